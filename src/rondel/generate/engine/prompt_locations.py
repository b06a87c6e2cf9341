"""Which replica has computed which beginnings of prompts, so that the next turn of an episode goes where
the last one lies.

A prompt is known by its blocks of 64 tokens: the hash of a block is taken with that of the block before it. Behind
4,096 tokens a block has 1/64 of what is before it, so that a million tokens are some 400 blocks
and a few milliseconds of the event loop.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

from rondel.core.types import IDS

Replica = TypeVar("Replica", bound=Hashable)
BLOCK = 64  # tokens, at least
GROWTH = 64  # a block is at most this part of the tokens before it, where that is more


class PromptLocations(Generic[Replica]):
    """`most` blocks are remembered, those that were computed or asked for last. A wrong answer costs time alone."""

    def __init__(self, most: int = 100_000) -> None:
        self._most = most
        self._blocks: OrderedDict[int, dict[Replica, None]] = OrderedDict()

    def record(self, scope: Hashable, tokens: Sequence[int], replica: Replica) -> None:
        """`scope`: under which weights; the same tokens under others are another prompt."""
        for *_, block in _hash_blocks(scope, tokens):
            self._blocks.setdefault(block, {})[replica] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def known_tokens(self, scope: Hashable, tokens: Sequence[int]) -> dict[Replica, int]:
        """Of each replica that has computed a beginning of this prompt, its tokens in whole blocks."""
        known: dict[Replica, int] = {}
        for start, end, block in _hash_blocks(scope, tokens):
            if not (found := self._blocks.get(block)):
                break
            self._blocks.move_to_end(block)
            for replica in found:
                if known.get(replica, 0) == start:  # all blocks before it, too
                    known[replica] = end
        return known

    def forget(self) -> None:
        """Other weights serve: keys and values of these ones are worth nothing."""
        self._blocks.clear()


def _hash_blocks(scope: Hashable, tokens: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """-> of each whole block its first token, that behind its last, and its hash."""
    before, start = hash(scope), 0
    column = None
    if isinstance(tokens, array) and tokens.typecode == IDS:
        column = memoryview(tokens)  # a slice of it copies nothing
    while (end := start + max(BLOCK, start // GROWTH)) <= len(tokens):
        block = array(IDS, tokens[start:end]) if column is None else column[start:end]
        before = hash((before, block.tobytes()))
        yield start, end, before
        start = end
