"""What happens to the answers of a stepwise engine between two steps: other weights, or a crash."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kits.flows import publish_in_place
from rondel.core.types import Completion, Request
from rondel.generate.engine.resumption import generate_until_done
from rondel.runtime.journal.wal import TokenLog


def parted(e: Any, requests: Sequence[Request], far: Callable[[Any], bool], how: str, change: Callable[[], Any]) -> Any:
    """Interrupted as soon as the first answer is `far`; other weights serve the rest. -> completions"""

    async def serve() -> list[Completion]:
        asks = [asyncio.ensure_future(generate_until_done(e.generate, request)) for request in requests]
        while not e.answers or not far(e.answers[0]):
            await asyncio.sleep(0)
        await e.pause(how)
        with torch.no_grad():
            change()
        await publish_in_place(e, 1)
        await e.resume()
        return await asyncio.gather(*asks)

    return asyncio.run(serve())


def drawn_of(
    e: Any, requests: Sequence[Request], far: Callable[[Any], bool] | None = None
) -> tuple[list[Completion], int]:
    """All of them by an engine at version 1, and how many tokens it drew; dies when the first one is `far`."""

    async def serve() -> tuple[list[Completion], int]:
        await publish_in_place(e, 1)
        asks = [asyncio.ensure_future(e.generate(request)) for request in requests]
        if far is not None:
            while not e.answers or not far(e.answers[0]):
                await asyncio.sleep(0)
            await e.pause("hold")
            return [], 0
        return await asyncio.gather(*asks), e.account.counts["tokens"]

    return asyncio.run(serve())


def killed(
    make: Callable[[TokenLog], Any], requests: Sequence[Request], far: Callable[[Any], bool], folder: Path
) -> Any:
    """-> (completions, tokens drawn) of a whole life, then of the second life of one that was cut off"""
    whole = drawn_of(make(TokenLog(folder / "whole")), requests)
    drawn_of(make(TokenLog(folder / "cut")), requests, far)
    return whole, drawn_of(make(TokenLog(folder / "cut")), requests)
