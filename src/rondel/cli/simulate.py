"""rondel simulate: the loop of a run on a virtual clock, at any scale, with the planner's times."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any

import typer

from rondel.cli import OVERRIDES, setting_of
from rondel.core.errors import ConfigError
from rondel.system.files import write_text

SETTINGS = OVERRIDES


def run(
    ctx: typer.Context,
    recipe: Annotated[
        str, typer.Argument(metavar="[RUN.toml]", help="The recipe; none: only what --what-if says.")
    ] = "",
    what_if: Annotated[
        str, typer.Option("--what-if", metavar="NAME=VALUE ...", help="As `rondel plan` takes them.")
    ] = "",
    staleness: Annotated[
        str, typer.Option("--staleness", metavar="S,S", help="One simulation for each: 0,1,2,4.")
    ] = "",
    split: Annotated[
        str,
        typer.Option(
            "--split", metavar="T:E,T:E", help="Trainer's devices to engines', one simulation for each: 1:1,1:3."
        ),
    ] = "",
    sigma: Annotated[
        float, typer.Option("--sigma", help="Of the log-normal lengths; 0: all as long as the mean.")
    ] = 0.8,
    lengths: Annotated[
        str, typer.Option("--lengths", metavar="RUN", help="Instead: as the answers of this run folder.")
    ] = "",
    costs: Annotated[
        str,
        typer.Option(
            "--costs", metavar="RUN,RUN", help="Instead of the planner's times: as the timers of these run folders say."
        ),
    ] = "",
    tail: Annotated[
        str,
        typer.Option("--tail", metavar="SHARE:TIMES", help="Instead: 0.1:8 makes one of ten answers 8 times as long."),
    ] = "",
    slow: Annotated[str, typer.Option("--slow", metavar="SHARE:TIMES", help="Engines that are slower: 0.05:2.")] = "",
    in_flight: Annotated[str, typer.Option("--in-flight", metavar="HOW", help="hold, drain or abort.")] = "",
    mtbf: Annotated[
        float, typer.Option("--mtbf", metavar="HOURS", help="Mean time to the failure of one engine; 0: none fails.")
    ] = 0.0,
    controllers: Annotated[int, typer.Option("--controllers", min=1, help="Controllers that share the answers.")] = 1,
    parts: Annotated[
        int,
        typer.Option(
            "--parts", min=1, help="Of a step's groups; each is trained while the others are still written (M2Flow)."
        ),
    ] = 1,
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="Steps that are counted, after those that fill the buffer.")
    ] = 20,
    seed: Annotated[int, typer.Option("--seed", help="Of lengths and failures.")] = 0,
    chain: Annotated[
        bool, typer.Option("--chain", help="What breaks from 8 devices to ten thousand, and what helps.")
    ] = False,
    picture: Annotated[str, typer.Option("--picture", metavar="FILE.svg", help="With --chain: the same drawn.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Run the loop on a virtual clock.

    The real loop and buffer, with engines and a trainer that take the planner's times:
    throughput, idle shares, lag, step time.
    """
    if chain:
        from rondel.simulate.chain import build_chain, format_chain

        rows = build_chain()
        if picture:
            from rondel.simulate.picture import render_svg as drawn

            write_text(picture, drawn(rows))
        print(json.dumps(rows) if as_json else format_chain(rows))
        return
    if picture:
        raise ConfigError("--picture draws the chain: add --chain")
    setting = setting_of([recipe, what_if, *ctx.args])
    if in_flight:
        from rondel.core.registry import one_of

        one_of("--in-flight", in_flight, ("hold", "drain", "abort"))
        setting = replace(setting, in_flight=in_flight)
    how = _simulation_options(setting, sigma, lengths, tail, slow, mtbf, seed)
    how |= {"controllers": controllers, "parts": parts}
    if parts > 1 and not (setting.split or split):
        raise ConfigError("--parts trains while others generate: add --split 1:3, or --what-if place=split")
    found = rows_of(
        setting,
        _parse_integers("--staleness", staleness),
        _parse_splits(split, setting.gpus),
        steps,
        how,
        costs.split(",") if costs else [],
    )
    if as_json:
        print(
            json.dumps(
                {
                    "model": setting.shape.name,
                    "hardware": setting.hardware.name,
                    "devices": setting.gpus,
                    "rows": found,
                    "assumed": list(setting.assumed),
                }
            )
        )
    else:
        show_rows(setting, found)


def rows_of(
    setting: Any, stale: list[int], splits: list[int], steps: int, how: dict[str, Any], runs: list[str] | None = None
) -> list[dict[str, Any]]:
    """A row for each split and staleness; what is not swept is as the setting has it.
    `runs` say what things cost, if there are any.
    """
    from rondel.simulate import simulate, world_of
    from rondel.simulate.costs import costs_of

    measured = costs_of(runs).with_costs if runs else lambda world: world
    rows = []
    for trainers in splits or [-1]:
        placed = setting if trainers < 0 else setting.on_devices(place="split", trainers=trainers)
        for s in stale or [setting.staleness]:
            told = simulate(measured(world_of(replace(placed, staleness=s), **how)), steps=steps)
            where = f"{placed.train_devices}:{placed.engine_devices}" if placed.split else "in turn"
            rows.append({"split": where, "staleness": s, **told})
    return rows


def _simulation_options(
    setting: Any, sigma: float, folder: str, tail: str, slow: str, mtbf: float, seed: int
) -> dict[str, Any]:
    from rondel.simulate.lengths import long_tailed, parse_tail, recorded_lengths

    if sigma < 0:
        raise ConfigError(f"--sigma {sigma}: it is 0 or more")
    law: Any = None
    if folder:
        law = recorded_lengths(folder)
    elif tail:
        share, times = parse_tail(tail)
        law = long_tailed(setting.mean / (1 - share + share * times), share, times)
    return {
        "lengths": law,
        "sigma": sigma,
        "slow": parse_tail(slow) if slow else (0.0, 1.0),
        "mtbf": mtbf * 3600,
        "seed": seed,
    }


def _parse_integers(name: str, text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",") if word]
    except ValueError as error:
        raise ConfigError(f"{name} {text}: numbers with commas between, such as 0,1,2,4") from error


def _parse_splits(text: str, gpus: int) -> list[int]:
    """ "1:3,1:1" on 64 devices -> [16, 32] that train."""
    found = []
    for word in filter(None, text.split(",")):
        try:
            train, generate = map(int, word.split(":"))
            trainers = round(gpus * train / (train + generate))
        except (ValueError, ZeroDivisionError) as error:
            raise ConfigError(f"--split {word}: it is TRAIN:GENERATE, such as 1:3") from error
        if not 0 < trainers < gpus:
            raise ConfigError(
                f"--split {word} of {gpus} devices leaves one side empty: give more with --what-if gpus=8"
            )
        found.append(trainers)
    return found


def show_rows(setting: Any, rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True, width=140)
    console.print(
        f"{setting.shape.name} on {setting.gpus} x {setting.hardware.name}: {setting.prompts} prompts x "
        f"{setting.group} "
        f"answers a step, "
        f"{rows[0]['mean_length']:.0f} {setting.unit} on average\n"
    )
    table = Table(box=None, pad_edge=False)
    for name in (
        "train:generate",
        "S",
        "step",
        "samples/s",
        f"{setting.unit}/s",
        "trainer idle",
        "engines idle",
        "places empty",
        "lag",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        lags = " ".join(f"{lag}: {share:.0%}" for lag, share in row["lags"].items())
        table.add_row(
            row["split"],
            str(row["staleness"]),
            f"{row['step_seconds']:.4g} s",
            f"{row['samples_per_second']:.4g}",
            f"{row['tokens_per_second']:.4g}",
            f"{row['trainer_idle']:.0%}",
            f"{row['rollout_idle']:.0%}",
            f"{row['places_idle']:.0%}",
            lags,
        )
    console.print(table)
    best = max(rows, key=lambda row: row["samples_per_second"])
    if len(rows) > 1:
        worst = min(rows, key=lambda row: row["samples_per_second"])
        console.print(
            f"\nfastest: {best['split']} at S = {best['staleness']}, "
            f"{best['samples_per_second'] / worst['samples_per_second']:.2f} times the slowest"
        )
    if failures := sum(row["failures"] for row in rows):
        console.print(f"{failures} engines failed; what they wrote went on elsewhere")
    console.print("\nassumed   " + "\n          ".join(setting.assumed) if setting.assumed else "")
