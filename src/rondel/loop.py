"""The loop: Generate -> Score -> Filter -> Train -> Sync, joined by one buffer. No mode in it: a
mode is three values.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from rondel.buffer import Buffer
from rondel.core.clocks import PhaseTimer
from rondel.core.events import GroupFinished, GroupsTaken, StepDone, emit
from rondel.core.types import DROPPED, Failed, Group, Slot, Task, Verdict
from rondel.runtime.telemetry.reward_hacking import from_scored
from rondel.system.loop_turns import TURN_TOKENS, drop_in_turns


async def feed_tasks(tasks: AsyncIterator[Task], buffer: Buffer) -> None:
    """Offer tasks for ever; all flow control of the system is in this wait."""
    async for task in tasks:
        await buffer.admit(task)
    await buffer.close()


async def run_rollout_lane(
    buffer: Buffer,
    attempt: Callable[[Slot], Awaitable[Group]],
    score: Callable[[Group], Awaitable[None]],
    judge: Callable[[Group], Verdict],
) -> None:
    """One lane of Generate -> Score -> Filter."""
    while slot := await buffer.claim():
        group = await attempt(slot)  # G trajectories at once; failures are data
        await score(group)
        verdict = judge(group)
        emit(_group_finished(group, verdict))
        if verdict.failed:
            buffer.counts.details[verdict.reason] = verdict.detail
        await (buffer.put(slot, group) if verdict.keep else buffer.drop(slot, verdict.reason, failed=verdict.failed))
        del group  # its tokens may be many, and the next wait is long


async def learn(buffer, prepare, trainer, engine, devices, sync, algo, steps: Iterable[int], milestone) -> None:
    """Train -> Sync, once for each step."""
    clock = PhaseTimer()
    for step in steps:
        groups = await buffer.take()
        clock.record_phase("wait")
        if not groups:
            return
        emit(GroupsTaken(step, buffer.version, groups, buffer.rule.max_staleness))
        batch = await prepare(groups)  # one packed batch; annotators that need an engine run here
        clock.record_phase("prepare")
        async with devices.parked():  # Shared: requests stand still.  Split: nothing
            async with devices.training():  # Shared: the trainer has the memory.  Split: nothing
                clock.record_phase("hand_over")
                stats = await trainer.step(batch, algo)
                clock.record_phase("train")
            clock.record_phase("hand_over")
            version = await sync(trainer, engine)  # nothing runs between the update and its commit
            clock.record_phase("sync")
        buffer.settle_groups(failed="" if stats.stepped else stats.note.partition(":")[0], outcomes=stats.outcomes)
        metrics = stats.metrics | from_scored(group for group in groups if not group.supervised)
        emit(StepDone(step, version, metrics, clock.finish_step(), buffer.ledger(), stats.note))
        await milestone(step, version, batch)  # evaluate and checkpoint at a version, before anything new is admitted
        held = [trajectory for group in groups for trajectory in group.trajectories] + [*getattr(batch, "samples", ())]
        del groups, batch  # as above
        if sum(len(one.tokens) for one in held) > TURN_TOKENS:
            await drop_in_turns(held, lambda one: len(one.tokens))
        del held
        clock.record_phase("milestone")  # counted with the step that follows
        await buffer.advance(version)  # room appears, the feed wakes


async def run(
    tasks, buffer, *, attempt, score, judge, prepare, trainer, engine, devices, sync, algo, steps, milestone
) -> None:
    """One feed, (S + 1)·P + X rolling lanes and the learner; ends with the learner, and the first error ends all."""
    async with asyncio.TaskGroup() as crew:
        lanes = [crew.create_task(feed_tasks(tasks, buffer), name="feed")]
        for number in range(buffer.rule.max_open_groups):
            lanes.append(crew.create_task(run_rollout_lane(buffer, attempt, score, judge), name=f"roll-{number}"))
        await learn(buffer, prepare, trainer, engine, devices, sync, algo, steps, milestone)
        for lane in lanes:
            lane.cancel()


def _group_finished(group: Group, verdict: Verdict) -> GroupFinished:
    return GroupFinished(
        number=group.id,
        task=group.task.id,
        born=group.born,
        kept=verdict.keep,
        reason=verdict.reason,
        rewards=[] if group.supervised else [t.reward for t in group.policy_samples if t.reward is not None],
        lengths=[t.written for t in group.policy_samples],
        failed=sum(isinstance(t.score, Failed) and t.score.reason != DROPPED for t in group.policy_samples),
        episodes=group.count_episodes(),
        boxes=group.sum_boxes(),
        truncated=sum(t.is_truncated for t in group.policy_samples),
        source=str(group.task.data.get("source", "")),
        supervised=group.supervised,
    )
