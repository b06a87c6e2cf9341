"""What was asked, which part of a text is the answer to it, and whether that can be a
number without a computer algebra system.
"""

from __future__ import annotations

import re
from fractions import Fraction

from rondel.core.media import message_text
from rondel.core.types import Task, Trajectory, Turn

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
DENIED = re.compile(r"\bnot [^\s,;]{1,40},? but (?:rather )?", re.IGNORECASE)
LONGEST = 2000  # characters of an answer that are still read
TAIL = 16000  # characters at the end of a text in which its answer stands: no pattern here may meet an endless text

PLAIN = re.compile(
    r"([+-]?)((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,18})(?:\.[0-9]{1,18})?|\.[0-9]{1,18})(?:\s*/\s*([0-9]{1,18}))?"
)

# What a policy can write in ten characters and no machine can compute: towers of powers,
# exponents and bounds of six digits, repeated factorials.
OPEN, CLOSE = r"[\s{(\[]*", r"[\s})\]]*"
WILD = re.compile(
    rf"(?:\^|\*\*){OPEN}[0-9]+{CLOSE}(?:\^|\*\*){OPEN}[0-9]"  # 9^{9^{9}}, 9**9**9
    rf"|(?:\^|\*\*){OPEN}-?[0-9]{{5}}"  # 2^{100000}
    rf"|![\s)}}\]]*!"  # (9!)!
    rf"|[0-9]{{5}}{CLOSE}!"  # 99999!
    rf"|\\[dt]?binom{OPEN}(?:[0-9]{{6}}|[0-9]+{OPEN}\^)"
    rf"|\\(?:sum|prod)[^$]{{0,40}}\^{OPEN}(?:[0-9]{{6}}|[0-9]+{OPEN}\^)"
)


def question_of(task: Task) -> str:
    """The prompt, or what the user said in the messages."""
    if "prompt" in task.data:
        return str(task.data["prompt"])
    return "\n".join(
        message_text(message.get("content", ""))
        for message in task.data.get("messages", [])
        if message.get("role") == "user"
    )


def turns_of(trajectory: Trajectory) -> list[Turn]:
    """The conversation from the policy's first turn on; its text alone where nothing else is known."""
    own = next((i for i, turn in enumerate(trajectory.conversation) if turn.written), None)
    if own is None:
        return [Turn("assistant", trajectory.text, 0, len(trajectory.tokens), True)]
    return trajectory.conversation[own:]


def asked_of(trajectory: Trajectory, task: Task) -> list[dict[str, str]]:
    """The messages before the policy's first turn: those of the task, with their roles, or what was given where the
    task has none.
    """
    if "messages" in task.data and question_of(task) and "prompt" not in task.data:
        return [
            {"role": str(message.get("role", "user")), "content": message_text(message.get("content") or "")}
            for message in task.data["messages"]
        ]
    if question := question_of(task):
        return [{"role": "user", "content": question}]
    first = next((i for i, turn in enumerate(trajectory.conversation) if turn.written), 0)
    return [{"role": turn.role, "content": turn.text} for turn in trajectory.conversation[:first]] or [
        {"role": "user", "content": ""}
    ]


def question_text(asked: list[dict[str, str]]) -> str:
    """What the user said in the messages before the policy's first turn, for readers of one text."""
    own = [message for message in asked if message["role"] == "user"]
    return "\n".join(message["content"] for message in own or asked)


def extract_answer(text: str) -> str:
    r"""The last box that closes, whole, else the last <answer>, else the text without
    what it denies: "not 7 but 8" says 8.

    said(r"\boxed{7}, no: \boxed{8}") -> r"\boxed{8}" · said("<answer>7</answer>") -> "7" · said("not 7 but 8") -> "8"
    """
    text = text[-TAIL:].replace("\u2212", "-")
    for start in reversed([found.end() for found in BOX.finditer(text)][-50:]):
        inside = _read_braced(text, start)
        if inside is not None:
            return f"\\boxed{{{inside}}}"
    _, opened, after = text.rpartition("<answer>")
    if opened and "</answer>" in after:
        return after.partition("</answer>")[0].strip()
    return DENIED.sub("", re.sub(r"\\\$(?=[0-9])", "", text))


def plain_number(answer: str) -> Fraction | None:
    r"""The number, where the answer is nothing but one: "1,000" -> 1000, r"\boxed{-3/4}" -> -3/4, "x=7" -> None."""
    if len(answer) > 100:
        return None
    inside = answer[7:-1] if answer.startswith("\\boxed{") else answer
    found = PLAIN.fullmatch(inside.strip().strip("$").strip().removesuffix("."))
    if not found or (found[3] and not int(found[3])):
        return None
    value = Fraction(found[2].replace(",", "")) / int(found[3] or 1)
    return -value if found[1] == "-" else value


def is_too_expensive(answer: str) -> bool:
    """Whether to try to compute this would be to hang: it is longer than any answer, or
    of those that grow beyond every machine.
    """
    boxed = answer.startswith("\\boxed{")
    return (
        (boxed and len(answer) > LONGEST)
        or _nesting_depth(answer) > 100
        or bool(WILD.search(answer))
        or bool(re.search(r"[0-9]{1000}", answer))
    )


def _read_braced(text: str, start: int) -> str | None:
    """From an opening brace to the one that closes it; a box in a box counts as one."""
    depth = 1
    for at in range(start, min(len(text), start + 2 * LONGEST)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return text[start:at]
    return None


def _nesting_depth(text: str) -> int:
    depth = deepest = 0
    for mark in text:
        if mark in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif mark in ")]}":
            depth = max(0, depth - 1)
    return deepest
