"""Installed distributions as a box sees them: their own folders, and none beside them."""

from __future__ import annotations

import functools
import sys
from importlib import metadata
from pathlib import Path

from rondel.core.errors import ConfigError


@functools.cache
def installed_modules(packages: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...], frozenset[str]]:
    """(folders and files to show, folders to import from, names of their modules) of distributions and of all that they
    require. Their entry points are left out: a plugin is loaded only where a command names it.
    """
    shown, imports, names = list[str](), list[str](), set[str]()
    for package in _required(packages):
        dist = metadata.distribution(package)
        for path in dist.files or ():
            top = path.parts[0]
            if top.endswith((".dist-info", ".egg-info", ".pth", ".data")) or top in ("..", "__pycache__"):
                continue
            name = top.removesuffix(".py")
            if name not in names:
                names.add(name)
                whole = Path(str(dist.locate_file(top)))
                shown.append(str(whole))
                imports.append(str(whole.parent))
    return tuple(shown), tuple(dict.fromkeys(imports)), frozenset(names)


def _required(packages: tuple[str, ...]) -> list[str]:
    """The distributions and what they require here, in the order found."""
    found: list[str] = []
    wanted = list(packages)
    while wanted:
        name = wanted.pop(0)
        if name in found:
            continue
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError as error:
            raise ConfigError(
                f"the tests of the repositories need '{name}', which is not installed here: pip install {name}"
            ) from error
        found.append(name)
        wanted += [own for line in requires if (own := _applies(line))]
    return found


def _applies(line: str) -> str:
    """The distribution that a line of requirements names, if it counts on this machine."""
    from packaging.requirements import Requirement

    need = Requirement(line)
    return need.name if need.marker is None or need.marker.evaluate({"extra": ""}) else ""


def shadowed_names(packages: tuple[str, ...]) -> frozenset[str]:
    """Modules that a new file of the same name would stand in for when the tests run."""
    return frozenset(sys.stdlib_module_names) | installed_modules(packages)[2] | {"rondel_pytest_report"}
