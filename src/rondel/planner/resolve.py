""" "auto" is resolved here and nowhere else, each value with its reason."""

from __future__ import annotations

import os
from typing import Any, Literal, NamedTuple

from rondel.core.errors import ConfigError

Apart = Literal["module", "device", "process", "machine", "server"]  # what trainer and engine do not share


class ResolvedValue(NamedTuple):
    value: Any
    why: str


COMMIT = 0.01  # seconds an engine stands still for a swap between two passes: 1-10 ms (arXiv:2509.19128)
SPARE = 0.06  # of a GPU: what the driver, the allocator's rests and the kernels' workspaces take
BUCKET = 64 << 20  # of a broadcast, two at a time (sync/from_distributed.py)
ROWS = 512  # of logits that one step of an engine makes at once (generate/engine/builtin/runner.py)
LOGITS = 1 << 25  # entries of a chunk of logits in fp32 (train/logprobs.py)
PROGRAMS = 512  # compiled products that oneDNN keeps (runtime/devices.py)
LEAST_MICRO, MOST_MICRO = 512, 4096  # tokens of a micro-batch on a CPU

FEWEST_SNAPSHOTS = 4


def state_slots(max_running: int) -> int:
    """Slots for recurrent states of one engine: one for each running request, and snapshots for half as many."""
    return max_running + 2 * (max(FEWEST_SNAPSHOTS, max_running // 2) // 2)


def kv_pages(
    wanted: int | str,
    *,
    max_running: int,
    longest: int,
    page_bytes: int,
    free_bytes: int,
    reserve_bytes: int | None = None,
) -> ResolvedValue:
    """Cache pages (one token each): room for every running request at its longest, as far as memory goes.

    `reserve_bytes` is what an engine keeps free that has a device to itself (also in turn with a trainer
    that is offloaded); the cache may have all the rest. None: the memory is shared with the trainer or with other
    processes, and the cache takes a quarter of what is free.
    """
    if wanted != "auto":
        return ResolvedValue(int(wanted), "set")
    room = max_running * longest
    share = free_bytes // 4 if reserve_bytes is None else max(0, free_bytes - reserve_bytes)
    affordable = max(longest, share // max(1, page_bytes))
    if room <= affordable:
        return ResolvedValue(room, f"{max_running} requests of {longest} tokens, {room * page_bytes / 1e6:.0f} MB")
    if reserve_bytes is None:
        return ResolvedValue(
            affordable, f"a quarter of {free_bytes / 1e9:.1f} GB free memory at {page_bytes} bytes a token"
        )
    why = (
        f"{free_bytes / 1e9:.1f} GB free on a device of its own, less a reserve of {reserve_bytes / 1e9:.1f} GB, "
        f"at {page_bytes} bytes a token"
    )
    return ResolvedValue(affordable, why)


def engine_reserve(
    *, memory: float, hidden: int, vocab: int, width: float, prefill: int, max_running: int, staged: float = 0
) -> int:
    """Bytes that an engine on a device of its own needs beside weights and cache.

    A share of the device for driver and allocator, the activations of a prefill, the logits of one
    step, and whichever of a broadcast's buckets and a `staged` second version of the weights is larger.
    """
    return int(
        SPARE * memory
        + prefill_bytes(hidden, prefill, width)
        + logits_bytes(vocab, max_running)
        + max(2 * BUCKET, staged)
    )


def prefill_bytes(hidden: int, tokens: int, width: float) -> float:
    """Activations of `tokens` in one layer: the stream, its norm, and a feed-forward of three times some 4D."""
    return 16.0 * hidden * tokens * width


def logits_bytes(vocab: int, max_running: int) -> float:
    """Logits, weights and a sorted copy of one step's rows, in fp32."""
    return 3.0 * 4 * min(max_running, ROWS) * vocab


def micro_tokens(wanted: int | str, *, on_gpu: bool, vocab: int = 1) -> ResolvedValue:
    """Tokens in one forward and backward pass; it cannot change the result, only speed and memory. On a CPU a group
    that is larger stays whole up to MOST_MICRO, so that its prompt is computed once (TrainSettings.micro_group).
    """
    if wanted != "auto":
        return ResolvedValue(int(wanted), "set")
    if on_gpu:
        return ResolvedValue(16384, "a GPU is filled by then")
    if (chunk := LOGITS // vocab) >= MOST_MICRO:
        return ResolvedValue(MOST_MICRO, "every pass also goes over all gradients once, so few large ones")
    return ResolvedValue(max(LEAST_MICRO, chunk), "their logits are one chunk; more need more memory and are no faster")


def resolve_transport(
    wanted: str, *, apart: Apart, weights: int = 0, room: int = 0, server: str = "sglang"
) -> ResolvedValue:
    """How new weights reach the engines. `weights`: bytes of one version. `room`: free bytes
    of the shared memory, 0 where there is none. `server`: engine.kind of engines of others.
    """
    if apart == "module":
        if wanted not in ("auto", "tensor"):
            raise ConfigError(
                f"sync.kind = '{wanted}' has no effect with place.kind = 'shared': trainer and engine hold one module, "
                f"and nothing moves. "
                "Leave it at 'auto'"
            )
        return ResolvedValue("tensor", "one process, one module: 0 bytes move")
    if apart == "device":
        if wanted not in ("auto", "tensor"):
            raise ConfigError(
                f"sync.kind = '{wanted}' is for workers of their own; place.cluster = 'local' has one process. Leave "
                "it at 'auto'"
            )
        return ResolvedValue("tensor", "one process: copied from memory to memory")
    if apart == "server":
        if wanted == "distributed" and server in ("sglang", "vllm"):
            return ResolvedValue(wanted, "set: the trainer and the servers form a group")
        if wanted == "distributed":
            raise ConfigError(
                f"sync.kind = 'distributed': engines of others read new weights from a folder; sglang and vllm take a "
                f"broadcast, too, '{server}' is sent none. Leave it at 'auto'"
            )
        if wanted not in ("auto", "disk"):
            raise ConfigError(
                f"sync.kind = '{wanted}': engines of others read new weights from a folder, or by 'distributed' "
                f"(sglang, vllm). Leave it at 'auto'"
            )
        return ResolvedValue("disk", "engines of others read new weights from a folder")
    if wanted == "tensor":
        raise ConfigError(
            "sync.kind = 'tensor' hands over the tensors of one process; trainer and engines are apart. Leave it at "
            "'auto'"
        )
    short = f"two versions need {2 * weights / 1e9:.1f} GB of shared memory, and {room / 1e9:.1f} GB are free"
    if wanted == "ipc" and apart == "process" and room < 2 * weights:
        raise ConfigError(
            f"sync.kind = 'ipc': {short}. Leave it at 'auto', which sends them by broadcast, or give this machine "
            "more memory"
        )
    if wanted != "auto":
        return ResolvedValue(wanted, "set")
    if apart == "machine":
        return ResolvedValue("distributed", "trainer and engines are on different machines")
    if room < 2 * weights:
        return ResolvedValue("distributed", short)
    return ResolvedValue("ipc", "trainer and engines share a machine: its memory is read in place")


def transport_ways(first: str) -> list[str]:
    """What carries weights between processes of one machine: the first choice, and what may take its place."""
    return [first, *(kind for kind in ("distributed", "disk") if kind != first)]


def shared_memory() -> int:
    """Free bytes of what processes can map together: a memfd (sync/from_ipc.py) counts against
    memory, where there is none /dev/shm, too.
    """
    if hasattr(os, "memfd_create"):
        return free_memory()
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return min(found.f_bavail * found.f_frsize, free_memory())


def free_memory() -> int:
    """Bytes of host memory that a new allocation can have."""
    try:
        with open("/proc/meminfo") as file:
            rows = dict(line.split(":", 1) for line in file)
        return int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
