"""Another rank of an engine of several processes: it does what the first one does, and decides nothing."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rondel.generate.engine.builtin.feature_exchange import receive_features
from rondel.generate.engine.builtin.idle_pass import idle_pass
from rondel.generate.engine.builtin.memory_release import MemoryRelease
from rondel.generate.engine.builtin.rank_channel import receive_tensor
from rondel.generate.engine.builtin.shared_pools import copy_slots, share_cache
from rondel.generate.engine.builtin.states import StateMemory
from rondel.models.cache_pools import LayerPools
from rondel.models.collectives import compared_columns
from rondel.models.layout_message import rebuild_layout
from rondel.models.recurrent.layout import SlotStates

if TYPE_CHECKING:
    from rondel.generate.engine.builtin.follower_update import FollowerUpdate
    from rondel.generate.engine.builtin.rank_channel import CommandChannel
    from rondel.models.collectives import RankGroup
    from rondel.models.image_features import VisionFeatures
    from rondel.models.loaded_model import LoadedModel
    from rondel.models.paged_layout import PagedLayout
    from rondel.models.routing_tape import RoutingTape
    from rondel.models.serving_part import ServingPart


class EngineFollower:
    """Passes of the model over its own cache, as the leader commands them; weights come by `update`."""

    def __init__(self, part: ServingPart, channel: CommandChannel, compute: RankGroup, update: FollowerUpdate) -> None:
        self.part, self.channel, self.compute, self.update = part, channel, compute, update
        self.loaded, self.device = part.loaded, part.loaded.device
        self.resting = MemoryRelease(part.loaded, None, owns=True)
        self.keys, self.values = LayerPools(0), LayerPools(0)
        self.states = StateMemory(0)
        self._hidden: dict[int, Tensor] = {}  # by the number of the pass

    def follow(self) -> None:
        """On the device's thread, until the leader closes. What breaks here ends this process,
        and with it the engine."""
        verbs = {
            "attach": self._attach,
            "forward": self._forward,
            "logits": self._give_logits,
            "step": self._step,
            "step logits": self._give_own_logits,
            "compare": self._give_columns,
            "share": self._share,
            "rows": self._give_rows,
            "halves": self._compute_half,
            "head": self._multiply_rows,
            "sleep": self._sleep,
            "wake": self._wake,
            "open": self.update.open_route,
            "take": self.update.accept_tensor,
            "read": self.update.report_data,
            "commit": self.update.commit,
            "drop": self.update.drop,
        }
        while True:
            facts, tensors = self.channel.receive(self.device)
            if facts["do"] == "stop":
                return
            verbs[facts["do"]](facts, tensors)

    def _attach(self, facts: dict[str, Any], tensors: list[Tensor]) -> None:
        self.keys, self.values = LayerPools(facts["pages"]), LayerPools(facts["pages"])
        self.states = StateMemory(facts["slots"])

    @torch.inference_mode()
    def _forward(self, facts: dict[str, Any], tensors: list[Tensor]) -> None:
        prompts = bool(facts.get("answers")) and self.half == 1
        for source, target in () if prompts else facts["copies"]:
            self.states.copy_slot(source, target)
        tokens, positions, *rest = tensors
        seen, rest = receive_features(facts["seen"], rest, self.compute.broadcast, self.device)
        fresh = facts["fresh"]
        keys, values = (LayerPools(fresh), LayerPools(fresh)) if fresh else (self.keys, self.values)
        layout = rebuild_layout(facts["layout"], rest, keys, values)
        if "runs" in facts:
            states = StateMemory(1) if fresh else self.states
            layout.states = SlotStates(states, [tuple(run) for run in facts["runs"]], self.device)
        tape = _new_tape(self.loaded, facts.get("records"))
        self._compute(facts, tokens, positions, layout, tape, seen)
        if prompts:
            self._end_prefill(tape)

    @property
    def half(self) -> int:
        """1 of the ranks that compute prompts for the others."""
        return self.compute.index // self.part.cuts.ranks.size

    @torch.inference_mode()
    def _compute_half(self, facts: dict[str, Any], tensors: list[Tensor]) -> None:
        """Of a step whose prompts one half of the ranks computes, and whose single tokens the other."""
        own, first = facts["parts"][self.half], facts["parts"][0]["tensors"] * self.half
        each, prompts = self.part.cuts.ranks.size, facts["parts"][1]["tensors"]
        copy_slots(self.states, facts["copies"], self.compute, each, read=prompts > 0)
        if not own["tensors"]:
            return
        tokens, positions, *rest = tensors[first : first + own["tensors"]]
        numbers = tensors[sum(part["tensors"] for part in facts["parts"]) :]
        if self.half and facts["seen"][0]:
            _, _, *numbers = numbers  # rows and pictures of the other half
        receive = partial(self.compute.receive, source=0)
        seen, _ = receive_features(facts["seen"][self.half], numbers, receive, self.device)
        tape = _new_tape(self.loaded, facts["records"])
        layout = rebuild_layout(own["layout"], rest, self.keys, self.values)
        if own["runs"]:
            layout.states = SlotStates(self.states, [tuple(run) for run in own["runs"]], self.device)
        self._compute(facts, tokens, positions, layout, tape, seen)
        if self.half:
            self._end_prefill(tape)

    def _end_prefill(self, tape: RoutingTape | None) -> None:
        """The other half is about to read what was written."""
        self.compute.send(torch.zeros(1, dtype=torch.int64), 0)
        if tape is not None and self.part.cuts.ranks.index == 0:
            routes = tape.recorded_routes
            self.compute.send(torch.tensor(routes.shape), 0)
            self.compute.send(routes, 0)

    def _compute(
        self,
        facts: dict[str, Any],
        tokens: Tensor,
        positions: Tensor,
        layout: PagedLayout,
        tape: RoutingTape | None = None,
        seen: VisionFeatures | None = None,
    ) -> None:
        """One pass, whose hidden states are kept for as long as the leader keeps its own."""
        self._hidden = {number: self._hidden[number] for number in facts["alive"] if number in self._hidden}
        self._hidden[facts["number"]] = self.loaded.hidden_states(tokens, positions, layout, tape, seen)

    @torch.inference_mode()
    def _step(self, facts: dict[str, Any], tensors: list[Tensor]) -> None:
        """Of the requests in this rank's own cache."""
        if (own := facts["parts"][self.compute.index - 1]) is None:
            idle = idle_pass(self.keys, self.values, self.device, recurrent=self.states.slots > 0)
            return self._compute(facts, *idle)
        for source, target in own["copies"]:
            self.states.copy_slot(source, target)
        tokens, positions, *rest = self.channel.receive_own(own["shapes"], self.device)
        seen, rest = receive_features(own["seen"], rest, partial(self.compute.receive, source=0), self.device)
        layout = rebuild_layout(own["layout"], rest, self.keys, self.values)
        if own["runs"]:
            layout.states = SlotStates(self.states, [tuple(run) for run in own["runs"]], self.device)
        tape = _new_tape(self.loaded, facts["records"])
        self._compute(facts, tokens, positions, layout, tape, seen)
        if tape is not None:
            self.compute.send(tape.recorded_routes, 0)

    @torch.inference_mode()
    def _give_own_logits(self, facts: dict[str, Any], tensors: list[Tensor]) -> None:
        if len(rows := tensors[0].split(facts["counts"])[self.compute.index - 1]):
            self.compute.send(self.loaded.logits(self._hidden[facts["number"]], rows), 0)

    @torch.inference_mode()
    def _give_columns(self, facts: dict[str, Any], tensors: list[Tensor]) -> None:
        z = self.loaded.logits(self._hidden[facts["number"]], tensors[0])
        self.compute.send(compared_columns(z), 0)

    @torch.inference_mode()
    def _give_logits(self, facts: dict[str, Any], tensors: list[Tensor]) -> None:
        self.part.join_logits(self.loaded.logits(self._hidden[facts["number"]], tensors[0]))

    @torch.inference_mode()
    def _give_rows(self, facts: dict[str, Any], tensors: list[Tensor]) -> None:
        if self.half and self.part.cuts.ranks.index == 0:
            self.compute.send(self._hidden[facts["number"]].index_select(0, tensors[0]), 0)

    @torch.inference_mode()
    def _multiply_rows(self, facts: dict[str, Any], tensors: list[Tensor]) -> None:
        """Hidden states that the leader has, with this rank's part of the head."""
        if not self.half:
            ranks = self.part.cuts.ranks
            rows = receive_tensor(facts["dtype"], facts["shape"], ranks.broadcast, self.device)
            self.part.join_logits(self.loaded.head.logits(rows))

    def _share(self, facts: dict[str, Any], tensors: list[Tensor]) -> None:
        """One cache with the rank of the other half that has the same key heads."""
        cache = share_cache(self.loaded, facts["pages"], facts["slots"], self.compute, self.part.cuts.ranks.size)
        self.keys, self.values = cache.keys, cache.values
        if cache.states is not None:
            self.states = cache.states

    # -- memory ----------------------------------------------------------------------------------

    def _sleep(self, facts: dict[str, Any], tensors: list[Tensor]) -> None:
        if "kv_cache" in facts["tags"]:
            self.keys.clear()
            self.values.clear()
            self.states.clear()
        self.resting.sleep(tuple(facts["tags"]))

    def _wake(self, facts: dict[str, Any], tensors: list[Tensor]) -> None:
        self.resting.wake(tuple(facts["tags"]))


def _new_tape(loaded: LoadedModel, width: int | None) -> RoutingTape | None:
    """As wide as the leader's; None: nothing is recorded."""
    return None if width is None else loaded.routing_tape(longest=None if width else 0)
