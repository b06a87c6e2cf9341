"""pipeline.json: what each stage was begun with, how it ended and what it brought. A pipeline that was ended goes on
by it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rondel.core.config.differences import changed_keys, changed_text
from rondel.core.config.job import Job
from rondel.core.config.old_recipe import translate_moved_keys
from rondel.core.errors import CheckpointError, ConfigError
from rondel.pipeline.pipeline_file import Pipeline
from rondel.pipeline.stage_recipe import StageRecipe
from rondel.pipeline.stage_result import BEGUN, EVALUATION, FINISHED, Checkpoint, find_checkpoint, manifest_digest
from rondel.system.files import guard_write, make_folder, replace_file
from rondel.text.unicode import read_exact_json, write_json

FILE = "pipeline.json"
REPLACED = "replaced"  # folder of stages that were done again


class PipelineRecord:
    """`record.stages["math"]` is {"status": "finished", "recipe": {...}, "inputs": {...}, ...},
    on disk after `save`."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.path = pipeline.folder / FILE
        self.stages: dict[str, dict[str, Any]] = self._read()

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            return dict(read_exact_json(self.path.read_text(encoding="utf-8"))["stages"])
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise CheckpointError(
                f"{self.path} cannot be read ({error}): put a copy of it back, or begin again in another folder: "
                "--folder=..."
            ) from error

    def save(self) -> None:
        """In the order of the file; what is no stage any more stays at the end."""
        ordered = {name: self.stages[name] for name in [*self.pipeline.stages, *self.stages] if name in self.stages}
        replace_file(self.path, write_json({"file": str(self.pipeline.path), "stages": ordered}) + "\n")

    def begin(self, stage: StageRecipe, inputs: dict[str, Checkpoint], command: list[str]) -> None:
        self.stages[stage.name] = {
            "status": BEGUN,
            "kind": stage.kind,
            "folder": str(stage.folder),
            "needs": list(stage.needs),
            "inputs": {name: found.to_dict() for name, found in inputs.items()},
            "command": command,
            "recipe": stage.job.to_dict(),
        }
        self.save()

    def end(self, name: str, status: str, facts: dict[str, Any]) -> None:
        self.stages[name] |= {"status": status, **facts}
        self.save()

    def is_finished(self, stage: StageRecipe) -> bool:
        """Whether it is done, and as long as its recipe says now."""
        known = self.stages.get(stage.name)
        if known is None or known["status"] != FINISHED:
            return False
        return stage.kind == "eval" or stage.steps is None or stage.steps == known["steps"]

    def set_aside(self, stage: StageRecipe) -> Path | None:
        """The folder of a stage that is done again moves to replaced/NAME-1. -> where it is now."""
        self.stages.pop(stage.name, None)
        if not stage.folder.exists():
            return None
        home, number = make_folder(self.pipeline.folder / REPLACED), 1
        while (target := home / f"{stage.name}-{number}").exists():
            number += 1
        with guard_write(target, doing="moving"):
            stage.folder.rename(target)
        return target


def refuse_changed(record: PipelineRecord, redo: set[str]) -> None:
    """Every stage that was begun with another recipe or other models than it would have now,
    unless it is done again."""
    faults: dict[str, str] = {}
    for name, stage in record.pipeline.stages.items():
        if name not in redo and (why := _changed(record, stage, {*redo, *faults})):
            faults[name] = why
    if faults:
        said = "; ".join(f"{name} {why}" for name, why in faults.items())
        flags = " ".join(f"--redo {name}" for name in faults)
        raise ConfigError(
            f"{said}. Put the old values back, or do these stages again: rondel pipeline {record.pipeline.path} "
            f"{flags} (what they had is kept in {record.pipeline.folder / REPLACED}), or begin in another folder: "
            "--folder=..."
        )


def _changed(record: PipelineRecord, stage: StageRecipe, again: set[str]) -> str:
    """Why a stage cannot go on or be skipped; "" if it can. again: stages that will have another result."""
    known = record.stages.get(stage.name)
    if known is None:
        begun = (stage.folder / "job.toml").is_file() or (stage.folder / EVALUATION).is_file()
        return f"has a run in {stage.folder} that {FILE} does not tell of" if begun else ""
    before = dict(known["recipe"])
    translate_moved_keys(before)
    if known["kind"] != stage.kind or (differ := changed_keys(Job.parse(before, str(record.path)), stage.job)):
        return f"was begun with another recipe ({changed_text(differ) if known['kind'] == stage.kind else 'kind'})"
    finished = known["status"] == FINISHED
    if finished and stage.steps is not None and stage.kind == "train" and stage.steps < known["steps"]:
        return f"was trained for {known['steps']} steps, and its recipe says {stage.steps}"
    for name, found in known["inputs"].items():
        source = record.pipeline.stages[name]
        if name in again or (not record.is_finished(source)):
            return f"was begun from what {name} had, which will change"
        if find_checkpoint(source).digest != found["digest"]:
            return f"was begun from other weights of {name} than those of {find_checkpoint(source).path}"
    if (
        finished
        and stage.kind == "train"
        and manifest_digest(Path(known["checkpoint"]["path"])) != known["checkpoint"]["digest"]
    ):
        return f"has finished, and {known['checkpoint']['path']} is gone or another one"
    return ""
