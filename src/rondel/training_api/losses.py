"""Losses of the training API: each a sum over tokens, L = Σ_t l_t, whose gradient is added as it is.

    z_t   log-probability of a target under the adapter        q_t   the one that it was drawn with ("logprobs")
    A_t   advantage ("advantages")                             r_t = exp(z_t - q_t)

    cross_entropy         -w_t z_t, w = "weights"
    importance_sampling   -r_t A_t
    ppo                   -min(r_t A_t, clip(r_t) A_t)                       arXiv:1707.06347
    cispo                 -sg[clip(r_t)] A_t z_t                             arXiv:2506.13585
    dro                   -(A_t z_t - β/2 (z_t - q_t)²)                      arXiv:2405.19107
    gspo                  the same as ppo with r = exp(mean over a sequence of (z - q)), whose gradient reaches each
                          of its tokens; the mean is over "sequence_ratio_mask" where it is given, else where A ≠ 0.
                          -Σ_t m_t min(r A_t, clip(r) A_t)                   arXiv:2507.18071

clip(r) is to [clip_low_threshold, clip_high_threshold], by default 0.8 and 1.2 (gspo: 1 - 3e-4 and 1 + 4e-4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rondel.core.errors import UserError
from rondel.core.registry import suggest_name
from rondel.training_api.backend import Example

Inputs = Mapping[str, Tensor]  # of each token


@dataclass(frozen=True, slots=True)
class Loss:
    """needs   inputs that each example has
    config  keys that it reads, with what they are when left out
    value   (z [N], inputs, config) -> l [N] of one example
    """

    needs: tuple[str, ...]
    config: Mapping[str, float]
    value: Callable[[Tensor, Inputs, Mapping[str, float]], Tensor]
    optional: tuple[str, ...] = ()


def _cross_entropy(z: Tensor, given: Inputs, config: Mapping[str, float]) -> Tensor:
    return -given["weights"] * z


def _importance_sampling(z: Tensor, given: Inputs, config: Mapping[str, float]) -> Tensor:
    return -(z - given["logprobs"]).exp() * given["advantages"]


def _clip(ratio: Tensor, config: Mapping[str, float]) -> Tensor:
    return ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])


def _ppo(z: Tensor, given: Inputs, config: Mapping[str, float]) -> Tensor:
    ratio, advantage = (z - given["logprobs"]).exp(), given["advantages"]
    return -torch.minimum(ratio * advantage, _clip(ratio, config) * advantage)


def _cispo(z: Tensor, given: Inputs, config: Mapping[str, float]) -> Tensor:
    return -_clip((z - given["logprobs"]).exp(), config).detach() * given["advantages"] * z


def _dro(z: Tensor, given: Inputs, config: Mapping[str, float]) -> Tensor:
    return -(given["advantages"] * z - 0.5 * config["beta"] * (z - given["logprobs"]).square())


def _gspo(z: Tensor, given: Inputs, config: Mapping[str, float]) -> Tensor:
    advantage = given["advantages"]
    mask = given["sequence_ratio_mask"] if "sequence_ratio_mask" in given else (advantage != 0).to(z.dtype)
    mean = ((z - given["logprobs"]) * mask).sum() / mask.sum().clamp_min(1)
    ratio = mean.exp()
    return -mask * torch.minimum(ratio * advantage, _clip(ratio, config) * advantage)


RL, CLIP = ("logprobs", "advantages"), {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES = {
    "cross_entropy": Loss(("weights",), {}, _cross_entropy),
    "importance_sampling": Loss(RL, {}, _importance_sampling),
    "ppo": Loss(RL, CLIP, _ppo),
    "cispo": Loss(RL, CLIP, _cispo),
    "dro": Loss(RL, {"beta": 0.05}, _dro),
    "gspo": Loss(
        RL, {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4}, _gspo, ("sequence_ratio_mask",)
    ),
}


def loss_named(name: str, config: Mapping[str, float], examples: Sequence[Example]) -> tuple[Loss, dict[str, float]]:
    """The loss and its complete config. UserError where an example lacks an input or has one of another shape."""
    if name == "stable_reinforce":
        raise UserError(
            "loss_fn 'stable_reinforce': its formula is not published, so nobody can compute it elsewhere; take "
            "'cispo' or 'importance_sampling', or forward_backward_custom"
        )
    if name == "custom":
        raise UserError(
            "loss_fn 'custom' as a graph is not carried; forward_backward_custom computes your function where you are"
        )
    if (loss := LOSSES.get(name)) is None:
        raise UserError(
            f"loss_fn '{name}' does not exist.{suggest_name(name, list(LOSSES))} It is one of {', '.join(LOSSES)}"
        )
    if strange := sorted(config.keys() - loss.config.keys()):
        raise UserError(
            f"loss_fn_config of '{name}' has no '{strange[0]}'; it reads {', '.join(loss.config) or 'nothing'}"
        )
    for i, example in enumerate(examples):
        given, where = example.inputs, f"example {i} for loss_fn '{name}'"
        if missing := [key for key in loss.needs if key not in given]:
            raise UserError(
                f"{where} lacks loss_fn_inputs['{missing[0]}']; it needs target_tokens, {', '.join(loss.needs)}"
            )
        if strange := sorted(given.keys() - {*loss.needs, *loss.optional, "mask"}):
            raise UserError(f"{where} has loss_fn_inputs['{strange[0]}'], which it does not read")
        for key, array in given.items():
            if array.shape != example.targets.shape:
                raise UserError(
                    f"{where}: {key} has shape {list(array.shape)}, target_tokens {list(example.targets.shape)}"
                )
    return loss, dict(loss.config) | dict(config)
