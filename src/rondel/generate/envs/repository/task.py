"""A repository task: files, a statement, tests that the policy sees and tests that it does not, and what solves it.

task.toml        how it is tested, below
statement.md     what the policy reads first
repository/      the files that it works on (or repository.tar.gz)
hidden/          files laid over the repository when it is graded; a folder hidden/@/logs is /logs there
gold.patch       a unified diff that solves it, for checks
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from rondel.core.config.section import CLOSED, LONGEST
from rondel.core.errors import DataError
from rondel.core.registry import suggest_name
from rondel.core.repository_files import RepositoryFile, Tree
from rondel.generate.envs.repository.tree import subtree
from rondel.generate.envs.repository.unified_diff import apply_diff

HOME = "/box/repository"
ABSOLUTE = "@/"  # how a path below hidden/ says that it is one of the machine
PROTECTED = (
    "test_*.py", "*_test.py", "tests/*", "test/*", "*/tests/*", "*/test/*", "conftest.py", "*/conftest.py",
    "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml", "noxfile.py", "sitecustomize.py",
    "usercustomize.py", "*/sitecustomize.py", "*/usercustomize.py", "*.pth",
    "*.dist-info/*", "*.egg-info/*",  # entry points: pytest loads a plugin that one names
)  # fmt: skip


class TaskSettings(BaseModel):
    """task.toml of a task folder."""

    model_config = CLOSED
    format: Literal[1] = Field(1, description="of this file")
    test: str = Field(
        "python3 -m pytest -q {files}",
        description="the shell command that runs tests, in the repository; {files} becomes the files of the tests",
    )
    report: Literal["pytest", "exit", "reward"] = Field(
        "pytest",
        description='where results are read: "pytest" by test, "exit" all or nothing from the exit code, "reward" a '
        "number in the file `reward_file`",
    )
    fail_to_pass: list[str] = Field([], description="tests that fail now and must pass, tests/test_a.py::test_b")
    pass_to_pass: list[str] = Field([], description="tests that pass now and must still pass")
    visible: list[str] = Field([], description="which files of tests the tool run_tests runs; unset, the command's own")
    protected: list[str] = Field(
        list(PROTECTED), description="patterns of files that are restored before the task is graded"
    )
    seconds: float = Field(120.0, gt=0, le=LONGEST, description="wall clock of one run of the tests")
    packages: list[str] = Field(["pytest"], description="installed distributions that the box can import")
    env: dict[str, str] = Field({}, description="environment variables; PYTHONPATH is relative to the repository")
    workdir: str = Field(HOME, pattern=r"^/[^:]+$", description="where the repository is in the box")
    places: list[str] = Field([], description="further folders that can be written, /logs")
    reward_file: str = Field("", description='for report = "reward": the number, or {"reward": number}')
    difficulty: float | None = Field(None, description="for a curriculum")
    licence: str = Field("", description="of the repository")
    origin: dict[str, Any] = Field({}, description="where it is from: package, version, sha256, seed")


@dataclass(frozen=True, slots=True)
class RepositoryTask:
    """One task in memory. `solve`: (files, command) for tasks that are solved by a script. `unmet`: what their image
    would have and a box of another kind has not.
    """

    name: str
    statement: str
    files: Tree
    settings: TaskSettings
    hidden: Tree = field(default_factory=dict)
    gold: str = ""
    solve: tuple[Tree, str] | None = None
    unmet: tuple[str, ...] = ()

    def is_protected(self, path: str) -> bool:
        """Whether the policy may not change this file: it decides what the tests say."""
        return path in self.hidden or any(fnmatchcase(path, pattern) for pattern in self.settings.protected)

    @property
    def test_files(self) -> list[str]:
        """The files of the tests that decide."""
        tests = [*self.settings.fail_to_pass, *self.settings.pass_to_pass]
        return sorted({test.partition("::")[0] for test in tests})

    def solved(self) -> Tree:
        """The files behind the gold patch."""
        return apply_diff(self.files, self.gold)


def read_task(tree: Mapping[str, RepositoryFile], where: str, name: str) -> RepositoryTask:
    """The task of a folder. DataError with the file, the rule and what to do."""
    settings = read_settings_file(tree, where)
    statement = text_of(tree, "statement.md", where).strip()
    if not statement:
        raise DataError(f"{where}/statement.md is empty: write what the policy is asked to do")
    files = subtree(tree, "repository")
    if not files:
        raise DataError(f"{where}/repository has no file: put the repository there, without its .git")
    hidden = {_box_path(path): file for path, file in subtree(tree, "hidden").items()}
    gold = text_of(tree, "gold.patch", where) if "gold.patch" in tree else ""
    task = RepositoryTask(name, statement, files, settings, hidden, gold)
    check_task(task, where)
    return task


def read_settings_file(tree: Mapping[str, RepositoryFile], where: str) -> TaskSettings:
    try:
        return TaskSettings(**tomllib.loads(text_of(tree, "task.toml", where)))
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"{where}/task.toml: not TOML ({error})") from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        near = suggest_name(key, list(TaskSettings.model_fields)) if first["type"] == "extra_forbidden" else ""
        raise DataError(f"{where}/task.toml: {key}: {first['msg'].lower()}.{near}") from error


def check_task(task: RepositoryTask, where: str) -> None:
    """What must hold before a box is started."""
    own = task.settings
    known = task.files.keys() | task.hidden.keys()
    if own.report == "reward" and not own.reward_file:
        raise DataError(f'{where}: report = "reward" needs reward_file, where the tests write the number')
    if own.report == "pytest":
        if not own.fail_to_pass:
            raise DataError(
                f'{where}: fail_to_pass is empty, and report = "pytest" counts its tests: name at least one test that '
                f'fails now, or set report = "exit"'
            )
        if missing := [name for name in task.test_files if name not in known]:
            raise DataError(
                f"{where}: the test file {missing[0]} is neither in repository/ nor in hidden/: paths start at the "
                f"repository, tests/test_a.py::test_b"
            )
    if both := sorted(set(own.fail_to_pass) & set(own.pass_to_pass)):
        raise DataError(f"{where}: {both[0]} is in fail_to_pass and in pass_to_pass; it fails now or it does not")
    if task.gold:
        try:
            task.solved()
        except DataError as error:
            raise DataError(f"{where}/gold.patch: {error}") from error


def text_of(tree: Mapping[str, RepositoryFile], path: str, where: str) -> str:
    """The text of one file of a task."""
    if path not in tree:
        have = sorted({name.partition("/")[0] for name in tree})
        raise DataError(f"{where}: no {path}.{suggest_name(path, have)} It has: {', '.join(have) or 'nothing'}")
    try:
        return tree[path].data.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}/{path}: byte {error.start} is not UTF-8: save it as UTF-8") from error


def _box_path(path: str) -> str:
    return path[1:] if path.startswith(ABSOLUTE) else path
