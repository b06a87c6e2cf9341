"""Where the memory of a run is: each process as the kernel counts it, and in it what its tenants say that they hold.

    engine-0   pid 4711   resident 812 MB, at most 1,204 MB   kv_cache 96 MB
    trainer-0  pid 4712   resident 1,960 MB, at most 2,310 MB   moments 720 MB, masters 360 MB,
               gradients 360 MB, weights 180 MB

The kernel is asked from outside, so a process that hangs, or is about to be killed,
is seen as well as one that answers.
"""

from __future__ import annotations

import re
import sys
import tracemalloc
from collections.abc import Mapping
from pathlib import Path

from rondel.system.process_memory import resident_memory

OUT = re.compile(r"out of memory|can't allocate memory|cannot allocate memory", re.IGNORECASE)
LINES = 10  # of Python's own allocations, where they are traced


def ran_out(error: BaseException) -> bool:
    """Python's, torch's on a CPU, a GPU's; also as the text of another process's, and inside a group."""
    if isinstance(error, BaseExceptionGroup):
        return any(ran_out(inner) for inner in error.exceptions)
    return isinstance(error, MemoryError) or "MemoryError" in str(error) or bool(OUT.search(str(error)))


def format_memory_report(processes: Mapping[str, int], held: Mapping[str, Mapping[str, int]]) -> str:
    """A line a process; `held`: bytes of tenants by worker, as it last told."""
    lines = ["memory"]
    for name, pid in processes.items():
        found = resident_memory(pid)
        tenants = {what: n for what, n in held.get(name, {}).items() if n and what not in ("rss", "peak")}
        told = ", ".join(f"{what} {_format_mb(n)}" for what, n in sorted(tenants.items(), key=lambda kv: -kv[1]))
        counted = f"resident {_format_mb(found['rss'])}, at most {_format_mb(found['peak'])}" if found else "gone"
        lines.append(f"  {name:<12} pid {pid:<8} {counted}{'   ' + told if told else ''}")
    return "\n".join([*lines, *_device_lines(), *_largest_allocations()])


def _device_lines() -> list[str]:
    """CUDA's own count, if this process has torch and a GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return []
    return [
        f"  cuda:{i}: allocated {_format_mb(torch.cuda.memory_allocated(i))}, reserved "
        f"{_format_mb(torch.cuda.memory_reserved(i))}, "
        f"at most {_format_mb(torch.cuda.max_memory_allocated(i))}"
        for i in range(torch.cuda.device_count())
    ]


def write_device_snapshot(path: Path) -> bool:
    """Every block of the CUDA allocator, for https://pytorch.org/memory_viz. -> whether there is a GPU to ask"""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return False
    torch.cuda.memory._dump_snapshot(str(path))
    return True


def _largest_allocations() -> list[str]:
    """Python's largest allocations: `PYTHONTRACEMALLOC=1 rondel train ...`."""
    if not tracemalloc.is_tracing():
        return []
    top = tracemalloc.take_snapshot().statistics("lineno")[:LINES]
    return ["  Python's own, by line", *(f"    {_format_mb(each.size):>12}  {each.traceback[0]}" for each in top)]


def _format_mb(count: float) -> str:
    return f"{count / 1e6:,.{0 if count >= 1e7 else 2}f} MB"
