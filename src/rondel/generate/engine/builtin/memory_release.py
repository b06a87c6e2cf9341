"""What an engine gives back beside its cache, by tag.

    weights      those of its own go to host memory, each tensor the same object (models/host.py);
                 on a CPU the host is the device, and what goes are the packed copies of linear
                 layers, as large as the weights, which
                 are made again at their next use
    cuda_graph   recorded steps are forgotten, and recorded again when their size is met

An engine that shares a trainer's module has no weights of its own to give.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rondel.core.protocols import Tags
from rondel.models.host import HostMemory

if TYPE_CHECKING:
    from rondel.models.compilation import CompiledModel
    from rondel.models.cuda_graphs import DecodeGraphs
    from rondel.models.loaded_model import LoadedModel
    from rondel.models.static_decode import StaticDecode


class MemoryRelease:
    """`owns`: the weights are the engine's. All on the device's thread."""

    def __init__(
        self, loaded: LoadedModel, compiled: CompiledModel | DecodeGraphs | StaticDecode | None, *, owns: bool
    ) -> None:
        self.loaded, self.compiled, self.owns = loaded, compiled, owns
        self.host = HostMemory()
        self.moves = owns and loaded.device.type != "cpu"
        self.tensors = [*loaded.model.parameters(), *loaded.model.buffers()]

    def sleep(self, tags: Tags) -> None:
        if "cuda_graph" in tags and self.compiled is not None:
            self.compiled.forget_graphs()
        if "weights" in tags:
            for stack in self.loaded.packed_copies:
                stack.drop_packed()
            if self.moves:
                self.host.put(self.tensors)

    def wake(self, tags: Tags) -> None:
        if "weights" in tags and self.moves:
            self.host.fetch_tensors(self.tensors)

    @property
    def memory_bytes(self) -> dict[str, int]:
        """On the device, where the engine owns the weights; of a shared module the trainer tells."""
        packed = sum(stack.packed_bytes for stack in self.loaded.packed_copies)
        return {"weights": self.host.resident_bytes(self.tensors, set()), "packed": packed}
