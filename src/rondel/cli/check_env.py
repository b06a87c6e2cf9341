"""rondel check-env: is an environment fit to be trained in?"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import asdict
from typing import Annotated, Any

import typer

from rondel.cli import OVERRIDES, sort_words
from rondel.core.errors import UserError
from rondel.text.unicode import visible_text

SETTINGS = OVERRIDES
ALONE: dict[str, Any] = {  # an environment without a recipe
    "model": {"path": {"random": "llama", "max_position_embeddings": 8192}},
    "loop": {"steps": 1, "groups_per_step": 1},
    "run": {"folder": "runs/check-env"},
}


def run(
    ctx: typer.Context,
    target: Annotated[
        str, typer.Argument(metavar="RUN.toml|ENV", help='A recipe, or an environment: a name or "module:name".')
    ],
    data: Annotated[str, typer.Option("--data", help="Its tasks, as task.data: '{ kind = \"digits\" }'.")] = "",
    n: Annotated[int, typer.Option("--n", min=1, help="How many tasks.")] = 20,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds for one episode.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Play an environment with scripted policies.

    Gold scores, wrong does not; no exception, exact masks, budgets held, nothing left open;
    time per call. Exits 1 if anything is wrong.
    """
    job = _read_job(target, data, ctx.args)
    from rondel.assemble import check_env

    checked = check_env(job, n=n, timeout=timeout)
    if as_json:
        print(
            json.dumps(
                {"ok": checked.ok, "findings": [asdict(f) for f in checked.findings], "figures": checked.figures}
            )
        )
    else:
        print_findings(checked.findings)
        wrong = sum(not f.ok for f in checked.findings)
        print(
            f"\n{wrong} of {len(checked.findings)} checks failed"
            if wrong
            else f"\nall {len(checked.findings)} checks passed"
        )
    if not checked.ok:
        raise typer.Exit(1)


def print_findings(findings: list[Any]) -> None:
    """A line a finding, and what to do below a failure and a warning."""
    width = max((len(f.what) for f in findings), default=0)
    for finding in findings:
        print(
            visible_text(
                f"{'!' if finding.warning else '✓' if finding.ok else '✗'} {finding.what:<{width}}  {finding.message}"
            )
        )
        if (finding.warning or not finding.ok) and finding.remedy:
            print(visible_text(f"  {'':<{width}}  do: {finding.remedy}"))


def _read_job(target: str, data: str, words: list[str]) -> Any:
    from rondel.core.config.job import Job
    from rondel.core.config.toml_reader import parse_overrides, set_dotted

    names, overrides = sort_words(target, *words)
    if len(names) != 1:
        raise UserError(f"one recipe or environment is needed and {len(names)} were given: {', '.join(names)}")
    overrides |= parse_overrides([f"--task.data={data}"]) if data else {}
    if names[0].endswith(".toml"):
        return Job.read(names[0], overrides)
    if "task.data" not in overrides and not any(key.startswith("task.data.") for key in overrides):
        raise UserError(
            f"'{names[0]}' is an environment, and needs tasks: --data '{{ kind = \"digits\" }}', or give a recipe"
        )
    tree = deepcopy(ALONE) | {"task": {"env": names[0], "data": {}}}
    for dotted, value in overrides.items():
        set_dotted(tree, dotted, value)
    return Job.parse(tree, "the command line")
