"""rondel prepare: the models and the data of a recipe, made ready on this node."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rondel.cli import OVERRIDES, read_job

SETTINGS = OVERRIDES


def run(
    ctx: typer.Context,
    recipe: Annotated[str, typer.Argument(metavar="RUN.toml", help="What will be trained.")],
    stage: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Copy the models there, on a fast disk of this node, with their digests."),
    ] = None,
    reread: Annotated[
        bool, typer.Option("--reread", help="Compare all digests, also of files that look as before.")
    ] = False,
) -> None:
    """Make the models and the data of a recipe ready on this node.

    locate, convert, stage, verify: what is done is skipped, what was interrupted goes on.
    """
    job, _ = read_job(recipe, *ctx.args)
    from rondel.models.model_copies import MODELS
    from rondel.models.model_folder import cache_folder
    from rondel.models.prepare import prepare_model

    paths = models_of(job)
    for path in paths:
        print(path)
        prepare_model(path, stage, cache_folder(), _say, reread=reread)
    if not paths:
        print("no model is read: the recipe makes a random one")
    from rondel.generate.envs.sources import load_tasks

    tasks = load_tasks(job.task.data, env=job.task.env_kind)
    print(f"tasks\n  {'read':<9} {len(tasks.train)} to train on, {len(tasks.held_out)} held out")
    told = f"{MODELS}={stage.expanduser().resolve()} " if stage is not None and paths else ""
    print(f"ready: {told}rondel train {recipe}")


def models_of(job: Any) -> list[str]:
    """What a run reads weights from: the policies, their teachers, the bases of adapters; each once."""
    from rondel.models import adapter_files

    given = [job.model.path, *(teacher.path for teacher in job.model.teachers)]
    paths = [path for path in given if isinstance(path, str)]
    bases = [str(adapter_files.base_of(path)) if adapter_files.is_adapter(path) else path for path in paths]
    return list(dict.fromkeys(bases))


def _say(stage: str, text: str) -> None:
    print(f"  {stage:<9} {text}", flush=True)
