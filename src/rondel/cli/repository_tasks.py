"""rondel tasks repositories, rondel tasks check: tasks of real packages, and whether tasks are good."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import typer

from rondel.core.errors import UserError
from rondel.core.registry import suggest_name
from rondel.text.unicode import visible_text


def make_repositories(out: Path, n: int, seed: int, names: list[str], cache: str, as_json: bool) -> None:
    from rondel.generate.envs.repository.catalogue import PACKAGES
    from rondel.generate.envs.repository.task_set import make_task_set
    from rondel.runtime.sandbox.box import Sandbox

    if odd := next((name for name in names if name not in PACKAGES), None):
        raise UserError(
            f"--package {odd}: it is not known.{suggest_name(odd, list(PACKAGES))} Known: {', '.join(PACKAGES)}"
        )
    packages = [PACKAGES[name] for name in names or PACKAGES]
    kept = Path(cache) if cache else out.parent / ".rondel-sdists"
    digest = make_task_set(packages, out, Sandbox(), n=n, seed=seed, cache=kept, say=_say)
    if as_json:
        print(json.dumps({"folder": str(out), "tasks": n, "seed": seed, "digest": digest}))
    else:
        print(f'{n} tasks in {out}, digest {digest}\ntask.data = {{ kind = "repository", path = "{out}" }}')


def check_repositories(path: str, format: str, source: str, as_json: bool) -> None:
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
