"""The engine of actions: what it records, noise that no scheduling changes, parking, updates and its log."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from kits.control import POLICIES, asked, chunk_policy, engine, policy
from kits.flows import publish_in_place
from rondel.core.errors import UserError
from rondel.core.types import Sampling
from rondel.generate.engine.resumption import generate_until_done
from rondel.models.flow.transition import step_coefficients
from rondel.models.noise import draw_normal
from rondel.models.packed_steps import PackedSteps
from rondel.runtime.journal.wal import TokenLog


def draw(n, *, loaded=None, temperature=1.0, **how):
    async def ask():
        e = engine(loaded, **how)
        return await asyncio.gather(*(e.generate(asked(i, temperature=temperature)) for i in range(n)))

    return asyncio.run(ask())


@pytest.mark.parametrize("kind", POLICIES)
def test_an_action_is_the_same_alone_and_in_company(kind):
    loaded = POLICIES[kind]()
    alone, crowd, narrow = draw(1, loaded=loaded), draw(9, loaded=loaded), draw(9, loaded=loaded, max_running=2)
    assert alone[0].steps == crowd[0].steps and alone[0].logprobs == crowd[0].logprobs
    assert [d.steps for d in crowd] == [d.steps for d in narrow]
    with torch.no_grad():
        steps = PackedSteps.of([d.steps.rows for d in crowd], [[0]] * 9, "cpu")
        assert loaded.head.evaluate_steps(steps)[0].tolist() == [d.logprobs[0] for d in crowd]
    tokens = [int(d.steps.drawn[0, 0]) if kind == "choices" else 0 for d in crowd]
    assert [d.tokens[0] for d in crowd] == tokens and (kind != "choices" or len(set(tokens)) > 1)
    n, size = loaded.head.chunk
    assert (n, size) == {"choices": (1, 1), "numbers": (1, 3), "chunks": (2, 3)}[kind]
    assert all(np.array_equal(d.actions.reshape(-1), d.steps.drawn[0, -n * size :]) for d in crowd)


def test_draws_follow_the_distribution():
    """4,000 keys of one observation; a chi-square of the counts, moments of the numbers."""
    loaded, n = policy(), 4000
    shown = np.repeat(asked(0).observation[None], n, 0)
    noise = (np.arange(n) + 0.5) / n  # evenly: counts are then exact to one
    seen = PackedSteps.of([shown], [[0]], "cpu")
    drawn, density = loaded.head.draw(seen, np.ones(n, np.float32), noise)
    p = torch.softmax(loaded.model.act(loaded.model(torch.from_numpy(shown[:1]))), -1)[0].tolist()
    counts = [int((drawn == action).sum()) for action in range(3)]
    assert counts == pytest.approx([n * share for share in p], abs=1.01)
    assert sorted(set(np.exp(density).round(5))) == pytest.approx(sorted(p), abs=1e-4)
    wide = policy(discrete=False)
    numbers = np.random.default_rng(0).normal(size=(n, 3)).astype(np.float32)
    drawn, _ = wide.head.draw(seen, np.full(n, 0.5, np.float32), numbers)
    mean = wide.model.act(wide.model(torch.from_numpy(shown[:1]))).detach().numpy()
    assert np.allclose(drawn, mean + 0.5 * np.exp(np.float32(-0.4)) * numbers, atol=1e-6)


@pytest.mark.parametrize("discrete", [True, False])
def test_without_temperature_the_likeliest_is_taken(discrete):
    loaded = policy(discrete=discrete)
    for i, done in enumerate(draw(5, loaded=loaded, temperature=0.0)):
        out = loaded.model.act(loaded.model(torch.from_numpy(asked(i).observation)[None]))[0]
        wanted = [float(out.argmax())] if discrete else out.tolist()
        assert done.steps.drawn[0].tolist() == pytest.approx(wanted, abs=1e-6)


def test_a_chunk_is_the_end_of_its_chain():
    """Of the noise of its key: x' = scale_x·x + scale_v·v + std·noise, at noise 0 Euler's steps of the flow."""
    loaded = chunk_policy()
    for temperature in (0.7, 0.0):
        [done] = draw(1, loaded=loaded, temperature=temperature)
        noise = draw_normal(asked(0).key, 0, 4 * 6).reshape(4, 6).astype(np.float64)
        chain = done.steps.drawn[0].reshape(4, 6).astype(np.float64)
        assert np.array_equal(chain[0], noise[0])
        with torch.no_grad():
            states = loaded.model(torch.from_numpy(asked(0).observation)[None])
            for k, (sigma, scale_x, scale_v, std) in enumerate(step_coefficients(3, temperature)):
                x = torch.from_numpy(chain[k].astype(np.float32))
                v = loaded.model.velocity(x[None, None], torch.tensor([sigma], dtype=torch.float32), states)[0, 0]
                follows = scale_x * chain[k] + scale_v * v.numpy() + std * noise[k + 1]
                assert np.allclose(chain[k + 1], follows, atol=2e-6)
        assert np.array_equal(done.actions, done.steps.drawn[0, -6:].reshape(2, 3))
        assert (done.logprobs[0] == 0) == (temperature == 0)


@pytest.mark.parametrize("how", ["hold", "abort"])
def test_a_request_waits_for_new_weights(how):
    async def ask():
        loaded = policy()
        e = engine(loaded)
        await e.pause(how)
        waiting = [asyncio.ensure_future(generate_until_done(e.generate, asked(i))) for i in range(3)]
        await asyncio.sleep(0)
        assert (await e.status()).parked == 3
        with torch.no_grad():
            loaded.model.act.weight.mul_(1.5)
        await publish_in_place(e, 1)
        await e.resume()
        return await asyncio.gather(*waiting), await e.generate(asked(0))

    done, again = asyncio.run(ask())
    assert [list(d.versions) for d in done] == [[1]] * 3 and done[0].steps == again.steps


def test_an_interrupted_request_is_asked_again():
    async def ask():
        e = engine()
        await e.pause("hold")
        waiting = asyncio.ensure_future(generate_until_done(e.generate, asked(1)))
        await asyncio.sleep(0)
        assert await e.abort(lambda request: True) == 1
        await e.resume()
        return await waiting, await e.generate(asked(1))

    done, plain = asyncio.run(ask())
    assert done.steps == plain.steps and done.finish_reason == "stop"


@pytest.mark.parametrize("kind", POLICIES)
def test_after_a_crash_an_action_is_taken_from_the_log(tmp_path, kind):
    """Where the world shows the same; another observation gets another action."""

    async def serve(requests):
        e = engine(POLICIES[kind](), log=TokenLog(tmp_path))
        await publish_in_place(e, 1)
        done = await asyncio.gather(*(e.generate(r) for r in requests))
        return [(d.steps, d.logprobs, d.versions) for d in done], e.account.counts["tokens"]

    first, drawn = asyncio.run(serve([asked(i) for i in range(4)]))
    other = replace(asked(3), observation=asked(9).observation)
    again, anew = asyncio.run(serve([*(asked(i) for i in range(3)), other]))
    assert drawn == 4 and anew == 1
    assert again[:3] == first[:3] and again[3] != first[3]


def test_what_is_about_tokens_is_refused():
    e = engine()
    for request, why in (
        (replace(asked(0), observation=None), "has none"),
        (asked(0, observed=5), r"float32 \[4\]"),
        (replace(asked(0), sampling=Sampling(top_k=3)), "top_k"),
    ):
        with pytest.raises(UserError, match=why):
            asyncio.run(e.generate(request))
