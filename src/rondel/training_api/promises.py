"""Results that a client comes back for: a request is answered with an id at once, its result when it is there.

    post(id, work) ── id ──> client ── retrieve(id) ──> try again | result | why there is none

The same id posted twice is one piece of work: a client that was cut off asks again, and no gradient is added twice.
"""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from rondel.core.errors import RondelError, UserError

Result = bytes | dict[str, Any]
KEPT = 3600.0  # seconds that a result waits for its client
MOST = 100_000  # promises that are kept
BYTES = 512 << 20  # of all results that are kept


@dataclass(slots=True, eq=False)
class Promise:
    id: str
    task: asyncio.Task[Result]
    retrieved: bool = False
    finished: float = 0.0
    size: int = 0  # bytes of its result


class Promises:
    """Those that are under way are all kept. Of the others the oldest are forgotten, fetched ones first."""

    def __init__(self) -> None:
        self._known: dict[str, Promise] = {}
        self._fetched: dict[str, Promise] = {}
        self._unfetched: dict[str, Promise] = {}
        self._bytes = 0

    def post(self, name: str, work: Callable[[], Awaitable[Result]]) -> Promise:
        if name not in self._known:

            async def run() -> Result:
                return await work()

            promise = Promise(name, asyncio.create_task(run()))
            promise.task.add_done_callback(lambda task: self._finish(promise))
            self._known[name] = promise
        return self._known[name]

    async def retrieve(self, name: str, patience: float) -> Result | None:
        """None: not yet. A failure is a result, too: {"error", "category"}. KeyError: nobody knows it (any more)."""
        promise = self._known[name]
        await asyncio.wait([promise.task], timeout=patience)
        if not promise.task.done():
            return None
        promise.retrieved = True
        if self._unfetched.pop(name, None) is not None:
            self._fetched[name] = promise
        if promise.task.cancelled():
            gone = "where its gradient had been begun, all that was added since the last optim_step is gone"
            return {"error": f"it was cancelled; {gone}", "category": "user"}
        if (error := promise.task.exception()) is None:
            return promise.task.result()
        known = isinstance(error, RondelError | ValueError)
        if not known:
            traceback.print_exception(error, file=sys.stderr)
        return {
            "error": str(error) if known else f"{type(error).__name__}: {error}",
            "category": "user" if known else "server",
        }

    def cancel(self, name: str) -> None:
        if name in self._known:
            self._known[name].task.cancel()

    async def close(self) -> None:
        for promise in self._known.values():
            promise.task.cancel()
        await asyncio.gather(*(promise.task for promise in self._known.values()), return_exceptions=True)

    def _finish(self, promise: Promise) -> None:
        task = promise.task
        if not task.cancelled() and task.exception() is None and isinstance(result := task.result(), bytes):
            promise.size = len(result)
        promise.finished = time.monotonic()
        self._bytes += promise.size
        (self._fetched if promise.retrieved else self._unfetched)[promise.id] = promise
        self._forget_old(promise)

    def _forget_old(self, newest: Promise) -> None:
        old = time.monotonic() - KEPT
        for part in (self._fetched, self._unfetched):
            while part and (first := next(iter(part.values()))) is not newest:
                if first.finished >= old and self._bytes <= BYTES and len(self._known) <= MOST:
                    break
                del part[first.id], self._known[first.id]
                self._bytes -= first.size


class InOrder:
    """Requests of one client, which may arrive in another order than they were numbered in."""

    PATIENCE = 20.0  # seconds, with nothing of this client being computed, that one waits for an earlier one

    def __init__(self, first: int) -> None:
        self.next = first
        self._turn = asyncio.Condition()
        self._refused: set[int] = set()
        self._here: list[int] = []  # numbers that wait for their turn
        self._running = False
        self._done = 0

    async def skip(self, number: int) -> None:
        """It was refused before it had a place: nobody shall wait for it."""
        if number < self.next:
            return
        self._refused.add(number)
        if not self._running:  # else its end moves on
            async with self._turn:
                self._move_on(self.next)
                self._turn.notify_all()

    def _move_on(self, number: int) -> None:
        self.next = max(self.next, number)
        while self.next in self._refused:
            self._refused.discard(self.next)
            self.next += 1

    async def run(self, number: int | None, work: Callable[[], Awaitable[Result]]) -> Result:
        """`number` None has no place in the order: it goes when nothing else runs. UserError: its turn is over."""
        if number is not None:
            self._here.append(number)
        try:
            async with self._turn:
                if number is not None:
                    await self._wait_for_turn(number)
                return await self._run(number, work)
        finally:
            if number is not None:
                self._here.remove(number)

    async def _wait_for_turn(self, number: int) -> None:
        while number > self.next:
            done = self._done
            try:
                async with asyncio.timeout(self.PATIENCE):
                    await self._turn.wait()
            except TimeoutError:
                if done == self._done and number == min(self._here):
                    self._move_on(number)  # the ones before were never sent: their client has been told so
        if number < self.next:
            raise UserError(
                f"seq_id {number} comes too late: this server is at {self.next} of this client, and an earlier "
                "gradient would now be part of a later step. Go on from a saved state"
            )

    async def _run(self, number: int | None, work: Callable[[], Awaitable[Result]]) -> Result:
        self._running = True
        try:
            return await work()
        finally:
            self._running = False
            self._done += 1
            self._move_on(self.next if number is None else number + 1)
            self._turn.notify_all()
