"""KLPO: where it rests, what its estimators share, the draws that the engine makes beside a token, and the gradient."""

from __future__ import annotations

import pytest
import torch

from kits.algos import F64, near, tokens
from kits.engine import drawn_groups
from kits.engine import tiny as tiny_model
from kits.runs import run
from kits.train import apart, gradient, row, trainer
from rondel.algos.kl_regression import KlRegression
from rondel.algos.table import TABLE, resolve_algorithm
from rondel.core.errors import ConfigError, UserError
from rondel.generate.engine.builtin.channels import open_channels
from rondel.generate.engine.builtin.sampler import draw_beside, draw_more
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.runtime.journal import store
from rondel.train.annotate import compute_advantages
from rondel.train.pack import batch_of

V = 9


def policies(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits of the policy, with a gradient; log q of the sampler)."""
    make = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(V, generator=make, dtype=F64)
    return z.requires_grad_(), (z.detach() + torch.randn(V, generator=make, dtype=F64)).log_softmax(0)


def pulls(part: KlRegression, z: torch.Tensor, log_q: torch.Tensor, a: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """d l/dz of every token that could have been drawn, [V, V], with the recorded `ids` [K] beside it."""
    log_p, each = z.log_softmax(0), torch.arange(V)
    seen = tokens(
        log_p,
        log_p - log_p.detach(),
        a,
        log_drift=(log_p - log_q).detach(),
        sample=each,
        top_behavior=log_q[ids].expand(V, -1),
        top_logprobs=log_p[ids].expand(V, -1),
    )
    return torch.stack([torch.autograd.grad(loss, z, retain_graph=True)[0] for loss in part(seen).loss_T])


@pytest.mark.parametrize("route", ["token", "sequence"])
def test_klpo_rests_where_the_reward_has_tilted_the_sampler(route):
    """At p ~ q·e^(A/beta) the mean pull over the sampler's draws is 0, with the whole vocabulary as the head."""
    a, beta = torch.linspace(-1, 1, V, dtype=F64), 0.7
    for seed in range(3):
        z, log_q = policies(seed)
        tilted = (log_q + a / beta).clone().requires_grad_()
        part, q = KlRegression("topk", route, beta, top=V), log_q.exp()
        whole = torch.arange(V)
        assert near((q[:, None] * pulls(part, tilted, log_q, a, whole)).sum(0), [0.0] * V)
        assert (q[:, None] * pulls(part, z, log_q, a, whole)).sum(0).abs().max() > 1e-3


def test_more_draws_have_the_head_as_their_mean():
    """One draw, over all that it could have been, pulls as the whole vocabulary does; so does a head of one shape."""
    z, log_q = policies(4)
    a, q = torch.linspace(-1, 1, V, dtype=F64), log_q.exp()
    whole = pulls(KlRegression("topk", top=V), z, log_q, a, torch.arange(V))
    one = KlRegression("mc", draws=1)
    mean = sum(q[v] * pulls(one, z, log_q, a, torch.tensor([v])) for v in range(V))
    assert near(mean, whole)
    with torch.no_grad():
        head = log_q.topk(4).indices
        tail = torch.ones(V, dtype=torch.bool).index_fill(0, head, False)
        log_q[tail] = z[tail] - 9
        log_q -= log_q.logsumexp(0)
    parts = [pulls(KlRegression("topk", top=k), z, log_q, a, log_q.topk(k).indices) for k in (4, V)]
    assert near(*parts)


def test_where_nothing_has_moved_it_is_the_policy_gradient():
    """p = q: the complement weighs 1 and the coefficients of a head are 0."""
    z, _ = policies(5)
    a, log_q = torch.linspace(-1, 1, V, dtype=F64), z.detach().log_softmax(0)
    plain = -a[:, None] * (torch.eye(V, dtype=F64) - log_q.exp())
    for part in (KlRegression("binary"), KlRegression("topk", top=3), KlRegression("binary", "sequence")):
        assert near(pulls(part, z, log_q, a, log_q.topk(3).indices), plain)
    certain = torch.tensor([0.0, -50.0], dtype=F64)
    held = KlRegression("binary")(tokens(certain, certain * 0, certain * 0 + 1, log_drift=certain * 0))
    assert bool(held.loss_T.isfinite().all()), "a token of probability 1 has a complement of 1e-6"


def test_the_draws_beside_a_token_are_the_samplers():
    """Frequencies within six deviations of q, log-probabilities exact, nothing of weight 0, and again the same."""
    p = torch.tensor([0.0, 1.0, 0.25, 0.0, 0.5, 0.125, 0.0])
    q, count = p.double() / p.double().sum(), 40_000
    ids, logs = draw_more(p, draw_beside(77, 3, count))
    found = torch.bincount(ids, minlength=7) / count
    assert bool(((found - q).abs() <= 6 * (q * (1 - q) / count).sqrt()).all()) and not found[q == 0].any()
    assert torch.allclose(logs, q[ids].log(), rtol=0, atol=1e-12)
    assert bool((draw_beside(77, 3, 9) == draw_beside(77, 3, count)[:9]).all())
    others = (draw_beside(77, 4, count), draw_beside(78, 3, count))
    assert all(abs(float(((draw_beside(77, 3, count) - 0.5) * (x - 0.5)).mean())) < 6 / 12 / count**0.5 for x in others)


def test_more_draws_change_nothing_that_is_drawn():
    loaded = tiny_model()
    plain, beside = drawn_groups(loaded), drawn_groups(loaded, {"behavior_draws:7"}, top_k=0)
    for one, two in zip(plain, beside, strict=True):
        for a, b in zip(one.trajectories, two.trajectories, strict=True):
            assert a.tokens == b.tokens and a.logprobs == b.logprobs
            assert all(top is None or len(top[0]) == 7 for top in b.behavior_top)
    cut = drawn_groups(loaded, {"behavior_draws:7"}, top_k=3)
    for t in (t for group in cut for t in group.trajectories):
        for at in range(3, len(t.tokens)):
            assert set(t.behavior_top[at][0].tolist()) <= set(t.support[at])
    with pytest.raises(UserError, match="fills the same column"):
        open_channels(frozenset({"behavior_top:3", "behavior_draws:3"}), 99)


@pytest.mark.slow
def test_the_trainer_regresses_on_what_was_drawn_in_any_split():
    """The gradient on the weights against autograd through written-out logits; the policy is not the sampler."""
    loaded, algo = tiny_model(), row("klpo", surrogate={"draws": 6, "beta": 0.3})
    groups = drawn_groups(loaded, {"behavior_draws:6"})
    with torch.no_grad():
        for p in loaded.model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    t, b = trainer(loaded, algo, temperature=0.7), batch_of(groups)
    compute_advantages(b, algo)
    whole = gradient(t, b, algo)
    assert apart(gradient(t, b, algo, micro_tokens=1), whole) <= 1e-6
    t.weights.zero_grad()
    total = torch.zeros(())
    for s in b.samples:
        ids, layout = torch.tensor(s.tokens.tolist()), PackedLayout([PackedSegment(0, len(s.tokens))])
        logits = t.loaded.head.logits(t.loaded.hidden_states(ids, torch.arange(len(ids)), layout))
        log_p = (logits / 0.7).log_softmax(-1)[s.trainable - 1]
        own = log_p.gather(-1, torch.tensor(s.tokens[s.trainable]).long()[:, None])[:, 0]
        z = own - log_p.gather(-1, s.known.top_ids).mean(-1)
        h = s.reward - 0.3 * (own.detach() - s.known.behavior)
        total = total - (h * z).sum() / len(b.samples)
    total.backward()
    wanted = torch.cat([m.grad.flatten() for m in t.weights.masters]).double()
    assert wanted.norm() > 1e-3 and apart(whole, wanted) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("estimator,knobs", [("mc", {"draws": 5}), ("topk", {}), ("binary", {})])
def test_a_tiny_run_of_single_answers(tmp_path, estimator, knobs):
    algo = {"kind": "klpo", "group_size": 1, "surrogate": {"estimator": estimator, **knobs}}
    run(tmp_path, algo=algo, loop__steps=2, loop__warmup__steps=1)
    found = [t for g in store.groups_of(store.read_step(tmp_path, 3)) for t in g.trajectories if t.written]
    assert found and all((t.behavior_top is None) == (estimator == "binary") for t in found)


@pytest.mark.parametrize(
    "section,message",
    [
        ({"surrogate": {"estimator": "full"}}, "estimator = 'full'"),
        ({"surrogate": {"beta": -0.1}}, "distance to the sampler would be rewarded"),
        ({"surrogate": {"draws": 1, "route": "sequence"}}, "each column of draws is weighed by the others"),
        ({"surrogate": {"top": 5}}, r"surrogate\.top = 5 has no effect: surrogate\.estimator is mc"),
        ({"surrogate": {"estimator": "binary", "draws": 5}}, "surrogate.estimator is binary"),
        ({"surrogate": {"estimator": "topk", "top": 0}}, "it must be at least 1"),
        ({"correction": {"kind": "importance"}}, "weighed twice"),
    ],
)
def test_knobs_that_cannot_be_meant_are_refused(section, message):
    with pytest.raises(ConfigError, match=message):
        resolve_algorithm({"kind": "klpo", **section})


def test_rows_that_want_different_records_do_not_stand_in_one_run(tmp_path):
    with pytest.raises(ConfigError, match=r"want different things of it \(behavior_draws:128, behavior_top:20\)"):
        run(tmp_path, algo={"kind": "klpo", "sources": {"a": {"kind": "score_centering"}}})
    assert TABLE["klpo"].surrogate.behavior_draws == 128 and not TABLE["klpo"].advantage.compares
