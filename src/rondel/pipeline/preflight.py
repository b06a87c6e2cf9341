"""What is wrong with a stage is said before the first one runs: at hour zero, and not when its turn comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rondel.assemble.recipe_parts import load_run_tasks, sampling_of
from rondel.assemble.refusals import refuse_job
from rondel.assemble.rows import refuse_unknown_sources, rows_of
from rondel.core.errors import ConfigError, UserError
from rondel.core.registry import find_registered
from rondel.generate.envs.sources import TaskSet
from rondel.pipeline.pipeline_file import Pipeline
from rondel.pipeline.stage_recipe import REFERENCE, StageRecipe, is_reference
from rondel.score import REWARDS, reward_kinds


def check_pipeline(pipeline: Pipeline) -> dict[str, TaskSet]:
    """Every stage: its models, its row, its reward and its data. -> the tasks of each stage."""
    for stage in pipeline.stages.values():
        _check_models(stage, pipeline)
    return {name: _check_recipe(stage, pipeline.path) for name, stage in pipeline.stages.items()}


def _check_models(stage: StageRecipe, pipeline: Pipeline) -> None:
    where = f"{pipeline.path}: stages.{stage.name}"
    for name in stage.inputs:
        source = pipeline.stages[name]
        if source.kind != "train":
            raise ConfigError(
                f'{where} reads the model "{REFERENCE}{name}", and {name} is an evaluation: name what it evaluates'
            )
        if source.steps == 0:
            raise ConfigError(
                f'{where} reads the model "{REFERENCE}{name}", and {name} trains nothing: set its loop.steps or '
                "loop.warmup.steps above 0"
            )
    models: list[tuple[str, Any]] = [("model.path", stage.job.model.path)]
    models += [(f"model.teacher[{i}].path", teacher.path) for i, teacher in enumerate(stage.job.model.teachers)]
    if stage.kind == "eval" and isinstance(stage.job.model.path, dict):
        raise ConfigError(f"{where}.model is made of random weights: name what is evaluated, a stage or a folder")
    for key, model in models:
        if key != "model.path" and isinstance(model, dict):
            raise ConfigError(
                f"{where}.{key} = {model}: a teacher of random weights knows nothing; name a stage or a folder"
            )
        if (
            isinstance(model, str)
            and not is_reference(model)
            and _is_folder_name(model)
            and not Path(model).expanduser().exists()
        ):
            near = f', or a stage, "{REFERENCE}{Path(model).name}"' if Path(model).name in pipeline.stages else ""
            raise ConfigError(
                f"{where}.{key} = '{model}': there is no such folder, so it has not been trained; name one that "
                f"exists{near}"
            )


def _is_folder_name(model: str) -> bool:
    """Whether a model is of this machine: a hub id has one slash, between its owner and its name."""
    return model.startswith(("/", "./", "../", "~", "runs/")) or model.count("/") > 1


def _check_recipe(stage: StageRecipe, path: Path) -> TaskSet:
    """As the run itself will, as far as that takes no model."""
    stage.look_beside_origin()
    job, trains = stage.job, stage.kind == "train"
    try:
        for kind in reward_kinds(job.task.reward_spec):
            find_registered("reward", kind, REWARDS)
        tasks = load_run_tasks(job, trains)
        if trains:
            rows = rows_of(job)
            refuse_job(job, rows, sampling_of(job))
            refuse_unknown_sources(job, rows, tasks.train)
        elif not tasks.evaluated:
            raise ConfigError("it holds no tasks out: set task.data.holdout, or name sets, task.eval.sets")
    except UserError as error:
        raise type(error)(f"{path}: stages.{stage.name}: {error}") from error
    return tasks


def task_counts(tasks: TaskSet) -> dict[str, Any]:
    """{"train": 300, "held_out": 100}."""
    return {"train": len(tasks.train), "held_out": len(tasks.evaluated)}
