"""What several workers would each make for themselves is made by the first that needs it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that `make(folder)` fills once in a session of tests. -> this worker's own copy of it."""
    base = factory.getbasetemp()  # without workers, what is above it holds what older sessions left
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"once-{name}"
    with FileLock(f"{folder}.lock"):
        if not folder.with_suffix(".done").exists():
            shutil.rmtree(folder, ignore_errors=True)  # what one that failed has left
            make(folder)
            folder.with_suffix(".done").touch()
    own = factory.mktemp(name) / "own"
    shutil.copytree(folder, own)
    return own
