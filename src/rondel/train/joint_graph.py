"""One pass of fixed shapes, forward and backward, as a graph without Python.

    loss_of(buffers) ──make_fx──> weights, buffers ──> loss, measures, gradients ──inductor──> machine code
                     │ once a shape
                     └──record──> the same as a CUDA graph, without a compiler

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
from rondel.models.recorded_graph import CudaGraph, GraphRecording

Run = Callable[..., Any]  # (weights and buffers, one after the other) -> loss, measures and gradients, likewise
Compiler = Callable[[GraphModule, list[Tensor]], Run]
Maker = Callable[[Run, list[Tensor]], Run]  # the same pass, to be run again and again
RECORDED = 1e-3  # of its norm that what a recording computes may differ by: sums of atomics have no order


class JointGraph:
    """`JointGraph(loss_of, inputs, traced(compile_graph))(inputs)` is `loss_of(inputs)`, with the same gradients.

    Raises ConfigError where a pass depends on a number, or it cannot be made.
    """

    def __init__(self, loss_of: nn.Module, inputs: dict[str, Tensor], make: Maker) -> None:
        held = dict(loss_of.named_parameters()) | dict(loss_of.named_buffers())
        self._held = list(held.values())
        self.trained = [p for p in self._held if p.requires_grad]
        self.names = list(inputs)
        self._measures: list[str] = []
        self._run = make(self._joint_pass(loss_of, list(held)), [*self._held, *inputs.values()])

    def _joint_pass(self, loss_of: nn.Module, names: list[str]) -> Run:
        """Forward and backward pass as a function of weights and buffers alone."""
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

        return joint

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


class GraphRun:
    """A joint pass that was recorded once as a CUDA graph, and is replayed over what its tensors hold then.

    A graph remembers addresses: where a weight has moved it is recorded again. The first answer of a recording is
    compared with the plain pass.
    """

    def __init__(self, joint: Run, tensors: list[Tensor], record: Callable[[Run], GraphRecording] = CudaGraph) -> None:
        self._joint, self._record, self._over = joint, record, list[int]()
        self._recording = self._record_pass(tensors)

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        if [t.data_ptr() for t in tensors] != self._over:
            self._recording = self._record_pass(list(tensors))
        return [t.clone() for t in self._recording.replay()]  # the next replay writes there

    def _record_pass(self, tensors: list[Tensor]) -> GraphRecording:
        plain = self._joint(*tensors)
        try:
            recording = self._record(lambda: self._joint(*tensors))
        except RuntimeError as error:
            raise ConfigError(
                f'trainer.micro_tokens.compile = "record": a training pass cannot be recorded as a CUDA graph: '
                f"{_first_line(error)}; set compile = false"
            ) from error
        gap = max(relative_difference(a, b) for a, b in zip(recording.replay(), plain, strict=True))
        if not gap <= RECORDED:
            raise ConfigError(
                f'trainer.micro_tokens.compile = "record": the recorded pass differs from the plain one by {gap:.3g} '
                f"of its norm (limit {RECORDED}); set compile = false"
            )
        self._over = [t.data_ptr() for t in tensors]
        return recording


def relative_difference(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|, and |a| where b is 0."""
    a, b = a.double(), b.double()
    return float((a - b).norm() / (b.norm() or 1.0))


def traced(compiler: Compiler) -> Maker:
    """The pass as a graph that was traced over tensors without numbers, and compiled."""

    def make(joint: Run, tensors: list[Tensor]) -> Run:
        try:
            graph = make_fx(joint, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)
        except Exception as error:
            raise ConfigError(
                f"trainer.micro_tokens.compile: a training pass cannot be made a graph: {_first_line(error)}; set "
                "compile = false"
            ) from error
        try:
            return compiler(graph, tensors)
        except Exception as error:
            raise ConfigError(
                f"trainer.micro_tokens.compile: a training pass cannot be compiled here: {_first_line(error)}. It "
                "needs a C++ compiler (apt install g++, xcode-select --install); or set compile = false"
            ) from error

    return make


def compile_graph(graph: GraphModule, inputs: Sequence[Tensor]) -> Run:
    """Machine code of a graph, by torch's inductor. It rounds where the operations round."""
    from torch._inductor import standalone_compile  # slow to import

    options = {"config_patches": {"emulate_precision_casts": True}}
    return standalone_compile(graph, [*inputs], dynamic_shapes="from_example_inputs", options=options)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
