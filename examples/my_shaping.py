"""Post-processing of rewards of your own: `algo.shaping = { kind = "my_shaping:PerToken", price = 0.01 }`.

A component of an algorithm is a frozen dataclass derived from `Component`; its fields are its knobs in the recipe.
`algo.advantage`, `algo.surrogate` and the others take yours in the same way.
"""

from dataclasses import dataclass

from rondel.algos.component import Component


@dataclass(frozen=True)
class PerToken(Component):
    """R_i = r_i - price * length_i.  [N] -> [N].  Every token that the policy wrote costs something."""

    price: float = 0.01

    def __call__(self, scored):
        return scored.rewards_N - self.price * scored.lengths_N.to(scored.rewards_N.dtype)

    def __str__(self):
        return f"reward - {self.price:g}·length"
