"""A stepwise engine goes through the stints of its requests again: chains, blocks and actions, bit for bit (law 9)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from kits import blocks, control, flows
from rondel.core.errors import LawError
from rondel.core.types import Completion, Request, Stint
from rondel.generate.engine.resumption import generate_until_done
from rondel.models.aligned_numerics import align_numerics

Lines = dict[tuple[int, int], list[tuple[Stint, ...]]]  # of a request's pieces, by its key and continuation


def chains() -> Any:
    return flows.engine(max_running=3)


def masks() -> Any:
    loaded = blocks.block_model()
    align_numerics(loaded)
    return blocks.engine(loaded, max_running=3)


def actions() -> Any:
    return control.engine(max_running=3)


KINDS: dict[str, tuple[Callable[[], Any], Callable[[int], Request]]] = {
    "chains": (chains, lambda i: flows.asked(i, steps=3 + i % 4)),
    "blocks": (masks, lambda i: blocks.asked(i, most=6 + i % 5)),
    "actions": (actions, control.asked),
}


def change(e: Any, version: int) -> None:
    """Another direction each time, the same for equal versions."""
    noise = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for p in e.loaded.model.parameters():
            p.mul_(1 + 0.1 * torch.randn(p.shape, generator=noise))


async def life(
    e: Any, requests: Sequence[Request], ask: Callable[[Request], Any], when: Callable[[int], Any], how: str, seed: int
) -> list[Completion]:
    """All requests at random moments, and three updates, each as soon as `when` has returned."""
    arrive = random.Random(seed)

    async def one(request: Request) -> Completion:
        for _ in range(arrive.randrange(30)):
            await asyncio.sleep(0)
        return await generate_until_done(ask, request)

    tasks = [asyncio.create_task(one(request)) for request in requests]
    for version in (1, 2, 3):
        await when(version)
        await e.pause(how)
        change(e, version)
        await flows.publish_in_place(e, version)
        await e.resume()
    return await asyncio.gather(*tasks)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hold", "abort"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_goes_through_its_stints_again(kind: str, how: str) -> None:
    make, request_of = KINDS[kind]
    requests = [request_of(i) for i in range(10)]
    first, second = make(), make()
    pieces: Lines = {}

    async def noted(request: Request) -> Completion:
        done = await first.generate(request)
        if done.tokens:
            pieces.setdefault((request.key, request.continuation), []).append(tuple(done.stints))
        return done

    async def some_steps(version: int) -> None:
        while first.account.counts["steps"] < 4 * version and (first.answers or version == 1):
            await asyncio.sleep(0)

    told = asyncio.run(life(first, requests, noted, some_steps, how, 1))
    versions = [set(done.versions) for done in told]
    assert len(set.union(*versions)) > 1
    assert kind == "actions" or any(len(own) > 1 for own in versions), "no answer was drawn by two versions"
    left = {key: list(reversed(own)) for key, own in pieces.items()}
    asked: set[tuple[int, int, int]] = set()

    async def following(request: Request) -> Completion:
        own = left[request.key, request.continuation]
        asked.add((request.key, request.continuation, len(own)))
        done = await second.generate(replace(request, lines=own[-1]))
        if done.tokens:
            own.pop()
        return done

    async def all_have_come(version: int) -> None:
        due = {
            (*key, n)
            for key, own in pieces.items()
            for n, stints in enumerate(reversed(own), 1)
            if any(at == version - 1 for at, *_ in stints)
        }
        while not due <= asked:
            await asyncio.sleep(0)

    again = asyncio.run(life(second, requests, following, all_have_come, how, 2))
    for one, other in zip(told, again, strict=True):
        assert (one.tokens, one.logprobs, one.versions) == (other.tokens, other.logprobs, other.versions)
        assert (one.steps.stored == other.steps.stored).all()


def test_a_request_that_comes_after_its_version_is_a_broken_law() -> None:
    e = chains()

    async def late() -> None:
        await flows.publish_in_place(e, 1)
        await e.generate(replace(flows.asked(0), lines=((0, 2, 2), (1, 3, 3))))

    with pytest.raises(LawError, match=r"had taken \(steps, tokens\) = \(0, 0\).*version 0 took it to \(2, 2\)"):
        asyncio.run(late())


def test_one_that_never_ended_stands_still() -> None:
    e = chains()

    async def ask() -> int:
        task = asyncio.create_task(e.generate(replace(flows.asked(0), lines=())))
        for _ in range(20):
            await asyncio.sleep(0)
        task.cancel()
        return int(e.account.counts["steps"])

    assert asyncio.run(ask()) == 0
