"""What an agent asks for and what it gets, whichever API it speaks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from rondel.core.types import Completion


@dataclass(slots=True)
class ChatRequest:
    """What an agent wants of the policy.

    said        messages, or a text, or token ids, to go on from
    calls       whether tool calls are looked for in the answer
    draw, required, parallel, seed   where a client decides: fields of Sampling, the functions of which one must be called, whether
                                     several may be, and whose noise it is
    adapter     that the client means by the model's name, "" for the model itself
    """

    said: list[dict[str, Any]] | str | list[int]
    tools: list[dict[str, Any]] = field(default_factory=list)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    calls: bool = True
    draw: dict[str, Any] = field(default_factory=dict)
    required: list[str] = field(default_factory=list)
    parallel: bool = True
    seed: int = 0
    adapter: str = ""


@dataclass(slots=True)
class ChatReply:
    """`calls`: (id, name, arguments). `stopped`: the client's stop string that ended it, which is not in `text`."""

    text: str
    calls: list[tuple[str, str, dict[str, Any]]]
    done: Completion
    prompt: int
    stopped: str = ""

    @property
    def is_truncated(self) -> bool:
        return self.done.finish_reason == "length"

    @property
    def assistant_message(self) -> dict[str, Any]:
        """What a client sends back when it goes on from here."""
        calls = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": given}}
            for id, name, given in self.calls
        ]
        return {"role": "assistant", "content": self.text, **({"tool_calls": calls} if calls else {})}


class ChatSession(Protocol):
    """Who answers: an episode of the gateway, or a server.

    stored   the conversations that /v1/responses may go on from, by the id of what ended them
    """

    stored: dict[str, list[dict[str, Any]]]

    async def generate_replies(self, asked: ChatRequest) -> list[ChatReply]: ...

    async def count_tokens(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> int: ...
