"""The one state machine of a weight update: begin -> data -> commit -> version -> probe. It is a transaction (law 6).

Whatever the transport, 100 % of the names are acknowledged before data moves, digests are compared before the version
changes, and a fixed probe is scored on both sides afterwards. Anything else is an abort.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import numpy as np

from rondel.words.errors import SyncError
from rondel.words.events import Synced, emit
from rondel.words.protocols import Engine, Trainer, Transport
from rondel.words.types import Abort, Begin, Commit, Manifest, Request


class Update:
    """`version = await Update(transport, ...)(trainer, engine)`.

    probe      tokens whose logprobs both sides must agree on after the commit; empty switches the probe off
    score      the trainer's logprobs of the probe
    tolerance  largest allowed mean difference in nats a token
    moved      asked after a step with lr > 0: must the weights have changed since the last update?
    """

    def __init__(
        self,
        transport: Transport,
        *,
        probe: list[int],
        score: Callable[[list[int]], Awaitable[list[float]]],
        tolerance: float,
        moved: Callable[[], bool] = lambda: False,
    ) -> None:
        self.transport, self.probe, self.score, self.tolerance, self.moved = transport, probe, score, tolerance, moved
        self.root: str | None = None

    async def __call__(self, trainer: Trainer, engine: Engine) -> int:
        began = time.perf_counter()
        route = self.transport.route(trainer, [engine])
        manifest = await trainer.publish(route)
        self._check_moved(manifest)
        try:
            await engine.receive(Begin(manifest))
            await engine.receive(route)
            version = await engine.receive(Commit(manifest.version, manifest.root))
            if version != manifest.version:
                raise SyncError(f"the engine says it serves version {version}, but {manifest.version} was committed (law 6)")
            gap = await self._probe_gap(engine, manifest)
        except BaseException as error:  # a cancelled update is an aborted one, too
            await engine.receive(Abort(f"{type(error).__name__}: {error}"))
            raise
        self.root = manifest.root
        emit(Synced(version, manifest.root, time.perf_counter() - began, getattr(engine, "bytes_copied", 0), gap))
        return version

    def _check_moved(self, manifest: Manifest) -> None:
        """The digest changes if and only if a non-zero update was applied."""
        if self.root is None:
            return
        if self.moved() and manifest.root == self.root:
            raise SyncError("the trainer made a step with lr > 0, but the weights it publishes are bit for bit the old ones (law 6)")
        if not self.moved() and manifest.root != self.root:
            raise SyncError("no update was applied, but the published weights changed (law 6)")

    async def _probe_gap(self, engine: Engine, manifest: Manifest) -> float:
        if not self.probe:
            return 0.0
        theirs = (await engine.score(Request(self.probe))).logprobs
        ours = await self.score(self.probe)
        if len(theirs) != len(ours):
            raise SyncError(
                f"the probe has {len(self.probe)} tokens; the trainer scored {len(ours)} of them, the engine {len(theirs)} (law 6)"
            )
        gap = float(np.abs(np.subtract(theirs, ours)).mean())  # NaN wins; one unlikely token in bf16 may be off by a nat, the mean is not
        if not gap <= self.tolerance:
            raise SyncError(
                f"after version {manifest.version} trainer and engine differ by {gap:.3g} nats a token on the probe (limit {self.tolerance}; law 6)"
            )
        return gap
