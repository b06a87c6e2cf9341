"""One request in the engine of blocks: whole blocks, and one that is being filled in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rondel.core.errors import UserError
from rondel.core.types import Completion, FinishReason, Request
from rondel.core.unmasking_steps import ABSENT, MASKED, UnmaskingSteps
from rondel.generate.engine.stepwise.answer import Answer, refuse_sampling
from rondel.models.block_diffusion.settings import BlockSettings


class UnmaskedToken(NamedTuple):
    """A token of a block: what was drawn, how likely, by which weights, and the row of `UnmaskingSteps` of its draw."""

    token: int
    logprob: float
    version: int
    row: np.ndarray


WHAT = "a model that fills in blocks of masks"


@dataclass(slots=True, eq=False)
class BlockSequence(Answer):
    """A request and what has been drawn of it. A block counts when it is whole: until then its tokens are nobody's.

    total    tokens of the answer at most, with those of a continuation
    state    [B] the block that is being filled in: tokens, MASKED, ABSENT behind the last position
    step     of this block
    taken    steps of the blocks before it
    begun    its tokens, by position
    kept     tokens of whole blocks drawn here
    read     what the answer consists of: the tokens of the request's continuation and those of `kept`
    """

    settings: BlockSettings
    stops: frozenset[int]
    decode: Callable[[list[int]], str]
    prompt: np.ndarray
    read: list[int]
    total: int
    state: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    step: int = 0
    taken: int = 0
    ended: bool = False
    begun: dict[int, UnmaskedToken] = field(default_factory=dict)
    kept: list[UnmaskedToken] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        request: Request,
        done: asyncio.Future[Completion],
        settings: BlockSettings,
        stops: frozenset[int],
        decode: Callable[[list[int]], str],
    ) -> BlockSequence:
        refuse_sampling(request.sampling, WHAT)
        tokens, given = np.asarray(request.tokens, np.int32), request.continuation
        if given % settings.block:
            raise UserError(
                f"a continuation of {given} tokens for a model of blocks of {settings.block}: only whole blocks go on"
            )
        if given >= len(tokens):
            raise UserError("a request without a prompt: blocks of masks stand behind one token at least")
        first = len(tokens) - given
        own = frozenset() if request.sampling.ignore_eos else stops
        read, total = tokens[first:].tolist(), given + request.sampling.max_tokens
        made = cls(request, done, settings, own, decode, tokens[:first], read, total)
        made._open_block()
        return made

    def _open_block(self) -> None:
        """The next block, all of it masked."""
        length = min(self.settings.block, self.total - len(self.read))
        self.state, self.step = np.full(self.settings.block, MASKED, np.int32), 0
        self.state[length:] = ABSENT
        self.begun = {}

    @property
    def is_begun(self) -> bool:
        return bool(self.kept or self.begun)

    @property
    def drawn(self) -> str:
        return f"{len(self.kept) + len(self.begun)} tokens"

    @property
    def reached(self) -> tuple[int, int]:
        return self.taken + self.step, len(self.kept)

    @property
    def is_whole(self) -> bool:
        return self.ended or len(self.read) >= self.total

    @property
    def masked(self) -> np.ndarray:
        """Positions that are still masked."""
        return np.flatnonzero(self.state == MASKED)

    def append_step(self, places: list[int], tokens: list[int], logprobs: list[float], version: int) -> bool:
        """What one step has drawn, at these positions of the block. -> whether the block is whole now

        Behind a stop token nothing is drawn any more: masks there become that token, as in a demonstration, and what
        was drawn there before is cut.
        """
        row = np.concatenate([np.array([self.step], np.int32), self.state])
        self.state = self.state.copy()
        for place, token, logprob in zip(places, tokens, logprobs, strict=True):
            self.begun[place] = UnmaskedToken(token, logprob, version, row)
            self.state[place] = token
        self.step += 1
        if (end := self._stop_place()) is not None:
            behind = self.state[end:]
            behind[behind == MASKED] = self.state[end]
        return not len(self.masked)

    def _stop_place(self) -> int | None:
        found = [place for place, own in self.begun.items() if own.token in self.stops]
        return min(found) if found else None

    def close_block(self) -> list[UnmaskedToken]:
        """The tokens of a whole block, up to a stop token, join the answer. -> they"""
        end = self._stop_place()
        last = int((self.state != ABSENT).sum()) - 1 if end is None else end
        return self.join_block([self.begun[place] for place in range(last + 1)])

    def join_block(self, tokens: list[UnmaskedToken]) -> list[UnmaskedToken]:
        """Drawn now, or in an earlier life."""
        self.kept += tokens
        self.taken, self.step = self.taken + 1 + max(int(own.row[0]) for own in tokens), 0
        self.read += [own.token for own in tokens]
        self.ended = tokens[-1].token in self.stops
        if not self.is_whole:
            self._open_block()
        return tokens

    def completion(self, reason: FinishReason) -> Completion:
        """The whole blocks; "length" where none of them has ended the text."""
        if reason == "stop" and not self.ended:
            reason = "length"
        tokens = [own.token for own in self.kept]
        return Completion(
            tokens,  # type: ignore[arg-type]
            [own.logprob for own in self.kept],  # type: ignore[arg-type]
            [own.version for own in self.kept],  # type: ignore[arg-type]
            reason,
            prompt_tokens=len(self.prompt),
            text=self.decode(tokens),
            steps=UnmaskingSteps.of_tokens([own.row for own in self.kept], self.settings.block),
        )
