"""The memory of a process, as the kernel counts it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path


def resident_memory(pid: int | None = None) -> dict[str, int]:
    """{"rss": bytes, "peak": bytes} of a process by the kernel's count; nothing where it
    has ended, or the kernel does not say.
    """
    try:
        rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid or 'self'}/status").read_text().splitlines())
        return {"rss": int(rows["VmRSS"].split()[0]) * 1024, "peak": int(rows["VmHWM"].split()[0]) * 1024}
    except (OSError, KeyError, ValueError):
        return {}


def release_freed_memory() -> None:
    """The pages of freed blocks go back to the kernel; nothing where the C library is not glibc.

    glibc keeps them in its heap for as long as a live block lies behind them. Activations of many sizes beside a cache
    that is packed anew after each update leave such holes: 0.1 GB a step of a model of 135M parameters.
    """
    _malloc_trim()(0)


@functools.cache
def _malloc_trim() -> Callable[[int], object]:
    try:
        return ctypes.CDLL(None).malloc_trim  # type: ignore[no-any-return]
    except (OSError, AttributeError, TypeError):
        return lambda _: 0
