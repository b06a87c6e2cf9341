"""What a step knows of every trained token before the first pass with a gradient: its log-probabilities under some
weights (proximal, reference, start), in the same packing as the update, and what it has earned,
for the whole step at once (law 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from rondel.algos.value import explained_variance
from rondel.core.errors import ConfigError, TrainError
from rondel.core.registry import find_registered
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.models.routing_tape import RoutingTape
from rondel.models.step_head import StepHead
from rondel.train.logprobs import collision_probability, logprob_and_entropy
from rondel.train.pack import MicroBatchShapes, PackedBatch, TrainBatch, micro_batches
from rondel.train.parallel import ALONE, SingleRank
from rondel.train.row_share import forward_stage, own_routes, own_share
from rondel.train.shaped_rewards import charge_advantages, returns_of, with_shaped_rewards
from rondel.train.step_policy import StepPolicy

if TYPE_CHECKING:
    from rondel.algos.scored_samples import ScoredSamples
    from rondel.algos.table import Algorithm
    from rondel.models.head import LMHead
    from rondel.models.loaded_model import LoadedModel


BLOCKS = "rondel.train.block_policy:BlockPolicy"  # by name: who trains text imports none


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
            hidden = loaded.hidden_states(own.tokens, own.positions, own.layout, tape, own.encode_images(loaded))
            return logprob_and_entropy(
                hidden.index_select(0, own.source),
                own.target,
                head,
                temperature=temperature,
                kept=own.kept if drawn else None,
            )

        logprobs, entropy = loaded.run_with_head(compute_logprobs)
        own.join_flips(tape)
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


def policy_of(loaded: LoadedModel) -> Policy:
    """Its head, by what it draws."""
    if loaded.blocks is not None:
        blocks: Policy = find_registered("policy", BLOCKS, {})(loaded)
        return blocks
    return StepPolicy(loaded) if isinstance(loaded.head, StepHead) else TokenPolicy(loaded)


def forward(
    loaded: LoadedModel,
    packed: PackedBatch,
    *,
    temperature: float,
    tape: RoutingTape | None = None,
    drawn: bool = False,
) -> tuple[Tensor, Tensor]:
    """(logprob [M], entropy [M]) of the trainable tokens of one micro-batch; of the distributions that they were
    `drawn` from, which top-k and top-p may have cut, or of whole ones. Of a pipeline, the last stage's.
    """
    return policy_of(loaded).evaluate(packed, temperature=temperature, tape=tape, drawn=drawn)


@torch.no_grad()
def annotate_logprobs(
    loaded: LoadedModel,
    batch: TrainBatch,
    name: str | int,
    *,
    budget: int,
    temperature: float,
    share: bool = True,
    replay: bool = False,
    drawn: bool = False,
    ranks: SingleRank = ALONE,
    shapes: MicroBatchShapes | None = None,
) -> TrainBatch:
    """Write the logprobs of `loaded` into the field `name` of every sample's tokens, and the entropy beside "proximal".

    name      a field of TokenBatch, or the number of a teacher
    replay    repeat the engine's routes: for the policy; other weights route for themselves
    drawn     the distribution that the engine drew from, which top-k and top-p may have cut: for
              whatever enters a ratio with the behavior. A reference or teacher drew nothing and
              keeps its whole vocabulary, so x = log pi -
              log pi_ref is that of the cut policy
    """
    done: list[int] = []
    where = {"rank": ranks.data_rank, "ranks": ranks.data_size, "stages": ranks.stages}
    for packed in micro_batches(batch, budget, share=share, device=loaded.device, shapes=shapes, **where):
        tape = replay_tape(loaded, packed) if replay else None
        if not loaded.has_head:
            forward_stage(loaded, packed, tape)
            continue
        logprobs, entropy = forward(loaded, packed, temperature=temperature, tape=tape, drawn=drawn)
        if packed.idle:
            continue
        done += packed.samples
        if isinstance(name, int):
            batch.write_teacher(packed.samples, name, logprobs)
        else:
            batch.write_tokens(packed.samples, **{name: logprobs})
        if name == "proximal":
            batch.write_tokens(packed.samples, entropy=entropy)
    written = ["teachers"] if isinstance(name, int) else ["proximal", "entropy"] if name == "proximal" else [name]
    ranks.exchange_tokens(batch, done, *written)
    return batch


@torch.no_grad()
def annotate_collisions(
    loaded: LoadedModel,
    batch: TrainBatch,
    *,
    budget: int,
    temperature: float,
    share: bool = True,
    replay: bool = False,
    ranks: SingleRank = ALONE,
    shapes: MicroBatchShapes | None = None,
) -> None:
    """Write the sum of p² over the vocabulary as the field `collision` of every sample's tokens, of the distributions
    that they were drawn from: how likely two draws are the same. A pass of its own.
    """
    done: list[int] = []
    for packed in micro_batches(
        batch, budget, share=share, device=loaded.device, rank=ranks.data_rank, ranks=ranks.data_size, shapes=shapes
    ):
        tape = replay_tape(loaded, packed) if replay else None
        if not loaded.has_head:
            forward_stage(loaded, packed, tape)
            continue
        own: Any = packed if loaded.context is None else own_share(packed, loaded.context)

        def compute_collisions(head: LMHead, own: Any = own, tape: Any = tape, packed: Any = packed) -> Tensor:
            hidden = loaded.hidden_states(own.tokens, own.positions, own.layout, tape, own.encode_images(loaded))
            return collision_probability(
                hidden.index_select(0, own.source), head, temperature=temperature, kept=own.kept
            )

        found = own.join_targets(loaded.run_with_head(compute_collisions))
        own.join_flips(tape)
        if not packed.idle:
            done += packed.samples
            batch.write_tokens(packed.samples, collision=found)
    ranks.exchange_tokens(batch, done, "collision")


@torch.no_grad()
def logprobs_of(loaded: LoadedModel, tokens: list[int]) -> list[float]:
    """Of every token of one text; 0 for the first."""
    return policy_of(loaded).score_prompt(tokens)


def expert_tape(loaded: LoadedModel, packed: PackedBatch, *, replay: bool) -> RoutingTape | None:
    """For one pass of training: the engine's routes to `replay`, or what records the model's own. None where it has no
    experts, or would have to keep the keys that its indexers choose.
    """
    if replay:
        return replay_tape(loaded, packed)
    return loaded.routing_tape() if loaded.routers and not loaded.indexers else None


def replay_tape(loaded: LoadedModel, packed: PackedBatch) -> RoutingTape:
    """The engine's routes of this micro-batch, ready for one forward pass."""
    if packed.routes is None or len(packed.routes) != len(packed.tokens):
        raise TrainError(
            f"{0 if packed.routes is None else len(packed.routes)} recorded routes for {len(packed.tokens)} tokens: "
            f"every token needs "
            "the experts that the engine chose. An environment that builds trajectories itself must keep "
            "Completion.experts; "
            "or set trainer.routing_replay = false"
        )
    return loaded.routing_tape(own_routes(loaded, packed))


# -- what the tokens have earned ---------------------------------------------------------------------------


def compute_advantages(batch: TrainBatch, row: Algorithm) -> dict[str, float]:
    """Write every sample's advantages, and what a critic is to learn as their
    "returns". -> metrics: how much of it the critic knew, and how far the policy is from its
    teacher (mean of log pi_behavior - log pi_teacher,
    an estimate of the reverse KL a token)."""
    branches = [s for s in batch.samples if s.parent is not None]
    if branches:
        _refuse_by_token(row, batch)
        batch = TrainBatch([s for s in batch.samples if s.parent is None])
    scored = batch.scored_samples
    batch.write_tokens(advantages=advantages_of(row, scored))
    roots = {(s.group, s.index): s for s in batch.samples}
    for branch in branches:
        assert branch.parent is not None
        earned = roots[branch.group, branch.parent].known.advantages
        assert earned is not None
        branch.known.advantages = earned[:1].repeat(len(branch.trainable))
    told = {}
    if scored.teacher_T is not None and scored.behavior_T is not None:
        told["train/kl_teacher"] = float((scored.behavior_T - scored.teacher_T).mean())
    if "values" not in row.needs:
        return told
    returns_T = returns_of(row, scored)
    batch.write_tokens(returns=returns_T)
    assert scored.values_T is not None, "the row needs values"
    known = explained_variance(scored.values_T, returns_T)
    return told if known is None else told | {"train/explained_variance": known}


def advantages_of(row: Algorithm, scored: ScoredSamples) -> Tensor:
    """The advantage of every trainable token, in the order of the samples.  -> [T]."""
    found = row.advantage(scored if row.takes_rewards else with_shaped_rewards(row, scored))
    found_T = found if row.advantage.per_token else scored.spread_to_tokens(found)
    return charge_advantages(row, found_T, scored) if row.charges_advantages else found_T


def _refuse_by_token(row: Algorithm, batch: TrainBatch) -> None:
    """An episode has one number for all its branches, where it has one."""
    by_token = (
        row.distill.coef or row.kl.in_reward or row.kl.in_advantage or "values" in row.needs or row.advantage.per_token
    )
    if by_token and "advantage" not in row.idle:
        raise ConfigError(
            f"algo.kind = '{row.name}' gives every token a credit of its own, and this episode has branches "
            f"({batch.sample_name(0)}), which share one "
            "number. Use a row with one advantage a sample (grpo, dr_grpo, rloo, gspo, ...), or an environment that "
            "does not rewrite its history"
        )
