"""A trainer in ten lines that publishes weights, and weight updates to an engine."""

from __future__ import annotations

import asyncio

import torch

from kits.engine import plain_logprobs, prompt
from rondel.core.types import Manifest
from rondel.models import names
from rondel.sync.from_ipc import FromIpc
from rondel.sync.from_tensor import FromTensor
from rondel.sync.ipc_parts import narrow
from rondel.sync.update import WeightUpdate
from rondel.train.mesh_layout import rank_part


class Publisher:
    """The ten-line trainer: its weights, and a version that counts."""

    def __init__(self, loaded, version=0, transport=None):
        self.loaded, self.version, self.transport = loaded, version, transport or FromTensor()

    async def publish(self, route):
        return self.transport.publish(
            route, self.version, names.describe_tensors(names.named_weights(self.loaded.model))
        )

    async def send(self, route):
        await asyncio.to_thread(self.transport.send, route, names.named_weights(self.loaded.model))

    def train(self, size=0.15):
        """Another direction each time, the same for equal versions."""
        self.version += 1
        g = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for p in self.loaded.model.parameters():
                p.mul_(1 + size * torch.randn(p.shape, generator=g))


class ShardedPublisher(Publisher):
    """A trainer whose weights lie over the ranks of a mesh, each with an end of the transport; `cuts`: by tp."""

    def __init__(self, loaded, mesh, cuts=None):
        super().__init__(loaded, transport=FromIpc())
        self.writers = [FromIpc() for _ in range(mesh.world)]
        shapes = {name: t.shape for name, t in names.named_weights(loaded.model)}
        self.held = [
            {name: rank_part(mesh, r, shape, tp=(cuts or {}).get(name)) for name, shape in shapes.items()}
            for r in range(mesh.world)
        ]
        self.assigned = self.transport.assign_parts(self.held, dict.fromkeys(shapes, 4))

    async def publish(self, route):
        told = dict(names.named_weights(self.loaded.model))
        places = [
            writer.write_parts(narrow(told[name], b.start, b.size) for name, blocks in own.items() for b in blocks)
            for writer, own in zip(self.writers, self.assigned)
        ]
        rows = tuple(row for row, _ in names.describe_tensors(told.items()))
        return Manifest(self.version, rows), self.transport.route_parts(places, self.assigned)

    def close(self):
        for end in (self.transport, *self.writers):
            end.close()


def updater():
    return WeightUpdate(FromTensor(), probe=[], score=None, tolerance=1e-4, moved=lambda: True)


async def wrote(e, n):
    while not e.scheduler.running or min(live.written for live in e.scheduler.running) < n:
        await asyncio.sleep(0)


PROBE = prompt(0, 16)


def update(trainer, *, probe=PROBE, score=None, moved=True, tolerance=1e-4):
    async def theirs(tokens):
        return [0.0, *plain_logprobs(trainer.loaded, tokens)]

    return WeightUpdate(FromTensor(), probe=probe, score=score or theirs, tolerance=tolerance, moved=lambda: moved)
