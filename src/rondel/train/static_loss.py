"""The loss of a micro-batch as a function of its buffers alone, which can be traced, exported and compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from rondel.algos.objective import objective
from rondel.algos.scored_samples import dense_group_ids
from rondel.train.annotate import policy_of
from rondel.train.static_batch import known_of, packed_of

if TYPE_CHECKING:
    from rondel.algos.table import Algorithm
    from rondel.models.loaded_model import LoadedModel

Measured = dict[str, Tensor]  # [M] each


class StaticLoss(nn.Module):
    """`StaticLoss(loaded, row, 1.0)(inputs)` -> the loss, and the log-probability, entropy and terms of each target."""

    def __init__(self, loaded: LoadedModel, row: Algorithm, temperature: float) -> None:
        super().__init__()
        self.model = loaded.model
        self._loaded, self.row, self.temperature = loaded, row, temperature

    def forward(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Measured]:
        loaded = replace(self._loaded, head=self._loaded.head.of_copy(self.model))
        packed = packed_of(inputs)
        logprobs, entropy = policy_of(loaded).evaluate(packed, temperature=self.temperature, tape=None, drawn=False)
        known = known_of(inputs).with_fields(logprobs=logprobs, entropy=entropy)
        with dense_group_ids():
            loss, terms = objective(self.row, known, inputs["weight"])
        return loss, {"logprobs": logprobs, "entropy": entropy, **terms}
