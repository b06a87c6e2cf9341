"""Engines of several processes that look at pictures: the first one, or an encoder process, has the tower at work, and every
rank reads what it saw.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from functools import partial

import pytest

from kits import engine as plain
from kits.engine import all_of, engine, idle, prompt, twin, watched
from kits.engine_ranks import EncodedEngines, RankedEngines, end_ranks, same_answers, whole
from kits.sweeps import covering
from kits.sync import Publisher, wrote
from kits.vision import EYES, MUTUAL, ask, image, model, picture_requests, stream
from rondel.core.errors import EngineError, SyncError
from rondel.core.types import Begin, Completion
from rondel.models.save import save_model
from rondel.sync.from_ipc import FromIpc
from rondel.sync.update import WeightUpdate

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    yield from of_three(tmp_path_factory.mktemp("cut"))


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    yield from of_three(tmp_path_factory.mktemp("apart"), experts_apart=True, requests_apart=True)


def of_three(folder, **how):
    made = EncodedEngines(folder, ranks=2, **how)
    yield made
    made.close()
    assert made.ended == []


async def told_of_pictures(e, m):
    """Answers, once more from the prefix cache, and scores."""
    told = await all_of(e, picture_requests(m)) + await all_of(e, picture_requests(m))
    scored = [(await e.score(request)).logprobs for request in picture_requests(m)[:3]]
    idle(e)
    return told + [Completion([], row, [], "length") for row in scored]


def as_one_process(e, m, **settings):
    ours = asyncio.run(told_of_pictures(e, m))
    return same_answers(ours, asyncio.run(told_of_pictures(engine(m, **settings), m)), cached=False)


def update_of(trainer):
    return WeightUpdate(trainer.transport, probe=[], score=None, tolerance=1e-4, moved=lambda: True)


def updated(e, trainer, version, **settings):
    """One more version arrives, and serves as in one process."""
    trainer.train()
    assert asyncio.run(update_of(trainer)(trainer, e)) == version == e.version
    as_one_process(e, twin(trainer.loaded), version=version, **settings)


# features between layers and M-RoPE here; image tokens that see each other, tiles, states and the rest in the sweeps
@pytest.mark.parametrize("kind", covering([*EYES, MUTUAL], ["qwen3_vl"]))
def test_ranks_read_what_the_encoder_saw(cut, kind):
    """Before and after an update of tower and matrices; every picture is encoded once for each version, and none here."""
    m, settings = model(kind), {"prefill_tokens": 7, "kv_pages": 512}
    e = watched(cut.of(kind, transports={"ipc": FromIpc()}, **settings))
    lead, trainer = e.runner.eyes.encoder, Publisher(twin(m), transport=FromIpc())
    as_one_process(e, m, **settings)
    updated(e, trainer, 1, **settings)
    assert (lead.encoded, lead.updates, e.runner.eyes.looked) == (4, 1, 0)
    trainer.transport.close()


def test_ranks_read_their_parts_of_a_stored_model_that_looks(cut, tmp_path):
    """From its folder: the follower the tower and its part of the rest alone."""
    m, settings = model("qwen3_vl"), {"prefill_tokens": 7, "kv_pages": 512}
    save_model(m, tmp_path)
    as_one_process(watched(cut.of(partial(whole, f"from {tmp_path}"), **settings)), m, **settings)


# states of recurrent layers in the sweeps
@pytest.mark.parametrize("kind", covering(["qwen3_vl_moe", "qwen3_5_moe"], ["qwen3_vl_moe"]))
def test_ranks_with_requests_of_their_own_read_what_the_encoder_saw(apart, kind):
    """Texts and pictures on both ranks, each of which is told of its own alone."""
    m, settings = model(kind), {"prefill_tokens": 24, "kv_pages": 256}
    e = watched(apart.of(kind, transports={"ipc": FromIpc()}, **settings))
    trainer, told, send = Publisher(twin(m), transport=FromIpc()), [], e.loaded.lead.send_step

    def noted(tokens, positions, layout, records, seen):
        for rank, (n, looks) in enumerate(zip(layout.counts, seen)):
            told.append((rank, looks is not None))
            assert looks is None or int(looks.rows.max()) < n
        return send(tokens, positions, layout, records, seen)

    e.loaded.lead.send_step = noted
    as_one_process(e, m, **settings)
    updated(e, trainer, 1, **settings)
    assert {*told} == {(0, True), (0, False), (1, True), (1, False)}
    assert (e.runner.eyes.encoder.encoded, e.runner.eyes.looked) == (4, 0)
    trainer.transport.close()


def test_an_update_reaches_ranks_and_encoder_or_neither(cut):
    """Wrong bits for the encoder, for a rank, and a rank that does not commit: then the engine refuses."""
    m = model("qwen3_vl")
    e = cut.of("qwen3_vl", transports={"ipc": FromIpc()}, kv_pages=512)
    client, lead, trainer = e.runner.eyes.encoder, e.loaded.lead, Publisher(twin(m), transport=FromIpc())
    update, send, tell, command = update_of(trainer), cut.send, lead.tell, lead.channel.send
    looks = ask(*stream(m, 3, image(m, 1), 6), key=1)

    def wrong_stage(verb, *given):
        if verb == "stage":
            shapes, digests, path = given
            given = shapes, {**digests, min(digests): "0" * 32}, path
        return send(verb, *given)

    def wrong_digest(message):
        if isinstance(message, Begin):
            *rows, last = message.manifest.tensors
            message = Begin(replace(message.manifest, tensors=(*rows, replace(last, digest="0" * 32))), message.beside)
        tell(message)

    def wrong_root(do, tensors, facts):
        command(do, tensors, {**facts, "root": "0" * 32} if do == "commit" else facts)

    async def main():
        before = await e.generate(looks)
        for owner, name, lie, said in (
            (cut, "send", wrong_stage, "1 tensors came to the encoder with other bits"),
            (lead, "tell", wrong_digest, "rank 1: 1 tensors arrived with other bits"),
        ):
            true = getattr(owner, name)
            trainer.train()
            setattr(owner, name, lie)
            with pytest.raises(SyncError, match=said):
                await update(trainer, e)
            setattr(owner, name, true)
            after = await e.generate(looks)
            assert (e.version, client.updates, after.tokens) == (0, 0, before.tokens)
            assert after.logprobs == pytest.approx(before.logprobs, abs=1e-6)
        lead.channel.send = wrong_root
        with pytest.raises(SyncError, match=r"rank 1: version .* is committed.*refuses"):
            await update(trainer, e)
        lead.channel.send = command
        assert client.updates == 0, "the encoder keeps the old tower until a good update"
        with pytest.raises(EngineError, match="refuses"):
            await e.generate(looks)
        trainer.train()
        version = await update(trainer, e)
        same_answers(
            [await e.generate(looks)], [one := await engine(twin(trainer.loaded), version=version).generate(looks)]
        )
        assert client.updates == 1 and one.logprobs != before.logprobs

    asyncio.run(main())
    trainer.transport.close()


def test_without_an_encoder_the_first_rank_looks(cut):
    m, settings = model("qwen3_vl"), {"kv_pages": 512}
    end_ranks(cut.encoder.ranks, cut.device)
    ranks = cut.encoder.ranks.join(partial(model, "qwen3_vl"), cut.device)
    e = cut.device.call(lambda: engine(ranks.model, ranks=ranks, run=cut.device.run, **settings))
    as_one_process(e, m, **settings)
    assert e.runner.eyes.looked == 2


@pytest.fixture(scope="module", params=[2, 4])
def halves(request, tmp_path_factory):
    """Prompts computed by one process, or by two that share every matrix."""
    made = RankedEngines(tmp_path_factory.mktemp("halves"), tp=request.param, prefill=True)
    yield made
    made.close()
    assert made.ended == []


# features between layers and M-RoPE; states beside them, tiles and tokens that see each other in the sweeps
@pytest.mark.parametrize("kind", covering([*EYES, MUTUAL], ["qwen3_vl"]))
def test_who_computes_prompts_reads_what_the_first_rank_saw(halves, kind):
    """Beside requests that decode, again from the prefix cache, when it is scored, and under new weights of the tower."""
    m, settings = model(kind), {"prefill_tokens": 7, "kv_pages": 512}
    e = watched(halves.of(partial(model, kind), transports={"ipc": FromIpc()}, **settings))
    trainer = Publisher(twin(m), transport=FromIpc())
    as_one_process(e, m, **settings)
    assert e.runner.eyes.looked > 0
    updated(e, trainer, 1, **settings)
    trainer.transport.close()


async def told_of_last_cells(e, m):
    """A prompt that ends with a picture: fresh, cached but for its last cell, and so again beside a prompt of others and
    beside an answer."""
    seen, other = stream(m, 3, image(m, 1, 2, 3), seed=1), stream(m, 19, seed=2)
    asked = [ask(*seen, key=1, n=3), ask(*other, key=2, n=12), ask(*stream(m, 9, seed=3), key=3, n=12)]
    told = [await e.generate(asked[0]), await e.generate(asked[0])]
    told += await all_of(e, asked[:2]) + await all_of(e, [*asked, asked[0]])
    idle(e)
    return told


@pytest.mark.parametrize("kind", covering([*EYES, MUTUAL], ["qwen3_vl", "qwen2_5_vl"]))
def test_the_last_cell_of_a_picture_is_seen_by_who_decodes(halves, kind):
    """A prompt of which one token is left is computed among the answers."""
    m, settings = model(kind), {"kv_pages": 512}
    told = asyncio.run(told_of_last_cells(halves.of(partial(model, kind), **settings), m))
    same_answers(told, asyncio.run(told_of_last_cells(engine(m, **settings), m)))
    assert told[1].cached_tokens == told[1].prompt_tokens - 1


def test_a_rank_that_is_killed_beside_an_encoder_is_named(tmp_path):
    made = EncodedEngines(tmp_path, patience=5.0, ranks=2)
    e, m = made.of("qwen2_5_vl", kv_pages=512), model()

    async def main():
        asked = [ask(*stream(m, 3, image(m, 1), 4), n=400), plain.ask(prompt(1, 9), n=400)]
        answers = [asyncio.ensure_future(e.generate(request)) for request in asked]
        await wrote(e, 3)
        os.kill(made.encoder.ranks.followers[0].pid, signal.SIGKILL)
        for error in await asyncio.gather(*answers, return_exceptions=True):
            assert isinstance(error, EngineError) and "worker engine-rank-1" in str(error) and "SIGKILL" in str(error)

    try:
        asyncio.run(main())
    finally:
        made.close()
    assert len(made.ended) == 1 and "worker engine-rank-1" in made.ended[0]
