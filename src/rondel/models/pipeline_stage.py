"""Layers of one model on several ranks, one stage behind the other (pipeline parallel, arXiv:1811.06965).

    first stage   embedding, layers 0 ... a-1 ──► hidden states [T, D] ──► layers a ... L-1, norm, head   last stage
                                              ◄── their gradient     ◄──

The module stays whole, and so do its names; only what another stage computes has no memory here, and is passed over:
the states that come in take the place of what the layers before would give, and a pass ends where the next stage's
first layer would begin. Sending is a part of the graph: the backward pass of what was sent receives the gradient, that
of what came in sends it on. So a stage makes a forward pass and a backward pass like any model, and the order of
passes (train/pipeline_schedule.py) is all that makes a pipeline of them.

A stage may have several chunks, runs of layers with those of the other stages between them: the last stage then sends
to the first one's next chunk. A pass with a gradient is one chunk's; one without goes through all of them in turn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rondel.core.errors import ModelError
from rondel.models.blocks import map_hidden
from rondel.models.layer_split import INSTEAD, StageLayers
from rondel.models.routing_tape import ROUTERS
from rondel.models.stage_link import StageLink


class _EndOfStage(Exception):
    """A pass has come to the first layer of the next stage."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class PipelineStage:
    """One stage of one model.

    chunk   of its runs of layers the one that the next pass goes through; None: all of them, one after the other
    """

    def __init__(self, model: Any, layers: StageLayers, link: StageLink, dtype: torch.dtype) -> None:
        """`dtype`: of the hidden states between layers."""
        self.layers, self.link, self.dtype = layers, link, dtype
        self.kind, self.width = model.config.model_type, model.get_input_embeddings().weight.shape[1]
        self.chunk: int | None = None
        self._now = 0  # the chunk that computes
        self._sent = 0  # in a pass through all of them
        self._outputs = 0  # of a layer, where it gives a tuple; told with the first states, for layers that are skipped
        routers = [m for m in model.modules() if type(m).__name__.endswith(ROUTERS)]
        self._routers = [
            frozenset(i for i, router in enumerate(routers) if id(router) in inside)
            for inside in ({id(m) for i in run for m in layers.blocks[i].modules()} for run in layers.runs)
        ]
        self._received: Tensor | None = None
        self._blank: Tensor | None = None
        self._forms: dict[int, list[Any]] = {}  # of each chunk, shape and dtype of a row of what comes in
        self._announced: set[int] = set()  # chunks whose form the next stage knows: told with the first states
        earlier = {id(layers.blocks[i]): i for run in layers.runs[:-1] for i in run}
        # of each layer that a later chunk passes over: where the module has it
        self._places = {
            earlier[id(child)]: (parent, key, child)
            for parent in model.modules()
            for key, child in parent._modules.items()
            if id(child) in earlier
        }
        self._install(model)

    @property
    def routers(self) -> frozenset[int]:
        """Those that the next pass asks."""
        return frozenset().union(*self._routers) if self.chunk is None else self._routers[self.chunk]

    @property
    def root_chunk(self) -> int:
        """Whose passes go through what is in no layer."""
        return len(self.layers.runs) - 1 if self.link.is_last else 0

    @property
    def ends_in_head(self) -> bool:
        """Whether the next pass does."""
        return self.link.is_last and self.chunk in (None, len(self.layers.runs) - 1)

    def _install(self, model: Any) -> None:
        """Change what layers of other stages do. The hooks of those who cut or gather the own layers are there
        already, and see what comes in.
        """
        blocks, runs, first = self.layers.blocks, self.layers.runs, self.link.index == 0
        inside = {id(m) for block in blocks for m in block.modules()}
        names = {id(p): name for name, p in model.named_parameters()}
        for module in model.modules() if not first or len(runs) > 1 else ():
            own = [names[id(p)] in self.layers.held for p in module.parameters(recurse=False)]
            if id(module) in inside:
                continue
            if module is model.get_input_embeddings() or (own and first) or not all(own):
                setattr(module, "forward", functools.partial(self._give_blank, module.forward))  # noqa: B010
        ours = {i for run in runs for i in run}
        for i, block in enumerate(blocks):
            if i not in ours:
                setattr(block, "forward", functools.partial(self._pass_over, i))  # noqa: B010
        for chunk, run in enumerate(runs):
            if not (first and chunk == 0):
                blocks[run.start].register_forward_pre_hook(self._take_in, prepend=True, with_kwargs=True)
            if run.stop < len(blocks):
                blocks[run.stop - 1].register_forward_hook(self._note_outputs)

    def run(self, forward: Callable[[], Tensor], rows: int) -> Tensor:
        """Last hidden states of this stage's layers over a packed row: [1, T, D]."""
        if self.chunk is not None:
            return self._run_chunk(self.chunk, forward, rows)
        self._sent, last = 0, len(self.layers.runs) - 1
        for chunk in range(last):
            self.send_forward(self._run_chunk(chunk, forward, rows)[0])
        return self._run_chunk(last, forward, rows)

    def _run_chunk(self, chunk: int, forward: Callable[[], Tensor], rows: int) -> Tensor:
        self._now = chunk
        if self.link.index or chunk:
            self._received = self._receive(rows)
            # a decoder that takes more of it than its size and dtype says so
            self._blank = torch.full((1, rows, self.width), torch.nan, dtype=self.dtype, device=self.link.device)
        passed = [place for i, place in self._places.items() if i < self.layers.runs[chunk].start]
        try:
            for parent, key, _ in passed:  # their hooks would gather weights that this pass does not need
                parent._modules[key] = _SkippedLayer(self)
            return forward()
        except _EndOfStage as end:
            return end.hidden
        finally:
            for parent, key, block in passed:
                parent._modules[key] = block
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
        self._sent += 1
        if self._now not in self._announced:
            self.link.send_object((tuple(hidden.shape[1:]), hidden.dtype, self._outputs), self.link.next)
            self._announced.add(self._now)
        return _SendForward.apply(hidden, self.link)

    def give_up(self, rows: int) -> Tensor:
        """Send something in place of a pass that failed here, so that no other stage waits for it.
        -> [rows - 1], NaN."""
        for chunk in range(self._sent, len(self.layers.runs) - self.link.is_last):
            self._now = chunk
            self.send_forward(torch.zeros(rows, self.width, dtype=self.dtype, device=self.link.device))
        return self.link.broadcast_last(torch.full((rows - 1,), torch.nan, device=self.link.device))

    def _receive(self, rows: int) -> Tensor:
        link, before = self.link, self.link.before
        if self._now not in self._forms:
            *form, self._outputs = link.receive_object(before)
            self._forms[self._now] = form
        width, dtype = self._forms[self._now]
        came = link.receive((1, rows, *width), dtype, before, link.ranks)
        if torch.is_grad_enabled():
            came.requires_grad_().register_post_accumulate_grad_hook(functools.partial(_send_gradient, link))
        return came

    def _give_blank(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stands for embeddings: a decoder looks at their size and dtype before the first layer."""
        if not (self.link.index or self._now):
            return own(*args, **kwargs)
        if self._received is None:
            raise ModelError(f"model type '{self.kind}' computes with weights of the first stage behind its layers")
        assert self._blank is not None
        return self._blank[0] if args and args[0].ndim == 1 else self._blank

    def skip_layer(self, *args: Any, **kwargs: Any) -> Any:
        """What a layer before those that compute now gives."""
        return (self._blank, *[None] * (self._outputs - 1)) if self._outputs else self._blank

    def _pass_over(self, layer: int, *args: Any, **kwargs: Any) -> Any:
        """In place of a layer of another stage."""
        if layer < self.layers.runs[self._now].start:
            return self.skip_layer()

        def end(hidden: Tensor) -> Tensor:
            raise _EndOfStage(hidden)

        return map_hidden(end, args, kwargs)

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


class _SkippedLayer(nn.Module):
    """Stands where a layer of an earlier chunk is, while a later one computes."""

    def __init__(self, stage: PipelineStage) -> None:
        super().__init__()
        self.forward = stage.skip_layer


class _SendForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, link: StageLink):
        ctx.link, ctx.form = link, (tuple(hidden.shape), hidden.dtype)
        link.send(hidden, link.next, link.ranks)
        return hidden.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.link.receive(*ctx.form, ctx.link.next, ctx.link.back), None


def _send_gradient(link: StageLink, came: Tensor) -> None:
    assert came.grad is not None
    link.send(came.grad[0], link.before, link.back)
    came.grad = None
