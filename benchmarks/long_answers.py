"""Answers of a million tokens through the controller: an engine and the ranks of a trainer as processes, which draw and
train nothing; the real rollouts, buffer, router, store, batch and checkpoint between them.

rondel bench long_answers --tokens 1000000 --samples 4 --steps 3

`longest_pass_ms`  how long anything that is ready waited for its turn on the event loop, without the time in which the
                   loop's thread waited for a core; `where` is what the loop was at. A thread that holds the interpreter
                   and waits for a core itself counts, so on a busy machine see the next two
`computed_ms`      the same by processor time: what all threads of this process computed in a pass at most, and no more
                   than the pass was long. Alone on its cores no pass would be longer
`longest_work_ms`  what the loop itself computed in a pass
`peak_mb`          resident memory of this process above what it had before the first request
`arrays_mb`        what a step consists of, counted where it is: the trajectories' columns (`columns_mb`, 17 bytes a
                   token), their texts, and the arrays of the batch that is trained
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import os
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from _work import report
from controller import made, rss


class LongEngine:
    """Answers at once, with as many tokens as it may write."""

    def __init__(self, tokens: int) -> None:
        import numpy as np

        from rondel.core.types import IDS, NUMBERS, TokenColumn

        draw = np.random.default_rng(0)
        self.tokens = TokenColumn(IDS, draw.integers(10, 500, tokens).tolist())
        self.logprobs = TokenColumn(NUMBERS, (-draw.random(tokens)).tolist())
        self.most = 64  # of an answer, until it is told otherwise

    async def allow(self, tokens: int) -> None:
        self.most = tokens

    async def generate(self, request: Any) -> Any:
        from rondel.core.types import IDS, Completion, TokenColumn

        n = min(self.most, request.sampling.max_tokens)
        return Completion(
            self.tokens[:n], self.logprobs[:n], TokenColumn(IDS, [0]) * n, "length", prompt_tokens=len(request.tokens)
        )


class EchoRank:
    """Says of every sample what a trainer would say, without one, after so many seconds. The first rank says it."""

    def __init__(self, seconds: float, leads: bool) -> None:
        self.seconds, self.leads = seconds, leads

    async def step(self, batch: Any, algo: Any) -> Any:
        import torch

        from rondel.core.types import StepStats

        await asyncio.sleep(self.seconds)
        for sample in batch.samples:
            sample.known.trained = sample.known.behavior.clone()
            sample.known.advantages = torch.zeros(len(sample.trainable))
        return StepStats(True, {}), True, [sample.known for sample in batch.samples] if self.leads else []


class Watch:
    """The event loop's longest pass, and what this process holds at most."""

    def __init__(self) -> None:
        self.longest, self.where, self.peak, self.beat = 0.0, "", 0.0, time.perf_counter()
        self.work, self.worked = 0.0, time.thread_time()
        self.computed, self.used = 0.0, time.process_time()
        self.loop = threading.get_ident()
        # kept open: each call that lets other threads run may cost a turn of the interpreter
        self.queue = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        self.waited, self.over = self._in_queue(), threading.Event()
        self.base = rss()

    def _in_queue(self) -> float:
        return int(os.pread(self.queue, 100, 0).split()[1]) / 1e9

    async def pulse(self) -> None:
        while True:
            now, waited, worked, used = time.perf_counter(), self._in_queue(), time.thread_time(), time.process_time()
            took = now - self.beat - (waited - self.waited)
            self.longest, self.work = max(self.longest, took), max(self.work, worked - self.worked)
            self.computed = max(self.computed, min(took, used - self.used))
            self.beat, self.waited, self.worked, self.used = now, waited, worked, used
            await asyncio.sleep(0)

    def look(self) -> None:
        while not self.over.wait(0.01):
            self.peak = max(self.peak, rss() - self.base)
            late = time.perf_counter() - self.beat
            if late > 0.02 and late > self.longest:
                frames = traceback.extract_stack(sys._current_frames()[self.loop])
                ours = [f for f in frames if "asyncio" not in f.filename][-3:]
                self.where = " > ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in ours)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="rondel bench long_answers", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--samples", type=int, default=4, help="of a step, in one group")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--train", type=float, default=1.0, help="seconds of a step; a million tokens take a trainer more"
    )
    parser.add_argument("--staleness", type=int, default=0, help="above 0 a checkpoint has finished answers in it")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    report(measure(args.tokens, args.samples, args.steps, args.ranks, args.staleness, args.train), only_json=args.json)


def measure(tokens: int, samples: int, steps: int, ranks: int, staleness: int, train: float) -> dict[str, Any]:
    from rondel.assemble.remote_workers import RemoteTrainer
    from rondel.core.events import subscribe
    from rondel.generate.engine.router import EngineRouter
    from rondel.runtime.cluster.process import ProcessCluster
    from rondel.runtime.devices import prepare_controller
    from rondel.runtime.journal.store import RolloutStore
    from rondel.system.process_memory import release_freed_memory

    prepare_controller()
    warmup, (parts, tasks) = made(8, 512), made(8, 512)
    parts.model_info.max_context, parts.sampling = tokens + 512, replace(parts.sampling, max_tokens=tokens)
    cluster = ProcessCluster()
    own = importlib.import_module("long_answers")  # by the name under which workers find it
    engine = cluster.spawn("engine-0", own.LongEngine, tokens)
    workers = [cluster.spawn(f"trainer-{i}", own.EchoRank, train, i == 0) for i in range(ranks)]
    for worker in (engine, *workers):
        worker.now()
    parts.engine = EngineRouter({"engine-0": engine}, max_inflight=samples)
    with tempfile.TemporaryDirectory(prefix="long-") as folder:
        stored = RolloutStore(Path(folder))
        end = subscribe(stored.write)
        trainer = RemoteTrainer(workers)
        warmup[0].engine = EngineRouter({"engine-0": engine}, max_inflight=samples)
        held = Held()
        asyncio.run(
            drive(*warmup, samples, 1, trainer, stored, Watch(), held, staleness)
        )  # imports are not what is measured
        engine.now("allow", tokens)
        gc.collect()
        release_freed_memory()
        watch = Watch()
        threading.Thread(target=watch.look, daemon=True).start()
        began = time.perf_counter()
        try:
            trained = asyncio.run(drive(parts, tasks, samples, steps, trainer, stored, watch, held, staleness))
        finally:
            watch.over.set()
            end()
            stored.close()
            cluster.close()
    return {
        "tokens": tokens, "samples": samples, "steps": steps, "ranks": ranks, "staleness": staleness, "train": train, "trained": trained,
        "seconds": round(time.perf_counter() - began, 1), "longest_pass_ms": round(1e3 * watch.longest, 1),
        "computed_ms": round(1e3 * watch.computed, 1), "longest_work_ms": round(1e3 * watch.work, 1), "where": watch.where, "peak_mb": round(watch.peak, 1), "columns_mb": round(held.columns / 2**20, 1),
        "arrays_mb": round(held.arrays / 2**20, 1), "peak_to_arrays": round(watch.peak * 2**20 / held.arrays, 2),
    }  # fmt: skip


class Held:
    """Bytes of the largest step: of its trajectories' columns, and of all its arrays and texts."""

    def __init__(self) -> None:
        self.columns = self.arrays = 0

    def count(self, groups: list[Any], batch: Any) -> None:
        each = [t for group in groups for t in group.trajectories]
        columns = sum(17 * len(t.tokens) for t in each)
        texts = sum(sys.getsizeof(t.text) for t in each)
        arrays = sum(s.tokens.nbytes + s.trainable.nbytes + _bytes_of(s.known) for s in batch.samples)
        if columns > self.columns:
            self.columns, self.arrays = columns, columns + texts + arrays


def _bytes_of(known: Any) -> int:
    import torch

    tensors = [value for f in fields(known) if isinstance(value := getattr(known, f.name), torch.Tensor)]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


async def drive(
    parts: Any,
    tasks: Any,
    samples: int,
    steps: int,
    trainer: Any,
    stored: Any,
    watch: Watch,
    held: Held,
    staleness: int,
) -> int:
    """The loop as a run has it, with a checkpoint's state after every step."""
    from rondel import loop as house
    from rondel.buffer import Buffer
    from rondel.buffer.state import encode
    from rondel.core.events import GroupsTaken, subscribe
    from rondel.core.types import KEEP
    from rondel.driver.phases import PerToken
    from rondel.driver.rollouts import GroupRollouts, prepare
    from rondel.runtime.devices import SplitDevices
    from rondel.train.checkpoint import Checkpoints

    buffer, work = Buffer(groups_per_step=1, max_staleness=staleness), GroupRollouts(parts, samples)
    checkpoints = Checkpoints(stored.folder / "checkpoints", 1)
    parts.judge = lambda group: KEEP
    pulse = asyncio.create_task(watch.pulse())

    async def sync(trainer: Any, engine: Any) -> int:
        return buffer.version + 1

    async def save(folder: Path) -> None:
        (folder / "weights").write_text("")

    async def milestone(step: int, version: int, batch: Any) -> None:
        await stored.annotate_rollouts(step, advantages=PerToken(batch, "advantages"))
        await checkpoints.write(step, save, {"step": step, "buffer": buffer.state_dict(version, encoded=False)}, encode)

    def taken(event: Any) -> None:
        if isinstance(event, GroupsTaken):
            groups[:] = event.groups

    async def counted_step(batch: Any, algo: Any) -> Any:
        stats = await trainer.step(batch, algo)
        held.count(groups, batch)
        groups.clear()
        return stats

    groups: list[Any] = []
    end = subscribe(taken)
    await house.run(
        tasks, buffer, attempt=work.generate_group, score=work.score, judge=parts.judge, prepare=prepare,
        trainer=SimpleNamespace(step=counted_step), engine=parts.engine, devices=SplitDevices(), sync=sync, algo=None,
        steps=range(1, steps + 1), milestone=milestone,
    )  # fmt: skip
    pulse.cancel()
    end()
    await stored.wait_until_written()
    return int(buffer.counts.trained)


if __name__ == "__main__":
    main()
