"""rondel init: a folder with a recipe, a reward and an environment of one's own."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from rondel.core.errors import UserError, disk_refusal
from rondel.system.files import write_text

TEMPLATES = Path(__file__).parent / "templates"
RANDOM = "random"
MODEL = 'path = "smollm2-135m"'  # the line of templates/pretrained_model.toml that --model replaces


def run(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Made if it does not exist.")] = Path("."),
    model: Annotated[
        str,
        typer.Option("--model", help='A model folder or hub id; "random" is made on the spot and trains in seconds.'),
    ] = RANDOM,
) -> None:
    """Write a recipe, a reward and an environment that run.

    recipe.toml, reward.py and environment.py, to be changed. No file is overwritten.
    """
    files = project_files(model)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; name a folder")
    if there := [name for name in files if (folder / name).exists()]:
        raise UserError(f"{folder} has {', '.join(there)} already; nothing was written. Name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_text(folder / name, text)
    except OSError as error:
        raise UserError(disk_refusal(error, f"writing to {folder}") or f"writing to {folder}: {error}") from error
    print(f"wrote {', '.join(str(folder / name) for name in files)}\n")
    if folder.resolve() != Path.cwd():
        print(f"cd {shlex.quote(str(folder))}")
    print("rondel check recipe.toml        tries recipe, data, reward and environment before training")
    print("rondel train recipe.toml        trains; the same command continues an interrupted run")
    print("rondel view runs/first       shows what the model read and wrote")


def project_files(model: str) -> dict[str, str]:
    """File name -> text of a new project that trains this model."""
    recipe = (TEMPLATES / ("random_model.toml" if model == RANDOM else "pretrained_model.toml")).read_text("utf-8")
    if model != RANDOM:
        if not model or set(model) & {'"', "\\", "\n"}:
            raise UserError(f"--model {model!r} is no model folder and no hub id")
        recipe = recipe.replace(MODEL, f'path = "{model}"', 1)
    code = {name: (TEMPLATES / name).read_text("utf-8") for name in ("reward.py", "environment.py")}
    return {"recipe.toml": recipe} | code
