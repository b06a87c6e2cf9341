"""Engine and trainer that live elsewhere, as the loop calls them: the protocols, over
proxies with the same awaitable verbs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rondel.algos.tokens import TokenBatch
from rondel.core.errors import EngineError, SilentError, StalledError, WorkerError
from rondel.core.events import Warned, emit, stalled_error
from rondel.core.protocols import RemoteProxy
from rondel.core.types import Completion, Message, Request, StepStats
from rondel.system.loop_turns import drop_in_turns
from rondel.train.pack import TrainBatch

RESTARTS = 5  # of one engine in one run
MOMENT = 2.0  # seconds between the end of a worker and the time when everyone knows


class RemoteEngine:
    """One engine in another process. One that ends is started again, takes the weights that
    serve from where they lie, and its requests are asked again: they keep their keys, and its
    token log has what the first life drew. Every
    other verb says that it ended: an update is a transaction, and one that mended an
    engine in its midst would wait for itself.

    start     another worker that is asked for nothing yet
    longest   what it is opened with
    catch_up  brings a newcomer the weights that serve; set once there is an update
    """

    def __init__(self, worker: RemoteProxy, start: Callable[[], RemoteProxy], longest: int) -> None:
        self._worker, self._start, self._longest = worker, start, longest
        self.catch_up: Callable[[Any], Awaitable[int]] | None = None
        self.version = self.restarts = 0
        self._one = asyncio.Lock()

    async def receive(self, message: Message) -> int:
        self.version = await self._worker.receive(message)
        return self.version

    async def generate(self, request: Request) -> Completion:
        while True:
            worker = self._worker
            try:
                return await worker.generate(request)
            except WorkerError as error:
                if worker.alive:
                    raise
                await self._restart_worker(worker, error)

    def __getattr__(self, verb: str) -> Any:
        if verb.startswith("_"):
            raise AttributeError(verb)
        return getattr(self._worker, verb)

    async def join(self) -> None:
        """Ready to take weights: one that begins while the run goes on."""
        await self._worker.ready()
        await self._worker.open(self._longest)

    def dismiss(self) -> None:
        """Nobody asks it any more: its process ends."""
        self._worker.dismiss()

    async def restart_if_dead(self) -> bool:
        """Start it again if it has ended. -> had it?"""
        if (worker := self._worker).alive:
            return False
        await self._restart_worker(worker, WorkerError(worker.fate))
        return True

    async def caught_up(self, _: Any) -> int:
        """What a router asks of one that joins. -> the version that it serves."""
        assert self.catch_up is not None, "there was an update, or nobody is lost"
        self.version = await self.catch_up(self)
        return self.version

    async def _restart_worker(self, dead: RemoteProxy, why: Exception) -> None:
        async with self._one:
            while self._worker is dead:
                if self.restarts == RESTARTS:
                    raise EngineError(f"an engine ended {RESTARTS + 1} times, the last time: {why}") from why
                self.restarts += 1
                emit(
                    Warned(
                        f"{why}\nIt is started again ({self.restarts} of at most {RESTARTS} times); its requests go on "
                        f"from their tokens"
                    )
                )
                fresh = self._start()
                try:
                    await fresh.ready()
                    await fresh.open(self._longest)
                    if self.catch_up is not None:
                        self.version = await self.catch_up(fresh)
                except BaseException as error:
                    if fresh.alive or not isinstance(error, WorkerError):
                        fresh.dismiss()
                        raise
                    why = error
                else:
                    self._worker = fresh


class WorkerRole:
    """One of the objects of a worker: `await WorkerRole(worker, "trainer").step(batch)` asks it for "trainer.step"."""

    def __init__(self, worker: Any, role: str) -> None:
        self.worker, self._role = worker, role

    def __getattr__(self, verb: str) -> Any:
        if verb.startswith("_"):
            raise AttributeError(verb)
        return getattr(self.worker, f"{self._role}.{verb}")

    def ask(self, verb: str, *args: Any) -> Any:
        return self.worker.ask(f"{self._role}.{verb}", *args)

    @property
    def alive(self) -> bool:
        return bool(self.worker.alive)

    @property
    def fate(self) -> str:
        return str(self.worker.fate)


class RemoteTrainer:
    """All ranks of a trainer: each is asked the same, the first one's answer counts, an error of one is everyone's."""

    def __init__(self, ranks: Sequence[RemoteProxy]) -> None:
        self._ranks = ranks
        self.moved = False

    async def annotate(self, batch: TrainBatch, needs: frozenset[str]) -> TrainBatch:
        await _copy_tokens(batch, await self._call_ranks("annotate", batch, needs))
        return batch

    async def step(self, batch: TrainBatch, algo: Any) -> StepStats:
        stats, self.moved, told = await self._call_ranks("step", batch, algo)
        await _copy_tokens(batch, told)
        return stats

    def __getattr__(self, verb: str) -> Any:
        if verb.startswith("_"):
            raise AttributeError(verb)

        async def call(*args: Any) -> Any:
            return await self._call_ranks(verb, *args)

        return call

    async def find_lost_rank(self) -> WorkerError | None:
        """A rank that has ended. Who reads its memory may know before we do, so a moment is waited for it."""
        for _ in range(int(MOMENT / 0.1)):
            if dead := [rank.fate for rank in self._ranks if not rank.alive]:
                return WorkerError(dead[0])
            await asyncio.sleep(0.1)
        return None

    async def _call_ranks(self, verb: str, *args: Any) -> Any:
        ways = {_packing_of(rank) for rank in self._ranks}
        if args and len(ways) == 1 and (pack := ways.pop()):
            args = await asyncio.to_thread(pack, args)  # once for all of them, and beside the event loop
        answers = [asyncio.ensure_future(getattr(rank, verb)(*args)) for rank in self._ranks]
        await asyncio.sleep(0)  # they are sent
        del args  # memory that ranks map is given up by the thread that sent it, and not here
        try:
            await asyncio.wait(answers, return_when=asyncio.FIRST_EXCEPTION)
            if any(answer.done() and answer.exception() for answer in answers):
                await asyncio.wait(answers, timeout=MOMENT)  # one that ended explains what the others complain of
                raise self._first_cause(answers)
        finally:
            for answer in answers:
                answer.cancel()
        return answers[0].result()

    def _first_cause(self, answers: list[asyncio.Future[Any]]) -> BaseException:
        """Of several errors the one that others follow from: who ended, then who has not come
        where the others wait, then the first.
        """
        errors = {i: error for i, answer in enumerate(answers) if answer.done() and (error := answer.exception())}
        if ended := [error for i, error in errors.items() if not self._ranks[i].alive]:
            return ended[0]
        first = next(iter(errors.values()))
        if not isinstance(first, StalledError):
            return first
        late = ", ".join(f"trainer-{i}" for i, answer in enumerate(answers) if not answer.done())
        return stalled_error(
            f"{first}; {f'{late} has not come' if late else 'all of them wait, at different places'}", SilentError
        )


async def _copy_tokens(batch: TrainBatch, told: list[TokenBatch]) -> None:
    """What the ranks found out about their copies of the samples."""
    known = [sample.known for sample in batch.samples]
    for sample, learned in zip(batch.samples, told, strict=True):
        sample.known = learned
    await drop_in_turns(known, lambda tokens: len(tokens.sample))


def _packing_of(rank: RemoteProxy) -> Any:
    """How the arguments of calls to several workers of its kind are packed once, if they can be."""
    return getattr(type(rank.worker if isinstance(rank, WorkerRole) else rank), "pack_arguments", None)
