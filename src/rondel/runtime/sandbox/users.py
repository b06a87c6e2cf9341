"""Under which number a box runs. For a root each has one of its own, so that limits by user are limits of the box."""

from __future__ import annotations

import os
import random
from pathlib import Path

PLAIN = 1000  # what a box of a plain user is called in its own namespace


def somebody() -> int:
    """A number that nobody here has."""
    if os.geteuid() != 0:
        return PLAIN
    with open("/proc/self/uid_map") as lines:
        first, _, count = (int(word) for word in lines.readline().split())
    top = first + count
    low = (1 << 30) if top > 1 << 31 else max(first + 1000, top - 50_000)
    return random.SystemRandom().randrange(low, min(top, 1 << 31) - 1)


def owner_of(folder: Path) -> int:
    """The number for a box with this folder: its owner, or somebody who owns it from now on."""
    if os.geteuid() != 0:
        return PLAIN
    if owner := folder.stat().st_uid:
        return owner
    uid = somebody()
    os.chown(folder, uid, uid)
    return uid
