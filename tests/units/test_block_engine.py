"""The engine of blocks: what it records, noise that no scheduling changes, stop tokens, parking, updates and its log."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from kits.blocks import asked, block_model, brute_force, engine, of_completion, plain_model
from kits.flows import run_here
from kits.stepwise import killed, parted
from rondel.core.errors import UserError
from rondel.core.types import Request, Sampling
from rondel.core.unmasking_steps import MASKED
from rondel.generate.engine.blocks.engine import BlockEngine
from rondel.generate.engine.builtin.sampler import draw_uniform
from rondel.models.aligned_numerics import align_numerics


def aligned():
    loaded = block_model()
    align_numerics(loaded)
    return loaded


MODEL = aligned()


async def draw(n, loaded=MODEL, **how):
    e = engine(loaded, **how)
    return await asyncio.gather(*(e.generate(asked(i)) for i in range(n)))


def test_a_logprob_is_that_of_the_step_in_which_the_token_was_unmasked():
    for i, done in enumerate(asyncio.run(draw(3))):
        t = of_completion(asked(i), done)
        assert torch.allclose(brute_force(plain_model(MODEL), t), torch.tensor(done.logprobs), rtol=0, atol=1e-5)
        for k, (step, *seen) in enumerate(done.steps.rows.tolist()):
            assert seen[k % 4] == MASKED and 0 <= step < 3
        unmasked = [sum(s != MASKED for s in row[1:]) for row in done.steps.rows.tolist()[:4] if row[0] == 1]
        assert unmasked == [2], "two of four masks in the first of three steps"


@pytest.mark.slow
def test_an_answer_is_the_same_alone_and_in_company():
    together = asyncio.run(draw(3))
    for how in ({"max_running": 1}, {"max_running": 2}):
        alone = asyncio.run(draw(3, **how))
        assert [(d.tokens, d.logprobs, d.steps) for d in alone] == [(d.tokens, d.logprobs, d.steps) for d in together]


def test_the_most_certain_positions_come_first():
    """Two passes by hand: the masks with the largest probabilities, drawn by the noise of their positions."""
    loaded = block_model(block=4, steps=2)
    e = engine(loaded)
    [done] = [asyncio.run(e.generate(asked(1, most=4)))]
    theirs = plain_model(loaded)
    mask, state = loaded.blocks.mask_token, [MASKED] * 4
    for step in (0, 1):
        ids = [*asked(1).tokens, *(mask if s == MASKED else s for s in state)]
        first = len(asked(1).tokens)
        at = torch.arange(len(ids))
        sees = (at[:, None] >= at) | (at >= first)[None] & (at >= first)[:, None]
        bias = torch.zeros(len(ids), len(ids)).masked_fill(~sees, torch.finfo(torch.float32).min)
        logits = theirs(torch.tensor([ids]), attention_mask=bias[None, None]).logits[0, first:].detach()
        logits[:, mask] = -torch.inf
        p = logits.double().softmax(-1)
        free = [k for k in range(4) if state[k] == MASKED]
        for k in sorted(sorted(free, key=lambda k: -float(p[k].max()))[:2]):
            assert done.steps.step[k] == step
            state[k] = int(torch.searchsorted(p[k].cumsum(-1), draw_uniform(asked(1).key, k)))
    assert list(done.tokens) == state


@pytest.mark.slow
def test_text_ends_at_a_stop_token_inside_a_block():
    """What was drawn behind it is cut, and masks behind it are not drawn any more."""
    loaded = block_model()
    whole = asyncio.run(draw(3, loaded))
    for i, done in enumerate(whole):
        stop = done.tokens[5]
        e = engine(loaded)
        e.loaded.stop_ids, before = frozenset([stop]), e.loaded.stop_ids
        cut = asyncio.run(e.generate(asked(i)))
        e.loaded.stop_ids = before
        n = list(done.tokens).index(stop) + 1
        assert cut.finish_reason == "stop" and cut.tokens[-1] == stop and len(cut.tokens) == len(cut.steps) <= 8
        assert len(cut.tokens) == n and list(cut.tokens)[: n // 4 * 4] == list(done.tokens)[: n // 4 * 4]
        t = of_completion(asked(i), cut)
        assert torch.allclose(brute_force(plain_model(loaded), t), torch.tensor(cut.logprobs), rtol=0, atol=1e-5)
    assert whole[0].finish_reason == "length" and len(whole[0].tokens) == 10


class Forgetful(BlockEngine):
    """Computes prompts and whole blocks anew in every step."""

    def draw_step(self, answers):
        self.cache.clear()
        return super().draw_step(answers)


@pytest.mark.slow
@pytest.mark.parametrize("numerics", ["aligned", "fast"])
def test_what_is_cached_changes_nothing_and_is_computed_once(numerics):
    """The same tokens and log-probabilities as without, to the last bit in aligned numerics; and the work is counted."""
    loaded = MODEL if numerics == "aligned" else block_model()
    requests = [*(asked(i) for i in range(3)), replace(asked(2), key=5)]  # the last two have a prompt in common

    def drawn(kind, **how):
        e = kind(loaded, run=run_here, **how)

        async def serve():
            return await asyncio.gather(*(e.generate(request) for request in requests))

        return asyncio.run(serve()), e

    plain, anew = drawn(Forgetful)
    for how in ({}, {"max_running": 1}):
        ours, e = drawn(BlockEngine, **how)
        for a, b in zip(ours, plain, strict=True):
            assert a.tokens == b.tokens and a.steps == b.steps
            within = 0.0 if numerics == "aligned" else 4e-6  # of 40 requests 1.8e-6 by torch's operations alone
            assert list(a.logprobs) == pytest.approx(list(b.logprobs), rel=0, abs=within)
        assert not e.cache.segments and e.cache_bytes == 0, "nobody reads it any more"
    # three blocks of 4, 4 and 2 in 3, 3 and 2 steps, behind prompts of 1, 2 and 3 tokens
    states = 3 * 4 + 3 * 4 + 2 * 2
    assert e.account.counts["computed"] == sum((1, 2, 3)) + 4 * (states + 2 * 4)
    again = 8 * sum((1, 2, 3)) + 4 * (3 * 4 + 2 * 8)  # in each of the 8 steps, without a cache
    assert anew.account.counts["computed"] == again + 4 * states


@pytest.mark.slow
def test_a_prompt_is_cached_once_for_its_group():
    sampling = replace(asked(2).sampling, ignore_eos=True)
    e, requests = engine(MODEL), [replace(asked(2), key=k, sampling=sampling) for k in (3, 4, 5)]

    async def serve():
        asks = [asyncio.ensure_future(e.generate(request)) for request in requests]
        while not any(own.kept for own in e.answers):
            await asyncio.sleep(0)
        await e.pause("hold")
        held = e.cache_bytes, (await e.status()).memory["kv_cache"]
        await e.sleep(("kv_cache",))
        gone = e.cache_bytes
        await e.wake(("kv_cache",))
        await e.resume()
        return held, gone, await asyncio.gather(*asks)

    held, gone, done = asyncio.run(serve())
    bytes_of_a_token = 2 * 2 * 8 * 4  # keys and values of one layer, 2 heads of 8 numbers in float32
    assert held == (3 * bytes_of_a_token,) * 2 and gone == 0
    assert e.account.counts["computed"] == 3 + 3 * (28 + 8) + 3  # the prompt again behind the sleep
    alone = [asyncio.run(engine(MODEL).generate(request)) for request in requests]
    assert [(d.tokens, d.logprobs) for d in done] == [(d.tokens, d.logprobs) for d in alone]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hold", "abort"])
def test_new_weights_never_read_what_old_ones_have_cached(how):
    """Law 7: keys and values of a layer that has changed are computed again."""
    requests, loaded = [asked(i) for i in range(3)], aligned()
    attention = loaded.model.model.layers[0].self_attn
    later = parted(
        engine(loaded),
        requests,
        lambda own: own.kept,
        how,
        lambda: (attention.k_proj.weight.mul_(1.5), attention.v_proj.weight.mul_(0.5)),
    )
    for i, done in enumerate(later):
        now = brute_force(plain_model(loaded), of_completion(asked(i), done))
        new = torch.tensor(list(done.versions)) == 1
        assert new.any() and torch.allclose(now[new], torch.tensor(done.logprobs)[new], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hold", "abort"])
def test_a_parked_text_goes_on_under_other_weights(how):
    """Parked inside a block it goes on there; aborted, from its last whole block (law 15)."""

    requests, loaded = [asked(i) for i in range(3)], aligned()
    whole = asyncio.run(draw(3))
    e, head = engine(loaded), loaded.model.lm_head.weight
    later = parted(e, requests, lambda own: own.kept and own.begun, how, lambda: head.mul_(1.5))
    for i, (a, b) in enumerate(zip(whole, later)):
        assert set(b.versions) == {0, 1} and set(b.versions[:4]) == {0} and len(b.tokens) == len(b.steps) == 10
        assert a.steps[:4] == b.steps[:4] and a.tokens[:4] == b.tokens[:4] and a.logprobs[:4] == b.logprobs[:4]
        assert (1 in b.versions[4:8]) and (how == "hold") == (0 in b.versions[4:8])
        now = brute_force(plain_model(loaded), of_completion(asked(i), b))
        new = torch.tensor(list(b.versions)) == 1
        assert torch.allclose(now[new], torch.tensor(b.logprobs)[new], rtol=0, atol=1e-5)


def test_a_killed_text_goes_on_behind_its_last_whole_block(tmp_path):
    requests = [asked(i) for i in range(3)]
    (whole, drawn), (resumed, again) = killed(
        lambda log: engine(MODEL, log=log), requests, lambda own: own.kept, tmp_path
    )
    assert drawn == 30 and again == 18
    assert [(d.tokens, d.steps, d.logprobs) for d in resumed] == [(d.tokens, d.steps, d.logprobs) for d in whole]


def test_what_belongs_to_text_from_left_to_right_is_refused():
    e = engine(MODEL)
    for request, why in (
        (Request([1], Sampling(top_k=3, max_tokens=4)), "top_k"),
        (Request([1], Sampling(min_tokens=2, max_tokens=4)), "min_tokens"),
        (Request([], Sampling(max_tokens=4)), "prompt"),
        (Request([1] * 1000), "context"),
        (Request([1, 9], Sampling(max_tokens=4), continuation=1), "whole blocks"),
    ):
        with pytest.raises(UserError, match=why):
            asyncio.run(e.generate(request))
    assert np.isfinite(asyncio.run(e.score(Request([1, 2, 3]))).logprobs).all()
