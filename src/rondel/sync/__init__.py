"""kind -> transport. Driver, trainer and engine each make one of the same kind; the knobs travel,
the instances do not.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from rondel.core.errors import ConfigError
from rondel.core.protocols import Transport
from rondel.core.registry import find_registered, make_from_settings, refuse_missing_methods
from rondel.sync.delta import Delta
from rondel.sync.from_disk import FromDisk
from rondel.sync.from_distributed import FromDistributed
from rondel.sync.from_ipc import FromIpc
from rondel.sync.from_tcp import FromTcp
from rondel.sync.from_tensor import FromTensor
from rondel.sync.to_servers import ToServers


def _takes_folder(found: Any) -> bool:
    try:
        return "folder" in inspect.signature(found).parameters
    except ValueError:  # written in C
        return False


VERBS = {  # of a user's transport, and what each is called with
    "plan_route": ("trainer", "engines"),
    "publish": ("route", "version", "weights"),
    "send": ("route", "weights"),
    "receive": ("route", "manifest", "mine"),
    "close": (),
}
CHOICES = {"holds": ("never", "begin", "commit"), "names": ("module", "checkpoint")}


def transport_of(kind: str, *, folder: str | Path, one_module: bool = False, server: str = "") -> Transport:
    """`folder`: where versions lie, seen by all under this name. `one_module`:
    trainer and engine have the same tensors. `server`: host of an engine of others. A user's class is made with the
    folder.
    """
    known = {
        "tensor": lambda: FromTensor("never" if one_module else "begin"),
        "ipc": FromIpc,
        "tcp": FromTcp,
        "disk": lambda: FromDisk(folder),
        "distributed": lambda: ToServers(server) if server else FromDistributed(),
        "delta": lambda: Delta(folder),
    }
    found = find_registered("sync.kind", kind, known)
    if kind in known:
        return found()
    made = make_from_settings("sync.kind", kind, found, {"folder": Path(folder)} if _takes_folder(found) else {})
    refuse_missing_methods("sync.kind", kind, made, VERBS)
    for name, values in CHOICES.items():
        if getattr(made, name, None) not in values:
            raise ConfigError(
                f"sync.kind: {name} of '{kind}' is {getattr(made, name, None)!r}; set it to one of {', '.join(values)} "
                f"(core/protocols.py, Transport)"
            )
    return made
