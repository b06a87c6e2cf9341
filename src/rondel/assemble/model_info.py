"""Facts of a loaded model that a driver needs without its weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from rondel.assemble.arithmetic import arithmetic_of
from rondel.core.media import ImageProcessorConfig
from rondel.generate.engine.routed_experts import RoutedExperts
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
    arithmetic: dict[str, str] = field(default_factory=dict)  # what its last bits depend on (assemble/arithmetic.py)
    told_experts: RoutedExperts | None = None  # how a server tells its routes; None where it cannot
    stop_ids: frozenset[int] = frozenset()  # tokens at which its answers end
    point_size: int = 0  # numbers of a point that it draws, if it draws points

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.dtype.itemsize

    @classmethod
    def from_model(cls, loaded: LoadedModel, threads: int) -> ModelInfo:
        """`threads`: that compute together where it lies."""
        return cls(
            loaded.name,
            loaded.tokenizer,
            loaded.max_context,
            loaded.routers,
            loaded.sight,
            loaded.parameter_count,
            loaded.dtype,
            loaded.fp32_stream,
            arithmetic_of(loaded.device, threads, has_loops=not isinstance(loaded.head, StepHead)),
            RoutedExperts.of_model(loaded) if loaded.routers else None,
            loaded.stop_ids,
            loaded.head.point_size if isinstance(loaded.head, StepHead) else 0,
        )
