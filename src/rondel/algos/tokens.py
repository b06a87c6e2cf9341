"""The trainable tokens that the loss is a sum over."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """T trainable tokens of whole samples, [T] each. Only `logprobs` and `log_ratio` carry a gradient."""

    logprobs: Tensor  # log pi
    log_ratio: Tensor  # log pi - log pi_proximal, as the row's ratio sees it
    advantages: Tensor  # 0 where the row reads none
    sample: Tensor  # int64: which tokens belong together
    log_weight: Tensor  # log pi_proximal - log pi_behavior; 0 where no behavior is known
    score: Tensor  # the reward of the token's sample
    guided: Tensor  # bool: the token is of a demonstration, not of the policy
    selected: Tensor  # bool: what the surrogate's own `select` chose of the whole update
