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
from dataclasses import dataclass, field
from typing import Any

from rondel.core.errors import RondelError

Result = bytes | dict[str, Any]
KEPT = 3600.0  # seconds that a result waits for its client
MOST = 100_000  # promises that are kept


@dataclass(slots=True, eq=False)
class Promise:
    id: str
    task: asyncio.Task[Result]
    born: float = field(default_factory=time.monotonic)
    retrieved: bool = False


class Promises:
    def __init__(self) -> None:
        self._known: dict[str, Promise] = {}

    def post(self, name: str, work: Callable[[], Awaitable[Result]]) -> Promise:
        if name not in self._known:
            self._forget_old()

            async def run() -> Result:
                return await work()

            self._known[name] = Promise(name, asyncio.create_task(run()))
        return self._known[name]

    async def retrieve(self, name: str, patience: float) -> Result | None:
        """None: not yet. A failure is a result, too: {"error", "category"}. KeyError: nobody knows it (any more)."""
        promise = self._known[name]
        await asyncio.wait([promise.task], timeout=patience)
        if not promise.task.done():
            return None
        promise.retrieved = True
        if promise.task.cancelled():
            return {"error": "it was cancelled", "category": "user"}
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

    def _forget_old(self) -> None:
        old = time.monotonic() - KEPT
        over = len(self._known) - MOST
        for name, promise in list(self._known.items()):
            done = promise.task.done()
            if not done or not (promise.born < old or over > 0):
                if promise.born >= old and over <= 0:
                    break
                continue
            del self._known[name]
            over -= 1


class InOrder:
    """Requests of one client, which may arrive in another order than they were numbered in."""

    PATIENCE = 20.0  # seconds that a request waits for an earlier one that never came

    def __init__(self, first: int) -> None:
        self.next = first
        self._turn = asyncio.Condition()
        self._refused: set[int] = set()

    async def skip(self, number: int) -> None:
        """It was refused before it had a place: nobody shall wait for it."""
        async with self._turn:
            self._refused.add(number)
            self._move_on(self.next)
            self._turn.notify_all()

    def _move_on(self, number: int) -> None:
        self.next = max(self.next, number)
        while self.next in self._refused:
            self._refused.discard(self.next)
            self.next += 1

    async def run(self, number: int | None, work: Callable[[], Awaitable[Result]]) -> Result:
        """`number` None has no place in the order: it goes when nothing else runs."""
        async with self._turn:
            if number is not None and number > self.next:
                try:
                    async with asyncio.timeout(self.PATIENCE):
                        await self._turn.wait_for(lambda: self.next >= number)
                except TimeoutError:
                    pass  # it was never sent: its client has been told so
            try:
                return await work()
            finally:
                if number is not None:
                    self._move_on(number + 1)
                self._turn.notify_all()
