"""Long work on the event loop, cut so that no pass of it is long: one piece a pass, whoever asks, and what is large is
freed beside it.

A piece of an answer of a million tokens takes some three milliseconds. Eight answers that each do one in the same pass
hold up everyone else for the sum, and so does one statement that drops the last reference to all of them: the memory
of an array goes back to the kernel page by page.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

TURN_TOKENS = 1 << 17  # of long answers that are copied, packed or freed in one pass: some three milliseconds

_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


async def take_loop_turn() -> None:
    """Wait for a pass of the event loop in which nobody else does a long piece, and do one at once: the turn ends with
    the pass. Who asks first is first.
    """
    loop = asyncio.get_running_loop()
    turn = _turns.setdefault(loop, asyncio.Lock())
    await turn.acquire()
    loop.call_soon(turn.release)


async def drop_in_turns(held: list[Any], tokens: Callable[[Any], int]) -> None:
    """Empty a list that may hold the last references: long items one by one on another thread, where the kernel takes
    their pages while the loop goes on, short ones here, TURN_TOKENS a pass. `tokens`: how many an item has.
    """
    long: list[Any] = []
    dropped = 0
    while held:
        item = held.pop()
        if (n := tokens(item)) > TURN_TOKENS:
            long.append(item)
        del item
        if (dropped := dropped + n) > TURN_TOKENS:
            await asyncio.sleep(0)
            dropped = 0
    if long:
        await asyncio.to_thread(_drop_one_by_one, long)


def _drop_one_by_one(items: list[Any]) -> None:
    """Between two of them another thread may have the interpreter."""
    while items:
        items.pop()
