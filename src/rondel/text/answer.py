"""What a policy wrote: its text, without holding up the event loop, and how much of it repeats."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from typing import Any

LONG = 2048  # tokens that are decoded at once: two or three milliseconds
BEFORE = 8  # tokens that a piece is decoded behind: what one says depends on the one before
_reader = ThreadPoolExecutor(1, "long-answers")
HALF = "\ufffd"  # how a decoder shows bytes that are not yet a character


async def decode_answer(tokenizer: Any, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """What `tokenizer.decode(tokens, skip_special_tokens=...)` says. A million tokens take a second in which a
    tokenizer lets no other thread run, so long answers are decoded in pieces, beside the event loop and one after the
    other: several at once would each take a turn of the interpreter before the loop gets one.
    """
    if len(tokens) <= LONG:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))
    return await beside_loop(partial(decode_in_pieces, tokenizer, tokens, skip_special_tokens=skip_special_tokens))


async def beside_loop(work: Callable[..., Any], *args: Any) -> Any:
    """What is read of a long answer, on the one thread that all of them share: a thread each, and the event loop would
    wait for one turn of the interpreter after the other before its own.
    """
    return await asyncio.get_running_loop().run_in_executor(_reader, work, *args)


def decode_in_pieces(tokenizer: Any, ids: Sequence[int], size: int = LONG, *, skip_special_tokens: bool = True) -> str:
    """The same text, from pieces that end where a character does."""

    def say(first: int, end: int) -> str:
        return str(tokenizer.decode(list(ids[first:end]), skip_special_tokens=skip_special_tokens))

    pieces, at = [], 0
    while at < len(ids):
        end = min(at + size, len(ids))
        while end < len(ids) and say(max(at, end - BEFORE), end)[-1:] in ("", HALF) and end - at < 2 * size:
            end += 1
        behind = max(0, at - BEFORE)
        before, both = say(behind, at), say(behind, end)
        if not both.startswith(before) or end - at >= 2 * size:  # no tokenizer that is known
            return say(0, len(ids))
        pieces.append(both[len(before) :])
        at = end
    return "".join(pieces)


def repeated_fraction(tokens: Sequence[int], mask: Sequence[Any], n: int) -> float | None:
    """1 - distinct / all n-grams of the tokens that the policy wrote; one that spans a given
    token does not count. None when there are none.
    """
    grams: list[tuple[int, ...]] = []
    for written, run in groupby(zip(tokens, mask), key=lambda pair: bool(pair[1])):
        if written:
            own = [token for token, _ in run]
            grams += [tuple(own[i : i + n]) for i in range(len(own) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else None
