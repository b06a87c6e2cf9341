"""rondel check: all that can be wrong, before an hour is spent."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rondel.cli import OVERRIDES, read_job
from rondel.cli.check_env import print_findings

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
    from rondel.score import reward_urls
    from rondel.score.preflight import GROUPS, PAID

    for url in reward_urls(job.task.reward_spec):  # before any of them is made
        step = job.loop.groups_per_step * job.algo.group_size
        print(
            f"the reward asks {url}: this check makes at most {3 * PAID + GROUPS * job.algo.group_size} calls, a step "
            f"at least {step}"
        )
    findings = check(job, asked=self_test, say=lambda line: print(line, file=sys.stderr, flush=True))
    print_findings(findings)
    wrong, warned = (sum(map(test, findings)) for test in (lambda f: not f.ok, lambda f: f.warning))
    print(
        f"\n{wrong} of {len(findings)} checks failed"
        if wrong
        else (
            f"\nall {len(findings)} checks passed{f', {warned} with a warning' * bool(warned)}; next: "
            f"rondel train {recipe}"
        )
    )
    if wrong:
        raise typer.Exit(1)
