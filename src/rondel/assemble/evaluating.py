"""`rondel eval`: the number of a training run once more, for a run folder, a checkpoint or any model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from rondel.assemble.parts import build
from rondel.evaluate import evaluate
from rondel.runtime.devices import keep_memory
from rondel.words.config import Job
from rondel.words.errors import UserError
from rondel.words.events import Evaluated


def evaluate_checkpoint(model_or_run: str, recipe: str | None, overrides: dict[str, Any]) -> Evaluated:
    """The same number for a run folder (its newest checkpoint), a checkpoint folder, or any model with a recipe's tasks."""
    keep_memory()
    folder, step, model = Path(model_or_run), 0, model_or_run
    if (folder / "manifest.json").is_file() and (folder.parent.parent / "job.toml").is_file():
        recipe, step = recipe or str(folder.parent.parent / "job.toml"), int(folder.name.split("-")[-1])
    elif (folder / "job.toml").is_file():
        checkpoints = sorted((folder / "checkpoints").glob("step-*"))
        if not checkpoints:
            raise UserError(
                f"{folder} has no checkpoint yet; train it, or evaluate its starting model: rondel eval MODEL {folder / 'job.toml'}"
            )
        recipe, model, step = recipe or str(folder / "job.toml"), str(checkpoints[-1]), int(checkpoints[-1].name.split("-")[-1])
    if recipe is None:
        raise UserError(f"'{model_or_run}' is a model, so name the tasks: rondel eval {model_or_run} recipes/quickstart.toml")
    job = Job.read(recipe, {**overrides, "model.path": model})
    parts = build(job.on_one_device())
    try:
        if not parts.tasks.held_out:
            raise UserError("the recipe holds no tasks out: set task.data.holdout = 50, or eval_path for files")
        parts.engine.version = step
        return asyncio.run(evaluate(parts, step))
    finally:
        parts.close()
