"""Rows of SWE-bench and of data sets in its format: SWE-bench Lite and Verified, SWE-Gym, nebius' SWE-rebench.

instance_id, repo, base_commit, problem_statement, patch (gold), test_patch (hidden), FAIL_TO_PASS, PASS_TO_PASS: the
lists, or their JSON as a text. Nothing is downloaded: `source` holds a folder (or tar file) for each task, the files of
`repo` at `base_commit`, named instance_id, or owner__name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rondel.core.errors import DataError
from rondel.core.registry import locate_path
from rondel.core.repository_files import Tree
from rondel.generate.envs.repository.task import HOME, RepositoryTask, TaskSettings, check_task
from rondel.generate.envs.repository.tree import TARS, read_tree
from rondel.generate.envs.repository.unified_diff import apply_diff, patched_files

REQUIRED = (
    "instance_id",
    "repo",
    "base_commit",
    "problem_statement",
    "patch",
    "test_patch",
    "FAIL_TO_PASS",
    "PASS_TO_PASS",
)


def read_swebench(row: Mapping[str, Any], source: str, test: str = "") -> RepositoryTask:
    """The task of a row. `test`: the command, where it is not pytest's."""
    where = f"row {row.get('instance_id')}"
    if missing := [name for name in REQUIRED if not isinstance(row.get(name), str | list)]:
        raise DataError(f"{where}: no '{missing[0]}'; a row of SWE-bench has {', '.join(REQUIRED)}")
    files = read_tree(_checkout(row, source))
    try:
        tested = apply_diff(files, row["test_patch"])
    except DataError as error:
        raise DataError(
            f"{where}: test_patch: {error}; is the folder of base_commit {row['base_commit']:.12}?"
        ) from error
    touched = [path for path in patched_files(row["test_patch"]) if path in tested]
    hidden: Tree = {path: tested[path] for path in touched}
    settings = TaskSettings(
        fail_to_pass=_tests(row, "FAIL_TO_PASS"),
        pass_to_pass=_tests(row, "PASS_TO_PASS"),
        workdir=HOME,
        seconds=1800.0,
        **({"test": test} if test else {}),
        origin={key: row[key] for key in ("instance_id", "repo", "base_commit")},
    )
    task = RepositoryTask(row["instance_id"], row["problem_statement"].strip(), files, settings, hidden, row["patch"])
    check_task(task, where)
    return task


def _tests(row: Mapping[str, Any], key: str) -> list[str]:
    found = row[key]
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except ValueError as error:
            raise DataError(
                f"row {row['instance_id']}: {key} is neither a list nor the JSON of one: {error}"
            ) from error
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise DataError(f"row {row['instance_id']}: {key} is no list of names of tests")
    if odd := next((one for one in found if "::" not in one), None):
        raise DataError(
            f"row {row['instance_id']}: {key} names '{odd}', which is no test of pytest (tests/test_a.py::test_b): "
            f"repositories with a test runner of their own are not read"
        )
    return found


def _checkout(row: Mapping[str, Any], source: str) -> Path:
    if not source:
        raise DataError(
            f"row {row['instance_id']}: nothing is downloaded: set task.data.source to a folder that holds "
            f"{row['repo']} at {row['base_commit']:.12} as {row['instance_id']}/"
        )
    folder = locate_path(source)
    for name in (row["instance_id"], str(row["repo"]).replace("/", "__")):
        for path in (folder / name, *(folder / f"{name}{ending}" for ending in TARS)):
            if path.exists():
                return path
    raise DataError(
        f"row {row['instance_id']}: {folder} has neither {row['instance_id']}/ nor a tar file of that name: put the "
        f"files of {row['repo']} at {row['base_commit']:.12} there (git archive {row['base_commit']:.12} | tar -x -C "
        "...)"
    )
