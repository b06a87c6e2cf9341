"""The seccomp filter of our own boxes (inside/filter.py) for containers: in a bundle, and as a file for an engine."""

from __future__ import annotations

import json
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from rondel.runtime.sandbox.inside.filter import FAMILIES, NAMESPACES, TABLE


@cache
def seccomp_file() -> str:
    """Of this process; removed as the bundles of one that is gone are."""
    folder = Path(tempfile.mkdtemp(prefix=f"rondel-bundle-{os.getpid()}-"))
    path = folder / "seccomp.json"
    path.write_text(json.dumps(seccomp()))
    return str(path)


def seccomp() -> dict[str, Any]:
    """The filter of our own boxes (inside/filter.py), as the runtime spec writes it."""

    def refuse(names: list[str], errno: int = 1, **args: Any) -> dict[str, Any]:
        return {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": errno, **args}

    flags = [1 << bit for bit in range(32) if NAMESPACES >> bit & 1]
    clones = [
        refuse(["clone"], args=[{"index": 0, "value": flag, "valueTwo": flag, "op": "SCMP_CMP_MASKED_EQ"}])
        for flag in flags
    ]
    below = [n for n in range(max(FAMILIES)) if n not in FAMILIES]
    sockets = [refuse(["socket", "socketpair"], args=[{"index": 0, "value": n, "op": "SCMP_CMP_EQ"}]) for n in below]
    sockets.append(refuse(["socket", "socketpair"], args=[{"index": 0, "value": max(FAMILIES), "op": "SCMP_CMP_GT"}]))
    architecture = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}.get(os.uname().machine)
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        **({"architectures": [architecture]} if architecture else {}),
        "syscalls": [refuse([row.split()[0] for row in TABLE.splitlines()]), refuse(["clone3"], 38), *clones, *sockets],
    }
