"""How a model asks for a tool: read off its own chat template, which is asked to write a call that is known.

    Qwen, Hermes   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    Llama 3        {"name": "add", "parameters": {"a": 1}}
    Mistral        [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]
    Qwen 3.5       <function=add><parameter=a>1</parameter></function>
    GLM, LFM2, Gemma 4, gpt-oss: dialects.py

A template that knows no tools is given the first form in words: tools are then
described in the system message, and results come back in a user's message.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rondel.core.errors import DataError
from rondel.generate.dialects import Dialect, ToolCall, detect_dialect, type_arguments, untyped_call
from rondel.text.unicode import valid_unicode

THOUGHT_ENDS = "</think>"
NAME, KEY, VALUE = "probe_name", "probe_key", "probe value"
PROBE: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": NAME, "arguments": {KEY: VALUE}}}],
}
TOLD = (
    "You may call one or more of these functions:\n<tools>\n{tools}\n</tools>\n"
    'For each call write a JSON object within <tool_call></tool_call>:\n<tool_call>\n{{"name": '
    '<function>, "arguments": '
    "<object>}}\n</tool_call>"
)


@dataclass(frozen=True)
class JsonCalls:
    """opens, closes  what stands around a call's JSON object, or around a list of them
    arguments         the key of its arguments
    told              tools are described in words, because the template does not
    """

    opens: str
    closes: str
    arguments: str = "arguments"
    told: bool = False
    ends: ClassVar = ""
    BETWEEN: ClassVar = re.compile(r"[; \n\t,]*+")

    def parse_calls(self, text: str) -> list[ToolCall]:
        """The calls in what the policy wrote, in order; one that is begun and cannot be read is a call with a fault."""
        if not self.opens:
            begins = text.strip()
            return self._read_objects(begins)[0] if begins.startswith("{") and '"name"' in begins else []
        return [call for _, _, calls in self._find_calls(text) for call in calls]

    def find_call_spans(self, text: str) -> list[tuple[int, int]]:
        """From where to where the calls stand that can be read."""
        if self.opens:
            found = self._find_calls(text)
            return [(begin, end) for begin, end, calls in found if not any(call.fault for call in calls)]
        spans: list[tuple[int, int]] = []
        for begin in (0, *(found.end() for found in re.finditer(THOUGHT_ENDS, text))):
            at = begin + len(text[begin:]) - len(text[begin:].lstrip())
            if (not spans or at >= spans[-1][1]) and text.startswith('{"name"', at):
                try:
                    spans.append((at, json.JSONDecoder().raw_decode(text, at)[1]))
                except (ValueError, RecursionError):
                    continue
        return spans

    def _find_calls(self, text: str) -> Iterator[tuple[int, int, list[ToolCall]]]:
        """Begin, end and calls of each piece behind a mark. A mark within a JSON string belongs to the string, unless
        the piece cannot be read so.
        """
        at = 0
        while (begin := text.find(self.opens, at)) >= 0:
            body = begin + len(self.opens)
            end = self._find_piece_end(text, body)
            calls, length = self._read_objects(text[body:end])
            if calls[0].fault and (first := self._find_mark(text, body)) < end:
                end, (calls, length) = first, self._read_objects(text[body:first])
            yield begin, body + length, calls
            at = end

    def _find_piece_end(self, text: str, at: int) -> int:
        """The first mark outside of strings, or the end; the first mark at all where a string has no end."""
        marks = "|".join(re.escape(mark) for mark in (self.opens, self.closes) if mark)
        for token in re.compile(rf'"(?:[^"\\]|\\.)*+"|["\\]|{marks}', re.DOTALL).finditer(text, at):
            if token.group() in (self.opens, self.closes):
                return token.start()
            if len(token.group()) == 1:
                return self._find_mark(text, at)
        return len(text)

    def _find_mark(self, text: str, at: int) -> int:
        found = (text.find(mark, at) for mark in (self.opens, self.closes) if mark)
        return min((place for place in found if place >= 0), default=len(text))

    def find_call_start(self, text: str) -> int:
        """Where the first call begins; the text's length where there is none."""
        if not self.opens:
            return 0 if self.parse_calls(text) else len(text)
        at = text.find(self.opens)
        return len(text) if at < 0 else at

    def _read_objects(self, text: str) -> tuple[list[ToolCall], int]:
        """The calls of a piece, and where the last one that could be read ends."""
        found: list[ToolCall] = []
        end = 0
        text, at = text.rstrip(), len(text) - len(text.lstrip())
        while at < len(text) and (not found or text[at] in "{["):
            try:
                value, end = json.JSONDecoder().raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                return [*found, ToolCall("", {}, f"the call is not valid JSON: {error}")], end
            found += [self._parse_call(one) for one in (value if isinstance(value, list) else [value])]
            at = self.BETWEEN.match(text, end).end()  # type: ignore[union-attr]  # it matches nothing, too
        return found or [ToolCall("", {}, "the call is empty")], end

    def _parse_call(self, value: Any) -> ToolCall:
        if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
            return ToolCall("", {}, f'a call is a JSON object with "name" and "{self.arguments}"')
        arguments = value.get(self.arguments, value.get("arguments", {}))
        if isinstance(arguments, str):  # some write the object as a string
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = None
        if not isinstance(arguments, dict):
            return ToolCall(name, {}, f'"{self.arguments}" of {name} is not a JSON object')
        return ToolCall(name, arguments)


class TaggedCalls:
    """A tag for the function, and one for each of its arguments."""

    told, ends = False, ""
    FUNCTION = re.compile(r"<function=([^<>\n]+)>")
    TAG = re.compile(r"<parameter=([^<>\n]+)>\n?|</function>")

    def parse_calls(self, text: str) -> list[ToolCall]:
        """As JsonCalls.parse_calls."""
        calls = [call for _, _, call in self._find_calls(text)]
        return calls or ([ToolCall("", {}, "the call names no <function=...>")] if "<tool_call>" in text else [])

    def find_call_spans(self, text: str) -> list[tuple[int, int]]:
        """As JsonCalls.find_call_spans."""
        return [(begin, end) for begin, end, call in self._find_calls(text) if not call.fault]

    def _find_calls(self, text: str) -> Iterator[tuple[int, int, ToolCall]]:
        """Begin, end and call of each function. A value may hold any tag but its own end."""
        at = 0
        while (function := self.FUNCTION.search(text, at)) is not None:
            name, texts, fault, at = function.group(1).strip(), {}, "", function.end()
            while (tag := self.TAG.search(text, at)) is not None and tag.group() != "</function>":
                if (end := text.find("</parameter>", tag.end())) < 0:
                    fault = f"<parameter={tag.group(1)}> has no end: </parameter>"
                    break
                texts[tag.group(1).strip()] = text[tag.end() : end].removesuffix("\n")
                at = end + len("</parameter>")
            end = text.find("</function>", at)
            at = len(text) if end < 0 else end + len("</function>")
            yield function.start(), at, ToolCall(name, {}, fault) if fault else untyped_call(name, texts)

    def find_call_start(self, text: str) -> int:
        """As JsonCalls.find_call_start."""
        return min(at if at >= 0 else len(text) for at in (text.find("<tool_call>"), text.find("<function=")))


CallFormat = JsonCalls | TaggedCalls | Dialect


def read_calls(form: CallFormat, answer: str, tools: Sequence[dict[str, Any]] = ()) -> list[ToolCall]:
    """The calls of an answer, decoded with its control tokens; what it only thought of is not asked for. `tools`: those
    that were offered, whose schemas say what is a number.
    """
    found = [type_arguments(call, tools) for call in form.parse_calls(answer[_find_thought_end(form, answer) :])]
    # JSON may spell half a character
    return [ToolCall(valid_unicode(c.name), valid_unicode(c.arguments), valid_unicode(c.fault)) for c in found]


def text_before_calls(form: CallFormat, answer: str) -> str:
    """What an answer that calls says before its first call, its thoughts included."""
    thought = _find_thought_end(form, answer)
    return answer[: thought + form.find_call_start(answer[thought:])].rstrip()


def _find_thought_end(form: CallFormat, answer: str) -> int:
    """Behind the last </think> that is not a part of a call's arguments; 0 where there is none."""
    marks = [found.span() for found in re.finditer(THOUGHT_ENDS, answer)]
    spans = form.find_call_spans(answer) if marks else []
    begins = [begin for begin, _ in spans]
    for at, end in reversed(marks):
        before = bisect_right(begins, at) - 1
        if before < 0 or spans[before][1] <= at:
            return end
    return 0


HERMES = JsonCalls("<tool_call>", "</tool_call>", told=True)


def read_off(write: Callable[[list[dict[str, Any]], Sequence[dict[str, Any]]], str]) -> CallFormat:
    """The format of a template. write: (messages, tools) -> text, as the template renders a
    conversation without a prompt for more.
    """
    tool = {
        "type": "function",
        "function": {
            "name": NAME,
            "description": "probe",
            "parameters": {
                "type": "object",
                "properties": {KEY: {"type": "string", "description": "probe"}},
                "required": [KEY],
            },
        },
    }
    asks = {"role": "user", "content": "u"}
    try:
        knows = NAME in write([asks], [tool])
        before, written = write([asks], [tool]), write([asks, PROBE], [tool])
    except Exception:  # a template refuses what it does not know by raising whatever it likes
        return HERMES
    if not knows:
        return HERMES
    written = written[len(before) :] if written.startswith(before) else written
    if f"<function={NAME}>" in written:
        return TaggedCalls()
    if (dialect := detect_dialect(NAME, before, written)) is not None:
        return dialect
    at = next((i for i in _brace_positions(written) if NAME in str(_read_object(written, i))), None)
    if at is None:
        raise DataError(
            "the chat template writes tool calls in a form that is none of those that are read back. Use a model whose "
            "template does, or a tokenizer whose chat_template knows no tools: they are then described in words"
        )
    value, end = _read_object(written, at) or ({}, at)
    listed = written[:at].rstrip().endswith("[")
    opens, closes = written[:at].rstrip().removesuffix("[").rstrip(), written[end:].lstrip().removeprefix("]").lstrip()
    arguments = next((key for key in ("arguments", "parameters") if key in value), "arguments")
    opens = opens.rpartition("\n")[2] or opens.rpartition("\n\n")[2]
    if not listed and not closes.startswith("</"):  # the object is the whole message
        return JsonCalls("", "", arguments)
    return JsonCalls(_nearest_tag(opens), _nearest_tag(closes, end=True), arguments)


def _nearest_tag(text: str, *, end: bool = False) -> str:
    """The tag nearest to the object."""
    if end:
        return text[: text.find(">") + 1] if text.startswith("</") else ""
    begins = max(text.rfind("<"), text.rfind("["))
    return text[begins:] if begins >= 0 else text


def _brace_positions(text: str) -> list[int]:
    return [i for i, c in enumerate(text) if c == "{"]


def _read_object(text: str, at: int) -> tuple[dict[str, Any], int] | None:
    try:
        value, end = json.JSONDecoder().raw_decode(text, at)
    except ValueError:
        return None
    return (value, end) if isinstance(value, dict) and value.get("name") == NAME else None
