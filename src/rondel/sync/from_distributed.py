"""Over the network: one broadcast a bucket, from the trainer to all engines at once, in a group of their own.

    trainer   fill A | send A, fill B | send B, fill A | ...        a bucket: tensors one behind the other, as bytes
    engine           | recv A         | recv B, copy A | ...        two of them, so that copying and sending overlap

Which tensor lies in which bucket follows from the manifest, so no other word travels.
The group belongs to the weights alone (the trainer's collectives know nothing of it);
it is made at the first update, warmed up,
kept, and made anew after a fault or when other engines receive: a group cannot be resized, and nobody
takes another one's place in it. Everyone waits with a
deadline, and who fails leaves, which wakes the others.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rondel.core.errors import StalledError, SyncError
from rondel.core.protocols import RolloutEngine, Tensors, Trainer, Weights
from rondel.core.types import Manifest, Route, TensorInfo
from rondel.sync.tensor_bytes import aligned, size_of
from rondel.system import sockets

BUCKET = 64 << 20  # bytes; a larger tensor has a bucket of its own


@dataclass(frozen=True, slots=True)
class GroupAddress:
    """Where the group of `size` members meets; `name` is another one for every group."""

    host: str
    port: int
    name: str
    size: int


def split_into_buckets(rows: Iterable[TensorInfo], most: int) -> list[list[TensorInfo]]:
    """In order, as many as fit into `most` bytes; both sides compute the same."""
    out: list[list[TensorInfo]] = []
    room = 0
    for row in rows:
        if not out or size_of(row) > room:
            out.append([])
            room = most
        out[-1].append(row)
        room -= _aligned_size(row)
    return out


def _aligned_size(row: TensorInfo) -> int:
    return aligned(size_of(row))


def split_bucket(bucket: list[TensorInfo], buffer: Tensor) -> Iterator[tuple[TensorInfo, Tensor]]:
    """Each tensor's bytes in the buffer."""
    at = 0
    for row in bucket:
        yield row, buffer[at : at + size_of(row)]
        at += _aligned_size(row)


class BroadcastGroup:
    """A process group beside the default one: rank 0 sends, the others are numbered as they come."""

    def __init__(
        self, meeting: GroupAddress, store: dist.TCPStore, device: torch.device, deadline: float, *, sends: bool
    ) -> None:
        self.meeting, self.device = meeting, device
        rank = 0 if sends else store.add(f"{meeting.name}/joined", 1)
        if rank >= meeting.size:
            raise SyncError(f"group {meeting.name} has {meeting.size - 1} engines, and one more wants to receive")
        own, wait = dist.PrefixStore(meeting.name, store), timedelta(seconds=deadline)
        if device.type == "cuda":  # not yet run on hardware
            options = dist.ProcessGroupNCCL.Options()  # type: ignore[attr-defined]
            options._timeout = wait
            self.group: Any = dist.ProcessGroupNCCL(own, rank, meeting.size, options)  # type: ignore[attr-defined]
        else:
            self.group = dist.ProcessGroupGloo(own, rank, meeting.size, sockets.gloo_at(meeting.host, deadline))
        self._sent: list[Any] = [None, None]
        # the first collective of a group costs seconds
        self.broadcast(0, torch.zeros(1, dtype=torch.uint8, device=device))
        self.wait_for_buffer(0)

    def broadcast(self, i: int, buffer: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._sent[i % 2] = self.group.broadcast([buffer], options)

    def wait_for_buffer(self, i: int) -> None:
        """Until what was begun as number i has arrived, if anything was."""
        work, self._sent[i % 2] = self._sent[i % 2], None
        try:
            if work is not None:
                work.wait()
        finally:
            del work  # a traceback would keep it, and it the connections

    def leave_group(self) -> None:
        """Gloo closes its connections with the last reference to them, and no sooner."""
        self.group, self._sent = None, [None, None]


class FromDistributed:
    """host      an address of the trainer that the engines reach; the trainer's instance is told it
    bucket    bytes of one broadcast
    deadline  seconds that anyone waits for the others
    """

    holds: Literal["begin"] = "begin"
    names: Literal["module", "checkpoint"] = "checkpoint"

    def __init__(self, host: str = "127.0.0.1", *, bucket: int = BUCKET, deadline: float = 300.0) -> None:
        self.host, self.bucket, self.deadline = host, bucket, deadline
        self._store: dist.TCPStore | None = None
        self._group: Any = None
        self._made = self._rounds = 0
        self._asked: tuple[int, ...] = ()
        self._for = (0, 0)  # whom the group was made for
        self._rows: tuple[TensorInfo, ...] = ()
        self._one = threading.Lock()  # broadcasts of one group never overlap

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process go the knobs alone."""
        return partial(FromDistributed, bucket=self.bucket, deadline=self.deadline), (self.host,)

    async def plan_route(self, trainer: Trainer, engines: list[RolloutEngine]) -> Route:
        """How many receive, and their number in the row of those who were asked: others than
        the last time need a group of their own.
        """
        if (asked := tuple(map(id, engines))) != self._asked:
            self._asked, self._rounds = asked, self._rounds + 1
        return Route("distributed", (sum([(await engine.status()).replicas for engine in engines]), self._rounds))

    # -- the trainer's end -----------------------------------------------------------------------

    def publish(self, route: Route, version: int, weights: Weights) -> tuple[Manifest, Route]:
        """Only says what there is: the data travels when all engines are there to take it."""
        self._rows = tuple(row for row, _ in weights)
        if self._store is None:
            wait = timedelta(seconds=self.deadline)
            file, port = sockets.open_listening_socket(self.host)
            self._store = dist.TCPStore(
                self.host, port, is_master=True, wait_for_workers=False, timeout=wait, master_listen_fd=file
            )
        if self._group is None or self._for != route.data:
            self._group, self._made, self._for = None, self._made + 1, route.data
        meeting = GroupAddress(self.host, self._store.port, f"weights-{self._made}", route.data[0] + 1)
        return Manifest(version, self._rows), Route("distributed", meeting, bytes=sum(map(size_of, self._rows)))

    def send(self, route: Route, weights: Tensors) -> None:
        with self._one, self._leave_on_error("the trainer sends weights"):
            plan, stream = split_into_buckets(self._rows, self.bucket), iter(weights)
            name, tensor = next(stream)
            group = self._join_group(route.data, tensor.device, sends=True)
            pair = _double_buffer(plan, group.device)
            for i, bucket in enumerate(plan):
                group.wait_for_buffer(i)  # the broadcast before the last: its buffer is filled again
                for row, slot in split_bucket(bucket, pair[i % 2]):
                    if name != row.name:
                        raise SyncError(f"{row.name} was published, and {name or 'nothing'} is sent in its place")
                    slot.copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
                    name, tensor = next(stream, ("", tensor))
                group.broadcast(i, _used_part(bucket, pair[i % 2]))
            group.wait_for_buffer(0)
            group.wait_for_buffer(1)

    # -- the engine's ----------------------------------------------------------------------------

    def receive(self, route: Route, manifest: Manifest, mine: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        with self._one, self._leave_on_error("an engine receives weights"):
            plan, device = split_into_buckets(manifest.tensors, self.bucket), next(iter(mine.values())).device
            group = self._join_group(route.data, device, sends=False)
            pair = _double_buffer(plan, device)
            group.broadcast(0, _used_part(plan[0], pair[0]))
            for i, bucket in enumerate(plan):
                group.wait_for_buffer(i)
                if i + 1 < len(plan):
                    group.broadcast(i + 1, _used_part(plan[i + 1], pair[(i + 1) % 2]))
                for row, slot in split_bucket(bucket, pair[i % 2]):
                    yield row.name, slot.view(getattr(torch, row.dtype)).view(row.shape)

    # -- both ------------------------------------------------------------------------------------

    def _join_group(self, meeting: GroupAddress, device: torch.device, *, sends: bool) -> BroadcastGroup:
        if self._group is None or self._group.meeting != meeting:
            self._group = None
            wait = timedelta(seconds=self.deadline)
            store = self._store if sends else dist.TCPStore(meeting.host, meeting.port, is_master=False, timeout=wait)
            assert store is not None, "send before publish"
            self._group = BroadcastGroup(meeting, store, device, self.deadline, sends=sends)
        return self._group

    @contextmanager
    def _leave_on_error(self, what: str) -> Iterator[None]:
        """Whoever fails leaves the group: connections close, and who waits at the other end
        fails too, long before the deadline.
        """
        try:
            yield
        except BaseException as error:
            if self._group is not None:
                self._group.leave_group()
            self._group = None
            if not isinstance(error, RuntimeError):
                raise
            if "timeout" in (said := str(error).lower()) or "timed out" in said:
                raise StalledError(f"{what}: no answer for {self.deadline:g} s, the last word was: {error}") from error
            raise SyncError(f"{what}: {error}") from error

    def close(self) -> None:
        self._group = self._store = None


def _used_part(bucket: list[TensorInfo], buffer: Tensor) -> Tensor:
    return buffer[: sum(map(_aligned_size, bucket))]


def _double_buffer(plan: list[list[TensorInfo]], device: torch.device) -> list[Tensor]:
    most = max(sum(map(_aligned_size, bucket)) for bucket in plan)
    return [torch.empty(most, dtype=torch.uint8, device=device) for _ in range(min(2, len(plan)))] * 2
