"""Coefficients of KL and entropy that follow a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rondel.algos.tokens import TokenBatch
from rondel.train.pack import TrainBatch, TrainSample

if TYPE_CHECKING:
    from rondel.algos.mixture import Mixture
    from rondel.algos.table import Algorithm


@dataclass
class AdaptiveCoefs:
    """Where each coefficient with a target has got to, by its part of the row; a checkpoint keeps them."""

    values: dict[str, float] = field(default_factory=dict)

    def update_coefs(self, batch: TrainBatch, algo: Algorithm | Mixture, main: Algorithm) -> dict[str, float]:
        """Coefficients with a target follow what the step measured of their samples. ->
        what they were, and what was measured.
        """
        own = next((share.samples for row, _, share in batch.split_by_row(algo) if row is main), [])
        told: dict[str, float] = {}
        if main.kl.is_adaptive:
            told |= {"train/kl_coef": main.kl.coef, "train/kl_sample": (measured := kl_of_samples(TrainBatch(own)))}
            self.values["kl"] = main.kl.next_coef(measured, len(own))
        if main.entropy.is_adaptive and own:
            told["train/entropy_coef"] = main.entropy.coef
            self.values["entropy"] = main.entropy.next_coef(_mean_entropy(own))
        return told

    def apply_coefs(self, algo: Algorithm) -> Algorithm:
        """The row with the coefficients that earlier steps have led to."""
        known = {name: coef for name, coef in self.values.items() if getattr(algo, name).is_adaptive}
        return replace(algo, **{name: replace(getattr(algo, name), coef=coef) for name, coef in known.items()})


def kl_of_samples(batch: TrainBatch) -> float:
    """Mean over samples of sum_t log pi_behavior - log pi_ref: in nats a sample,
    unbiased for the policy that wrote them.
    """
    known = batch.tokens()
    if not batch.samples or known.behavior is None or known.reference is None:
        return 0.0
    return float((known.behavior.double() - known.reference.double()).sum()) / len(batch.samples)


def _mean_entropy(samples: Sequence[TrainSample]) -> float:
    entropy_T = TokenBatch.concat([s.known for s in samples]).entropy
    assert entropy_T is not None
    return float(entropy_T.mean())
