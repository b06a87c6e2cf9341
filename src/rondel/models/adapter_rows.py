"""Several LoRA adapters on one base, each for its own tokens of a pass: y_t = W x_t + s_a · B_a (A_a x_t), a = a(t).

    packed tokens | adapter a ...... | adapter b ... | base ..... | adapter a . |
    few runs      each run by its own two products
    many runs     ((x Aᵀ) ∘ M) Bᵀ: A [R, I] and B [O, R] of all adapters in one, M [T, R] the scale where a token is
                  of that adapter, else 0 (a batch of decoding requests)

The base is read by all and changed by none. arXiv:2106.09685, 2310.18547 (Punica), 2311.03285 (S-LoRA).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rondel.core.errors import LawError
from rondel.models import linear
from rondel.models.cache_pools import upload
from rondel.models.lora_product import LoraProduct

HEAD = "lm_head"


@dataclass(slots=True, eq=False)
class AdapterWeights:
    """layers  {full name of a linear layer, or "lm_head": (A [r, I], B [O, r])}, float32
    scale   alpha / r
    """

    name: str
    rank: int
    scale: float
    layers: dict[str, tuple[Tensor, Tensor]]

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for pair in self.layers.values() for tensor in pair]

    @property
    def parameter_count(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors)


Run = tuple[AdapterWeights | None, int]  # of neighbouring tokens: how many


def runs_within(runs: Sequence[Run], first: int, count: int) -> list[Run]:
    """Those of tokens [first, first + count)."""
    ends = list(accumulate(n for _, n in runs))
    cut = [(adapter, min(end, first + count) - max(end - n, first)) for (adapter, n), end in zip(runs, ends)]
    return [(adapter, n) for adapter, n in cut if n > 0]


@dataclass(slots=True, eq=False)
class JoinedAdapters:
    """A [R, I] and B [O, R] of several adapters, layer by layer, and the rows of R that are of each."""

    adapters: list[AdapterWeights]
    rows: dict[AdapterWeights, slice] = field(default_factory=dict)
    layers: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def covering(cls, adapters: list[AdapterWeights], held: JoinedAdapters | None) -> JoinedAdapters:
        """The one that is there, where it has them all."""
        if held is not None and all(adapter in held.rows for adapter in adapters):
            return held
        out, first = cls(adapters), 0
        for adapter in adapters:
            out.rows[adapter] = slice(first, first + adapter.rank)
            first += adapter.rank
        for name in dict.fromkeys(name for adapter in adapters for name in adapter.layers):
            one_a, one_b = next(adapter.layers[name] for adapter in adapters if name in adapter.layers)
            a, b = one_a.new_zeros(first, one_a.shape[1]), one_b.new_zeros(one_b.shape[0], first)
            for adapter, rows in out.rows.items():
                if name in adapter.layers:
                    a[rows], b[:, rows] = adapter.layers[name]
            out.layers[name] = a, b
        return out


class AdapterPass:
    """Which tokens of one pass are of which adapter."""

    def __init__(
        self, runs: list[Run], joined: JoinedAdapters | None, device: torch.device | str, *, exact: bool = False
    ) -> None:
        """`exact`: products whose rows do not depend on each other (aligned numerics), run by run."""
        self.runs, self.joined, self.device, self.exact = runs, joined, device, exact
        self.total = sum(n for _, n in runs)
        self.mask: Tensor | None = None
        self.others: Tensor | None = None
        if joined is not None:
            mask, first = torch.zeros(self.total, sum(a.rank for a in joined.adapters)), 0
            for adapter, n in runs:
                if adapter is not None:
                    mask[first : first + n, joined.rows[adapter]] = adapter.scale
                first += n
            self.mask = upload(mask, torch.device(device))
            self.others = self.mask == 0

    def add(self, name: str, x: Tensor, out: Tensor) -> Tensor:
        """x [..., I], out = W x [..., O] -> with what the adapters add, in the dtype of `out`."""
        flat, wide = x.flatten(0, -2), out.flatten(0, -2)
        if len(flat) != self.total:
            raise LawError(
                f"layer {name} reads {len(flat)} rows in a pass of {self.total} tokens: whose they are is not known, "
                "so adapters of single requests cannot reach it"
            )
        return self.add_rows(name, flat, wide).view_as(out)

    def add_rows(self, name: str, x: Tensor, out: Tensor) -> Tensor:
        """x [T, I], out [T, O] -> [T, O]"""
        if self.joined is not None:
            if name not in self.joined.layers:
                return out
            assert self.mask is not None and self.others is not None
            a, b = self.joined.layers[name]
            # what has overflowed with another adapter's A is not 0 times 0
            low = F.linear(x.float(), a).mul_(self.mask).masked_fill_(self.others, 0.0)
            return torch.addmm(out.float(), low, b.t()).to(out.dtype)
        parts, first = [], 0
        for adapter, n in self.runs:
            rows, first = slice(first, first + n), first + n
            if adapter is None or name not in adapter.layers:
                parts.append(out[rows])
                continue
            a, b = adapter.layers[name]
            if self.exact:
                delta = adapter.scale * linear.product(linear.product(x[rows].float(), a), b)
                parts.append((out[rows] + delta).to(out.dtype))
            elif torch.is_grad_enabled():
                parts.append(LoraProduct.apply(out[rows], x[rows], a, b, adapter.scale))
            else:
                low = F.linear(x[rows].float(), a)
                parts.append(torch.addmm(out[rows].float(), low, b.t(), alpha=adapter.scale).to(out.dtype))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    @property
    def adapts_head(self) -> bool:
        return any(adapter is not None and HEAD in adapter.layers for adapter, _ in self.runs)

    def add_to_logits(self, scale: float, hidden: Tensor, rows: Tensor, logits: Tensor) -> Tensor:
        """What the adapters add to the logits [C, V] of rows [C] of this pass, whose hidden states are [T, D]; the head
        multiplies its logits by `scale`.
        """
        if not self.adapts_head:
            return logits
        owners = [adapter for adapter, n in self.runs for _ in range(n)]
        own = AdapterPass([(owners[row], 1) for row in rows.tolist()], self.joined, self.device, exact=self.exact)
        return own.add_rows(HEAD, hidden[rows] * scale, logits)


class ServedAdapters(Protocol):
    """What an engine and its server know of the adapters of a base (models/adapter_bank.py)."""

    served: dict[str, AdapterWeights]

    def use(self, runs: Sequence[Run]) -> AbstractContextManager[AdapterPass | None]: ...

    def runs_of(self, first: int, count: int) -> list[Run]: ...

    def load(self, name: str, folder: str | Path) -> None: ...

    def remove(self, name: str) -> None: ...

    def cache_name(self, name: str) -> str: ...

    def forget_joined(self) -> None: ...
