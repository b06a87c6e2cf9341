"""Token logs of several lives, and engines that write one and die."""

from __future__ import annotations

import asyncio

from kits.engine import ask, engine, prompt, publish_in_place, tiny
from rondel.core.types import Request, sample_key
from rondel.runtime.journal.wal import TokenLog

BIG = 2**128 - 9  # keys use all their bits


def rows(key: int, first: int, n: int, version: int, prompt: int = 7) -> list:
    return [(key, first + i, prompt, -0.1 * (first + i + 1), 100 + first + i, version) for i in range(n)]


def said(log: TokenLog, key: int, prompt: int = 7, first: int = 0) -> list[int]:
    return [found.token for found in log.recall_tokens(key, prompt, first=first)]


def serving(folder, loaded=None, **how):
    """An engine of a life that serves version 1."""
    log = TokenLog(folder)
    e = engine(loaded or tiny("llama"), log=log, **how)
    asyncio.run(publish_in_place(e, 1))
    return e


def asked(n: int = 6) -> list[Request]:
    return [
        ask(prompt(i, 7 + i), n=24, temperature=1.0, ignore_eos=i % 2 == 0, key=sample_key(0, i, 0)) for i in range(n)
    ]


async def dies(e, requests, after: int):
    """When each of them has drawn so many tokens."""
    calls = [asyncio.create_task(e.generate(r)) for r in requests]
    while not e.scheduler.running or min(live.written for live in e.scheduler.running) < after:
        await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


def counted(e) -> list[int]:
    """How many tokens each step of this engine draws, from now on."""
    drawn, step = [], e.runner.step

    def counting(*plans):
        out = step(*plans)
        drawn.append(len(out))
        return out

    e.runner.step = counting
    return drawn


def two_versions(folder):
    """A life that served versions 3 and 4: sample 1 is of both, sample 2 of the first, sample 3 of the second."""
    log = TokenLog(folder)
    log.record_version(3, "root-3")
    log.write(rows(1, 0, 4, 3) + rows(2, 0, 3, 3))
    log.write(rows(1, 4, 1, 3))
    log.record_version(4, "root-4")
    log.write(rows(1, 5, 2, 4) + rows(3, 0, 2, 4))
    log.close()
    return folder
