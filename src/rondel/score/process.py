"""A process reward: each step of the answer gets a value, from a model with a head
for tokens or from a function of yours.
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from rondel.core.errors import ConfigError
from rondel.core.registry import one_of
from rondel.core.types import Failed, Score, Task, Trajectory, Turn
from rondel.score.answer_text import asked_of, question_text, turns_of
from rondel.score.clock import EPISODE, pause_clock
from rondel.score.step_model import GrowingText, TokenModel
from rondel.score.step_scorer import StepScorer, ValuedSteps, check_values
from rondel.text.unicode import valid_unicode

AGGREGATES: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "mean": lambda values: math.fsum(values) / len(values),
    "last": lambda values: values[-1],
    "sum": math.fsum,
}


def steps_of(text: str, separator: str) -> list[tuple[str, int]]:
    """(step, its end in characters): steps_of("a\\n\\nbc", "\\n\\n") -> [("a", 1), ("bc", 5)]. Empty steps are none."""
    found, at = [], 0
    for piece in text.split(separator):
        end = at + len(piece)
        if piece.strip():
            found.append((piece, end))
        at = end + len(separator)
    return found


@dataclass(eq=False)
class EarlyAnswer:
    """What is known of an answer that is still being written.

    lock    one call at a time extends it; `closed` when the answer is whole, and its own call does the rest
    """

    valued: ValuedSteps = field(default_factory=ValuedSteps)
    text: GrowingText = field(default_factory=GrowingText)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    closed: bool = False


class ProcessReward:
    """The aggregate of the steps' values, or, with `tokenizer`, each value at the last token of its step.

    path or scorer   a token classifier, or "module:name": `(steps, task) -> values`, plain or async; with a parameter
                     `first` it values steps[first:] alone
    separator        of steps, and what the model reads after each: its value stands at that token
    aggregate        min, mean, last or sum. Placed values add up to it, so only mean and sum can be placed
    tokenizer        of the policy, by which a character's place becomes a token's
    pipelined        a step is valued when it is written, while the answer goes on: with the same result, because its
                     value depends on nothing behind it
    """

    def __init__(
        self,
        *,
        path: str | None = None,
        scorer: str | None = None,
        separator: str = "\n\n",
        aggregate: str = "min",
        tokenizer: str | None = None,
        together: int = 64,
        pipelined: bool = False,
        **settings: Any,
    ) -> None:
        one_of("process reward: aggregate", aggregate, AGGREGATES)
        if (path is None) == (scorer is None) or (scorer and settings):
            raise ConfigError(
                "reward 'process' needs one of path = 'model' (and its settings) or scorer = 'module:name'"
            )
        if not separator:
            raise ConfigError("reward 'process': separator is empty; steps are split by it")
        if tokenizer and aggregate not in ("mean", "sum"):
            raise ConfigError(
                f"reward 'process': values that are placed at tokens add up, so aggregate = '{aggregate}' needs no "
                f"tokenizer; or use sum or mean"
            )
        self.separator, self.aggregate, self.together = separator, aggregate, max(2, together)
        self.scorer = StepScorer(scorer, together=self.together, pipelined=pipelined) if scorer else None
        self.model = TokenModel(path=path, together=together, pipelined=pipelined, **settings) if path else None
        self.counts: dict[str, float] = self.model.counts if self.model else defaultdict(float)
        self.separators = {separator} if pipelined else set[str]()
        self.early: dict[int | None, EarlyAnswer] = {}  # by episode
        self._places = asyncio.Semaphore(self.together)
        self.naps = self.model is not None and self.model.naps
        self.tokenizer: Any = None
        if tokenizer:
            from transformers import AutoTokenizer

            self.tokenizer = AutoTokenizer.from_pretrained(tokenizer)

    def load_to_device(self) -> None:
        if self.model:
            self.model.load_to_device()

    async def wake(self) -> None:
        if self.model:
            await self.model.wake()

    async def sleep(self) -> None:
        if self.model:
            await self.model.sleep()

    @property
    def memory(self) -> int:
        return self.model.memory if self.model else 0

    async def __call__(self, trajectory: Trajectory, task: Task) -> Score | Failed:
        began, turns = time.monotonic(), turns_of(trajectory)
        of = [steps_of(turn.text, self.separator) if turn.written else [] for turn in turns]
        if not any(of):
            return Failed("answer has no steps")
        values = await self._value_steps(trajectory, task, turns, of)
        if isinstance(values, Failed):
            return values
        if self.separators:
            self.counts["process_steps"] += len(values)
            self.counts["process_wait_seconds"] += time.monotonic() - began
        total = AGGREGATES[self.aggregate](values)
        if self.tokenizer is None or not trajectory.tokens:
            return Score(total)
        share = 1.0 if self.aggregate == "sum" else 1 / len(values)
        places = [
            place
            for turn, own in zip(turns, of)
            for place in self._step_tokens(trajectory, turn, [end for _, end in own])
        ]
        return Score(total, steps=tuple((place, share * value) for place, value in zip(places, values)))

    async def _value_steps(
        self, trajectory: Trajectory, task: Task, turns: list[Turn], of: list[list[tuple[str, int]]]
    ) -> list[float] | Failed:
        """Of a whole answer. Those that were valued while it was written are not valued again."""
        early = self.early.get(EPISODE.get()) or EarlyAnswer()
        early.closed = True
        steps, known, read = _texts(of), len(early.valued.steps), len(early.text.ids)
        with pause_clock():  # what is being valued has a clock of its own
            await early.lock.acquire()
        try:
            if self.scorer:
                if early.valued.values_of(steps):
                    self.counts["process_early_steps"] += known
                return await self.scorer.value_steps(steps, task, early.valued)
            assert self.model
            ids, ends = self.encode_steps(asked_of(trajectory, task), turns, of)
            if len(ids) > (most := self.model.most):
                return Failed(
                    "text does not fit the reward model", f"it has {len(ids)} tokens, and the model reads {most}"
                )
            if early.text.known_of(ids):
                self.counts["process_early_steps"] += sum(end < read for end in ends)
            said = await self.model.value_rest(early.text, ids)
            return check_values([said[end] for end in ends], len(ends))
        finally:
            early.lock.release()

    # -- while an answer is written ------------------------------------------------------------------

    async def precompute(self, episode: int, trajectory: Trajectory, task: Task, unfinished: bool) -> None:
        """Value the steps that an answer has by now; of an unfinished last turn those behind which a separator stands.
        What raises here raises again when the answer is scored, and counts then.
        """
        early = self.early.setdefault(episode, EarlyAnswer())
        turns = turns_of(trajectory)
        of = [steps_of(turn.text, self.separator) if turn.written else [] for turn in turns]
        if unfinished:
            of[-1] = steps_of(turns[-1].text.rpartition(self.separator)[0], self.separator)
        async with self._early_place(), early.lock:
            if early.closed or not (steps := _texts(of)):
                return
            began = time.monotonic()
            if self.model:
                await self.model.read_ahead(early.text, self.encode_steps(asked_of(trajectory, task), turns, of)[0])
            elif self.scorer and self.scorer.agrees:
                await self.scorer.extend(early.valued, steps, task)
            self.counts["process_early_seconds"] += time.monotonic() - began

    @asynccontextmanager
    async def _early_place(self) -> AsyncIterator[None]:
        """Among the steps that are valued early, when nobody waits for a score: not on the clock of the call."""
        async with AsyncExitStack() as ends:
            with pause_clock():
                await ends.enter_async_context(self._places)
                if self.model:
                    await ends.enter_async_context(self.model.quiet())
            yield

    async def forget(self, episode: int) -> None:
        """The answer is scored, or nobody will ask for it."""
        if early := self.early.pop(episode, None):
            early.closed = True
            if self.model:
                async with early.lock:
                    self.model.drop_text(early.text)

    def take_warning(self) -> str:
        if self.scorer is None:
            return ""
        found, self.scorer.warning = self.scorer.warning, ""
        return found

    def encode_steps(
        self, asked: list[dict[str, str]], turns: list[Turn], of: list[list[tuple[str, int]]]
    ) -> tuple[list[int], list[int]]:
        """(tokens, where each step's value stands): at the last token of the separator behind it. What was
        asked stands before the first step, and what tools and users said between the turns where they said it."""
        assert self.model
        special = self.model.special
        question = question_text(asked)
        ids = special.encode(
            special.cover_control_tokens(valid_unicode(question)) + self.separator, add_special_tokens=True
        )
        ends = []
        for turn, steps in zip(turns, of):
            for text in [step for step, _ in steps] if turn.written else [turn.text]:
                covered = special.cover_control_tokens(valid_unicode(text)) + self.separator
                ids += special.encode_behind(self.separator if self.separator in special.names else "\n", covered)
                ends += [len(ids) - 1] * turn.written
        return ids, ends

    def _step_tokens(self, trajectory: Trajectory, turn: Turn, ends: list[int]) -> list[int]:
        """For each character of a turn behind a step, the token that the policy wrote it with.
        Tokens are decoded, never the text encoded.
        """
        written = [at for at in range(turn.start, turn.end) if trajectory.mask[at]] if ends else []
        tokens = [trajectory.tokens[at] for at in written]
        counts = range(1, len(written) + 1)
        places = [
            bisect_left(counts, end, key=lambda n: len(self.tokenizer.decode(tokens[:n], skip_special_tokens=True)))
            for end in ends
        ]
        return [written[min(place, len(written) - 1)] for place in places]


def _texts(of: list[list[tuple[str, int]]]) -> list[str]:
    return [step for own in of for step, _ in own]
