"""What a process gives up before the box's code runs in it, in this order: files, limits, user, capabilities, calls."""

from __future__ import annotations

import os
import resource
import signal
from contextlib import suppress
from typing import Any

from rondel.runtime.sandbox.inside import filter as calls
from rondel.runtime.sandbox.inside.kernel import (
    CAP_AMBIENT,
    CAPBSET_DROP,
    DUMPABLE,
    NO_NEW_PRIVS,
    prctl,
    without_capabilities,
)


def drop(spec: dict[str, Any], groups: list[int], keep: tuple[int, ...] = ()) -> None:
    """groups: open `cgroup.procs` of the box. keep: open files beside 0, 1 and 2; they close at exec."""
    os.setsid()
    first_to_be_killed()
    for group in groups:
        os.write(group, b"0")
    close_all_but(keep)
    set_limits(spec)
    for capability in range(64):
        with suppress(OSError):
            prctl(CAPBSET_DROP, capability)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(spec["uid"], spec["uid"], spec["uid"])
        os.setresuid(spec["uid"], spec["uid"], spec["uid"])
    with suppress(OSError):
        prctl(CAP_AMBIENT, 4)  # clear all
    without_capabilities()
    prctl(NO_NEW_PRIVS, 1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.umask(0o022)
    with suppress(PermissionError):  # an earlier command of the same box closed its home: this one begins outside
        os.chdir(spec["home"])
    prctl(DUMPABLE, 1)  # it may look at itself
    if calls.is_supported():
        calls.install_filter(memory_files=spec["grouped"])


def first_to_be_killed() -> None:
    """Where the machine or the box is short of memory. Written before the capabilities
    go, so that it cannot be taken back.
    """
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def close_all_but(keep: tuple[int, ...]) -> None:
    low = 3
    for fd in sorted(keep):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def set_limits(spec: dict[str, Any]) -> None:
    """Of each process; what the box as a whole may have is the group's and the file system's to hold."""
    memory = resource.RLIMIT_DATA if spec["grouped"] else resource.RLIMIT_AS  # DATA forgives what is only reserved
    cpu = max(1, int(spec["cpu"] + 0.999))
    for what, value, hard in (
        (memory, spec["memory"], spec["memory"]),
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_FSIZE, spec["file"], spec["file"]),
        (resource.RLIMIT_NOFILE, spec["open_files"], spec["open_files"]),
        (resource.RLIMIT_NPROC, spec["processes"], spec["processes"]),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 1 << 16, 1 << 16),
        (resource.RLIMIT_STACK, 8 << 20, 8 << 20),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
        (resource.RLIMIT_RTPRIO, 0, 0),
    ):
        ceiling = resource.getrlimit(what)[1]
        fits = ceiling == resource.RLIM_INFINITY or hard <= ceiling
        resource.setrlimit(what, (value, hard) if fits else (min(value, ceiling), ceiling))
