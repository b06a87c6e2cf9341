"""Requests apart, experts shared (data parallel attention): each rank of an engine has the whole attention and the keys
and values of requests of its own; the experts of a mixture are divided over the ranks, and tokens travel to them.

    first rank   scheduling, sampling │ its requests ──┐ all-to-all ┌── E/n experts │ logits of all requests
    others        ... their own part  │ theirs ────────┘ each layer └── E/n experts │ ──> theirs to the first rank
All ranks meet in every layer with experts, so one without a request computes a token for nobody. The caches hold n
times the tokens of one: pages 1 ... P are the first rank's, P + 1 ... 2P the second one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rondel.core.errors import ConfigError, EngineError
from rondel.generate.engine.builtin.feature_exchange import describe_features, send_features
from rondel.generate.engine.builtin.idle_pass import idle_pass
from rondel.generate.engine.builtin.lead_rank import LeadRank, RecordedStates
from rondel.generate.engine.builtin.runner import ModelRunner
from rondel.models.collectives import compared_columns
from rondel.models.layout_message import describe_layout, own_slots
from rondel.models.load_check import PARITY
from rondel.models.loaded_model import LoadedModel
from rondel.models.paged_layout import PagedLayout

if TYPE_CHECKING:
    from rondel.generate.engine.builtin.pages import EngineCaches
    from rondel.generate.engine.builtin.request import TokenFeed
    from rondel.models.image_features import VisionFeatures
    from rondel.models.routing_tape import RoutingTape


@dataclass(slots=True, eq=False)
class ApartLayout:
    """A step whose tokens lie rank after rank.

    parts   the layout of each rank in the numbers of all caches, None where it has no token
    counts  how many tokens each has
    """

    parts: list[PagedLayout | None]
    counts: list[int]

    @property
    def write(self) -> Tensor:
        """[T] pages of the tokens."""
        return torch.cat([part.write for part in self.parts if part is not None])


class ApartRunner(ModelRunner):
    """Steps of requests that lie in the caches of several ranks."""

    def __init__(self, *given: Any, draft: Any = None, **more: Any) -> None:
        if draft is not None:
            raise ConfigError(
                "ranks with requests of their own have no cache for a draft model: look guesses up instead"
            )
        super().__init__(*given, **more)

    def pack_step(
        self, chunks: list[TokenFeed], single: list[TokenFeed], unread: Tensor | None
    ) -> tuple[Tensor, Tensor, ApartLayout, list[int]]:
        """As of one rank; a feed ends in a row of all tokens, rank after rank."""
        ids: list[Tensor] = []
        at: list[Tensor] = []
        layout, rows, ends = ApartLayout([], []), 0, dict[int, int]()
        for rank in range(self.pages.ranks):
            own, one = ([f for f in feeds if f.live.owner == rank] for feeds in (chunks, single))
            if not (own or one):
                layout.parts.append(None)
                layout.counts.append(0)
                continue
            tokens, positions, part, stops = super().pack_step(own, one, None)
            assert isinstance(part, PagedLayout), "several ranks are told of no other"
            ids.append(tokens)
            at.append(positions)
            layout.parts.append(part)
            layout.counts.append(len(tokens))
            ends |= {id(f): rows + stop for f, stop in zip([*own, *one], stops)}
            rows += len(tokens)
        if any(positions.ndim == 2 for positions in at):  # of one with pictures
            at = [positions.expand(4, -1) for positions in at]
        return torch.cat(ids), torch.cat(at, -1), layout, [ends[id(f)] for f in [*chunks, *single]]


class ApartLead(LeadRank):
    """The first rank. `counts`: tokens of each rank in a pass whose hidden states are kept."""

    runner = ApartRunner

    def __init__(self, *joined: Any, **more: Any) -> None:
        super().__init__(*joined, **more)
        self.caches, self.counts = self.size, dict[int, list[int]]()
        self.told: list[RecordedStates] = []  # of the ranks beside this one, whose states lie there

    def attach(self, caches: EngineCaches) -> None:
        """Each rank keeps pools of its own pages, and states of its own requests."""
        self.own, *self.others = caches
        super().attach(caches)

    def record_copies(self, caches: EngineCaches) -> int:
        """Those of each other rank, for that one."""
        for cache in self.others:
            if (states := cache.states) is not None:
                states.memory = told = RecordedStates(states.memory.slots, [])
                self.told.append(told)
        return 0 if (mine := self.own.states) is None else mine.memory.slots

    def send_step(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: ApartLayout,
        records: int | None,
        seen: list[VisionFeatures | None],
    ) -> int:
        """Announce one pass, and give every rank its own part of it. `records`: the width of a tape. `seen`: of
        pictures, by each rank. -> its number.
        """
        parts, sent = list[dict[str, Any] | None](), dict[int, list[Tensor]]()
        each = (layout.parts, tokens.split(layout.counts), positions.split(layout.counts, -1), seen)
        for rank, (part, ids, at, looks) in enumerate(zip(*each)):
            if part is None or not rank:
                parts.append(None)
                continue
            cache = self.others[rank - 1]
            header, rest = describe_layout(own_slots(part, rank * self.own.pages.count))
            widths, numbers = describe_features(looks)
            sent[rank] = [ids, at, *numbers, *rest]
            own = {"layout": header, "shapes": [list(x.shape) for x in sent[rank]], "copies": [], "runs": []}
            own["seen"] = widths
            if cache.states is not None and part.states is not None:
                cache.states.make_copies()
                own |= {"copies": self.told[rank - 1].take_copies(), "runs": [list(run) for run in part.states.runs]}
            parts.append(own)
        number = self.announce_pass("step", parts=parts[1:], records=records)
        for rank, tensors in sent.items():
            self.channel.send_own(tensors, rank)
            send_features(seen[rank], partial(self.compute.send, to=rank))
        self.counts = {known: self.counts[known] for known in self._passes if known in self.counts}
        self.counts[number] = layout.counts
        return number

    def receive_each(self, counts: Sequence[int], like: Tensor) -> list[Tensor]:
        """Rows [n, ...] of the others that have some, in their order; `like`: [.., ...] of the same form."""
        return [
            self.compute.receive(like.new_empty(n, *like.shape[1:]), rank)
            for rank, n in enumerate(counts)
            if rank and n
        ]


@dataclass(slots=True)
class ApartModel(LoadedModel):
    """The model of the first rank. What is scored, such as the probe of an update, every rank computes:
    they must agree."""

    lead: ApartLead | None = field(default=None, repr=False)

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
        """Of a step those of the first rank's own tokens; `logits` finds the others."""
        assert self.lead is not None
        with self.lead.together():
            if not isinstance(layout, ApartLayout):
                number = self.lead.send_pass(tokens, positions, layout, seen)
                hidden = LoadedModel.hidden_states(self, tokens, positions, layout, tape, seen)
            else:
                records = None if tape is None else tape.width
                runs = pairwise(accumulate(layout.counts, initial=0))
                each = [None if seen is None else seen.slice_rows(first, end) for first, end in runs]
                number = self.lead.send_step(tokens, positions, layout, records, each)
                hidden = self._compute_own(tokens, positions, layout, tape, each[0])
            self.lead.remember_pass(number, hidden)
        return hidden

    def _compute_own(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: ApartLayout,
        tape: RoutingTape | None,
        seen: VisionFeatures | None,
    ) -> Tensor:
        assert self.lead is not None
        n, part, own = layout.counts[0], layout.parts[0], None if tape is None else tape.repeated()
        keys, values, states = self.lead.own.pages.keys, self.lead.own.pages.values, self.lead.own.states
        idle = None if n else idle_pass(keys, values, self.device, recurrent=states is not None)
        hidden = LoadedModel.hidden_states(self, *(idle or (tokens[:n], positions[..., :n], part)), own, seen)
        if tape is not None and own is not None:
            routes = own.recorded_routes
            tape.restore_records(torch.cat([routes[:n], *self.lead.receive_each(layout.counts, routes)]))
        return hidden

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Each rank's of its own tokens, here in the order of `rows`."""
        assert self.lead is not None
        number = self.lead.find_pass(hidden)
        if number not in self.lead.counts:
            return self._agreed_logits(hidden, rows, number)
        ends = torch.tensor([*accumulate(self.lead.counts[number])])
        owner = torch.bucketize(rows.cpu(), ends, right=True)
        order = owner.argsort(stable=True)
        counts = owner.bincount(minlength=self.lead.size).tolist()
        own = LoadedModel.logits(self, hidden, rows[owner == 0])
        if counts[0] == len(rows):
            return own
        first = torch.cat([ends.new_zeros(1), ends])[owner]
        with self.lead.together():
            theirs = (rows.cpu() - first)[order][counts[0] :]
            self.lead.send("step logits", theirs, number=number, counts=counts[1:])
            parts = [own, *self.lead.receive_each(counts, own)]
        return torch.cat(parts)[order.argsort().to(own.device)]

    def _agreed_logits(self, hidden: Tensor, rows: Tensor, number: int | None) -> Tensor:
        assert self.lead is not None
        own = LoadedModel.logits(self, hidden, rows)
        mine = compared_columns(own)
        with self.lead.together():
            self.lead.send("compare", rows, number=number)
            theirs = self.lead.receive_each([len(rows)] * self.lead.size, mine)
        for rank, those in enumerate(theirs, 1):
            if not (gap := float((mine - those).abs().mean())) <= PARITY[self.dtype]:
                raise EngineError(
                    f"rank {rank} of the engine scores a text differently than the first, by {gap:.3g} nats a token "
                    f"(limit {PARITY[self.dtype]}): one of them has other weights"
                )
        return own
