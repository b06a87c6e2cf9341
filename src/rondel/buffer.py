"""Between Filter and Train: admission, deadlines, refunds, the ledger. The only file that knows S.

    admit ──> waiting ──claim──> rolling ──put──> finished ──take──> taken ──settle──> trained
                                    └──drop──> filtered(rule) | failed(reason)   (the place is refunded)

P groups per step · S max_staleness · v version served (counts consumed batches) · open = waiting, rolling or finished
Admit while open < (S + 1)·P, less the places of the batch at v that are gone: those picked
so far, and all P once `take` has returned, even if it returned fewer. A group born at b
is trained at v <= b + S, so a batch is a
slot of P places before a deadline, and all deadlines can be kept as long as, for every
b, (open groups born at b or before) <=
P·(batches from now to b + S). `take` picks the oldest finished group whose absence from the
batches after it keeps this true: whoever is
slow is overtaken until its deadline, and then waited for. S = 0 makes every group due at
once, so synchronous training is a consequence.

X oversample > 0: admit X more, and take whoever has finished. Who would be older than S is late: at the advance of v
its place is refunded, and its task is lost (and counted), or asked again from the beginning.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from rondel.buffer_state import decode, encode
from rondel.core.errors import LawError, RewardError, UserError
from rondel.core.events import Admitted, Warned, emit, stalled_error
from rondel.core.protocols import BufferOrder
from rondel.core.types import Group, Slot, Task

LATE = "late"
SHORT = -1  # instead of a group's number: the batch stays as short as it is


class AnyOrder:
    """What happens in a buffer happens when it can."""

    def may_proceed(self, what: str, number: int) -> bool:
        return True

    def mark_done(self, what: str, number: int) -> None: ...

    def in_time(self, number: int) -> bool | None:
        return None


class Buffer:
    """All flow control of the system.

    groups_per_step  P, groups in one training step
    max_staleness    S, how many versions may pass between a group's admission and its training; 0 is synchronous
    window           at most so far past an unfinished group does `take` look, in admission numbers: 1 is
                     first in, first out. None: no limit
    oversample       X, groups begun beyond those of which each is certain to be trained in time
    retry            whether the task of a late group is asked again
    max_refills      a step gives up refilling after this many times P dropped groups
    patience         seconds without any change after which a wait is an error (law 10)
    order            asked before, told after whatever changes what a batch will be: it records the
                     order, or enforces a recorded one
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int = 0,
        window: int | None = None,
        oversample: int = 0,
        retry: bool = False,
        version: int = 0,
        max_refills: int = 20,
        patience: float = 1800.0,
        order: BufferOrder | None = None,
    ) -> None:
        if window is not None and not 1 <= window <= max_staleness * groups_per_step + 1:
            raise UserError(
                f"loop.window = {window}, but with max_staleness = {max_staleness} and groups_per_step = "
                f"{groups_per_step} "
                f"it must lie in [1, {max_staleness * groups_per_step + 1}]; leave it at 'auto'"
            )
        self.groups_per_step, self.max_staleness, self.window = groups_per_step, max_staleness, window
        self.version, self.max_refills, self.patience = version, max_refills, patience
        self.oversample, self.retry = oversample, retry
        self.order: BufferOrder = order or AnyOrder()
        self.admitted = 0  # also the next admission number
        self.refunded = 0
        self.trained = 0
        self.retried = 0
        self.filtered: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.details: dict[str, str] = {}  # the last message of each reason to fail
        self._waiting: deque[Slot] = deque()
        self._rolling: dict[int, Slot] = {}
        self._finished: dict[int, Group] = {}
        self._taken: dict[int, Group] = {}
        self._batch_complete = False  # take() has returned the batch of this version
        self._open: dict[int, int] = {}  # waiting, rolling or finished: number -> born
        self._births: Counter[int] = Counter()  # of those
        self._head = 0  # no open number is less
        self._ripe: list[int] = []  # the finished numbers, as a heap; some are taken already
        self._dropped_since_take = 0
        self._closed = False
        self._changes = 0
        self._asleep: dict[str, OrderedDict[asyncio.Future[None], None]] = {
            who: OrderedDict() for who in ("feed", "roll", "learner", "late")
        }

    @property
    def max_open_groups(self) -> int:
        """How many groups can be written at once."""
        return (self.max_staleness + 1) * self.groups_per_step + self.oversample

    # -- the feed's side -------------------------------------------------------------------------

    def has_room(self) -> bool:
        gone = self.groups_per_step if self._batch_complete else len(self._taken)
        limit = (self.max_staleness + 1) * self.groups_per_step + self.oversample - gone
        return len(self._open) < limit and not self._is_exhausted()

    async def wait_for_room(self) -> None:
        """Wait until the inequality holds."""
        await self._wait_until(self.has_room, who="feed", waits_for="room in the buffer")

    async def admit(self, task: Task) -> Slot:
        """Wait until the inequality holds, then give the task its number and its birth version."""
        await self._take_turn(
            "admit", lambda: self.admitted if self.has_room() else None, who="feed", waits_for="room in the buffer"
        )
        return self._admit_task(task)

    def _admit_task(self, task: Task) -> Slot:
        slot = Slot(self.admitted, task, self.version)
        self.admitted += 1
        self._waiting.append(slot)
        self._record_opened(slot.number, slot.born)
        self._wake_one("roll")
        emit(Admitted(slot.number, task.id, slot.born))
        return slot

    async def close(self) -> None:
        """No more tasks will come: what is in flight is finished, and the last batch may be short."""
        await self._take_turn("close", lambda: self.admitted, who="feed")
        self._closed = True
        self._wake_all("roll")
        self._wake_one("learner")

    # -- the rollouts' side ----------------------------------------------------------------------

    async def claim(self) -> Slot | None:
        """The next slot to work on; None once the tasks have ended."""

        def first_waiting() -> int | None:
            return self._waiting[0].number if self._waiting else SHORT if self._closed else None

        if await self._take_turn("claim", first_waiting, who="roll", waits_for="a task") == SHORT:
            return None
        slot = self._waiting.popleft()
        self._rolling[slot.number] = slot
        return slot

    async def put(self, slot: Slot, group: Group) -> None:
        await self._take_turn("put", lambda: slot.number, who="roll")
        self._leave_rolling(slot)
        if self._is_late(slot.born):
            return self._refund_slot(slot)
        self._finished[slot.number] = group
        heapq.heappush(self._ripe, slot.number)
        self._wake_one("learner")

    async def drop(self, slot: Slot, reason: str, *, failed: bool = False) -> None:
        """The group ends here; its place is refunded, so the feed admits another task."""
        await self._take_turn("drop", lambda: slot.number, who="roll")
        self._leave_rolling(slot)
        if self._is_late(slot.born):
            return self._refund_slot(slot)
        self._record_closed(slot.number)
        (self.failed if failed else self.filtered)[reason] += 1
        self.refunded += 1
        self._dropped_since_take += 1
        self._wake_one("feed")
        self._wake_one("learner")

    async def in_time(self, slot: Slot, attempt: Callable[[Slot], Awaitable[Group]]) -> Group:
        """What comes of the attempt; a group without trajectories as soon as it would be late. A
        recorded order says which of the two it was.
        """
        if (known := self.order.in_time(slot.number)) is not None:
            if known:
                return await attempt(slot)
            await self.take_turn("late", slot.number, who="late")
            return Group(slot.number, slot.task, [], slot.born)
        rolling, late = asyncio.ensure_future(attempt(slot)), asyncio.ensure_future(self._until_late(slot))
        try:
            await asyncio.wait([rolling, late], return_when=asyncio.FIRST_COMPLETED)
            if rolling.done():
                return rolling.result()
        finally:
            for each in (rolling, late):
                each.cancel()
        await self.take_turn("late", slot.number, who="late")
        return Group(slot.number, slot.task, [], slot.born)

    async def _until_late(self, slot: Slot) -> None:
        await self._wait_until(lambda: self._is_late(slot.born), who="late", waits_for="the end of its time")

    def _is_late(self, born: int) -> bool:
        return self.oversample > 0 and self.version - born > self.max_staleness

    def _refund_slot(self, slot: Slot) -> None:
        """Its place is refunded, and taken again at once if its task is asked again: its
        number, and so its noise, is a new one.
        """
        self._record_closed(slot.number)
        self.filtered[LATE] += 1
        self.refunded += 1
        if self.retry:
            self.retried += 1
            self._admit_task(slot.task)
        self._wake_one("feed")
        self._wake_one("learner")

    def _leave_rolling(self, slot: Slot) -> None:
        if self._rolling.pop(slot.number, None) is None:
            raise LawError(f"group {slot.number} was given back, but nobody had claimed it")

    # -- the learner's side ----------------------------------------------------------------------

    async def take(self) -> list[Group]:
        """The next P groups that finish, as far as the deadlines of the others allow; fewer
        only at the end or when refills ran out.
        """
        if self._taken:
            raise LawError("take() before the groups of the last step were settled")
        picked: list[Group] = []
        while len(picked) < self.groups_per_step:
            number = await self._take_turn("pick", self._next_finished, who="learner", waits_for="finished groups")
            if number == SHORT:
                break
            self._record_closed(number)
            picked.append(self._taken.setdefault(number, self._finished.pop(number)))
        self._explain_short(picked)
        self._batch_complete = True  # a short batch leaves its other places empty: whoever took them would be late
        self._dropped_since_take = 0
        picked.sort(key=lambda group: group.id)  # a batch does not depend on who ended first
        for group in picked:
            if self.version - group.born > self.max_staleness:
                raise LawError(
                    f"group {group.id} is {self.version - group.born} versions old; at most {self.max_staleness} are "
                    f"allowed (loop.max_staleness)"
                )
        return picked

    def settle_groups(self, *, failed: str = "") -> None:
        """Book the taken groups: trained, or failed for the given reason. Nobody is woken, nothing is admitted.

        A failed batch was consumed all the same, so its places are not refunded: v counts batches.
        """
        if failed:
            self.failed[failed] += len(self._taken)
        else:
            self.trained += len(self._taken)
        self._taken.clear()
        self.check_ledger()

    async def advance(self, version: int) -> None:
        """`version` serves from now on: room appears, the feed wakes, and who is late by now goes."""
        await self._take_turn("advance", lambda: version, who="learner")
        self.version, self._batch_complete = version, False
        self._lose_late()
        self._wake_one("feed")
        self._wake_all("late")

    def _lose_late(self) -> None:
        late = [slot for slot in self._waiting if self._is_late(slot.born)]
        late += [Slot(n, group.task, group.born) for n, group in self._finished.items() if self._is_late(group.born)]
        for slot in sorted(late, key=lambda slot: slot.number):
            if self._finished.pop(slot.number, None) is None:
                self._waiting.remove(slot)
            self._refund_slot(slot)

    def _next_finished(self) -> int | None:
        """The oldest finished group, unless a place must be kept for older ones that have not
        finished; SHORT if none will come for this step.
        """
        while self._ripe and self._ripe[0] not in self._finished:
            heapq.heappop(self._ripe)
        if not self._ripe:
            return SHORT if self._is_drained() else None
        number = self._ripe[0]
        if self.oversample:
            return number
        while self._head not in self._open:
            self._head += 1
        if self.window is not None and number >= self._head + self.window:
            return None
        left, older = self.groups_per_step - len(self._taken) - 1, 0
        for born in sorted(self._births):
            if born >= self._open[number]:
                break
            older += self._births[born]
            if older > left + (born + self.max_staleness - self.version) * self.groups_per_step:
                return None
        return number

    def _record_opened(self, number: int, born: int) -> None:
        self._open[number] = born
        self._births[born] += 1

    def _record_closed(self, number: int) -> None:
        born = self._open.pop(number)
        self._births[born] -= 1
        if not self._births[born]:
            del self._births[born]

    def _is_exhausted(self) -> bool:
        return self._dropped_since_take > self.max_refills * self.groups_per_step

    def _is_drained(self) -> bool:
        """Nothing more will come for this step."""
        return (self._closed or self._is_exhausted()) and not self._waiting and not self._rolling and not self._finished

    def _explain_short(self, picked: list[Group]) -> None:
        if not self._is_exhausted():
            return
        reasons = ", ".join(f"{n} {r}" for r, n in (self.filtered + self.failed).most_common(3))
        if not picked and self.failed.total() > self.filtered.total():
            reason = self.failed.most_common(1)[0][0]
            raise RewardError(
                f"no group survived, because too few answers have a score: {self._dropped_since_take} were dropped in "
                f"one step ({reasons}); the last one said: "
                f"{self.details.get(reason) or reason}. Mend the reward or the environment (`rondel check RUN.toml` "
                f"tries it), and give the same "
                "command again"
            )
        if not picked:
            raise UserError(
                f"no group survived the filters: {self._dropped_since_take} were dropped in one step ({reasons}). There "
                f"is no signal to train on: "
                "try an easier task or a larger group_size; `rondel check` measures how many groups have mixed rewards"
            )
        emit(
            Warned(
                f"a short batch of {len(picked)} groups: {self._dropped_since_take} were dropped in one step ({reasons})"
            )
        )

    # -- the ledger ------------------------------------------------------------------------------

    def ledger(self) -> dict[str, int]:
        """Law 1: issued = trained + filtered + failed + in flight."""
        in_flight = len(self._waiting) + len(self._rolling) + len(self._finished) + len(self._taken)
        return {
            "issued": self.admitted,
            "trained": self.trained,
            "in_flight": in_flight,
            **{f"filtered/{rule}": n for rule, n in self.filtered.items()},
            **{f"failed/{reason}": n for reason, n in self.failed.items()},
        }

    def check_ledger(self) -> None:
        book = self.ledger()
        if 2 * book["issued"] != sum(book.values()):
            raise LawError(f"the ledger does not balance: {book}")

    def state_dict(self, version: int) -> dict[str, Any]:
        """What a resume needs, with `version` serving: finished groups whole, also those that a step
        has picked and not trained, unfinished ones as tasks that are started again."""
        unfinished = sorted([*self._waiting, *self._rolling.values()], key=lambda s: s.number)
        return {
            "version": version,
            "counts": [self.admitted, self.refunded, self.trained, self.retried],
            "filtered": dict(self.filtered),
            "failed": dict(self.failed),
            "unfinished": [asdict(s) for s in unfinished],
            "finished": [encode(group) for _, group in sorted((self._finished | self._taken).items())],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.version = state["version"]
        self.admitted, self.refunded, self.trained, self.retried = state["counts"]
        self.filtered, self.failed = Counter(state["filtered"]), Counter(state["failed"])
        self._waiting.extend(Slot(s["number"], Task(**s["task"]), s["born"]) for s in state["unfinished"])
        self._finished = {g.id: g for g in map(decode, state["finished"])}
        self._ripe = sorted(self._finished)
        for number, born in [(s.number, s.born) for s in self._waiting] + [
            (g.id, g.born) for g in self._finished.values()
        ]:
            self._record_opened(number, born)
        self._head = min(self._open, default=self.admitted)
        self._lose_late()  # the checkpoint was written before the advance
        self.check_ledger()

    # -- waiting ---------------------------------------------------------------------------------

    async def take_turn(self, what: str, number: int, *, who: str) -> None:
        """Something that changes nothing here has its place in the order, too."""
        await self._take_turn(what, lambda: number, who=who)

    async def _take_turn(
        self, what: str, ready: Callable[[], int | None], *, who: str, waits_for: str = "its turn"
    ) -> int:
        """Until `ready` gives a number and the order allows it. -> the number.  What is in order
        waits for what was before it, whoever does that.
        """

        def is_turn() -> bool:
            return (number := ready()) is not None and self.order.may_proceed(what, number)

        await self._wait_until(is_turn, who=who, waits_for=waits_for)
        number = ready()
        assert number is not None
        self.order.mark_done(what, number)
        if not isinstance(self.order, AnyOrder):
            asyncio.get_running_loop().call_soon(self._wake_all, *self._asleep)
        return number

    async def _wait_until(self, ready: Callable[[], object], *, who: str, waits_for: str) -> None:
        """What may have made it ready wakes one of those who wait for it, the first to come; the others sleep on."""
        seen, asleep = self._changes, self._asleep[who]
        while not ready():
            woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            asleep[woken] = None
            try:
                async with asyncio.timeout(self.patience):  # wait_for may swallow a cancellation on Python 3.11
                    await woken
            except TimeoutError as error:
                if self._changes != seen:
                    seen = self._changes
                    continue
                rolling = sorted(self._rolling)
                raise stalled_error(
                    f"{who} waits for {waits_for} since {self.patience:.0f} s without any change; "
                    f"{len(self._waiting)} tasks unclaimed, rolling {rolling[:8]}, {len(self._finished)} finished, version {self.version}"
                ) from error
            except asyncio.CancelledError:
                if woken.done() and not woken.cancelled():
                    self._wake_one(who)  # what it was woken for is another one's now
                raise
            finally:
                asleep.pop(woken, None)

    def _wake_all(self, *names: str) -> None:
        for who in names:
            for _ in range(len(self._asleep[who])):
                self._wake_one(who)

    def _wake_one(self, who: str) -> None:
        self._changes += 1
        asleep = self._asleep[who]
        while asleep:
            woken, _ = asleep.popitem(last=False)
            if not woken.done():
                woken.set_result(None)
                return
