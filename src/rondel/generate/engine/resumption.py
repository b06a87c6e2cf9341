"""A sample that an engine gave back unfinished goes on from its tokens, under whatever weights serve then (law 15)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

from rondel.core.types import IDS, NUMBERS, Completion, Request, Sampling, TokenColumn, earliest_routes
from rondel.generate.engine.builtin.text import open_reader, special_ids
from rondel.text.tokenization import beside_loop, decode_answer

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


async def end_at_stop(tokenizer: Any, done: Completion, sampling: Sampling) -> Completion:
    """An answer in several pieces with the text of its tokens, without the stop string that ends it: a character, or a
    stop string, may lie on both sides of a border, and some tokenizers leave out the space before a piece. A server
    that wrote half of a stop string before the border does not see it behind, and goes on: what it wrote then is no
    part of the answer. Steps of points or actions are numbers and not tokens: what their engine says of them stays.
    """
    if done.steps is not None and done.steps.are_densities:
        return done
    whole = await decode_answer(tokenizer, done.tokens)
    named = special_ids(tokenizer) if sampling.stop else {}  # a name means its token, and not the text that spells it
    strings = tuple(one for one in sampling.stop if isinstance(one, str) and one not in named)
    if any(one in whole for one in strings):
        ends = await beside_loop(_first_end, tokenizer, strings, list(done.tokens), sampling.min_tokens)
        if ends is not None:
            n, text = ends
            return replace(_first_tokens(done, n), text=text)
    return replace(done, text=whole)


def _first_end(tokenizer: Any, strings: tuple[str, ...], tokens: list[int], least: int) -> tuple[int, str] | None:
    """How many tokens there are where the first of the strings is complete, and the text before it; one that is
    complete by the `least` that there must be is passed over, as engines do."""
    reader = open_reader(tokenizer, strings, [])
    for n in range(1, len(tokens) + 1):
        if (text := reader.find_stop(tokens[:n])) is not None and n > least:
            return n, text
    return None


def _first_tokens(done: Completion, n: int) -> Completion:
    """The answer as if it had ended behind so many tokens."""
    if (more := len(done.tokens) - n) == 0:
        return done
    per_token = ("tokens", "logprobs", "versions", "raw_logprobs", "top_logprobs", "support", "behavior_top", "steps")
    kept: dict[str, Any] = {name: whole if (whole := getattr(done, name)) is None else whole[:n] for name in per_token}
    experts = None if done.experts is None else done.experts[:-more]
    return replace(done, **kept, experts=experts, finish_reason="stop")


def join_completions(pieces: list[Completion]) -> Completion:
    """One completion of several."""
    first, last = pieces[0], pieces[-1]
    experts = first.experts
    for piece in pieces[1:]:
        experts = earliest_routes(experts, piece.experts)
    read = next((piece for piece in pieces if piece.prompt_logprobs or piece.prompt_top_logprobs), first)
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
        prompt_logprobs=read.prompt_logprobs,
        prompt_top_logprobs=read.prompt_top_logprobs,
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
    """Of the pieces in which something was drawn: one that ended before it had a place in an engine has no lists."""
    lists = [getattr(piece, name) for piece in pieces if piece.tokens]
    return None if any(entries is None for entries in lists) else [entry for entries in lists for entry in entries]
