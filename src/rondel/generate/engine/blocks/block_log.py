"""The token log of blocks: after a crash a text goes on behind its last whole block (law 15)."""

from __future__ import annotations

import numpy as np

from rondel.generate.engine.blocks.block_sequence import BlockSequence, UnmaskedToken
from rondel.generate.engine.stepwise.answer_log import AnswerLog, as_halves


class BlockLog(AnswerLog[BlockSequence]):
    """Each token of a whole block is a row of the log, with the int32 numbers of its `UnmaskingSteps` row."""

    def restore(self, answer: BlockSequence) -> None:
        block: list[UnmaskedToken] = []
        numbers = 1 + answer.settings.block
        for found, halves in self.recall(answer, answer.prompt.tolist(), len(answer.read), numbers):
            if answer.is_whole:
                break
            block.append(UnmaskedToken(found.token, found.logprob, found.version, halves.view(np.int32)))
            if len(block) == (answer.state >= -1).sum() or found.token in answer.stops:
                answer.join_block(block)
                block = []

    def record_block(self, answer: BlockSequence, tokens: list[UnmaskedToken]) -> None:
        """A block that is whole now, before anyone sees it."""
        if self.log is None or not answer.mark:
            return
        first, key = len(answer.read) - len(tokens), answer.request.key
        rows = [(key, first + at, answer.mark, own.logprob, own.token, own.version) for at, own in enumerate(tokens)]
        self.log.write(rows, [(first + at, as_halves(own.row)) for at, own in enumerate(tokens)])
