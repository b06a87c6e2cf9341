"""An answer with the passage that says so, of an episode that searched a corpus."""

from __future__ import annotations

import re

from rondel.core.errors import ConfigError
from rondel.core.types import Score, Task, Trajectory
from rondel.score.answer_text import TAIL, turns_of

HEADLINE = re.compile(r"^\[(\d+)\] ", re.MULTILINE)  # how a tool's result begins a passage
CITED = re.compile(r"\[(\d{1,9})\]")
QUOTES = "'\"`“”‘’"


def normalise(text: str) -> str:
    """Lower case, one space between words, without quotes and a full stop around: " `ENOENT`." -> "enoent"."""
    return " ".join(text.lower().split()).strip(QUOTES + " ").rstrip(".,;").strip(QUOTES + " ")


def split_answer(text: str) -> tuple[str, list[int]]:
    """(answer, cited passages) of a last line: "Answer: 3.8 [17]" -> ("3.8", [17])."""
    last = next((line for line in reversed(text[-TAIL:].splitlines()) if line.strip()), "")
    said = CITED.sub(" ", last)
    return normalise(re.sub(r"^\s*(?:the )?answer(?: is)?\s*:?\s+", "", said, flags=re.IGNORECASE)), [
        int(id) for id in CITED.findall(last)
    ]


def shown_passages(trajectory: Trajectory) -> dict[int, str]:
    """What tools showed of each passage in this episode. Errors show none: they may repeat what the policy wrote."""
    shown: dict[int, str] = {}
    for turn in turns_of(trajectory):
        if turn.written or turn.role != "tool" or turn.text.startswith("error:"):
            continue
        pieces = HEADLINE.split(turn.text)
        for id, text in zip(pieces[1::2], pieces[2::2], strict=True):
            shown[int(id)] = f"{shown.get(int(id), '')}\n{text}"
    return shown


class Citation:
    """Score(answer + citation + unread), each with its weight, of a last line like "ENOENT [79184]".

    answer     weight of the answer that equals task.data["answer"] (or one in a list), after `normalise`
    citation   weight of one cited passage that a tool showed in this episode, that is among task.data["passages"]
               where the task names some, and in what was shown of which the answer stands; 0 where more than one
               passage is cited
    unread     added to a right answer that stood in nothing that was shown: it was guessed or remembered
    """

    def __init__(self, *, answer: float = 0.5, citation: float = 0.5, unread: float = -0.25) -> None:
        if answer <= 0 or citation < 0 or not -answer < unread <= 0:
            raise ConfigError(
                f"reward 'citation': answer = {answer}, citation = {citation}, unread = {unread}; answer must be above "
                f"0, citation at least 0, and unread a penalty from 0 to above -answer, or a right answer would be "
                f"worth no more than a wrong one"
            )
        self.answer, self.citation, self.unread = answer, citation, unread
        self.maximum = answer + citation

    def __call__(self, trajectory: Trajectory, task: Task) -> Score:
        gold = task.data["answer"]
        wanted = {normalise(str(one)) for one in (gold if isinstance(gold, list) else [gold])}
        said, cited = split_answer(trajectory.text)
        right, shown = said in wanted, shown_passages(trajectory)
        supports = task.data.get("passages")
        good = (
            len(cited) == 1
            and cited[0] in shown
            and (supports is None or cited[0] in supports)
            and _holds(shown[cited[0]], wanted)
        )
        unread = right and not any(_holds(text, wanted) for text in shown.values())
        parts = {
            "answer": self.answer * right,
            "citation": self.citation * (right and good),
            "unread": self.unread * unread,
        }
        return Score(sum(parts.values()), parts)


def _holds(text: str, wanted: set[str]) -> bool:
    text = " ".join(text.lower().split())
    return any(re.search(rf"(?<!\w){re.escape(one)}(?!\w)", text) for one in wanted)
