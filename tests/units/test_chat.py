"""The chat's buffer against the template's own rendering, on five kinds of templates and on none."""

import asyncio
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from kits.chat import CHATML, PREAMBLE, TEMPLATES, THINKING, Engine, chat, spaced_tokenizer, tokenizer
from rondel.core.errors import DataError, EnvError
from rondel.core.types import Task
from rondel.generate.envs.chat import BESIDE, TURNS
from rondel.generate.envs.demonstrations import Demonstrate, GoldEpisode
from rondel.generate.envs.single_turn import SingleTurn

EXAMPLES = Path(__file__).parents[2] / "examples"
ASK = [{"role": "user", "content": "what is three plus four?"}]
AGAIN = [{"role": "user", "content": "look again."}]


def end(tok):
    """What ends a turn."""
    return tok.eos_token_id if tok.eos_token != "<|endoftext|>" else tok.convert_tokens_to_ids("<|im_end|>")


def words(tok, text):
    return tok.encode(text, add_special_tokens=False)


async def turns(talk, *messages):
    for given in messages:
        talk.give(given)
        await talk.reply()
    return talk.trajectory


@pytest.mark.parametrize("template", TEMPLATES)
def test_turns_read_as_the_template_writes_a_whole_conversation(template):
    """A policy whose turns survive decode and encode must get exactly what rendering everything at once gives."""
    tok = tokenizer(template)
    says = ["seven.", "the answer is seven.", "seven."]
    lead = " " if template == "alternating" else ""
    engine = Engine(*([*words(tok, lead + s), end(tok)] for s in says))
    trajectory = asyncio.run(turns(chat(tok, engine), ASK, AGAIN, AGAIN))
    history = [
        *ASK,
        {"role": "assistant", "content": says[0]},
        *AGAIN,
        {"role": "assistant", "content": says[1]},
        *AGAIN,
    ]
    whole = (
        tok.apply_chat_template(history, tokenize=True, add_generation_prompt=True, return_dict=False) + engine.turns[2]
    )
    assert trajectory.tokens == whole
    assert engine.requests[2].tokens == whole[: -len(engine.turns[2])]
    assert [t for t, m in zip(trajectory.tokens, trajectory.mask) if m] == list(chain(*engine.turns))


def test_provenance_keys_text_and_times():
    tok = tokenizer()
    engine = Engine([*words(tok, "seven"), end(tok)], [*words(tok, "8"), end(tok)])
    trajectory = asyncio.run(turns(chat(tok, engine, policy="actor"), ASK, AGAIN))
    n = len(engine.turns[0])
    first = len(tok.apply_chat_template(ASK, add_generation_prompt=True, return_dict=False))
    assert trajectory.mask[first - 1 : first + n + 1] == [False] + [True] * n + [False]
    assert set(trajectory.versions) == {-1, 1, 2} and trajectory.versions[first] == 1 and trajectory.versions[-1] == 2
    assert [lp for lp, m in zip(trajectory.logprobs, trajectory.mask) if m] == [-0.5] * trajectory.written
    assert [r.key for r in engine.requests] == [1000, 1001] and engine.requests[
        0
    ].policy == trajectory.policy == "actor"
    assert (
        trajectory.text == "seven\n8" and trajectory.timings == {"decode": 1.0} and trajectory.finish_reason == "stop"
    )


def test_a_token_keeps_the_routes_with_which_it_was_drawn():
    """Each turn's answer has routes of the whole stream, by the weights that served then: the earliest count, also in
    a copy of the first turn."""
    tok = tokenizer()
    engine = Engine([*words(tok, "seven"), end(tok)], [*words(tok, "8"), end(tok)])

    async def generate(request):
        done = await engine.generate(request)
        computed = len(request.tokens) + len(done.tokens) - 1  # the last token was drawn, and not read yet
        return replace(done, experts=np.full((computed, 1, 2), len(engine.requests)))

    talk = chat(tok, engine)
    talk.generate = generate
    trajectory = asyncio.run(turns(talk, ASK, AGAIN))
    assert len(trajectory.experts) == len(trajectory.tokens) - 1
    first = (
        trajectory.versions.index(1) + len(engine.turns[0]) - 1
    )  # the first turn's last token was read by the second
    assert trajectory.experts[:, 0, 0].tolist() == [1] * first + [2] * (len(trajectory.experts) - first)


def test_no_two_conversations_of_an_episode_draw_with_the_same_noise():
    """Those beside the first one, beside these and beside copies."""
    one = chat(tokenizer(), Engine())
    two, three = one.beside("a"), one.beside("b")
    found = [one, two, three, two.beside("c"), one.fork().beside("d"), three.fork().beside("e"), one.beside("f")]
    numbers = [(talk.key(7) - 1007) // TURNS for talk in found]
    assert numbers == [0, 1, 2, BESIDE + 1, 3, 2 * BESIDE + 1, 4]


@pytest.mark.parametrize("ending", ["", "<|endoftext|>", "<|im_end|>", "<|im_end|>\n"])
def test_a_turn_without_its_end_is_closed_by_given_tokens(ending):
    tok = tokenizer()
    engine = Engine(words(tok, "seven" + ending), [end(tok)], finish="length")
    trajectory = asyncio.run(turns(chat(tok, engine), ASK, AGAIN))
    closed = {"": "<|im_end|>\n", "<|endoftext|>": "<|endoftext|><|im_end|>\n"}.get(ending, "<|im_end|>\n")
    assert "seven" + closed + "<|im_start|>user\nlook again.<|im_end|>\n<|im_start|>assistant\n" in tok.decode(
        trajectory.tokens
    )
    assert [t for t, m in zip(trajectory.tokens, trajectory.mask) if m] == list(chain(*engine.turns))


def test_without_a_template_text_is_text():
    tok = tokenizer(None)
    engine = Engine(words(tok, "7"), words(tok, "8"))
    trajectory = asyncio.run(turns(chat(tok, engine), ASK, AGAIN))
    assert tok.decode(trajectory.tokens) == "what is three plus four?7look again.8"


def test_the_system_message_is_given_once_and_only_where_none_is():
    tok = tokenizer("injecting")
    for messages, system in ((ASK, "be brief"), ([{"role": "system", "content": "mine"}, *ASK], "mine")):
        engine = Engine([end(tok)], [end(tok)])
        read = tok.decode(asyncio.run(turns(chat(tok, engine, system="be brief"), messages, AGAIN)).tokens)
        assert (
            read.count("<|im_start|>system\n" + system) == read.count("<|im_start|>system") == 1
            and PREAMBLE not in read
        )


def test_a_prompt_that_fills_the_context_is_an_error_of_the_data():
    tok = tokenizer()
    size = len(tok.apply_chat_template(ASK, add_generation_prompt=True, return_dict=False))
    with pytest.raises(DataError, match=f"{size} tokens.*holds {size};.*raise the context"):
        asyncio.run(turns(chat(tok, Engine([1]), max_context=size), ASK))
    engine = Engine([end(tok)])
    asyncio.run(turns(chat(tok, engine, max_context=size + 1), ASK))
    assert engine.requests[0].sampling.max_tokens == 1


def test_a_later_message_that_does_not_fit_ends_the_conversation():
    tok = tokenizer()
    engine = Engine([*words(tok, "seven"), end(tok)])
    size = len(tok.apply_chat_template(ASK, add_generation_prompt=True, return_dict=False))
    talk = chat(tok, engine, max_context=size + 12)
    trajectory = asyncio.run(turns(talk, ASK, AGAIN))
    assert trajectory.finish_reason == "length" and trajectory.mask[-1] and len(trajectory.tokens) <= size + 12
    assert len(engine.requests) == 1


def test_two_gives_in_a_row_are_refused():
    talk = chat(tokenizer(), Engine())
    talk.give(ASK)
    with pytest.raises(EnvError, match="one call"):
        talk.give(AGAIN)


def test_a_reply_needs_a_message_before_it():
    tok = tokenizer()
    talk = chat(tok, Engine([end(tok)]))
    asyncio.run(turns(talk, ASK))
    with pytest.raises(EnvError, match="without a give"):
        asyncio.run(talk.reply())


def test_single_turn():
    tok = tokenizer("injecting")
    engine = Engine([*words(tok, "7"), end(tok)])
    task = Task("t/1", "single_turn", {"prompt": "3 + 4 =", "answer": "7"})
    trajectory = asyncio.run(SingleTurn(suffix=" Be brief.", system="s").run(task, chat(tok, engine)))
    assert tok.decode(trajectory.tokens) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n3 + 4 = Be "
        "brief.<|im_end|>\n<|im_start|>assistant\n7<|im_end|>"
    )
    assert trajectory.text == "7" and task.data["prompt"] == "3 + 4 ="
    listed = Task("t/2", "single_turn", {"messages": [{"role": "system", "content": "mine"}, *ASK]})
    asyncio.run(SingleTurn(suffix="!", system="s").run(listed, chat(tok, Engine([1]))))
    assert listed.data["messages"][-1]["content"] == ASK[0]["content"]
    with pytest.raises(DataError, match="it has: question"):
        asyncio.run(SingleTurn().run(Task("t/3", "single_turn", {"question": "?"}), chat(tok, Engine())))


def test_examples_are_turns_before_the_question_that_are_only_read():
    tok = tokenizer("injecting")
    shown = [{"prompt": "2 + 2 =", "answer": "4"}, {"prompt": "1 - 3 =", "answer": "-2"}]
    task = Task("t/1", "single_turn", {"prompt": "3 + 4 =", "answer": "7"})
    policy = SingleTurn(suffix=" Be brief.", system="s", examples=shown)
    trajectory = asyncio.run(policy.run(task, chat(tok, Engine([*words(tok, "7"), end(tok)]))))
    turns = [
        "user\n2 + 2 = Be brief.",
        "assistant\n4",
        "user\n1 - 3 = Be brief.",
        "assistant\n-2",
        "user\n3 + 4 = Be brief.",
    ]
    before = (
        "<|im_start|>system\ns<|im_end|>\n"
        + "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns)
        + "<|im_start|>assistant\n"
    )
    assert tok.decode(trajectory.tokens) == before + "7<|im_end|>"
    assert tok.decode([t for t, wrote in zip(trajectory.tokens, trajectory.mask) if wrote]) == "7<|im_end|>"
    told = asyncio.run(Demonstrate(suffix=" Be brief.", system="s", examples=shown).run(task, chat(tok, Engine())))
    assert told.tokens == trajectory.tokens and told.mask == trajectory.mask


def test_demonstrate_writes_the_answer_as_the_policys():
    tok = tokenizer()
    task = Task("t/1", "demonstrate", {"prompt": "3 + 4 =", "answer": 7})
    trajectory = asyncio.run(Demonstrate().run(task, chat(tok, Engine())))
    own = [t for t, m in zip(trajectory.tokens, trajectory.mask) if m]
    assert own == [*words(tok, "7"), end(tok)] and trajectory.text == "7" and trajectory.finish_reason == "stop"
    assert trajectory.versions[-2:] == [0, 0] and trajectory.logprobs[-2:] == [0.0, 0.0]
    size = len(trajectory.tokens)
    cut = asyncio.run(Demonstrate().run(task, chat(tok, Engine(), max_context=size - 1)))
    assert cut.tokens == trajectory.tokens[:-1] and cut.finish_reason == "length"


def test_the_example_environment(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from my_env import SecondThought

    tok = tokenizer()
    task = Task("t/1", "my_env:SecondThought", {"prompt": "3 + 4 =", "answer": "7"})
    right, wrong = [*words(tok, "7"), end(tok)], [*words(tok, "8"), end(tok)]
    assert asyncio.run(SecondThought().run(task, chat(tok, Engine(right)))).text == "7"
    second = asyncio.run(SecondThought().run(task, chat(tok, Engine(wrong, right))))
    assert second.text == "8\n7" and "Look again." in tok.decode(second.tokens)
    assert len((EXAMPLES / "my_env.py").read_text().splitlines()) <= 30


@pytest.mark.slow
def test_environments_and_rewards_start_without_torch():
    modules = [
        "agents",
        "chat",
        "curriculum",
        "demonstrations",
        "gym",
        "mcp",
        "order",
        "single_turn",
        "sources",
        "verifiers",
    ]
    code = (
        ";".join(f"import rondel.generate.envs.{m}" for m in modules)
        + ";import rondel.score.pool, rondel.score.preflight, sys"
    )
    code += ";print([m for m in ('torch', 'transformers', 'datasets', 'pyarrow', 'reasoning_gym', 'math_verify') if m in sys.modules])"
    assert (
        subprocess.check_output(
            [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path}; {code}"], text=True
        ).strip()
        == "[]"
    )


@pytest.mark.parametrize("scheme", ["always", "first"])
@pytest.mark.parametrize("template", ["chatml", "alternating", "bare", None])
def test_what_is_shown_has_the_tokens_of_the_whole_text(scheme, template):
    """Llama 2's tokenizer begins every text with a space, which an answer behind a line break does not have."""
    tok = spaced_tokenizer(scheme)
    bare = "{% for m in messages %}<|im_start|>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
    tok.chat_template = {"bare": bare, None: None}.get(template) or TEMPLATES.get(template)
    task = Task("t/1", "single_turn", {"prompt": "what is 3 + 4 =", "answer": "7 is"})
    written = asyncio.run(Demonstrate().run(task, chat(tok, Engine()))).tokens
    said = [{"role": "user", "content": "what is 3 + 4 ="}, {"role": "assistant", "content": "7 is"}]
    whole = tok.apply_chat_template(said, tokenize=False) if template else "what is 3 + 4 =7 is</s>"
    wanted = tok.encode(whole.removesuffix("<|im_end|>\n"), add_special_tokens=False)
    assert list(written)[: len(wanted)] == wanted and len(written) - len(wanted) == (template == "chatml")


def test_a_template_that_reads_parts_alone_ends_what_is_shown_with_the_end_token():
    tok = tokenizer.__wrapped__("chatml")
    tok.chat_template = (
        "{% for m in messages %}{% for part in m['content'] %}{{ part.missing.text }}{% endfor %}{% endfor %}"
    )
    assert chat(tok, Engine(), stop_ids={0, tok.eos_token_id}).end_token == tok.eos_token_id


def test_a_reply_is_not_shown_within_a_thought_that_the_template_begins():
    """Qwen3.5 and R1: the generation prompt ends with <think>, and an answer behind it is none."""
    tok = tokenizer.__wrapped__("chatml")
    tok.chat_template = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    for answer, good in (("seven.", False), ("so.\n</think>\n\nseven.", True)):
        task = Task("t/1", "single_turn", {"prompt": "3 + 4 =", "answer": answer})
        shown = [Demonstrate(), GoldEpisode(Scripted([answer]))]
        for env in shown:
            if good:
                asyncio.run(env.run(task, chat(tok, Engine())))
                continue
            with pytest.raises(DataError, match="answer within its thought"):
                asyncio.run(env.run(task, chat(tok, Engine())))
    for env in (Demonstrate(trained=False), GoldEpisode(Scripted(["seven."]), trained=False)):  # read as messages
        asyncio.run(env.run(task, chat(tok, Engine())))


@pytest.mark.parametrize(
    "thinking",
    [THINKING, (Path(__file__).parents[1] / "kits/templates/qwen3.jinja").read_text()],
    ids=["a like", "qwen3"],
)
@pytest.mark.parametrize("answer", ["seven.", "<think>\nthree, four\n</think>\n\nseven."])
def test_a_demonstration_is_what_the_template_writes_of_it(thinking, answer):
    """Qwen3: behind an empty thought, where the answer has none; what is only read is an earlier turn, without one."""
    tok = tokenizer.__wrapped__("chatml")
    tok.add_tokens(["<think>", "</think>"])
    tok.chat_template = thinking
    task = Task("t/1", "single_turn", {"prompt": "3 + 4 =", "answer": answer})
    messages = [{"role": "user", "content": "3 + 4 ="}, {"role": "assistant", "content": answer}]
    prompt = tok.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    whole = tok.apply_chat_template(messages, return_dict=False)
    for env in (Demonstrate, partial(GoldEpisode, Scripted([answer]))):
        for trained in (True, False):
            told = asyncio.run(env(trained=trained).run(task, chat(tok, Engine())))
            shown = told[0] if isinstance(told, list) else told
            assert shown.tokens[: len(prompt)] == prompt and sum(shown.mask) == len(shown.tokens) - len(prompt)
            if trained and (thinking is not THINKING or answer == "seven."):
                assert shown.tokens == whole[: len(shown.tokens)] and tok.decode(whole[len(shown.tokens) :]) == "\n"
            else:
                assert tok.decode(shown.tokens[len(prompt) :]) == f"{answer}{tok.eos_token}"


@pytest.mark.parametrize("name", [*sorted({*TEMPLATES} - {"ending"}), "first", "always"])
def test_a_demonstration_begins_as_the_answer_in_every_template(name):
    """A space that the template writes begins the answer (DeepSeek V2), unless the tokenizer adds its own (Llama 2)."""
    tok = tokenizer.__wrapped__(name) if name in TEMPLATES else spaced_tokenizer(name)
    if name not in TEMPLATES:
        tok.chat_template = TEMPLATES["alternating"]
    task = Task("t/1", "single_turn", {"prompt": "3 + 4 =", "answer": "seven."})
    messages = [{"role": "user", "content": "3 + 4 ="}, {"role": "assistant", "content": "seven."}]
    whole = tok.apply_chat_template(messages, return_dict=False)
    shown = asyncio.run(Demonstrate().run(task, chat(tok, Engine()))).tokens
    assert shown == whole[: len(shown)]


class Scripted:
    """One turn, whose gold reply is known."""

    def __init__(self, replies):
        self.replies = replies

    def gold(self, task):
        return self.replies

    async def run(self, task, conversation):
        conversation.give([{"role": "user", "content": task.data["prompt"]}])
        await conversation.reply()
        return conversation.trajectory


def test_what_is_shown_ends_as_the_template_ends_a_turn():
    """Phi 3 and Gemma: answers end at the mark of a turn, too, and the tokenizer's end token is another one."""
    tok = tokenizer("ending")
    mark = tok.convert_tokens_to_ids("<|im_end|>")
    for stops, end in (
        ({mark, tok.eos_token_id}, mark),
        ({tok.eos_token_id}, tok.eos_token_id),
        ((), tok.eos_token_id),
    ):
        conversation = chat(tok, Engine(), stop_ids=stops)
        conversation.give([{"role": "user", "content": "3 + 4 ="}])
        conversation.write("seven.")
        assert conversation.trajectory.tokens[-1] == end and conversation.trajectory.finish_reason == "stop"
        assert conversation.fork().end_token == end
        conversation.give([{"role": "user", "content": "look again."}])
        written = tok.decode(list(conversation.trajectory.tokens))
        between = "<|im_end|>\n" if end == mark else "<|endoftext|><|im_end|>\n"
        assert f"seven.{between}<|im_start|>user" in written
