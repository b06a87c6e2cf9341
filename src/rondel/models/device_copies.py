"""Copies between host and device for which the host does not wait: the device makes each of them in its turn.

A copy from ordinary memory makes CUDA finish all that was asked of it before, so what is uploaded lies in pinned memory
first. torch keeps such memory until the device has read it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Tensor | Sequence[object], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers of the host as a tensor of the device. A tensor keeps its shape; on a CPU it is the same one."""
    made = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    return (made.pin_memory() if device.type == "cuda" else made).to(device, non_blocking=True)


class HostCopy:
    """A tensor of the device on its way to the host."""

    def __init__(self, made: Tensor) -> None:
        self._there, self._event = made, None
        if made.device.type == "cuda":
            self._there = torch.empty(made.shape, dtype=made.dtype, pin_memory=True)
            self._there.copy_(made, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> Tensor:
        """The numbers. The host waits for what made them and for nothing that was asked of the device since."""
        if self._event is not None:
            self._event.synchronize()
        return self._there
