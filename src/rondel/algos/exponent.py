"""Exponentials that do not overflow: of a log-ratio, and of the logits of a vocabulary."""

from __future__ import annotations

from rondel.algos.tensors import Tensor

LIMIT = 20.0  # of a log-ratio: exp(20) = 5e8 is already absurd, and a hundred more would overflow


def bounded_exp(log_T: Tensor) -> Tensor:
    """exp(clamp(x, ±20)).  [T] -> [T].  Finite for every finite x; beyond the limit no gradient passes."""
    return log_T.clamp(-LIMIT, LIMIT).exp()


def select_logprobs(z: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scaled logits z [C, V] (may be overwritten), target [C] -> (logprob [C], z - max
    [C, V], exp of that, its sum [C, 1]).

    Engine and trainer both take this one, so that aligned numerics end in the same bits.
    """
    if len(z) == 1:  # torch sums a single row in another order
        logprob, shifted, e, total = select_logprobs(z.repeat(2, 1), target.expand(2))
        return logprob[:1], shifted[:1], e[:1], total[:1]
    top = z.amax(-1, keepdim=True)
    picked = z.gather(-1, target[:, None])
    e = z.sub_(top).exp()
    total = e.sum(-1, keepdim=True)
    return (picked - top - total.log())[:, 0], z, e, total
