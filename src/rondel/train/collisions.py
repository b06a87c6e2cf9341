"""Sum of p² over the vocabulary at every trainable token: how likely two draws are the same. A pass of its own, for the
rows that ask for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rondel.train.annotate import forward_stage, join_flips, replay_tape
from rondel.train.logprobs import collision_probability
from rondel.train.pack import TrainBatch, micro_batches
from rondel.train.parallel import ALONE, SingleRank
from rondel.train.row_share import own_share

if TYPE_CHECKING:
    from rondel.models.head import LMHead
    from rondel.models.loaded_model import LoadedModel


@torch.no_grad()
def annotate_collisions(
    loaded: LoadedModel,
    batch: TrainBatch,
    *,
    budget: int,
    temperature: float,
    share: bool = True,
    replay: bool = False,
    ranks: SingleRank = ALONE,
) -> None:
    """Write the field `collision` of every sample's tokens, of the distributions that they were drawn from."""
    done: list[int] = []
    for packed in micro_batches(
        batch, budget, share=share, device=loaded.device, rank=ranks.data_rank, ranks=ranks.data_size
    ):
        tape = replay_tape(loaded, packed) if replay else None
        if not loaded.has_head:
            forward_stage(loaded, packed, tape)
            continue
        own: Any = packed if loaded.context is None else own_share(packed, loaded.context)

        def compute_collisions(head: LMHead, own: Any = own, tape: Any = tape, packed: Any = packed) -> Tensor:
            hidden = loaded.hidden_states(own.tokens, own.positions, own.layout, tape, packed.encode_images(loaded))
            return collision_probability(
                hidden.index_select(0, own.source), head, temperature=temperature, kept=own.kept
            )

        found = own.join_targets(loaded.run_with_head(compute_collisions))
        join_flips(own, tape)
        if not packed.idle:
            done += packed.samples
            batch.write_tokens(packed.samples, collision=found)
    ranks.exchange_tokens(batch, done, "collision")
