"""What a command is at, said where it takes longer than some seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

Say = Callable[[str], None]
PATIENCE = 3.0  # seconds


def silent(line: str) -> None:
    """Says nothing."""


@contextmanager
def slow_part(say: Say, what: str) -> Iterator[None]:
    """`with slow_part(print, "lr = 0, step 1 of 3"):` prints "lr = 0, step 1 of 3 ..." once after PATIENCE seconds."""
    timer = Timer(PATIENCE, say, [f"{what} ..."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
