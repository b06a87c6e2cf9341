"""How far a policy's distribution of one token is from a teacher's, and which way its logits would have to move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rondel.algos.tensors import Tensor, torch

LEAST = 1e-38  # of a probability in a logarithm, the least that float32 holds with all its digits


class VocabularyColumns(Protocol):
    """Columns of one rank, of `total` that lie over several; `widest`: most columns of a rank."""

    @property
    def index(self) -> int: ...

    @property
    def widest(self) -> int: ...

    @property
    def total(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor:
        """Over the ranks, in place."""

    def gather(self, x: Tensor) -> Tensor:
        """[C, k] of each rank -> [C, ranks·k]."""


@dataclass(frozen=True)
class Divergence:
    """D(p, q) and dD/dz of p = softmax(z).  [C, V], [C, V] -> [C], [C, V].  arXiv:2306.13649 (GKD).

        beta = 1    sum p·log(p/q)                      g = log(p/q)
        beta = 0    sum q·log(q/p)                      g = -q/p
        between     beta·KL(q || m) + (1 - beta)·KL(p || m), m = (1 - beta)·p + beta·q       g = (1 - beta)·log(p/m)

    dD/dz = p·(g - sum p·g). With `top` the same over the policy's `top` likeliest tokens, for which both are scaled to
    a sum of 1, or beside which all others are one more token (`tail`), whose members then share its pull. `part`: whose
    columns these are, where other ranks have the rest.
    """

    beta: float = 1.0
    top: int = 0
    tail: bool = True

    @property
    def is_reverse_kl(self) -> bool:
        """The one that needs nothing but sum p·log q."""
        return self.beta == 1 and not self.top

    def __call__(self, p: Tensor, log_q: Tensor, part: VocabularyColumns | None = None) -> tuple[Tensor, Tensor]:
        if not self.top or self.top >= (p.shape[-1] if part is None else part.total):
            apart, g = self._compare(p, log_q)
            mean = (p * g).sum(-1, keepdim=True)
            return (apart, p * (g - mean)) if part is None else (part.sum(apart), p * (g - part.sum(mean)))
        head, log_q_head, at, mine = self._likeliest(p, log_q, part)
        if not self.tail:
            scaled = head / head.sum(-1, keepdim=True)
            apart, g = self._compare(scaled, log_q_head.log_softmax(-1))
            pull = scaled * (g - (scaled * g).sum(-1, keepdim=True))
            return apart, _place(torch.zeros_like(p), at, mine, pull)
        # 1 - the head's sum would be a rounding error
        rest_p = _place(p, at, mine, torch.zeros_like(head)).sum(-1, keepdim=True)
        rest_q = _place(log_q, at, mine, torch.full_like(head, -torch.inf)).logsumexp(-1, keepdim=True)
        if part is not None:
            rest_p, rest_q = part.sum(rest_p), part.gather(rest_q).logsumexp(-1, keepdim=True)
        apart, g = self._compare(torch.cat([head, rest_p], -1), torch.cat([log_q_head, rest_q], -1))
        mean = (head * g[..., :-1]).sum(-1, keepdim=True) + rest_p * g[..., -1:]
        spread = _place(g[..., -1:].expand_as(p), at, mine, g[..., :-1])
        return apart, p * (spread - mean)

    def _likeliest(
        self, p: Tensor, log_q: Tensor, part: VocabularyColumns | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """p and log q of the `top` likeliest tokens of the whole vocabulary [C, top], which column here each is, and
        whether it is one of these; None: all are. Each rank tells the others its own likeliest.
        """
        if part is None:
            head, at = p.topk(self.top, -1)
            return head, log_q.gather(-1, at), at, None
        wide = min(self.top, part.widest)
        own, at = p.topk(min(wide, p.shape[-1]), -1)
        spare = [0, wide - own.shape[-1]]  # of a rank with fewer columns than others
        pad = torch.nn.functional.pad
        told = part.gather(torch.cat([pad(own, spare, value=-1.0), pad(log_q.gather(-1, at), spare)], -1))
        told = told.view(len(p), -1, 2, wide).transpose(1, 2).flatten(2)  # [C, 2, ranks·wide]
        head, slot = told[:, 0].topk(self.top, -1)
        slot_here = slot - part.index * wide
        mine = (slot_here >= 0) & (slot_here < at.shape[-1])
        return head, told[:, 1].gather(-1, slot), at.gather(-1, slot_here * mine), mine

    def _compare(self, p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        """D and g over the last dimension."""
        log_p = p.clamp_min(LEAST).log()
        if self.beta == 1:
            return (p * (log_p - log_q)).sum(-1), log_p - log_q
        q = log_q.exp()
        if self.beta == 0:
            return (q * (log_q - log_p)).sum(-1), -q / p.clamp_min(LEAST)
        log_m = ((1 - self.beta) * p + self.beta * q).clamp_min(LEAST).log()
        apart = self.beta * (q * (log_q - log_m)) + (1 - self.beta) * (p * (log_p - log_m))
        return apart.sum(-1), (1 - self.beta) * (log_p - log_m)

    def __str__(self) -> str:
        kind = f"Jensen-Shannon divergence, {self.beta:g} of the teacher in the mixture,"
        if self.beta in (0, 1):
            kind = "KL(policy || teacher)" if self.beta else "KL(teacher || policy)"
        if not self.top:
            return kind
        return f"{kind} of the policy's {self.top} likeliest tokens{', all others as one' if self.tail else ''}"


def _place(x: Tensor, at: Tensor, mine: Tensor | None, values: Tensor) -> Tensor:
    """x [C, V] with values [C, k] in the columns `at` that are `mine`."""
    if mine is None:
        return x.scatter(-1, at, values)
    spare = torch.cat([x, x[..., :1]], -1)  # what others have goes into a column more
    return spare.scatter(-1, torch.where(mine, at, x.shape[-1]), values)[..., :-1]


def binary_tv(now_T: Tensor, before_T: Tensor) -> Tensor:
    """|p - q| from log p, log q.  [T], [T] -> [T].  The total variation of "this token or another"."""
    return (now_T.exp() - before_T.exp()).abs()


def binary_kl(now_T: Tensor, before_T: Tensor) -> Tensor:
    """q·log(q/p) + (1-q)·log((1-q)/(1-p)) from log p, log q.  [T], [T] -> [T].  1-p and 1-q are kept above 1e-7."""
    q_T = before_T.exp()
    other_now_T, other_before_T = (-torch.expm1(x_T).clamp(max=-1e-7) for x_T in (now_T, before_T))
    return q_T * (before_T - now_T) + other_before_T * (other_before_T.log() - other_now_T.log())
