"""Where the threads of this process are."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

_one_at_a_time = threading.RLock()  # a signal's handler may interrupt the one who asks


def current_frames() -> dict[int, FrameType]:
    """The innermost frame of every thread, by `Thread.ident`, with no garbage collection meanwhile.

    `sys._current_frames` makes its frames under the interpreter's lock of threads. A collection there that
    runs a finaliser gives up the GIL, and whoever then starts or ends a thread waits for that lock with the
    GIL in hand: the process stands still for ever (Python before 3.12, gh-106883).
    """
    with _one_at_a_time:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()
