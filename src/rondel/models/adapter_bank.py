"""Several LoRA adapters on one base, each for its own tokens of a pass: y_t = W x_t + s_a · B_a (A_a x_t), a = a(t).

    packed tokens | adapter a ...... | adapter b ... | base ..... | adapter a . |
    few runs      each run by its own two products
    many runs     ((x Aᵀ) ∘ M) Bᵀ: A [R, I] and B [O, R] of all adapters in one, M [T, R] the scale where a token is
                  of that adapter, else 0 (a batch of decoding requests)

The base is read by all and changed by none. arXiv:2106.09685, 2310.18547 (Punica), 2311.03285 (S-LoRA).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rondel.core.errors import LawError, ModelError
from rondel.models.adapters import LoraProduct, asked_layers, linear_layers

if TYPE_CHECKING:
    from rondel.models.head import LMHead
    from rondel.models.loaded_model import LoadedModel

HEAD = "lm_head"
RUNS = 4  # of tokens of one adapter in a pass; more are computed together


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


class AdapterBank:
    """The adapters that a base serves, by name, and the pass that is being computed. Made once for a base, before
    its first pass; all passes are computed on one thread.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        unsupported = {
            "it has an adapter of its own, which would be added to all of them: merge it first (rondel merge)": loaded.adapter
            is not None,
            "its layers lie on several ranks": loaded.leads_ranks or loaded.stage is not None,
            "aligned numerics take other products": loaded.aligned,
        }
        if reasons := [what for what, present in unsupported.items() if present]:
            raise ModelError(f"'{loaded.name}' cannot carry several adapters: {reasons[0]}")
        self.loaded, self.served = loaded, dict[str, AdapterWeights]()
        self._pass: AdapterPass | None = None
        self._joined: JoinedAdapters | None = None
        layers = asked_layers(loaded, linear_layers(loaded))
        self.sizes = {name: _layer_size(layer) for name, layer in layers.items()}
        if loaded.head.softcap is None:
            self.sizes[HEAD] = (int(loaded.head.weight.shape[1]), int(loaded.head.weight.shape[0]))
        for name, layer in layers.items():
            layer.register_forward_hook(partial(self._add, name))
        loaded.model.requires_grad_(False)
        loaded.bank = self

    def create_adapter(
        self, name: str, *, rank: int, alpha: float, seed: int, attention: bool, mlp: bool, head: bool
    ) -> AdapterWeights:
        """A uniform in ±1/sqrt(I), as peft starts it, B = 0: it changes nothing yet."""
        chosen = [layer for layer in self.sizes if {"attention": attention, "mlp": mlp, HEAD: head}[layer_role(layer)]]
        if not chosen:
            raise ModelError(f"'{self.loaded.name}' has no layer of the kinds that adapter '{name}' shall have")
        generator = torch.Generator().manual_seed(seed)
        layers = {}
        for layer in chosen:
            size_in, size_out = self.sizes[layer]
            a = torch.empty(rank, size_in).uniform_(-(size_in**-0.5), size_in**-0.5, generator=generator)
            device = self.loaded.device
            layers[layer] = (a.to(device), torch.zeros(size_out, rank, device=device))
        return AdapterWeights(name, rank, alpha / rank, layers)

    def add(self, weights: AdapterWeights) -> None:
        """Serve it under its name, which must be new: what is cached under a name was computed with its weights."""
        if weights.name in self.served:
            raise ModelError(f"adapter '{weights.name}' is served already: take another name, or remove that one first")
        for name, (a, b) in weights.layers.items():
            if name not in self.sizes or (a.shape[1], b.shape[0]) != self.sizes[name]:
                raise ModelError(
                    f"adapter '{weights.name}' does not fit '{self.loaded.name}': {name} is A {list(a.shape)}, "
                    f"B {list(b.shape)} there, and {self.sizes.get(name, 'no linear layer')} (inputs, outputs) here"
                )
        self.served[weights.name] = weights

    def remove(self, name: str) -> None:
        del self.served[name]
        self._joined = None

    @contextmanager
    def use(self, runs: Sequence[Run]) -> Iterator[AdapterPass | None]:
        """Inside, passes over these tokens, in this order, read the adapters of `runs`, their backward passes too."""
        merged: list[Run] = []
        for adapter, n in runs:
            if merged and merged[-1][0] is adapter:
                merged[-1] = (adapter, merged[-1][1] + n)
            elif n:
                merged.append((adapter, n))
        before = self._pass
        adapters = list(dict.fromkeys(adapter for adapter, _ in merged if adapter is not None))
        self._pass = None
        if adapters:
            joined = None
            if len(merged) > RUNS and not torch.is_grad_enabled():
                joined = self._joined = JoinedAdapters.covering(adapters, self._joined)
            self._pass = AdapterPass(merged, joined, self.loaded.device)
        try:
            yield self._pass
        finally:
            self._pass = before

    def _add(self, name: str, layer: Any, args: tuple[Tensor], out: Tensor) -> Tensor | None:
        return None if self._pass is None else self._pass.add(name, args[0], out)


def _layer_size(layer: Any) -> tuple[int, int]:
    """(inputs, outputs)"""
    return (layer.in_features, layer.out_features) if hasattr(layer, "in_features") else tuple(layer.weight.shape)


def layer_role(name: str) -> str:
    """attention (or what mixes tokens in its place), mlp or lm_head."""
    if name == HEAD:
        return HEAD
    parts = name.lower().split(".")
    return (
        "mlp" if any(key in part for part in parts for key in ("mlp", "feed_forward", "ffn", "expert")) else "attention"
    )


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

    def __init__(self, runs: list[Run], joined: JoinedAdapters | None, device: torch.device | str) -> None:
        self.runs, self.joined, self.device = runs, joined, device
        self.total = sum(n for _, n in runs)
        self.mask: Tensor | None = None
        if joined is not None:
            mask, first = torch.zeros(self.total, sum(a.rank for a in joined.adapters)), 0
            for adapter, n in runs:
                if adapter is not None:
                    mask[first : first + n, joined.rows[adapter]] = adapter.scale
                first += n
            self.mask = mask.to(device)

    def add(self, name: str, x: Tensor, out: Tensor) -> Tensor:
        """x [..., I], out = W x [..., O] -> with what the adapters add, in the dtype of `out`."""
        flat, wide = x.flatten(0, -2), out.flatten(0, -2)
        if len(flat) != self.total:
            raise LawError(
                f"layer {name} reads {len(flat)} rows in a pass of {self.total} tokens: whose they are is not known, so "
                "adapters of single requests cannot reach it"
            )
        return self.add_rows(name, flat, wide).view_as(out)

    def add_rows(self, name: str, x: Tensor, out: Tensor) -> Tensor:
        """x [T, I], out [T, O] -> [T, O]"""
        if self.joined is not None:
            if name not in self.joined.layers:
                return out
            assert self.mask is not None
            a, b = self.joined.layers[name]
            low = F.linear(x.float(), a).mul_(self.mask)
            return torch.addmm(out.float(), low, b.t()).to(out.dtype)
        parts, first = [], 0
        for adapter, n in self.runs:
            rows, first = slice(first, first + n), first + n
            if adapter is None or name not in adapter.layers:
                parts.append(out[rows])
                continue
            a, b = adapter.layers[name]
            if torch.is_grad_enabled():
                parts.append(LoraProduct.apply(out[rows], x[rows], a, b, adapter.scale))
            else:
                low = F.linear(x[rows].float(), a)
                parts.append(torch.addmm(out[rows].float(), low, b.t(), alpha=adapter.scale).to(out.dtype))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    @property
    def adapts_head(self) -> bool:
        return any(adapter is not None and HEAD in adapter.layers for adapter, _ in self.runs)

    def add_to_logits(self, head: LMHead, hidden: Tensor, rows: Tensor, logits: Tensor) -> Tensor:
        """What the adapters add to the logits [C, V] of rows [C] of this pass, whose hidden states are [T, D]."""
        if not self.adapts_head:
            return logits
        owners = [adapter for adapter, n in self.runs for _ in range(n)]
        own = AdapterPass([(owners[row], 1) for row in rows.tolist()], self.joined, self.device)
        return own.add_rows(HEAD, hidden[rows] * head.scale, logits)
