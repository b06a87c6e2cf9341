"""Several agents: who reads what and when, conversations and noise of their own, one
score, and a game that two of them learn.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from kits.chat import tokenizer
from kits.no_rows import NO_ROWS
from kits.runs import events, final, run, tiny
from rondel.core.errors import ConfigError, DataError, EngineError, UserError
from rondel.core.types import Completion, EnvFault, Sampling, Score, Slot, Task
from rondel.driver.evaluation import evaluate
from rondel.driver.failure_budget import FailureBudget
from rondel.driver.rollouts import GroupRollouts
from rondel.generate.envs.agents import Agents
from rondel.generate.envs.chat import TokenChat
from rondel.generate.envs.episode import assign_parents, share_scores
from rondel.runtime.journal import store

TASK = Task("t", "agents", {"prompt": "2+2", "hint": "even"})
TURNS = [
    {"agent": "writer", "says": "{prompt}"},
    {"agent": "critic", "says": "{prompt} {hint}: {writer}", "system": "doubt"},
    {"agent": "judge", "says": "{writer}"},
    {"agent": "writer", "turn": "final", "says": "{critic} {judge}"},
]


def play(turns, *, slow: str = "", **settings):
    """-> (trajectories, what each request read, keys, the order in which they were asked)."""
    tok = tokenizer()
    read, keys = [], []

    async def generate(request):
        text = tok.decode(request.tokens)
        read.append(text)
        keys.append(request.key)
        words = f"r{len(read)}"
        if slow and slow in text:
            await asyncio.sleep(0.05)
        tokens = [*tok.encode(words, add_special_tokens=False), tok.eos_token_id]
        return Completion(tokens, [-1.0] * len(tokens), [0] * len(tokens), "stop", text=words)

    chat = TokenChat(tok, generate, sampling=Sampling(max_tokens=8), key=lambda turn: 1000 + turn, max_context=400)
    return asyncio.run(Agents(turns, **settings).run(TASK, chat)), read, keys


def test_a_turn_reads_what_it_names_and_an_agent_goes_on_with_its_own_conversation():
    found, read, keys = play(TURNS)
    assert [t.agent for t in found] == ["writer", "critic", "judge"]
    assert "2+2 even: r1" in read[1] and "doubt" in read[1] and "doubt" not in read[0]
    assert read[2].count("r1") == 1
    assert "r1" in read[3] and "r2 r3" in read[3] and read[3].startswith(read[0])
    assert len(set(keys)) == 4
    assert found[0].text == "r1\nr4" and found[1].text == "r2"


def test_turns_that_do_not_wait_for_each_other_run_side_by_side():
    """The critic is slow: the judge is asked meanwhile."""
    _, read, _ = play(TURNS, slow="even")
    assert ["even" in r for r in read] == [False, True, False, False]
    _, read, _ = play([TURNS[0], {"agent": "a", "says": "slow {writer}"}, {"agent": "b", "says": "{writer}"}, {"agent": "c", "says": "{b}"},
                       {"agent": "writer", "turn": "end", "says": "{a} {c}"}], slow="slow")  # fmt: skip
    assert "r3" in read[3] and "r2 r4" in read[4]  # b and c have spoken while a is still slow


def test_who_has_no_score_shares_the_answers():
    found, *_ = play(TURNS)
    episode = assign_parents(found)
    episode[0].score = Score(0.7, {"a": 0.7}, ((3, 0.1),))
    share_scores(episode)
    assert [t.score for t in episode[1:]] == [Score(0.7, {"a": 0.7})] * 2 and [t.parent for t in episode] == [None] * 3


def test_what_cannot_be_played_is_refused_at_the_start():
    for turns, said in [
        ([{"agent": "a", "says": "{b}"}, {"agent": "b", "says": "{a}"}], "a -> b -> a|b -> a -> b"),
        (
            [{"agent": "a", "says": "{c}"}, {"agent": "a", "turn": "b", "says": "x"}, {"agent": "c", "says": "{b}"}],
            "each of these waits",
        ),
        ([{"agent": "a", "says": "x"}, {"agent": "a", "says": "y"}], "two turns are called 'a'"),
        ([{"agent": "a", "says": "x", "sytem": "y"}], "Did you mean 'system'"),
        ([{"agent": "a"}], "needs agent"),
        ([{"agent": "a", "says": "{"}], "a brace of the text itself is written twice"),
        ([{"agent": "a", "says": "{prompt.__class__}"}], "name of a field or a turn"),
    ]:
        with pytest.raises(ConfigError, match=said):
            Agents(turns)
    with pytest.raises(DataError, match="Did you mean 'prompt'"):
        play([{"agent": "a", "says": "{promt} x"}])


@pytest.mark.slow
def test_one_turn_is_single_turn_to_the_bit(tmp_path):
    """A chain of one agent is plain GRPO."""
    one, other = tmp_path / "one", tmp_path / "other"
    run(one, loop__steps=3)
    run(other, loop__steps=3, task__env={"kind": "agents", "agents": [{"agent": "only", "says": "{prompt}"}]})
    a, b = final(one), final(other)
    assert a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)


class Relay(Agents):
    """The speaker sees a number and says one token, the listener sees that token only:
    each is half of what the episode is worth.
    """

    def __init__(self) -> None:
        super().__init__(
            [{"agent": "speaker", "says": "say {prompt} "}, {"agent": "listener", "says": "hear {speaker} "}]
        )

    async def run(self, task, chat):
        episode = await super().run(task, chat)
        right = [t.text.strip() == task.data["answer"] for t in episode]
        episode[0].score = Score(sum(right) / 2, {t.agent: float(r) for t, r in zip(episode, right)})
        return episode


def three(n: int = 60):
    return ({"prompt": str(1 + i % 3), "answer": str(1 + i % 3)} for i in range(n))


@pytest.mark.slow
@pytest.mark.sweep  # tests/units/test_policies.py learns a game of two from one score, each with weights of its own
def test_two_agents_learn_together_from_one_score(tmp_path):
    """Measured on seeds 0 and 1: 0.02 -> 0.98 and 0.97."""
    run(
        tmp_path, task__env="test_agents:Relay", task__data={"kind": "test_agents:three"}, loop__warmup__steps=0, loop__steps=60,
        loop__groups_per_step=8, algo__group_size=12, engine__sampling__max_tokens=1, trainer__lr=1.4e-2, trainer__schedule="linear",
        run__checkpoint__every=0,
    )  # fmt: skip
    rewards = [sum(e["rewards"]) / len(e["rewards"]) for e in events(tmp_path, "GroupFinished")]
    first, last = sum(rewards[:30]) / 30, sum(rewards[-80:]) / 80
    print(f"CURVE relay: {first:.2f} -> {last:.3f}")
    assert first < 0.3 and last > 0.9
    rows = store.read_step(tmp_path, 60)
    assert {row["agent"] for row in rows} == {"speaker", "listener"} and all(row["parent"] is None for row in rows)


def rollouts(env, engine, folder) -> GroupRollouts:
    """Those of a run whose engine is a function."""

    class Fake(GroupRollouts):
        def open_chat(self, key, *args, **kwargs):
            return TokenChat(tokenizer(), engine, sampling=Sampling(max_tokens=4), key=key, max_context=200)

    return Fake(
        SimpleNamespace(
            job=tiny(folder), sampling=Sampling(), env=env, pool=None, rows=NO_ROWS, failures=FailureBudget()
        ),
        group_size=1,
    )


def tried(env, engine, folder):
    return asyncio.run(rollouts(env, engine, folder)._sample_episode(Slot(0, TASK, 0), 0))


async def broken(request):
    raise EngineError("no engine is left")


async def fine(request):
    return Completion([5], [-1.0], [0], "stop", text="x")


class Crowd:
    """An environment of the user's own that breaks inside task groups inside each other."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = errors

    async def run(self, task, chat):
        async def fail(error):
            raise error

        async with asyncio.TaskGroup() as outer:
            inner = asyncio.TaskGroup()
            async with inner:
                for error in self.errors:
                    inner.create_task(fail(error))
            outer.create_task(asyncio.sleep(0))


def test_an_error_inside_a_task_group_keeps_its_kind(tmp_path):
    one = [{"agent": "a", "says": "{prompt}"}]
    with pytest.raises(EngineError, match="no engine is left"):
        tried(Agents(one), broken, tmp_path)
    with pytest.raises(DataError, match=r"reads \{promt\}.*Did you mean 'prompt'"):
        tried(Agents([*one, {"agent": "b", "says": "{promt} {a}"}]), fine, tmp_path)
    with pytest.raises(EngineError, match="no engine is left"):
        tried(Crowd(KeyError("x"), EngineError("no engine is left")), fine, tmp_path)
    [fault] = tried(Crowd(ZeroDivisionError("my own")), fine, tmp_path)
    assert fault.outcome == EnvFault("ZeroDivisionError: my own")


def test_an_environment_that_forgets_to_return_is_told_so(tmp_path):
    class Forgets(Agents):
        async def run(self, task, chat):
            await super().run(task, chat)

    with pytest.raises(UserError, match=r"returned nothing; .*`return chat.trajectory`"):
        tried(Forgets([{"agent": "a", "says": "{prompt}"}]), fine, tmp_path)


def test_an_environment_that_gives_a_text_is_told_what_a_message_is(tmp_path):
    for given in ("3+4=", ["3+4="]):

        class Gives(Agents):
            async def run(self, task, chat, given=given):
                chat.give(given)

        [fault] = tried(Gives([{"agent": "a", "says": "{prompt}"}]), fine, tmp_path)
        assert "it takes messages, as in give([{'role': 'user', 'content': 'text'}])" in fault.outcome.reason


def test_a_broken_environment_in_an_evaluation_is_a_failure_and_no_end(tmp_path, monkeypatch):
    made = rollouts(Crowd(ZeroDivisionError("my own")), fine, tmp_path)
    monkeypatch.setattr("rondel.driver.rollouts.GroupRollouts", lambda parts, size, watch=None: made)
    parts = made.parts
    parts.step_watch = None
    parts.tasks, parts.engine = SimpleNamespace(held_out=[TASK], sources=[], sets={}), SimpleNamespace(version=3)
    [done] = asyncio.run(evaluate(parts, 1))
    told = done.event
    assert (told.score, told.request["failed"]) == (0.0, 1)
