"""Masters of one rank among several: whole on each, or its shards; what it takes to sum, measure and gather them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rondel.models.rounded_weights import take_whole
from rondel.models.tensor_cuts import TensorCuts, join_cuts
from rondel.train.optim import MasterWeights

if TYPE_CHECKING:
    from rondel.models.pipeline_stage import PipelineStage


class ReplicatedWeights(MasterWeights):
    """What lies whole on every rank: an adapter, and the head of a critic that has one. Equal sums move equal bits."""

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        cuts: TensorCuts | None = None,
        *,
        stage: PipelineStage | None = None,
        **how: Any,
    ) -> None:
        """`group`: who sums. `stage`: whose layers these are, of a pipeline."""
        self.group, self.stage, self._summed = group, stage, False
        super().__init__(model, **how)
        # whose gradient is whole on each of the tp ranks: the first one's counts
        whole = {id(p) for name, p in model.named_parameters() if cuts is not None and name not in cuts.partial}
        self._repeated = [cuts is not None and cuts.ranks.index > 0 and id(p) in whole for p in self.compute]
        if stage is not None:
            self.share = stage.share_of(sum(m.numel() for m in self._masters))

    def gradient_norm(self) -> Tensor:
        """Each rank has the gradient of its own tokens, and of its part of each matrix, until it is asked; then all
        have the sum.
        """
        self.restore_grads()  # the same of all ranks
        grads = [m.grad for m in self._masters if m.grad is not None]
        if grads and not self._summed:
            for master, repeated in zip(self._masters, self._repeated):
                if repeated and master.grad is not None:
                    master.grad.zero_()
            _all_reduce_together(grads, self.group)
            self._summed = True
        norm = super().gradient_norm()
        return norm if self.stage is None else self.stage.link.ranks.all_reduce(norm**2).sqrt()

    def gather_all(self, read: Callable[[int], dict[str, Tensor]]) -> Iterator[tuple[str, dict[str, Tensor]]]:
        own = super().gather_all(read)
        return own if self.stage is None else self.stage.collect(own)

    def zero_grad(self) -> None:
        self._summed = False
        super().zero_grad()


class ShardedWeights(MasterWeights):
    """The shards of one rank. The module's parameters are the masters; a rounded copy of the
    shard says whether a step moved any bits. Of a weight in a number format the parameter has what its master decodes
    to, each rank by itself: blocks lie whole on one (train/whole_blocks.py).

    Where matrices are cut by tp, too, a shard is one of this rank's part. What a layer's part keeps whole has a part of
    its gradient on each of the tp ranks: summed once an update, when the norm is asked for. Experts that lie apart have
    no twins among these.
    """

    in_shards = True

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        cuts: TensorCuts | None = None,
        *,
        experts: TensorCuts | None = None,
        stage: PipelineStage | None = None,
        **how: Any,
    ) -> None:
        """`group`: who has the other shards, and the other experts. `stage`: whose layers these are, of a pipeline."""
        self.group, self.cuts, self.experts, self._summed = group, cuts, experts, False
        self.dtype, self.stage = computes_in(model), stage
        super().__init__(model, **how)
        if stage is not None:
            self.share = stage.share_of(
                sum(m.numel() for n, m in zip(self.names, self._masters) if self._is_counted(n))
            )
        # of each shard, as the last step left it; of one in a number format the parameter itself has it
        self._rounded = [
            None if form is not None or self.dtype == torch.float32 else m.to(self.dtype, copy=True)
            for m, form in zip(self._masters, self._forms)
        ]

    def _make_masters(self) -> list[Tensor]:
        self._masters = [p.detach().to_local() for p in self.compute]
        return [
            held if form is None else self.local_shard(i, take_whole(p)).to(held.device, torch.float32, copy=True)
            for i, (p, held, form) in enumerate(zip(self.compute, self._masters, self._forms))
        ]

    def _install_gradient_hooks(self) -> None:
        """FSDP sums gradients in fp32 itself."""

    def gradient_norm(self) -> Tensor:
        for parameter, master in zip(self.compute, self._masters):
            master.grad = None if parameter.grad is None else parameter.grad.to_local()
        if not self._summed:
            self._sum_parts()
            self._summed = True
        square = self._squares(False)
        if self.cuts is not None:
            square = self.cuts.ranks.all_reduce(self._squares(True)) + square
        dist.all_reduce(square, group=self.group)
        if self.stage is not None:
            self.stage.link.ranks.all_reduce(square)
        return square.sqrt() / self._gradient_scale

    def _sum_parts(self) -> None:
        """Gradients of which several ranks have a part, in place: tp of what its parts keep whole, the two ends of a
        pipeline of a matrix that is embedding and head.
        """
        grads = dict(zip(self.names, (m.grad for m in self._masters)))
        if self.cuts is not None:
            partial = [g for name, g in grads.items() if name in self.cuts.partial]
            _all_reduce_together([g for g in partial if g is not None], self.cuts.ranks.group)
        if self.stage is not None:
            for name in self.names:
                if name in self.stage.layers.shared and (grad := grads[name]) is not None:
                    self.stage.link.sum_ends(grad)

    def _is_counted(self, name: str) -> bool:
        """Whether the numbers of this parameter count here, and not on the first stage of a pipeline."""
        return self.stage is None or self.stage.link.index == 0 or name not in self.stage.layers.shared

    def _is_apart(self, name: str) -> bool:
        """Whether the tp ranks, if there are any, have different numbers of this parameter."""
        if self.cuts is None:
            return False
        return name in self.cuts.cuts or (self.experts is not None and name in self.experts.cuts)

    def _squares(self, cut: bool) -> Tensor:
        """Of the gradients of which the tp ranks have different numbers, or of the others."""
        grads = [
            m.grad
            for n, m in zip(self.names, self._masters)
            if self._is_apart(n) == cut and m.grad is not None and self._is_counted(n)
        ]
        none = torch.zeros((), device=self._masters[0].device)
        return torch.stack(torch._foreach_norm(grads)).norm() ** 2 if grads else none

    @torch.no_grad()
    def _round_masters(self, part: list[int]) -> tuple[int, int]:
        changed = total = 0
        for i, name, master, form in ((i, self.names[i], self._masters[i], self._forms[i]) for i in part):
            if (rounded := self._rounded[i] if form is None else self._held(i)) is None:
                continue
            fresh = master.to(self.dtype) if form is None else form.fake(master, self.dtype).to(rounded.dtype)
            own = self.cuts is None or self._is_apart(name) or self.cuts.ranks.index == 0  # each number once
            if own and self._is_counted(name):
                changed, total = changed + int((fresh != rounded).sum()), total + fresh.numel()
            rounded.copy_(fresh)
        return changed, total

    def _changed_share(self, changed: int, total: int) -> float:
        counts = torch.tensor([changed, total], dtype=torch.float64, device=self._masters[0].device)
        dist.all_reduce(counts, group=self.group)
        if self.cuts is not None:
            self.cuts.ranks.all_reduce(counts)
        if self.stage is not None:
            self.stage.link.ranks.all_reduce(counts)
        return float(counts[0] / counts[1]) if counts[1] else 1.0

    def _held(self, i: int) -> Tensor:
        """This rank's shard of parameter `i`."""
        shard: Tensor = self.compute[i].detach().to_local()
        return shard

    def zero_grad(self) -> None:
        self._summed = False
        for parameter, master in zip(self.compute, self._masters):
            parameter.grad = master.grad = None

    def clear_grads(self) -> None:
        self.zero_grad()

    def gather_all(self, read: Callable[[int], dict[str, Tensor]]) -> Iterator[tuple[str, dict[str, Tensor]]]:
        own = super().gather_all(read)
        return own if self.stage is None else self.stage.collect(own)

    def gather_full(self, i: int, piece: Tensor) -> Tensor:
        """The whole of a tensor that lies in shards like parameter `i`; every rank asks."""
        like = self.compute[i]
        if piece.shape != self._masters[i].shape:
            return piece  # AdamW's count of steps
        full = DTensor.from_local(
            piece.contiguous(),
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        ).full_tensor()
        return join_cuts((self.cuts, self.experts), self.names[i], full)

    def local_shard(self, i: int, full: Tensor) -> Tensor:
        """This rank's part of a whole tensor: of its own columns, rows or experts, dimension 0 in equal pieces, the
        last ones shorter or empty. What is a part already stays as it is.
        """
        if full.ndim == 0 or full.shape == self._masters[i].shape:
            return full
        for cuts in (self.cuts, self.experts):
            full = full if cuts is None else cuts.split(self.names[i], full)
        holders = self.compute[i].device_mesh
        pieces, rank = full.chunk(holders.size(holders.ndim - 1), 0), holders.get_local_rank(holders.ndim - 1)
        return pieces[rank] if rank < len(pieces) else full[:0]

    def load_masters(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for i, (name, master, form) in enumerate(zip(self.names, self._masters, self._forms)):
                master.copy_(self.local_shard(i, weights[name]))
                if form is not None:
                    self._held(i).copy_(form.fake(master, self.dtype))
                elif (rounded := self._rounded[i]) is not None:
                    rounded.copy_(master)


def _all_reduce_together(grads: list[Tensor], group: dist.ProcessGroup) -> None:
    """One sum for all of them, in place."""
    if not grads:
        return
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat, group=group)
    for grad, piece in zip(grads, flat.split([g.numel() for g in grads])):
        grad.copy_(piece.view_as(grad))


def computes_in(model: nn.Module) -> torch.dtype:
    """FSDP has no public word for it."""
    dtype = next(m for m in model.modules() if isinstance(m, FSDPModule))._get_fsdp_state()._mp_policy.param_dtype
    assert dtype is not None, "shard_model() names one"
    return dtype
