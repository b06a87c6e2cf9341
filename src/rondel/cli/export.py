"""rondel export: a checkpoint of a run in a number format, for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rondel.core.errors import UserError


def run(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|CHECKPOINT", help="A run folder (its newest checkpoint), or one of its checkpoints."
        ),
    ],
    into: Annotated[Path, typer.Argument(metavar="DIR", help="Where the model goes; it must not exist.")],
) -> None:
    """Write a checkpoint in a number format as other tools load it.

    Of a run with model.format: codes and scales, in the layout that vLLM, SGLang and transformers read.
    """
    from rondel.models.quantized_export import export_quantized
    from rondel.system.files import checkpoints_in

    if into.exists():
        raise UserError(f"{into} exists already: name a folder that does not, or remove it")
    checkpoint = source
    if (source / "checkpoints").is_dir():
        found = checkpoints_in(source / "checkpoints")
        if not found:
            raise UserError(f"{source} has no checkpoint yet; run.checkpoint.every says when there is one")
        checkpoint = list(found.values())[-1]
    if not (checkpoint / "optimizer.safetensors").is_file():
        raise UserError(f"{checkpoint} is neither a run folder nor one of its checkpoints")
    name, before, after = export_quantized(checkpoint, into)
    print(f"{into}: {checkpoint.name} in {name}, {after / 1e6:,.1f} MB of weights, {before / 1e6:,.1f} before")
    print(f"next    vllm serve {into}")
