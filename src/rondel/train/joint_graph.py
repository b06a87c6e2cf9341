"""One pass of fixed shapes, forward and backward, as a graph without Python.

    loss_of(buffers) ──make_fx──> weights, buffers ──> loss, measures, gradients ──inductor──> machine code
                      once a shape

The graph reads the model's own weights at every run, so new weights need no new graph. To autograd a run looks like one
operation, whose gradients are known when it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from rondel.core.errors import ConfigError

Run = Callable[..., Any]  # (weights and buffers, one after the other) -> loss, measures and gradients, likewise
Compiler = Callable[[GraphModule, list[Tensor]], Run]


class JointGraph:
    """`JointGraph(loss_of, inputs, compile_graph)(inputs)` is `loss_of(inputs)`, with the same gradients.

    Raises ConfigError where a pass depends on a number, or the compiler fails.
    """

    def __init__(self, loss_of: nn.Module, inputs: dict[str, Tensor], compiler: Compiler) -> None:
        held = dict(loss_of.named_parameters()) | dict(loss_of.named_buffers())
        self._held = list(held.values())
        self.trained = [p for p in self._held if p.requires_grad]
        self.names = list(inputs)
        self._measures: list[str] = []
        self.graph = self._trace(loss_of, list(held), list(inputs.values()))
        try:
            self._run = compiler(self.graph, [*self._held, *inputs.values()])
        except Exception as error:
            raise ConfigError(
                f"trainer.micro_tokens.compile: a training pass cannot be compiled here: {_first_line(error)}. It "
                "needs a C++ compiler (apt install g++, xcode-select --install); or set compile = false"
            ) from error

    def _trace(self, loss_of: nn.Module, names: list[str], inputs: list[Tensor]) -> GraphModule:
        wants = [p.requires_grad for p in self._held]

        def joint(*tensors: Tensor) -> list[Tensor]:
            weights = [t.detach().requires_grad_(w) for t, w in zip(tensors, wants)]
            given = dict(zip(self.names, tensors[len(weights) :]))
            trained = [w for w in weights if w.requires_grad]
            own = {f"loss_of.{name}": w for name, w in zip(names, weights)}
            loss, measured, grads = functional_call(_WithGradients(loss_of), own, (given, trained))
            self._measures = list(measured)
            found = [torch.zeros_like(w) if g is None else g for w, g in zip(trained, grads)]
            return [loss.detach(), *(value.detach() for value in measured.values()), *found]

        try:
            return make_fx(joint, tracing_mode="fake", _allow_non_fake_inputs=True)(*self._held, *inputs)
        except Exception as error:
            raise ConfigError(
                f"trainer.micro_tokens.compile: a training pass cannot be made a graph: {_first_line(error)}; set "
                "compile = false"
            ) from error

    def __call__(self, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        loss, *measured = _GraphLoss.apply(self, inputs, *self.trained)
        return loss, dict(zip(self._measures, measured))

    @torch.no_grad()
    def run(self, inputs: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """-> loss and measures, gradients of the trained weights."""
        found = self._run(*self._held, *inputs.values())
        split = 1 + len(self._measures)
        return list(found[:split]), list(found[split:])


class _WithGradients(nn.Module):
    """Loss, measures, gradients of some weights: a backward pass may run a module again, over the same weights."""

    def __init__(self, loss_of: nn.Module) -> None:
        super().__init__()
        self.loss_of = loss_of

    @torch.enable_grad()
    def forward(
        self, inputs: dict[str, Tensor], trained: list[Tensor]
    ) -> tuple[Tensor, dict[str, Tensor], Sequence[Tensor | None]]:
        loss, measured = self.loss_of(inputs)
        return loss, measured, torch.autograd.grad(loss, trained, allow_unused=True)


class _GraphLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, graph: JointGraph, inputs: dict[str, Tensor], *trained: Tensor):
        (loss, *measured), ctx.grads = graph.run(inputs)
        ctx.mark_non_differentiable(*measured)
        return loss, *measured

    @staticmethod
    def backward(ctx, grad: Tensor, *_: Tensor):
        grads, ctx.grads = ctx.grads, None
        return None, None, *(g.mul_(grad) for g in grads)


def compile_graph(graph: GraphModule, inputs: Sequence[Tensor]) -> Run:
    """Machine code of a graph, by torch's inductor. It rounds where the operations round."""
    from torch._inductor import standalone_compile  # slow to import

    options = {"config_patches": {"emulate_precision_casts": True}}
    return standalone_compile(graph, [*inputs], dynamic_shapes="from_example_inputs", options=options)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
