"""What a process holds, and what it gives back."""

import subprocess
import sys

import pytest

from rondel.system import process_memory

PROGRAM = """
import ctypes
from rondel.system import process_memory as pm

pm.LEAST_RESIDENT = 0
library, size = pm._glibc(), 100 << 10
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]
blocks = [library.malloc(size) for _ in range(4000)]
for block in blocks:
    ctypes.memset(block, 1, size)
held = [pm.resident_memory()["rss"]]
for block in blocks[::2]:
    library.free(block)
for least in (pm.LEAST_FREED, 64 << 20):
    pm.LEAST_FREED = least
    pm.release_freed_memory()
    held.append(pm.resident_memory()["rss"])
print(*held)
"""


@pytest.mark.slow
@pytest.mark.skipif(process_memory._glibc() is None, reason="glibc's heap")
def test_freed_memory_goes_back_where_it_is_much():
    """4,000 blocks of 0.1 MB, every second one freed: holes, which only a trim gives back."""
    told = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    full, kept, given_back = (int(word) for word in told.split())
    assert kept > full - (100 << 20), "200 MB are not worth it"
    assert given_back < full - (150 << 20)


@pytest.mark.slow
@pytest.mark.skipif(process_memory._glibc() is None, reason="glibc's heap")
def test_bytes_of_the_heap():
    """A block of 64 MB is used while it lives. Before a mapping of its own is taken, the heap is asked for it."""
    program = (
        "from rondel.runtime.devices import prepare_process\n"
        "prepare_process()\n"
        "from rondel.system.process_memory import heap_bytes\n"
        "before = heap_bytes()['used']\n"
        "block = bytearray(64 << 20)\n"
        "held = heap_bytes()['used']\n"
        "del block\n"
        "print(held - before, heap_bytes()['used'] - before, heap_bytes()['free'])"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    held, after, free = (int(word) for word in told.split())
    assert 0 <= held - (64 << 20) < 1 << 20 and abs(after) < 1 << 20 and free >= 60 << 20
