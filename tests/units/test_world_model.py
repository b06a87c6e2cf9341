"""A learned model of a world: densities against torch's distributions, draws against their noise, errors against loops."""

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from kits.flows import publish_in_place
from kits.worlds import asked, learned_groups, observed_rows, world_engine, world_model
from rondel.core.errors import UserError
from rondel.core.transitions import split_drawn, transitions
from rondel.core.types import Request, Sampling
from rondel.generate.engine.builtin.sampler import draw_uniform
from rondel.models.control.world_head import density_of, error_names
from rondel.models.noise import draw_normal
from rondel.models.packed_steps import PackedSteps
from rondel.runtime.journal.wal import TokenLog
from rondel.train.multi_policy import MultiPolicyTrainer
from rondel.train.pack import batch_of


def packed(rows: np.ndarray) -> PackedSteps:
    return PackedSteps.of([rows], [[0]], "cpu")


def member_outputs(model, row, member):
    """Mean and deviation of change and reward, written once more."""
    own, config = model.members[member], model.config
    size = config.observation_size
    seen = (row[:size] - row.new_tensor(config.centre)) / row.new_tensor(config.spread)
    action = torch.eye(3, dtype=row.dtype)[int(row[size])] if config.discrete else row[size : size + 3]
    hidden = torch.cat([seen, action])
    for layer in own.layers:
        hidden = hidden @ layer.weight.T + layer.bias
        hidden = hidden * torch.sigmoid(hidden)
    mean, raw = hidden @ own.mean.weight.T + own.mean.bias, hidden @ own.log_std.weight.T + own.log_std.bias
    upper = 2 - torch.log1p(torch.exp(2 - raw))
    log_std = -4 + torch.log1p(torch.exp(upper + 4))
    step = row.new_tensor(config.step)
    return mean[: size + 1] * step, log_std[: size + 1].exp() * step


def end_probability(model, after, member):
    own, config = model.members[member], model.config
    hidden = (after - after.new_tensor(config.centre)) / after.new_tensor(config.spread)
    for layer in own.end_layers:
        hidden = hidden @ layer.weight.T + layer.bias
        hidden = hidden * torch.sigmoid(hidden)
    return torch.sigmoid((hidden @ own.end.weight.T + own.end.bias)[0])


@pytest.mark.parametrize("discrete", [True, False])
def test_density_entropy_and_gradient_against_torch(discrete):
    """In float64, to 1e-10: of transitions that the world made, and of drawn ones."""
    loaded = world_model(discrete=discrete)
    model = loaded.model.double()
    rows = torch.from_numpy(observed_rows(6, discrete=discrete)).double()
    at = loaded.head.observed
    rows[3:, at] = torch.tensor([0.0, 2.0, 1.0])
    found = loaded.head.evaluate_steps(packed(rows.numpy()))
    (found[0].sum() + 0.3 * found[1].sum()).backward()
    mine = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    densities, entropies = [], []
    for row in rows:
        each, entropy = [], 0.0
        for member in range(3):
            mean, std = member_outputs(model, row, member)
            end = end_probability(model, row[:4] + row[at + 1 : -2], member)
            known, ends = torch.distributions.Normal(mean, std), torch.distributions.Bernoulli(end)
            each.append(known.log_prob(row[at + 1 : -1]).sum() + ends.log_prob(row[-1]))
            entropy = entropy + (known.entropy().sum() + ends.entropy()) / 3
        drawn_by = int(row[at])
        densities.append(sum(each) / 3 if drawn_by < 0 else each[drawn_by] - math.log(3))
        entropies.append(entropy)
    wanted = torch.stack(densities), torch.stack(entropies)
    (wanted[0].sum() + 0.3 * wanted[1].sum()).backward()
    for ours, theirs in zip(found, wanted):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-10)
    assert all(torch.allclose(a, p.grad, rtol=0, atol=1e-10) for a, p in zip(mine, model.parameters()))


def test_the_density_of_a_drawn_transition_adds_up_to_one():
    """Over members, ends, and a grid of one number that follows: it is that of the distribution it is drawn from."""
    mean, log_std, logit = torch.tensor([[[0.3], [-0.5]]]), torch.tensor([[[-0.2], [0.4]]]), torch.tensor([[0.7, -1.0]])
    grid = torch.linspace(-9, 9, 4001, dtype=torch.float64)
    total = 0.0
    for member in (0, 1):
        for end in (0, 1):
            drawn = torch.stack([torch.full_like(grid, member), grid, torch.full_like(grid, end)], 1)
            sides = [t.double().expand(len(grid), *t.shape[1:]) for t in (mean, log_std, logit)]
            total += float(density_of(drawn, *sides).exp().sum() * (grid[1] - grid[0]))
    assert total == pytest.approx(1.0, abs=1e-6)


def draw(requests, loaded=None, **how):
    async def ask():
        e = world_engine(loaded, **how)
        return await asyncio.gather(*(e.generate(r) for r in requests))

    return asyncio.run(ask())


@pytest.mark.parametrize("discrete", [True, False])
def test_what_follows_is_its_noise_alone_and_in_company(discrete):
    """Law 4, bit for bit whoever is beside it; member, numbers and end are those of the key."""
    loaded = world_model(discrete=discrete)
    requests = [asked(i, discrete=discrete) for i in range(9)]
    alone, crowd, narrow = draw(requests[:1], loaded), draw(requests, loaded), draw(requests, loaded, max_running=2)
    assert alone[0].steps == crowd[0].steps and alone[0].logprobs == crowd[0].logprobs
    assert [d.steps for d in crowd] == [d.steps for d in narrow]
    rows = np.concatenate([d.steps.rows for d in crowd])
    with torch.no_grad():
        again = loaded.head.evaluate_steps(packed(rows))[0]
        assert again.tolist() == pytest.approx([d.logprobs[0] for d in crowd], abs=1e-5)
        for request, done in zip(requests, crowd):
            member = int(3 * draw_uniform(request.key, 0))
            mean, std = member_outputs(loaded.model, torch.from_numpy(request.observation), member)
            change, reward, ended = split_drawn(done.steps.drawn[0])
            end = end_probability(loaded.model, torch.from_numpy(request.observation[:4] + change), member)
            wanted = mean.numpy() + std.numpy() * draw_normal(request.key, 0, 5)
            assert done.steps.drawn[0, 0] == member and ended == (draw_uniform(request.key, 1) < float(end))
            assert [*change, reward] == pytest.approx(wanted.tolist(), abs=1e-5)
    assert len({float(row[loaded.head.observed]) for row in rows}) > 1


def recorded(rows, horizon=3):
    return Request([0], Sampling(max_tokens=horizon), policy="world", steps=transitions(rows, 4))


@pytest.mark.parametrize("discrete", [True, False])
def test_errors_against_loops(discrete):
    loaded, rows = world_model(discrete=discrete), observed_rows(7, discrete=discrete)
    [done] = draw([recorded(rows)], loaded)
    model, at, T = loaded.model, loaded.head.observed, len(rows)
    given = torch.from_numpy(rows)
    with torch.no_grad():
        assert list(done.logprobs) == pytest.approx(loaded.head.evaluate_steps(packed(rows))[0].tolist(), abs=1e-6)
        outs = [[member_outputs(model, row, m) for m in range(3)] for row in given]
        after = given[:, :4] + given[:, at + 1 : at + 5]
        ends = np.array([[float(end_probability(model, own, m)) for m in range(3)] for own in after])
        path = np.concatenate([rows[:1, :4], rows[:, :4] + rows[:, at + 1 : at + 5]])
        wanted = {}
        for j in range(1, 4):
            spread, squares = (path[j:] - path[:-j]).std(0), []
            for t in range(T + 1 - j):
                for m in range(3):
                    x = given[t, :4]
                    for step in range(j):
                        row = torch.cat([x, given[t + step, 4:]])
                        x = x + member_outputs(model, row, m)[0][:4]
                    squares.append(((x.numpy() - path[t + j]) / spread) ** 2)
            wanted[f"error_{j}"] = np.sqrt(np.mean(squares))
    target = rows[:, at + 1 : -1]
    means = np.array([[out[0].numpy() for out in own] for own in outs])
    z = np.array([[((target[t] - out[0].numpy()) / out[1].numpy()) for out in outs[t]] for t in range(T)])
    spread = target[:, :4].std(0)
    wanted["coverage"] = np.mean(np.abs(z) < 1.2815515655)
    wanted["reward_error"] = np.sqrt(np.mean((target[:, -1] - means.mean(1)[:, -1]) ** 2))
    wanted["end_error"] = np.mean((rows[:, -1] - ends.mean(1)) ** 2) / rows[:, -1].var()
    wanted["disagreement"] = np.sqrt(np.mean(((means - means.mean(1, keepdims=True))[..., :4] / spread) ** 2))
    assert done.measured.keys() == wanted.keys() == set(error_names(3))
    for name, value in wanted.items():
        assert done.measured[name] == pytest.approx(value, rel=1e-4), name


def test_what_cannot_be_measured_is_nan():
    [done] = draw([recorded(observed_rows(2), horizon=3)])
    assert math.isfinite(done.measured["error_1"]) and math.isnan(done.measured["error_3"])


def test_after_a_crash_a_transition_is_taken_from_the_log(tmp_path):
    """Where it is asked for the same; those of the world are scored again, for nothing of them was drawn."""

    async def serve(requests):
        e = world_engine(log=TokenLog(tmp_path))
        await publish_in_place(e, 1)
        done = await asyncio.gather(*(e.generate(r) for r in requests))
        drawn = e.account.counts["tokens"]
        scored = await e.generate(recorded(observed_rows(5)))
        assert e.account.counts["tokens"] == drawn + 1 and len(scored.tokens) == 5
        return [(d.steps, d.logprobs, d.versions) for d in done], drawn

    first, drawn = asyncio.run(serve([asked(i) for i in range(4)]))
    other = replace(asked(3), observation=asked(9).observation)
    again, anew = asyncio.run(serve([*(asked(i) for i in range(3)), other]))
    assert (drawn, anew) == (4, 1) and again[:3] == first[:3] and again[3] != first[3]


def test_what_it_cannot_read_is_refused():
    for request, why in (
        (replace(asked(0), observation=None), "has none"),
        (recorded(observed_rows(3, discrete=False)), "recorded transitions have 5 numbers"),
        (replace(asked(0), sampling=Sampling(top_k=3)), "top_k"),
    ):
        with pytest.raises(UserError, match=why):
            draw([request])
    with pytest.raises(ValueError, match="none but 1"):
        world_model().head.evaluate_steps(packed(observed_rows(2)), temperature=0.5)


class Noted:
    """A trainer that notes what it is given."""

    moved = True

    async def step(self, batch, algo):
        from rondel.core.types import StepStats

        self.agents, self.algo = [s.agent for s in batch.samples], algo
        return StepStats(True, {"train/loss": 1.0})


def test_a_model_learns_what_the_world_did_and_nothing_that_it_drew():
    from rondel.algos.table import PPO, SFT

    main, world = Noted(), Noted()
    trainer = MultiPolicyTrainer({"policy": main, "world": world}, {"world": SFT})
    stats = asyncio.run(trainer.step(batch_of(learned_groups(world_model())), PPO))
    assert (main.algo, world.algo) == (PPO, SFT) and world.agents == ["world.observed"] * 7
    told = {name: stats.metrics[f"world/{name}"] for name in ("real_steps", "imagined_steps", "trusted", "error_1")}
    assert told == {"real_steps": 29.0, "imagined_steps": 0.0, "trusted": 0.0, "error_1": pytest.approx(0.25 * 29 / 7)}
