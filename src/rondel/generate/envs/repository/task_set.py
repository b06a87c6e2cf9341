"""A folder of generated tasks: packages, their bugs, the tasks of an even choice of them, each checked in boxes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rondel.core.errors import DataError, SandboxError
from rondel.core.protocols import SandboxFactory
from rondel.core.repository_files import Tree
from rondel.generate.envs.repository.catalogue import SourcePackage
from rondel.generate.envs.repository.sdists import sdist_of
from rondel.generate.envs.repository.self_check import check_in_boxes
from rondel.generate.envs.repository.task_generator import FoundBug, find_bugs, make_task, package_files, write_task
from rondel.generate.envs.repository.tree import read_tree, tree_digest

INDEX = "tasks.json"
SPARE = 2  # bugs more than are needed of each package


def make_task_set(
    packages: Sequence[SourcePackage],
    out: Path,
    sandbox: SandboxFactory,
    *,
    n: int,
    seed: int,
    cache: Path,
    say: Callable[[str], None],
) -> str:
    """Writes n tasks to `out`, as evenly over the packages as these have bugs. -> the digest of them all.

    DataError where there are fewer: nothing is left out without a word.
    """
    if (out / INDEX).exists():
        raise DataError(f"{out} has tasks already: name another folder, or remove it")
    wanted = math.ceil(n / len(packages))
    bugs: list[tuple[SourcePackage, Tree, list[FoundBug]]] = []
    for number, package in enumerate(packages, 1):
        began = time.monotonic()
        files = package_files(read_tree(sdist_of(package, cache)))
        try:
            found, told = find_bugs(package, files, sandbox, seed=seed, want=wanted + SPARE)
        except SandboxError as error:
            say(f"{number}/{len(packages)} {package.title}: left out: {error}")
            continue
        bugs.append((package, files, found))
        say(
            f"{number}/{len(packages)} {package.title}: {told['tests']} tests, {told['tried']} bugs tried, "
            f"{len(found)} found by them, {time.monotonic() - began:.0f} s"
        )
    made: list[dict[str, Any]] = []
    for package, files, bug, name in _in_turn(bugs, seed):
        if len(made) == n:
            break
        task = make_task(package, files, bug, name, seed)
        checked = check_in_boxes(task, sandbox)
        if checked.fault:
            say(f"{name}: left out: {checked.fault}")
            continue
        write_task(task, out / name)
        made.append(
            {"name": name, "digest": tree_digest(read_tree(out / name)), "difficulty": task.settings.difficulty}
        )
        say(f"{len(made)}/{n} {name}: untouched {checked.untouched:g}, solved {checked.solved:g}")
    if len(made) < n:
        raise DataError(
            f"{len(made)} tasks were found in {len(packages)} packages, and {n} were asked for; they are in {out}: ask "
            "for fewer, or name more packages"
        )
    index = json.dumps({"seed": seed, "tasks": made}, indent=1)
    (out / INDEX).write_text(index + "\n")
    return tree_digest(read_tree(out))


def _in_turn(
    bugs: Sequence[tuple[SourcePackage, Tree, list[FoundBug]]], seed: int
) -> Iterator[tuple[SourcePackage, Tree, FoundBug, str]]:
    """The first of each package, then the second of each; none whose failing tests another one has."""
    seen: set[tuple[str, ...]] = set()
    for turn in range(max((len(found) for _, _, found in bugs), default=0)):
        for package, files, found in bugs:
            if turn < len(found) and (key := (package.name, *sorted(found[turn].failing))) not in seen:
                seen.add(key)
                yield package, files, found[turn], f"{package.name}-{seed}-{turn:02d}"
