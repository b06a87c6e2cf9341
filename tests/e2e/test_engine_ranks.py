"""An engine of two processes, each with a part of every matrix: what one process writes, it writes, whatever happens."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from kits.engine import all_of, ask, engine, idle, inline, plain_logprobs, prompt, twin, watched
from kits.engine_ranks import RankedEngines, same_answers, whole
from kits.runs import check, events, final, run
from kits.sweeps import covering
from kits.sync import Publisher, ShardedPublisher, wrote
from kits.workers import alive, children
from rondel.core.config.place import PlaceConfig
from rondel.core.errors import ConfigError, EngineError, ModelError, SyncError
from rondel.core.events import GroupFinished, subscribe
from rondel.core.mesh import Mesh
from rondel.core.tensor_parts import TensorPart
from rondel.core.types import Begin, Completion, Request, Sampling
from rondel.generate.engine.builtin.draft import DraftModel
from rondel.generate.engine.builtin.speculative import SpeculativeDecoder
from rondel.models import names
from rondel.models.linear import packed_linears
from rondel.models.save import save_model
from rondel.models.shard_cut import part_of
from rondel.models.tensor_parallel import check_tensor_parallel
from rondel.sync.delta import Delta
from rondel.sync.from_disk import FromDisk
from rondel.sync.from_distributed import FromDistributed
from rondel.sync.from_ipc import FromIpc
from rondel.sync.from_tensor import FromTensor
from rondel.sync.transfer_plan import plan_transfer
from rondel.sync.update import WeightUpdate

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    made = RankedEngines(tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()
    assert made.ended == []


def alike(engines, kind, scenario, **settings):
    """What a scenario tells of an engine of two processes, and of one: equal, logprobs to 1e-5. -> what it told."""
    ours = asyncio.run(scenario(watched(engines.of(kind, **settings))))
    theirs = asyncio.run(scenario(watched(engine(whole(kind), **{"run": inline, **settings}))))
    same_answers(ours, theirs)
    return ours


def mixed(n=6, **more):
    """Greedy and sampled, siblings and strangers."""
    return [ask(prompt(i // 2, 9 + 7 * (i // 2), 50), key=i, n=10, temperature=float(i % 2), **more) for i in range(n)]


FAMILIES = ["llama", "one_key", "untied", "gpt_oss", "deepseek_v3", "qwen3_next", "falcon_h1"]


# fewer key heads than processes, sinks, latents, and a state; the others are below
@pytest.mark.parametrize("kind", covering(FAMILIES, FAMILIES[1:2] + FAMILIES[3:6]))
def test_every_family_writes_what_one_process_writes(engines, kind):
    async def scenario(e):
        told = await all_of(e, mixed())
        again = await all_of(e, mixed())  # from the prefix cache
        scored = [await e.score(request) for request in mixed()]
        assert [row.version for row in scored] == [0] * 6
        idle(e)
        return [*told, *again, *(_scored(row.logprobs) for row in scored)]

    told = alike(engines, kind, scenario, kv_pages=512)
    assert sum(answer.cached_tokens for answer in told[6:12]) > 0


def _scored(logprobs):
    return Completion([], logprobs, [], "length")


def test_experts_are_recorded_as_one_process_records_them(engines):
    async def scenario(e):
        requests = [Request(r.tokens, r.sampling, key=r.key, wants=frozenset({"experts"})) for r in mixed()]
        return await all_of(e, requests)

    told = alike(engines, "qwen3_moe", scenario, routes=True)
    assert all(answer.experts is not None for answer in told)


def test_retraction_truncation_and_streams_beside_the_tokens(engines):
    wants = frozenset({"raw_logprobs", "prompt_logprobs", "support"})

    async def scenario(e):
        requests = [
            Request(prompt(i, 20, 50), Sampling(max_tokens=20, ignore_eos=True, top_k=5, top_p=0.8), key=i, wants=wants)
            for i in range(5)
        ]
        told = await all_of(e, requests)
        assert e.scheduler.retracted > 0
        idle(e)
        return told

    told = alike(engines, "llama", scenario, kv_pages=100, prefill_tokens=16)
    assert all(len(answer.prompt_logprobs) == 20 and max(map(len, answer.support)) <= 5 for answer in told)


@pytest.mark.parametrize("how", ["hold", "drain", "abort"])
def test_pauses_and_sleep(engines, how):
    async def scenario(e):
        asked = [asyncio.ensure_future(e.generate(request)) for request in mixed(4)]
        await wrote(e, 3)
        await e.pause(how)
        if how == "hold":
            await e.sleep(("weights", "kv_cache"))
            await e.wake(("weights", "kv_cache"))
        await e.resume()
        return await asyncio.gather(*asked)

    ours = asyncio.run(scenario(engines.of("llama")))
    theirs = asyncio.run(scenario(engine(whole("llama"))))
    if how == "abort":  # where they were is a matter of timing
        for a, b in zip(ours, theirs):
            n = min(len(a.tokens), len(b.tokens))
            assert a.finish_reason == "abort" and a.tokens[:n] == b.tokens[:n] and n >= 3
    else:
        assert [a.tokens for a in ours] == [b.tokens for b in theirs]


@pytest.mark.parametrize("draft", [None, "one_key"])
def test_guesses_and_grammars(engines, draft):
    """A draft model is whole, on the first process alone."""

    def speculation():
        return SpeculativeDecoder(4, None if draft is None else DraftModel(whole(draft)))

    async def scenario(e):
        tokens = prompt(3, 8, 50) * 4
        greedy = await all_of(e, [ask(tokens, key=i, n=24, temperature=0) for i in range(3)])
        return [*greedy, await e.generate(ask(tokens, key=4, grammar={"regex": "[0-9]{4}"}, ignore_eos=False))]

    ours = asyncio.run(scenario(engines.of("llama", speculation=speculation())))
    theirs = asyncio.run(scenario(engine(whole("llama"))))
    assert [a.tokens for a in ours] == [b.tokens for b in theirs]


def test_what_cannot_be_cut_is_refused(engines):
    for kind, error, said in (
        ("mamba", ModelError, "no plan for tensor parallelism.*tp = 1"),
        ("three_heads", ModelError, "tp = 2 does not divide the 3 attention heads"),
        ("deepseek_v32", ConfigError, "an indexer cannot be cut"),
    ):
        with pytest.raises(error, match=said):
            engines.of(kind)
    assert len(asyncio.run(engines.of("llama").generate(ask(prompt(1, 9, 50)))).tokens) == 16, "the ranks go on"


# -- weights -------------------------------------------------------------------------------------


class CheckpointPublisher(Publisher):
    """Under the checkpoint's names where the transport asks for these, as the trainer does it."""

    def _weights(self):
        named = names.named_weights(self.loaded.model)
        own = self.transport.names == "checkpoint"
        return names.published_tensors(self.loaded.model, named) if own else named

    async def publish(self, route):
        return self.transport.publish(route, self.version, names.describe_tensors(self._weights()))

    async def send(self, route):
        await asyncio.to_thread(self.transport.send, route, self._weights())


def ends(engines, way, folder, kind="llama"):
    """-> (trainer, engine of two processes, update)."""
    transports = {
        "ipc": FromIpc,
        "disk": lambda: FromDisk(folder / "weights"),
        "distributed": lambda: FromDistributed(deadline=20.0),
        "tensor": lambda: FromTensor("begin"),
    }
    trainer = CheckpointPublisher(whole(kind), transport=transports[way]())
    e = engines.of(kind, transports={way: transports[way]()})

    return trainer, e, updater_of(trainer)


def updater_of(trainer):
    async def score(tokens):
        return [0.0, *plain_logprobs(trainer.loaded, tokens)]

    return WeightUpdate(trainer.transport, probe=PROBE, score=score, tolerance=1e-4, moved=lambda: True)


PROBE = prompt(0, 16, 50)


@pytest.mark.parametrize(
    ("way", "kind"),
    covering(
        [
            ("ipc", "one_key"),
            ("ipc", "qwen3_moe"),
            ("disk", "qwen3_moe"),
            ("distributed", "llama"),
            ("tensor", "untied"),
        ],
        [("disk", "qwen3_moe"), ("distributed", "llama")],  # ipc, tensor and one_key below
    ),
)
def test_weights_arrive_in_parts(engines, way, kind, tmp_path):
    trainer, e, update = ends(engines, way, tmp_path, kind)

    async def main():
        asked = [asyncio.ensure_future(e.generate(ask(prompt(3, 9, 50), key=1, n=40)))]
        for version in (1, 2):
            trainer.train()
            assert await update(trainer, e) == version == e.version and e.state == "serving"
            one = engine(twin(trainer.loaded))
            ours, theirs = await all_of(e, mixed(2)), await all_of(one, mixed(2))
            assert [a.tokens for a in ours] == [b.tokens for b in theirs]
            assert {v for a in ours for v in a.versions} == {version}
        assert len((await asyncio.gather(*asked))[0].tokens) == 40, "what ran beside the updates goes on"
        assert all(s.is_trained for s in packed_linears(e.loaded.model) if s.packed_bytes), (
            "packed copies that no update renews"
        )
        idle(e)

    asyncio.run(main())
    trainer.transport.close()


@pytest.mark.parametrize(
    ("mesh", "kind"),
    covering(
        [(Mesh(shards=2, tp=2), "one_key"), (Mesh(shards=3), "untied"), (Mesh(replicas=2, tp=2), "llama")],
        [(Mesh(shards=2, tp=2), "one_key")],  # parts of any cut: tests/units/test_transfer_plan.py
    ),
)
def test_each_rank_pulls_its_own_part_of_what_a_trainer_of_several_ranks_wrote(engines, mesh, kind):
    """Nobody has a tensor whole: the sums of both ranks give the digests, and a wrong one is refused."""
    e = engines.of(kind, transports={"ipc": FromIpc()})
    trainer = ShardedPublisher(whole(kind), mesh, e.loaded.lead.part.cuts.cuts)
    publish = trainer.publish

    async def score(tokens):
        return [0.0, *plain_logprobs(trainer.loaded, tokens)]

    update = WeightUpdate(trainer.transport, probe=PROBE, score=score, tolerance=1e-4, moved=lambda: True)

    async def wrong(route):
        manifest, route = await publish(route)
        first, *rows = manifest.tensors
        return replace(manifest, tensors=(replace(first, digest="0" * 32), *rows)), route

    async def main():
        for version in (1, 2, 3):
            trainer.train()
            assert await update(trainer, e) == version == e.version and e.state == "serving"
            one = engine(twin(trainer.loaded))
            ours, theirs = await all_of(e, mixed(2)), await all_of(one, mixed(2))
            assert [a.tokens for a in ours] == [b.tokens for b in theirs]
        reader = e.arrivals._transports["ipc"].reader
        parts = e.arrivals.proof.parts
        assert reader.bytes_read == 4 * sum(part.numel for part in parts.values())
        norms = {name for name, part in parts.items() if len(part.shape) == 1}
        assert norms and not norms & e.arrivals.proof.rows.keys(), "what both have, both compare whole"
        assert reader.bytes_read < 0.75 * 4 * sum(p.numel() for p in trainer.loaded.model.parameters())
        trainer.publish = wrong
        trainer.train()
        with pytest.raises(SyncError, match="1 tensors arrived with other bits than were sent"):
            await update(trainer, e)
        assert e.version == 3 and [a.tokens for a in await all_of(e, mixed(2))] == [a.tokens for a in ours]
        trainer.publish = publish
        lead = e.loaded.lead
        tell, told = lead.tell, []

        def lie(message):
            if isinstance(message, Begin) and not told:
                told.append(True)
                message = Begin(replace(message.manifest, tensors=message.manifest.tensors[1:]), message.beside)
            tell(message)

        lead.tell = lie
        with pytest.raises(SyncError, match="rank 1: 1 tensors are missing"):  # its sums are nothing, and nobody hangs
            await update(trainer, e)
        assert await update(trainer, e) == 4 == e.version
        idle(e)

    asyncio.run(main())
    trainer.close()


@pytest.mark.parametrize("way", ["ipc", "tensor"])
def test_a_rank_that_reads_other_bits_is_named_and_the_old_version_stays_or_is_refused(engines, way, tmp_path):
    """The other rank is told another digest of the last tensor."""
    trainer, e, update = ends(engines, way, tmp_path)
    lead = e.loaded.lead
    tell, told = lead.tell, []

    def lie(message):
        if isinstance(message, Begin) and not told:
            told.append(True)
            *rows, last = message.manifest.tensors
            message = Begin(replace(message.manifest, tensors=(*rows, replace(last, digest="0" * 32))), message.beside)
        tell(message)

    async def main():
        before = await e.generate(ask(PROBE, key=1))
        lead.tell = lie
        trainer.train()
        with pytest.raises(SyncError, match="rank 1: 1 tensors arrived with other bits"):
            await update(trainer, e)
        if way == "ipc":
            assert (await e.generate(ask(PROBE, key=1))).tokens == before.tokens and e.version == 0
        else:
            with pytest.raises(EngineError, match="refuses"):
                await e.generate(ask(PROBE))
        trainer.train()
        assert await update(trainer, e) == 2
        one = engine(twin(trainer.loaded))
        assert (await e.generate(ask(PROBE, key=1))).tokens == (await one.generate(ask(PROBE, key=1))).tokens

    asyncio.run(main())


def test_changes_alone_are_refused_by_name(engines, tmp_path):
    e = engines.of("llama", transports={"delta": Delta(tmp_path)})
    trainer = CheckpointPublisher(whole("llama"), transport=Delta(tmp_path))
    update = WeightUpdate(trainer.transport, probe=[], score=None, tolerance=1e-4)
    with pytest.raises(SyncError, match="'delta', which an engine of 2 processes does not take: use ipc, disk"):
        asyncio.run(update(trainer, e))


# -- experts apart -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    made = RankedEngines(tmp_path_factory.mktemp("experts"), experts_apart=True)
    yield made
    made.close()
    assert made.ended == []


EXPERTS = ["qwen3_moe", "gpt_oss", "deepseek_v3"]


@pytest.mark.parametrize(
    "kind", covering(EXPERTS, EXPERTS[2:])
)  # shared experts, too; those of gpt_oss: test_expert_parallel.py
def test_experts_whole_on_some_process_each(mixtures, kind, tmp_path):
    """What one process writes, experts recorded alike, before and after updates; a process holds half of the experts, and
    the whole of each.
    """
    wants = frozenset({"experts"})

    async def scenario(e):
        return await all_of(e, [Request(r.tokens, r.sampling, key=r.key, wants=wants) for r in mixed()])

    settings = {"kv_pages": 512, "routes": True}
    ours = mixtures.of(kind, transports={"ipc": FromIpc()}, **settings)
    same_answers(asyncio.run(scenario(watched(ours))), asyncio.run(scenario(watched(engine(whole(kind), **settings)))))
    part = ours.loaded.lead.part
    held = dict(part.loaded.model.named_parameters())
    experts = [name for name in held if ".experts." in name]
    assert experts and all(tuple(held[n].shape) == (part.module[n][0][0] // 2, *part.module[n][0][1:]) for n in experts)
    trainer = CheckpointPublisher(whole(kind), transport=FromIpc())
    for version in (1, 2):
        trainer.train()
        assert asyncio.run(updater_of(trainer)(trainer, ours)) == version
        told, true = (asyncio.run(all_of(e, mixed(4))) for e in (ours, engine(twin(trainer.loaded))))
        assert [a.tokens for a in told] == [b.tokens for b in true]


@pytest.mark.parametrize(
    "mesh",
    covering(
        [Mesh(tp=2), Mesh(shards=2, tp=2), Mesh(pp=2, tp=2), Mesh(shards=2), Mesh(replicas=2, tp=2)],
        [Mesh(shards=2, tp=2)],
    ),
    ids=str,
)
def test_a_trainer_that_cuts_experts_hands_over_to_an_engine_that_lays_them_apart(mixtures, mesh):
    """Each rank of the engine pulls its part of attention and its experts whole, of what the trainer's ranks have cut by tp:
    exact by digest, and as many bytes as the plan of copies has.
    """
    e = mixtures.of("qwen3_moe", transports={"ipc": FromIpc()})
    loaded, cuts = whole("qwen3_moe"), e.loaded.lead.part.cuts.cuts
    trainer = ShardedPublisher(loaded, mesh, check_tensor_parallel(loaded.model, mesh.tp))
    update = updater_of(trainer)
    shapes = {name: TensorPart.whole(t.shape) for name, t in trainer.loaded.model.named_parameters()}

    async def main():
        for version in (1, 2):
            trainer.train()
            assert await update(trainer, e) == version == e.version
            ours, theirs = await all_of(e, mixed(2)), await all_of(engine(twin(trainer.loaded)), mixed(2))
            assert [a.tokens for a in ours] == [b.tokens for b in theirs]
        mine = {name: part_of(shape, cuts.get(name), 2, 0) for name, shape in shapes.items()}
        planned = sum(copy.bytes for copy in plan_transfer(trainer.held, [mine], dict.fromkeys(shapes, 4)))
        read = e.arrivals._transports["ipc"].reader.bytes_read
        assert (
            read
            == planned
            == 4 * sum(part.numel for part in mine.values())
            < 0.6 * 4 * sum(part.numel for part in shapes.values())
        )
        experts = [name for name in cuts if ".experts." in name]
        assert experts and all(mine[name].shape[0] == shapes[name].shape[0] // 2 for name in experts), "each lies whole"
        idle(e)

    asyncio.run(main())
    trainer.close()


def test_a_dense_model_has_no_experts_to_lay_apart(mixtures):
    with pytest.raises(ModelError, match=r"'llama' has no experts that ep could lay apart.*leave ep out"):
        mixtures.of("llama")


def test_experts_lie_apart_over_all_processes_or_none():
    assert PlaceConfig(kind="split", engines={"tp": 2, "ep": 2}).engine_experts_apart
    assert not PlaceConfig(kind="split", engines={"tp": 2}).engine_experts_apart
    for sizes in ({"tp": 4, "ep": 2}, {"ep": 2}):
        with pytest.raises(ValueError, match=r"ep = 2 with tp = .*leave ep out"):
            PlaceConfig(kind="split", engines=sizes)
    halves = PlaceConfig(kind="split", engines={"tp": 2, "ep": 2, "prefill": True})
    assert halves.engine_processes == 4 and halves.engine_sizes == "tp = 2, prefill = true"
    with pytest.raises(ValueError, match="prefill = true with encoders = 1 is not supported"):
        PlaceConfig(kind="split", engines={"tp": 2, "prefill": True, "encoders": 1})


# -- prefill and decode apart --------------------------------------------------------------------


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    made = RankedEngines(tmp_path_factory.mktemp("prefill"), prefill=True)
    yield made
    made.close()
    assert made.ended == []


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """Prompts computed by two processes that share every matrix, answers by two others."""
    made = RankedEngines(tmp_path_factory.mktemp("halves"), tp=4, prefill=True)
    yield made
    made.close()
    assert made.ended == []


@pytest.fixture(scope="module")
def experts_in_halves(tmp_path_factory):
    made = RankedEngines(tmp_path_factory.mktemp("mixed"), tp=4, prefill=True, experts_apart=True)
    yield made
    made.close()
    assert made.ended == []


STATES = ("lfm2", "qwen3_next", "falcon_h1")
PROMPTS_APART = [
    *(("apart", kind) for kind in ("llama", "deepseek_v3", "qwen3_moe", *STATES)),
    *(("halves", kind) for kind in ("llama", "one_key", "untied", "deepseek_v3", "qwen3_moe", "qwen3_next")),
    ("experts_in_halves", "qwen3_moe"),
]


# latents and routes; keys and values: a run whose process of its prompts is killed, below; key heads that two share; states
@pytest.mark.parametrize(
    ("engines_of", "kind"),
    covering(
        PROMPTS_APART,
        [("apart", "deepseek_v3"), ("halves", "one_key"), ("halves", "qwen3_moe"), ("halves", "qwen3_next")],
    ),
)
def test_prompts_computed_elsewhere(request, engines_of, kind, tmp_path):
    """What one process writes, whatever decodes beside the prompts; of one request after another the bits of the same
    engine without the second half, so that handing over changes none; and after an update, which reaches all processes.
    """
    apart, mixture = request.getfixturevalue(engines_of), kind in ("deepseek_v3", "qwen3_moe")
    wants = frozenset({"prompt_logprobs", *(["experts"] if mixture else [])})

    async def scenario(e):
        requests = [Request(r.tokens, r.sampling, key=r.key, wants=wants) for r in mixed(8)]
        told = await all_of(e, requests)  # some decode while others are prompts
        await e.pause("hold")
        await e.sleep(("kv_cache",))
        await e.wake(("kv_cache",))
        await e.resume()
        idle(e)
        return [*told, *await all_of(e, requests), _scored((await e.score(mixed(8)[7])).logprobs)]

    settings = {"routes": mixture, "kv_pages": 70, "prefill_tokens": 16}
    ours = apart.of(kind, transports={"ipc": FromIpc()}, **settings)
    told, true = (asyncio.run(scenario(watched(e))) for e in (ours, engine(whole(kind), **settings)))
    same_answers(told, true)
    assert ours.scheduler.retracted > 0 or mixture

    async def one_by_one(e):
        asked = [replace(ask(prompt(i, 40, 50), key=i, n=10), wants=wants) for i in range(3)]
        return [await e.generate(r) for r in (*asked, *(replace(r, wants=frozenset()) for r in asked))]

    settings["kv_pages"] = 512
    ours = apart.of(kind, transports={"ipc": FromIpc()}, **settings)
    plain = engine(whole(kind), **settings)
    if engines_of != "apart":
        plain = request.getfixturevalue({"halves": "engines"}.get(engines_of, "mixtures")).of(kind, **settings)
    told, true = (asyncio.run(one_by_one(e)) for e in (ours, plain))
    for a, b in zip(told, true, strict=True):
        assert (a.tokens, a.logprobs, a.prompt_logprobs) == (b.tokens, b.logprobs, b.prompt_logprobs)
    assert sum(a.cached_tokens for a in told[3:]) > 0, "the second time they begin with keys that are handed over"
    trainer = CheckpointPublisher(whole(kind), transport=FromIpc())
    trainer.train()
    assert asyncio.run(updater_of(trainer)(trainer, ours)) == 1
    told, true = (asyncio.run(all_of(e, mixed(4))) for e in (ours, engine(twin(trainer.loaded))))
    assert [a.tokens for a in told] == [b.tokens for b in true] and told[0].versions[0] == 1
    assert all(s.is_trained for s in packed_linears(ours.loaded.model) if s.packed_bytes), (
        "packed copies that no update renews"
    )
    with torch.no_grad():
        for p in ours.loaded.model.parameters():
            p.mul_(1.5)
    with pytest.raises(EngineError, match=r"score a text differently.*one of them has other weights"):
        asyncio.run(ours.score(ask(PROBE)))
    trainer.transport.close()


def test_each_half_pulls_its_own_parts_and_proves_them(halves):
    """Of what a trainer of several ranks wrote; other bits in the half of the prompts are named, and the old version serves."""
    e = halves.of("llama", transports={"ipc": FromIpc()})
    trainer, lead = ShardedPublisher(whole("llama"), Mesh(shards=2, tp=2), e.loaded.lead.part.cuts.cuts), e.loaded.lead
    update, tell, told = updater_of(trainer), lead.tell, []

    def lie(message):
        if isinstance(message, Begin) and not told:
            told.append(True)
            cut = next(row for row in message.manifest.tensors if row.name in e.loaded.lead.part.cuts.cuts)
            rows = (replace(row, digest="0" * 32) if row is cut else row for row in message.manifest.tensors)
            message = Begin(replace(message.manifest, tensors=tuple(rows)), message.beside)
        tell(message)

    async def main():
        for version in (1, 2):
            trainer.train()
            assert await update(trainer, e) == version == e.version
            true = await all_of(engine(twin(trainer.loaded)), mixed(2))
            assert [a.tokens for a in await all_of(e, mixed(2))] == [b.tokens for b in true]
        lead.tell = lie
        trainer.train()
        with pytest.raises(SyncError, match=r"^rank 2: 1 tensors arrived with other bits than were sent"):
            await update(trainer, e)
        assert e.version == 2 and [a.tokens for a in await all_of(e, mixed(2))] == [b.tokens for b in true]
        assert await update(trainer, e) == 3 == e.version
        idle(e)

    asyncio.run(main())
    trainer.close()


def test_prompts_elsewhere_need_a_cache_that_can_be_shared(apart, monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(ConfigError, match=r"this system has no memory without a name \(memfd\). Leave it out"):
        apart.of("llama")


# -- a rank that ends ----------------------------------------------------------------------------


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_ends_or_hangs_is_named(tmp_path, how):
    made = RankedEngines(tmp_path, patience=2.0)
    e = made.of("llama")
    [follower] = made.ranks.followers

    async def main():
        if how == signal.SIGSTOP:
            await asyncio.sleep(4.0)  # an idle engine is no silent one
        asked = [asyncio.ensure_future(e.generate(ask(prompt(i, 9, 50), key=i, n=200))) for i in range(2)]
        async with asyncio.timeout(30):
            await wrote(e, 5)
        os.kill(follower.pid, how)
        asked.append(asyncio.ensure_future(e.generate(ask(prompt(2, 9, 50), key=2, n=200))))
        said = "SIGKILL" if how == signal.SIGKILL else "gives no sign of life"
        ended = await asyncio.gather(*asked, return_exceptions=True)
        # whole ones ended before the signal, or while a stopped rank went on to tell its stacks
        errors = [one for one in ended if not (isinstance(one, Completion) and len(one.tokens) == 200)]
        for error in errors:
            assert isinstance(error, EngineError) and "worker engine-rank-1" in str(error) and said in str(error)
        assert errors or how == signal.SIGSTOP
        async with asyncio.timeout(30):
            while not made.ended:
                await asyncio.sleep(0.05)
        with pytest.raises(EngineError, match="cannot go on"):
            await e.generate(ask(PROBE))
        with pytest.raises(EngineError, match="cannot go on"):
            await e.score(ask(PROBE))

    try:
        asyncio.run(main())
    finally:
        made.close()
    assert len(made.ended) == 1 and "worker engine-rank-1" in made.ended[0]
    assert not alive(follower.pid)


# -- whole runs ----------------------------------------------------------------------------------


RUN = {"place__kind": "split", "loop__warmup__steps": 0, "loop__steps": 2, "place__patience": 10.0}


def followers(folder):
    """Processes whose output is the log of a follower in this run's folder."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            out = os.readlink(f"/proc/{pid}/fd/1")
            if out.startswith(str(folder)) and "-rank-" in out:
                found.append(int(pid))
    return found


def test_a_run_writes_and_learns_what_it_does_with_one_process(tmp_path):
    run(tmp_path / "one", **RUN)
    run(tmp_path / "two", **RUN, place__engines={"tp": 2})
    one, two = (check(tmp_path / name, staleness=0, total=2) for name in ("one", "two"))
    assert [row["tokens"] for row in one] == [row["tokens"] for row in two]
    assert all(e["probe_gap"] < 1e-5 for e in events(tmp_path / "two", "Synced"))
    a, b = (final(tmp_path / name) for name in ("one", "two"))
    assert all(torch.allclose(a[name], b[name], atol=1e-5) for name in a if name.startswith("model"))
    assert not followers(tmp_path)


def test_a_run_goes_on_when_the_process_of_its_prompts_is_killed(tmp_path):
    hit = []

    def strike(event):
        if isinstance(event, GroupFinished) and not hit:
            hit.extend(followers(tmp_path))
            for pid in hit:
                os.kill(pid, signal.SIGKILL)

    stop = subscribe(strike)
    try:
        run(tmp_path, **RUN, place__engines={"prefill": True})
    finally:
        stop()
    check(tmp_path, staleness=0, total=2)
    said = [e["message"] for e in events(tmp_path, "Warned")]
    assert len(hit) == 1 and any("worker engine-0-rank-1" in text and "started again (1 of" in text for text in said)
    assert not followers(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"place__kind": "shared"}, 'needs devices of its own: set place.kind = "split"'),
        ({"model__adapter": {"kind": "lora"}}, "takes whole weights: drop model.adapter"),
        ({"engine__numerics": "aligned"}, 'set engine.numerics = "fast"'),
        ({"engine__compile": True}, "set engine.compile = false"),
        ({"sync__kind": "delta"}, 'sync.kind = "delta" is none of them'),
        ({"place__cluster": "ray"}, 'place.cluster = "ray" has them anywhere'),
    ],
)
def test_recipes_that_cannot_be_are_refused_by_name(tmp_path, changes, said):
    with pytest.raises(ConfigError, match=f"place.engines.tp = 2 .*{said}"):
        run(tmp_path, **{**RUN, "place__engines": {"tp": 2}, **changes})


# -- rondel serve --------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", ["--tp", "--dp"])
def test_a_server_of_two_processes(tmp_path, axis):
    """Its follower reads its part from the folder alone, experts apart; weights come from another folder; it ends with its
    follower.
    """
    pytest.importorskip("openai")
    from kits.serve import Server, until

    loaded = whole("mixtral")
    later = Publisher(twin(loaded))
    later.train()
    for name, model in (("first", loaded), ("second", later.loaded)):
        save_model(model, tmp_path / name)
    server = Server(tmp_path / "first", tmp_path, axis, "2", "--ep", "2", "--kv-pages", "512")
    try:
        for number, model in enumerate((loaded, later.loaded)):
            if number:
                server.ok("/update_weights_from_disk", model_path=str(tmp_path / "second"), weight_version="7")
            told = server.ok(
                "/generate",
                input_ids=PROBE,
                sampling_params={"temperature": 0, "max_new_tokens": 12, "ignore_eos": True},
            )
            one = asyncio.run(engine(twin(model)).generate(ask(PROBE, n=12, temperature=0)))
            assert told["output_ids"] == one.tokens
        [nursery] = [pid for pid in children(server.process.pid) if children(pid)]
        [follower] = children(nursery)
        os.kill(follower, signal.SIGKILL)
        until(lambda: server.process.poll() is not None, 30)
        assert server.process.poll() == 1 and "worker engine-rank-1" in server.said() and "SIGKILL" in server.said()
        until(lambda: not alive(nursery), 10)
    finally:
        server.stop()
