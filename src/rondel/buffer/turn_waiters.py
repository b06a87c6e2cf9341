"""Those who wait for a turn in a buffer. What may have made someone ready wakes the first to come of its kind."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from rondel.core.events import stalled_error
from rondel.core.schedule_gate import ScheduleGate


class TurnWaiters:
    """
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
