"""New weights of an engine with an encoder process: they arrive here, and what is new of the tower goes on to there.

    data     every tensor, as ever ──> those of the tower whose bits are others than the encoder's ──> staged there
    commit   here and on the other ranks, then there: an update that fails before leaves all with the old version
However weights travel, a tower that is frozen costs its digests alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rondel.generate.engine.builtin.shared_tensors import SharedTensors
from rondel.models import names, vision

if TYPE_CHECKING:
    from rondel.core.types import Begin, Commit, Route
    from rondel.generate.engine.builtin.encoder_client import EncoderClient
    from rondel.generate.engine.builtin.weight_receiver import WeightReceiver


class TowerReceiver:
    """The engine's side of an update. `inner`: the same without the encoder."""

    def __init__(self, client: EncoderClient, inner: WeightReceiver) -> None:
        self.client, self.inner = client, inner
        self._new: dict[str, str] = {}  # digests of tensors that the encoder does not serve yet

    @property
    def root(self) -> str:
        return self.inner.root

    @property
    def route_kinds(self) -> set[str]:
        return self.inner.route_kinds

    @property
    def bytes_copied(self) -> int:
        return self.inner.bytes_copied

    @property
    def is_overwriting(self) -> bool:
        return self.inner.is_overwriting

    def begin_update(self, begin: Begin, version: int) -> None:
        self.inner.begin_update(begin, version)

    async def receive_data(self, route: Route, run: Callable[..., Awaitable[Any]]) -> None:
        await self.inner.receive_data(route, run)
        self._new, changed = {}, dict[str, Tensor]()
        for name, own in vision.tower_tensors(self.inner.loaded.model).items():  # between two the device is free
            tensor = self.inner.staged.after_commit(name, own)
            digest = await run(names.tensor_digest, tensor)
            if digest != self.client.digests[name]:
                self._new[name], changed[name] = digest, tensor
        if changed:
            await self._stage_tensors(changed, run)

    async def _stage_tensors(self, changed: dict[str, Tensor], run: Callable[..., Awaitable[Any]]) -> None:
        shapes = {name: names.shape_of(tensor) for name, tensor in changed.items()}
        memory = SharedTensors(shapes)
        try:
            for name, place in memory.map_memory()[1].items():
                await run(place.copy_, changed[name])
            await asyncio.wrap_future(self.client.ask("stage", shapes, self._new, memory.path))
        finally:
            memory.close()

    def commit_update(self, commit: Commit) -> None:
        self.inner.commit_update(commit)
        self.client.change_weights(self._new, self.client.ask("commit", self._new).result())

    def drop_update(self) -> bool:
        self._new = {}
        return self.inner.drop_update()
