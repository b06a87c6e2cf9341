"""Whether a Triton kernel or the plain code computes something, and why: one rule for every kernel."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import NamedTuple


class KernelChoice(NamedTuple):
    """`reason`: why the plain code computes it; empty where the kernel does."""

    takes_kernel: bool
    reason: str = ""


@cache  # asked at every micro-batch, and whether a package is installed is read from disk
def choose_kernel(device: str, *unsupported: str) -> KernelChoice:
    """device        the type of the tensors' device, "cuda" or another
    unsupported   what this case has and the kernel does not compute
    """
    if device != "cuda":
        return KernelChoice(False, f"the tensors are on {device}, and kernels are for cuda")
    if importlib.util.find_spec("triton") is None:
        return KernelChoice(False, "Triton is not installed (pip install triton)")
    return KernelChoice(not unsupported, f"the kernel does not compute {', '.join(unsupported)}" if unsupported else "")
