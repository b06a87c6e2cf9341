"""Calls that are computed several at once: none is forgotten, whenever it comes."""

import asyncio

import pytest

from rondel.score.batch import Batcher


@pytest.mark.parametrize("timed", [True, False])
def test_who_comes_as_the_only_lane_ends_is_served(timed):
    """A caller that asks again in the step in which its answer came, and one that comes at every other moment."""

    async def compute(items):
        return [2 * item for item in items]

    async def main():
        b = Batcher(compute, most=4, lanes=1, timed=timed)
        assert [await b(1), await b(2), await b(3)] == [2, 4, 6]

        async def late(turns):
            for _ in range(turns):
                await asyncio.sleep(0)
            return await b(turns)

        assert await asyncio.gather(*(late(n) for n in range(12))) == [2 * n for n in range(12)]
        assert not b.waiting and not b._open

    asyncio.run(asyncio.wait_for(main(), 5))
