"""`data = { kind = "repository", path = ... }`: tasks from folders, tar files and rows, in the formats that are known.

| format         | a task is |
| rondel         | a folder with task.toml, statement.md, repository/ (task.py) |
| harbor         | a folder with task.toml, instruction.md, environment/, tests/test.sh (harbor.py) |
| terminal_bench | a folder with task.yaml, run-tests.sh or tests/ (harbor.py) |
| swebench       | a row with instance_id, patch, test_patch, ... and a checkout beside (swebench.py) |
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rondel.core.errors import DataError
from rondel.core.registry import locate_path, one_of
from rondel.core.repository_files import RepositoryFile, Tree
from rondel.generate.envs.repository.harbor import read_harbor, read_terminal_bench
from rondel.generate.envs.repository.swebench import REQUIRED, read_swebench
from rondel.generate.envs.repository.task import RepositoryTask, read_task
from rondel.generate.envs.repository.tree import is_tar, read_tree

FORMATS = ("auto", "rondel", "harbor", "terminal_bench", "swebench")
NEST = 3  # folders between the given one and a task
READERS = {"rondel": read_task, "harbor": read_harbor, "terminal_bench": read_terminal_bench}


def task_specs(path: str, format: str, source: str, test: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, what `load_task` needs) of each task below a path. DataError where there is none."""
    one_of("task.data.format", format, FORMATS)
    whole = locate_path(path)
    if whole.suffix == ".jsonl":
        yield from _specs_of_rows(whole, format, source, test)
        return
    found = [whole] if _is_task(whole) else sorted(_tasks_below(whole, NEST))
    if not found:
        raise DataError(
            f"{path}: no repository task there. A task is a folder or a tar file with task.toml and statement.md "
            "(ours), task.toml and instruction.md (Harbor) or task.yaml (terminal-bench); rows are in a .jsonl file"
        )
    for folder in found:
        yield str(folder), {"path": str(folder), "format": format}


def _tasks_below(folder: Path, depth: int) -> Iterator[Path]:
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if _is_task(path):
            yield path
        elif depth > 1 and path.is_dir():
            yield from _tasks_below(path, depth - 1)


def _is_task(path: Path) -> bool:
    if path.is_dir():
        return (path / "task.toml").is_file() or (path / "task.yaml").is_file()
    return path.is_file() and is_tar(path)


def _specs_of_rows(path: Path, format: str, source: str, test: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{where}: a {type(row).__name__}; a row is an object")
        if "instance_id" in row:
            yield where, {"format": "swebench", "row": row, "source": source, "test": test}
        elif isinstance(row.get("path"), str):
            yield where, {"path": str(path.parent / row["path"]), "format": row.get("format", format)}
        else:
            raise DataError(
                f"{where}: neither a row of SWE-bench ({', '.join(REQUIRED)}) nor one that names a folder or tar file "
                f'with "path"'
            )


def load_task(spec: str | Mapping[str, Any]) -> RepositoryTask:
    """The task that a spec of `task_specs` names, as an object or as its JSON."""
    own = json.loads(spec) if isinstance(spec, str) else dict(spec)
    if own["format"] == "swebench":
        return read_swebench(own["row"], own["source"], own["test"])
    path = Path(own["path"])
    tree = read_tree(path)
    if not tree:
        raise DataError(f"{path}: no files in it")
    name = path.name.partition(".tar")[0].removesuffix(".tgz")
    kind = _format_of(tree) if own["format"] == "auto" else own["format"]
    if kind == "swebench":
        raise DataError(f'{path}: format = "swebench" is one of rows: name a .jsonl file')
    if kind == "rondel":
        tree = _unpacked(tree, path)
    return READERS[kind](tree, str(path), name)


def _format_of(tree: Mapping[str, RepositoryFile]) -> str:
    if "task.yaml" in tree:
        return "terminal_bench"
    return "harbor" if "instruction.md" in tree else "rondel"


def _unpacked(tree: Tree, path: Path) -> Tree:
    """With the files of repository.tar.gz below repository/."""
    for name in [name for name in tree if name.startswith("repository.t") and is_tar(Path(name))]:
        if path.is_dir():
            tree |= {f"repository/{key}": file for key, file in read_tree(path / name).items()}
            del tree[name]
    return tree
