"""Any layout of weights to any other: against gathering the whole and cutting it, number by number."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rondel.core.errors import SyncError
from rondel.core.mesh import Mesh
from rondel.core.tensor_parts import TensorPart
from rondel.models.shard_cut import ShardCut, part_of, split_shards
from rondel.sync.transfer_plan import Copy, plan_transfer, split_buckets
from rondel.train.mesh_layout import rank_part

H, K, D, F, V, E = 8, 2, 3, 12, 101, 4  # query heads, key heads, head size, feed-forward, vocabulary, experts
WEIGHTS = {
    "columns": (ShardCut(), (F, 10)),
    "bias": (ShardCut(), (F,)),
    "rows": (ShardCut(dim=1), (10, F)),
    "norm": (None, (10,)),
    "k": (ShardCut(heads=K), (K * D, 10)),
    "qkv": (ShardCut(parts=((H * D, ShardCut(heads=H)), (K * D, ShardCut(heads=K)), (K * D, ShardCut(heads=K)))), (36, 5)),
    "vocabulary": (ShardCut(uneven=True), (V, 7)),
    "padded": (ShardCut(rows=V, multiple=4), (V, 3)),
    "experts": (ShardCut(1), (E, F, 6)),
    "packed experts": (ShardCut(1, parts=((F, ShardCut(1)), (F, ShardCut(1)))), (E, 2 * F, 6)),
    "experts down": (ShardCut(2), (E, 6, F)),
}  # fmt: skip


def numbered(shape) -> torch.Tensor:
    return torch.arange(1, math.prod(shape) + 1).view(shape)


def box(tensor, at, size):
    for dim, (first, n) in enumerate(zip(at, size)):
        tensor = tensor.narrow(dim, first, n)
    return tensor


def held(part: TensorPart, whole: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(part.shape, dtype=whole.dtype)
    for block in part.blocks:
        box(out, block.here, block.size).copy_(box(whole, block.start, block.size))
    return out


def carried_out(copies: list[Copy], have: list[dict], want: list[dict]) -> tuple[list[dict], list[dict]]:
    """-> what the takers have, and how often each of their numbers was written."""
    got = [{n: torch.zeros(p.shape, dtype=torch.long) for n, p in parts.items()} for parts in want]
    times = [{n: torch.zeros(p.shape, dtype=torch.long) for n, p in parts.items()} for parts in want]
    for c in copies:
        box(got[c.target][c.name], c.to, c.size).copy_(box(have[c.source][c.name], c.at, c.size))
        box(times[c.target][c.name], c.to, c.size).add_(1)
    return got, times


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_part_has_the_numbers_of_the_cut(name, tp):
    cut, shape = WEIGHTS[name]
    whole = numbered(shape)
    for index, shard in enumerate(split_shards(whole, cut, tp) if cut else [whole] * tp):
        part = part_of(TensorPart.whole(shape), cut, tp, index)
        assert torch.equal(held(part, whole), shard)


@pytest.mark.parametrize("rows, count", list(product((0, 1, 5, 8), (1, 2, 3, 4))))
def test_shards_are_those_of_chunk(rows, count):
    whole = numbered((rows, 3))
    chunks = [*whole.chunk(count), *[whole[:0]] * count] if rows else [whole] * count
    for index in range(count):
        assert torch.equal(held(TensorPart.whole((rows, 3)).shard(index, count), whole), chunks[index])


def naive(mesh: Mesh, rank: int, cut: ShardCut | None, whole: torch.Tensor, ep: bool) -> torch.Tensor:
    """This rank's shard: cut the whole by tp or ep, then into chunks."""
    sharing, apart = mesh.shards * mesh.cp, rank // mesh.tp % (mesh.shards * mesh.cp)
    if ep:
        mine = split_shards(whole, ShardCut(0), mesh.ep)[apart % mesh.ep]
        sharing, apart = sharing // mesh.ep, apart // mesh.ep
    else:
        mine = whole if cut is None else split_shards(whole, cut, mesh.tp)[rank % mesh.tp]
    chunks = mine.chunk(sharing)
    return chunks[apart] if apart < len(chunks) else mine[:0]


meshes = st.builds(
    lambda replicas, shards, cp, tp, ep: Mesh(
        replicas=replicas, shards=shards, cp=cp, tp=tp, ep=ep if tp == 1 and shards * cp % ep == 0 else 1
    ),
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 2), st.sampled_from((1, 2, 4)), st.sampled_from((1, 2, 4)),
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(mesh=meshes, tp=st.sampled_from((1, 2, 4)), names=st.sets(st.sampled_from(sorted(WEIGHTS)), min_size=1),
       most=st.integers(8, 400))  # fmt: skip
def test_every_wanted_number_comes_once_from_whoever_has_it(mesh, tp, names, most):
    wholes = {name: numbered(WEIGHTS[name][1]) for name in names}
    cuts = {name: WEIGHTS[name][0] for name in names}
    apart = {name: mesh.ep > 1 and "experts" in name for name in names}

    def layout(name, rank):
        how = {"ep": ShardCut(0)} if apart[name] else {"tp": cuts[name]}
        return rank_part(mesh, rank, wholes[name].shape, **how)

    holders = [{name: layout(name, rank) for name in names} for rank in range(mesh.world)]
    have = [
        {name: naive(mesh, rank, cuts[name], wholes[name], apart[name]) for name in names} for rank in range(mesh.world)
    ]
    for rank in range(mesh.world):
        assert all(torch.equal(held(holders[rank][name], wholes[name]), have[rank][name]) for name in names)
    want = [
        {name: part_of(TensorPart.whole(wholes[name].shape), cuts[name], tp, index) for name in names}
        for index in range(tp)
    ]
    copies = plan_transfer(holders, want, dict.fromkeys(names, 2))
    got, times = carried_out(copies, have, want)
    for index in range(tp):
        for name in names:
            truth = wholes[name] if cuts[name] is None else split_shards(wholes[name], cuts[name], tp)[index]
            assert torch.equal(got[index][name], truth)
            assert torch.equal(times[index][name], (truth > 0).long()), "padding is written by nobody, the rest once"
    assert sum(c.bytes for c in copies) == 2 * sum(part.numel for parts in want for part in parts.values())
    buckets = split_buckets(copies, most)
    assert all(sum(c.bytes for c in bucket) <= most for bucket in buckets)
    again, times = carried_out([c for bucket in buckets for c in bucket], have, want)
    assert all(torch.equal(again[i][n], got[i][n]) for i in range(tp) for n in names)
    assert all(int(t.max()) <= 1 for parts in times for t in parts.values())


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_replicas_share_the_work(replicas):
    """{replicas R, shards 2} to one taker: each holder gives a part near 1 / (2 R) of the bytes, none of it twice."""
    mesh, shapes = Mesh(replicas=replicas, shards=2), {f"w{i}": (8 + i % 3, 16) for i in range(24)}
    holders = [{n: rank_part(mesh, r, s) for n, s in shapes.items()} for r in range(mesh.world)]
    copies = plan_transfer(holders, [{n: TensorPart.whole(s) for n, s in shapes.items()}], dict.fromkeys(shapes, 4))
    total = 4 * sum(a * b for a, b in shapes.values())
    given = [sum(c.bytes for c in copies if c.source == r) for r in range(mesh.world)]
    assert sum(given) == total and max(given) - min(given) <= 2 * max(c.bytes for c in copies)


def test_the_nearest_holder_gives():
    """Ranks 0-3 on one machine and 4-7 on another, replicas of each other: nothing crosses."""
    mesh, shape = Mesh(replicas=2, shards=2, tp=2), (8, 8)
    holders = [{"w": rank_part(mesh, r, shape, tp=ShardCut(1))} for r in range(8)]
    want = [{"w": part_of(TensorPart.whole(shape), ShardCut(0), 2, i)} for i in range(2)]
    copies = plan_transfer(holders, want, {"w": 2}, distance=lambda source, target: int(source // 4 != target))
    assert copies and all(c.source // 4 == c.target for c in copies)


def test_what_nobody_has_is_named():
    whole = TensorPart.whole((6, 2))
    with pytest.raises(SyncError, match=r"w: nobody has the box \(2, 2\) from \(4, 0\) on"):
        plan_transfer([{"w": whole.shard(0, 3)}, {"w": whole.shard(1, 3)}], [{"w": whole}], {"w": 4})


def test_equal_layouts_move_each_part_in_one_piece():
    mesh, shape = Mesh(tp=2), (8, 6)
    parts = [{"w": rank_part(mesh, r, shape, tp=ShardCut(1))} for r in range(2)]
    copies = plan_transfer(parts, parts, {"w": 4}, distance=lambda source, target: int(source != target))
    assert sorted((c.source, c.target, c.at, c.to, c.bytes) for c in copies) == [
        (rank, rank, (0, 0), (0, 0), 96) for rank in range(2)
    ]
