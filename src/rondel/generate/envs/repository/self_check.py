"""Is a task one? Its own solution must score 1, and the repository as it is less; both in boxes of their own."""

from __future__ import annotations

from dataclasses import dataclass

from rondel.core.errors import RondelError, error_text
from rondel.core.protocols import SandboxFactory
from rondel.core.types import Score
from rondel.generate.envs.repository.grader import Changes, grade, known_sums
from rondel.generate.envs.repository.task import RepositoryTask
from rondel.generate.envs.repository.workspace import command_text, open_workspace

SOLUTIONS = {"/solution": "/solution/solve.sh", "/oracle": "/oracle/solution.sh"}


@dataclass(frozen=True, slots=True)
class TaskCheck:
    """What a task scores untouched and solved; `fault` says why it is no good, or is empty."""

    name: str
    untouched: float
    solved: float
    fault: str = ""


def check_in_boxes(task: RepositoryTask, sandbox: SandboxFactory) -> TaskCheck:
    try:
        untouched = grade(task, {}, sandbox)
        if untouched.value >= 1:
            return TaskCheck(
                task.name, untouched.value, 0.0, "the untouched repository passes its tests: nothing to do"
            )
        changes = _solution(task, sandbox)
        if changes is None:
            return TaskCheck(task.name, untouched.value, 0.0, "no gold.patch and no script that solves it")
        solved = grade(task, changes, sandbox)
    except RondelError as error:
        return TaskCheck(task.name, 0.0, 0.0, error_text(error))
    return TaskCheck(task.name, untouched.value, solved.value, _fault(task, untouched, solved))


def _fault(task: RepositoryTask, untouched: Score, solved: Score) -> str:
    if solved.value < 1:
        return f"its own solution scores {solved.value:g} ({solved.parts})"
    if task.settings.report == "pytest" and (early := untouched.parts.get("fail_to_pass", 0.0)):
        return f"{early:.0%} of fail_to_pass pass in the untouched repository"
    if untouched.parts.get("pass_to_pass", 1.0) < 1:
        return "some of pass_to_pass fail in the untouched repository"
    return ""


def _solution(task: RepositoryTask, sandbox: SandboxFactory) -> Changes | None:
    """The files that the task's own solution changes."""
    known = known_sums(task.files)
    if task.solve is None:
        if not task.gold:
            return None
        solved = task.solved()
        changes: dict[str, object] = dict.fromkeys(task.files.keys() - solved.keys())
        changes |= {path: file for path, file in solved.items() if task.files.get(path) != file}
        return changes  # type: ignore[return-value]
    files, command = task.solve
    box = open_workspace(task, sandbox, seconds=task.settings.seconds)
    try:
        folder = next(folder for folder, path in SOLUTIONS.items() if path in command)
        box.put((folder, files))
        ran = box.run(command)
        if not ran.ok:
            raise RondelError(f"its solution '{command}' failed: {command_text(ran, 300)}")
        return box.changes(known)
    finally:
        box.close()
