"""What may be done with the requests of a stepwise engine from outside: parking, ending, putting to sleep."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from math import inf
from typing import Generic, TypeVar

from rondel.core.errors import EngineError
from rondel.core.protocols import Interrupt, Tags
from rondel.core.types import Request
from rondel.generate.engine.builtin.lifecycle import StepTask, check_interrupt
from rondel.generate.engine.stepwise.answer import Answer

A = TypeVar("A", bound=Answer)


class StepwiseControl(StepTask, Generic[A]):
    """Half of the Engine protocol, over the answers in flight and the task that takes their steps."""

    answers: list[A]

    @abstractmethod
    def forget_weights(self) -> None: ...

    @property
    def state(self) -> str:
        return self.lifecycle.state

    @property
    def is_busy(self) -> bool:
        return self._task is not None and bool(self.answers)

    @property
    def _is_behind(self) -> bool:
        """Whether a request of a replayed run has not yet come as far as it was."""
        version = self.lifecycle.version
        return any(own.request.lines is not None and not own.stands_still(version) for own in self.answers)

    async def pause(self, how: Interrupt = "hold", lease: float = inf) -> None:
        """hold: park requests between two steps. drain: let the begun ones end. abort: return what is drawn.

        Those of a replayed run are first brought to their lines.
        """
        check_interrupt(how)
        self.lifecycle.end_lease()
        while self.state == "serving" and self._is_behind:
            self.wake_up()
            if self.has_stopped:  # nobody may move; whoever is not at its line is named when the weights change
                break
            await self.wait_for_task()
        await self.lifecycle.hold(how, self.wait_until_stopped, self.wake_up)
        if how == "abort":
            await self.abort(lambda request: True)
        self.lifecycle.begin_lease(lease, self.wake_up)

    async def resume(self) -> None:
        self.lifecycle.end_lease()
        self.lifecycle.held = False
        self.wake_up()

    async def abort(self, which: Callable[[Request], bool]) -> int:
        """Requests of which this is true return what they have drawn; a step under way is no part of it.
        -> how many."""
        found = [answer for answer in self.answers if which(answer.request)]
        self.answers = [answer for answer in self.answers if answer not in found]
        for answer in found:
            answer.finish("abort", self.lifecycle.version)
        return len(found)

    async def sleep(self, tags: Tags) -> None:
        """Parked requests keep what they have drawn; what was computed of them is computed again."""
        if self.is_busy:
            raise EngineError("sleep while requests run: pause the engine first")
        self.forget_weights()
        self.lifecycle.asleep.update(tags)
        self.update_account()

    async def wake(self, tags: Tags) -> None:
        self.lifecycle.asleep.difference_update(tags)
        self.wake_up()
