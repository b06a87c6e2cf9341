"""The trainable tokens that the loss is a sum over."""

from __future__ import annotations

from dataclasses import dataclass

from rondel.algos.tensors import Tensor


@dataclass(frozen=True)
class Tokens:
    """T trainable tokens of whole samples, [T] each. Only `logprobs` and `log_ratio` carry a gradient."""

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
