"""How many functions the device threads of this process have begun and ended, where somebody wants to know: while one
is open, a turning event loop is no progress.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

begun = ended = 0
is_watched = False  # by whoever tells that a worker is alive
_guard = threading.Lock()


@contextmanager
def mark_busy() -> Iterator[None]:
    global begun, ended
    with _guard:
        begun += 1
    try:
        yield
    finally:
        with _guard:
            ended += 1
