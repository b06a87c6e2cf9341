"""Small packages of PyPI that bring their own tests, pinned: what generated tasks are made of."""

from __future__ import annotations

from typing import NamedTuple


class SourcePackage(NamedTuple):
    """One sdist. `code` is the folder of what gets bugs, `tests` are arguments of pytest, `path` is PYTHONPATH."""

    name: str
    version: str
    sha256: str
    licence: str
    code: str
    tests: tuple[str, ...] = ("tests",)
    path: str = "."

    @property
    def title(self) -> str:
        return f"{self.name} {self.version}"


_ROWS = (
    ("blinker", "1.9.0", "b4ce2265a7abece45e7cc896e98dbebe6cead56bcf805a3d23136d145f5445bf", "MIT", "src/blinker",
     ("tests/test_context.py", "tests/test_symbol.py", "tests/test_signals.py"), "src"),
    ("boltons", "26.2.0", "d39cfd15c1a1c3bd4d705c82252fa9edb8e4f5e8cc039f8e39afac7b1b47e92c", "BSD-3-Clause", "boltons"),
    ("cachetools", "8.0.2", "30ac523adfc118b51d2b2e7bad8a0ddb31370dfe2700c7f10ca224f36ccf81e0", "MIT", "src/cachetools",
     ("tests",), "src"),
    ("inflection", "0.5.1", "1a29730d366e996aaacffb2f1f1cb9593dc38e2ddd30c91250c6dde09ea9b417", "MIT", "inflection",
     ("test_inflection.py",)),
    ("itsdangerous", "2.2.0", "e0050c0b7da1eea53ffaf149c0cfbb5c6e2e2b69c4bef22c81fa6eb73e5f6173", "BSD-3-Clause",
     "src/itsdangerous", ("tests/test_itsdangerous",), "src"),
    ("jmespath", "1.1.0", "472c87d80f36026ae83c6ddd0f1d05d4e510134ed462851fd5f754c8c3cbb88d", "MIT", "jmespath"),
    ("parse", "1.22.4", "706d458feed5a81b02768d3156e8070baf6cee7d150a3a3c0cd43101a875c3b5", "MIT", "parse"),
    ("pathspec", "1.1.1", "17db5ecd524104a120e173814c90367a96a98d07c45b2e10c2f3919fff91bf5a", "MPL-2.0", "pathspec"),
    ("semver", "3.1.2", "bea193552413194252d33ff26ce0962b76669bd1c6fb17e8e203ac37f072feaf", "BSD-3-Clause", "src/semver",
     ("tests",), "src"),
    ("sqlparse", "0.6.1", "ca722573f848ff2d30e40ea30f53a104b7dea7635ea9285891263eb2c58fb6e7", "BSD-3-Clause", "sqlparse"),
    ("tabulate", "0.10.0", "e2cfde8f79420f6deeffdeda9aaec3b6bc5abce947655d17ac662b126e48a60d", "MIT", "tabulate",
     ("test",)),
    ("toolz", "1.2.0", "9667a038e9d6ecba37995e26cb2f59ec6420b6ad8dd9677de59db9b956b08490", "BSD-3-Clause", "toolz",
     ("toolz/tests",)),
)  # fmt: skip
PACKAGES = {row[0]: SourcePackage(*row) for row in _ROWS}
