"""Which numbers of a weight each rank of a trainer's mesh holds: a pure function of the mesh and of how it is cut."""

from __future__ import annotations

from collections.abc import Iterable

from rondel.core.mesh import Mesh
from rondel.core.tensor_parts import TensorPart
from rondel.models.shard_cut import ShardCut, part_of


def rank_part(
    mesh: Mesh,
    rank: int,
    shape: Iterable[int],
    *,
    tp: ShardCut | None = None,
    ep: ShardCut | None = None,
    sharded: bool = True,
) -> TensorPart:
    """Of a whole tensor of this shape: its part by tp or ep, and of that the rows of the rank's shard. Rows lie over
    shards · cp, those of experts over what ep leaves of shards · cp · tp; replicas have the same. `sharded` is False
    for what lies whole on every rank.
    """
    part = TensorPart.whole(shape)
    if not sharded:
        return part
    sharing = mesh.shards * mesh.cp
    apart = rank % (sharing * mesh.tp)  # within its replica
    if ep is not None:
        part = part_of(part, ep, mesh.ep, apart % mesh.ep)
        return part.shard(apart // mesh.ep, sharing * mesh.tp // mesh.ep)
    return part_of(part, tp, mesh.tp, apart % mesh.tp).shard(apart // mesh.tp, sharing)
