"""Processors that this process may use: those it may run on, and of them what the quota of a container leaves.

    cgroup v2   cpu.max "150000 100000", cpu.stat "usage_usec 12345"                     1.5 processors
    cgroup v1   cpu.cfs_quota_us 150000, cpu.cfs_period_us 100000, cpuacct.usage in ns

A quota holds for all processes of a group and of the groups in it; the smallest on the way up to the root is the one
that is felt.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

MOUNT, GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


class CpuQuota(NamedTuple):
    """`processors`: 1.5 is one and a half, for all processes of the control group in `folder` together."""

    processors: float
    folder: Path

    def used_seconds(self) -> float:
        """Seconds of processors that its processes have used. Raises OSError or ValueError where the kernel does not
        tell. Time in which they were throttled is none.
        """
        with suppress(FileNotFoundError):
            rows = dict(line.split() for line in (self.folder / "cpu.stat").read_text().splitlines())
            if "usage_usec" in rows:
                return int(rows["usage_usec"]) / 1e6
        return int((self.folder / "cpuacct.usage").read_text()) / 1e9


def find_cpu_quota(mount: Path | None = None, groups: Path | None = None) -> CpuQuota | None:
    """The smallest quota of this process's control group and those above it; None where there is none. `mount`: where
    control groups are mounted; `groups`: the file that tells in which this process is.
    """
    found = []
    for folder in _group_folders(mount or MOUNT, groups or GROUPS):
        with suppress(OSError, ValueError, ZeroDivisionError):
            if (processors := _read_quota(folder)) is not None:
                found.append(CpuQuota(processors, folder))
    return min(found, default=None)


def usable_processors() -> int:
    """Those that this process may run on, no more of them than its quota has whole ones; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = find_cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota.processors)))


def _group_folders(mount: Path, groups: Path) -> Iterator[Path]:
    """From the process's own up to the root. A container may see the groups above it or not;
    its own is then the root."""
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        roots = [mount / "unified", mount] if not controllers else [mount / controllers, mount / "cpu"]
        root = next((place for place in roots if place.is_dir()), mount)
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield root.joinpath(*parts[:depth])


def _read_quota(folder: Path) -> float | None:
    if (file := folder / "cpu.max").is_file():
        quota, period = file.read_text().split()
    else:
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    return None if quota in ("max", "-1") else int(quota) / int(period)
