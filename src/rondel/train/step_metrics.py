"""What a step measures of its tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

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
    """Quantiles of s_k - s_(k+1) over tokens and layers, of all and of those that chose otherwise than the engine did."""
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
