"""A per-token loss term of your own: `algo.terms = [{ kind = "my_loss_term:StayClose", coef = 0.05 }]`.

The loss adds coef·term for every token that counts; `rondel explain` shows it, and its mean is train/term_stay_close.
"""

from dataclasses import dataclass
from typing import ClassVar

from rondel.algos.component import LossTerm
from rondel.algos.tokens import TokenBatch


@dataclass(frozen=True)
class StayClose(LossTerm):
    """(log pi - log mu)², mu the policy that drew the token; above `free` nats.

    free    a distance that costs nothing
    """

    free: float = 0.0
    needs: ClassVar[frozenset[str]] = frozenset({"behavior_logprobs"})

    def __call__(self, tokens: TokenBatch):
        return ((tokens.logprobs - tokens.behavior).abs() - self.free).clamp(min=0) ** 2
