"""More than one rank: parameters, gradients and AdamW's moments in shards (FSDP2), gathered around each pass.

master   fp32, a shard a rank     what AdamW moves
compute  bf16 (the model's dtype), whole, from the gathering before a layer's pass to the end of it
gradient bf16 in the pass, summed over the ranks in fp32: summed and not averaged, since
every weight of the loss is global already
adapter  fp32, whole on every rank: 1-2 % of the numbers. The base under it lies in shards
         of its own dtype, and has no gradient
4 bits   whole on every rank: bytes are not cast, and cost a quarter of what sharding would gather
"""

from __future__ import annotations

import datetime
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from rondel.core.errors import ConfigError, StalledError
from rondel.models import linear, names, vision
from rondel.models.head import LMHead
from rondel.models.loaded_model import LoadedModel
from rondel.models.recompute import model_blocks
from rondel.system import sockets
from rondel.train.optim import MasterWeights, spread_within_rounding
from rondel.train.optimizers import ONE_RANK
from rondel.train.parallel import SingleRank


class Rendezvous:
    """Where ranks find each other: the first one opens it, at that address only, on a port that the system chooses."""

    def __init__(self, host: str, port: int = 0, *, opens: bool = True) -> None:
        file = None
        if opens:
            file, port = sockets.open_listening_socket(host, port)
        self.store = dist.TCPStore(host, port, is_master=opens, wait_for_workers=False, master_listen_fd=file)
        self.address = (host, port)

    @classmethod
    def connect_to(cls, address: tuple[str, int]) -> Rendezvous:
        return cls(*address, opens=False)


class FsdpRank(SingleRank):
    """One of `size` ranks that meet there; without a meeting, in the group that a launcher has made already.

    patience  seconds that one rank waits for another in a collective
    """

    def __init__(
        self, rank: int, size: int, meeting: Rendezvous | None, *, device: str = "cpu", patience: float = 600.0
    ) -> None:
        self.rank, self.size, self.patience = rank, size, patience
        if meeting is not None:
            if sockets.is_loopback(
                meeting.address[0]
            ):  # all on this machine: nobody else may speak to a rank. NCCL's: not yet run on hardware
                for library in ("GLOO", "NCCL"):
                    os.environ.setdefault(f"{library}_SOCKET_IFNAME", sockets.loopback_interface())
            backend, wait = "gloo" if device == "cpu" else "nccl", datetime.timedelta(seconds=patience)
            dist.init_process_group(backend, store=meeting.store, rank=rank, world_size=size, timeout=wait)
        self.mesh = init_device_mesh(device.partition(":")[0], (size,))

    def shard_model(self, loaded: LoadedModel) -> LoadedModel:
        """Each layer is gathered when its pass begins and let go when it ends; embedding, last
        norm and head stay for the whole pass.
        """
        model, dtype = loaded.model, loaded.dtype
        if not isinstance(model, FSDPModule):  # a reference that is the policy without its adapter is held already
            self._shard_model(loaded)
        head = LMHead.from_model(model)

        def enter_with_head(work: Callable[[LMHead], Any]) -> Any:
            return model.enter(
                lambda: work(
                    replace(
                        head,
                        weight=_output_embeddings(model).weight,
                        bias=getattr(_output_embeddings(model), "bias", None),
                    )
                )
            )

        head.stack = linear.UnpackedLinear()
        return replace(loaded, model=model, head=head, enter=enter_with_head, compute=dtype)

    def _shard_model(self, loaded: LoadedModel) -> None:
        model, dtype = loaded.model, loaded.dtype
        linear.unpack_linears(model)
        whole: set[nn.Parameter] = set()
        if loaded.adapter is not None:
            names.pin_digest(model)
            whole = {
                p
                for name, p in model.named_parameters()
                if names.LORA in name or p.requires_grad or not p.is_floating_point()
            }
        elif any(p.requires_grad for p in model.parameters()):
            names.remember_dtypes(model)
            for name, parameter in model.named_parameters():
                if parameter.requires_grad and parameter.dtype == dtype != torch.float32:
                    parameter.data = spread_within_rounding(name, parameter)
            model.float()
        eye = set(vision.vision_tower(model).modules()) if loaded.sight is not None else set()
        # whole on every rank, and frozen: no rank waits in a tower that another has no picture for
        if loaded.sight is not None:
            whole |= set(vision.vision_tower(model).to(dtype).parameters())
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        head = model.get_output_embeddings()
        # a critic's: its one number is computed in full precision
        if head.weight.shape[0] == 1 and head.weight not in whole:
            fully_shard(
                head,
                mesh=self.mesh,
                mp_policy=MixedPrecisionPolicy(torch.float32, torch.float32),
                reshard_after_forward=False,
            )
        for layer in [block for block in model_blocks(model) if block not in eye]:
            fully_shard(layer, mesh=self.mesh, mp_policy=policy, ignored_params=whole)
        fully_shard(model, mesh=self.mesh, mp_policy=policy, ignored_params=whole)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        model.enter = MethodType(_forward_root, model)
        register_fsdp_forward_method(model, "enter")

    def make_masters(self, model: nn.Module, **how: Any) -> MasterWeights:
        if (kind := how.get("optimizer")) in ONE_RANK:
            raise ConfigError(
                f'trainer.optimizer.kind = "{kind}" is for one rank, and this trainer has {self.size}: use "adamw"'
            )
        if how.get("host"):
            raise ConfigError(
                f'trainer.memory.optimizer = "host" is for one rank, and this trainer has {self.size}, which keep a shard '
                "each: leave it out"
            )
        kept = (
            ShardedWeights
            if any(isinstance(p, DTensor) for p in model.parameters() if p.requires_grad)
            else ReplicatedWeights
        )
        return kept(model, self.mesh, **how)

    def full_weights(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        dtype = _computes_in(model)
        for name, parameter in names.named_weights(model):
            yield name, parameter.full_tensor().to(dtype) if isinstance(parameter, DTensor) else parameter

    def all_gather_object(self, value: Any) -> list[Any]:
        told: list[Any] = [None] * self.size
        dist.all_gather_object(told, value)
        return told

    @contextmanager
    def collective_section(self, verb: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if "timed out" not in (said := str(error).lower()) and "timeout" not in said:
                raise
            raise StalledError(
                f"rank {self.rank} of {self.size} waits for another one since {self.patience:g} s, {_failed_operation(error)}, "
                f"asked for: {verb}"
            ) from error

    def close(self) -> None:
        dist.destroy_process_group()


class ReplicatedWeights(MasterWeights):
    """What lies whole on every rank: an adapter, and the head of a critic that has one. Equal sums move equal bits."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, **how: Any) -> None:
        self.mesh, self._summed = mesh, False
        super().__init__(model, **how)

    def gradient_norm(self) -> Tensor:
        """Each rank has the gradient of its own tokens until it is asked; then all have the sum."""
        grads = [m.grad for m in self.masters if m.grad is not None]
        if grads and not self._summed:
            flat = torch.cat([g.flatten() for g in grads])
            dist.all_reduce(flat, group=self.mesh.get_group())
            for grad, piece in zip(grads, flat.split([g.numel() for g in grads])):
                grad.copy_(piece.view_as(grad))
            self._summed = True
        return super().gradient_norm()

    def zero_grad(self) -> None:
        self._summed = False
        super().zero_grad()


class ShardedWeights(MasterWeights):
    """The shards of one rank. The module's parameters are the masters; a rounded copy of the
    shard says whether a step moved any bits.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, **how: Any) -> None:
        self.mesh = mesh
        self.dtype = _computes_in(model)
        super().__init__(model, **how)
        self._rounded = [m.to(self.dtype, copy=True) for m in self.masters] if self.dtype != torch.float32 else []

    def _make_masters(self) -> list[Tensor]:
        return [p.detach().to_local() for p in self.compute]

    def _install_gradient_hooks(self) -> None:
        """FSDP sums gradients in fp32 itself."""

    def gradient_norm(self) -> Tensor:
        for parameter, master in zip(self.compute, self.masters):
            master.grad = None if parameter.grad is None else parameter.grad.to_local()
        square = super().gradient_norm() ** 2
        dist.all_reduce(square, group=self.mesh.get_group())
        return square.sqrt()

    def _changed_share(self) -> float:
        if not self._rounded:
            return 1.0
        counts = torch.zeros(2, dtype=torch.float64)
        for master, rounded in zip(self.masters, self._rounded):
            fresh = master.to(self.dtype)
            counts += torch.tensor([int((fresh != rounded).sum()), fresh.numel()], dtype=torch.float64)
            rounded.copy_(fresh)
        dist.all_reduce(counts, group=self.mesh.get_group())
        return float(counts[0] / counts[1])

    def zero_grad(self) -> None:
        for parameter, master in zip(self.compute, self.masters):
            parameter.grad = master.grad = None

    def clear_grads(self) -> None:
        self.zero_grad()

    def gather_full(self, i: int, piece: Tensor) -> Tensor:
        """The whole of a tensor that lies in shards like parameter `i`; every rank asks."""
        like = self.compute[i]
        if piece.shape != self.masters[i].shape:
            return piece  # AdamW's count of steps
        return DTensor.from_local(
            piece.contiguous(), self.mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        ).full_tensor()

    def local_shard(self, i: int, full: Tensor) -> Tensor:
        """This rank's part of a whole tensor: dimension 0 in equal pieces, the last ones shorter or empty."""
        like = self.compute[i]
        if full.shape != like.shape:
            return full
        pieces = full.chunk(self.mesh.size(), 0)
        rank = self.mesh.get_local_rank()
        return pieces[rank] if rank < len(pieces) else full[:0]

    def load_masters(self, weights: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for i, (name, master) in enumerate(zip(self.names, self.masters)):
                master.copy_(self.local_shard(i, weights[name]))
            for master, rounded in zip(self.masters, self._rounded):
                rounded.copy_(master)


def _failed_operation(error: BaseException) -> str:
    """ "in all_reduce (optim.py:71, step)": the operation, and which of our lines began it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = next((frame for frame in reversed(frames) if f"{os.sep}torch{os.sep}" not in frame.filename), frames[0])
    return f"in {frames[-1].name} ({os.path.basename(ours.filename)}:{ours.lineno}, {ours.name})"


def _forward_root(model: nn.Module, work: Callable[[], Any]) -> Any:
    """A pass through the model: FSDP gathers what lies at its root, and lets go of it after the backward pass."""
    return work()


def _output_embeddings(model: Any) -> Any:
    return model.get_output_embeddings()


def _computes_in(model: nn.Module) -> torch.dtype:
    """FSDP has no public word for it."""
    dtype = next(m for m in model.modules() if isinstance(m, FSDPModule))._get_fsdp_state()._mp_policy.param_dtype
    assert dtype is not None, "hold() names one"
    return dtype
