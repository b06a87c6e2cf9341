"""rondel train: the main job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rondel.cli import OVERRIDES, read_job
from rondel.text.unicode import visible_text

SETTINGS = OVERRIDES


def run(
    ctx: typer.Context,
    recipe: Annotated[
        str, typer.Argument(metavar="RUN.toml", help="The recipe; `rondel explain RUN.toml` shows what it means.")
    ],
    record: Annotated[
        bool,
        typer.Option(
            "--record", help="run.record: write down what the recipe does not determine, for `rondel replay --into`."
        ),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only warnings and errors.")] = False,
) -> None:
    """Train a model by a recipe.

    --section.key=value overrides the recipe. An unfinished run folder is continued by the same command.
    """
    job, _ = read_job(recipe, *ctx.args, *["--run.record=true"] * record)
    from rondel.assemble import train

    card = train(job, quiet=quiet)
    if card and not quiet:
        print(visible_text(closing_summary(job.run.folder, card)))


def closing_summary(folder: str, card: dict[str, Any]) -> str:
    """What a newcomer wants to see last: before and after, a few answers, where everything is, what to try next."""
    from rondel.runtime.telemetry.scores import failure_text, interval_text, score_text

    share, found = card["score_is_share"], _list_evaluations(card)
    width = max((len(name) for name, _ in found), default=0)
    rows = [
        f"  {name:<{width}} {score_text(e['score'], share):>7}   95 % interval "
        f"{interval_text(e['low'], e['high'], share)}   n = {e['n']}"
        + (f", {failed} {failure_text(e['request'])}" if (failed := e["request"].get("failed")) else "")
        for name, e in found
    ]
    temperature = found[0][1]["request"].get("temperature", 0) if found else 0
    drawn = f"temperature {temperature:g}" if temperature else "greedy"
    pairs = list(zip(card["samples_before"], card["samples_after"]))[:3]
    answers = [
        f"  asked   {was.get('prompt', '')}\n  before  {_one_line(was)}\n  after   {_one_line(now)}\n  correct "
        f"{was.get('answer', '')}\n"
        for was, now in pairs
    ]
    return "\n".join(
        [
            *(["", f"held-out tasks, {drawn}", *rows] if rows else []),
            *(["", *answers] if answers else [""]),
            f"run folder  {folder}   ({card['steps']} steps, {card['seconds']:.0f} s)",
            f"next        rondel view {folder}        the answers, coloured by who wrote them",
            f"            rondel card {folder}        the run card: nine questions answered from measurement",
            f"            rondel diagnose {folder}    what is wrong with the run, if anything",
            *(
                [f"            tensorboard --logdir {folder}/tensorboard"]
                if Path(folder, "tensorboard").is_dir()
                else []
            ),
        ]
    )


def _list_evaluations(card: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """In the order of time: before, after the supervised phase where there is one, after."""
    known = (("before", "before"), ("supervised", "after the supervised phase"), ("after", "after"))
    return [(name, card[f"eval_{key}"]) for key, name in known if card.get(f"eval_{key}")]


def _one_line(sample: dict[str, Any]) -> str:
    text = " ".join(str(sample.get("text", "")).split())
    return (
        f"{text[:90]}{'...' * (len(text) > 90)}   (reward {sample['reward']:g})"
        if sample.get("reward") is not None
        else f"{text[:90]}   (not scored)"
    )
