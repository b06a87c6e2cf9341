"""The adapters that one base serves, each to the tokens of its own requests (models/adapter_rows.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rondel.core.errors import ModelError
from rondel.models.adapter_bank_files import read_weights
from rondel.models.adapter_rows import HEAD, AdapterPass, AdapterWeights, JoinedAdapters, Run, runs_within
from rondel.models.adapters import asked_layers, linear_layers, run_few_tokens
from rondel.models.latent_attention import latent_projections

if TYPE_CHECKING:
    from rondel.models.loaded_model import LoadedModel

RUNS = 4  # of tokens of one adapter in a pass; more are computed together


class AdapterBank:
    """The adapters that a base serves, by name, and the pass that is being computed. Made once for a base, before
    its first pass; all passes are computed on one thread.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        unsupported = {
            "it has an adapter of its own, which would be added to all of them: merge it first (rondel merge)": loaded.adapter
            is not None,
            "its layers lie on several ranks": loaded.leads_ranks or loaded.stage is not None,
        }
        if reasons := [what for what, present in unsupported.items() if present]:
            raise ModelError(f"'{loaded.name}' cannot carry several adapters: {reasons[0]}")
        self.loaded, self.served = loaded, dict[str, AdapterWeights]()
        self._added, self._numbers = 0, dict[str, int]()  # adapters so far, and which of them each name means
        self._pass: AdapterPass | None = None
        self._joined: JoinedAdapters | None = None
        layers = asked_layers(linear_layers(loaded), partial(run_few_tokens, loaded))
        self.sizes = {name: _layer_size(layer) for name, layer in layers.items()}
        if loaded.head.softcap is None:
            self.sizes[HEAD] = (int(loaded.head.weight.shape[1]), int(loaded.head.weight.shape[0]))
        for name, layer in layers.items():
            layer.register_forward_hook(partial(self._add, name))
        for up in latent_projections(loaded.model):
            up.bank, up.name = self, next((name for name, layer in layers.items() if layer is up.module.kv_b_proj), "")
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
        """Serve it under its name, which must be free: answers that are being written read it by that."""
        if weights.name in self.served:
            raise ModelError(f"adapter '{weights.name}' is served already: take another name, or remove that one first")
        for name, (a, b) in weights.layers.items():
            if name not in self.sizes or (a.shape[1], b.shape[0]) != self.sizes[name]:
                raise ModelError(
                    f"adapter '{weights.name}' does not fit '{self.loaded.name}': {name} is A {list(a.shape)}, "
                    f"B {list(b.shape)} there, and {self.sizes.get(name, 'no linear layer')} (inputs, outputs) here"
                )
            if not bool(a.isfinite().all() and b.isfinite().all()):
                raise ModelError(
                    f"adapter '{weights.name}' holds numbers of {name} that are not finite: its training has diverged; "
                    "take an earlier state of it"
                )
        self.served[weights.name] = weights
        self._added += 1
        self._numbers[weights.name] = self._added

    def cache_name(self, name: str) -> str:
        """By what a prefix cache knows the adapter that is served under a name now: another one may come under it."""
        return f"{name}#{self._numbers[name]}" if name else ""

    def load(self, name: str, folder: str | Path) -> None:
        """Serve the adapter in `folder`, whoever wrote it."""
        self.add(read_weights(self.loaded, name, folder))

    def remove(self, name: str) -> None:
        del self.served[name]
        self._joined = None

    def forget_joined(self) -> None:
        """The weights of adapters that are served were written over: what was copied of them is old."""
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
            if len(merged) > RUNS and not torch.is_grad_enabled() and not self.loaded.aligned:
                joined = self._joined = JoinedAdapters.covering(adapters, self._joined)
            self._pass = AdapterPass(merged, joined, self.loaded.device, exact=self.loaded.aligned)
        try:
            yield self._pass
        finally:
            self._pass = before

    def runs_of(self, first: int, count: int) -> list[Run]:
        """Of tokens [first, first + count) of the pass; none, where none of the pass is read with an adapter."""
        return [] if self._pass is None else runs_within(self._pass.runs, first, count)

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
