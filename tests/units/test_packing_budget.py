"""A micro-batch whose size nobody chose keeps a group whole, with its prompt once."""

import asyncio

import pytest

from kits.train import awkward_groups, batch, model, row, step, trainer
from rondel.train import annotate as notes
from rondel.train import step as module


@pytest.mark.slow
def test_a_large_group_stays_whole(monkeypatch):
    """Samples of each micro-batch: without room for a group its prompt is in several; the gradient is the same."""
    algo = row("grpo")
    seen, found = [], module.micro_batches

    def note(b, budget, **how):
        packs = found(b, budget, **how)
        seen.append((budget, sum(p.token_count for p in found(b, budget, **how))))
        return packs

    monkeypatch.setattr(module, "micro_batches", note)
    b = batch(awkward_groups(), algo)
    assert b.largest_group == max(
        sum(len(s.tokens) - s.prompt_length for s in own) + own[0].prompt_length
        for own in ([s for s in b.samples if s.group == g] for g in {s.group for s in b.samples})
    )
    norms = [
        step(trainer(model(), algo, micro_tokens=8, micro_group=whole), batch(awkward_groups(), algo), algo).metrics[
            "train/grad_norm"
        ]
        for whole in (0, 12, 4096)
    ]
    assert [budget for budget, _ in seen] == [8, 12, b.largest_group]
    tokens = [n for _, n in seen]
    assert tokens[0] >= tokens[1] > tokens[2]
    assert abs(norms[2] - norms[0]) <= 1e-6 * norms[0]


@pytest.mark.slow
def test_what_is_packed_follows_from_its_batch_and_from_no_earlier_step(monkeypatch):
    """Law 9: a run that goes on annotates its first batch as one that was never interrupted."""
    algo, seen, found = row("grpo"), [], notes.micro_batches

    def note(b, budget, **how):
        seen.append(budget)
        return found(b, budget, **how)

    monkeypatch.setattr(notes, "micro_batches", note)
    fresh, old = (trainer(model(), algo, micro_tokens=8, micro_group=4096) for _ in range(2))
    step(old, batch(awkward_groups()[:1], algo), algo)
    for each in (fresh, old):
        asyncio.run(each.annotate(batch(awkward_groups(), algo), frozenset({"proximal_logprobs"})))
    assert seen == [batch(awkward_groups(), algo).largest_group] * 2
