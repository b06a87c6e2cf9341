"""Who runs on a device and who owns its memory. One executor thread a device: the event loop never runs torch."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import torch

from rondel.core.errors import ConfigError, LawError
from rondel.core.events import Resident, emit
from rondel.core.protocols import Interrupt, RolloutEngine
from rondel.runtime import busy
from rondel.runtime.neighbours import watch_neighbours
from rondel.system.cpu_quota import usable_processors


def pick_device(wanted: str) -> str:
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|mps|cuda(:\d{1,3})?", wanted):
        raise ConfigError(f"place.device = '{wanted}'; it is 'auto', 'cpu', 'cuda', 'cuda:1' or 'mps'")
    if wanted == "mps":
        if not torch.backends.mps.is_available():
            raise ConfigError("place.device = 'mps', but torch sees no Metal device; use 'auto' or 'cpu'")
        return wanted
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"place.device = '{wanted}', but torch sees no CUDA device; `rondel doctor` says why. Use 'auto' or 'cpu'"
        )
    if int(wanted.partition(":")[2] or 0) >= (there := torch.cuda.device_count()) and wanted != "cpu":
        raise ConfigError(f"place.device = '{wanted}', but this machine has {there} GPUs, counted from 0")
    return wanted


MMAP_MAX, MMAP_THRESHOLD, TRIM_THRESHOLD, TOP_PAD, ARENA_MAX = -4, -3, -1, -2, -8  # glibc's mallopt

# products of one shape that oneDNN keeps compiled, 0.6 MB each: its own 1,024 are as much as a model of 135M parameters
PRODUCTS = 512


def prepare_process() -> bool:
    """Settings of a process that computes; must run before the first large allocation.

    glibc keeps what it has mapped: large tensors are otherwise unmapped on free and page-faulted in again.
    -> whether the allocator took it (glibc only).
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(PRODUCTS))
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch: large tensors in huge pages, 512 times fewer faults
    return _set_allocator({MMAP_MAX: 0, TRIM_THRESHOLD: -1, TOP_PAD: 64 << 20, ARENA_MAX: 1})


TURN = 0.001  # that a thread of a controller has the interpreter while others wait; Python's own is five times as long


def prepare_controller() -> bool:
    """The same of a process that computes nothing and passes on what others computed, a million tokens at times: a
    large array has pages of its own, which go back to the kernel with it. glibc would learn from the first one that
    was freed to take the next from its heap, where whatever lies behind keeps its pages. Arrow takes its memory there,
    too. And its event loop, which gives up the interpreter in every operation on an array, gets it back from a thread
    that is busy after TURN seconds.
    """
    sys.setswitchinterval(TURN)
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    return _set_allocator({MMAP_THRESHOLD: 1 << 20, TRIM_THRESHOLD: 8 << 20, ARENA_MAX: 1})


def _set_allocator(settings: dict[int, int]) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return all(mallopt(key, value) for key, value in settings.items())


def default_threads() -> int:
    """OMP_NUM_THREADS where it is set, as every program with OpenMP takes it, or the processors that this process may
    use, by a container's quota too.
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(wanted) if wanted.isdecimal() and int(wanted) else usable_processors()


class Device:
    """One device and its one thread: `await device.run(function, *args)`.

    All arithmetic belongs on it. OpenMP gives every thread that computes a pool of its
    own, and as soon as there are more of them than cores each parallel region waits to be
    woken: decoding ran at half its speed with one
    tensor cast on the main thread (docs/LOG.md). Beside other busy programs that is what is wanted
    (runtime/neighbours.py).
    """

    def __init__(self, name: str = "cpu", threads: int | None = None) -> None:
        self.name = name
        self.threads = threads or default_threads()
        self._thread = ThreadPoolExecutor(1, f"rondel-{name}", initializer=self._init_thread)
        self._watch = watch_neighbours(self.threads) if name == "cpu" else None

    def _init_thread(self) -> None:
        torch.set_num_threads(self.threads)
        if self.name.startswith("cuda:"):
            torch.cuda.set_device(self.name)  # NCCL and whoever says "cuda" mean this one

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, _call_guarded, function, args)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """The same from code without an event loop."""
        return self._thread.submit(_call_guarded, function, args).result()

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._watch is not None:
            self._watch.close()


def _call_guarded(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """A StopIteration cannot cross a future: it would be lost and its waiter would hang."""
    try:
        with busy.mark_busy() if busy.is_watched else nullcontext():
            return function(*args)
    except StopIteration as error:
        raise RuntimeError(f"{getattr(function, '__name__', function)} let a StopIteration escape") from error


class OneAtATime:
    """A claim on the memory of one device: KV cache or trainer state, never both (law 8)."""

    def __init__(self, holder: str) -> None:
        self.holder: str | None = holder

    def take(self, who: str) -> None:
        if self.holder not in (None, who):
            raise LawError(
                f"the {who} wants the memory of a device that the {self.holder} has: the {self.holder} must sleep first"
            )
        self.holder = who

    def leave(self, who: str) -> None:
        if self.holder == who:
            self.holder = None


class SharedDevice:
    """Trainer and engine on one device.  With `offload` exactly one of them has its
    memory (law 8), in this order:

    engine ──pause, cache sleeps──> trainer wakes, steps, sleeps ──> sync: the weights alone ──> cache wakes, resume
    ──> engine

    A reward model on the same device (`beside`) sleeps from the first arrow to the last.

    On a CPU the cache of an engine without requests sleeps in any case: the update would empty it, and its memory
    is given back and taken again page by page.
    """

    in_turn = True  # whoever has the devices, the other one stands still

    def __init__(
        self,
        engine: RolloutEngine,
        trainer: Any,
        *,
        how: Interrupt = "hold",
        offload: bool = False,
        device: str = "cpu",
        beside: Any = None,
    ) -> None:
        """`trainer`: one whose `offload` can say what it has on the device. `beside`:
        sleeps, wakes, and says its `memory`.
        """
        self.engine = engine
        self.trainer = trainer
        self.how = how
        self.offload = offload
        self.device = device
        self.beside = beside
        self._cache_sleeps = False
        self._seen = Resident({}, {})

    @asynccontextmanager
    async def parked(self) -> AsyncIterator[None]:
        """Requests stand still with their tokens; afterwards they go on under the new weights."""
        await self.engine.pause(self.how)
        await self._record_memory("generate")
        if self.beside is not None:
            await self.beside.sleep()
        yield
        await self._record_memory("sync")
        if self.beside is not None:
            await self.beside.wake()
        seen, self._seen = self._seen, Resident({}, {})
        emit(seen)
        if self._cache_sleeps:
            await self.engine.wake(("kv_cache",))
            self._cache_sleeps = False
        await self.engine.resume()

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Inside `parked`: what the trainer keeps is on the device, with `offload` in the place of the cache."""
        self._cache_sleeps = self.offload or (self.device == "cpu" and not (await self.engine.status()).parked)
        if self._cache_sleeps:
            await self.engine.sleep(("kv_cache",))
        if self.offload:
            await self.trainer.wake(("optimizer",))
        yield
        await self._record_memory("train")
        if self.offload:
            await self.trainer.sleep(("optimizer",))

    async def _record_memory(self, phase: str) -> None:
        """A CUDA device has counted itself; on a CPU bytes of tensors are, without those
        that a pass needs while it runs.
        """
        mine = self.trainer.offload
        held, own = mine.memory(), (await self.engine.status()).memory
        # one with a module of its own has weights beside the trainer's
        held = held | {f"engine {name}" if name in held else name: n for name, n in own.items()}
        if self.beside is not None:
            held["reward"] = self.beside.memory
        peak = max(sum(held.values()), mine.high + held["kv_cache"])
        if self.device.startswith("cuda"):
            # which is in a process of its own
            peak = torch.cuda.max_memory_allocated(self.device) + held.get("reward", 0)
            torch.cuda.reset_peak_memory_stats(self.device)
        mine.high = 0
        self._seen.peak[phase], self._seen.held[phase] = peak, held


class SharedDevices(SharedDevice):
    """Several of them: the engines stand still while the ranks train. Each process reports its own memory."""

    async def _record_memory(self, phase: str) -> None: ...


class SplitDevices:
    """Trainer and engine on devices of their own: nobody waits, the update itself pauses what it must."""

    in_turn = False

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        yield

    parked = training
