"""A folder that one process at a time works in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from rondel.core.errors import ConfigError
from rondel.system.files import guard_write


@contextmanager
def lock_folder(folder: Path, taken: str) -> Iterator[None]:
    """The folder is this process's alone. ConfigError with the words `taken` where it is another's."""
    with guard_write(folder / ".lock", doing="locking"):
        lock = FileLock(folder / ".lock", timeout=0)
        try:
            lock.acquire()
        except Timeout as error:
            raise ConfigError(taken) from error
    try:
        yield
    finally:
        lock.release()
