"""A correction that trains the least likely tokens of an update and no others: self-adaptation without a reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rondel.algos.advantage import Constant
from rondel.algos.component import Component
from rondel.algos.entropy import top_count_mask
from rondel.algos.tensors import Tensor, torch
from rondel.algos.tokens import Tokens
from rondel.core.errors import ConfigError

FLAT = 1e-12  # nats between the entropies of the chosen tokens, below which they are one


@dataclass(frozen=True)
class LeastLikely(Component):
    """c_t = least + (most - least)·(H_t - min H) / (max H - min H) for the `share` of the update's tokens that the
    proximal policy finds least likely, min and max over these; 0 for the others, which leave the denominators.  [T] ->
    [T].  arXiv:2608.31046 (OPSA).

    Beside a constant advantage of -1 it lowers what the policy drew and would hardly draw again, most where it was
    least decided. Nothing says that such a token was wrong: the assumption is that the tail of the policy is worse than
    its mode. The choice is over the whole update, so no packing and no rank changes it; the paper's code chooses on
    each rank by itself. Tokens as likely as the last one chosen are chosen too.
    All c are `most` where the entropies agree.

    share    of the update's tokens, rounded down, at least one
    least    weight of the chosen token of lowest entropy
    most     weight of the one of highest entropy; least = most weighs all alike
    """

    share: float = 0.2
    least: float = 0.5
    most: float = 1.0
    needs: ClassVar[frozenset[str]] = frozenset({"proximal_logprobs"})
    denominator: ClassVar[str] = "kept"

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"share = {self.share}; it must lie in (0, 1]: a share of the update's tokens")
        if not 0 < self.least <= self.most:
            raise ConfigError(
                f"least = {self.least}, most = {self.most}; 0 < least <= most, for the sign is that of the advantage"
            )

    def refuse_beside(self, parts: Mapping[str, Any]) -> None:
        """It knows no reward, no reference and no teacher, and its weights are the size of the advantage."""
        advantage = parts["advantage"]
        if not isinstance(advantage, Constant) or not advantage.value < 0:
            raise ConfigError(
                f"algo.advantage = {advantage} beside correction.kind = 'least_likely', which lowers the least "
                "likely tokens whatever they earned: set algo.advantage = { kind = 'constant', value = -1.0 }, or "
                "choose tokens by surrogate.kind = 'forking' and keep the rewards"
            )
        for name in ("kl", "distill"):
            if coef := parts[name].coef:
                raise ConfigError(
                    f"algo.{name}.coef = {coef:g} beside correction.kind = 'least_likely': it would act on the least "
                    f"likely tokens alone, and the rest would be free. Set algo.{name}.coef = 0"
                )

    def weights_of(self, tokens: Tokens) -> Tensor:
        logp_T, entropy_T = tokens.logprobs.detach(), tokens.entropy
        if not len(logp_T):
            return logp_T
        chosen_T = top_count_mask(-logp_T, max(1, int(self.share * len(logp_T))))
        low, high = entropy_T[chosen_T].min(), entropy_T[chosen_T].max()
        place_T = (entropy_T - low) / (high - low) if high - low > FLAT else torch.ones_like(entropy_T)
        return torch.where(chosen_T, self.least + (self.most - self.least) * place_T, 0.0).to(logp_T.dtype)

    def counts(self, log_weight_T: Tensor, sample_T: Tensor, weight_T: Tensor) -> Tensor:
        return weight_T != 0

    def __str__(self) -> str:
        size = f"{self.most:g}" if self.least == self.most else f"{self.least:g} to {self.most:g} as the entropy rises"
        return f"{size} for the {self.share:g} of the tokens that are least likely, else 0"
