"""What a stage has brought: its checkpoint, and its scores on held-out tasks."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from rondel.core.errors import CheckpointError
from rondel.pipeline.stage_recipe import StageRecipe
from rondel.runtime.journal.log import FILE
from rondel.runtime.telemetry.card import card_of
from rondel.runtime.telemetry.scores import is_share
from rondel.system.run_weights import find_run_weights

BEGUN, FINISHED, FAILED = "begun", "finished", "failed"  # how a stage stands in pipeline.json
EVALUATION = "evaluation.json"  # in the folder of an evaluation
TAIL = 1 << 16  # bytes at the end of a journal in which its last step is looked for


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`digest` is that of its manifest, which has the sum of every file: equal digests are equal weights.

    Example: Checkpoint("runs/p/math/checkpoints/step-000060", 60, "6f1c0b9d2a7e4431")
    """

    path: str
    step: int
    digest: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def find_checkpoint(stage: StageRecipe) -> Checkpoint:
    """The model of a stage: what run.checkpoint.best kept where its recipe asks for that, else the newest."""
    found = find_run_weights(str(stage.folder), best=bool(stage.job.run.checkpoint.best))
    return Checkpoint(found.model, found.step, manifest_digest(Path(found.model)))


def manifest_digest(checkpoint: Path) -> str:
    """ "" where there is none."""
    try:
        return blake2b((checkpoint / "manifest.json").read_bytes(), digest_size=8).hexdigest()
    except OSError:
        return ""


def read_result(stage: StageRecipe) -> dict[str, Any]:
    """The facts of a stage that has ended, for pipeline.json.

    steps, seconds; held_out {name: {score, low, high, n, share, of}} and before, the same of the starting weights
    """
    if stage.kind == "eval":
        return _read_evaluation(stage)
    card = card_of(stage.folder)
    rows = {row["profile"]: row for row in card["eval_sets"]}
    return {
        "steps": card["steps"],
        "seconds": card["seconds"],
        "checkpoint": find_checkpoint(stage).to_dict(),
        "before": None if card["eval_before"] is None else card["eval_before"]["score"],
        "held_out": {name: _score_row(row) for name, row in rows.items()},
    }


def _read_evaluation(stage: StageRecipe) -> dict[str, Any]:
    path = stage.folder / EVALUATION
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); do the stage again: --redo {stage.name}") from error
    rows = [told, *told["sets"]]
    return {
        "steps": None,
        "seconds": sum(row["seconds"] for row in rows),
        "checkpoint": None,
        "before": None,
        "held_out": {row["profile"]: _score_row(row | {"share": is_share(row)}) for row in rows},
    }


def _score_row(row: dict[str, Any]) -> dict[str, Any]:
    return {key: row.get(key) for key in ("score", "low", "high", "n", "share", "of", "metrics")}


def last_step(folder: Path) -> tuple[int, float | None] | None:
    """(step, its mean reward) of a run that goes on, from the end of its journal; None before the first."""
    try:
        with (folder / FILE).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        if b'"kind":"StepDone"' in line.replace(b" ", b"")[:200]:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            return event["step"], event["metrics"].get("score/reward_mean")
    return None
