"""Folders that come with Rondel: beside the source in its tree, inside the package in an installed wheel."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parents[1]  # src/rondel, or site-packages/rondel


def shipped_folder(name: str) -> Path | None:
    """benchmarks, recipes or examples; None where neither place has it."""
    return next((home / name for home in (PACKAGE.parents[1], PACKAGE) if _is_shipped(home, name)), None)


def _is_shipped(home: Path, name: str) -> bool:
    """Whether this folder is ours: a stranger's `recipes` may lie above site-packages."""
    return (home / name).is_dir() and (home == PACKAGE or (home / "src" / "rondel").resolve() == PACKAGE.resolve())
