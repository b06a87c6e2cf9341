"""One decode step of the engine in milliseconds: the module as it is, what the engine computes with by itself (on some
CPUs all layers in one call, models/packed_layers.py; else the module again) and the compiled serving pass (on a GPU
recorded steps), in turn (A B C A B C), and where it goes.

    rondel bench decode --model FOLDER --dtype bfloat16 --json
N requests with contexts of their own, `--context` tokens at first, write `--new` tokens each.
A step is what lies between two tokens of the first request while all of them decode; the
number is the median over `--new` steps, of
each round; `cpu_ms` is the same in CPU time of the process, for a machine that others use, too. `host` is the share of the plain step outside of the device's thread: planning, delivery, turns of the event
loop; it is all that can run beside the device. `reading` is how long a sum over the very weights that the engine's step
reads takes on the same threads, in turn with the rounds: less than that no step of one request can take. `hop_ns` is how long
a line of memory takes from one core to another: 30 where both share a cache, 300 between two sockets. Shares are of a step under torch's profiler, by kind of operation: `other` is
small operations, or the fused loops of the
compiled pass, and `between` lies in none. The profiler itself costs most where operations are small.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
KINDS = {  # kind of operation -> what its name has
    "linear": ("mkldnn::", "linear", "addmm", "aten::mm"),
    "gather": ("index", "gather"),
    "attention": ("bmm", "baddbmm", "softmax", "scaled_dot_product", "flash"),
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="rondel bench decode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="folder, hub id or smollm2-135m")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--running", default="1,2,8,30,64", help="requests that decode together")
    parser.add_argument("--context", type=int, default=100, help="tokens of each when it begins")
    parser.add_argument("--new", type=int, default=20, help="tokens of each, so steps of a round")
    parser.add_argument("--rounds", type=int, default=2, help="of module and compiled in turn")
    parser.add_argument("--profile", type=int, default=8, help="requests running where shares are taken; 0 is none")
    parser.add_argument("--threads", type=int, default=0, help="0 is all cores")
    parser.add_argument("--eager", action="store_true", help="the module alone, nothing is compiled")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args(argv)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells of its every start

    from _work import median, opened, report

    from rondel.generate.engine.builtin.engine import BuiltinEngine
    from rondel.models.cpu_kernels import hop_ns
    from rondel.models.cuda_graphs import serving_pass

    device, loaded = opened(a.model, a.dtype, a.threads)
    sizes = [int(n) for n in a.running.split(",")]
    most = max(*sizes, a.profile)
    engine = BuiltinEngine(loaded, run=device.run, kv_pages=most * (a.context + a.new + 64), max_running=most)
    passes = {"module": loaded.hidden_states, "engine": engine.runner.hidden}
    if not a.eager:
        passes["compiled"] = device.call(serving_pass, loaded, most).hidden_states

    def round_of(name: str, running: int, seed: int) -> tuple[float, float]:
        engine.runner.hidden = passes[name]
        engine.scheduler.drop_cache(engine.version)
        clock, cpu = zip(*asyncio.run(steps(engine, running, a.context, a.new, seed)), strict=True)
        return median(clock), median(cpu)

    inside: list[float] = []
    plain_step = engine.runner.step

    def timed(*plans: Any) -> Any:
        began = time.perf_counter()
        out = plain_step(*plans)
        inside.append(time.perf_counter() - began)
        return out

    table: dict[int, dict[str, list[float]]] = {}
    cpu_table: dict[int, dict[str, list[float]]] = {}
    host: dict[int, list[float]] = {}
    reading: dict[int, list[float]] = {}
    hops: dict[int, list[int]] = {}
    for n in sizes:
        reading[n], host[n], hops[n] = [], [], []
        table[n], cpu_table[n] = {name: [] for name in passes}, {name: [] for name in passes}
        engine.runner.step = timed  # type: ignore[method-assign]
        for seed in range(a.rounds + 1):  # the first one warms up
            if seed:
                hops[n].append(round(device.call(lambda: median([hop_ns() for _ in range(20)]))))
                reading[n].append(round(1e3 * device.call(lambda: median([read(loaded) for _ in range(20)])), 2))
            for name in passes:
                inside.clear()
                spent, cpu = round_of(name, n, seed)
                table[n][name] += [round(1e3 * spent, 2)] * (seed > 0)
                cpu_table[n][name] += [round(1e3 * cpu, 2)] * (seed > 0)
                if seed and name == "module":
                    host[n].append(round(1 - median(inside[-a.new :]) / spent, 3))
        del engine.runner.step
        if not a.json:
            print(
                f"{n:>4} requests   "
                + "   ".join(f"{name} {told} ms" for name, told in table[n].items())
                + f"   reading {reading[n]} ms   hop {hops[n]} ns",
                flush=True,
            )
    shares = {}
    if a.profile:
        for name in passes:
            with profiled(engine.runner) as shares[name]:
                round_of(name, a.profile, 99)
            if not a.json:
                print(f"{a.profile:>4} requests   {name} {shares[name]}", flush=True)
    report(
        {
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "context": a.context,
            "ms": {str(n): row for n, row in table.items()},
            "cpu_ms": {str(n): row for n, row in cpu_table.items()},
            "reading_ms": {str(n): row for n, row in reading.items()},
            "hop_ns": {str(n): row for n, row in hops.items()},
            "host": {str(n): shares for n, shares in host.items()},
            "profiled": a.profile,
            "shares": shares,
            "threads": device.threads,
        },
        only_json=a.json,
    )
    device.close()


def read(loaded: Any) -> float:
    """Seconds of a sum over what a step of the engine reads: packed layers where it has them, else parameters; the head."""
    import torch

    packed = getattr(loaded.model, "packed_layers", None)
    layers = [] if packed is None else packed.packed_memory
    weights = [*(layers or loaded.model.parameters()), *([loaded.head.weight.detach()] if layers else [])]
    whole = [w.detach().flatten() for w in weights if w.numel() > 1]
    whole = [w if w.nbytes % 4 else w.view(torch.float32) for w in whole]
    began = time.perf_counter()
    for weight in whole:
        float(weight.sum())  # waits for the device, too
    return time.perf_counter() - began


async def steps(engine: Any, running: int, context: int, new: int, seed: int) -> list[tuple[float, float]]:
    """Seconds, and CPU seconds of the process, between the tokens of the first request, from where all requests have one."""
    from rondel.core.types import Request, Sampling, sample_key

    vocab = engine.loaded.head.weight.shape[0]
    begun, told = set(), []

    def heard(row: int) -> None:
        begun.add(row)
        if row == 0 and len(begun) == running:
            told.append((time.perf_counter(), time.process_time()))

    def request(row: int) -> Request:
        tokens = [(7919 * (row + 1) + 31 * seed + 13 * t) % vocab for t in range(context)]
        return Request(tokens, Sampling(max_tokens=new + filling, ignore_eos=True), key=sample_key(seed, row, 0))

    filling = -(-running * context // engine.scheduler.prefill_tokens)  # steps in which only some decode
    await asyncio.gather(
        *(engine.generate(request(row), on_token=lambda *_, row=row: heard(row)) for row in range(running))
    )
    return [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(told)][-new:]


@contextmanager
def profiled(runner: Any) -> Iterator[dict[str, float]]:
    """Shares of the steps in which everyone decodes, by kind of operation; known at the end.
    The profiler sees the thread that it is in.
    """
    from torch.profiler import ProfilerActivity, profile

    spent: Counter[str] = Counter()
    shares: dict[str, float] = {}
    plain = runner.step

    def step(plan: Any, following: Any) -> Any:
        if plan.chunks:
            return plain(plan, following)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            began = time.perf_counter()
            out = plain(plan, following)
            whole = 1e6 * (time.perf_counter() - began)
        for event in seen.key_averages():
            spent[
                next((kind for kind, parts in KINDS.items() if any(part in event.key for part in parts)), "other")
            ] += event.self_cpu_time_total
            whole -= event.self_cpu_time_total
        spent["between"] += whole
        return out

    runner.step = step
    try:
        yield shares
    finally:
        del runner.step
        total = sum(spent.values())
        shares |= {kind: round(spent[kind] / total, 3) for kind in (*KINDS, "other", "between")}


if __name__ == "__main__":
    main()
