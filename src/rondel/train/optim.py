"""fp32 master weights behind a compute copy, their optimizer, schedules, clipping.

The module's parameters are the compute copy that the engine reads; the masters are what the optimizer moves
(train/optimizers.py). In float32 they are the same tensors. The step writes the compute copy in place, so an engine
that shares it needs 0 bytes moved.

With `host` masters, accumulators and moments lie in host memory and the step is taken there (arXiv:2101.06840):

    device   gradient of a weight, as soon as it is known ──►│        ◄── rounded weights, a piece at a time
    host                                        accumulator += ; step  │
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rondel.models.cpu_kernels import add_gradient, round_into
from rondel.models.main_grad import own_parameter, weights_changed
from rondel.models.rounded_weights import take_whole, weight_format
from rondel.train.loss_scale import LossScale
from rondel.train.optimizers import TABLES, build_optimizers, bytes_each, is_hidden

if TYPE_CHECKING:
    from rondel.train.settings import TrainSettings

PIECE = 1 << 20  # weights spread or rounded at a time: temporary tensors of 4 MB


class MasterWeights:
    """Masters, their gradients and their optimizers for one module; with `host` all of them in host memory."""

    in_shards = False  # whether each rank has a part of them

    def __init__(
        self,
        model: nn.Module,
        *,
        betas: tuple[float, float],
        weight_decay: float,
        optimizer: str = "adamw",
        host: bool = False,
        loss_scale: LossScale | None = None,
    ) -> None:
        """`loss_scale`: of a model that computes in float16."""
        self.on_host, self.loss_scale = host, loss_scale
        self.names, self.compute = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad))
        self._forms = [weight_format(p) for p in self.compute]  # how each is rounded, where it lies in a number format
        self.formatted_names = {name for name, form in zip(self.names, self._forms) if form is not None}
        self.masters = self._make_masters()
        hidden = is_hidden(model)
        self.optimizers = build_optimizers(
            optimizer, self.masters, [hidden[id(p)] for p in self.compute], betas=betas, weight_decay=weight_decay
        )
        self._moved_by = {
            id(master): optimizer
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for master in group["params"]
        }
        self.share = 1.0  # of all trained weights, where other stages of a pipeline have theirs
        # of all moments, before the first step too, as if each tensor were large
        self.moment_bytes = sum(int(m.numel() * bytes_each(self._moved_by[id(m)])) for m in self.masters)
        self._graded: list[Tensor] = []
        self._install_gradient_hooks()

    def _make_masters(self) -> list[Tensor]:
        def make_master(name: str, parameter: Tensor) -> Tensor:
            if (
                weight_format(parameter) is not None
            ):  # its rounding swallows no update: the master moves on between two codes
                whole = take_whole(parameter).detach()
                return whole.to("cpu" if self.on_host else whole.device, torch.float32, copy=True)
            if parameter.dtype == torch.float32:
                return parameter.detach().to("cpu", copy=True) if self.on_host else parameter
            return spread_within_rounding(name, parameter.detach().cpu() if self.on_host else parameter)

        return [make_master(name, p) for name, p in zip(self.names, self.compute)]

    def _install_gradient_hooks(self) -> None:
        """Below fp32, or with masters elsewhere, every gradient moves into its master's fp32 accumulator as soon as
        autograd is done with it.
        """

        def moves_to(master: Tensor) -> Callable[[Tensor], None]:
            def accumulate_gradient(parameter: Tensor) -> None:
                fresh = parameter.grad
                if fresh is None:  # it was added to the master's already (rondel.models.main_grad)
                    return
                if master.grad is None:
                    master.grad = fresh.to(master.device, torch.float32)
                else:
                    add_gradient(master.grad, fresh)
                parameter.grad = None

            return accumulate_gradient

        for parameter, master in zip(self.compute, self.masters):
            own_parameter(parameter, master)
            if parameter is not master:
                parameter.register_post_accumulate_grad_hook(moves_to(master))

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch to the accumulators, in float16 under the loss scale."""
        (loss if self.loss_scale is None else loss * self.loss_scale.value).backward()

    @property
    def _gradient_scale(self) -> float:
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def gradient_norm(self) -> Tensor:
        """Global 2-norm of the accumulated gradient, in fp32."""
        self.restore_grads()
        grads = [m.grad for m in self.masters if m.grad is not None]
        return torch.stack(torch._foreach_norm(grads)).norm() / self._gradient_scale if grads else torch.zeros(())

    def overflowed(self, norm: Tensor) -> bool:
        """Whether a gradient of this norm outgrew float16 under the loss scale, which then halves; the step is not
        taken.
        """
        if math.isfinite(float(norm)) or self.loss_scale is None or not self.loss_scale.can_shrink:
            return False
        self.loss_scale.update(overflowed=True)
        return True

    def step(self, *, lr: float, clip: float, norm: Tensor) -> float:
        """Clip by the global norm, move the masters, write the compute copy. -> share of
        compute weights whose bits changed.

        In float32 there is no cast that could swallow an update, so nothing is counted: 1 if lr > 0.
        """
        grads = [m.grad for m in self.masters if m.grad is not None]
        if (scale := min(1.0, clip / (float(norm) + 1e-6)) / self._gradient_scale) < 1:
            torch._foreach_mul_(grads, scale)
        if self.loss_scale is not None:
            self.loss_scale.update(overflowed=False)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        weights_changed()  # the fused step does not count as a change of its tensors
        return self._changed_share() if lr > 0 else 0.0

    def _changed_share(self) -> float:
        changed = total = 0
        with torch.no_grad():
            for parameter, master, form in zip(self.compute, self.masters, self._forms):
                if form is not None:
                    rounded = form.fake(master, parameter.dtype).to(parameter.device)
                    total += parameter.numel()
                    changed += int((rounded != parameter).sum())
                    parameter.copy_(rounded)
                elif parameter is not master:
                    rounds = parameter.dtype != master.dtype
                    total += parameter.numel() * rounds
                    for held, moved in zip(parameter.view(-1).split(PIECE), master.view(-1).split(PIECE)):
                        if rounds:
                            changed += round_into(held, moved)
                        else:
                            held.copy_(moved)
        return changed / total if total else 1.0

    def moments(self, i: int) -> dict[str, Tensor]:
        """What the optimizer remembers of master `i`, whole, by the optimizer's names, without its constant tables."""
        return {key: self.gather_full(i, value) for key, value in self.held_moments(i).items()}

    def held_moments(self, i: int) -> dict[str, Tensor]:
        """The same as it is kept here."""
        state = self._moved_by[id(self.masters[i])].state.get(self.masters[i], {})
        return {key: torch.as_tensor(value).detach() for key, value in state.items() if key not in TABLES}

    def load_moments(self, i: int, moments: dict[str, Tensor]) -> None:
        """What `moments` told; nothing: as if no step had been."""
        master, optimizer = self.masters[i], self._moved_by[id(self.masters[i])]
        optimizer.state.pop(master, None)
        if moments:
            counts_itself = isinstance(optimizer, torch.optim.AdamW)  # on the device
            optimizer.state[master] = {
                key: self.local_shard(i, value).to(master.device, copy=True)
                if value.ndim or counts_itself
                else int(value)
                for key, value in moments.items()
            }
        if "absmax1" in moments:  # of a tensor in 8 bits
            tables = {key: getattr(optimizer, "name2qmap")[name].to(master.device) for key, name in TABLES.items()}  # noqa: B009
            optimizer.state[master] |= tables

    def gather_all(self, read: Callable[[int], dict[str, Tensor]]) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """(name, what `read` gives of master i, whole), of all masters on the rank that writes; every rank asks."""
        return ((name, read(i)) for i, name in enumerate(self.names))

    def gather_full(self, i: int, piece: Tensor) -> Tensor:
        """The whole of a tensor that is kept like master `i`: a master, one of its moments."""
        return piece

    def local_shard(self, i: int, full: Tensor) -> Tensor:
        """What is kept here of it."""
        return full

    def zero_grad(self) -> None:
        for master in self.masters:
            if master.grad is not None:
                master.grad.zero_()

    def state_tensors(self) -> dict[str, list[Tensor]]:
        """What is the optimizer's alone; the compute copy is the engine's, too."""
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        moments = [value for state in states for value in state.values() if isinstance(value, Tensor) and value.ndim]
        gradients = [m.grad for m in self.masters if m.grad is not None]
        return {
            "masters": [m for p, m in zip(self.compute, self.masters) if p is not m],
            "moments": moments,
            "gradients": gradients,
        }

    def clear_grads(self) -> None:
        """Between two steps: every gradient is spent."""
        self._graded += [m for m in self.masters if m.grad is not None]
        for master in self.masters:
            master.grad = None

    def restore_grads(self) -> None:
        """Where there was a gradient there is a zero again: AdamW passes over what has none."""
        for master in self._graded:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        self._graded = []

    def load_masters(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter, master, form in zip(self.names, self.compute, self.masters, self._forms):
                master.copy_(weights[name])
                if form is not None:
                    parameter.copy_(form.fake(master, parameter.dtype))
                elif parameter is not master:
                    parameter.copy_(master)


@torch.no_grad()
def spread_within_rounding(name: str, rounded: Tensor) -> Tensor:
    """A bf16 or fp16 parameter -> its fp32 master: uniform among the numbers that round to it.

    A checkpoint in bf16 holds only numbers in the middle of their rounding interval, so masters equal to them
    must all move by half an interval before one bit of the policy changes: the first steps of a small learning
    rate train almost nothing. Spread over the interval, an update d of a master changes its weight with
    probability |d| / interval, by one interval: in the mean over the weights the policy moves by d (the argument
    of stochastic rounding: Gupta et al., 2015, arXiv:1502.02551; here drawn once, so that a step stays
    deterministic). The policy's own bits are unchanged: master.to(rounded.dtype) == rounded.

    The draw is a hash of the name and the index: the same on every device and for every number of ranks.
    """
    master = rounded.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    dropped = round(math.log2(torch.finfo(rounded.dtype).eps / torch.finfo(torch.float32).eps))  # bits: 16 of bf16's
    for bits, first in zip(master.view(-1).view(torch.int32).split(PIECE), range(0, master.numel(), PIECE)):
        ordinary = bits & 0x7FFFFFFF
        ordinary = (ordinary >= 1 << 23) & (ordinary < 0x7F800000)  # not 0, subnormal, inf or NaN
        below_half = (1 << dropped - 1) - 1
        bits += ((_hashed(name, first, bits) & 2 * below_half + 1) - below_half).clamp_max_(below_half) * ordinary
    return master


def _hashed(name: str, first: int, like: Tensor) -> Tensor:
    """-> int32 of the shape of `like`: an integer hash of each index, begun at `first`, and of the name."""
    word = torch.arange(first, first + len(like), dtype=torch.int32, device=like.device)
    word += zlib.crc32(name.encode()) - (1 << 31)
    for odd in (0x7FEB352D, 0x3C6EF373):
        word ^= word >> 16
        word *= odd
    return word ^ word >> 16


def learning_rate(lr: float, step: int, settings: TrainSettings) -> float:
    """`lr` at a step that counts from 0: linear warm-up over `warmup_steps`, then constant, linear to 0, or a half
    cosine to 0 at `steps`.
    """
    step, warmup = step - settings.first_step, settings.warmup_steps
    if step < warmup:
        return lr * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, settings.steps - warmup))
    return lr * {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[settings.schedule]
