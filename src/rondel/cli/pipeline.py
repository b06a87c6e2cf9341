"""rondel pipeline: several recipes as one job."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Annotated

import typer

from rondel.cli import OVERRIDES, sort_words
from rondel.core.errors import UserError
from rondel.text.unicode import visible_text

SETTINGS = OVERRIDES


def run(
    ctx: typer.Context,
    file: Annotated[str, typer.Argument(metavar="FILE.toml", help="The stages: each a recipe, with a name.")],
    plan: Annotated[
        bool, typer.Option("--plan", help="Show the stages in order with what each costs, and run nothing.")
    ] = False,
    redo: Annotated[
        list[str] | None,
        typer.Option("--redo", metavar="STAGE", help="Do this stage again, and all that read its model; repeatable."),
    ] = None,
    parallel: Annotated[
        int | None, typer.Option("--parallel", min=1, help="Stages side by side at most, in place of the file's.")
    ] = None,
    what_if: Annotated[
        str,
        typer.Option("--what-if", metavar="NAME=VALUE ...", help="With --plan, as of `rondel plan`: hardware=h100 ..."),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Train in stages: specialists, then one student of all of them.

    The same command goes on where it ended. --stages.NAME.section.key=value and --shared.section.key=value override
    the file.
    """
    from rondel.pipeline.pipeline_file import read_pipeline

    paths, overrides = sort_words(file, *ctx.args)
    if len(paths) != 1:
        raise UserError(f"one pipeline is needed and {len(paths)} were given: {', '.join(paths)}")
    pipeline = read_pipeline(paths[0], overrides | ({} if parallel is None else {"parallel": parallel}))
    if plan:
        from rondel.pipeline.pipeline_plan import plan_pipeline, plan_table
        from rondel.planner.plan import make_plan

        told = plan_pipeline(pipeline, make_plan, what_if.split())
        print(json.dumps(told) if as_json else visible_text(plan_table(told)))
        return
    if what_if:
        raise UserError("--what-if belongs to --plan: add it, or leave --what-if out")
    from rondel.pipeline.pipeline_run import run_pipeline
    from rondel.pipeline.pipeline_summary import summary_table

    def print_line(text: str) -> None:
        print(visible_text(text), file=sys.stderr if as_json else sys.stdout, flush=True)

    record = run_pipeline(pipeline, redo=redo or (), tell=print_line, status=_status_printer())
    if as_json:
        print(json.dumps({"folder": str(pipeline.folder), "stages": record.stages}))
    else:
        print(visible_text(f"\n{summary_table(record)}\n\nfolder   {pipeline.folder}   (pipeline.json, card.md)"))


def _status_printer() -> Callable[[str], None]:
    """On a terminal a line that moves; elsewhere one every half minute."""
    last, terminal = time.monotonic(), sys.stderr.isatty()

    def print_status(text: str) -> None:
        nonlocal last
        if (now := time.monotonic()) - last < (0.5 if terminal else 30.0):
            return
        last = now
        print(f"\r\x1b[K{text}" if terminal else text, end="\r" if terminal else "\n", file=sys.stderr, flush=True)

    return print_status
