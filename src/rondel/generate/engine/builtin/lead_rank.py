"""What the first rank of an engine of several processes does with all of them: passes, updates, and memory given back."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from rondel.core.errors import SyncError
from rondel.core.protocols import Tags
from rondel.core.types import Commit, Manifest, Route
from rondel.generate.engine.builtin.lock_step import LockStep
from rondel.generate.engine.builtin.memory_release import MemoryRelease
from rondel.generate.engine.builtin.part_receiver import PASSED_ON, READ_BY_ALL, PartReceiver
from rondel.generate.engine.builtin.states import SequenceStates, StateMemory
from rondel.models.layout_message import describe_layout
from rondel.models.loaded_model import LoadedModel

if TYPE_CHECKING:
    from rondel.core.protocols import Transport
    from rondel.generate.engine.builtin.pages import LayerPools, PageAllocator
    from rondel.models.image_features import VisionFeatures
    from rondel.models.routing_tape import RoutingTape
    from rondel.models.serving_part import ServingPart


class RecordedStates(StateMemory):
    """Recurrent states of this rank, and which copies of them the others have not made yet."""

    def __init__(self, slots: int, copies: list[tuple[int, int]]) -> None:
        super().__init__(slots)
        self.copies = copies

    def copy_slot(self, source: int, target: int) -> None:
        super().copy_slot(source, target)
        self.copies.append((source, target))

    def clear(self) -> None:
        super().clear()
        self.copies.clear()


class LeadRank(LockStep):
    """The first rank as its engine knows it."""

    def __init__(self, *joined: Any, **calls: Any) -> None:
        super().__init__(*joined, **calls)
        self._cache: LayerPools | None = None
        self._copies: list[tuple[int, int]] = []  # of recurrent states, which the others have not made yet
        self._passes: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # hidden states that logits are asked of
        self._number = 0
        self.prompt_rows: dict[int, int] = {}  # of passes of which another rank computes the first rows

    @property
    def model(self) -> LeadModel:
        loaded = self.part.loaded
        return LeadModel(**{f.name: getattr(loaded, f.name) for f in fields(loaded)}, lead=self)

    def attach(self, pages: PageAllocator, states: SequenceStates | None) -> None:
        """Followers keep pools of the same pages, and states of the same rows."""
        self._cache, slots = pages.keys, 0
        if states is not None:
            slots = states.memory.slots
            states.memory = RecordedStates(slots, self._copies)
        with self.together():
            self.send("attach", pages=pages.keys.pages, slots=slots)

    def send_pass(self, tokens: Tensor, positions: Tensor, layout: Any, **more: Any) -> int:
        """Announce one forward pass. -> its number."""
        header, tensors = describe_layout(layout)
        facts: dict[str, Any] = {"layout": header, "copies": list(self._copies), "alive": list(self._passes), **more}
        self.prompt_rows = {number: self.prompt_rows[number] for number in self._passes if number in self.prompt_rows}
        self._copies.clear()
        facts["fresh"] = 0 if layout.keys is self._cache else layout.keys.pages
        if layout.states is not None:
            facts["runs"] = [list(run) for run in layout.states.runs]
        self._number += 1
        self.send("forward", tokens, positions, *tensors, number=self._number, **facts)
        return self._number

    def remember_pass(self, number: int, hidden: Tensor) -> None:
        """Followers keep the hidden states of a pass for as long as they are kept here."""
        self._passes[number] = hidden

    def find_pass(self, hidden: Tensor) -> int | None:
        """The number of the pass that these are from."""
        return next((number for number, kept in self._passes.items() if kept is hidden), None)

    def weight_receiver(self, transports: Mapping[str, Transport]) -> LeadReceiver:
        return LeadReceiver(self, self.part, transports)

    def memory_release(self, owns: bool) -> LeadMemoryRelease:
        return LeadMemoryRelease(self, owns)


@dataclass(slots=True)
class LeadModel(LoadedModel):
    """The part of the first rank; its passes are those of all ranks."""

    lead: LeadRank | None = field(default=None, repr=False)

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
            self.lead.send("logits", rows, number=self.lead.find_pass(hidden))
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


class LeadReceiver(PartReceiver):
    """The first rank's side: the others take the same tensors in the same order, and tell what failed."""

    def __init__(self, lead: LockStep, part: ServingPart, transports: Mapping[str, Transport]) -> None:
        super().__init__(part, transports)
        self.lead = lead

    def _open_stream(
        self, route: Route, manifest: Manifest, mine: dict[str, Tensor]
    ) -> Generator[tuple[str, Tensor], None, None]:
        if route.kind not in (*READ_BY_ALL, *PASSED_ON):
            raise SyncError(
                f"weights come by '{route.kind}', which an engine of {self.lead.size} processes does not take: use "
                f"{', '.join((*READ_BY_ALL, *PASSED_ON))}"
            )
        lead, passed, whole = self.lead, route.kind in PASSED_ON or isinstance(route.data, dict), False
        assert self._begun is not None
        with lead.together():
            lead.tell(self._begun)
            lead.tell(Route("passed on") if passed else route)
            lead.send("open")
        try:
            for name, tensor in super()._open_stream(route, manifest, mine):
                with lead.together():
                    lead.send("take", name=name, passed=[*_kind_of(tensor)] if passed else [])
                    if passed:
                        lead.compute.broadcast(
                            tensor.detach().to(lead.part.loaded.device).contiguous().view(-1).view(torch.uint8)
                        )
                yield name, tensor
            whole = True
            self._raise_faults("read", proof=0 if self.proof is None else len(self.proof.values))
        finally:
            if not whole and not lead.lost:
                lead.send_later("drop")

    def _raise_faults(self, do: str, **facts: object) -> None:
        with self.lead.together():
            if do:
                self.lead.send(do, **facts)
            wrong = self.proof.find_wrong(self.lead.compute) if do == "read" and self.proof is not None else []
            faults = self.lead.channel.report("")
        if wrong and not any(faults):
            raise SyncError(f"{len(wrong)} tensors arrived with other bits than were sent, first {wrong[0]}")
        if told := [f"rank {rank}: {fault}" for rank, fault in enumerate(faults) if fault]:
            raise SyncError("; ".join(told))

    def commit_update(self, commit: Commit) -> None:
        self._check_commit(commit)
        self._untouched = False  # from here on one rank may have what another has not
        with self.lead.together():
            self.lead.send("commit", version=commit.version, root=commit.root)
        try:
            super().commit_update(commit)
        finally:
            self._raise_faults("")

    def drop_update(self) -> bool:
        if self._begun is not None:
            self.lead.send_later("drop")
        return super().drop_update()


def _kind_of(tensor: Tensor) -> tuple[str, list[int]]:
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
