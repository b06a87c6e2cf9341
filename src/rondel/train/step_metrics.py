"""What a step measures of its tokens: sums over all ranks, and how far the trainer's probabilities are from the
engine's, with an alarm.

T trainable tokens · x_t = log pi_trainer(t) - log mu(t), mu the engine's when the token was drawn, before any
rejection · w = exp(x), x clamped to ±20
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
from rondel.train.parallel import SingleRank


class StepMetricSums:
    """Per-token terms of a step, reduced once at its end."""

    def __init__(self) -> None:
        self.loss, self.packed = 0.0, 0
        self.shared = 0  # tokens of these whose keys and values ranks of cp give each other
        self.terms: dict[str, list[Tensor]] = {}
        self.values: dict[str, float] = {}
        self.expert_counts: dict[int, Tensor] = {}  # of each layer, tokens that went to each of its experts [E]

    def add_terms(self, loss: Tensor, terms: dict[str, Tensor]) -> None:
        self.loss += float(loss)
        for name, values in terms.items():
            self.terms.setdefault(name, []).append(values.float().cpu())  # no wait for what is on the host

    def add_routing_flips(self, flips_L: list[Tensor], margins_L: list[Tensor]) -> None:
        """Share of each token's own choice of experts that the engine's record does not hold, and by how much the last
        expert of that choice was ahead of the next one.
        """
        for layer, (flips, margins) in enumerate(zip(flips_L, margins_L)):
            self.terms.setdefault(f"flips_{layer}", []).append(flips.cpu())
            if len(margins) == len(flips):
                self.terms.setdefault(f"margins_{layer}", []).append(margins.cpu())

    def add_expert_counts(self, counts_LE: dict[int, Tensor]) -> None:
        for layer, counts_E in counts_LE.items():
            self.expert_counts[layer] = self.expert_counts.get(layer, 0) + counts_E

    def gather_ranks(self, ranks: SingleRank) -> None:
        """All that the ranks have summed."""
        own = {name: torch.cat(pieces) for name, pieces in self.terms.items() if pieces}
        counts = ranks.gather_data_ranks((self.loss, self.packed, self.shared))
        told = ranks.gather_arrays(own)
        self.loss, self.packed, self.shared = (sum(told) for told in zip(*counts))
        self.terms = {
            name: [terms[name] for terms in told if name in terms] for name in dict.fromkeys(n for t in told for n in t)
        }
        counted = ranks.all_gather_object({layer: counts_E.cpu() for layer, counts_E in self.expert_counts.items()})
        self.expert_counts = {}
        for told_LE in counted:
            self.add_expert_counts(told_LE)

    def put(self, name: str, value: float) -> None:
        self.values[name] = max(value, self.values.get(name, value))

    def to_metrics(self, updates: int) -> dict[str, float]:
        out = {"train/loss": self.loss / max(1, updates), "train/packed_tokens": float(self.packed), **self.values}
        if self.shared:
            out["train/shared_tokens"] = float(self.shared)
        terms = {name: torch.cat(pieces) for name, pieces in self.terms.items() if pieces}
        if "correction" in terms:
            terms["dropped"] = (terms["correction"] == 0).float()
        names_of = {
            "entropy": "train/entropy",
            "clipped": "train/clip_fraction",
            "kl": "train/kl_ref",
            "taught": "train/kl_teacher",
            "correction": "train/correction",
            "dropped": "train/correction_dropped",
            "truncated": "train/correction_truncated",
            "value": "train/value_loss",
            "value_clipped": "train/value_clip_fraction",
        }
        for term, name in names_of.items():
            if term in terms and terms[term].numel():
                out[name] = float(terms[term].mean())
        for name in (name for name in terms if name.startswith("term_") and terms[name].numel()):
            out[f"train/{name}"] = float(terms[name].mean())
        flips = {name: values for name, values in terms.items() if name.startswith("flips_")}
        if flips:
            out["train/route_flips"] = float(torch.cat(list(flips.values())).mean())
            out |= {f"train/route_{name}": float(values.mean()) for name, values in flips.items()}
            out |= _route_margins(flips, terms)
        out |= _expert_load(self.expert_counts)
        if "gap" in terms and terms["gap"].numel():
            gap = terms["gap"].abs()
            out |= {
                "train/gap_mean": float(gap.mean()),
                "train/gap_max": float(gap.max()),
                "train/gap_p99": float(np.quantile(gap.numpy(), 0.99)),
            }
        if "ratio" in terms and terms["ratio"].numel():
            out["train/ratio_max_deviation"] = float((terms["ratio"] - 1).abs().max())
        return out


def _route_margins(flips: dict[str, Tensor], terms: dict[str, Tensor]) -> dict[str, float]:
    """Quantiles of s_k - s_(k+1) over tokens and layers, of all and of those that chose otherwise than
    the engine did."""
    pairs = [
        (margins, flips[name]) for name in flips if (margins := terms.get(name.replace("flips", "margins"))) is not None
    ]
    if not pairs:
        return {}
    margins, flipped = (torch.cat(each) for each in zip(*pairs))
    out: dict[str, float] = {}
    for name, values in (("route_margin", margins), ("route_margin_flipped", margins[flipped > 0])):
        if len(values):
            quantiles = np.quantile(values.numpy(), (0.01, 0.5, 0.99, 1.0))
            out |= {f"train/{name}_{q}": float(v) for q, v in zip(("p01", "p50", "p99", "max"), quantiles)}
    return out


def _expert_load(counts: dict[int, Tensor]) -> dict[str, float]:
    """How even the load of the experts is: largest by mean, MaxVio + 1 of arXiv:2408.15664."""
    if not counts:
        return {}
    counts_LE = [counts[layer] for layer in sorted(counts)]
    busiest_L = [float(counts_E.max() / counts_E.float().mean()) for counts_E in counts_LE]
    return {
        "train/expert_load_imbalance": sum(busiest_L) / len(busiest_L),
        **{f"train/expert_load_imbalance_{layer}": ratio for layer, ratio in enumerate(busiest_L)},
        "train/starved_experts": float((torch.cat(counts_LE) == 0).float().mean()),
    }


# -- the trainer's probabilities against the engine's ------------------------------------------------------

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
