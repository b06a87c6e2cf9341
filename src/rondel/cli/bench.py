"""rondel bench: the benchmarks that the results table was made with."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from rondel.words.errors import UserError
from rondel.words.registry import nearest

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
HOMES = (Path(__file__).parents[3] / "benchmarks", Path(__file__).parents[1] / "benchmarks")  # source tree, installed wheel


def run(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which benchmark: step, prefix.")] = "",
) -> None:
    """Run a benchmark; its own --help follows the name.

    With --json the last line on stdout is one JSON object.
    """
    home = next((h for h in HOMES if h.is_dir()), None)
    known = sorted(p.stem for p in home.glob("*.py") if not p.stem.startswith("_")) if home else []
    if name in ("", "--help"):
        print(f"rondel bench NAME [--help]\n\nbenchmarks: {', '.join(known) or 'none installed'}")
        return
    if name not in known:
        raise UserError(f"no benchmark '{name}'.{nearest(name, known)} Known: {', '.join(known) or 'none: they come with the source tree'}")
    spec = importlib.util.spec_from_file_location(f"rondel_bench_{name}", home / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(ctx.args)
