"""How a packed row lies over the ranks that share it: short families whole, long samples in runs, the work even."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kits.row_split import COST, random_row, rank_rows, row_of
from rondel.core.errors import ModelError
from rondel.core.row_split import EVEN, RowDealing, deal_row, segment_depths, spread_row, work_of
from rondel.models.block_indexer import TokenCount
from rondel.models.context_parallel import ContextLayout, ContextRanks
from rondel.models.dense_attention import ScoreRule
from rondel.models.packed_layout import PackedLayout, PackedSegment


def token_work(segments, cost=COST) -> list[np.ndarray]:
    """Of each segment's tokens, one by one."""
    above = segment_depths(segments)
    return [cost + depth + np.arange(1, s.length + 1) for depth, s in zip(above, segments)]


def loads(segments, ranks) -> list[int]:
    work = np.concatenate(token_work(segments))
    return [int(work[rows].sum()) for rows in rank_rows(segments, deal_row(segments, ranks, COST))]


def test_work_of_a_token_is_its_products_and_its_context():
    segments = row_of((3, 2, 1), (2,))
    told = [w.tolist() for w in token_work(segments, 10)]
    assert told == [[11, 12, 13], [14, 15], [14], [11, 12]]
    for depth, tokens, s in zip(segment_depths(segments), told, segments):
        assert [work_of(depth, n, 10) for n in range(s.length + 1)] == [0, *np.cumsum(tokens)]


@pytest.mark.parametrize("families", [[(10, 5, 6, 7)] * 2, [(10, 5, 6, 7)] * 6, [(30,), (31,), (8, 20), (9, 20)]])
def test_short_families_stay_whole_and_nothing_is_shared(families):
    segments = row_of(*families)
    dealing = deal_row(segments, 2, COST)
    assert dealing.shared == [] and dealing.shared_tokens == 0
    assert all(
        s.parent is None or {i, s.parent} <= set(own)
        for own in dealing.whole
        for i, s in enumerate(segments)
        if i in own
    )
    assert sorted(i for own in dealing.whole for i in own) == [*range(len(segments))]


def test_a_long_sample_is_spread_over_all_and_fills_up_who_has_least():
    segments = row_of(*[(10, 5, 6, 7)] * 5, (12, 400))
    dealing = deal_row(segments, 4, COST)
    assert dealing.shared == [20, 21] and dealing.shared_tokens == 412
    assert min(dealing.lengths) > 0 and sorted(map(len, dealing.whole)) == [4, 4, 4, 8]
    assert max(loads(segments, 4)) <= EVEN * np.mean(loads(segments, 4))


def test_a_family_too_large_for_one_rank_shares_its_prompt_alone():
    """Its completions lie whole, each on one rank."""
    segments = row_of((40, 50, 51, 49, 50))
    dealing = deal_row(segments, 2, COST)
    assert dealing.shared == [0] and dealing.shared_tokens == 40
    assert sorted(map(len, dealing.whole)) == [2, 2]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("seed", range(25))
def test_any_row_is_dealt_once_evenly_and_with_all_that_its_tokens_see(seed, ranks):
    segments = random_row(seed)
    dealing, total = deal_row(segments, ranks, COST), sum(s.length for s in segments)
    rows = rank_rows(segments, dealing)
    assert sorted(np.concatenate(rows)) == [*range(total)], "each token on one rank"
    assert len(dealing.shared) + sum(map(len, dealing.whole)) == len(segments)
    for i in dealing.shared:
        assert segments[i].parent is None or segments[i].parent in dealing.shared
    for own in dealing.whole:
        for i in own:
            assert segments[i].parent is None or segments[i].parent in dealing.shared or segments[i].parent in own
    if total < ranks:
        assert [len(r) for r in rows] == [total] + [0] * (ranks - 1)
        return
    longest = max(int(w.max()) for w in token_work(segments))
    assert min(map(len, rows)) >= 1 and (not dealing.shared or min(dealing.lengths) >= 1)
    # no cut can be finer than a token, and every rank has one at least
    assert max(loads(segments, ranks)) <= EVEN * sum(loads(segments, ranks)) / ranks + 2 * ranks * longest
    assert dealing.shared_tokens <= spread_row(segments, ranks, COST).shared_tokens == total
    assert repr(deal_row(segments, ranks, COST)) == repr(dealing)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(
    "families", [[(10, 5, 6, 7)] * 2, [(10, 5, 6, 7), (12, 90)], [(20, 30, 31, 29)], [(70,)], [(5, 4)] * 3 + [(6, 60)]]
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_attends_as_one_would(monkeypatch, families, ranks, window):
    """Its queries over the keys that it gathers and those that it has: the rows of one layout of the whole row."""
    segments, heads, size = row_of(*families), 2, 4
    total = sum(s.length for s in segments)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, total, heads, size)
    rule = ScoreRule(0.5, window)
    plain, drawn = PackedLayout(segments), torch.randint(9, [total])
    expected, states = plain.attend(0, q, k, v, rule), plain.states.scan(0, TokenCount(), drawn)
    dealing = deal_row(segments, ranks, COST)
    rows = [torch.from_numpy(r) for r in rank_rows(segments, dealing)]
    runs = [r[:n] for r, n in zip(rows, dealing.lengths)]
    for rank in range(ranks):
        own = SimpleNamespace(index=rank, size=ranks)
        if dealing.shared:
            layout = ContextLayout(segments, dealing, own, "cpu")
            # keys are gathered first, values second, and the inputs of a state; of each what the ranks have of it
            waiting = [torch.cat([x[run] for run in runs]) for x in (k, v, drawn)]
            monkeypatch.setattr(layout, "gather_run", lambda x, waiting=waiting: waiting.pop(0), raising=True)
        else:
            layout = ContextRanks(own, COST).own_layout(segments, dealing, "cpu")
        with torch.no_grad():
            found = layout.attend(0, q[rows[rank]], k[rows[rank]], v[rows[rank]], rule)
        torch.testing.assert_close(found, expected[rows[rank]])
        counted = layout.states.scan(0, TokenCount(), drawn[rows[rank]])
        torch.testing.assert_close(counted, states[rows[rank]])


def test_a_run_whose_tokens_all_see_each_other_stays_so_beside_a_cut(monkeypatch):
    """Blocks of masks behind a text that is cut, between ranks and whole on one of them."""
    segments = [PackedSegment(0, 20), PackedSegment(20, 8, 0, causal=False), PackedSegment(28, 5, 0, causal=False)]
    dealing = RowDealing([0, 1], [14, 14], [[], [2]])
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 33, 2, 4)
    expected = PackedLayout(segments).attend(0, q, k, v, ScoreRule(0.5))
    rows = [torch.from_numpy(r) for r in rank_rows(segments, dealing)]
    for rank in range(2):
        layout = ContextLayout(segments, dealing, SimpleNamespace(index=rank, size=2), "cpu")
        waiting = [x[:28] for x in (k, v)]
        monkeypatch.setattr(layout, "gather_run", lambda x, waiting=waiting: waiting.pop(0), raising=True)
        with torch.no_grad():
            found = layout.attend(0, q[rows[rank]], k[rows[rank]], v[rows[rank]], ScoreRule(0.5))
        torch.testing.assert_close(found, expected[rows[rank]])


def test_a_cut_through_tokens_that_all_see_each_other_is_refused():
    segments = [PackedSegment(0, 20), PackedSegment(20, 8, 0, causal=False)]
    dealing, rank = RowDealing([0, 1], [22, 6], [[], []]), SimpleNamespace(index=0, size=2)
    with pytest.raises(ModelError, match="8 tokens that all see each other lies over 2 ranks of cp"):
        ContextLayout(segments, dealing, rank, "cpu")
    with pytest.raises(ModelError, match=r"see those behind them: set place\.mesh\.cp_attention"):
        ContextLayout(segments, replace(dealing, lengths=[20, 8]), rank, "cpu", ring=True)


def test_runs_are_cut_where_the_work_is_equal():
    """Of one long sample: the first rank takes more tokens than the second, and so on."""
    dealing = deal_row(row_of((4000,)), 4, COST)
    assert dealing.lengths == sorted(dealing.lengths, reverse=True) and len(set(dealing.lengths)) == 4
    assert all(a > b for a, b in pairwise(dealing.lengths))
    told = loads(row_of((4000,)), 4)
    assert max(told) - min(told) <= 2 * (COST + 4000)
