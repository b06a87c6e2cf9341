"""Parts of a layer beside its attention: mixers that keep a state, and indexers that choose keys. No torch.

D hidden  L layers  Hk, Hv key and value heads  K, V their sizes  C kernel of a convolution
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Get = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """How many layers have a mixer, its numbers, and its state: numbers in fp32, and a convolution's window."""

    layers: int = 0
    numbers: int = 0
    state: int = 0
    window: int = 0


@dataclass(frozen=True, slots=True)
class IndexerShape:
    """How many layers have an indexer (arXiv:2512.02556), its numbers, the size of its key, cached for each token, and
    how many keys it chooses for a token.
    """

    layers: int = 0
    numbers: int = 0
    key: int = 0
    count: int = 0


NO_STATE, NO_INDEXER = RecurrentShape(), IndexerShape()


def recurrent_shape(get: Get, hidden: int, layers: int, head: int) -> RecurrentShape:
    """Of a config whose family says in `mixer` which one it has."""
    if (kind := get("mixer")) is None:
        return NO_STATE
    listed = get("layer_types") or MIXERS[kind][1](get, layers)
    return RecurrentShape(sum(t == "linear_attention" for t in listed), *MIXERS[kind][0](get, hidden, head))


def indexer_shape(get: Get, hidden: int, layers: int) -> IndexerShape:
    """Of a config that names `index_topk`; layers that share a choice have no indexer of their own."""
    if not get("index_topk"):
        return NO_INDEXER
    heads, key = get("index_n_heads"), get("index_head_dim")
    own = [t == "full" for t in _indexer_types(get, layers)]
    return IndexerShape(
        sum(own), get("q_lora_rank") * heads * key + hidden * (key + heads) + 2 * key, key, get("index_topk")
    )


def _indexer_types(get: Get, layers: int) -> list[str]:
    pattern = get("index_topk_pattern")
    if listed := get("indexer_types") or pattern:
        return [{"F": "full", "S": "shared"}.get(t, t) for t in listed]
    every, first = max(get("index_topk_freq") or 1, 1), get("index_skip_topk_offset") or 2
    return ["full" if max(i - first + 1, 0) % every == 0 else "shared" for i in range(layers)]


def _gated_delta(get: Get, hidden: int, head: int) -> tuple[int, int, int]:
    """q, k, v and z, two numbers a head, a convolution, decay and step, a norm, and the way out."""
    keys, values = (get(f"linear_num_{side}_heads") * get(f"linear_{side}_head_dim") for side in ("key", "value"))
    heads, kernel = get("linear_num_value_heads"), get("linear_conv_kernel_dim")
    numbers = hidden * (2 * keys + 3 * values + 2 * heads) + kernel * (2 * keys + values)
    numbers += 2 * heads + get("linear_value_head_dim")
    return numbers, values * get("linear_key_head_dim"), (kernel - 1) * (2 * keys + values)


def _kimi_delta(get: Get, hidden: int, head: int) -> tuple[int, int, int]:
    """q, k, v and the way out, a convolution, two gates of rank K with the decay's bias and rate, steps, a norm."""
    given = get("linear_attn_config") or {}
    heads = given.get("num_heads") or get("linear_num_heads")
    size = given.get("head_dim") or get("linear_head_dim")
    kernel = given.get("short_conv_kernel_size") or get("linear_conv_kernel_dim")
    width = heads * size
    numbers = 4 * hidden * width + 3 * width * kernel + 2 * size * (hidden + width) + width + heads
    return numbers + hidden * heads + size, width * size, 3 * width * (kernel - 1)


def _lightning(get: Get, hidden: int, head: int) -> tuple[int, int, int]:
    """q, k, v, a gate and the way out, and a norm."""
    width = get("num_attention_heads") * head
    return 5 * hidden * width + width, width * head, 0


def _gated_delta_layers(get: Get, layers: int) -> list[str]:
    every = get("full_attention_interval")
    return ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]


def _kimi_delta_layers(get: Get, layers: int) -> list[str]:
    if listed := (get("linear_attn_config") or {}).get("kda_layers"):  # counted from one
        return ["linear_attention"] * len(listed)
    return ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(layers)]


def _lightning_layers(get: Get, layers: int) -> list[str]:
    return ["linear_attention" if i % 2 else "full_attention" for i in range(layers)]


MIXERS = {  # (numbers, state and window; which layers have it if the config does not say)
    "gated delta": (_gated_delta, _gated_delta_layers),
    "kimi delta": (_kimi_delta, _kimi_delta_layers),
    "lightning": (_lightning, _lightning_layers),
}
