"""Engines on a virtual clock. One replica is a server whose n requests all advance by a token
every beat(n) seconds: an event an answer, not a token.

progress   tokens that whoever has run from the beginning has now; a request that joins ends at progress + its length
debt       seconds of prefill that stand before the next token
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from rondel.core.errors import UserError


@dataclass(slots=True)
class Answers:
    """Those of one group that are still being written."""

    left: int
    done: asyncio.Future[None]


class SimulatedRequest(NamedTuple):
    length: float
    read: float  # tokens to prefill before it can go on
    of: Answers


@dataclass(slots=True)
class SimulatedReplica:
    """One engine. `slow`: how many times as long as others it takes."""

    pool: ReplicaPool
    slow: float = 1.0
    running: list[tuple[float, int, Answers]] = field(default_factory=list)
    waiting: deque[SimulatedRequest] = field(default_factory=deque)
    progress: float = 0.0
    debt: float = 0.0
    at: float = 0.0
    stopped: int = 0
    dead: bool = False
    place: int = 0
    filled: float = 0.0  # requests x tokens
    beats: float = 0.0  # tokens
    busy: float = 0.0  # seconds with anything to do
    timer: asyncio.TimerHandle | None = None

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)

    def submit_requests(self, wanted: list[SimulatedRequest]) -> None:
        self.catch_up()
        self.waiting.extend(wanted)
        self.pool.update_load(self)
        self.admit_requests()

    def catch_up(self) -> None:
        """Account for the time since the last look."""
        now = self.pool.clock.time()
        passed, self.at = now - self.at, now
        if self.stopped or not self.running:
            return
        self.busy += passed
        paid = min(self.debt, passed)
        self.debt -= paid
        tokens = (passed - paid) / (self.pool.beat[len(self.running)] * self.slow)
        self.progress += tokens
        self.beats += tokens
        self.filled += tokens * len(self.running)

    def admit_requests(self) -> None:
        """Fill the places, unless somebody waits for them to run empty."""
        while self.waiting and len(self.running) < self.pool.places and not self.pool.draining:
            length, read, of = self.waiting.popleft()
            self.debt += read * self.pool.prefill * self.slow
            self.pool.number += 1
            heapq.heappush(self.running, (self.progress + length, self.pool.number, of))
        self.arm_timer()

    def arm_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if self.running and not self.stopped:
            tokens = max(0.0, self.running[0][0] - self.progress)
            wait = self.debt + tokens * self.pool.beat[len(self.running)] * self.slow
            self.timer = self.pool.clock.call_at(self.at + wait, self.on_timer)

    def on_timer(self) -> None:
        self.timer = None
        self.catch_up()
        while self.running and self.running[0][0] <= self.progress + 1e-6:
            _, _, of = heapq.heappop(self.running)
            of.left -= 1
            if of.left == 0 and not of.done.done():
                of.done.set_result(None)
        self.pool.update_load(self)
        self.admit_requests()
        if not self.running:
            self.pool.notify_empty()

    def stop(self) -> None:
        self.catch_up()
        self.stopped += 1
        self.arm_timer()

    def resume_serving(self) -> None:
        self.catch_up()
        self.stopped -= 1
        self.admit_requests()

    def recompute_cache(self, prompt: float) -> None:
        """What is in flight lost its cache: about the middle of each answer is read again."""
        self.debt += (
            sum(prompt + max(0.0, end - self.progress) for end, _, _ in self.running) * self.pool.prefill * self.slow
        )

    def take_in_flight(self, prompt: float) -> list[SimulatedRequest]:
        """-> what was in flight, to go on elsewhere from the token where it was; what it had read
        is read again there.
        """
        self.catch_up()
        lost = [
            SimulatedRequest(max(1e-3, end - self.progress), prompt + max(0.0, end - self.progress), of)
            for end, _, of in self.running
        ]
        lost += self.waiting
        self.running, self.waiting, self.debt, self.dead = [], deque(), 0.0, True
        self.arm_timer()
        return lost


QUICKEST = 1e-7  # seconds of a token


class ReplicaPool:
    """All replicas. beat[n]: seconds of a token of n requests; prefill: seconds of a prompt's
    token; places: requests of a replica at once.
    """

    def __init__(
        self, replicas: int, *, places: int, beat: list[float], prefill: float, slow: tuple[float, float] = (0.0, 1.0)
    ) -> None:
        if min(beat[1:]) < QUICKEST:
            raise UserError(
                f"a token in {min(beat[1:]):.1g} s: no engine is that fast, and a virtual clock cannot tell such times "
                f"apart; look at the costs"
            )
        self.clock, self.places, self.beat, self.prefill = asyncio.get_running_loop(), places, beat, prefill
        self.number, self.draining = 0, False
        self._empty: asyncio.Future[None] | None = None
        late = round(slow[0] * replicas)
        self.replicas = [SimulatedReplica(self, slow[1] if i < late else 1.0) for i in range(replicas)]
        self.failures = 0
        # a heap of (load, replica); what no longer holds is passed over
        self._least = [(0.0, i) for i in range(replicas)]
        for i, replica in enumerate(self.replicas):
            replica.place = i

    async def generate_group(self, lengths: list[float], prompt: float) -> None:
        """A group: its answers are written together by the replica with the least to do, where its prompt is read once;
        of more answers than a replica has places, by as many replicas as they fill (generate/engine/router.py).
        """
        answers = Answers(len(lengths), self.clock.create_future())
        for first in range(0, len(lengths), self.places):
            part = lengths[first : first + self.places]
            self._assign_requests(
                [SimulatedRequest(length, prompt if i == 0 else 0.0, answers) for i, length in enumerate(part)]
            )
        await answers.done

    def _assign_requests(self, wanted: list[SimulatedRequest]) -> None:
        while True:
            load, i = heapq.heappop(self._least)
            if not (replica := self.replicas[i]).dead and load == replica.load * replica.slow:
                return replica.submit_requests(wanted)

    async def pause(self, how: str, prompt: float) -> None:
        """hold: all stand still.  drain: until nothing runs.  abort: as hold, and the cache is lost."""
        if how == "drain":
            self.draining = True
            while any(replica.running for replica in self.replicas):
                self._empty = self.clock.create_future()
                await self._empty
        for replica in self.replicas:
            replica.stop()
            if how == "abort":
                replica.recompute_cache(prompt)

    def resume(self) -> None:
        self.draining = False
        for replica in self.replicas:
            replica.resume_serving()

    def update_load(self, replica: SimulatedReplica) -> None:
        """Its load is another now."""
        heapq.heappush(self._least, (replica.load * replica.slow, replica.place))

    def restore_replica(self, replica: SimulatedReplica) -> None:
        replica.dead = False
        self.update_load(replica)

    def notify_empty(self) -> None:
        if self._empty is not None and not self._empty.done():
            self._empty.set_result(None)

    def fail_replica(self, which: int, prompt: float, back_in: float) -> None:
        replica = self.replicas[which]
        if replica.dead or sum(not each.dead for each in self.replicas) == 1:
            return
        self.failures += 1
        lost = replica.take_in_flight(prompt)
        self.clock.call_later(back_in, self.restore_replica, replica)
        for each in lost:
            self._assign_requests([each])
        if self.draining:
            self.notify_empty()

    def usage_totals(self) -> tuple[float, float, float]:
        """(requests x tokens, places x tokens, busy seconds) of all so far."""
        for replica in self.replicas:
            replica.catch_up()
            replica.arm_timer()
        filled = sum(replica.filled for replica in self.replicas)
        return (
            filled,
            self.places * sum(replica.beats for replica in self.replicas),
            sum(replica.busy for replica in self.replicas),
        )
