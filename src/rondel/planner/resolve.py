""" "auto" is resolved here and nowhere else, each value with its reason."""

from __future__ import annotations

import os
from typing import NamedTuple


class Resolved(NamedTuple):
    value: int
    why: str


def window(wanted: int | str, *, max_staleness: int, groups_per_step: int) -> Resolved:
    """How far the learner may look past an unfinished group: 1 + floor(S·P/2) leaves half of the allowed lag to stragglers."""
    if wanted != "auto":
        return Resolved(int(wanted), "set")
    return Resolved(1 + max_staleness * groups_per_step // 2, f"1 + S·P/2 with S = {max_staleness}, P = {groups_per_step}")


def kv_pages(wanted: int | str, *, max_running: int, longest: int, page_bytes: int, free_bytes: int) -> Resolved:
    """Cache pages (one token each): room for every running request at its longest, at most a quarter of the free memory."""
    if wanted != "auto":
        return Resolved(int(wanted), "set")
    room = max_running * longest
    affordable = max(longest, free_bytes // 4 // max(1, page_bytes))
    if room <= affordable:
        return Resolved(room, f"{max_running} requests of {longest} tokens, {room * page_bytes / 1e6:.0f} MB")
    return Resolved(affordable, f"a quarter of {free_bytes / 1e9:.1f} GB free memory at {page_bytes} bytes a token")


def micro_tokens(wanted: int | str, *, on_gpu: bool) -> Resolved:
    """Tokens in one forward and backward pass; it cannot change the result, only speed and memory."""
    if wanted != "auto":
        return Resolved(int(wanted), "set")
    return (
        Resolved(16384, "a GPU is filled by then")
        if on_gpu
        else Resolved(4096, "every pass also goes over all gradients once, so few large ones")
    )


def transport(wanted: str, *, kind: str, cluster: str, engine: str = "builtin") -> tuple[str, str]:
    """How weights travel, and why."""
    if wanted != "auto":
        return wanted, "set"
    if engine != "builtin":
        return "disk", f"a folder that {engine} reads"
    if cluster == "local":
        return "tensor", "one process, one module: 0 bytes move" if kind == "shared" else "one process: copied from memory to memory"
    return "ipc", "processes of one machine: shared memory"


def free_memory() -> int:
    """Bytes of host memory that a new allocation can have."""
    try:
        with open("/proc/meminfo") as file:
            rows = dict(line.split(":", 1) for line in file)
        return int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
