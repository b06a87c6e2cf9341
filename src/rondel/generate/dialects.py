"""Calls that are not JSON in tags: the forms of single families, as their own chat templates write them.

    GLM 4.5, 4.6    <tool_call>add⏎<arg_key>a</arg_key>⏎<arg_value>1</arg_value>⏎</tool_call>
    LFM2            <|tool_call_start|>[add(a=1), add(a=2)]<|tool_call_end|>
    Gemma 4         <|tool_call>call:add{a:1,s:<|"|>x<|"|>}<tool_call|>       FunctionGemma:
                    <start_function_call>, <escape>, ...
    gpt-oss         <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>

Each reads what a policy wrote in one pass, whatever it is: a call that is begun and cannot
be read is a call with a fault, and reading goes on behind the place that could not be read, never before it.

ends   the mark behind which a turn with a call is the template's again: tools are answered
       there, and not behind an end of turn; "" where a turn with a call ends as any other
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

DEEPEST = 32  # lists and objects within each other
NESTED = "its arguments are nested too deeply"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`fault` says why it cannot be carried out; it is what the policy then reads. `texts`: its arguments as they
    stand there, in forms that do not tell a text from a number.
    """

    name: str
    arguments: dict[str, Any]
    fault: str = ""
    texts: dict[str, str] = field(default_factory=dict, compare=False, repr=False)


# -- values without quotes --------------------------------------------------------------------------

WORDS = {"true": True, "false": False, "null": None, "none": None}  # Qwen's template writes True and None
KINDS: dict[type, set[str]] = {
    bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, str: set(), list: {"array"}, dict: {"object"},
    type(None): {"null"},
}  # fmt: skip


def parse_value(text: str, kinds: set[str] | None = None) -> Any:
    """What an argument without quotes says. `kinds`: the JSON types that it may have; where nobody says, lists and
    objects are written as JSON, and everything else is a text.

    parse_value("3", {"integer"}) -> 3 · parse_value('{"a": 1}', {"string"}) -> '{"a": 1}'
    """
    if kinds == {"string"}:
        return text
    word = text.strip().lower()
    try:
        value = WORDS[word] if kinds and word in WORDS else json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not kinds or (not KINDS[type(value)] & kinds and "string" not in kinds):
        return value if isinstance(value, list | dict) else text
    finite = not isinstance(value, float) or math.isfinite(value)
    return value if KINDS[type(value)] & kinds and finite else text


def untyped_call(name: str, texts: dict[str, str]) -> ToolCall:
    return ToolCall(name, {key: parse_value(text) for key, text in texts.items()}, texts=texts)


def type_arguments(call: ToolCall, tools: Sequence[dict[str, Any]]) -> ToolCall:
    """Its arguments in the types that the tool of its name declares: only the schema says that 3 is no text, and that
    the text of a file which is JSON is one.
    """
    if not call.texts:
        return call
    told = [tool.get("function", tool) for tool in tools]
    parameters = next((one.get("parameters") for one in told if one.get("name") == call.name), None)
    known = parameters.get("properties") if isinstance(parameters, dict) else None
    known = known if isinstance(known, dict) else {}
    return replace(call, arguments={k: parse_value(text, _kinds(known.get(k))) for k, text in call.texts.items()})


def _kinds(schema: Any) -> set[str]:
    """The JSON types that a schema allows; none where it does not say."""
    if not isinstance(schema, dict):
        return set()
    kind = schema.get("type")
    found = {one for one in (kind if isinstance(kind, list) else [kind]) if isinstance(one, str)}
    for name in ("anyOf", "oneOf"):
        for one in schema[name] if isinstance(schema.get(name), list) else []:
            if not (more := _kinds(one)):
                return set()
            found |= more
    return found


class UnreadValue(Exception):
    """What stands where something else must."""


# -- GLM -------------------------------------------------------------------------------------------


class KeyedCalls:
    """A name, and a tag for each key and each value. A value may hold any tag but its own end."""

    told, ends = False, "</tool_call>"
    TAG = re.compile(r"</?(?:tool_call|arg_key|arg_value)>")

    def parse_calls(self, text: str) -> list[ToolCall]:
        """The calls in what the policy wrote, in order."""
        return [call for _, _, call in self._find_calls(text)]

    def find_call_spans(self, text: str) -> list[tuple[int, int]]:
        """From where to where the calls stand that can be read."""
        return [(begin, end) for begin, end, call in self._find_calls(text) if not call.fault]

    def _find_calls(self, text: str) -> list[tuple[int, int, ToolCall]]:
        calls: list[tuple[int, int, ToolCall]] = []
        inside, name, key, begins, opened = "", "", "", 0, 0
        texts: dict[str, str] = {}
        for tag in self.TAG.finditer(text):
            kind, piece = tag.group(), text[begins : tag.start()]
            if inside == "value" and kind != "</arg_value>":
                continue
            match inside, kind:
                case "", "<tool_call>":
                    inside, texts, key, opened = "name", {}, "", tag.start()
                case "name", "<arg_key>" | "</tool_call>":
                    name = piece.strip()
                    inside = "key" if kind == "<arg_key>" else ""
                case "key", "</arg_key>":
                    key, inside = piece.strip(), "keyed"
                case "keyed", "<arg_value>":
                    inside = "value"
                case "value", "</arg_value>":
                    texts[key], inside = piece, "call"
                case "call", "<arg_key>":
                    inside = "key"
                case "call", "</tool_call>":
                    inside = ""
                case "", _:
                    continue
                case _:
                    said = name if inside != "name" else piece.strip()
                    fault = f"in the call {kind} stands where it cannot"
                    calls.append((opened, tag.start(), ToolCall(said, {}, fault)))
                    inside = "name" if kind == "<tool_call>" else ""
                    begins, texts, opened = tag.end(), {}, tag.start()
                    continue
            if kind == "</tool_call>":
                call = untyped_call(name, texts) if name else ToolCall("", {}, "the call names no function")
                calls.append((opened, tag.end(), call))
            begins = tag.end()
        if inside:
            said = name if inside != "name" else ""
            calls.append((opened, len(text), ToolCall(said, {}, "the call has no end: </tool_call>")))
        return calls

    def find_call_start(self, text: str) -> int:
        """Where the first call begins; the text's length where there is none."""
        return _find_mark(text, "<tool_call>")


# -- values as Python and Gemma write them ------------------------------------------------------------


@dataclass
class ValueScanner:
    """Values in a text, from `at` on: texts in quotes or between two `quote` marks, numbers, words, lists, objects."""

    text: str
    at: int = 0
    quote: str = ""
    STRING: ClassVar = re.compile(r"""'((?:[^'\\]|\\.)*+)'|"((?:[^"\\]|\\.)*+)\"""", re.DOTALL)
    NUMBER: ClassVar = re.compile(r"[-+]?\d++(?:\.\d*+)?(?:[eE][-+]?\d++)?")
    WORD: ClassVar = re.compile(r"[A-Za-z_][\w.\-]*+")
    ESCAPE: ClassVar = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
    SPACE: ClassVar = re.compile(r"\s*+")
    WORDS: ClassVar[dict[str, Any]] = {"true": True, "false": False, "null": None, "none": None}

    def skip_spaces(self) -> None:
        self.at = self.SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]  # it matches nothing, too

    def take_mark(self, mark: str) -> bool:
        """Behind the mark, if it is next."""
        self.skip_spaces()
        if not (there := self.text.startswith(mark, self.at)):
            return False
        self.at += len(mark)
        return there

    def expect_mark(self, mark: str) -> None:
        if not self.take_mark(mark):
            raise UnreadValue(f"{self.text[self.at : self.at + 20]!r} stands where {mark!r} must")

    def read_word(self) -> str:
        self.skip_spaces()
        if (found := self.WORD.match(self.text, self.at)) is None:
            raise UnreadValue(f"{self.text[self.at : self.at + 20]!r} stands where a name must")
        self.at = found.end()
        return found.group()

    def read_value(self, depth: int = 0) -> Any:
        if depth > DEEPEST:
            raise UnreadValue(NESTED)
        self.skip_spaces()
        if self.quote and self.take_mark(self.quote):
            return self._read_until(self.quote)
        if (found := self.STRING.match(self.text, self.at)) is not None:
            self.at = found.end()
            return self.ESCAPE.sub(
                _unescape_character, found.group(1) if found.group(1) is not None else found.group(2)
            )
        if self.text.startswith(("'", '"'), self.at):
            self.at = len(self.text)
            raise UnreadValue("a text has no end")
        if self.take_mark("["):
            return self.read_list("]", lambda: self.read_value(depth + 1))
        if self.take_mark("{"):
            return dict(self.read_list("}", lambda: self.read_pair(":", depth + 1)))
        if (found := self.NUMBER.match(self.text, self.at)) is not None:
            self.at = found.end()
            return _parse_number(found.group())
        word = self.read_word()
        if word.lower() not in self.WORDS:
            raise UnreadValue(f"{word[:20]!r} is no value; a text stands in quotes")
        return self.WORDS[word.lower()]

    def read_pair(self, between: str, depth: int = 0) -> tuple[str, Any]:
        """A key, bare or as a text, and its value."""
        self.skip_spaces()
        quoted = self.text.startswith(("'", '"', *([self.quote] if self.quote else [])), self.at)
        key = self.read_value(depth) if quoted else self.read_word()
        self.expect_mark(between)
        return key, self.read_value(depth)

    def read_list(self, end: str, one: Any) -> list[Any]:
        """`one` after the other, with commas between, up to the end mark."""
        found: list[Any] = []
        while not self.take_mark(end):
            if found:
                self.expect_mark(",")
                if self.take_mark(end):
                    break
            found.append(one())
        return found

    def _read_until(self, mark: str) -> str:
        end = self.text.find(mark, self.at)
        if end < 0:
            self.at = len(self.text)
            raise UnreadValue("a text has no end")
        piece, self.at = self.text[self.at : end], end + len(mark)
        return piece


def _parse_number(text: str) -> int | float:
    if len(text) > 300:  # a thousand digits are no argument, and their reading is not linear
        raise UnreadValue("a number of more than 300 digits")
    return float(text) if any(c in text for c in ".eE") else int(text)


def _unescape_character(escape: re.Match[str]) -> str:
    code = escape.group(1)
    if len(code) > 1:
        return chr(int(code[1:], 16))
    return {"n": "\n", "t": "\t", "r": "\r", "\n": ""}.get(code, code if code in "'\"\\/" else f"\\{code}")


@dataclass(frozen=True)
class ScannedCalls:
    """Between two marks, read value by value."""

    opens: str
    closes: str
    quote: str = ""
    told: ClassVar = False

    def parse_calls(self, text: str) -> list[ToolCall]:
        """The calls in what the policy wrote, in order."""
        return [call for _, _, calls in self._find_calls(text) for call in calls]

    def find_call_spans(self, text: str) -> list[tuple[int, int]]:
        """From where to where the calls stand that can be read."""
        found = self._find_calls(text)
        return [(begin, end) for begin, end, calls in found if not any(call.fault for call in calls)]

    def _find_calls(self, text: str) -> Iterator[tuple[int, int, list[ToolCall]]]:
        scan = ValueScanner(text, quote=self.quote)
        while (begin := text.find(self.opens, scan.at)) >= 0:
            scan.at, calls = begin + len(self.opens), []
            try:
                calls = self._parse_calls(scan)
                scan.expect_mark(self.closes)
            except UnreadValue as error:
                calls = [*calls, ToolCall("", {}, f"the call cannot be read: {error}")]
            yield begin, scan.at, calls

    def find_call_start(self, text: str) -> int:
        """Where the first call begins; the text's length where there is none."""
        return _find_mark(text, self.opens)

    def _parse_calls(self, scan: ValueScanner) -> list[ToolCall]:
        raise NotImplementedError


class PythonCalls(ScannedCalls):
    """A list of calls as Python writes them, or of objects with name and arguments."""

    ends = ""

    def __init__(self) -> None:
        super().__init__("<|tool_call_start|>", "<|tool_call_end|>")

    def _parse_calls(self, scan: ValueScanner) -> list[ToolCall]:
        return scan.read_list("]", lambda: self._read_call(scan)) if scan.take_mark("[") else [self._read_call(scan)]

    def _read_call(self, scan: ValueScanner) -> ToolCall:
        scan.skip_spaces()
        if scan.text.startswith("{", scan.at):
            value = scan.read_value()
            if not isinstance(value.get("name"), str) or not isinstance(value.get("arguments", {}), dict):
                raise UnreadValue('a call is an object with "name" and "arguments"')
            return ToolCall(value["name"], value.get("arguments", {}))
        name = scan.read_word()
        scan.expect_mark("(")
        return ToolCall(name, dict(scan.read_list(")", lambda: scan.read_pair("="))))


class BracedCalls(ScannedCalls):
    """`call:` and the name, then an object whose keys are bare and whose texts stand between two marks."""

    @property
    def ends(self) -> str:
        return self.closes

    def _parse_calls(self, scan: ValueScanner) -> list[ToolCall]:
        scan.expect_mark("call:")
        name = scan.read_word()
        scan.expect_mark("{")
        return [ToolCall(name, dict(scan.read_list("}", lambda: scan.read_pair(":"))))]


# -- gpt-oss ---------------------------------------------------------------------------------------


class ChannelCalls:
    """Harmony: each message has a header, and one that is `to=functions.NAME` is a call whose
    body is JSON. Other channels think and speak.
    """

    told, ends = False, "<|call|>"
    MARK = re.compile(r"<\|(?:start|message|end|call|return)\|>")
    TO = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")

    def parse_calls(self, text: str) -> list[ToolCall]:
        """The calls in what the policy wrote, in order."""
        return [call for _, call in self._find_calls(text)]

    def find_call_spans(self, text: str) -> list[tuple[int, int]]:
        """The whole text: channels tell thoughts from calls, and no mark within a message does."""
        return [(0, len(text))]

    def find_call_start(self, text: str) -> int:
        """Where the message of the first call begins; the text's length where there is none."""
        return next((at for at, _ in self._find_calls(text)), len(text))

    def _find_calls(self, text: str) -> list[tuple[int, ToolCall]]:
        found: list[tuple[int, ToolCall]] = []
        begins, to, body = 0, "", -1  # of the message, whom it is for, of its body
        for mark in [*self.MARK.finditer(text), None]:
            kind, at, end = ("", len(text), len(text)) if mark is None else (mark.group(), mark.start(), mark.end())
            if kind == "<|message|>" and body < 0:
                told = self.TO.search(text, begins, at)
                to, body = told.group(1) if told else "", end
            elif kind != "<|message|>":
                if body >= 0 and to:
                    found.append((begins, self._parse_call(to, text[body:at])))
                begins, to, body = at if kind == "<|start|>" else end, "", -1
        return found

    def _parse_call(self, name: str, body: str) -> ToolCall:
        try:
            arguments = json.loads(body) if body.strip() else {}
        except (ValueError, RecursionError) as error:
            return ToolCall(name, {}, f"the call's body is not valid JSON: {error}")
        return (
            ToolCall(name, arguments)
            if isinstance(arguments, dict)
            else ToolCall(name, {}, "the call's body is not a JSON object")
        )


def _find_mark(text: str, mark: str) -> int:
    at = text.find(mark)
    return len(text) if at < 0 else at


Dialect = KeyedCalls | PythonCalls | BracedCalls | ChannelCalls


def detect_dialect(name: str, before: str, written: str) -> Dialect | None:
    """Whose form a template wrote a call of `name` in, behind what it says `before`; None if it is none of these."""
    if "<arg_key>" in written and "<tool_call>" in written:
        return KeyedCalls()
    # a template that leaves calls out shows tools
    if "<|tool_call_start|>" in written or "<|tool_list_start|>" in before:
        return PythonCalls()
    if f"<|tool_call>call:{name}{{" in written:
        return BracedCalls("<|tool_call>", "<tool_call|>", '<|"|>')
    if f"<start_function_call>call:{name}{{" in written:
        return BracedCalls("<start_function_call>", "<end_function_call>", "<escape>")
    if f"to=functions.{name}" in written and "<|call|>" in written:
        return ChannelCalls()
    return None
