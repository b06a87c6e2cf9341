"""A proposer writes problems, a solver solves them; the proposer earns most for problems that are solved half the time.

    proposer ──problem──> checker ──question, answer──> solver x attempts ──> p, the share that is right
    proposer earns 1 - 2 |p - 1/2| (R-Zero, arXiv:2508.05004), and 0 for what the checker cannot answer
    solver   earns 1 where it is right, less the share of the others that are

The subtraction is the solver's baseline within the episode: every episode of a group has a problem of its own, and what
is compared must have been asked the same. A task that has an answer is given to the solver alone: held-out problems.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Literal

from rondel.core.types import Score, Task, Trajectory
from rondel.generate.envs.single_turn import opening_messages
from rondel.generate.envs.toolbox import calculator
from rondel.generate.template import Messages, Schemas

PROPOSER, SOLVER = "proposer", "solver"
# the text of a proposer -> question and answer; ValueError where it is no problem
Checker = Callable[[str], tuple[str, str]]
LONGEST = 200  # characters of a problem


class ProposerSolver:
    """`ProposerSolver(arithmetic, attempts=4)`.

    attempts      of the solver at one problem
    solver_score  "relative": right or wrong, less the mean of the other attempts; "plain": right or wrong
    """

    agents = (PROPOSER, SOLVER)
    scores_itself = True

    def __init__(
        self,
        checker: Checker,
        *,
        attempts: int = 4,
        solver_score: Literal["relative", "plain"] = "relative",
        suffix: str = "",
        system: str | None = None,
    ) -> None:
        self.checker, self.attempts, self.kind = checker, attempts, solver_score
        self.suffix, self.system, self.turns = suffix, system, 1 + attempts

    def prompt(self, task: Task) -> tuple[Messages, Schemas]:
        """The topic for the proposer, or the problem of a task that has an answer."""
        return opening_messages(task, suffix=self.suffix if _is_fixed(task) else "", system=self.system), ()

    async def run(self, task: Task, chat: Any) -> list[Trajectory]:
        """-> the proposer's trajectory, then those of the solver; or the solver's alone."""
        messages, _ = self.prompt(task)
        if _is_fixed(task):
            chat.trajectory.agent = SOLVER
            chat.give(messages)
            correct = float(same_answer((await chat.reply()).text or "", str(task.data["answer"])))
            chat.trajectory.score = Score(correct, {"correct": correct})
            return [chat.trajectory]
        chat.trajectory.agent = PROPOSER
        chat.give(messages)
        text = (await chat.reply()).text or ""
        try:
            question, answer = self.checker(text[:LONGEST])
        except (ValueError, ArithmeticError):  # what was proposed is no problem
            chat.trajectory.score = Score(0.0, {"valid": 0.0})
            return [chat.trajectory]
        solvers = [chat.beside(SOLVER) for _ in range(self.attempts)]
        right = await asyncio.gather(*(self._solve(one, question, answer) for one in solvers))
        rate = sum(right) / self.attempts
        chat.trajectory.score = Score(middle_reward(rate), {"valid": 1.0, "solved": rate})
        for one, ok in zip(solvers, right, strict=True):
            others = (sum(right) - ok) / max(1, self.attempts - 1)
            value = float(ok) - others if self.kind == "relative" and self.attempts > 1 else float(ok)
            one.trajectory.score = Score(value, {"correct": float(ok)})
        return [chat.trajectory, *(one.trajectory for one in solvers)]

    async def _solve(self, chat: Any, question: str, answer: str) -> bool:
        chat.others = True
        system: Messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        chat.give([*system, {"role": "user", "content": question + self.suffix}])
        return same_answer((await chat.reply()).text or "", answer)


def middle_reward(rate: float) -> float:
    """1 - 2 |p - 1/2|: 1 where half of the attempts are right, 0 where all or none are."""
    return 1.0 - 2.0 * abs(rate - 0.5)


def arithmetic(text: str) -> tuple[str, str]:
    """The last line is an expression: "3 + 4 * 2" -> ("3 + 4 * 2 =", "11")."""
    expression = next((line for line in reversed(text.strip().splitlines()) if line.strip()), "").strip().rstrip("= ")
    return f"{expression} =", calculator(expression)


def same_answer(said: str, answer: str) -> bool:
    """Whether the last line ends with the answer: as a number where it is one, else as a text."""
    last = next((line for line in reversed(said.strip().splitlines()) if line.strip()), "").strip().rstrip(".")
    try:
        wanted = Fraction(answer)
    except ValueError:
        return last.lower().endswith(answer.lower())
    try:
        return Fraction((last.split() or [""])[-1]) == wanted
    except (ValueError, ZeroDivisionError):
        return False


def _is_fixed(task: Task) -> bool:
    return task.data.get("answer") not in (None, "")
