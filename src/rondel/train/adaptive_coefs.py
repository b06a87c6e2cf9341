"""Coefficients of KL and entropy that follow a target, and what advantages remember of earlier steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rondel.algos.group_advantages import AgentBaseline
from rondel.algos.prompt_norm import PromptNorm
from rondel.algos.tokens import TokenBatch
from rondel.train.pack import TrainBatch, TrainSample
from rondel.train.shaped_rewards import with_shaped_rewards

if TYPE_CHECKING:
    from rondel.algos.mixture import Mixture
    from rondel.algos.table import Algorithm


STEERED = ("kl", "entropy")  # parts of a row whose coefficient follows a target
BASELINE = "baseline of "  # what an agent has earned so far, by its name
REWARDS = "rewards of "  # the last ones of a task, by its name


@dataclass
class AdaptiveCoefs:
    """Where each coefficient with a target has got to, by its part of the row, and the last rewards of each task, where
    the row remembers them; a checkpoint keeps them.
    """

    values: dict[str, float] = field(default_factory=dict)
    rewards: dict[str, list[float]] = field(default_factory=dict)

    def stored(self) -> dict[str, Tensor]:
        """As a checkpoint keeps them, among tensors of other names."""
        known: dict[str, float | list[float]] = {**self.values, **{REWARDS + n: own for n, own in self.rewards.items()}}
        return {f"{name}_coef": torch.tensor(value, dtype=torch.float64) for name, value in known.items()}

    def restore(self, found: Mapping[str, Tensor]) -> None:
        """From tensors whose names end in _coef: some may be those of weights with such a name."""
        own = {name.removesuffix("_coef"): value for name, value in found.items()}
        single = {name: float(value) for name, value in own.items() if value.numel() == 1}
        self.values = {n: value for n, value in single.items() if n in STEERED or n.startswith(BASELINE)}
        self.rewards = {n.removeprefix(REWARDS): x.tolist() for n, x in own.items() if n.startswith(REWARDS)}

    def update_coefs(self, batch: TrainBatch, algo: Algorithm | Mixture, main: Algorithm) -> dict[str, float]:
        """Coefficients with a target follow what the step measured of their samples. ->
        what they were, and what was measured.
        """
        own = next((share.samples for row, _, share in batch.split_by_row(algo) if row is main), [])
        told: dict[str, float] = {}
        if main.kl.is_adaptive and own:
            told |= {"train/kl_coef": main.kl.coef, "train/kl_sample": (measured := kl_of_samples(TrainBatch(own)))}
            self.values["kl"] = main.kl.next_coef(measured, len(own))
        if main.entropy.is_adaptive and own:
            told["train/entropy_coef"] = main.entropy.coef
            self.values["entropy"] = main.entropy.next_coef(_mean_entropy(own))
        if main.advantage.remembers:
            order = sorted((s for s in own if s.parent is None), key=lambda s: (s.group, s.index))
            earned = _compared_rewards(main, TrainBatch(order))
            if isinstance(main.advantage, AgentBaseline):
                moved = main.advantage.next_baselines([s.agent for s in order], earned)
                self.values |= {f"{BASELINE}{agent}": value for agent, value in moved.items()}
            if isinstance(main.advantage, PromptNorm):
                self.rewards |= main.advantage.next_history([s.task for s in order], earned)
        return told

    def apply_coefs(self, algo: Algorithm) -> Algorithm:
        """The row with the coefficients that earlier steps have led to."""
        baselines = {n.removeprefix(BASELINE): b for n, b in self.values.items() if n.startswith(BASELINE)}
        if baselines and isinstance(algo.advantage, AgentBaseline):
            algo = replace(algo, advantage=replace(algo.advantage, baselines=algo.advantage.baselines | baselines))
        if self.rewards and isinstance(algo.advantage, PromptNorm):
            algo = replace(algo, advantage=replace(algo.advantage, history={**algo.advantage.history, **self.rewards}))
        known = {n: coef for n, coef in self.values.items() if n in STEERED and getattr(algo, n).is_adaptive}
        return replace(algo, **{name: replace(getattr(algo, name), coef=coef) for name, coef in known.items()})


def kl_of_samples(batch: TrainBatch) -> float:
    """Mean over samples of sum_t log pi_behavior - log pi_ref: in nats a sample,
    unbiased for the policy that wrote them.
    """
    known = batch.tokens()
    if not batch.samples or known.behavior is None or known.reference is None:
        return 0.0
    return float((known.behavior.double() - known.reference.double()).sum()) / len(batch.samples)


def _compared_rewards(row: Algorithm, batch: TrainBatch) -> list[float]:
    """The reward of each sample as the row's advantage has seen it: shaped, and charged with the KL. Branches are not
    among them: an episode is compared once.
    """
    scored = batch.scored_samples
    shaped = scored if row.takes_rewards else with_shaped_rewards(row, scored)
    rewards: list[float] = shaped.rewards_N.tolist()
    return rewards


def _mean_entropy(samples: Sequence[TrainSample]) -> float:
    entropy_T = TokenBatch.concat([s.known for s in samples]).entropy
    assert entropy_T is not None
    return float(entropy_T.mean())
