"""The body of a request, field by field. An agent was written for another model: what cannot
be followed is said aloud once, not refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from rondel.core.types import Sampling
from rondel.generate.chat_apis.chat_request import ChatRequest
from rondel.system.http.response import RequestRefusal
from rondel.text.unicode import read_json

# What says nothing about the answer.
SILENT = frozenset(
    {
        "model",
        "stream",
        "stream_options",
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "cache_control",
        "include",
        "truncation",
    }
)
NOTHING: tuple[Any, ...] = (
    None,
    [],
    {},
    {"type": "text"},
    {"format": {"type": "text"}},
    {"type": "disabled"},
    "auto",
    {"type": "auto"},
)


def parse_body(raw: bytes) -> dict[str, Any]:
    """The body as valid text: an agent passes on what tools and pages gave it."""
    try:
        body = read_json(raw)
    except (ValueError, RecursionError) as error:
        raise RequestRefusal(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestRefusal(400, f"the body is a JSON {type(body).__name__}; it must be an object")
    return body


class ChatFields:
    """`f.take("max_tokens", int)`: the value, the default if it is missing or null, or a refusal that names it."""

    def __init__(self, body: dict[str, Any], sampling: Sampling, warn: Callable[[str, str], None]) -> None:
        self.body, self.sampling, self.warn, self._known = body, sampling, warn, set(SILENT)
        self.parallel = True  # whether an answer may call several tools, as read_tool_choice finds it

    def read_field(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        self._known.add(name)
        value = self.body.get(name)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            expected = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            raise RequestRefusal(400, f"{name} = {json.dumps(value)[:80]}; it must be of type {expected}")
        return value

    def read_count(self, *names: str) -> int | None:
        """The first of them that is given."""
        given = [value for name in names if (value := self.read_field(name, int)) is not None]
        if given and given[0] < 1:
            raise RequestRefusal(400, f"{names[0]} = {given[0]}; it must be at least 1")
        return given[0] if given else None

    def stop_strings(self, name: str) -> tuple[str, ...]:
        given = self.read_field(name, (str, list), [])
        listed = [given] if isinstance(given, str) else given
        if not all(isinstance(stop, str) for stop in listed):
            raise RequestRefusal(400, f"{name} must be a text or a list of texts")
        return tuple(dict.fromkeys(stop for stop in listed if stop))

    def read_tool_choice(self) -> bool:
        """Whether tools are offered, and may be called side by side."""
        choice = self.read_field("tool_choice", (str, dict))
        self.parallel = self.read_parallel(choice)
        if isinstance(choice, dict):
            choice = {name: value for name, value in choice.items() if name != "disable_parallel_tool_use"}
        off = choice == "none" or choice == {"type": "none"}
        if choice not in NOTHING and not off:
            self.warn("tool_choice", "the policy chooses for itself whether it calls a tool")
        return not off

    def read_parallel(self, choice: Any) -> bool:
        """Whether an answer may call several tools, as OpenAI's and Anthropic's clients say it."""
        one = isinstance(choice, dict) and bool(choice.get("disable_parallel_tool_use"))
        return bool(self.read_field("parallel_tool_calls", bool, True)) and not one

    def read_chat_request(
        self, said: Any, tools: list[dict[str, Any]] | None = None, *, limit: tuple[str, ...], stop: str = "stop"
    ) -> ChatRequest:
        """What the APIs have in common. Called last: what nobody has taken by now is told to the
        person who runs this.
        """
        offered = self.read_tool_choice()
        if not said:
            raise RequestRefusal(400, "there is nothing to answer")
        n = self.read_count("n") or 1
        if n > 128:
            raise RequestRefusal(400, f"n = {n}; at most 128")
        asked = ChatRequest(said, tools or [], self.read_count(*limit), self.stop_strings(stop), n, offered)
        asked.parallel = self.parallel
        for name in self.body.keys() - self._known:
            value, own = self.body[name], getattr(self.sampling, name, None)
            if not any(value == nothing for nothing in NOTHING) and not (
                value is False or (own is not None and value == own)
            ):
                rule = f"the run's {own} is used" if own is not None else "it has no effect"
                self.warn(name, f"{rule}: what is trained is drawn as engine.sampling says")
        return asked


def read_functions(tools: list[Any], read: Callable[[dict[str, Any]], dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools as templates want them. `read` takes one of an API apart."""
    out = []
    for tool in tools:
        if not isinstance(tool, dict) or tool.get("type", "function") not in ("function", "custom"):
            kind = tool.get("type") if isinstance(tool, dict) else type(tool).__name__
            raise RequestRefusal(
                400, f"a tool of type '{kind}'; only functions of the agent's own can be offered to the policy"
            )
        given = read(tool)
        if not isinstance(given, dict) or not isinstance(given.get("name"), str):
            raise RequestRefusal(400, "a tool without a name")
        out.append({"type": "function", "function": {k: v for k, v in given.items() if v is not None}})
    return out
