"""`rondel train`: one run folder, its phases, its milestones, from nothing or from the last checkpoint."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import tomli_w

from rondel.assemble.components import build, with_steps
from rondel.assemble.facts import facts_of, warn_of_other_arithmetic
from rondel.assemble.recipe_parts import sampling_of
from rondel.assemble.rows import rows_of
from rondel.assemble.run_components import Components
from rondel.assemble.workers import follow_leader
from rondel.core.clocks import run_loop
from rondel.core.config.differences import changed_keys, changed_text, without_none
from rondel.core.config.job import Job
from rondel.core.config.section import split_kind
from rondel.core.config.toml_reader import ORIGIN
from rondel.core.errors import CheckpointError, ConfigError, StalledError, WorkerError
from rondel.core.events import (
    Broke,
    Resumed,
    RunStarted,
    Stalled,
    StepDone,
    Warned,
    WorkerTime,
    drop_on_failure,
    emit,
    subscribe,
    warn_aloud,
)
from rondel.core.schedule_gate import ScheduleGate
from rondel.driver.phases import RunPhases
from rondel.runtime.cluster import torchrun
from rondel.runtime.devices import pick_device, prepare_controller, prepare_process
from rondel.runtime.journal import store
from rondel.runtime.journal.log import FILE, Journal, read
from rondel.runtime.journal.schedule import FILE as SCHEDULE
from rondel.runtime.journal.schedule import OrderRecorder
from rondel.runtime.memory import ran_out
from rondel.runtime.stacks import StackDumper
from rondel.runtime.telemetry.advice import Advisor, PlacementFacts
from rondel.runtime.telemetry.card import write_card
from rondel.runtime.telemetry.metrics import LateBias, StepMetrics
from rondel.runtime.telemetry.otel import traces_of
from rondel.runtime.telemetry.progress import ProgressPrinter
from rondel.runtime.telemetry.reward_hacking import HackingMonitor
from rondel.runtime.telemetry.sinks import open_sinks, traces_address
from rondel.runtime.termination import GracefulStop
from rondel.system.files import make_folder, replace_file
from rondel.system.folder_lock import lock_folder
from rondel.train.checkpoint import Checkpoints

RESTARTS = 3  # of a run that lost a rank of its trainer


def train(
    job: Job,
    *,
    quiet: bool = False,
    built: Callable[[Components], Any] | None = None,
    schedule: ScheduleGate | None = None,
) -> dict[str, Any]:
    """Run the recipe, or continue its folder. -> the run card. `built` sees the parts
    before the first step; a schedule is followed.
    """
    prepare_controller() if job.place.cluster == "process" or job.place.on_ray else prepare_process()
    job, why = with_steps(job)
    if job.place.cluster == "torchrun" and torchrun.rank_and_size()[0]:
        follow_leader(
            job, rows_of(job).needs, sampling_of(job), torchrun.own_device(pick_device(job.place.device)), None
        )
        return {}
    folder = make_folder(Path(job.run.folder), "run.folder")
    refuse_misplaced(folder, job.run.sinks)
    taken = f"another process is training in {folder}; wait for it, or set --run.folder to another one"
    with lock_folder(folder, taken):
        return _run_training(job, folder, quiet, built, schedule or ScheduleGate(), why)


def _run_training(
    job: Job, folder: Path, quiet: bool, built: Callable[[Components], Any] | None, gate: ScheduleGate, why: str
) -> dict[str, Any]:
    """`why`: the arithmetic of loop.steps where the recipe says passes."""
    _same_recipe(job, folder)
    checkpoints = Checkpoints(folder / "checkpoints", job.run.checkpoint.keep, bool(job.run.checkpoint.best))
    total = job.loop.warmup.steps + job.steps
    with ExitStack() as ends:
        ending = ends.enter_context(GracefulStop())
        progress = ends.enter_context(ProgressPrinter(total, quiet=quiet))
        ends.callback(subscribe(drop_on_failure("the console", progress.on_event, tell=warn_aloud), *progress.kinds))
        if why:
            progress.print_line(f"loop.steps = {job.steps}: {why}")
        found = checkpoints.find_latest()
        if found and found[1]["step"] >= total:
            progress.print_line(
                f"{folder} is complete: {found[1]['step']} of {total} steps. To go on, set --loop.steps or "
                f"--loop.passes higher; the card is in {folder / 'card.md'}"
            )
            return write_card(folder)
        interrupted = not found and (folder / FILE).is_file()  # before its first checkpoint
        if interrupted:
            refuse_lost_checkpoints(folder)
        if job.run.record and (found or interrupted):
            raise ConfigError(
                f"{folder} was interrupted, and what was in flight then cannot be replayed: go on with "
                f"--run.record=false, or begin in another run.folder"
            )
        stacks = StackDumper(folder)
        ends.callback(subscribe(drop_on_failure("the record of stacks", stacks.on_event), Stalled))
        ends.enter_context(stacks.on_demand())
        parts = build(job, folder)
        stacks.others, stacks.pids = lambda: parts.placed.dump(), lambda: parts.placed.pids()  # those of the last start
        ends.callback(lambda: parts.close())
        if built:
            built(parts)
        checkpoints.check_disk(parts.placed.checkpoint_bytes)
        if job.run.record:
            gate = OrderRecorder(folder)
            ends.callback(gate.close)
        rollouts = store.RolloutStore(folder)
        ends.callback(rollouts.close)
        metrics, go_back = _open_recorders(job, folder, rollouts, ends, after=found[1]["step"] if found else -1)
        stacks.held = metrics.held
        run = RunPhases(job, parts, folder, checkpoints, rollouts, ending, gate)
        if unread := job.unread_keys():
            raise ConfigError(
                f"set, but without effect in this run: {', '.join(unread)}. Remove them, or see `rondel explain` for "
                f"what reads them"
            )
        replace_file(folder / "job.toml", tomli_w.dumps(without_none(job.to_dict())))
        if job.origin:
            replace_file(folder / ORIGIN, job.origin)
        facts = facts_of(parts)
        if found or interrupted:
            warn_of_other_arithmetic("the run goes on", folder, facts)
        emit(RunStarted(str(folder), job.digest(), facts))
        if interrupted:
            emit(Resumed(0, 0, ""))
        for restarts in itertools.count(1):
            try:
                run_loop(run.run_phases(found))
                return write_card(folder)
            except BaseException as error:
                if ran_out(error):
                    stacks.ran_out()
                lost = lost_worker(error)
                if lost is None or restarts > RESTARTS or gate.keeps_order or ending.asked:
                    with suppress(CheckpointError):  # the disk may be why it ends
                        emit(Broke(last_words(error)))
                    raise
                if (found := checkpoints.find_latest()) is None:
                    refuse_lost_checkpoints(folder)
                emit(
                    Warned(
                        f"{lost}\nThe run goes on from {'the last checkpoint' if found else 'its beginning'} "
                        f"({restarts} of at most {RESTARTS} times)"
                    )
                )
            go_back(found[1]["step"] if found else -1)
            parts.close()
            parts = build(job, folder)
            run = RunPhases(job, parts, folder, checkpoints, rollouts, ending, gate)
            if not found:
                emit(Resumed(0, 0, ""))
        raise AssertionError


FOLDERS = ("checkpoints", "rollouts", "wal", "weights", "logs", "policies")  # of a run folder
FILES = (FILE, "job.toml", ORIGIN, ".lock", "card.md", "card.json", SCHEDULE)
# name, a folder?
OF_SINKS = {"tensorboard": ("tensorboard", True), "jsonl": ("metrics.jsonl", False), "csv": ("metrics.csv", False)}


def refuse_misplaced(folder: Path, sinks: Sequence[str | dict[str, Any]]) -> None:
    """A file where the run needs a folder, a folder where it needs a file, a link that
    leads nowhere: before anything is loaded.
    """
    needed = (
        {name: True for name in FOLDERS}
        | dict.fromkeys(FILES, False)
        | dict(OF_SINKS[kind] for kind, _ in (split_kind(sink, "") for sink in sinks) if kind in OF_SINKS)
    )
    for name, wanted in needed.items():
        path = folder / name
        if os.path.lexists(path) and not (path.is_dir() if wanted else path.is_file()):
            what = (
                "a folder"
                if path.is_dir()
                else "a file"
                if path.is_file()
                else "a link that leads nowhere"
                if path.is_symlink()
                else "no ordinary file"
            )
            raise ConfigError(
                f"{path} is {what}, and the run needs a {'folder' if wanted else 'file'} there: move it away, or "
                f"choose another folder with --run.folder=..."
            )


def refuse_lost_checkpoints(folder: Path) -> None:
    """A run that had checkpoints and has none must not begin anew as if it had never learned anything."""
    saved = [event["step"] for event in read(folder) if event["kind"] == "Checkpointed"]
    if saved:
        raise CheckpointError(
            f"{folder} has no checkpoint, and its journal tells of one after step {saved[-1]}: put a copy back into "
            f"{folder / 'checkpoints'}, or begin again in another folder: --run.folder=..."
        )


def _open_recorders(
    job: Job, folder: Path, rollouts: store.RolloutStore, ends: ExitStack, after: int
) -> tuple[StepMetrics, Callable[[int], None]]:
    """Who writes down what happens: journal, rollouts, metrics of the steps after `after`,
    traces, and what is seen in them. A resumed run depends on the first two: what they cannot
    write ends the run. All others are dispensable.

    -> the metrics, and what to call with the step to which the run goes back."""
    journal = Journal(folder, job.run.durability)
    ends.callback(journal.close)
    sinks = open_sinks(job.run.sinks, folder, after=after)
    traces = traces_of(traces_address(job.run.sinks), str(folder), str(job.model.path))
    for writer in (journal.write, rollouts.write):
        ends.callback(subscribe(writer))
    closes = [
        *((sink.name, sink.close) for sink in sinks),
        *([("traces", traces.close)] if traces is not None else []),
    ]
    for name, close in closes:
        ends.callback(drop_on_failure(f"the end of {name}", close))
    writers = [drop_on_failure(sink.name, sink.write) for sink in sinks]
    rewinds = [drop_on_failure(sink.name, sink.go_back) for sink in sinks]
    writers += [
        drop_on_failure("the watch on late groups", LateBias().write),
        drop_on_failure("the watch on the reward", HackingMonitor().write),
    ]
    if traces is not None:
        ends.callback(subscribe(drop_on_failure("traces", traces.on_event)))
    metrics = StepMetrics(*writers)
    ends.callback(subscribe(drop_on_failure("metrics", metrics.on_event)))
    place = PlacementFacts.from_job(job.to_dict())
    if place.split:  # elsewhere nobody works beside another
        advisor = Advisor(place, after=job.loop.warmup.steps)
        ends.callback(subscribe(drop_on_failure("advice on speed", advisor.on_event), WorkerTime, StepDone))

    def go_back(step: int) -> None:
        for rewind in rewinds:
            rewind(step)

    return metrics, go_back


def last_words(error: BaseException) -> str:
    """Of several errors that ended a task group together, each in one line."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(dict.fromkeys(last_words(inner) for inner in error.exceptions))
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def lost_worker(error: BaseException) -> WorkerError | StalledError | None:
    """The worker that ended, if that is all that went wrong."""
    if isinstance(error, BaseExceptionGroup):
        found = [lost_worker(inner) for inner in error.exceptions]
        return next((one for one in found if one), None) if all(found) else None
    return error if isinstance(error, WorkerError) else None


def _same_recipe(job: Job, folder: Path) -> None:
    """A folder is continued only by the recipe that began it; otherwise every difference is shown. The trainer's ranks
    may be others, or arranged otherwise: a checkpoint holds whole tensors, and the gradient is the same to rounding.
    """
    path = folder / "job.toml"
    if not path.is_file():
        return
    old = Job.read(path)
    differ = changed_keys(old, job)
    if moved := [k for k in differ if k == "place.ranks" or k.startswith("place.mesh.")]:
        told = ", ".join(f"{k} {differ[k][0]} -> {differ[k][1]}" for k in moved)
        emit(
            Warned(f"the trainer goes on with other ranks ({told}): equal to rounding, not bit for bit, and no replay")
        )
        differ = {k: pair for k, pair in differ.items() if k not in moved}
    if differ:
        raise ConfigError(
            f"{folder} was begun with another recipe ({changed_text(differ)}). Continue it with the old values, or "
            "train into another folder: --run.folder=..."
        )
    before, now, schedule = old.loop.steps, job.loop.steps, job.trainer.schedule
    if before != now and schedule != "constant":
        emit(
            Warned(
                f"loop.steps {before} -> {now}: the {schedule} schedule now ends at step {now}, so the learning rate "
                "jumps here"
            )
        )
