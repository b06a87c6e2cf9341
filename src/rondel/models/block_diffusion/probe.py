"""What both sides of a weight update must agree on of a block-diffusion model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from rondel.core.unmasking_steps import ABSENT, MASKED
from rondel.models.block_diffusion.packed_blocks import BlockRow, PackedBlocks

if TYPE_CHECKING:
    from rondel.models.loaded_model import LoadedModel


@torch.no_grad()
def score_prompt(loaded: LoadedModel, tokens: Sequence[int]) -> list[float]:
    """Log-probabilities of tokens in blocks behind the first one, each block masked as a whole;
    0 for the first token."""
    assert loaded.blocks is not None
    ids, size = np.asarray(tokens, np.int32), loaded.blocks.block
    if len(ids) < 2:
        return [0.0] * len(ids)
    seen = np.full((len(ids) - 1, size), MASKED, np.int32)
    last = (len(ids) - 1) // size * size
    seen[last:, len(ids) - 1 - last :] = ABSENT
    row = BlockRow()
    source = row.place_answer(ids[:1], ids[1:], seen)
    packed = PackedBlocks.of_row(row, [source], loaded.device)
    logprobs = loaded.head.logits(packed.hidden_states(loaded)).log_softmax(-1)
    target = torch.from_numpy(ids[1:]).long().to(loaded.device)
    return [0.0, *logprobs.gather(1, target[:, None])[:, 0].tolist()]
