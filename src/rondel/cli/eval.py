"""rondel eval: a model, a checkpoint or a run on held-out tasks, by the same rollout code as in training."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from rondel.cli import OVERRIDES, sort_words
from rondel.words.errors import UserError

SETTINGS = OVERRIDES


def run(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL_OR_RUN", help="A run folder, a checkpoint, a model folder or a hub id.")],
    recipe: Annotated[str, typer.Argument(metavar="[RUN.toml]", help="Whose tasks; a run folder knows its own.")] = "",
    n: Annotated[int | None, typer.Option("--n", min=1, help="How many held-out tasks; all when left out.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Score a model on held-out tasks.

    --section.key=value overrides the recipe, or what the run folder recorded.
    """
    names, overrides = sort_words(model, recipe, *ctx.args)
    if not 1 <= len(names) <= 2:
        raise UserError(f"give a model or run, then at most one recipe; {len(names)} were given: {', '.join(names)}")
    model, recipe = names[0], (names[1] if len(names) > 1 else "")
    overrides |= {} if n is None else {"task.eval.n": n}
    from rondel.assemble import evaluate_checkpoint

    result = evaluate_checkpoint(model, recipe or None, overrides)
    if as_json:
        print(json.dumps(dataclasses.asdict(result), default=str))
        return
    print(f"{model}: {result.score:.1%} of {result.n} held-out tasks, 95 % interval {result.low:.1%} to {result.high:.1%}")
    print(f"profile {result.profile}, weights of version {result.version} after step {result.step}, {result.seconds:.1f} s")
    for sample in result.samples[:3]:
        reward = "not scored" if sample.get("reward") is None else f"reward {sample['reward']:g}"
        print(
            f"\n  asked   {sample.get('prompt', '')}\n  wrote   {sample.get('text', '')}\n  answer  {sample.get('answer', '')}   ({reward})"
        )
