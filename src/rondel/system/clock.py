"""The time of day, read once when this process began, and from there on by a clock that
nobody sets: differences are durations.
"""

from __future__ import annotations

import time

ORIGIN = time.time() - time.monotonic()


def now() -> float:
    """Seconds since 1970. What sets the machine's clock meanwhile, or puts it to sleep, makes no step longer."""
    return ORIGIN + time.monotonic()
