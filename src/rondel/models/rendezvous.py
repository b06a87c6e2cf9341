"""Where ranks find each other, and the groups that they make there beside the default one."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rondel.models.collectives import RankGroup
from rondel.system import sockets


class Rendezvous:
    """Where ranks find each other: the first one opens it, at that address only, on a port that the system chooses."""

    def __init__(self, host: str, port: int = 0, *, opens: bool = True) -> None:
        file = None
        if opens:
            file, port = sockets.open_listening_socket(host, port)
        self.store = dist.TCPStore(host, port, is_master=opens, wait_for_workers=False, master_listen_fd=file)
        self.address = (host, port)

    @classmethod
    def connect_to(cls, address: tuple[str, int]) -> Rendezvous:
        return cls(*address, opens=False)

    def make_group(self, name: str, rank: int, size: int, *, device: str = "cpu", patience: float) -> RankGroup:
        """A group of `size` ranks, all of which ask for it by this name; gloo on a CPU, NCCL on a GPU.

        patience  seconds that one rank waits for another in a collective
        """
        store = dist.PrefixStore(name, self.store)
        if device.startswith("cuda"):  # not yet run on hardware
            options = dist.ProcessGroupNCCL.Options()  # type: ignore[attr-defined]
            options._timeout = timedelta(seconds=patience)
            group: Any = dist.ProcessGroupNCCL(store, rank, size, options)  # type: ignore[attr-defined]
        else:
            group = dist.ProcessGroupGloo(store, rank, size, sockets.gloo_at(self.address[0], patience))
        return RankGroup(group, rank, size)
