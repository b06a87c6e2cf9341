"""Which tasks are held out, so that nothing leaks.

The *content* of a question is what is left when order is forgotten: 3 + 4 and 4 + 3
are one problem, so both are trained on or both are held out.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from hashlib import blake2b

from rondel.core.errors import ConfigError
from rondel.core.media import message_text
from rondel.core.types import Task

GRAM, COMMON = (
    13,
    10,
)  # words in a row that two questions do not share by chance; in more training tasks than this they are a phrase of the set


def content_key(question: str) -> str:
    """What a question is about, whatever the order: "3 + 4 =" and "4 + 3 =" -> "3 4 | + ="."""
    numbers = re.findall(r"\d+(?:\.\d+)?", question)
    words = re.findall(r"[^\W\d_]+|[^\w\s]", question.lower())
    return " ".join(sorted(numbers)) + " | " + " ".join(sorted(words))


def asked_key(task: Task) -> str:
    """The content of what the user asks, in whatever form: as a text or as messages, with a system prompt or without."""
    if "prompt" in task.data:
        return content_key(task.data["prompt"])
    messages = task.data["messages"]
    own = [m for m in messages if m.get("role") == "user"] or messages
    return content_key("\n".join(message_text(m["content"]) for m in own))


def hold_out(contents: list[str], holdout: float, seed: int) -> set[str]:
    """Whole contents, in the order of their hash with the seed, until `holdout` tasks (or that
    fraction) are held out.
    """
    number = isinstance(holdout, int | float) and not isinstance(holdout, bool) and math.isfinite(holdout)
    if not number or holdout < 0 or (holdout >= 1 and holdout != int(holdout)):
        raise ConfigError(f"task.data.holdout = {holdout!r}; it must be a number of tasks, or a fraction below 1")
    wanted = round(holdout * len(contents)) if holdout < 1 else int(holdout)
    sizes = Counter(contents)
    held: set[str] = set()
    count = 0
    for content in sorted(sizes, key=lambda c: blake2b(f"{seed}/{c}".encode(), digest_size=8).digest()):
        if count >= wanted:
            break
        held.add(content)
        count += sizes[content]
    return held


def overlapping_tasks(train: list[Task], held: list[Task], n: int) -> set[str]:
    """Ids of the training tasks that share `n` words in a row with a held-out question; what
    stands in many of them is a form of words.
    """
    if n <= 0:
        return set()
    theirs = {gram for task in held for gram in _word_ngrams(task, n)}
    found: dict[tuple[str, ...], list[str]] = {}
    for task in train:
        for gram in _word_ngrams(task, n) & theirs:
            found.setdefault(gram, []).append(task.id)
    return {id for ids in found.values() if len(ids) <= COMMON for id in ids}


def _word_ngrams(task: Task, n: int) -> set[tuple[str, ...]]:
    messages = (
        [task.data["prompt"]] if "prompt" in task.data else [message_text(m["content"]) for m in task.data["messages"]]
    )
    words = re.findall(r"\w+", " ".join(messages).lower())
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}
