"""The condition of a box between two commands: all that one of them could change and the next one could see.

A box is used for another command only if its condition is that of a new one. Places it may
write to are compared by what lies in them and by their owner, mode, times, attributes
and free space; the first process by what
another process of its user may change in it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import time
from contextlib import suppress
from typing import Any

from rondel.runtime.sandbox.inside.kernel import ARCH, libc, syscall

PLACES = ("/tmp", "/dev/shm")  # and its home
GET_FLAGS = 0x80086601  # of a file: immutable, append only, no dump, ...
SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}.get(ARCH)
IOPRIO_GET = {"x86_64": 252, "aarch64": 31}.get(ARCH)
SHM_INFO, SEM_INFO, MSG_INFO = 14, 19, 12
SETTINGS = (  # of the kernel for a namespace: bubblewrap shows them, and a plain user's commands could write them
    *(f"kernel/{name}" for name in ("pid_max", "sem", "shmmax", "shmall", "shmmni", "shm_rmid_forced", "msgmax", "msgmnb", "msgmni", "auto_msgmni")),
    *(f"fs/mqueue/{name}" for name in ("msg_default", "msg_max", "msgsize_default", "msgsize_max", "queues_max")),
)  # fmt: skip
LIMITS = sorted({number for name, number in vars(resource).items() if name.startswith("RLIMIT_")})


def initial_condition(home: str) -> tuple[Any, ...]:
    """The condition of a new box. Reading a folder changes its access time only where that is older than the last
    change, and this call is one: the access time is put a minute ahead, or a busy machine would change some boxes.
    """
    now = time.time_ns()
    for path in (home, *PLACES):
        with suppress(OSError):
            os.utime(path, ns=(now + 60 * 10**9, now - 10**9))
    return condition(home)


def condition(home: str) -> tuple[Any, ...]:
    """Equal for a new box and for one that no command has changed. OSError where a command has closed a place."""
    return (*map(path_state, (home, *PLACES)), shared_memory(), kernel_settings(), first_process())


def path_state(path: str) -> tuple[Any, ...]:
    with os.scandir(path) as entries:
        empty = next(entries, None) is None
    found, room = os.stat(path), os.statvfs(path)
    times = (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)
    attributes = {name: os.getxattr(path, name) for name in os.listxattr(path)}
    flags = ctypes.c_long()
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):  # a file system without them
        fcntl.ioctl(folder, GET_FLAGS, flags)
    os.close(folder)
    who = (found.st_mode, found.st_uid, found.st_gid, found.st_nlink, found.st_size)
    return empty, who, times, attributes, flags.value, (room.f_bfree, room.f_ffree)


def shared_memory() -> tuple[bytes, ...]:
    """What the kernel counts of System V memory, semaphores and queues; POSIX ones are files of /dev/shm."""
    told = []
    for ask, what in ((libc.shmctl, (0, SHM_INFO)), (libc.semctl, (0, 0, SEM_INFO)), (libc.msgctl, (0, MSG_INFO))):
        counts = ctypes.create_string_buffer(256)
        ask(*what, counts)
        told.append(counts.raw)
    return tuple(told)


def kernel_settings() -> tuple[bytes, ...]:
    """Where they are shown."""
    found = []
    for name in SETTINGS:
        with suppress(OSError), open(f"/proc/sys/{name}", "rb") as file:
            found.append(file.read())
    return tuple(found)


def first_process() -> tuple[Any, ...]:
    """Of a plain user's box the commands have its user, and may change its priority,
    cores and limits: they would inherit them.
    """
    schedule = ctypes.create_string_buffer(64)
    priority = -1
    with suppress(OSError):
        syscall(SCHED_GETATTR, 0, schedule, ctypes.c_uint(64), 0)
        priority = syscall(IOPRIO_GET, 1, 0)
    return (
        schedule.raw,
        priority,
        os.getpriority(os.PRIO_PROCESS, 0),
        os.sched_getaffinity(0),
        *map(resource.getrlimit, LIMITS),
    )


def next_process() -> int:
    """The number that the next process of the box gets is the one after it: of a command
    that made none, the one after its own.
    """
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return child
