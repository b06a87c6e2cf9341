"""What travels between a worker and its controller: a pickle, and large arrays beside it in memory that both map.

    send     head = pickle without the arrays | memory: a memfd with the arrays, handed over through the socket
    receive  arrays lie in the sender's pages, copied only where they are written to

A batch for several ranks is packed once. Where there is no memfd everything is in the pickle.
"""

from __future__ import annotations

import mmap
import os
import pickle
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NamedTuple

LARGE = 1 << 16  # bytes of an array from which on it travels beside the pickle
ALIGN = 64
PLAIN, BESIDE = b"p", b"b"


@dataclass(eq=False)
class SharedMemory:
    """Bytes of arrays, one behind the other; closed with its last reference."""

    fd: int
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        weakref.finalize(self, os.close, self.fd)

    @classmethod
    def of(cls, arrays: Sequence[pickle.PickleBuffer]) -> SharedMemory:
        raw = [array.raw() for array in arrays]
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("rondel-arrays", os.MFD_CLOEXEC)
        else:
            fd, path = tempfile.mkstemp(prefix="rondel-arrays-")
            os.unlink(path)
        memory = cls(fd, tuple(map(len, raw)))
        for at, array in zip(_offsets(memory.sizes), raw):
            while len(array):
                n = os.pwrite(fd, array, at)
                at, array = at + n, array[n:]
        os.ftruncate(fd, _offsets(memory.sizes)[-1])
        return memory


class PackedArguments(NamedTuple):
    """Arguments of a call to several workers, pickled once."""

    head: bytes
    memory: SharedMemory | None


class Frame(NamedTuple):
    """A message on its way. `arguments`: of a call, packed before."""

    head: bytes
    memory: SharedMemory | None


def pack_arguments(args: tuple[Any, ...]) -> PackedArguments:
    return PackedArguments(*_dump(args))


def pack_call(number: int, verb: str | None, args: tuple[Any, ...], how: dict[str, Any]) -> Frame:
    """A call as `unpack` gives it: (number, verb, args, how)."""
    if len(args) == 1 and isinstance(args[0], PackedArguments):
        return Frame(_dump_plain((number, verb, args[0].head, how)), args[0].memory)
    return pack((number, verb, args, how))


def pack(message: Any) -> Frame:
    return Frame(*_dump(message))


def send_frame(pipe: Connection, frame: Frame) -> None:
    if frame.memory is None:
        pipe.send_bytes(PLAIN + frame.head)
        return
    pipe.send_bytes(BESIDE + pickle.dumps((frame.memory.sizes, frame.head)))
    send_handle(pipe, frame.memory.fd, None)


def receive_frame(pipe: Connection) -> Any:
    """The next message. EOFError where the other side has ended."""
    return unpack(receive_bytes(pipe))


class Received(NamedTuple):
    head: bytes
    arrays: list[memoryview]


def receive_bytes(pipe: Connection) -> Received:
    """The next message as it came, not looked into yet."""
    raw = pipe.recv_bytes()
    if raw[:1] == PLAIN:
        return Received(raw[1:], [])
    sizes, head = pickle.loads(memoryview(raw)[1:])
    fd = recv_handle(pipe)
    try:
        ends = _offsets(sizes)
        memory = memoryview(mmap.mmap(fd, ends[-1], flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    finally:
        os.close(fd)
    return Received(head, [memory[at : at + size] for at, size in zip(ends, sizes)])


def unpack(received: Received) -> Any:
    message = pickle.loads(received.head, buffers=received.arrays)
    if len(message) == 4 and isinstance(message[2], bytes):  # a call whose arguments were packed before
        number, verb, head, how = message
        return number, verb, pickle.loads(head, buffers=received.arrays), how
    return message


def _dump(value: Any) -> tuple[bytes, SharedMemory | None]:
    arrays: list[pickle.PickleBuffer] = []

    def take(array: pickle.PickleBuffer) -> bool:
        """Whether it stays in the pickle."""
        if array.raw().nbytes < LARGE:
            return True
        arrays.append(array)
        return False

    head = pickle.dumps(value, protocol=5, buffer_callback=take)
    return head, SharedMemory.of(arrays) if arrays else None


def _dump_plain(value: Any) -> bytes:
    return pickle.dumps(value, protocol=5)


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Where each array begins, and the end."""
    return list(accumulate((-(-size // ALIGN) * ALIGN for size in sizes), initial=0))
