"""What a rank computes that has no request where others have some: all must meet at the experts of a mixture."""

from __future__ import annotations

import torch
from torch import Tensor

from rondel.generate.engine.builtin.states import StateMemory
from rondel.models.cache_pools import LayerPools
from rondel.models.paged_layout import PagedLayout, PrefillChunk
from rondel.models.recurrent.layout import SlotStates


def idle_pass(
    keys: LayerPools, values: LayerPools, device: torch.device, *, recurrent: bool
) -> tuple[Tensor, Tensor, PagedLayout]:
    """Tokens [1], positions [1] and layout of a pass for nobody, which is written into the scratch page."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    layout = PagedLayout(keys, values, zero, [PrefillChunk(0, 1, zero)])
    if recurrent:
        layout.states = SlotStates(StateMemory(1), [(0, 1, 0, True)], device)
    return zero, zero, layout
