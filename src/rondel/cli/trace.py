"""rondel trace: a run as a picture of its time."""

from __future__ import annotations

from typing import Annotated

import typer


def run(
    folder: Annotated[str, typer.Argument(metavar="RUN", help="A run folder.")],
    output: Annotated[str, typer.Option("-o", "--output", metavar="FILE", help="Where to write it.")] = "trace.json",
) -> None:
    """Write a trace that Perfetto opens.

    One track a worker, a slice a phase, every group from its admission to its training,
    counters of lag, speed and groups in flight.
    """
    from rondel.runtime.telemetry.trace import build_trace
    from rondel.system.files import write_text
    from rondel.text.unicode import write_json

    told = build_trace(folder)
    write_text(output, write_json(told) + "\n")
    print(
        f"{output}: {len(told['traceEvents'])} events; open it at https://ui.perfetto.dev (nothing is uploaded) or "
        f"chrome://tracing"
    )
