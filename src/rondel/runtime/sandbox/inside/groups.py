"""Control groups, version 1 or 2, where this process may make them: memory and processes of a whole box."""

from __future__ import annotations

import os
from contextlib import suppress

ROOT = "/sys/fs/cgroup"
FILES = {  # controller -> (its limit, where its oom kills are counted), version 1 and 2
    "memory": (("memory.limit_in_bytes", "memory.oom_control"), ("memory.max", "memory.events")),
    "pids": (("pids.max", ""), ("pids.max", "")),
    "cpuacct": (("", ""), ("", "")),  # version 1 counts seconds in a group of their own; nothing is limited there
}


def cgroup_folders() -> dict[str, tuple[str, int]]:
    """controller -> (the folder of this process's group, version), for those that a new group below it has."""
    found = {}
    with open("/proc/self/cgroup") as lines:
        for line in lines:
            _, names, path = line.strip().split(":", 2)
            for name in names.split(",") if names else FILES:
                base = (
                    f"{ROOT}/{name}"
                    if names
                    else ROOT
                    if os.path.exists(f"{ROOT}/cgroup.controllers")
                    else f"{ROOT}/unified"
                )
                home = base + path if os.path.isdir(base + path) else base
                if name in FILES and name not in found and os.path.isdir(home):
                    found[name] = (home, 1 if names else 2)
    return found


def make_group(name: str, limits: dict[str, int]) -> tuple[dict[str, str], str]:
    """-> (controller -> folder made, the file that counts oom kills). What cannot be made is left out."""
    made: dict[str, str] = {}
    counter = ""
    for controller, (home, version) in cgroup_folders().items():
        limit, oom = FILES[controller][version - 1]
        folder = f"{home}/{name}"
        try:
            remove_orphan_groups(home)
            os.makedirs(folder, exist_ok=True)
            if limit:
                with open(f"{folder}/{limit}", "w") as file:
                    file.write(str(limits[controller]))
        except OSError:
            with suppress(OSError):
                os.rmdir(folder)
            continue
        made[controller] = folder
        if oom:
            counter = f"{folder}/{oom}"
            for swap, value in (("memory.memsw.limit_in_bytes", str(limits["memory"])), ("memory.swap.max", "0")):
                with suppress(OSError), open(f"{folder}/{swap}", "w") as file:
                    file.write(value)
    return made, counter


def remove_orphan_groups(home: str) -> None:
    """Groups of boxes whose keeper was killed: the keeper's process id is in the name."""
    for name in os.listdir(home):
        if name.startswith("rondel-") and not os.path.exists(f"/proc/{name.split('-')[1]}"):
            remove_groups([f"{home}/{name}"])


def remove_groups(folders: list[str]) -> None:
    for folder in folders:
        with suppress(OSError):
            os.rmdir(folder)
