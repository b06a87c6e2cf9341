"""What the first rank of an engine of several processes does with all of them: passes, and memory given back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from torch import Tensor

from rondel.core.protocols import Tags
from rondel.generate.engine.builtin.feature_exchange import describe_features, send_features
from rondel.generate.engine.builtin.lock_step import LockStep
from rondel.generate.engine.builtin.memory_release import MemoryRelease
from rondel.generate.engine.builtin.states import StateMemory
from rondel.models.layout_message import describe_layout

if TYPE_CHECKING:
    from rondel.core.protocols import Transport
    from rondel.generate.engine.builtin.pages import EngineCaches
    from rondel.generate.engine.builtin.runner import ModelRunner
    from rondel.generate.engine.builtin.weight_receiver import WeightReceiver
    from rondel.models.cache_pools import LayerPools
    from rondel.models.image_features import VisionFeatures
    from rondel.models.loaded_model import LoadedModel


class RecordedStates(StateMemory):
    """Recurrent states of this rank, and which copies of them the others have not made yet."""

    def __init__(self, slots: int, copies: list[tuple[int, int]]) -> None:
        super().__init__(slots)
        self.copies = copies

    def copy_slot(self, source: int, target: int) -> None:
        super().copy_slot(source, target)
        self.copies.append((source, target))

    def take_copies(self) -> list[tuple[int, int]]:
        """Those that are to be told now."""
        taken = [*self.copies]
        self.copies.clear()
        return taken

    def clear(self) -> None:
        super().clear()
        self.copies.clear()


class LeadRank(LockStep):
    """The first rank as its engine knows it. `caches`: one in which every rank has its part of each request; or one a
    rank, each of other requests. `runner`: what makes a step's passes, if it is no plain one.
    """

    caches = 1
    runner: type[ModelRunner] | None = None

    def __init__(
        self,
        *joined: Any,
        model: Callable[..., LoadedModel],
        receiver: Callable[..., WeightReceiver],
        **calls: Any,
    ) -> None:
        """`model`: makes the engine's model of the fields of a LoadedModel and of this rank; `receiver`: makes what
        takes in new weights, of this rank, its part and the engine's transports.
        """
        super().__init__(*joined, **calls)
        self._model, self._receiver = model, receiver
        self._cache: LayerPools | None = None
        self._copies: list[tuple[int, int]] = []  # of recurrent states, which the others have not made yet
        self._passes: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # hidden states that logits are asked of
        self._number = 0
        self.prompt_rows: dict[int, int] = {}  # of passes of which another rank computes the first rows

    @property
    def model(self) -> LoadedModel:
        loaded = self.part.loaded
        return self._model(**{f.name: getattr(loaded, f.name) for f in fields(loaded)}, lead=self)

    def attach(self, caches: EngineCaches) -> None:
        """Followers keep pools of the same pages, and states of the same rows."""
        self._cache = caches[0].pages.keys
        slots = self.record_copies(caches)
        with self.together():
            self.send("attach", pages=self._cache.pages, slots=slots)

    def record_copies(self, caches: EngineCaches) -> int:
        """Of recurrent states, for those who have them elsewhere. -> slots of each rank."""
        if (states := caches[0].states) is None:
            return 0
        states.memory = RecordedStates(states.memory.slots, self._copies)
        return states.memory.slots

    def send_pass(
        self, tokens: Tensor, positions: Tensor, layout: Any, seen: VisionFeatures | None = None, **more: Any
    ) -> int:
        """Announce one forward pass, and give every rank what it reads of pictures. -> its number."""
        header, tensors = describe_layout(layout)
        widths, numbers = describe_features(seen)
        facts: dict[str, Any] = {"layout": header, "copies": list(self._copies), "seen": widths, **more}
        self.prompt_rows = {number: self.prompt_rows[number] for number in self._passes if number in self.prompt_rows}
        self._copies.clear()
        facts["fresh"] = 0 if layout.keys is self._cache else layout.keys.pages
        if layout.states is not None:
            facts["runs"] = [list(run) for run in layout.states.runs]
        number = self.announce_pass("forward", tokens, positions, *numbers, *tensors, **facts)
        send_features(seen, self.compute.broadcast)
        return number

    def announce_pass(self, do: str, *tensors: Tensor, **facts: Any) -> int:
        """-> the number under which followers keep its hidden states."""
        self._number += 1
        self.send(do, *tensors, number=self._number, alive=list(self._passes), **facts)
        return self._number

    def remember_pass(self, number: int, hidden: Tensor) -> None:
        """Followers keep the hidden states of a pass for as long as they are kept here."""
        self._passes[number] = hidden

    def find_pass(self, hidden: Tensor) -> int | None:
        """The number of the pass that these are from."""
        return next((number for number, kept in self._passes.items() if kept is hidden), None)

    def weight_receiver(self, transports: Mapping[str, Transport]) -> WeightReceiver:
        return self._receiver(self, self.part, transports)

    def memory_release(self, owns: bool) -> LeadMemoryRelease:
        return LeadMemoryRelease(self, owns)


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


class LeadsRanks:
    """What a model of the first rank says of itself: its part knows the whole. `lead`: the first rank."""

    __slots__ = ()
    lead: LeadRank | None

    @property
    def leads_ranks(self) -> bool:
        return True

    @property
    def vocabulary(self) -> int:
        assert self.lead is not None
        return self.lead.part.vocabulary

    @property
    def token_count(self) -> int:
        assert self.lead is not None
        return self.lead.part.token_count
