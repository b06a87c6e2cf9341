"""Which replica has computed which beginnings of prompts, so that the next turn of an episode goes where the last one lies.

A prompt is known by its blocks of 64 tokens: the hash of a block is taken with that of the block before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

Replica = TypeVar("Replica", bound=Hashable)
BLOCK = 64  # tokens


class PromptLocations(Generic[Replica]):
    """`most` blocks are remembered, those that were computed or asked for last. A wrong answer costs time alone."""

    def __init__(self, most: int = 100_000) -> None:
        self._most = most
        self._blocks: OrderedDict[int, dict[Replica, None]] = OrderedDict()

    def record(self, scope: Hashable, tokens: Sequence[int], replica: Replica) -> None:
        """`scope`: under which weights; the same tokens under others are another prompt."""
        for block in _hash_blocks(scope, tokens):
            self._blocks.setdefault(block, {})[replica] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def known_tokens(self, scope: Hashable, tokens: Sequence[int]) -> dict[Replica, int]:
        """Of each replica that has computed a beginning of this prompt, its tokens in whole blocks."""
        known: dict[Replica, int] = {}
        for number, block in enumerate(_hash_blocks(scope, tokens)):
            if not (found := self._blocks.get(block)):
                break
            self._blocks.move_to_end(block)
            for replica in found:
                if known.get(replica, 0) == number * BLOCK:  # all blocks before it, too
                    known[replica] = (number + 1) * BLOCK
        return known

    def forget(self) -> None:
        """Other weights serve: keys and values of these ones are worth nothing."""
        self._blocks.clear()


def _hash_blocks(scope: Hashable, tokens: Sequence[int]) -> Iterator[int]:
    before = hash(scope)
    for at in range(0, len(tokens) - BLOCK + 1, BLOCK):
        before = hash((before, *tokens[at : at + BLOCK]))
        yield before
