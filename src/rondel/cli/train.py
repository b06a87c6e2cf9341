"""rondel train: the main job."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rondel.cli import OVERRIDES, read_job

SETTINGS = OVERRIDES


def run(
    ctx: typer.Context,
    recipe: Annotated[str, typer.Argument(metavar="RUN.toml", help="The recipe; `rondel explain RUN.toml` shows what it means.")],
    record: Annotated[
        bool, typer.Option("--record", help="run.record: write down what the recipe does not determine, for `rondel replay --into`.")
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
        print(ending(job.run.folder, card))


def ending(folder: str, card: dict[str, Any]) -> str:
    """What a newcomer wants to see last: before and after, a few answers, where everything is, what to try next."""
    from rondel.runtime.telemetry.scores import interval_text, score_text

    share = card["score_is_share"]
    rows = [
        f"  {name:<7}{score_text(e['score'], share):>7}   95 % interval {interval_text(e['low'], e['high'], share)}   n = {e['n']}"
        for name, e in _evaluations(card)
    ]
    pairs = list(zip(card["samples_before"], card["samples_after"]))[:3]
    answers = [
        f"  asked   {was.get('prompt', '')}\n  before  {_one_line(was)}\n  after   {_one_line(now)}\n  answer  {was.get('answer', '')}\n"
        for was, now in pairs
    ]
    return "\n".join(
        [
            *(["", "held-out tasks, greedy", *rows] if rows else []),
            *(["", *answers] if answers else [""]),
            f"run folder  {folder}   ({card['steps']} steps, {card['seconds']:.0f} s)",
            f"next        rondel view {folder}        the answers, coloured by who wrote them",
            f"            rondel card {folder}        the run card: nine questions answered from measurement",
            f"            tensorboard --logdir {folder}/tensorboard",
        ]
    )


def _evaluations(card: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(name, card[f"eval_{name}"]) for name in ("before", "after") if card.get(f"eval_{name}")]


def _one_line(sample: dict[str, Any]) -> str:
    text = " ".join(str(sample.get("text", "")).split())
    return (
        f"{text[:90]}{'...' * (len(text) > 90)}   (reward {sample['reward']:g})"
        if sample.get("reward") is not None
        else f"{text[:90]}   (not scored)"
    )
