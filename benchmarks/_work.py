"""What the benchmarks share: the work, the machine's limit, the count of multiplications."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

SUM_TASK = {
    "kind": "reasoning_gym",
    "name": "chain_sum",
    "size": 2000,
    "args": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
}
SUFFIX = " Reply with only the final number."


def gemm_peak(dtype: str, threads: int, size: int = 2048, rounds: int = 4) -> float:
    """FLOP/s of one large matrix product in this dtype, by torch or by oneDNN, on the GPU if there is one, best of
    `rounds` of each: the limit that shares are stated against.
    """
    import torch

    from rondel.models.linear import matmul

    torch.set_num_threads(threads)
    gpu = torch.cuda.is_available()

    def reached(product: Any, size: int) -> float:
        a, b = (torch.randn(size, size, device="cuda" if gpu else "cpu").to(getattr(torch, dtype)) for _ in range(2))
        began = time.perf_counter()
        product(a, b)
        if gpu:
            torch.cuda.synchronize()
        return 2 * size**3 / (time.perf_counter() - began)

    small = {product: max(reached(product, 256) for _ in range(5)) for product in (torch.matmul, matmul)}
    ways = [product for product, rate in small.items() if rate > max(small.values()) / 4]  # one may only be emulated
    return max(reached(product, 8192 if gpu else size) for product in ways * rounds)


def multiplications(model: Any) -> tuple[int, int]:
    """(weights of the body's linear layers, weights of the head): a token costs 2 FLOP a weight forward."""
    head = model.get_output_embeddings().weight
    body = sum(m.weight.numel() for m in model.modules() if hasattr(m, "in_features") and m.weight is not head)
    return body, head.numel()


def median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def add_set(parser: argparse.ArgumentParser) -> None:
    """`--set KEY=VALUE`, as often as wanted: what the runs of a benchmark change in its recipe."""
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="overrides of the recipe")


def overrides(pairs: list[str], changes: dict[str, Any]) -> dict[str, Any]:
    """The changes of a run with those of `--set` over them. A size of the model is none of a run that reads its weights."""
    from rondel.core.config.toml_reader import parse_overrides

    given = parse_overrides([f"--{pair}" for pair in pairs])
    if isinstance(changes.get("model.path"), str):
        given = {key: value for key, value in given.items() if not key.startswith("model.path.")}
    return changes | given


def report(row: dict[str, Any], *, only_json: bool) -> None:
    """A table for a reader, then one JSON object on the last line."""
    if not only_json:
        for name, value in row.items():
            print(f"{name:<28} {value}")
    print(json.dumps(row), flush=True)


def opened(model: str, dtype: str, threads: int) -> tuple[Any, Any]:
    """(device, model on it), as a run has them: everything computes on the device's thread. 0 threads is all cores."""
    from rondel.models.load import load_model
    from rondel.runtime.devices import Device, pick_device, prepare_process

    prepare_process()
    where = pick_device("auto")
    device = Device(where, threads or None)
    return device, device.call(lambda: load_model(model, dtype=dtype, device=where))
