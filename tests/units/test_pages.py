"""The memory behind the cache: it appears where it is written, and goes back without moving."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

from rondel.generate.engine.builtin.pages import RUN, FreePages, PageAllocator
from rondel.models.cache_pools import LayerPools

MB = 1 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="mappings of one's own are used on Linux")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pool_is_empty_then_written_then_empty_again(dtype):
    layers = LayerPools(10)
    like = torch.ones(3, 2, 4, dtype=dtype)
    pool = layers.layer_pool(0, like)
    assert pool.shape == (2, 10, 4) and pool.dtype == dtype and not pool.any()
    assert layers.pool_bytes == pool.numel() * pool.element_size()
    pool.fill_(7)
    layers.clear()
    assert layers.pool_bytes == 0
    assert not layers.layer_pool(0, like).any() and layers.pool_bytes == pool.numel() * pool.element_size()


@pytest.mark.slow
@linux
def test_sleep_gives_memory_back_and_moves_nothing():
    pages = PageAllocator((256 * MB) // 4096)  # 1,024 floats a page
    like = torch.zeros(1, 1, 1024)
    before = resident()
    keys = pages.keys.layer_pool(0, like)
    assert resident() - before < 32 * MB, "what nobody wrote costs nothing"
    keys.fill_(1)
    assert resident() - before > 200 * MB
    address = keys.data_ptr()
    pages.release_memory()
    assert resident() - before < 64 * MB and pages.keys.pool_bytes == 0
    again = pages.keys.layer_pool(0, like)
    assert again.data_ptr() == address and not again.any()


def test_tokens_of_requests_that_decode_together_lie_in_runs():
    free, requests = FreePages(101, 4 * RUN), [[], [], []]
    for _ in range(RUN):
        for pages in requests:
            pages += free.take(1, pages[-1] if pages else None)
    assert [[p - pages[0] for p in pages] for pages in requests] == [[*range(RUN)]] * 3 and len(free) == RUN
    rest = free.take(RUN - 1, requests[0][-1])
    assert rest == list(range(rest[0], rest[0] + RUN - 1)), "behind a run that is taken lies another run"
    free.give_back(requests[1][5:9])
    assert free.take(1, None) == requests[1][5:6], "no run is whole: any page"
    assert free.take(4, requests[1][5]) == [*requests[1][6:9], rest[-1] + 1] and not len(free)


@pytest.mark.parametrize("count", [1, RUN - 1, RUN, 3 * RUN + 5])
def test_every_page_is_handed_out_once_whatever_came_before(count):
    draw, free, held = random.Random(count), FreePages(7, count), list[list[int]]()
    for _ in range(300):
        if held and (draw.random() < 0.45 or not len(free)):
            free.give_back(held.pop(draw.randrange(len(held))))
        elif len(free):
            held.append(
                free.take(draw.randint(1, len(free)), draw.choice([None, 7, 6 + count, *(h[-1] for h in held)]))
            )
        taken = [page for pages in held for page in pages]
        assert sorted([*taken, *free]) == list(range(7, 7 + count)) and len(free) == count - len(taken)
    for pages in held:
        free.give_back(pages)
    assert free.take(count, None) == list(range(7, 7 + count))
    with pytest.raises(AssertionError, match="given back twice"):
        free.give_back([7, 7])
