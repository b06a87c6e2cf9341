"""The first rank of an engine of several processes: what the others do at the same time.

    device thread   command ──> followers │ the same pass, a part of every matrix on each rank │ logits gathered here
Scheduling, sampling, the prefix tree and the log are this rank's alone. Whatever breaks a pass leaves the ranks at
different places: then the engine is over, and says which rank ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from torch import Tensor

from rondel.core.errors import EngineError, UserError
from rondel.core.protocols import Tags
from rondel.generate.engine.builtin.memory_release import MemoryRelease
from rondel.generate.engine.builtin.pages import LayerPools, PageAllocator
from rondel.generate.engine.builtin.rank_channel import CommandChannel
from rondel.generate.engine.builtin.states import SequenceStates, StateMemory
from rondel.models.layout_message import describe_layout
from rondel.models.loaded_model import LoadedModel

if TYPE_CHECKING:
    from rondel.core.types import Message
    from rondel.models.collectives import RankGroup
    from rondel.models.image_features import VisionFeatures
    from rondel.models.routing_tape import RoutingTape
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
        self.model = LeadModel(**{f.name: getattr(part.loaded, f.name) for f in fields(part.loaded)}, lead=self)
        self._cache: LayerPools | None = None
        self._states: RecordedStates | None = None
        self._passes: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # hidden states that logits are asked of
        self._number = 0
        self._late: list[str] = []  # commands that wait for the device's thread

    @property
    def size(self) -> int:
        return self.compute.size

    def attach(self, pages: PageAllocator, states: SequenceStates | None) -> None:
        """Followers keep pools of the same pages."""
        self._cache, rows = pages.keys, 0
        if states is not None:
            states.memory = self._states = RecordedStates(states.memory.slots)
            rows = self._states.slots
        with self.together():
            self.send("attach", pages=pages.keys.pages, slots=rows)

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

    def send_pass(self, tokens: Tensor, positions: Tensor, layout: Any) -> int:
        """Announce one forward pass. -> its number."""
        if positions.ndim != 1:
            raise UserError("an engine of several processes reads text alone: leave the images out")
        header, tensors = describe_layout(layout)
        facts: dict[str, Any] = {"layout": header, "copies": [], "alive": list(self._passes)}
        facts["fresh"] = 0 if layout.keys is self._cache else layout.keys.pages
        if layout.states is not None:
            facts["runs"] = [list(run) for run in layout.states.runs]
        if self._states is not None:
            facts["copies"], self._states.copies = self._states.copies, []
        self._number += 1
        self.send("forward", tokens, positions, *tensors, number=self._number, **facts)
        return self._number

    def remember_pass(self, number: int, hidden: Tensor) -> None:
        """Followers keep the hidden states of a pass for as long as they are kept here."""
        self._passes[number] = hidden

    def pass_number(self, hidden: Tensor) -> int:
        return next(number for number, kept in self._passes.items() if kept is hidden)

    def close(self) -> None:
        """The followers stop waiting for commands."""
        if not self.lost:
            self.send("stop")
            self.lost = "the engine is closed"


class RecordedStates(StateMemory):
    """Recurrent states of this rank, and which copies of them the others have not made yet."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.copies: list[tuple[int, int]] = []

    def copy_slot(self, source: int, target: int) -> None:
        super().copy_slot(source, target)
        self.copies.append((source, target))

    def clear(self) -> None:
        super().clear()
        self.copies.clear()


@dataclass(slots=True)
class LeadModel(LoadedModel):
    """The part of the first rank; its passes are those of all ranks."""

    lead: LockStep | None = field(default=None, repr=False)

    @property
    def vocabulary(self) -> int:
        assert self.lead is not None
        return self.lead.part.vocabulary

    @property
    def token_count(self) -> int:
        assert self.lead is not None
        return self.lead.part.token_count

    def hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: Any,
        tape: RoutingTape | None = None,
        seen: VisionFeatures | None = None,
    ) -> Tensor:
        assert self.lead is not None
        with self.lead.together():
            number = self.lead.send_pass(tokens, positions, layout)
            hidden = LoadedModel.hidden_states(self, tokens, positions, layout, tape, seen)
            self.lead.remember_pass(number, hidden)
            return hidden

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        assert self.lead is not None
        with self.lead.together():
            self.lead.send("logits", rows, number=self.lead.pass_number(hidden))
            whole = self.lead.part.join_logits(LoadedModel.logits(self, hidden, rows))
            assert whole is not None, "the first rank has them"
            return whole


class LeadMemoryRelease(MemoryRelease):
    """What all ranks give back."""

    def __init__(self, lead: LockStep, owns: bool) -> None:
        super().__init__(lead.part.loaded, None, owns=owns)
        self.lead = lead

    def sleep(self, tags: Tags) -> None:
        with self.lead.together():
            self.lead.send("sleep", tags=list(tags))
            super().sleep(tags)

    def wake(self, tags: Tags) -> None:
        with self.lead.together():
            self.lead.send("wake", tags=list(tags))
            super().wake(tags)
