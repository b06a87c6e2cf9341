"""Exponentials that do not overflow: of a log-ratio, what a KL is estimated by (kl.py), and of the logits of a
vocabulary.
"""

from __future__ import annotations

from rondel.algos.tensors import Tensor, torch

LIMIT = 20.0  # of a log-ratio: exp(20) = 5e8 is already absurd, and a hundred more would overflow


def bounded_exp(log_T: Tensor) -> Tensor:
    """exp(clamp(x, ±20)).  [T] -> [T].  Finite for every finite x; beyond the limit no gradient passes."""
    return log_T.clamp(-LIMIT, LIMIT).exp()


def k1(x_T: Tensor) -> Tensor:
    """x.  [T] -> [T].  Schulman 2020.  Unbiased, of either sign."""
    return x_T


def k2(x_T: Tensor) -> Tensor:
    """x²/2.  [T] -> [T].  Schulman 2020.  Half the second moment: biased unless x is small."""
    return x_T.square() / 2


def k3(x_T: Tensor) -> Tensor:
    """exp(-x) - 1 + x.  [T] -> [T].  Schulman 2020.  Unbiased where the policy covers
    the reference; x is clamped to ±20.
    """
    x_T = x_T.clamp(-LIMIT, LIMIT)
    return torch.expm1(-x_T) + x_T


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
