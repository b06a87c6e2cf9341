"""rondel plan: memory by tenant and phase, times, split, sync and layouts of a run,
before anything is started. Starts no torch.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from rondel.cli import OVERRIDES, setting_of

SETTINGS = OVERRIDES


def run(
    ctx: typer.Context,
    recipe: Annotated[
        str, typer.Argument(metavar="[RUN.toml]", help="The recipe; none: only what --what-if says.")
    ] = "",
    what_if: Annotated[
        str, typer.Option("--what-if", metavar="NAME=VALUE ...", help="model=70b gpus=64 hardware=h100 output=16k ...")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine first, in about a minute, and remember it.")
    ] = False,
) -> None:
    """Show what a run needs: memory, time, split, sync.

    The bill of memory by tenant and phase, how long a step takes, which pool waits, how
    weights travel, what to change first.
    """
    if calibrate:
        from rondel.checks.calibration import calibrate as measure

        print(measure(), file=sys.stderr, flush=True)
        if not (recipe or what_if or ctx.args):
            return
    from rondel.planner.plan import make_plan

    told = make_plan(setting_of([recipe, what_if, *ctx.args]))
    if as_json:
        print(json.dumps(told))
    else:
        print_plan(told)


def print_plan(told: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    model, devices, work = told["model"], told["devices"], told["work"]
    routed = f", {model['active'] / 1e9:.3g} B a token" if model["active"] < 0.9 * model["parameters"] else ""
    eye = f", {model['tower'] / 1e6:.4g} M of them its tower" if model["tower"] else ""
    where = " in an adapter" if model["adapter"] else ""
    part = (
        f", of which {model['trained'] / 1e6:.4g} M{where} are trained"
        if model["trained"] < model["parameters"]
        else ""
    )
    part += ", over a base in 4 bits" if model["four_bits"] else ""
    console.print(f"model     {model['name']}: {model['parameters'] / 1e9:.4g} B numbers{eye}{routed}{part}")
    for other in told["policies"]:
        console.print(
            f"          {other['name']}: {other['model']}, {other['parameters'] / 1e9:.4g} B numbers"
            + (", frozen" if other["frozen"] else "")
        )
    if devices["place"] == "split":
        places = f", {devices['train']} train, {devices['generate']} generate"
    else:
        places = ", which do both in turn" if devices["count"] > 1 else ""
    wide = f", {devices['devices_an_engine']} an engine" if devices["devices_an_engine"] > 1 else ""
    mesh = f", place.mesh = {devices['mesh']}" if devices.get("mesh", "{}") != "{}" else ""
    wide += f" ({layout})" if (layout := devices.get("engine")) else ""
    console.print(f"devices   {devices['count']} x {devices['hardware']}{places}{wide}{mesh}")
    console.print(f"a step    {work['text']}")
    for bill in told["memory"]:
        table = Table(title=f"GB on one device: {bill['pool']}", title_justify="left", box=None, pad_edge=False)
        table.add_column("")
        for phase in bill["total"]:
            table.add_column(phase, justify="right")
        for tenant, row in sorted(bill["rows"].items(), key=lambda item: -max(item[1].values())):
            table.add_row(tenant, *(_format_gb(row[phase]) for phase in row))
        table.add_row("sum", *(_format_gb(value) for value in bill["total"].values()), style="bold")
        console.print()
        console.print(table)
        if bill["loading"]:
            console.print(f"while it loads, a rank has at most {_format_gb(bill['loading'])}")
    console.print()
    for line in told["advice"]:
        console.print(line)
    generate, train, sync = told["generate"], told["train"], told["sync"]
    console.print(
        f"\ngenerate  {_format_seconds(generate['seconds'])}: {generate['text']}; "
        f"the longest answer alone {_format_seconds(generate['longest_answer_seconds'])}",
    )
    console.print(f"train     {_format_seconds(train['seconds'])}: {train['text']}")
    console.print(f"sync      {sync[0]['kind']}, {_format_seconds(sync[0]['seconds'])}: {sync[0]['why']}")
    for way in sync[1:]:
        console.print(f"          {way['kind']}, {_format_seconds(way['seconds'])}: {way['why']}")
    if devices["place"] == "split":
        costs = ", ".join(f"{how} {_format_seconds(seconds)}" for how, seconds in told["interrupt"].items())
        console.print(f"          an update stands in the way of requests in flight for: {costs}")
    console.print(f"step      {_format_seconds(told['step_seconds'])}; {told['split']['text']}")
    if devices["count"] > 1:
        console.print(f"place     {told['placement']}")
        for row in told["layouts"]:
            known = f" (place.mesh = {row['mesh']})" if row["exists"] else " (not in Rondel yet)"
            console.print(
                f"layout    {row['name']}{known}: {row['memory'] / 1e9:.1f} "
                f"GB{'' if row['fits'] else ', too much'}, training {_format_seconds(row['seconds'])}, "
                f"{row['bubble']:.0%} bubble, {row['traffic'] / 1e9:.3g} GB of traffic a device",
            )
    console.print("\nassumed   " + "\n          ".join(told["assumed"]))


def _format_gb(bytes_: float) -> str:
    return "" if bytes_ < 0.5e4 else f"{bytes_ / 1e9:.2f}" if bytes_ >= 1e7 else f"{bytes_ / 1e9:.5f}"


def _format_seconds(seconds: float) -> str:
    for unit, name in ((3600, "h"), (60, "min"), (1, "s")):
        if seconds >= 2 * unit or unit == 1:
            return f"{seconds / unit:.3g} {name}" if seconds >= 1 or seconds == 0 else f"{seconds * 1000:.3g} ms"
    return ""
