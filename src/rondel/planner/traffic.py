"""What a layout over devices moves and how long its stages wait, by formula; and how a plan tells of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def pipeline_bubble(p: int, m: int, v: int = 1) -> float:
    """Idle share of 1F1B with p stages, m micro-batches, v chunks a stage: (p-1)/(v·m+p-1)."""
    return (p - 1) / (v * m + p - 1)


def zero_traffic(phi: float, stage: int, micro_batches: int = 1) -> float:
    """A step's traffic of a device in units of the model.

    2 for DDP and ZeRO-1/2, which synchronise once a step (a reduce-scatter and a gather are an all-reduce); 3 for
    ZeRO-3 in every micro-batch: it gathers for the forward and for the backward pass, and reduce-scatters the gradient.
    """
    return 3 * phi * micro_batches if stage == 3 else 2 * phi


def sharded_traffic(layers: float, root: float, *, ranks: int, micro_batches: int, width: float) -> float:
    """Bytes of one rank in a step under FSDP2 as train/fsdp.py uses it:
    m·(n-1)/n·((2·width + 4)·layers + (width + 4)·root).

    Every micro-batch gathers a layer for its forward and again for its backward pass, gathers
    `root` (embedding, last norm, head) once, and reduce-scatters all gradients in fp32.
    """
    return micro_batches * (ranks - 1) / ranks * ((2 * width + 4) * layers + (width + 4) * root)


def tensor_traffic(n: int, size: float) -> float:
    """An all-reduce of `size` bytes over n devices, a device's: 2(n-1)/n·S."""
    return 2 * (n - 1) / n * size


def expert_traffic(n: int, size: float, k: int) -> float:
    """Dispatch and combine: 2(n-1)/n·kS/n."""
    return 2 * (n - 1) / n * k * size / n


def context_traffic(n: int, kv: float) -> float:
    """Keys and values of the others' chunks pass by: (n-1)/n of them."""
    return (n - 1) / n * kv


def powers_of_two(most: int) -> Iterator[int]:
    n = 1
    while n <= most:
        yield n
        n *= 2


def describe_layout(row: Any) -> dict[str, Any]:
    """A ParallelLayout or a FlowLayout as the plan's JSON has it."""
    return {
        "name": row.name,
        "exists": row.is_supported,
        "mesh": str(row.mesh),
        "memory": row.memory,
        "fits": row.fits,
        "bubble": row.bubble,
        "traffic": row.traffic,
        "seconds": row.seconds,
    }
