"""rondel merge: an adapter folded into its base."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rondel.core.errors import UserError


def run(
    adapter: Annotated[
        Path, typer.Argument(metavar="ADAPTER", help="A folder with adapter_config.json: a checkpoint, or peft's.")
    ],
    into: Annotated[Path, typer.Argument(metavar="DIR", help="Where the model goes; it must not exist.")],
    dtype: Annotated[str, typer.Option(help="Of the merged model: float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Fold a LoRA adapter into its base.

    A plain model, W + alpha/r B A; it says which share of the adapter rounding to the dtype lost.
    """
    from rondel.models.merge import merge

    if into.exists():
        raise UserError(f"{into} exists already: name a folder that does not, or remove it")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise UserError(f"--dtype {dtype}; it is float32, bfloat16 or float16")
    lost = merge(adapter, into, dtype=dtype)
    print(f"{into}: a plain model in {dtype}; rounding lost {lost:.2%} of the adapter")
    print(f"next    rondel serve {into}")
