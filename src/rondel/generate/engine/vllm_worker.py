"""In a worker of vLLM 0.29 and later: weights that a trainer of Rondel broadcasts, received by vLLM's own weight
transfer.

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model MODEL --port 8000
        --worker-extension-cls rondel.generate.engine.vllm_worker.RondelBroadcast
        --weight-transfer-config '{"backend": "rondel"}'

vLLM's own backends want a GPU on both sides; this one is torch's gloo or NCCL. Rondel must be importable there, of
which these imports need nothing but torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from rondel.system import sockets

BACKEND = "rondel"


class RondelBroadcast:
    """vLLM imports it into each worker, which makes the backend known; it adds nothing."""


@dataclass
class GroupInfo(WeightTransferInitInfo):
    """As sync/to_servers.py says it, with the rank of this server's first worker."""

    host: str
    port: int
    name: str
    size: int
    rank: int
    deadline: float


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """Tensors whose bytes come one behind the other."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class BroadcastEngine(WeightTransferEngine[GroupInfo, BucketInfo]):
    """A member of the trainer's group; tensors are loaded layer by layer, as from a checkpoint."""

    init_info_cls, update_info_cls = GroupInfo, BucketInfo
    group: Any = None

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        """A second one takes its place: of another run, or with other servers in it."""
        self.shutdown()
        wait, rank = timedelta(seconds=init_info.deadline), init_info.rank + self.parallel_config.rank
        store: Any = dist.TCPStore(init_info.host, init_info.port, is_master=False, timeout=wait)
        for prefix in (init_info.name, f"{init_info.name}/", f"{self.device.type}/"):
            store = dist.PrefixStore(prefix, store)
        if self.device.type == "cuda":  # not yet run on hardware
            nccl = dist.ProcessGroupNCCL.Options()  # type: ignore[attr-defined]
            nccl._timeout = wait
            self.group = dist.ProcessGroupNCCL(store, rank, init_info.size, nccl)  # type: ignore[attr-defined]
        else:
            gloo = sockets.gloo_at(init_info.host, init_info.deadline)
            self.group = dist.ProcessGroupGloo(store, rank, init_info.size, gloo)

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def receive_weights(self, update_info: BucketInfo) -> None:
        """One broadcast, whose pieces are the tensors."""
        kinds = [getattr(torch, dtype) for dtype in update_info.dtypes]
        tensors = [torch.empty(s, dtype=k, device=self.device) for s, k in zip(update_info.shapes, kinds)]
        flat = torch.empty(sum(t.nbytes for t in tensors), dtype=torch.uint8, device=self.device)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self.group.broadcast([flat], options).wait()
        for tensor, piece in zip(tensors, flat.split([t.nbytes for t in tensors])):
            tensor.view(-1).view(torch.uint8).copy_(piece)
        self.model.load_weights(list(zip(update_info.names, tensors)))

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Gloo closes its connections with the last reference to them."""
        self.group = None


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, BroadcastEngine)
