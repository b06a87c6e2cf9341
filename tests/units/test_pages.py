"""The memory behind the cache: it appears where it is written, and goes back without moving."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from rondel.generate.engine.builtin.pages import PageAllocator
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
