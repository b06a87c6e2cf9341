"""kind -> object: a short name for ours, "module:name" for the user's."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rondel.core.errors import ConfigError, error_boundary


def suggest_name(word: str, known: list[str]) -> str:
    """ " Did you mean 'x'?", or nothing when no known word is near."""
    match = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" Did you mean '{match[0]}'?" if match else ""


def one_of(knob: str, value: Any, known: Iterable[str]) -> None:
    """Refuse a value that is not among the known ones."""
    if value not in (names := list(known)):
        raise ConfigError(f"{knob} = {value!r}; it must be one of {', '.join(names)}.{suggest_name(str(value), names)}")


EXPLAINED = {  # where what is registered is described, kind by kind
    "algo.kind": "docs/papers.md",
    "reward": "docs/score.md",
    "filter": "docs/filter.md",
    "environment": "docs/generate.md#environments",
    "tool": "docs/generate.md#tools",
    "engine": "docs/generate.md#external-engines",
    "sync.kind": "docs/sync.md",
    "task.data.kind": "docs/generate.md#tasks",
    "run.sinks:": "docs/runs.md#metrics-elsewhere",
}


class ImportedOnUse(dict[str, Any]):
    """kind -> object, of which a text "module:name" is imported by whoever asks for it first."""

    def __getitem__(self, kind: str) -> Any:
        found = super().__getitem__(kind)
        if isinstance(found, str):
            module, _, name = found.partition(":")
            self[kind] = found = getattr(importlib.import_module(module), name)
        return found


def find_registered(what: str, kind: str, known: dict[str, Any], *, called: bool = True) -> Any:
    """The object called `kind`: from `known`, or imported when written "module:name"; one
    that can be called, unless it is a value.
    """
    if not isinstance(kind, str):
        raise ConfigError(
            f"{what} {kind!r} is no name. Known: {', '.join(sorted(known))}; or your own as 'module:name'."
        )
    if kind in known:
        return known[kind]
    if ":" in kind:
        if not callable(found := import_attribute(what, kind)) and called:
            raise ConfigError(f"{what} '{kind}' is {found!r:.60}, and no function or class")
        return found
    raise ConfigError(
        f"{what} '{kind}' does not exist.{suggest_name(kind, list(known))} Known: {', '.join(sorted(known))}; or your "
        "own as 'module:name'.",
        page=EXPLAINED.get(what, ""),
    )


GIVEN: dict[
    str, Any
] = {}  # what a recipe was given as an object, by the name that stands for it (core/given_objects.py)
MAIN = "__main__"


class Untravelled(str):
    """Why an object did not come to this worker; it stands in its place."""


def can_be_imported(name: str) -> bool:
    """Whether another process finds it by this name."""
    return not name.startswith(f"{MAIN}:") and not set("<>()") & set(name)


_recipe: list[Path] = []  # the folder of the recipe that was read last


def look_beside(recipe: Path) -> None:
    """Modules and files that a recipe names are looked for in its folder first. Workers
    inherit the search path of their controller.
    """
    _recipe[:] = [recipe.resolve().parent]
    _add_to_path(Path.cwd())
    _add_to_path(_recipe[0], first=True)


def _add_to_path(folder: Path, *, first: bool = False) -> None:
    if first and str(folder) in sys.path:
        sys.path.remove(str(folder))
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def search_folders() -> list[Path]:
    """Where what a recipe names is looked for."""
    return list(dict.fromkeys([*_recipe, Path.cwd()]))


def locate_path(path: str) -> Path:
    """The file or folder of this name in the first place that has it; else as it is."""
    return next((found for place in search_folders() if _path_exists(found := place / path)), Path(path))


def _path_exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # no name that a file could have
        return False


def refuse_uncallable(what: str, function: Any, *given: str) -> None:
    """A function of the user's that cannot be called as it will be; one written in C does not say how it can."""
    try:
        inspect.signature(function).bind(*given)
    except TypeError as error:
        raise ConfigError(f"{what} is called as f({', '.join(given)}), and cannot be: {error}") from error
    except ValueError:
        pass


def make_from_settings(key: str, kind: str, found: Callable[..., Any], settings: dict[str, Any]) -> Any:
    """An object of the user's class, made with the settings that the recipe gives beside `kind`."""
    refuse_settings(key, kind, found, settings)
    with error_boundary(ConfigError, f"{key}: making '{kind}'"):
        return found(**settings)


def refuse_settings(key: str, kind: str, found: Any, settings: dict[str, Any], given: int = 0) -> None:
    """Settings that a user's class or function does not have, and one that it needs and the recipe does not give.
    `given`: how many arguments the caller adds in front.
    """
    try:
        known = dict(inspect.signature(found).parameters)
    except ValueError:  # written in C
        known = {}
    named = [p for p in list(known.values())[given:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if known and not any(p.kind is p.VAR_KEYWORD for p in known.values()):
        names = [p.name for p in named]
        if odd := next((name for name in settings if name not in names), None):
            raise ConfigError(
                f"{key}: '{kind}' has no setting '{odd}'.{suggest_name(odd, names)} It has: "
                f"{', '.join(names) or 'none'}"
            )
        if lacks := [p.name for p in named if p.default is p.empty and p.name not in settings]:
            raise ConfigError(
                f"{key}: '{kind}' needs {', '.join(lacks)}: "
                f'{key} = {{ kind = "{kind}", {", ".join(f"{name} = ..." for name in lacks)} }}'
            )


def refuse_missing_methods(key: str, kind: str, made: Any, methods: dict[str, tuple[str, ...]]) -> None:
    """A user's object without a method that will be called, or with one that takes other arguments."""
    for name, given in methods.items():
        if not callable(method := getattr(made, name, None)):
            raise ConfigError(
                f"{key}: '{kind}' has no method {name}({', '.join(given)}); add it. It needs: {', '.join(methods)}"
            )
        refuse_uncallable(f"{key}: {name} of '{kind}'", method, *given)


def import_attribute(what: str, path: str) -> Any:
    """`module:name` from the recipe's folder, the current folder or the Python path; or what stands under that name
    because it was given as an object.
    """
    if path in GIVEN:
        if isinstance(found := GIVEN[path], Untravelled):
            raise ConfigError(str(found))
        return found
    module, _, name = path.partition(":")
    if not (module and name):
        raise ConfigError(f"{what} '{path}': your own is written 'module:name'")
    if not can_be_imported(path):
        raise ConfigError(
            f"{what} '{path}' was given as an object of Python, and this process does not have it: continue where it "
            "is defined, by the same call of rondel.run, or put it into a file and name it 'module:name'"
        )
    _add_to_path(Path.cwd())
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and module.split(".")[0] != error.name.split(".")[0]:
            raise ConfigError(
                f"{what} '{path}': importing {module} failed, because it needs '{error.name}': pip install it"
            ) from error
        raise ConfigError(
            f"{what} '{path}': no module '{module}' in {' or '.join(map(str, search_folders()))} or on the Python path"
        ) from error
    except Exception as error:
        raise ConfigError(f"{what} '{path}': importing {module} raised {type(error).__name__}: {error}") from error
    if not hasattr(found, name):
        names = [n for n in vars(found) if not n.startswith("_")]
        raise ConfigError(f"{what} '{path}': {module} has no '{name}'.{suggest_name(name, names)}")
    return getattr(found, name)
