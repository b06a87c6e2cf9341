"""rondel audit: rollouts that may have earned their reward by a hack, read one by one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from rondel.core.errors import UserError
from rondel.text.unicode import visible_text


def run(
    folder: Annotated[str, typer.Argument(metavar="RUN", help="A run folder; the run may still go on.")],
    steps: Annotated[
        str, typer.Option("--steps", metavar="FIRST:LAST", help="Which steps; all that are stored when left out.")
    ] = "",
    limit: Annotated[int, typer.Option("--limit", min=0, help="How many rollouts of each kind to quote.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, with every finding.")] = False,
    fail: Annotated[bool, typer.Option("--fail", help="Exit with 1 if there is a finding.")] = False,
) -> None:
    """Find reward hacks in the rollouts of a run.

    Tests edited, checks patched, answers copied, judges addressed, several answers: each with the words that say so.
    """
    from rondel.checks.audit import audit_rollouts
    from rondel.cli.view import supervised_steps
    from rondel.runtime.journal.store import stored_steps
    from rondel.text.unicode import write_json

    supervised = supervised_steps(Path(folder))
    chosen = _choose_steps([step for step in stored_steps(folder) if step > supervised], steps, folder, supervised)
    report = audit_rollouts(_read_steps(Path(folder), chosen))
    if as_json:
        told = {"folder": folder, "steps": chosen, "rollouts": report.rollouts, "kinds": report.summary()}
        told |= {"findings": [asdict(f) for f in report.findings], "shares": report.shares, "rewards": report.rewards}
        print(write_json(told))
    else:
        _print_report(folder, chosen, report, limit)
    if fail and report.findings:
        raise typer.Exit(1)


def _choose_steps(stored: list[int], wanted: str, folder: str, supervised: int) -> list[int]:
    """`stored`: without the supervised phase: nobody was rewarded for it."""
    behind = f" behind the supervised phase (steps 1 to {supervised})" if supervised else ""
    if not stored:
        raise UserError(f"{folder} has no stored rollouts{behind}: name the folder of a run that has trained a step")
    if not wanted:
        return stored
    first, colon, last = wanted.partition(":")
    try:
        low, high = int(first or stored[0]), int((last or stored[-1]) if colon else first)
    except ValueError as error:
        raise UserError(f"--steps {wanted}: write two numbers, --steps 10:20 say, or one") from error
    chosen = [step for step in stored if low <= step <= high]
    if not chosen:
        raise UserError(f"--steps {wanted}: none of them is stored{behind}; {stored[0]} to {stored[-1]} are")
    return chosen


def _read_steps(folder: Path, steps: list[int]) -> Iterator[tuple[int, list[tuple[dict[str, Any], Any]]]]:
    """Without what was shown to the policy: nobody was rewarded for it."""
    from rondel.checks.audit import Rollout
    from rondel.cli.view import load_tokenizer, token_pieces
    from rondel.core.types import DATA
    from rondel.runtime.journal.store import read_step

    read_tokens = load_tokenizer(folder)
    for number, step in enumerate(steps, 1):
        if sys.stderr.isatty():
            end = "\n" if number == len(steps) else "\r"
            print(f"step {step}: {number} of {len(steps)}", end=end, file=sys.stderr, flush=True)
        rows = [row for row in read_step(folder, step) if row["policy"] != DATA]
        yield step, [(row, Rollout(token_pieces(row, read_tokens), row["task_data"])) for row in rows]


def _print_report(folder: str, steps: list[int], report: Any, limit: int) -> None:
    kinds = report.summary()
    print(
        f"{folder}: {report.rollouts} rollouts of {len(steps)} steps ({steps[0]} to {steps[-1]})"
        + ("" if kinds else "; nothing found")
    )
    for kind in kinds:
        gain = "not scored" if kind["advantage"] is None else f"{kind['advantage']:+.3g} against their groups"
        r = (
            ""
            if kind["correlation"] is None
            else f", its share correlates with the reward over steps at {kind['correlation']:+.2f}"
        )
        n = kind["rollouts"]
        print(f"\n{kind['name']}: {n} rollout{'s' * (n != 1)} ({kind['share']:.1%}), reward {gain}{r}")
        own = sorted((f for f in report.findings if f.name == kind["name"]), key=lambda f: -(f.advantage or 0.0))
        for f in own[:limit]:
            gain = "" if f.advantage is None else f" ({f.advantage:+.3g})"
            reward = "no reward" if f.reward is None else f"reward {f.reward:g}{gain}"
            print(visible_text(f"  step {f.step}, group {f.group}, sample {f.sample}, {reward}: {f.quote}"))
    if kinds:
        first = report.findings[0]
        print(f"\nnext    rondel view {folder} --step {first.step} --group {first.group}")
        print("A finding is a reason to look, and no proof; a share that grows with the reward is a reason to stop.")
