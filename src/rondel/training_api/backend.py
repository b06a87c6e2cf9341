"""What the training API asks of what trains: adapters of one base, each with an optimizer of its own.

    create_adapter ── forward (backward) ... ── optim_step ── snapshot ── sample

N tokens of an example · K targets of a token. All methods may be called for several adapters at once; calls for one
adapter are made one after the other, in the order of its client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """rank       r of A [r, I] and B [O, r]
    seed       of A; B starts at 0
    attention, mlp, unembed   which linear layers are adapted
    """

    rank: int
    seed: int = 0
    attention: bool = True
    mlp: bool = True
    unembed: bool = False


@dataclass(frozen=True, slots=True)
class Example:
    """tokens [N] that the model reads; targets [N] or [N, K], whose logprobs the loss reads; inputs: what else it
    reads, each of the shape of targets (weights, logprobs, advantages, ...), float32.
    """

    tokens: Sequence[int]
    targets: np.ndarray
    inputs: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Adam:
    lr: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    clip: float = 0.0  # greatest norm of the gradient; 0: not clipped


@dataclass(frozen=True, slots=True)
class Losses:
    """outputs: of each example {"logprobs": shape of its targets, "elementwise_loss": the same}; metrics: at least
    "loss:sum", the number whose gradient was added.
    """

    outputs: list[dict[str, np.ndarray]]
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class SampleSettings:
    n: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop_texts: Sequence[str] = ()
    stop_tokens: Sequence[int] = ()
    prompt_logprobs: bool = False
    top_prompt_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class Sampled:
    """sequences: (tokens, logprobs, "stop" or "length") of each answer; prompt_logprobs [N], None for the first token;
    top_prompt_logprobs: of each prompt token [(token, logprob)], best first.
    """

    sequences: list[tuple[list[int], list[float], str]]
    prompt_logprobs: list[float | None] | None = None
    top_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None


class TrainingBackend(Protocol):
    """UserError where a request is wrong: its text goes to the client."""

    @property
    def base_model(self) -> str: ...

    @property
    def max_context(self) -> int: ...

    async def create_adapter(self, adapter: str, spec: AdapterSpec) -> None: ...

    async def drop_adapter(self, adapter: str) -> None: ...

    async def forward(
        self, adapter: str, examples: Sequence[Example], loss: str, config: Mapping[str, float], *, backward: bool
    ) -> Losses:
        """The sum of the loss over all tokens; with `backward` its gradient is added to the adapter's."""
        ...

    async def optim_step(self, adapter: str, adam: Adam) -> dict[str, float]:
        """One step with the gradient that was added, which is 0 then."""
        ...

    async def save(self, adapter: str, folder: Path, *, optimizer: bool) -> None:
        """peft's two files, and with `optimizer` the moments."""
        ...

    async def load(self, adapter: str, folder: Path, *, optimizer: bool) -> None: ...

    async def serve_adapter(self, name: str, folder: Path) -> None:
        """From now on `sample(adapter=name)` reads the weights in `folder`, which never change under a name."""
        ...

    async def drop_served(self, name: str) -> None: ...

    async def sample(self, prompt: Sequence[int], adapter: str | None, settings: SampleSettings) -> Sampled:
        """`adapter`: a name that is served, or None for the base."""
        ...

    async def close(self) -> None: ...
