"""Tools: what is offered, how calls are read, what comes back, and whose fault what is."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import traceback
from pathlib import Path

import pytest

from kits.chat import Engine, chat, tokenizer
from kits.reward_models import saved
from rondel.core.errors import ConfigError, EnvError
from rondel.core.sandbox_types import BoxFileError
from rondel.core.types import Score, Task, Trajectory
from rondel.generate.calls import HERMES, JsonCalls, TaggedCalls, read_off
from rondel.generate.envs import repl
from rondel.generate.envs.toolbox import calculator
from rondel.generate.envs.tools import Tool, Tools
from rondel.score import build_reward
from rondel.score.answer_text import asked_of, turns_of
from rondel.score.killable_process import without_arrays
from rondel.score.process import steps_of

TASK = Task("t", "tools", {"prompt": "what is three plus four?"})
QWEN = (  # tools in the system message, calls as tagged JSON, results from the user
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content "
    "}}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}'
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    QWEN.replace('\n<tool_call>\n{"name"', '{"name"')
    .replace('"arguments": {{', '"parameters": {{')
    .replace("}\n</tool_call>", "}")
)
MISTRAL = QWEN.replace("\n<tool_call>\n", "[TOOL_CALLS] [").replace("}\n</tool_call>", "}]")
TAGGED = QWEN.replace(
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}',
    "<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v "
    "}}\n</parameter>\n{% endfor %}</function>",
)


def tok(template: str):
    made = tokenizer.__wrapped__("chatml")
    made.chat_template = template
    return made


def add(a: int, b: int = 1) -> int:
    """The sum of two numbers."""
    return a + b


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def play(*says: str, tools=(add,), template: str = QWEN, max_context: int = 4096, **how):
    """An episode whose policy says these turns. -> trajectory, its text, and what each request asked."""
    t = tok(template)
    engine = Engine(*([*t.encode(s, add_special_tokens=False), t.eos_token_id] for s in says))
    trajectory = asyncio.run(Tools(tools, **how).run(TASK, chat(t, engine, max_context=max_context)))
    return trajectory, t.decode(trajectory.tokens), [t.decode(r.tokens) for r in engine.requests]


# -- formats ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (QWEN, JsonCalls("<tool_call>", "</tool_call>")),
        (LLAMA, JsonCalls("", "", "parameters")),
        (MISTRAL, JsonCalls("[TOOL_CALLS]", "")),
        (TAGGED, TaggedCalls),
    ],
    ids=["qwen", "llama", "mistral", "tagged"],
)
def test_the_format_is_read_off_the_template_and_reads_back_what_it_writes(template, form):
    t = tok(template)

    def write(messages, tools):
        return t.apply_chat_template(messages, tools=list(tools), tokenize=False)

    found = read_off(write)
    assert found == form or isinstance(found, type(form) if not isinstance(form, type) else form)
    arguments = {"city": "a\nb", "near": "{x}"}
    asked = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "find", "arguments": arguments}}],
    }
    before = write([{"role": "user", "content": "u"}], ())
    (one,) = found.parse_calls(
        write([{"role": "user", "content": "u"}, asked], ())[len(before) :].replace("<|im_start|>assistant\n", "")
    )
    assert (one.name, one.arguments, one.fault) == ("find", arguments, "")


def test_a_template_without_tools_is_told_in_words():
    t = tok(tokenizer("chatml").chat_template)
    assert (
        read_off(lambda messages, tools: t.apply_chat_template(messages, tools=list(tools), tokenize=False)) is HERMES
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<tool_call>{'name': 1}</tool_call>", "not valid JSON"),
        ("<tool_call></tool_call>", "empty"),
        ('<tool_call>{"arguments": {}}</tool_call>', '"name"'),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "not a JSON object"),
        ('<tool_call>{"name": "add", "arguments": "{"}</tool_call>', "not a JSON object"),
        ("<tool_call>" + "[" * 100_000, "not valid JSON"),
    ],
)
def test_what_cannot_be_read_is_a_call_with_a_fault(text, said):
    (one,) = HERMES.parse_calls(text)
    assert said in one.fault


def test_a_call_that_is_only_thought_of_is_not_made():
    _, _, asked = play("<think>perhaps " + call("add", a=9) + "</think>" + call("add", a=3), "four.")
    assert "\n4\n" in asked[1] and "\n10\n" not in asked[1]


def test_several_calls_and_none():
    assert [c.arguments for c in HERMES.parse_calls(call("f", x=1) + " and " + call("f", x=2))] == [{"x": 1}, {"x": 2}]
    assert HERMES.parse_calls("the answer is 7") == []
    assert [
        c.name for c in JsonCalls("", "").parse_calls('{"name": "a", "arguments": {}}; {"name": "b", "arguments": {}}')
    ] == ["a", "b"]
    assert JsonCalls("", "").parse_calls("{7}") == []


# -- the environment -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "template",
    [QWEN, tokenizer("chatml").chat_template, tokenizer("alternating").chat_template],
    ids=["qwen", "told", "no system"],
)
def test_an_episode_with_a_call(template):
    trajectory, text, asked = play("look. " + call("add", a=3, b=4), "the answer is 7.", template=template)
    assert len(asked) == 2 and "<tool_response>\n7\n</tool_response>" in asked[1] and asked[1].startswith(asked[0])
    assert text.count("The sum of two numbers.") == 1 and '"integer"' in text, "the schema, once"
    mine = [t for t, m in zip(trajectory.tokens, trajectory.mask) if m]
    assert (
        "tool_response" not in tok(template).decode(mine) and trajectory.mask[-1] and trajectory.finish_reason == "stop"
    )
    assert trajectory.timings["tools"] >= 0


def shown_to(kind: str, folder: Path, trajectory: Trajectory) -> str:
    """What a reward of this kind reads of an episode: the body that it sends, or the text that its model gets."""
    address = {"url": "http://127.0.0.1:9/v1"}
    if kind == "judge":
        judge = build_reward({"kind": "judge", **address, "model": "j", "rubric": "1 if the sum was computed"})
        return str(judge.build_request(trajectory, TASK)["messages"][0]["content"])
    if kind == "remote":
        remote, sent = build_reward({"kind": "remote", **address}), []

        async def post(item):
            sent.append(item)
            return 1.0

        remote.post = post
        assert asyncio.run(remote(trajectory, TASK)) == Score(1.0)
        return "\n".join(f"{m['role']}: {m['content']}" for m in sent[0]["messages"])
    if kind == "groupwise":
        return "\n".join(f"{turn.role}: {turn.text}" for turn in without_arrays([trajectory])[0].conversation)
    saved(folder, what={"model": "SequenceClassification", "process": "TokenClassification"}[kind])
    template = {"template": "{question}\n{answer}"} if kind == "model" else {"separator": "\n\n"}
    reward = build_reward({"kind": kind, "path": str(folder), **template})
    asked, turns = asked_of(trajectory, TASK), turns_of(trajectory)
    if kind == "model":
        return str(reward.tokenizer.decode(reward.encode_conversation(asked, turns)))
    of = [steps_of(turn.text, "\n\n") if turn.written else [] for turn in turns]
    return str(reward.model.tokenizer.decode(reward.encode_steps(asked, turns, of)[0]))


@pytest.mark.parametrize("kind", ["judge", "remote", "model", "process", "groupwise"])
def test_a_reward_that_reads_a_conversation_sees_calls_and_what_tools_said(kind, tmp_path):
    trajectory, *_ = play("look. " + call("add", a=3, b=4), call("add", a="x"), "the answer is 7.")
    shown = shown_to(kind, tmp_path, trajectory)
    result, fault = (turn.text for turn in trajectory.conversation if turn.role == "tool")
    assert result == "7" and "a valid integer" in fault
    order = [
        "what is three",
        '{"name": "add", "arguments": {"a": 3, "b": 4}}',
        "7",
        '{"a": "x"}',
        fault,
        "the answer is 7.",
    ]
    at = 0
    for text in order:
        assert text in shown[at:], f"{text!r} is not where it belongs in {shown!r}"
        at = shown.index(text, at) + len(text)


@pytest.mark.parametrize(
    ("says", "reads"),
    [
        (call("sub", a=1), "there is no tool 'sub'; there are: add"),
        (call("add", a="many"), "add: a: Input should be a valid integer"),
        (call("add"), "add: a: Field required"),
        (call("add", a=1, c=2), "add: c: Extra inputs are not permitted"),
        ("<tool_call>{</tool_call>", "not valid JSON"),
    ],
)
def test_what_the_policy_gets_wrong_it_reads(says, reads):
    _, _, asked = play(says, "seven.")
    assert "error: " in asked[1] and reads in asked[1]


def test_a_tool_that_raises_is_read_and_one_that_hangs_or_loses_its_line_is_the_worlds_fault():
    def divide(a: int, b: int) -> float:
        return a / b

    def cut(a: int) -> int:
        raise ConnectionError("gone")

    def fill() -> None:
        raise BoxFileError("cannot write 'a' in the box: a: No space left on device")

    async def hang(a: int) -> int:
        await asyncio.sleep(60)
        return a

    assert "error: cannot write 'a' in the box" in play(call("fill"), "seven.", tools=[fill])[2][1], (
        "the box is the policy's own"
    )
    assert (
        "error: ZeroDivisionError: division by zero" in play(call("divide", a=1, b=0), "seven.", tools=[divide])[2][1]
    )
    with pytest.raises(EnvError, match="tool cut: ConnectionError: gone"):
        play(call("cut", a=1), tools=[cut])

    def stand() -> None:
        assert threading.current_thread().daemon, "one that hangs must not keep the process"
        threading.Event().wait(60)

    with pytest.raises(EnvError, match=r"tool hang did not answer within 0.05 s \(task.env.timeout\)"):
        play(call("hang", a=1), tools=[hang], timeout=0.05)
    with pytest.raises(EnvError, match="tool stand did not answer"):
        play(call("stand"), tools=[stand], timeout=0.05)


class Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.slow
def test_whatever_a_policy_makes_a_tool_do_it_reads_and_no_run_ends():
    """Its arguments choose the path, the size and the end: otherwise it could have its episode left out of training."""

    def read(path: str) -> str:
        return open(path).read()

    def leave(code: int) -> None:
        raise SystemExit(code)

    async def leave_later(code: int) -> None:
        raise SystemExit(code)

    def interrupt() -> None:
        raise KeyboardInterrupt

    def speechless() -> None:
        raise Speechless

    def made(what: str) -> object:
        deep: list = []
        for _ in range(20_000):
            deep = [deep]
        round_: list = []
        round_.append(round_)
        return {"deep": deep, "round": round_, "keys": {(1, 2): 3}, "dumb": Dumb()}[what]

    class Dumb:
        def __str__(self) -> str:
            raise ValueError("no words")

    tools = [read, leave, leave_later, interrupt, speechless, made]
    for says, reads in [
        *(
            (call("read", path=path), kind)
            for path, kind in [
                ("/nowhere", "FileNotFoundError"), ("/", "IsADirectoryError"), ("/dev/null/x", "NotADirectoryError"),
                ("a" * 300, "File name too long"), ("a\0b", "null byte"),
            ]
        ),
        (call("leave", code=0), "SystemExit: 0"), (call("leave_later", code=3), "SystemExit: 3"), (call("interrupt"), "KeyboardInterrupt"),
        (call("speechless"), "Speechless, whose text cannot be read"), (call("made", what="deep"), "RecursionError"),
        (call("made", what="round"), "Circular reference"), (call("made", what="keys"), "TypeError: keys must be"),
        (call("made", what="dumb"), "no words"), (call("made", what="x"), "KeyError"),
    ]:  # fmt: skip
        _, _, asked = play(says, "seven.", tools=tools, max_context=8192)
        assert "<tool_response>\nerror: " in asked[1] and reads in asked[1].rpartition("<tool_response>")[2], says


def test_calls_of_one_reply_run_side_by_side():
    together = threading.Barrier(3, timeout=10)

    def meet(n: int) -> int:
        together.wait()
        return n

    _, _, asked = play("".join(call("meet", n=n) for n in range(3)), "seven.", tools=[meet])
    assert [f"\n{n}\n" in asked[1] for n in range(3)] == [True] * 3


def test_turns_end_an_episode_and_its_last_token_is_the_policys():
    trajectory, _, asked = play(*[call("add", a=n) for n in range(3)], turns=3)
    assert len(asked) == 3 and trajectory.finish_reason == "length" and trajectory.mask[-1]


def test_a_result_that_does_not_fit_ends_the_episode():
    def much() -> str:
        return "seven. " * 500

    trajectory, _, asked = play(call("much"), "seven.", tools=[much], max_context=600)
    assert len(asked) == 1 and trajectory.finish_reason == "length" and trajectory.mask[-1]


def test_a_class_is_made_for_every_episode_and_closed_whatever_happens():
    lives = []

    class Notes:
        def __init__(self, task):
            self.kept, self.task = [], task
            lives.append(self)

        def write(self, text: str) -> str:
            "Keep a text."
            self.kept.append(text)
            return f"{len(self.kept)} kept"

        def lose(self) -> None:
            raise OSError("disk")

        def close(self) -> None:
            lives.remove(self)

    _, _, asked = play(call("write", text="x"), call("write", text="y"), "seven.", tools=[Notes])
    assert "1 kept" in asked[1] and "2 kept" in asked[2] and not lives
    with pytest.raises(EnvError):
        play(call("lose"), tools=[Notes])
    assert not lives


def test_what_cannot_be_a_tool_is_refused_at_the_start():
    with pytest.raises(ConfigError, match="the policy calls by name"):
        Tools([lambda *args: 1])
    with pytest.raises(ConfigError, match="neither a function nor an object"):
        Tools([object()])
    with pytest.raises(ConfigError, match="two tools are called 'add'"):
        Tools([add, add])


def test_the_schema_is_openais():
    schema = Tool(add).schema
    assert schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "The sum of two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 1}},
                "required": ["a"],
            },
        },
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("(3 + 4) * 12", "84"),
        ("2**10", "1024"),
        ("1/3", "0.333333333333"),
        ("7 // 2 % 2", "1"),
        ("-3 × 2", "-6"),
        ("0.1+0.2", "0.3"),
    ],
)
def test_the_calculator(text, value):
    assert calculator(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "9**9**9",
        "10**1000000",
        "a+b",
        "(" * 500,
        "-" * 5000 + "1",
        "1" * 2000,
        "True",
        "'a'*9",
        "1 if 1 else 2",
        "",
    ],
)
def test_the_calculator_refuses_what_is_no_arithmetic(text):
    with pytest.raises((ValueError, ZeroDivisionError)):
        calculator(text)


# -- what an error does not tell -------------------------------------------------------------------


class Broken:
    """Tools that raise, each with what a policy must not read in its words."""

    def __init__(self, task):
        pass

    def chained(self, x: int) -> str:
        """Raises another's traceback."""
        try:
            return str({}[x])
        except KeyError as error:
            raise RuntimeError(f"it broke:\n{traceback.format_exc()}") from error

    async def waits(self) -> str:
        """Raises a file of ours that is not there."""
        return Path(__file__).with_name("no such file").read_text()

    def names(self, path: str) -> str:
        """Raises a file that the policy named, beside one that it did not."""
        raise ValueError(f"{path} is not in {__file__}, see https://example.org/a/b and 3/4/5")

    def box(self) -> str:
        """A file of the box."""
        raise BoxFileError(2, "no such file", str(Path(__file__).parent / "box/a.txt"))


def test_an_error_that_the_policy_reads_has_no_traceback_and_no_path_of_the_machine():
    asks = [call("chained", x=3), call("waits"), call("names", path="/data/mine.txt"), call("box")]
    _, told, _ = play(*asks, "seven.", tools=[Broken])
    here = str(Path(__file__).parent)
    assert "Traceback" not in told and "File " not in told and here not in told and "tests/units" not in told
    read = [part.partition("\n</tool_response>")[0] for part in told.split("<tool_response>\n")[1:]]
    assert read[0] == "error: RuntimeError: it broke:\nKeyError: 3\n"
    assert read[1] == "error: FileNotFoundError: [Errno 2] No such file or directory: 'no such file'"
    assert read[2] == (
        "error: ValueError: /data/mine.txt is not in test_tools.py, see https://example.org/a/b and 3/4/5"
    )
    assert read[3].endswith("a.txt'") or read[3].endswith("a.txt")


def test_the_interpreter_of_a_box_shows_the_code_of_the_policy_and_nothing_of_its_own(capsys):
    space: dict = {}
    repl.execute_code("import json\ndef f():\n    json.loads('{')", space)
    for text in ("f()", "1 +", "try:\n    f()\nexcept ValueError as e:\n    raise KeyError(1) from e"):
        repl.execute_code(text, space)
    space["late"] = repl.raise_timeout
    repl.execute_code("late()", space)
    told = capsys.readouterr().err
    assert "json/decoder.py" in told and "TimeoutError" in told and "SyntaxError" in told and 'File "<python>"' in told
    assert "repl.py" not in told and "raise_timeout" not in told and sys.base_prefix not in told
