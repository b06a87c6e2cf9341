"""The controller alone: the real loop, buffer, rollouts, router, journal and store, engines that
answer after a virtual delay, 10,000 samples at once.

rondel bench controller                    an hour of virtual time; `--hours 0.1 --rollouts 500,2000,8000`
                                           shows how costs grow
rondel bench controller --rollouts 512 --tokens 8192 --hours 0.5     few and long: what a token costs

Time is virtual: when nothing is ready the clock jumps to the next timer, so what is measured
is the work of the event loop and nothing else. Lag is the time of one pass of the loop: so
long anything that is ready may wait for its turn.
Resident memory is read once a virtual minute; its slope is that of a line through all readings but
those of the first quarter, in which buffers fill.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import linear_regression
from types import SimpleNamespace
from typing import Any, cast

from _work import report

from rondel.simulate.clock import VirtualLoop

RECIPE = Path(__file__).parent.parent / "recipes" / "tiny.toml"
GROUP, STALENESS, ENGINES = 8, 1, 8
TRAIN, SYNC = 40.0, 2.0  # virtual seconds of a step and of its update
LONGEST = 102.4  # virtual seconds of the longest answer


class Later:
    """An engine that answers after as long as an engine would: lengths are skewed, as those of a reasoning model."""

    def __init__(self, seed: int, most: int) -> None:
        self.draw, self.version, self.most = random.Random(seed), 0, most
        self.tokens, self.logprobs = [10 + i % 512 for i in range(most)], [-self.draw.random() for _ in range(most)]

    async def generate(self, request: Any) -> Any:
        from rondel.core.types import Completion

        n = min(self.most, 1 + int(self.most / 512 * self.draw.lognormvariate(4.5, 0.8)))
        await asyncio.sleep(LONGEST * n / self.most)
        return Completion(
            self.tokens[:n], self.logprobs[:n], [self.version] * n, "stop", prompt_tokens=len(request.tokens)
        )


class Trainer:
    async def step(self, batch: Any, algo: Any) -> Any:
        import torch

        from rondel.core.types import StepStats

        await asyncio.sleep(TRAIN)
        for sample in batch.samples:
            sample.known.advantages = torch.zeros(len(sample.trainable))
        return StepStats(True, {})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="rondel bench controller", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rollouts", default="10000", help="samples in flight; several numbers are run one after the other"
    )
    parser.add_argument("--hours", type=float, default=1.0, help="virtual")
    parser.add_argument("--tokens", type=int, default=512, help="of the longest answer; the median has a sixth")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    for n in map(int, args.rollouts.split(",")):
        report(measure(n, args.hours * 3600, args.tokens), only_json=args.json)


def measure(rollouts: int, seconds: float, tokens: int) -> dict[str, Any]:
    from rondel.core.events import subscribe
    from rondel.runtime.journal.log import Journal
    from rondel.runtime.journal.store import RolloutStore
    from rondel.runtime.telemetry.metrics import StepMetrics

    seen = [0]

    def count(_: Any) -> None:
        seen[0] += 1

    parts, tasks = made(rollouts, tokens)
    importlib.import_module("rondel.driver.controller")  # the time that it takes is not the loop's
    with tempfile.TemporaryDirectory(prefix="controller-") as folder:
        journal = Journal(folder)
        stored = RolloutStore(Path(folder))
        ends = [subscribe(reader) for reader in (journal.write, stored.write, StepMetrics().on_event, count)]
        try:
            with asyncio.Runner(loop_factory=VirtualLoop) as runner:
                loop, memory = runner.get_loop(), [(0.0, rss())]
                began, cpu = time.perf_counter(), time.process_time()
                buffer = runner.run(drive(parts, tasks, rollouts, seconds, memory, stored))
                took, cpu = time.perf_counter() - began, time.process_time() - cpu
        finally:
            for end in ends:
                end()
            stored.close()
            journal.close()
    lag, samples = loop.passes, buffer.counts.trained * GROUP
    return {
        "rollouts in flight": rollouts,
        "virtual_s": round(loop.now),
        "real_s": round(took, 1),
        "cpu_s": round(cpu, 1),
        "steps": buffer.version,
        "samples": samples,
        "events_per_s": round(seen[0] / took),
        "cpu_us_per_sample": round(cpu / max(1, samples) * 1e6),
        "lag_p50_ms": round(1e3 * lag.seconds_at(0.5), 3),
        "lag_p99_ms": round(1e3 * lag.seconds_at(0.99), 2),
        "lag_p999_ms": round(1e3 * lag.seconds_at(0.999), 1),
        "lag_max_ms": round(1e3 * lag.longest, 1),
        "rss_mb": [round(memory[len(memory) * part // 4 - (part > 0)][1], 1) for part in range(5)],
        "rss_mb_per_hour": round(slope(memory[len(memory) // 4 :]), 1),
    }


def slope(memory: list[tuple[float, float]]) -> float:
    """(second, MB) -> MB an hour."""
    return 3600 * linear_regression(*zip(*memory)).slope if len(memory) > 1 else 0.0


def made(rollouts: int, tokens: int) -> tuple[SimpleNamespace, Any]:
    """What a run has when it begins; engines, trainer and reward are ours."""
    from rondel.assemble.components import judge_of
    from rondel.assemble.recipe_parts import sampling_of
    from rondel.assemble.rows import rows_of
    from rondel.core.config.job import Job
    from rondel.core.types import Score
    from rondel.driver.failure_budget import FailureBudget
    from rondel.generate.engine.router import EngineRouter
    from rondel.generate.envs.episode import EpisodeState
    from rondel.generate.envs.order import ShuffledOrder, stream_tasks
    from rondel.generate.envs.single_turn import SingleTurn
    from rondel.generate.envs.sources import load_tasks
    from rondel.models.load import load_model

    changes = {
        "run.folder": "nowhere",
        "algo.group_size": GROUP,
        "model.path.max_position_embeddings": tokens + 512,
        "engine.sampling.max_tokens": tokens,
    }
    job = Job.read(RECIPE, changes)
    loaded, draw = load_model(job.model.path, dtype="float32", device="cpu"), random.Random(0)

    async def score(trajectory: Any, task: Any) -> Any:
        return Score(float(draw.random() < 0.5))

    engines = {f"engine-{i}": Later(i, tokens) for i in range(ENGINES)}
    return SimpleNamespace(
        job=job, sampling=sampling_of(job), env=SingleTurn(), replays_routing=False, behavior_wants=frozenset(), rows=rows_of(job), episodes=EpisodeState, commands=None, failures=FailureBudget(), judge=judge_of(job, rows_of(job)), engines=engines,
        engine=EngineRouter(engines, max_inflight=2 * rollouts // ENGINES), pool=SimpleNamespace(score=score, groupwise=False),
        model_info=SimpleNamespace(tokenizer=loaded.tokenizer, max_context=loaded.max_context, sight=None, stop_ids=()),
    ), stream_tasks(ShuffledOrder(load_tasks(job.task.data, env=job.task.env_kind).train, seed=0))  # fmt: skip


async def drive(
    parts: Any, tasks: Any, rollouts: int, seconds: float, memory: list[tuple[float, float]], stored: Any
) -> Any:
    """The loop as a run has it."""
    from rondel import loop as house
    from rondel.buffer import Buffer
    from rondel.driver.phases import PerToken
    from rondel.driver.rollouts import GroupRollouts, prepare

    groups = max(1, rollouts // (GROUP * (STALENESS + 1)))
    buffer = Buffer(groups_per_step=groups, max_staleness=STALENESS)
    work, clock = GroupRollouts(parts, GROUP), cast(VirtualLoop, asyncio.get_running_loop())

    async def sync(trainer: Any, engine: Any) -> int:
        await asyncio.sleep(SYNC)
        for one in parts.engines.values():
            one.version += 1
        return buffer.version + 1

    async def milestone(step: int, version: int, batch: Any) -> None:
        with clock.freeze_clock():
            await stored.annotate_rollouts(step, advantages=PerToken(batch, "advantages"))
        if step % 10 == 0:  # what a checkpoint keeps of a buffer
            json.dumps(buffer.state_dict(version))

    async def reading() -> None:
        while True:
            await asyncio.sleep(60)
            memory.append((clock.time(), rss()))

    def steps() -> Any:
        step = 0
        while clock.time() < seconds:
            yield (step := step + 1)

    from rondel.runtime.devices import SplitDevices

    readings = asyncio.create_task(reading())
    await house.run(
        tasks, buffer, attempt=work.generate_group, score=work.score, judge=parts.judge, prepare=prepare, trainer=Trainer(),
        engine=parts.engine, devices=SplitDevices(), sync=sync, algo=None, steps=steps(), milestone=milestone,
    )  # fmt: skip
    readings.cancel()
    return buffer


def rss() -> float:
    """Resident memory of this process, MB."""
    if sys.platform != "linux":
        return 0.0
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


if __name__ == "__main__":
    main()
