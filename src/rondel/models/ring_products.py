"""Products of tensor parallelism beside the rows that travel for them (async TP, doi:10.1145/3567955.3567959).

    rows lie apart              every rank, all rows                               rows lie apart
    [t, D] ──► q k v, gate up: run by run, as they come ──► attention, gate ──► o, down: run by run, as they go ──► [t, D]

One gather carries all products that read the same rows; its backward pass has the ring of sums, and that of o and down
the ring of gradients. What is kept for the backward pass is what plain products keep: gathered rows,
and the input of o.

Between the border of a part and its products stands a tensor of all rows that has this rank's own, and NaN for those
of others. Whoever else reads it says NaN, which the checks of a cut model refuse, and never a wrong number.

t own rows · T all rows · D, I inputs · O outputs
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rondel.models.blocks import map_hidden
from rondel.models.collectives import RankGroup, own_run
from rondel.models.linear import TOGETHER, as_factor, matmul, product, weight_gradient
from rondel.models.ring_collectives import gather_ring, reduce_ring
from rondel.models.shard_cut import ShardCut


@dataclass(frozen=True, slots=True)
class RingProducts:
    """The matrices that read the input of a part of a layer, and the one that makes its output."""

    columns: list[nn.Linear]
    row: nn.Linear


def ring_products(part: nn.Module, cuts: Mapping[str, ShardCut]) -> RingProducts | None:
    """Those of an attention or feed-forward part that has no other matrices; None of any other part.

    cuts  of its parameters, by their names in the part
    """
    linears = {name: layer for name, layer in part.named_children() if type(layer) is nn.Linear}
    rows = [name for name in linears if (cut := cuts.get(f"{name}.weight")) is not None and cut.dim == 1]
    matrices = {name for name, parameter in part.named_parameters() if parameter.ndim > 1}
    if len(rows) != 1 or matrices != {f"{name}.weight" for name in linears}:
        return None
    row = linears.pop(rows[0])
    alone = len(linears) == 1 and all(f"{name}.weight" in cuts for name in linears)
    if not alone and linears.keys() not in [{*names} for names in TOGETHER]:
        return None
    return RingProducts([*linears.values()], row)


def install_ring(part: nn.Module, products: RingProducts, ranks: RankGroup, runs: Callable[[], list[int]]) -> None:
    """Let the products of a part move its rows themselves: they lie apart before and behind it.

    runs  the lengths of the ranks' runs in the pass that is under way
    """
    joined = _ColumnProducts(products.columns, ranks, runs)
    for i, layer in enumerate(products.columns):
        setattr(layer, "forward", functools.partial(joined.forward, i))  # noqa: B010
    setattr(products.row, "forward", functools.partial(_row_product, products.row, ranks, runs))  # noqa: B010
    part.register_forward_pre_hook(functools.partial(_spread_input, ranks, runs), with_kwargs=True)
    part.register_forward_hook(joined.forget)


def _spread_input(
    ranks: RankGroup, runs: Callable[[], list[int]], part: Any, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    return map_hidden(lambda x: _SpreadRows.apply(x[0], runs(), ranks)[None], args, kwargs)


class _ColumnProducts:
    """Matrices that read the same rows: the first that is called gathers them and computes all,
    the others find theirs."""

    def __init__(self, layers: list[nn.Linear], ranks: RankGroup, runs: Callable[[], list[int]]) -> None:
        self.layers, self.ranks, self.runs = layers, ranks, runs
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}

    def forward(self, i: int, x: Tensor) -> Tensor:
        """[1, T, D], of which the own rows are there -> [1, T, O_i]."""
        if x is not self._input or i not in self._outputs:
            factors = [factor for layer in self.layers for factor in (layer.weight, layer.bias)]
            outputs = _GatheredProducts.apply(x[0], self.runs(), self.ranks, *factors)
            self._input, self._outputs = x, dict(enumerate(outputs))
        return self._outputs.pop(i)[None]

    def forget(self, *hook: Any) -> None:
        """Outputs that the part did not ask for."""
        self._input, self._outputs = None, {}


def _row_product(row: nn.Linear, ranks: RankGroup, runs: Callable[[], list[int]], x: Tensor) -> Tensor:
    """This rank's columns of the input of all rows [1, T, I] -> [1, t, O] of the sum over the ranks."""
    return _SummedProduct.apply(x[0], row.weight, row.bias, runs(), ranks)[None]


class _SpreadRows(torch.autograd.Function):
    """Own rows [t, D] -> [T, D], NaN where the others' will be."""

    @staticmethod
    def forward(ctx, x: Tensor, lengths: Sequence[int], ranks: RankGroup):
        ctx.lengths, ctx.ranks = lengths, ranks
        rows = x.new_full((sum(lengths), x.shape[1]), math.nan)
        own_run(rows, lengths, ranks).copy_(x)
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return own_run(grad, ctx.lengths, ctx.ranks), None, None


class _GatheredProducts(torch.autograd.Function):
    """Rows [T, D], of which the own ones are read, weights [O_i, D] and biases [O_i] or None -> [T, O_i]."""

    @staticmethod
    def forward(ctx, rows: Tensor, lengths: Sequence[int], ranks: RankGroup, *factors: Tensor | None):
        pairs: list[tuple[Any, Tensor | None]] = list(zip(factors[::2], factors[1::2]))
        own = as_factor(own_run(rows, lengths, ranks), pairs[0][0])
        outputs = [own.new_empty(len(rows), len(weight)) for weight, _ in pairs]

        def multiply(place: slice, run: Tensor) -> None:
            for out, (weight, bias) in zip(outputs, pairs):
                out[place] = product(run, weight, bias)

        gathered = gather_ring(own, lengths, ranks, multiply)
        ctx.lengths, ctx.ranks = lengths, ranks
        ctx.save_for_backward(gathered, *(weight for weight, _ in pairs))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        gathered, *weights = ctx.saved_tensors
        wants_rows, wanted = ctx.needs_input_grad[0], ctx.needs_input_grad[3:]

        def part(place: slice) -> Tensor:
            total = _multiply_back(grads[0][place], weights[0])
            for grad, weight in zip(grads[1:], weights[1:]):
                total += _multiply_back(grad[place], weight)
            return total

        of_rows = None
        if wants_rows:
            of_rows = gathered.new_zeros(gathered.shape)  # of the others' rows nothing was read
            own_run(of_rows, ctx.lengths, ctx.ranks).copy_(reduce_ring(ctx.lengths, ctx.ranks, part))
        of_factors: list[Tensor | None] = []
        for i, (grad, weight) in enumerate(zip(grads, weights)):
            of_factors.append(weight_gradient(weight, grad, gathered) if wanted[2 * i] else None)
            of_factors.append(grad.sum(0) if wanted[2 * i + 1] else None)
        return of_rows, None, None, *of_factors


class _SummedProduct(torch.autograd.Function):
    """x [T, I], weight [O, I] of each rank, bias [O] or None that all have alike -> own rows of the sum, [t, O]."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, lengths: Sequence[int], ranks: RankGroup):
        x = as_factor(x, weight)

        def part(place: slice) -> Tensor:
            run = x[place]
            return product(run, weight) if len(run) else run.new_empty(0, len(weight))

        total = reduce_ring(lengths, ranks, part)
        ctx.lengths, ctx.ranks = lengths, ranks
        ctx.save_for_backward(x, weight)
        return total if bias is None else total.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        of_x = torch.empty_like(x) if wants_x else None

        def multiply(place: slice, run: Tensor) -> None:
            if of_x is not None:
                of_x[place] = matmul(run, weight)

        gathered = gather_ring(grad, ctx.lengths, ctx.ranks, multiply)
        of_weight = weight_gradient(weight, gathered, x) if wants_weight else None
        return of_x, of_weight, grad.sum(0) if wants_bias else None, None, None


def _multiply_back(grad: Tensor, weight: Tensor) -> Tensor:
    """[t, O] @ [O, D]; of no rows, too."""
    return matmul(grad, weight) if len(grad) else grad.new_empty(0, weight.shape[1])
