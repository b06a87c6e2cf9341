"""What a box has used, as the kernel counts it in the box's control groups, version 1 or 2."""

from __future__ import annotations

import functools
import os
from contextlib import suppress

from rondel.core.sandbox_types import BoxUsage
from rondel.runtime.sandbox.inside.groups import ROOT, cgroup_folders

FILES = {"cpu": ("cpuacct.usage", "cpu.stat"), "peak": ("memory.max_usage_in_bytes", "memory.peak")}
KILLS = ("memory.oom_control", "memory.events")


@functools.cache
def own_folders() -> tuple[str, ...]:
    """Below which the groups of this process's boxes are."""
    return tuple(dict.fromkeys(home for home, _ in cgroup_folders().values()))


@functools.cache
def is_hybrid() -> bool:
    """Whether both versions have controllers on this machine."""
    with suppress(OSError), open(f"{ROOT}/unified/cgroup.controllers") as file:
        return bool(file.read().strip())
    return False


def group_usage(group: str, folders: tuple[str, ...]) -> BoxUsage:
    """Of the group of this name in those folders; None for what no file counts."""
    cpu = _read_count(group, folders, FILES["cpu"], "usage_usec")
    return BoxUsage(
        cpu=None if cpu is None else cpu[0] / (1e9 if cpu[1] == "cpuacct.usage" else 1e6),
        peak=None if (peak := _read_count(group, folders, FILES["peak"])) is None else peak[0],
    )


def count_kills(group: str, folders: tuple[str, ...]) -> int:
    """Processes that the kernel ended because the group was out of memory."""
    found = _read_count(group, folders, KILLS, "oom_kill")
    return found[0] if found else 0


def _read_count(group: str, folders: tuple[str, ...], names: tuple[str, ...], row: str = "") -> tuple[int, str] | None:
    """(number, file) of the first file that is there: of its only word, or behind the word `row`."""
    for name in names:
        for folder in folders:
            with suppress(OSError, ValueError, IndexError), open(os.path.join(folder, group, name)) as file:
                words = file.read().split()
                return int(words[words.index(row) + 1] if len(words) > 1 else words[0]), name
    return None
