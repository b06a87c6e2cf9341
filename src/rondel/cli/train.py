"""rondel train: the main job."""

from __future__ import annotations

from typing import Annotated

import typer

from rondel.cli import OVERRIDES, read_job

SETTINGS = OVERRIDES


def run(
    ctx: typer.Context,
    recipe: Annotated[str, typer.Argument(metavar="RUN.toml", help="The recipe; `rondel explain RUN.toml` shows what it means.")],
    quiet: Annotated[bool, typer.Option("--quiet", help="Only warnings and errors.")] = False,
) -> None:
    """Train a model by a recipe.

    --section.key=value overrides the recipe. An unfinished run folder is continued by the same command.
    """
    job, _ = read_job(recipe, *ctx.args)
    from rondel.assemble import train

    train(job, quiet=quiet)
