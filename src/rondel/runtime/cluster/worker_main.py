"""What runs in a worker's process: builds the object it was sent, answers its calls,
tells its events, shows that it is alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import queue
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import Any

from rondel.core.clocks import run_loop
from rondel.core.errors import RondelError, WorkerError
from rondel.core.events import WorkerTime, subscribe
from rondel.core.given_objects import unpack_given
from rondel.runtime import stacks
from rondel.runtime.cluster import frames
from rondel.runtime.cluster.progress import WorkerProgress
from rondel.runtime.cluster.worker import PULSE
from rondel.system.signals import die_with_parent, leave_to_controller


def run_worker(socket: int, parent: int) -> None:
    """`parent`: who started this process."""
    _die_with(parent)
    pipe = Connection(socket)
    name, cores, tells, given = frames.receive_frame(pipe)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    leave_to_controller()
    unpack_given(given)
    stacks.register_stack_dump(sys.stderr)
    run_loop(WorkerMain(pipe, name, tells).serve())


class WorkerMain:
    """One object and the calls on it; what they do to the event loop is what they would do in process."""

    def __init__(self, pipe: Connection, name: str, tells: bool) -> None:
        self.pipe, self.name, self.tells = pipe, name, tells
        self.object: Any = None
        self.calls: dict[int, asyncio.Task] = {}
        self.outbox: queue.SimpleQueue[frames.Frame] = queue.SimpleQueue()
        self.over = asyncio.Event()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        self.progress = WorkerProgress()
        turning = loop.create_task(self.progress.count_turns())
        subscribe(lambda event: self.put(0, "event", event) if self.tells or isinstance(event, WorkerTime) else None)
        for work in (self._send_messages, self._send_pulses):
            threading.Thread(target=work, daemon=True).start()
        threading.Thread(target=self._receive_messages, args=(loop,), daemon=True).start()
        await self.over.wait()
        turning.cancel()
        if close := getattr(self.object, "close", None):
            close()
        os._exit(0)  # a thread that computes must not keep a process alive that nobody asks any more

    def put(self, number: int, kind: str, value: Any) -> None:
        try:
            message = frames.pack((number, kind, value))
        except Exception as error:
            if kind == "event":
                return
            message = frames.pack(
                (number, "error", WorkerError(f"{self.name}: an answer that cannot be sent: {error}"))
            )
        self.outbox.put(message)

    # -- threads ---------------------------------------------------------------------------------

    def _receive_messages(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while True:
                self._hand_over(loop, frames.receive_bytes(self.pipe))
        except (EOFError, OSError):
            loop.call_soon_threadsafe(self.over.set)
        except Exception as error:  # whose call it was is not known, so it is everyone's
            self.put(
                0, "broken", WorkerError(f"{self.name} cannot read what it was asked: {type(error).__name__}: {error}")
            )

    def _hand_over(self, loop: asyncio.AbstractEventLoop, received: frames.Received) -> None:
        """Nothing of the message stays in its thread while the next one is waited for."""
        self.progress.reads = True
        message = frames.unpack(received)
        self.progress.reads = False
        loop.call_soon_threadsafe(self._accept_call, *message)

    def _send_messages(self) -> None:
        try:
            while True:
                frames.send_frame(self.pipe, self.outbox.get())
        except OSError:
            os._exit(1)  # nobody listens any more

    def _send_pulses(self) -> None:
        while True:
            time.sleep(PULSE)
            self.put(0, "pulse", self.progress.liveness_sign())

    # -- calls -----------------------------------------------------------------------------------

    def _accept_call(
        self, number: int, verb: str | None, args: tuple[Any, ...] = (), how: dict[str, Any] | None = None
    ) -> None:
        if verb is None:  # whoever asked has gone away; 0 is the controller itself
            if number in self.calls:
                self.calls[number].cancel()
            elif not number:
                self.over.set()
            return
        self.calls[number] = asyncio.create_task(self._answer_call(number, verb, args, how or {}))

    async def _answer_call(self, number: int, verb: str, args: tuple[Any, ...], how: dict[str, Any]) -> None:
        try:
            if not verb:
                make, made_of = args
                self.object = make(*made_of)
                value = None
            else:
                value = attrgetter(verb)(self.object)(*args, **how)
                if asyncio.iscoroutine(value):
                    value = await value
            self.put(number, "result", value)
        except asyncio.CancelledError:
            self.put(number, "error", WorkerError(f"{self.name}: {verb} was cancelled"))
        except BaseException as error:
            with contextlib.suppress(OSError):  # the disk of the log may be what is full
                traceback.print_exc()
                sys.stderr.flush()
            self.put(number, "error", portable_error(error, self.name, verb or "build"))
        finally:
            self.calls.pop(number, None)


def portable_error(error: BaseException, name: str, verb: str) -> Exception:
    """Our own errors cross as they are; what another process could not build again crosses as its text."""
    if isinstance(error, RondelError):
        try:
            return pickle.loads(pickle.dumps(error))
        except Exception:
            pass
    return WorkerError(f"{name}, {verb}: {type(error).__name__}: {error}")


def _die_with(parent: int) -> None:
    """Law 14: this process ends when its controller ends; elsewhere than on Linux the pipe's end does it."""
    die_with_parent()
    if sys.platform == "linux" and os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    run_worker(*map(int, sys.argv[1:3]))
