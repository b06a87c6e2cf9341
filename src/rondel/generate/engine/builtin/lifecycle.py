"""State of an engine: what it may do now, for how long it may stand still, the task in which it moves, and the update
that changes the weights that it serves: begin -> route -> commit, or abort.

serving ──pause──> held ──sleep──> asleep        a failed update or step: refusing, until a good update

Data beside the weights that serve: whatever fails before the commit leaves the old version serving, and requests run
until then. Data over them: requests are parked first, and if anything fails, the engine refuses until a good update.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, get_args

from rondel.core.errors import EngineError, SyncError, UserError
from rondel.core.events import Warned, emit
from rondel.core.protocols import Interrupt
from rondel.core.types import Abort, Begin, Commit, Message, Route
from rondel.models.main_grad import weights_changed

if TYPE_CHECKING:
    from rondel.generate.engine.builtin.adapter_receiver import AdapterReceiver
    from rondel.generate.engine.builtin.tower_receiver import TowerReceiver
    from rondel.generate.engine.builtin.weight_receiver import WeightReceiver


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
    run     executes a function on the device's own thread
    """

    run: Callable[..., Awaitable[Any]]

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
    @abstractmethod
    def is_busy(self) -> bool:
        """Whether a step runs or will: parked requests do not count (law 8)."""

    @abstractmethod
    def follow_weights(self, before: int, commit: Commit) -> None:
        """Other weights serve since this commit, and before it another version did: nothing computed so far is used
        again as if it were theirs.
        """

    @abstractmethod
    def report_version(self) -> None:
        """What it did until this version; `requests` of `room` were computed together."""

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


class EngineUpdate:
    """The engine's part of an update: everything but the weights themselves, which are the receiver's."""

    def __init__(
        self,
        arrivals: WeightReceiver | AdapterReceiver | TowerReceiver,
        lifecycle: EngineLifecycle,
        serving: StepTask,
    ) -> None:
        self.arrivals, self.lifecycle, self.serving = arrivals, lifecycle, serving

    async def receive(self, message: Message) -> None:
        beside = (
            message.beside
            if isinstance(message, Begin)
            else isinstance(message, Route) and not self.arrivals.is_overwriting
        )
        if self.serving.is_busy and not beside and not isinstance(message, Abort):
            raise SyncError("weights arrived while requests run: pause the engine first")
        try:
            match message:
                case Begin():
                    if self.arrivals.is_overwriting:
                        self.arrivals.drop_update()
                        self.lifecycle.broken = "an update that wrote over the weights was not ended"
                    self.arrivals.begin_update(message, self.lifecycle.version)
                    self.serving.update_account()
                case Route():
                    await self.arrivals.receive_data(message, self.serving.run)
                case Commit():
                    await self._commit(message)
                    self.serving.report_version()
                case Abort(reason=reason) if not self.arrivals.drop_update():
                    self.lifecycle.broken = f"the update was aborted ({reason})"
        except BaseException as error:
            why = str(error) or type(error).__name__
            if not (whole := self.arrivals.drop_update()):
                self.lifecycle.broken = why
            if not isinstance(error, Exception):
                raise
            raise SyncError(why if whole else f"{why}; the engine refuses to generate until a good update") from error

    async def _commit(self, commit: Commit) -> None:
        await self.serving.run(self.arrivals.commit_update, commit)
        weights_changed()
        before, self.lifecycle.version = self.lifecycle.version, commit.version
        self.serving.follow_weights(before, commit)
        self.lifecycle.broken = ""
        self.serving.wake_up()


def check_interrupt(how: str) -> None:
    """UserError for what no engine knows."""
    if how not in get_args(Interrupt):
        raise UserError(f"pause('{how}'): it is one of {', '.join(get_args(Interrupt))}")
