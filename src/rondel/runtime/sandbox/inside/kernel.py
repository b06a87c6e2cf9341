"""System calls that Python 3.11 has no name for. Standard library only: this runs in the box, before there is one."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

ARCH = os.uname().machine
CLONE = {"x86_64": 56, "aarch64": 220}.get(ARCH)
MOUNT_SETATTR = 442  # the same everywhere
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}.get(ARCH)

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE, DETACH = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18, 2
PDEATHSIG, DUMPABLE, CAPBSET_DROP, NO_NEW_PRIVS, CAP_AMBIENT, SECCOMP = 1, 4, 24, 38, 47, 22

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def check_errno(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, *values: int) -> None:
    check_errno(libc.prctl(option, *(ctypes.c_ulong(v) for v in (*values, 0, 0, 0, 0)[:4])), f"prctl {option}")


def syscall(number: int | None, *arguments: object) -> int:
    if number is None:
        raise OSError(0, f"not known on {ARCH}")
    return check_errno(libc.syscall(ctypes.c_long(number), *arguments), f"system call {number}")


def fork_into(namespaces: int) -> int:
    """As os.fork, and the child is in new namespaces: the first process of its own, where they are of processes."""
    sys.stdout.flush()
    return syscall(CLONE, ctypes.c_ulong(namespaces | signal.SIGCHLD), *[ctypes.c_ulong(0)] * 4)


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    names = (text.encode() for text in (source, target, kind))
    check_errno(libc.mount(*names, ctypes.c_ulong(flags), data.encode()), f"mount {target}")


def unmount(target: str) -> None:
    check_errno(libc.umount2(target.encode(), DETACH), f"umount {target}")


def read_only(target: str, attributes: int = RDONLY | NOSUID | NODEV, *, below: bool = True) -> None:
    """Or other attributes (their numbers are those of mount flags); with all that is mounted below."""

    class Attributes(ctypes.Structure):
        _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]

    wanted = Attributes(attributes, 0, 0, 0)
    at, recursive = ctypes.c_int(-100), ctypes.c_uint(0x8000 if below else 0)
    syscall(MOUNT_SETATTR, at, target.encode(), recursive, ctypes.byref(wanted), ctypes.c_size_t(ctypes.sizeof(wanted)))


def without_capabilities() -> None:
    class Header(ctypes.Structure):
        _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]

    header, none = Header(0x20080522, 0), (ctypes.c_uint32 * 6)()
    check_errno(libc.capset(ctypes.byref(header), none), "capset")
