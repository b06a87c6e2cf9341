"""What truncation left of the vocabulary for the draw of some tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CUT = -1e30  # a logit whose weight is 0, and finite


class SupportMask(NamedTuple):
    """The ids that tokens were drawn from, of those among M tokens that had some cut off: token
    row[k] could be ids[k].
    """

    ids: Tensor  # [K]
    row: Tensor  # [K] ascending

    def mask_logits(self, z: Tensor, rows: slice) -> Tensor:
        """z [C, V] of the tokens `rows`, with CUT wherever the draw kept nothing."""
        first, end = torch.searchsorted(self.row, torch.tensor([rows.start, rows.stop], device=z.device)).tolist()
        row = self.row[first:end] - rows.start
        gone = torch.zeros(z.shape, dtype=torch.bool, device=z.device).index_fill_(0, row, True)
        gone[row, self.ids[first:end].long()] = False
        return z.masked_fill(gone, CUT)
