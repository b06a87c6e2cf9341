"""What training asks of a policy that draws points or actions:
the same as of one that draws tokens (annotate.py: Policy)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rondel.core.errors import TrainError
from rondel.models.packed_steps import PackedSteps

if TYPE_CHECKING:
    from rondel.models.loaded_model import LoadedModel
    from rondel.models.routing_tape import RoutingTape
    from rondel.train.pack import PackedBatch


class StepPolicy:
    """The distribution of each recorded step."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded

    def evaluate(
        self, packed: PackedBatch, *, temperature: float, tape: RoutingTape | None, drawn: bool
    ) -> tuple[Tensor, Tensor]:
        steps = steps_of(packed)

        def evaluate_steps(head: Any) -> Any:
            return head.evaluate_steps(steps, temperature=temperature)

        found: tuple[Tensor, Tensor] = self.loaded.run_with_head(evaluate_steps)
        return found

    def score_prompt(self, tokens: Sequence[int]) -> list[float]:

        def score_prompt(head: Any) -> Any:
            return head.score_prompt(tokens)

        found: list[float] = self.loaded.run_with_head(score_prompt)
        return found


def steps_of(packed: PackedBatch) -> PackedSteps:
    """Those of a micro-batch. TrainError where its trajectories have none."""
    if not isinstance(packed.steps, PackedSteps):
        raise TrainError(
            "trajectories without points or actions for a model that draws them: an environment that builds "
            "trajectories itself must hand Completion.steps to extend()"
        )
    return packed.steps
