"""Samplers, and the checkpoints that are in memory for them.

sampler ── reads ── tinker://RUN/sampler_weights/NAME ── served adapter, the least recently asked goes first
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

from rondel.training_api.backend import SampleSettings, TrainingBackend
from rondel.training_api.promises import Promise, Promises, Result
from rondel.training_api.request_log import RequestLog
from rondel.training_api.store import Store
from rondel.training_api.wire import sample_reply

SERVED = 32  # adapters that are kept in memory for samplers


@dataclass(slots=True, eq=False)
class ServedWeights:
    """What a sampler reads: the address of a checkpoint, or None for the base. In-flight ones move on."""

    address: str | None


@dataclass(slots=True, eq=False)
class Sampler:
    id: str
    reads: ServedWeights
    clones: int = 0


class ServedCheckpoints:
    """`await served.load(address)`; `with served.held(address):` while an answer is written with it."""

    def __init__(self, backend: TrainingBackend, store: Store) -> None:
        self.backend, self.store = backend, store
        self.addresses: dict[str, None] = {}  # the least recently asked first
        self._guard = asyncio.Lock()  # one of them is loaded or dropped
        self._tasks: set[asyncio.Task[None]] = set()
        self._held = Counter[str]()  # answers that are being written with them

    async def load(self, address: str) -> None:
        """A checkpoint is served under its address, loaded once however many ask."""
        await self._unhindered(self._load(address))

    async def drop(self, address: str) -> None:
        await self._unhindered(self._drop(address))

    @contextmanager
    def held(self, address: str | None) -> Iterator[None]:
        self._held[address or ""] += 1
        try:
            yield
        finally:
            self._held[address or ""] -= 1

    async def _unhindered(self, work: Coroutine[Any, Any, None]) -> None:
        """Done to its end, also where its client stops waiting for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)

    async def _load(self, address: str) -> None:
        async with self._guard:
            if address in self.addresses:
                self.addresses[address] = self.addresses.pop(address)
                return
            await self.backend.serve_adapter(address, self.store.place(address))
            self.addresses[address] = None
            idle = [one for one in self.addresses if not self._held[one] and one != address]
            for old in idle[: max(0, len(self.addresses) - SERVED)]:  # it is loaded again when it is asked
                del self.addresses[old]
                await self.backend.drop_served(old)

    async def _drop(self, address: str) -> None:
        async with self._guard:
            if address in self.addresses:
                del self.addresses[address]
                await self.backend.drop_served(address)


class Samplers:
    """Who asks for answers, and from which weights."""

    def __init__(self, backend: TrainingBackend, store: Store, promises: Promises, log: RequestLog) -> None:
        self.backend, self.promises, self.log = backend, promises, log
        self.served = ServedCheckpoints(backend, store)
        self._known: dict[str, Sampler] = {}

    async def create(self, session: str, number: int, address: str | None) -> Sampler:
        if address is not None:
            await self.served.load(address)
        return self.add(session, number, ServedWeights(address))

    def add(self, session: str, number: int, reads: ServedWeights) -> Sampler:
        """The one of that number, which is made once."""
        name = f"{session}:sample:{number}"
        return self._known.setdefault(name, Sampler(name, reads))

    def of_session(self, session: str) -> list[str]:
        return [name for name in self._known if name.startswith(f"{session}:sample:")]

    def get(self, name: str) -> Sampler:
        """KeyError: there is none."""
        if name not in self._known:
            raise KeyError(f"no sampler '{name[:100]}' here")
        return self._known[name]

    def sample(
        self, name: str, number: int | None, reads: ServedWeights, prompt: list[int], how: SampleSettings
    ) -> Promise:
        async def work() -> Result:
            address = reads.address
            with self.served.held(address):
                if address is not None:
                    await self.served.load(address)
                done = await self.backend.sample(prompt, address, how)
            self.log.count_tokens("sampled", sum(len(tokens) for tokens, *_ in done.sequences))
            return sample_reply(done, how.top_prompt_logprobs)

        key = uuid4().hex if number is None else number
        return self.promises.post(f"{name}:{key}", partial(self.log.run, "sample", name, work))
