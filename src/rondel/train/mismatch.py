"""How far the trainer's probabilities are from the engine's: measured over every trained
token, before any rejection, with an alarm.

T trainable tokens · x_t = log pi_trainer(t) - log mu(t), mu the engine's when the token
was drawn · w = exp(x), x clamped to ±20
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rondel.algos.tokens import LIMIT, TokenBatch, bounded_exp, k3
from rondel.core.events import Warned, emit
from rondel.train.pack import TrainSample

TENTHS = 10  # parts of an answer, by position
# K3 in nats a token between two healthy programs of the same weights, several times over. SmolLM2 measures 5e-4 in
# bfloat16 with sums in fp32 (models/fp32_sums.py) and 1e-5 in float16; 2e-3 (vLLM beside transformers, too) and 4e-5
# where sums are rounded; in float32 1e-13
BOUNDS = {torch.float32: 1e-6, torch.float16: 5e-5, torch.bfloat16: 3e-3}
ROUNDED = {torch.float16: 2e-4, torch.bfloat16: 1e-2}
MIXTURE = 1e-1  # where rounding sends a token to another expert
# of an engine whose weights are rounded alone, by their bits: SmolLM2 measures 0.04 in 8 bits; in 4 bits 0.4 to 1, where
# few samples are worth their weight, which is said
QUANTISED = {8: 0.15, 4: 0.3}


def bound_of(
    dtype: torch.dtype, *, mixture: bool, foreign: bool, rounded: bool = False, engine_bits: float = 32
) -> float:
    """K3 of fresh tokens, in nats a token, above which trainer and engine disagree.
    rounded: a model of 16 bits that rounds its residual stream; foreign: a server, whose precision is not known.
    engine_bits: of a weight of an engine that rounds its weights alone.
    """
    quantised = max((bound for bits, bound in QUANTISED.items() if engine_bits < bits + 1), default=0.0)
    if mixture:
        return max(MIXTURE, quantised)
    if quantised:
        return quantised
    own = ROUNDED.get(dtype, BOUNDS[dtype]) if rounded else BOUNDS[dtype]
    return max(own, ROUNDED[torch.bfloat16] if foreign else 0.0)


def mismatch_metrics(log_weight_T: Tensor, behavior_T: Tensor, sample_T: Tensor, mask_T: Tensor) -> dict[str, float]:
    """What x says of two policies that should be one.  [T], [T], [T], [T] -> {name:
    number}.  Over mask_T; nothing of no tokens.

    k3                       mean of w - 1 - x: KL(mu || trainer), never negative; of fresh Gaussian logit
                             noise s it is s²/2·(1 - Σp²)
    probability_mean, _max   of |pi_trainer - mu|
    perplexity_ratio         mean over samples of exp(-mean x): the trainer's perplexity by the engine's
    chi2_token, chi2_sample  mean of w² - 1; the same with the samples' weights W = exp(Σ x)
    ess_token, ess_sample    (Σ w)² / (n·Σ w²), a share; the same with W
    weight_mean, _std, _max  of w: 1, 0 and 1 where both agree
    """
    x_T, mu_T = log_weight_T[mask_T].double(), behavior_T[mask_T].double()
    if not len(x_T):
        return {}
    w_T = bounded_exp(x_T)
    samples_N, index_T = sample_T[mask_T].unique(return_inverse=True)
    zeros_N = torch.zeros(len(samples_N), dtype=torch.float64)
    length_N = zeros_N.index_add(0, index_T, torch.ones_like(x_T))
    sum_N = zeros_N.index_add(0, index_T, x_T)
    difference_T = ((mu_T + x_T).exp() - mu_T.exp()).abs()
    found = {
        "k3": k3(-x_T).mean(),
        "probability_mean": difference_T.mean(),
        "probability_max": difference_T.max(),
        "perplexity_ratio": bounded_exp(-sum_N / length_N).mean(),
        "chi2_token": torch.expm1(2 * x_T.clamp(-LIMIT, LIMIT)).mean(),
        "chi2_sample": torch.expm1(2 * sum_N.clamp(-LIMIT, LIMIT)).mean(),
        "ess_token": _effective_sample_share(w_T),
        "ess_sample": _effective_sample_share(bounded_exp(sum_N)),
        "weight_mean": w_T.mean(),
        "weight_std": w_T.std(correction=0),
        "weight_max": w_T.max(),
    }
    return {name: float(value) for name, value in found.items()}


def _effective_sample_share(weight_N: Tensor) -> Tensor:
    """(Σ w)² / (n·Σ w²).  [N] -> scalar in (0, 1].  Kish 1965.  The share of the samples that
    equal weights would need.
    """
    return weight_N.sum().square() / (len(weight_N) * weight_N.square().sum())


def measure_mismatch(samples: list[TrainSample], version: int) -> dict[str, float]:
    """`mismatch_metrics` of the samples' tokens, its K3 by tenths of the answer, and by how many versions old a token
    is.

    A token is as old as the first of its answer: one that was held while weights changed went
    on from the keys and values of the old ones.
    """
    if not samples:
        return {}
    known = TokenBatch.concat([s.known for s in samples])
    assert known.behavior is not None and known.trained is not None
    mu_T = known.behavior.double()
    x_T = known.trained.double() - mu_T
    each = [len(s.trainable) for s in samples]
    sample_T = torch.arange(len(samples)).repeat_interleave(torch.tensor(each))
    out = {
        f"train/mismatch_{name}": value
        for name, value in mismatch_metrics(x_T, mu_T, sample_T, torch.ones_like(x_T, dtype=torch.bool)).items()
    }
    k3_T = k3(-x_T)
    tenth_T = _concat_pieces([np.arange(n) * TENTHS // max(1, n) for n in each])
    oldest = [s.known.versions for s in samples]
    lag_T = version - torch.cat([v.cummin(0).values for v in oldest if v is not None]).double()
    out |= dict(_mean_by_part("train/mismatch_k3_tenth", k3_T, tenth_T + 1))
    return out | dict(_mean_by_part("train/mismatch_k3_lag", k3_T, lag_T))


def _mean_by_part(prefix: str, value_T: Tensor, part_T: Tensor) -> Iterator[tuple[str, float]]:
    """The mean over each part: (prefix_3, number)."""
    for part in part_T.unique().tolist():
        yield f"{prefix}_{int(part)}", float(value_T[part_T == part].mean())


def _concat_pieces(pieces: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(pieces)).double()


@dataclass
class MismatchAlarm:
    """Speaks once when the K3 of fresh tokens rises above `most`, and again only after it has been below.

    Tokens of older versions are left out: there the policy itself has moved.

    rounded   the number format of an engine that rounds alone
    """

    most: float
    above: bool = False
    rounded: str = ""

    def check_step(self, drawn: list[TrainSample], version: int, where: str) -> dict[str, float]:
        """Engine against trainer over the drawn samples of a step, with a warning where they disagree. -> metrics."""
        if not drawn:
            return {}
        metrics = measure_mismatch(drawn, version)
        if told := self.check_metrics(metrics):
            emit(Warned(f"{where}: {told}"))
        return metrics

    def check_metrics(self, metrics: dict[str, float]) -> str:
        """What to tell the user, or nothing."""
        fresh = metrics.get("train/mismatch_k3_lag_0", 0.0)
        was, self.above = self.above, not fresh <= self.most
        if was or not self.above:
            return ""
        if self.rounded:
            return (
                f"the engine's weights in {self.rounded} draw another policy than is trained: K3 is {fresh:.1e} nats a "
                f"token on tokens of the current version, above {self.most:g}, and few samples are worth their weight "
                "(train/mismatch_ess_token). Take a format of more bits, or let the trainer round, too: model.format = "
                f'"{self.rounded}"'
            )
        return (
            f"trainer and engine disagree: K3 is {fresh:.1e} nats a token on tokens of the current version, above "
            f"{self.most:g}. "
            "Try model.dtype = 'float32' or engine.numerics = 'aligned' to tell rounding from a bug; of a mixture of "
            "experts look at "
            "train/route_flips and trainer.routing_replay; where train/mismatch_k3_tenth_10 is the largest, at the end "
            "of the answers"
        )
