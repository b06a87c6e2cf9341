"""Policies of actions against torch's own distributions, and GAE over episodes that a world ends or cuts off."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kits.control import acted_groups, chunk_policy, policy
from rondel.algos.discount import gae
from rondel.algos.reward_transforms import NoShaping
from rondel.algos.table import GIGPO, PPO, TURN_PPO
from rondel.core.errors import UserError
from rondel.models.packed_steps import PackedSteps
from rondel.models.step_head import refuse_step_head
from rondel.train.annotate import advantages_of
from rondel.train.pack import batch_of
from rondel.train.shaped_rewards import returns_of


def packed(rows: torch.Tensor) -> PackedSteps:
    return PackedSteps.of([rows.numpy()], [[0]], "cpu")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("discrete", [True, False])
def test_density_entropy_and_gradient_against_torch(discrete, temperature):
    """In float64, to 1e-10."""
    torch.manual_seed(0)
    loaded = policy(discrete=discrete)
    model = loaded.model.double()
    rows = torch.randn(7, 4 + loaded.head.dim, dtype=torch.float64)
    if discrete:
        rows[:, 4] = torch.arange(7) % 3
    found = loaded.head.evaluate_steps(packed(rows), temperature=temperature)
    (found[0].sum() + 0.3 * found[1].sum()).backward()
    mine = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    hidden = rows[:, :4]
    for layer in model.layers:
        hidden = torch.tanh(torch.nn.functional.linear(hidden, layer.weight, layer.bias))
    out = torch.nn.functional.linear(hidden, model.act.weight, model.act.bias)
    if discrete:
        known = torch.distributions.Categorical(logits=out / temperature)
        wanted = known.log_prob(rows[:, 4].long()), known.entropy()
    else:
        known = torch.distributions.Independent(torch.distributions.Normal(out, temperature * model.log_std.exp()), 1)
        wanted = known.log_prob(rows[:, 4:]), known.entropy()
    (wanted[0].sum() + 0.3 * wanted[1].sum()).backward()
    for ours, theirs in zip(found, wanted):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-10)
    assert all(torch.allclose(a, p.grad, rtol=0, atol=1e-10) for a, p in zip(mine, model.parameters()))


@pytest.mark.parametrize("eta", [1.0, 0.7])
def test_density_entropy_and_gradient_of_a_chunk_against_its_gaussians(eta):
    """Flow-GRPO's step (arXiv:2505.05470, eq. 9) written once more, each a Gaussian of torch; the mean of the steps, the
    sum of the numbers. In float64, to 1e-10."""
    torch.manual_seed(0)
    loaded, steps, size = chunk_policy(), 3, 6
    model = loaded.model.double()
    rows = torch.randn(5, 4 + (steps + 1) * size, dtype=torch.float64)
    found = loaded.head.evaluate_steps(packed(rows), temperature=eta)
    found[0].sum().backward()
    mine = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    states = rows[:, :4]
    for layer in model.layers:
        states = torch.tanh(torch.nn.functional.linear(states, layer.weight, layer.bias))
    density, entropy = torch.zeros(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    for k in range(steps):
        sigma, after = 1 - k / steps, 1 - (k + 1) / steps
        x, drawn = (rows[:, 4 + i * size : 4 + (i + 1) * size] for i in (k, k + 1))
        angles = [sigma * np.pi * 2 ** (i / 2) for i in range(6)]
        level = torch.tensor([*np.sin(angles), *np.cos(angles)]).expand(5, -1)
        hidden = model.enter(torch.cat([x, level], 1)) + states
        hidden = hidden + model.mix[0](torch.nn.functional.silu(hidden))
        v = (x - model.act(torch.nn.functional.silu(hidden))) / sigma
        s = eta * (sigma / (1 - (sigma if k else after))) ** 0.5
        score, dt = -(x + (1 - sigma) * v) / sigma, after - sigma
        known = torch.distributions.Normal(x + (v - 0.5 * s**2 * score) * dt, s * (-dt) ** 0.5)
        density = density + known.log_prob(drawn).sum(1) / steps
        entropy = entropy + known.entropy().expand(5, size).sum(1) / steps
    density.sum().backward()
    assert torch.allclose(found[0], density, rtol=0, atol=1e-10) and torch.allclose(found[1], entropy, atol=1e-10)
    assert all(torch.allclose(a, p.grad, rtol=0, atol=1e-10) for a, p in zip(mine, model.parameters()))


def test_a_new_policy_is_orthogonal_and_nearly_indifferent():
    from rondel.models.load import load_model

    path = {"random": "mlp_policy", "observation_size": 32, "action_size": 2, "hidden_size": 32, "log_std": -1.0}
    model = load_model({**path, "discrete": False}).model
    assert all(torch.allclose(one.weight @ one.weight.T, 2 * torch.eye(32), atol=1e-5) for one in model.layers)
    assert torch.allclose(model.act.weight @ model.act.weight.T, 1e-4 * torch.eye(2), atol=1e-8)
    assert model.log_std.tolist() == [-1.0, -1.0] and load_model({**path, "discrete": True}).model.log_std is None


def test_gae_of_an_episode_that_was_cut_off():
    """stable-baselines3's loop, written once more: behind the last step of an episode stands V of what came then, 0 where
    it had ended."""
    rng = np.random.default_rng(0)
    lengths, after = [3, 1, 5], [0.0, 2.0, -1.5]
    rewards, values = rng.normal(size=9), rng.normal(size=9)
    wanted, first = [], 0
    for n, last in zip(lengths, after):
        own, advantage = [], 0.0
        for t in reversed(range(first, first + n)):
            following = values[t + 1] if t + 1 < first + n else last
            advantage = rewards[t] + 0.9 * following - values[t] + 0.9 * 0.8 * advantage
            own.insert(0, advantage)
        wanted, first = [*wanted, *own], first + n
    sample = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 2])
    given = [torch.from_numpy(rewards), torch.from_numpy(values), sample]
    found, returns = gae(*given, gamma=0.9, lam=0.8, after_N=torch.tensor(after, dtype=torch.float64))
    assert np.allclose(found, wanted, rtol=0, atol=1e-12) and np.allclose(returns, np.array(wanted) + values)
    ended, nothing = gae(*given, gamma=0.9, lam=0.8), gae(*given, gamma=0.9, lam=0.8, after_N=torch.zeros(3))
    assert torch.equal(ended[0], nothing[0])


def test_it_has_no_engine_of_tokens():
    with pytest.raises(UserError, match="draws actions"):
        refuse_step_head("mine", policy().head)


def test_each_action_is_a_turn():
    """Turn-wise PPO is PPO there, cut-off episodes among them, and GiGPO compares actions under one observation."""
    groups = acted_groups(policy())
    for group in groups:
        for t in group.trajectories[1:]:  # two actions of a group under one observation, one of which shows -0 for 0
            t.steps.rows[0, :4], group.trajectories[0].steps.rows[-1, :4] = (0, 1, 2, 3), (-0.0, 1, 2, 3)
    batch = batch_of(groups)
    values = torch.randn(batch.total_tokens, generator=torch.Generator().manual_seed(0))
    batch.write_tokens(values=values)
    for sample in batch.samples:
        sample.value_after = 0.5
    scored = batch.scored_samples
    for turns, plain in ((TURN_PPO, PPO), (replace(TURN_PPO, shaping=NoShaping()), replace(PPO, shaping=NoShaping()))):
        assert torch.equal(advantages_of(turns, scored), advantages_of(plain, scored))
        assert torch.equal(returns_of(turns, scored), returns_of(plain, scored))
    seen, at = {}, 0
    for whose, t in ((group.id, t) for group in groups for t in group.trajectories):
        for k, x in enumerate(t.steps.x):
            later = sum(0.95**j * reward for j, (_, reward) in enumerate(t.score.steps[k:]))
            seen.setdefault((whose, tuple(x + 0.0)), []).append((at + k, later))
        at += len(t.steps)
    wanted = torch.zeros(at, dtype=torch.float64)
    for alike in seen.values():
        for place, later in alike:
            wanted[place] = later - np.mean([own for _, own in alike])
    whole = replace(GIGPO, advantage=replace(GIGPO.advantage, divide=False, weight=0.0))
    both = replace(GIGPO, advantage=replace(GIGPO.advantage, divide=False))
    found = advantages_of(both, scored) - advantages_of(whole, scored)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-9) and int((found != 0).sum()) >= 7
