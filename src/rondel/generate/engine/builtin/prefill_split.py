"""Prompts computed by one half of an engine's ranks, answers by the other: a step's chunks and its decoding rows run side by side.

    prompts   ranks n ... 2n-1   chunks of prompts ──> keys and values │ memory that both map │ ──> the rows that are drawn from
    answers   ranks 0 ... n-1    one token of every decoding request    │  read in place       │     and everything else
A step takes as long as the longer of its two parts, where one half computes both in turn. The ranks of each half share
every matrix (n = 1: each has the whole model), and rank n + i has the key heads of rank i, so that keys and values are
handed over by being written, and so are recurrent states. Pictures are looked at by the first rank of all, and who
computes tokens of theirs is told what it saw. Both halves compute what is scored, such as the probe of an update: they must agree.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rondel.core.errors import ConfigError, EngineError
from rondel.generate.engine.builtin.feature_exchange import describe_features, send_features
from rondel.generate.engine.builtin.lead_rank import LeadRank, LeadsRanks
from rondel.generate.engine.builtin.pages import EngineCaches
from rondel.generate.engine.builtin.rank_channel import raw_bytes
from rondel.generate.engine.builtin.shared_pools import share_cache
from rondel.models.image_features import VisionFeatures
from rondel.models.layout_message import describe_layout
from rondel.models.load_check import PARITY
from rondel.models.loaded_model import LoadedModel
from rondel.models.paged_layout import PagedLayout
from rondel.models.recurrent.layout import SlotStates
from rondel.models.routing_tape import RoutingTape


class PrefillLead(LeadRank):
    """The first rank of those that decode. `half`: how many do."""

    @property
    def half(self) -> int:
        return self.part.cuts.ranks.size

    def attach(self, caches: EngineCaches) -> None:
        """The cache moves into memory that processes of both halves map."""
        loaded, pages, states = self.part.loaded, caches[0].pages, caches[0].states
        for found, what in (
            (loaded.device.type != "cpu", "memory of a GPU is not shared between processes yet"),
            (not hasattr(os, "memfd_create"), "this system has no memory without a name (memfd)"),
        ):
            if found:
                raise ConfigError(f"place.engines.prefill = true: {what}. Leave it out")
        count, slots = pages.keys.pages, 0 if states is None else states.memory.slots
        copies = self._copies if self.half > 1 else None  # of others, whose ranks have parts of their own
        with self.together():
            self.send("share", pages=count, slots=slots)
            cache = share_cache(loaded, count, slots, self.compute, self.half, copies)
        self._cache = pages.keys = cache.keys
        pages.values = cache.values
        if states is not None and cache.states is not None:
            states.memory = cache.states

    def shares_pools(self, layout: PagedLayout) -> bool:
        """Whether a pass writes into the cache, and not into pools of its own."""
        return layout.keys is self._cache

    def start_halves(
        self,
        tokens: Tensor,
        positions: Tensor,
        answers: PagedLayout | None,
        prompts: PagedLayout | None,
        width: int | None,
        seen: tuple[VisionFeatures | None, VisionFeatures | None],
    ) -> int:
        """Announce one step: to one half its prompts, which come first, to the other the rest, and to each what its
        tokens read of pictures: `seen`, of the rest and of the prompts. `width`: of a tape. -> its number.
        """
        c, parts, sent = 0 if prompts is None else len(prompts.write), list[dict[str, Any]](), list[Tensor]()
        for layout, own in ((answers, slice(c, None)), (prompts, slice(c))):
            header, tensors = ({}, []) if layout is None else describe_layout(layout)
            mine = [] if layout is None else [tokens[own], positions[..., own], *tensors]
            runs = [] if layout is None or layout.states is None else [list(run) for run in layout.states.runs]
            parts.append({"layout": header, "tensors": len(mine), "runs": runs})
            sent += mine
        copies = [*self._copies]
        self._copies.clear()
        widths, numbers = zip(*map(describe_features, seen))
        told = {"parts": parts, "records": width, "copies": copies, "seen": widths}
        number = self.announce_pass("halves", *sent, *chain(*numbers), **told)
        for rank in range(1, self.size):
            send_features(seen[rank // self.half], partial(self.compute.send, to=rank))
        return number

    def wait_for_prefill(self, tape: RoutingTape | None) -> Tensor | None:
        """Its keys and values exist. -> the experts that its tokens went to, if they are recorded."""
        for rank in range(self.half, self.size):
            self.compute.receive(torch.zeros(1, dtype=torch.int64), rank)
            if tape is not None and rank == self.half:
                shape = torch.zeros(3, dtype=torch.int64)
                theirs = torch.empty(*self.compute.receive(shape, rank).tolist(), dtype=torch.int64)
                self.compute.receive(theirs, rank)
        return None if tape is None else theirs

    def fetch_rows(self, number: int, rows: Tensor) -> Tensor:
        """Hidden states of some rows of a pass elsewhere: [C] -> [C, D]."""
        self.send("rows", rows, number=number)
        loaded = self.part.loaded
        out = torch.empty(len(rows), loaded.head.weight.shape[1], dtype=loaded.dtype)
        return self.compute.receive(out, self.half)

    def multiply_rows(self, picked: Tensor) -> Tensor:
        """Logits of hidden states that this rank has, by all that share the head: [C, D] -> [C, V]."""
        head, ranks = self.part.loaded.head, self.part.cuts.ranks
        if ranks.size == 1:
            return head.logits(picked)
        with self.together():
            self.send("head", dtype=str(picked.dtype).removeprefix("torch."), shape=list(picked.shape))
            ranks.broadcast(raw_bytes(picked))
            whole = self.part.join_logits(head.logits(picked))
            assert whole is not None, "the first rank has them"
            return whole


@dataclass(slots=True)
class SplitModel(LeadsRanks, LoadedModel):
    """The part of the first rank that decodes: prompts go to the other half."""

    lead: PrefillLead | None = field(default=None, repr=False)

    def hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: Any,
        tape: RoutingTape | None = None,
        seen: VisionFeatures | None = None,
    ) -> Tensor:
        """Rows of prompts are left empty: `logits` asks for those that are wanted."""
        lead, c = self.lead, sum(chunk.length for chunk in layout.chunks)
        assert lead is not None
        if not c and lead.half == 1:
            return LoadedModel.hidden_states(self, tokens, positions, layout, tape, seen)
        width = None if tape is None else tape.width
        with lead.together():
            hidden = torch.zeros(len(tokens), self.head.weight.shape[1], dtype=self.dtype)
            routes: list[Tensor] = []
            if not lead.shares_pools(layout):  # of what is scored, which is all prompt
                number = lead.send_pass(tokens, positions, layout, seen, answers=True, records=width)
                hidden = LoadedModel.hidden_states(self, tokens, positions, layout, None, seen)
            else:
                prompts, rest = split_layout(layout, c)
                # a prompt of which one token is left is a single one, which may be the last one of a picture
                late, early = (None, None) if seen is None else (seen.slice_rows(c, len(tokens)), seen.slice_rows(0, c))
                number = lead.start_halves(tokens, positions, rest, prompts, width, (late, early))
                if rest is not None:
                    own = None if tape is None else tape.repeated()
                    hidden[c:] = LoadedModel.hidden_states(self, tokens[c:], positions[..., c:], rest, own, late)
                    routes = [] if own is None else [own.recorded_routes]
            theirs = lead.wait_for_prefill(tape) if c else None
            if tape is not None:
                tape.restore_records(torch.cat([*([] if theirs is None else [theirs]), *routes]))
            lead.remember_pass(number, hidden)
            lead.prompt_rows[number] = c
        return hidden

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        lead, picked = self.lead, hidden.index_select(0, rows)
        assert lead is not None
        number = lead.find_pass(hidden)
        elsewhere = rows < (0 if number is None else lead.prompt_rows[number])
        if number is None or not bool(elsewhere.any()):
            return lead.multiply_rows(picked)
        with lead.together():
            theirs = lead.fetch_rows(number, rows[elsewhere])
        if bool(picked[elsewhere].any()):  # computed here, too
            self._compare(lead.multiply_rows(picked[elsewhere]), lead.multiply_rows(theirs))
        else:
            picked[elsewhere] = theirs
        return lead.multiply_rows(picked)

    def _compare(self, ours: Tensor, theirs: Tensor) -> None:
        gap = float((ours.log_softmax(-1) - theirs.log_softmax(-1)).abs().mean())
        if not gap <= PARITY[self.dtype]:
            raise EngineError(
                f"the process of prompts and the one that decodes score a text differently, by {gap:.3g} nats a token "
                f"(limit {PARITY[self.dtype]}): one of them has other weights"
            )


def split_layout(layout: PagedLayout, c: int) -> tuple[PagedLayout | None, PagedLayout | None]:
    """Of a step whose first `c` tokens are prompts: theirs, and that of the single tokens behind them."""
    prompts, rest = None, None
    if c:
        prompts = PagedLayout(layout.keys, layout.values, layout.write[:c], layout.chunks)
    if layout.decoding is not None:
        rest = PagedLayout(layout.keys, layout.values, layout.write[c:], [], layout.decoding)
    if (states := layout.states) is not None:
        device = layout.write.device
        early = [run for run in states.runs if run[0] < c]
        late = [(start - c, n, slot, fresh) for start, n, slot, fresh in states.runs if start >= c]
        if prompts is not None:
            prompts.states = SlotStates(states.pools, early, device)
        if rest is not None:
            rest.states = SlotStates(states.pools, late, device)
    return prompts, rest
