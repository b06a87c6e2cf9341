"""The gate of an engine of others: requests pass it to draw, and it is shut while weights change.

It is this gate that is shut and never the server: if this process dies, nothing stays paused.
"""

from __future__ import annotations

import asyncio


class DrawGate:
    """
    shut              nobody passes
    drawing, waiting  requests inside it, requests before it
    cuts              interruptions so far
    aborts            those after which nothing goes on
    """

    def __init__(self) -> None:
        self.shut = False
        self.drawing = self.waiting = self.cuts = self.aborts = 0
        self._changed = asyncio.Condition()  # it opens, a draw ends, everything is aborted

    async def wait_until_open(self, aborts: int) -> bool:
        """False when everything has been aborted since `aborts`."""
        self.waiting += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self.shut or self.aborts != aborts)
        finally:
            self.waiting -= 1
        return self.aborts == aborts

    async def wait_until_idle(self, seconds: float | None) -> None:
        """Until nothing draws, or so many seconds have passed."""
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: not self.drawing)
        except TimeoutError:
            if seconds is None:
                raise

    async def close(self, *, abort: bool) -> None:
        self.shut = True
        self.aborts += abort
        await self._notify_waiters()

    async def open(self) -> None:
        self.shut = False
        await self._notify_waiters()

    async def end_drawing(self) -> None:
        self.drawing -= 1
        await self._notify_waiters()

    async def _notify_waiters(self) -> None:
        async with self._changed:
            self._changed.notify_all()
