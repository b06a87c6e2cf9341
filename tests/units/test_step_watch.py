"""Steps that are valued while an answer is written: the numbers of the whole answer, whatever happens on the way."""

import asyncio
from types import SimpleNamespace

import pytest

from kits import runs
from kits.engine import engine, publish_in_place, tiny
from kits.reward_models import saved
from kits.step_scorers import ASKED
from rondel.core.errors import ConfigError
from rondel.core.events import Warned, subscribe
from rondel.core.types import Failed, Sampling, Score, Task, Trajectory, Turn
from rondel.driver.step_watch import CURRENT_ANSWER, StepWatch
from rondel.generate.engine.multi_policy import MultiPolicyEngine
from rondel.generate.engine.resumption import generate_until_done
from rondel.generate.engine.router import EngineRouter
from rondel.generate.envs.chat import TokenChat
from rondel.generate.envs.episode import EpisodeState
from rondel.runtime.journal.log import read
from rondel.score import build_reward
from rondel.score.clock import EPISODE
from rondel.score.pool import RewardPool

TASK = Task("t/1", "single_turn", {"prompt": "What is 3 + 4?", "answer": "7"})
OPENING = [Turn("user", "What is 3 + 4?", 0, 0)]
EPISODE_TURNS = [
    ("assistant", "first;second;thi"),
    ("tool", "it says; 7"),
    ("assistant", "; fourth;;fifth"),
    ("user", "so?"),
    ("assistant", "sixth;seventh; and last"),
]


def here(name):
    return f"kits.step_scorers:{name}"


# -- what a watch says, piece by piece -----------------------------------------------------------


def conversation(upto=None):
    return [*OPENING, *(Turn(role, text, 0, 0, role == "assistant") for role, text in EPISODE_TURNS[:upto])]


def pieces(size=4):
    """(conversation so far, unfinished), as turns grow by so many characters."""
    for n, (role, text) in enumerate(EPISODE_TURNS):
        if role == "assistant":
            for end in range(size, len(text), size):
                yield [*conversation(n), Turn(role, text[:end], 0, 0, True)], True
            yield conversation(n + 1), False


def whole():
    return Trajectory(
        text="\n".join(text for role, text in EPISODE_TURNS if role == "assistant"), conversation=conversation()
    )


async def scored(reward, trajectory, number=None):
    EPISODE.set(number)
    return await reward(trajectory, TASK)


async def scored_on_the_way(reward, number=1, *, told=None, of=None):
    for turns, unfinished in pieces() if told is None else told:
        await reward.precompute(number, Trajectory(conversation=turns), TASK, unfinished)
    score = await scored(reward, of or whole(), number)
    await reward.forget(number)
    return score


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def step_model(request, tmp_path_factory):
    return saved(tmp_path_factory.mktemp(request.param), family=request.param, what="TokenClassification", labels=2)


@pytest.mark.slow
def test_a_model_says_the_same_of_steps_that_it_read_early(step_model):
    """Also with a window for attention, with tools and users between, after a nap that took its memory, where another
    text needs the memory, and where the answer turned out to be another one.
    """
    spec = {"kind": "process", "path": str(step_model), "separator": ";", "aggregate": "sum"}
    reward = build_reward({**spec, "pipelined": True, "offload": True, "cached_tokens": 120})
    other = Trajectory(conversation=[*OPENING, Turn("assistant", "first;second;another;way", 0, 0, True)])

    async def work():
        await reward.wake()
        expected, expected_other = await scored(plain, whole()), await scored(plain, other)
        first = await scored_on_the_way(reward)
        assert first.value == pytest.approx(expected.value, abs=1e-5) and expected.value > 0.1
        assert reward.counts["process_steps"] == 8 and reward.counts["process_early_steps"] == 8
        assert not reward.early and not reward.model.texts
        cut = list(pieces())[:5]
        assert (await scored_on_the_way(reward, told=cut)).value == pytest.approx(expected.value, abs=1e-5)
        assert reward.counts["process_early_steps"] == 8 + 3
        assert (await scored_on_the_way(reward, told=cut, of=other)).value == pytest.approx(
            expected_other.value, abs=1e-5
        )
        assert reward.counts["process_early_steps"] == 8 + 3, "another third step: nothing of it is used"
        for turns, unfinished in cut:
            await reward.precompute(7, Trajectory(conversation=turns), TASK, unfinished)
        await reward.sleep()
        assert all(text.cache is None for text in reward.model.texts) and not reward.memory
        late = asyncio.ensure_future(reward.precompute(7, Trajectory(conversation=conversation()), TASK, False))
        await asyncio.sleep(0.02)
        assert not late.done(), "nothing is computed while it sleeps"
        await reward.wake()
        await late
        assert (await scored(reward, whole(), 7)).value == pytest.approx(expected.value, abs=1e-5)
        reward.model.cached_tokens = 30  # no room: it is read when it is whole
        seen = reward.counts["process_early_steps"]
        assert (await scored_on_the_way(reward, 8)).value == pytest.approx(expected.value, abs=1e-5)
        assert reward.counts["process_early_steps"] <= seen + 1

    plain = build_reward(spec)
    asyncio.run(work())


def test_a_model_that_reads_what_follows_is_refused(step_model, monkeypatch):
    from rondel.score.step_model import TokenModel

    spec = {"kind": "process", "path": str(step_model), "separator": ";"}
    plain = TokenModel._forward_batch
    backwards = lambda self, batch: [[sum(values)] * len(values) for values in plain(self, batch)]  # noqa: E731
    monkeypatch.setattr(TokenModel, "_forward_batch", backwards)
    build_reward(spec)
    with pytest.raises(ConfigError, match="depends on those behind it"):
        build_reward({**spec, "pipelined": True})
    with pytest.raises(ConfigError, match="needs a parameter 'first'"):
        build_reward({"kind": "process", "scorer": here("old_form"), "pipelined": True})


def test_a_scorer_values_each_step_once():
    spec = {"kind": "process", "scorer": here("by_length"), "separator": ";", "aggregate": "sum"}
    reward, plain = build_reward({**spec, "pipelined": True}), build_reward(spec)

    async def work():
        expected = await scored(plain, whole())
        assert await scored_on_the_way(reward) == expected  # the first is valued as a whole, too
        ASKED.clear()
        assert await scored_on_the_way(reward, 2, told=list(pieces())[:-1]) == expected
        assert sum(steps - first for first, steps in ASKED) == 8 and len(ASKED) > 4
        assert not reward.early and reward.take_warning() == ""

    asyncio.run(work())


def test_a_scorer_that_looks_ahead_is_found_and_the_whole_counts():
    spec = {"kind": "process", "scorer": here("looks_ahead"), "separator": ";", "aggregate": "mean"}
    reward = build_reward({**spec, "pipelined": True})

    async def work():
        for number in (1, 2):
            assert await scored_on_the_way(reward, number) == Score(8.0)
        assert "step 1 of an answer 1 before the next one was written, and 8 afterwards" in reward.take_warning()
        assert reward.take_warning() == ""

    asyncio.run(work())


def test_what_fails_early_fails_when_the_answer_is_scored():
    reward = build_reward({"kind": "process", "scorer": here("breaks_at_second"), "separator": ";", "pipelined": True})

    async def work():
        with pytest.raises(ValueError, match="no second step"):
            await reward.precompute(1, Trajectory(conversation=conversation(1)), TASK, False)
        with pytest.raises(ValueError, match="no second step"):
            await scored(reward, whole(), 1)
        assert await scored(reward, Trajectory(text="one"), 1) == Score(1.0)

    asyncio.run(work())


# -- through the process of the reward ------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("name", "timeout"), [("by_length", 20.0), ("dies_at_second", 20.0), ("hangs_early", 1.0)])
def test_through_the_pool_also_when_the_process_dies(name, timeout):
    """In parts of `combine`, which have separators of their own; a process that an early call ends has lost nobody's
    score, and an episode that is given up leaves nothing.
    """
    part = {"kind": "process", "scorer": here(name), "separator": ";", "aggregate": "sum", "pipelined": True}
    spec = {"kind": "combine", "parts": {"steps": part, "form": {"kind": "format", "pattern": "fi", "weight": 0.0}}}
    with RewardPool(spec, timeout=timeout) as pool:
        assert pool.separators == (";",)

        async def work():
            told = [(1, turns, unfinished) for turns, unfinished in list(pieces(7))[:3]]  # of one, two, three steps
            worked = [await pool.precompute(n, Trajectory(conversation=turns), TASK, open) for n, turns, open in told]
            scores = await asyncio.gather(pool.score(whole(), TASK, 1), pool.score(whole(), TASK))
            pool.forget(2)
            return worked, scores

        worked, scores = asyncio.run(work())
        assert all(isinstance(score, Score) for score in scores) and scores[0] == scores[1]
        expected = {"by_length": [True] * 3, "dies_at_second": [True, False, True], "hangs_early": [False, False, True]}
        assert worked == expected[name]


def test_beside_a_groupwise_part_it_is_refused(monkeypatch):
    import rondel.score.pool as module

    class Hello:
        groupwise, maximum, separators, together = True, None, (";",), 64

        def __init__(self, *args, **settings): ...
        def kill(self): ...

    monkeypatch.setattr(module, "RewardProcess", Hello)
    with pytest.raises(ConfigError, match="no effect beside a groupwise part"):
        RewardPool("number")


# -- from the engine's tokens on -------------------------------------------------------------------


class InThisProcess:
    """A pool whose reward is here."""

    separators = (";",)

    def __init__(self, reward):
        self.reward, self.told, self.forgotten = reward, [], []

    async def precompute(self, episode, trajectory, task, unfinished):
        self.told.append((episode, [turn.text for turn in trajectory.conversation], unfinished))
        await self.reward.precompute(episode, trajectory, task, unfinished)
        return True

    def forget(self, episode):
        self.forgotten.append(episode)
        self.reward.early.pop(episode, None)

    async def score(self, trajectory, task, episode=None):
        score = await scored(self.reward, trajectory, episode)
        await self.reward.forget(episode)
        return score


@pytest.fixture(scope="module")
def model():
    return tiny()


def talk_of(e, model, n=25):
    """A conversation whose policy likes to end steps."""
    (semicolon,) = model.tokenizer.encode(";", add_special_tokens=False)
    episode = EpisodeState(watcher=CURRENT_ANSWER.get())
    sampling = Sampling(max_tokens=n, ignore_eos=True, logit_bias={semicolon: 6.0})
    ask = lambda request: generate_until_done(e.generate, request)  # noqa: E731
    return TokenChat(model.tokenizer, ask, sampling=sampling, key=lambda turn: turn, max_context=500, episode=episode)


async def played(e, model, watch, turns=1):
    async with watch.open(TASK) as answer:
        talk = talk_of(e, model)
        for turn in range(turns):
            talk.give_tokens(model.tokenizer.encode(f"say {turn}", add_special_tokens=False))
            await talk.reply()
            await asyncio.sleep(0.01)  # a tool
        assert answer is CURRENT_ANSWER.get()
        return talk.trajectory, await answer.score(talk.trajectory)


@pytest.mark.parametrize(
    "how", ["alone", *(pytest.param(how, marks=pytest.mark.slow) for how in ("behind a router", "as policies"))]
)
def test_steps_are_told_while_the_engine_writes_them(model, how):
    """Three turns, parked and interrupted on the way and gone on with under new weights: the score is that of the whole."""
    spec = {"kind": "process", "scorer": here("by_length"), "separator": ";", "aggregate": "sum"}
    reward, inner = build_reward({**spec, "pipelined": True}), engine(model)
    e = {
        "alone": lambda: inner,
        "behind a router": lambda: EngineRouter({"one": inner, "two": engine(model)}, max_inflight=8),
        "as policies": lambda: MultiPolicyEngine({"policy": inner}),
    }[how]()

    async def disturb():
        for kind in ("hold", "abort"):
            for _ in range(12):
                await asyncio.sleep(0)
            await inner.pause(kind)
            if how == "alone":
                await publish_in_place(inner, inner.version + 1)
            await inner.resume()

    async def work():
        pool = InThisProcess(reward)
        watch = StepWatch(pool, lambda: e, interval=0.0)
        disturber = asyncio.ensure_future(disturb())
        trajectory, score = await played(e, model, watch, turns=3)
        await disturber
        assert score == await scored(build_reward(spec), trajectory)
        texts = [turn.text for turn in trajectory.conversation]
        for _, told, unfinished in pool.told:  # each the beginning of what was written
            assert told[:-1] == texts[: len(told) - 1] and texts[len(told) - 1].startswith(told[-1])
            assert unfinished or told[-1] == texts[len(told) - 1]
        assert len({len(told) for _, told, _ in pool.told}) == 3 and any(unfinished for *_, unfinished in pool.told)
        assert reward.counts["process_early_steps"] > reward.counts["process_steps"] / 2
        assert not watch.turns and not watch.answers and not reward.early

    asyncio.run(asyncio.wait_for(work(), 60))


def test_an_answer_that_is_given_up_is_forgotten(model):
    reward = build_reward({"kind": "process", "scorer": here("by_length"), "separator": ";", "pipelined": True})

    async def work():
        pool, e = InThisProcess(reward), engine(model)
        watch = StepWatch(pool, lambda: e, interval=0.0)
        playing = [asyncio.ensure_future(played(e, model, watch)) for _ in range(3)]
        while len({number for number, *_ in pool.told}) < 3:
            await asyncio.sleep(0)
        for one in playing[:2]:
            one.cancel()
        await asyncio.wait(playing)
        assert sorted(pool.forgotten) == [1, 2] and isinstance(playing[2].result()[1], Score)
        assert not watch.turns and not watch.answers and not reward.early
        assert CURRENT_ANSWER.get() is None

    asyncio.run(asyncio.wait_for(work(), 60))


def test_an_engine_that_does_not_say_what_it_has_written(model):
    reward, warned = build_reward({"kind": "process", "scorer": here("by_length"), "separator": ";"}), []
    end = subscribe(lambda event: warned.append(event.message) if isinstance(event, Warned) else None)

    class Silent:
        async def status(self):
            return SimpleNamespace(capabilities=frozenset({"logprobs"}))

    async def work():
        pool = InThisProcess(reward)
        watch = StepWatch(pool, Silent)
        for _ in range(2):
            async with watch.open(TASK) as answer:
                assert answer is None and CURRENT_ANSWER.get() is None
        assert pool.told == pool.forgotten == []

    try:
        asyncio.run(work())
    finally:
        end()
    assert len(warned) == 1 and "steps are valued when an answer is whole" in warned[0]


def test_failures_stay_failures():
    reward = build_reward({"kind": "process", "scorer": here("by_length"), "separator": ";", "pipelined": True})
    assert asyncio.run(scored(reward, Trajectory(text=" ; "), 1)) == Failed("answer has no steps")


@pytest.mark.slow
def test_a_run_trains_the_same_weights(tmp_path):
    """From the recipe on: what is told early decides no bit of what is learned."""
    weights, counts = {}, {}
    for name, how in (("early", {"pipelined": True}), ("after", {})):
        reward = {"kind": "process", "scorer": here("by_length"), "separator": "e", "aggregate": "sum", **how}
        more = {"loop__steps": 1, "loop__warmup__steps": 0, "engine__sampling__max_tokens": 24}
        runs.run(tmp_path / name, task__reward=reward, **more)
        weights[name] = runs.final(tmp_path / name)
        told = [event["counts"] for event in read(tmp_path / name) if event["kind"] == "RewardCounts"]
        counts[name] = sum(one.get("process_steps", 0) for one in told)
    early, after = weights["early"], weights["after"]
    assert early.keys() == after.keys() and all((early[name] == after[name]).all() for name in early)
    assert counts["early"] > 0 == counts["after"]
