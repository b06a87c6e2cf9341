"""PPO's critic: its loss and gradient are the written formula's, for any split; it
resumes to the bit, and frozen means frozen.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kits.runs import events, final, run, run_and_die
from kits.sweeps import covering
from kits.train import apart, awkward_groups, batch, bits, model, row, shuffled, step, trainer, trajectory
from rondel.assemble import replay
from rondel.core.errors import ConfigError
from rondel.core.types import Group, Score, Task
from rondel.models.save import save_model
from rondel.runtime.journal import store
from rondel.train.adaptive_coefs import kl_of_samples
from rondel.train.annotate import compute_advantages
from rondel.train.checkpoint import load_trainer, save_trainer
from rondel.train.pack import TrainBatch, batch_of
from rondel.train.step_metrics import StepMetricSums

PPO = row("ppo")
CHARGED = row("ppo", kl={"coef": 0.3}, advantage={"gamma": 0.98, "lam": 0.9})


def learned(kind: str = "llama", algo=PPO, **settings):
    """A trainer whose critic has an opinion: its head and the reference are off their starts."""
    t = trainer(model(kind), algo, **settings)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in t.critic.loaded.model.get_output_embeddings().parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw))
        if t.start is not None:
            t.start.head.weight.mul_(0.9)
    t.critic.steps = 1  # so that it does not begin again
    return t


def critic_bits(t) -> list[bytes]:
    return bits(t.critic)


def gradient(
    t, b: TrainBatch, algo, *, micro_tokens: int = 10**6, share: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the policy and of the critic, each in one vector; values and returns once for
    all splits, and a step away from them.
    """
    t.main = replace(t.main, micro_tokens=micro_tokens, share_prompts=share)
    t.weights.zero_grad()
    t._accumulate_gradients(b, algo, StepMetricSums(), proximal_noted=False)
    t.critic.accumulate_gradients(b, algo, t.settings, StepMetricSums())
    return tuple(
        torch.cat([(torch.zeros_like(m) if m.grad is None else m.grad).flatten() for m in w.masters]).double().clone()
        for w in (t.weights, t.critic.weights)
    )


def noted(t, groups, algo) -> TrainBatch:
    b = batch_of(groups)
    t._annotate(b, algo.needs)
    compute_advantages(b, algo)
    rng = np.random.default_rng(3)
    for s in b.samples:  # as if the critic had moved since: some tokens lie beyond the clip
        s.known.values = torch.as_tensor(
            s.known.values.numpy() + rng.normal(scale=0.3, size=len(s.trainable)).astype(np.float32)
        )
    return b


@pytest.mark.slow
@pytest.mark.parametrize("kind", covering(["llama", "tied", "gemma3_text"], ["tied"]))
def test_both_gradients_are_the_same_for_any_split(kind):
    t = learned(kind, CHARGED)
    b = noted(t, awkward_groups(), CHARGED)
    whole = gradient(t, b, CHARGED)
    assert all(g.norm() > 1e-3 for g in whole)
    splits = [(b, 13, True), (b, 40, False)]
    splits += [(shuffled(b, seed, whole_groups=seed < 1), 25, True) for seed in range(2)]
    worst = max(
        apart(x, y)
        for other, micro, share in splits
        for x, y in zip(gradient(t, other, CHARGED, micro_tokens=micro, share=share), whole)
    )
    assert worst <= 1e-6, worst


@pytest.mark.slow
def test_two_updates_move_both_alike_for_any_split():
    moved = []
    for micro_tokens, share in ((1, False), (20, True)):
        t = learned("llama", CHARGED, micro_tokens=micro_tokens, share_prompts=share, updates_per_step=2)
        start = [torch.cat([m.detach().flatten() for m in w.masters]).double() for w in (t.weights, t.critic.weights)]
        assert step(t, batch_of(awkward_groups()), CHARGED).stepped
        end = [torch.cat([m.detach().flatten() for m in w.masters]).double() for w in (t.weights, t.critic.weights)]
        moved.append([b - a for a, b in zip(start, end)])
    for other in moved[1:]:
        # AdamW magnifies the rounding of tiny gradients
        assert all(apart(x, y) <= 2e-3 for x, y in zip(other, moved[0]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", covering(["llama", "tied", "gemma3_text"], ["gemma3_text"]))
def test_both_gradients_are_those_of_the_formula(kind):
    """Token by token in float64 through plain transformers modules: values, KL in the
    reward, GAE, whitening, both losses.
    """
    algo, groups = CHARGED, awkward_groups()
    t = learned(kind, algo)
    for g in groups[3].trajectories:  # rewards on the way, one of them at a token that was only read
        g.score = Score(g.score.value, steps=((g.mask.index(True), 0.5), (len(g.tokens) - 1, -0.25)))
    b = batch_of(groups)
    t._annotate(b, algo.needs)
    compute_advantages(b, algo)
    mine = gradient(t, b, algo, micro_tokens=30)

    def plain(loaded):
        twin = AutoModelForCausalLM.from_config(loaded.model.config, attn_implementation="eager")
        there = twin.state_dict()
        twin.load_state_dict(
            {k: v for k, v in loaded.model.state_dict().items() if k in there and v.shape == there[k].shape},
            strict=False,
        )
        return twin.double().eval()

    policy, reference, critic = plain(t.loaded), plain(t.start), plain(t.critic.loaded)
    head = [p.detach().double().requires_grad_() for p in t.critic.loaded.model.get_output_embeddings().parameters()]
    rows, total = [], sum(len(s.trainable) for s in b.samples)
    for s in b.samples:
        ids, at = torch.tensor(s.tokens)[None], torch.tensor(s.trainable)
        target = torch.tensor(s.tokens)[at][:, None]
        logp = policy(ids, use_cache=False).logits[0].log_softmax(-1)[at - 1].gather(1, target)[:, 0]
        with torch.no_grad():
            ref = reference(ids, use_cache=False).logits[0].log_softmax(-1)[at - 1].gather(1, target)[:, 0]
        value = (critic.base_model(ids, use_cache=False).last_hidden_state[0][at - 1] @ head[0].T + head[1])[:, 0]
        reward = min(max(s.reward, -5.0), 5.0)
        earned = [0.0] * len(at)
        score = groups[[g.id for g in groups].index(s.group)].trajectories[s.index].score
        for position, amount in score.steps:
            earned[max(i for i, place in enumerate(s.trainable) if place <= position)] += amount
        earned[-1] += reward - sum(amount for _, amount in score.steps)
        advantage = next_value = 0.0
        advantages, said = [0.0] * len(at), value.tolist()
        for i in reversed(range(len(at))):
            r = earned[i] - 0.3 * (float(s.known.behavior.numpy()[i]) - float(ref[i]))
            advantage = r + 0.98 * next_value - said[i] + 0.98 * 0.9 * advantage
            next_value, advantages[i] = said[i], advantage
        rows.append((logp, value, advantages))
    flat = np.array([a for _, _, advantages in rows for a in advantages])
    mean, deviation = flat.mean(), np.sqrt(flat.var(ddof=1) + 1e-8)
    loss = value_loss = 0.0
    for logp, value, advantages in rows:
        for i, a in enumerate(advantages):
            loss = loss - (a - mean) / deviation * (logp[i] - logp[i].detach()).exp() / total
            returns = a + float(value[i].detach())
            value_loss = value_loss + (value[i] - returns) ** 2 / 2 / total
    loss.backward(), value_loss.backward()
    theirs = dict(policy.named_parameters())
    exact = torch.cat([theirs[n].grad.flatten() for n in t.weights.names])
    assert apart(mine[0], exact) <= 1e-5
    theirs = {n: p.grad for n, p in critic.named_parameters()} | {
        "lm_head.weight": head[0].grad,
        "lm_head.bias": head[1].grad,
    }
    exact = torch.cat([theirs[n].flatten() for n in t.critic.weights.names])
    assert apart(mine[1], exact) <= 1e-5


# -- credit --------------------------------------------------------------------------------------


def test_an_observation_changes_no_advantage():
    """The same written tokens, values and rewards, with more or fewer observed tokens between the turns."""
    rng = np.random.default_rng(0)

    def told(observed: list[int]) -> TrainBatch:
        ours = np.random.default_rng(1)
        groups = []
        for n, gap in enumerate(observed):
            t = trajectory(
                [(3, 1), *([(gap, 0)] if gap else []), (4, 1), *([(gap, 0)] if gap else [])],
                ours,
                prompt=[7, 8],
                reward=float(n),
            )
            first = len(t.mask) - 1 if n % 2 else 2 + 3 + gap - 1  # somewhere behind the written tokens it belongs to
            t.score = Score(float(n), steps=((first, 0.5),))
            groups.append(Group(n, Task(f"t{n}", "fake", {}), [t], 0))
        return batch_of(groups)

    bare, chatty = told([0, 0, 0, 0]), told([5, 1, 9, 2])
    notes = [{name: rng.normal(size=7).astype(np.float32) for name in ("values", "reference")} for _ in bare.samples]
    for b in (bare, chatty):
        for s, note in zip(b.samples, notes):
            s.known.values, s.known.reference = (
                torch.from_numpy(note[name].copy()) for name in ("values", "reference")
            )
            s.known.behavior = s.known.reference - 0.1
        compute_advantages(b, CHARGED)
    for a, c in zip(bare.samples, chatty.samples):
        assert (
            len(a.tokens) < len(c.tokens)
            and np.array_equal(a.known.advantages.numpy(), c.known.advantages.numpy())
            and np.array_equal(a.known.returns.numpy(), c.known.returns.numpy())
        )


def test_rows_without_time_see_the_sum_of_what_was_earned():
    groups, placed = awkward_groups(), awkward_groups()
    for g in placed:
        for t in g.trajectories:
            t.score = Score(t.score.value, steps=((t.mask.index(True), 0.75),))
    for kind in ("grpo", "rloo", "dapo"):
        a, b = (batch(x, row(kind)) for x in (groups, placed))
        assert all(
            np.array_equal(x.known.advantages.numpy(), y.known.advantages.numpy()) for x, y in zip(a.samples, b.samples)
        )


def test_the_kl_is_charged_to_the_reward_of_a_row_without_time_too():
    """RLOO with R - coef·sum(log pi - log pi_ref), as its paper has it."""
    algo = row("rloo", kl={"kind": "k1", "coef": 0.2, "where": "reward"})
    b, rng = batch_of(awkward_groups()), np.random.default_rng(0)
    for s in b.samples:
        s.known.reference = torch.as_tensor(rng.normal(size=len(s.trainable)).astype(np.float32))
    compute_advantages(b, algo)
    paid = {
        (s.group, s.index): s.reward
        - 0.2 * float((s.known.behavior.numpy().astype(float) - s.known.reference.numpy()).sum())
        for s in b.samples
    }
    for s in b.samples:
        others = [r for (g, i), r in paid.items() if g == s.group and i != s.index]
        wanted = paid[s.group, s.index] - np.mean(others) if others else 0.0
        np.testing.assert_allclose(s.known.advantages.numpy(), wanted, rtol=1e-5, atol=1e-5)


def test_a_reward_out_of_place_names_its_sample():
    groups = awkward_groups()
    groups[1].trajectories[0].score = Score(1.0, steps=((0, 1.0),))
    with pytest.raises(
        ValueError, match="group 7, sample 0: a reward of 1 at position 0, but the policy wrote nothing before 4"
    ):
        batch_of(groups)


@pytest.mark.parametrize("broken", ["step", "value"])
def test_what_is_not_finite_names_its_sample_and_moves_nothing(broken):
    t = learned()
    groups = awkward_groups()
    if broken == "step":
        groups[1].trajectories[0].score = Score(1.0, steps=((5, float("nan")), (5, 1.0)))
    b = batch_of(groups)
    if broken == "value":
        t.critic.annotate_values = lambda batch, settings: [
            setattr(s.known, "values", torch.full((len(s.trainable),), torch.inf if s.group == 7 else 0.0))
            for s in batch.samples
        ]
    before = bits(t) + critic_bits(t)
    stats = step(t, b, PPO)
    assert (
        not stats.stepped
        and f"{'reward' if broken == 'step' else 'value'}: not finite for group 7, sample 0" in stats.note
    )
    assert bits(t) + critic_bits(t) == before


# -- a step --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_first_mini_batch_is_on_policy_to_the_bit():
    """r = 1 and nothing clipped, of the policy and of the critic, although both were annotated beforehand."""
    t, b = learned(updates_per_step=3, micro_tokens=20), batch_of(awkward_groups())
    first = b.split_updates(3)[0]
    for update in b.split_updates(3):
        t._annotate(update, PPO.needs | {"proximal_logprobs"})
    compute_advantages(b, PPO)
    sums = StepMetricSums()
    t._accumulate_gradients(first, PPO, sums, proximal_noted=True)
    t.critic.accumulate_gradients(first, PPO, t.settings, sums)
    metrics = sums.to_metrics(1)
    assert (
        metrics["train/ratio_max_deviation"]
        == metrics["train/clip_fraction"]
        == metrics["train/value_clip_fraction"]
        == 0
    )
    stats = step(learned(updates_per_step=3, lr=1e-2, critic_lr=1e-2), b, PPO)
    assert stats.metrics["train/ratio_max_deviation"] > 0 and stats.metrics["train/value_clip_fraction"] > 0


@pytest.mark.slow
def test_a_rate_of_0_changes_nothing():
    t = learned(lr=0.0, critic_lr=0.0, weight_decay=0.1, updates_per_step=2)
    before = [p.clone() for w in (t.weights, t.critic.weights) for p in w.masters]
    stats = step(t, batch_of(awkward_groups()), PPO)
    assert stats.stepped and stats.metrics["train/critic_grad_norm"] > 0 and stats.metrics["train/grad_norm"] > 0
    assert all(torch.equal(p, q) for p, q in zip(before, [p for w in (t.weights, t.critic.weights) for p in w.masters]))


@pytest.mark.slow
def test_the_policy_is_frozen_while_the_critic_warms_up():
    t = trainer(model(), PPO, critic_warmup=2, start_probe=4)
    step(t, batch(awkward_groups(3), row("sft")), row("sft"))  # a supervised phase is not the critic's
    before = bits(t)
    for n in range(2):
        was = critic_bits(t)
        stats = step(t, batch_of(awkward_groups(n)), PPO)
        assert bits(t) == before and critic_bits(t) != was and stats.stepped and not t.moved
        assert stats.metrics["train/kl_to_start"] >= 0 and stats.metrics["train/weights_changed"] == 0
    assert step(t, batch_of(awkward_groups(5)), PPO).stepped and t.moved and bits(t) != before


@pytest.mark.slow
def test_the_critic_begins_where_the_policy_is_at_its_first_step():
    t = trainer(model("tied", "bfloat16"), PPO, critic_lr=0.0)
    for n in range(2):
        step(t, batch(awkward_groups(n), row("sft")), row("sft"))
    policy = dict(zip(t.weights.names, [m.clone() for m in t.weights.masters]))
    step(t, batch_of(awkward_groups(3)), PPO)
    own = dict(zip(t.critic.weights.names, t.critic.weights.masters))
    heads = own.keys() - policy.keys()
    assert all(
        torch.equal(own[name], policy[name]) for name in own.keys() - heads if own[name].shape == policy[name].shape
    )
    # weight and bias of the head
    assert sum(not bool(own[name].any()) and own[name].numel() <= 48 for name in own) == 2
    step(t, batch_of(awkward_groups(4)), PPO)
    # and does not follow it further
    assert all(torch.equal(a, b) for a, b in zip(own.values(), t.critic.weights.masters))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", covering(["float32", "bfloat16"], ["bfloat16"]))
def test_a_critic_learns_what_to_expect(dtype):
    """The same rollouts again and again: the reward is told by the prompt, so it can be known
    before the first token.
    """
    rng = np.random.default_rng(0)
    groups = [
        Group(
            n,
            Task(f"t{n}", "fake", {}),
            [trajectory([(4, 1)], rng, prompt=[20 + n % 4, 9], reward=float(n % 4)) for _ in range(4)],
            0,
        )
        for n in range(8)
    ]
    t = trainer(model("llama", dtype), PPO, critic_warmup=10**6, critic_lr=3e-3)
    metrics = [step(t, batch_of(groups), PPO).metrics for _ in range(40)]
    assert metrics[0]["train/explained_variance"] == 0 and metrics[-1]["train/explained_variance"] > 0.95
    assert metrics[-1]["train/value_loss"] < 0.1 * metrics[0]["train/value_loss"]


# -- the KL that is steered ------------------------------------------------------------------------


@pytest.mark.slow
def test_the_coefficient_follows_the_kl_and_outlives_a_resume(tmp_path):
    algo = row("ppo", kl={"coef": 0.3, "target": 2.0, "horizon": 100})
    t, coef = learned(algo=algo), 0.3
    for n in range(3):
        b = batch_of(awkward_groups(n))
        stats = step(t, b, algo)
        measured = np.mean(
            [
                sum(float(x) - float(y) for x, y in zip(s.known.behavior.numpy(), s.known.reference.numpy()))
                for s in b.samples
            ]
        )
        assert stats.metrics["train/kl_coef"] == pytest.approx(coef, rel=1e-12) and kl_of_samples(b) == pytest.approx(
            measured, rel=1e-6
        )
        coef *= 1 + min(max(measured / 2.0 - 1, -0.2), 0.2) * len(b.samples) / 100
    assert t.coefs.values["kl"] == pytest.approx(coef, rel=1e-6) and abs(coef - 0.3) > 1e-3
    save_trainer(t, tmp_path)
    other = learned(algo=algo)
    load_trainer(other, tmp_path)
    assert other.coefs.values == t.coefs.values
    for which in (t, other):
        step(which, batch_of(awkward_groups(7)), algo)
    assert bits(other) + critic_bits(other) == bits(t) + critic_bits(t) and other.coefs.values == t.coefs.values


@pytest.mark.parametrize(
    ("kl", "message"),
    [
        ({"coef": 0.1, "where": "rewards"}, "Did you mean 'reward'"),
        ({"coef": 0.1, "target": 0.0}, "target = 0.0; it must be positive"),
        ({"coef": 0.1, "horizon": 5}, "horizon = 5 has no effect: kl.target is not set"),
        ({"target": 6.0}, "target = 6.0 has no effect: kl.coef is 0"),
    ],
)
def test_knobs_of_the_kl(kl, message):
    with pytest.raises(ConfigError, match=message):
        row("ppo", kl=kl)


# -- resume, replay ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype"),
    covering(product(("llama", "tied"), ("float32", "bfloat16")), [("llama", "bfloat16"), ("tied", "float32")]),
)
def test_a_loaded_critic_goes_on_bit_for_bit(tmp_path, kind, dtype):
    t, other = (trainer(model(kind, dtype), PPO, critic_warmup=1) for _ in range(2))
    for n in range(3):
        step(t, batch_of(awkward_groups(n)), PPO)
    save_trainer(t, tmp_path)
    step(other, batch_of(awkward_groups(9)), PPO)
    load_trainer(other, tmp_path)
    assert other.critic.steps == 3
    for which in (t, other):
        step(which, batch_of(awkward_groups(5)), PPO)
    assert bits(other) + critic_bits(other) == bits(t) + critic_bits(t)


@pytest.mark.slow
def test_asleep_and_awake_it_is_the_same(tmp_path):
    t, other = learned(), learned()
    for n in range(2):
        asyncio.run(t.sleep(("optimizer",))), asyncio.run(t.wake(("optimizer",)))
        for which in (t, other):
            step(which, batch_of(awkward_groups(n)), PPO)
    assert critic_bits(t) == critic_bits(other)


TINY = {
    "algo__kind": "ppo", "algo__group_size": 1, "loop__groups_per_step": 12, "loop__updates_per_step": 2, "loop__steps": 6,
    "trainer__critic": {"lr": 1e-3, "warmup": 2},
}  # fmt: skip
BRIEF = TINY | {"loop__warmup__steps": 3, "loop__steps": 4}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(folder, **BRIEF)
    return folder


@pytest.mark.slow
@pytest.mark.sweep  # law 9 kills a run that has a critic among others
def test_a_killed_run_with_a_critic_ends_with_the_same_bits(whole, tmp_path):
    """Killed in the supervised phase, while the policy is frozen, and behind it."""
    for moment in (("StepDone", 2), ("StepDone", 4), ("GroupsTaken", 3)):
        assert run_and_die(tmp_path / "run", moment, **BRIEF) == -9
    run(tmp_path / "run", **BRIEF)
    ours, theirs = final(tmp_path / "run"), final(whole)
    assert ours.keys() == theirs.keys() and any(name.startswith("critic/") for name in ours)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.slow
def test_steps_of_a_run_with_a_critic_replay(whole):
    done = {e["step"]: e["metrics"] for e in events(whole, "StepDone")}
    assert [n for n, m in done.items() if m["train/weights_changed"] == 0] == [4, 5]
    again = replay(whole, 7)
    for name in (
        "train/loss",
        "train/value_loss",
        "train/explained_variance",
        "train/grad_norm",
        "train/critic_grad_norm",
    ):
        assert again[name] == done[7][name], name


@pytest.mark.slow
def test_turns_that_pay_on_their_own_stale_and_held_to_the_start(tmp_path):
    """Two turns with an observation in between, a reward for each, the KL charged to the
    rewards with a target, one step of staleness.
    """
    changes = {
        "task__env": "kits.rewards:Twice",
        "task__reward": {"kind": "combine", "parts": {"turns": {"kind": "kits.rewards:turns", "weight": 0.25}}},
        "algo__kl": {"coef": 0.1, "target": 0.5, "horizon": 50},
        "loop__warmup__steps": 0, "loop__max_staleness": 1, "algo__correction": {"kind": "importance"},
    }  # fmt: skip
    run(tmp_path, **{**TINY, **changes, "loop__steps": 4})
    metrics = [e["metrics"] for e in events(tmp_path, "StepDone")]
    assert len({m["train/kl_coef"] for m in metrics}) > 2 and all("train/explained_variance" in m for m in metrics)
    for row_ in store.read_step(tmp_path, 4):
        assert row_["reward"] == 0.5 and row_["step_rewards"] == [0.25, 0.25]
        first, second = row_["step_positions"]
        assert row_["mask"][first] and not row_["mask"][first + 1] and second == len(row_["mask"]) - 1
        assert all(a == 0 or written for a, written in zip(row_["advantages"], row_["mask"]))


@pytest.mark.slow
def test_a_critic_may_be_another_model_that_reads_the_same_tokens(tmp_path):
    small = {"random": "qwen3", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    run(tmp_path / "run", **{**TINY, "trainer__critic": {"path": small}, "loop__steps": 2})
    kept = final(tmp_path / "run")
    assert kept["critic/master.lm_head.weight"].shape == (1, 16) and bool(kept["critic/master.lm_head.weight"].any())
    foreign = model()
    foreign.tokenizer.add_tokens(["<more>"])
    save_model(foreign, tmp_path)
    with pytest.raises(ConfigError, match=r"trainer.critic.path = .* has another vocabulary.*first '<more>'"):
        run(tmp_path / "other", **{**TINY, "trainer__critic": {"path": str(tmp_path)}})


def test_a_critic_that_no_row_reads_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer.critic.warmup has no effect: algo.kind = 'grpo' has no critic"):
        run(tmp_path / "run", trainer__critic={"warmup": 3})
