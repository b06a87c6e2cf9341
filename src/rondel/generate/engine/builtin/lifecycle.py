"""State of an engine: what it may do now, for how long it may stand still, and the task in which it moves.

serving ──pause──> held ──sleep──> asleep        a failed update or step: refusing, until a good update
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import get_args

from rondel.core.errors import EngineError, UserError
from rondel.core.events import Warned, emit
from rondel.core.protocols import Interrupt


class EngineLifecycle:
    """
    version     the weights that serve
    broken      why it refuses; "" if it does not
    held        requests are parked
    admits      False while it drains: what has begun ends, nothing new begins
    asleep      memory tags given back
    overwrites  whether an update is writing over the weights
    """

    def __init__(self, version: int, overwrites: Callable[[], bool]) -> None:
        self.version = version
        self.broken = ""
        self.held = False
        self.admits = True
        self.asleep: set[str] = set()
        self.overwrites = overwrites
        self._lease: asyncio.TimerHandle | None = None

    @property
    def state(self) -> str:
        if self.broken:
            return "refusing"
        if self.asleep:
            return "asleep"
        return "held" if self.held or self.overwrites() else "serving"

    def refuse_if_broken(self) -> None:
        if self.broken:
            raise EngineError(f"the engine refuses to generate until a good update: {self.broken}")

    async def hold(self, how: Interrupt, stop: Callable[[], Awaitable[None]], wake: Callable[[], None]) -> None:
        """Held as soon as `stop` has seen the step under way end, and with drain those that have begun. A
        hold that was cut off holds nobody.
        """
        before, self.held = self.held, self.held or how != "drain"
        self.admits = how != "drain"
        try:
            await stop()
            before = self.held = True
        finally:
            self.held, self.admits = before, True
            wake()

    def begin_lease(self, seconds: float, wake: Callable[[], None]) -> None:
        """Held for at most so long; then whoever waits goes on."""
        if seconds != float("inf"):
            self._lease = asyncio.get_running_loop().call_later(seconds, self._release, seconds, wake)

    def end_lease(self) -> None:
        if self._lease is not None:
            self._lease.cancel()
        self._lease = None

    def _release(self, seconds: float, wake: Callable[[], None]) -> None:
        self._lease, self.held = None, False
        emit(
            Warned(
                f"the engine was paused for {seconds:g} s and nobody resumed it; it is {self.state} again at version "
                f"{self.version}"
            )
        )
        wake()


class StepTask(ABC):
    """The steps of an engine, in a task that lives while there is one to take.

    spends  is told what its time goes into from now on: `TimeAccount.switch_to`
    """

    def __init__(self, lifecycle: EngineLifecycle, spends: Callable[[str], None]) -> None:
        self.lifecycle, self._spends = lifecycle, spends
        self._task: asyncio.Task[None] | None = None

    @property
    @abstractmethod
    def _may_step(self) -> bool: ...

    @abstractmethod
    async def _step_until_done(self) -> None:
        """Step until nothing is left or a pause arrives."""

    @property
    def has_stopped(self) -> bool:
        return self._task is None

    def wake_up(self) -> None:
        """There may be something to do."""
        if self._task is None and self._may_step:
            self._task = asyncio.create_task(self._step_until_done(), name="engine")
        self.update_account()

    def update_account(self) -> None:
        """`held` is a wait for the trainer or an update, `idle` one for whoever asks."""
        state = self.lifecycle.state
        self._spends("generate" if self._task is not None else {"serving": "idle"}.get(state, state))

    async def wait_for_task(self) -> None:
        """Unlike awaiting the task, this leaves its step alone if the caller gives up."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def wait_until_stopped(self) -> None:
        """Until nothing moves: what a hold waits for."""
        while not self.has_stopped:
            await self.wait_for_task()


def check_interrupt(how: str) -> None:
    """UserError for what no engine knows."""
    if how not in get_args(Interrupt):
        raise UserError(f"pause('{how}'): it is one of {', '.join(get_args(Interrupt))}")
