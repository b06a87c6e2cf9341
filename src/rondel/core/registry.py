"""kind -> object: a short name for ours, "module:name" for the user's."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rondel.core.errors import ConfigError


def suggest_name(word: str, known: list[str]) -> str:
    """ " Did you mean 'x'?", or nothing when no known word is near."""
    match = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" Did you mean '{match[0]}'?" if match else ""


def one_of(knob: str, value: Any, known: Iterable[str]) -> None:
    """Refuse a value that is not among the known ones."""
    if value not in (names := list(known)):
        raise ConfigError(f"{knob} = {value!r}; it must be one of {', '.join(names)}.{suggest_name(str(value), names)}")


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
        f"{what} '{kind}' does not exist.{suggest_name(kind, list(known))} Known: {', '.join(sorted(known))}; or your own as "
        f"'module:name'."
    )


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


def import_attribute(what: str, path: str) -> Any:
    """`module:name` from the recipe's folder, the current folder or the Python path."""
    module, _, name = path.partition(":")
    if not (module and name):
        raise ConfigError(f"{what} '{path}': your own is written 'module:name'")
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
