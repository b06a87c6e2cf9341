"""Tokens and scored samples by hand, for the tests of algos/."""

from __future__ import annotations

import torch
from torch import Tensor

from rondel.algos.scored import Scored
from rondel.algos.tokens import Tokens

torch.set_num_threads(1)
F64 = torch.float64


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


def near(found: Tensor, wanted: Tensor | list[float], within: float = 1e-10) -> bool:
    wanted = torch.as_tensor(wanted, dtype=found.dtype)
    return found.shape == wanted.shape and bool(((found - wanted).abs() <= within).all())


def slope(value: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(value, of, retain_graph=True)[0]


def tokens(logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, **more: Tensor) -> Tokens:
    """Whatever is not given is 0: one sample, no behavior, nothing guided, nothing selected."""
    flat, none = torch.zeros_like(logprobs.detach()), torch.zeros(logprobs.shape, dtype=torch.bool)
    rest = {"sample": none.long(), "log_weight": flat, "score": flat, "guided": none, "selected": none}
    return Tokens(logprobs=logprobs, log_ratio=log_ratio, advantages=advantages, **{**rest, **more})


def scored(rewards: Tensor, group: Tensor | None = None, lengths: Tensor | None = None, **parts: Tensor) -> Scored:
    """One group of samples of one token, unless told otherwise."""
    group = torch.zeros(len(rewards), dtype=torch.int64) if group is None else group
    return Scored(rewards, group, torch.ones(len(rewards), dtype=torch.int64) if lengths is None else lengths, parts)
