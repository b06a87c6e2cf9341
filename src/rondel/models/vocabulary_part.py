"""The vocabulary cut over ranks: each has some rows of the head, and logits [C, V] lie nowhere whole.

    logprob = z[target] - max - log sum exp(z - max)      three sums over the ranks for C tokens: max, sum, z[target]

(Megatron-LM, arXiv:1909.08053, section 3)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from rondel.models.collectives import RankGroup, gather_runs


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """The ids [first, first + size) of this rank, of `total`; `widest`: the largest of all ranks' sizes, which are one
    apart at most.
    """

    first: int
    size: int
    widest: int
    total: int
    ranks: RankGroup

    @property
    def index(self) -> int:
        """Which of the parts it is."""
        return self.ranks.index

    def own_ids(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Ids of the vocabulary -> rows of this rank's part, 0 where another has it, and where this one does."""
        local = ids - self.first
        mine = (local >= 0) & (local < self.size)
        return local * mine, mine

    def select_logprobs(self, z: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `algos.tokens.select_logprobs` gives, of this rank's columns z [C, size] (overwritten);
        the sums are whole."""
        top = self.ranks.all_reduce(z.amax(-1, keepdim=True), dist.ReduceOp.MAX)
        local, mine = self.own_ids(target)
        picked = self.sum(z.gather(-1, local[:, None]) * mine[:, None])
        e = z.sub_(top).exp()
        total = self.sum(e.sum(-1, keepdim=True))
        return (picked - top - total.log())[:, 0], z, e, total

    def softmax(self, z: Tensor) -> Tensor:
        """This rank's columns of the softmax over all of them, of z [C, size] (overwritten)."""
        e = z.sub_(self.ranks.all_reduce(z.amax(-1, keepdim=True), dist.ReduceOp.MAX)).exp_()
        return e.div_(self.sum(e.sum(-1, keepdim=True)))

    def log_softmax(self, z: Tensor) -> Tensor:
        """The same of its logarithm: two sums over the ranks for C tokens."""
        z = z.sub_(self.ranks.all_reduce(z.amax(-1, keepdim=True), dist.ReduceOp.MAX))
        return z.sub_(self.sum(z.exp().sum(-1, keepdim=True)).log_())

    def sum(self, x: Tensor) -> Tensor:
        """Over the ranks, in place."""
        return self.ranks.all_reduce(x)

    def gather(self, x: Tensor) -> Tensor:
        """[C, k] of each rank -> [C, ranks·k]."""
        n = self.ranks.size
        return gather_runs(x, [len(x)] * n, self.ranks).view(n, *x.shape).transpose(0, 1).flatten(1)
