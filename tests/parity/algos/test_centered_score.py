"""Score centering: exact means over a vocabulary, in float64; then what the engine tells and the trainer makes of it."""

from __future__ import annotations

import copy

import pytest
import torch

from kits.algos import F64, near, tokens
from kits.engine import drawn_groups, tiny
from kits.runs import run
from kits.train import apart, gradient, row, trainer
from rondel.algos.off_policy_surrogates import CenteredScore
from rondel.algos.table import resolve_algorithm
from rondel.buffer.state import decode, encode
from rondel.core.errors import ConfigError, TrainError
from rondel.core.types import Trajectory
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.runtime.journal import store
from rondel.train.annotate import compute_advantages
from rondel.train.logprobs import logprob_entropy_and_top
from rondel.train.pack import TrainBatch, batch_of

V = 9


def two_policies(seed: int, noise: float = 0.7) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits of the policy, with a gradient; log q of the behavior)."""
    make = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(V, generator=make, dtype=F64)
    return z.requires_grad_(), (z.detach() + noise * torch.randn(V, generator=make, dtype=F64)).log_softmax(0)


def pulls(part: CenteredScore, z: torch.Tensor, log_q: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """d l/dz of every token that could have been drawn, [V, V], and its advantage."""
    log_p, top = z.log_softmax(0), log_q.topk(min(part.top, V))
    each = torch.arange(V)
    seen = tokens(
        log_p,
        log_p - log_p.detach(),
        a,
        log_drift=(log_p - log_q).detach(),
        sample=each,
        top_behavior=top.values.expand(V, -1),
        top_logprobs=log_p[top.indices].expand(V, -1),
    )
    loss_V = part(seen).loss_T
    return torch.stack([torch.autograd.grad(loss, z, retain_graph=True)[0] for loss in loss_V])


@pytest.mark.parametrize("bounds", [(1.0, 1.0), (0.5, 2.0), (0.0, 1.1), (0.9, 1.0)])
def test_what_is_the_same_for_every_draw_moves_nothing(bounds):
    """sum_v q_v·(pull of v at A = 1) = 0 with the whole vocabulary; without C it is the mean of the weighed score."""
    one = torch.ones(V, dtype=F64)
    for seed in range(4):
        z, log_q = two_policies(seed, 1.5)
        found = pulls(CenteredScore(*bounds, top=V), z, log_q, one)
        assert near((log_q.exp()[:, None] * found).sum(0), [0.0] * V)
        p = z.detach().softmax(0)
        weighed = log_q.exp() * (p / log_q.exp()).clamp(*bounds)
        drift = weighed @ (torch.eye(V, dtype=F64) - p)
        assert drift.abs().max() > 1e-5, "without centering it would drift"


@pytest.mark.parametrize("bounds", [(1.0, 1.0), (0.7, 1.3)])
def test_its_mean_is_the_policy_gradient_of_the_advantages_less_their_drift(bounds):
    """E_q[pull] = -sum_v q_v·w_v·(A_v - b)·s_v where b is one number: a baseline has become free of bias."""
    z, log_q = two_policies(5)
    make = torch.Generator().manual_seed(6)
    a = torch.randn(V, generator=make, dtype=F64)
    part, q = CenteredScore(*bounds, top=V), log_q.exp()
    mean = (q[:, None] * pulls(part, z, log_q, a)).sum(0)
    shifted = (q[:, None] * pulls(part, z, log_q, a + 3.7)).sum(0)
    assert near(mean, shifted)
    p = z.detach().softmax(0)
    score = torch.eye(V, dtype=F64) - p
    w = (p / q).clamp(*bounds)
    centered = w[:, None] * score - (q * w) @ score
    assert near(mean, -(q * a) @ centered)


def test_a_head_is_exact_where_the_tails_have_one_shape():
    z, log_q = two_policies(7)
    with torch.no_grad():
        head = log_q.topk(4).indices
        tail = torch.ones(V, dtype=torch.bool).index_fill(0, head, False)
        log_q[tail] = (z[tail] - 8).clone()  # less likely than all of the head, in the policy's proportions
        log_q -= log_q.logsumexp(0)
    assert set(log_q.topk(4).indices.tolist()) == set(head.tolist())
    for bounds in ((1.0, 1.0), (0.8, 1.2), (0.0, 3.0)):
        a = torch.linspace(-1, 1, V, dtype=F64)
        few, whole = (pulls(CenteredScore(*bounds, top=k), z, log_q, a) for k in (4, V))
        assert near(few, whole)


def test_on_policy_and_without_bounds_there_is_nothing_to_center():
    z, log_q = two_policies(8)
    a = torch.linspace(-1, 1, V, dtype=F64)
    p = z.detach().softmax(0)
    plain = -a[:, None] * (torch.eye(V, dtype=F64) - p)
    for k in (3, V):
        assert near(pulls(CenteredScore(top=k), z, z.detach().log_softmax(0), a), plain)
        found = pulls(CenteredScore(0.0, float("inf"), top=k), z, log_q, a)
        assert near(found, (p / log_q.exp())[:, None] * plain, 1e-9)


def test_what_fills_up_a_row_counts_for_nothing():
    part, (z, log_q) = CenteredScore(0.8, 1.2, top=3), two_policies(9)
    log_p, top = z.detach().log_softmax(0), log_q.topk(3)
    own = part.coefs(log_p[top.indices][None], top.values[None])
    padded = part.coefs(
        torch.cat([log_p[top.indices], log_p[:2]])[None], torch.cat([top.values, torch.tensor([-torch.inf] * 2)])[None]
    )
    assert near(padded[:, :3], own) and torch.equal(padded[0, 3:], torch.zeros(2, dtype=F64))
    with pytest.raises(ConfigError, match="1 must lie between them"):
        CenteredScore(1.2, 2.0)
    with pytest.raises(ConfigError, match="at least 1"):
        CenteredScore(top=0)
    with pytest.raises(ConfigError, match="weighed twice"):
        resolve_algorithm({"kind": "score_centering", "correction": {"kind": "importance"}})


# -- from the engine to the gradient
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [{}, {"top_k": 4}], ids=["whole", "cut"])
def test_the_engine_tells_the_distribution_that_it_drew_from(cut):
    loaded = tiny()
    for group in drawn_groups(loaded, {"behavior_top:6"}, **cut):
        for t in group.trajectories:
            assert t.behavior_top is not None and t.behavior_top[:3] == [None] * 3
            for at in range(3, len(t.tokens)):
                ids, logprobs = t.behavior_top[at]
                assert len(ids) == (4 if cut else 6) and list(logprobs) == sorted(logprobs, reverse=True)
                assert not cut or abs(sum(torch.tensor(logprobs).exp()) - 1) < 1e-6
                if t.tokens[at] in ids:
                    assert logprobs[list(ids).index(t.tokens[at])] == pytest.approx(t.logprobs[at], abs=1e-6)


@pytest.mark.slow
def test_the_trainer_centers_by_the_same_tokens_in_any_split():
    """The gradient on the weights against autograd through written-out logits; the policy is not the behavior."""
    loaded, algo = tiny(), row("score_centering", surrogate={"low": 0.8, "high": 1.2, "top": 6})
    groups = drawn_groups(loaded, {"behavior_top:6"})
    with torch.no_grad():
        for p in loaded.model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    t, b = trainer(loaded, algo, temperature=0.7), batch_of(groups)
    compute_advantages(b, algo)
    whole = gradient(t, b, algo)
    for micro_tokens, share in ((1, True), (30, False)):
        assert apart(gradient(t, b, algo, micro_tokens=micro_tokens, share=share), whole) <= 1e-6
    t.weights.zero_grad()
    total, count = torch.zeros(()), b.total_tokens
    for s in b.samples:
        known = s.known
        ids, layout = torch.tensor(s.tokens.tolist()), PackedLayout([PackedSegment(0, len(s.tokens))])
        logits = t.loaded.head.logits(t.loaded.hidden_states(ids, torch.arange(len(ids)), layout))
        log_p = (logits / 0.7).log_softmax(-1)[s.trainable - 1]
        own = log_p.gather(-1, torch.tensor(s.tokens[s.trainable]).long()[:, None])[:, 0]
        top = log_p.gather(-1, known.top_ids)
        q, p = known.top_behavior.exp(), top.detach().exp()
        rho = (1 - q.sum(-1, keepdim=True)) / (1 - p.sum(-1, keepdim=True))
        c = torch.minimum(torch.maximum(p, 0.8 * q), 1.2 * q) - (1 / rho).clamp(0.8, 1.2) * rho * p
        w = (own.detach() - known.behavior).exp().clamp(0.8, 1.2)
        total = total - (known.advantages * (w * own - (c * top).sum(-1))).sum() / count
    total.backward()
    wanted = torch.cat([m.grad.flatten() for m in t.weights.masters]).double()
    assert wanted.norm() > 1e-3 and apart(whole, wanted) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind,knobs", [("score_centering", {"top": 6}), ("klpo", {"estimator": "topk", "top": 6})])
def test_answers_with_fewer_tokens_to_record_stand_in_one_batch(kind, knobs):
    """Top-p left some answers 3 tokens at the most and others 6: together they have the gradient of each alone."""
    loaded, algo = tiny(), row(kind, surrogate=knobs)
    b = batch_of(drawn_groups(loaded, {"behavior_top:6"}, top_p=0.5))
    assert len({s.known.top_ids.shape[1] for s in b.samples}) > 1
    t = trainer(loaded, algo, temperature=0.7)
    compute_advantages(b, algo)
    together = gradient(t, b, algo)
    assert together.norm() > 1e-4 and apart(gradient(t, b, algo, micro_tokens=1), together) <= 1e-6


@pytest.mark.slow
def test_what_the_engine_told_survives_the_store_and_the_buffer(tmp_path):
    made = drawn_groups(tiny(), {"behavior_top:3"})
    store.write_step(tmp_path, 1, made)
    for again in (store.groups_of(store.read_step(tmp_path, 1)), [decode(encode(copy.deepcopy(g))) for g in made]):
        for ours, theirs in zip(batch_of(made).samples, batch_of(again).samples, strict=True):
            assert torch.equal(ours.known.top_ids, theirs.known.top_ids)
            assert torch.equal(ours.known.top_behavior, theirs.known.top_behavior)
    t = Trajectory()
    t.extend([1])
    with pytest.raises(ValueError, match="a behavior_top of 2 entries for 1 drawn"):
        t.extend([6], logprobs=[-1.0], versions=[0], behavior_top=[([1], [0.0])] * 2)


def test_more_tokens_in_the_place_of_one_in_chunks(monkeypatch):
    monkeypatch.setattr("rondel.train.logprobs.LOGITS", 300)
    loaded, make = tiny(), torch.Generator().manual_seed(2)
    head = loaded.head
    hidden, target = torch.randn(11, head.weight.shape[1], generator=make), torch.randint(0, 99, (11,), generator=make)
    ids, g = torch.randint(0, 99, (11, 4), generator=make), torch.randn(3, 11, 4, generator=make)
    ours, plain = (hidden.clone().requires_grad_() for _ in range(2))
    logprob, entropy, top = logprob_entropy_and_top(ours, target, head, ids, temperature=1.3)
    log_p = (head.logits(plain) / 1.3).log_softmax(-1)
    wanted = log_p.gather(-1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1), log_p.gather(-1, ids)
    assert all((a - b).abs().max() < 1e-5 for a, b in zip((logprob, entropy, top), wanted))
    for terms in ((logprob, entropy, top), wanted):
        sum((x * w).sum() for x, w in zip(terms, (g[0, :, 0], g[1, :, 0], g[2]))).backward()
    assert (ours.grad - plain.grad).abs().max() < 1e-5


@pytest.mark.slow
def test_a_run_centers_stores_what_it_needs_and_refuses_without_it(tmp_path):
    run(tmp_path, algo={"kind": "score_centering", "surrogate": {"top": 5}}, loop__steps=2, loop__warmup__steps=1)
    found = [t for g in store.groups_of(store.read_step(tmp_path, 3)) for t in g.trajectories if t.written]
    assert found and all(len(t.behavior_top) == len(t.tokens) for t in found)
    ids, logprobs = found[0].behavior_top[-1]
    assert len(ids) == len(logprobs) == 5
    with pytest.raises(ConfigError, match="does not tell them"):
        run(
            tmp_path / "far",
            algo__kind="score_centering",
            engine={"kind": "sglang", "url": "http://127.0.0.1:1"},
            place__kind="split",
        )
    loaded, algo = tiny(), row("score_centering")
    groups = drawn_groups(loaded, {"behavior_top:3"})
    groups[0].trajectories[0].behavior_top = None
    b = batch_of(groups)
    compute_advantages(b, algo)
    with pytest.raises(TrainError, match=r"must hand Completion\.behavior_top to extend"):
        gradient(trainer(loaded, algo), TrainBatch(b.samples), algo)
