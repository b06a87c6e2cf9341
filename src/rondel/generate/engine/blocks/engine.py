"""The engine of a block-diffusion model: one device and one module, which it may share with the trainer.

A block of B masks stands behind the prompt and the blocks before it. Each step asks the model for all its masked
positions, draws tokens at those where its distribution is most certain, and leaves the others masked. Which positions
these are follows from the distributions alone, so the log-probability of what was drawn is exact. Token t of a sample
draws with its own noise (`draw_uniform`), in whichever step that is.

Every step computes prompt and whole blocks again, by the layout in which the trainer packs them.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from rondel.core.types import Completion, Request
from rondel.generate.engine.blocks.block_log import BlockLog
from rondel.generate.engine.blocks.block_sequence import BlockSequence
from rondel.generate.engine.builtin.sampler import draw_uniform, sample_tokens, sampling_weights
from rondel.generate.engine.stepwise.engine import StepwiseEngine
from rondel.models.block_diffusion.packed_blocks import BlockRow, PackedBlocks
from rondel.models.block_diffusion.probe import score_prompt

if TYPE_CHECKING:
    from rondel.models.block_diffusion.settings import BlockSettings

Drawn = tuple[list[int], list[int], list[float]]  # positions of a block, tokens, log-probabilities


class BlockEngine(StepwiseEngine[BlockSequence]):
    """The Engine protocol over a `LoadedModel` that has `blocks`."""

    log_kind = BlockLog
    log: BlockLog

    @property
    def settings(self) -> BlockSettings:
        assert self.loaded.blocks is not None
        return self.loaded.blocks

    def open_answer(self, request: Request, done: asyncio.Future[Completion]) -> BlockSequence:
        self.refuse_overlong(request)
        decode = partial(self.loaded.tokenizer.decode, skip_special_tokens=True)
        return BlockSequence.of(request, done, self.settings, self.loaded.stop_ids, decode)

    @torch.no_grad()
    def draw_step(self, answers: list[BlockSequence]) -> list[Drawn]:
        """Of each block the most certain of its masked positions, in one pass of the model."""
        row = BlockRow()
        masked = [sequence.masked for sequence in answers]
        source = [
            row.place_state(own.prompt, np.asarray(own.read, np.int32), own.state) + places
            for own, places in zip(answers, masked, strict=True)
        ]
        packed = PackedBlocks.of_row(row, source, self.loaded.device)
        logits = self.loaded.head.logits(packed.hidden_states(self.loaded))
        samplings = [own.request.sampling for own, places in zip(answers, masked, strict=True) for _ in places]
        weights = sampling_weights(logits, samplings)
        certainty = (1 / weights.sum(-1, dtype=torch.float64)).cpu().numpy()  # the largest weight of a row is 1
        chosen, rows, noise, at = [], [], [], 0
        for own, places in zip(answers, masked, strict=True):
            n = self.settings.count_at(len(places), own.step)
            best = np.sort(np.argsort(-certainty[at : at + len(places)], kind="stable")[:n])
            chosen.append(places[best].tolist())
            rows += (at + best).tolist()
            noise += [draw_uniform(own.request.key, len(own.read) + int(place)) for place in places[best]]
            at += len(places)
        drawn, logprobs = sample_tokens(weights[rows], [samplings[i] for i in rows], noise)
        out, at = [], 0
        for places in chosen:
            out.append((places, drawn[at : at + len(places)], logprobs[at : at + len(places)]))
            at += len(places)
        return out

    def keep_step(self, answers: list[BlockSequence], steps: list[Drawn], version: int) -> int:
        for sequence, (places, tokens, logprobs) in zip(answers, steps, strict=True):
            if sequence.append_step(places, tokens, logprobs, version):
                self.log.record_block(sequence, sequence.close_block())
        return sum(len(tokens) for _, tokens, _ in steps)

    def score_tokens(self, tokens: list[int]) -> list[float]:
        return score_prompt(self.loaded, tokens)
