"""By broadcast to servers that speak SGLang's endpoints (SGLang, `rondel serve`), without a file: the trainer leads a
group of torch's as rank 0, and each server joins it when it is asked over HTTP.

    trainer                        controller, for each server            server
    listens, names a group ─Route─► /init_weights_update_group, once       joins with a rank of its own
    broadcasts bucket 0, 1, ...    /update_weights_from_distributed each  receives, and loads at once or with the last
    one

A bucket is its tensors' bytes one behind the other (SGLang's "flattened_bucket"). What the server loads has no digest
of ours: the version that it tells and the probe are what an update is checked by, as with a folder.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rondel.core.errors import StalledError, SyncError
from rondel.core.protocols import Tensors, Weights
from rondel.core.types import Manifest, Route
from rondel.sync.from_distributed import BUCKET, FromDistributed, split_into_buckets
from rondel.sync.tensor_bytes import size_of
from rondel.system import sockets

REFUSAL = 0.5  # seconds in which a server that will not join says so
AGAIN = 0.02  # seconds between two looks at the store


class ServerGroup:
    """Rank 0 of a group whose other ranks are servers."""

    def __init__(self, store: dist.TCPStore, where: dict[str, Any], device: torch.device, deadline: float) -> None:
        """The same keys in the store as torch's own groups, which servers join with its own helper."""
        _wait_for_servers(store, where, deadline)
        inside: Any = store
        for prefix in (where["name"], f"{where['name']}/", f"{device.type}/"):
            inside = dist.PrefixStore(prefix, inside)
        if device.type == "cuda":  # not yet run on hardware
            options = dist.ProcessGroupNCCL.Options()  # type: ignore[attr-defined]
            options._timeout = timedelta(seconds=deadline)
            self.group: Any = dist.ProcessGroupNCCL(inside, 0, where["size"], options)  # type: ignore[attr-defined]
        else:
            self.group = dist.ProcessGroupGloo(inside, 0, where["size"], sockets.gloo_at(where["host"], deadline))

    def broadcast(self, flat: Tensor) -> None:
        """Returns when all have it."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self.group.broadcast([flat], options).wait()

    def leave_group(self) -> None:
        self.group = None


def _wait_for_servers(store: dist.TCPStore, where: dict[str, Any], deadline: float) -> None:
    """Until all were asked to join and none has refused: torch would wait for one that refused to its deadline."""
    end, name, asked = time.monotonic() + deadline, where["name"], where["size"] - 1
    while (came := store.add(f"{name}/joined", 0)) < asked:
        if time.monotonic() > end:
            raise StalledError(f"{came} of {asked} servers were asked to join {name} in {deadline:g} s")
        time.sleep(AGAIN)
    end = time.monotonic() + REFUSAL
    while time.monotonic() < end:
        if store.check([f"{name}/refused"]):
            raise SyncError(f"a server did not join: {store.get(f'{name}/refused').decode()}")
        time.sleep(AGAIN)


class ToServers(FromDistributed):
    """towards  host of a server: the trainer listens at the address by which it reaches that one

    Its route's data: "host", "port", "name" and "size" of the group, its "backend", and "buckets": the first and the
    end of each in the manifest's tensors. Servers take their ranks from the counter NAME/joined of the store; why one
    of them does not join is put at NAME/refused.
    """

    def __init__(self, towards: str = "127.0.0.1", *, bucket: int = BUCKET, deadline: float = 300.0) -> None:
        super().__init__(towards, bucket=bucket, deadline=deadline)
        self.towards, self._run = towards, secrets.token_hex(4)  # a server may be in groups of earlier runs

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(ToServers, bucket=self.bucket, deadline=self.deadline), (self.towards,)

    def publish(self, route: Route, version: int, weights: Weights) -> tuple[Manifest, Route]:
        device = "cpu"

        def described() -> Any:
            nonlocal device
            for row, tensor in weights:
                device = tensor.device.type
                yield row, tensor

        self.host = self.towards if sockets.is_loopback(self.towards) else sockets.own_address(self.towards)
        manifest, told = super().publish(route, version, described())
        meeting, ends = told.data, [0]
        for bucket in split_into_buckets(self._rows, self.bucket):
            ends.append(ends[-1] + len(bucket))
        data = {"host": meeting.host, "port": meeting.port, "name": f"{meeting.name}-{self._run}", "size": meeting.size}
        data |= {"backend": "nccl" if device == "cuda" else "gloo", "buckets": list(pairwise(ends))}
        return manifest, Route("distributed", data, bytes=told.bytes)

    def send(self, route: Route, weights: Tensors) -> None:
        where = route.data
        with self._one, self._leave_on_error("the trainer sends weights to servers"):
            stream = iter(weights)
            name, tensor = next(stream)
            if self._group is None:
                assert self._store is not None, "send before publish"
                self._group = ServerGroup(self._store, where, tensor.device, self.deadline)
            for first, end in where["buckets"]:
                rows = self._rows[first:end]
                flat = torch.empty(sum(map(size_of, rows)), dtype=torch.uint8, device=tensor.device)
                for row, slot in zip(rows, flat.split([size_of(row) for row in rows])):
                    if name != row.name:
                        raise SyncError(f"{row.name} was published, and {name or 'nothing'} is sent in its place")
                    slot.copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
                    name, tensor = next(stream, ("", tensor))
                self._group.broadcast(flat)
