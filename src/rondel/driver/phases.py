"""The phases of one run, what happens between two versions, and how it is stopped between two steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rondel import loop
from rondel.algos.table import SFT
from rondel.buffer import LATE, Buffer
from rondel.buffer.deadline import attempt_in_time
from rondel.buffer.state import encode
from rondel.core.config.job import Job
from rondel.core.errors import RewardError, UserError
from rondel.core.events import Checkpointed, Checkpointing, Evaluating, Resumed, RunEnded, Warned, emit, subscribe
from rondel.core.schedule_gate import ScheduleGate
from rondel.core.types import POLICY, Group, Slot, Trajectory, Verdict
from rondel.driver.best_checkpoint import BestCheckpoint, refuse_unknown_metric
from rondel.driver.elastic_engines import admit_engines, scale_engines
from rondel.driver.evaluation import evaluate, evaluation_sampling, evaluation_sets
from rondel.driver.rollouts import GroupRollouts, SupervisedRollouts, prepare, prepare_of, rollouts_of
from rondel.driver.run_record import OrderedDevices, score_in_turn
from rondel.driver.weight_delivery import WeightDelivery
from rondel.filter import chain_filters
from rondel.generate.envs.order import ShuffledOrder, TaskAdmissions, stream_tasks
from rondel.runtime.journal.store import RolloutStore
from rondel.runtime.termination import GracefulStop
from rondel.train.checkpoint import Checkpoints
from rondel.train.pack import TrainBatch

if TYPE_CHECKING:
    from rondel.assemble.run_components import Components


WAIT = 1800.0  # seconds without any change in the buffer after which a wait is an error (law 10)
Attempt = Callable[[Slot], Awaitable[Group]]
Judge = Callable[[Group], Verdict]


@dataclass(frozen=True)
class PhasePlan:
    """What the recipe says of the phases, read before the first step: a key without effect is found by then, and an
    evaluation that cannot be sampled, too.
    """

    warmup_steps: int
    warmup_groups: int
    steps: int
    groups_per_step: int
    max_staleness: int
    window: int | None
    oversample: int
    retry: bool
    max_refills: int
    patience: float
    checkpoint_every: int
    evaluate_every: int

    @classmethod
    def from_job(cls, job: Job, parts: Components) -> PhasePlan:
        loop, warmup, evaluation = job.loop, job.loop.warmup, job.task.eval
        if parts.tasks.evaluated:
            evaluation_sampling(evaluation, parts.sampling)
        if evaluation.samples > 1:
            _ = evaluation.reported_k, evaluation.pass_reward  # by every evaluation, the first of which is later
        refuse_unknown_metric(job.run.checkpoint.best, [*evaluation_sets(evaluation, parts.tasks)], evaluation)
        return cls(
            warmup_steps=warmup.steps,
            warmup_groups=warmup.groups_per_step,
            steps=job.steps,
            groups_per_step=loop.groups_per_step,
            max_staleness=loop.max_staleness,
            window=None if loop.window == "auto" else loop.window,
            oversample=loop.oversample.groups,
            retry=loop.oversample.late == "retry",
            max_refills=loop.max_refills,
            patience=job.task.reward_calls.patience,
            checkpoint_every=job.run.checkpoint.every,
            evaluate_every=evaluation.every,
        )


class RunPhases:
    """The phases of one run and what happens between two versions."""

    def __init__(
        self,
        job: Job,
        parts: Components,
        folder: Path,
        checkpoints: Checkpoints,
        rollouts: RolloutStore,
        ending: GracefulStop,
        gate: ScheduleGate,
    ) -> None:
        self.job, self.parts, self.folder, self.checkpoints, self.rollouts = job, parts, folder, checkpoints, rollouts
        self.ending, self.gate = ending, gate
        parts.engine = parts.placed.engine = gate.wrap_engine(parts.engine)
        self.plan, self.config = PhasePlan.from_job(job, parts), job.digest()
        self.trained_policies = {POLICY, *(name for name, policy in job.policies.items() if not policy.frozen)}
        sets, metric = [*evaluation_sets(job.task.eval, parts.tasks)], job.run.checkpoint.best
        self.best = BestCheckpoint(metric, sets, checkpoints) if metric else None
        self.delivery = WeightDelivery(parts.sync, parts.placed)
        # an update that cannot be made again, another way or beside a step needs no delivery
        sync = parts.sync
        self.updates_plainly = parts.placed.stays_whole and not sync.has_ways and not sync.keeps_snapshots
        self.buffer: Buffer
        self.began = time.perf_counter()
        self.total = self.plan.warmup_steps + self.plan.steps
        self.rest = asyncio.Event()  # set while no step is being trained
        # step, version, and if synchronous the loop as it was then
        self.done: tuple[int, int, dict[str, Any] | None] = (0, 0, None)
        self.saved = 0  # the step of the newest checkpoint
        self.unmeasured = 0  # a step whose evaluation is due and has not ended
        self.writing: asyncio.Task[None] | None = None

    async def run_phases(self, found: tuple[Path, dict[str, Any]] | None) -> None:
        """The phases to their end, or until a signal, or until too much has failed."""
        self.rest.set()
        failures = self.parts.failures
        work, asked = asyncio.create_task(self._run_phases(found)), asyncio.create_task(self.ending.wait())
        spent, broken = (asyncio.create_task(event.wait()) for event in (failures.spent, self.delivery.broken))
        try:
            await asyncio.wait([work, asked, spent, broken], return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and broken.done():
                await self.delivery.finish(self.parts.trainer, self.parts.engine)
            if not work.done():
                await asyncio.wait(
                    [work, rest := asyncio.create_task(self.rest.wait())], return_when=asyncio.FIRST_COMPLETED
                )
                rest.cancel()
            if work.done():
                return work.result()
        except BaseException:
            await self.delivery.cancel()
            raise
        finally:
            for each in (asked, spent, broken, work):
                each.cancel()
            await asyncio.wait([work])
        await self._save_checkpoint()
        state = (
            f"after step {self.saved} of {self.total}, which is in a checkpoint"
            if self.saved
            else "before its first step"
        )
        if failures.why and not self.ending.asked:
            raise RewardError(
                f"the run stopped {state}: {failures.why}. The limit is task.reward.max_failures = {failures.most:g}. "
                "Mend the reward or the environment and give the same command: it goes on from there"
            )
        raise self.ending.stopped_at(state)

    async def _run_phases(self, found: tuple[Path, dict[str, Any]] | None) -> None:
        parts = self.parts
        done, saved = 0, None
        if found:
            path, saved = found
            await parts.trainer.load(path)
            done = self.saved = saved["step"]
            self.done = (done, saved["buffer"]["version"], None)
            emit(Resumed(done, saved["buffer"]["version"], str(path)))
        if self.best:
            self.best.restore((saved or {}).get("best"))
        await self.delivery.update_engines(parts.trainer, parts.engine)  # the initial sync
        parts.sync.moved = lambda: parts.trainer.moved
        async with self._open_to_newcomers():
            await self._train_phases(done, saved)

    @asynccontextmanager
    async def _open_to_newcomers(self) -> AsyncIterator[None]:
        """Engines of others may come late or come back, and ours may become more or fewer."""
        parts, task = self.parts, None
        if (reach := parts.placed.reach) is not None:
            urls = parts.job.engine.urls
            task = asyncio.create_task(
                admit_engines(parts.engine, self.folder, urls, reach, parts.sync.catch_up), name="newcomers"
            )
        elif parts.placed.new_engine is not None:
            task = asyncio.create_task(
                scale_engines(parts.placed, self.folder, parts.sync), name="engines that come and go"
            )
        try:
            yield
        finally:
            if task is not None:
                task.cancel()
                await asyncio.wait([task])

    async def _train_phases(self, done: int, saved: dict[str, Any] | None) -> None:
        parts = self.parts
        if done == 0 or (saved or {}).get("unmeasured"):  # the latter: a signal cut it off
            await self._run_evaluation(done)
            if self.best and self.best.improved_at(done):
                self.best.state_at(done)
                self.best.publish()
        warm, steps = self.plan.warmup_steps, self.plan.steps
        if done < warm:
            done = await self._run_warmup(range(done + 1, warm + 1), saved)
            saved = None
        await self._run_reinforcement(range(done + 1, warm + steps + 1), saved if done > warm else None)
        await self._finish_delivery()
        emit(RunEnded(warm + steps, parts.engine.version, "all steps done", time.perf_counter() - self.began))

    async def _run_warmup(self, steps: range, saved: dict[str, Any] | None) -> int:
        """A supervised phase: the same loop, whose Generate copies answers."""
        parts = self.parts
        buffer = self._make_buffer(self.plan.warmup_groups, 0, None, saved)
        await self._run_loop(
            buffer,
            ShuffledOrder(parts.tasks.train, parts.job.loop.seed),
            SupervisedRollouts(parts, 1),
            chain_filters([]),
            SFT,
            steps,
        )
        return steps.stop - 1

    async def _run_reinforcement(self, steps: range, saved: dict[str, Any] | None) -> None:
        parts, plan = self.parts, self.plan
        buffer = self._make_buffer(plan.groups_per_step, plan.max_staleness, plan.window, saved, plan.oversample)
        bare = [row.name for row in parts.rows.all_rows if "advantages" in row.needs and not row.corrects_staleness]
        if plan.max_staleness and bare:
            emit(
                Warned(
                    f"max_staleness = {plan.max_staleness} without a correction in {', '.join(bare)}: stale tokens are "
                    "trained as if they were fresh. Set algo.correction.kind = 'importance'"
                )
            )
        if saved and saved.get("order") is not None:
            parts.order.load(saved["order"])
        readers = [parts.order.on_event]
        if parts.returning is not None:
            parts.returning.restore_steps(self.folder, range(plan.warmup_steps + 1, steps.start))
            readers.append(parts.returning.on_event)
        with ExitStack() as ends:
            for read in readers:
                ends.callback(subscribe(read))
            await self._run_loop(
                buffer, parts.order, rollouts_of(parts), parts.judge, parts.algo, steps, prepare_of(parts)
            )

    def _make_buffer(
        self, groups: int, staleness: int, window: int | None, saved: dict[str, Any] | None, oversample: int = 0
    ) -> Buffer:
        version = self.parts.engine.version
        self.buffer = Buffer(
            groups_per_step=groups,
            max_staleness=staleness,
            window=window,
            oversample=oversample,
            retry=self.plan.retry,
            version=version,
            max_refills=self.plan.max_refills,
            patience=WAIT + self.plan.patience,  # while a run pauses nothing changes
            gate=self.gate,
        )
        self.gate.begin_phase()
        if saved:
            self.buffer.load_state_dict(saved["buffer"])
        return self.buffer

    async def _run_loop(
        self,
        buffer: Buffer,
        order: TaskAdmissions,
        rollouts: GroupRollouts,
        judge: Callable,
        algo: Any,
        steps: range,
        prepare: Callable = prepare,
    ) -> None:
        parts = self.parts
        tasks = stream_tasks(order, start=buffer.counts.admitted - buffer.counts.retried, room=buffer.wait_for_room)
        attempt: Attempt = rollouts.generate_group
        score: Callable[[Group], Awaitable[None]] = rollouts.score
        devices: Any = parts.placed.devices
        if buffer.rule.oversample:
            attempt, judge = in_time(attempt, judge, buffer)
        if self.gate.keeps_order:
            score, devices = score_in_turn(score, buffer), OrderedDevices(devices, self.gate, buffer)
        await loop.run(
            tasks,
            buffer,
            attempt=attempt,
            score=score,
            judge=judge,
            prepare=self._guard_prepare(prepare),
            trainer=parts.trainer,
            engine=parts.engine,
            devices=devices,
            sync=self.sync,
            algo=algo,
            steps=steps,
            milestone=self.milestone,
        )

    def _guard_prepare(self, prepare: Callable) -> Callable:
        """What begins a step; none is begun any more once the run was asked to end."""

        async def start_step(groups: list[Group]) -> TrainBatch:
            if self.ending.asked or self.parts.failures.why:
                await asyncio.get_running_loop().create_future()  # until it is cancelled
            self.rest.clear()
            tell_silence(groups, self.trained_policies, trained=self.buffer.counts.trained)
            return await prepare(groups)

        return start_step

    async def sync(self, trainer: Any, engine: Any) -> int:
        """The update: beside the next step where samples may be stale, the transport keeps what is published and
        engines have devices of their own. A recorded run waits, for its schedule says between which requests a version
        came.
        """
        if self.updates_plainly:
            return await self.parts.sync(trainer, engine)
        apart = self.parts.sync.keeps_snapshots and not self.parts.placed.devices.in_turn
        if apart and self.buffer.rule.max_staleness and not self.gate.keeps_order:
            return await self.delivery.start(trainer, engine, self.buffer)
        return await self.delivery.update_engines(trainer, engine)

    async def _finish_delivery(self) -> None:
        """Engines serve what was published last."""
        if not self.updates_plainly:
            await self.delivery.finish(self.parts.trainer, self.parts.engine)

    # -- between two versions --------------------------------------------------------------------

    async def milestone(self, step: int, version: int, batch: TrainBatch) -> None:
        """Store what training learned of the rollouts; evaluate; checkpoint."""
        plan, last = self.plan, self.total
        await self.rollouts.annotate_rollouts(
            step, trainer_logprobs=PerToken(batch, "trained"), advantages=PerToken(batch, "advantages")
        )
        self.done = (step, version, None if self.buffer.rule.max_staleness else self._loop_state(version))
        measures = step in (last, plan.warmup_steps) or (plan.evaluate_every and step % plan.evaluate_every == 0)
        self.unmeasured = step if measures else 0
        if step < last:
            self.rest.set()
        if measures:
            await self._run_evaluation(step)
        due = step == last or (plan.checkpoint_every and step % plan.checkpoint_every == 0)
        if due or (self.best and self.best.improved_at(step)):
            await self._save_checkpoint()

    async def _save_checkpoint(self) -> None:
        """The last whole step, if it is not in one already. What has begun is written to
        its end, whoever waits for it no more.
        """
        if self.writing is None or self.writing.done():
            self.writing = asyncio.create_task(self._write_checkpoint())
        await asyncio.shield(self.writing)

    async def _write_checkpoint(self) -> None:
        """A synchronous run replays what it had begun since; another one goes on with it."""
        await self._finish_delivery()
        step, version, then = self.done
        if step == self.saved:
            return
        await self.buffer.waiters.pass_gate("save", version, who="learner")
        began, told = time.perf_counter(), {"step": step, "config": self.config, **(then or self._loop_state(version))}
        if self.unmeasured == step:
            told["unmeasured"] = True
        if self.best:
            told["best"] = self.best.state_at(step)
        emit(Checkpointing(step))
        await self.rollouts.wait_until_written()
        path = await self.checkpoints.write(step, self.parts.trainer.save, told, encode)
        self.saved = step
        if self.best:
            self.best.publish()
        emit(Checkpointed(step, version, str(path), time.perf_counter() - began))

    def _loop_state(self, version: int) -> dict[str, Any]:
        """Of one moment: an order has heard of the groups that the buffer has finished, and of no others."""
        return {"buffer": self.buffer.state_dict(version, encoded=False), "order": self.parts.order.state_dict()}

    async def _run_evaluation(self, step: int) -> None:
        if self.parts.tasks.evaluated:
            await self._finish_delivery()
            for done in await evaluate(self.parts, step, lambda *told: emit(Evaluating(step, *told))):
                emit(done.event)
                if self.best:
                    self.best.note_evaluation(done.event)
        self.unmeasured = 0


def in_time(attempt: Attempt, judge: Judge, buffer: Buffer) -> tuple[Attempt, Judge]:
    """An attempt ends when it is late; then there is nothing to judge."""
    return lambda slot: attempt_in_time(
        buffer, slot, attempt
    ), lambda group: judge(group) if group.trajectories else Verdict(False, LATE)


class PerToken(Mapping[tuple[int, int], np.ndarray]):
    """One field of TokenBatch for every trained token, laid out over the whole stream: (group, sample) -> [T], made
    when it is asked for. Nothing of what nobody credited (a frozen policy's), or no pass computed.
    """

    def __init__(self, batch: TrainBatch, name: str) -> None:
        self._known = {
            (s.group, s.index): (len(s.tokens), s.trainable, getattr(s.known, name))
            for s in batch.samples
            if s.known.advantages is not None and getattr(s.known, name) is not None
        }

    def __getitem__(self, key: tuple[int, int]) -> np.ndarray:
        tokens, trainable, told = self._known[key]
        values = np.zeros(tokens, np.float32)
        values[trainable] = np.asarray(told)
        return values

    def __contains__(self, key: object) -> bool:
        return key in self._known

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def tell_silence(groups: list[Group], policies: Collection[str], *, trained: int) -> None:
    """Of a step none of whose episodes holds a token of a trained policy: an error while no group was trained, for
    then nothing can be learned; a warning later. Single episodes may well be silent, and so may one of several
    policies.
    """
    written = [t for group in groups for t in group.policy_samples]
    if not written or any(t.written and t.policy in policies for group in groups for t in group.trajectories):
        return
    cause, remedy = explain_silence(written)
    told = f"the policy wrote nothing in the {len(written)} answers of a step, so there is nothing to train: {cause}"
    if not trained:
        raise UserError(f"{told}. To mend it, {remedy}")
    emit(Warned(f"{told}. To mend it, {remedy}"))


def explain_silence(answers: list[Trajectory]) -> tuple[str, str]:
    """(cause, remedy) where no trained policy wrote in any of them."""
    if any(t.written for t in answers):
        return (
            "every agent that spoke is played by a frozen policy",
            "let one speak that a trained policy plays, or remove frozen = true",
        )
    if all(t.finish_reason == "length" for t in answers):
        return (
            "their prompts leave no room for an answer",
            "take shorter prompts, a model with a longer context, or a larger task.env.budget",
        )
    return "the environment never asked it", "let it: `await chat.reply()` (`rondel check-env RUN.toml` plays it)"
