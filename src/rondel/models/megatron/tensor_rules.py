"""Which tensors of a Hugging Face checkpoint make up which tensor of a Megatron-Core checkpoint.

Megatron stores one tensor for all layers, [layers, ...], and joins what it multiplies at once:

    linear_qkv  [K · (H/K + 2) · D, hidden]   for each key head: its H/K query heads, the key, the value
    linear_fc1  [2 · I, hidden]               gate, then up; of experts [layers, experts, 2 · I, hidden]

H query heads · K key heads · D head size · I width of the feed-forward part
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rondel.core.errors import ModelError

DENSE, MIXTURES = ("llama", "mistral", "qwen2", "qwen3"), ("mixtral", "qwen3_moe")
LAYER = "model.layers.{layer}"


def _take_one(parts: list[Tensor]) -> Tensor:
    return parts[0]


def _give_one(whole: Tensor) -> list[Tensor]:
    return [whole]


@dataclass(frozen=True, slots=True)
class MegatronTensor:
    """One tensor of a Megatron-Core checkpoint, and where its parts are in one of Hugging Face.

    shape    of the whole of it; -1 stands for what the stored tensor has
    stacked  its first so many axes count layers, and experts: each number there is stored, and made, by itself
    sources  names in the Hugging Face checkpoint, with {layer} and {expert}
    join     the sources of one such number -> that number's part
    split    the way back
    """

    name: str
    shape: tuple[int, ...]
    stacked: int
    sources: tuple[str, ...]
    join: Callable[[list[Tensor]], Tensor] = _take_one
    split: Callable[[Tensor], list[Tensor]] = _give_one

    def sources_of(self, at: tuple[int, ...]) -> list[str]:
        """`at`: layer, or layer and expert."""
        number = dict(zip(("layer", "expert"), at))
        return [name.format(**number) for name in self.sources]


def megatron_tensors(config: Any) -> list[MegatronTensor]:
    """All of a model with this config of transformers. ModelError where a family has no rules here."""
    kind = config.model_type
    if kind not in DENSE + MIXTURES:
        raise ModelError(
            f"model type '{kind}' has no rules for Megatron's tensors; they are written for "
            f"{', '.join(DENSE + MIXTURES)}"
        )
    if getattr(config, "mlp_only_layers", None) or getattr(config, "decoder_sparse_step", 1) != 1:
        raise ModelError(f"a {kind} with dense layers between its mixtures has no rules for Megatron's tensors")
    layers, hidden = config.num_hidden_layers, config.hidden_size
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    size = getattr(config, "head_dim", None) or hidden // heads
    biased = kind == "qwen2" or bool(getattr(config, "attention_bias", False))
    rows = (heads + 2 * keys) * size
    here, attention = "decoder.layers.self_attention", f"{LAYER}.self_attn"
    qkv = {"join": partial(join_qkv, keys), "split": partial(split_qkv, keys, size)}

    def of_layers(name: str, shape: tuple[int, ...], *sources: str, **how: Any) -> MegatronTensor:
        return MegatronTensor(name, (layers, *shape), 1, sources, **how)

    def projections(end: str) -> tuple[str, ...]:
        return tuple(f"{attention}.{x}_proj.{end}" for x in "qkv")

    found = [
        MegatronTensor("embedding.word_embeddings.weight", (-1, hidden), 0, ("model.embed_tokens.weight",)),
        of_layers(f"{here}.linear_qkv.layer_norm_weight", (hidden,), f"{LAYER}.input_layernorm.weight"),
        of_layers(f"{here}.linear_qkv.weight", (rows, hidden), *projections("weight"), **qkv),
        of_layers(f"{here}.linear_proj.weight", (hidden, heads * size), f"{attention}.o_proj.weight"),
        MegatronTensor("decoder.final_layernorm.weight", (hidden,), 0, ("model.norm.weight",)),
    ]
    if biased:
        found.append(of_layers(f"{here}.linear_qkv.bias", (rows,), *projections("bias"), **qkv))
    if biased and kind != "qwen2":
        found.append(of_layers(f"{here}.linear_proj.bias", (hidden,), f"{attention}.o_proj.bias"))
    if kind in ("qwen3", "qwen3_moe"):
        found += [of_layers(f"{here}.{x}_layernorm.weight", (size,), f"{attention}.{x}_norm.weight") for x in "qk"]
    found += _dense_parts(config) if kind in DENSE else _mixture_parts(config)
    if not config.tie_word_embeddings:
        found.append(MegatronTensor("output_layer.weight", (-1, hidden), 0, ("lm_head.weight",)))
    return found


def _dense_parts(config: Any) -> list[MegatronTensor]:
    if getattr(config, "mlp_bias", False):
        raise ModelError(f"a {config.model_type} with mlp_bias has no rules for Megatron's tensors")
    layers, hidden, wide = config.num_hidden_layers, config.hidden_size, config.intermediate_size
    here, there = "decoder.layers.mlp", f"{LAYER}.mlp"
    gates = (f"{there}.gate_proj.weight", f"{there}.up_proj.weight")
    norm = (f"{LAYER}.post_attention_layernorm.weight",)
    return [
        MegatronTensor(f"{here}.linear_fc1.layer_norm_weight", (layers, hidden), 1, norm),
        MegatronTensor(f"{here}.linear_fc1.weight", (layers, 2 * wide, hidden), 1, gates, torch.cat, _halves),
        MegatronTensor(f"{here}.linear_fc2.weight", (layers, hidden, wide), 1, (f"{there}.down_proj.weight",)),
    ]


def _mixture_parts(config: Any) -> list[MegatronTensor]:
    layers, hidden, mixtral = config.num_hidden_layers, config.hidden_size, config.model_type == "mixtral"
    experts = config.num_local_experts if mixtral else config.num_experts
    wide = config.intermediate_size if mixtral else config.moe_intermediate_size
    here, there = "decoder.layers.mlp", f"{LAYER}.{'block_sparse_moe' if mixtral else 'mlp'}"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    one = f"{there}.experts.{{expert}}"
    gates, fc1 = (f"{one}.{gate}.weight", f"{one}.{up}.weight"), (layers, experts, 2 * wide, hidden)
    norm, inside = (f"{LAYER}.post_attention_layernorm.weight",), f"{here}.experts.experts"
    fc2 = (layers, experts, hidden, wide)
    return [
        MegatronTensor("decoder.layers.pre_mlp_layernorm.weight", (layers, hidden), 1, norm),
        MegatronTensor(f"{here}.router.weight", (layers, experts, hidden), 1, (f"{there}.gate.weight",)),
        MegatronTensor(f"{inside}.linear_fc1.weight", fc1, 2, gates, torch.cat, _halves),
        MegatronTensor(f"{inside}.linear_fc2.weight", fc2, 2, (f"{one}.{down}.weight",)),
    ]


def join_qkv(keys: int, parts: list[Tensor]) -> Tensor:
    """[H·D, ...], [K·D, ...], [K·D, ...] of K = `keys` heads -> [(H + 2K)·D, ...], by key heads."""
    rest = parts[0].shape[1:]
    return torch.cat([part.reshape(keys, -1, *rest) for part in parts], dim=1).reshape(-1, *rest)


def split_qkv(keys: int, size: int, whole: Tensor) -> list[Tensor]:
    """The way back; `size`: of a head."""
    rest = whole.shape[1:]
    groups = whole.reshape(keys, -1, *rest)
    parts = groups.split([groups.shape[1] - 2 * size, size, size], dim=1)
    return [part.reshape(-1, *rest).contiguous() for part in parts]


def _halves(whole: Tensor) -> list[Tensor]:
    gate, up = whole.chunk(2)
    return [gate.contiguous(), up.contiguous()]
