"""Recurrences as kernels of flash-linear-attention (the package `fla`), on a GPU and in 16 bits, where it is installed.

                 here                                     there, several tokens        one token, without a gradient
    delta rule   models/recurrent/gated_delta.py          chunk_gated_delta_rule       fused_recurrent_gated_delta_rule
    by channel   the same, a decay for each channel       chunk_kda                    fused_recurrent_kda
    fading sums  Mamba-2, lightning attention             chunk_simple_gla             fused_recurrent_simple_gla

A batch of rows [B, L, ...] goes there as it is, with the states that its rows start from, and their final states come
back: padded tokens write nothing and nothing fades. States and logs of decay stay in fp32, all else is rounded to the
model's 16 bits. On a CPU, and for models in fp32, the formulas of these modules run.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rondel.core.errors import ModelError
from rondel.models.processor import HALVES

WIDEST = 256  # numbers of a key that the kernels take
SHARED = ("q", "k", "v", "g", "scale", "initial_state", "output_final_state")
KERNELS = {  # where they are, the arguments of all, and one's own
    "delta": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", (*SHARED, "beta")),
    "delta_step": ("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule", (*SHARED, "beta")),
    "channels": ("fla.ops.kda", "chunk_kda", (*SHARED, "beta")),
    "channels_step": ("fla.ops.kda", "fused_recurrent_kda", (*SHARED, "beta")),
    "fading": ("fla.ops.simple_gla", "chunk_simple_gla", SHARED),
    "fading_step": ("fla.ops.simple_gla", "fused_recurrent_simple_gla", SHARED),
}
Kernel = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class FusedKernels:
    """What is called in place of the formulas, and the dtype that q, k, v and beta are rounded to."""

    functions: dict[str, Kernel]
    dtype: torch.dtype

    def delta_rule(
        self, state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        """state [B,Hv,K,V], q and k [B,L,Hv,K], v [B,L,Hv,V], g [B,L,Hv,1 or K], beta [B,L,Hv] -> [B,L,Hv,V], state."""
        name, decay = ("delta", g[..., 0]) if g.shape[-1] == 1 else ("channels", g)
        return self._run(name, state, q, k, v, decay, scale=q.shape[-1] ** -0.5, beta=self._rounded(beta))

    def fading_sum(self, state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """state [B,H,V,K], q and k [B,L,H,K], v [B,L,H,V], g [B,L,H] -> [B,L,H,V], state."""
        out, final = self._run("fading", state.transpose(-1, -2), q, k, v, g, scale=1.0)
        return out, final.transpose(-1, -2)

    def _run(
        self, name: str, state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, **more: Any
    ) -> tuple[Tensor, Tensor]:
        is_step = v.shape[1] == 1 and not torch.is_grad_enabled()  # their kernels of one token have no backward pass
        q, k, v = (self._rounded(x) for x in (q, k, v))
        run = self.functions[f"{name}_step" if is_step else name]
        out, final = run(
            q=q, k=k, v=v, g=g.contiguous(), initial_state=state.contiguous(), output_final_state=True, **more
        )
        return out.float(), final.float()

    def _rounded(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).contiguous()


FindKernels = Callable[[Tensor, int], FusedKernels | None]


def fused_kernels(hidden: Tensor, key: int) -> FusedKernels | None:
    """Of a layer with these hidden states and keys of this size; None where the formulas run."""
    if not hidden.is_cuda or hidden.dtype not in HALVES or key > WIDEST or not is_installed():
        return None
    return FusedKernels(load_kernels(), hidden.dtype)


@functools.cache
def is_installed() -> bool:
    return importlib.util.find_spec("fla") is not None


@functools.cache
def load_kernels() -> dict[str, Kernel]:
    """All of them. Raises ModelError where the installed ones are not those that are known here."""
    found: dict[str, Kernel] = {}
    for name, (module, function, needed) in KERNELS.items():
        try:
            found[name] = getattr(importlib.import_module(module), function)
            known = inspect.signature(found[name]).parameters
        except (ImportError, AttributeError, RuntimeError) as error:
            raise ModelError(
                f"flash-linear-attention is installed, and {module}.{function} cannot be had: {error}. {REMEDY}"
            ) from error
        if missing := [argument for argument in needed if argument not in known]:
            raise ModelError(f"{module}.{function} takes no '{missing[0]}'. {REMEDY}")
    return found


REMEDY = (
    "Install flash-linear-attention 0.6.0, whose arguments are known here, or uninstall it: then the formulas of "
    "models/recurrent run, in torch"
)
