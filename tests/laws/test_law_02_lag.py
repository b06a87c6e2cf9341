"""Law 2, lag: no group is trained more than S versions after its birth. `S = 0` is synchronous: with equal numerics and
thread counts, split and shared placement give the same run.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.fakes import CountingTrainer, Rollouts, endless, loop_kit
from kits.once import made_once
from kits.runs import PLACES, final, run, steps
from kits.sweeps import covering
from rondel import loop
from rondel.buffer import Buffer
from rondel.core.errors import LawError, UserError
from rondel.core.types import KEEP, Group, Task, Verdict
from rondel.runtime.journal import store


def windows(p: int, s: int) -> list[int | None]:
    return [*sorted({1, 1 + s * p // 2, 1 + s * p}), None]


SETTINGS = [
    (p, s, w, drop, seed)
    for p, s, drop, seed in itertools.product((1, 2, 5), (0, 1, 2, 4), (0.0, 0.3), (0, 1))
    for w in windows(p, s)
]
CHOSEN = [row for row in SETTINGS if row[4] == (row[0] + row[1]) % 2]  # each P, S, window and share under one seed


@pytest.mark.parametrize("p,s,w,drop,seed", covering(SETTINGS, CHOSEN))
def test_no_group_is_trained_later_than_its_bound(p, s, w, drop, seed):
    trainer, rollouts = CountingTrainer(), Rollouts(seed, drop)
    buffer = Buffer(groups_per_step=p, max_staleness=s, window=w)
    asyncio.run(loop.run(endless(), buffer, **loop_kit(trainer, rollouts, 25)))
    lags = [version - born for batch in trainer.seen for _, born, version in batch]
    ids = [i for batch in trainer.seen for i, _, _ in batch]
    assert max(lags) <= s
    assert len(ids) == len(set(ids)) == 25 * p == buffer.counts.trained
    book = buffer.ledger()
    assert book["issued"] == sum(v for k, v in book.items() if k != "issued")


class LateEngines(Rollouts):
    """Engines that serve a new version some time after the trainer goes on, and stamp what they write with their own."""

    def __init__(self, seed: int, drop: float, buffer: Buffer) -> None:
        super().__init__(seed, drop)
        self.buffer, self.serving, self.version = buffer, 0, 0
        self.running: asyncio.Task | None = None
        self.begun: dict[int, int] = {}  # number of a group -> version that served when it began
        self.overlapped = 0

    async def generate_group(self, slot):
        self.begun[slot.number] = self.serving
        return await super().generate_group(slot)

    async def sync(self, trainer, engine) -> int:
        if self.running is not None:
            self.overlapped += not self.running.done()
            await self.running
        self.version = trainer.version = self.version + 1
        self.buffer.begin_delivery()
        self.running = asyncio.create_task(self._deliver(self.version))
        return self.version

    async def _deliver(self, version: int) -> None:
        for _ in range(self.random.randrange(60)):
            await asyncio.sleep(0)
        self.serving = version
        self.buffer.end_delivery()


@pytest.mark.parametrize("p,s,w,drop,seed", [row for row in CHOSEN if row[0] < 5])
def test_the_bound_holds_while_engines_still_fetch_the_version_before(p, s, w, drop, seed):
    """A group is born at what engines serve, not at what the trainer has: no token of it is older than its birth."""
    buffer, trainer = Buffer(groups_per_step=p, max_staleness=s, window=w), CountingTrainer()
    engines = LateEngines(seed, drop, buffer)
    asyncio.run(loop.run(endless(), buffer, **{**loop_kit(trainer, engines, 25), "sync": engines.sync}))
    groups = [row for batch in trainer.seen for row in batch]
    assert len(groups) == 25 * p and bool(engines.overlapped) == bool(s)
    assert all(0 <= version - born <= s and born <= engines.begun[number] for number, born, version in groups)


class Refusals:
    """A filter that refuses nearly all of what is born at some versions, so that their steps run out of refills."""

    def __init__(self, hard: set[int], keep_every: int) -> None:
        self.hard, self.keep_every = hard, keep_every

    def __call__(self, group: Group) -> Verdict:
        return KEEP if group.born not in self.hard or group.id % self.keep_every == 0 else Verdict(False, "too hard")


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    p=st.integers(1, 5),
    s=st.integers(0, 3),
    refills=st.integers(1, 2),
    hard=st.sets(st.integers(0, 11), max_size=6),
    keep_every=st.integers(2, 4),
    cut=st.integers(1, 11),
    seed=st.integers(0, 3),
)
def test_short_batches_make_nobody_late(p, s, refills, hard, keep_every, cut, seed):
    """The places that a short batch leaves empty stay empty, also when the run is resumed at any of its steps."""
    trainer, state = CountingTrainer(), {}

    def buffer() -> Buffer:
        return Buffer(groups_per_step=p, max_staleness=s, max_refills=refills, patience=5)

    def kit(steps: int, milestone) -> dict:
        return {**loop_kit(trainer, Rollouts(seed), steps), "judge": Refusals(hard, keep_every), "milestone": milestone}

    async def remember(step, version, batch):
        if step == cut - 1:
            state.update(json.loads(json.dumps(first.state_dict(version))))

    async def nothing(step, version, batch):
        assert len(second.groups.born) <= s * p

    first, second = buffer(), buffer()
    try:
        asyncio.run(loop.run(endless(), first, **kit(cut, remember)))
        second.load_state_dict(state)
        asyncio.run(loop.run(endless(), second, **kit(12 - cut, nothing)))
    except ExceptionGroup as group:
        assert not group.subgroup(lambda error: not isinstance(error, (UserError, ExceptionGroup))), (
            "only 'no group survived' may end it"
        )
    assert all(version - born <= s for batch in trainer.seen for _, born, version in batch)
    trained = [number for batch in trainer.seen for number, _, _ in batch]
    assert len(trained) == len(set(trained))


def test_the_step_after_a_short_batch_is_whole_and_fresh():
    async def scenario():
        buffer = Buffer(groups_per_step=4, max_refills=1)

        async def feed():
            while True:
                await buffer.admit(Task(f"t{buffer.counts.admitted}", "fake", {}))

        async def lane():
            while slot := await buffer.claim():
                await asyncio.sleep(0)
                if buffer.version == 0 and slot.number:
                    await buffer.drop(slot, "no signal")
                else:
                    await buffer.put(slot, Group(slot.number, slot.task, [], slot.born))

        crew = [asyncio.create_task(feed()), *(asyncio.create_task(lane()) for _ in range(buffer.rule.max_open_groups))]
        taken = []
        for version in range(1, 5):
            taken.append([group.born for group in await buffer.take()])
            buffer.settle_groups()
            await buffer.advance(version)
        for task in crew:
            task.cancel()
        return taken

    assert asyncio.run(scenario()) == [[0], [1] * 4, [2] * 4, [3] * 4]


def test_staleness_zero_is_synchronous():
    trainer = CountingTrainer()
    asyncio.run(loop.run(endless(), Buffer(groups_per_step=4), **loop_kit(trainer, Rollouts(0), 10)))
    assert [[i for i, _, _ in batch] for batch in trainer.seen] == [list(range(4 * k, 4 * k + 4)) for k in range(10)]
    assert all(born == version for batch in trainer.seen for _, born, version in batch)


def test_staleness_is_used_when_allowed():
    """A bound that is never reached would be a hidden constant."""
    trainer = CountingTrainer()
    buffer = Buffer(groups_per_step=2, max_staleness=2)
    asyncio.run(loop.run(endless(), buffer, **loop_kit(trainer, Rollouts(3, spread=30), 40)))
    assert max(version - born for batch in trainer.seen for _, born, version in batch) == 2


def in_time(births: list[int], places: dict[int, int], s: int) -> bool:
    """Whether every group can still be trained by version born + s, when version v has so
    many places: earliest deadline first.
    """
    left, due = dict(places), sorted(born + s for born in births)
    for version in sorted(left):
        while due and left[version]:
            if due.pop(0) < version:
                return False
            left[version] -= 1
    return not due


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 4), st.integers(0, 3), st.lists(st.integers(0, 9), max_size=60), st.randoms(use_true_random=False)
)
def test_take_picks_whatever_leaves_all_others_their_time(p, s, moves, dice):
    """It never picks what makes another group late, and never waits although it could
    pick: against a schedule made by hand.
    """

    async def scenario():
        buffer, n = Buffer(groups_per_step=p, max_staleness=s, patience=1), 0
        for move in moves:
            while buffer.has_room():
                await buffer.admit(Task(f"t{n}", "fake", {}))
                n += 1
            while buffer.groups.waiting:
                await buffer.claim()
            slot = (
                dice.choice(sorted(buffer.groups.rolling.values(), key=lambda slot: slot.number))
                if buffer.groups.rolling
                else None
            )
            if slot and move:
                await (
                    buffer.put(slot, Group(slot.number, slot.task, [], slot.born))
                    if move < 9
                    else buffer.drop(slot, "why")
                )
            while True:
                births = {
                    **{k: slot.born for k, slot in buffer.groups.rolling.items()},
                    **{k: g.born for k, g in buffer.groups.finished.items()},
                }
                now = p - len(buffer.groups.taken)
                places = {buffer.version + k: now if k == 0 else p for k in range(s + 1)}
                assert in_time(list(births.values()), places, s), "a deadline is lost"
                after = {**places, buffer.version: now - 1}
                may = [
                    k
                    for k in sorted(buffer.groups.finished)
                    if in_time([b for j, b in births.items() if j != k], after, s)
                ]
                picked = buffer.next_pick()
                assert (picked is None) == (not may) and (picked is None or picked == may[0])
                if picked is None:
                    break
                buffer.groups.pick(picked)
                if len(buffer.groups.taken) == p:
                    buffer.settle_groups()
                    await buffer.advance(buffer.version + 1)

    asyncio.run(scenario())


def test_the_slow_one_is_overtaken_until_its_deadline_and_then_waited_for():
    async def scenario():
        buffer = Buffer(groups_per_step=2, max_staleness=1)
        slots = [await buffer.admit(Task(f"t{n}", "fake", {})) for n in range(4)]
        for _ in slots:
            await buffer.claim()
        for slot in slots[1:]:
            await buffer.put(slot, Group(slot.number, slot.task, [], 0))
        first = [group.id for group in await buffer.take()]
        buffer.settle_groups()
        await buffer.advance(1)
        second = asyncio.create_task(buffer.take())
        await asyncio.sleep(0.01)
        waits = not second.done()
        await buffer.put(slots[0], Group(0, slots[0].task, [], 0))
        return first, waits, {group.id for group in await second}

    assert asyncio.run(scenario()) == ([1, 2], True, {0, 3})


def test_a_stale_group_is_refused_at_consumption():
    async def scenario():
        buffer = Buffer(groups_per_step=1)
        slot = await buffer.admit(Task("t", "fake", {}))
        await buffer.claim()
        await buffer.put(slot, Group(0, slot.task, [], born=0))
        buffer.version = 1
        await buffer.take()

    with pytest.raises(LawError, match="1 versions old; at most 0 are allowed"):
        asyncio.run(scenario())


ALIGNED = {"engine__numerics": "aligned", "place__threads": 1, "loop__warmup__steps": 1, "loop__steps": 2}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return made_once(tmp_path_factory, "shared", partial(run, **ALIGNED))


@pytest.mark.slow
@pytest.mark.parametrize("place", covering(["two devices", "processes"], ["processes"]))  # law 9 records on two devices
def test_synchronous_split_is_synchronous_shared_bit_for_bit(shared, tmp_path, place):
    run(tmp_path / "split", **ALIGNED, **PLACES[place])
    ours, theirs = final(tmp_path / "split"), final(shared)
    assert [name for name in theirs if name != "optimizer/rng" and not torch.equal(ours[name], theirs[name])] == []
    for n in store.stored_steps(shared):
        for a, b in zip(store.read_step(tmp_path / "split", n), store.read_step(shared, n), strict=True):
            a.pop("timings"), b.pop("timings")
            assert a == b
    assert steps(tmp_path / "split") == steps(shared)
