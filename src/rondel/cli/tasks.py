"""rondel tasks: repository tasks, made of real packages, and checked."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rondel.core.errors import UserError
from rondel.core.registry import suggest_name
from rondel.text.unicode import visible_text

WHAT = ("repositories", "check")


def run(
    what: Annotated[str, typer.Argument(metavar="repositories|check", help="Make tasks, or check those of a path.")],
    path: Annotated[str, typer.Argument(metavar="[PATH]", help="For check: a folder of tasks, or one.")] = "",
    out: Annotated[str, typer.Option("--out", metavar="FOLDER", help="Where tasks are written.")] = "",
    n: Annotated[int, typer.Option("--n", min=1, help="How many.")] = 60,
    seed: Annotated[int, typer.Option("--seed", help="Of the bugs: equal seeds make equal folders.")] = 0,
    package: Annotated[list[str] | None, typer.Option("--package", help="Of these alone; may be repeated.")] = None,
    cache: Annotated[str, typer.Option("--cache", metavar="FOLDER", help="Where sdists are kept.")] = "",
    format: Annotated[str, typer.Option("--format", help="Of what is checked: rondel, harbor, ...")] = "auto",
    source: Annotated[str, typer.Option("--source", help="Checkouts, for rows of SWE-bench.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Make or check repository tasks.

    They are made of packages of PyPI with seeded bugs. A task is good if its solution scores 1 and the untouched repository less. Exits 1 if one is not.
    """
    if what not in WHAT:
        raise UserError(f"rondel tasks {what}: it is {' or '.join(WHAT)}.{suggest_name(what, list(WHAT))}")
    if what == "check":
        _check(path, format, source, as_json)
    else:
        _make(out, n, seed, package or [], cache, as_json)


def _make(out: str, n: int, seed: int, names: list[str], cache: str, as_json: bool) -> None:
    from rondel.generate.envs.repository.catalogue import PACKAGES
    from rondel.generate.envs.repository.task_set import make_task_set
    from rondel.runtime.sandbox.box import Sandbox

    if not out:
        raise UserError("--out is missing: name a new folder for the tasks")
    if odd := next((name for name in names if name not in PACKAGES), None):
        raise UserError(
            f"--package {odd}: it is not known.{suggest_name(odd, list(PACKAGES))} Known: {', '.join(PACKAGES)}"
        )
    packages = [PACKAGES[name] for name in names or PACKAGES]
    folder = Path(out)
    kept = Path(cache) if cache else folder / ".sdists"
    digest = make_task_set(packages, folder, Sandbox(), n=n, seed=seed, cache=kept, say=_say)
    if as_json:
        print(json.dumps({"folder": out, "tasks": n, "seed": seed, "digest": digest}))
    else:
        print(f'{n} tasks in {out}, digest {digest}\ntask.data = {{ kind = "repository", path = "{out}" }}')


def _check(path: str, format: str, source: str, as_json: bool) -> None:
    from rondel.generate.envs.repository.reader import load_task, task_specs
    from rondel.generate.envs.repository.self_check import check_in_boxes
    from rondel.runtime.sandbox.box import Sandbox

    if not path:
        raise UserError("name what is to be checked: rondel tasks check FOLDER")
    sandbox, found = Sandbox(), []
    for _, spec in task_specs(path, format, source, ""):
        checked = check_in_boxes(load_task(spec), sandbox)
        found.append(checked)
        if not as_json:
            ends = checked.fault or f"untouched {checked.untouched:g}, solved {checked.solved:g}"
            print(visible_text(f"{'✗' if checked.fault else '✓'} {checked.name}  {ends}"), flush=True)
    wrong = [one for one in found if one.fault]
    if as_json:
        print(json.dumps({"ok": not wrong, "tasks": [asdict(one) for one in found]}))
    else:
        print(f"\n{len(found) - len(wrong)} of {len(found)} tasks are good")
    if wrong:
        raise typer.Exit(1)


def _say(text: str) -> None:
    print(visible_text(text), file=sys.stderr, flush=True)
