"""The trainable tokens that the loss is a sum over: what is known of each, what the parts of a row see, and what is
made of the log-probabilities of one: exponentials that do not overflow, estimates of a KL (kl.py), and they themselves,
of the logits of a vocabulary. And how much of an answer's tokens repeats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from typing import Any

import numpy as np

from rondel.algos.tensors import Tensor, torch


@dataclass(slots=True)
class TokenBatch:
    """T trainable tokens of whole samples, in the order of the samples; [T] each, None while it is not known.

    A sample has one, a micro-batch is the concatenation of its samples'; there `logprobs`, `entropy`, `full_kl` and
    `step_kl` are those of the forward pass and carry a gradient.
    """

    sample: Tensor  # int64: which tokens belong together
    logprobs: Tensor | None = None  # log pi, of the forward pass
    entropy: Tensor | None = None  # of the policy at the token, in nats
    behavior: Tensor | None = None  # log-probability when the token was drawn, by the engine
    versions: Tensor | None = None  # int64: of the weights that drew it
    age: Tensor | None = None  # versions between those weights and the ones that begin the step
    proximal: Tensor | None = None  # log-probability by the weights that began the step
    trained: Tensor | None = None  # by the same weights, in the pass that trained the token
    start: Tensor | None = None  # by the weights that began the run
    reference: Tensor | None = None  # by the reference model
    teacher: Tensor | None = None  # by the teacher, or the weighted mean of several
    teachers: dict[int, Tensor] = field(default_factory=dict)  # by each of them
    margins: dict[int, Tensor] = field(default_factory=dict)  # by each of them that is a hint: as in ScoredSamples
    values: Tensor | None = None  # what the critic expected before the token
    returns: Tensor | None = None  # what the critic is to learn
    advantages: Tensor | None = None
    collision: Tensor | None = None  # sum of p² over the vocabulary, by the weights that began the step
    score: Tensor | None = None  # the reward of the token's sample
    # [T, K] of the tokens that were likeliest when it was drawn, or that were drawn beside it; -inf for the
    # log-probability of what fills a row up:
    top_ids: Tensor | None = None  # int64
    top_behavior: Tensor | None = None  # log-probability, of the distribution that drew the token
    top_logprobs: Tensor | None = None  # log pi of the same ids, of the forward pass, with its gradient
    demonstration: Tensor | None = None  # bool: nobody drew it
    reference_mean: Tensor | None = None  # [T, D] means of the steps of a flow, by the reference model
    step_kl: Tensor | None = None  # KL(policy || reference) of the Gaussian of a step, of the forward pass
    full_kl: Tensor | None = None  # divergence of policy and teacher over the whole vocabulary, of the row's kind
    # decided over the whole update before its first micro-batch (`decide_update`):
    correction: Tensor | None = None  # weight of the surrogate
    counts: Tensor | None = None  # 0 or 1: counts in the denominators, and pays KL and entropy
    selected: Tensor | None = None  # 0 or 1: chosen by the surrogate
    entropy_mask: Tensor | None = None  # 0 or 1: where the entropy bonus acts

    def with_fields(self, **known: Any) -> TokenBatch:
        """The same tokens, of which more is known, or less."""
        return replace(self, **known)

    def __getstate__(self) -> dict[str, Any]:
        """To another process: arrays, which can travel beside a pickle; and a part of a tensor would travel as the
        whole.
        """
        known = {f.name: getattr(self, f.name) for f in fields(self)}
        more = {
            "teachers": {number: _to_array(value) for number, value in self.teachers.items()},
            "margins": {number: _to_array(value) for number, value in self.margins.items()},
            "sample": len(self.sample) if self.sample.stride() == (0,) else _to_array(self.sample),
        }
        return {name: _to_array(value) for name, value in known.items() if name != "sample"} | more

    def __setstate__(self, known: dict[str, Any]) -> None:
        more = {
            name: {number: _to_tensor(value) for number, value in known[name].items()}
            for name in ("teachers", "margins")
        }
        for name, value in (known | more).items():
            setattr(self, name, _to_tensor(value))

    @staticmethod
    def concat(samples: Sequence[TokenBatch], device: Any = "cpu") -> TokenBatch:
        """The tokens of several samples, one behind the other: what is known of all of them."""
        found: dict[str, Any] = {}
        for name in (f.name for f in fields(TokenBatch) if f.name not in ("sample", "teachers", "margins")):
            if not samples or getattr(samples[0], name) is None:
                continue
            pieces = [getattr(sample, name) for sample in samples]
            if all(piece is not None for piece in pieces):
                found[name] = torch.cat(_same_width(pieces, FILLER.get(name))).to(device)
        lengths = torch.tensor([len(sample.sample) for sample in samples], dtype=torch.int64)
        return TokenBatch(torch.arange(len(samples)).repeat_interleave(lengths).to(device), **found)


# what fills up the columns of a sample that has fewer than others: truncation left fewer tokens to record
FILLER = {"top_ids": 0, "top_behavior": -math.inf}


def _same_width(pieces: list[Any], filler: float | None) -> list[Any]:
    """[m, K_i] each -> [m, max K]; as they are where they have no filler."""
    if filler is None:
        return pieces
    widest = max(piece.shape[1] for piece in pieces)
    return [
        torch.cat([piece, piece.new_full((len(piece), widest - piece.shape[1]), filler)], 1)
        if piece.shape[1] < widest
        else piece
        for piece in pieces
    ]


def _to_array(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value


def _to_tensor(value: Any) -> Any:
    if isinstance(value, int):  # so many tokens of one sample
        return torch.zeros(1, dtype=torch.int64).expand(value)
    if not isinstance(value, np.ndarray):
        return value
    return torch.from_numpy(value if value.flags.writeable else value.copy())  # Ray's arrays are everyone's


@dataclass(frozen=True)
class Tokens:
    """The same tokens as the parts of one row see them, [T] each; what is not known is 0.

    Only `logprobs`, `log_ratio` and `top_logprobs` carry a gradient.
    """

    logprobs: Tensor  # log pi
    log_ratio: Tensor  # log pi - log pi_anchor, as the row's ratio sees it
    log_weight: Tensor  # log pi_proximal - log pi_behavior; 0 where no behavior is known
    # log pi - log pi_behavior, token by token and without gradient; log pi - log pi_proximal where no behavior is known
    log_drift: Tensor
    advantages: Tensor  # 0 where the row reads none
    sample: Tensor  # int64: which tokens belong together
    score: Tensor  # the reward of the token's sample
    entropy: Tensor  # of the policy at the token
    guided: Tensor  # bool: the token is of a demonstration, not of the policy
    selected: Tensor  # bool: what the surrogate's own `select` chose of the whole update
    age: Tensor  # versions since it was drawn
    top_behavior: Tensor | None = None  # [T, K] log-probabilities of the likeliest tokens, or of more draws
    top_logprobs: Tensor | None = None  # [T, K] log pi of the same


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


def repeated_fraction(tokens: Sequence[int], mask: Sequence[Any], n: int) -> float | None:
    """1 - distinct / all n-grams of the tokens that the policy wrote; one that spans a given
    token does not count. None when there are none.
    """
    grams: list[tuple[int, ...]] = []
    for written, run in groupby(zip(tokens, mask), key=lambda pair: bool(pair[1])):
        if written:
            own = [token for token, _ in run]
            grams += [tuple(own[i : i + n]) for i in range(len(own) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else None


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
