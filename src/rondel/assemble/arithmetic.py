"""What the last bits of a run depend on beside its recipe: a run that goes on, or is replayed, elsewhere says so."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from rondel.models.cpu_kernels import kernels_of


def arithmetic_of(device: torch.device, threads: int, *, has_loops: bool) -> dict[str, str]:
    """As a run's facts tell it: {"torch": "2.14.0", "kernels": "loops in C++", "instructions": "AVX512", ...}.
    `has_loops`: whether the model is one that takes the loops of a CPU.
    """
    if device.type != "cpu":
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return {"torch": torch.__version__, "device": name}
    return {
        "torch": torch.__version__,
        **({"kernels": kernels_of(device)} if has_loops else {}),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "processor": processor_name(),
        "threads": str(threads),
    }


def processor_name() -> str:
    """Such as "Intel(R) Xeon(R) Platinum 8481C"; the architecture where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
