"""Which weights a word on the command line means: of a run folder its newest or best checkpoint, a checkpoint itself,
or any model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rondel.core.errors import UserError
from rondel.system.files import checkpoints_in, step_of

BEST = "best.json"  # in checkpoints/: {"step": 40, "metric": "eval/score", "value": 0.81}


@dataclass(frozen=True, slots=True)
class RunWeights:
    """`model` is a folder or whatever was given; `run` the folder of the run it belongs to, None for any other model.

    Example: RunWeights("runs/a/checkpoints/step-000040", 40, Path("runs/a"))
    """

    model: str
    step: int
    run: Path | None

    @property
    def recipe(self) -> str | None:
        return None if self.run is None else str(self.run / "job.toml")


def find_run_weights(model_or_run: str, best: bool = False, remedy: str = "train it first") -> RunWeights:
    """best: the checkpoint that run.checkpoint.best kept; else the newest. remedy: what to do without any."""
    folder = Path(model_or_run)
    if (folder / "manifest.json").is_file() and (folder.parent.parent / "job.toml").is_file():
        if best:
            raise UserError(f"{folder} is one checkpoint: --best needs the folder of its run, {folder.parent.parent}")
        return RunWeights(model_or_run, step_of(folder) or 0, folder.parent.parent)
    if not (folder / "job.toml").is_file():
        if best:
            raise UserError(f"'{model_or_run}' is no run folder, and --best needs one")
        return RunWeights(model_or_run, 0, None)
    found = checkpoints_in(folder / "checkpoints")
    if not found:
        raise UserError(f"{folder} has no checkpoint yet; {remedy}")
    step = _best_step(folder) if best else max(found)
    if step not in found:
        raise UserError(
            f"{folder / 'checkpoints' / BEST} names step {step}, whose checkpoint is gone; leave --best out for the "
            "newest"
        )
    return RunWeights(str(found[step]), step, folder)


def _best_step(run: Path) -> int:
    path = run / "checkpoints" / BEST
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["step"])
    except FileNotFoundError as error:
        raise UserError(
            f'{run} keeps no best checkpoint: train with run.checkpoint.best = "eval/score", or leave --best out'
        ) from error
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}); leave --best out for the newest checkpoint") from error
