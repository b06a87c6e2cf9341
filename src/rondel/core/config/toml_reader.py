"""TOML files and dotted overrides as one tree of plain data."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from rondel.core.errors import ConfigError, disk_refusal
from rondel.core.registry import suggest_name


def parse_overrides(words: list[str]) -> dict[str, Any]:
    """["--loop.steps=5", "--model.path=x"] -> {"loop.steps": 5, "model.path": "x"}; values are TOML, bare words
    strings.
    """
    out: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.removeprefix("--").partition("=")
        if not equals or not key:
            raise ConfigError(f"'{word}' is not an override; write --section.key=value")
        try:
            out[key] = tomllib.loads(f"x = {text}")["x"]
        except tomllib.TOMLDecodeError:
            out[key] = text
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--{key} cannot be read: {_describe_toml_error(error)}") from error
    return out


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError as error:
        near = suggest_name(path.name, [p.name for p in path.parent.glob("*.toml")]) if path.parent.is_dir() else ""
        shipped = "" if near or path.suffix else " `rondel recipes` lists those that come with Rondel, and writes one"
        raise ConfigError(f"no recipe at {path}.{near}{shipped}") from error
    except IsADirectoryError as error:
        own = path / "job.toml"
        remedy = f"the recipe of the run in it is {own}" if own.is_file() else "name a file, such as recipe.toml"
        raise ConfigError(f"{path} is a folder and no recipe: {remedy}") from error
    except OSError as error:
        raise ConfigError(
            disk_refusal(error, f"reading the recipe {str(path)[:200]}") or f"reading the recipe {path}: {error}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not TOML: byte {error.start + 1} is not UTF-8; save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {_describe_toml_error(error)}") from error


def _describe_toml_error(error: Exception) -> str:
    """The parser's message, or one in words for an error that it does not foresee."""
    if isinstance(error, tomllib.TOMLDecodeError):
        return str(error)
    if isinstance(error, RecursionError):
        return "tables or lists are nested too deep"
    return "it has a number of more than 4300 digits" if "digits" in str(error) else str(error)


def refuse_odd_text(node: Any, source: str, dotted: str = "") -> None:
    """Refuse lone surrogates (of an argument that is not UTF-8) and the zero character: no file name and no
    tokenizer takes them.
    """
    if isinstance(node, dict | list):
        for name, inner in node.items() if isinstance(node, dict) else enumerate(node):
            refuse_odd_text(inner, source, f"{dotted}.{name}".lstrip("."))
    elif isinstance(node, str) and (odd := next((c for c in node if c == "\0" or "\ud800" <= c <= "\udfff"), None)):
        raise ConfigError(
            f"{source}: {dotted} = {node[:80]!r} has the character {odd!r}, which is no text: remove it, or write it "
            "as UTF-8"
        )


INSTEAD = {  # a key of the command line -> what it stands in place of in the recipe
    "loop.steps": ("loop.passes",),
    "loop.passes": ("loop.steps",),
    "loop.window": ("loop.oversample",),
    "loop.oversample": ("loop.window",),
}


def drop_contradicted(tree: dict[str, Any], overrides: dict[str, Any]) -> None:
    """Remove from the recipe what an override says by another key: --loop.passes replaces loop.steps."""
    for dotted in overrides:
        for other in INSTEAD.get(dotted, ()):
            *parents, leaf = other.split(".")
            node: Any = tree
            for name in parents:
                node = node.get(name) if isinstance(node, dict) else None
            if other not in overrides and isinstance(node, dict):
                node.pop(leaf, None)


def set_dotted(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """tree["loop"]["steps"] = value, for "loop.steps"."""
    *parents, leaf = dotted.split(".")
    for depth, name in enumerate(parents, 1):
        if isinstance(tree.get(name), str) and ".".join(parents[:depth]) in ("task.env", "task.reward"):
            tree[name] = {"kind": tree[name]}
        elif isinstance(tree.get(name), int) and ".".join(parents[:depth]) == "loop.oversample":
            tree[name] = {"groups": tree[name]}
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--{dotted}: '{name}' is a value, not a section")
    tree[leaf] = value


ORIGIN = "recipe.path"  # in a run's folder: where the recipe lies that began it


def recipe_origin(path: Path) -> Path:
    """The path itself; for the job.toml of a run, the recipe that it was made from."""
    note = path.parent / ORIGIN
    return (
        Path(note.read_text(encoding="utf-8", errors="replace")) if path.name == "job.toml" and note.is_file() else path
    )
