"""rondel diagnose: what is wrong with a run, in the order in which to look at it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from rondel.text.unicode import visible_text


def run(
    folder: Annotated[str, typer.Argument(metavar="RUN", help="A run folder; the run may still go on, or have died.")],
    other: Annotated[
        str, typer.Argument(metavar="RUN2", help="Another one, to compare with.", show_default=False)
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    fail_on: Annotated[
        Literal["never", "error", "warning", "note"],
        typer.Option("--fail-on", help="Exit with 1 if there is a finding at least so severe."),
    ] = "never",
) -> None:
    """Find what is wrong with a run.

    Ranked findings, each with its evidence and the next thing to do. With RUN2 it says which findings
    only one of both has, and where their recipes differ.
    """
    from rondel.runtime.telemetry.diagnose import differing, findings, read_story
    from rondel.runtime.telemetry.diagnose.finding import ORDER
    from rondel.text.unicode import write_json

    stories = [read_story(f) for f in (folder, other) if f]
    told = [findings(story) for story in stories]
    differs = differing(stories[0].job, stories[1].job, skip=("run.",)) if other else {}
    if as_json:
        runs = [
            {"folder": str(s.folder), **_run_state(s), "findings": [asdict(f) for f in found]}
            for s, found in zip(stories, told)
        ]
        print(write_json({"runs": runs, "differs": differs} if other else runs[0]))
    else:
        names = [{f.name for f in found} for found in told]
        for i, (story, found) in enumerate(zip(stories, told)):
            _print_findings(story, found, names[1 - i] if other else None)
        if other:
            print(
                "the recipes differ in\n" + "\n".join(f"  {k}: {a!r} -> {b!r}" for k, (a, b) in differs.items())
                if differs
                else "equal recipes"
            )
    if fail_on != "never" and any(ORDER.index(f.severity) <= ORDER.index(fail_on) for found in told for f in found):
        raise typer.Exit(1)


def _run_state(story: Any) -> dict[str, Any]:
    state = "goes on" if story.alive else "complete" if story.ended else "ended early"
    return {
        "state": state,
        "supervised": story.shown > 0 and not story.steps,
        "step": story.step,
        "steps": story.recipe_value("loop.warmup.steps", 0) + story.recipe_value("loop.steps", 0),
    }


def _print_findings(story: Any, found: list[Any], beside: set[str] | None) -> None:
    about = _run_state(story)
    print(
        f"{Path(story.folder)}: step {about['step']} of {about['steps']}, "
        f"{'in the supervised phase, ' * about['supervised']}{about['state']}" + ("" if found else "; nothing found")
    )
    for number, f in enumerate(found, start=1):
        only = "   (only here)" if beside is not None and f.name not in beside else ""
        told = (
            f"\n{number}. {f.severity}: {f.name.replace('_', ' ')}{only}\n   {f.evidence}\n   {f.meaning}\n   "
            f"next: {f.action}"
        )
        print(visible_text(told))
    print()
