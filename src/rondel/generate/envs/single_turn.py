"""One prompt, one answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rondel.core.errors import DataError
from rondel.core.protocols import Chat
from rondel.core.types import Task, Trajectory
from rondel.generate.template import Messages, Schemas
from rondel.text.tokenization import SPLIT

Example = dict[str, str]  # {"prompt": "2 + 2 =", "answer": "4"}


def opening_messages(
    task: Task, *, suffix: str = "", system: str | None = None, examples: Sequence[Example] = ()
) -> Messages:
    """Messages of a task's prompt: task.data's "messages", or its "prompt" as a user's message.

    suffix ends the last one; examples are earlier turns, each a question (with the
    suffix) and its answer; system goes in front. Control tokens that they spell are text, unless the task's data means
    them (task.data.split_special_tokens = false)
    """
    data: dict[str, Any] = task.data
    if "messages" in data:
        messages = [{key: value for key, value in m.items() if key != SPLIT} for m in data["messages"]]
    elif isinstance(data.get("prompt"), str):
        messages = [{"role": "user", "content": data["prompt"]}]
    else:
        raise DataError(
            f"task {task.id} has neither a text 'prompt' nor 'messages'; it has: {', '.join(data) or 'nothing'}"
        )
    if suffix and isinstance(messages[-1]["content"], list):
        messages[-1]["content"] = [*messages[-1]["content"], {"type": "text", "text": suffix}]
    else:
        messages[-1]["content"] += suffix
    if examples:
        at = 1 if messages[0].get("role") == "system" else 0
        shown = (
            ("user", e["prompt"] + suffix) if k == 0 else ("assistant", e["answer"]) for e in examples for k in (0, 1)
        )
        messages[at:at] = [{"role": role, "content": content} for role, content in shown]
    if system is not None and messages[0].get("role") != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages if data.get(SPLIT, True) else [{**message, SPLIT: False} for message in messages]


class SingleTurn:
    """Gives the prompt, takes one reply: `SingleTurn(suffix=" Answer with a number.")`."""

    def __init__(self, *, suffix: str = "", system: str | None = None, examples: Sequence[Example] = ()) -> None:
        self.suffix, self.system, self.examples = suffix, system, examples

    def prompt(self, task: Task) -> tuple[Messages, Schemas]:
        """What the policy reads first, and the tools it is offered."""
        return opening_messages(task, suffix=self.suffix, system=self.system, examples=self.examples), ()

    async def run(self, task: Task, chat: Chat) -> Trajectory:
        chat.give(*self.prompt(task))
        await chat.reply()
        return chat.trajectory
