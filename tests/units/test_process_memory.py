"""What a process holds, and what it gives back."""

import ctypes
import sys

import pytest

from rondel.system import process_memory


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's count, and glibc's heap")
def test_freed_memory_goes_back_where_it_is_much(monkeypatch):
    """4,000 blocks of 0.1 MB below glibc's mmap threshold, every second one freed: holes, which only a trim gives back."""
    library = process_memory._glibc()
    if library is None:
        pytest.skip("not glibc 2.33 or later")
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    size = 100 << 10
    blocks = [library.malloc(size) for _ in range(4000)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    full = process_memory.resident_memory()["rss"]
    for block in blocks[::2]:
        library.free(block)
    process_memory.release_freed_memory()
    kept = process_memory.resident_memory()["rss"]
    assert kept > full - (100 << 20), "200 MB are not worth it"
    monkeypatch.setattr(process_memory, "LEAST_FREED", 64 << 20)
    process_memory.release_freed_memory()
    assert process_memory.resident_memory()["rss"] < full - (150 << 20)
    for block in blocks[1::2]:
        library.free(block)
