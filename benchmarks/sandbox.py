"""What a box costs: a snippet by the pool of waiting boxes, a command in a box that
is there, a new box for each command.

    rondel bench sandbox --json
`pool_ms`   print(1) by `Functions.call`: a copy of a waiting interpreter
`python_ms` python3 -c "print(1)" in an open box; `true_ms` a program that does nothing
`box_ms`    a new box, one snippet, and its end; `bare_ms` python3 -c "print(1)" without any box
`case_ms`   the code reward on one function case, `assert_ms` on one assert: two boxes that speak to each other
Medians; `wall` is which isolation it was.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="rondel bench sandbox", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--wall", default="auto", help="native or bubblewrap; auto takes the first that holds")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args(argv)

    from _work import median, report

    from rondel.core.types import Task, Trajectory
    from rondel.runtime.sandbox.box import Sandbox
    from rondel.runtime.sandbox.cell import PYTHON
    from rondel.runtime.sandbox.pool import Functions
    from rondel.runtime.sandbox.probe import find_isolation
    from rondel.score.code import Code

    sandbox = Sandbox(wall=a.wall)

    def timed(act: Callable[[], Any], times: int) -> tuple[float, float]:
        """(median, nine in ten are below) in milliseconds."""
        taken = []
        for _ in range(times):
            began = time.perf_counter()
            act()
            taken.append(1e3 * (time.perf_counter() - began))
        return round(median(taken), 2), round(sorted(taken)[int(0.9 * times)], 2)

    def whole_box() -> None:
        cell = sandbox.cell()
        cell.call("print(1)")
        cell.kill()

    result: dict[str, Any] = {
        "wall": find_isolation(a.wall).wall,
        "holds": ", ".join(find_isolation(a.wall).holds),
        "calls": a.calls,
    }
    few = max(5, a.calls // 5)
    with Functions(sandbox) as pool:
        result["pool_ms"], result["pool_ms_p90"] = timed(lambda: pool.call("print(1)"), a.calls)
    cell = sandbox.cell()
    result["true_ms"], _ = timed(lambda: cell.run(["true"]), few)
    result["python_ms"], _ = timed(lambda: cell.run(["python3", "-c", "print(1)"]), few)
    cell.kill()
    result["box_ms"], result["box_ms_p90"] = timed(whole_box, few)
    result["bare_ms"], _ = timed(lambda: subprocess.run([PYTHON, "-c", "print(1)"], stdout=subprocess.DEVNULL), few)
    reward, answer = Code(sandbox=sandbox), Trajectory(text="def f(x): return x * x")
    for name, test in (("case", {"call": [2], "expected": 4, "function": "f"}), ("assert", "assert f(2) == 4")):
        task = Task("t", "bench", {"tests": [test]})
        result[f"{name}_ms"], _ = timed(lambda task=task: reward(answer, task), few)  # type: ignore[misc]
    report(result, only_json=a.json)


if __name__ == "__main__":
    main()
