"""Law 6 on every way that weights travel: the same bits arrive, or the old version
goes on serving, or the engine refuses.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import gc
import json
import os
import random
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from kits.engine import SIZE, ask, engine, idle, prompt, tiny, twin
from kits.families import FAMILIES
from kits.sweeps import covering
from kits.sync import Publisher, wrote
from kits.train import inline
from kits.transports import bits, left_behind, remote, same
from kits.vision import EYES
from kits.vision import model as looking
from rondel.core.errors import EngineError, StalledError, SyncError
from rondel.core.events import Synced, subscribe
from rondel.core.types import Abort, Begin, Commit, Manifest, Route, TensorInfo
from rondel.generate.engine.server import broadcast
from rondel.generate.engine.server.fields import RequestFields
from rondel.models import names
from rondel.models.compilation import CompiledModel
from rondel.models.load import load_model
from rondel.sync import delta, from_disk, from_distributed, from_ipc
from rondel.sync.delta import Delta
from rondel.sync.from_disk import FromDisk
from rondel.sync.from_distributed import FromDistributed
from rondel.sync.from_ipc import FromIpc
from rondel.sync.from_tcp import FromTcp
from rondel.sync.from_tensor import FromTensor
from rondel.sync.update import WeightUpdate
from rondel.system.http.response import RequestRefusal
from rondel.train.parallel import SingleRank
from rondel.train.settings import TrainSettings
from rondel.train.step import LocalTrainer

KINDS = ["tensor", "ipc", "named", "tcp", "disk", "delta", "distributed"]
BESIDE = ["ipc", "named", "tcp", "disk", "delta"]


def transport(kind, folder, **knobs):
    if kind in ("disk", "delta"):
        return {"disk": FromDisk, "delta": Delta}[kind](folder / "weights", **knobs)
    if kind == "distributed":
        return FromDistributed(**{"bucket": 20_000, "deadline": 20.0, **knobs})
    if kind == "tcp":
        return FromTcp(**{"bucket": 20_000, "deadline": 20.0, **knobs})
    return {"tensor": FromTensor, "ipc": FromIpc, "named": lambda: FromIpc(named=True)}[kind](**knobs)


def ends(kind, folder, loaded, **knobs):
    """-> (trainer, engine, update): two models in one process, with an end of the transport each."""
    route = {"named": "ipc"}.get(kind, kind)
    trainer = Publisher(twin(loaded), transport=transport(kind, folder, **knobs))
    e = engine(loaded, transports={route: transport(kind, folder, **knobs)}, run=in_thread)
    return (
        trainer,
        e,
        WeightUpdate(trainer.transport, probe=[], score=None, tolerance=1e-4, moved=lambda: True, deadline=30.0),
    )


async def in_thread(f, *args):
    return await asyncio.to_thread(f, *args)


def close(trainer, e):
    trainer.transport.close()
    for t in e.arrivals._transports.values():
        t.close()


MODELS = {
    "llama": tiny,
    "tied": lambda: tiny("gemma2", **SIZE, head_dim=16),
    "bf16": lambda: load_model(
        {"random": "llama", **SIZE, "vocab_size": 101, "intermediate_size": 77, "seed": 4}, dtype="bfloat16"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(  # every transport with tensors of two bytes and odd sizes; tied ones once
    ("kind", "name"),
    covering(product(KINDS, MODELS), [*product(KINDS, ["bf16"]), ("disk", "tied")]),
)
def test_the_same_bits_arrive(kind, name, tmp_path):
    model = MODELS[name]()
    trainer, e, sync = ends(kind, tmp_path, twin(model))

    async def main():
        for version in range(1, 4):
            trainer.train()
            assert await sync(trainer, e) == version == e.version
            assert same(bits(trainer.loaded), bits(e.loaded))
            truth = await engine(twin(trainer.loaded)).generate(ask(prompt(2, 14)))
            told = await e.generate(ask(prompt(2, 14)))
            assert (told.tokens, told.logprobs, set(told.versions)) == (truth.tokens, truth.logprobs, {version})
        idle(e)

    asyncio.run(main())
    close(trainer, e)


APART = ["ipc", "distributed", "named", "tcp", "disk", "delta"]


@pytest.mark.parametrize("kind", covering(APART, APART[:4]))  # files are the same to every process
@pytest.mark.slow
def test_two_engines_in_processes_of_their_own(kind, tmp_path):
    """And after the end no process, port or segment is left."""
    before = left_behind()
    route = {"named": "ipc"}.get(kind, kind)
    trainer = Publisher(tiny(), transport=transport(kind, tmp_path))
    sync = WeightUpdate(trainer.transport, probe=[], score=None, tolerance=1e-4, moved=lambda: True, deadline=60.0)
    with (
        remote(tiny, route, transport(kind, tmp_path)) as (a, _),
        remote(tiny, route, transport(kind, tmp_path)) as (b, _),
    ):

        async def main():
            for version in (1, 2):
                trainer.train()
                assert await sync(trainer, a, b) == version
                for e in (a, b):
                    assert same(bits(trainer.loaded), await e.bits())
                    status = await e.status()
                    assert (status.version, status.state, status.root) == (version, "serving", sync.root)
                    assert set((await e.generate(ask(prompt(1, 9)))).versions) == {version}

        asyncio.run(main())
        assert (left_behind() != before) == (kind in ("named", "distributed", "tcp"))
    trainer.transport.close()
    gc.collect()
    assert left_behind() == before


# -- beside: whatever is wrong, the old version goes on serving --------------------------------------


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 4
    path.write_bytes(raw)


def spoil(kind, what, route, transport):
    """One thing wrong with the published data. -> the route."""
    r = random.Random(what)
    if kind == "tcp":
        [address], server = route.data.segments, transport._server
        pieces = server._last[1]
        if what == "flipped":
            pieces[3].view(torch.uint8).view(-1)[r.randrange(pieces[3].nbytes)] ^= 4
        elif what == "truncated":
            server._find_boxes = partial(cut_off, server, server._find_boxes)
        elif what == "reordered":
            one, two = [i for i, piece in enumerate(route.data.pieces[0]) if "down_proj" in piece.name]
            pieces[one], pieces[two] = pieces[two], pieces[one]
        elif what == "another":
            address = replace(address, number=address.number - 1)
        elif what == "gone":
            address = replace(address, key=bytes(32))
        return replace(route, data=replace(route.data, segments=(address,)))
    if kind in ("ipc", "named"):
        fd = os.open(route.data.path, os.O_RDWR)
        size = os.fstat(fd).st_size
        if what == "flipped":
            at = r.randrange(from_ipc.HEAD, size - 64)
            old = os.pread(fd, 1, at)
            os.pwrite(fd, bytes([old[0] ^ 4]), at)
            if at in range(size - 64, size):
                pytest.skip("padding")
        elif what == "truncated":
            os.ftruncate(fd, size - 100)
        elif what == "reordered":
            os.pwrite(fd, os.pread(fd, 512, from_ipc.HEAD + 512) + os.pread(fd, 512, from_ipc.HEAD), from_ipc.HEAD)
        elif what == "another":
            os.pwrite(fd, (77).to_bytes(8, "little"), 0)
        os.close(fd)
        return replace(route, data=replace(route.data, path="/proc/self/fd/999")) if what == "gone" else route
    if kind == "disk":
        place = Path(route.data)
        file = next(place.glob("*.safetensors"))
        if what == "flipped":
            flip(file, file.stat().st_size - 1000)
        elif what == "truncated":
            file.write_bytes(file.read_bytes()[:-100])
        elif what == "reordered":
            held = load_file(file)
            one, two = [n for n in held if "down_proj" in n]
            save_file({**held, one: held[two], two: held[one]}, file)
        elif what == "another":
            held = load_file(file)
            name = next(iter(held))
            save_file({**held, name: held[name].double()}, file)
        elif what == "gone":
            file.unlink()
        return route
    path, size = route.data
    if what == "flipped":
        flip(Path(path), size // 3)
    elif what == "truncated":
        Path(path).write_bytes(Path(path).read_bytes()[:-100])
    elif what == "reordered":
        raw = Path(path).read_bytes()
        Path(path).write_bytes(raw[5000:9000] + raw[:5000] + raw[9000:])
    elif what == "another":
        return replace(route, base="f" * 32)
    elif what == "gone":
        Path(path).unlink()
    return route


def cut_off(server, find, number, boxes):
    """The first box, and the connection ends, once."""
    server._find_boxes = find
    yield find(number, boxes)[0]
    raise OSError


FAULTS = ["flipped", "truncated", "reordered", "another", "gone"]


@pytest.mark.parametrize(  # all of them in memory; in files what differs there
    ("kind", "what"),
    covering(
        product(BESIDE, FAULTS),
        [*product(["ipc", "tcp"], FAULTS), *product(["disk"], ["flipped", "another", "gone"]), ("delta", "flipped")],
    ),
)
@pytest.mark.slow
def test_faulty_data_leaves_the_old_version_serving(kind, what, tmp_path):
    trainer, e, sync = ends(kind, tmp_path, tiny())
    request = ask(prompt(1, 12), key=5, n=30)

    async def main():
        trainer.train()
        await sync(trainer, e)
        before = {n: t.clone() for n, t in bits(e.loaded).items()}
        truth = await engine(twin(trainer.loaded)).generate(request)
        publish, trainer.spoils = trainer.publish, True

        async def faulty(route):
            manifest, route = await publish(route)
            return manifest, spoil(kind, what, route, trainer.transport) if trainer.spoils else route

        trainer.publish = faulty
        trainer.train()
        running = asyncio.create_task(e.generate(request))
        await wrote(e, 3)
        with pytest.raises(SyncError):
            await sync(trainer, e)
        done = await running
        assert (done.tokens, done.logprobs, set(done.versions)) == (truth.tokens, truth.logprobs, {1})
        assert (await e.status()).state == "serving" and e.version == 1 and same(before, bits(e.loaded))
        trainer.spoils = False
        trainer.train()
        assert await sync(trainer, e) == 3 and same(bits(trainer.loaded), bits(e.loaded))
        idle(e)

    asyncio.run(main())
    close(trainer, e)


@pytest.mark.slow
@pytest.mark.parametrize("kind", BESIDE)
def test_messages_repeated_or_missing(kind, tmp_path):
    trainer, first, _ = ends(kind, tmp_path, tiny())
    kind = {"named": "ipc"}.get(kind, kind)

    async def main():
        trainer.train()
        manifest, route = await trainer.publish(await trainer.transport.plan_route(trainer, [first]))
        begin, commit = Begin(manifest, beside=True), Commit(1, manifest.root)
        for messages, says in [
            ((route,), "data without begin"),
            ((commit,), "commit without begin"),
            ((begin, commit), "commit without data"),
            ((begin, route, route), "came twice"),
            ((begin, replace(route, kind="pigeon")), f"weights come by 'pigeon'; this engine takes them by .*{kind}"),
            ((begin, route, replace(commit, version=2)), "version 2 with root .* is committed, but 1"),
            ((Begin(replace(manifest, tensors=manifest.tensors[1:]), beside=True),), "1 tensors are missing"),
            (
                (
                    Begin(
                        replace(manifest, tensors=(replace(manifest.tensors[0], shape=(3,)), *manifest.tensors[1:])),
                        True,
                    ),
                ),
                "another shape",
            ),
        ]:
            e = engine(tiny(), transports={kind: trainer.transport})
            with pytest.raises(SyncError, match=says):
                for message in messages:
                    await e.receive(message)
            # a word without a begin is nobody's update: no one knows what was written
            begun = isinstance(messages[0], Begin)
            assert (await e.status()).state == ("serving" if begun else "refusing") and e.version == 0

    asyncio.run(main())
    close(trainer, first)


def test_an_update_that_nobody_ended_is_no_old_version_to_go_back_to(tmp_path):
    """One wrote over the weights, and no word came that it is over; the next one, beside them, fails."""
    trainer, e, _ = ends("ipc", tmp_path, tiny())

    async def main():
        before = await e.generate(ask(prompt(0, 16)))
        trainer.train()
        manifest = names.build_manifest(trainer.loaded.model, 1)
        await e.receive(Begin(manifest))
        await e.receive(Route("tensor", dict(names.named_weights(trainer.loaded.model))))
        trainer.train()
        manifest, route = await trainer.publish(await trainer.transport.plan_route(trainer, [e]))
        await e.receive(Begin(manifest, beside=True))
        assert (await e.status()).state == "refusing"
        with pytest.raises(EngineError, match="an update that wrote over the weights was not ended"):
            await e.generate(ask(prompt(0, 16)))
        await e.receive(Abort("the trainer ended"))
        with pytest.raises(EngineError, match="an update that wrote over the weights was not ended"):
            await e.generate(ask(prompt(0, 16)))
        for message in (Begin(manifest, beside=True), route, Commit(manifest.version, manifest.root)):
            await e.receive(message)
        after, true = (
            await e.generate(ask(prompt(0, 16))),
            await engine(twin(trainer.loaded)).generate(ask(prompt(0, 16))),
        )
        assert after.tokens == true.tokens != before.tokens

    asyncio.run(main())
    close(trainer, e)


@pytest.mark.parametrize("kind", covering(BESIDE, ["delta"]))
@pytest.mark.slow
def test_the_engine_decodes_until_the_commit(kind, tmp_path):
    """Staged beside, a pause only for the commit; the same tokens as with a pause
    at the same place, versions in order.
    """
    trainer, e, sync = ends(kind, tmp_path, tiny())
    seen = []
    stop = subscribe(lambda event: seen.append(event) if isinstance(event, Synced) else None)

    async def main():
        trainer.train()
        await sync(trainer, e)
        task = asyncio.create_task(e.generate(ask(prompt(3, 10), n=300)))
        await wrote(e, 5)
        trainer.train()
        states, receive = [], e.receive

        async def watched(message):
            states.append((type(message).__name__, e.state))
            return await receive(message)

        e.receive = watched
        assert await sync(trainer, e) == 2
        assert states == [("Begin", "serving"), ("Route", "serving"), ("Commit", "held")]
        done = await task
        assert done.versions == sorted(done.versions) and set(done.versions) == {1, 2} and len(done.tokens) == 300
        idle(e)

    try:
        asyncio.run(main())
    finally:
        stop()
    assert 0 < seen[-1].paused <= seen[-1].seconds and seen[-1].bytes_copied > 0
    close(trainer, e)


@pytest.mark.slow
@pytest.mark.parametrize("kind", covering(["ipc", "disk"], ["ipc"]))
def test_a_compiled_pass_reads_what_the_module_points_to(kind, tmp_path):
    trainer, e, sync = ends(kind, tmp_path, tiny("llama", **SIZE | {"num_hidden_layers": 1}))
    e.runner.hidden = CompiledModel(e.loaded).hidden_states

    async def main():
        before = await e.generate(ask(prompt(4, 12)))
        trainer.train()
        await sync(trainer, e)
        after = await e.generate(ask(prompt(4, 12)))
        truth = await engine(twin(trainer.loaded)).generate(ask(prompt(4, 12)))
        assert before.tokens != after.tokens == truth.tokens and after.logprobs == pytest.approx(
            truth.logprobs, abs=1e-5
        )

    asyncio.run(main())
    close(trainer, e)


@pytest.mark.slow
def test_an_engine_that_starts_late_joins_from_disk(tmp_path):
    trainer, e, sync = ends("disk", tmp_path, tiny(), keep=2)

    async def main():
        for _ in range(4):
            trainer.train()
            await sync(trainer, e)
        late = engine(tiny(), transports={"disk": transport("disk", tmp_path)})
        assert await sync.join(late, *from_disk.newest(tmp_path / "weights")) == 4 == late.version
        assert same(bits(trainer.loaded), bits(late.loaded))
        trainer.train()
        assert await sync(trainer, e, late) == 5 == late.version and same(bits(trainer.loaded), bits(late.loaded))

    asyncio.run(main())
    assert [p.name for p in sorted((tmp_path / "weights").iterdir())] == ["v-000004", "v-000005"]
    modes = {p.stat().st_mode & 0o666 for p in (tmp_path / "weights").rglob("*")}
    assert len(modes) == 1, "an engine of another user reads all of it or nothing"
    (tmp_path / "weights" / "v-000005" / "manifest.json").unlink()  # a version without manifest does not exist
    assert from_disk.newest(tmp_path / "weights")[0].version == 4
    text = (tmp_path / "weights" / "v-000004" / "manifest.json").read_text()
    tree = json.loads(text)
    tree["tensors"][0][3] = "0" * 32
    (tmp_path / "weights" / "v-000004" / "manifest.json").write_text(json.dumps(tree))
    with pytest.raises(SyncError, match="its rows have"):
        from_disk.newest(tmp_path / "weights")
    with pytest.raises(SyncError, match="no version of the weights"):
        from_disk.newest(tmp_path / "empty")
    close(trainer, e)


MIXTURES = {
    "qwen3_moe": {"num_experts_per_tok": 2, "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32},
    "mixtral": {"num_experts_per_tok": 2, "num_local_experts": 4},
    "minimax_m2": {"num_experts_per_tok": 2, "head_dim": 16, "num_local_experts": 4},  # has a buffer that is stored
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    covering(
        [
            *((kind, "qwen3_moe") for kind in ("disk", "delta", "distributed", "ipc")),
            ("disk", "mixtral"),
            ("delta", "minimax_m2"),
        ],
        [("distributed", "qwen3_moe"), ("ipc", "qwen3_moe"), ("disk", "mixtral"), ("delta", "minimax_m2")],
    ),
)
def test_a_mixture_leaves_under_the_names_of_its_checkpoints(kind, name, tmp_path):
    """What other programs read has names, shapes and bits of `save_pretrained`; the engine
    puts the experts where its module has them.
    """
    trainer, e, sync = ends(kind, tmp_path, tiny(name, **(SIZE | MIXTURES[name])))
    heard = []
    begin = e.arrivals.begin_update
    e.arrivals.begin_update = lambda message, version: (heard.append(message.manifest), begin(message, version))

    async def publish(route):
        tensors = names.named_weights(trainer.loaded.model)
        tensors = (
            names.published_tensors(trainer.loaded.model, tensors)
            if trainer.transport.names == "checkpoint"
            else tensors
        )
        return trainer.transport.publish(route, trainer.version, names.describe_tensors(tensors))

    async def send(route):
        tensors = list(names.published_tensors(trainer.loaded.model, names.named_weights(trainer.loaded.model)))
        await asyncio.to_thread(trainer.transport.send, route, tensors)

    trainer.publish, trainer.send = publish, send

    async def main():
        for _ in range(3):
            trainer.train()
            await sync(trainer, e)
            assert same(bits(trainer.loaded), bits(e.loaded))

    asyncio.run(main())
    trainer.loaded.model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    sent = {row.name: (row.shape, row.digest) for row in heard[-1].tensors}
    if kind == "ipc":
        assert sent.keys() == bits(trainer.loaded).keys()
    else:
        assert sent == {n: (tuple(t.shape), names.tensor_digest(t)) for n, t in saved.items()}
    if kind == "disk":
        read = load_file(next((tmp_path / "weights" / "v-000003").glob("*.safetensors")))
        assert same(read, saved)
    close(trainer, e)


@pytest.mark.parametrize(
    "kind",
    [
        "gpt_neox",
        "granitemoe",
        "ernie4_5_moe",
        "deepseek_v3",
        "deepseek_v4",
        "apertus",
        "gpt2",
        "qwen2_5_vl",
        "gemma3_text",
    ],
)
def test_published_tensors_are_those_of_save_pretrained_and_parts_of_the_module(kind, tmp_path):
    loaded = looking(kind) if kind in EYES else load_model({"random": kind, **FAMILIES[kind]}, dtype="bfloat16")
    loaded.model.save_pretrained(tmp_path)
    saved = {name: t for file in tmp_path.glob("*.safetensors") for name, t in load_file(file).items()}
    told = dict(names.published_tensors(loaded.model, names.named_weights(loaded.model)))
    assert told.keys() == saved.keys() and all(
        torch.equal(t, saved[name]) and t.dtype == saved[name].dtype for name, t in told.items()
    )
    own = {t.untyped_storage().data_ptr() for t in loaded.model.state_dict().values()}
    assert all(t.untyped_storage().data_ptr() in own for t in told.values())  # nothing is copied to be named


def test_the_broadcast_endpoint_knows_the_names_of_checkpoints():
    loaded = tiny("qwen3_moe", **(SIZE | MIXTURES["qwen3_moe"]))
    service = SimpleNamespace(engine=SimpleNamespace(loaded=loaded))

    def rows(name, shape):
        return broadcast._announced_tensors(
            service, RequestFields({"names": [name], "dtypes": ["float32"], "shapes": [shape]})
        )

    for name, shape in (
        ("experts.3.gate_proj.weight", [32, 64]),
        ("experts.0.down_proj.weight", [64, 32]),
        ("experts.gate_up_proj", [4, 64, 64]),
    ):
        name = f"model.layers.0.mlp.{name}"
        assert rows(name, shape) == [(name, torch.float32, shape)]
    with pytest.raises(RequestRefusal, match="this model has no tensor"):
        rows("model.layers.0.mlp.experts.4.gate_proj.weight", [32, 64])


def test_shards_are_gathered_once_an_update():
    """The second gathering would move the whole model between all ranks again."""
    gathered = []

    class Two(SingleRank):
        size = 2

        def full_weights(self, model):
            for name, tensor in names.named_weights(model):
                gathered.append(name)
                yield name, tensor

    class Later:
        holds, names = "begin", "checkpoint"

        def publish(self, route, version, weights):
            return Manifest(version, tuple(row for row, _ in weights)), route

        def send(self, route, weights):
            sent.update(weights)

    loaded, sent = tiny(), {}
    trainer = LocalTrainer(loaded, TrainSettings(lr=1e-3, start_probe=0), run=inline, ranks=Two(), transport=Later())
    manifest, _ = asyncio.run(trainer.publish(Route("distributed")))
    asyncio.run(trainer.send(Route("distributed")))
    assert gathered == [name for name, _ in names.named_weights(loaded.model)] and not trainer.publisher.held
    assert {row.name: row.digest for row in manifest.tensors} == {
        name: names.tensor_digest(t) for name, t in sent.items()
    }


@pytest.mark.parametrize("kind", ["disk", "delta"])
def test_a_run_that_was_rolled_back_reads_what_it_publishes(kind, tmp_path):
    """A run that dies at version 17 and goes on from 10: later versions are abandoned,
    and the newest is the one published last.
    """

    def publish(way, *versions):
        for version in versions:
            manifest, route = way.publish(Route(kind), version, rows_of({"a": torch.full((1000,), float(version))}))
            ((_, read),) = way.receive(route, manifest, {"a": torch.zeros(1000)})
            assert read.eq(version).all()

    publish(transport(kind, tmp_path, keep=3), 8, 9, 10, 11, 16, 17)
    (tmp_path / "weights" / ".d-000018.tmp").touch()
    again = transport(kind, tmp_path, keep=3)
    publish(again, 10)
    assert [int(p.name[2:]) for p in sorted((tmp_path / "weights").glob("[dv]-*"))] == [10]
    publish(again, 11, 12, 13)
    assert [int(p.name[2:]) for p in sorted((tmp_path / "weights").glob("[dv]-*"))] == [11, 12, 13]
    if kind == "disk":
        assert from_disk.newest(tmp_path / "weights")[0].version == 13
    else:
        assert not list((tmp_path / "weights").glob(".*"))


@pytest.mark.parametrize("kind", ["disk", "delta"])
def test_a_version_that_could_not_be_written_is_not_in_the_way(kind, tmp_path):
    """A disk that is full has no use for half of one."""
    way, row = transport(kind, tmp_path, keep=3), {"a": torch.ones(1000)}
    way.publish(Route(kind), 1, rows_of(row))

    def stop_in_the_middle():
        yield from rows_of(row)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(SyncError, match="the disk is full"):
        way.publish(Route(kind), 2, stop_in_the_middle())
    assert [int(p.name[2:]) for p in (tmp_path / "weights").iterdir()] == [1]


# -- shared memory -----------------------------------------------------------------------------------


def rows_of(tensors):
    return list(names.describe_tensors(tensors.items()))


def test_two_segments_take_turns_and_none_is_written_while_it_is_read():
    sender, receiver = FromIpc(), FromIpc()
    g = torch.Generator().manual_seed(0)
    held, places = {}, []
    for version in range(1, 9):
        tensors = {"a": torch.randn(1000, generator=g), "b": torch.randn(3, 5, generator=g), "c": torch.zeros(0)}
        manifest, route = sender.publish(Route("ipc"), version, rows_of(tensors))
        places.append(route.data.path)
        held = dict(receiver.receive(route, manifest, {}))  # lets go of the version before the last
        assert all(torch.equal(held[n], tensors[n]) for n in tensors)
    assert len(set(places)) == 2 and places[:2] * 4 == places
    stays = held
    for version in range(9, 13):
        manifest, route = sender.publish(Route("ipc"), version, rows_of({n: t + version for n, t in tensors.items()}))
        places.append(route.data.path)
        held = dict(receiver.receive(route, manifest, {}))
    assert len(set(places)) == 3 and all(torch.equal(stays[n], tensors[n]) for n in tensors), (
        "a segment was written while it was read"
    )
    stays["a"][0] = 7.0  # private: a reader's write is its own
    assert len(sender._segments) == 3
    sender.close(), receiver.close()


def test_a_route_of_another_day():
    sender, receiver = FromIpc(), FromIpc()
    old = None
    for version in range(4):
        manifest, route = sender.publish(Route("ipc"), version, rows_of({"a": torch.full((100,), float(version))}))
        old = old or (manifest, route)
    with pytest.raises(SyncError, match="holds publication 3 by now, and not 1"):
        dict(receiver.receive(old[1], old[0], {}))
    fd = os.open(route.data.path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(SyncError, match="is being written"):
        dict(receiver.receive(route, manifest, {}))
    os.close(fd)
    assert len(dict(receiver.receive(route, manifest, {}))) == 1
    sender.close(), receiver.close()


@pytest.mark.slow
def test_a_read_is_never_torn():
    """A writer that fills segments as fast as it can, a reader of routes that may be old.
    Without lock and number it reads mixtures.
    """
    sender, receiver, routes, stop = FromIpc(), FromIpc(), [], threading.Event()

    def write():
        version = 0
        while not stop.is_set():
            version += 1
            routes.append(
                sender.publish(
                    Route("ipc"), version, [(TensorInfo("a", (200_000,), "int64", ""), torch.full((200_000,), version))]
                )
            )

    def naked(route):
        fd = os.open(route.data.path, os.O_RDONLY)
        raw = torch.frombuffer(bytearray(os.pread(fd, 1_600_000, from_ipc.HEAD)), dtype=torch.int64)
        os.close(fd)
        return raw

    writer = threading.Thread(target=write)
    writer.start()
    good = refused = torn = 0
    until = time.monotonic() + 30
    while time.monotonic() < until and not (good > 20 and torn):
        if not routes:
            continue
        manifest, route = routes[-1]
        if (raw := naked(route)).min() != raw.max():
            torn += 1
        try:
            ((_, tensor),) = receiver.receive(route, manifest, {})
            assert tensor.min() == tensor.max() == manifest.version
            good += 1
        except SyncError:
            refused += 1
    stop.set()
    writer.join()
    assert good > 20 and torn, f"{good} good, {refused} refused, {torn} torn without the lock"
    sender.close(), receiver.close()


# -- delta -------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3000),
    st.floats(0, 1),
    st.sampled_from(["float32", "bfloat16", "float64", "uint8"]),
    st.integers(0, 10**6),
)
def test_decode_undoes_encode(n, share, dtype, seed):
    g = torch.Generator().manual_seed(seed)
    old = delta.view_as_integers((torch.randn(n, generator=g) * 50).to(getattr(torch, dtype)))
    new = torch.where(
        torch.rand(n, generator=g) < share,
        delta.view_as_integers((torch.randn(n, generator=g) * 50).to(getattr(torch, dtype))),
        old,
    )
    blob = delta.encode(old, new)
    assert (blob == b"") == torch.equal(old, new)
    if blob:
        kept = old.clone()
        assert torch.equal(delta.decode(old, blob), new) and torch.equal(old, kept)


def test_a_delta_carries_only_what_changed(tmp_path):
    trainer, e, sync = ends("delta", tmp_path, tiny())
    whole = sum(t.numel() * 4 for t in bits(e.loaded).values())

    async def main():
        sizes = []
        for changed in (10, 10, 0):
            trainer.version += 1
            with torch.no_grad():
                for p in list(trainer.loaded.model.parameters())[:2]:
                    p.view(-1)[torch.randperm(p.numel())[:changed]] += 1.0
            sync.moved = lambda n=changed: n > 0
            await sync(trainer, e)
            sizes.append(e.arrivals.bytes_copied)
            assert same(bits(trainer.loaded), bits(e.loaded))
        return sizes

    first, second, third = asyncio.run(main())
    assert first > whole and third < second < first / 20


@pytest.mark.slow
@pytest.mark.parametrize("lies", [False, True])
def test_a_delta_on_another_base_is_refused(lies, tmp_path):
    """By its root; and if it lies about that, by the digests."""
    trainer, e, sync = ends("delta", tmp_path, tiny())
    other = engine(tiny(), transports={"delta": transport("delta", tmp_path)})

    async def main():
        trainer.train()
        await sync(trainer, e, other)
        trainer.train()
        await sync(trainer, e)  # `other` stays behind
        trainer.train()
        manifest, route = await trainer.publish(Route("delta", base=e.arrivals.root))
        if lies:
            other.arrivals.root = e.arrivals.root
        with pytest.raises(
            SyncError, match="other bits than were sent" if lies else "the data changes weights with root"
        ):
            await other.receive(Begin(manifest, beside=True))
            await other.receive(route)
        assert (await other.status()).state == "serving" and other.version == 1
        other.arrivals.root = "?"
        trainer.train()
        assert await sync(trainer, e, other) == 4  # two bases: the whole travels
        assert same(bits(trainer.loaded), bits(other.loaded)) and same(bits(trainer.loaded), bits(e.loaded))

    asyncio.run(main())
    close(trainer, e)


# -- distributed -------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4000), min_size=1, max_size=40), st.integers(1, 5000))
def test_buckets_hold_everything_once_and_in_order(sizes, most):
    rows = [TensorInfo(str(i), (n,), "uint8", "") for i, n in enumerate(sizes)]
    plan = from_distributed.split_into_buckets(rows, most)
    assert [row for bucket in plan for row in bucket] == rows and all(plan)
    for bucket in plan:
        assert len(bucket) == 1 or sum(row.shape[0] for row in bucket) <= most
        buffer = torch.zeros(sum(map(from_distributed._aligned_size, bucket)), dtype=torch.uint8)
        for _, slot in from_distributed.split_bucket(bucket, buffer):
            assert not slot.any()
            slot += 1
        assert int(buffer.sum()) == sum(row.shape[0] for row in bucket)


@pytest.mark.parametrize("who", ["trainer", "engine"])
def test_who_fails_wakes_the_other_and_the_engine_refuses_until_a_good_update(who, tmp_path):
    trainer, e, sync = ends("distributed", tmp_path, tiny(), deadline=15.0)

    async def main():
        trainer.train()
        await sync(trainer, e)
        send, accept = trainer.send, e.arrivals.accept_tensor

        async def half(route):
            tensors = list(names.named_weights(trainer.loaded.model))
            await asyncio.to_thread(trainer.transport.send, route, tensors[:5])

        def strange(*one):
            accept(*one)
            raise SyncError("no room")

        trainer.send = half if who == "trainer" else send
        e.arrivals.accept_tensor = strange if who == "engine" else accept
        trainer.train()
        began = time.monotonic()
        with pytest.raises((SyncError, StalledError)):
            await sync(trainer, e)
        assert time.monotonic() - began < 14, "somebody waited for its deadline"
        with pytest.raises(EngineError, match="refuses"):
            await e.generate(ask([1, 2, 3]))
        trainer.send, e.arrivals.accept_tensor = send, accept
        trainer.train()
        assert await sync(trainer, e) == 3 and same(bits(trainer.loaded), bits(e.loaded))

    asyncio.run(main())
    close(trainer, e)


@pytest.mark.slow
def test_nobody_waits_for_ever():
    """An engine that waits for a trainer that never sends says so."""
    sender, receiver = FromDistributed(deadline=1.0), FromDistributed(deadline=1.0)
    rows = rows_of({"a": torch.ones(5)})
    manifest, route = sender.publish(Route("distributed", (1, 1)), 1, rows)
    with pytest.raises(StalledError, match=r"an engine receives weights: no answer for 1 s"):
        list(receiver.receive(route, manifest, {"a": torch.zeros(5)}))
    assert not receiver._one.locked()
    sender.close(), receiver.close()


def test_two_updates_at_once_take_turns(tmp_path):
    trainer, e, sync = ends("distributed", tmp_path, tiny())

    async def main():
        trainer.train()
        sync.moved = lambda: False
        assert await asyncio.gather(*(sync(trainer, e) for _ in range(3))) == [1, 1, 1]

    asyncio.run(main())
    close(trainer, e)


def test_an_engine_that_never_answers_is_named():
    class Dumb:
        async def receive(self, message):
            if not isinstance(message, Begin):
                return 0
            await asyncio.sleep(60)

    trainer = Publisher(tiny())
    sync = WeightUpdate(FromTensor(), probe=[], score=None, tolerance=1e-4, deadline=0.2)
    with pytest.raises(StalledError, match=r"engine 0: no answer to begin for 0.2 s"):
        asyncio.run(sync(trainer, Dumb()))


def test_an_empty_manifest_has_a_root():
    assert Manifest(0, ()).root != Manifest(0, (TensorInfo("a", (1,), "uint8", ""),)).root


# -- tcp: each rank serves its own -------------------------------------------------------------------


@pytest.mark.slow
def test_who_does_not_know_the_key_is_told_nothing_and_a_silent_rank_is_named():
    """Neither a wrong key nor none gets a byte of weights; a rank that accepts and says nothing is named."""
    sender, wanted = FromTcp(), {"a": torch.arange(6.0).view(2, 3)}
    manifest, route = sender.publish(Route("tcp"), 1, rows_of(wanted))
    [address] = route.data.segments
    assert address.host == "127.0.0.1" and address.key.hex() not in repr(route)
    assert torch.equal(dict(FromTcp().receive(route, manifest, {}))["a"], wanted["a"])
    forged = replace(route, data=replace(route.data, segments=(replace(address, key=bytes(32)),)))
    with pytest.raises(SyncError, match=f"from a rank of the trainer at 127.0.0.1:{address.port}: "):
        dict(FromTcp().receive(forged, manifest, {}))
    with socket.create_connection((address.host, address.port)) as stranger:
        stranger.sendall(bytes(64) + (2).to_bytes(4, "big") + b"{}")
        stranger.settimeout(20)
        told = b""
        with suppress(ConnectionResetError):
            while some := stranger.recv(4096):
                told += some
        assert len(told) == 64, "random bytes and a proof, and then the end"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        quiet = replace(address, port=silent.getsockname()[1])
        with pytest.raises(StalledError, match=r"no answer of a rank of the trainer at 127.0.0.1:\d+ for 0.3 s"):
            dict(
                FromTcp(deadline=0.3).receive(replace(route, data=replace(route.data, segments=(quiet,))), manifest, {})
            )
    nowhere = replace(address, host="a" * 64)  # of which the library raises what is no error of a connection
    with pytest.raises(UnicodeError, match="label"):
        dict(FromTcp().receive(replace(route, data=replace(route.data, segments=(nowhere,))), manifest, {}))
    sender.close()
    with pytest.raises(SyncError, match="refused"):
        dict(FromTcp().receive(route, manifest, {}))


@pytest.mark.slow
def test_a_publication_stays_as_it_was_while_the_rank_trains_on_and_the_last_one_counts():
    sender, tensor = FromTcp(), torch.zeros(1000)
    first = sender.publish(Route("tcp"), 1, rows_of({"a": tensor}))
    tensor += 1
    assert not dict(FromTcp().receive(first[1], first[0], {}))["a"].any()
    second = sender.publish(Route("tcp"), 2, rows_of({"a": tensor}))
    assert dict(FromTcp().receive(second[1], second[0], {}))["a"].all()
    with pytest.raises(SyncError, match="holds publication 2 by now, and not 1"):
        dict(FromTcp().receive(first[1], first[0], {}))
    sender.close()
