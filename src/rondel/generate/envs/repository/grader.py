"""What a repository is worth after an episode: its tests, run in a box of their own.

    box of the episode ──changed files──> without those that decide what tests say ──> fresh box + hidden files ──> tests

A file that the policy changed and that decides what the tests say (a test, a configuration of the test runner, a module
that would be imported in place of an installed one) is left as it was, and counted as `tests_edited`.

Code of the policy and the tests run in one process of the fresh box, as they do in the benchmarks of the field: code
that is written to forge the report of the test runner can. It cannot read the hidden tests before it is graded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from rondel.core.errors import BoxError, EnvError
from rondel.core.protocols import SandboxFactory
from rondel.core.repository_files import RepositoryFile, Tree
from rondel.core.types import Score
from rondel.generate.envs.repository.box_files import checksum
from rondel.generate.envs.repository.packages import shadowed_names
from rondel.generate.envs.repository.task import RepositoryTask
from rondel.generate.envs.repository.workspace import Workspace, open_workspace

Changes = Mapping[str, RepositoryFile | None]
GOOD = ("passed", "xfailed")


def known_sums(files: Mapping[str, RepositoryFile]) -> dict[str, str]:
    """Checksums of files, as the script in a box computes them."""
    return {path: checksum(file) for path, file in files.items()}


def split_changes(task: RepositoryTask, changes: Changes) -> tuple[Tree, list[str]]:
    """(the repository with the changes that count, the paths of those that are undone)"""
    files, undone = dict(task.files), list[str]()
    names = shadowed_names(tuple(task.settings.packages))
    for path, file in changes.items():
        if task.is_protected(path) or (file is not None and path not in task.files and _shadows(path, names)):
            undone.append(path)
        elif file is None:
            files.pop(path, None)
        else:
            files[path] = file
    return files, undone


def _shadows(path: str, names: frozenset[str]) -> bool:
    """Whether a new file would be imported in place of an installed module."""
    parts = PurePosixPath(path).parts
    first = parts[1:] if parts[0] in ("src", "lib") and len(parts) > 1 else parts
    return first[0].partition(".")[0] in names and (len(first) > 1 or first[0].endswith((".py", ".so")))


def grade(task: RepositoryTask, changes: Changes, sandbox: SandboxFactory) -> Score:
    """1 where the tests that failed pass and those that passed still do, else 0; with the parts `fail_to_pass`,
    `pass_to_pass` (shares) and `tests_edited` (how many edits of tests were undone). EnvError where it cannot be found
    out.
    """
    files, undone = split_changes(task, changes)
    hidden = [
        (task.settings.workdir, {path: file for path, file in task.hidden.items() if not path.startswith("/")}),
        ("/", {path[1:]: file for path, file in task.hidden.items() if path.startswith("/")}),
    ]
    box = open_workspace(task, sandbox, seconds=task.settings.seconds, files=files, more=hidden)
    try:
        score, parts = _grade_in(box)
    except BoxError:  # ended by what ran in it
        score, parts = 0.0, {}
    finally:
        box.close()
    return Score(score, {**parts, "tests_edited": float(len(undone))})


def _grade_in(box: Workspace) -> tuple[float, dict[str, float]]:
    """The worth of what is in a box, where the hidden files are."""
    task, own = box.task, box.task.settings
    ran, outcomes = box.run_tests(task.test_files)
    if own.report == "exit":
        return float(ran.ok), {}
    if own.report == "reward":
        reward = reward_in(box.read_file(own.reward_file), own.reward_file)
        return reward
    shares = {
        name: sum(outcomes.get(test) in GOOD for test in tests) / len(tests) if tests else 1.0
        for name, tests in (("fail_to_pass", own.fail_to_pass), ("pass_to_pass", own.pass_to_pass))
    }
    return float(all(share == 1.0 for share in shares.values())), shares


def reward_in(text: str, path: str) -> tuple[float, dict[str, float]]:
    """A number, or a JSON object of numbers whose "reward" is the score; else the tests broke, which is no score."""
    try:
        found: Any = json.loads(text)
    except ValueError:
        found = None
    parts = found if isinstance(found, dict) else {"reward": found}
    numbers = {
        str(name): float(value)
        for name, value in parts.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
    if len(numbers) != len(parts) or not numbers:
        raise EnvError(
            f"the tests wrote no reward to {path}: {text.strip()[:200]!r} is neither a number nor such an object"
        )
    total = numbers.pop("reward", None)
    return (sum(numbers.values()) / len(numbers) if total is None else total), numbers
