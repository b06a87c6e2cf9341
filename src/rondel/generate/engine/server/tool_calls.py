"""Tools in a chat: what an answer calls, what of it a stream may show before it is certain, and the grammar of an
answer that must call.

answer   |thoughts, text|<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
          content         tool_calls, finish_reason "tool_calls"
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rondel.generate.calls import JsonCalls, read_calls, text_before_calls
from rondel.generate.dialects import ToolCall
from rondel.generate.engine.server.answers import AnswerDelta, SampleAnswer
from rondel.system.http.response import RequestRefusal

if TYPE_CHECKING:
    from rondel.generate.calls import CallFormat
    from rondel.generate.engine.server.chat_fields import OfferedTools

MARKS = 24  # characters of the longest beginning of a call


class CallReader:
    """Text and calls of the answers of one request."""

    def __init__(self, form: CallFormat, tokenizer: Any, tools: OfferedTools) -> None:
        self.form, self.tokenizer, self.tools = form, tokenizer, tools
        opens = getattr(form, "opens", None)
        self._marks = ("<tool_call>", "<function=") if opens is None else (opens,) if opens else ()
        self._shown: dict[int, int] = {}  # characters of an answer that its stream has been given, by its index

    def split(self, a: SampleAnswer) -> tuple[str, list[ToolCall]]:
        """What an answer says, and what it calls; a call that cannot be read is text."""
        if a.completion is None or a.completion.finish_reason != "stop":
            return a.text, []
        raw = self.tokenizer.decode(a.tokens, skip_special_tokens=False)
        calls = read_calls(self.form, raw, self.tools.functions)
        if not calls or any(call.fault for call in calls):
            return a.text, []
        return text_before_calls(self.form, raw), calls if self.tools.parallel else calls[:1]

    def next_text(self, piece: AnswerDelta) -> str:
        """What a stream may show: nothing that may turn out to be a call."""
        a = piece.answer
        shown = self._shown.get(a.index, 0)
        if piece.ends:
            said, _ = self.split(a)
            return said[shown:]
        text, upto = a.text, len(a.text)
        if not self._marks or any(t in self.tokenizer.all_special_ids for t in a.tokens[: piece.last]):
            return ""
        if text.lstrip()[:1] in ("{", "["):
            return ""
        at = min((i for mark in self._marks if (i := text.find(mark)) >= 0), default=-1)
        if at >= 0:
            upto = at
        else:
            upto -= max(
                (
                    n
                    for mark in self._marks
                    for n in range(min(len(mark), len(text), MARKS), 0, -1)
                    if text.endswith(mark[:n])
                ),
                default=0,
            )
        upto = len(text[:upto].rstrip())  # space before a call is dropped with it
        if upto <= shown:
            return ""
        self._shown[a.index] = upto
        return text[shown:upto]


def call_fields(id: str, index: int, calls: list[ToolCall], *, streamed: bool = False) -> list[dict[str, Any]]:
    """As OpenAI tells them; ids are of the request, the answer and the place."""
    return [
        {
            **({"index": place} if streamed else {}),
            "id": f"call_{id[-16:]}_{index}_{place}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for place, call in enumerate(calls)
    ]


def call_grammar(tools: OfferedTools, form: CallFormat, tokenizer: Any) -> dict[str, Any] | None:
    """Of an answer that calls; None where it may also speak."""
    if not tools.required:
        return None
    special = set(tokenizer.all_special_tokens)
    if not isinstance(form, JsonCalls) or form.opens in special or form.closes in special:
        raise RequestRefusal(
            400,
            f"this model writes calls in a form that cannot be demanded here ({type(form).__name__}): use tool_choice "
            "'auto'",
            param="tool_choice",
        )
    schemas = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                form.arguments: function.get("parameters") or {"type": "object"},
            },
            "required": ["name", form.arguments],
            "additionalProperties": False,
        }
        for function in (tool["function"] for tool in tools.functions)
        if function["name"] in tools.required
    ]
    call = "NEWLINE? body NEWLINE?"
    if form.opens:
        call = (
            f"{json.dumps(form.opens)} {call} {json.dumps(form.closes)}"
            if form.closes
            else f"{json.dumps(form.opens)} {call}"
        )
    more = " (NEWLINE? call)*" if tools.parallel and form.closes else ""
    body = json.dumps({"x-guidance": {"whitespace_pattern": " ?"}, "anyOf": schemas})
    return {"grammar": f"start: call{more}\ncall: {call}\nbody: %json {body}\nNEWLINE: /\\n/\n"}
