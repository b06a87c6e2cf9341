"""A base with a bank of noisy adapters, and the oracle: the model that an adapter makes of it, by hand."""

from __future__ import annotations

import torch

from kits import families
from kits.engine import SIZE, tiny, twin
from rondel.models.adapter_bank import AdapterBank
from rondel.models.adapter_rows import HEAD, AdapterWeights
from rondel.models.loaded_model import LoadedModel

FAMILIES = {
    "llama": SIZE,
    "qwen3": SIZE | {"head_dim": 16},
    "gpt2": dict(n_embd=64, n_layer=2, n_head=4, n_positions=512),
    "gemma2": SIZE | {"head_dim": 16, "sliding_window": 8, "final_logit_softcapping": 6.0},
    **{kind: families.FAMILIES[kind] for kind in ("deepseek_v3", "minicpm3", "llama4_text")},
}


def noisy(bank: AdapterBank, name: str, seed: int, *, rank: int = 4, head: bool = True) -> AdapterWeights:
    head = head and HEAD in bank.sizes
    weights = bank.create_adapter(name, rank=rank, alpha=8, seed=seed, attention=True, mlp=seed % 2 == 0, head=head)
    generator = torch.Generator().manual_seed(seed)
    for _, b in weights.layers.values():
        b.copy_(0.1 * torch.randn(b.shape, generator=generator))
    return weights


def banked(kind: str = "llama", adapters: int = 3, *, head: bool = True) -> tuple[LoadedModel, LoadedModel]:
    """A base that serves a1, a2, ..., and the same base without a bank."""
    loaded = tiny(kind, **FAMILIES[kind])
    plain = twin(loaded)
    bank = AdapterBank(loaded)
    for i in range(1, adapters + 1):
        bank.add(noisy(bank, f"a{i}", i, rank=2 + 2 * i, head=head))
    return loaded, plain


def merged(plain: LoadedModel, weights: AdapterWeights | None) -> LoadedModel:
    """W + s B A in another module; the head is untied first."""
    out = twin(plain)
    if weights is None:
        return out
    model = out.model
    model.config.tie_word_embeddings = False
    embeddings = model.get_output_embeddings()
    embeddings.weight = torch.nn.Parameter(embeddings.weight.detach().clone())
    with torch.no_grad():
        for name, (a, b) in weights.layers.items():
            layer = embeddings if name == HEAD else model.get_submodule(name)
            delta = weights.scale * b @ a
            layer.weight.add_(
                delta if layer.weight.shape == delta.shape and "Conv1D" not in type(layer).__name__ else delta.t()
            )
    return out
