"""kind -> transport. Driver, trainer and engine each make one of the same kind; the knobs travel,
the instances do not.
"""

from __future__ import annotations

from pathlib import Path

from rondel.core.protocols import Transport
from rondel.core.registry import find_registered
from rondel.sync.delta import Delta
from rondel.sync.from_disk import FromDisk
from rondel.sync.from_distributed import FromDistributed
from rondel.sync.from_ipc import FromIpc
from rondel.sync.from_tensor import FromTensor


def transport_of(kind: str, *, folder: str | Path, one_module: bool = False) -> Transport:
    """`folder`: where versions lie, seen by all under this name. `one_module`:
    trainer and engine have the same tensors.
    """
    known = {
        "tensor": lambda: FromTensor("never" if one_module else "begin"),
        "ipc": FromIpc,
        "disk": lambda: FromDisk(folder),
        "distributed": FromDistributed,
        "delta": lambda: Delta(folder),
    }
    return find_registered("sync.kind", kind, known)()
