"""A draft learns what the policy writes, so that its guesses stay good while the policy moves.

    L = - mean over the written tokens of log q(token)      the tokens are samples of p, so
    this is KL(p || q) + constant: distillation

Its weights, gradients and optimizer are its own; the policy's are not touched.  arXiv:2310.07177.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from rondel.core.events import Warned, emit
from rondel.train import annotate as notes
from rondel.train.loss_scale import loss_scale_of
from rondel.train.optim import MasterWeights
from rondel.train.pack import TrainBatch, micro_batches, micro_budget

if TYPE_CHECKING:
    from rondel.models.loaded_model import LoadedModel
    from rondel.train.settings import TrainSettings


class DraftTrainer:
    """AdamW with a constant rate for the draft's own module, which the engine reads."""

    def __init__(self, loaded: LoadedModel, *, lr: float) -> None:
        self.loaded, self.lr = loaded, lr
        self.weights = MasterWeights(
            loaded.model, betas=(0.9, 0.99), weight_decay=0.0, loss_scale=loss_scale_of(loaded.model)
        )

    def step(self, batch: TrainBatch, policy: TrainSettings) -> dict[str, float]:
        """One move on a batch of the policy, at the temperature of its samples; on the device's thread."""
        if not batch.total_tokens:
            return {}
        self.weights.zero_grad()
        loss = 0.0
        for packed in micro_batches(
            batch, micro_budget(batch, policy), share=policy.share_prompts, device=self.loaded.device
        ):
            logprobs, _ = notes.forward(self.loaded, packed, temperature=policy.temperature)
            part = -logprobs.sum() / batch.total_tokens
            self.weights.backward(part)
            loss += float(part.detach())
        norm = self.weights.gradient_norm()
        if not math.isfinite(float(norm)) or not math.isfinite(loss):
            scaled = "; the loss scale halves" if self.weights.overflowed(norm) else ""
            self.weights.zero_grad()
            emit(
                Warned(
                    f"the draft was not trained in this step: its loss is {loss}, the norm of its gradient "
                    f"{float(norm)}{scaled}"
                )
            )
            return {"train/draft_loss": loss}
        self.weights.step(lr=self.lr, clip=policy.clip, norm=torch.as_tensor(norm))
        return {"train/draft_loss": loss}
