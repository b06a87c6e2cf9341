"""Work that was carried out once and is replayed: a CUDA graph, or what a test puts in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol
from weakref import WeakSet

import torch


class GraphRecording(Protocol):
    """`work` as it was carried out once, to be carried out again over what its inputs hold then."""

    def replay(self) -> Any: ...


class CudaGraph:
    """torch's. All that live share one pool of memory: only one runs at a time.
    A pool ends with the last of its graphs."""

    pool: Any = None
    alive: ClassVar[WeakSet[CudaGraph]] = WeakSet()

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work  # the tensors that only it holds have addresses in the graph, too
        if not CudaGraph.alive:
            CudaGraph.pool = torch.cuda.graph_pool_handle()
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            work()  # compiles kernels, chooses algorithms, makes workspaces
        torch.cuda.current_stream().wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=CudaGraph.pool, capture_error_mode="thread_local"):
            self.out = work()
        CudaGraph.alive.add(self)

    def replay(self) -> Any:
        self.graph.replay()
        return self.out
