"""What goes into a command and comes out of it, on pipes of ours, with a deadline and a limit for each."""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

PATIENCE = 10.0  # seconds for a box to end a command that it was told to


class CommandStreams:
    """What goes into a command and comes out of it, until its box says that it has ended."""

    def __init__(self, control: socket.socket, into: int, out: dict[int, bytearray], stdin: bytes, most: int) -> None:
        self.control, self.into, self.out, self.rest, self.most = control, into, out, memoryview(stdin), most
        self.cut: set[int] = set()
        self.poll = select.poll()
        self.poll.register(control, select.POLLIN)
        for fd in ([into] if into >= 0 else []) + list(out):
            self.poll.register(fd, select.POLLOUT if fd == into else select.POLLIN)
            os.set_blocking(fd, False)
        self.open = set(out)
        self.told = False  # to end

    def until_done(
        self, deadline: float, too_much: Callable[[], bool] | None = None
    ) -> tuple[dict[str, Any] | None, str]:
        """-> what the box says of it, and which limit we ended it for. No answer: the box is gone, or does not hear."""
        answer: dict[str, Any] | None = None
        limit, look, pace = "", time.monotonic(), 0.02
        try:
            while answer is None or self.open:
                now = time.monotonic()
                if not limit and too_much and now >= look:
                    full = too_much()
                    pace = max(0.02, 10 * (time.monotonic() - now))
                    look = time.monotonic() + pace
                    limit = "disk" if full else ""
                if not limit and now >= deadline:
                    limit = "wall"
                if limit and not self.told:
                    self.told, deadline = True, now + PATIENCE
                    with suppress(OSError):
                        self.control.send(b'{"do": "kill"}')
                elif limit and now >= deadline:
                    return None, limit
                until = min(deadline, look) if too_much and not limit else deadline
                for fd, _ in self.poll.poll(max(0.0, until - now) * 1000 + 1):
                    if fd == self.control.fileno():
                        try:
                            message = self.control.recv(1 << 18)
                        except ConnectionResetError:  # it ended with something unread
                            message = b""
                        if not message:
                            return None, limit
                        answer = json.loads(message)
                        self.poll.unregister(fd)
                    elif fd == self.into:
                        self._write_stdin()
                    elif self._read_chunk(fd) and not limit:
                        limit = "output"
            if too_much and not limit and too_much():
                limit = "disk"
            return answer, limit
        finally:
            for fd in {self.into, *self.open} - {-1}:
                os.close(fd)

    def _write_stdin(self) -> None:
        try:
            if self.rest:
                self.rest = self.rest[os.write(self.into, self.rest[: 1 << 16]) :]
        except BlockingIOError:
            return
        except OSError:  # it reads no more
            self.rest = memoryview(b"")
        if not self.rest:
            self.poll.unregister(self.into)
            os.close(self.into)
            self.into = -1

    def _read_chunk(self, fd: int) -> bool:
        """-> whether it is too much."""
        try:
            piece = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if not piece:
            self.poll.unregister(fd)
            self.open.discard(fd)
            os.close(fd)
            return False
        kept = self.out[fd]
        room = self.most - len(kept)
        kept += piece[:room]
        if len(piece) > room:
            self.cut.add(fd)
        return len(piece) > room

    def captured_output(self, fd: int) -> bytes:
        return bytes(self.out[fd]) + (b"\n[cut at %d bytes]" % self.most if fd in self.cut else b"")
