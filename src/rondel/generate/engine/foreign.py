"""An engine of others behind a URL, under the contract of this house.

    generate ──> gate ──> draw ──> whole
                  ^         └────> cut by an interruption: "abort" returns what is written; else the rest is drawn as a
                  └─────────────── continuation of its own tokens, when the gate opens again

Before weights change everything that runs is interrupted, and nothing is sent until they
have changed: so all tokens of a piece have one version, whatever the server does with
requests of its own. It is the gate here that is
shut and never the server: if this process dies, nothing stays paused. A piece has noise of its own,
seeded by the sample's key and the tokens before it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import inf
from pathlib import Path
from typing import Any, Protocol, get_args

from rondel.core.errors import EngineError, SyncError, UserError
from rondel.core.events import Warned, emit, stalled_error
from rondel.core.media import ImagePlaceholder
from rondel.core.protocols import Interrupt, Tags
from rondel.core.types import (
    Abort,
    Begin,
    Commit,
    Completion,
    EngineStatus,
    FinishReason,
    Message,
    Request,
    Route,
    Sampling,
    TokenScores,
    earliest_routes,
)
from rondel.generate.engine.draw_gate import DrawGate
from rondel.generate.engine.folder_update import FolderUpdate

Media = Sequence[ImagePlaceholder]
ROUNDING = 1e-3  # nats by which a log-probability may lie above 0
AGAIN = 0.5  # seconds after which an interruption is repeated: a request may have been on its way


@dataclass(slots=True)
class DrawnTokens:
    """What the server drew at once, behind P tokens. `version` is the one that it says it drew with;
    None if it says nothing."""

    tokens: list[int]
    logprobs: list[float]
    finish: FinishReason
    text: str
    cached: int = 0
    version: str | None = None
    experts: Any | None = None  # [P + T - 1, L, K] of all tokens but the last


class ServerDriver(Protocol):
    """What differs from one kind of server to another.

    name   of the kind
    lacks  sampling settings that it does not have, or not under the logprob that law 4 asks for
    blind  why it is sent no images; "" where it sees them

    One that can has `async def take_broadcast(self, group, manifest)`, too: join the trainer's group and load what it
    broadcasts (sync/to_servers.py). And `experts`, which is set to how it tells routed experts where these are
    replayed.
    """

    name: str
    lacks: frozenset[str]
    blind: str

    def open(self, sampling: Sampling) -> int: ...  # check once what can be checked -> the most tokens of a request
    async def draw_tokens(
        self, tokens: list[int], media: Media, sampling: Sampling, seed: int, deadline: float | None
    ) -> DrawnTokens: ...
    async def score(self, tokens: list[int], media: Media) -> list[float]: ...  # raw logprob of each; the first is 0
    async def interrupt(self) -> None: ...  # whatever runs returns what it has
    async def load(self, folder: str, version: str) -> None: ...  # and forget what older weights have cached
    async def version(self) -> str: ...


class ForeignEngine:
    """The Engine protocol over a `ServerDriver`.

    patience  seconds in which interrupted requests must have come back, and in which weights must be read
    """

    def __init__(self, server: ServerDriver, *, version: int = -1, patience: float = 600.0) -> None:
        self.server, self.version, self.patience = server, version, patience
        self.root, self.bytes_copied = "", 0
        self._broken = ""  # why it refuses
        self.gate, self._update = DrawGate(), FolderUpdate(server.name)

    @property
    def state(self) -> str:
        return "refusing" if self._broken else "held" if self.gate.shut else "serving"

    @property
    def _server_name(self) -> str:
        link = getattr(self.server, "link", None)
        return f"{self.server.name} at {link.url}" if link else self.server.name

    # -- generate and score ----------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        self._check_request(request)
        began, done = time.perf_counter(), Completion.empty("abort", len(request.tokens))
        done.text = ""
        try:
            async with asyncio.timeout(request.deadline):
                await self._generate_pieces(request, done)
        except TimeoutError as error:
            raise stalled_error(
                f"a request waits for {self.server.name} since {request.deadline} s; it had written {len(done.tokens)} "
                f"tokens, engine {self.state}"
            ) from error
        done.timings = {"total": time.perf_counter() - began}
        return done

    async def _generate_pieces(self, request: Request, done: Completion) -> None:
        """Pieces, until one is whole or all is aborted."""
        gate = self.gate
        aborts = gate.aborts
        while await gate.wait_until_open(aborts):
            self._refuse_if_broken()
            gate.drawing += 1
            cuts, version = gate.cuts, self.version
            try:
                piece = await self._draw_tokens(request, done)
            finally:
                await gate.end_drawing()
            if piece.version is not None and piece.version != str(version):
                raise EngineError(
                    f"{self.server.name} says that it drew with weights '{piece.version}', and this run gave it "
                    f"'{version}': "
                    "somebody else changes them, too. A run needs a server of its own"
                )
            done.tokens += piece.tokens
            done.logprobs += check_logprobs(self._server_name, piece.tokens, piece.logprobs)
            done.versions += [version] * len(piece.tokens)
            done.text = (done.text or "") + piece.text
            done.experts = earliest_routes(done.experts, piece.experts)  # it tells those of what came before it, too
            done.cached_tokens = done.cached_tokens or piece.cached
            if piece.finish != "abort" or len(done.tokens) >= request.sampling.max_tokens:
                done.finish_reason = "length" if piece.finish == "abort" else piece.finish
                return
            if cuts == gate.cuts:
                raise EngineError(
                    f"{self.server.name} cut a request that nobody here interrupted; it had {len(done.tokens)} tokens"
                )

    async def _draw_tokens(self, request: Request, done: Completion) -> DrawnTokens:
        s, n = request.sampling, len(done.tokens)
        before = request.continuation + n  # whoever asked may go on from an earlier abort
        if before and s.has_penalties:
            raise EngineError(
                "a sample with penalties cannot go on behind an interruption: the server would not know which tokens "
                "it wrote"
            )
        seed = int.from_bytes(blake2b(f"{request.key}/{before}".encode(), digest_size=8).digest(), "little") >> 1
        rest = _remaining_sampling(s, n)
        return await self.server.draw_tokens(
            [*request.tokens, *done.tokens], request.media, rest, seed, request.deadline
        )

    async def score(self, request: Request) -> TokenScores:
        self._refuse_if_broken()
        self._check_images(request)
        version = self.version
        logprobs = await self.server.score(list(request.tokens), request.media)
        return TokenScores(check_logprobs(self._server_name, request.tokens, logprobs, request.media), version)

    def _check_request(self, request: Request) -> None:
        self._refuse_if_broken()
        if not request.tokens:
            raise UserError("an empty prompt: a language model needs at least one token to go on from")
        self._check_images(request)
        told = {"experts"} if getattr(self.server, "experts", None) is not None else set()
        if (wants := request.wants - told) or request.adapter:
            asked = ", ".join(sorted(wants)) or f"adapter '{request.adapter}'"
            raise UserError(f'{self.server.name} gives no {asked}; engine.kind = "builtin" does')
        plain = Sampling()
        if lacking := [
            name for name in sorted(self.server.lacks) if getattr(request.sampling, name) != getattr(plain, name)
        ]:
            raise UserError(
                f'{self.server.name} does not draw with {lacking[0]} as this house does; engine.kind = "builtin" does'
            )

    def _check_images(self, request: Request) -> None:
        if request.media and self.server.blind:
            raise UserError(
                f'{self.server.name} is sent no images: {self.server.blind}. engine.kind = "builtin" and "sglang" '
                "see them"
            )
        if any(place.image.frames > 1 for place in request.media):
            raise UserError(
                f"{self.server.name} is sent no videos, whose frames are merged in steps: take engine.kind = "
                '"builtin", '
                "or give the frames as images"
            )
        try:
            ImagePlaceholder.check_placeholders(request.tokens, request.media)
        except ValueError as error:
            raise EngineError(
                f"{self.server.name} tells images by their placeholders alone, and the policy has drawn one or lacks "
                f"one: {error}"
            ) from error

    # -- control ---------------------------------------------------------------------------------

    async def status(self) -> EngineStatus:
        """The server is asked, too: one that is gone has no state."""
        await self.server.version()
        waits = (0, self.gate.waiting) if self.gate.shut else (self.gate.waiting, 0)
        return EngineStatus(
            version=self.version,
            state=self.state,
            running=self.gate.drawing,
            waiting=waits[0],
            parked=waits[1],
            pages_free=0,
            pages_cached=0,
            pages_total=0,
            capabilities=frozenset(
                {
                    "logprobs",
                    "hold",
                    "drain",
                    "abort",
                    "score",
                    "update_disk",
                    *(() if self.server.blind else ("images",)),
                }
            ),
            root=self.root,
            bytes_copied=self.bytes_copied,
        )

    async def pause(self, how: Interrupt = "hold", lease: float = inf) -> None:
        """hold: what runs returns and goes on later. drain: it ends first, however long it takes. abort: it returns for
        good.
        """
        if how not in get_args(Interrupt):
            raise UserError(f"pause('{how}'): it is one of {', '.join(get_args(Interrupt))}")
        began = time.perf_counter()
        await self.gate.close(abort=how == "abort")
        try:
            async with asyncio.timeout(None if how == "drain" else min(lease, self.patience)):
                while self.gate.drawing:
                    if how != "drain":
                        self.gate.cuts += 1
                        await self.server.interrupt()
                    await self.gate.wait_until_idle(self.patience / 10 if how == "drain" else AGAIN)
                    if how == "drain" and self.gate.drawing:
                        waited = time.perf_counter() - began
                        emit(
                            Warned(
                                f"new weights have waited {waited:.0f} s for {self.gate.drawing} requests that "
                                f"{self._server_name} still answers (in_flight = 'drain'); 'hold' interrupts them, and "
                                "they go on under the new weights"
                            )
                        )
        except BaseException as error:
            await self.resume()
            if isinstance(error, TimeoutError):
                raise stalled_error(
                    f"{self.gate.drawing} requests at {self._server_name} have not come back from a {how} for "
                    f"{min(lease, self.patience):g} s"
                ) from error
            raise

    async def resume(self) -> None:
        await self.gate.open()

    async def sleep(self, tags: Tags) -> None:
        if tags:
            raise EngineError(
                f"{self.server.name} has a device of its own and keeps its memory; place.kind = 'shared' is for the "
                "built-in engine"
            )

    async def wake(self, tags: Tags) -> None: ...

    # -- weights ---------------------------------------------------------------------------------

    async def receive(self, message: Message) -> int:
        """A folder: until the commit the old version serves, and a commit that fails leaves an engine that refuses
        until a good update. A broadcast is loaded as it comes: from its route on the engine refuses until the commit.
        """
        match message:
            case Begin():
                self._update.begin(message, broadcast=self._takes_broadcasts)
            case Route() if message.kind == "distributed" and self._takes_broadcasts:
                await self._take_broadcast(message)
            case Route():
                self._update.check_folder(message)
            case Commit():
                await self._commit_update(message)
            case Abort():
                self._update.forget()
                if self._update.committed:
                    self._broken = f"the update was aborted after its commit: {message.reason}"
        return self.version

    @property
    def _takes_broadcasts(self) -> bool:
        return hasattr(self.server, "take_broadcast")

    async def _take_broadcast(self, route: Route) -> None:
        manifest = self._update.announced(route)
        async with self._while_loading(manifest.version):
            await self.server.take_broadcast(route.data, manifest)  # type: ignore[attr-defined]
        self._update.arrived(route)

    async def _commit_update(self, commit: Commit) -> None:
        route = self._update.take_route(commit)
        async with self._while_loading(commit.version):
            if route.kind == "disk":
                await self.server.load(str(Path(route.data).resolve()), str(commit.version))
            serves = await self.server.version()
            if serves != str(commit.version):
                raise SyncError(f"it says it serves '{serves}'")
        self._broken, self.version, self.root, self.bytes_copied = "", commit.version, commit.root, route.bytes
        self._update.committed = True

    @asynccontextmanager
    async def _while_loading(self, version: int) -> AsyncIterator[None]:
        """The engine refuses, and does so afterwards if that fails."""
        if self.gate.drawing or self.state == "serving":
            raise SyncError("a commit while requests run: pause the engine first")
        self._broken = f"version {version} is on its way"
        try:
            async with asyncio.timeout(self.patience):
                yield
        except BaseException as error:
            self._broken = f"{self.server.name} did not take version {version}: {type(error).__name__}: {error}"
            if not isinstance(error, Exception):
                raise
            raise SyncError(f"{self._broken}; the engine refuses to generate until a good update") from error

    def _refuse_if_broken(self) -> None:
        if self._broken:
            raise EngineError(f"the engine refuses to generate until a good update: {self._broken}")


def check_logprobs(server: str, tokens: Sequence[int], logprobs: Sequence[float], media: Media = ()) -> list[float]:
    """The log-probabilities that a server gave for these tokens: each is finite and at most 0, up to rounding.

    Anything else has no meaning that a run could go on with: NaN taken for 0 would be a
    token that the policy was certain of. Those of the placeholders of images are nobody's.
    """
    if len(logprobs) != len(tokens):
        raise EngineError(f"{server} gave {len(logprobs)} log-probabilities for {len(tokens)} tokens")
    placeholders = {at for place in media for at in range(place.start, place.end)}
    for at, (token, logprob) in enumerate(zip(tokens, logprobs)):
        if at in placeholders:
            continue
        if not isinstance(logprob, int | float) or not -math.inf < logprob <= ROUNDING:
            raise EngineError(
                f"{server} gave token {token} (number {at} of {len(tokens)}) a log-probability of {logprob}; "
                "it must be a finite number of at most 0. Check the server's model and numerics, and start it again"
            )
    return [logprob if at in placeholders else min(0.0, logprob) for at, logprob in enumerate(logprobs)]


def _remaining_sampling(s: Sampling, written: int) -> Sampling:
    """For the tokens that are still to come."""
    return replace(s, max_tokens=s.max_tokens - written, min_tokens=max(0, s.min_tokens - written))


def common_sampling_fields(s: Sampling) -> dict[str, Any]:
    """What all servers call alike; what is not truncated says so."""
    return {
        "temperature": s.temperature,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": s.repetition_penalty,
        "presence_penalty": s.presence_penalty,
        "frequency_penalty": s.frequency_penalty,
        "logit_bias": {str(token): bias for token, bias in s.logit_bias.items()} or None,
        "stop": [x for x in s.stop if isinstance(x, str)] or None,
        "stop_token_ids": [x for x in s.stop if isinstance(x, int)] or None,
        "ignore_eos": s.ignore_eos,
    }
