"""fp32 master weights behind a compute copy, their optimizer, schedules, clipping.

The module's parameters are the compute copy that the engine reads; the masters are what the optimizer moves
(train/optimizers.py). In float32 they are the same tensors. The step writes the compute copy in place, so an engine
that shares it needs 0 bytes moved.

Between two steps a bf16 weight on a CPU is its master's upper half already, so the other 16 bits alone are kept, and
the masters, bit by bit, are there while a step is taken:

    passes, generation   bf16 weight 2 bytes, the rest of its master 2
    the step             bf16 weight 2 bytes, master 4

With `host` masters, accumulators and moments lie in host memory and the step is taken there (arXiv:2101.06840):

    device   gradient of a weight, as soon as it is known ──►│        ◄── rounded weights, a piece at a time
    host                                        accumulator += ; step  │
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rondel.models.cpu_kernels import add_gradient, join_bits, round_into, split_bits
from rondel.models.main_grad import own_parameter, weights_changed
from rondel.models.rounded_weights import take_whole, weight_format
from rondel.train.loss_scale import LossScale
from rondel.train.optimizers import TABLES, build_optimizers, bytes_each, is_hidden

if TYPE_CHECKING:
    from rondel.train.settings import TrainSettings

PART = 1 << 22  # masters that are whole at the same time, where a step joins them: 16 MB, or one tensor
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
        self._masters = self._make_masters()
        self.has_copies = [master is not p for p, master in zip(self.compute, self._masters)]
        self.sizes = [master.numel() for master in self._masters]  # numbers of each that are here
        # of a split master what it has beside its weight: models/cpu_kernels.py, split_bits
        self._rest: list[tuple[Tensor, Tensor] | None] = [None] * len(self._masters)
        self._is_split, self._splits = [False] * len(self._masters), True
        hidden = is_hidden(model)
        self.optimizers = build_optimizers(
            optimizer, self._masters, [hidden[id(p)] for p in self.compute], betas=betas, weight_decay=weight_decay
        )
        self._moved_by = {
            id(master): optimizer
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for master in group["params"]
        }
        self.share = 1.0  # of all trained weights, where other stages of a pipeline have theirs
        # of all moments, before the first step too, as if each tensor were large
        self.moment_bytes = sum(int(m.numel() * bytes_each(self._moved_by[id(m)])) for m in self._masters)
        self._graded: list[Tensor] = []
        self._install_gradient_hooks()
        self._split_masters(range(len(self._masters)))

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

    @property
    def masters(self) -> list[Tensor]:
        """The tensors that the optimizer moves. Who asks may keep them, so they stay whole from now on; `read_master`
        tells their numbers and leaves them as they are.
        """
        self.keep_whole()
        return self._masters

    def keep_whole(self) -> None:
        """From now on every master has its storage between two steps, too."""
        self._splits = False
        self._join_masters(range(len(self._masters)))

    def read_master(self, i: int) -> Tensor:
        """The numbers of master `i`, to be read: of one that is not whole a copy."""
        master, rest = self._masters[i].detach(), self._rest[i]
        if rest is None or not self._is_split[i]:
            return master
        whole = torch.empty(master.shape)
        join_bits(whole, self.compute[i].detach(), *rest)
        return whole

    def _may_split(self, i: int) -> bool:
        """Whether weight `i` is its master, rounded to bf16, and lies beside it."""
        if not self._splits or self.on_host or self.in_shards or self._forms[i] is not None:
            return False
        parameter, master = self.compute[i], self._masters[i]
        here = parameter.is_cpu and master.is_cpu and parameter.is_contiguous() and master.is_contiguous()
        return here and parameter.dtype == torch.bfloat16

    @torch.no_grad()
    def _split_master(self, i: int) -> int:
        """Round it into its weight; the rest of its bits alone stays, and the tensor keeps its place in the optimizer,
        with one number. -> how many numbers of the weight have other bits than before.
        """
        master, known = self._masters[i], self._rest[i]
        changed, rest = split_bits(self.compute[i].detach(), master, None if known is None else known[0])
        self._rest[i], self._is_split[i] = rest, rest is not None
        master.data = torch.zeros(()).expand(master.shape) if rest is not None else master.detach().clone()
        return changed

    def _split_masters(self, part: Iterable[int]) -> None:
        for i in part:
            if not self._is_split[i] and self._may_split(i):
                self._split_master(i)

    @torch.no_grad()
    def _join_masters(self, part: Iterable[int], room: Tensor | None = None) -> None:
        """In `room`, as long as they are split again before it is another's; else in rooms of their own."""
        first = 0
        for i in part:
            if not self._is_split[i] or (rest := self._rest[i]) is None:
                continue
            master, size = self._masters[i], self.sizes[i]
            whole = torch.empty(size) if room is None else room[first : first + size]
            master.data = whole.view(master.shape)
            join_bits(master.data, self.compute[i].detach(), *rest)
            self._is_split[i] = False
            if room is None:
                self._rest[i] = None
            first += size

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

        for parameter, master in zip(self.compute, self._masters):
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
        grads = [m.grad for m in self._masters if m.grad is not None]
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
        grads = [m.grad for m in self._masters if m.grad is not None]
        if (scale := min(1.0, clip / (float(norm) + 1e-6)) / self._gradient_scale) < 1:
            torch._foreach_mul_(grads, scale)
        if self.loss_scale is not None:
            self.loss_scale.update(overflowed=False)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
        changed = total = 0
        parts = self._parts()
        room = torch.empty(max(sum(self.sizes[i] for i in part) for part in parts)) if any(self._is_split) else None
        for part in parts:
            self._join_masters(part, room)
            self._move_masters(part)
            if lr > 0:
                differ, numbers = self._round_masters(part)
                changed, total = changed + differ, total + numbers
            self._split_masters(part)
        weights_changed()  # the fused step does not count as a change of its tensors
        return self._changed_share(changed, total) if lr > 0 else 0.0

    def _parts(self) -> list[list[int]]:
        """Masters that are whole at the same time; all where none is split."""
        if not any(self._is_split):
            return [[*range(len(self._masters))]]
        parts: list[list[int]] = [[]]
        size = 0
        for i, more in enumerate(self.sizes):
            if parts[-1] and size + more > PART:
                parts.append([])
                size = 0
            parts[-1].append(i)
            size += more
        return parts

    def _move_masters(self, part: list[int]) -> None:
        """An optimizer passes over what has no gradient."""
        aside = {i: m.grad for i, m in enumerate(self._masters) if m.grad is not None}
        for i in aside.keys() - set(part):
            self._masters[i].grad = None
        for optimizer in self.optimizers:
            optimizer.step()
        for i, grad in aside.items():
            self._masters[i].grad = grad

    @torch.no_grad()
    def _round_masters(self, part: list[int]) -> tuple[int, int]:
        """Write the compute copies. -> how many of them have other bits than before, of how many that are rounded."""
        changed = total = 0
        for i in part:
            parameter, master, form = self.compute[i], self._masters[i], self._forms[i]
            if self._may_split(i):
                total += parameter.numel()
                changed += self._split_master(i)
            elif form is not None:
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
        return changed, total

    def _changed_share(self, changed: int, total: int) -> float:
        return changed / total if total else 1.0

    def moments(self, i: int) -> dict[str, Tensor]:
        """What the optimizer remembers of master `i`, whole, by the optimizer's names, without its constant tables."""
        return {key: self.gather_full(i, value) for key, value in self.held_moments(i).items()}

    def held_moments(self, i: int) -> dict[str, Tensor]:
        """The same as it is kept here."""
        state = self._moved_by[id(self._masters[i])].state.get(self._masters[i], {})
        return {key: torch.as_tensor(value).detach() for key, value in state.items() if key not in TABLES}

    def load_moments(self, i: int, moments: dict[str, Tensor]) -> None:
        """What `moments` told; nothing: as if no step had been."""
        master, optimizer = self._masters[i], self._moved_by[id(self._masters[i])]
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
        for master in self._masters:
            if master.grad is not None:
                master.grad.zero_()

    def state_tensors(self) -> dict[str, list[Tensor]]:
        """What is the optimizer's alone; the compute copy is the engine's, too."""
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        moments = [value for state in states for value in state.values() if isinstance(value, Tensor) and value.ndim]
        gradients = [m.grad for m in self._masters if m.grad is not None]
        return {
            "masters": [
                m if rest is None else rest[0]
                for m, rest, copy in zip(self._masters, self._rest, self.has_copies)
                if copy
            ],
            "moments": moments,
            "gradients": gradients,
        }

    def clear_grads(self) -> None:
        """Between two steps: every gradient is spent."""
        self._graded += [m for m in self._masters if m.grad is not None]
        for master in self._masters:
            master.grad = None

    def restore_grads(self) -> None:
        """Where there was a gradient there is a zero again: AdamW passes over what has none."""
        for master in self._graded:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        self._graded = []

    def load_masters(self, weights: Mapping[str, Tensor]) -> None:
        self._join_masters(range(len(self._masters)))
        with torch.no_grad():
            for name, parameter, master, form in zip(self.names, self.compute, self._masters, self._forms):
                master.copy_(weights[name])
                if form is not None:
                    parameter.copy_(form.fake(master, parameter.dtype))
                elif parameter is not master:
                    parameter.copy_(master)
        self._split_masters(range(len(self._masters)))


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
