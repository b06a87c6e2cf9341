"""rondel replay: one step again, from its stored rollouts."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def run(
    folder: Annotated[str, typer.Argument(metavar="RUN", help="A run folder.")],
    step: Annotated[int, typer.Option("--step", min=1, help="Which step.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Train one step again and compare.

    From its stored rollouts; every metric beside what was recorded.
    """
    from rondel.runtime.journal.log import read
    from rondel.words.errors import UserError

    done = {e["step"]: e["metrics"] for e in read(folder) if e["kind"] == "StepDone"}
    if step not in done:
        raise UserError(f"{folder} has no finished step {step}; finished: {f'{min(done)} to {max(done)}' if done else 'none'}")
    from rondel.assemble import replay

    replayed, recorded = replay(folder, step), done[step]
    if as_json:
        print(json.dumps({"step": step, "recorded": recorded, "replayed": replayed}))
        return
    names = sorted(recorded.keys() | replayed.keys())
    width = max((len(name) for name in names), default=6)
    print(f"{'metric':<{width}}  {'recorded':>14}  {'replayed':>14}  difference")
    for name in names:
        was, now = recorded.get(name), replayed.get(name)
        print(f"{name:<{width}}  {_number(was):>14}  {_number(now):>14}  {_difference(was, now)}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.7g}"


def _difference(was: float | None, now: float | None) -> str:
    if was is None or now is None:
        return "only one side has it"
    return "equal" if was == now or (was != was and now != now) else f"{now - was:+.1e}"
