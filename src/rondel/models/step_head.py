"""What stands in the place of an LMHead where a model draws points or actions and not tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from rondel.core.errors import ConfigError, UserError

if TYPE_CHECKING:
    from torch import Tensor

    from rondel.models.collectives import RankGroup
    from rondel.models.packed_steps import PackedSteps
    from rondel.models.tensor_cuts import TensorCuts


class StepHead:
    """The policy of a module over the steps of a trajectory (core/continuous_steps.py): a density for each.

    kind  which engine draws its steps
    """

    kind = ""
    part = None

    def __init__(self, model: Any, ranks: RankGroup | None = None) -> None:
        """`ranks`: who shares the tokens of a sample."""
        self.model, self.ranks = model, ranks

    def of_copy(self, model: Any) -> Self:
        """The head of a copy of its model."""
        return type(self)(model)

    def shared_by(self, ranks: RankGroup | None) -> Self:
        """The head of the same model whose samples several ranks share; `ranks` None: one computes them. ConfigError
        where they cannot.
        """
        if ranks is not None:
            raise ConfigError(
                f"place.mesh has cp = {ranks.size}, and a {self.kind} has no tokens to share: leave cp out"
            )
        return self

    def cut_over(self, ranks: RankGroup, *, sequence: bool) -> TensorCuts:
        """Keep this rank's part of every matrix of the model that can be cut, in place; `sequence`: and of the rows
        between them. ConfigError where none can.
        """
        raise ConfigError(
            f"place.mesh has tp = {ranks.size}, and a {self.model.config.model_type} has no attention heads to share: "
            "leave tp out"
        )

    @property
    def point_size(self) -> int:
        """Numbers of a point that it draws as an answer; 0 where it draws actions."""
        return 0

    @property
    def step_tokens(self) -> int:
        """Tokens that a module reads of one step: 1 unless it cuts a point into patches."""
        return 1

    def describe(self, max_tokens: int, temperature: float) -> str:
        """What it draws, for whoever asks what a run has resolved."""
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:
        """Where the weights lie, and in what."""
        raise NotImplementedError

    def evaluate_steps(self, steps: PackedSteps, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """(log-probability or log-density [M], entropy [M]) of recorded steps under the weights of now."""
        raise NotImplementedError

    def step_means(self, steps: PackedSteps) -> Tensor:
        """[M, D] of each step's Gaussian, of a flow."""
        raise NotImplementedError

    def evaluate_with_reference(self, steps: PackedSteps, means: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`evaluate_steps`, and KL(policy || reference) of each step, by the means of the reference."""
        raise NotImplementedError

    def states(self, steps: PackedSteps) -> Tensor:
        """[M, W] what a critic reads of each step."""
        raise NotImplementedError

    def score_prompt(self, tokens: Sequence[int]) -> list[float]:
        """What both sides of a weight update must agree on: one number for each token, 0 for the first."""
        raise NotImplementedError


KINDS = {"flow": ("points", "flows"), "control": ("actions", "control"), "world": ("transitions of a world", "worlds")}


def refuse_step_head(name: str, head: Any) -> None:
    """UserError for what only serves text."""
    if isinstance(head, StepHead):
        what, page = KINDS[head.kind]
        raise UserError(
            f"'{name}' draws {what} and not tokens: train it with `rondel train` (docs/{page}.md)"
            + ("" if head.kind == "world" else ", or ask it over HTTP: `rondel serve`")
        )
