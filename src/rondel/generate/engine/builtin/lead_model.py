"""The model of an engine of several processes (tensor parallel) as its first rank has it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rondel.generate.engine.builtin.lead_rank import LeadRank, LeadsRanks
from rondel.models.loaded_model import LoadedModel

if TYPE_CHECKING:
    from rondel.models.image_features import VisionFeatures
    from rondel.models.routing_tape import RoutingTape


@dataclass(slots=True)
class LeadModel(LeadsRanks, LoadedModel):
    """The part of the first rank; its passes are those of all ranks."""

    lead: LeadRank | None = field(default=None, repr=False)

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
            number = self.lead.send_pass(tokens, positions, layout, seen)
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
