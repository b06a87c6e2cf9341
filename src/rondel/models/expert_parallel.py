"""Experts of a mixture over several ranks: each holds E/n of every layer's, and tokens travel to them by all-to-all
(GShard, arXiv:2006.16668; DeepSpeed-MoE, arXiv:2201.05596).

    rank 0   router ─┐ dispatch ┌─ experts 0 ... E/n - 1 ─┐ combine  ┌─ sum of a token's k rows, each by its weight
    rank 1   router ─┘ [T k, H] └─ experts E/n ... E - 1  ─┘ [T k, H] └─ the same for the tokens of this rank

Routers, shared experts and everything else stay as they are. A replayed route (models/routing_tape.py) is the
router's, so it is dispatched like any other. No capacity, no dropped token:
what an expert gets is what was routed to it.

In an engine every rank has the rows of all, and nothing travels: each computes those of its experts, and the sum that
leaves the layer's part is the whole (`exchange` false). Where its ranks have requests of their own, rows travel.

Beside tensor parallel (models/tensor_parallel.py) experts are not cut, and each of the tp ranks, which all have the
same rows, sends a run of them: what its experts make of these is its part of the sum that leaves the layer's part.

The gradient of an expert has the tokens of all ranks already, and is summed over the ranks that hold the same one.

T tokens of this rank · k experts of each · S = T k rows that leave · R rows
that arrive · H hidden · E experts · n ranks
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rondel.core.errors import ModelError
from rondel.models.collectives import RankGroup, exchange_rows
from rondel.models.shard_cut import ShardCut, even_runs, split_shards
from rondel.models.tensor_cuts import TensorCuts

INSTEAD = "use place.mesh with shards, cp or tp instead of ep"


def routed_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that can be cut, by name: called with hidden states, experts and weights,
    their tensors joined [E, ...]."""
    return {name: module for name, module in model.named_modules() if _is_joined(module)}


def _is_joined(module: nn.Module) -> bool:
    count, parameters = getattr(module, "num_experts", 0), [*module.parameters()]
    return (
        type(module).__name__.endswith("Experts")
        and len(inspect.signature(module.forward).parameters) == 3
        and [*module.parameters(recurse=False)] == parameters != []
        and all(p.ndim > 1 and len(p) == count for p in parameters)
    )


def expert_parameters(model: nn.Module) -> list[str]:
    """Names of all their tensors."""
    return [f"{name}.{own}" for name, experts in routed_experts(model).items() for own, _ in experts.named_parameters()]


def check_experts(model: Any, ep: int, instead: str = INSTEAD) -> dict[str, nn.Module]:
    """The mixtures of a model whose experts `ep` ranks share. Raises ModelError where there are none that can be cut,
    or ranks do not divide them. `instead`: the remedy for a dense one.
    """
    kind, mixtures = model.config.model_type, routed_experts(model)
    if not mixtures:
        raise ModelError(
            f"model type '{kind}' has no experts that ep could lay apart (it has none, or their weights are not joined "
            f"in tensors [experts, ...]): {instead}"
        )
    for experts in mixtures.values():
        if (count := next(experts.parameters()).shape[0]) % ep:
            raise ModelError(
                f"ep = {ep} does not divide the {count} experts of a layer of model type '{kind}': take an ep that does"
            )
    return mixtures


def cut_experts(
    model: Any,
    ranks: RankGroup,
    twins: RankGroup | None = None,
    *,
    exchange: bool = True,
    instead: str = INSTEAD,
) -> TensorCuts:
    """Keep this rank's experts of a whole model, in place. `twins`: who has the same rows, by tensor parallel.
    `exchange`: tokens travel; else all ranks have the same ones.

    Raises ModelError where there are none that can be cut, or ranks do not divide them.
    """
    found, mixtures = TensorCuts(ranks, sequence=False), check_experts(model, ranks.size, instead)
    for name, experts in mixtures.items():
        count = next(experts.parameters()).shape[0]
        cut = ShardCut(0)
        for own, whole in [*experts.named_parameters(recurse=False)]:
            with torch.no_grad():
                part = split_shards(whole.detach(), cut, ranks.size)[ranks.index].clone()
            setattr(experts, own, nn.Parameter(part, requires_grad=whole.requires_grad))
            found.cuts[f"{name}.{own}"], found.shapes[f"{name}.{own}"] = cut, whole.shape
        setattr(experts, "num_experts", count // ranks.size)  # noqa: B010
        forward = functools.partial(_dispatch if exchange else _compute_own, experts.forward, ranks, count)
        setattr(experts, "forward", forward if twins is None else functools.partial(_dispatch_run, forward, twins))  # noqa: B010
    return found


def _dispatch(
    compute: Callable[..., Tensor], ranks: RankGroup, count: int, hidden: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """The tokens of this rank, each through its k experts wherever they lie: [.., H], [T, k], [T, k] -> [.., H].

    All ranks make this call, those without a token for their experts too. `compute` is the family's own way through
    the experts of this rank: [R, H], [R, 1] of 0 ... E/n - 1, weights of 1 -> [R, H].
    """
    tokens, k = hidden.flatten(0, -2), chosen.shape[-1]
    expert_S = chosen.flatten()
    order = expert_S.argsort(stable=True)  # by expert, and with that by rank
    leave = torch.bincount(expert_S, minlength=count).view(ranks.size, -1)  # [n, E/n]
    arrive = ranks.all_to_all(leave, torch.empty_like(leave))  # [n, E/n], of each rank to each expert here
    sent, got = torch.stack([leave.sum(1), arrive.sum(1)]).tolist()
    rows = exchange_rows(tokens[order // k], sent, got, ranks)  # [R, H]
    here = torch.arange(arrive.shape[1], device=rows.device).repeat(ranks.size)
    expert_R = here.repeat_interleave(arrive.flatten(), output_size=len(rows))
    out = exchange_rows(_compute_some(compute, rows, expert_R), got, sent, ranks)  # [S, H]
    out = out[order.argsort()].view(*chosen.shape, out.shape[-1]) * weights[..., None]  # [T, k, H]
    return out.sum(-2).to(hidden.dtype).view_as(hidden)


def _dispatch_run(
    dispatch: Callable[[Tensor, Tensor, Tensor], Tensor],
    twins: RankGroup,
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
) -> Tensor:
    """The same of rows that several ranks have: this one's run of them, zeros for the others', [.., H] again. The sum
    over the ranks is the whole.
    """
    rows = hidden.flatten(0, -2)
    runs = even_runs(len(rows), twins.size)
    first, end = sum(runs[: twins.index]), sum(runs[: twins.index + 1])
    own = dispatch(rows[first:end], chosen[first:end], weights[first:end])
    return F.pad(own, (0, 0, first, len(rows) - end)).view_as(hidden)


def _compute_own(
    compute: Callable[..., Tensor], ranks: RankGroup, count: int, hidden: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """Of rows that all ranks have, what the experts of this one make of them: [.., H], [T, k], [T, k] -> [.., H], whose
    sum over the ranks is the whole.
    """
    tokens, each = hidden.flatten(0, -2), count // ranks.size
    row, place = (chosen // each == ranks.index).nonzero(as_tuple=True)
    expert = chosen[row, place] - ranks.index * each
    out = _compute_some(compute, tokens[row], expert) * weights[row, place, None]
    every = out.new_zeros(*chosen.shape, out.shape[-1])  # [T, k, H], which sums in a fixed order
    every[row, place] = out
    return every.sum(-2).to(hidden.dtype).view_as(hidden)


def _compute_some(compute: Callable[..., Tensor], rows: Tensor, expert_R: Tensor) -> Tensor:
    """Where nothing arrived, a row of zeros goes through and is left out: every rank has gradients to sum, of zeros."""
    arrived = len(rows)
    if not arrived:
        rows, expert_R = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), expert_R.new_zeros(1)
    return compute(rows, expert_R[:, None], rows.new_ones(len(rows), 1))[:arrived]
