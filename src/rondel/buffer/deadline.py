"""Attempts that end with the time of their group."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rondel.buffer.buffer import Buffer
from rondel.core.types import Group, Slot


async def attempt_in_time(buffer: Buffer, slot: Slot, attempt: Callable[[Slot], Awaitable[Group]]) -> Group:
    """What comes of the attempt; a group without trajectories as soon as it would be late. A recorded order says which
    of the two it was.
    """
    waiters = buffer.waiters

    async def until_late() -> None:
        await waiters.wait_until(
            lambda: buffer.rule.is_late(slot.born, buffer.version), who="late", waits_for="the end of its time"
        )

    known = waiters.ended_in_time(slot.number)
    if known:
        return await attempt(slot)
    if known is None:
        rolling, late = asyncio.ensure_future(attempt(slot)), asyncio.ensure_future(until_late())
        try:
            await asyncio.wait([rolling, late], return_when=asyncio.FIRST_COMPLETED)
            if rolling.done():
                return rolling.result()
        finally:
            for each in (rolling, late):
                each.cancel()
    await waiters.pass_gate("late", slot.number, who="late")
    return Group(slot.number, slot.task, [], slot.born)
