"""Answers that are watched while they are written, so that a process reward values each finished step meanwhile.

engine ──progress, 20 times a second──> text so far ──a separator is complete──> pool.precompute, one call an answer at a time
                                                    └─the answer is whole──────> pool.score: what is left

Nothing here decides a number: the reward compares what it valued early with the answer that it scores, and values anew
what differs. An answer that is parked writes nothing; one that goes on, also under other weights or after a crash, is
told from its first token; one that is given up is forgotten.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from rondel.core.errors import EngineError, StalledError, WorkerError, error_text
from rondel.core.events import Warned, emit
from rondel.core.types import Failed, Score, Task, Trajectory, Turn
from rondel.generate.engine.builtin.text import IncrementalDetokenizer

INTERVAL = 0.05  # seconds between two questions to the engine
# the answer that is watched for the task that asks
CURRENT_ANSWER: ContextVar[AnswerWatch | None] = ContextVar("rondel_answer_watch", default=None)


class EarlyPool(Protocol):
    """What values steps: `RewardPool`."""

    separators: tuple[str, ...]

    async def precompute(self, episode: int, trajectory: Trajectory, task: Task, unfinished: bool) -> bool: ...
    def forget(self, episode: int) -> None: ...
    async def score(self, trajectory: Trajectory, task: Task, episode: int | None = None) -> Score | Failed: ...


@dataclass(eq=False)
class TurnText:
    """The text of a turn that is being written; `ended` is how many separators it has."""

    reader: IncrementalDetokenizer
    tokens: list[int] = field(default_factory=list)
    ended: int = 0

    def read(self, first: int, tokens: Sequence[int]) -> None:
        """Tokens from the first on; from 0 where the turn was begun again."""
        if first < len(self.tokens):
            self.tokens, self.reader, self.ended = [], IncrementalDetokenizer(self.reader.decode, ()), 0
        if tokens:
            self.tokens += tokens
            self.reader.find_stop(self.tokens)

    def ends_step(self, separators: Sequence[str]) -> bool:
        """Whether a separator was completed since it was asked last."""
        before, self.ended = self.ended, sum(self.reader.text.count(separator) for separator in separators)
        return self.ended > before


class AnswerWatch:
    """One answer, from its first token to its score: `number` is what the reward knows it by."""

    def __init__(self, watch: StepWatch, number: int, task: Task) -> None:
        self.watch, self.number, self.task = watch, number, task
        self.spoken: list[Turn] = []  # the conversation before the turn that is being written
        self.pending: tuple[list[Turn], bool] | None = None  # what is new to the reward; whether its end is unfinished
        self.sender: asyncio.Task[None] | None = None
        self.done = self.scored = False

    @contextmanager
    def turn(self, chat: Any, key: int) -> Iterator[None]:
        """While the policy writes a turn. Another agent's conversation in the same episode is not watched, nor a branch
        that does not go on from what was said.
        """
        spoken = _plain_turns(chat)
        if self.done or spoken[: len(self.spoken)] != self.spoken:
            yield
            return
        self.spoken = spoken
        text = TurnText(IncrementalDetokenizer(lambda ids: chat.tokenizer.decode(ids, skip_special_tokens=True), ()))
        self.watch.add(key, self, text)
        try:
            yield
        finally:
            self.watch.remove(key)

    def end_turn(self, chat: Any) -> None:
        """A turn is whole, and its last step with it: there is time to value it if the episode goes on."""
        spoken = _plain_turns(chat)
        if not self.done and spoken[: len(self.spoken)] == self.spoken:
            self.spoken, self.pending = spoken, (spoken, False)

    def read(self, text: TurnText) -> None:
        """More of the turn that is being written."""
        if text.ends_step(self.watch.pool.separators):
            self.pending = ([*self.spoken, Turn("assistant", text.reader.text, 0, 0, True)], True)

    def send(self) -> None:
        """What is new goes to the reward, one call at a time."""
        if self.pending and self.sender is None and not self.done:
            self.sender = asyncio.create_task(self._send_pending())

    async def _send_pending(self) -> None:
        """A reward that could not value it is not asked again before the answer is whole."""
        while self.pending and not self.done:
            (turns, unfinished), self.pending = self.pending, None
            early = Trajectory(conversation=turns)
            self.done = not await self.watch.pool.precompute(self.number, early, self.task, unfinished) or self.done
        self.sender = None

    async def score(self, trajectory: Trajectory) -> Score | Failed:
        await self.stop()
        score = await self.watch.pool.score(trajectory, self.task, self.number)
        self.scored = True
        return score

    async def stop(self) -> None:
        """Nothing is sent any more: the next that the reward hears of it is the last."""
        self.done, sender = True, self.sender
        if sender is not None:
            sender.cancel()
            await asyncio.wait([sender])


def _plain_turns(chat: Any) -> list[Turn]:
    """What was said, wherever its tokens lie."""
    return [turn._replace(start=0, end=0) for turn in chat.trajectory.conversation]


class StepWatch:
    """The answers that are being written, and the loop that asks what they have by now."""

    def __init__(self, pool: EarlyPool, engine: Callable[[], Any], interval: float = INTERVAL) -> None:
        self.pool, self.engine, self.interval = pool, engine, interval
        self.turns: dict[int, tuple[AnswerWatch, TurnText]] = {}  # by the key of the request
        self.answers: set[AnswerWatch] = set()
        self._numbers = itertools.count(1)
        self._loop: asyncio.Task[None] | None = None
        self._can: bool | None = None  # whether the engine says what its requests have written

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[AnswerWatch | None]:
        """An answer to it is watched by the task that is in this block, until it is scored. None where it cannot be."""
        if not await self._can_watch():
            yield None
            return
        answer = AnswerWatch(self, next(self._numbers), task)
        self.answers.add(answer)
        before = CURRENT_ANSWER.set(answer)
        try:
            yield answer
        finally:
            CURRENT_ANSWER.reset(before)
            self.answers.discard(answer)
            await answer.stop()
            if not answer.scored:
                self.pool.forget(answer.number)

    def add(self, key: int, answer: AnswerWatch, text: TurnText) -> None:
        self.turns[key] = (answer, text)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._watch())

    def remove(self, key: int) -> None:
        self.turns.pop(key, None)

    async def _can_watch(self) -> bool:
        if self._can is None:
            try:
                self._can = "progress" in (await self.engine().status()).capabilities
            except (EngineError, WorkerError, StalledError):
                return False  # not now: who asks it for an answer hears why, and the next answer finds out
            if not self._can:
                emit(
                    Warned(
                        "task.reward.pipelined: this engine does not say what its requests have written, so steps are "
                        'valued when an answer is whole. engine.kind = "builtin" says it'
                    )
                )
        return self._can

    async def _watch(self) -> None:
        """While anything is being written, or a step waits to be sent."""
        while self._can and self.answers:
            await asyncio.sleep(self.interval)
            known = {key: len(text.tokens) for key, (_, text) in self.turns.items()}
            try:
                told = await self.engine().progress(known) if known else {}
            except (EngineError, WorkerError, StalledError):
                continue  # those whose requests it had hear of it
            except Exception as error:
                self._can = False
                emit(Warned(f"steps are valued when an answer is whole: {error_text(error)}"))
                return
            for key, (first, tokens) in told.items():
                if key in self.turns:
                    answer, text = self.turns[key]
                    text.read(first, tokens)
                    answer.read(text)
            for answer in list(self.answers):
                answer.send()
