"""What is specific to the rows of 2026, in closed form; each of them is also in test_rows.py, one token at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from kits.algos import F64, Ragged, near, scored, tensor, tokens
from kits.train import batch as batch_with_advantages
from kits.train import model, step, trainer, trajectory
from kits.train import row as row_of
from rondel.algos import advantage, aggregate, gae, group_advantages, kl, table, turn_advantages
from rondel.algos.divergence import binary_kl
from rondel.algos.explanation import explain_objective
from rondel.algos.mask_corrections import BinaryKlMask, Freshness, VariationMask
from rondel.algos.objective import objective
from rondel.algos.soft_surrogates import DivergencePenalty, FutureKl, GammaWeight, SquaredGap, UnboundedPositive
from rondel.algos.surrogate import Clip
from rondel.algos.tokens import TokenBatch
from rondel.core.errors import ConfigError
from rondel.core.types import Group, Score, Task
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.train.annotate import advantages_of, compute_advantages
from rondel.train.checkpoint import load_trainer, save_trainer
from rondel.train.pack import batch_of

LENGTHS = [3, 0, 7, 1, 10, 5, 2, 8, 4]


def slopes(part, x, a, **more) -> torch.Tensor:
    """dl/dlogp of single tokens with log-ratios x."""
    logp = tensor(*[-1.0] * len(x)).requires_grad_()
    drawn = torch.as_tensor(x, dtype=F64)
    seen = tokens(logp, logp - logp.detach() + drawn, torch.as_tensor(a, dtype=F64), **more)
    return torch.autograd.grad(part(seen).loss_T.sum(), logp)[0]


def test_vespo_weighs_an_answer_by_a_gamma_of_its_whole_ratio():
    """phi(1) = 1, phi is largest at W = k/lambda, and W is the product over the answer, without its length."""
    drift, sample = tensor(0.1, 0.2, -0.4, 0.3, 0.0), torch.tensor([0, 0, 0, 1, 1])
    found = slopes(GammaWeight(), drift, [1.0] * 5, log_drift=drift, sample=sample)
    for w, at in ((math.exp(-0.1), slice(0, 3)), (math.exp(0.3), slice(3, 5))):
        assert near(found[at], [-(w**2) * math.exp(3 * (1 - w))] * (at.stop - at.start))
    grid = torch.linspace(0.05, 3, 60, dtype=F64)
    for a, peak in ((1.0, 2 / 3), (-1.0, 3 / 2)):
        one = torch.arange(60)
        weight = slopes(GammaWeight(), grid.log(), [a] * 60, log_drift=grid.log(), sample=one).abs()
        assert abs(float(grid[weight.argmax()]) - peak) < 0.06
    far = tensor(-40.0, 40.0)
    assert torch.equal(
        slopes(GammaWeight(), far, [1.0, 1.0], log_drift=far, sample=torch.arange(2)).isfinite(), torch.ones(2).bool()
    )


def test_luspo_is_gspo_times_the_length():
    batch = Ragged.make(LENGTHS, 5)
    at = batch.lengths_N.repeat_interleave(batch.lengths_N)[:, None]
    rows = [replace(table.TABLE[name], surrogate=Clip(0.05, 0.1)) for name in ("luspo", "gspo")]
    luspo, gspo = (batch.loss(row)[1] for row in rows)
    assert near(luspo, gspo * at) and table.LUSPO.surrogate == Clip(2e-3, 2.5e-3)


def test_drpo_attenuates_and_then_corrects():
    """The paper's table 1: -A·r·(1 - sign(A·(r - 1))·|p - q|/delta)."""
    x, a, p, delta = [0.4, -0.4, 0.4, -0.4, 2.0], [1.0, 1.0, -1.0, -1.0, 1.0], math.exp(-1.0), 0.1
    found = slopes(DivergencePenalty(delta), x, a)
    wanted = []
    for moved, weight in zip(x, a, strict=True):
        r = math.exp(moved)
        q = p / r
        wanted.append(-weight * r * (1 - math.copysign(1, weight * (r - 1)) * abs(p - q) / delta))
    assert near(found, wanted)
    assert found[0] > 0 and found[4] > 0, "beyond delta the policy is pulled back"


def test_up_holds_bad_tokens_only():
    x, a = [3.0, 0.1, 3.0, -3.0, 0.1], [0.7, 0.7, -0.7, -0.7, -0.7]
    r = math.exp(0.1)
    assert near(slopes(UnboundedPositive(), x, a), [-0.7, -0.7, 0, 0, 0.7 * r])
    with pytest.raises(ConfigError, match=r"high = 0\.3 has no effect"):
        table.resolve_algorithm({"kind": "up", "surrogate": {"high": 0.3}})


def test_fipo_counts_what_followed_a_token():
    x, a, g = [0.02, 0.1, -0.05], [1.0, 1.0, 1.0], 2 ** (-1 / 32)
    sums = [x[0] + g * x[1] + g * g * x[2], x[1] + g * x[2], x[2]]
    found = slopes(FutureKl(least=0.5, most=2.0), x, a)
    assert near(found, [-math.exp(s) * math.exp(own) for s, own in zip(sums, x, strict=True)])
    assert near(
        slopes(FutureKl(), x, a),
        [-min(max(math.exp(s), 1), 1.2) * math.exp(own) for s, own in zip(sums, x, strict=True)],
    )
    still = [0.0] * 3
    assert near(slopes(FutureKl(), still, a), slopes(Clip(), still, a))
    two = slopes(FutureKl(least=0.5), [0.1, 0.1], [1.0, 1.0], sample=torch.tensor([0, 1]))
    assert near(two, [-math.exp(0.2)] * 2), "nothing follows across samples"
    assert near(slopes(FutureKl(safe=1.5), [0.5], [-1.0]), [math.exp(0.5)]), "a bad token is not made heavier"


def test_vaco_masks_what_leaves_in_an_answer_that_has_left():
    x, a, sample = tensor(0.5, -0.5, 0.01, -0.01), tensor(1, 1, 1, 1), torch.tensor([0, 0, 1, 1])
    seen = tokens(tensor(-1, -1, -1, -1), x, a, log_weight=x, log_drift=x, sample=sample)
    assert VariationMask(0.1).weights_of(seen).tolist() == [0, 1, 1, 1]
    assert VariationMask(0.001).weights_of(seen).tolist() == [0, 1, 0, 1]
    assert VariationMask(0.001).weights_of(replace(seen, advantages=-a)).tolist() == [1, 0, 1, 0]
    row = table.resolve_algorithm({"kind": "vaco"})
    assert not row.correction.weighs and row.corrects_staleness
    with pytest.raises(ConfigError, match="no advantage is negative"):
        table.resolve_algorithm({"kind": "raft", "correction": {"kind": "variation_mask"}})


def test_kpop_is_wide_in_ratios_for_a_rare_token_and_tight_for_a_common_one():
    before = tensor(math.log(0.001), math.log(0.9), math.log(0.5), math.log(0.5))
    now = tensor(math.log(0.02), math.log(0.5), math.log(0.55), math.log(0.5))
    x = now - before
    seen = tokens(now, x, torch.ones(4, dtype=F64), log_weight=x, log_drift=x, sample=torch.zeros(4).long())
    both = torch.maximum(binary_kl(now, before), binary_kl(before, now))
    assert both[0] < 0.1 < both[1] and x[0] > 2.9 and abs(float(x[1])) < 0.6
    assert near(BinaryKlMask().weights_of(seen), [20.0, 0.0, 1.1, 1.0])
    moved = replace(seen, logprobs=now + 0.3, log_drift=x + 0.3)  # the policy has moved on within the step
    assert near(BinaryKlMask().weights_of(moved), [20.0, 0.0, 1.1, 1.0])


def test_a_star_po_rests_where_the_implied_reward_is_the_advantage():
    part, sample = SquaredGap(0.5), torch.zeros(4).long()
    assert near(slopes(part, [0.4] * 4, [0.8] * 4, sample=sample), [0.0] * 4)  # 0.5·1.6 = 0.8
    assert near(slopes(part, [0.0] * 4, [1.0] * 4, sample=sample), [-part.steepness] * 4)
    logp = tensor(0.1, 0.2, 0.3).requires_grad_()
    loss = part(tokens(logp, logp, tensor(2, 2, 2), sample=torch.zeros(3).long())).loss_T.sum()
    assert near(loss, (0.5 * logp.sum() - 2) ** 2)
    rewards = tensor(0, 1, 1, 0.5)
    for beta, value in ((1e-3, 1.0), (1e4, 0.625)):
        assert near(group_advantages.SoftValue(beta)(scored(rewards)), rewards - value, 2e-3)
    assert near(group_advantages.SoftValue()(scored(tensor(0.1, 0.1, 0.1))), [0.0] * 3)
    assert table.A_STAR_PO.needs == {"advantages", "ref_logprobs"}


def test_real_has_the_gradient_of_its_classification():
    """With the policy where the step began; the whole loss by autograd, across the samples of a group."""
    batch = Ragged.make([3, 7, 1, 10, 5, 2, 8, 4], 3)
    own = batch.logits_TV.log_softmax(-1)[:, 0]
    batch = replace(batch, others_3T=torch.stack([own, batch.others_3T[1], own]), guided_N=batch.guided_N & False)
    leaf = batch.logits_TV.clone().requires_grad_()
    moved = (leaf.log_softmax(-1)[:, 0] - batch.others_3T[1]).split(batch.lengths_N.tolist())
    s, loss, groups = (
        torch.stack([piece.mean() for piece in moved]) / 0.5,
        torch.zeros((), dtype=F64),
        batch.group_N.unique(),
    )
    for g in groups:
        mine = batch.group_N == g
        good = mine & (batch.rewards_N > batch.rewards_N[mine].mean())
        bad = mine & ~good
        if good.any() and bad.any():
            loss = loss + torch.log1p(s[bad].exp().sum()) + torch.log1p((-s[good]).exp().sum())
    wanted = torch.autograd.grad(loss / len(groups), leaf)[0]
    assert near(batch.loss(table.REAL)[1], wanted) and wanted.abs().max() > 1e-3


def test_a_prompt_counts_as_much_as_any_other_and_its_tokens_alike():
    lengths, group = torch.tensor([2, 6, 0, 5, 3]), torch.tensor([7, 7, 7, 1, 9])
    weight = aggregate.PromptMean()(lengths, group)
    assert near(weight, [1 / 24, 1 / 24, 0, 1 / 15, 1 / 9])
    for g in (7, 1, 9):
        assert near((weight * lengths)[group == g].sum(), torch.tensor(1 / 3, dtype=F64))
    assert aggregate.PromptMean()(torch.zeros(2).long(), torch.zeros(2).long()).tolist() == [0, 0]


def test_one_scale_for_the_whole_step():
    rewards, group = tensor(0, 1, 1, 1, 0, 0), torch.tensor([0, 0, 1, 1, 2, 2])
    deviations = tensor(-0.5, 0.5, 0, 0, 0, 0)
    for over, values in (("deviations", deviations), ("rewards", rewards)):
        assert near(group_advantages.BatchNorm(over, 1e-4)(scored(rewards, group)), deviations / (values.std() + 1e-4))


def test_gar_shares_what_the_winners_earned_by_the_judges_opinion():
    rewards, judged = tensor(1, 1, 0, 0), tensor(1.0, 0.0, 0.3, math.nan)
    rule = group_advantages.Redistribute()
    found = rule(scored(rewards, quality=judged))
    assert near(found, [2 / 3, 1 / 3, -0.5, -0.5]) and near(
        rule(scored(rewards, quality=tensor(0.4, 0.4, 1, 1))), [0.5, 0.5, -0.5, -0.5]
    )
    capped = replace(rule, least=0.1, most=1.0)(scored(rewards, quality=tensor(1, 0, 0, 0)))
    assert near(capped.sum(), tensor(0.0)[0]) and near(capped, [0.6125, 0.1625, -0.3875, -0.3875])
    with pytest.raises(ConfigError, match="the part 'quality' of the reward"):
        rule(scored(rewards, right=judged))
    with pytest.raises(ConfigError, match="must lie in"):
        rule(scored(rewards, quality=tensor(2, 0, 0, 0)))


def test_the_baseline_of_a_place_has_the_least_variance_there():
    """Two answers of two tokens: the baseline is the mean weighed by the squared gradients so far, at each place."""
    pi, square = tensor(0.5, 0.9, 0.2, 0.1), tensor(0.5, 0.82, 0.3, 0.4)
    told = replace(scored(tensor(1, 0), lengths=torch.tensor([2, 2])), proximal_T=pi.log(), collision_T=square)
    first = [1 - 2 * 0.5 + 0.5, 1 - 2 * 0.2 + 0.3]
    second = [first[0] + 1 - 1.8 + 0.82, first[1] + 1 - 0.2 + 0.4]
    found = turn_advantages.TokenBaseline()(told)
    b = [first[0] / sum(first), second[0] / sum(second)]
    assert near(found, [1 - b[0], 1 - b[1], -b[0], -b[1]])
    longer = replace(told, lengths_N=torch.tensor([1, 3]))
    assert near(turn_advantages.TokenBaseline()(longer)[2:], [0.0, 0.0]) and near(
        turn_advantages.TokenBaseline(False)(longer)[2:], [0.0, 0.0]
    )
    alone = replace(longer, rewards_N=tensor(0, 1))
    assert near(turn_advantages.TokenBaseline()(alone)[2:], [1.0, 1.0])
    # the variance of (G - b)·|score|² over the two answers is least there
    w, g = torch.tensor(first, dtype=F64), tensor(1, 0)
    spread = [float((w * (g - at).square()).sum()) for at in (b[0] - 0.05, b[0], b[0] + 0.05)]
    assert spread[1] < min(spread[0], spread[2])


def test_the_trainer_says_how_likely_two_draws_are_the_same():
    row = row_of("otb")
    t, b = trainer(model(), row, micro_tokens=12), batch_of([episodes()])
    step(t, b, row)
    other = model()
    for s in b.samples:
        with torch.no_grad():
            ids = torch.from_numpy(s.tokens.astype(np.int64))
            layout = PackedLayout([PackedSegment(0, len(ids))], "cpu")
            logits = other.head.logits(other.hidden_states(ids, torch.arange(len(ids)), layout)[s.trainable - 1])
        assert torch.allclose(s.known.collision, logits.softmax(-1).square().sum(-1), atol=1e-6)


def test_early_tokens_are_taught_more():
    """TRL's weights: 1 + gamma·(1 - prefix / total) of |log q - log p|, the prefix without the token itself."""
    behavior, teacher = tensor(-1.0, -2.0, -1.0, -0.5), tensor(-2.0, -1.5, -1.0, -3.0)
    told = replace(scored(tensor(0, 0), lengths=torch.tensor([3, 1])), behavior_T=behavior, teacher_T=teacher)
    gaps = [1.0, -0.5, 0.0, 2.5]
    weights = [1.5, 1 + 0.5 * (1 - 1 / 1.5), 1.0, 1.5]
    assert near(advantages_of(table.IW_OPD, told), [-w * gap for w, gap in zip(weights, gaps, strict=True)])


def test_sdar_learns_what_the_teacher_finds_likelier():
    logp, teacher = tensor(-3.0, -1.0, -0.1).requires_grad_(), tensor(-0.5, -1.0, -4.0)
    known = TokenBatch(
        torch.zeros(3).long(), logprobs=logp, teacher=teacher, proximal=logp.detach(), advantages=tensor(0, 0, 0)
    )
    loss, terms = objective(table.SDAR, known, torch.ones(3, dtype=F64))
    gate = torch.sigmoid(5.0 * (teacher - logp.detach()))
    assert near(terms["taught"], gate * (teacher - logp.detach())) and near(loss, 0.1 * terms["taught"].sum())
    assert (
        near(torch.autograd.grad(loss, logp)[0], -0.1 * gate) and gate[0] > 0.99 and gate[1] == 0.5 and gate[2] < 1e-6
    )


# -- agents, turns and ages in the trainer
# ---------------------------------------------------------------------------------


def game(number: int, rewards: list[float], rng: np.random.Generator) -> Group:
    group = Group(
        number, Task(f"t{number}", "fake", {}), [trajectory([(3, 1)], rng, prompt=[5, 6], reward=r) for r in rewards], 0
    )
    for i, t in enumerate(group.trajectories):
        t.agent = "first" if i % 2 else "second"
    return group


def test_each_agent_is_compared_with_what_it_usually_earns(tmp_path):
    rng, row = np.random.default_rng(0), row_of("rae", advantage={"decay": 0.5})
    t = trainer(model(), row)
    known = {"first": 0.0, "second": 0.0}
    for rewards in ([1.0, -1.0, 1.0, 1.0], [0.0, 2.0, 0.0, 2.0]):
        b = batch_of([game(1, rewards, rng)])
        step(t, b, row)
        found = [float(s.known.advantages[0]) for s in b.samples]
        assert found == pytest.approx([s.reward - known[s.agent] for s in b.samples])
        for agent in known:
            own = [s.reward for s in b.samples if s.agent == agent]
            known[agent] = 0.25 * known[agent] + 0.75 * sum(own) / 2
    assert known["first"] != known["second"]
    save_trainer(t, tmp_path)
    other = trainer(model(), row)
    load_trainer(other, tmp_path)
    assert (
        other.coefs.values == t.coefs.values == {f"baseline of {agent}": pytest.approx(b) for agent, b in known.items()}
    )
    one_by_one = 0.3  # as the paper moves it: the same where rewards agree
    for _ in range(3):
        one_by_one = 0.9 * one_by_one + 0.1 * 2.0
    rule = group_advantages.AgentBaseline(0.9, {"a": 0.3})
    assert rule.next_baselines(["a"] * 3, [2.0] * 3)["a"] == pytest.approx(one_by_one)


@pytest.mark.parametrize("charged", [True, False])
@pytest.mark.parametrize("remembered", ["baseline", "history"])
def test_what_is_remembered_is_what_was_compared(remembered, charged):
    """Answers that always earn the same, behind a length penalty and a KL in the reward: what they are compared with
    paid both, too. And a branch of an episode earns nothing of its own.
    """
    kind = {"kind": "agent_baseline", "decay": 0.0} if remembered == "baseline" else {"kind": "prompt_norm", "least": 1}
    charge = {"kl": {"kind": "k2", "coef": 0.5, "where": "reward"}} if charged else {}
    row = row_of("reinforce", advantage=kind, shaping={"kind": "overlong", "max_tokens": 3, "buffer": 1}, **charge)
    t = trainer(model(), row, lr=0.0)
    for again in range(2):
        group = game(1, [0.25, 1.0], np.random.default_rng(0))
        if not charged:
            group.trajectories += game(1, [0.25], np.random.default_rng(1)).trajectories
            group.trajectories[2].parent = 0
        b = batch_of([group])
        step(t, b, row)
        paid = [s.reward - 1.0 for s in b.samples[:2]]
        if charged:
            each = [s.known.behavior.double() - s.known.reference for s in b.samples]
            paid = [reward - float((0.25 * x**2).sum()) for reward, x in zip(paid, each, strict=True)]
        if remembered == "baseline":
            assert list(t.coefs.values.values()) == pytest.approx(paid)
            found = [float(s.known.advantages[0]) for s in b.samples[:2]]
            assert found == pytest.approx([0.0, 0.0] if again else paid, abs=1e-5)
        else:
            assert t.coefs.rewards["t1"] == pytest.approx(paid * (1 + again))


def episodes() -> Group:
    """Two episodes of two turns; their second turns saw the same observation, their first ones the prompt."""
    rng = np.random.default_rng(1)
    group = Group(4, Task("t4", "fake", {}), [trajectory([(2, 1)], rng, prompt=[5, 6, 7]) for _ in range(3)], 0)
    for t, seen, reward in zip(group.trajectories, ([9, 9], [9, 9], [8]), (1.0, 0.0, 0.5), strict=True):
        t.extend(seen)
        t.extend([11, 12, 13], logprobs=[-1.0] * 3, versions=[0] * 3)
        t.score = Score(reward)
    return group


def test_turns_that_saw_the_same_are_compared():
    b = batch_of([episodes()])
    found = b.scored_samples
    assert found.turn_T.tolist() == [0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 4, 4, 5, 5, 5]
    assert found.state_T.tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 0, 0, 2, 2, 2]
    compute_advantages(b, row_of("gigpo", advantage={"divide": False, "gamma": 0.5}))
    first, second = ([float(s.known.advantages[at]) for s in b.samples] for at in (0, -1))
    assert first == pytest.approx([0.5 + 0.25, -0.5 - 0.25, 0.0])
    assert second == pytest.approx([0.5 + 0.5, -0.5 - 0.5, 0.0]), "the last one's state was seen by no other"


@pytest.mark.slow
def test_echo_learns_the_tokens_that_came_back_as_a_likelihood_of_their_own():
    """Its gradient less that of dr_grpo is 0.1 times that of the mean -log pi of what was read, in any split."""

    def gradient_of(row, **settings):
        t, made = trainer(model(), row, lr=0.0, clip=1e9, **settings), batch_with_advantages([episodes()], row)
        step(t, made, row)
        return torch.cat([m.grad.flatten() for m in t.weights.masters]).double()

    echo, plain = (row_of(kind) for kind in ("echo", "dr_grpo"))
    found = gradient_of(echo) - gradient_of(plain)
    other = model()
    for parameter in other.model.parameters():
        parameter.requires_grad_()
    total, count = torch.zeros(()), 0
    for t in episodes().trajectories:
        ids = torch.tensor(list(t.tokens))
        layout = PackedLayout([PackedSegment(0, len(ids))], "cpu")
        logp = other.head.logits(other.hidden_states(ids, torch.arange(len(ids)), layout)).log_softmax(-1)
        read = [i for i in range(5, len(ids)) if not t.mask[i]]
        total, count = total - sum(logp[i - 1, ids[i]] for i in read), count + len(read)
    assert count == 5
    text = explain_objective(echo)
    assert "reading   beside it, not weighed by w: 0.1·mean of -logp" in text and "0.1·d" not in text
    assert "distill.coef = 0.1" in text
    (0.1 * total / count).backward()
    names = dict(other.model.named_parameters())
    wanted = torch.cat([p.grad.flatten() for p in names.values()]).double()
    assert float((found - wanted).norm() / wanted.norm()) < 1e-4
    assert gradient_of(echo, epochs=2).isfinite().all(), "a second pass does not ask what was read for its ratio"
    assert float((gradient_of(echo, micro_tokens=9) - gradient_of(echo)).norm() / wanted.norm()) < 1e-5


def test_turns_are_the_steps_of_gae():
    draw = torch.Generator().manual_seed(2)
    values = torch.randn(15, generator=draw, dtype=F64)
    told = replace(batch_of([episodes()]).scored_samples, values_T=values)
    found = turn_advantages.TurnGae(0.9, 0.8, whiten=False)
    a, returns = found(told), found.returns(told)
    for i, reward in enumerate((1.0, 0.0, 0.5)):
        v, w = float(values[5 * i]), float(values[5 * i + 2])
        late = reward - w
        early = 0.9 * w - v + 0.72 * late
        assert near(a[5 * i : 5 * i + 5], [early] * 2 + [late] * 3) and near(
            returns[5 * i : 5 * i + 5], [early + v] * 2 + [late + w] * 3
        )
    single = replace(told, turn_T=torch.arange(15))
    assert near(found(single), gae.Gae(0.9, 0.8, whiten=False)(single))
    cut = replace(single, value_after_N=tensor(0.0, 2.0, -1.5))  # what a world showed where it cut an episode off
    assert near(found(cut), gae.Gae(0.9, 0.8, whiten=False)(cut)) and not near(found(cut), found(single))


def test_a_token_counts_by_the_versions_since_it_was_drawn():
    row = row_of("rloo", correction={"kind": "freshness", "half_life": 2.0, "oldest": 4})
    group = episodes()
    for t, drawn in zip(group.trajectories, (6, 4, 1), strict=True):
        t.versions = [drawn if wrote else v for v, wrote in zip(t.versions, t.mask, strict=True)]
    t = trainer(model(), row, every_answer=True)
    t.version = 6
    b = batch_with_advantages([group], row)
    stats = step(t, b, row)
    assert [float(s.known.age[0]) for s in b.samples] == [0, 2, 5]
    assert stats.metrics["train/correction"] == pytest.approx((1 + 0.5 + 0) / 3) and row.corrects_staleness
    assert Freshness(2.0).weights_of(tokens(tensor(0), tensor(0), tensor(1), age=tensor(4))).tolist() == [0.25]


def test_codapo_counts_a_question_by_confidence_and_difficulty():
    """Three groups of four answers of two tokens: half right, all right, one right and the policy less sure of it."""
    rewards = tensor(1, 0, 1, 0, 1, 1, 1, 1, 0, 0, 0, 1)
    group = torch.arange(3).repeat_interleave(4)
    logp = tensor(*[-0.2] * 8, *[-0.1] * 8, *[-1.0] * 8)
    logp[0], logp[1] = -0.1, -0.3  # the mean over an answer's tokens counts
    told = replace(scored(rewards, group, torch.full((12,), 2)), behavior_T=logp)
    rule = table.CODAPO.advantage
    wanted = [math.exp(-0.2)] * 4 + [0.0] * 4 + [math.exp(-1.0) * 0.75] * 4
    assert near(rule.values_N(told), wanted)
    plain = advantage.GroupNorm()(told)
    assert near(rule(told), (torch.tensor(wanted, dtype=F64) + 0.1) * plain) and rule(told)[4:8].tolist() == [0.0] * 4
    shaped = replace(told, rewards_N=rewards - 0.7, unshaped_N=rewards)  # what shapes a reward says nothing of right
    assert near(rule.values_N(shaped), wanted)
    graded = replace(told, rewards_N=rewards * 0.3, parts={"acc": rewards})
    assert near(replace(rule, part="acc").values_N(graded), wanted) and near(rule.values_N(graded), [0.0] * 12)
    with pytest.raises(ConfigError, match="has no such part; it has: acc"):
        replace(rule, part="right").values_N(graded)
    with pytest.raises(ConfigError, match="would change their sign"):
        replace(rule, delta=-1.0)


def test_the_coefficient_doubles_and_halves():
    rule = kl.Kl("k1", 0.2, "reward", target=3.0, steer="doubling")
    assert [rule.next_coef(nats, 8) for nats in (4.6, 4.4, 2.1, 1.9)] == [0.4, 0.2, 0.2, 0.1]
    assert rule.next_coef(0.0, 8) == 0.1 and replace(rule, coef=1e6).next_coef(9.0, 8) == 1e6
    with pytest.raises(ConfigError, match=r"horizon = 50 has no effect: kl\.steer is doubling"):
        row_of("ppo", kl={"coef": 0.1, "target": 3.0, "steer": "doubling", "horizon": 50})


@pytest.mark.parametrize(
    "part,message",
    [
        (lambda: GammaWeight(k_pos=-1), "k_pos = -1"),
        (lambda: DivergencePenalty(0.0), "no token could move"),
        (lambda: FutureKl(half_life=0.0), "a number of tokens"),
        (lambda: FutureKl(least=1.1), "1 must lie between"),
        (lambda: SquaredGap(0.0), "nothing would be learned"),
        (lambda: BinaryKlMask(0.0), "it must be positive"),
        (lambda: VariationMask(-0.1), "must not be negative"),
        (lambda: Freshness(0.0), "a number of versions"),
        (lambda: group_advantages.AgentBaseline(1.0), "would never move"),
        (lambda: group_advantages.Redistribute(least=0.0), "must not lose all"),
        (lambda: turn_advantages.StepGroups(gamma=1.5), "must lie in"),
    ],
)
def test_a_knob_that_cannot_be_meant_is_refused(part, message):
    with pytest.raises(ConfigError, match=message):
        part()


def test_the_advantages_of_recent_rows_are_zero_for_a_group_that_agrees():
    agreed = scored(tensor(0.1, 0.1, 0.1, 0.1), quality=tensor(1, 0, 0.5, 0.2))
    rules = [
        group_advantages.BatchNorm(),
        group_advantages.SoftValue(),
        group_advantages.Redistribute(),
        turn_advantages.StepGroups(),
    ]
    assert (
        all(rule(agreed).tolist() == [0.0] * 4 for rule in rules)
        and advantage.GroupNorm()(agreed).tolist() == [0.0] * 4
    )
