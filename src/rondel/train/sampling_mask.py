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

    def of_vocabulary(self, first: int, size: int) -> SupportMask:
        """Among the ids [first, first + size) alone, as columns of that part. A token that kept none of them stays
        known by one column that does not exist, so that all of its own are cut.
        """
        inside = (self.ids >= first) & (self.ids < first + size)
        return SupportMask(torch.where(inside, self.ids - first, size), self.row)

    def of_tokens(self, chosen: Tensor) -> SupportMask:
        """Of the tokens `chosen` (ascending or not), under their places there."""
        place = torch.full((int(self.row.max()) + 1 if len(self.row) else 0,), -1, device=self.row.device)
        wanted = chosen[chosen < len(place)]
        place[wanted] = (chosen < len(place)).nonzero()[:, 0]
        row = place[self.row]
        order = row.argsort(stable=True)
        order = order[row[order] >= 0]
        return SupportMask(self.ids[order], row[order])

    def mask_logits(self, z: Tensor, rows: slice) -> Tensor:
        """z [C, V] of the tokens `rows`, with CUT wherever the draw kept nothing."""
        first, end = torch.searchsorted(self.row, torch.tensor([rows.start, rows.stop], device=z.device)).tolist()
        row = self.row[first:end] - rows.start
        gone = torch.zeros(z.shape, dtype=torch.bool, device=z.device).index_fill_(0, row, True)
        ids = self.ids[first:end].long()
        here = ids < z.shape[1]
        gone[row[here], ids[here]] = False
        return z.masked_fill(gone, CUT)
