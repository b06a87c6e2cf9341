"""The buffer: groups in flight come back whole from a checkpoint, counts and ages included; lanes wake one by one."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.fakes import CountingTrainer, Rollouts, endless, loop_kit
from rondel import loop
from rondel.buffer import Buffer
from rondel.buffer.state import decode, encode
from rondel.core.errors import LawError
from rondel.core.types import EnvFault, Failed, Group, Ok, PolicyFault, Score, Task, Trajectory

text = st.text(max_size=8)
number = st.floats(allow_nan=False, allow_infinity=False)
value = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | number | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
tasks = st.builds(Task, text, text, st.dictionaries(text, value, max_size=3))
scores = (
    st.none()
    | st.builds(
        Score,
        number,
        st.dictionaries(text, number, max_size=3),
        st.lists(st.tuples(st.integers(0, 99), number), max_size=2),
    )
    | st.builds(Failed, text, text)
)
outcomes = st.just(Ok()) | st.builds(EnvFault, text) | st.builds(PolicyFault, text)


@st.composite
def trajectories(draw) -> Trajectory:
    t = Trajectory(
        score=draw(scores), outcome=draw(outcomes), text=draw(text), finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        policy=draw(text), parent=draw(st.none() | st.integers(0, 9)), timings=draw(st.dictionaries(text, number, max_size=2)),
    )  # fmt: skip
    for written, n in draw(st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=4)):
        tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n))
        if written:
            t.extend(
                tokens,
                logprobs=draw(st.lists(st.floats(-1e30, 0.0), min_size=n, max_size=n)),
                versions=draw(st.lists(st.integers(0, 10**6), min_size=n, max_size=n)),
            )
        else:
            t.extend(tokens)
    return t


groups = st.builds(Group, st.integers(0, 10**9), tasks, st.lists(trajectories(), max_size=3), st.integers(0, 10**6))


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(groups)
def test_a_group_survives_json_exactly(group):
    assert decode(json.loads(json.dumps(encode(group)))) == group


def test_what_arrays_hold_survives_too():
    """The routes of a mixture's tokens and what they were drawn from: arrays, as engines give them."""
    t = Trajectory(experts=np.arange(12, dtype=np.uint8).reshape(2, 2, 3))
    t.extend([1])
    t.extend([2, 3], logprobs=[-0.5, -0.5], versions=[0, 0], support=[np.array([2, 9], np.int32), None])
    back = decode(json.loads(json.dumps(encode(Group(0, Task("t", "e", {}), [t], 0))))).trajectories[0]
    assert back.experts.dtype == np.uint8 and np.array_equal(back.experts, t.experts)
    assert [None if ids is None else list(ids) for ids in back.support] == [None, [2, 9], None]


def simple(slot) -> Group:
    t = Trajectory(score=Score(1.0, {"correct": 1.0}))
    t.extend([1, 2])
    t.extend([3], logprobs=[-0.1 - 1e-17], versions=[slot.born])
    return Group(slot.number, slot.task, [t], slot.born)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["claim", "put", "drop", "fail"]), max_size=30), st.integers(1, 3), st.integers(0, 2))
def test_state_and_restore_are_inverse(moves, p, s):
    """Whatever state the buffer is in: the ledger, the ages and the finished groups are the
    same; what was running is started again.
    """

    async def scenario():
        buffer = Buffer(groups_per_step=p, max_staleness=s, version=4)
        rolling = []
        n = 0
        for move in moves:
            while buffer.has_room():
                await buffer.admit(Task(f"t{n}", "e", {"n": n}))
                n += 1
            if move == "claim" and buffer.groups.waiting:
                rolling.append(await buffer.claim())
            elif rolling and move != "claim":
                slot = rolling.pop(0)
                await (
                    buffer.put(slot, simple(slot)) if move == "put" else buffer.drop(slot, "why", failed=move == "fail")
                )
        state = json.loads(json.dumps(buffer.state_dict(buffer.version)))
        other = Buffer(groups_per_step=p, max_staleness=s)
        other.load_state_dict(state)
        assert other.ledger() == buffer.ledger() and other.has_room() == buffer.has_room()
        assert other.groups.finished == buffer.groups.finished
        unfinished = sorted([*buffer.groups.waiting, *rolling], key=lambda slot: slot.number)
        assert list(map(asdict, other.groups.waiting)) == list(map(asdict, unfinished)) and not other.groups.rolling
        assert other.state_dict(other.version) == state
        other.ledger()

    asyncio.run(scenario())


@pytest.mark.parametrize("p,s,drop", [(1, 0, 0.0), (3, 0, 0.3), (2, 1, 0.3), (4, 2, 0.2)])
@pytest.mark.parametrize("cut", [1, 4, 9])
def test_a_loop_cut_at_any_step_trains_every_group_once_and_in_time(p, s, drop, cut):
    """k steps, the state through JSON at the milestone, a new buffer, the rest: as law 9 wants it, with fakes."""
    trainer, kept = CountingTrainer(), {}
    buffer = Buffer(groups_per_step=p, max_staleness=s)

    async def milestone(step, version, batch):
        if step == cut - 1:
            kept["state"] = json.dumps(buffer.state_dict(version))

    kit = loop_kit(trainer, Rollouts(5, drop), cut)
    asyncio.run(loop.run(endless(), buffer, **{**kit, "milestone": milestone}))
    resumed = Buffer(groups_per_step=p, max_staleness=s)
    resumed.load_state_dict(json.loads(kept["state"]))
    assert resumed.version == trainer.version == cut

    async def rest():
        n = resumed.counts.admitted
        while True:
            yield Task(f"t{n}", "fake", {})
            n += 1

    asyncio.run(loop.run(rest(), resumed, **loop_kit(trainer, Rollouts(6, drop), 12 - cut)))
    ids = [number for batch in trainer.seen for number, _, _ in batch]
    assert len(ids) == len(set(ids)) == 12 * p == resumed.counts.trained
    assert all(0 <= version - born <= s for batch in trainer.seen for _, born, version in batch)
    book = resumed.ledger()
    assert book["issued"] == sum(n for name, n in book.items() if name != "issued")


def test_a_state_that_does_not_add_up_is_refused():
    buffer = Buffer(groups_per_step=2)
    state = buffer.state_dict(0)
    with pytest.raises(LawError, match="ledger"):
        Buffer(groups_per_step=2).load_state_dict({**state, "counts": [5, 0, 3, 0]})


def test_a_task_wakes_one_lane_and_not_all_of_them():
    """Ten thousand lanes that look up at every change are what a controller would do all day."""

    async def scenario():
        buffer = Buffer(groups_per_step=8)
        lanes = [asyncio.create_task(buffer.claim()) for _ in range(50)]
        await asyncio.sleep(0)
        await buffer.admit(Task("t", "fake", {}))
        assert len(buffer.waiters.asleep["roll"]) == 49
        lanes[0].cancel()  # it was woken, and hears of it no more: the next one gets the task
        await asyncio.sleep(0.01)
        assert [lane for lane in lanes if lane.done()] == lanes[:2] and lanes[1].result().number == 0
        await buffer.close()
        assert await asyncio.gather(*lanes[2:]) == [None] * 48

    asyncio.run(scenario())


def test_an_error_in_a_lane_ends_the_run_at_once():
    trainer, rollouts = CountingTrainer(), Rollouts(0)

    async def broken(slot):
        raise RuntimeError("lane broke")

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(
            asyncio.wait_for(
                loop.run(endless(), Buffer(groups_per_step=2), **{**loop_kit(trainer, rollouts, 3), "attempt": broken}),
                5,
            )
        )
    assert caught.group_contains(RuntimeError, match="lane broke")
