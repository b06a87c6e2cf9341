"""What the interpreter itself takes when a command begins and ends.

Beside torch and transformers lie 3,600 modules and 700,000 objects. Garbage collections
while they are imported, and taking them apart at the end, cost half of what the imports
themselves cost (docs/LOG.md).
"""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import os
import stat
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import NoReturn

BROKEN_OUTPUT = 120  # what an interpreter that cannot write its output exits with


def import_whole(name: str) -> ModuleType:
    """`importlib.import_module(name)` without garbage collections; what is there afterwards stays, so no later one
    looks through it either.
    """
    if name in sys.modules:
        return sys.modules[name]
    collects = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # what is still frozen when an interpreter ends, libraries call a leak
        if collects:
            gc.enable()


def is_program(name: str) -> bool:
    """Whether this interpreter was started for `name` and nothing else: no profiler, debugger or test has work left."""
    started = sys.orig_argv[1:3]
    return started == ["-m", name] or Path(*started[:1]).name == name


def end_process(code: int) -> NoReturn:
    """End as the interpreter would: threads are waited for, what wanted to be called is called, every open file is
    written. Then the process is gone, without its objects being taken apart one by one.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        if not _flush_files():
            code = BROKEN_OUTPUT
    finally:
        os._exit(code)


def _flush_files() -> bool:
    """Write what open files hold; a pipe may have no reader, so only files. -> whether what was printed arrived."""
    for found in gc.get_objects():
        if issubclass(type(found), io.IOBase):
            with suppress(Exception):
                if not found.closed and stat.S_ISREG(os.fstat(found.fileno()).st_mode):
                    found.flush()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except OSError:
        return False
    return True
