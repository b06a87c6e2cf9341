"""Weights from the segments of several writers into one engine: law 6 as over every other way."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import pytest
import torch

from kits.engine import ask, engine, prompt, tiny, twin
from kits.sync import ShardedPublisher
from kits.transports import bits, left_behind, same
from rondel.core.errors import SyncError
from rondel.core.mesh import Mesh
from rondel.core.types import Manifest
from rondel.sync.from_ipc import FromIpc
from rondel.sync.ipc_parts import PartAddresses, WrittenPiece
from rondel.sync.tensor_bytes import HEAD
from rondel.sync.update import WeightUpdate


@pytest.fixture
def ends():
    before, model = left_behind(), tiny()
    trainer = ShardedPublisher(twin(model), Mesh(replicas=2, shards=2))
    e = engine(model, transports={"ipc": FromIpc()})
    yield trainer, e, WeightUpdate(trainer.transport, probe=[], score=None, tolerance=1e-4, moved=lambda: True)
    trainer.close()
    e.arrivals._transports["ipc"].close()
    assert left_behind() == before


@pytest.mark.slow
def test_the_same_bits_arrive_while_segments_take_turns(ends):
    trainer, e, sync = ends

    async def main():
        for version in range(1, 6):
            trainer.train()
            assert await sync(trainer, e) == version == e.version
            assert same(bits(trainer.loaded), bits(e.loaded))
        truth = await engine(twin(trainer.loaded)).generate(ask(prompt(2, 14)))
        assert (await e.generate(ask(prompt(2, 14)))).tokens == truth.tokens

    asyncio.run(main())
    assert all(len(writer._segments) <= 3 for writer in trainer.writers)


def spoiled(what: str, manifest: Manifest, route):
    """-> (manifest, route) with one thing wrong."""
    place: PartAddresses = route.data
    pieces = [list(own) for own in place.pieces]
    if what == "a flipped bit":
        fd = os.open(place.segments[1].path, os.O_RDWR)
        byte = os.pread(fd, 1, HEAD + 40)[0]
        os.pwrite(fd, bytes([byte ^ 4]), HEAD + 40)
        os.close(fd)
    elif what == "a hole":
        pieces[1].pop()
    elif what == "a stranger":
        pieces[0][0] = replace(pieces[0][0], name="model.extra.weight")
    elif what == "too much":
        pieces[0].append(WrittenPiece(pieces[0][0].name, (0, 0), (1 << 20, 64)))
    elif what == "pieces of another place":
        pieces[0][0], pieces[0][1] = pieces[0][1], pieces[0][0]
    elif what == "an old segment":
        segment = replace(place.segments[0], number=place.segments[0].number - 1)
        place = replace(place, segments=(segment, *place.segments[1:]))
    return manifest, replace(route, data=replace(place, pieces=tuple(map(tuple, pieces))))


FAULTS = {
    "a flipped bit": "1 tensors arrived with other bits than were sent",
    "a hole": "nobody has the box",
    "a stranger": "model.extra.weight was written, and was not announced",
    "too much": "a trainer's memory has",
    "pieces of another place": "arrived with other bits than were sent",
    "an old segment": "holds publication",
}


@pytest.mark.parametrize("what", FAULTS)
def test_what_is_wrong_leaves_the_old_version_serving(ends, what):
    trainer, e, sync = ends

    async def main():
        trainer.train()
        await sync(trainer, e)
        before = {name: t.clone() for name, t in bits(e.loaded).items()}
        trainer.train()
        publish = trainer.publish

        async def wrong(route):
            return spoiled(what, *await publish(route))

        trainer.publish = wrong
        with pytest.raises(SyncError, match=FAULTS[what]):
            await sync(trainer, e)
        assert e.version == 1 and (await e.status()).state == "serving" and same(before, bits(e.loaded))
        trainer.publish = publish
        assert await sync(trainer, e) == 2 and same(bits(trainer.loaded), bits(e.loaded))

    asyncio.run(main())


def test_one_writer_of_a_whole_tensor_is_read_in_place():
    """Nothing is copied: the engine serves from the writer's memory."""
    trainer = ShardedPublisher(tiny(), Mesh())
    reader = FromIpc()

    async def main():
        manifest, route = await trainer.publish(None)
        return dict(reader.receive(route, manifest, {}))

    got = asyncio.run(main())
    assert len({t.untyped_storage().data_ptr() for t in got.values()}) == 1
    assert same(got, bits(trainer.loaded)) and torch.is_tensor(next(iter(got.values())))
    del got
    trainer.close()
    reader.close()
