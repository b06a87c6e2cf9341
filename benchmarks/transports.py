"""New weights on their way to an engine in another process: bytes, seconds, memory,
and what share of copying memory that is.

    rondel bench transports --size 135m --json
    rondel bench transports --size 1.5b --kinds ipc,distributed --json
    rondel bench transports --step smollm2-135m --json        the delta after one real RL step at lr 1e-6, instead
    rondel bench transports --pause smollm2-135m --json       how long an engine that decodes stands still, instead
Random bf16 weights of the size's shapes; every update publishes other bits, is taken by a
second process, and each tensor's digest is computed at both ends. `moved` leaves the
digests out. The limit is torch's copy of as
many bytes, 1 GB at most, measured in between by the same thread.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
SIZES = {
    "1m": (128, 256, 4, 4, 2, 1024),
    "135m": (576, 1536, 30, 9, 3, 49152),
    "1.5b": (1536, 8960, 28, 12, 2, 151936),
}  # hidden, inner, layers, heads, key heads, vocabulary


def shapes(size: str) -> dict[str, tuple[int, ...]]:
    d, f, layers, h, k, v = SIZES[size]
    kv = d // h * k
    one = {
        "q": (d, d),
        "k": (kv, d),
        "v": (kv, d),
        "o": (d, d),
        "gate": (f, d),
        "up": (f, d),
        "down": (d, f),
        "norm1": (d,),
        "norm2": (d,),
    }
    return {
        "embed": (v, d),
        **{f"layers.{i}.{n}": shape for i in range(layers) for n, shape in one.items()},
        "norm": (d,),
    }


def memory(what: str) -> int:
    """MB of this process: "VmRSS" now, "VmHWM" at most since `from_here`."""
    rows = dict(row.split(":", 1) for row in Path("/proc/self/status").read_text().splitlines())
    return int(rows[what].split()[0]) // 1024


def from_here() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def receiver(pipe, transport, shapes) -> None:
    """Takes each route and computes every digest, as an engine does."""
    import torch

    from rondel.models import names

    torch.set_num_threads(1)
    mine = {n: torch.zeros(shape, dtype=torch.bfloat16) for n, shape in shapes.items()}
    while (told := pipe.recv()) is not None:
        manifest, route = told
        sent, before, began = {t.name: t.digest for t in manifest.tensors}, from_here(), time.perf_counter()
        held, seconds, hashed = {}, 0.0, 0.0
        for name, tensor in transport.receive(route, manifest, mine):
            t = time.perf_counter()
            good = transport.holds == "begin" or names.tensor_digest(tensor) == sent[name]
            hashed += time.perf_counter() - t
            assert good, f"{name} arrived with other bits"
            if transport.holds == "begin":
                mine[name].copy_(tensor)
            else:
                held[name] = tensor
        seconds = time.perf_counter() - began
        if transport.holds == "begin":
            t = time.perf_counter()
            assert all(names.tensor_digest(mine[n]) == d for n, d in sent.items())
            hashed = time.perf_counter() - t
            seconds += hashed
        else:
            mine = held
        pipe.send((seconds, hashed, memory("VmHWM") - before))
    transport.close()


def measure(kind: str, size: str, updates: int, folder: str) -> dict[str, float]:
    import torch
    from _work import median

    from rondel.core.types import Route
    from rondel.models import names
    from rondel.sync import transport_of

    torch.set_num_threads(1)
    transport, g = transport_of(kind, folder=folder), torch.Generator().manual_seed(0)
    weights = {n: torch.randn(shape, generator=g).bfloat16() for n, shape in shapes(size).items()}
    total = sum(2 * t.numel() for t in weights.values())
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(
        target=receiver, args=(theirs, transport_of(kind, folder=folder), shapes(size)), daemon=True
    )
    child.start()
    rows, root = [], ""
    for _ in range(updates + 2):  # two to warm up: a segment is mapped at its first use
        for tensor in weights.values():
            tensor.view(-1)[::97] += 1
        before, began, hashed = from_here(), time.perf_counter(), 0.0

        def described():
            nonlocal hashed
            for name, tensor in weights.items():
                t = time.perf_counter()
                row = names.tensor_info(name, tensor)
                hashed += time.perf_counter() - t
                yield row, tensor

        manifest, route = transport.publish(
            Route(kind, 1, base=root) if kind == "distributed" else Route(kind, base=root), 1, described()
        )
        published, grown = time.perf_counter() - began, memory("VmHWM") - before
        ours.send((manifest, route))
        began, sending = time.perf_counter(), None
        if transport.holds == "begin":
            sending = threading.Thread(target=transport.send, args=(route, weights.items()))
            sending.start()
        seconds, checked, their_growth = ours.recv()
        if sending is not None:
            sending.join()
        root = manifest.root
        rows.append(
            (
                published + seconds,
                published + seconds - hashed - checked,
                copy_speed(total),
                grown,
                their_growth,
                route.bytes,
                published,
            )
        )
    ours.send(None)
    child.join(30)
    transport.close()
    used = rows[2:]
    whole, moved, copy = (median([row[i] for row in used]) for i in range(3))
    return {
        "bytes": used[-1][5], "seconds": round(whole, 3), "gb_s": round(total / whole / 1e9, 2), "share_of_copy": round(total / whole / copy, 2),
        "moved_s": round(moved, 3), "moved_gb_s": round(total / moved / 1e9, 2), "moved_share_of_copy": round(total / moved / copy, 2),
        "copy_gb_s": round(copy / 1e9, 1), "publish_s": round(median([row[6] for row in used]), 3),
        "peak_growth_mb": max(row[3] for row in rows), "receiver_growth_mb": max(row[4] for row in rows),
    }  # fmt: skip


def copy_speed(total: int) -> float:
    """Bytes a second of one copy of as many bytes as the weights have, 1 GB at most, best of two."""
    import torch

    count = min(total // 2, 1 << 29)
    a, b = torch.ones(count, dtype=torch.bfloat16), torch.empty(count, dtype=torch.bfloat16)
    b.copy_(a)
    best = 0.0
    for _ in range(2):
        began = time.perf_counter()
        b.copy_(a)
        best = max(best, 2 * a.numel() / (time.perf_counter() - began))
    return best


def small(count: int = 1000, updates: int = 3) -> dict[str, float]:
    """`count` tensors of 1,000 numbers: a broadcast each, and in buckets."""
    import torch
    from _work import median

    from rondel.core.types import Route
    from rondel.models import names
    from rondel.sync.from_distributed import BUCKET, FromDistributed

    weights = {f"t{i}": torch.randn(1000) for i in range(count)}
    rows, out = list(names.describe_tensors(weights.items())), {}
    for name, bucket in (("per_tensor_s", 1), ("buckets_s", BUCKET)):
        sender, taker, seconds = FromDistributed(bucket=bucket), FromDistributed(bucket=bucket), []
        for _ in range(updates + 1):
            manifest, route = sender.publish(Route("distributed", (1, 1)), 1, rows)
            began, thread = time.perf_counter(), threading.Thread(target=sender.send, args=(route, weights.items()))
            thread.start()
            for n, tensor in taker.receive(route, manifest, weights):
                weights[n].copy_(tensor)
            thread.join()
            seconds.append(time.perf_counter() - began)
        out[name] = round(median(seconds[1:]), 4)
        sender.close(), taker.close()
    return {**out, "times": round(out["per_tensor_s"] / out["buckets_s"], 1)}


def after_a_step(model: str, lr: float) -> dict[str, float]:
    """The delta of SmolLM2 in bf16 after one step of GRPO."""
    from _work import SUFFIX, SUM_TASK

    from rondel.assemble import train
    from rondel.core.config.job import Job
    from rondel.core.types import Route
    from rondel.models import names
    from rondel.sync.delta import Delta, decode, encode, view_as_integers

    parts, before = [], {}

    def keep(built) -> None:
        parts.append(built)
        before.update({n: t.clone() for n, t in names.named_weights(built.loaded.model)})

    with tempfile.TemporaryDirectory() as folder:
        tree = {
            "model": {"path": model, "dtype": "bfloat16"},
            "task": {"data": SUM_TASK, "reward": "number", "env": {"kind": "single_turn", "suffix": SUFFIX}},
            "algo": {"kind": "grpo", "group_size": 8},
            "loop": {"steps": 1, "groups_per_step": 8},
            "engine": {"sampling": {"max_tokens": 32}},
            "trainer": {"lr": lr},
            "run": {"folder": folder, "checkpoint": {"every": 0}, "sinks": []},
        }
        train(Job.parse(tree, "rondel bench transports"), quiet=True, built=keep)
        after = dict(names.named_weights(parts[0].loaded.model))
        changed = sum(int((view_as_integers(before[n]) != view_as_integers(after[n])).sum()) for n in before)
        transport = Delta(Path(folder) / "delta")
        manifest, _ = transport.publish(Route("delta"), 0, names.describe_tensors(before.items()))
        began = time.perf_counter()
        manifest, route = transport.publish(
            Route("delta", base=manifest.root), 1, names.describe_tensors(after.items())
        )
        published = time.perf_counter() - began
        began = time.perf_counter()
        arrived = dict(transport.receive(route, manifest, before))
        received = time.perf_counter() - began
        began = time.perf_counter()
        blobs = {n: encode(view_as_integers(before[n]), view_as_integers(after[n])) for n in before}
        encoded = time.perf_counter() - began
        began = time.perf_counter()
        for n, blob in blobs.items():
            if blob:
                decode(view_as_integers(before[n]), blob)
        decoded = time.perf_counter() - began
    assert all(names.tensor_digest(arrived[n]) == names.tensor_digest(after[n]) for n in after)
    numbers = sum(t.numel() for t in after.values())
    return {
        "lr": lr, "whole_bytes": 2 * numbers, "bytes": route.bytes, "share": round(route.bytes / 2 / numbers, 4), "changed": round(changed / numbers, 4),
        "publish_s": round(published, 2), "receive_s": round(received, 2), "encode_s": round(encoded, 2), "decode_s": round(decoded, 2),
    }  # fmt: skip


def pause(model: str, updates: int) -> dict[str, float]:
    """How long an engine that decodes stands still for an update through shared memory, and
    the longest gap between two of its tokens.
    """
    import asyncio

    from _work import median, opened

    from rondel.core.events import Synced, subscribe
    from rondel.core.types import Request, Sampling
    from rondel.generate.engine.builtin.engine import BuiltinEngine
    from rondel.models import names
    from rondel.sync.from_ipc import FromIpc
    from rondel.sync.update import WeightUpdate

    device, loaded = opened(model, "bfloat16", 0)
    weights = {n: t.clone() for n, t in names.named_weights(loaded.model)}

    class Trainer:
        version, transport = 0, FromIpc()

        async def publish(self, route):
            self.version += 1
            next(iter(weights.values())).view(-1)[self.version] += 1
            return await device.run(
                self.transport.publish, route, self.version, names.describe_tensors(weights.items())
            )

        async def send(self, route): ...

    async def run() -> None:
        engine = BuiltinEngine(loaded, run=device.run, kv_pages=4096, transports={"ipc": FromIpc()})
        trainer = Trainer()
        sync = WeightUpdate(trainer.transport, probe=[], score=None, tolerance=0.0, moved=lambda: True)
        wanted = [Request([1 + i], Sampling(max_tokens=400, ignore_eos=True), key=i) for i in range(4)]
        heard: list[float] = []
        jobs = [
            asyncio.create_task(engine.generate(r, on_token=lambda *_: heard.append(time.perf_counter())))
            for r in wanted
        ]
        while len(heard) < 40:
            await asyncio.sleep(0.01)
        usual.append(median([b - a for a, b in zip(heard[::4], heard[4::4])]))
        for _ in range(updates):
            await sync(trainer, engine)
            n = len(heard)
            while len(heard) < n + 20:
                await asyncio.sleep(0.01)
            gaps.append(max(b - a for a, b in zip(heard[n - 8 :], heard[n - 7 :])))
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)

    paused, gaps, usual = [], [], []
    stop = subscribe(lambda event: paused.append(event.paused) if isinstance(event, Synced) else None)
    try:
        asyncio.run(run())
    finally:
        stop()
        device.close()
    rows = {
        "paused_ms": median(paused),
        "paused_most_ms": max(paused),
        "usual_step_ms": median(usual),
        "longest_gap_ms": max(gaps),
    }
    return {name: round(1000 * value, 2) for name, value in rows.items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="rondel bench transports", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=list(SIZES), default="135m")
    parser.add_argument("--kinds", default="ipc,disk,distributed,delta")
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--step", metavar="MODEL", default="", help="only the delta after one RL step of this model")
    parser.add_argument(
        "--pause", metavar="MODEL", default="", help="only how long an engine that decodes stands still"
    )
    parser.add_argument("--lr", type=float, default=1e-6, help="of that step")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args(argv)

    from rondel.runtime.devices import prepare_process

    prepare_process()
    from _work import report

    if a.step:
        return report({"bench": "transports", **after_a_step(a.step, a.lr)}, only_json=a.json)
    if a.pause:
        return report({"bench": "transports", **pause(a.pause, a.updates)}, only_json=a.json)
    out = {"bench": "transports", "size": a.size}
    for kind in a.kinds.split(","):
        with tempfile.TemporaryDirectory() as folder:
            out[kind] = measure(kind, a.size, a.updates, folder)
    report({**out, "small_tensors": small()}, only_json=a.json)


if __name__ == "__main__":
    main()
