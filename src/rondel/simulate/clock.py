"""An event loop whose time is virtual."""

from __future__ import annotations

import asyncio
import time
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """The clock jumps to the next timer when nothing is ready. `passes` are real seconds, one for each pass of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.passes, self._since = 0.0, [0.0], time.perf_counter()
        self._poll, self._selector.select = self._selector.select, self._jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now

    def _jump(self, timeout: float | None = None) -> list[Any]:
        self.passes.append(time.perf_counter() - self._since)
        self.now += timeout or 0.0
        self._since = time.perf_counter()
        return self._poll(0 if timeout is not None else None)  # type: ignore[no-any-return]
