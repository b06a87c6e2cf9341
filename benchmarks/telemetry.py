"""What it costs that a run answers for itself: the time inside every reader of events and
every time account, beside that of the steps.

    rondel bench telemetry recipes/tiny.toml --steps 40 --json

`share_of_step` has the share of the RL steps' CPU time (which other processes do not stretch) that each takes: Journal
(a JSON line an event, flushed), StepMetrics (the fold, the sinks, the alarms), Progress, Advisor,
Stacks, accounts. `telemetry` is their sum. RolloutStore is
beside it, with what its thread does: it writes the answers themselves, which is data.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
DATA = "RolloutStore"


def main(argv: list[str] | None = None) -> None:
    from _work import add_set

    parser = argparse.ArgumentParser(
        prog="rondel bench telemetry", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", nargs="?", default=str(Path(__file__).parents[1] / "recipes" / "tiny.toml"))
    parser.add_argument("--steps", type=int, default=40)
    add_set(parser)
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args(argv)

    from _work import overrides, report

    from rondel.core import clocks
    from rondel.core.config.job import Job
    from rondel.core.events import Event, StepDone, subscribe
    from rondel.driver import controller
    from rondel.runtime.journal import store
    from rondel.runtime.journal.log import read

    spent: Counter[str] = Counter()  # of the RL steps: it begins anew when the warmup is over
    warm, marks = 0, []

    def timed(reader: Callable[[Any], None], *kinds: type[Event]) -> Callable[[], None]:
        name = (
            type(owner).__name__
            if (owner := getattr(reader, "__self__", None)) is not None
            else getattr(reader, "__name__", "reader")
        )

        def read_timed(event: Any) -> None:
            began = time.thread_time()
            reader(event)
            spent[name] += time.thread_time() - began  # type: ignore[assignment]
            if isinstance(event, StepDone) and event.step == warm and name == "Journal":
                spent.clear()
                marks.append(time.process_time())
            elif isinstance(event, StepDone) and event.step > warm and name == "Journal":
                marks.append(time.process_time())

        return subscribe(read_timed, *kinds)

    def counted(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **how: Any) -> Any:
            began = time.thread_time()
            try:
                return work(*args, **how)
            finally:
                spent[DATA] += time.thread_time() - began  # type: ignore[assignment]

        return run

    plain, write, annotate = clocks.TimeAccount._add_lap, store.write_step, store.annotate_step

    def lap(self: Any) -> None:
        began = time.thread_time()
        plain(self)
        spent["accounts"] += time.thread_time() - began  # type: ignore[assignment]

    with tempfile.TemporaryDirectory() as scratch:
        changes = {
            "loop.steps": a.steps,
            "run.folder": scratch,
            "run.checkpoint.every": 0,
            "task.eval.every": 0,
        }
        job = Job.read(a.recipe, overrides(a.set, changes))
        warm = job.loop.warmup.steps
        before, controller.subscribe, clocks.TimeAccount._add_lap = controller.subscribe, timed, lap
        store.write_step, store.annotate_step = counted(write), counted(annotate)
        try:
            controller.train(job, quiet=True)
        finally:
            controller.subscribe, clocks.TimeAccount._add_lap = before, plain
            store.write_step, store.annotate_step = write, annotate
        done = [e for e in read(scratch) if e["kind"] == "StepDone" and e["step"] > warm]
    seconds = marks[-1] - marks[0] if warm else marks[-1]
    shares = {name: round(n / seconds, 5) for name, n in spent.most_common()}
    report(
        {
            "steps": len(done),
            "milliseconds_a_step": round(1e3 * seconds / len(done), 1),
            "telemetry": round(sum(share for name, share in shares.items() if name != DATA), 5),
            "share_of_step": shares,
        },
        only_json=a.json,
    )


if __name__ == "__main__":
    main()
