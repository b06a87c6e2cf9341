"""The decode step as CUDA graphs, one for each of a few batch sizes: a step is one launch instead of a thousand.

    tokens, positions, slots, feeds of this step ──copy──> inputs that stay where they are ──replay──> hidden states that stay, too
                                                           the next larger size; what is left over writes the
                                                           scratch page

A graph remembers addresses. Before each replay those of weights and pools are compared with
what it was recorded over, and where one has moved (a cache that slept, weights that came
back elsewhere) it is recorded again. Its
first answer is compared with the plain pass.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rondel.core.errors import ConfigError
from rondel.models.attention import AttentionLayout
from rondel.models.compilation import REMEDY, TOLERANCE, CompiledModel, refuse_compilation
from rondel.models.recorded_graph import CudaGraph, GraphRecording

if TYPE_CHECKING:
    from rondel.models.fed_layout import FedLayout
    from rondel.models.loaded_model import LoadedModel


class DecodeGraphs:
    """`DecodeGraphs(loaded, 64).hidden` is `loaded.hidden` without gradients and without a tape; steps
    that are not one token each go the plain way.
    """

    def __init__(
        self, loaded: LoadedModel, most: int, record: Callable[[Callable[[], Tensor]], GraphRecording] = CudaGraph
    ) -> None:
        _refuse_graphs(loaded)
        self._loaded, self._record = loaded, record
        self.sizes = sizes_upto(most)
        self.recorded: dict[int, GraphRecording] = {}
        self._held = [*loaded.model.parameters(), *loaded.model.buffers()]
        self._over: list[int] = []  # addresses of weights and pools
        device = loaded.device
        self.tokens, self.positions, self.write = (
            torch.zeros(self.sizes[-1], dtype=torch.int64, device=device) for _ in range(3)
        )
        self.feeds = torch.zeros(self.sizes[-1], 4, dtype=torch.int32, device=device)

    @torch.no_grad()
    def hidden_states(self, tokens: Tensor, positions: Tensor, layout: AttentionLayout) -> Tensor:
        """[T], [T] -> [T, D], which the next call overwrites."""
        from rondel.models.fed_layout import FedLayout

        n = len(tokens)
        if not isinstance(layout, FedLayout) or not layout.is_decode or n > self.sizes[-1]:
            return self._loaded.hidden_states(tokens, positions, layout)
        self._copy_inputs(tokens, positions, layout)
        self._forget_if_moved(layout)
        size = next(size for size in self.sizes if size >= n)
        if size in self.recorded:
            found: Tensor = self.recorded[size].replay()
            return found[:n]
        return self._record_graph(size, layout)[:n]

    def forget_graphs(self) -> None:
        self.recorded.clear()

    def _copy_inputs(self, tokens: Tensor, positions: Tensor, layout: FedLayout) -> None:
        """This step's inputs; rows that nobody has read one scratch slot and write it."""
        n = len(tokens)
        for room, given in (
            (self.tokens, tokens),
            (self.positions, positions),
            (self.write, layout.write),
            (self.feeds, layout.parts[0][1].feeds),
        ):
            room[:n].copy_(given)
        self.tokens[n:], self.positions[n:], self.write[n:] = 0, 0, 0
        self.feeds[n:, 3] = 1

    def _record_graph(self, size: int, layout: FedLayout) -> Tensor:
        """Record this size, and compare its first answer with the plain pass over the same inputs."""
        from rondel.models.fed_layout import FedLayout
        from rondel.models.paged_attention import LaunchBatch

        loaded, table = self._loaded, layout.parts[0][1].table
        self.feeds[:, 1] = torch.arange(len(self.feeds), dtype=torch.int32, device=loaded.device)
        self.feeds[:, 2] = 1
        feeds = LaunchBatch(table, self.feeds[:size], [1] * size, layout.parts[0][1].splits)

        def run_forward() -> Tensor:
            step = FedLayout(layout.keys, layout.values, self.write[:size], [(size, feeds)])
            return loaded.hidden_states(self.tokens[:size], self.positions[:size], step)

        plain = loaded.head.logits(run_forward()).log_softmax(-1)
        try:
            recording = self._record(run_forward)
        except RuntimeError as error:
            raise ConfigError(
                f"engine.compile: a step of '{loaded.name}' cannot be recorded as a CUDA graph: "
                f"{str(error).strip().splitlines()[0]}; {REMEDY}"
            ) from error
        out: Tensor = recording.replay()
        gap = float((loaded.head.logits(out).log_softmax(-1) - plain).abs().mean())
        if not gap <= TOLERANCE[loaded.dtype]:
            raise ConfigError(
                f"engine.compile: the graph of {size} rows of '{loaded.name}' differs by {gap:.3g} in logprob (limit "
                f"{TOLERANCE[loaded.dtype]}); {REMEDY}"
            )
        self.recorded[size] = recording
        return out

    def _forget_if_moved(self, layout: FedLayout) -> None:
        held = [*self._held, layout.parts[0][1].table]
        over = [*(t.data_ptr() for t in held), *layout.keys.data_pointers, *layout.values.data_pointers]
        if over != self._over:
            self.forget_graphs()
            self._over = over


def serving_pass(loaded: LoadedModel, most: int) -> CompiledModel | DecodeGraphs:
    """What `engine.compile` means here, for an engine of at most so many requests: fused
    loops on a CPU, recorded steps on a GPU.
    """
    return CompiledModel(loaded) if loaded.device.type == "cpu" else DecodeGraphs(loaded, most)


def sizes_upto(most: int) -> list[int]:
    """1, 2, 4, 8, then every 8 up to 64, every 16 up to 256, then every 32: little is computed for nobody."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, most + 32, 32)]
    return [size for size in sizes if size < most] + [min(size for size in sizes if size >= most)]


def _refuse_graphs(loaded: LoadedModel) -> None:
    reasons = {
        f"it runs on {loaded.device}, and graphs are CUDA's": loaded.device.type not in ("cuda", "cpu"),
        "Triton is not installed (pip install triton)": importlib.util.find_spec("triton") is None,
    }
    refuse_compilation(loaded, "recorded", reasons)
