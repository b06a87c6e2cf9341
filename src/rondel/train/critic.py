"""A critic: what the rewards still to come will add up to, said before every token. Its own
backbone, its own AdamW, one number a token.

    policy  hidden [T, D] -> head   [V, D] -> logprob of the token that follows
    critic  hidden [T, D] -> value  [1, D] -> V of the state in which that token is chosen
            the same packed rows, cut the same way

Its head starts at 0: before it has learned anything it expects nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from rondel.algos.aggregate import sample_weights
from rondel.models.activation_offload import activation_store
from rondel.models.head import LMHead
from rondel.models.packed_steps import PackedSteps
from rondel.models.recompute import install_recompute
from rondel.models.step_head import StepHead
from rondel.train.optim import MasterWeights
from rondel.train.pack import MicroBatches, PackedBatch, TrainBatch, micro_batches, micro_budget
from rondel.train.parallel import ALONE, SingleRank
from rondel.train.row_share import forward_stage, own_share

if TYPE_CHECKING:
    from rondel.algos.table import Algorithm
    from rondel.models.loaded_model import LoadedModel
    from rondel.train.settings import TrainSettings
    from rondel.train.step_metrics import StepMetricSums


class Critic:
    """Values, the gradient of their loss, and a move; all on the device's thread.

    loaded    where the backbone starts; it is copied. Under an adapter, that is: the same base,
              and an adapter of the critic's own
    follows   start as the policy is at the critic's first step (after a supervised phase, say), and not as `loaded` was
    """

    def __init__(
        self, loaded: LoadedModel, settings: TrainSettings, *, follows: bool = True, ranks: SingleRank = ALONE
    ) -> None:
        backbone = loaded.copy_trainable()
        model = backbone.model
        value = nn.Linear(loaded.head.weight.shape[1], 1, device=loaded.device, dtype=torch.float32)
        nn.init.zeros_(value.weight)
        nn.init.zeros_(value.bias)
        model.set_output_embeddings(value)
        keep = activation_store(settings.activations, settings.folder)
        install_recompute(model, settings.recompute, backbone.adapter, keep)
        head = backbone.head if isinstance(backbone.head, StepHead) else LMHead(value.weight, value.bias)
        self.loaded = ranks.shard_model(replace(backbone, head=head, compute=loaded.dtype))
        self.weights = ranks.make_masters(model, **settings.optimizer_options)
        self.follows, self.ranks = follows, ranks
        self.steps = 0  # that it took part in

    def copy_backbone(self, policy: MasterWeights) -> None:
        """Before its first step: the policy's backbone, in full precision."""
        if self.follows and self.steps == 0:
            theirs = {name: policy.read_master(i) for i, name in enumerate(policy.names)}
            head = {id(parameter) for parameter in self.loaded.model.get_output_embeddings().parameters()}
            backbone = {
                name for name, parameter in zip(self.weights.names, self.weights.compute) if id(parameter) not in head
            }
            own = {name: self.weights.read_master(i) for i, name in enumerate(self.weights.names)}
            self.weights.load_masters(
                {name: theirs[name] if name in backbone else master for name, master in own.items()}
            )

    def predict_values(self, packed: PackedBatch) -> Tensor:
        """V of the states in which the trainable tokens of one micro-batch are chosen.  -> [M] in fp32."""

        own = packed if self.loaded.context is None else own_share(packed, self.loaded.context)

        def compute_values(head: LMHead | StepHead) -> Tensor:
            if isinstance(head, StepHead):
                assert isinstance(packed.steps, PackedSteps), "samples without the steps that this model draws"
                return self._values_of(head.states(packed.steps))
            hidden = self.loaded.hidden_states(
                own.tokens, own.positions, own.layout, seen=own.encode_images(self.loaded)
            )
            return self._values_of(hidden.index_select(0, own.source))

        return own.join_targets(self.loaded.run_with_head(compute_values))

    def _values_of(self, states: Tensor) -> Tensor:
        """[M, W] -> [M]"""
        found: Tensor = self.loaded.model.get_output_embeddings()(states.float())[:, 0]
        return found

    @torch.no_grad()
    def annotate_values(self, batch: TrainBatch, settings: TrainSettings) -> None:
        """Write the values into every sample's tokens, and of an episode that its world cut off that
        of what came then."""
        done: list[int] = []
        for packed in self._split_batch(batch, settings):
            if not self.loaded.has_head:
                forward_stage(self.loaded, packed)
                continue
            values = self.predict_values(packed)
            if not packed.idle:
                batch.write_tokens(packed.samples, values=values)
                done += packed.samples
        self.ranks.exchange_tokens(batch, done, "values")
        if cut := [sample for sample in batch.samples if sample.after is not None]:
            rows = [np.asarray(sample.after)[None] for sample in cut]
            prompts = [sample.tokens[: sample.prompt_length] for sample in cut]
            states = self.loaded.head.states(PackedSteps.of(rows, prompts, self.loaded.device))
            for sample, value in zip(cut, self._values_of(states).tolist(), strict=True):
                sample.value_after = value

    def accumulate_gradients(
        self, batch: TrainBatch, row: Algorithm, settings: TrainSettings, sums: StepMetricSums, *, weight: float = 1.0
    ) -> Tensor:
        """The gradient of sum_t w_t·m_t over an update, every weight fixed before its
        first micro-batch (law 3). -> its norm.
        """
        self.weights.zero_grad()
        weight_N = weight * sample_weights(row.aggregate, batch.lengths_N, batch.group_N).float().to(self.loaded.device)

        def forward(packed: PackedBatch, last: bool) -> tuple[Tensor, dict[str, Tensor]]:
            if not self.loaded.has_head:
                return forward_stage(self.loaded, packed), {}
            known = batch.tokens(packed.samples, self.loaded.device)
            assert known.values is not None and known.returns is not None
            loss_T, clipped_T = row.value(self.predict_values(packed), known.values, known.returns)
            terms = {} if packed.idle else {"value": loss_T.detach(), "value_clipped": clipped_T}
            return (weight_N[packed.sample] * loss_T).sum().mul(not packed.idle), terms

        def backward(made: tuple[Tensor, dict[str, Tensor]], last: bool) -> None:
            self.weights.backward(made[0])
            sums.add_terms(torch.zeros(()), made[1])

        packs = self._split_batch(batch, settings)
        self.ranks.run_passes(packs, forward, backward)
        return self.weights.gradient_norm()

    def optimizer_step(self, *, lr: float, clip: float, norm: Tensor) -> None:
        """By the accumulated gradient; without one the momentum of earlier steps does not move it either."""
        if norm > 0:
            self.weights.step(lr=lr, clip=clip, norm=norm)

    def _split_batch(self, batch: TrainBatch, settings: TrainSettings) -> MicroBatches:
        return micro_batches(
            batch,
            micro_budget(batch, settings),
            share=settings.share_prompts,
            device=self.loaded.device,
            rank=self.ranks.data_rank,
            ranks=self.ranks.data_size,
            stages=self.ranks.stages,
        )
