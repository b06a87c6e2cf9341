"""Law 1, the ledger: every admitted task ends in exactly one of trained, filtered(rule), failed(reason), in flight. The
sum is checked at every step.

The same settings without oversampling are in test_law_02_lag.py, which checks lag and ledger of one run.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter

import pytest

from kits.fakes import CountingTrainer, Heard, Rollouts, endless, loop_kit
from kits.sweeps import covering
from rondel import loop
from rondel.buffer import Buffer
from rondel.core.errors import LawError, RewardError, UserError
from rondel.core.events import Admitted
from rondel.core.types import Failed, Group, Task, Trajectory
from rondel.driver.phases import in_time
from rondel.filter.complete import Complete


def whole(buffer: Buffer, trainer: CountingTrainer, rollouts: Rollouts, steps: int) -> None:
    kit = loop_kit(trainer, rollouts, steps)
    kit["attempt"], kit["judge"] = in_time(kit["attempt"], kit["judge"], buffer)
    asyncio.run(loop.run(endless(), buffer, **kit))


SETTINGS = list(itertools.product((1, 2, 5), (0, 1, 2), (1, 4), (0.0, 0.3), (False, True)))
CHOSEN = [
    row for row in SETTINGS if (row[0] + row[1] + (row[2] > 1) + (row[3] > 0) + row[4]) % 2
]  # each pair of values


@pytest.mark.parametrize("p,s,x,drop,retry", covering(SETTINGS, CHOSEN))
def test_no_group_is_trained_later_than_its_bound_and_none_is_lost_unseen(p, s, x, drop, retry):
    trainer = CountingTrainer()
    buffer = Buffer(groups_per_step=p, max_staleness=s, oversample=x, retry=retry)
    with Heard(Admitted) as admitted:
        whole(buffer, trainer, Rollouts(7, drop, spread=20), 25)
    assert all(0 <= version - born <= s for batch in trainer.seen for _, born, version in batch)
    ids = [number for batch in trainer.seen for number, _, _ in batch]
    assert len(ids) == len(set(ids)) == 25 * p == buffer.counts.trained
    book = buffer.ledger()
    assert book["issued"] == len(admitted) == sum(n for name, n in book.items() if name != "issued")
    assert book.get("filtered/late", 0) or s, "at S = 0 the surplus of every step is late"
    assert buffer.counts.retried == (book.get("filtered/late", 0) if retry else 0)
    tasks = Counter(e.task for e in admitted)
    assert set(tasks) == {f"t{n}" for n in range(len(admitted) - buffer.counts.retried)}, (
        "the stream goes on where it was"
    )


def test_whose_task_is_asked_again_is_trained_like_any_other():
    """Every third attempt is slow, whatever its task. Dropped, its task is gone; asked
    again, every task is trained once.
    """

    class Slow(Rollouts):
        async def generate_group(self, slot):
            for _ in range(400 if self.random.random() < 1 / 3 else self.random.randrange(4)):
                await asyncio.sleep(0)
            return Group(slot.number, slot.task, [Trajectory()], slot.born)

    def trained(retry: bool) -> tuple[Counter, set[str]]:
        buffer = Buffer(groups_per_step=4, oversample=4, retry=retry)
        seen: Counter = Counter()

        class Reading(CountingTrainer):
            async def step(self, batch, algo):
                seen.update(g.task.id for g in batch)
                return await super().step(batch, algo)

        whole(buffer, Reading(), Slow(3), 30)
        state = buffer.state_dict(buffer.version)
        return seen, {slot["task"]["id"] for slot in state["unfinished"]} | {
            group["task"]["id"] for group in state["finished"]
        }

    (dropped, _), (again, in_flight) = trained(False), trained(True)
    assert max(again.values()) == max(dropped.values()) == 1
    early = {f"t{n}" for n in range(100)}
    assert early <= again.keys() | in_flight
    assert len(early - dropped.keys()) > 20


def test_with_nobody_to_spare_the_learner_waits_and_loses_none():
    buffer = Buffer(groups_per_step=2, max_staleness=1)
    whole(buffer, CountingTrainer(), Rollouts(1, spread=30), 20)
    assert "filtered/late" not in buffer.ledger()


def test_the_state_of_a_buffer_knows_where_its_stream_is():
    buffer = Buffer(groups_per_step=2, oversample=3, retry=True)
    whole(buffer, CountingTrainer(), Rollouts(2, spread=30), 5)
    other = Buffer(groups_per_step=2, oversample=3, retry=True)
    other.load_state_dict(buffer.state_dict(buffer.version))
    assert (
        buffer.counts.retried <= other.counts.retried
        and other.counts.admitted - other.counts.retried == buffer.counts.admitted - buffer.counts.retried
    )


@pytest.mark.parametrize("retry", [False, True])
def test_who_is_late_when_a_checkpoint_is_read_goes_then(retry):
    """It was written before the new version was announced to the buffer."""

    async def scenario():
        buffer = Buffer(groups_per_step=1, oversample=1, retry=retry)
        slots = [await buffer.admit(Task(f"t{n}", "fake", {})) for n in range(2)]
        for slot in slots:
            await buffer.claim()
            await buffer.put(slot, Group(slot.number, slot.task, [], slot.born))
        await buffer.take()
        buffer.settle_groups()
        return buffer.state_dict(1)

    other = Buffer(groups_per_step=1, oversample=1, retry=retry)
    other.load_state_dict(asyncio.run(scenario()))
    assert (
        not other.groups.finished
        and other.counts.filtered["late"] == 1
        and [s.task.id for s in other.groups.waiting] == ["t1"] * retry
    )


# -- steps that are not whole ----------------------------------------------------------------------


def test_finite_tasks_end_with_a_short_batch():
    async def five():
        for n in range(5):
            yield Task(f"t{n}", "fake", {})

    trainer = CountingTrainer()
    asyncio.run(loop.run(five(), Buffer(groups_per_step=2), **loop_kit(trainer, Rollouts(0), 10)))
    assert [len(b) for b in trainer.seen] == [2, 2, 1]


def test_a_filter_that_drops_everything_ends_with_its_diagnosis():
    buffer = Buffer(groups_per_step=2, max_refills=3)
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(loop.run(endless(), buffer, **loop_kit(CountingTrainer(), Rollouts(0, drop=1.0), 5)))
    assert caught.group_contains(UserError, match="no group survived")


def test_a_reward_that_fails_everywhere_ends_with_its_own_words():
    buffer = Buffer(groups_per_step=2, max_refills=3)
    kit = loop_kit(CountingTrainer(), Rollouts(0), 5)

    async def attempt(slot):
        broken = [
            Trajectory(score=Failed("raised KeyError", "grade.py:3 in grade: KeyError: 'gold'")) for _ in range(2)
        ]
        return Group(slot.number, slot.task, broken, slot.born)

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(loop.run(endless(), buffer, **{**kit, "attempt": attempt, "judge": Complete()}))
    assert caught.group_contains(RewardError, match=r"KeyError: 'gold'\. Mend the reward or the environment")


def test_giving_back_twice_is_an_error():
    async def scenario():
        buffer = Buffer(groups_per_step=1)
        slot = await buffer.admit(Task("t", "fake", {}))
        await buffer.claim()
        await buffer.drop(slot, "x")
        await buffer.drop(slot, "x")

    with pytest.raises(LawError, match="nobody had claimed it"):
        asyncio.run(scenario())
