"""Whether each rank of a trainer can round its part of a weight alone:
every block that shares a scale lies whole on one.

W [O, I] in shards of rows       blocks of 1 x 32: whole        blocks of 128 x 128: where O / shards is a multiple
                                                                of 128        a scale of the tensor: never
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from rondel.core.errors import ConfigError
from rondel.core.tensor_parts import TensorPart
from rondel.models.rounded_weights import WeightFormat, weight_format
from rondel.train.mesh_layout import rank_part

if TYPE_CHECKING:
    from rondel.core.mesh import Mesh
    from rondel.models.shard_cut import ShardCut
    from rondel.train.parallel import SingleRank


def refuse_cut_blocks(ranks: SingleRank, model: nn.Module) -> None:
    """ConfigError on every rank where one has a part of a block. All ranks ask."""
    forms: dict[str, WeightFormat] = {
        name: found for name, p in model.named_parameters() if (found := weight_format(p)) is not None
    }
    told = ranks.all_gather_object({n: part for n, part in ranks.weight_parts(model).items() if n in forms})
    shapes: dict[str, tuple[int, ...]] = {}
    for held in told:
        for name, part in held.items():
            ends = [tuple(a + n for a, n in zip(b.start, b.size)) for b in part.blocks]
            shapes[name] = tuple(map(max, *[*ends, shapes.get(name, (0,) * len(part.shape))], (0,) * len(part.shape)))
    for held in told:
        for name, part in held.items():
            _refuse_part(name, forms[name], part, shapes[name])


def check_blocks(model: nn.Module, mesh: Mesh, cuts: Mapping[str, ShardCut]) -> None:
    """What `refuse_cut_blocks` will refuse of a model that lies whole here, once it lies over a mesh, `cuts` by tp."""
    alike: dict[Any, str] = {}  # the first of those that are rounded and cut alike
    for name, parameter in model.named_parameters():
        if (form := weight_format(parameter)) is not None:
            alike.setdefault((form, tuple(parameter.shape), cuts.get(name)), name)
    for (form, shape, cut), name in alike.items():
        for rank in range(mesh.shards * mesh.cp * mesh.tp):  # of one replica
            _refuse_part(name, form, rank_part(mesh, rank, shape, tp=cut), shape)


def _refuse_part(name: str, form: WeightFormat, part: TensorPart, shape: tuple[int, ...]) -> None:
    if has_whole_blocks(form, part, shape):
        return
    rule: Any = form.form
    blocks = f"blocks of {' x '.join(str(n or 'all') for n in rule.block)}"
    in_rows = rule.block[0] == 1 and not rule.scales_tensor
    take = (
        "shards or cp instead of tp" if in_rows else "a format whose blocks lie in rows (int4, mxfp4, mxfp8, fp8_row)"
    )
    raise ConfigError(
        f'model.format = "{rule.name}" has {"a scale of the whole tensor" if rule.scales_tensor else blocks}, and a '
        f"rank of the trainer holds {list(part.shape)} of {name} {list(shape)}, which cuts some: take {take}, or fewer "
        "ranks (place.ranks, place.mesh)",
        page="docs/train.md#number-formats",
    )


def has_whole_blocks(form: WeightFormat, part: TensorPart, shape: tuple[int, ...]) -> bool:
    """Whether this part of a tensor of `shape` [..., O, I] (transposed: [..., I, O]) has all of each block that it has
    any number of, on the grid that its own numbers are cut by.
    """
    rule: Any = form.form
    if rule.scales_tensor:
        return not part.blocks or part.shape == shape
    sizes = rule.block[::-1] if form.transposed else rule.block
    for block in part.blocks:
        for dim, each in zip((-2, -1), sizes):
            whole, own = shape[dim], part.shape[dim]
            start, size, here = block.start[dim], block.size[dim], block.here[dim]
            if each == 0:
                if (start, size, own) != (0, whole, whole):
                    return False
            elif start % each or here % each or (size % each and (start + size != whole or here + size != own)):
                return False
    return True
