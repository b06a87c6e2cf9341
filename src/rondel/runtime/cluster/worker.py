"""What all proxies share: the calls that wait for an answer, the event loop that hears
events, and an end that every call learns of.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rondel.core.errors import RondelError, WorkerError
from rondel.core.events import Event, WorkerTime, emit

PULSE = 1.0  # seconds between two signs of life
STILL = 60.0  # seconds without a pulse and without anything done after which one that is built counts as stuck
START = 300.0  # seconds that a worker may go without progress while it imports and loads, from a busy disk at times
STARTS = {"join", "load", "open"}  # verbs in which it does so; in a role's name, too: "trainer.join"


class RemoteWorker:
    """An object elsewhere: every public name is an awaitable verb of it. `ask` and
    `now` are for code without an event loop.

    A subclass implements `_send_call` and `_cancel_call`, and calls `_resolve_call`, `_forward_event` and `_mark_lost`.
    """

    def __init__(self, name: str, patience: float) -> None:
        self._name, self._patience = name, patience
        self._asked: dict[int, tuple[str, Future[Any]]] = {}
        self._numbers = itertools.count(1)
        self._over = ""  # why it answers no more
        self._loop: asyncio.AbstractEventLoop | None = None
        self._guard = threading.Lock()
        self._made: Future[Any]

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        if verb.startswith("_"):
            raise AttributeError(verb)

        async def call(*args: Any, **how: Any) -> Any:
            self._loop = asyncio.get_running_loop()
            answer = self.ask(verb, *args, **how)
            del args, how  # a call may take long, and what was sent is not needed here
            return await asyncio.wrap_future(answer)

        return call

    def ask(self, verb: str, *args: Any, **how: Any) -> Future[Any]:
        """The call itself, for code that waits for several."""
        number, answer = next(self._numbers), Future[Any]()
        with self._guard:
            if self._over:
                raise WorkerError(self._over)
            self._asked[number] = (verb or "build", answer)
        answer.add_done_callback(lambda done: self._cancel_call(number) if done.cancelled() else None)
        self._send_call(number, verb, args, how)
        return answer

    def now(self, verb: str = "", *args: Any, **how: Any) -> Any:
        """The same, waiting for the answer; without a verb it waits until the object is built."""
        return (self.ask(verb, *args, **how) if verb else self._made).result()

    async def ready(self) -> None:
        await asyncio.wrap_future(self._made)

    @property
    def alive(self) -> bool:
        return not self._over

    @property
    def fate(self) -> str:
        """Why it is not alive."""
        return self._over

    def _send_call(self, number: int, verb: str, args: tuple[Any, ...], how: dict[str, Any]) -> None:
        raise NotImplementedError

    def _cancel_call(self, number: int) -> None:
        raise NotImplementedError

    def _resolve_call(self, number: int, kind: str, value: Any) -> None:
        with self._guard:
            _, answer = self._asked.pop(number, ("", None))
        if answer is None or not answer.set_running_or_notify_cancel():
            return
        answer.set_result(value) if kind == "result" else answer.set_exception(value)

    def _forward_event(self, event: Event) -> None:
        """Readers of events are not made for threads: they hear it on the event loop that asks this worker."""
        if isinstance(event, WorkerTime):
            # there are several of its kind; in a process of two roles each has its own account
            event.worker = (
                self._name.replace("rank-", f"{event.worker}-", 1) if self._name.startswith("rank-") else self._name
            )
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(emit, event)
            return
        try:
            emit(event)
        except RondelError as error:  # of a reader that a run cannot do without: who waits for this worker is told
            self._mark_lost(str(error), type(error))

    @property
    def _silence_limit(self) -> float:
        """Seconds that it may be silent now."""
        return max(self._patience, START) if self._is_starting else self._patience

    @property
    def _is_starting(self) -> bool:
        """It is built, or all that it is asked for is a part of that: it imports and loads, which shows no progress."""
        with self._guard:
            asked = {verb.rpartition(".")[2] for verb, _ in self._asked.values()}
        return not self._made.done() or (bool(asked) and asked <= STARTS)

    def _pending_verbs(self) -> str:
        with self._guard:
            return ", ".join(sorted({verb for verb, _ in self._asked.values()}))

    def _mark_lost(self, why: str, error: type[Exception] = WorkerError, words: Callable[[], str] = str) -> None:
        """It answers no more, and whoever waits is told; `words` are its last ones, asked for
        when it can no longer be heard otherwise.
        """
        with self._guard:
            if self._over:
                return
            self._over = why
            waiting, self._asked = list(self._asked.values()), {}
        self._over = why = why + words()
        for _, answer in waiting:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error(why))
