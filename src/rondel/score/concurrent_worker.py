"""One worker process that serves many calls at once: for rewards that wait on a network, or that compute in batches.

score ──> outbox ──stdin──> worker: an event loop with `together` calls open     every second a sign of life ──stdout──> here

Early calls are about answers that are still being written. Nobody waits for their reply: one that is lost is not
asked again, and none is sent while a suspect is alone.

A call's own clock runs in the worker. Here only silence is timed: a worker whose loop
stands still is killed. Whoever was in it is asked again, alone, so that the one that
does it is found and nobody else pays.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pickle
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rondel.core.clocks import poll_until, running_time
from rondel.core.errors import ConfigError
from rondel.core.types import Failed, Score, Task, Trajectory
from rondel.score.jobs import EarlyJob, OrderJob, ScoreJob
from rondel.score.killable_process import Asked, Result, RewardProcess, read_reply, without_arrays

GRACE = 5.0  # seconds beside the timeout that a silent worker has


@dataclass(eq=False)
class Open:
    number: int
    job: bytes
    answer: asyncio.Future[Result]
    suspect: bool = False  # it was open when a worker ended
    order: bool = False  # to the worker itself
    early: bool = False  # about an answer that is still being written

    def deliver_result(self, result: Result) -> None:
        def resolve_answer() -> None:
            if not self.answer.done():
                self.answer.set_result(result)

        with suppress(RuntimeError):  # its loop has ended, and nobody waits in it
            self.answer.get_loop().call_soon_threadsafe(resolve_answer)


@dataclass
class ConcurrentWorker:
    """The parent's end. `hire` and `dismiss` are the pool's; everything but `ask` runs in one thread."""

    worker: RewardProcess | None
    hire: Callable[[], RewardProcess]
    dismiss: Callable[[RewardProcess], None]
    together: int
    silence: float
    counts: dict[str, float] = field(default_factory=dict)  # what the reward says of itself, so far
    warnings: list[str] = field(default_factory=list)  # what it wants the run to hear
    closed: bool = False
    pending: int = 0
    asleep: bool = False  # what a worker that naps was told last
    memory: int = 0  # bytes that it has on a device of others

    def __post_init__(self) -> None:
        self._lock, self._serving = threading.Lock(), False
        self._numbers = itertools.count()
        self._waiting: deque[Open] = deque()
        self._orders: deque[Open] = deque()  # before all that wait, however many are open
        self._early: deque[Open] = deque()
        self._before: dict[str, float] = {}  # counts of the workers that ended
        self._bell, self._button = socket.socketpair()
        self._button.setblocking(False)

    async def request_score(
        self, asked: Asked, task: Task, threads: ThreadPoolExecutor, episode: int | None = None
    ) -> Result:
        number = next(self._numbers)
        try:
            job = pickle.dumps(ScoreJob(number, without_arrays(asked), task, episode))
        except Exception as error:  # pickle raises what the object's own code raises
            return Failed("task cannot be sent", f"task {task.id}: {type(error).__name__}: {error}")
        call = Open(number, job, asyncio.get_running_loop().create_future())
        self._enqueue_call(self._waiting, call, threads)
        self.pending += 1
        try:
            return await call.answer
        finally:
            self.pending -= 1

    async def precompute(
        self, episode: int, trajectory: Trajectory, task: Task, unfinished: bool, threads: ThreadPoolExecutor
    ) -> bool:
        """The steps of an answer that is still being written. -> whether they were valued."""
        number = next(self._numbers)
        try:
            job = pickle.dumps(EarlyJob(number, episode, trajectory, task, unfinished))
        except Exception:  # the call that needs the result will say so
            return False
        call = Open(number, job, asyncio.get_running_loop().create_future(), early=True)
        self._enqueue_call(self._early, call, threads)
        return isinstance(await call.answer, Score)

    async def send_order(self, verb: str, threads: ThreadPoolExecutor) -> Result:
        """ "sleep" or "wake": done when the answer is there, also by a worker that is hired meanwhile."""
        self.asleep = verb == "sleep"
        return await self._order(verb, (), threads)

    def forget(self, episode: int, threads: ThreadPoolExecutor) -> None:
        """Nobody will ask for the score of this episode."""
        if not self.closed:
            self._order("forget", (episode,), threads)

    def _order(self, verb: str, given: tuple[int, ...], threads: ThreadPoolExecutor) -> asyncio.Future[Result]:
        number = next(self._numbers)
        job = pickle.dumps(OrderJob(number, verb, given))
        call = Open(number, job, asyncio.get_running_loop().create_future(), order=True)
        self._enqueue_call(self._orders, call, threads)
        return call.answer

    def _enqueue_call(self, queue: deque[Open], call: Open, threads: ThreadPoolExecutor) -> None:
        with self._lock:
            queue.append(call)
            start, self._serving = not self._serving, True
        if start:
            threads.submit(self._serve_calls)
        else:
            self._notify_loop()

    def _notify_loop(self) -> None:
        with suppress(OSError):  # full: it will look anyway
            self._button.send(b"!")

    # -- in the pool's thread ----------------------------------------------------------------------

    def _serve_calls(self) -> None:
        """Until nothing waits and nothing is open."""
        opened: dict[int, Open] = {}
        while True:
            with self._lock:
                if not self._waiting and not self._orders and not self._early and not opened:
                    self._serving = False
                    return
            try:
                self._exchange_messages(opened)
            except (ConfigError, OSError) as error:
                self._handle_lost_worker(
                    opened, Failed("worker did not start", str(error)) if self.worker is None else None
                )
            except Exception as error:  # ours: nobody may wait for ever
                self._handle_lost_worker(opened, Failed("pool broke", f"{type(error).__name__}: {error}"))

    def _exchange_messages(self, opened: dict[int, Open]) -> None:
        """Jobs there and replies back, until both are empty or the worker is lost."""
        # it ended between two calls: no reward's fault
        if self.worker and self.worker.process.poll() is not None and not opened:
            self.dismiss(self.worker)
            self.worker = None
        if self.worker is None:
            self.worker = self.hire()
            self.memory = self.worker.memory
        worker = self.worker
        assert worker.process.stdin and worker.process.stdout
        there, back, bell = worker.process.stdin.fileno(), worker.process.stdout.fileno(), self._bell.fileno()
        outbox, said, heard = memoryview(b""), b"", running_time()
        while not self.closed:
            for call in self._take_ready_calls(opened):
                if not opened:
                    heard = running_time()
                opened[call.number] = call
                outbox = memoryview(bytes(outbox) + call.job)
            if not opened:
                return
            poll = select.poll()
            poll.register(back, select.POLLIN)
            poll.register(bell, select.POLLIN)
            if outbox:
                poll.register(there, select.POLLOUT)
            ready = poll_until(poll, heard + self.silence)
            if not ready:
                return self._handle_lost_worker(
                    opened,
                    Failed("timeout", f"the reward's process said nothing for {self.silence:g} s; it was killed"),
                )
            if bell in ready:
                self._bell.recv(1 << 16)
            if there in ready:
                outbox = outbox[os.write(there, outbox[: select.PIPE_BUF]) :]
            if back in ready:
                piece, heard = os.read(back, 1 << 16), running_time()
                if not piece:
                    return self._handle_lost_worker(opened, Failed("worker died", worker.last_words()))
                *lines, said = (said + piece).split(b"\n")
                for line in lines:
                    self._read_reply(json.loads(line), opened)
        self._handle_lost_worker(opened, Failed("pool closed"), finally_=True)

    def _take_ready_calls(self, opened: dict[int, Open]) -> list[Open]:
        """Who may be sent now: at most `together`, and a suspect only alone."""
        found: list[Open] = []
        with self._lock:
            calls = sum(not call.order and not call.early for call in opened.values())
            while self._waiting and calls + len(found) < self.together:
                alone = self._waiting[0].suspect or any(call.suspect for call in (*opened.values(), *found))
                if alone and (found or any(not call.order for call in opened.values())):
                    break
                call = self._waiting.popleft()
                if not call.answer.cancelled():
                    found.append(call)
            orders, self._orders = list(self._orders), deque()
            early = self._take_early(opened, [*found, *self._waiting])
        return [*orders, *early, *found]

    def _take_early(self, opened: dict[int, Open], calls: list[Open]) -> list[Open]:
        """Those that may be sent now: none beside a suspect, and none that nobody wants any more."""
        if any(call.suspect for call in (*opened.values(), *calls)):
            return []
        found: list[Open] = []
        places = self.together - sum(call.early for call in opened.values())
        while self._early and len(found) < places:
            call = self._early.popleft()
            if not call.answer.cancelled():
                found.append(call)
        return found

    def _read_reply(self, reply: dict[str, Any], opened: dict[int, Open]) -> None:
        if counts := reply.pop("counts", None):
            self.counts = {name: self._before.get(name, 0) + value for name, value in counts.items()}
        if warned := reply.pop("warned", ""):
            self.warnings.append(warned)
        self.memory = reply.pop("memory", self.memory)
        call = opened.pop(reply.pop("number", -1), None)
        if call:
            call.deliver_result(read_reply(reply))

    def _handle_lost_worker(self, opened: dict[int, Open], failed: Failed | None, *, finally_: bool = False) -> None:
        """The worker is gone: one that was alone in it is to blame, several are asked again one by one."""
        if self.worker is not None:
            self.dismiss(self.worker)
            self.worker = None
        self._before = dict(self.counts)
        calls = [call for call in opened.values() if not call.order and not call.early]
        orders = [call for call in opened.values() if call.order]
        early = [call for call in opened.values() if call.early]
        opened.clear()
        hopeless = finally_ or (failed is not None and failed.reason in ("worker did not start", "pool broke"))
        with self._lock:
            if finally_ or (not calls and (hopeless or not early)):
                calls += self._waiting
                self._waiting.clear()
            if hopeless:
                calls += [*orders, *self._orders]
                self._orders.clear()
                early += self._early
                self._early.clear()
            else:
                self._orders.extendleft(reversed(orders))  # to the next worker, which may know already
        failed = failed or Failed("worker died")
        for call in early:
            call.deliver_result(failed)
        if hopeless or (len(calls) == 1 and not early):
            for call in calls:
                call.deliver_result(failed)
        else:
            for call in calls:
                call.suspect = True
            with self._lock:
                self._waiting.extendleft(reversed(calls))

    def close(self) -> None:
        self.closed = True
        self._notify_loop()
