"""Who is connected: sessions, the models that they train, the samplers that they ask; and what each request does.

session ── model (an adapter, its requests in order) ── weights on disk ── sampler (a served adapter)
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from rondel.core.errors import UserError
from rondel.system.files import replace_file
from rondel.training_api.backend import Adam, AdapterSpec, SampleSettings, TrainingBackend
from rondel.training_api.promises import InOrder, Promise, Promises, Result
from rondel.training_api.store import UNNAMED, Store, expiry
from rondel.training_api.wire import ForwardRequest, forward_reply, sample_reply

DEFAULT_RANK = 32
OPTIMIZER = {"type": "adamw"}
SERVED = 32  # adapters that are kept in memory for samplers
TRAINED = 64  # adapters that are trained at once
_line: ContextVar[dict[str, Any]] = ContextVar("line")  # what a request adds to its line of requests.jsonl
SILENCE = 3600.0  # seconds after which a session whose client says nothing is over; clients are heard every ten


@dataclass(slots=True, eq=False)
class Session:
    id: str
    facts: dict[str, Any]
    born: float = field(default_factory=time.time)
    heard: float = field(default_factory=time.time)
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)
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


@dataclass(slots=True, eq=False)
class ServedWeights:
    """What a sampler reads: the address of a checkpoint, or None for the base. In-flight ones move on."""

    address: str | None


@dataclass(slots=True, eq=False)
class Sampler:
    id: str
    reads: ServedWeights
    clones: int = 0


class Clients:
    def __init__(self, backend: TrainingBackend, folder: Path) -> None:
        self.backend, self.store, self.promises = backend, Store(folder), Promises()
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, Sampler] = {}
        self.counts = {"sessions": 0, "models": 0, "steps": 0, "trained_tokens": 0, "sampled_tokens": 0, "failures": 0}
        self._served: dict[str, None] = {}  # addresses, the least recently asked first
        self._serving = asyncio.Lock()  # one of them is loaded or dropped
        self._tasks: set[asyncio.Task[None]] = set()
        self._reading = Counter[str]()  # answers that are being written with them
        self.links: dict[str, tuple[float, Path]] = {}  # until when files of a checkpoint are fetched without a key
        self._log = (folder / "requests.jsonl").open("a")

    async def close(self) -> None:
        await self.promises.close()
        self._write_card()
        self._log.close()

    # -- sessions --------------------------------------------------------------------------------

    def create_session(self, facts: dict[str, Any]) -> Session:
        self._end_silent_sessions()
        session = Session(uuid4().hex, facts, project=facts.get("project_id") or "default")
        self.sessions[session.id] = session
        self.counts["sessions"] += 1
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
            await self.stop_serving(address)
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

        return self.promises.post(f"{name}:create", partial(self._logged, "create_model", name, create))

    async def _add_model(self, session: Session, name: str, spec: AdapterSpec, metadata: dict[str, Any]) -> None:
        if len(self.models) >= TRAINED:
            raise UserError(f"{TRAINED} adapters are trained here already: finish a session, or come back later")
        await self.backend.create_adapter(name, spec)
        facts = {"base_model": self.backend.base_model, "rank": spec.rank, "seed": spec.seed, "metadata": metadata}
        kinds = {"attention": spec.attention, "mlp": spec.mlp, "unembed": spec.unembed}
        self.store.create_run(name, facts | kinds | {"session": session.id})
        self.models[name] = Model(name, spec, InOrder(1), metadata)
        session.models.append(name)
        self.counts["models"] += 1

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

        return self.promises.post(f"{name}:create", partial(self._logged, "load_weights", name, create))

    def ask(self, model: Model, number: int | None, what: str, work: Callable[[], Awaitable[Result]]) -> Promise:
        """A request of a model, in the order of its client."""
        name = f"{model.id}:{uuid4().hex if number is None else number}"
        return self.promises.post(name, lambda: model.order.run(number, partial(self._logged, what, model.id, work)))

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
            self.counts["trained_tokens"] += tokens * asked.backward
            _line.get()["tokens"] = tokens
            return forward_reply(done)

        return self.ask(model, asked.number, "forward_backward" if asked.backward else "forward", work)

    def optim_step(self, model: Model, number: int | None, adam: Adam) -> Promise:
        async def work() -> Result:
            metrics = await self.backend.optim_step(model.id, adam)
            self.counts["steps"] += 1
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
        return f"tinker://{model.id}/{kind}/{name}"

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
            await self._serve(address)
            reads = ServedWeights(address)
            if sent.get("kind") == "inflight":
                for earlier in model.follows:
                    earlier.address = address
                model.follows.append(reads)
            sampler = self._add_sampler(session, own, reads)
            return {"path": address, "sampling_session_id": sampler.id, "type": "save_weights_for_sampler"}

        return self.ask(model, number, "save_weights_for_sampler", work)

    async def create_sampler(self, session: Session, number: int, address: str | None) -> Sampler:
        if address is not None:
            await self._serve(address)
        return self._add_sampler(session, number, ServedWeights(address))

    def _add_sampler(self, session: Session, number: int, reads: ServedWeights) -> Sampler:
        name = f"{session.id}:sample:{number}"
        if name not in self.samplers:
            self.samplers[name] = Sampler(name, reads)
            session.samplers.append(name)
        return self.samplers[name]

    def sampler(self, name: str) -> Sampler:
        if name not in self.samplers:
            raise KeyError(f"no sampler '{name[:100]}' here")
        return self.samplers[name]

    async def _serve(self, address: str) -> None:
        """A checkpoint is served under its address, loaded once however many ask."""
        await self._unhindered(self._load(address))

    async def stop_serving(self, address: str) -> None:
        await self._unhindered(self._unload(address))

    async def _unhindered(self, work: Coroutine[Any, Any, None]) -> None:
        """Done to its end, also where its client stops waiting for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)

    async def _load(self, address: str) -> None:
        async with self._serving:
            if address in self._served:
                self._served[address] = self._served.pop(address)
                return
            await self.backend.serve_adapter(address, self.store.place(address))
            self._served[address] = None
            idle = [one for one in self._served if not self._reading[one] and one != address]
            for old in idle[: max(0, len(self._served) - SERVED)]:  # it is loaded again when it is asked
                del self._served[old]
                await self.backend.drop_served(old)

    async def _unload(self, address: str) -> None:
        async with self._serving:
            if address in self._served:
                del self._served[address]
                await self.backend.drop_served(address)

    def sample(
        self, name: str, number: int | None, reads: ServedWeights, prompt: list[int], how: SampleSettings
    ) -> Promise:
        async def work() -> Result:
            address = reads.address
            self._reading[address or ""] += 1
            try:
                if address is not None:
                    await self._serve(address)
                done = await self.backend.sample(prompt, address, how)
            finally:
                self._reading[address or ""] -= 1
            tokens = sum(len(tokens) for tokens, *_ in done.sequences)
            self.counts["sampled_tokens"] += tokens
            _line.get()["tokens"] = tokens
            return sample_reply(done, how.top_prompt_logprobs)

        key = uuid4().hex if number is None else number
        return self.promises.post(f"{name}:{key}", partial(self._logged, "sample", name, work))

    # -- what is kept of requests ----------------------------------------------------------------

    async def _logged(self, what: str, who: str, work: Callable[[], Awaitable[Result]]) -> Result:
        began, fault = time.time(), ""
        told: dict[str, Any] = {}
        _line.set(told)
        try:
            return await work()
        except BaseException as error:
            fault = f"{type(error).__name__}: {error}"
            self.counts["failures"] += 1
            raise
        finally:
            line = {"at": round(began, 3), "what": what, "who": who, "seconds": round(time.time() - began, 4)} | told
            if not self._log.closed:
                self._log.write(json.dumps(line | ({"failed": fault} if fault else {})) + "\n")
                self._log.flush()
            if what == "optim_step":
                self._write_card()

    def _write_card(self) -> None:
        card = {"base_model": self.backend.base_model, **self.counts, "written": time.time()}
        replace_file(self.store.folder / "card.json", json.dumps(card, indent=2) + "\n")
