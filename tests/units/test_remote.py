"""An engine elsewhere that ends: its requests are asked again of the next one, an update is not."""

from __future__ import annotations

import asyncio

import pytest

from kits.remote import Trainer, made
from rondel.core.errors import SyncError, WorkerError
from rondel.core.types import Request


def test_a_request_is_asked_again_of_the_next_engine():
    engine, _, started = made("generate")
    assert asyncio.run(engine.generate(Request([1]))).tokens == [1]
    assert len(started) == 1 == engine.restarts


@pytest.mark.parametrize("verb", ["status", "Begin", "pause", "Commit", "resume", "score"])
def test_an_engine_that_ends_in_an_update_ends_the_update(verb):
    """At once, whatever it was asked for: one that mended it would wait for the update, that is for itself."""
    engine, update, started = made(verb)

    async def work() -> None:
        with pytest.raises((WorkerError, SyncError)):
            await asyncio.wait_for(update(Trainer(), engine), 5)
        assert not started
        assert await asyncio.wait_for(engine.restart_if_dead(), 5) and len(started) == 1
        assert await asyncio.wait_for(update(Trainer(), engine), 5) == 1

    asyncio.run(work())
