"""rondel replay: one step again from its stored rollouts, or a recorded run whole."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from rondel.text.unicode import visible_text


def run(
    folder: Annotated[str, typer.Argument(metavar="RUN", help="A run folder.")],
    step: Annotated[int | None, typer.Option("--step", min=1, help="Which step.")] = None,
    into: Annotated[
        Path | None,
        typer.Option("--into", metavar="FOLDER", help="Of a run with --record: the whole run again, into this folder."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Train one step again, or a whole recorded run, and compare.

    A step from its stored rollouts, every metric beside what was recorded; a run from nothing
    but its recipe and its schedule, bit for bit.
    """
    if (step is None) == (into is None):
        raise typer.BadParameter("give --step N, or --into FOLDER for the whole run")
    if into is not None:
        return _replay_run(Path(folder), into, as_json)
    assert step is not None
    from rondel.core.errors import UserError
    from rondel.runtime.journal.log import read

    done = {e["step"]: e["metrics"] for e in read(folder) if e["kind"] == "StepDone"}
    if step not in done:
        raise UserError(
            f"{folder} has no finished step {step}; finished: {f'{min(done)} to {max(done)}' if done else 'none'}"
        )
    from rondel.assemble import replay

    with _warnings_printed():
        replayed, recorded = replay(folder, step), done[step]
    if as_json:
        print(json.dumps({"step": step, "recorded": recorded, "replayed": replayed}))
        return
    names = sorted(recorded.keys() | replayed.keys())
    width = max((len(name) for name in names), default=6)
    print(f"{'metric':<{width}}  {'recorded':>14}  {'replayed':>14}  difference")
    for name in names:
        was, now = recorded.get(name), replayed.get(name)
        print(f"{name:<{width}}  {_format_number(was):>14}  {_format_number(now):>14}  {_format_difference(was, now)}")


def _replay_run(folder: Path, into: Path, as_json: bool) -> None:
    from rondel.assemble import again, differences, train

    job, schedule = again(folder, into)
    train(job, quiet=as_json, schedule=schedule)
    with _warnings_printed():
        differ = differences(folder, into)
    if as_json:
        print(json.dumps({"folder": str(folder), "into": str(into), "differences": differ}))
    else:
        print(
            visible_text("\n".join(differ)) or f"{into} has the rollouts, metrics and weights of {folder}, bit for bit"
        )
    if differ:
        raise typer.Exit(1)


@contextmanager
def _warnings_printed() -> Iterator[None]:
    from rondel.core.events import Event, Warned, subscribe

    def print_warning(event: Event) -> None:
        if isinstance(event, Warned):
            print(visible_text(f"warning: {event.message}"), file=sys.stderr)

    forget = subscribe(print_warning)
    try:
        yield
    finally:
        forget()


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.7g}"


def _format_difference(was: float | None, now: float | None) -> str:
    if was is None or now is None:
        return "only one side has it"
    return "equal" if was == now or (was != was and now != now) else f"{now - was:+.1e}"
