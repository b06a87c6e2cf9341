"""Under which number a box runs. For a root each has one of its own, so that limits by user are limits of the box."""

from __future__ import annotations

import os
import random
from pathlib import Path

PLAIN = 1000  # what a box of a plain user is called in its own namespace
SYSTEM = 1000  # numbers below are those of a system's own users
NOBODY = 65534
HIGHEST = 1 << 31


def is_real_root() -> bool:
    """Whether this is a root that has numbers to give away; one in a user namespace of a
    single number makes boxes as a plain user does.
    """
    return os.geteuid() == 0 and len(sandbox_ids()) > 1


def random_user_id() -> int:
    """A number that nobody here has."""
    if not is_real_root():
        return PLAIN
    while (one := random.SystemRandom().choice(sandbox_ids())) == NOBODY:
        pass
    return one


def owner_of(folder: Path) -> int:
    """The number for a box with this folder: its owner, or somebody who owns it from now on."""
    if not is_real_root():
        return PLAIN
    if owner := folder.stat().st_uid:
        return owner
    uid = random_user_id()
    os.chown(folder, uid, uid)
    return uid


def sandbox_ids() -> range:
    """Those that this process may give to a box, for its user and its group alike: the
    upper half of the highest range it has.
    """
    shared = [
        range(max(user.start, group.start, SYSTEM), min(user.stop, group.stop, HIGHEST))
        for user in mapped_ids("uid")
        for group in mapped_ids("gid")
    ]
    highest = max(filter(None, shared), key=lambda one: one.stop, default=range(0))
    return highest[len(highest) // 2 :]


def mapped_ids(kind: str) -> list[range]:
    """The numbers of users ("uid") or groups ("gid") in this process's user namespace,
    one range for each row of its map.
    """
    with open(f"/proc/self/{kind}_map") as rows:
        return [range(first, first + count) for first, _, count in (map(int, row.split()) for row in rows)]
