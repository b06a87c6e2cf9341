"""The memory of a process, as the kernel counts it, and of its tensors."""

from __future__ import annotations

import ctypes
import functools
import resource
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def resident_memory(pid: int | None = None) -> dict[str, int]:
    """{"rss": bytes, "peak": bytes} of a process by the kernel's count; nothing where it
    has ended, or the kernel does not say.
    """
    try:
        rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid or 'self'}/status").read_text().splitlines())
        return {"rss": int(rows["VmRSS"].split()[0]) * 1024, "peak": int(rows["VmHWM"].split()[0]) * 1024}
    except (OSError, KeyError, ValueError):
        return {}


LEAST_FREED = 256 << 20  # bytes that are worth the page faults of taking them again
LEAST_RESIDENT = 1 << 30  # of a smaller process glibc is not asked, which walks its whole heap to count


class _HeapCounts(ctypes.Structure):
    """glibc's struct mallinfo2; `fordblks` are the free bytes of the heap."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def release_freed_memory() -> None:
    """The pages of freed blocks go back to the kernel, where they are many; nothing where the C library is not glibc.

    glibc keeps them in its heap for as long as a live block lies behind them. Activations of many sizes beside a cache
    that is packed anew after each update leave such holes: 0.1 GB a step of a model of 135M parameters.
    """
    library = _glibc()
    if library is None or _resident_bytes() < LEAST_RESIDENT:
        return
    if library.mallinfo2().fordblks >= LEAST_FREED:
        library.malloc_trim(0)


def heap_bytes() -> dict[str, int]:
    """{"used": bytes of live blocks, "free": of freed ones, resident or given back} of the heap;
    nothing without glibc."""
    library = _glibc()
    if library is None:
        return {}
    counts = library.mallinfo2()
    return {"used": counts.uordblks, "free": counts.fordblks}


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return 0


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    """With mallinfo2, which glibc has since 2.33."""
    try:
        library = ctypes.CDLL(None)
        library.mallinfo2.restype = _HeapCounts
        library.malloc_trim.argtypes = [ctypes.c_size_t]
    except (OSError, AttributeError, TypeError):
        return None
    return library


def storage_bytes(tensors: Iterable[Any], seen: set[int]) -> int:
    """Bytes of the storages of torch tensors, each storage once; those of `seen`, by address, were counted before."""
    total = 0
    for t in tensors:
        if t.is_meta:  # on another stage of a pipeline
            continue
        # a shard counts what it has here
        storage = (t.to_local() if hasattr(t, "to_local") else t).untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total
