"""Prompts computed in one process, answers in another: a step's chunks and its decoding rows run side by side.

    prefill process   chunks of prompts ──> keys and values │ memory that both map │ ──> the rows that are drawn from
    this process      one token of every decoding request    │  read in place       │     and everything else
A step takes as long as the longer of its two parts, where one process computes both in turn. Both have the whole model,
and both compute what is scored, such as the probe of an update: they must agree.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rondel.core.errors import ConfigError, EngineError
from rondel.generate.engine.builtin.lead_rank import LeadRank
from rondel.generate.engine.builtin.pages import EngineCaches
from rondel.generate.engine.builtin.shared_pools import PoolShapes, SharedPools
from rondel.models.cache_pools import LayerPools
from rondel.models.image_features import VisionFeatures
from rondel.models.load_check import PARITY
from rondel.models.loaded_model import LoadedModel
from rondel.models.paged_layout import PagedLayout, PrefillChunk
from rondel.models.routing_tape import RoutingTape

PREFILL = 1  # the rank that computes prompts


class PrefillLead(LeadRank):
    """The rank that decodes."""

    def attach(self, caches: EngineCaches) -> None:
        """The cache moves into memory that both processes map."""
        loaded, pages, states = self.part.loaded, caches[0].pages, caches[0].states
        for found, what in (
            (states is not None, f"recurrent states of '{loaded.name}' are not shared between processes"),
            (loaded.device.type != "cpu", "memory of a GPU is not shared between processes yet"),
            (not hasattr(os, "memfd_create"), "this system has no memory without a name (memfd)"),
        ):
            if found:
                raise ConfigError(f"place.engines.prefill = true: {what}. Leave it out")
        shapes, count = pool_shapes(loaded), pages.keys.pages
        pages.keys, pages.values = (SharedPools(count, each, loaded.dtype) for each in shapes)
        self._cache = pages.keys
        with self.together():
            told = [[[layer, *shape] for layer, shape in each.items()] for each in shapes]
            self.send("share", pages=count, layers=told, paths=[pages.keys.path, pages.values.path])

    def shares_pools(self, layout: PagedLayout) -> bool:
        """Whether a pass writes into the cache, and not into pools of its own."""
        return layout.keys is self._cache

    def start_prefill(self, tokens: Tensor, positions: Tensor, layout: PagedLayout, records: int | None) -> int:
        """Begin one pass elsewhere. -> its number."""
        return self.send_pass(tokens, positions, layout, answers=True, records=records)

    def wait_for_prefill(self, rows: int, tape: RoutingTape | None) -> Tensor | None:
        """Its keys and values exist. -> the experts that its tokens went to, if they are recorded."""
        self.compute.receive(torch.zeros(1, dtype=torch.int64), PREFILL)
        if tape is None:
            return None
        shape = torch.zeros(3, dtype=torch.int64)
        return self.compute.receive(
            torch.empty(*self.compute.receive(shape, PREFILL).tolist(), dtype=torch.int64), PREFILL
        )

    def fetch_rows(self, number: int, rows: Tensor) -> Tensor:
        """Hidden states of some rows of a pass elsewhere: [C] -> [C, D]."""
        self.send("rows", rows, number=number)
        loaded = self.part.loaded
        out = torch.empty(len(rows), loaded.head.weight.shape[1], dtype=loaded.dtype)
        return self.compute.receive(out, PREFILL)


@dataclass(slots=True)
class SplitModel(LoadedModel):
    """The model of the rank that decodes: prompts go to the other one."""

    lead: PrefillLead | None = field(default=None, repr=False)

    @property
    def leads_ranks(self) -> bool:
        return True

    def hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: Any,
        tape: RoutingTape | None = None,
        seen: VisionFeatures | None = None,
    ) -> Tensor:
        """Rows of prompts are left empty: `logits` asks for those that are wanted."""
        assert self.lead is not None
        c = sum(chunk.length for chunk in layout.chunks)
        if not c:
            return LoadedModel.hidden_states(self, tokens, positions, layout, tape, seen)
        with self.lead.together():
            mine = PagedLayout(layout.keys, layout.values, layout.write[:c], layout.chunks)
            records = None if tape is None else tape.width
            number = self.lead.start_prefill(tokens[:c], positions[:c], mine, records)
            hidden = torch.zeros(len(tokens), self.head.weight.shape[1], dtype=self.dtype)
            routes: list[Tensor] = []
            if not self.lead.shares_pools(layout):
                hidden = LoadedModel.hidden_states(self, tokens, positions, layout)
            elif layout.decoding is not None:
                rest = PagedLayout(layout.keys, layout.values, layout.write[c:], [], layout.decoding)
                own = None if tape is None else tape.repeated()
                hidden[c:] = LoadedModel.hidden_states(self, tokens[c:], positions[c:], rest, own)
                routes = [] if own is None else [own.recorded_routes]
            theirs = self.lead.wait_for_prefill(c, tape)
            if tape is not None and theirs is not None:
                tape.restore_records(torch.cat([theirs, *routes]))
            self.lead.remember_pass(number, hidden)
            self.lead.prompt_rows[number] = c
        return hidden

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        assert self.lead is not None
        number = self.lead.find_pass(hidden)
        if number is None:
            return LoadedModel.logits(self, hidden, rows)
        picked, elsewhere = hidden.index_select(0, rows), rows < self.lead.prompt_rows[number]
        if not bool(elsewhere.any()):
            return self.head.logits(picked)
        with self.lead.together():
            theirs = self.lead.fetch_rows(number, rows[elsewhere])
        if bool(picked[elsewhere].any()):  # computed here, too
            self._compare(self.head.logits(picked[elsewhere]), self.head.logits(theirs))
        else:
            picked[elsewhere] = theirs
        return self.head.logits(picked)

    def _compare(self, ours: Tensor, theirs: Tensor) -> None:
        gap = float((ours.log_softmax(-1) - theirs.log_softmax(-1)).abs().mean())
        if not gap <= PARITY[self.dtype]:
            raise EngineError(
                f"the process of prompts and the one that decodes score a text differently, by {gap:.3g} nats a token "
                f"(limit {PARITY[self.dtype]}): one of them has other weights"
            )


@torch.inference_mode()
def pool_shapes(loaded: LoadedModel) -> tuple[PoolShapes, PoolShapes]:
    """What the layers of a model keep of a token: of keys, and of values."""
    where = torch.arange(1, 3, device=loaded.device)
    keys, values = LayerPools(4), LayerPools(4)
    loaded.hidden_states(where, where - 1, PagedLayout(keys, values, where, [PrefillChunk(0, 2, where)]))
    return _shapes_in(keys), _shapes_in(values)


def _shapes_in(pools: Any) -> PoolShapes:
    made: dict[int, Tensor] = pools._pools
    return {layer: (pool.shape[0], pool.shape[2]) for layer, pool in made.items()}
