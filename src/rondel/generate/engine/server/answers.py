"""The samples of one HTTP request while they are written: tokens as they are drawn,
text as it becomes certain, stop strings.

tokens   t0 t1 t2 t3 ...            each with logprob and version
text     |sent to a stream|held back: half a character, or what may become a stop string|
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rondel.core.types import Completion, Request
from rondel.generate.engine.builtin.text import IncrementalDetokenizer, first_stop


@dataclass(slots=True)
class SampleAnswer:
    """One sample: `index` is its place in the reply, `prompt` what it answers,
    `reader` grows its text if it is streamed.
    """

    index: int
    prompt: list[int]
    stops: tuple[str, ...] = ()
    reader: IncrementalDetokenizer | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    text: str = ""  # what a stream has been given, in the end all of it
    completion: Completion | None = None

    def append_token(
        self,
        reader: IncrementalDetokenizer,
        token: int,
        logprob: float,
        version: int,
        top: list[tuple[int, float]] | None,
    ) -> str:
        """-> the next piece of text that no later token can take back."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if top is not None:
            self.top.append(top)
        known = len(reader.text)
        reader.find_stop(self.tokens)
        piece = reader.text[len(self.text) : self._stop_boundary(reader.text, known)]
        self.text += piece
        return piece

    def _stop_boundary(self, text: str, known: int) -> int:
        """Where a stop string may begin: one that this token completed, or one that the text ends in the middle of."""
        whole = first_stop(text, self.stops, known)
        half = len(text) - max((_stop_overlap(text, stop) for stop in self.stops), default=0)
        return half if whole is None else min(half, whole)

    def cut_to(self, n: int) -> None:
        """No more than the first n tokens, as if it had been limited to them."""
        del self.tokens[n:], self.logprobs[n:], self.versions[n:], self.top[n:]
        self.text = self.text if n else ""
        if self.completion is not None:
            self.completion.finish_reason = "length"

    def finish_answer(self, completion: Completion) -> str:
        """-> the rest of the text."""
        rest = (completion.text or "")[len(self.text) :]
        self.completion, self.text = completion, self.text + rest
        self.tokens, self.logprobs = list(completion.tokens), list(completion.logprobs)
        self.versions = list(completion.versions)
        self.top = completion.top_logprobs or []
        return rest


def _stop_overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class AnswerDelta(NamedTuple):
    """What is new in an answer: text, and tokens from `first` up to `last`. `ends` at its last piece."""

    answer: SampleAnswer
    text: str
    first: int
    last: int
    ends: bool = False


class RequestSamples:
    """All samples of one HTTP request. They end together: if one is refused, or the client leaves, the others stop."""

    def __init__(self, engine: Any, pairs: list[tuple[SampleAnswer, Request]]) -> None:
        self.engine, self.pairs = engine, pairs
        self.answers = [answer for answer, _ in pairs]
        self._pieces: asyncio.Queue[AnswerDelta | None] = asyncio.Queue()

    async def _generate_one(self, answer: SampleAnswer, request: Request) -> None:
        reader = answer.reader
        if reader is None:
            answer.finish_answer(await self.engine.generate(request))
            return

        def on_token(token: int, logprob: float, version: int, top: list[tuple[int, float]] | None) -> None:
            text, at = answer.append_token(reader, token, logprob, version, top), len(answer.tokens)
            self._pieces.put_nowait(AnswerDelta(answer, text, at - 1, at))

        rest = answer.finish_answer(await self.engine.generate(request, on_token=on_token))
        self._pieces.put_nowait(AnswerDelta(answer, rest, len(answer.tokens), len(answer.tokens), ends=True))

    async def gather_answers(self) -> list[SampleAnswer]:
        tasks = [asyncio.create_task(self._generate_one(*pair)) for pair in self.pairs]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self._pieces.put_nowait(None)
        return self.answers

    async def stream_deltas(self) -> AsyncGenerator[AnswerDelta]:
        """As they come; the last of each answer `ends` it. Left early, everything ends."""
        work = asyncio.create_task(self.gather_answers())
        try:
            while (piece := await self._pieces.get()) is not None:
                yield piece
            await work
        finally:
            work.cancel()
            await asyncio.wait([work])
            if not work.cancelled():
                work.exception()  # told already, or nobody is left to tell
