"""An event loop on which no time passes by itself: what a clock decides is the same on any machine, however busy."""

from __future__ import annotations

import asyncio
import selectors
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """`loop.now += 0.06` is 0.06 s in which the loop stood still. A sleep in which nothing else can run takes no time.
    Work for a thread is done at once; where it finds the end of a file, it waits for ever.
    """

    def __init__(self) -> None:
        super().__init__(SkippingSelector(self))
        self.now = 0.0
        self.set_default_executor(InlineExecutor())

    def time(self) -> float:
        return self.now

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """It has no threads; the loop's own way starts one, of which the selector knows nothing until it has ended."""


class SkippingSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualClockLoop) -> None:
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        found = super().select(0)
        assert found or timeout is not None, "nobody can move"
        self.loop.now += 0.0 if found else timeout or 0.0
        return found


class InlineExecutor(ThreadPoolExecutor):
    def submit(self, work: Any, /, *given: Any, **how: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*given, **how))
        except EOFError:
            pass
        except Exception as error:
            done.set_exception(error)
        return done
