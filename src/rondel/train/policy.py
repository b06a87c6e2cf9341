"""What training asks of a policy, whatever it draws: tokens or points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from rondel.core.errors import TrainError
from rondel.models.flow.loaded_flow import LoadedFlow
from rondel.models.head import LMHead
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.train.logprobs import logprob_and_entropy
from rondel.train.pack import PackedBatch
from rondel.train.row_share import RowShare, own_share

if TYPE_CHECKING:
    from rondel.models.loaded_model import LoadedModel
    from rondel.models.routing_tape import RoutingTape


class Policy(Protocol):
    """A head over a loaded model. Ratios, losses and everything behind them see only what `evaluate` returns."""

    def evaluate(
        self, packed: PackedBatch, *, temperature: float, tape: RoutingTape | None, drawn: bool
    ) -> tuple[Tensor, Tensor]:
        """(log-probability or log-density [M], entropy [M]) of what was drawn in one micro-batch, with its gradient."""
        ...

    def score_prompt(self, tokens: Sequence[int]) -> list[float]:
        """What both sides of a weight update must agree on of one text; 0 for the first token."""
        ...


def policy_of(loaded: LoadedModel) -> Policy:
    return FlowPolicy(loaded) if isinstance(loaded, LoadedFlow) else TokenPolicy(loaded)


class TokenPolicy:
    """Softmax over a vocabulary."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded

    def evaluate(
        self, packed: PackedBatch, *, temperature: float, tape: RoutingTape | None, drawn: bool
    ) -> tuple[Tensor, Tensor]:
        """`drawn`: of the distributions that top-k and top-p may have cut. Of a pipeline, the last stage's."""
        loaded = self.loaded
        own = packed if loaded.context is None else own_share(packed, loaded.context)

        def compute_logprobs(head: LMHead) -> tuple[Tensor, Tensor]:
            hidden = loaded.hidden_states(own.tokens, own.positions, own.layout, tape, packed.encode_images(loaded))
            return logprob_and_entropy(
                hidden.index_select(0, own.source),
                own.target,
                head,
                temperature=temperature,
                kept=own.kept if drawn else None,
            )

        logprobs, entropy = loaded.run_with_head(compute_logprobs)
        join_flips(own, tape)
        return own.join_targets(logprobs), own.join_targets(entropy)

    def score_prompt(self, tokens: Sequence[int]) -> list[float]:
        loaded = self.loaded
        ids = torch.tensor(tokens, device=loaded.device)

        def compute_logprobs(head: LMHead) -> Tensor:
            hidden = loaded.hidden_states(
                ids,
                torch.arange(len(ids), device=loaded.device),
                PackedLayout([PackedSegment(0, len(ids))], loaded.device),
            )
            if loaded.stage is not None and not loaded.has_head:
                loaded.stage.send_forward(hidden)
                return torch.zeros(len(ids) - 1, device=ids.device)
            return logprob_and_entropy(hidden[:-1], ids[1:], head)[0]

        found = loaded.run_with_head(compute_logprobs)
        return [0.0, *(found if loaded.stage is None else loaded.stage.link.broadcast_last(found)).tolist()]


class FlowPolicy:
    """The Gaussian of each denoising step. Its noise is recorded with the step, so no temperature is read."""

    def __init__(self, loaded: LoadedFlow) -> None:
        self.loaded = loaded

    def evaluate(
        self, packed: PackedBatch, *, temperature: float, tape: RoutingTape | None, drawn: bool
    ) -> tuple[Tensor, Tensor]:
        if packed.steps is None:
            raise TrainError(
                "trajectories without points for a flow: an environment that builds trajectories itself must hand "
                "Completion.steps to extend()"
            )
        return self.loaded.evaluate_steps(packed.steps)

    def score_prompt(self, tokens: Sequence[int]) -> list[float]:
        return self.loaded.score_prompt(tokens)


def join_flips(own: PackedBatch | RowShare, tape: Any) -> None:
    """Of a row that ranks share: each rank's tape gets the routes of its own part of it."""
    if tape is not None and tape.routes is not None and not isinstance(own, PackedBatch):
        tape.flips = [own.join_rows(flips_t) if i in tape.own else flips_t for i, flips_t in enumerate(tape.flips)]
