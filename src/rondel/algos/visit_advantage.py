"""An advantage over several groups to one prompt: it is asked again while none of its answers is right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rondel.algos.component import Component
from rondel.algos.reward_transforms import NoShaping
from rondel.algos.scored_samples import ScoredSamples, group_sizes, over_group
from rondel.algos.tensors import Tensor, torch
from rondel.core.errors import ConfigError
from rondel.core.types import ATTEMPTS, SOLVED


@dataclass(frozen=True)
class Anchored(Component):
    """A_i = 1 - s/n for a right answer, -(1 - s/n)·right/wrong for a wrong one; s of n attempts at the prompt were
    right, right and wrong count those that are trained.  -> [N].  arXiv:2609.13443 (NGU).

    A prompt none of whose G answers is right is asked for G more, with probability `again`, up to `rounds` times in
    all; what the last `kept` rounds wrote is trained as one group, and what came before is counted alone. So a hard
    prompt's first success is not lost, its failures weigh what they are, and the advantages of a group add up to 0.
    Where all rounds are kept it is r - mean. A group without both kinds is 0, and the row's filter leaves it out.
    Rewards are 0 or 1. It assumes that a prompt that failed is worth more answers than another prompt.

    again     with which probability a prompt without a success is asked again
    rounds    groups that a prompt is asked for at most
    kept      of the last rounds, whose answers are trained
    """

    again: float = 0.5
    rounds: int = 8
    kept: int = 4
    compares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.again < 1:
            raise ConfigError(f"again = {self.again}; it must lie in [0, 1): a prompt may have no right answer at all")
        if not 1 <= self.kept <= self.rounds:
            raise ConfigError(f"kept = {self.kept}, rounds = {self.rounds}; 1 <= kept <= rounds")

    def refuse_beside(self, parts: Mapping[str, Any]) -> None:
        """It counts what is right, so nothing may change a reward before."""
        if not isinstance(parts["shaping"], NoShaping) or parts["kl"].in_reward:
            changed = "kl.where = 'reward'" if parts["kl"].in_reward else f"shaping = {parts['shaping']}"
            raise ConfigError(
                f"algo.{changed} beside advantage.kind = 'anchored', which counts rewards of 0 and 1: remove it, or "
                "let the KL be a term of the loss"
            )

    @property
    def asks_again(self) -> tuple[float, int, int]:
        return self.again, self.rounds, self.kept

    def __call__(self, scored: ScoredSamples) -> Tensor:
        group_N, right_N = scored.group_N, (scored.rewards_N > 0).to(scored.rewards_N.dtype)
        good_N, all_N = over_group(right_N, group_N, "sum"), group_sizes(right_N, group_N)
        share_N = good_N / all_N
        if ATTEMPTS in scored.parts:
            share_N = scored.parts[SOLVED].to(share_N.dtype) / scored.parts[ATTEMPTS].to(share_N.dtype)
        above_N = 1 - share_N
        bad_N = all_N - good_N
        advantage_N = torch.where(right_N > 0, above_N, -above_N * good_N / bad_N.clamp(min=1))
        return torch.where((good_N > 0) & (bad_N > 0), advantage_N, 0.0)

    def __str__(self) -> str:
        return (
            "1 - s/n if right, else -(1 - s/n)·right/wrong, s of n attempts solved; a prompt without success is asked "
            f"again with {self.again:g}, up to {self.rounds} times, the last {self.kept} kept"
        )
