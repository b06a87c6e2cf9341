"""rondel eval: a model, a checkpoint or a run on held-out tasks, by the same rollout code as in training."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rondel.cli import OVERRIDES, sort_words
from rondel.core.errors import UserError
from rondel.system.files import write_text
from rondel.text.unicode import visible_text

SETTINGS = OVERRIDES


def run(
    ctx: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL_OR_RUN", help="A run folder, a checkpoint, a model folder or a hub id.")
    ],
    recipe: Annotated[str, typer.Argument(metavar="[RUN.toml]", help="Whose tasks; a run folder knows its own.")] = "",
    n: Annotated[int | None, typer.Option("--n", min=1, help="How many held-out tasks; all when left out.")] = None,
    rates: Annotated[
        str,
        typer.Option("--rates", metavar="FILE", help="Instead: the training tasks with their pass rates, as JSONL."),
    ] = "",
    samples: Annotated[int, typer.Option("--samples", min=1, help="Tries at each task for --rates.")] = 10,
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
    if rates:
        return _write_ratings(model, recipe or None, overrides, samples, Path(rates))
    from rondel.assemble import evaluate_checkpoint
    from rondel.runtime.telemetry.scores import interval_text, is_share, score_text

    result = evaluate_checkpoint(model, recipe or None, overrides)
    if as_json:
        print(json.dumps(dataclasses.asdict(result), default=str))
        return
    share = is_share(dataclasses.asdict(result))
    what = "score" if share else "mean reward"
    print(
        f"{model}: {what} {score_text(result.score, share)} on {result.n} held-out task{'s' * (result.n != 1)}, "
        f"95 % interval {interval_text(result.low, result.high, share)}"
    )
    if failed := result.request.get("failed"):
        print(f"{failed} of them could not be scored and count as 0")
    print(
        f"profile {result.profile}, weights of version {result.version} after step {result.step}, {result.seconds:.1f} "
        f"s"
    )
    for sample in result.samples[:3]:
        reward = "not scored" if sample.get("reward") is None else f"reward {sample['reward']:g}"
        told = (
            f"\n  asked   {sample.get('prompt', '')}\n  wrote   {sample.get('text', '')}\n  correct "
            f"{sample.get('answer', '')}   ({reward})"
        )
        print(visible_text(told))


def _write_ratings(model: str, recipe: str | None, overrides: dict[str, Any], samples: int, path: Path) -> None:
    """One line a task, which task.data of kind "jsonl" reads: `where = { pass_rate = [0.1,
    0.9] }` leaves out what teaches nothing.
    """
    from rondel.assemble import rate

    if not path.parent.is_dir():
        raise UserError(f"--rates {path}: there is no folder {path.parent}")

    def print_progress(done: int, total: int) -> None:
        if sys.stderr.isatty() or done == total or done % 100 == 0:
            print(
                f"{done} of {total} tasks",
                end="\r" if sys.stderr.isatty() and done < total else "\n",
                file=sys.stderr,
                flush=True,
            )

    rows = rate(model, recipe, overrides, samples, print_progress)
    write_text(path, "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows))
    known = sorted(row["pass_rate"] for row in rows if row["pass_rate"] is not None)
    never, always = (sum(r == end for r in known) for end in (0.0, 1.0))
    print(
        f"{path}: {len(rows)} tasks, {samples} tries each; {never} never succeed, {always} always, "
        f"{len(known) - never - always} between"
    )
    if len(known) < len(rows):
        print(f"{len(rows) - len(known)} could not be scored: pass_rate is null there")
