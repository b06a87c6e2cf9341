"""Forms of calls of single families: read off templates of their kind, whatever a policy
writes, and answered where the family answers.
"""

from __future__ import annotations

import asyncio
import json
import random
import time

import pytest

from kits.chat import Engine, chat, tokenizer
from rondel.core.types import Task
from rondel.generate.calls import HERMES, JsonCalls, TaggedCalls, read_calls, read_off, text_before_calls
from rondel.generate.dialects import BracedCalls, ChannelCalls, KeyedCalls, PythonCalls, ToolCall
from rondel.generate.envs.tools import Tools

SHOWS = "{% if tools %}[tools {{ tools | tojson }}]{% endif %}{% for m in messages %}"
GLM = SHOWS + (  # the mark of the next message is what ends a turn
    "{% if m.role == 'tool' %}<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>{% else %}<|{{ m.role "
    "}}|>\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name "
    "}}{% for k, v in c.function.arguments.items() %}\n<arg_key>{{ k }}</arg_key>"
    "\n<arg_value>{{ v if v is string else v | tojson "
    "}}</arg_value>{% endfor %}\n</tool_call>{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
LFM = SHOWS + (
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}<|tool_call_start|>[{% for c in m.tool_calls %}{{ "
    "c.function.name }}("
    "{% for k, v in c.function.arguments.items() %}{{ k }}={% if v is true %}True{% elif v is none %}None{% else %}{{ v "
    "| tojson }}{% endif %}"
    "{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]<|tool_call_end|>{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA = SHOWS + (  # a tool's answer is a part of the model's own turn
    "{% if m.role == 'tool' %}<|tool_response>response:{{ m.name }}{value:<|\"|>{{ m.content }}<|\"|>}<tool_response|>"
    "{% else %}{% if m.role != 'assistant' or loop.previtem.role != 'tool' %}<|turn>{{ m.role }}\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}{{ '{' }}"
    '{% for k, v in c.function.arguments.items() %}{{ k }}:{% if v is string %}<|"|>{{ v }}<|"|>{% else %}{{ v | tojson }}{% endif %}'
    "{{ ',' if not loop.last }}{% endfor %}}<tool_call|>{% endfor %}{% if not m.tool_calls %}<turn|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|turn>assistant\n{% endif %}"
)
HARMONY = SHOWS + (
    "{% if m.tool_calls %}<|start|>assistant<|channel|>commentary to=functions.{{ m.tool_calls[0].function.name }} <|constrain|>json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% elif m.role == 'tool' %}<|start|>functions.{{ m.name }} to=assistant"
    "<|channel|>commentary<|message|>{{ m.content }}<|end|>{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>"
    "{{ m.content }}<|end|>{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
MARKS = [
    "<|observation|>", "<|user|>", "<|assistant|>", "<tool_call>", "</tool_call>", "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call>",
    "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>', "<|turn>", "<turn|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>",
    "<|constrain|>", "<|call|>",
]  # fmt: skip
WHAT = {"s": 'it\'s "x"\n<b>', "n": 3, "f": -1.5, "b": True, "l": [1, "a"], "o": {"k": "v"}}
FORMS = {
    "glm": (GLM, KeyedCalls),
    "lfm": (LFM, PythonCalls),
    "gemma": (GEMMA, BracedCalls),
    "harmony": (HARMONY, ChannelCalls),
}
ONE = {  # add(a=3) as the family writes it, with what ends the turn; and an answer
    "glm": (
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        "<|observation|>",
        "so four<|user|>",
    ),
    "lfm": ("<|tool_call_start|>[add(a=3)]<|tool_call_end|>", "<|im_end|>", "so four<|im_end|>"),
    "gemma": ("<|tool_call>call:add{a:3}<tool_call|>", "<|tool_response>", "so four<turn|>"),
    "harmony": (
        '<|channel|>analysis<|message|>to=functions.no<|end|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 3}',
        "<|call|>",
        "<|channel|>final<|message|>so four<|end|>",
    ),
}


def tok(template: str):
    made = tokenizer.__wrapped__("chatml")
    made.add_special_tokens({"additional_special_tokens": MARKS})
    made.chat_template = template
    return made


def writer(template: str):
    t = tok(template)
    return lambda messages, tools: t.apply_chat_template(messages, tools=list(tools), tokenize=False)


def asking(*calls: tuple[str, dict]) -> dict:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls],
    }


def add(a: int, b: int = 1) -> int:
    """The sum of two numbers."""
    return a + b


@pytest.mark.parametrize("name", FORMS)
def test_the_form_is_read_off_and_reads_back_what_the_template_writes(name):
    template, form = FORMS[name]
    write = writer(template)
    found = read_off(write)
    assert isinstance(found, form)
    user = [{"role": "user", "content": "u"}]
    asked = [("find", WHAT)] + ([("other", {})] if name != "harmony" else [])
    text = write([*user, asking(*asked)], ())[len(write(user, ())) :]
    expected = {
        k: v if name != "glm" or isinstance(v, list | dict) else str(v) if k != "b" else "true" for k, v in WHAT.items()
    }
    assert found.parse_calls(text) == [ToolCall(n, expected if n == "find" else {}) for n, _ in asked]
    assert (
        found.parse_calls("thinking aloud " + text) == found.parse_calls(text)
        and found.parse_calls("the answer is 7") == []
    )
    before = "hm. "
    start = found.find_call_start(before + text)
    assert (
        found.parse_calls((before + text)[start:]) == found.parse_calls(text)
        and found.parse_calls((before + text)[:start]) == []
    )
    assert found.find_call_start(before) == len(before)


@pytest.mark.parametrize("name", FORMS)
def test_an_episode_says_what_the_template_says(name):
    """Law 5 with the family's own marks: the stream is the template's rendering of the
    whole, no mark twice, no answer lost.
    """
    template, _ = FORMS[name]
    t, (call, ends, says) = tok(template), ONE[name]
    engine = Engine(*(t.encode(s, add_special_tokens=False) for s in (call + ends, says)))
    trajectory = asyncio.run(Tools([add]).run(Task("t", "tools", {"prompt": "what?"}), chat(t, engine)))
    text = t.decode(trajectory.tokens)
    opening = t.decode(engine.requests[0].tokens)
    behind = {
        "glm": "<|observation|>\n<tool_response>\n4\n</tool_response><|assistant|>\n",
        "lfm": "<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n",
        "gemma": '<|tool_response>response:add{value:<|"|>4<|"|>}<tool_response|>',
        "harmony": "<|call|><|start|>functions.add to=assistant<|channel|>commentary<|message|>4<|end|><|start|>assistant",
    }[name]
    assert text == opening + call + behind + says
    assert t.decode([k for k, m in zip(trajectory.tokens, trajectory.mask) if m]) == call + ends + says


def test_a_turn_of_glm_ends_with_the_mark_of_the_next_message():
    t = tok(GLM)
    c = chat(
        t,
        Engine(t.encode("hello<|user|>", add_special_tokens=False), t.encode("yes<|user|>", add_special_tokens=False)),
    )
    for said in ("hi", "sure?"):
        c.give([{"role": "user", "content": said}])
        asyncio.run(c.reply())
    assert t.decode(c.trajectory.tokens) == "<|user|>\nhi<|assistant|>\nhello<|user|>\nsure?<|assistant|>\nyes<|user|>"


@pytest.mark.parametrize(
    ("form", "text", "fault"),
    [
        (KeyedCalls(), "<tool_call>add", "has no end"),
        (KeyedCalls(), "<tool_call></tool_call>", "names no function"),
        (KeyedCalls(), "<tool_call>add<arg_value>1</arg_value></tool_call>", "<arg_value> stands where it cannot"),
        (KeyedCalls(), "<tool_call>add<arg_key>a<arg_key>b</tool_call>", "<arg_key> stands where it cannot"),
        (PythonCalls(), "<|tool_call_start|>[add(a=3)", "stands where ',' must"),
        (PythonCalls(), "<|tool_call_start|>[add(3)]<|tool_call_end|>", "stands where a name must"),
        (PythonCalls(), "<|tool_call_start|>[add(a=os.getcwd())]<|tool_call_end|>", "'os.getcwd' is no value"),
        (PythonCalls(), "<|tool_call_start|>[add(a='x)]<|tool_call_end|>", "a text has no end"),
        (PythonCalls(), f"<|tool_call_start|>[add(a={'[' * 9999})]<|tool_call_end|>", "nested too deeply"),
        (PythonCalls(), f"<|tool_call_start|>[add(a={'9' * 9999})]<|tool_call_end|>", "more than 300 digits"),
        (PythonCalls(), '<|tool_call_start|>[{"name": 3}]<|tool_call_end|>', '"name" and "arguments"'),
        (BracedCalls("<|tool_call>", "<tool_call|>", '<|"|>'), "<|tool_call>add{a:3}<tool_call|>", "'call:' must"),
        (BracedCalls("<|tool_call>", "<tool_call|>", '<|"|>'), '<|tool_call>call:add{a:<|"|>3}<tool_call|>', "a text has no end"),
        (BracedCalls("<|tool_call>", "<tool_call|>", '<|"|>'), "<|tool_call>call:add{a:3}", "'<tool_call|>' must"),
        (ChannelCalls(), "<|channel|>commentary to=functions.add<|message|>{3}<|call|>", "not valid JSON"),
        (ChannelCalls(), "<|channel|>commentary to=functions.add<|message|>[3]<|call|>", "not a JSON object"),
        (ChannelCalls(), f"<|channel|>commentary to=functions.add<|message|>{'[' * 99999}<|call|>", "not valid JSON"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_a_call_with_a_fault(form, text, fault):
    found = form.parse_calls(text)
    assert (len([c for c in found if c.fault]) == 1 and fault in found[-1].fault) or any(
        fault in c.fault for c in found
    ), found


def test_forms_that_templates_do_not_show_are_read_too():
    new = "<tool_call>add<arg_key>a</arg_key><arg_value>[1, 2]</arg_value><arg_key>s</arg_key><arg_value></tool_call></arg_value></tool_call>"
    assert KeyedCalls().parse_calls(new) == [ToolCall("add", {"a": [1, 2], "s": "</tool_call>"})]
    listed = '<|tool_call_start|>[{"name": "add", "arguments": {"a": 1}}, sub(s=\'\\u00e9\\n\\q\', t=("x"), n=None,)]<|tool_call_end|>'
    with_tuple = PythonCalls().parse_calls(listed)
    assert with_tuple[0].fault and "stands where a name must" in with_tuple[0].fault, "a tuple is no argument"
    assert PythonCalls().parse_calls(listed.replace('("x")', '"x"')) == [
        ToolCall("add", {"a": 1}),
        ToolCall("sub", {"s": "\u00e9\n\\q", "t": "x", "n": None}),
    ]
    function = BracedCalls("<start_function_call>", "<end_function_call>", "<escape>")
    assert function.parse_calls("<start_function_call>call:f{a:<escape>x<escape>,n:2}<end_function_call>") == [
        ToolCall("f", {"a": "x", "n": 2})
    ]
    assert ChannelCalls().parse_calls(' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>') == [
        ToolCall("add", {"a": 1})
    ]
    assert ChannelCalls().parse_calls("<|channel|>commentary<|message|>I will look.<|end|>") == []
    write = writer(SHOWS.replace("[tools", "<|tool_list_start|>[tools") + "{{ m.role }}: {{ m.content }}\n{% endfor %}")
    assert isinstance(read_off(write), PythonCalls), "an older LFM2 shows tools, and leaves calls out"


# -- forms that write every value without quotes: the schema says what it is ---------------------------

KEPT = {
    "s": ('{"a": 1}', '{"a": 1}'),
    "t": ("3", "3"),
    "n": ("3", 3),
    "x": ("1.5", 1.5),
    "b": ("True", True),
    "o": ("null", None),
    "l": ("[1, 2]", [1, 2]),
    "u": ("[1, 2]", [1, 2]),
    "w": ("three", "three"),
}
TYPES = {
    "s": {"type": "string"},
    "t": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "n": {"type": "integer"},
    "x": {"type": "number"},
    "b": {"type": "boolean"},
    "o": {"type": ["integer", "null"]},
    "l": {"type": "array"},
    "w": {"type": "integer"},
}


@pytest.mark.parametrize("form", [TaggedCalls(), KeyedCalls()], ids=lambda form: type(form).__name__)
def test_arguments_have_the_types_that_the_schema_declares(form):
    tool = {"type": "function", "function": {"name": "put", "parameters": {"properties": TYPES}}}
    tagged = "".join(f"<parameter={k}>\n{said}\n</parameter>" for k, (said, _) in KEPT.items())
    keyed = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{said}</arg_value>\n" for k, (said, _) in KEPT.items())
    text = f"<function=put>{tagged}</function>" if isinstance(form, TaggedCalls) else f"put\n{keyed}"
    (call,) = read_calls(form, f"<tool_call>{text}</tool_call>", [tool])
    assert call.arguments == {k: wanted for k, (_, wanted) in KEPT.items()} and not call.fault
    (unknown,) = read_calls(form, f"<tool_call>{text}</tool_call>", [{"function": {"name": "put", "parameters": 7}}])
    assert unknown.arguments == form.parse_calls(f"<tool_call>{text}</tool_call>")[0].arguments


def test_a_tool_is_given_a_file_that_is_json_as_text():
    """Qwen's tags say nothing of types: the policy could not write any file whose text is a list or an object."""

    async def write(path: str, content: str) -> str:
        return content

    tools = Tools([write])
    text = "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n<parameter=content>\n[1]\n</parameter>\n</function>"
    (call,) = read_calls(TaggedCalls(), text, [tool.schema for tool in tools.shared.values()])
    assert asyncio.run(tools.carry_out(call)) == "[1]"


def test_half_a_call_is_a_fault_and_not_another_call():
    """A parameter without an end was left out and its default taken; a second call that is no JSON was passed over."""
    (call,) = read_calls(TaggedCalls(), "<function=wait>\n<parameter=n>\n7\n</function>")
    assert "<parameter=n> has no end" in call.fault
    first, second = read_calls(HERMES, '<tool_call>{"name": "a", "arguments": {}}\n{"name": "b", "arg</tool_call>')
    assert first == ToolCall("a", {}) and "not valid JSON" in second.fault


ALL = [
    KeyedCalls(),
    PythonCalls(),
    BracedCalls("<|tool_call>", "<tool_call|>", '<|"|>'),
    ChannelCalls(),
    TaggedCalls(),
    JsonCalls("<tool_call>", "</tool_call>"),
]
PIECES = [
    "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call>call:",
    "<tool_call|>", '<|"|>', "<|channel|>commentary to=functions.f", "<|message|>", "<|call|>", "<|start|>", "<|end|>", "<function=f>", "<parameter=a>",
    "</parameter>", "</function>", "[", "]", "{", "}", "(", ")", ",", ":", "=", "'", '"', "\\", "f", "a", "1", "-", ".", " ", "\n", "é", "true", '{"name": "f"',
]  # fmt: skip


@pytest.mark.parametrize("form", ALL, ids=lambda form: type(form).__name__)
def test_no_text_breaks_a_reader(form):
    rng = random.Random(11)
    for _ in range(1500):
        text = "".join(rng.choices(PIECES, k=rng.randrange(40)))
        for call in form.parse_calls(text):
            assert isinstance(call.name, str) and isinstance(call.arguments, dict) and isinstance(call.fault, str)
        assert 0 <= form.find_call_start(text) <= len(text)


def _written(form, name, arguments):
    """A call as the family's template writes it; `arguments`: texts."""
    as_json = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    match form:
        case JsonCalls():
            return f"{form.opens}{'[' * (form.opens == '[TOOL_CALLS]')}{as_json}{']' * (form.opens == '[TOOL_CALLS]')}{form.closes}"
        case TaggedCalls():
            tags = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
            return f"<tool_call>\n<function={name}>\n{tags}</function>\n</tool_call>"
        case KeyedCalls():
            tags = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items())
            return f"<tool_call>{name}\n{tags}</tool_call>"
        case PythonCalls():
            pairs = ", ".join(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in arguments.items())
            return f"<|tool_call_start|>[{name}({pairs})]<|tool_call_end|>"
        case BracedCalls():
            pairs = ",".join(f"{k}:{form.quote}{v}{form.quote}" for k, v in arguments.items())
            return f"{form.opens}call:{name}{{{pairs}}}{form.closes}"
    body = json.dumps(arguments, ensure_ascii=False)
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{body}<|call|>"


MISTRAL = JsonCalls("[TOOL_CALLS]", "")
OWN_ENDS = {"TaggedCalls": ["</parameter>"], "KeyedCalls": ["</arg_value>"], "BracedCalls": ['<|"|>']}
OWN_ENDS["ChannelCalls"] = ["<|call|>", "<|message|>", "<|start|>", "<|end|>"]


@pytest.mark.parametrize("form", [*ALL, MISTRAL, JsonCalls("", "")], ids=lambda form: type(form).__name__)
def test_a_mark_within_an_argument_belongs_to_the_argument(form):
    """What a format can carry reads back: </think>, or the mark of a call, in an argument cut the call in two."""
    rng = random.Random(5)
    carried = [
        one
        for one in [*PIECES, "<think>", "</think>", "[TOOL_CALLS]"]
        if one not in OWN_ENDS.get(type(form).__name__, [])
    ]
    tools = [{"name": "f", "parameters": {"properties": {k: {"type": "string"} for k in "ab"}}}]
    for _ in range(400):
        made = [
            {k: "".join(rng.choices(carried, k=rng.randrange(9))) for k in "ab"} for _ in range(rng.choice((1, 1, 2)))
        ]
        if form == JsonCalls("", ""):
            made = made[:1]
        said = "".join(_written(form, "f", one) for one in made)
        thought = rng.choice(["", "so.</think>\n", "<think>" + _written(form, "f", {"a": "no"}) + "</think>\n\n"])
        if isinstance(form, ChannelCalls):  # its thoughts have a channel
            thought = ""
        if form == JsonCalls("", "") and thought.startswith("<think>"):
            thought = "<think>no</think>"
        assert read_calls(form, thought + said, tools) == [ToolCall("f", one) for one in made], thought + said
        assert text_before_calls(form, thought + said) == thought.rstrip()


@pytest.mark.slow
@pytest.mark.parametrize("form", ALL, ids=lambda form: type(form).__name__)
def test_time_grows_with_the_length_alone(form):
    """Each piece five hundred times against eight thousand times, by processor time, alone
    and behind an open call: no square of it.
    """

    def seconds(text: str) -> float:
        began = time.process_time()
        form.parse_calls(text)
        return time.process_time() - began

    opens = [
        "",
        "<tool_call>",
        "<|tool_call_start|>[f(a=",
        "<|tool_call>call:f{a:",
        "<|channel|>x to=functions.f<|message|>",
        "<function=f>",
    ]
    for head in opens:
        for piece in [
            *PIECES,
            "<parameter=",
            "<tool_call>f",
            "<|tool_call_start|>[f(a='",
            '<|tool_call>call:f{a:<|"|>',
            '{"name": "f", "arguments": {}};',
        ]:
            few, many = head + piece * 500, head + piece * 8_000
            assert any(  # a collection of garbage may fall into one
                seconds(many) < 0.05 + 200 * seconds(few) for _ in range(3)
            ), (head, piece)
