"""Who is connected: sessions, the models that they train, and what each of their requests does.

session ── model (an adapter, its requests in order) ── weights on disk ── sampler (a served adapter)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from rondel.core.errors import UserError
from rondel.training_api.backend import Adam, AdapterSpec, TrainingBackend
from rondel.training_api.promises import InOrder, Promise, Promises, Result
from rondel.training_api.request_log import RequestLog
from rondel.training_api.samplers import Samplers, ServedWeights
from rondel.training_api.store import UNNAMED, Store, expiry
from rondel.training_api.wire import ForwardRequest, forward_reply

DEFAULT_RANK = 32
OPTIMIZER = {"type": "adamw"}
TRAINED = 64  # adapters that are trained at once
SILENCE = 3600.0  # seconds after which a session whose client says nothing is over; clients are heard every ten


@dataclass(slots=True, eq=False)
class Session:
    id: str
    facts: dict[str, Any]
    born: float = field(default_factory=time.time)
    heard: float = field(default_factory=time.time)
    models: list[str] = field(default_factory=list)
    snapshots: list[str] = field(default_factory=list)  # without a name: they go with it
    finished: dict[str, Any] | None = None
    project: str = "default"


@dataclass(slots=True, eq=False)
class Model:
    """An adapter that a client trains."""

    id: str
    spec: AdapterSpec
    order: InOrder
    metadata: dict[str, Any]
    heard: float = field(default_factory=time.time)
    follows: list[ServedWeights] = field(default_factory=list)  # what its in-flight samplers read


class Clients:
    def __init__(self, backend: TrainingBackend, folder: Path) -> None:
        self.backend, self.store, self.promises = backend, Store(folder), Promises()
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        self.log = RequestLog(folder, backend.base_model)
        self.samplers = Samplers(backend, self.store, self.promises, self.log)
        self._tasks: set[asyncio.Task[None]] = set()
        self.links: dict[str, tuple[float, Path]] = {}  # until when files of a checkpoint are fetched without a key

    async def close(self) -> None:
        await self.promises.close()
        self.log.close()

    # -- sessions --------------------------------------------------------------------------------

    def create_session(self, facts: dict[str, Any]) -> Session:
        self._end_silent_sessions()
        session = Session(uuid4().hex, facts, project=facts.get("project_id") or "default")
        self.sessions[session.id] = session
        self.log.counts["sessions"] += 1
        return session

    def session(self, name: str) -> Session:
        """KeyError: there is none."""
        if name not in self.sessions:
            raise KeyError(
                f"no session '{name[:100]}' here; this server may have been started anew: make a new ServiceClient"
            )
        self.sessions[name].heard = time.time()
        return self.sessions[name]

    def _end_silent_sessions(self) -> None:
        """Their adapters are not trained any more; what was saved stays."""
        for session in list(self.sessions.values()):
            if session.finished is None and session.heard < time.time() - SILENCE:
                self._tasks.add(task := asyncio.create_task(self.end_session(session, "interrupted", "it fell silent")))
                task.add_done_callback(self._tasks.discard)

    async def end_session(self, session: Session, how: str, detail: str | None) -> None:
        """Its adapters are not trained any more, and snapshots without a name go; what was saved stays."""
        session.finished = session.finished or {"reason": {"type": how}, "detail": detail}
        for name in [name for name in session.models if name in self.models]:
            await self.unload(self.models[name]).task
        while session.snapshots:
            address = session.snapshots.pop()
            await self.samplers.served.drop(address)
            self.store.delete(*self.store.find(address))

    def model(self, name: str) -> Model:
        if name not in self.models:
            raise KeyError(f"no model '{name[:100]}' is trained here; it may have been unloaded")
        self.models[name].heard = time.time()
        return self.models[name]

    # -- training --------------------------------------------------------------------------------

    def create_model(self, session: Session, number: int, config: dict[str, Any], metadata: Any) -> Promise:
        name = f"{session.id}:train:{number}"
        rank, seed = config.get("rank", DEFAULT_RANK), config.get("seed") or 0
        if type(rank) is not int or type(seed) is not int:
            raise UserError(f"lora_config: rank = {rank!r:.40} and seed = {seed!r:.40} must be numbers")
        spec = AdapterSpec(
            rank,
            seed=seed,
            attention=bool(config.get("train_attn", True)),
            mlp=bool(config.get("train_mlp", True)),
            unembed=bool(config.get("train_unembed", True)),
        )

        async def create() -> Result:
            await self._add_model(session, name, spec, metadata or {})
            return {"model_id": name, "type": "create_model"}

        return self.promises.post(f"{name}:create", partial(self.log.run, "create_model", name, create))

    async def _add_model(self, session: Session, name: str, spec: AdapterSpec, metadata: dict[str, Any]) -> None:
        if len(self.models) >= TRAINED:
            raise UserError(f"{TRAINED} adapters are trained here already: finish a session, or come back later")
        await self.backend.create_adapter(name, spec)
        facts = {"base_model": self.backend.base_model, "rank": spec.rank, "seed": spec.seed, "metadata": metadata}
        kinds = {"attention": spec.attention, "mlp": spec.mlp, "unembed": spec.unembed}
        self.store.create_run(name, facts | kinds | {"session": session.id})
        self.models[name] = Model(name, spec, InOrder(1), metadata)
        session.models.append(name)
        self.log.counts["models"] += 1

    def load_new_model(self, session: Session, number: int, address: str, *, optimizer: bool, metadata: Any) -> Promise:
        """A model whose first request is a load: its adapter is made like the one that was saved."""
        name = f"{session.id}:train:{number}"

        async def create() -> Result:
            run, kind, _ = self.store.find(address)
            if kind != "weights":
                raise UserError(f"'{address}' is for sampling: training goes on from tinker://RUN/weights/NAME")
            saved = self.store.run(run)
            spec = AdapterSpec(saved["rank"], saved["seed"], saved["attention"], saved["mlp"], saved["unembed"])
            await self._add_model(session, name, spec, metadata or {})
            try:
                await self.backend.load(name, self.store.place(address), optimizer=optimizer)
            except BaseException:
                await self._drop_model(name)
                raise
            return {"path": address, "model_id": name, "type": "load_weights"}

        return self.promises.post(f"{name}:create", partial(self.log.run, "load_weights", name, create))

    def ask(self, model: Model, number: int | None, what: str, work: Callable[[], Awaitable[Result]]) -> Promise:
        """A request of a model, in the order of its client."""
        name = f"{model.id}:{uuid4().hex if number is None else number}"
        return self.promises.post(name, lambda: model.order.run(number, partial(self.log.run, what, model.id, work)))

    async def skip_refused(self, model: Any, number: Any) -> None:
        """A request that was refused before it had a place in its model's order leaves no gap in it."""
        if isinstance(number, int) and (known := self.models.get(str(model))) is not None:
            await known.order.skip(number)

    def forward(self, asked: ForwardRequest) -> Promise:
        model = self.model(asked.model)

        async def work() -> Result:
            done = await self.backend.forward(
                model.id, asked.examples, asked.loss, asked.config, backward=asked.backward
            )
            tokens = sum(len(example.tokens) for example in asked.examples)
            self.log.count_tokens("trained" if asked.backward else "", tokens)
            return forward_reply(done)

        return self.ask(model, asked.number, "forward_backward" if asked.backward else "forward", work)

    def optim_step(self, model: Model, number: int | None, adam: Adam) -> Promise:
        async def work() -> Result:
            metrics = await self.backend.optim_step(model.id, adam)
            self.log.counts["steps"] += 1
            return {"metrics": metrics, "type": "optim_step"}

        return self.ask(model, number, "optim_step", work)

    def save(self, model: Model, number: int | None, kind: str, sent: dict[str, Any]) -> Promise:
        """Under the name that was sent, or one of its own."""
        name = sent.get("path") or f"auto-{number or uuid4().hex[:8]}"
        note = {"metadata": sent.get("user_metadata"), "expires": expiry(sent.get("ttl_seconds"))}
        what = {"weights": "save_weights", "external_weights": "save_weights_external"}[kind]

        async def work() -> Result:
            path = await self._save(model, kind, name, note, overwrite=bool(sent.get("overwrite")))
            return {"path": path, "type": what}

        return self.ask(model, number, what, work)

    async def _save(self, model: Model, kind: str, name: str, note: dict[str, Any], *, overwrite: bool = False) -> str:
        with self.store.new_checkpoint(model.id, kind, name, note, overwrite=overwrite) as folder:
            await self.backend.save(model.id, folder, optimizer=kind == "weights")
        address = f"tinker://{model.id}/{kind}/{name}"
        await self.samplers.served.drop(address)  # what samplers had under it was an earlier one
        return address

    def load(self, model: Model, number: int | None, address: str, *, optimizer: bool) -> Promise:
        async def work() -> Result:
            await self.backend.load(model.id, self.store.place(address), optimizer=optimizer)
            return {"path": address, "model_id": model.id, "type": "load_weights"}

        return self.ask(model, number, "load_weights", work)

    def unload(self, model: Model) -> Promise:
        async def work() -> Result:
            await self._drop_model(model.id)
            return {"model_id": model.id, "type": "unload_model"}

        return self.ask(model, None, "unload_model", work)

    async def _drop_model(self, name: str) -> None:
        del self.models[name]
        await self.backend.drop_adapter(name)

    # -- sampling --------------------------------------------------------------------------------

    def save_for_sampler(self, model: Model, number: int | None, sent: dict[str, Any]) -> Promise:
        """A checkpoint by name, or a sampler at once (kind "inflight": one that later saves move on)."""
        own, session = sent.get("sampling_session_seq_id"), self.session(model.id.partition(":train:")[0])
        name = sent.get("path") or f"sampler-{number or uuid4().hex[:8]}"
        note = {"metadata": sent.get("user_metadata"), "expires": expiry(sent.get("ttl_seconds"))}
        note[UNNAMED] = own is not None

        async def work() -> Result:
            address = await self._save(model, "sampler_weights", name, note)
            if own is None:
                return {"path": address, "type": "save_weights_for_sampler"}
            session.snapshots.append(address)
            await self.samplers.served.load(address)
            reads = ServedWeights(address)
            if sent.get("kind") == "inflight":
                for earlier in model.follows:
                    earlier.address = address
                model.follows.append(reads)
            sampler = self.samplers.add(session.id, own, reads)
            return {"path": address, "sampling_session_id": sampler.id, "type": "save_weights_for_sampler"}

        return self.ask(model, number, "save_weights_for_sampler", work)
