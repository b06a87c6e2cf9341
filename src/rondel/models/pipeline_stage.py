"""Layers of one model on several ranks, one stage behind the other (pipeline parallel, arXiv:1811.06965).

    first stage   embedding, layers 0 ... a-1 ──► hidden states [T, D] ──► layers a ... L-1, norm, head   last stage
                                              ◄── their gradient     ◄──

The module stays whole, and so do its names; only what another stage computes has no memory here, and is passed over:
the states that come in take the place of what the layers before would give, and a pass ends where the next stage's
first layer would begin. Sending is a part of the graph: the backward pass of what was sent receives the gradient, that
of what came in sends it on. So a stage makes a forward pass and a backward pass like any model, and the order of
passes (train/pipeline_schedule.py) is all that makes a pipeline of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rondel.core.errors import ModelError
from rondel.models.blocks import map_hidden
from rondel.models.collectives import RankGroup
from rondel.models.layer_split import INSTEAD, StageLayers
from rondel.models.routing_tape import ROUTERS


class _EndOfStage(Exception):
    """A pass has come to the first layer of the next stage."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class StageLink:
    """Messages of a rank to the stages before and behind it, in two groups, so that neither direction waits for the
    other.
    """

    def __init__(self, forward: RankGroup, backward: RankGroup, device: torch.device, *, leads: bool = True) -> None:
        """`leads`: it begins with the first of all ranks, which writes checkpoints and publishes weights."""
        self.ranks, self.back, self.device, self.leads = forward, backward, device, leads
        self.index, self.size = forward.index, forward.size
        self._under_way: list[tuple[Any, Tensor]] = []  # sends, whose tensors must stay

    @property
    def is_last(self) -> bool:
        return self.index == self.size - 1

    def send(self, x: Tensor, to: int, group: RankGroup) -> None:
        """Without waiting for it to arrive."""
        x = x.detach().contiguous()
        self._under_way = [(work, held) for work, held in self._under_way if not work.is_completed()]
        while len(self._under_way) > 2 * self.size:  # a pass without a gradient: the next stage is slower
            self._under_way.pop(0)[0].wait()
        self._under_way.append((dist.isend(x, group=group.group, group_dst=to), x))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int, group: RankGroup) -> Tensor:
        x = torch.empty(shape, dtype=dtype, device=self.device)
        dist.recv(x, group=group.group, group_src=source)
        return x

    def send_object(self, value: Any, to: int) -> None:
        dist.send_object_list([value], group=self.ranks.group, group_dst=to, device=self.device)

    def receive_object(self, source: int) -> Any:
        told = [None]
        dist.recv_object_list(told, group=self.ranks.group, group_src=source, device=self.device)
        return told[0]

    def broadcast_last(self, values: Tensor) -> Tensor:
        """Send what the last stage has in `values` to all of them, in place. -> values."""
        dist.broadcast(values, group=self.ranks.group, group_src=self.size - 1)
        return values

    def collect(
        self, own: Iterable[tuple[str, dict[str, Tensor]]], shared: Container[str]
    ) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Tensors by the name of their parameter, those of all stages on the first one, in the order of the stages;
        every stage asks, and goes through its own. `shared`: names that the first stage has, too. Where this pipeline
        does not begin with the rank that writes, none travels.
        """
        if not self.leads:
            yield from own
        elif self.index == 0:
            yield from own
            for stage in range(1, self.size):
                while (told := self.receive_object(stage)) is not None:
                    name, forms = told
                    yield (
                        name,
                        {k: self.receive(shape, dtype, stage, self.ranks) for k, (shape, dtype) in forms.items()},
                    )
        else:
            for name, tensors in own:
                if name not in shared:
                    self.send_object((name, {key: (tuple(t.shape), t.dtype) for key, t in tensors.items()}), 0)
                    for t in tensors.values():
                        dist.send(t.detach().to(self.device).contiguous(), group=self.ranks.group, group_dst=0)
                yield name, tensors
            self.send_object(None, 0)

    def sum_ends(self, x: Tensor) -> None:
        """In place, over the first and the last stage."""
        other = self.size - 1 if self.index == 0 else 0
        self.send(x.clone(), other, self.ranks if self.index == 0 else self.back)
        x += self.receive(tuple(x.shape), x.dtype, other, self.back if self.index == 0 else self.ranks)


class PipelineStage:
    """One stage of one model."""

    def __init__(self, model: Any, layers: StageLayers, link: StageLink, dtype: torch.dtype) -> None:
        """`dtype`: of the hidden states between layers."""
        self.layers, self.link, self.dtype = layers, link, dtype
        self.kind, self.width = model.config.model_type, model.get_input_embeddings().weight.shape[1]
        self._outputs = 0  # of a layer, where it gives a tuple; told with the first states, for layers that are skipped
        routers = [m for m in model.modules() if type(m).__name__.endswith(ROUTERS)]
        inside = {id(m) for block in layers.own_blocks for m in block.modules()}
        self.routers = frozenset(i for i, router in enumerate(routers) if id(router) in inside)
        self._received: Tensor | None = None
        self._blank: Tensor | None = None
        self._form: list[Any] | None = None  # shape and dtype of a row of what comes in: told with the first one
        self._announced = False
        self._install(model)

    def _install(self, model: Any) -> None:
        """Change what layers of other stages do. The hooks of those who cut or gather the own layers are there
        already, and see what comes in.
        """
        blocks, own = self.layers.blocks, self.layers.own
        if self.link.index:
            inside = {id(m) for block in blocks for m in block.modules()}
            names = {id(p): name for name, p in model.named_parameters()}
            for module in model.modules():
                held = all(names[id(p)] in self.layers.held for p in module.parameters(recurse=False))
                if (not held and id(module) not in inside) or module is model.get_input_embeddings():
                    setattr(module, "forward", self._give_blank)  # noqa: B010
            for block in blocks[: own.start]:
                setattr(block, "forward", self._skip_layer)  # noqa: B010
            blocks[own.start].register_forward_pre_hook(self._take_in, prepend=True, with_kwargs=True)
        if not self.link.is_last:
            blocks[own.stop - 1].register_forward_hook(self._note_outputs)
            setattr(blocks[own.stop], "forward", self._end)  # noqa: B010

    def run(self, forward: Callable[[], Tensor], rows: int) -> Tensor:
        """Last hidden states of this stage's layers over a packed row: [1, T, D]."""
        if self.link.index:
            self._received = self._receive(rows)
            # a decoder that takes more of it than its size and dtype says so
            self._blank = torch.full((1, rows, self.width), torch.nan, dtype=self.dtype, device=self.link.device)
        try:
            return forward()
        except _EndOfStage as end:
            return end.hidden
        finally:
            self._received = self._blank = None

    def collect(self, own: Iterable[tuple[str, dict[str, Tensor]]]) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Tensors by the name of their parameter, whole: all of them on the first rank, which asks with all others;
        these go through their own.
        """
        return self.link.collect(own, self.layers.shared)

    def share_of(self, count: int) -> float:
        """This stage's share of what all stages count."""
        every = self.link.ranks.all_reduce(torch.tensor(count, dtype=torch.float64, device=self.link.device))
        return count / max(1.0, float(every))

    def send_forward(self, hidden: Tensor) -> Tensor:
        """Send what this stage computed [T, D] to the next one. -> 0, whose backward pass receives the gradient."""
        if not self._announced:
            self.link.send_object((tuple(hidden.shape[1:]), hidden.dtype, self._outputs), self.link.index + 1)
            self._announced = True
        return _SendForward.apply(hidden, self.link)

    def give_up(self, rows: int) -> Tensor:
        """Send something in place of a pass that failed here, so that no other stage waits for it. -> [rows - 1], NaN."""
        if not self.link.is_last:
            self.send_forward(torch.zeros(rows, self.width, dtype=self.dtype, device=self.link.device))
        return self.link.broadcast_last(torch.full((rows - 1,), torch.nan, device=self.link.device))

    def _receive(self, rows: int) -> Tensor:
        link, before = self.link, self.link.index - 1
        if self._form is None:
            *self._form, self._outputs = link.receive_object(before)
        width, dtype = self._form
        came = link.receive((1, rows, *width), dtype, before, link.ranks)
        if torch.is_grad_enabled():
            came.requires_grad_().register_post_accumulate_grad_hook(functools.partial(_send_gradient, link))
        return came

    def _give_blank(self, *args: Any, **kwargs: Any) -> Tensor:
        """Stands for embeddings: a decoder looks at their size and dtype before the first layer."""
        if self._received is None:
            raise ModelError(f"model type '{self.kind}' computes with weights of the first stage behind its layers")
        assert self._blank is not None
        return self._blank[0] if args and args[0].ndim == 1 else self._blank

    def _skip_layer(self, *args: Any, **kwargs: Any) -> Any:
        return (self._blank, *[None] * (self._outputs - 1)) if self._outputs else self._blank

    def _take_in(self, block: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        came = self._received
        if came is None:
            raise ModelError(
                f"a layer of model type '{self.kind}' is called twice in a pass, and pp computes it once. {INSTEAD}"
            )
        self._received = None
        return map_hidden(lambda _: came, args, kwargs)

    def _note_outputs(self, block: Any, args: tuple, out: Any) -> None:
        self._outputs = len(out) if isinstance(out, tuple) else 0

    def _end(self, *args: Any, **kwargs: Any) -> None:
        def end(hidden: Tensor) -> Tensor:
            raise _EndOfStage(hidden)

        map_hidden(end, args, kwargs)


class _SendForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, link: StageLink):
        ctx.link, ctx.form = link, (tuple(hidden.shape), hidden.dtype)
        link.send(hidden, link.index + 1, link.ranks)
        return hidden.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.link.receive(*ctx.form, ctx.link.index + 1, ctx.link.back), None


def _send_gradient(link: StageLink, came: Tensor) -> None:
    assert came.grad is not None
    link.send(came.grad[0], link.index - 1, link.back)
    came.grad = None
