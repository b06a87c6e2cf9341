"""Compressed entries of DeepSeek V4 (its report, section 2.3): m tokens become one key that is its value, too.

    entry of window w = sum_j softmax_j(gate_j + bias_j) * kv_j        channel by channel, j over
    heavily compressed    the m tokens of window w
    sparse, overlapping   the m tokens of window w - 1 (first half of their channels) and of w (second half)

A window is whole at its last token, so an entry belongs to that token: position (w + 1) m - 1. The state of a sequence
is what a later entry may still read, the last m - 1 tokens, or 2m - 1 where windows overlap. A prompt's open window is
thus closed by each of its answers, exactly, in the engine and in a packed row.

B rows · L tokens · m tokens of a window · n windows that end in a row · D size of an entry · C = D, or 2 D if they
overlap
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class WindowCompression:
    """bias [m, C]; inputs kv and gate [B, L, C], positions [B, L]; outputs [B, L, D], zero where no window ends."""

    bias: Tensor
    size: int
    state_dtype: torch.dtype
    name: str = "window"

    @property
    def rate(self) -> int:
        return len(self.bias)

    @property
    def overlaps(self) -> bool:
        return self.bias.shape[1] > self.size

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.rate * (2 if self.overlaps else 1) - 1, 2 * self.bias.shape[1]

    def __call__(self, state: Tensor, inputs: Sequence[Tensor], lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        kv, gate, positions = inputs
        seen = torch.cat([state.to(kv.dtype), torch.cat([kv, gate], -1)], 1)  # [B, W-1+L, 2C]
        length = kv.shape[1]
        first = (self.rate - 1 - positions[:, :1]) % self.rate  # [B, 1] the first token of the row that ends a window
        ends = first + self.rate * torch.arange(-(-length // self.rate), device=kv.device)  # [B, n]
        entries = self._entries(seen, ends.clamp_max(length - 1), positions[:, :1] + ends)
        out = kv.new_zeros(len(kv), length + self.rate, self.size)  # an end behind the row falls into the spare part
        out = out.scatter(1, ends[:, :, None].expand_as(entries), entries)[:, :length]
        held = len(seen[0]) - length
        if lengths is None:
            return out, seen[:, length:]
        last = lengths[:, None] + torch.arange(held, device=kv.device)
        return out, seen.gather(1, last[:, :, None].expand(-1, -1, seen.shape[2]))

    def _entries(self, seen: Tensor, ends: Tensor, at: Tensor) -> Tensor:
        """Tokens ends [B, n] of rows that follow their state, at positions `at` -> entries [B, n, D]."""
        kv, gate = seen.chunk(2, -1)
        width = self.state_shape[0] + 1
        # places in `seen` [B, n, m]
        own = ends[:, :, None] + torch.arange(width - self.rate, width, device=seen.device)
        kvs, gates = (_take(x[..., -self.size :], own) for x in (kv, gate))
        gates = gates + self.bias[:, -self.size :]
        if self.overlaps:
            before_kv, before_gate = (_take(x[..., : self.size], own - self.rate) for x in (kv, gate))
            before_gate = before_gate + self.bias[:, : self.size]
            is_first = (at < self.rate)[:, :, None, None]  # no window before it
            kvs = torch.cat([before_kv, kvs], 2)
            gates = torch.cat([before_gate.masked_fill(is_first, float("-inf")), gates], 2)
        return (kvs * gates.softmax(2, dtype=torch.float32).to(kvs.dtype)).sum(2)


def _take(x: Tensor, places: Tensor) -> Tensor:
    """x [B, T, D] at places [B, n, m] -> [B, n, m, D]."""
    rows = x.gather(1, places.flatten(1)[:, :, None].expand(-1, -1, x.shape[2]))
    return rows.view(*places.shape, x.shape[2])
