"""What is their own in the rows of flows, in closed form; tests/kits/algos_oracle.py has every row token by token."""

import asyncio
import copy
import math
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
import torch

from kits.algos import scored, tensor, tokens
from kits.flows import flow, flown_groups
from kits.train import gradient, trainer
from rondel.algos.mixture import Mixture
from rondel.algos.prompt_norm import PromptNorm
from rondel.algos.table import DDPO, DDRL, FLOW_GRPO, GRPO, SFT, resolve_algorithm
from rondel.core.errors import ConfigError
from rondel.core.types import Group, Score, Task, Trajectory
from rondel.generate.envs.flow import matching_steps
from rondel.models.flow.flow_head import FlowHead
from rondel.models.packed_steps import PackedSteps
from rondel.train.checkpoint import load_trainer, save_trainer
from rondel.train.pack import batch_of


def test_a_narrow_clip_holds_a_density_that_has_moved():
    """max(-A·r, -clip(r, 1 ± 1e-4)·A): a step passes a gradient until its density has moved by 1e-4 to its side."""
    x = tensor(0.0, 5e-5, 2e-4, -2e-4, -2e-4, 2e-4).requires_grad_()
    advantages = tensor(1, 1, 1, 1, -1, -1)
    found = FLOW_GRPO.surrogate(tokens(x, x, advantages))
    wanted = [
        max(-a * math.exp(r), -min(max(math.exp(r), 1 - 1e-4), 1 + 1e-4) * a)
        for r, a in zip(x.tolist(), advantages.tolist())
    ]
    assert found.loss_T.tolist() == pytest.approx(wanted, abs=1e-12)
    moves = torch.autograd.grad(found.loss_T.sum(), x)[0] != 0
    assert moves.tolist() == [True, True, False, True, False, True]


def test_ddrl_leaves_the_bad_before_it_tells_the_good_apart():
    rewards = tensor(0.0, 0.8, 0.9, 1.0, 5.0, 5.0)
    group = torch.tensor([0, 0, 0, 0, 1, 1])
    found = DDRL.advantage(scored(rewards, group)).tolist()
    z = [(r - 0.675) / (rewards[:4].std().item() + 1e-6) for r in rewards[:4].tolist()]
    costs = [math.exp(-one) for one in z]
    assert found == pytest.approx([sum(costs) / 4 - cost for cost in costs] + [0.0, 0.0], abs=1e-12)
    assert found[1] - found[0] > 5 * (found[3] - found[1]) > 0 and sum(found) == pytest.approx(0, abs=1e-12)


class PerPromptStats:
    """What a prompt has earned, as the authors of DDPO count it (ddpo-pytorch, stat_tracking.py): in numpy."""

    def __init__(self, size: int, least: int):
        self.size, self.least, self.kept = size, least, {}

    def advantages(self, prompts, rewards):
        out = np.empty(len(rewards))
        for prompt in set(prompts):
            own = np.array([p == prompt for p in prompts])
            kept = self.kept.setdefault(prompt, deque(maxlen=self.size))
            kept.extend(rewards[own])
            compared = rewards if len(kept) < self.least else kept
            out[own] = (rewards[own] - np.mean(compared)) / (np.std(compared) + 1e-6)
        return np.clip(out, -10, 10)


@pytest.mark.slow
def test_ddpo_compares_a_prompt_with_what_it_has_earned_so_far(tmp_path):
    """Over five steps of a trainer, and one behind a checkpoint: a prompt that comes twice in a step, one that is rare."""
    row = replace(DDPO, advantage=PromptNorm(window=6, least=5))
    random, ours = np.random.default_rng(0), trainer(flow(), row)
    theirs, steps = PerPromptStats(6, 5), 0
    for prompts in (["a", "b"], ["a", "a"], ["c", "b"], ["b", "a"], ["a", "c"], ["b", "a"]):
        groups = [
            replace_group(g, i, prompt, random) for i, (g, prompt) in enumerate(zip(flown_groups(steps), prompts))
        ]
        batch = batch_of(groups)
        asyncio.run(ours.step(batch, row))
        wanted = theirs.advantages([s.task for s in batch.samples], np.array([s.reward for s in batch.samples]))
        assert [float(s.known.advantages[0]) for s in batch.samples] == pytest.approx(wanted, abs=1e-6)
        if (steps := steps + 1) == 5:
            save_trainer(ours, tmp_path)
            before, ours = ours, trainer(flow(), row)
            load_trainer(ours, tmp_path)
            assert ours.coefs.rewards == before.coefs.rewards and set(ours.coefs.rewards) == {"a", "b", "c"}


def replace_group(group, number, prompt, random):
    """The same chains of another task, three of them, with rewards of their own."""
    for t in group.trajectories:
        t.score = Score(float(random.normal()))
    return Group(number, Task(prompt, "flow", {}), group.trajectories[:3], 0)


def test_the_closed_form_is_the_term_of_a_row():
    """The loss of a step without signal is coef·KL alone: its value and its gradient by autograd, when the policy has
    moved; before that both are 0."""
    row = resolve_algorithm({"kind": "flow_grpo", "kl": {"kind": "closed_form", "coef": 0.3}})
    assert row.needs == {"advantages", "ref_means"} and row.kl.idle.keys() >= {"through", "clamp"}
    groups = flown_groups()
    for group in groups:
        for t in group.trajectories:
            t.score = Score(1.0)
    ours = trainer(flow(), row, lr=1e-2)
    stats = asyncio.run(ours.step(batch_of(groups), row))
    assert stats.metrics["train/kl_ref"] == 0.0 == stats.metrics["train/grad_norm"]
    with torch.no_grad():
        ours.loaded.model.leave.weight.mul_(1.3)
    moved, batch = copy.deepcopy(ours.loaded.model), batch_of(groups)
    found = gradient(ours, batch, row)
    prompts = [list(s.tokens[: s.prompt_length]) for s in batch.samples]
    steps = PackedSteps.of([s.steps.rows for s in batch.samples], prompts, "cpu")
    with torch.no_grad():
        means = flow().head.step_means(steps)
    head = FlowHead(moved)
    kl = ((head.step_means(steps) - means) ** 2 / (2 * steps.rows[:, -1:] ** 2)).mean(1)
    lengths = [len(s.trainable) for s in batch.samples]
    loss = 0.3 * torch.stack([own.mean() for own in kl.split(lengths)]).mean()
    wanted = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(moved.parameters()))]).double()
    assert float(kl.mean()) > 1e-4 and float((found - wanted).norm()) <= 1e-5 * float(wanted.norm())


def test_a_step_of_ddrl_has_the_gradient_of_its_paper():
    """Both terms of arXiv:2512.04332 in one update: -A of a step's density over the chains, A = mean exp(-z) - exp(-z), and
    0.01 of flow matching over data, each with its own denominators; written out from the module's velocities alone.
    """
    random, chains = np.random.default_rng(3), flown_groups()
    for number, n in enumerate((8, 3), 40):
        t = Trajectory(score=Score(0.0))
        t.extend([7, number])
        steps = matching_steps(random.normal(size=(5, 2)), n, number)
        t.extend(range(n), logprobs=[0.0] * n, versions=[0] * n, steps=steps)
        chains.append(Group(number, Task(f"d{number}", "flow", {"source": "data"}), [t], 0))
    algo, ours, kept = Mixture(DDRL, {"data": (SFT, 0.01)}), trainer(flow(), DDRL), []

    def keep(**how):
        kept.extend(m.grad.double().flatten() for m in ours.weights.masters)
        return 0.0

    ours.weights.step = keep
    asyncio.run(ours.step(batch_of(chains), algo))

    module, loss = copy.deepcopy(flow().model), torch.zeros(())

    def velocities(t, rows):
        prompt = torch.tensor(list(t.tokens[: len(t.tokens) - len(rows)]))
        condition = module.condition(prompt, torch.tensor([0])).expand(len(rows), -1)
        return module.forward(rows[:, :2], rows[:, 4], condition)

    drawn = [g.trajectories for g in chains[:-2]]
    for group in drawn:
        rewards = np.array([t.reward for t in group])
        spread = rewards.std(ddof=1) if len(rewards) > 1 else 0.0
        costs = np.exp(-(rewards - rewards.mean()) / (spread + 1e-6))
        for t, advantage in zip(group, costs.mean() - costs):
            rows = torch.from_numpy(t.steps.rows)
            mean = rows[:, 5:6] * rows[:, :2] + rows[:, 6:7] * velocities(t, rows)
            density = -(((rows[:, 2:4] - mean) / rows[:, 7:]) ** 2).mean(1) / 2
            loss = loss - float(advantage) * density.mean() / sum(map(len, drawn))
    data = [t for g in chains[-2:] for t in g.trajectories]
    misses = [(velocities(t, rows) - rows[:, 2:4]) ** 2 for t in data for rows in [torch.from_numpy(t.steps.rows)]]
    loss = loss + 0.01 * torch.cat(misses).mean(1).mean() / 2
    wanted = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))]).double()
    assert float(wanted.norm()) > 1e-2
    assert float((torch.cat(kept) - wanted).norm()) <= 1e-5 * float(wanted.norm())


@pytest.mark.parametrize("low, high", [(0.01, 0.02), (1e-4, 1e-4)])
def test_an_update_of_flow_grpo_has_the_gradient_of_its_paper(low, high):
    """arXiv:2505.05470, of the second of two updates on a step, where ratios have left 1 and the policy its reference:
    -min(r·A, clip(r)·A) + beta·(mean - mean_ref)² / (2·std²) of each SDE step, meaned over its dimensions, the steps of its
    chain and the chains; written out from the module's velocities alone.
    """
    bounds, beta, chains = {"low": low, "high": high}, 3.0, flown_groups()
    row = resolve_algorithm({"kind": "flow_grpo", "surrogate": bounds, "kl": {"kind": "closed_form", "coef": beta}})
    ours, found = trainer(flow(), row, epochs=2), []

    def keep_and_move(**how):
        found.append(torch.cat([m.grad.double().flatten() for m in ours.weights.masters]))
        with torch.no_grad():
            ours.loaded.model.leave.weight.mul_(1.05)
        return 0.0

    ours.weights.step = keep_and_move
    asyncio.run(ours.step(batch_of(chains), row))
    assert len(found) == 2

    first, second = flow().model, flow().model
    with torch.no_grad():
        second.leave.weight.mul_(1.05)

    def means(module, t, rows):
        prompt = torch.tensor(list(t.tokens[: len(t.tokens) - len(rows)]))
        condition = module.condition(prompt, torch.tensor([0])).expand(len(rows), -1)
        return rows[:, 5:6] * rows[:, :2] + rows[:, 6:7] * module.forward(rows[:, :2], rows[:, 4], condition)

    def density(mean, rows):
        z = (rows[:, 2:4] - mean) / rows[:, 7:]
        return (-(z**2) / 2 - rows[:, 7:].log() - math.log(2 * math.pi) / 2).mean(1)

    loss, held, count = torch.zeros(()), [], sum(len(g.trajectories) for g in chains)
    for group in chains:
        rewards = np.array([t.reward for t in group.trajectories])
        spread = rewards.std(ddof=1) if len(rewards) > 1 else 0.0
        for t, advantage in zip(group.trajectories, (rewards - rewards.mean()) / (spread + 1e-6)):
            rows, a = torch.from_numpy(t.steps.rows), float(advantage)
            mean, before = means(second, t, rows), means(first, t, rows).detach()
            ratio = (density(mean, rows) - density(before, rows)).exp()
            gain = torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)
            kl = ((mean - before) ** 2 / (2 * rows[:, 7:] ** 2)).mean(1)  # the reference is the policy before the step
            loss = loss + (beta * kl - gain).mean() / count
            held += (gain < ratio * a).tolist()
    wanted = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(second.parameters()))]).double()
    assert 0 < sum(held) < len(held) and float(wanted.norm()) > 1e-2
    assert float((found[1] - wanted).norm()) <= 1e-5 * float(wanted.norm())


def test_ddpo_without_a_window_whitens_the_step():
    rewards = tensor(0.0, 3.0, 1.0, 5.0, -2.0)
    found = PromptNorm(window=0, eps=1e-8)(scored(rewards, torch.tensor([4, 4, 1, 1, 1])))
    assert found.tolist() == pytest.approx((rewards.numpy() - rewards.numpy().mean()) / (rewards.numpy().std() + 1e-8))
    assert PromptNorm(window=0)(scored(tensor(0.1, 0.1, 0.1))).tolist() == [0.0] * 3
    assert PromptNorm(window=0)(scored(tensor())).tolist() == []
    bounded = PromptNorm(window=8, least=2, bound=1.0, history={"5": (0.0,) * 7})(
        scored(tensor(9.0), torch.tensor([5]))
    )
    assert bounded.tolist() == [1.0]
    for knobs, why in (
        ({"window": -1}, "0 or more"),
        ({"window": 3, "least": 4}, "no prompt would have enough"),
        ({"eps": 0.0}, "divide 0 by 0"),
        ({"bound": 0.0}, "nothing would be learned"),
    ):
        with pytest.raises(ConfigError, match=why):
            PromptNorm(**knobs)
    with pytest.raises(ConfigError, match="window is 0"):
        resolve_algorithm({"kind": "ddpo", "advantage": {"window": 0, "least": 3}})
    for knobs, why in (
        ({"where": "reward"}, "with where"),
        ({"target": 1.0}, "with target"),
        ({"through": "k2"}, "estimates nothing"),
    ):
        with pytest.raises(ConfigError, match=why):
            resolve_algorithm({"kind": "flow_grpo", "kl": {"kind": "closed_form", "coef": 0.1, **knobs}})


def test_both_are_grpo_but_for_that():
    assert GRPO.needs == FLOW_GRPO.needs == DDRL.needs == DDPO.needs and FLOW_GRPO.aggregate == GRPO.aggregate
    assert DDRL.kl.coef == 0 and DDRL.surrogate == FLOW_GRPO.surrogate
    row = resolve_algorithm({"kind": "ddrl", "advantage": {"kind": "group_norm"}})
    assert row.advantage == GRPO.advantage and row.surrogate.low == 1e-4
