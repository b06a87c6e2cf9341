"""Who runs on a device and who owns its memory. One executor thread a device: the event loop never runs torch."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import torch

from rondel.words.errors import ConfigError
from rondel.words.protocols import Engine, Trainer


def pick_device(wanted: str) -> str:
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"place.device = '{wanted}', but torch sees no CUDA device; `rondel doctor` says why. Use 'auto' or 'cpu'")
    return wanted


def keep_memory() -> bool:
    """Tell glibc to keep what it has mapped: large tensors are otherwise unmapped on free and page-faulted in again.

    Must run before the first large allocation. -> whether the allocator took it (glibc only).
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch: large tensors in huge pages, 512 times fewer faults
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    trim_threshold, top_pad, mmap_max, arena_max = -1, -2, -4, -8
    settings = [(mmap_max, 0), (trim_threshold, -1), (top_pad, 64 << 20), (arena_max, 1)]
    return all(mallopt(key, value) for key, value in settings)


class Device:
    """One device and its one thread: `await device.run(function, *args)`.

    All arithmetic belongs on it. OpenMP gives every thread that computes a pool of its own, and as soon as there are more of them
    than cores each parallel region waits to be woken: decoding ran at half its speed with one tensor cast on the main thread (docs/LOG.md).
    """

    def __init__(self, name: str = "cpu", threads: int | None = None) -> None:
        self.name = name
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.threads = threads or cores
        self._thread = ThreadPoolExecutor(1, f"rondel-{name}", initializer=torch.set_num_threads, initargs=(self.threads,))

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, _whole, function, args)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """The same from code without an event loop."""
        return self._thread.submit(function, *args).result()

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)


def _whole(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """A StopIteration cannot cross a future: it would be lost and its waiter would hang."""
    try:
        return function(*args)
    except StopIteration as error:
        raise RuntimeError(f"{getattr(function, '__name__', function)} let a StopIteration escape") from error


class Shared:
    """Trainer and engine on the same device: exactly one of them owns it (law 8)."""

    def __init__(self, engine: Engine, trainer: Trainer, *, how: str = "hold", frees: tuple[str, ...] = (), offload: bool = False) -> None:
        self.engine, self.trainer, self.how, self.frees, self.offload = engine, trainer, how, frees, offload
        self.owner = "engine"

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Requests are parked with their tokens; the engine gives up what it must; afterwards they go on under the new weights."""
        await self.engine.pause(self.how)
        await self.engine.sleep(self.frees)
        if self.offload:
            await self.trainer.wake(("optimizer",))
        self.owner = "trainer"
        yield
        self.owner = "engine"
        if self.offload:
            await self.trainer.sleep(("optimizer",))
        await self.engine.wake(self.frees)
        await self.engine.resume()


class Split:
    """Trainer and engine on devices of their own: nobody waits, the update itself pauses what it must."""

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        yield
