"""Attention of a row whose keys and values go round a ring: that of one rank over the whole row, for ranks that are threads."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch

from kits.row_split import COST, random_row, rank_rows, row_of
from kits.thread_ranks import ThreadRank, on_ranks
from rondel.core.mesh import Mesh
from rondel.core.ring_blocks import ring_hops, ring_pieces, ring_tokens
from rondel.core.row_split import deal_row, spread_row
from rondel.models import ring_attention
from rondel.models.collectives import RankGroup
from rondel.models.context_parallel import ContextLayout
from rondel.models.dense_attention import ScoreRule
from rondel.models.packed_layout import PackedLayout
from rondel.models.processor import is_widened

HEADS, KEYS, SIZE, VALUE = 4, 2, 8, 6
RULES = {
    "plain": ScoreRule(0.3),
    "window": ScoreRule(0.3, window=7),
    "softcap": ScoreRule(2.0, window=40, softcap=3.0),
    "chunk": ScoreRule(0.3, chunk=16),
    "sinks": ScoreRule(0.3, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "slopes": ScoreRule(0.3, slopes=torch.tensor([0.5, 0.1, 0.02, 0.0])),
}


def attention(layout, rows, inputs, grad, rule):
    """Of these rows: outputs, and gradients of queries, keys, values and sinks."""
    own = [x[rows].clone().requires_grad_() for x in inputs]
    if rule.sinks is not None:
        rule = replace(rule, sinks=rule.sinks.clone().requires_grad_())
    out = layout.attend(0, *own, rule)
    out.backward(grad[rows])
    return [out.detach(), *(x.grad for x in own)], None if rule.sinks is None else rule.sinks.grad


def compare(segments, dealing, rule, n):
    """-> the ranks, which know what they received."""
    total = sum(s.length for s in segments)
    seeded = torch.Generator().manual_seed(0)
    shapes = [(HEADS, SIZE), (KEYS, SIZE), (KEYS, VALUE), (HEADS, VALUE)]
    *inputs, grad = (torch.randn(total, *shape, generator=seeded) for shape in shapes)
    rows = [torch.from_numpy(r) for r in rank_rows(segments, dealing)]

    def work(rank):
        return attention(ContextLayout(segments, dealing, rank, "cpu", ring=True), rows[rank.index], inputs, grad, rule)

    done, ranks = on_ranks(n, work)
    expected, of_sinks = attention(PackedLayout(segments), torch.arange(total), inputs, grad, rule)
    for own, (found, _) in zip(rows, done):
        for mine, whole in zip(found, expected):
            assert float((mine - whole[own]).norm()) <= 1e-6 * float(whole.norm())
    if of_sinks is not None:
        torch.testing.assert_close(sum(each for _, each in done), of_sinks)
    return ranks


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("n", [2, 4])
def test_each_rank_attends_as_one_would(monkeypatch, rule, n):
    """Trees of turns and of samples, in runs alone and beside whole segments, in few and in many parts; bytes by the formula."""
    rows = [random_row(seed) for seed in (1, 4)] + [row_of((20, 30, 31, 29)), row_of((70,)), row_of((5, 4), (6, 60))]
    for segments in rows:
        for deal, scores in ((deal_row, 1 << 19), (spread_row, 800)):
            dealing = deal(segments, n, COST)
            if dealing.shared:
                monkeypatch.setattr(ring_attention, "SCORES", scores)
                ranks = compare(segments, dealing, RULES[rule], n)
                moved = ring_tokens(segments, dealing, RULES[rule].reach)
                assert sum(rank.received for rank in ranks) == 3 * moved * KEYS * (SIZE + VALUE)


def test_a_block_goes_no_farther_than_it_is_seen():
    long, family = row_of((400,)), row_of((40, 30, 31, 28, 33))
    dealing = spread_row(long, 4, COST)
    pieces = ring_pieces(long, dealing)
    assert ring_hops(pieces, 4) == [3, 2, 1, 0], "causally to all behind"
    assert ring_hops(pieces, 4, (8, None)) == [1, 1, 1, 0], "in a window to the next"
    assert ring_tokens(long, dealing) == sum(n * t for n, t in zip([3, 2, 1, 0], dealing.lengths))
    dealing = deal_row(family, 4, COST)
    assert dealing.shared == [0], "the prompt; its answers are whole"
    assert ring_hops(ring_pieces(family, dealing), 4) == [3, 3, 3, 3]
    apart = row_of((50,), (50,))  # no token of the second sample sees the first
    dealing = replace(spread_row(apart, 2, COST), lengths=[50, 50])
    assert ring_hops(ring_pieces(apart, dealing), 2) == [0, 0] and ring_tokens(apart, dealing) == 0


@pytest.mark.parametrize("n", [3, 6])
def test_a_rank_holds_two_blocks_of_keys_in_place_of_the_row(monkeypatch, n):
    """Counted whenever a block sets out, in both passes: its own message or another's, and the one that comes."""
    segments = row_of((600,))
    dealing, most = spread_row(segments, n, COST), [0] * n
    known = [set() for _ in range(n)]

    def counted_shift(rank, x, out):
        held = known[rank.index]
        for storage in (t.untyped_storage() for t in (x, out) if t.numel()):
            if not hasattr(storage, "counted"):
                storage.counted = True  # the same object, as long as it is alive
                held.add(weakref.ref(storage))
        alive = [storage for ref in held if (storage := ref()) is not None]
        most[rank.index] = max(most[rank.index], sum(storage.nbytes() for storage in alive))
        return RankGroup.shift(rank, x, out)

    monkeypatch.setattr(ThreadRank, "shift", counted_shift)
    compare(segments, dealing, RULES["plain"], n)
    each = 4 * KEYS * (SIZE + VALUE)  # bytes of a token
    row, block = 600 * each, max(dealing.lengths) * each
    assert block < max(most) <= 2 * block and max(most) < row


def test_halves_are_merged_in_fp32():
    """Of bfloat16, a ring of four is as near to fp32 as one rank is."""
    segments, n = row_of((30, 90, 20), (10, 160)), 4
    dealing, total = spread_row(segments, n, COST), 310
    shapes = [(HEADS, SIZE), (KEYS, SIZE), (KEYS, VALUE), (HEADS, VALUE)]
    seeded = torch.Generator().manual_seed(0)
    halves = [torch.randn(total, *shape, generator=seeded).bfloat16() for shape in shapes]
    rows = [torch.from_numpy(r) for r in rank_rows(segments, dealing)]

    def work(rank):
        layout = ContextLayout(segments, dealing, rank, "cpu", ring=True)
        return attention(layout, rows[rank.index], halves[:3], halves[3], RULES["plain"])[0]

    done, _ = on_ranks(n, work)
    ringed = [torch.cat(parts)[torch.cat(rows).argsort()] for parts in zip(*done)]
    whole = PackedLayout(segments), torch.arange(total)
    alone, _ = attention(*whole, halves[:3], halves[3], RULES["plain"])
    *truth, grad = (x.float() for x in halves)
    exact, _ = attention(*whole, truth, grad, RULES["plain"])
    most = 1.5 if is_widened(torch.bfloat16) else 1.2  # computed in fp32, one rank rounds once: nothing is nearer
    for mine, theirs, right in zip(ringed, alone, exact):
        assert mine.dtype == torch.bfloat16
        assert float((mine - right).norm()) <= most * float((theirs - right).norm())


def test_a_ring_without_ranks_or_of_points_is_refused():
    with pytest.raises(ValueError, match=r'cp_attention = "ring" with cp = 1: .* leave cp_attention out'):
        Mesh(tp=2, cp_attention="ring")
    assert str(Mesh(cp=2, cp_attention="ring")) == '{ cp = 2, cp_attention = "ring" }'
