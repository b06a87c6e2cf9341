"""Steps of several trajectories, packed for one pass of a model that draws points or actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(slots=True)
class PackedSteps:
    """M steps of several trajectories, as a model reads them.

    rows        [M, W]        `ContinuousSteps.rows` behind each other
    prompt      [P]           tokens of n prompts behind each other
    begins      [n]           where each begins
    prompt_of   [M]           which of them a step has
    """

    rows: Tensor
    prompt: Tensor
    begins: Tensor
    prompt_of: Tensor

    @classmethod
    def of(
        cls, rows: Sequence[np.ndarray], prompts: Sequence[Any], device: torch.device | str, dtype: Any = None
    ) -> PackedSteps:
        """Of each trajectory its steps [m, W] and the tokens of its prompt."""
        counts = torch.tensor([len(own) for own in rows])
        lengths = [len(prompt) for prompt in prompts]
        return cls(
            torch.from_numpy(np.concatenate(rows)).to(device, dtype),
            torch.from_numpy(np.concatenate([np.asarray(prompt, np.int64) for prompt in prompts])).to(device),
            torch.tensor([0, *np.cumsum(lengths)[:-1].tolist()], device=device),
            torch.repeat_interleave(torch.arange(len(rows)), counts).to(device),
        )
