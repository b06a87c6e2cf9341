"""Boxes that wait started, for any substrate: one that is taken is replaced beside the work, and none is used twice."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rondel.core.errors import SandboxError
from rondel.core.sandbox_types import Limits

Start = Callable[[Limits, dict[str, Any]], Any]
OWN = ("folder", "lock")  # settings of one box alone: nobody could start it before


class WaitingBoxes:
    """`take(limits, settings)`: the oldest that waits, or a new one. Boxes of different limits wait apart."""

    def __init__(self, start: Start, size: int) -> None:
        self._start, self._size = start, size
        self._idle: dict[str, queue.Queue[Any]] = {}
        self._held: set[Any] = set()  # those that nobody has taken
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, _end_boxes, self._held)

    def take(self, limits: Limits, settings: dict[str, Any]) -> Any:
        if any(settings.get(name) is not None for name in OWN):
            return self._start(limits, settings)
        key = repr((limits, sorted(settings.items())))
        with self._lock:
            first = key not in self._idle
            idle = self._idle.setdefault(key, queue.Queue())
        for _ in range(self._size if first else 0):
            self._refill(idle, limits, settings)
        while True:
            try:
                box = idle.get_nowait()
            except queue.Empty:
                return self._start(limits, settings)
            self._held.discard(box)
            self._refill(idle, limits, settings)
            if box.alive:
                return box
            box.kill()

    def close(self) -> None:
        self._end()

    def _refill(self, idle: queue.Queue[Any], limits: Limits, settings: dict[str, Any]) -> None:
        def start() -> None:
            with suppress(SandboxError):  # who needs one starts it and reads why it cannot
                box = self._start(limits, settings)
                self._held.add(box)
                if not self._end.alive:
                    box.kill()
                idle.put(box)

        threading.Thread(target=start, name="sandbox", daemon=True).start()


def _end_boxes(boxes: set[Any]) -> None:
    for box in tuple(boxes):
        box.interrupt()
    for box in tuple(boxes):
        box.kill()
