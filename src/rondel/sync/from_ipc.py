"""Through memory that both processes map: written once by the trainer, read in place
by the engine, which then serves from it.

    trainer  writes segment A | serves nothing      A: version 2, exclusive lock while it is written
    engine   points into B    | shared lock on B    B: version 1, until the last tensor that points there is gone

A segment is written only while nobody reads it: readers hold a shared lock on the file for
as long as a tensor lives in it, the writer asks for an exclusive one and takes
another segment if it cannot have it. So two
segments take turns, a third one appears when an engine stays behind, and no read is ever
torn. Its first words say which publication it
holds: a late reader sees that it is another.

A trainer of several ranks gathers nothing: each rank writes its own shards into segments of its own, and the engine
pulls what it wants from all of them (sync/ipc_parts.py).

A segment is a memfd, opened by others as /proc/PID/fd/N: it has no name and is gone with
its last user (law 14). Where there is no memfd it is a file in shared memory with the
writer's pid in its name, removed by its
writer or else by the next one that starts. Tensors on a GPU lie in a buffer there, of
which the segment carries CUDA's handle;
this way has not been run on hardware yet.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import pickle
import re
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from rondel.core.errors import SyncError, error_boundary
from rondel.core.protocols import RolloutEngine, Tensors, Trainer, Weights
from rondel.core.tensor_parts import Block, TensorPart
from rondel.core.types import Manifest, Route, TensorInfo
from rondel.sync.ipc_parts import PartAddresses, PartReader, assign_writers, write_whole, written_pieces
from rondel.sync.tensor_bytes import HEAD, aligned, size_of
from rondel.system.files import guard_write

SEGMENT = re.compile(r"/proc/\d+/fd/\d+|/dev/shm/rondel-[\w-]+", re.ASCII)
SHARED = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())


@dataclass(frozen=True, slots=True)
class SegmentAddress:
    """`path` opens the segment of `size` bytes; its first word must be `number`. `cuda`
    is the handle of a buffer, pickled.
    """

    path: str
    size: int
    number: int
    cuda: bytes = b""


def tensor_offsets(rows: tuple[TensorInfo, ...]) -> list[int]:
    """Where each tensor begins, and the end: a fact of the manifest alone, so that both sides know it."""
    at = [HEAD]
    for row in rows:
        at.append(aligned(at[-1] + size_of(row)))
    return at


class SharedSegment:
    """The writer's side of one piece of shared memory. It grows while the first version
    is written, and then keeps its size.
    """

    def __init__(self, *, named: bool) -> None:
        self.named, self._reserved = named, 0
        self.cuda: Tensor | None = None
        with guard_write(f"the weights to {SHARED if named else 'memory'}", error=SyncError):
            if named:
                self.fd, self.path = tempfile.mkstemp(prefix=f"rondel-{os.getpid()}-", dir=SHARED)
            else:
                self.fd = os.memfd_create("rondel-weights", os.MFD_CLOEXEC)
                self.path = f"/proc/{os.getpid()}/fd/{self.fd}"
            os.ftruncate(self.fd, HEAD)
            self.map = mmap.mmap(self.fd, HEAD)

    def lock(self) -> bool:
        """For writing; False while anyone reads."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def unlock(self) -> None:
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    @property
    def number(self) -> int:
        return int.from_bytes(self.map[:8], "little")

    @number.setter
    def number(self, value: int) -> None:
        self.map[:8] = value.to_bytes(8, "little")

    def write(self, at: int, tensor: Tensor) -> None:
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if raw.is_cuda:
            self._on_gpu(at + len(raw), raw.device)[at : at + len(raw)].copy_(raw)
        elif len(raw):
            if at + len(raw) > len(self.map):
                self.map.resize(max(at + len(raw), 2 * len(self.map)))
            self._reserve_bytes(at + len(raw))
            torch.frombuffer(self.map, dtype=torch.uint8, count=len(raw), offset=at).copy_(raw)

    def _reserve_bytes(self, size: int) -> None:
        """Pages for the first so many bytes: shared memory that is full is an error here, where a
        write into the map would end the process.
        """
        if size > self._reserved:
            with guard_write(f"the weights to {self.path}", size, SyncError):
                os.posix_fallocate(self.fd, self._reserved, size - self._reserved)
            self._reserved = size

    def _on_gpu(self, size: int, device: torch.device) -> Tensor:
        if self.cuda is None or len(self.cuda) < size:
            old, self.cuda = self.cuda, torch.empty(2 * size, dtype=torch.uint8, device=device)
            if old is not None:
                self.cuda[: len(old)] = old
        return self.cuda

    def cuda_handle(self) -> bytes:
        if self.cuda is None:
            return b""
        from torch.multiprocessing.reductions import reduce_tensor

        torch.cuda.synchronize(self.cuda.device)
        return pickle.dumps(reduce_tensor(self.cuda))

    def finish_writing(self, size: int) -> None:
        """All is written: no byte more than announced."""
        if self.cuda is None and len(self.map) != size:
            self.map.resize(size)
            self._reserved = min(self._reserved, size)

    def close(self) -> None:
        self.map.close()
        os.close(self.fd)
        if self.named:
            Path(self.path).unlink(missing_ok=True)


def _unlock_and_close(fd: int) -> None:
    """Python's map keeps a copy of the descriptor, and the lock would stay with it."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def reap_segments() -> list[str]:
    """Remove named segments whose writer is gone. -> their names."""
    dead = [
        path
        for path in SHARED.glob("rondel-*-*")
        if (pid := path.name.split("-")[1]).isdecimal() and not _process_exists(int(pid))
    ]
    for path in dead:
        path.unlink(missing_ok=True)
    return [path.name for path in dead]


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class FromIpc:
    """`named`: a file in shared memory instead of a memfd."""

    holds: Literal["commit"] = "commit"
    names: Literal["module", "checkpoint"] = "module"
    one_machine = True

    def __init__(self, *, named: bool = not hasattr(os, "memfd_create")) -> None:
        self.named = named
        self._segments: list[SharedSegment] = []
        self._published = 0
        self._maps: dict[tuple[int, int], mmap.mmap] = {}
        self._kept_maps = 3
        self.reader = PartReader()

    @property
    def bytes_read(self) -> int:
        """Bytes of the parts that were put together for the last update."""
        return self.reader.bytes_read

    @staticmethod
    def segment_address(path: str, size: int, number: int) -> SegmentAddress:
        """A segment that somebody else tells of: shared memory of this machine, never a
        handle that would have to be unpickled.
        """
        if not SEGMENT.fullmatch(path):
            raise SyncError(
                f"'{path[:80]}' is no segment: it is /proc/PID/fd/N of a memfd, or a file rondel-* in {SHARED}"
            )
        return SegmentAddress(path, size, number)

    async def plan_route(self, trainer: Trainer, engines: list[RolloutEngine]) -> Route:
        return Route("ipc")

    def publish(self, route: Route, version: int, weights: Weights) -> tuple[Manifest, Route]:
        place, rows = write_whole(weights, self._write_segment)
        return Manifest(version, rows), Route("ipc", place, bytes=sum(map(size_of, rows)))

    def _write_segment(self, tensors: Iterable[Tensor]) -> SegmentAddress:
        """All of them, one behind the other, in a segment that nobody reads."""
        segment, at = self._lock_free_segment(), HEAD
        try:
            segment.number = 0
            for tensor in tensors:
                segment.write(at, tensor)
                at = aligned(at + tensor.numel() * tensor.element_size())
            segment.finish_writing(at)
            self._published += 1
            segment.number = self._published
        finally:
            segment.unlock()
        return SegmentAddress(segment.path, len(segment.map), self._published, segment.cuda_handle())

    def _lock_free_segment(self) -> SharedSegment:
        """A segment that nobody reads, locked: never the one that was published last,
        which an engine may be about to open.
        """
        for segment in sorted(self._segments, key=lambda s: s.number)[: len(self._segments) - 1]:
            if segment.lock():
                return segment
        if self.named and not self._segments:
            reap_segments()
        fresh = SharedSegment(named=self.named)
        self._segments.append(fresh)
        if not fresh.lock():
            raise SyncError(f"shared memory segment {fresh.number} is new, and another process holds its lock")
        return fresh

    def send(self, route: Route, weights: Tensors) -> None: ...

    # -- several writers -------------------------------------------------------------------------

    def assign_parts(
        self, held: Sequence[Mapping[str, TensorPart]], itemsize: Mapping[str, int]
    ) -> list[dict[str, list[Block]]]:
        return assign_writers(held, itemsize)

    def write_parts(self, pieces: Iterable[Tensor]) -> SegmentAddress:
        return self._write_segment(pieces)

    def route_parts(self, addresses: Sequence[SegmentAddress], assigned: Sequence[Mapping[str, list[Block]]]) -> Route:
        return Route("ipc", PartAddresses(tuple(addresses), written_pieces(assigned)))

    # -- the engine's end ------------------------------------------------------------------------

    def receive(self, route: Route, manifest: Manifest, mine: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Views of the segment; on a GPU copies, because nobody would know when the last view is gone."""
        if self.has_parts(route):
            yield from self.receive_parts(
                route, manifest, {row.name: TensorPart.whole(row.shape) for row in manifest.tensors}
            )
            return
        place, at = route.data, tensor_offsets(manifest.tensors)
        buffer = self._open_buffer(place)
        if at[-1] > len(buffer):
            raise SyncError(f"the trainer's memory has {len(buffer)} bytes, and the announced tensors need {at[-1]}")
        for row, start in zip(manifest.tensors, at):
            tensor = buffer[start : start + size_of(row)].view(getattr(torch, row.dtype)).view(row.shape)
            yield row.name, tensor.clone() if place.cuda else tensor

    def has_parts(self, route: Route) -> bool:
        return isinstance(route.data, PartAddresses)

    def receive_parts(
        self, route: Route, manifest: Manifest, wanted: Mapping[str, TensorPart]
    ) -> Iterator[tuple[str, Tensor]]:
        """Of each tensor the part that is wanted of it, from the segments of several writers."""
        place = route.data
        self._kept_maps = max(self._kept_maps, 3 * len(place.segments))
        buffers = [self._open_buffer(segment) for segment in place.segments]
        yield from self.reader.assemble(buffers, place, manifest, wanted)

    def _open_buffer(self, place: SegmentAddress) -> Tensor:
        """All bytes of a segment, or of the buffer on a GPU that it names."""
        with error_boundary(SyncError, f"opening the trainer's memory {place.path}"):
            base = self._open_segment(place)
        if not place.cuda:
            return base
        # made by torch in the trainer's process, and carried by our own channel
        rebuild, arguments = pickle.loads(place.cuda)
        return rebuild(*arguments)

    def _open_segment(self, place: SegmentAddress) -> Tensor:
        """All bytes as one tensor; the shared lock ends with the last tensor that shares its storage."""
        fd = os.open(place.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            stat = os.fstat(fd)
            if stat.st_size != place.size:
                raise SyncError(f"{place.path} has {stat.st_size} bytes and not {place.size}")
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError as error:
                raise SyncError(f"{place.path} is being written: this route is an old one") from error
            memory = (ctypes.c_char * place.size).from_buffer(self._map_segment(fd, stat))
            if (number := int.from_bytes(memoryview(memory)[:8], "little")) != place.number:
                raise SyncError(f"{place.path} holds publication {number} by now, and not {place.number}")
        except BaseException:
            _unlock_and_close(fd)
            raise
        weakref.finalize(memory, _unlock_and_close, fd)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _map_segment(self, fd: int, stat: os.stat_result) -> mmap.mmap:
        """Private, so that a write of this process stays its own; kept, because mapping
        again costs a fault for each page.
        """
        key = (stat.st_ino, stat.st_size)
        if key not in self._maps:
            while len(self._maps) >= self._kept_maps:
                self._maps.pop(next(iter(self._maps)))
            self._maps[key] = mmap.mmap(fd, stat.st_size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        return self._maps[key]

    def close(self) -> None:
        for segment in self._segments:
            segment.close()
        self._segments.clear()
        self._maps.clear()
