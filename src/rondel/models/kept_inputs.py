"""Norms and gated activations of which autograd keeps the inputs alone; the backward pass computes the rest again.

                plain, bytes a number        here
    norm        x 4, normalised 4 (or 2)     x in its own dtype     bf16 stream: 2, fp32 stream: 4
    act(g) * u  g, u, act(g)                 g, u

One kernel computes the norm that most families have, and silu(g) * u: of models/row_kernels.py on a GPU, in 16 bits; of
models/cpu_kernels.py on a CPU, which such layers ask first.

The backward pass runs the module's own forward once more, on the same numbers, so every family's norm is covered and
each module's values and gradients have the plain ones' bits. Without a gradient nothing changes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rondel.models import cpu_kernels
from rondel.models.linear import is_tracing
from rondel.models.processor import HALVES
from rondel.system.kernel_choice import KernelChoice, choose_kernel

WIDEST = 1 << 14  # numbers of a row that the kernel of a norm takes
# as transformers writes them in most families
_GATED = "self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"
GATED = ((f"down_proj = {_GATED}", "return down_proj"), (f"return {_GATED}",))
RMS_NORM = (
    "input_dtype = hidden_states.dtype",
    "hidden_states = hidden_states.to(torch.float32)",
    "variance = hidden_states.pow(2).mean(-1, keepdim=True)",
    "hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)",
    "return self.weight * hidden_states.to(input_dtype)",
)


def install_kept_inputs(decoder: Any) -> None:
    """Every norm and every plain gated MLP of a decoder keeps its inputs alone from now on."""
    for module in decoder.modules():
        if _is_norm(module):
            norm = functools.partial(_norm, module, module.forward)
            if _has_lines(cast(Any, type(module)), RMS_NORM):
                norm = functools.partial(cpu_kernels.norm_layer, norm, module)
            setattr(module, "forward", norm)  # noqa: B010
        elif _is_gated(module):
            mlp = functools.partial(_gated_mlp, module)
            if _is_silu(module.act_fn):
                mlp = functools.partial(
                    cpu_kernels.gated_layer, functools.partial(_gate_product, module.act_fn), module
                )
            setattr(module, "forward", mlp)  # noqa: B010
        elif hasattr(module, "_apply_gate"):  # joined experts: transformers' own seam
            setattr(module, "_apply_gate", functools.partial(_apply_gate, module._apply_gate))  # noqa: B010


def keep_inputs(run: Callable[..., Tensor], inputs: Sequence[Tensor], weights: Sequence[nn.Parameter] = ()) -> Tensor:
    """run(*inputs), differentiable in the inputs and in the `weights` that `run` reads; only these are kept."""
    is_wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, *weights))
    if not is_wanted or is_tracing() or torch.compiler.is_compiling():
        return run(*inputs)
    return KeptInputs.apply(run, len(inputs), *inputs, *weights)


class KeptInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run: Callable[..., Tensor], count: int, *tensors: Tensor) -> Tensor:
        ctx.run, ctx.weights = run, tensors[count:]
        ctx.save_for_backward(*tensors)  # the weights, too: torch then notices when one was written to
        return run(*tensors[:count])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Any:
        kept, wanted = ctx.saved_tensors, ctx.needs_input_grad[2:]
        count = len(kept) - len(ctx.weights)
        inputs = [x.detach().requires_grad_(wants) for x, wants in zip(kept[:count], wanted)]
        with torch.enable_grad():
            out = ctx.run(*inputs)
        chosen = [x for x, wants in zip([*inputs, *ctx.weights], wanted) if wants]
        found = iter(torch.autograd.grad(out, chosen, grad, allow_unused=True))
        return None, None, *(next(found) if wants else None for wants in wanted)


def _norm(module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):  # norms that have a gate of their own
        return forward(*args, **kwargs)
    if choose_norm_kernel(module, args[0]).takes_kernel:
        from rondel.models.row_kernels import rms_norm

        return rms_norm(args[0], module.weight, module.variance_epsilon)
    return keep_inputs(forward, args, [*module.parameters()])


def _gated_mlp(module: Any, x: Tensor) -> Tensor:
    return module.down_proj(_gate_product(module.act_fn, module.gate_proj(x), module.up_proj(x)))


def _gate_product(act: Any, gate: Tensor, up: Tensor) -> Tensor:
    if choose_gate_kernel(act, gate, up).takes_kernel:
        from rondel.models.row_kernels import swiglu

        return swiglu(gate, up)
    return keep_inputs(functools.partial(_gate, act), [gate, up])


def _apply_gate(gate: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
    return keep_inputs(gate, [gate_up])


def _gate(act: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    return act(gate) * up


def _is_silu(act: Any) -> bool:
    return type(act).__name__ in ("SiLU", "SiLUActivation")


def choose_norm_kernel(module: Any, x: Tensor) -> KernelChoice:
    """Whether models/row_kernels.py computes this norm of these numbers."""
    weight, kind = getattr(module, "weight", None), cast(Any, type(module))
    unsupported = {
        "another formula": not _has_lines(kind, RMS_NORM),
        f"a weight that is a {type(weight).__name__}": type(weight) not in (nn.Parameter, Tensor),
        "weights of more than 16 bits": getattr(weight, "dtype", None) not in HALVES,
        f"rows of more than {WIDEST} numbers": x.shape[-1] > WIDEST,
        "a pass that is traced": is_tracing() or torch.compiler.is_compiling(),
    }
    return choose_kernel(x.device.type, *(what for what, present in unsupported.items() if present))


def choose_gate_kernel(act: Any, gate: Tensor, up: Tensor) -> KernelChoice:
    """Whether models/row_kernels.py computes act(gate) * up."""
    unsupported = {
        f"the activation {type(act).__name__}": not _is_silu(act),
        f"{gate.dtype} beside {up.dtype}": gate.dtype != up.dtype or gate.dtype not in HALVES,
        "a pass that is traced": is_tracing() or torch.compiler.is_compiling(),
    }
    return choose_kernel(gate.device.type, *(what for what, present in unsupported.items() if present))


def _is_norm(module: nn.Module) -> bool:
    """One that has no state but its weights, and no parts. torch's own keep their input alone anyway."""
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)):
        return False
    return type(module).__name__.endswith("Norm") and not [*module.children()] and not [*module.buffers()]


def _is_gated(module: Any) -> bool:
    if "forward" in module.__dict__ or not all(
        hasattr(module, n) for n in ("gate_proj", "up_proj", "down_proj", "act_fn")
    ):
        return False
    kind: Any = type(module)
    return not [*module.act_fn.parameters()] and any(_has_lines(kind, lines) for lines in GATED)


@functools.cache
def _has_lines(kind: Any, wanted: tuple[str, ...]) -> bool:
    """Whether the forward of a class computes these lines and nothing else."""
    try:
        lines = [line.strip() for line in inspect.getsource(kind.forward).splitlines()]
    except (OSError, TypeError):  # no source: stays plain
        return False
    return tuple(line for line in lines if line and not line.startswith(("def ", "#"))) == wanted
