"""The engine of a block-diffusion model: one device and one module, which it may share with the trainer.

A block of B masks stands behind the prompt and the blocks before it. Each step asks the model for all its masked
positions, draws tokens at those where its distribution is most certain, and leaves the others masked. Which positions
these are follows from the distributions alone, so the log-probability of what was drawn is exact. Token t of a sample
draws with its own noise (`draw_uniform`), in whichever step that is.

Keys and values of prompts and whole blocks are cached while an answer reads them: a step computes the blocks that are
being filled in, and what has become whole since the last one.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rondel.core.errors import UserError
from rondel.core.types import Completion, Request
from rondel.generate.engine.blocks.block_log import BlockLog
from rondel.generate.engine.blocks.block_sequence import WHAT, BlockSequence
from rondel.generate.engine.builtin.sampler import draw_uniform, sample_tokens, sampling_weights
from rondel.generate.engine.stepwise.answer import refuse_overlong
from rondel.generate.engine.stepwise.engine import StepwiseEngine
from rondel.models.block_diffusion.block_cache import BlockCache, BlockState, CachedPass
from rondel.models.block_diffusion.packed_blocks import hide_masks
from rondel.models.block_diffusion.probe import score_prompt

if TYPE_CHECKING:
    from rondel.models.block_diffusion.settings import BlockSettings
    from rondel.models.loaded_model import LoadedModel

Drawn = tuple[list[int], list[int], list[float]]  # positions of a block, tokens, log-probabilities


class BlockEngine(StepwiseEngine[BlockSequence]):
    """The Engine protocol over a `LoadedModel` that has `blocks`."""

    log_kind = BlockLog
    log: BlockLog

    def __init__(self, loaded: LoadedModel, **how: Any) -> None:
        super().__init__(loaded, **how)
        self.cache, self.computed = BlockCache(), 0

    def forget_weights(self) -> None:
        self.cache.clear()

    @property
    def cache_bytes(self) -> int:
        return self.cache.bytes_held

    @property
    def settings(self) -> BlockSettings:
        assert self.loaded.blocks is not None
        return self.loaded.blocks

    def open_answer(self, request: Request, done: asyncio.Future[Completion]) -> BlockSequence:
        if request.wants:
            raise UserError(
                f"{', '.join(sorted(request.wants))} with {WHAT}: it tells only what it drew; leave them out"
            )
        refuse_overlong(request, self.context_limit)
        decode = partial(self.loaded.tokenizer.decode, skip_special_tokens=True)
        return BlockSequence.of(request, done, self.settings, self.loaded.stop_ids, decode)

    @torch.no_grad()
    def draw_step(self, answers: list[BlockSequence]) -> list[Drawn]:
        """Of each block the most certain of its masked positions, in one pass of the model."""
        loaded, masked = self.loaded, [sequence.masked for sequence in answers]
        row = CachedPass.of(self.cache, [state_of(own) for own in answers], loaded.device)
        source = np.concatenate([first + places for first, places in zip(row.states, masked, strict=True)])
        hidden = loaded.hidden_states(hide_masks(row.tokens, loaded), row.positions, row.layout)
        self.computed = len(row.tokens)
        logits = loaded.head.logits(hidden.index_select(0, torch.from_numpy(source).to(loaded.device)))
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
                self.log.record_block(sequence, whole := sequence.close_block())
                if sequence.on_token is not None:
                    for own in whole:
                        sequence.on_token(own.token, own.logprob, own.version, None)
        self.cache.keep_only(state_of(own) for own in self.answers if not own.is_whole)
        self.account.counts["computed"] += self.computed
        return sum(len(tokens) for _, tokens, _ in steps)

    def score_tokens(self, tokens: list[int]) -> list[float]:
        return score_prompt(self.loaded, tokens)


def state_of(sequence: BlockSequence) -> BlockState:
    """What the next step of a request reads."""
    return BlockState(sequence.prompt, np.asarray(sequence.read, np.int32), sequence.state)
