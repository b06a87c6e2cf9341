"""A server's place in the group of torch's in which a trainer broadcasts new weights (sync/to_servers.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from rondel.core.types import TensorInfo
from rondel.generate.engine.http import DEADLINE, ServerRefusal


class TrainerGroup:
    """`name` of the group that the server is in; "" before the first."""

    def __init__(self) -> None:
        self.name = ""

    async def join(
        self,
        group: dict[str, Any],
        ask: Callable[[int], Awaitable[None]],
        leave: Callable[[str], Awaitable[Any]],
    ) -> None:
        """`ask` the server to join with this rank, unless it is in the group. The trainer waits for all, and is told
        why one of them does not come.
        """
        if self.name == group["name"]:
            return
        left, self.name = self.name, ""
        if left:
            with suppress(ServerRefusal):  # a server that was started anew is in none
                await leave(left)
        store = await asyncio.to_thread(_store_of, group)
        rank = store.add(f"{group['name']}/joined", 1)
        try:
            await ask(rank)
        except Exception as error:
            store.set(f"{group['name']}/refused", str(error))
            raise
        self.name = group["name"]


def described(rows: tuple[TensorInfo, ...]) -> dict[str, list[Any]]:
    """What a bucket holds, as servers are told."""
    return {
        "names": [row.name for row in rows],
        "dtypes": [row.dtype for row in rows],
        "shapes": [list(row.shape) for row in rows],
    }


def _store_of(group: dict[str, Any]) -> Any:
    """Where the group meets; the trainer listens there."""
    from torch import distributed as dist

    return dist.TCPStore(group["host"], group["port"], is_master=False, timeout=timedelta(seconds=DEADLINE))
