"""The flow engine: the density that it records, noise that no scheduling changes, parking, updates and its log."""

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from kits.flows import asked, engine, flow
from kits.stepwise import drawn_of, killed, parted
from rondel.core.errors import EngineError, UserError
from rondel.core.types import Request, Sampling
from rondel.generate.engine.resumption import end_at_stop, generate_until_done
from rondel.models.flow.transition import entropy, log_density, step_coefficients, step_mean
from rondel.models.noise import draw_normal
from rondel.models.packed_steps import PackedSteps


def test_a_step_is_the_one_of_the_papers():
    """The formulas of arXiv:2505.05470 written out once more, in plain floats."""
    eta, steps = 0.7, 5
    x, v, noise = 0.3, -1.1, 0.4
    for k, (sigma, a, b, std) in enumerate(step_coefficients(steps, eta)):
        now, dt = 1 - k / steps, -1 / steps
        s = eta * math.sqrt(now / (1 - (now if k else 1 - 1 / steps)))
        mean = x * (1 + s**2 / (2 * now) * dt) + v * (1 + s**2 * (1 - now) / (2 * now)) * dt
        assert sigma == pytest.approx(now) and a * x + b * v == pytest.approx(mean, abs=1e-14)
        drawn = mean + s * math.sqrt(-dt) * noise
        wanted = -((drawn - mean) ** 2) / (2 * std**2) - math.log(std) - math.log(math.sqrt(2 * math.pi))
        point = torch.tensor([[drawn]], dtype=torch.float64)
        numbers = torch.tensor([[a, b, std]], dtype=torch.float64)
        ours = step_mean(torch.tensor([[x]], dtype=torch.float64), torch.tensor([[v]], dtype=torch.float64), numbers)
        assert float(log_density(point, ours, numbers[:, 2])[0]) == pytest.approx(wanted, abs=1e-10)
    assert step_coefficients(steps, 0.0)[:, 1:].tolist() == [[1.0, pytest.approx(-1 / steps), 0.0]] * steps


def test_chains_keep_the_marginals_of_the_flow():
    """Data N(1, 0.5²), whose velocity is known: points of the stochastic chain have its mean and its spread."""
    mean, spread, steps = 1.0, 0.5, 64
    points = np.stack([draw_normal(i, 0, 1)[0] for i in range(4000)]).astype(np.float64)
    noise = np.random.default_rng(0)
    for sigma, a, b, std in step_coefficients(steps, 0.7):
        var = (1 - sigma) ** 2 * spread**2 + sigma**2
        deviation = points - (1 - sigma) * mean
        velocity = (sigma - (1 - sigma) * spread**2) / var * deviation - mean  # E[noise - x0 | x]
        points = a * points + b * velocity + std * noise.normal(size=len(points))
    assert points.mean() == pytest.approx(mean, abs=0.03) and points.std() == pytest.approx(spread, abs=0.03)


def test_a_chain_that_was_interrupted_before_its_first_step_is_drawn_as_if_nothing_had_been():
    async def ask(cut: bool):
        e = engine()
        await e.pause("hold")
        waiting = asyncio.ensure_future(generate_until_done(e.generate, asked(1)))
        await asyncio.sleep(0)
        assert not cut or await e.abort(lambda request: True) == 1
        await e.resume()
        return await waiting

    whole, cut = asyncio.run(ask(False)), asyncio.run(ask(True))
    assert cut.steps == whole.steps and cut.logprobs == whole.logprobs


def test_a_chain_of_two_versions_is_still_told_as_its_point():
    """Its tokens are numbers of steps, which no tokenizer reads."""

    async def draw():
        e = engine()
        done = await e.generate(asked(1))
        return await end_at_stop(e.loaded.tokenizer, replace(done, versions=[0, 0, 0, 1, 1, 1]), asked(1).sampling)

    done = asyncio.run(draw())
    assert [float(number) for number in done.text.split()] == pytest.approx(done.steps.drawn[-1].tolist(), abs=1e-3)


def test_density_gradient_and_entropy_against_torch():
    """In float64, against torch's own normal distribution and its autograd."""
    torch.manual_seed(0)
    loaded = flow(dim=3)
    loaded.model.double()
    rows = torch.randn(7, 10, dtype=torch.float64)
    rows[:, 6], rows[:, 9] = torch.rand(7), torch.rand(7) + 0.1
    steps = PackedSteps.of([rows[:4].numpy(), rows[4:].numpy()], [[1, 2, 3], [4]], "cpu")
    ours, spread = loaded.head.evaluate_steps(steps)
    ours.sum().backward()
    mine = [p.grad.clone() for p in loaded.model.parameters()]
    loaded.model.zero_grad()
    embed = loaded.model.embed.weight
    condition = torch.stack([embed[[1, 2, 3]].mean(0)] * 4 + [embed[4]] * 3)
    velocity = loaded.model(rows[:, :3], rows[:, 6], condition)
    gaussian = torch.distributions.Normal(rows[:, 7:8] * rows[:, :3] + rows[:, 8:9] * velocity, rows[:, 9:])
    theirs = gaussian.log_prob(rows[:, 3:6]).mean(1)
    theirs.sum().backward()
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-10)
    assert torch.allclose(spread, gaussian.entropy().mean(1), rtol=0, atol=1e-10)
    assert torch.allclose(entropy(rows[:, 9]), spread)
    assert all(torch.allclose(a, p.grad, rtol=0, atol=1e-10) for a, p in zip(mine, loaded.model.parameters()))


def test_the_kl_of_a_step_is_that_of_torch_and_the_mean_of_its_estimate():
    """In float64: KL and gradient against torch.distributions, and E[log pi - log pi_ref] over points that pi draws."""
    torch.manual_seed(0)
    loaded, reference = flow(dim=3), flow(seed=1, dim=3)
    loaded.model.double()
    reference.model.double()
    rows = torch.randn(6, 10, dtype=torch.float64)
    rows[:, 6], rows[:, 9] = torch.rand(6), torch.rand(6) + 0.3
    steps = PackedSteps.of([rows.numpy()], [[1, 2, 3]], "cpu")
    with torch.no_grad():
        means = reference.head.step_means(steps)
    density, spread, ours = loaded.head.evaluate_with_reference(steps, means)
    plain = loaded.head.evaluate_steps(steps)
    assert torch.equal(density, plain[0]) and torch.equal(spread, plain[1])
    std = rows[:, 9:]
    own = torch.distributions.Normal(loaded.head.step_means(steps), std)
    theirs = torch.distributions.kl_divergence(own, torch.distributions.Normal(means, std)).mean(1)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-10) and ours.min() > 1e-3
    grads = [torch.autograd.grad(kl.sum(), list(loaded.model.parameters()), allow_unused=True) for kl in (ours, theirs)]
    assert all(a is None is b or torch.allclose(a, b, rtol=0, atol=1e-10) for a, b in zip(*grads, strict=True))
    drawn = own.sample((20_000,)).detach()
    estimate = (own.log_prob(drawn) - torch.distributions.Normal(means, std).log_prob(drawn)).mean((0, 2))
    assert torch.allclose(estimate, ours, rtol=0.05, atol=0.01)


def test_a_chain_is_the_same_alone_and_in_company():
    async def draw(n, **how):
        e = engine(**how)
        return await asyncio.gather(*(e.generate(asked(i)) for i in range(n)))

    alone, crowd, narrow = (asyncio.run(draw(n, **how)) for n, how in ((1, {}), (9, {}), (9, {"max_running": 2})))
    assert alone[0].steps == crowd[0].steps and alone[0].logprobs == crowd[0].logprobs
    assert all(a.steps == b.steps for a, b in zip(crowd, narrow))
    assert crowd[0].steps != crowd[1].steps and list(crowd[0].tokens) == list(range(6))
    x0 = crowd[0].steps.drawn[-1]
    assert crowd[0].text == f"{x0[0]:.3f} {x0[1]:.3f}" and crowd[0].finish_reason == "stop"


def test_the_recorded_density_is_that_of_the_weights():
    loaded = flow()
    done = asyncio.run(engine(loaded).generate(asked(0)))
    steps = PackedSteps.of([done.steps.rows], [asked(0).tokens], "cpu")
    with torch.no_grad():
        assert loaded.head.evaluate_steps(steps)[0].tolist() == list(done.logprobs)
    assert np.array_equal(done.steps.x[1:], done.steps.drawn[:-1])
    flown = asyncio.run(engine(loaded).generate(asked(0, eta=0.0)))  # without noise: the flow itself
    assert set(flown.logprobs) == {0.0} and np.array_equal(flown.steps.x[0], done.steps.x[0])


@pytest.mark.parametrize("how", ["hold", "abort"])
def test_new_weights_in_the_middle_of_a_chain(how):
    """It goes on from its point under what serves then; the steps before keep their bits (law 15)."""

    requests, loaded = [asked(i) for i in range(3)], flow()
    whole, _ = drawn_of(engine(), requests)
    leave = loaded.model.leave.weight
    later = parted(engine(loaded), requests, lambda own: own.step >= 3, how, lambda: leave.mul_(1.5))
    for a, b in zip(whole, later):
        at = list(b.versions).index(1)
        assert at >= 3 and set(b.versions[:at]) == {0} and len(b.tokens) == 6 and list(b.tokens) == list(range(6))
        assert a.steps[:at] == b.steps[:at] and a.steps[at:] != b.steps[at:]
        assert np.array_equal(b.steps.x[1:], b.steps.drawn[:-1])


def test_a_killed_chain_goes_on_from_its_point(tmp_path):
    requests = [asked(i) for i in range(3)]
    (whole, drawn), (resumed, again) = killed(
        lambda log: engine(log=log), requests, lambda own: own.step >= 3, tmp_path
    )
    assert drawn == 18 and again <= 9
    assert [d.steps for d in resumed] == [d.steps for d in whole]
    assert [d.logprobs for d in resumed] == [d.logprobs for d in whole]


def test_chains_may_begin_with_the_same_noise(tmp_path):
    """DanceGRPO's shared noise: of a key that they have in common, and each goes on with its own; alone and in company,
    over a change of weights, and after a crash."""
    requests = [replace(asked(i), start_key=99) for i in range(3)]
    apart, _ = drawn_of(engine(), [asked(i) for i in range(3)])
    (whole, drawn), (resumed, again) = killed(
        lambda log: engine(log=log), requests, lambda own: own.step >= 3, tmp_path
    )
    begin = draw_normal(99, 0, 2)
    for i, (own, other) in enumerate(zip(whole, apart, strict=True)):
        assert np.array_equal(own.steps.x[0], begin) and not np.array_equal(other.steps.x[0], begin)
        for done in (own, other):  # a step draws with the key of its chain, whatever it began with
            assert first_noise(done, asked(i).tokens) == pytest.approx(draw_normal(asked(i).key, 1, 2), abs=1e-5)
    assert len({done.text for done in whole}) == 3
    assert drawn == 18 and again <= 9 and [d.steps for d in resumed] == [d.steps for d in whole]
    leave = (loaded := flow()).model.leave.weight
    later = parted(engine(loaded), requests, lambda own: own.step >= 3, "abort", lambda: leave.mul_(1.5))
    assert all(a.steps[:3] == b.steps[:3] and a.steps != b.steps for a, b in zip(whole, later, strict=True))


def first_noise(done, prompt):
    """What the first step of a chain was drawn with, by its mean under the weights that drew it."""
    steps = PackedSteps.of([done.steps.rows[:1]], [prompt], "cpu")
    x, numbers = steps.rows[:, :2], steps.rows[:, 4:]
    with torch.no_grad():
        mean = step_mean(x, flow().head.velocity(x, numbers[:, 0], steps), numbers[:, 1:])
    return ((steps.rows[:, 2:4] - mean) / numbers[:, 3:])[0].numpy()


def test_what_has_no_meaning_for_points_is_refused():
    e = engine()
    for request, why in (
        (Request([1], Sampling(top_k=3)), "top_k"),
        (Request([1], Sampling(stop=("a",))), "stop"),
        (Request([], Sampling()), "prompt"),
        (Request([1] * 1000), "context"),
        (Request([1, 0], Sampling(), continuation=1), "bring them all"),
    ):
        with pytest.raises(UserError, match=why):
            asyncio.run(e.generate(request))


def test_weights_that_overflow_break_the_step_and_not_the_run():
    loaded = flow()
    with torch.no_grad():
        loaded.model.leave.weight.fill_(math.nan)

    async def draw():
        e = engine(loaded)
        with pytest.raises(EngineError, match="not finite"):
            await e.generate(asked(0))
        assert (await e.status()).state == "refusing"

    asyncio.run(draw())
