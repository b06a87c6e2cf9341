"""A conversation as messages: what a client would send to a server that renders every request anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rondel.generate.calls import read_calls, text_before_calls

if TYPE_CHECKING:
    from rondel.generate.template import Messages, Schemas, Template


class WrittenTurn:
    """A turn of the policy, whose message is read off its tokens when somebody asks."""

    def __init__(self, tokens: Sequence[int], text: str) -> None:
        self.tokens, self.text = tokens, text
        self._message: dict[str, Any] | None = None

    def message(self, template: Template, *, tools: bool) -> dict[str, Any]:
        """As an API tells it: the text before the first call, and the calls."""
        if self._message is None:
            self._message = {"role": "assistant", "content": self.text}
            raw = template.tokenizer.decode(list(self.tokens), skip_special_tokens=False) if tools else ""
            calls = read_calls(template.call_format, raw) if tools else []
            if calls and not any(call.fault for call in calls):
                self._message["content"] = text_before_calls(template.call_format, raw).strip()
                self._message["tool_calls"] = [
                    {
                        "id": f"call{number:05d}",
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                    for number, call in enumerate(calls, 1)
                ]
        return self._message


class SentMessages:
    """`sent.give(messages)`, `sent.write(tokens, text)`, `sent.render(template)`.

    renders   whether the template can write it whole: no images, and nothing that came in as tokens
    """

    def __init__(self, turns: Sequence[dict[str, Any] | WrittenTurn] = (), tools: Schemas = ()) -> None:
        self.turns, self.tools, self.renders = list(turns), tools, True

    def give(self, messages: Messages) -> None:
        self.renders = self.renders and all(isinstance(message.get("content"), str) for message in messages)
        self.turns += messages

    def write(self, tokens: Sequence[int], text: str) -> None:
        self.turns.append(WrittenTurn(tokens, text))

    def first(self, n: int) -> SentMessages:
        """The first n of them."""
        found = SentMessages(self.turns[:n], self.tools)
        found.renders = self.renders
        return found

    def messages(self, template: Template) -> Messages:
        return [
            turn.message(template, tools=bool(self.tools)) if isinstance(turn, WrittenTurn) else turn
            for turn in self.turns
        ]

    def render(self, template: Template) -> list[int]:
        """[T] the whole conversation up to where the policy writes next. TemplateError where it is refused."""
        return template.render_opening(self.messages(template), self.tools, remember=False)
