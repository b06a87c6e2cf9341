"""Flow control of a buffer: who is admitted, who may be picked and who is late, and how the others wait for their turn.

The rule is arithmetic on values and never waits. What may have made someone ready wakes the first to come of its kind.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rondel.core.errors import LawError, UserError
from rondel.core.events import stalled_error
from rondel.core.schedule_gate import ScheduleGate
from rondel.core.types import Group, Slot

if TYPE_CHECKING:
    from rondel.buffer.groups import OpenGroups

SHORT = -1  # instead of a group's number: the batch stays as short as it is


@dataclass(frozen=True, slots=True)
class AdmissionRule:
    """`AdmissionRule(groups_per_step=4, max_staleness=1)`: at most 8 groups are open at once.

    groups_per_step, max_staleness, window, oversample, max_refills: see `Buffer`
    """

    groups_per_step: int
    max_staleness: int = 0
    window: int | None = None
    oversample: int = 0
    max_refills: int = 20

    def __post_init__(self) -> None:
        widest = self.max_staleness * self.groups_per_step + 1
        if self.window is not None and not 1 <= self.window <= widest:
            raise UserError(
                f"loop.window = {self.window}, but with max_staleness = {self.max_staleness} and groups_per_step = "
                f"{self.groups_per_step} it must lie in [1, {widest}]; leave it at 'auto'"
            )

    @property
    def max_open_groups(self) -> int:
        """How many groups can be written at once."""
        return (self.max_staleness + 1) * self.groups_per_step + self.oversample

    def is_late(self, born: int, version: int) -> bool:
        return self.oversample > 0 and version - born > self.max_staleness

    def is_exhausted(self, dropped: int) -> bool:
        """Whether a step has dropped so many groups that it is refilled no more."""
        return dropped > self.max_refills * self.groups_per_step

    def may_pick(self, number: int, groups: OpenGroups, version: int) -> bool:
        """Whether this finished group can go into the batch at `version`
        and every older one still keeps its deadline."""
        if self.oversample:
            return True
        if self.window is not None and number >= groups.first_open() + self.window:
            return False
        left, older = self.groups_per_step - len(groups.taken) - 1, 0
        for born in sorted(groups.births):
            if born >= groups.born[number]:
                break
            older += groups.births[born]
            if older > left + (born + self.max_staleness - version) * self.groups_per_step:
                return False
        return True

    def next_pick(self, groups: OpenGroups, version: int, *, ended: bool) -> int | None:
        """The oldest finished group, unless a place must be kept for older ones that have not finished; SHORT if none
        will come for this step. `ended`: nothing more is admitted.
        """
        if (number := groups.oldest_finished()) is None:
            return SHORT if ended and groups.are_all_taken else None
        return number if self.may_pick(number, groups, version) else None

    def remove_late(self, groups: OpenGroups, version: int) -> list[Slot]:
        """Those that nobody works on, taken out; they are still open."""
        return groups.remove_idle(lambda born: self.is_late(born, version))

    def check_lag(self, picked: list[Group], version: int) -> None:
        for group in picked:
            if version - group.born > self.max_staleness:
                raise LawError(
                    f"group {group.id} is {version - group.born} versions old; at most {self.max_staleness} are "
                    f"allowed (loop.max_staleness)"
                )


class TurnWaiters:
    """Those who wait for a turn in a buffer.

    patience  seconds without any change after which a wait is an error (law 10)
    describe  how the buffer stands, for that error
    asleep    who -> those of this kind that wait, in the order of arrival
    """

    def __init__(self, patience: float, describe: Callable[[], str]) -> None:
        self.patience, self._describe = patience, describe
        self._changes = 0
        self.asleep: dict[str, OrderedDict[asyncio.Future[None], None]] = {
            who: OrderedDict() for who in ("feed", "roll", "learner", "late")
        }

    async def take_turn(
        self, what: str, ready: Callable[[], int | None], *, who: str, waits_for: str = "its turn"
    ) -> int:
        """Until `ready` gives a number. -> the number."""
        await self.wait_until(lambda: ready() is not None, who=who, waits_for=waits_for)
        number = ready()
        assert number is not None
        return number

    async def pass_gate(self, what: str, number: int, *, who: str) -> None:
        """What needs nothing but its place in the order, and here there is none."""

    def ended_in_time(self, number: int) -> bool | None:
        """Whether this group ended in time, or was given up as late. None: the clock decides."""
        return None

    async def wait_until(self, ready: Callable[[], object], *, who: str, waits_for: str) -> None:
        seen, asleep = self._changes, self.asleep[who]
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
                raise stalled_error(
                    f"{who} waits for {waits_for} since {self.patience:.0f} s without any change; {self._describe()}"
                ) from error
            except asyncio.CancelledError:
                if woken.done() and not woken.cancelled():
                    self.wake_one(who)  # what it was woken for is another one's now
                raise
            finally:
                asleep.pop(woken, None)

    def wake_all(self, *names: str) -> None:
        for who in names:
            for _ in range(len(self.asleep[who])):
                self.wake_one(who)

    def wake_one(self, who: str) -> None:
        self._changes += 1
        asleep = self.asleep[who]
        while asleep:
            woken, _ = asleep.popitem(last=False)
            if not woken.done():
                woken.set_result(None)
                return


class ScheduledWaiters(TurnWaiters):
    """The same in the order of a schedule.

    gate    asked before, told after whatever changes what a batch will be
    """

    def __init__(self, gate: ScheduleGate, patience: float, describe: Callable[[], str]) -> None:
        super().__init__(patience, describe)
        self.gate = gate

    async def take_turn(
        self, what: str, ready: Callable[[], int | None], *, who: str, waits_for: str = "its turn"
    ) -> int:
        """Until `ready` gives a number and the schedule allows it. -> the number.  What is in order
        waits for what was before it, whoever does that.
        """

        def find_turn() -> int | None:
            number = ready()
            return number if number is not None and self.gate.may_proceed(what, number) else None

        number = await super().take_turn(what, find_turn, who=who, waits_for=waits_for)
        self.gate.mark_done(what, number)
        asyncio.get_running_loop().call_soon(self.wake_all, *self.asleep)
        return number

    async def pass_gate(self, what: str, number: int, *, who: str) -> None:
        """As soon as the schedule allows it."""
        await self.take_turn(what, lambda: number, who=who)

    def ended_in_time(self, number: int) -> bool | None:
        return self.gate.in_time(number)


def make_waiters(gate: ScheduleGate | None, patience: float, describe: Callable[[], str]) -> TurnWaiters:
    """Those of a schedule where one is kept."""
    if gate is None or not gate.keeps_order:
        return TurnWaiters(patience, describe)
    return ScheduledWaiters(gate, patience, describe)
