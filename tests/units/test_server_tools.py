"""What a streamed chat shows while its answer may still become a call of a tool."""

from types import SimpleNamespace

import pytest

pytest.importorskip("starlette")

from rondel.generate.calls import HERMES, JsonCalls, TaggedCalls
from rondel.generate.dialects import PythonCalls
from rondel.generate.engine.server.answers import AnswerDelta, SampleAnswer
from rondel.generate.engine.server.chat_fields import OfferedTools, read_messages
from rondel.generate.engine.server.fields import RequestFields
from rondel.generate.engine.server.tool_calls import CallReader

SPECIAL = {"<|tool_call_start|>": 1, "<|tool_call_end|>": 2, "<eos>": 3}


class Letters:
    """A token a character, three that are control tokens."""

    all_special_ids = (1, 2, 3)

    def encode(self, text):
        out = []
        while text:
            mark = next((m for m in SPECIAL if text.startswith(m)), text[0])
            out.append(SPECIAL[mark] if mark in SPECIAL else ord(mark) + 10)
            text = text[len(mark) :]
        return out

    def decode(self, tokens, skip_special_tokens=False):
        names = {v: k for k, v in SPECIAL.items()}
        return "".join(("" if skip_special_tokens else names[t]) if t in names else chr(t - 10) for t in tokens)


def streamed(form, text, *, parallel=True):
    """-> what is shown piece by piece, then content and calls of the whole answer."""
    letters = Letters()
    reader = CallReader(form, letters, OfferedTools([], parallel=parallel))
    tokens = letters.encode(text + "<eos>")
    a, shown = SampleAnswer(0, [5]), []
    for n in range(1, len(tokens) + 1):
        a.tokens, a.text = tokens[:n], letters.decode(tokens[:n], skip_special_tokens=True)
        shown.append(reader.next_text(AnswerDelta(a, "", n - 1, n)))
    a.completion = SimpleNamespace(finish_reason="stop")
    shown.append(reader.next_text(AnswerDelta(a, "", n, n, ends=True)))
    said, calls = reader.split(a)
    assert "".join(shown) == said, "a stream says what the whole answer says"
    return shown, said, [(call.name, call.arguments) for call in calls]


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("form", "text", "said", "calls"),
    [
        (HERMES, f"Let me see.\n{CALL}", "Let me see.", [("add", {"a": 1})]),
        (HERMES, f"<think>\na {CALL}?\n</think>\n\nYes.\n{CALL}\n{CALL}", f"<think>\na {CALL}?\n</think>\n\nYes.", [("add", {"a": 1})] * 2),
        (HERMES, "1 < 2 and <tool", "1 < 2 and <tool", []),
        (HERMES, "<tool_call>\n{broken\n</tool_call>", "<tool_call>\n{broken\n</tool_call>", []),
        (JsonCalls("", "", "parameters"), '{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
        (JsonCalls("", "", "parameters"), "No tool helps.", "No tool helps.", []),
        (TaggedCalls(), "So: <function=add><parameter=a>1</parameter></function>", "So:", [("add", {"a": "1"})]),
        (PythonCalls(), "Now.<|tool_call_start|>[add(a=1)]<|tool_call_end|>", "Now.", [("add", {"a": 1})]),
    ],
)  # fmt: skip
def test_a_stream_shows_text_at_once_and_never_a_part_of_a_call(form, text, said, calls):
    shown, got, called = streamed(form, text)
    assert (got, called) == (said, calls)
    assert not any("<tool_call" in piece for piece in shown[:-1])
    if form is HERMES and said.startswith("Let"):
        assert "".join(shown[:10]).startswith("Let me"), "it does not wait for the end"


def test_one_call_where_one_was_allowed():
    assert len(streamed(HERMES, CALL + "\n" + CALL, parallel=False)[2]) == 1


def test_half_a_character_in_a_call_is_text_that_can_be_sent():
    _, _, [(name, arguments)] = streamed(
        HERMES, '<tool_call>{"name": "add", "arguments": {"a": "\\ud83d"}}</tool_call>'
    )
    assert name == "add" and arguments["a"].encode("utf-8")


def test_calls_that_are_sent_back_have_ids_that_every_template_takes():
    """Mistral's refuses an id that is not nine letters or digits; arguments are objects, as templates write them."""
    call = {"id": "call_0123456789abcdef_0_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    said = [
        {"role": "user", "content": "1 + 2?", "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "3"},
    ]
    asked, called, answered = read_messages(RequestFields({"messages": said}), said)
    assert asked == said[0]
    assert called["tool_calls"][0]["id"] == answered["tool_call_id"] == "call00001"
    assert called["tool_calls"][0]["function"]["arguments"] == {"a": 1} and answered["name"] == "add"
