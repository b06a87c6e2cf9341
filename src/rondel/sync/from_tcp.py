"""Over a connection to each rank of the trainer, which serves what it holds: nothing is gathered, on any machine.

    trainer-0 ── copy of its shards ──> port ┐                     engine: W = [ rows of 0 | rows of 1 ]
    trainer-1 ── copy of its shards ──> port ┘ <── boxes asked for      or only its own part of W

A publication is complete when every rank has copied its part to host memory; an engine fetches while it decodes, from
all ranks at once. What it asks for follows from a plan that is made once (sync/transfer_plan.py), so as many bytes come
as are wanted. Whoever connects proves that it knows the key of that rank, which is told beside the address, and the
rank proves it, too; the bytes themselves are not encrypted.

    both      32 random bytes | HMAC of both sides' bytes, by the key
    engine    length (4), JSON: {"number": publication, "boxes": [[piece, [at, ...], [size, ...]], ...]}
    rank      0 and the bytes of all boxes, or 1, length (4) and what is wrong
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from rondel.core.errors import StalledError, SyncError
from rondel.core.protocols import RolloutEngine, Tensors, Trainer, Weights
from rondel.core.tensor_parts import Block, TensorPart
from rondel.core.types import Manifest, Route
from rondel.sync.ipc_parts import (
    PartAddresses,
    WrittenPiece,
    assign_writers,
    narrow,
    plan_pieces,
    write_whole,
    written_pieces,
)
from rondel.sync.tensor_bytes import size_of
from rondel.sync.transfer_plan import Copy, split_buckets
from rondel.system import sockets

BUCKET = 16 << 20  # bytes that are asked for at a time
PROOF = 32  # bytes


@dataclass(frozen=True, slots=True)
class ServedAddress:
    """Where publication `number` of one rank is served to those who know its key."""

    host: str
    port: int
    number: int
    key: bytes = field(repr=False)


class PartServer:
    """One rank's pieces of the last publication, on a port of their own."""

    def __init__(self, host: str, deadline: float) -> None:
        self.host, self.deadline, self.key = host, deadline, secrets.token_bytes(PROOF)
        file, self.port = sockets.open_listening_socket(host)
        self._listening = socket.socket(fileno=file)
        self._last: tuple[int, list[Tensor]] = (0, [])
        threading.Thread(target=self._accept, name="weights", daemon=True).start()

    def hold(self, pieces: Iterable[Tensor]) -> ServedAddress:
        """A copy of them, in host memory: the rank goes on training."""
        number = self._last[0] + 1
        self._last = number - 1, []  # never two versions
        how: dict[str, Any] = {"device": "cpu", "copy": True, "memory_format": torch.contiguous_format}
        self._last = number, [piece.detach().to(**how) for piece in pieces]
        return ServedAddress(self.host, self.port, number, self.key)

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._last = 0, []

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection,), name="weights", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, SyncError):  # who asks is told by the end of the connection
            connection.settimeout(self.deadline)
            _prove_key(connection, self.key, b"rank", b"engine")
            while True:
                asked = json.loads(_receive_message(connection))
                try:
                    boxes = self._find_boxes(asked["number"], asked["boxes"])
                except SyncError as error:
                    said = str(error).encode()
                    connection.sendall(b"\1" + len(said).to_bytes(4, "big") + said)
                    continue
                connection.sendall(b"\0")
                for box in boxes:
                    connection.sendall(_bytes_of(box.contiguous()))

    def _find_boxes(self, number: int, boxes: list[Any]) -> list[Tensor]:
        last, pieces = self._last
        if number != last or not pieces:
            raise SyncError(f"a rank of the trainer holds publication {last} by now, and not {number}")
        return [narrow(pieces[i], tuple(at), tuple(size)) for i, at, size in boxes]


class FromTcp:
    """host      an address of this rank that the engines reach; the trainer's instance is told it
    deadline  seconds that anyone waits for the other side
    """

    holds: Literal["commit"] = "commit"
    names: Literal["module", "checkpoint"] = "module"
    one_machine = False

    def __init__(self, host: str = "127.0.0.1", *, bucket: int = BUCKET, deadline: float = 300.0) -> None:
        self.host, self.bucket, self.deadline = host, bucket, deadline
        self.bytes_read = 0  # of the last update
        self._server: PartServer | None = None
        self._layout: Any = None
        self._plan: dict[str, list[Copy]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process go the knobs alone."""
        return partial(FromTcp, bucket=self.bucket, deadline=self.deadline), (self.host,)

    async def plan_route(self, trainer: Trainer, engines: list[RolloutEngine]) -> Route:
        return Route("tcp")

    # -- the trainer's end -----------------------------------------------------------------------

    def publish(self, route: Route, version: int, weights: Weights) -> tuple[Manifest, Route]:
        address, rows = write_whole(weights, self.write_parts)
        pieces = tuple(WrittenPiece(row.name, (0,) * len(row.shape), row.shape) for row in rows)
        place = PartAddresses((address,), (pieces,))
        return Manifest(version, rows), Route("tcp", place, bytes=sum(map(size_of, rows)))

    def send(self, route: Route, weights: Tensors) -> None: ...

    def assign_parts(
        self, held: Sequence[Mapping[str, TensorPart]], itemsize: Mapping[str, int]
    ) -> list[dict[str, list[Block]]]:
        return assign_writers(held, itemsize)

    def write_parts(self, pieces: Iterable[Tensor]) -> ServedAddress:
        if self._server is None:
            try:
                self._server = PartServer(self.host, self.deadline)
            except OSError as error:
                raise SyncError(f"no port for weights at {self.host}: {error}") from error
        return self._server.hold(pieces)

    def route_parts(self, addresses: Sequence[ServedAddress], assigned: Sequence[Mapping[str, list[Block]]]) -> Route:
        return Route("tcp", PartAddresses(tuple(addresses), written_pieces(assigned)))

    # -- the engine's end ------------------------------------------------------------------------

    def receive(self, route: Route, manifest: Manifest, mine: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        yield from self.receive_parts(
            route, manifest, {row.name: TensorPart.whole(row.shape) for row in manifest.tensors}
        )

    def has_parts(self, route: Route) -> bool:
        return isinstance(route.data, PartAddresses)

    def receive_parts(
        self, route: Route, manifest: Manifest, wanted: Mapping[str, TensorPart]
    ) -> Iterator[tuple[str, Tensor]]:
        """Each tensor of the manifest, or the part of it that is wanted, as soon as all of it has come."""
        place: PartAddresses = route.data
        if (layout := (place.pieces, tuple(wanted.items()))) != self._layout:
            flat = [piece for held in place.pieces for piece in held]
            self._layout, self._plan = layout, plan_pieces(flat, manifest, wanted)
        copies = [copy for row in manifest.tensors for copy in self._plan[row.name]]
        arrival = _Arrival(manifest, wanted, copies)
        first, sources = 0, []
        for address, held in zip(place.segments, place.pieces):
            own = [copy for copy in copies if first <= copy.source < first + len(held)]
            if own:
                sources.append(_Source(address, first, own, arrival, self.bucket, self.deadline))
            first += len(held)
        try:
            for row in manifest.tensors:
                yield row.name, arrival.wait_for_tensor(row.name)
        finally:
            for source in sources:
                source.close()
            self.bytes_read = sum(source.bytes_read for source in sources)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


class _Arrival:
    """Tensors that fill up from several threads."""

    def __init__(self, manifest: Manifest, wanted: Mapping[str, TensorPart], copies: Sequence[Copy]) -> None:
        self.tensors: dict[str, Tensor] = {}
        for row in manifest.tensors:
            part = wanted[row.name]
            out = torch.zeros if part.numel < prod(part.shape) else torch.empty  # padding is 0
            self.tensors[row.name] = out(part.shape, dtype=getattr(torch, row.dtype))
        self._left = dict.fromkeys(self.tensors, 0)  # bytes still to come
        for copy in copies:
            self._left[copy.name] += copy.bytes
        self._error: Exception | None = None
        self._news = threading.Condition()

    def count(self, copy: Copy) -> None:
        with self._news:
            self._left[copy.name] -= copy.bytes
            self._news.notify_all()

    def fail(self, error: Exception) -> None:
        with self._news:
            self._error = self._error or error
            self._news.notify_all()

    def wait_for_tensor(self, name: str) -> Tensor:
        """Its sources wait no longer than their deadline, and then fail."""
        with self._news:
            self._news.wait_for(lambda: self._error or not self._left[name])
            if self._error is not None:
                raise self._error
        return self.tensors.pop(name)


class _Source:
    """A thread that fetches from one rank."""

    def __init__(
        self, address: ServedAddress, first: int, copies: list[Copy], arrival: _Arrival, bucket: int, deadline: float
    ) -> None:
        self.address, self.first, self.arrival, self.deadline = address, first, arrival, deadline
        self.buckets, self.targets = split_buckets(copies, bucket), dict(arrival.tensors)
        self.bytes_read, self._closed = 0, False
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._fetch, name="weights", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends what is under way."""
        self._closed = True
        if self._connection is not None:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _fetch(self) -> None:
        where = f"a rank of the trainer at {self.address.host}:{self.address.port}"
        try:
            with socket.create_connection((self.address.host, self.address.port), self.deadline) as connection:
                self._connection = connection
                _prove_key(connection, self.address.key, b"engine", b"rank")
                for bucket in self.buckets:
                    if self._closed:
                        return
                    self._fetch_bucket(connection, bucket)
        except TimeoutError:
            self.arrival.fail(StalledError(f"an engine receives weights: no answer of {where} for {self.deadline:g} s"))
        except (OSError, SyncError) as error:
            self.arrival.fail(SyncError(f"an engine receives weights from {where}: {error}"))
        except Exception as error:  # who waits hears of whatever ends this thread
            self.arrival.fail(error)
        finally:
            self.targets = {}

    def _fetch_bucket(self, connection: socket.socket, bucket: list[Copy]) -> None:
        asked = {"number": self.address.number, "boxes": [[c.source - self.first, c.at, c.size] for c in bucket]}
        words = json.dumps(asked).encode()
        connection.sendall(len(words).to_bytes(4, "big") + words)
        if _receive_exactly(connection, 1) != b"\0":
            raise SyncError(_receive_message(connection).decode(errors="replace"))
        for copy in bucket:
            box = narrow(self.targets[copy.name], copy.to, copy.size)
            came = box if box.is_contiguous() else torch.empty(copy.size, dtype=box.dtype)
            _receive_into(connection, _bytes_of(came))
            if came is not box:
                box.copy_(came)
            self.bytes_read += copy.bytes
            self.arrival.count(copy)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Those of a contiguous tensor, in place."""
    raw: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(raw)


def _receive_into(connection: socket.socket, room: memoryview) -> None:
    at = 0
    while at < len(room):
        if not (n := connection.recv_into(room[at:])):
            raise SyncError("the connection was closed")
        at += n


def _receive_exactly(connection: socket.socket, n: int) -> bytes:
    room = bytearray(n)
    _receive_into(connection, memoryview(room))
    return bytes(room)


def _receive_message(connection: socket.socket) -> bytes:
    return _receive_exactly(connection, int.from_bytes(_receive_exactly(connection, 4), "big"))


def _prove_key(connection: socket.socket, key: bytes, me: bytes, other: bytes) -> None:
    """Each side proves to the other one that it knows the key, which does not travel."""
    mine = secrets.token_bytes(PROOF)
    connection.sendall(mine)
    theirs = _receive_exactly(connection, PROOF)
    connection.sendall(hmac.digest(key, me + mine + theirs, "sha256"))
    proof = hmac.digest(key, other + theirs + mine, "sha256")
    if not hmac.compare_digest(_receive_exactly(connection, PROOF), proof):
        raise SyncError("the other side does not know the key of this publication")
