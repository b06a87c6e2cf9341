"""A Ray cluster of this machine that runs join."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def local_ray(cpus: int) -> Iterator[None]:
    """Skips the test where Ray is missing. One that a run begins by itself is in test_law_09_resume."""
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path or os.getcwd() for path in sys.path))
        ray.init("local", num_cpus=cpus, include_dashboard=False, log_to_driver=True, configure_logging=False)
    try:
        yield
    finally:
        ray.shutdown()
