"""Two debaters and a judge: each debater argues for an answer, the judge reads both and decides.

    first  ──> second ──> first ──> second ──> judge       `rounds` of the two; the judge reads all that was said

The judge earns 1 for the right answer. The debaters earn +1 and -1, or what the judge gives each. A debate is worth its
cost where judging arguments is easier than finding the answer (arXiv:1805.00899).
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import Any, Literal

from rondel.core.errors import DataError
from rondel.core.types import Score, Task, Trajectory
from rondel.generate.envs.remote_chat import RemoteChat
from rondel.generate.envs.single_turn import opening_messages
from rondel.generate.template import Messages, Schemas

DEBATERS, JUDGE = ("first", "second"), "judge"
LETTERS = "AB"
LETTER = re.compile(r"(?<![A-Za-z])[AB](?![A-Za-z])")
POINTS = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)(?![\w.]*\d)")
MOST_POINTS = 10.0
FORMS = {
    "zero_sum": "Which side is right? Answer with A or B.",
    "judged": "Give each side 0 to 10 points, first A, then B, as in: 7 4",
}


class Debate:
    """`Debate(rounds=2)`; a task has "prompt", "answer" and "wrong", the answer that the other side argues for.

    judge   "policy": the agent "judge"; or the address of a server, with `judge_model`
    score   "zero_sum": +1 for the side that the judge takes, -1 for the other, 0 where it takes none
            "judged": the points of each side, between 0 and 1
    Which debater argues for the right answer is drawn from the task, so it is the same in all its episodes.
    """

    scores_itself = True

    def __init__(
        self,
        *,
        rounds: int = 1,
        judge: str = "policy",
        judge_model: str = "",
        score: Literal["zero_sum", "judged"] = "zero_sum",
        timeout: float = 30.0,
        suffix: str = "",
        system: str | None = None,
    ) -> None:
        self.rounds, self.kind, self.suffix, self.system = rounds, score, suffix, system
        self.remote = None if judge == "policy" else RemoteChat(judge, judge_model, "task.env.judge", timeout)
        self.agents = DEBATERS if self.remote is not None else (*DEBATERS, JUDGE)
        self.turns = 2 * rounds + 1

    def prompt(self, task: Task) -> tuple[Messages, Schemas]:
        """What the first debater reads."""
        return [*self._system(), _user(self._opening(task, *self.sides(task)))], ()

    def sides(self, task: Task) -> tuple[str, str]:
        """The answers for which the first and the second debater argue."""
        if not task.data.get("wrong") or task.data.get("answer") in (None, ""):
            raise DataError(f'{task.id}: a debate needs an "answer" and a "wrong" one; it has: {", ".join(task.data)}')
        right, wrong = str(task.data["answer"]), str(task.data["wrong"])
        even = blake2b(task.id.encode(), digest_size=1).digest()[0] % 2 == 0
        return (right, wrong) if even else (wrong, right)

    async def run(self, task: Task, chat: Any) -> list[Trajectory]:
        """-> the judge's trajectory, then those of the debaters; of a judge elsewhere the debaters' alone."""
        sides = self.sides(task)
        chat.trajectory.agent = self.agents[-1] if self.remote is None else DEBATERS[0]
        chats = [chat.beside(DEBATERS[0]) if self.remote is None else chat, chat.beside(DEBATERS[1])]
        said: list[str] = []
        for turn in range(2 * self.rounds):
            own, before = turn % 2, said[-1:]
            opens = [] if turn > 1 else [self._opening(task, sides[own], sides[1 - own])]
            heard = [f"The other side says:\n{before[0]}"] if before else []
            chats[own].others = chats[own].others or bool(before)
            begin = self._system() if turn < 2 else []
            chats[own].give([*begin, _user("\n\n".join([*opens, *heard]))])
            said.append((await chats[own].reply()).text or "")
        verdict = await self._judge(task, chat, sides, said)
        return self._scored(task, chat, chats, sides, verdict)

    async def _judge(self, task: Task, chat: Any, sides: tuple[str, str], said: list[str]) -> str:
        lines = [f"{LETTERS[turn % 2]}: {text}" for turn, text in enumerate(said)]
        about = f"{_question(task)}\nA argues for: {sides[0]}\nB argues for: {sides[1]}"
        messages = [*self._system(), _user("\n\n".join([about, *lines, FORMS[self.kind] + self.suffix]))]
        if self.remote is not None:
            return await self.remote.ask(messages)
        chat.others = True
        chat.give(messages)
        return (await chat.reply()).text or ""

    def _scored(
        self, task: Task, chat: Any, chats: list[Any], sides: tuple[str, str], verdict: str
    ) -> list[Trajectory]:
        earned = read_verdict(verdict, self.kind)
        right = sides.index(str(task.data["answer"]))
        wins = earned is not None and earned[right] > earned[1 - right]
        debaters = [one.trajectory for one in chats]
        for place, trajectory in enumerate(debaters):
            trajectory.score = Score(0.0 if earned is None else earned[place], {"honest": float(place == right)})
        if self.remote is not None:
            return debaters
        chat.trajectory.score = Score(float(wins), {"decided": float(earned is not None)})
        return [chat.trajectory, *debaters]

    def gold(self, task: Task) -> list[str]:
        """Both sides state their answers, and the judge takes the right one."""
        sides = self.sides(task)
        right = sides.index(str(task.data["answer"]))
        verdict = LETTERS[right] if self.kind == "zero_sum" else ("10 0", "0 10")[right]
        return [*(f"The answer is {sides[turn % 2]}." for turn in range(2 * self.rounds)), verdict]

    def _opening(self, task: Task, own: str, other: str) -> str:
        return f"{_question(task)}\nArgue that the answer is: {own}\nThe other side argues for: {other}{self.suffix}"

    def _system(self) -> Messages:
        return [] if self.system is None else [{"role": "system", "content": self.system}]


def read_verdict(text: str, kind: str) -> tuple[float, float] | None:
    """What the two sides earn by the last letter, or the last two numbers, of a verdict; None where it has none.

    read_verdict("B is right", "zero_sum") -> (-1, 1) · read_verdict("7 4", "judged") -> (0.7, 0.4)
    """
    if kind == "zero_sum":
        letters = LETTER.findall(text)
        return None if not letters else (1.0, -1.0) if letters[-1] == "A" else (-1.0, 1.0)
    points = [min(float(one), MOST_POINTS) / MOST_POINTS for one in POINTS.findall(text)[-2:]]
    return (points[0], points[1]) if len(points) == 2 else None


def _question(task: Task) -> str:
    content = opening_messages(task)[-1]["content"]
    if not isinstance(content, str):
        raise DataError(f"{task.id}: a debate is about text, and its question has parts")
    return content


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}
