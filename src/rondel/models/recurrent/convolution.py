"""Causal depthwise convolution: y_t = sum_k w_k x_{t-K+1+k}.  Its state is the window, the last K - 1 inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN


@dataclass(frozen=True, slots=True)
class CausalConv:
    """weight [C, K], bias [C]; inputs one x [B, L, C], state [B, K-1, C]; with a dilation d it looks back d (K-1).
    `in_order` adds one tap after the other, in fp32, so that no bit depends on how many tokens there are.
    """

    weight: Tensor
    bias: Tensor | None
    name: str = "window"
    dilation: int = 1
    in_order: bool = False

    @classmethod
    def of(cls, layer: nn.Conv1d, name: str = "window", *, in_order: bool = False) -> CausalConv:
        return cls(layer.weight[:, 0], layer.bias, name, layer.dilation[0], in_order)

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.weight.shape[1] - 1) * self.dilation, self.weight.shape[0]

    @property
    def state_dtype(self) -> torch.dtype:
        return self.weight.dtype

    def __call__(self, state: Tensor, inputs: Sequence[Tensor], lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        (x,) = inputs
        seen = torch.cat([state.to(x.dtype), x], 1)  # [B, K-1+L, C]
        weight = self.weight.to(x.dtype)
        if self.in_order:
            out = self._add_in_order(seen, x.shape[1]).to(x.dtype)
        else:
            out = F.conv1d(
                seen.transpose(1, 2), weight[:, None], self.bias, dilation=self.dilation, groups=len(weight)
            ).transpose(1, 2)
        if lengths is None:
            return out, seen[:, x.shape[1] :]
        last = lengths[:, None] + torch.arange(state.shape[1], device=x.device)  # [B, K-1]
        return out, seen.gather(1, last[:, :, None].expand(-1, -1, seen.shape[2]))

    def _add_in_order(self, seen: Tensor, length: int) -> Tensor:
        """Rounded tap by tap, as elementwise operations are, whatever stands beside a number."""
        weights, d = self.weight.float().unbind(1), self.dilation
        taps = [seen[:, k * d : k * d + length].float() * weight for k, weight in enumerate(weights)]
        out = taps[0]
        for tap in taps[1:]:
            out = out + tap
        return out if self.bias is None else out + self.bias.float()


def activated(name: str | None, x: Tensor) -> Tensor:
    """`name` is transformers' name of an activation; None for none."""
    return x if name is None else ACT2FN[name](x)
