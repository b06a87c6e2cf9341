"""What is found out of tasks and a chat template before the weights are loaded: control
tokens, and what the template cannot write.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kits.chat import tokenizer
from rondel.assemble.components import longest_conversation
from rondel.checks.special_token_check import all_tasks, read_as_text, refuse_deaf_template, refuse_idle_split
from rondel.core.errors import ConfigError, DataError
from rondel.core.types import Sampling, Task
from rondel.driver.demonstration_stream import DemonstrationStream
from rondel.generate.envs.agents import Agents
from rondel.generate.envs.single_turn import SingleTurn
from rondel.generate.envs.sources import TaskSet, load_tasks
from rondel.generate.envs.tools import Tools
from rondel.text.tokenization import SPLIT


def tasks(*prompts: str, **settings) -> list[Task]:
    rows = [{"prompt": prompt, "answer": "7"} for prompt in prompts]
    return load_tasks({"kind": "list", "rows": rows, **settings}, env="x").train


def test_who_spells_control_tokens_is_told_and_how_to_mean_them():
    assert read_as_text(tasks("3 + 4", "<think> <user> <b>"), tokenizer()) == ""
    told = read_as_text(tasks("3 + 4", "a<|im_end|>", "<|im_start|>"), tokenizer())
    assert (
        told.startswith("2 tasks spell control tokens, as list/") and "with <|im_end|>: they are read as text" in told
    )
    assert f"task.data.{SPLIT} = false" in told
    assert read_as_text(tasks("a<|im_end|>", **{SPLIT: False}), tokenizer()) == ""


def test_a_switch_without_effect_is_refused():
    refuse_idle_split(tasks("3 + 4", "a<|im_end|>"), tokenizer())
    refuse_idle_split(tasks("3 + 4", "a<|im_end|>", **{SPLIT: False}), tokenizer())
    with pytest.raises(
        ConfigError, match=rf"task.data.{SPLIT} = false has no effect: no question or answer of 'x' spells .*<|im_end|>"
    ):
        refuse_idle_split(tasks("3 + 4", **{SPLIT: False}), tokenizer())
    with pytest.raises(ConfigError, match="it is true, or false for data that means"):
        tasks("3", **{SPLIT: "no"})
    mix = {
        "kind": "mix",
        "sources": [
            {"source": s, "kind": "list", "rows": [{"prompt": p, "answer": "7"}], **more} for s, p, more in SOURCES
        ],
    }
    loaded = load_tasks(mix, env="x").train
    assert [task.data.get(SPLIT, True) for task in loaded] == [False, True]
    assert "1 task spells control tokens, as list/" in read_as_text(
        loaded, tokenizer()
    ) and "of source 'b'" in read_as_text(loaded, tokenizer())
    refuse_idle_split(loaded, tokenizer())


SOURCES = [("a", "x<|im_end|>", {SPLIT: False}), ("b", "y<|im_end|>", {})]


def test_what_is_shown_beside_is_looked_at_too():
    own, other = tasks("3"), tasks("<|im_end|>")
    shown = [DemonstrationStream("beside.0", [*own, *other], None, 1.0, 1, "", [])]  # type: ignore[arg-type]
    assert all_tasks(TaskSet(own, []), shown) == [*own, *other]


def test_a_template_that_cannot_append_is_found_out_before_the_run():
    def search(query: str) -> str:
        """Finds."""
        return query

    deaf = tokenizer.__wrapped__("alternating")
    deaf.chat_template = "{% if messages[0].role != 'user' or messages|length > 1 %}{{ raise_exception('one question') }}{% endif %}{{ messages[0].content }}"
    talk = Agents([{"agent": "a", "says": "{prompt}"}, {"agent": "a", "turn": "again", "says": "look again"}])
    for env in (Tools([search]), talk, SimpleNamespace(envs={"tools": Tools([search])})):
        refuse_deaf_template(env, tokenizer())
        with pytest.raises(ConfigError, match=r"task.env: the chat template refuses messages .*one question"):
            refuse_deaf_template(env, deaf)
    for env in (SingleTurn(), Tools([search], turns=1), object()):
        refuse_deaf_template(env, deaf)


def test_a_task_that_the_template_refuses_is_named_before_the_run():
    strict = tokenizer("alternating")
    found = TaskSet([Task("t/1", "x", {"messages": [{"role": "system", "content": "s"}]})], [])
    job = SimpleNamespace(task=SimpleNamespace(suffix="", system=None))
    known = SimpleNamespace(tokenizer=strict, sight=None, max_context=100)
    with pytest.raises(DataError, match=r"task t/1: the chat template refuses messages \(system\): .*no system role"):
        longest_conversation(job, found, SingleTurn(), known, Sampling(max_tokens=8), {})  # type: ignore[arg-type]
