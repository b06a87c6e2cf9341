"""An engine whose pictures another process encodes: it writes what one process writes, and nobody waits for a picture but
who looks at it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kits import engine as plain
from kits.engine import all_of, engine, idle, prompt, twin, watched
from kits.engine_ranks import EncodedEngines, same_answers
from kits.runs import check, events, final
from kits.sweeps import covering
from kits.sync import Publisher, wrote
from kits.vision import MUTUAL, ask, image, model, picture_requests, stream
from kits.workers import children
from rondel.assemble import train
from rondel.assemble.engine_encoder import EngineEncoder
from rondel.assemble.format_refusals import refuse_formats
from rondel.assemble.refusals import _check_engine_ranks
from rondel.assemble.rows import rows_of
from rondel.assemble.served_engine import ServerSettings, open_engine
from rondel.core.config.job import Job
from rondel.core.config.place import PlaceConfig
from rondel.core.errors import ConfigError, EngineError, SyncError, UserError
from rondel.generate.engine.builtin import encoder_client
from rondel.generate.pictures import url_of
from rondel.models import vision
from rondel.models.save import save_model
from rondel.sync.from_ipc import FromIpc
from rondel.sync.from_tensor import FromTensor
from rondel.sync.update import WeightUpdate

pytestmark = pytest.mark.slow
KIND = "qwen2_5_vl"
RECIPE = Path(__file__).parents[2] / "recipes" / "vision.toml"


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    made = EncodedEngines(tmp_path_factory.mktemp("encoder"))
    yield made
    made.close()
    assert made.ended == []


@pytest.fixture
def of(engines):
    """A fresh engine of one kind, and its own trainer's model."""
    engines.held, engines.asked = None, []
    yield lambda kind=KIND, **settings: (watched(engines.of(kind, **settings)), model(kind))
    assert engines.held is None


# towers of gemma3 and smolvlm have no path of their own here; features between layers, and tokens that see each other, have
@pytest.mark.parametrize("kind", covering([KIND, "qwen3_vl", "gemma3", MUTUAL, "smolvlm"], [KIND, "qwen3_vl", MUTUAL]))
def test_tokens_and_features_are_those_of_one_process(of, kind):
    e, m = of(kind, prefill_tokens=7)
    lead, one = e.runner.eyes.encoder, engine(m, prefill_tokens=7)

    async def scenario(e):
        told = await all_of(e, picture_requests(m)) + await all_of(e, picture_requests(m))
        idle(e)
        return told

    same_answers(asyncio.run(scenario(e)), asyncio.run(scenario(one)), cached=False)
    assert (lead.encoded, e.runner.eyes.looked) == (2, 0), "each picture once, and none here"

    async def features_of(picture):
        return await asyncio.wrap_future(lead.request_features(picture))

    for picture in (image(m, 1), image(m, 5, 3, 4)):
        theirs = asyncio.run(features_of(picture))
        with torch.inference_mode():
            ours = m.encode_images([picture])
        assert torch.equal(theirs.main, ours.main) and len(theirs.deep) == len(ours.deep)
        assert all(map(torch.equal, theirs.deep, ours.deep)), "bit for bit"


def test_others_decode_while_a_picture_is_encoded(of, engines):
    """The encoder stands still: text and a known picture are answered to the end; then whoever waits is."""
    e, m = of()
    [new, known] = [ask(*stream(m, 3, image(m, i), 4, seed=i), key=i, n=6) for i in (7, 8)]
    text = plain.ask(prompt(1, 9), key=3, n=40)

    async def scenario():
        first = await e.generate(known)
        steps = e.account.counts["steps"]
        engines.held = []
        waits = asyncio.ensure_future(e.generate(new))
        others = await all_of(e, [text, replace(known, key=9)])
        assert e.account.counts["steps"] - steps >= 40 and not waits.done()
        assert [len(engines.held), e.scheduler.running, [w.request for w in e.scheduler.waiting]] == [1, [], [new]]
        assert e.serving.has_stopped, "no step is taken for nobody"
        engines.let_go()
        return [first, *others, await waits]

    ours = asyncio.run(scenario())
    theirs = asyncio.run(all_of(engine(m), [known, text, replace(known, key=9), new]))
    same_answers(ours, theirs, cached=False)
    idle(e)


def test_pictures_are_encoded_while_their_request_waits_for_a_place(of, engines):
    e, m = of(max_running=1)
    text, looks = plain.ask(prompt(1, 9), key=3, n=30), ask(*stream(m, 3, image(m, 5), 4), key=4)

    async def scenario():
        runs = asyncio.ensure_future(e.generate(text))
        await wrote(e, 2)
        waits = asyncio.ensure_future(e.generate(looks))
        ahead = e.runner.eyes.encoder
        while not ahead.encoded or not all(f.done() for f in ahead._features.values()):
            await asyncio.sleep(0)
        assert not runs.done() and e.scheduler.waiting
        return [await runs, await waits]

    same_answers(asyncio.run(scenario()), asyncio.run(all_of(engine(m), [text, looks])), cached=False)


def test_features_that_are_held_have_a_bound(of, monkeypatch):
    """More pictures than there is room for: one request after the other has its own, and all are answered."""
    e, m = of()
    lead = e.runner.eyes.encoder
    size = 8 * lead._cell_bytes
    monkeypatch.setattr(encoder_client, "ROOM", size)
    requests = [ask(*stream(m, 2, image(m, 2 * i), 3, image(m, 2 * i + 1), 4), key=i, n=3) for i in range(6)]
    most, take = [], lead.request_features

    def counted(picture):
        found = take(picture)
        most.append(lead._bytes)
        return found

    lead.request_features = counted
    same_answers(asyncio.run(all_of(e, requests)), asyncio.run(all_of(engine(m), requests)), cached=False)
    assert lead.encoded == 12 and max(most) == size
    assert lead.has_room([]) and (lead._bytes, lead._unanswered) == (0, 0), "all is given back"


def test_who_leaves_while_a_picture_is_encoded(of, engines):
    """Aborted, cancelled, and kept over a pause with sleep: pages and features are given back."""
    e, m = of()
    requests = [ask(*stream(m, 3, image(m, 20 + i), 4, seed=i), key=i) for i in range(4)]
    lead = e.runner.eyes.encoder

    async def scenario():
        engines.held = []
        asked = [asyncio.ensure_future(e.generate(r)) for r in requests]
        while len(engines.held) < 4:
            await asyncio.sleep(0)
        assert await e.abort(lambda r: r.key == 0) == 1
        asked[1].cancel()
        await asyncio.wait(asked[:2])
        await e.pause("hold")
        await e.sleep(("weights", "kv_cache"))
        await e.wake(("weights", "kv_cache"))
        engines.let_go()
        await e.resume()
        told = [await asked[0], *await all_of(e, requests[1:2]), *await asyncio.gather(*asked[2:])]
        engines.held = []
        late = asyncio.ensure_future(e.generate(ask(*stream(m, 3, image(m, 30), 4), key=5)))
        while not engines.held:
            await asyncio.sleep(0)
        await e.pause("abort")
        await e.resume()
        assert ((await late).finish_reason, (await late).tokens) == ("abort", [])
        engines.let_go()
        return told

    first, *told = asyncio.run(scenario())
    assert (first.finish_reason, first.tokens) == ("abort", [])
    same_answers(told, asyncio.run(all_of(engine(m), requests[1:])), cached=False)
    idle(e)
    asyncio.run(e.generate(requests[0]))  # what came too late was told to a loop that has ended
    assert lead.has_room([]) and lead._bytes == 0


# -- weights -------------------------------------------------------------------------------------


def update_of(trainer):
    return WeightUpdate(trainer.transport, probe=[], score=None, tolerance=1e-4, moved=lambda: True)


@pytest.mark.parametrize("way", [FromIpc, FromTensor])
def test_no_feature_outlives_its_weights(of, engines, way):
    """An update while one picture is encoded, another one waits encoded for a place, and a third one is seen in part."""
    transport = way()
    e, m = of(max_running=1, prefill_tokens=8, transports={"ipc": FromIpc()} if way is FromIpc else {})
    trainer, lead = Publisher(twin(m), transport=transport), e.runner.eyes.encoder
    update = update_of(trainer)
    long = ask(*stream(m, 3, image(m, 1), 12, image(m, 2), 5), key=1)
    ready, late = (ask(*stream(m, 2, image(m, i), 4), key=i) for i in (3, 4))
    text = plain.ask(prompt(1, 9), key=5, n=6)

    async def scenario(e, trainer, update):
        asked = [asyncio.ensure_future(e.generate(long))]
        while e.account.counts["steps"] < 1:
            await asyncio.sleep(0)
        await e.pause("hold")
        begun = e.scheduler.running[0].computed_tokens
        assert 0 < begun < 20, "its second picture is not computed"
        asked += [asyncio.ensure_future(e.generate(request)) for request in (ready, late, text)]
        while len(e.scheduler.waiting) < 3:
            await asyncio.sleep(0)
        if (ahead := e.runner.eyes.encoder) is not None:
            ahead.ask_ahead([e.scheduler.waiting[0].gaze.ahead])
            while not all(f.done() for f in ahead._features.values()):
                await asyncio.sleep(0)
            engines.held = []
            ahead.ask_ahead([live.gaze.ahead for live in e.scheduler.waiting if live.gaze])
            assert len(engines.held) == 1
        trainer.train()
        assert await update(trainer, e) == 1
        if engines.held is not None:
            engines.let_go()
        await e.resume()
        return begun, await asyncio.gather(*asked)

    begun, ours = asyncio.run(scenario(e, trainer, update))
    one = engine(twin(m), max_running=1, prefill_tokens=8)
    again = Publisher(twin(m))
    same = asyncio.run(scenario(one, again, update_of(again)))
    assert begun == same[0]
    same_answers(ours, same[1], cached=False)
    assert lead.updates == 1 and lead.encoded == 7, "four, one of which came too late, and three anew"
    assert e.runner.eyes.looked == 0
    idle(e)
    transport.close()


def test_a_drain_ends_what_has_begun(of, engines):
    """A prompt that an update has cut in two waits for its second picture, and the drain for its answer."""
    e, m = of(prefill_tokens=8)
    trainer = Publisher(twin(m), transport=FromTensor())
    long = ask(*stream(m, 3, image(m, 1), 12, image(m, 2), 5), key=1)

    async def scenario():
        asked = asyncio.ensure_future(e.generate(long))
        while e.account.counts["steps"] < 1:
            await asyncio.sleep(0)
        await e.pause("hold")
        trainer.train()
        assert await update_of(trainer)(trainer, e) == 1
        engines.held = []
        await e.resume()
        late = asyncio.ensure_future(e.generate(plain.ask(prompt(1, 9))))
        drained = asyncio.ensure_future(e.pause("drain"))
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(engines.held) == 1 and not drained.done()
        engines.let_go()
        await drained
        assert asked.done() and len((await asked).tokens) == 8 and e.state == "held"
        await e.resume()
        await late

    asyncio.run(scenario())
    idle(e)


def test_a_frozen_tower_does_not_travel_and_a_failed_update_leaves_the_old_one(of, engines):
    e, m = of(transports={"ipc": FromIpc()})
    trainer, lead = Publisher(twin(m), transport=FromIpc()), e.runner.eyes.encoder
    update, send = update_of(trainer), engines.send
    looks = ask(*stream(m, 3, image(m, 1), 6), key=1)

    def lie(verb, shapes, digests, path):
        first = min(digests)
        return send(verb, shapes, {**digests, first: "0" * 32}, path)

    async def main():
        before = await e.generate(looks)
        tower = {id(p) for p in vision.vision_tower(trainer.loaded.model).parameters()}
        with torch.no_grad():
            for p in trainer.loaded.model.parameters():
                p.mul_(1 if id(p) in tower else 1.1)
        trainer.version = 1
        assert await update(trainer, e) == 1
        assert engines.asked == ["encode", "commit"], "nothing of the tower is new"
        assert (await e.generate(looks)).tokens == (await engine(twin(trainer.loaded)).generate(looks)).tokens
        assert engines.asked[2:] == ["encode"], "yet nothing is kept over an update"
        held = await e.generate(looks)
        trainer.train()
        engines.send = lambda verb, *args: lie(verb, *args) if verb == "stage" else send(verb, *args)
        with pytest.raises(SyncError, match="1 tensors came to the encoder with other bits than were sent"):
            await update(trainer, e)
        engines.send = send
        assert e.version == 1 and (await e.generate(looks)).tokens == held.tokens
        assert await update(trainer, e) == 2 == e.version and lead.updates == 2
        told = await e.generate(looks)
        assert told.tokens == (await engine(twin(trainer.loaded)).generate(looks)).tokens
        assert told.logprobs != before.logprobs
        assert e.runner.eyes.looked == 0

    asyncio.run(main())
    trainer.transport.close()


# -- what cannot be, and what ends --------------------------------------------------------------


def test_what_does_not_combine_is_refused():
    for sizes, said in (
        ({"encoders": 1, "tp": 2, "dp": 2, "ep": 2}, r"engines: tp = 2 with dp = 2 is not supported"),
        ({"encoders": 1, "tp": 2, "ep": 3}, r"ep = 3 with tp = 2: experts lie apart over all processes"),
        ({"encoders": 1, "prefill": True}, r"prefill = true with encoders = 1 is not supported"),
        ({"encoders": 2}, r"less than or equal to 1"),
    ):
        with pytest.raises(ValueError, match=said):
            PlaceConfig(kind="split", engines=sizes)
    place = PlaceConfig(kind="split", engines={"encoders": 1})
    assert (place.engine_processes, place.engine_encoders, place.engine_sizes) == (2, 1, "encoders = 1")
    place = PlaceConfig(kind="split", engines={"encoders": 1, "tp": 2, "ep": 2})
    assert (place.engine_processes, place.engine_sizes) == (3, "tp = 2, encoders = 1") and place.engine_experts_apart
    for served, said in (
        ({"tp": 2, "ep": 3}, "--ep 3 with --tp 2"),
        ({"tp": 2, "compile": True, "device": "cpu"}, "--compile with --tp 2 --encoders 1"),
        ({"numerics": "aligned"}, "leave out --tp, --dp, --encoders and --compile"),
        ({"compile": True, "device": "cpu"}, "--compile with --encoders 1"),
    ):
        with pytest.raises(UserError, match=said), ExitStack() as ends:
            open_engine("nowhere", ServerSettings(encoders=1, **served), ends)
    apart = {"place.kind": "split", "place.engines": {"encoders": 1}}
    for changes, said in (
        ({"place.kind": "shared"}, 'needs devices of its own: set place.kind = "split"'),
        ({"model.adapter": {"kind": "lora"}}, "takes whole weights: drop model.adapter"),
        ({"engine.numerics": "aligned"}, 'set engine.numerics = "fast"'),
        ({"engine.compile": True}, "set engine.compile = false"),
        ({"run.record": True}, "set run.record = false"),
    ):
        with pytest.raises(ConfigError, match=rf"place\.engines\.encoders = 1 .*{said}"):
            _check_engine_ranks(Job.read(RECIPE, {**apart, **changes}))
    job = Job.read(RECIPE, {**apart, "model.format": {"engine": "fp8"}})
    with pytest.raises(ConfigError, match=r'encoders = 1: weights in "fp8" do not reach the tower.*Leave one of them'):
        refuse_formats(job, rows_of(job))


def test_a_model_of_text_is_refused_before_it_is_loaded(engines):
    e = EngineEncoder.__new__(EngineEncoder)
    e.cluster, e.ranks = ExitStack(), None
    with pytest.raises(
        ConfigError, match=r"the model reads text alone\. Leave out encoders, or take a vision-language"
    ):
        e.load({"random": "llama"}, "float32", engines.device)


def test_an_encoder_that_is_killed_is_named(tmp_path):
    made = EncodedEngines(tmp_path, patience=5.0)
    e, m = made.of(KIND), model()

    async def main():
        text = asyncio.ensure_future(e.generate(plain.ask(prompt(1, 9), n=400)))
        await wrote(e, 3)
        made.held = []
        looks = asyncio.ensure_future(e.generate(ask(*stream(m, 3, image(m, 1), 4))))
        while not made.held:
            await asyncio.sleep(0)
        os.kill(made.encoder.worker.pid, signal.SIGKILL)
        while not made.ended:
            await asyncio.sleep(0)
        with pytest.raises(EngineError, match=r"no picture is encoded any more: worker engine-encoder .*SIGKILL"):
            await e.generate(ask(*stream(m, 3, image(m, 2), 4)))
        made.held[0][0].set_exception(EngineError(made.encoder.worker.fate))
        for error in await asyncio.gather(looks, text, return_exceptions=True):
            assert isinstance(error, EngineError) and "worker engine-encoder" in str(error) and "SIGKILL" in str(error)

    try:
        asyncio.run(main())
    finally:
        made.close()
    assert len(made.ended) == 1 and "engine engine cannot go on: worker engine-encoder" in made.ended[0]


SMALL = {
    "place.kind": "split", "place.threads": 1, "model.vision": {"tower": "trained"}, "loop.steps": 2,
    "loop.warmup.steps": 0, "loop.groups_per_step": 4, "algo.group_size": 4, "task.data.size": 24, "task.data.holdout": 4,
    "run.sinks": [], "run.checkpoint.every": 0,
}  # fmt: skip


SIZES = [(1,), (2,)]  # processes of the language model beside the encoder


@pytest.mark.parametrize("tp", covering(SIZES, SIZES[1:]))
def test_a_run_with_pictures_learns_what_it_does_with_one_process(tmp_path, tp):
    """Its tower learns, too: every update goes on to the encoder."""
    for name, engines in (("one", {}), ("two", {"tp": tp, "encoders": 1})):
        changes = {"run.folder": str(tmp_path / name), "place.engines": engines}
        train(Job.read(RECIPE, {**SMALL, **changes}), quiet=True)
    one, two = (check(tmp_path / name, staleness=0, total=2) for name in ("one", "two"))
    assert [row["tokens"] for row in one] == [row["tokens"] for row in two] and all(row["media"] for row in two)
    assert all(e["probe_gap"] < 1e-5 for e in events(tmp_path / "two", "Synced"))
    a, b = (final(tmp_path / name) for name in ("one", "two"))
    assert any("visual" in name for name in a)
    assert all(torch.allclose(a[name], b[name], atol=1e-5) for name in a if name.startswith("model"))


@pytest.mark.parametrize("tp", covering(SIZES, SIZES[1:]))
def test_a_server_with_an_encoder(tmp_path, tp):
    """It answers about pictures as one process does, takes weights from a folder, and ends with its encoder."""
    pytest.importorskip("openai")
    from kits.serve import Server, until

    m = model()
    later = Publisher(twin(m))
    later.train()
    for name, loaded in (("first", m), ("second", later.loaded)):
        save_model(loaded, tmp_path / name)
    tokens, media = stream(m, 3, image(m, 1), 2, image(m, 2, 2, 3), 4)
    given = {"input_ids": tokens, "image_data": [url_of(place.image) for place in media]}
    server = Server(tmp_path / "first", tmp_path, "--tp", str(tp), "--encoders", "1", "--kv-pages", "512")
    try:
        for number, loaded in enumerate((m, later.loaded)):
            if number:
                server.ok("/update_weights_from_disk", model_path=str(tmp_path / "second"), weight_version="7")
            how = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
            told = server.ok("/generate", **given, sampling_params=how)
            [one] = asyncio.run(all_of(engine(twin(loaded)), [ask(tokens, media, temperature=0)]))
            assert told["output_ids"] == one.tokens
        [nursery] = [pid for pid in children(server.process.pid) if children(pid)]
        os.kill(min(children(nursery)), signal.SIGKILL)  # the encoder is started first
        until(lambda: server.process.poll() is not None, 30)
        assert server.process.poll() == 1 and "worker engine-encoder" in server.said() and "SIGKILL" in server.said()
    finally:
        server.stop()
