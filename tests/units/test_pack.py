"""Packing: exact layouts, every trainable token once, no pads, nobody reads a stranger."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.train import forked_group, model, trajectory
from rondel.core.types import Failed, Group, Task, Trajectory
from rondel.train.annotate import forward
from rondel.train.balance import PromptFamilies, balance_micro_batches
from rondel.train.pack import PackedBatch, TrainBatch, TrainSample, batch_of, micro_batches, pack_samples

piece = st.tuples(st.integers(1, 6), st.booleans())
sample = st.tuples(st.integers(0, 3), st.lists(piece, min_size=0, max_size=4), st.integers(1, 5))


SYSTEMS = [[], [7] * 20, [7] * 17 + [8] * 5]  # what groups may begin with


@st.composite
def batches(draw) -> TrainBatch:
    """Groups whose siblings share a prompt in part or whole; every sample writes
    something and begins with a given token.
    """
    samples = []
    for number in range(draw(st.integers(1, 4))):
        rng = np.random.default_rng(draw(st.integers(0, 10**6)))
        begin = SYSTEMS[draw(st.integers(0, len(SYSTEMS) - 1))]  # some groups begin alike
        # few tokens: siblings agree by accident, too
        prompt = begin + rng.integers(5, 9, draw(st.integers(1, 7))).tolist()
        for index, (cut, pieces, last) in enumerate(draw(st.lists(sample, min_size=1, max_size=4))):
            asked = prompt[: max(1, len(prompt) - cut)]
            samples.append(
                TrainSample.from_trajectory(
                    trajectory([*pieces, (last, True)], rng, prompt=asked), group=number, index=index
                )
            )
    return TrainBatch(samples)


def check(batch: TrainBatch, packed: PackedBatch) -> None:
    """Every source sees exactly the tokens before its target: walk the segments back to the root."""
    owner = {at: (k, s) for k, s in enumerate(packed.layout.segments) for at in range(s.start, s.start + s.length)}
    assert sorted(owner) == list(range(len(packed.tokens)))  # each packed token lies in one segment: no pads, no gaps
    seen = 0
    for i in packed.samples:
        s = batch.samples[i]
        for at in s.trainable:
            source, target = int(packed.source[seen]), int(packed.target[seen])
            assert target == s.tokens[at] and int(packed.sample[seen]) == i
            context, here = [], source
            while here is not None:
                _, segment = owner[here]
                context = packed.tokens[segment.start : here + 1].tolist() + context
                parent = packed.layout.segments[segment.parent] if segment.parent is not None else None
                here = None if parent is None else parent.start + parent.length - 1
            assert context == s.tokens[:at].tolist()
            assert int(packed.positions[source]) == at - 1
            seen += 1
    assert seen == len(packed.source) == len(packed.target)


@pytest.fixture(autouse=True)
def segments_stay(monkeypatch):
    """The layout keeps index tensors only; the test wants to see the segments."""
    from rondel.train import pack as module

    def layout(segments, device="cpu"):
        out = PackedLayout(segments, device)
        out.segments = segments
        return out

    PackedLayout = module.PackedLayout
    monkeypatch.setattr(module, "PackedLayout", layout)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 60), st.booleans())
def test_every_trainable_token_appears_once_with_its_own_past(batch, budget, share):
    packs = list(micro_batches(batch, budget, share=share))
    assert [i for p in packs for i in p.samples] == list(range(len(batch.samples)))
    for packed in packs:
        check(batch, packed)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 60), st.booleans())
def test_the_budget_is_kept_and_an_oversize_sample_goes_alone(batch, budget, share):
    for packed in micro_batches(batch, budget, share=share):
        assert len(packed.tokens) <= budget or len(packed.samples) == 1


@pytest.mark.slow
@given(batches(), st.integers(1, 40), st.booleans(), st.integers(2, 4))
@settings(max_examples=40, deadline=None)
def test_ranks_share_every_sample_once_within_the_budget(batch, budget, share, ranks):
    lots = [list(micro_batches(batch, budget, share=share, rank=rank, ranks=ranks)) for rank in range(ranks)]
    assert len({len(lot) for lot in lots}) == 1  # all of them gather together
    packs = [packed for lot in lots for packed in lot if not packed.idle]
    assert sorted(i for packed in packs for i in packed.samples) == list(range(len(batch.samples)))
    for packed in packs:
        check(batch, packed)
        assert len(packed.samples) == 1 or len(packed.tokens) <= budget


LOGNORMAL = [(20, 150, ranks, 16_384) for ranks in (2, 4, 8)] + [
    (2000, 100, 4, 16_384),
    (100, 200, 8, 4096),
    (300, 150, 8, 16_384),
]


@pytest.mark.parametrize("prompt,median,ranks,budget", LOGNORMAL)
def test_ranks_get_the_same_load_of_lognormal_lengths(prompt, median, ranks, budget):
    """Critical path (in every round all wait for the fullest) over the ideal, and what it
    costs to split families: <= 5 % each.
    """
    for seed in range(5):
        rng = np.random.default_rng(seed)
        own = np.minimum(rng.lognormal(np.log(median), 1, 128).astype(int) + 1, 4096).tolist()
        prompts = rng.integers(prompt // 2, 2 * prompt, 16).tolist()
        family = [i // 8 for i in range(128)]
        cuts = balance_micro_batches(PromptFamilies(own, family, prompts), budget=budget, ranks=ranks)
        loads = [sum(own[i] for i in cut) + sum(prompts[f] for f in {family[i] for i in cut}) for cut in cuts]
        rounds = [loads[k : k + ranks] for k in range(0, len(loads), ranks)]
        assert sorted(i for cut in cuts for i in cut) == list(range(128))
        ideal = sum(loads) / ranks
        largest = max(n + prompts[f] for n, f in zip(own, family))  # no split of a sample: a step takes at least this
        assert max(loads) <= max(budget, largest)
        assert sum(map(max, rounds)) <= max(1.05 * ideal, largest * len(rounds))
        assert sum(loads) <= 1.05 * (sum(own) + sum(prompts))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 99))
def test_a_group_costs_its_prompt_once_and_its_completions(p, lengths, seed):
    """P + sum of (completion - 1): the last token of a completion predicts nothing
    that is trained, so it is not computed.
    """
    rng = np.random.default_rng(seed)
    prompt = rng.integers(5, 100, p).tolist()
    rows = [
        TrainSample.from_trajectory(trajectory([(n, True)], rng, prompt=prompt), group=0, index=i)
        for i, n in enumerate(lengths)
    ]
    packed = pack_samples(TrainBatch(rows), list(range(len(rows))))
    assert len(packed.tokens) == p + sum(n - 1 for n in lengths)
    apart = pack_samples(TrainBatch(rows), list(range(len(rows))), share=False)
    assert len(apart.tokens) == len(lengths) * p + sum(n - 1 for n in lengths)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 999), st.integers(10, 200))
def test_every_trainable_token_of_every_walk_appears_with_its_own_past(seed, budget):
    whole = batch_of([forked_group(seed), forked_group(seed + 1, number=4)])
    for packed in micro_batches(whole, budget):
        check(whole, packed)


def test_groups_that_begin_alike_compute_it_once():
    """Tokens of one system message, examples or signatures of tools are laid once a
    micro-batch, for all groups and ranks.
    """
    rng, system = np.random.default_rng(0), list(range(200, 240))
    rows = [
        TrainSample.from_trajectory(
            trajectory([(3, True)], rng, prompt=[*(system if group < 4 else [9]), 100 + group, *range(group)]),
            group=group,
            index=i,
        )
        for group in range(5)
        for i in range(2)
    ]
    whole = TrainBatch(rows)
    [packed] = micro_batches(whole, 10_000)
    check(whole, packed)
    assert len(packed.tokens) == 40 + sum(1 + g for g in range(4)) + (2 + 4) + 10 * 2
    half = list(micro_batches(whole, 70))
    assert all(len(p.tokens) <= 70 for p in half) and len(half) == 2
    for packed in half:
        check(whole, packed)
    lots = [list(micro_batches(whole, 10_000, rank=rank, ranks=2)) for rank in range(2)]
    assert sum(len(p.tokens) for lot in lots for p in lot) <= len(packed.tokens) + 40 + 40 + 2 * 8
    [apart] = micro_batches(whole, 10_000, share=False)
    assert len(apart.tokens) == sum(len(s.tokens) - 1 for s in rows)


def test_written_tokens_and_other_routes_are_never_a_strangers():
    """Sample 0 of two groups wrote the same: each computes its own. And a prompt that the
    engine routed otherwise is not shared.
    """
    rng, asked = np.random.default_rng(0), list(range(200, 230))
    rows = [
        TrainSample.from_trajectory(trajectory([(4, True)], np.random.default_rng(3), prompt=asked), group=g, index=0)
        for g in range(2)
    ]
    assert (rows[0].tokens == rows[1].tokens).all()
    assert len(pack_samples(TrainBatch(rows), [0, 1]).tokens) == 30 + 3 + 3
    for row in rows:
        row.experts = rng.integers(0, 9, (len(row.tokens) - 1, 2, 2))
    assert len(pack_samples(TrainBatch(rows), [0, 1]).tokens) == 2 * 33
    rows[1].experts[:25] = rows[0].experts[:25]
    assert len(pack_samples(TrainBatch(rows), [0, 1]).tokens) == 25 + 2 * 8


def test_what_walks_share_is_computed_once():
    whole = batch_of([forked_group()])
    [packed] = micro_batches(whole, 10_000)
    distinct = {tuple(s.tokens[: i + 1]) for s in whole.samples for i in range(s.trainable[-1])}
    assert len(packed.tokens) == len(distinct)


def test_one_layout_by_hand():
    """Prompt 10 11 12; completions [20 21], [30], and a sibling that left the prompt after 10 11."""

    def written(prompt, tokens):
        t = Trajectory()
        t.extend(prompt)
        t.extend(tokens, logprobs=[-1.0] * len(tokens), versions=[0] * len(tokens))
        return t

    rows = [written([10, 11, 12], [20, 21]), written([10, 11, 12], [30]), written([10, 11, 13], [40, 41])]
    packed = pack_samples(
        TrainBatch([TrainSample.from_trajectory(t, group=0, index=i) for i, t in enumerate(rows)]), [0, 1, 2]
    )
    assert packed.tokens.tolist() == [10, 11, 12, 20, 13, 40]
    assert packed.positions.tolist() == [0, 1, 2, 3, 2, 3]
    assert packed.source.tolist() == [2, 3, 2, 4, 5]
    assert packed.target.tolist() == [20, 21, 30, 40, 41]
    assert packed.sample.tolist() == [0, 0, 1, 2, 2]
    packed = pack_samples(
        TrainBatch([TrainSample.from_trajectory(t, group=0, index=i) for i, t in enumerate(rows)]), [0, 1]
    )
    assert packed.tokens.tolist() == [10, 11, 12, 20]
    assert packed.source.tolist() == [2, 3, 2]  # both first tokens come from the prompt's last position


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize("share", [True, False])
def test_changing_one_sample_changes_nothing_in_another(kind, share):
    """Bit for bit, siblings included: a completion is a stranger to its siblings."""
    loaded, rng = model(kind), np.random.default_rng(0)
    prompts = [rng.integers(5, 100, n).tolist() for n in (8, 3)]
    rows = [
        TrainSample.from_trajectory(
            trajectory([(n, True), (2, False), (3, True)], rng, prompt=prompts[g]), group=g, index=i
        )
        for i, (n, g) in enumerate([(9, 0), (4, 0), (7, 0), (5, 1), (2, 1)])
    ]
    batch = TrainBatch(rows)

    def logprobs():
        packed = pack_samples(batch, list(range(5)), share=share)
        with torch.no_grad():
            values, _ = forward(loaded, packed, temperature=1.0)
        batch.write_tokens(packed.samples, trained=values)
        return [s.known.trained.numpy().copy() for s in batch.samples]

    before = logprobs()
    for changed in range(5):
        kept = rows[changed].tokens.copy()
        rows[changed].tokens[rows[changed].prompt_length :] = rng.integers(
            5, 100, len(kept) - rows[changed].prompt_length
        )
        after = logprobs()
        assert not np.array_equal(after[changed], before[changed])
        assert all(np.array_equal(after[i], before[i]) for i in range(5) if i != changed)
        rows[changed].tokens[:] = kept


def test_tokens_are_read_as_they_were_written():
    rng = np.random.default_rng(1)
    batch = TrainBatch(
        [
            TrainSample.from_trajectory(trajectory([(n, True)], rng, prompt=[7, 8]), group=i // 2, index=i)
            for i, n in enumerate([3, 1, 5, 2])
        ]
    )
    for packed in micro_batches(batch, 6):
        values = torch.randn(len(packed.target))
        batch.write_tokens(packed.samples, trained=values)
        assert torch.equal(batch.tokens(packed.samples).trained, values)
        expected = np.concatenate([batch.samples[i].known.behavior.numpy() for i in packed.samples])
        assert np.array_equal(batch.tokens(packed.samples).behavior.numpy(), expected)


def test_only_scored_trajectories_that_wrote_something_are_trained():
    rng = np.random.default_rng(2)
    good, silent, failed = (trajectory(p, rng, prompt=[5, 6]) for p in ([(2, True)], [(2, False)], [(3, True)]))
    failed.score = Failed("timeout")
    b = batch_of([Group(4, Task("t", "fake", {}), [failed, silent, good], 0)])
    assert [(s.group, s.index) for s in b.samples] == [(4, 2)]
    assert b.sample_name(0) == "group 4, sample 2"


def test_a_first_token_without_a_past_is_refused_by_name():
    with pytest.raises(ValueError, match="group 9, sample 2"):
        TrainSample.from_trajectory(trajectory([(2, True)], np.random.default_rng(0)), group=9, index=2)


# -- to another process ------------------------------------------------------------------------------


def test_a_sample_travels_without_its_neighbours() -> None:
    """Samples hold parts of one tensor; torch pickles the whole storage of a part."""
    whole = batch_of([forked_group()])
    count = whole.total_tokens
    whole.write_tokens(proximal=torch.arange(float(count)))
    whole.write_teacher(range(len(whole.samples)), 0, torch.arange(float(count)))
    first = whole.samples[0]
    assert first.known.proximal.untyped_storage().nbytes() == 4 * count, "the test would see nothing"
    there = pickle.loads(pickle.dumps(first))
    for here, arrived in (
        (first.known.proximal, there.known.proximal),
        (first.known.teachers[0], there.known.teachers[0]),
    ):
        assert torch.equal(here, arrived) and arrived.untyped_storage().nbytes() == arrived.nbytes
    assert torch.equal(there.known.behavior, first.known.behavior) and there.known.values is None
