"""A sample that an engine gave back unfinished goes on from its tokens, under whatever weights serve then (law 15)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

import numpy as np

from rondel.core.types import IDS, NUMBERS, Completion, Request, TokenColumn

if TYPE_CHECKING:
    from rondel.core.drawn_steps import DrawnSteps


async def generate_until_done(
    generate: Callable[[Request], Awaitable[Completion]], request: Request, begun: Completion | None = None
) -> Completion:
    """Ask until it ends by itself: every piece keeps its tokens, logprobs, versions, routes,
    support and likeliest tokens.

    begun    its first piece, where that is known
    """
    pieces = [await generate(request) if begun is None else begun]
    while pieces[-1].finish_reason == "abort":
        tokens = _join_columns(IDS, [piece.tokens for piece in pieces])
        sampling = request.sampling
        rest = replace(
            sampling, max_tokens=sampling.max_tokens - len(tokens), min_tokens=max(0, sampling.min_tokens - len(tokens))
        )
        again = replace(
            request,
            tokens=_join_columns(IDS, [request.tokens, tokens]),
            sampling=rest,
            continuation=request.continuation + len(tokens),
            steps=_join_steps([request, *pieces]),
        )
        pieces.append(await generate(again))
    return join_completions(pieces) if len(pieces) > 1 else pieces[0]


def join_completions(pieces: list[Completion]) -> Completion:
    """One completion of several. Of a token's routes those of the engine that wrote it
    count, so the earliest record stays.
    """
    first, last = pieces[0], pieces[-1]
    experts = first.experts
    for piece in pieces[1:]:
        if experts is not None and piece.experts is not None:
            experts = np.concatenate([experts, piece.experts[len(experts) :]])
    return replace(
        last,
        tokens=_join_columns(IDS, [piece.tokens for piece in pieces]),
        logprobs=_join_columns(NUMBERS, [piece.logprobs for piece in pieces]),
        versions=_join_columns(IDS, [piece.versions for piece in pieces]),
        prompt_tokens=first.prompt_tokens,
        cached_tokens=first.cached_tokens,
        experts=experts,
        text="".join(piece.text for piece in pieces if piece.text)
        if all(piece.text is not None for piece in pieces)
        else None,
        timings={what: sum(piece.timings.get(what, 0.0) for piece in pieces) for what in last.timings},
        raw_logprobs=_join_pieces(pieces, "raw_logprobs"),
        top_logprobs=_join_pieces(pieces, "top_logprobs"),
        support=_join_pieces(pieces, "support"),
        behavior_top=_join_pieces(pieces, "behavior_top"),
        steps=_join_steps(pieces),
        prompt_logprobs=first.prompt_logprobs,
        prompt_top_logprobs=first.prompt_top_logprobs,
    )


def _join_columns(kind: str, parts: Sequence[Sequence[Any]]) -> TokenColumn:
    whole = TokenColumn(kind)
    for part in parts:
        whole += part
    return whole


def _join_steps(parts: Sequence[Request | Completion]) -> DrawnSteps | None:
    found = [part.steps for part in parts if part.steps is not None]
    return reduce(add, found) if found else None


def _join_pieces(pieces: list[Completion], name: str) -> list[Any] | None:
    lists = [getattr(piece, name) for piece in pieces]
    return None if any(entries is None for entries in lists) else [entry for entries in lists for entry in entries]
