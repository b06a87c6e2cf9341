"""Disks that misbehave, for whole tiny runs: one that loses its power, one that is full, one that becomes read-only."""

from __future__ import annotations

import ctypes
import os
import random
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_watchers: list[Callable[[str], None]] = []  # an audit hook cannot be removed
CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir"}


@sys.addaudithook
def _heard(event: str, args: tuple) -> None:
    if event in CHANGES:
        for watcher in tuple(_watchers):
            watcher(event)


class PowerCut:
    """What the disk under `folder` has for certain, and what a machine may find there after a power cut at this moment.

    A file's bytes are on the disk as they were at its last fsync, a folder's names as they
    were at the folder's. Everything since is there or not by chance, each name and each tail of a
    file for itself: no order is promised between them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bytes: dict[int, bytes] = {}  # by inode
        self.names: dict[int, dict[str, int]] = {}
        self.busy = threading.local()
        self.open: list[int] = []  # what was synced, kept open so that its number is not given to another file

    @contextmanager
    def watched(self, moment: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """`moment` is called before every change of a name, and before and after every fsync, in
        the thread that makes it; what the thread of the rollouts does is seen with the next one of those."""
        plain = os.fsync

        def look(event: str = "") -> None:
            if getattr(self.busy, "is_so", False) or threading.current_thread().name.startswith("rollouts"):
                return
            self.busy.is_so = True
            try:
                moment()
            finally:
                self.busy.is_so = False

        def fsync(handle: int) -> None:
            look()
            plain(handle)
            self._synced(handle)
            look()

        monkeypatch.setattr(os, "fsync", fsync)
        _watchers.append(look)
        try:
            yield
        finally:
            _watchers.remove(look)
            monkeypatch.undo()
            for handle in self.open:
                os.close(handle)

    def _synced(self, handle: int) -> None:
        found = os.fstat(handle)
        self.open.append(os.dup(handle))
        if stat.S_ISDIR(found.st_mode):
            self.names[found.st_ino] = _listed(f"/proc/self/fd/{handle}")
        else:
            self.bytes[found.st_ino] = Path(f"/proc/self/fd/{handle}").read_bytes()

    def image(self, into: Path, rng: random.Random) -> Path:
        """One of the possible states of the disk after the cut."""
        self._folder(self.folder.stat().st_ino, self.folder, into, rng)
        return into

    def _folder(self, inode: int, now: Path | None, into: Path, rng: random.Random) -> None:
        into.mkdir(parents=True)
        sure, present = self.names.get(inode, {}), _listed(now) if now is not None else {}
        for name in sorted(sure.keys() | present.keys()):
            chosen = rng.choice([sure.get(name), present.get(name)])
            if chosen is None:
                continue
            here = now / name if now is not None and present.get(name) == chosen else None
            if chosen in self.names or (here is not None and here.is_dir()):
                self._folder(chosen, here, into / name, rng)
            else:
                (into / name).write_bytes(self._content(chosen, here, rng))

    def _content(self, inode: int, now: Path | None, rng: random.Random) -> bytes:
        sure = self.bytes.get(inode, b"")
        if now is None:
            return sure
        present = now.read_bytes()
        if present.startswith(sure):
            return sure + present[len(sure) : rng.randint(len(sure), len(present))]
        return rng.choice([sure, present])


def _listed(folder: str | Path) -> dict[str, int]:
    with os.scandir(folder) as entries:
        return {entry.name: entry.inode() for entry in entries}


# -- mounts, in a process of their own ---------------------------------------------------------------

NEWNS, NEWUSER = 0x20000, 0x10000000
RDONLY, REMOUNT, BIND, REC, PRIVATE, DETACH = 1, 32, 4096, 16384, 1 << 18, 2


def apart() -> bool:
    """From here on the mounts of this process are its own. Needs root, or namespaces for
    everybody. -> whether that is allowed here
    """
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    if user != 0:
        if libc.unshare(NEWUSER):
            return False
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    return libc.unshare(NEWNS) == 0 and _mount("none", "/", "", REC | PRIVATE)


def _mount(source: str, at: Path | str, kind: str = "", flags: int = 0, data: str = "") -> bool:
    arguments = [
        os.fsencode(source),
        os.fsencode(at),
        kind.encode() or None,
        ctypes.c_ulong(flags),
        data.encode() or None,
    ]
    return ctypes.CDLL(None, use_errno=True).mount(*arguments) == 0


def small_disk(at: Path, size: int) -> bool:
    """A file system of so many bytes; what is in it goes with this process."""
    at.mkdir(parents=True, exist_ok=True)
    return _mount("none", at, "tmpfs", 0, f"size={size}")


class FullDisk:
    """The small disk at `at` has no byte left, until `mend`."""

    words = "the disk is full", "free some space"

    def __init__(self, at: Path) -> None:
        self.filler = at.parent / "filler" if at.is_file() else at / "filler"

    def strike(self, rng: random.Random) -> None:
        spared = rng.randint(0, 8)  # pages that stay free
        with self.filler.open("wb") as file:
            for _ in range(100):  # a thread of the run may take what was free a moment ago
                free = os.statvfs(self.filler.parent)
                if not free.f_bavail:
                    return  # and the disk is as full as it can be
                with suppress(OSError):
                    return os.posix_fallocate(file.fileno(), 0, max(1, free.f_bavail - spared) * free.f_bsize)
            raise AssertionError("the small disk could not be filled")

    def mend(self) -> None:
        self.filler.unlink(missing_ok=True)


class ReadOnlyDisk:
    """Nothing under `at` can be made, removed or opened for writing, until `mend`."""

    words = "the file system is read-only", "make it writable"

    def __init__(self, at: Path) -> None:
        self.at = at

    def strike(self, rng: random.Random) -> None:
        assert _mount(str(self.at), self.at, "", BIND) and _mount("none", self.at, "", BIND | REMOUNT | RDONLY)

    def mend(self) -> None:
        ctypes.CDLL(None).umount2(os.fsencode(self.at), DETACH)
