"""A smaller model with the same tokenizer that writes a few tokens ahead of the large one.

It reads the same tokens through the same page numbers, into pools of its own:

    pages    context ............... | newest | ahead ......       of the scheduler, for both models
    known    yes yes yes yes no  no  | no     | no                 whether the draft has computed what this page holds
                             `- caught up in one pass -´ then a pass a guess

A page forgets when the large model writes something new into it, all pages forget when the draft gets new weights.
Token t of a sample uses four numbers of Philox(key, t), each for one thing: 0 draw, 1
guess, 2 coin, 3 draw after a rejection. A later round may guess the same t again with the
same number: what came of the first guess was
thrown away before anything looked at it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rondel.core.errors import ConfigError, EngineError
from rondel.core.events import Warned, emit
from rondel.generate.engine.builtin.rejection import accept_draft_tokens, residual_weights
from rondel.generate.engine.builtin.request import SequenceState, TokenFeed
from rondel.generate.engine.builtin.sampler import draw_uniform, sample_tokens, sampling_weights
from rondel.models.cache_pools import LayerPools
from rondel.models.vocabulary import same_words

if TYPE_CHECKING:
    from rondel.generate.engine.builtin.request import StepPlan
    from rondel.models.fed_layout import FedLayout
    from rondel.models.loaded_model import LoadedModel
    from rondel.models.paged_layout import PagedLayout

GUESS, COIN, AGAIN = 1, 2, 3  # the numbers of a token, beside 0
FEW = 8  # tokens of one request up to which they are fed row by row, not as a prompt's chunk


class PassBuilder(Protocol):
    """What a draft asks of the runner: the model that it guesses for, and the layout of a pass."""

    loaded: LoadedModel

    def pack_feeds(
        self, chunks: list[TokenFeed], single: list[TokenFeed], keys: LayerPools, values: LayerPools
    ) -> tuple[Tensor, Tensor, PagedLayout | FedLayout, list[int]]: ...


class DraftModel:
    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.seconds = 0.0  # spent on the guesses of the last step
        self.broken = ""  # why it guesses nothing until it gets new weights
        self._odds: dict[
            SequenceState, list[Tensor]
        ] = {}  # [V] each: the weights that every guess of this step was drawn with

    def allocate_pools(self, loaded: LoadedModel, pages: int) -> None:
        """Pools for an engine of this model and so many pages."""
        _check_draft(loaded, self.loaded)
        self.keys, self.values = LayerPools(pages + 1), LayerPools(pages + 1)
        self.known = np.zeros(pages + 1, bool)

    def forget_cache(self) -> None:
        """Its weights are others now."""
        self.known[:] = False
        self.broken = ""

    def release_memory(self) -> None:
        self.forget_cache()
        self.keys.clear()
        self.values.clear()

    # -- on the device's thread ------------------------------------------------------------------

    def propose_drafts(self, runner: PassBuilder, plan: StepPlan) -> None:
        """A guess for every page that was reserved ahead; none, if its numbers overflow: the model needs no guesses."""
        began = time.perf_counter()
        for live, n in plan.chunks:
            self.known[live.pages[live.computed_tokens - n :]] = False
        for live in plan.decoding:
            self.known[[live.pages[-1], *live.ahead]] = False
        self._odds = {live: [] for live in plan.decoding if live.ahead}
        vocab = runner.loaded.vocabulary
        try:
            for i in range(max((len(live.ahead) for live in self._odds), default=0)):
                self._one_more([live for live in self._odds if len(live.ahead) > i], i, vocab, runner)
        except EngineError as error:
            self.broken = str(error)
            for live in self._odds:
                live.guess = []
            emit(Warned(f"the draft '{self.loaded.name}' guesses nothing until it gets new weights: {error}"))
        self.seconds = time.perf_counter() - began

    def _one_more(self, lives: list[SequenceState], i: int, vocab: int, runner: PassBuilder) -> None:
        """Guess i of each, after feeding what the draft has not seen."""

        starts = [live.computed_tokens + i - 1 if i else self._first_uncomputed(live) for live in lives]
        feeds = [TokenFeed(live, first, live.computed_tokens + i - first) for live, first in zip(lives, starts)]
        chunks, single = [f for f in feeds if f.n > FEW], [f for f in feeds if f.n <= FEW]
        ids, at, layout, ends = runner.pack_feeds(chunks, single, self.keys, self.values)
        hidden = self.loaded.hidden_states(ids, at, layout)
        self.known[layout.write.cpu().numpy()] = True
        fed = [f.live for f in [*chunks, *single]]
        logits = self.loaded.head.logits(hidden[[end - 1 for end in ends]])[:, :vocab]
        samplings = [live.request.sampling for live in fed]
        q = sampling_weights(logits, samplings)
        tokens, _ = sample_tokens(
            q, samplings, [draw_uniform(live.request.key, live.noise_counter + i, GUESS) for live in fed]
        )
        for live, token, row in zip(fed, tokens, F.pad(q, (0, vocab - q.shape[1]))):
            live.guess.append(token)
            self._odds[live].append(row)

    def _first_uncomputed(self, live: SequenceState) -> int:
        """The first of its tokens that the draft has not computed; there is one, the newest."""
        return int(self.known[live.pages].argmin())

    def verify_drafts(
        self, lives: list[SequenceState], p: Tensor, tokens: list[int], logprobs: list[float]
    ) -> tuple[list[int], list[float]]:
        """What was drawn in each row of p [R, V] as if nobody had guessed -> the same with
        guesses kept and rejected by their odds.
        """
        first, rows = 0, []  # (request, the row of its guess i, i)
        for live in lives:
            rows += [(live, first + i, i) for i in range(len(live.guess))]
            first += 1 + len(live.guess)
        if not rows:
            return tokens, logprobs
        at = torch.tensor([row for _, row, _ in rows], device=p.device)
        guess = torch.tensor([live.guess[i] for live, _, i in rows], device=p.device)
        coin = torch.tensor(
            [draw_uniform(live.request.key, live.noise_counter + i, COIN) for live, _, i in rows],
            dtype=torch.float64,
            device=p.device,
        )
        stays = accept_draft_tokens(
            p[at], torch.stack([self._odds[live][i] for live, _, i in rows]), guess, coin
        ).tolist()
        tokens, lost, over = list(tokens), [], set()
        for (live, row, i), kept in zip(rows, stays):
            if live in over or live.request.sampling.temperature == 0:  # a greedy draw is its own judge
                continue
            if kept:
                tokens[row] = live.guess[i]
            else:
                over.add(live)
                lost.append((live, row, i))
        if lost:
            rest = residual_weights(
                p[[row for _, row, _ in lost]], torch.stack([self._odds[live][i] for live, _, i in lost])
            )
            noise = [draw_uniform(live.request.key, live.noise_counter + i, AGAIN) for live, _, i in lost]
            for (_, row, _), token in zip(
                lost, sample_tokens(rest, [live.request.sampling for live, _, _ in lost], noise)[0]
            ):
                tokens[row] = token
        stated = p.gather(1, torch.tensor(tokens, device=p.device)[:, None])[:, 0].double() / p.sum(
            -1, dtype=torch.float64
        )
        return tokens, stated.log().clamp_max_(0.0).tolist()


def _check_draft(loaded: LoadedModel, draft: LoadedModel) -> None:
    remedy = 'A draft needs the model\'s own tokenizer: take a smaller model of the same family, or kind = "ngram", which needs none'
    same_words(loaded, draft, who=f"the draft '{draft.name}'", remedy=remedy)
    if draft.max_context < loaded.max_context:
        raise ConfigError(
            f"the draft '{draft.name}' carries {draft.max_context} positions and '{loaded.name}' {loaded.max_context}: "
            f"it must carry as many"
        )
