"""The token log of blocks: after a crash a text goes on behind its last whole block (law 15)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rondel.generate.engine.blocks.block_sequence import UnmaskedToken

if TYPE_CHECKING:
    from rondel.generate.engine.blocks.block_sequence import BlockSequence
    from rondel.runtime.journal.wal import TokenLog


class BlockLog:
    """Each token of a whole block is a row of the log. Its `UnmaskingSteps` row stands where a mixture's routes do,
    [1, 1, 2·(1 + B)] halves of its int32 numbers; without a log nothing is kept.
    """

    def __init__(self, log: TokenLog | None) -> None:
        self.log = log

    def restore(self, sequence: BlockSequence) -> None:
        """Mark a new sequence, and give it the blocks that it had drawn in an earlier life."""
        request, size = sequence.request, sequence.settings.block
        if self.log is None or not request.key or request.namespace or request.wants:
            return
        sequence.mark = self.log.context_hash(sequence.prompt.tolist())
        block: list[UnmaskedToken] = []
        for found in self.log.recall_tokens(request.key, sequence.mark, first=len(sequence.read)):
            if sequence.is_whole or found.routes is None:
                break
            halves = np.asarray(found.routes[1]).astype(np.uint16).reshape(-1)
            if len(halves) != 2 * (1 + size):
                break  # of a run with another model
            block.append(UnmaskedToken(found.token, found.logprob, found.version, halves.view(np.int32)))
            if len(block) == (sequence.state >= -1).sum() or found.token in sequence.stops:
                sequence.join_block(block)
                block = []

    def record_block(self, sequence: BlockSequence, tokens: list[UnmaskedToken]) -> None:
        """A block that is whole now, before anyone sees it."""
        if self.log is None or not sequence.mark:
            return
        first, key = len(sequence.read) - len(tokens), sequence.request.key
        rows = [(key, first + at, sequence.mark, own.logprob, own.token, own.version) for at, own in enumerate(tokens)]
        halves = [np.ascontiguousarray(own.row).view(np.uint16).reshape(1, 1, -1) for own in tokens]
        self.log.write(rows, [(first + at, own) for at, own in enumerate(halves)])

    def record_version(self, version: int, root: str) -> None:
        if self.log is not None:
            self.log.record_version(version, root)
