"""Tasks made of real packages: a seeded bug, found by the package's own tests.

sdist -> its tests, twice, with the functions that each file of tests calls -> bugs in those functions, each tried with
the files that call it -> those that make a few tests fail -> a task, whose statement is made of the failing tests

Half of the failing tests are hidden where there are several. Equal for equal seed, packages and versions.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import tomli_w

from rondel.core.errors import DataError, SandboxError
from rondel.core.protocols import SandboxFactory
from rondel.core.repository_files import RepositoryFile, Tree
from rondel.generate.envs.repository.catalogue import SourcePackage
from rondel.generate.envs.repository.mutations import Mutation, mutations_of, without_tests
from rondel.generate.envs.repository.task import RepositoryTask, TaskSettings
from rondel.generate.envs.repository.tree import write_tree
from rondel.generate.envs.repository.unified_diff import write_diff
from rondel.generate.envs.repository.workspace import Workspace, open_workspace

TRIALS = Path(__file__).with_name("mutant_tests.py").read_text(encoding="utf-8")
TEST = "python3 -m pytest -q -c /dev/null --rootdir=. {files}"
ARGS = ("-c", "/dev/null", "--rootdir=.", "--continue-on-collection-errors")
SECONDS = 15.0  # of computing, for the tests of one bug
TRIED = 12  # bugs that are tried for each that is wanted
SHARE = 0.25  # of its files' tests that may fail for a bug
TEST_FILES = 4  # that call a function, at most
SHOWN = 5  # failing tests that a statement names
SAMPLE = 200  # tests of pass_to_pass
DROPPED = ("PKG-INFO", "setup.cfg.orig")


@dataclass(frozen=True, slots=True)
class FoundBug:
    """A bug of a package that its tests find. `failing`: test -> first line of its message."""

    path: str
    mutation: Mutation
    failing: dict[str, str]
    passing: list[str]


def package_files(tree: Mapping[str, RepositoryFile]) -> Tree:
    """The files of an sdist without what building it left."""
    return {
        path: file
        for path, file in tree.items()
        if path not in DROPPED and not any(part.endswith(".egg-info") for part in PurePosixPath(path).parts)
    }


def find_bugs(
    package: SourcePackage, files: Tree, sandbox: SandboxFactory, *, seed: int, want: int
) -> tuple[list[FoundBug], dict[str, Any]]:
    """Up to `want` bugs, and what was found on the way: {"tests", "tried"}. SandboxError where its tests do not run."""
    candidates = list(_interleaved(_candidates(package, files), random.Random(f"{seed}/{package.name}")))
    candidates = candidates[: TRIED * want]
    asked = {
        "folder": package.code,
        "args": [*ARGS, *package.tests],
        "options": list(ARGS),
        "mutants": [[path, m.first, m.last, m.text.decode(), m.line] for path, m in candidates],
        "seconds": SECONDS,
        "want": want,
        "share": SHARE,
        "files": TEST_FILES,
    }
    task = RepositoryTask(package.name, "", files, settings_of(package))
    box = open_workspace(task, sandbox)
    try:
        answer = _run_trials(box, asked, len(candidates))
    finally:
        box.close()
    found = []
    for number, failing, passing in answer["found"]:
        path, mutation = candidates[number]
        found.append(FoundBug(path, mutation, failing, passing))
    return found, answer


def _run_trials(box: Workspace, asked: dict[str, Any], count: int) -> dict[str, Any]:
    wall = SECONDS * 10 * (count + 20)
    request = json.dumps({"root": box.root, **asked}).encode()
    ran = box.cell.run(
        ["sh", "-c", 'cd "$1" && exec python3 -c "$2"', "run", box.root, TRIALS],
        stdin=request,
        env=box.environment(),
        wall=wall,
    )
    try:
        answer = json.loads(ran.stdout)
    except ValueError:
        said = ran.stderr.decode(errors="replace").strip()[-300:]
        raise SandboxError(f"the tests of {box.task.name} cannot be run: {said or ran.ended}") from None
    if "error" in answer:
        raise SandboxError(f"the tests of {box.task.name} cannot be run: {answer['error']}")
    return dict(answer)


def _candidates(package: SourcePackage, files: Tree) -> Iterator[tuple[str, Mutation]]:
    task = RepositoryTask(package.name, "", files, settings_of(package))
    for path, file in files.items():
        inside = path == package.code or path.startswith(f"{package.code}/")
        if inside and path.endswith(".py") and not task.is_protected(path):
            for mutation in mutations_of(file.data):
                yield path, mutation


def _interleaved(found: Iterable[tuple[str, Mutation]], rng: random.Random) -> Iterator[tuple[str, Mutation]]:
    """One of each kind in turn, each kind in a random order."""
    kinds: dict[str, list[tuple[str, Mutation]]] = {}
    for path, mutation in found:
        kinds.setdefault(mutation.kind, []).append((path, mutation))
    for kind in sorted(kinds):
        rng.shuffle(kinds[kind])
    while kinds:
        for kind in sorted(kinds):
            yield kinds[kind].pop()
            if not kinds[kind]:
                del kinds[kind]


def settings_of(package: SourcePackage, **more: Any) -> TaskSettings:
    return TaskSettings(
        test=TEST,
        env={"PYTHONPATH": package.path},
        licence=package.licence,
        origin={"package": package.name, "version": package.version, "sha256": package.sha256},
        **more,
    )


def make_task(package: SourcePackage, files: Tree, bug: FoundBug, name: str, seed: int) -> RepositoryTask:
    """The task of one bug."""
    rng = random.Random(f"{seed}/{name}")
    broken = dict(files)
    original = files[bug.path]
    broken[bug.path] = original._replace(data=bug.mutation.apply(original.data))
    hidden_names = _hidden_tests(sorted(bug.failing), rng)
    hidden: Tree = {}
    visible = []
    for path in sorted({test.partition("::")[0] for test in bug.failing}):
        hidden[path] = files[path]
        gone = {name for file, name in hidden_names if file == path}
        text = without_tests(files[path].data.decode(), gone) if gone else None
        if text is not None:
            broken[path] = files[path]._replace(data=text.encode())
        visible += [test for test in sorted(bug.failing) if _function_of(test)[0] == path and (text is None or _function_of(test)[1] not in gone)]  # fmt: skip
    settings = settings_of(
        package,
        fail_to_pass=sorted(bug.failing),
        pass_to_pass=sorted(rng.sample(bug.passing, min(SAMPLE, len(bug.passing)))),
        visible=sorted({test.partition("::")[0] for test in visible}),
        difficulty=difficulty_of(package, files, bug),
    )
    settings.origin.update(seed=seed, bug=bug.mutation.kind)
    gold = write_diff({bug.path: broken[bug.path]}, {bug.path: original})
    return RepositoryTask(name, statement_of(package, bug, visible), broken, settings, hidden, gold)


def _function_of(test: str) -> tuple[str, str]:
    """("tests/test_a.py", "TestB.test_c") of tests/test_a.py::TestB::test_c[1]."""
    file, *names = test.partition("[")[0].split("::")
    return file, ".".join(names)


def _hidden_tests(tests: list[str], rng: random.Random) -> list[tuple[str, str]]:
    """Half of the functions of these tests, none where there is one."""
    functions = sorted({_function_of(test) for test in tests})
    return sorted(rng.sample(functions, len(functions) // 2))


def statement_of(package: SourcePackage, bug: FoundBug, visible: list[str]) -> str:
    """What the policy reads: the failing tests that it can see, and neither file nor line of the bug."""
    shown = visible[:SHOWN]
    more = f"\n- and {len(visible) - SHOWN} more" if len(visible) > SHOWN else ""
    lines = [f"- {test}" + (f"\n  {bug.failing[test]}" if bug.failing[test] else "") for test in shown]
    return (
        f"The repository is {package.title}. These of its tests fail:\n\n" + "\n".join(lines) + f"{more}\n\n"
        "Find the cause in the code of the package and repair it. The tests are right: changes of tests and of their "
        "configuration are undone before the result is judged. Other tests that you cannot see must pass, too."
    )


def difficulty_of(package: SourcePackage, files: Tree, bug: FoundBug) -> float:
    """From 0 to 1: half for how few tests show the bug, half for how much code there is to look through.

    (1 - log(1 + failing) / log(1 + tests)) / 2 + min(1, log2(lines of the package) / 14) / 2
    """
    code = (
        file.data.count(b"\n") for path, file in files.items() if path.startswith(package.code) and path.endswith(".py")
    )
    tests = len(bug.failing) + len(bug.passing)
    few = 1 - math.log(1 + len(bug.failing)) / math.log(1 + max(2, tests))
    return round(few / 2 + min(1.0, math.log2(max(2, sum(code))) / 14) / 2, 3)


def write_task(task: RepositoryTask, folder: Path) -> None:
    """The folder of a task, as task.py reads it."""
    if folder.exists():
        raise DataError(f"{folder} is there already: name another folder, or remove it")
    table = task.settings.model_dump(exclude_defaults=True)
    table["format"] = task.settings.format
    tree = {
        "task.toml": RepositoryFile(tomli_w.dumps(table).encode()),
        "statement.md": RepositoryFile(f"{task.statement}\n".encode()),
        "gold.patch": RepositoryFile(task.gold.encode("utf-8", "surrogateescape")),
        **{f"repository/{path}": file for path, file in task.files.items()},
        **{f"hidden/{path}": file for path, file in task.hidden.items()},
    }
    write_tree(tree, folder)
