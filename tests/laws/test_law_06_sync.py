"""Law 6, sync is a transaction: a weight update is begin, data, commit. Every tensor name is acknowledged and every
digest compared before the version changes; anything else is an abort.

Here over the transport `tensor`; every other one is in tests/units/test_transports.py, the digest in test_digests.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kits.engine import ask, engine, idle, plain_logprobs, prompt, tiny, twin
from kits.sync import Publisher, update, wrote
from rondel.assemble.deployment import probe_tolerance
from rondel.core.errors import EngineError, SyncError
from rondel.core.events import Synced, subscribe
from rondel.core.types import POLICY, Abort, Begin, Commit, Route, TokenScores
from rondel.models import names
from rondel.sync.from_tensor import FromTensor
from rondel.sync.update import WeightUpdate


def equal(a, b):
    return all(
        torch.equal(x, y)
        for (_, x), (_, y) in zip(names.named_weights(a.model), names.named_weights(b.model), strict=True)
    )


def test_one_shared_copy_moves_nothing():
    model, seen = tiny(), []
    trainer, e = Publisher(model), engine(model)
    stop = subscribe(lambda event: seen.append(event) if isinstance(event, Synced) else None)
    trainer.train()
    assert asyncio.run(update(trainer)(trainer, e)) == 1
    stop()
    (synced,) = seen
    assert (
        e.arrivals.bytes_copied == 0
        and e.version == 1
        and synced.version == 1
        and synced.root == names.build_manifest(model.model, 1).root
    )
    assert synced.bytes_copied == 0 and synced.probe_gap < 1e-5


def test_a_separate_copy_becomes_bitwise_equal():
    theirs, mine = tiny(), tiny()
    trainer, e = Publisher(theirs), engine(mine)
    sync = update(trainer)
    before = asyncio.run(e.generate(ask(prompt(1, 20)))).tokens
    for version in (1, 2, 3):
        trainer.train()
        assert not equal(theirs, mine)
        assert asyncio.run(sync(trainer, e)) == version == e.version
        assert equal(theirs, mine)
        assert e.arrivals.bytes_copied == sum(p.numel() * 4 for _, p in names.named_weights(mine.model))
    after = asyncio.run(e.generate(ask(prompt(1, 20))))
    assert after.tokens == asyncio.run(engine(theirs).generate(ask(prompt(1, 20)))).tokens != before
    assert after.cached_tokens == 0 and set(after.versions) == {3}


def test_a_tied_tensor_travels_once():
    model = tiny(
        "gemma2",
        **{
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
        },
    )
    sent = [n for n, _ in names.named_weights(model.model)]
    assert len(sent) == len(set(sent)) and not any("lm_head" in n for n in sent)
    trainer, e = Publisher(twin(model)), engine(model)
    trainer.train()
    asyncio.run(update(trainer)(trainer, e))
    assert (
        equal(trainer.loaded, model)
        and model.model.lm_head.weight.data_ptr() == model.model.model.embed_tokens.weight.data_ptr()
    )


def test_an_engine_that_ends_right_after_the_commit_has_the_update_made_again():
    """The second time the same weights are published: they are not "the old ones" of a step that changed nothing."""
    trainer, e = Publisher(twin(tiny())), engine(tiny())
    sync = update(trainer)
    trainer.train()
    asyncio.run(sync(trainer, e))
    trainer.train()
    committed, status, receive = [], e.status, e.receive

    async def heard(message):
        committed.extend([message] if isinstance(message, Commit) else [])
        return await receive(message)

    async def lost():
        if len(committed) == 1:
            committed.append("told")
            raise EngineError("the worker ended")
        return await status()

    e.receive, e.status = heard, lost
    with pytest.raises(EngineError, match="the worker ended"):
        asyncio.run(sync(trainer, e))
    assert asyncio.run(sync(trainer, e)) == 2 == e.version and equal(trainer.loaded, e.loaded)


# -- everything that can go wrong on the way -------------------------------------------------------


def spoil(what, manifest, tensors):
    """-> (manifest, tensors, commit) with one thing wrong."""
    rows, commit = list(manifest.tensors), Commit(manifest.version, manifest.root)
    if what == "missing":
        rows.pop(3)
    elif what == "unknown":
        rows.append(replace(rows[0], name="model.extra.weight"))
    elif what == "shape":
        rows[2] = replace(rows[2], shape=(1, *rows[2].shape))
    elif what == "dtype":
        rows[2] = replace(rows[2], dtype="bfloat16")
    elif what == "older version":
        manifest = replace(manifest, version=-1)
    elif what == "left behind":
        tensors.pop(rows[4].name)
    elif what == "stowaway":
        tensors["model.extra.weight"] = torch.zeros(2)
    elif what == "flipped":
        tensors[rows[1].name] = tensors[rows[1].name].clone()
        tensors[rows[1].name].view(-1).view(torch.int32)[7] ^= 1
    elif what == "broadcast":
        tensors[rows[1].name] = tensors[rows[1].name][:1]
    elif what == "not a tensor":
        tensors[rows[1].name] = "?"
    elif what == "root":
        commit = replace(commit, root="0" * 32)
    elif what == "version":
        commit = replace(commit, version=manifest.version + 1)
    return replace(manifest, tensors=tuple(rows)), tensors, commit


FAULTS = {
    "missing": "1 tensors are missing, first ",
    "unknown": "1 tensors are unknown, first model.extra.weight",
    "shape": "another shape or dtype",
    "dtype": "another shape or dtype",
    "older version": "version -1 is older than 0",
    "left behind": "did not travel",
    "stowaway": "were not announced, first model.extra.weight",
    "flipped": "1 tensors arrived with other bits than were sent",
    "broadcast": r"was announced as float32 \[.*\] and came as",
    "not a tensor": "'str' object",
    "root": "with root 00000000 is committed",
    "version": "version 2 with root",
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_faulty_update_is_refused_until_a_good_one(what):
    mine = tiny()
    trainer, e = Publisher(twin(mine)), engine(mine)
    request = ask(prompt(1, 20), key=1)

    async def main():
        await e.generate(request)
        trainer.train()
        manifest, route = await trainer.publish(Route("tensor"))
        manifest, tensors, commit = spoil(what, manifest, route.data)
        with pytest.raises(SyncError, match=FAULTS[what]) as error:
            await e.receive(Begin(manifest))
            await e.receive(Route("tensor", tensors))
            await e.receive(commit)
        assert "refuses to generate until a good update" in str(error.value)
        assert (await e.status()).state == "refusing" and e.version == 0
        for verb in (e.generate, e.score):
            with pytest.raises(EngineError, match="refuses"):
                await verb(request)
        assert await update(trainer)(trainer, e) == 1
        c = await e.generate(request)
        idle(e)
        return c

    c = asyncio.run(main())
    truth = asyncio.run(engine(trainer.loaded).generate(request))
    assert (c.tokens, set(c.versions), c.cached_tokens) == (truth.tokens, {1}, 0)


def test_messages_out_of_order():
    async def main(*messages, says):
        e = engine(tiny())
        with pytest.raises(SyncError, match=says):
            for message in messages:
                await e.receive(message)
        assert (await e.status()).state == "refusing"

    model = tiny()
    manifest = names.build_manifest(model.model, 1)
    begin, data, commit = (
        Begin(manifest),
        Route("tensor", dict(names.named_weights(model.model))),
        Commit(1, manifest.root),
    )
    asyncio.run(main(commit, says="commit without begin"))
    asyncio.run(main(data, says="data without begin"))
    asyncio.run(main(begin, data, commit, commit, says="commit without begin"))
    asyncio.run(main(begin, Abort("never mind"), commit, says="commit without begin"))


def test_a_weight_that_flips_between_publish_and_commit():
    """Also where trainer and engine share the copy: there the digest is all that can notice."""
    model = tiny()
    trainer, e = Publisher(model), engine(model)

    async def main():
        manifest, route = await trainer.publish(Route("tensor"))
        await e.receive(Begin(manifest))
        await e.receive(route)
        next(iter(route.data.values())).view(-1)[5] += 1e-3
        with pytest.raises(
            SyncError, match=r"1 tensors arrived with other bits than were sent, first model\.embed_tokens\.weight"
        ):
            await e.receive(Commit(0, manifest.root))

    asyncio.run(main())


class Deaf:
    """An engine that says yes and does something else."""

    def __init__(self, version=1, logprobs=None):
        self.version, self.logprobs, self.heard = version, logprobs, []

    async def receive(self, message):
        self.heard.append(type(message).__name__)
        return self.version

    async def score(self, request):
        return type("Scored", (), {"logprobs": self.logprobs})


def test_a_version_that_is_not_echoed():
    trainer, deaf = Publisher(tiny(), 1), Deaf(version=0)
    with pytest.raises(SyncError, match="serves version 0, but 1 was committed"):
        asyncio.run(update(trainer)(trainer, deaf))
    assert deaf.heard == ["Begin", "Route", "Commit", "Abort"]


NAN = float("nan")


@pytest.mark.parametrize(
    "theirs, says",
    [
        ([0.0, -1.0, -2.2], "differ by 0.0667 nats"),
        ([0.0, NAN, -2.0], "differ by nan"),
        ([0.0, -1.0, NAN], "differ by nan"),
        ([0.0, -1.0], "3 tokens"),
    ],
)
def test_a_probe_that_disagrees(theirs, says):
    async def score(tokens):
        return [0.0, -1.0, -2.0]

    trainer, deaf = Publisher(tiny(), 1), Deaf(logprobs=theirs)
    sync = update(trainer, probe=[1, 2, 3], score=score)
    with pytest.raises(SyncError, match=says):
        asyncio.run(sync(trainer, deaf))
    assert deaf.heard[-1] == "Abort" and sync.root is None


def test_after_a_probe_that_disagrees_the_engine_refuses_and_the_error_says_why():
    model = tiny()
    trainer, e = Publisher(model), engine(model)

    async def off(tokens):
        return [0.0, *(lp + 0.01 for lp in plain_logprobs(model, tokens))]

    async def main():
        with pytest.raises(SyncError, match=r"differ by 0.0\d+ nats a token on the probe \(limit 0.0001\)"):
            await update(trainer, score=off)(trainer, e)
        assert (await e.status()).state == "refusing"
        await update(trainer)(trainer, e)
        assert (await e.generate(ask(prompt(1, 9)))).tokens

    asyncio.run(main())


def test_a_tensor_that_stays_behind_is_doubted_before_it_is_an_error():
    """As vLLM's packed head on a CPU: equal at the first update, then a tenth of each update is missing."""
    heard, trainer, at = [], [-1.0, -2.0], [0.0]

    class Engine:
        async def score(self, request):
            return TokenScores([x + 0.9 * at[0] * share for x in trainer], 0)

    async def score(tokens):
        return [x + at[0] for x in trainer]

    async def work():
        sync = WeightUpdate(FromTensor(), probe=[1, 2], score=score, tolerance=1e-3)
        for version in range(4):
            at[0] = 2e-3 * version
            await sync._probe_gap(Engine(), version, await sync._score_probe(), POLICY)

    stop = subscribe(heard.append)
    try:
        share = 1 / 0.9
        asyncio.run(work())
        assert not heard
        share = 1.0
        asyncio.run(work())
    finally:
        stop()
    assert (
        len(heard) == 3 and "differ by 2.0e-04 nats" in heard[0].message and "moved it by 2.0e-03" in heard[0].message
    )


def probed(moves, follows, *, noise=0.0, first=None, tolerance=0.25, versions=40, replicas=None, seed=0):
    """Updates that each move the trainer's probe by `moves` nats a token; of them an engine
    shows the share `follows`. `first`: the noise of the first one. -> the last version.
    """
    rng, at = np.random.default_rng(seed), np.zeros(24)
    signs = rng.choice([-1.0, 1.0], 24)

    class Engine:
        async def score(self, request):
            told = [
                (-3 + share * at + (noise if at.any() or first is None else first) * rng.laplace(size=24)).tolist()
                for share in (replicas or {"": follows}).values()
            ]
            return TokenScores(told[0], 0, dict(zip(replicas, told)) if replicas else {})

    async def score(tokens):
        return (-3 + at).tolist()

    async def work():
        sync = WeightUpdate(FromTensor(), probe=list(range(24)), score=score, tolerance=tolerance)
        for version in range(versions):
            await sync._probe_gap(Engine(), version, await sync._score_probe(), POLICY)
            at[:] += moves * signs
        return version

    return asyncio.run(work())


def test_an_engine_that_acknowledges_weights_and_keeps_the_old_ones_is_an_error():
    with pytest.raises(
        SyncError, match=r"from version 0 to 1 .* moved by 0.005 nats a token, and those of the engine did not move"
    ):
        probed(0.005, 0.0)
    with pytest.raises(SyncError, match=r"from version 0 to 26 .* did not move"):  # below what bf16 shows it adds up
        probed(0.0001, 0.0)
    with pytest.raises(
        SyncError, match=r"from version 0 to \d .* moved by 0.1[0-9]* nats a token, .* followed by -?\d+% of it"
    ):
        probed(0.02, 0.0, noise=0.01)  # its scores of the same weights are never the same
    with pytest.raises(SyncError, match="of the engine 'b' did not move"):
        probed(0.005, 0.0, replicas={"a": 1.0, "b": 0.0})


@pytest.mark.parametrize("moves", [0.0, 1e-7, 1e-5, 1e-3, 0.05])
@pytest.mark.parametrize("noise", [0.0, 0.01, 0.05])
def test_an_engine_that_follows_is_never_an_error(moves, noise):
    """Whatever the learning rate and the precision of the server, up to a third of the limit of bf16."""
    assert probed(moves, 1.0, noise=noise) == 39


def test_nor_is_one_whose_noise_was_small_at_first():
    """Of a run in bfloat16: 0.003 nats at the first update, 0.02 at later ones, which moved the policy by 0.03 to 0.1."""
    for seed in range(60):
        assert probed(0.03 + 0.001 * seed, 1.0, noise=0.02, first=0.0035, seed=seed) == 39
    with pytest.raises(SyncError, match=r"followed by -?\d+% of it"):
        probed(0.03, 0.0, noise=0.02, first=0.0035)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_routes_of_the_probe_may_flip_in_16_bits(dtype):
    """Of a mixture in bfloat16: 0.33 nats in a healthy run."""
    plain, mixture = (probe_tolerance(SimpleNamespace(dtype=dtype, routers=n)) for n in (0, 3))
    assert mixture == plain if dtype == torch.float32 else mixture > plain
    assert probe_tolerance(SimpleNamespace(dtype=torch.bfloat16, routers=3)) > 0.33


def test_the_probe_notices_a_half_written_module():
    """Digests compare what travelled; the probe compares what is computed."""
    model = tiny()
    trainer, e = Publisher(twin(model)), engine(model)
    e.loaded.head.scale = 1.01  # not a tensor: no digest sees it
    with pytest.raises(SyncError, match="nats a token on the probe"):
        asyncio.run(update(trainer)(trainer, e))


@pytest.mark.parametrize("error", [RuntimeError("the wire"), asyncio.CancelledError()])
def test_a_transport_that_dies_aborts(error):
    model = tiny()
    trainer, e = Publisher(twin(model), 1), engine(model)
    receive = e.receive

    async def broken(message):
        if isinstance(message, Route):
            raise error
        return await receive(message)

    async def main():
        e.receive = broken
        with pytest.raises(type(error)):
            await update(trainer)(trainer, e)
        with pytest.raises(EngineError, match="refuses"):
            await e.generate(ask(prompt(1, 9)))

    asyncio.run(main())


@pytest.mark.parametrize("tags", [(), ("kv_cache",)])
def test_the_probe_runs_while_requests_are_parked_and_memory_is_lent(tags):
    """The probe needs no page of the cache, so a full or sleeping one does not matter."""
    model = tiny()
    trainer, e = Publisher(model), engine(model, kv_pages=40)

    async def main():
        task = asyncio.create_task(e.generate(ask(prompt(1, 10), n=30)))
        await wrote(e, 5)
        await e.pause("hold")
        await e.sleep(tags)
        trainer.train()
        await update(trainer, probe=prompt(3, 60))(trainer, e)
        assert not tags or e.pages.keys.pool_bytes == 0
        await e.wake(tags)
        await e.resume()
        assert len((await task).tokens) == 30
        idle(e)

    asyncio.run(main())


def test_moved_and_unmoved_weights():
    model = tiny()
    trainer, e = Publisher(model), engine(model)
    first = names.build_manifest(model.model, 0).root
    sync = update(trainer, moved=False)
    asyncio.run(sync(trainer, e))
    asyncio.run(sync(trainer, e))  # no update was applied: the root is the same, and that is right
    assert sync.root == first
    trainer.train()
    with pytest.raises(SyncError, match="no update was applied, but the published weights changed"):
        asyncio.run(sync(trainer, e))
    sync.moved = lambda: True
    asyncio.run(sync(trainer, e))
    with pytest.raises(
        SyncError, match="made a step with lr > 0, but the weights it publishes are bit for bit the old ones"
    ):
        asyncio.run(sync(trainer, e))
