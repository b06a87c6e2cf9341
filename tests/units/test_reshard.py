"""What TP ranks of a trainer hold becomes what TP' ranks of an engine hold, through the same whole, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch

from rondel.core.errors import SyncError
from rondel.models.shard_cut import ShardCut, join_shards, split_shards

H, K, D, E, F, V = 8, 2, 3, 10, 12, 101  # query heads, key heads, head size, inputs, feed-forward, vocabulary
QKV = ShardCut(parts=((H * D, ShardCut(heads=H)), (K * D, ShardCut(heads=K)), (K * D, ShardCut(heads=K))))
GATE_UP = ShardCut(parts=((F, ShardCut()), (F, ShardCut())))
SIZES = {
    "columns": (ShardCut(), (F, E)),
    "bias": (ShardCut(), (F,)),
    "rows": (ShardCut(dim=1), (E, F)),
    "norm": (ShardCut(dim=None), (E,)),
    "q": (ShardCut(heads=H), (H * D, E)),
    "k with fewer heads than ranks": (ShardCut(heads=K), (K * D, E)),
    "qkv": (QKV, ((H + 2 * K) * D, E)),
    "gate_up": (GATE_UP, (2 * F, E)),
    "vocabulary": (ShardCut(rows=V, multiple=4), (V, E)),
}


@pytest.mark.parametrize("before, after", list(itertools.product((1, 2, 4), repeat=2)))
@pytest.mark.parametrize("name", SIZES)
def test_any_tp_to_any_tp(name, before, after):
    cut, shape = SIZES[name]
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
    shards = split_shards(whole, cut, before)
    assert len(shards) == before and len({s.shape for s in shards}) == 1
    assert torch.equal(join_shards(shards, cut), whole)
    resharded = split_shards(join_shards(shards, cut), cut, after)
    assert all(torch.equal(a, b) for a, b in zip(resharded, split_shards(whole, cut, after), strict=True))
    assert torch.equal(join_shards(resharded, cut), whole)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_sharded_layer_computes_what_the_whole_computes(tp):
    """Attention's projections and a gated feed-forward, in float64, each rank on its shard alone."""
    g = torch.Generator().manual_seed(1)
    w = {n: torch.randn(shape, generator=g, dtype=torch.float64) for n, (_, shape) in SIZES.items()}
    x = torch.randn(5, E, generator=g, dtype=torch.float64)
    gate, up = w["gate_up"].split(F)
    shards = split_shards(w["gate_up"], GATE_UP, tp)
    downs = split_shards(w["rows"], ShardCut(dim=1), tp)
    parts = [((x @ s[: F // tp].T).tanh() * (x @ s[F // tp :].T)) @ d.T for s, d in zip(shards, downs)]
    assert torch.allclose(sum(parts), ((x @ gate.T).tanh() * (x @ up.T)) @ w["rows"].T)
    q, k, _ = w["qkv"].split([H * D, K * D, K * D])
    truth = torch.einsum("thd,shd->hts", (x @ q.T).view(5, H, D), (x @ k.T).view(5, K, D).repeat_interleave(H // K, 1))
    scores, own = [], max(1, K // tp)
    for shard in split_shards(w["qkv"], QKV, tp):
        mine_q, mine_k = (
            (x @ shard[: H * D // tp].T).view(5, H // tp, D),
            (x @ shard[H * D // tp :][: own * D].T).view(5, own, D),
        )
        scores.append(torch.einsum("thd,shd->hts", mine_q, mine_k.repeat_interleave(H // tp // own, 1)))
    assert torch.allclose(torch.cat(scores), truth)
    logits = torch.cat([x @ s.T for s in split_shards(w["vocabulary"], SIZES["vocabulary"][0], tp)], -1)
    assert torch.allclose(logits[:, :V], x @ w["vocabulary"].T) and not logits[:, V:].any()


def test_what_cannot_be_cut_is_named():
    with pytest.raises(SyncError, match="10 rows over 4 ranks"):
        split_shards(torch.zeros(10, 2), ShardCut(), 4)
    with pytest.raises(SyncError, match="4 ranks over 3 heads"):
        split_shards(torch.zeros(9, 2), ShardCut(heads=3), 4)
    shards = split_shards(torch.randn(4, 2), ShardCut(heads=2), 4)
    shards[1] = shards[1] + 1
    with pytest.raises(SyncError, match="copies differ"):
        join_shards(shards, ShardCut(heads=2))
    padded = [torch.ones(4, 2), torch.ones(4, 2)]
    with pytest.raises(SyncError, match="the padding behind row 7"):
        join_shards(padded, ShardCut(rows=7, multiple=4))
