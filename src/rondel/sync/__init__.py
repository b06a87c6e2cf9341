"""kind -> transport. Driver, trainer and engine each make one of the same kind; the knobs travel, the instances do not."""

from __future__ import annotations

from pathlib import Path

from rondel.sync.delta import Delta
from rondel.sync.from_disk import FromDisk
from rondel.sync.from_distributed import FromDistributed
from rondel.sync.from_ipc import FromIpc
from rondel.sync.from_tensor import FromTensor
from rondel.words.protocols import Transport
from rondel.words.registry import find


def transport_of(kind: str, *, folder: str | Path, host: str = "127.0.0.1") -> Transport:
    """`folder`: where versions lie, seen by all under this name. `host`: an address of the trainer that the engines reach."""
    known = {
        "tensor": FromTensor,
        "ipc": FromIpc,
        "disk": lambda: FromDisk(folder),
        "distributed": lambda: FromDistributed(host),
        "delta": lambda: Delta(folder),
    }
    return find("sync.kind", kind, known)()
