"""The first rank of an engine of several processes: what the others do at the same time.

    device thread   command ──> followers │ the same pass, a part of every matrix on each rank │ logits gathered here
Scheduling, sampling, the prefix tree and the log are this rank's alone. Whatever breaks a pass leaves the ranks at
different places: then the engine is over, and says which rank ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rondel.core.errors import EngineError
from rondel.generate.engine.builtin.rank_channel import CommandChannel

if TYPE_CHECKING:
    from rondel.core.types import Message
    from rondel.models.collectives import RankGroup
    from rondel.models.serving_part import ServingPart


class LockStep:
    """
    compute  the group in which tensors of a pass are summed
    tell     hands a message of an update to every follower, by its pipe
    fate     why a follower has ended; "" if all live
    ended    told once, when the engine cannot go on
    """

    def __init__(
        self,
        part: ServingPart,
        channel: CommandChannel,
        compute: RankGroup,
        *,
        tell: Callable[[Message], None],
        fate: Callable[[], str],
        ended: Callable[[str], None],
    ) -> None:
        self.part, self.channel, self.compute, self.tell = part, channel, compute, tell
        self._fate, self._ended = fate, ended
        self.lost = ""  # why it is over
        self._late: list[str] = []  # commands that wait for the device's thread

    @property
    def size(self) -> int:
        return self.compute.size

    @contextmanager
    def together(self) -> Iterator[None]:
        """What all ranks do. If it breaks they stand at different places, and nothing more can be asked of them."""
        if self.lost:
            raise EngineError(self.lost)
        try:
            while self._late:
                self.send(self._late.pop(0))
            yield
        except Exception as error:
            why = self._fate() or f"{type(error).__name__}: {error}"
            self.end(f"the engine of {self.size} processes cannot go on: {why}")
            raise EngineError(self.lost) from error

    def end(self, why: str) -> None:
        if not self.lost:
            self.lost = why
            self._ended(why)

    def send(self, do: str, *tensors: Tensor, **facts: Any) -> None:
        self.channel.send(do, list(tensors), facts)

    def send_later(self, do: str) -> None:
        """A command without an answer, before the next one: for code that is not on the device's thread."""
        self._late.append(do)

    def close(self) -> None:
        """The followers stop waiting for commands."""
        if not self.lost:
            self.send("stop")
            self.lost = "the engine is closed"
