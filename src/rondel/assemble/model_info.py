"""Facts of a loaded model that a driver needs without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rondel.core.media import ImageProcessorConfig
from rondel.models.cpu_kernels import kernels_of
from rondel.models.loaded_model import LoadedModel
from rondel.models.step_head import StepHead


@dataclass(frozen=True)
class ModelInfo:
    """What a process without the weights knows of the model."""

    name: str
    tokenizer: Any
    max_context: int
    routers: int
    sight: ImageProcessorConfig | None  # how it looks at pictures
    parameters: int
    dtype: torch.dtype
    fp32_stream: bool = False  # its residual stream, where it computes in 16 bits
    cpu_kernels: str = ""  # what computes between its products on a CPU (models/cpu_kernels.py); "" elsewhere

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.dtype.itemsize

    @classmethod
    def from_model(cls, loaded: LoadedModel) -> ModelInfo:
        return cls(
            loaded.name,
            loaded.tokenizer,
            loaded.max_context,
            loaded.routers,
            loaded.sight,
            loaded.parameter_count,
            loaded.dtype,
            loaded.fp32_stream,
            "" if isinstance(loaded.head, StepHead) else kernels_of(loaded.device),
        )
