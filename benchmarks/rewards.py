"""Rule rewards a second through the pool of killable processes, and how long the event loop waits beside them.

    rondel bench rewards --reward number --workers 2 --json
Trajectories of 104 tokens with log-probabilities, all asked at once. `alone` is the
reward called in a loop without a pool: what is left between both is the pickle, the
pipe and the event loop. The gap is the
longest that a ticker of 1 ms had to wait.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

TEXTS = {"plain": "so it is {}", "boxed": r"hence \boxed{{{}}}", "latex": r"hence $\frac{{{}}}{{2}}$"}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="rondel bench rewards", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reward", default="number")
    parser.add_argument("--text", choices=list(TEXTS), default="plain")
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args(argv)

    from _work import median, report

    from rondel.core.types import Task, Trajectory
    from rondel.score import build_reward
    from rondel.score.pool import RewardPool

    def written(number: int) -> Trajectory:
        trajectory = Trajectory(text=TEXTS[a.text].format(number))
        trajectory.extend(list(range(40)))
        trajectory.extend(list(range(64)), logprobs=[-1.0] * 64, versions=[0] * 64)
        return trajectory

    trajectories, task = (
        [written(i) for i in range(a.calls)],
        Task("t", "single_turn", {"prompt": "What is it?", "answer": "7"}),
    )

    async def asked(pool: RewardPool) -> tuple[float, float]:
        began, gap = time.perf_counter(), 0.0
        scores = asyncio.gather(*(pool.score(trajectory, task) for trajectory in trajectories))
        while not scores.done():
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            gap = max(gap, time.perf_counter() - before - 0.001)
        return time.perf_counter() - began, gap

    async def rounds() -> list[tuple[float, float]]:
        with RewardPool(a.reward, workers=a.workers) as pool:
            await asked(pool)
            return [await asked(pool) for _ in range(a.repeat)]

    reward, alone = build_reward(a.reward), []
    for _ in range(a.repeat + 1):
        began = time.perf_counter()
        for trajectory in trajectories:
            reward(trajectory, task)
        alone.append(time.perf_counter() - began)
    seconds, gaps = zip(*asyncio.run(rounds()))
    out = {
        "bench": "rewards", "reward": a.reward, "text": a.text, "calls": a.calls, "workers": a.workers,
        "per_second": round(a.calls / median(list(seconds))), "alone_per_second": round(a.calls / median(alone[1:])),
        "loop_gap_ms": round(1e3 * median(list(gaps)), 1),
    }  # fmt: skip
    report(out, only_json=a.json)


if __name__ == "__main__":
    main()
