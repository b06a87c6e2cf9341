"""The contract of a part of an algorithm's row."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from rondel.algos.scored_samples import ScoredSamples
    from rondel.algos.tensors import Tensor
    from rondel.algos.tokens import Tokens

NOTHING: frozenset[str] = frozenset()
ADVANTAGE_AND_RATIO = frozenset({"advantage", "ratio"})


class Component:
    """A part of a row: a frozen dataclass whose fields are the knobs of a recipe, called with what its family is given.

    `Algorithm` says what each family is called with. What a row asks of a part beside the call has a default here, so
    a part of your own overrides only what differs:

        @dataclass(frozen=True)
        class Halved(Component):
            factor: float = 0.5
            def __call__(self, scored): return self.factor * scored.rewards_N
    """

    if TYPE_CHECKING:
        __call__: Callable[..., Any]

    reads: ClassVar[frozenset[str]] = ADVANTAGE_AND_RATIO
    """Of a surrogate: what it takes numbers from, of "advantage", "ratio", "behavior"."""

    scales_advantage: ClassVar[bool] = False
    """Of a surrogate: it is a multiple of the token's advantage, so a token whose advantage is 0 has no gradient. It is not
    inherited: a class that derives from such a one may add what is not.
    """

    token_ratio: ClassVar[bool] = False
    """Of a surrogate: it compares the token's own probabilities, so the ratio must be the token's."""

    probability: ClassVar[bool] = False
    """It reads log p as the probability of one token among others, at most 0. A density is none: it may be above 0."""

    weighs: ClassVar[bool] = False
    """Of a correction: it reaches from the behavior to the proximal policy."""

    reads_parts: ClassVar[bool] = False
    """Of an advantage: it reads the parts of a reward, so the shaped reward is not read."""

    remembers: ClassVar[bool] = False
    """Of an advantage: it follows what earlier steps have earned, which the trainer keeps."""

    compares: ClassVar[bool] = False
    """Of an advantage: it compares the samples of a group, so one sample has none."""

    per_token: ClassVar[bool] = False
    """Of an advantage: it returns a number a token, not a sample."""

    counts_groups: ClassVar[bool] = False
    """Of an aggregate: it is called with (lengths_N, group_N), for it counts the tokens of a group."""

    whole_distribution: ClassVar[bool] = False
    """Of a surrogate: log pi is the model's own, at temperature 1 over its whole vocabulary, not the sampler's."""

    counts_samples: ClassVar[bool] = False
    """Of an aggregate: its denominator is a number of samples, so one that is masked is counted out again."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.scales_advantage = vars(cls).get("scales_advantage", False)

    @property
    def needs(self) -> frozenset[str]:
        """What must be known of each token beside its log-probability: fields of a TokenBatch, as "ref_logprobs"."""
        return NOTHING

    @property
    def idle(self) -> Mapping[str, str]:
        """Knobs that change nothing as things stand, and why."""
        return {}

    def refuse_beside(self, parts: Mapping[str, Any]) -> None:
        """Raise a ConfigError, with its remedy, where the row has `parts`, by family,
        that this one cannot work with."""

    @property
    def slope(self) -> str:
        """Of a surrogate or a KL: the factor of ∇logp at ratio 1, as text for `rondel explain`."""
        return "dl/dlogp"

    @property
    def steepness(self) -> float:
        """Of a surrogate: the size of `slope` where the advantage is 1; an entropy bonus stands beside it."""
        return 1.0

    @property
    def push(self) -> str:
        """Of a surrogate: what its gradient has beside that of the drawn token, as text for `rondel explain`."""
        return ""

    @property
    def behavior_top(self) -> int:
        """Of a surrogate: how many of the tokens that were likeliest at each draw it needs; 0 for none."""
        return 0

    @property
    def behavior_draws(self) -> int:
        """Of a surrogate: how many more draws of the same distribution it needs at each draw; 0 for none."""
        return 0

    @property
    def asks_again(self) -> tuple[float, int, int] | None:
        """Of an advantage: with which probability a prompt without a success is asked for another group, how often in
        all, and of how many of the last groups answers are trained; None: never.
        """
        return None

    @property
    def anchor(self) -> str:
        """Of a ratio: "proximal", "behavior" or "reference", whose log-probability the policy's is compared with."""
        return "proximal"

    @property
    def denominator(self) -> str:
        """Of a correction: which tokens count in the denominators."""
        return "all"

    @property
    def selects_tokens(self) -> bool:
        """Of a surrogate or an entropy bonus: its `select` chooses tokens of the whole update."""
        return type(self).select is not Component.select

    def select(self, tokens: Tokens) -> Tensor:
        """[T] bool: the chosen tokens, asked for once, over the whole update, at the proximal policy."""
        raise NotImplementedError(f"{type(self).__name__} has no `select`")

    def truncated(self, log_weight_T: Tensor, sample_T: Tensor, weight_T: Tensor) -> Tensor | None:
        """[T] bool: of a correction, whether a bound held the weight of a token; None where it has none."""
        return None

    def weights_of(self, tokens: Tokens) -> Tensor:
        """[T]: of a correction, the weight of every token; overridden by one that looks at more than its call is
        given.
        """
        weight_T: Tensor = self(tokens.log_weight, tokens.sample, tokens.advantages)
        return weight_T

    def counts(self, log_weight_T: Tensor, sample_T: Tensor, weight_T: Tensor) -> Tensor:
        """[T] bool: of a correction whose denominator is not "all", the tokens that count."""
        raise NotImplementedError(f"{type(self).__name__} has a denominator, and no `counts`")

    def measures(self, log_weight_T: Tensor, sample_T: Tensor) -> dict[str, float]:
        """Metrics of a correction about what it chose over the whole update."""
        return {}

    def returns(self, scored: ScoredSamples) -> Tensor:
        """[T]: of an advantage that needs "values", what the critic is to learn."""
        raise NotImplementedError(f"{type(self).__name__} needs values, and has no `returns`")

    def bounded(self, max_tokens: int) -> Any:
        """The part with every length that the recipe left open."""
        return self


@dataclass(frozen=True)
class LossTerm(Component):
    """A per-token term of your own: the loss adds coef·term_t for every token that counts.

        @dataclass(frozen=True)
        class StayClose(LossTerm):
            needs: ClassVar[frozenset[str]] = frozenset({"behavior_logprobs"})
            def __call__(self, tokens): return (tokens.logprobs - tokens.behavior) ** 2

    `algo.terms = [{ kind = "my_terms:StayClose", coef = 0.05 }]` in a recipe. The call is given the micro-batch's
    TokenBatch, [T], and returns [T] with its gradient; it must not mix the tokens of different samples.

    coef    how much it weighs
    """

    coef: float = 0.1

    @property
    def name(self) -> str:
        """Of its metric, train/term_NAME: the class's, in lower case with underscores."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__).lower()
