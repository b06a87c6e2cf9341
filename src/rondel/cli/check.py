"""rondel check: all that can be wrong, before an hour is spent."""

from __future__ import annotations

from typing import Annotated

import typer

from rondel.cli import OVERRIDES, read_job

SETTINGS = OVERRIDES


def run(
    ctx: typer.Context,
    recipe: Annotated[str, typer.Argument(metavar="RUN.toml", help="The recipe.")],
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Steps at lr = 0 on a large model too; a small one takes them always.")
    ] = False,
) -> None:
    """Find what is wrong before an hour is spent.

    Recipe, data, rewards, signal, memory, steps at lr = 0. Exits 1 if anything is wrong.
    """
    job, _ = read_job(recipe, *ctx.args)
    from rondel.assemble import check

    findings = check(job, asked=self_test)
    width = max((len(f.what) for f in findings), default=0)
    for finding in findings:
        print(f"{'✓' if finding.ok else '✗'} {finding.what:<{width}}  {finding.message}")
        if not finding.ok and finding.remedy:
            print(f"  {'':<{width}}  do: {finding.remedy}")
    wrong = sum(not finding.ok for finding in findings)
    print(f"\n{wrong} of {len(findings)} checks failed" if wrong else f"\nall {len(findings)} checks passed; rondel train {recipe}")
    if wrong:
        raise typer.Exit(1)
