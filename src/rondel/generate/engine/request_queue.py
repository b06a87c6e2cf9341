"""Requests that wait for a replica, first come first served; each goes where its prompt, or the beginning of it, lies
already.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from rondel.core.errors import EngineError
from rondel.generate.engine.prompt_locations import PromptLocations
from rondel.generate.engine.replica_fleet import EngineReplica, ReplicaFleet

REMEMBERED = 10_000  # groups whose replica is known
TOKENS_A_REQUEST = 64  # of a prompt: as many are computed again rather than that one replica has a request more


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """A request's place in the queue; what it waits for is a replica, or None when everything is aborted."""

    group: Any
    scope: Hashable  # under which weights it is computed
    tokens: Sequence[int]
    place: asyncio.Future[EngineReplica | None]


class RequestQueue:
    """
    cap   how many requests a replica may have now
    lean  by how many requests a replica may be ahead of the least loaded one before its groups go elsewhere
    """

    def __init__(self, fleet: ReplicaFleet, *, cap: Callable[[], int], lean: int) -> None:
        self.fleet, self._cap, self.lean = fleet, cap, lean
        self.locations: PromptLocations[EngineReplica] = PromptLocations()
        self._homes: OrderedDict[Any, EngineReplica] = OrderedDict()
        self._queue: deque[QueuedRequest] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    async def acquire_replica(
        self, group: Any, scope: Hashable, tokens: Sequence[int], *, first: bool
    ) -> EngineReplica | None:
        """A replica with room, whose load already counts this request. `first`: it had one before."""
        self.fleet.refuse_if_deserted()
        mine = QueuedRequest(group, scope, tokens, asyncio.get_running_loop().create_future())
        self._queue.appendleft(mine) if first else self._queue.append(mine)
        self.assign_requests()
        try:
            return await mine.place
        except asyncio.CancelledError:
            if mine in self._queue:
                self._queue.remove(mine)
            elif (
                mine.place.done()
                and not mine.place.cancelled()
                and not mine.place.exception()
                and (got := mine.place.result())
            ):
                self.release_replica(got)
            raise

    def release_replica(self, replica: EngineReplica) -> None:
        replica.load -= 1
        self.assign_requests()

    def assign_requests(self) -> None:
        """Give out what room there is, in the order of the queue."""
        while self._queue and (replica := self._choose_replica(self._queue[0])):
            mine = self._queue.popleft()
            if not mine.place.done():
                replica.load += 1
                self.locations.record(mine.scope, mine.tokens, replica)
                mine.place.set_result(replica)

    def _choose_replica(self, mine: QueuedRequest) -> EngineReplica | None:
        """That of its group; of a group without one, the replica that knows most
        of its prompt for what it has to do."""
        able = [r for r in self.fleet.healthy if not r.leaving and r.load < self._cap()]
        if not able:
            return None
        least, home = min(able, key=lambda r: r.load), self._homes.get(mine.group)
        if home in able:
            chosen = home if home.load < least.load + self.lean else least
        elif home is not None and self.fleet.is_member(home) and not (home.leaving or home.fault):
            chosen = least  # it is full
        else:
            known = self.locations.known_tokens(mine.scope, mine.tokens)
            chosen = max(able, key=lambda r: known.get(r, 0) - TOKENS_A_REQUEST * r.load)
            self._homes[mine.group] = chosen
        self._homes.move_to_end(mine.group)
        while len(self._homes) > REMEMBERED:
            self._homes.popitem(last=False)
        return chosen

    def abort_all(self) -> None:
        for mine in self._queue:
            if not mine.place.done():
                mine.place.set_result(None)
        self._queue.clear()

    def fail_all(self, error: EngineError) -> None:
        """Nobody is left to serve those who wait."""
        for mine in self._queue:
            if not mine.place.done():
                mine.place.set_exception(error)
        self._queue.clear()
