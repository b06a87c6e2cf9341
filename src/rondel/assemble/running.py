"""`rondel train`: one run folder, its phases, its milestones, from nothing or from the last checkpoint."""

from __future__ import annotations

import asyncio
import itertools
import os
import platform
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import tomli_w
import torch
import transformers
from filelock import FileLock, Timeout

from rondel import loop
from rondel.algos.table import SFT
from rondel.assemble.hosts import follow
from rondel.assemble.joining import admit
from rondel.assemble.parts import Parts, build, row_of, sampling_of
from rondel.assemble.recording import InOrder, Scheduled, finishing
from rondel.assemble.rollouts import Demonstrations, Rollouts, prepare, prepare_of, rollouts_of
from rondel.buffer import LATE, Buffer
from rondel.evaluate import evaluate
from rondel.filter import chain
from rondel.generate.envs.stream import stream
from rondel.runtime.cluster import torchrun
from rondel.runtime.devices import keep_memory, pick_device
from rondel.runtime.journal import store
from rondel.runtime.journal.log import FILE, Journal
from rondel.runtime.journal.schedule import Recorder, Schedule
from rondel.runtime.telemetry.card import write_card
from rondel.runtime.telemetry.metrics import LateBias, StepMetrics
from rondel.runtime.telemetry.progress import Progress
from rondel.runtime.telemetry.sinks import open_sinks
from rondel.train.checkpoint import Checkpoints
from rondel.train.pack import Batch
from rondel.words.config import Job
from rondel.words.errors import ConfigError, StalledError, SyncError, WorkerError
from rondel.words.events import Checkpointed, Resumed, RunEnded, RunStarted, Warned, emit, subscribe
from rondel.words.types import Group, Slot, Verdict

RESTARTS = 3  # of a run that lost a rank of its trainer


def train(
    job: Job, *, quiet: bool = False, built: Callable[[Parts], Any] | None = None, schedule: Schedule | None = None
) -> dict[str, Any]:
    """Run the recipe, or continue its folder. -> the run card. `built` sees the parts before the first step; a schedule is followed."""
    keep_memory()
    if job.place.cluster == "torchrun" and torchrun.rank_and_size()[0]:
        follow(job, row_of(job), sampling_of(job), torchrun.own_device(pick_device(job.place.device)), None)
        return {}
    folder = Path(job.run.folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            return _train(job, folder, quiet, built, schedule)
    except Timeout as error:
        raise ConfigError(f"another process is training in {folder}; wait for it, or set --run.folder to another one") from error


def _train(job: Job, folder: Path, quiet: bool, built: Callable[[Parts], Any] | None, schedule: Schedule | None) -> dict[str, Any]:
    _same_recipe(job, folder)
    checkpoints = Checkpoints(folder / "checkpoints", job.run.checkpoint.keep)
    total = job.loop.warmup.steps + job.loop.steps
    with ExitStack() as ends:
        progress = ends.enter_context(Progress(total, quiet=quiet))
        ends.callback(subscribe(progress.read))
        found = checkpoints.latest()
        if found and found[1]["step"] >= total:
            progress.say(
                f"{folder} is complete: {found[1]['step']} of {total} steps. To go on, set --loop.steps higher; the card is in {folder / 'card.md'}"
            )
            return write_card(folder)
        interrupted = not found and (folder / FILE).is_file()  # before its first checkpoint
        if job.run.record and (found or interrupted):
            raise ConfigError(
                f"{folder} was interrupted, and what was in flight then cannot be replayed: go on with --run.record=false, or begin in another run.folder"
            )
        parts = build(job, folder)
        ends.callback(lambda: parts.close())  # those of the last start
        if built:
            built(parts)
        checkpoints.check_disk(parts.placed.checkpoint_bytes)
        if job.run.record:
            schedule = Recorder(folder)
            ends.callback(schedule.close)
        journal = Journal(folder, job.run.durability)
        ends.callback(journal.close)
        sinks = open_sinks(job.run.sinks, folder, after=found[1]["step"] if found else -1)
        for sink in sinks:
            ends.callback(sink.close)
        for reader in (journal.write, store.RolloutStore(folder).write, StepMetrics(*(s.write for s in sinks), LateBias().write).read):
            ends.callback(subscribe(reader))
        if unread := [key for key in job.unread() if not key.startswith(("run.", "loop.", "task.eval", "trainer.", "algo."))]:
            raise ConfigError(
                f"set, but without effect in this run: {', '.join(unread)}. Remove them, or see `rondel explain` for what reads them"
            )
        _replace(folder / "job.toml", tomli_w.dumps(_without_none(job.tree())))
        emit(RunStarted(str(folder), job.digest(), facts_of(parts)))
        run = Run(job, parts, folder, checkpoints, schedule)
        if interrupted:
            emit(Resumed(0, 0, ""))
        for restarts in itertools.count(1):
            try:
                asyncio.run(run.all(found))
                return write_card(folder)
            except BaseException as error:
                lost = lost_worker(error)
                if lost is None or restarts > RESTARTS or schedule is not None:
                    raise
                found = checkpoints.latest()
                emit(
                    Warned(
                        f"{lost}\nThe run goes on from {'the last checkpoint' if found else 'its beginning'} ({restarts} of at most {RESTARTS} times)"
                    )
                )
            parts.close()
            parts = build(job, folder)
            run = Run(job, parts, folder, checkpoints, schedule)
            if not found:
                emit(Resumed(0, 0, ""))
        raise AssertionError


Attempt = Callable[[Slot], Awaitable[Group]]
Judge = Callable[[Group], Verdict]


def in_time(attempt: Attempt, judge: Judge, buffer: Buffer) -> tuple[Attempt, Judge]:
    """An attempt ends when it is late; then there is nothing to judge."""
    return lambda slot: buffer.in_time(slot, attempt(slot)), lambda group: judge(group) if group.trajectories else Verdict(False, LATE)


def lost_worker(error: BaseException) -> WorkerError | StalledError | None:
    """The worker that ended, if that is all that went wrong."""
    if isinstance(error, BaseExceptionGroup):
        found = [lost_worker(inner) for inner in error.exceptions]
        return next((one for one in found if one), None) if all(found) else None
    return error if isinstance(error, WorkerError) else None


class Run:
    """The phases of one run and what happens between two versions."""

    def __init__(self, job: Job, parts: Parts, folder: Path, checkpoints: Checkpoints, schedule: Schedule | None) -> None:
        self.job, self.parts, self.folder, self.checkpoints, self.schedule = job, parts, folder, checkpoints, schedule
        if schedule is not None:
            parts.placed.engine = Scheduled(parts.engine, schedule)
        self.buffer: Buffer
        self.began = time.perf_counter()

    async def all(self, found: tuple[Path, dict[str, Any]] | None) -> None:
        parts = self.parts
        done, saved = 0, None
        if found:
            path, saved = found
            await parts.trainer.load(path)
            done = saved["step"]
            emit(Resumed(done, saved["buffer"]["version"], str(path)))
        await self.sync(parts.trainer, parts.engine)  # the initial sync
        parts.sync.moved = lambda: parts.trainer.moved
        async with self._open_to_newcomers():
            await self._phases(done, saved)

    @asynccontextmanager
    async def _open_to_newcomers(self) -> AsyncIterator[None]:
        """Engines of others may come late or come back."""
        parts, task = self.parts, None
        if (reach := parts.placed.reach) is not None:
            urls = parts.job.engine.url or []
            known = [urls] if isinstance(urls, str) else urls
            task = asyncio.create_task(admit(parts.engine, self.folder, known, reach, parts.sync.catch_up), name="newcomers")
        try:
            yield
        finally:
            if task is not None:
                task.cancel()
                await asyncio.wait([task])

    async def _phases(self, done: int, saved: dict[str, Any] | None) -> None:
        parts, job = self.parts, self.job
        if done == 0:
            await self._evaluate(0)
        warm, steps = job.loop.warmup.steps, job.loop.steps
        if done < warm:
            done = await self._warmup(range(done + 1, warm + 1), saved)
            saved = None
        await self._reinforce(range(done + 1, warm + steps + 1), saved if done > warm else None)
        emit(RunEnded(warm + steps, parts.engine.version, "all steps done", time.perf_counter() - self.began))

    async def _warmup(self, steps: range, saved: dict[str, Any] | None) -> int:
        """A supervised phase: the same loop, whose Generate copies answers."""
        parts = self.parts
        buffer = self._buffer(parts.job.loop.warmup.groups_per_step, 0, None, saved)
        await self._loop(buffer, Demonstrations(parts, 1), chain([]), SFT, steps)
        return steps.stop - 1

    async def _reinforce(self, steps: range, saved: dict[str, Any] | None) -> None:
        parts, job = self.parts, self.job
        window = None if job.loop.window == "auto" else job.loop.window
        buffer = self._buffer(job.loop.groups_per_step, job.loop.max_staleness, window, saved, job.loop.oversample)
        if job.loop.max_staleness and "advantages" in parts.row.needs and not parts.row.corrects:
            emit(
                Warned(
                    f"max_staleness = {job.loop.max_staleness} without a correction: stale tokens are trained as if they were fresh. Set algo.correction.kind = 'importance'"
                )
            )
        await self._loop(buffer, rollouts_of(parts), parts.judge, parts.algo, steps, prepare_of(parts))

    def _buffer(self, groups: int, staleness: int, window: int | None, saved: dict[str, Any] | None, oversample: int = 0) -> Buffer:
        version = self.parts.engine.version
        self.buffer = Buffer(
            groups_per_step=groups,
            max_staleness=staleness,
            window=window,
            oversample=oversample,
            retry=self.job.loop.late == "retry",
            version=version,
            start=version,
            max_refills=self.job.loop.max_refills,
            order=self.schedule,
        )
        if self.schedule is not None:
            self.schedule.begin()
        if saved:
            self.buffer.restore(saved["buffer"])
        return self.buffer

    async def _loop(
        self, buffer: Buffer, rollouts: Rollouts, judge: Callable, algo: Any, steps: range, prepare: Callable = prepare
    ) -> None:
        parts = self.parts
        tasks = stream(parts.tasks.train, seed=self.job.loop.seed, start=buffer.admitted - buffer.retried)
        attempt, score, devices = rollouts.attempt, rollouts.score, parts.placed.devices
        if buffer.oversample:
            attempt, judge = in_time(attempt, judge, buffer)
        if self.schedule is not None:
            score, devices = finishing(score, buffer), InOrder(devices, self.schedule, buffer)
        await loop.run(
            tasks, buffer, attempt=attempt, score=score, judge=judge, prepare=prepare, trainer=parts.trainer,
            engine=parts.engine, devices=devices, sync=self.sync, algo=algo, steps=steps, milestone=self.milestone,
        )  # fmt: skip

    async def sync(self, trainer: Any, engine: Any) -> int:
        """The update, once more if an engine ended in the middle of it."""
        while True:
            try:
                return await self.parts.sync(trainer, engine)
            except (WorkerError, StalledError, SyncError):
                if not await self.parts.placed.heal():
                    raise

    # -- between two versions --------------------------------------------------------------------

    async def milestone(self, step: int, version: int, batch: Batch) -> None:
        """Store what training learned of the rollouts; evaluate; checkpoint."""
        job, last = self.job, self.job.loop.warmup.steps + self.job.loop.steps
        store.annotate_step(self.folder, step, trainer_logprobs=per_token(batch, "trained"), advantages=per_token(batch, None))
        if step == last or step == job.loop.warmup.steps or (job.task.eval.every and step % job.task.eval.every == 0):
            await self._evaluate(step)
        if step == last or (job.run.checkpoint.every and step % job.run.checkpoint.every == 0):
            began = time.perf_counter()
            await self.buffer.turn("save", version, who="learner")
            state = {"step": step, "config": job.digest(), "buffer": self.buffer.state(version)}
            path = await self.checkpoints.write(step, self.parts.trainer.save, state)
            emit(Checkpointed(step, version, str(path), time.perf_counter() - began))

    async def _evaluate(self, step: int) -> None:
        if self.parts.tasks.held_out:
            emit(await evaluate(self.parts, step))


def per_token(batch: Batch, note: str | None) -> dict[tuple[int, int], list[float]]:
    """A note (or the advantages) of every trained token, laid out over the whole stream."""
    out = {}
    for sample in batch.samples:
        values = [0.0] * len(sample.tokens)
        told = sample.notes.get(note) if note else sample.advantages
        for i, at in enumerate(sample.trainable.tolist()):
            values[at] = float(told[i]) if told is not None else float("nan")
        out[(sample.group, sample.index)] = values
    return out


def facts_of(parts: Parts) -> dict[str, Any]:
    """What the run card says about the machine and the software, as measured or read."""
    from importlib.metadata import version

    job, known = parts.job, parts.known
    p, g, u = job.loop.groups_per_step, job.algo.group_size, job.loop.updates_per_step
    return {
        "versions": {
            "rondel": version("rondel"),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "device": torch.cuda.get_device_name()
        if torch.cuda.is_available() and parts.job.place.device != "cpu"
        else f"cpu ({platform.machine()})",
        "place": parts.placed.where,
        "dtypes": {
            "compute": str(known.dtype).removeprefix("torch."),
            "master": "float32",
            "logprobs": "float32",
            "adapter": parts.resolved["model.adapter"],
        },
        "model": {"name": known.name, "parameters": known.parameters},
        "batch": f"{p} groups x {g} samples = {p * g} trajectories a step, {u} optimizer update{'s' * (u > 1)}",
        "tasks": {
            "train": len(parts.tasks.train),
            "held_out": len(parts.tasks.held_out),
            "duplicates": parts.tasks.duplicates,
            "leaked": parts.tasks.leaked,
        },
        "seed": job.loop.seed,
        "algorithm": parts.row.name,
        "resolved": parts.resolved,
    }


def _same_recipe(job: Job, folder: Path) -> None:
    """A folder is continued only by the recipe that began it; otherwise every difference is shown."""
    path = folder / "job.toml"
    if not path.is_file():
        return
    old, new = (_flat(_without_none(recipe.tree())) for recipe in (Job.read(path), job))
    differ = [k for k in sorted(old.keys() | new.keys()) if old.get(k) != new.get(k) and not k.startswith("run.") and k != "loop.steps"]
    if differ:
        rows = "; ".join(f"{k}: {old.get(k, 'not set')!r} -> {new.get(k, 'not set')!r}" for k in differ)
        raise ConfigError(
            f"{folder} was begun with another recipe ({rows}). Continue it with the old values, or train into another folder: --run.folder=..."
        )
    before, now, schedule = old.get("loop.steps"), new.get("loop.steps"), new.get("trainer.schedule", "constant")
    if before != now and schedule != "constant":
        emit(Warned(f"loop.steps {before} -> {now}: the {schedule} schedule now ends at step {now}, so the learning rate jumps here"))


def _replace(path: Path, text: str) -> None:
    """Whole or not at all: a run killed while it starts must still find its recipe."""
    draft = path.with_name(f".{path.name}.tmp")
    draft.write_text(text)
    os.replace(draft, path)


def _without_none(node: Any) -> Any:
    """TOML has no null."""
    if isinstance(node, dict):
        return {k: _without_none(v) for k, v in node.items() if v is not None}
    return [_without_none(v) for v in node] if isinstance(node, list | tuple) else node


def _flat(node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in node.items():
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out
