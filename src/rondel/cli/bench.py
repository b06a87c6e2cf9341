"""rondel bench: the benchmarks that the results table was made with."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rondel.cli.package_files import shipped_folder
from rondel.core.errors import UserError
from rondel.core.registry import suggest_name
from rondel.system.interpreter import import_whole

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def run(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which benchmark: step, prefix.")] = "",
) -> None:
    """Run a benchmark; its own --help follows the name.

    With --json the last line on stdout is one JSON object.
    """
    home = shipped_folder("benchmarks")
    known = sorted(p.stem for p in home.glob("*.py") if not p.stem.startswith("_")) if home else []
    if name in ("", "--help"):
        print(f"rondel bench NAME [--help]\n\nbenchmarks: {', '.join(known) or 'none installed'}")
        return
    if name not in known:
        raise UserError(
            f"no benchmark '{name}'.{suggest_name(name, known)} Known: "
            f"{', '.join(known) or 'none: they come with the source tree'}"
        )
    sys.path.insert(0, str(home))
    import_whole(name).main(ctx.args)
