"""rondel eval: a model, a checkpoint or a run on held-out tasks, by the same rollout code as in training."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from rondel.cli import OVERRIDES, sort_words
from rondel.core.errors import UserError
from rondel.system.files import make_folder, replace_file, write_text
from rondel.system.run_weights import find_run_weights
from rondel.text.unicode import visible_text

SETTINGS = OVERRIDES
FILE_KINDS = {".jsonl": "jsonl", ".csv": "csv", ".parquet": "parquet"}


def run(
    ctx: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL_OR_RUN", help="A run folder, a checkpoint, a model folder or a hub id.")
    ],
    recipe: Annotated[str, typer.Argument(metavar="[RUN.toml]", help="Whose tasks; a run folder knows its own.")] = "",
    n: Annotated[int | None, typer.Option("--n", min=1, help="How many tasks of each set; all when left out.")] = None,
    draws: Annotated[
        int | None, typer.Option("--draws", min=1, help="Answers to each task; above 1: avg@k, pass@k, majority@k.")
    ] = None,
    k: Annotated[
        str, typer.Option("--k", metavar="1,4,8", help="The k to report; powers of 2 up to --draws when left out.")
    ] = "",
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=DATA", help="One more set, repeatable: a file, or a table as in task.data."
        ),
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Of a run the checkpoint that run.checkpoint.best kept, not the newest.")
    ] = False,
    report: Annotated[
        str, typer.Option("--report", metavar="FILE", help="Where the page goes; of a run, its folder evaluations/.")
    ] = "",
    rates: Annotated[
        str,
        typer.Option("--rates", metavar="FILE", help="Instead: the training tasks with their pass rates, as JSONL."),
    ] = "",
    samples: Annotated[
        int | None, typer.Option("--samples", min=1, help="Tries at each task for --rates; 10 when left out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Score a model on held-out tasks.

    --section.key=value overrides the recipe, or what the run folder recorded.
    """
    names, overrides = sort_words(model, recipe, *ctx.args)
    if not 1 <= len(names) <= 2:
        raise UserError(f"give a model or run, then at most one recipe; {len(names)} were given: {', '.join(names)}")
    model, recipe = names[0], (names[1] if len(names) > 1 else "")
    _refuse_ineffective(overrides, rates=bool(rates))
    if rates:
        asked = {"--n": n, "--draws": draws, "--k": k, "--set": sets, "--report": report, "--json": as_json}
        if idle := [name for name, given in asked.items() if given]:
            raise UserError(
                f"{', '.join(idle)} with --rates: it tries every training task --samples times and writes FILE, and "
                "evaluates no held-out set. Leave out one of both"
            )
        return _write_ratings(model, recipe or None, overrides, best, samples or 10, Path(rates))
    if samples is not None:
        raise UserError(
            f"--samples {samples} belongs to --rates FILE; --draws {samples} answers held-out tasks so often"
        )
    overrides |= {} if n is None else {"task.eval.n": n}
    overrides |= {} if draws is None else {"task.eval.samples": draws}
    overrides |= {"task.eval.k": _parse_numbers(k)} if k else {}
    overrides |= {f"task.eval.sets.{name}": table for name, table in map(_parse_set, sets or [])}
    page = _page_path(model, best, report)
    from rondel.assemble import evaluate_sets
    from rondel.cli.evaluation_page import render_evaluation

    done = evaluate_sets(model, recipe or None, overrides, best, _progress_printer())
    results = [each.event for each in done]
    if page:
        replace_file(page, render_evaluation(model, done).encode("utf-8", "replace"))
    if as_json:
        main, *others = [dataclasses.asdict(result) for result in results]
        print(json.dumps({**main, "sets": others, "report": str(page or "")}, default=str))
        return
    for result in results:
        _print_result(model if result is results[0] else result.profile, result)
    _print_samples(results[0])
    if page:
        print(f"\nreport  {page}")


TRAINING_ONLY = re.compile(
    r"(algo|trainer|sync|run)\.|loop\.(?!seed$)|task\.(curriculum|filters)\b|task\.eval\.every$"
    r"|policies\.[^.]+\.(lr|clip|epochs|frozen)$|engine\.speculative\.lr$"
)


def _refuse_ineffective(overrides: dict[str, Any], *, rates: bool) -> None:
    """Keys that only training reads, and those of held-out sets where none is evaluated."""
    for name, value in overrides.items():
        if TRAINING_ONLY.match(name):
            raise UserError(
                f"--{name}={value} has no effect on an evaluation, which trains nothing: leave it out. "
                "It reads model, task, engine, place and loop.seed, and of those no key that is for training alone"
            )
        if rates and name.startswith("task.eval."):
            raise UserError(
                f"--{name}={value} has no effect with --rates, which tries training tasks with engine.sampling and "
                "evaluates no held-out set. Leave out one of both"
            )


def _print_result(whose: str, result: Any) -> None:
    from rondel.runtime.telemetry.scores import failure_text, interval_text, is_share, score_text

    share = is_share(dataclasses.asdict(result))
    what = "score" if share else "mean reward"
    draws = f", {result.draws} draws each" if result.draws > 1 else ""
    how = f" ({result.interval})" if result.interval else ""
    print(
        f"{whose}: {what} {score_text(result.score, share)} on {result.n} held-out task{'s' * (result.n != 1)}{draws}, "
        f"95 % interval {interval_text(result.low, result.high, share)}{how}"
    )
    for name, (value, low, high) in result.metrics.items():
        own = share if name.startswith("avg@") else True
        print(f"  {name:<14} {score_text(value, own):>7}   {interval_text(low, high, own)}")
    if failed := result.request.get("failed"):
        print(f"{failed} of them {failure_text(result.request)}")
    print(
        f"profile {result.profile}, weights of version {result.version} after step {result.step}, {result.seconds:.1f} "
        f"s"
    )
    if weights := result.request.get("weights"):
        print(f"measured with weights {weights}")


def _print_samples(result: Any) -> None:
    for sample in result.samples[:3]:
        reward = "not scored" if sample.get("reward") is None else f"reward {sample['reward']:g}"
        told = (
            f"\n  asked   {sample.get('prompt', '')}\n  wrote   {sample.get('text', '')}\n  correct "
            f"{sample.get('answer', '')}   ({reward})"
        )
        print(visible_text(told))


def _page_path(model: str, best: bool, report: str) -> Path | None:
    """Where the report goes, known to be writable before the evaluation begins; None for a model without a run."""
    if report:
        path = Path(report)
        if not path.absolute().parent.is_dir():
            raise UserError(f"--report {path}: there is no folder {path.parent}")
        return path.absolute()
    weights = find_run_weights(model, best, "train it, or evaluate its starting model: rondel eval MODEL RUN/job.toml")
    if weights.run is None:
        return None
    return make_folder(weights.run / "evaluations") / f"step-{weights.step:06d}.html"


def _parse_numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as error:
        raise UserError(f"--k {text}: write whole numbers with commas between them, --k 1,4,8 say") from error


def _parse_set(text: str) -> tuple[str, dict[str, Any]]:
    """'aime=aime.jsonl' or 'sums={ kind = "digits" }' -> (name, table as in task.data)."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not value.strip():
        raise UserError(f"--set {text}: write NAME=FILE.jsonl, or NAME={{ kind = ..., ... }} as in task.data")
    name, value = name.strip(), value.strip()
    if not value.startswith("{"):
        kind = FILE_KINDS.get(Path(value).suffix)
        if kind is None:
            raise UserError(f"--set {text}: {value} is no {' or '.join(FILE_KINDS)} file; give a table as in task.data")
        return name, {"kind": kind, "path": str(Path(value).absolute())}
    try:
        return name, tomllib.loads(f"set = {value}")["set"]
    except (ValueError, RecursionError) as error:
        raise UserError(f"--set {name}: {value} is no inline table: {error}") from error


def _progress_printer() -> Callable[[str, int, int], None]:
    """A line on stderr about twice a second on a terminal; else one every half minute."""
    last, terminal = time.monotonic(), sys.stderr.isatty()

    def print_progress(name: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < (0.5 if terminal else 30.0) and not (terminal and done == total):
            return
        last = now
        end = "\r" if terminal and done < total else "\n"
        print(f"{name}: {done} of {total} answers", end=end, file=sys.stderr, flush=True)

    return print_progress


def _write_ratings(
    model: str, recipe: str | None, overrides: dict[str, Any], best: bool, samples: int, path: Path
) -> None:
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

    rows = rate(model, recipe, overrides, samples, print_progress, best)
    write_text(path, "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows))
    known = sorted(row["pass_rate"] for row in rows if row["pass_rate"] is not None)
    never, always = (sum(r == end for r in known) for end in (0.0, 1.0))
    print(
        f"{path}: {len(rows)} tasks, {samples} tries each; {never} never succeed, {always} always, "
        f"{len(known) - never - always} between"
    )
    if len(known) < len(rows):
        print(f"{len(rows) - len(known)} could not be scored: pass_rate is null there")
