"""`rondel pipeline`: stages whose needs have ended are begun, so many side by side as the file says.

what is finished is skipped      what was interrupted goes on by Rondel's own resume
what changed is refused, or moved away and done again where the user says so
what fails ends alone: stages that do not need it go on, and the same command tries it again
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from rondel.core.config.differences import without_none
from rondel.core.config.toml_reader import ORIGIN
from rondel.core.errors import RondelError, Stopped, UserError, WorkerError
from rondel.core.registry import suggest_name
from rondel.pipeline.pipeline_file import Pipeline
from rondel.pipeline.pipeline_record import PipelineRecord, refuse_changed
from rondel.pipeline.pipeline_summary import stage_line, write_summary
from rondel.pipeline.preflight import check_pipeline
from rondel.pipeline.stage_process import ChildProcess, StageProcess
from rondel.pipeline.stage_recipe import StageRecipe
from rondel.pipeline.stage_result import (
    EVALUATION,
    FAILED,
    FINISHED,
    Checkpoint,
    find_checkpoint,
    last_step,
    read_result,
)
from rondel.runtime.termination import GracefulStop
from rondel.system.files import make_folder, replace_file
from rondel.system.folder_lock import lock_folder

POLL = 0.2  # seconds between two looks at the stages that run
StartStage = Callable[[list[str], Path, Path | None, tuple[int, ...]], StageProcess]
Tell = Callable[[str], None]
Status = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RunningStage:
    stage: StageRecipe
    process: StageProcess
    slot: int
    began: float


def run_pipeline(
    pipeline: Pipeline,
    *,
    redo: Collection[str] = (),
    start: StartStage = ChildProcess,
    tell: Tell = print,
    status: Status = lambda text: None,
) -> PipelineRecord:
    """Every stage to its end, from nothing or from where the last call stopped. -> its record.

    redo    stages to be done again, with all that read their models
    start   begins a stage: its words for `rondel`, its log, where its output goes, its cores
    status  is told twice a second how far the stages are that run
    """
    if unknown := [name for name in redo if name not in pipeline.stages]:
        raise UserError(
            f"--redo {unknown[0]}: there is no such stage.{suggest_name(unknown[0], list(pipeline.stages))}"
        )
    check_pipeline(pipeline)
    make_folder(pipeline.folder, "folder")
    taken = f"another process works at the pipeline in {pipeline.folder}; wait for it, or set --folder=..."
    with lock_folder(pipeline.folder, taken):
        record = PipelineRecord(pipeline)
        again = pipeline.dependents(set(redo))
        refuse_changed(record, again)
        for name in again & pipeline.stages.keys():
            if (kept := record.set_aside(pipeline.stages[name])) is not None:
                tell(f"{name}: done again; what it had is in {kept}")
        if again:
            record.save()
        PipelineScheduler(pipeline, record, start, tell, status).run_stages()
        write_summary(record)
    return record


class PipelineScheduler:
    """Which stage runs when. `slots` are places side by side, each with its share of the cores."""

    def __init__(
        self, pipeline: Pipeline, record: PipelineRecord, start: StartStage, tell: Tell, status: Status
    ) -> None:
        self.pipeline, self.record, self.start, self.tell, self.status = pipeline, record, start, tell, status
        self.cores = share_cores(pipeline.parallel)
        self.running: list[RunningStage] = []
        self.failed: dict[str, str] = {}
        self.done: set[str] = set()

    def run_stages(self) -> None:
        total = len(self.pipeline.stages)
        for number, (name, stage) in enumerate(self.pipeline.stages.items(), 1):
            if self.record.is_finished(stage):
                self.done.add(name)
                self.tell(f"[{number}/{total}] {stage_line(name, self.record.stages[name])}   (done before)")
        with GracefulStop() as ending:
            try:
                while self._begin_ready() or self.running:
                    self._await_one()
            except BaseException as error:
                for own in self.running:
                    own.process.terminate()
                for own in self.running:  # each keeps a checkpoint first
                    own.process.wait()
                if isinstance(error, Stopped):
                    names = ", ".join(own.stage.name for own in self.running)
                    raise ending.stopped_at(f"while {names} ran" if names else "between two stages") from None
                raise
        if self.failed:
            waiting = [n for n in self.pipeline.stages if n not in self.done and n not in self.failed]
            rest = f"; not begun: {', '.join(waiting)}" if waiting else ""
            said = "; ".join(f"the stage {name} failed: {why}" for name, why in self.failed.items())
            raise WorkerError(f"{said}{rest}. The same command goes on from here")

    def _begin_ready(self) -> bool:
        """Begin what can be begun. -> whether that was any."""
        begun = False
        for name, stage in self.pipeline.stages.items():
            if len(self.running) == self.pipeline.parallel:
                break
            busy = {own.stage.name for own in self.running}
            if name not in self.done | busy | self.failed.keys() and set(stage.needs) <= self.done:
                self._begin(stage)
                begun = True
        return begun

    def _begin(self, stage: StageRecipe) -> None:
        inputs = {name: find_checkpoint(self.pipeline.stages[name]) for name in stage.inputs}
        goes_on = stage.name in self.record.stages
        words, out = prepare_stage(self.pipeline, stage, inputs)
        self.record.begin(stage, inputs, ["rondel", *words])
        slot = min(set(range(self.pipeline.parallel)) - {own.slot for own in self.running})
        log = log_of(self.pipeline, stage.name)
        log.unlink(missing_ok=True)
        number = list(self.pipeline.stages).index(stage.name) + 1
        what = (
            "evaluates"
            if stage.kind == "eval"
            else f"trains {stage.steps if stage.steps is not None else 'some'} steps"
        )
        self.tell(f"[{number}/{len(self.pipeline.stages)}] {stage.name}: {'goes on, ' * goes_on}{what}   {log}")
        process = self.start(words, log, out, self.cores[slot])
        self.running.append(RunningStage(stage, process, slot, time.monotonic()))

    def _await_one(self) -> None:
        """Until one of those that run has ended."""
        while not (ended := [own for own in self.running if own.process.poll() is not None]):
            self.status("   ".join(map(progress_text, self.running)))
            time.sleep(POLL)
        for own in ended:
            self.running.remove(own)
            self._end(own)

    def _end(self, own: RunningStage) -> None:
        name, code = own.stage.name, own.process.poll()
        why = "" if code == 0 else last_error(log_of(self.pipeline, name), code or 0)
        facts: dict[str, Any] = {"error": why}
        if not why:
            try:
                facts = read_result(own.stage)
            except RondelError as error:
                why = str(error)
                facts = {"error": why}
        self.record.end(name, FAILED if why else FINISHED, facts)
        number = list(self.pipeline.stages).index(name) + 1
        self.tell(f"[{number}/{len(self.pipeline.stages)}] {stage_line(name, self.record.stages[name])}")
        if why:
            self.failed[name] = why
        else:
            self.done.add(name)


def prepare_stage(
    pipeline: Pipeline, stage: StageRecipe, inputs: dict[str, Checkpoint]
) -> tuple[list[str], Path | None]:
    """Write the recipe with the models that it stands for. -> the words of its command, and where its output goes."""
    home = make_folder(pipeline.folder / "recipes" / stage.name)
    recipe = home / "job.toml"
    tree = stage.resolve(lambda name: inputs[name].path)
    replace_file(recipe, tomli_w.dumps(without_none(tree)))
    replace_file(home / ORIGIN, str(stage.origin.resolve()))
    if stage.kind == "train":
        return ["train", str(recipe)], None
    make_folder(stage.folder)
    report = ["--report", str(stage.folder / "report.html")]
    return ["eval", str(tree["model"]["path"]), str(recipe), "--json", *report], stage.folder / EVALUATION


def log_of(pipeline: Pipeline, name: str) -> Path:
    return pipeline.folder / "logs" / f"{name}.log"


def last_error(log: Path, code: int) -> str:
    """What a stage said last, and where it said the rest."""
    try:
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    said = next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1] if lines else "")
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"{said.removeprefix('error: ')[:600] or 'it said nothing'} ({ended}; {log})"


def progress_text(own: RunningStage) -> str:
    """ "math: step 12 of 40, reward 0.61"."""
    if own.stage.kind == "eval":
        return f"{own.stage.name}: {time.monotonic() - own.began:.0f} s"
    found = last_step(own.stage.folder)
    if found is None:
        return f"{own.stage.name}: starting"
    step, reward = found
    of = "" if own.stage.steps is None else f" of {own.stage.steps}"
    return f"{own.stage.name}: step {step}{of}" + ("" if reward is None else f", reward {reward:.2f}")


def share_cores(parallel: int) -> list[tuple[int, ...]]:
    """The cores of each place side by side; all for each where there are too few, or where they cannot be told."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    each = len(cores) // parallel
    if parallel == 1 or each == 0:
        return [()] * parallel
    return [tuple(cores[i * each : (i + 1) * each]) for i in range(parallel)]
