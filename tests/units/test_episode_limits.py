"""What an episode may use, and a conversation that goes on from its own summary."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from kits.chat import Engine, chat, tokenizer
from kits.no_rows import NO_ROWS
from rondel.assemble.episodes import episodes_of
from rondel.buffer.state import decode, encode
from rondel.core.config.environment import EpisodeConfig
from rondel.core.errors import ConfigError, EnvError
from rondel.core.events import GroupFinished
from rondel.core.types import Drift, EnvFault, Failed, Group, Ok, OutOfBudget, Score, Task, Trajectory
from rondel.driver.failure_budget import FailureBudget
from rondel.driver.rollouts import GroupRollouts
from rondel.generate.calls import ToolCall
from rondel.generate.envs.episode import EpisodeState, assign_parents, episode_of
from rondel.generate.envs.episode_budget import ASKS, EpisodeBudget
from rondel.generate.envs.single_turn import SingleTurn
from rondel.generate.envs.tools import Tools
from rondel.runtime.journal import store
from rondel.runtime.telemetry.metrics import from_groups

TASK = Task("t/1", "chat", {"prompt": "what is three plus four?"})
TOK = tokenizer()


def words(text):
    return [*TOK.encode(text, add_special_tokens=False), TOK.eos_token_id]


class Talks:
    """Asks on until a reply is empty."""

    async def run(self, task, talk):
        while True:
            talk.give([{"role": "user", "content": "look again"}])
            if not (await talk.reply()).tokens:
                return talk.trajectory


def play(env, state, policy, **more):
    talk = chat(TOK, policy, episode=state, **more)

    async def episode():
        return await talk.episode.finish(await episode_of(env, TASK, talk))

    return asyncio.run(episode())


def budget(**limits):
    return episodes_of(EpisodeConfig(budget=limits), Talks(), TOK, {})()


def test_each_budget_ends_the_episode_under_its_name():
    answer, n = words("seven"), len(words("seven"))
    cases = [({"turns": 2}, "turns", 2 * n), ({"tokens": 2 * n + 1}, "tokens", 2 * n + 1)]
    for limits, name, wrote in cases:
        policy = Engine(*[answer] * 9)

        async def within(request, policy=policy):
            done = await Engine.generate(policy, request)
            cut = done.tokens[: request.sampling.max_tokens]
            done.finish_reason = "stop" if len(cut) == len(done.tokens) else "length"
            done.tokens, done.logprobs = cut, done.logprobs[: len(cut)]
            done.versions = done.versions[: len(cut)]
            return done

        policy.generate = within
        [t] = play(Talks(), budget(**limits), policy)
        assert t.outcome == OutOfBudget(name) and t.written == wrote and t.finish_reason == "length" and t.score is None
        assert Group(0, TASK, [t], 0).count_episodes() == {f"out_of_{name}": 1}
    times = iter([0.0, 1.0, 5.0, 6.0])
    [t] = play(Talks(), EpisodeState(EpisodeBudget(seconds=4.0, clock=lambda: next(times))), Engine(*[answer] * 9))
    assert t.outcome == OutOfBudget("seconds") and t.written == 2 * n

    class Pays(Talks):
        async def run(self, task, talk):
            talk.spend(0.5)
            return await super().run(task, talk)

    [t] = play(Pays(), budget(cost=0.5), Engine())
    assert t.outcome == OutOfBudget("cost") and not t.written
    [t] = play(Talks(), budget(turns=1, over="drop"), Engine(answer))
    assert t.score == Failed("out of budget", "turns")
    [t] = play(Talks(), budget(turns=9), Engine(answer, []))
    assert t.outcome != OutOfBudget("turns") and t.written == n


def test_a_tool_that_runs_is_ended_when_the_seconds_are_over():
    """Its object hears of it, the policy writes nothing more, and a call that would begin later is not begun."""
    heard = []

    class Slow:
        def __init__(self, task):
            self.ended = threading.Event()

        def wait(self) -> str:
            """Waits until it is interrupted."""
            heard.append("begun")
            self.ended.wait(60)
            return "never read"

        def interrupt(self):
            heard.append("interrupted")
            self.ended.set()

        def close(self):
            heard.append("closed")

    text = '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
    talk = chat(TOK, Engine(words(text), words("seven")), episode=EpisodeState(EpisodeBudget(seconds=0.2)))

    async def episode():
        return await talk.episode.finish(await episode_of(Tools([Slow], timeout=30.0), TASK, talk))

    [t] = asyncio.run(asyncio.wait_for(episode(), 20))
    assert t.outcome == OutOfBudget("seconds") and t.written == len(words(text)) and t.finish_reason == "length"
    assert heard == ["begun", "interrupted", "closed"]
    assert [turn.text for turn in t.conversation if turn.role == "tool"] == [
        "error: wait: the time of the episode is over"
    ]
    tools = Tools([Slow])
    with ExitStack() as ends:
        late = tools.carry_out(ToolCall("wait", {}), tools._open_tools(TASK, ends), 0.0)
        assert asyncio.run(late) == "error: wait: the time of the episode is over" and heard.count("begun") == 1


def test_agents_of_one_episode_have_one_budget():
    class Two:
        async def run(self, task, talk):
            other = talk.beside("critic")
            for one in (talk, other, talk, other):
                one.give([{"role": "user", "content": "look again"}])
                await one.reply()
            return [talk.trajectory, other.trajectory]

    found = play(Two(), budget(turns=3), Engine(*[words("seven")] * 3))
    assert [t.written for t in found] == [2 * len(words("seven")), len(words("seven"))]
    assert {t.outcome for t in found} == {OutOfBudget("turns")}


def test_an_environment_that_never_ends_is_ended_and_what_was_written_is_kept():
    class Deaf(Talks):
        async def run(self, task, talk):
            while True:
                talk.give([{"role": "user", "content": "look again"}])
                await talk.reply()

    state = budget(turns=1)
    with pytest.raises(EnvError, match=f"asked for {ASKS} replies .* budget of turns"):
        play(Deaf(), state, Engine(words("seven")))
    [t] = asyncio.run(state.rescue())
    assert t.outcome == OutOfBudget("turns") and t.written == len(words("seven"))


@pytest.mark.parametrize("scores_itself", [True, False])
@pytest.mark.parametrize("drops", [True, False])
def test_what_an_environment_would_have_scored_is_not_left_to_another_reward(scores_itself, drops):
    """It fails behind its budget: task.reward, "number" where nobody named one, read a number in what had been said."""

    class Breaks(Talks):
        async def run(self, task, talk):
            await super().run(task, talk)
            raise EnvError("the judge does not answer")

    env = Breaks()
    env.scores_itself = scores_itself
    job = SimpleNamespace(
        loop=SimpleNamespace(seed=0), task=SimpleNamespace(system=""), model=SimpleNamespace(teacher=None),
        agent_policies={},
    )  # fmt: skip
    both = SimpleNamespace(envs={TASK.env: env, "other": Talks()})
    both.run = env.run
    for one in (env, both):
        rollouts = GroupRollouts(SimpleNamespace(env=one, job=job, rows=NO_ROWS, failures=FailureBudget()), 1)

        def opened():
            state = budget(turns=1, over="drop" if drops else "score")
            return chat(TOK, Engine(words("seven 7")), episode=state)

        (found,) = asyncio.run(rollouts.run_episode(TASK, opened))
        if scores_itself and not drops:
            assert found.outcome == EnvFault("EnvError: the judge does not answer") and not found.written
        else:
            assert found.outcome == OutOfBudget("turns") and found.written
            assert (found.score is None) == (not drops)


class Compacts:
    """Two turns, a summary, and a turn on it."""

    def __init__(self, keep):
        self.keep = keep

    async def run(self, task, talk):
        trajectory = talk.trajectory
        talk.give([{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is three plus four?"}])
        await talk.reply()
        talk.give([{"role": "user", "content": "look again"}])
        await talk.reply()
        await talk.compact("sum up", keep=self.keep)
        talk.give([{"role": "user", "content": "and?"}])
        await talk.reply()
        return trajectory


@pytest.mark.parametrize("keep", [0, 2])
def test_a_summary_is_trained_and_the_conversation_goes_on_from_it(keep):
    said = ["three", "four", "the answer is seven", "7"]
    policy = Engine(*map(words, said))
    root, closed = assign_parents(play(Compacts(keep), EpisodeState(), policy))

    def rendered(*messages):
        listed = [{"role": role, "content": text} for role, text in messages]
        return TOK.apply_chat_template(listed, add_generation_prompt=True, return_dict=False)

    first = [("system", "be brief"), ("user", "what is three plus four?"), ("assistant", "three")]
    first += [("user", "look again"), ("assistant", "four")]
    behind = (
        [("user", said[2] + "\n\nand?")]
        if not keep
        else [("user", said[2] + "\n\nlook again"), *first[-1:], ("user", "and?")]
    )
    assert policy.requests[2].tokens == rendered(*first, ("user", "sum up"))
    assert policy.requests[3].tokens == rendered(first[0], *behind)
    assert root.tokens == policy.requests[3].tokens + words("7") and root.written == len(words("7"))
    assert closed.parent == 0 and closed.written == sum(len(words(text)) for text in said[:3])
    assert closed.tokens[-len(words(said[2])) :] == words(said[2]) and closed.drift is None
    assert root.text == "\n".join(said) and [turn.text for turn in root.conversation if turn.written] == said
    keys = [request.key for request in policy.requests]
    assert len(set(keys)) == len(keys), "each turn is drawn with noise of its own"


def test_a_branch_in_which_nothing_was_written_leaves_the_episode_to_the_one_before():
    policy = Engine(*map(words, ["three", "four", "the answer is seven"]))
    [t] = play(Compacts(0), budget(turns=3), policy)
    assert t.outcome == OutOfBudget("turns") and t.parent is None
    assert t.written == sum(map(len, policy.turns)) and t.text == "three\nfour\nthe answer is seven"


def test_drift_and_budgets_are_stored_counted_and_shown(tmp_path):
    first, second = (Trajectory(score=Score(float(i)), drift=Drift("thought", 7, 1) if i else None) for i in range(2))
    for t in (first, second):
        t.extend([1, 2])
        t.extend([3], logprobs=[-0.5], versions=[0])
    first.outcome = OutOfBudget("turns")
    group = Group(4, TASK, [first, second], 0)
    assert [(t.drift, t.outcome) for t in decode(json.loads(json.dumps(encode(group)))).trajectories] == [
        (None, OutOfBudget("turns")),
        (Drift("thought", 7, 1), Ok()),
    ]
    store.write_step(tmp_path, 1, [group])
    assert store.groups_of(store.read_step(tmp_path, 1))[0].trajectories == [first, second]
    told = GroupFinished(4, "t", 0, True, "", [0.0, 1.0], [1, 1], episodes=group.count_episodes())
    row = from_groups([told, GroupFinished(5, "t", 0, True, "", [0.0, 1.0], [1, 1])])
    assert {name: value for name, value in row.items() if name.startswith("episode/")} == {
        "episode/drift_thought": 0.25,
        "episode/drift_share": 0.25,
        "episode/out_of_turns": 0.25,
        "episode/out_of_budget_share": 0.25,
    }


def test_a_setting_without_effect_is_refused():
    for settings, env, tok, words in (
        ({"drift": "branch"}, SingleTurn(), TOK, "one turn"),
        ({"drift": "refuse"}, Talks(), tokenizer(None), "without a chat template"),
        ({"budget": {"over": "drop"}}, Talks(), TOK, "without a budget"),
    ):
        with pytest.raises(ConfigError, match=words):
            episodes_of(EpisodeConfig(**settings), env, tok, {})


STOPPED = """
import sys
from rondel.generate.envs.episode_budget import EpisodeBudget
budget = EpisodeBudget(seconds=3.0)
budget.begin()
print("begun", flush=True)
sys.stdin.readline()
print(budget.has_room(), budget.seconds_left() > 0, flush=True)
"""


def test_the_time_in_which_a_run_was_stopped_is_nobodys():
    """Ctrl-Z and `fg`: an episode goes on with the seconds that it had."""
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin and child.stdout and child.stdout.readline() == "begun\n"
        child.send_signal(signal.SIGSTOP)
        time.sleep(3.5)
        child.send_signal(signal.SIGCONT)
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "True True\n"
