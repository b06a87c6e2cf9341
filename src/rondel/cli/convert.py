"""rondel convert: models of Hugging Face to Megatron-Core's checkpoints and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rondel.core.errors import UserError


def run(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|CHECKPOINT", help="A model folder or hub id; or a folder of Megatron-Core (torch_dist)."
        ),
    ],
    into: Annotated[Path, typer.Argument(metavar="DIR", help="Where it goes; it must not exist.")],
    like: Annotated[
        str,
        typer.Option(
            metavar="MODEL", help="Of a checkpoint of Megatron-Core: the model whose config and tokenizer it has."
        ),
    ] = "",
) -> None:
    """Convert a model to Megatron-Core's format, or back.

    A model folder becomes a checkpoint, a checkpoint a model folder of Hugging Face. Neither needs Megatron or a GPU,
    and no number changes. A run trains a model folder: convert a checkpoint first.
    """
    from rondel.models.megatron.convert import find_megatron, write_hugging_face, write_megatron

    if into.exists():
        raise UserError(f"{into} exists already: name a folder that does not, or remove it")
    checkpoint = find_megatron(Path(model).expanduser()) if Path(model).expanduser().is_dir() else None
    if checkpoint is None:
        if like:
            raise UserError(f"--like is for a checkpoint of Megatron-Core, and {model} is none: leave it out")
        count = write_megatron(model, into)
        print(f"{into}: {count:,} numbers as Megatron-Core loads them")
        print(f"next    --load {into} --ckpt-format torch_dist, where Megatron-LM loads it")
        return
    if not like:
        raise UserError(
            f"{checkpoint} is a checkpoint of Megatron-Core, which does not say how the model is built: name a model "
            "of that kind with --like, such as the one that it was trained from"
        )
    count = write_hugging_face(checkpoint, like, into)
    print(f"{into}: {count:,} numbers as transformers, vLLM and SGLang load them")
    print(f"next    rondel serve {into}")
