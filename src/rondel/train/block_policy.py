"""What training asks of a policy that fills in blocks of masks: the same as of one that writes token after token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rondel.core.errors import TrainError
from rondel.core.unmasking_steps import UnmaskedAnswers
from rondel.models.block_diffusion.packed_blocks import PackedBlocks
from rondel.models.block_diffusion.probe import score_prompt
from rondel.train.logprobs import logprob_and_entropy

if TYPE_CHECKING:
    from rondel.models.head import LMHead
    from rondel.models.loaded_model import LoadedModel
    from rondel.models.routing_tape import RoutingTape
    from rondel.train.pack import PackedBatch


class BlockPolicy:
    """log p(token | block as it stood when the token was drawn, whole blocks before, prompt).

    Of a demonstration, L / n · log p of each of the n masked tokens of a block of L, and 0 of the others: its sum is an
    unbiased estimate of a bound below log p(answer | prompt), and the row sft on it is the loss of masked diffusion
    (arXiv:2502.09992, eq. 3 and 14; in blocks arXiv:2503.09573).
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded

    def evaluate(
        self, packed: PackedBatch, *, temperature: float, tape: RoutingTape | None, drawn: bool
    ) -> tuple[Tensor, Tensor]:
        found, loaded = packed.steps, self.loaded
        if not isinstance(found, UnmaskedAnswers):
            raise TrainError(
                "trajectories without unmasking steps for a model of blocks: an environment that builds trajectories "
                "itself must hand Completion.steps to extend()"
            )

        blocks = PackedBlocks.of(found, loaded.device)

        def compute_logprobs(head: LMHead) -> tuple[Tensor, Tensor]:
            return logprob_and_entropy(blocks.hidden_states(loaded), blocks.target, head, temperature=temperature)

        logprobs, entropy = loaded.run_with_head(compute_logprobs)
        weight = blocks.weight
        return logprobs * weight, torch.where(weight > 0, entropy, torch.zeros_like(entropy))

    def score_prompt(self, tokens: Sequence[int]) -> list[float]:
        return score_prompt(self.loaded, tokens)
