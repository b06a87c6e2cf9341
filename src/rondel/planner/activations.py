"""Bytes that a layer keeps of a token for its backward pass."""

from __future__ import annotations

from rondel.planner.shapes import ModelShape


def activation_bytes(shape: ModelShape, bytes_each: float = 2, *, megatron: bool = False) -> int:
    """Activations that a backward pass needs, bytes a token, without recomputation,
    attention fused (its scores are never kept).

    A layer keeps: both norms' inputs and outputs 4D, q k v and its output, and the gate, the
    up side and their product 3F; of normed queries and keys their inputs. `megatron`: whether Megatron-Core's
    layers compute it.
    """
    q_size = shape.heads * shape.head
    attention = shape.layers * (4 * shape.hidden + 2 * q_size + 2 * shape.kv_heads * shape.head)
    more = megatron_bytes(shape, bytes_each) if megatron else 0
    return int(bytes_each * (attention + normed_heads_size(shape) + feed_forward_size(shape))) + more


def written_out_bytes(
    shape: ModelShape, bytes_each: float, keys: float, spread: float, *, widened: bool = False, megatron: bool = False
) -> int:
    """The same on a CPU, where attention writes its scores out: a token sees `keys` keys, and its
    calls hold `spread` copies of keys and values.

    A layer keeps: of each norm its input in fp32 (as the residual stream) and its output; the scores in fp32, and
    their copy in 16 bits where values are. `widened`: the CPU has no bf16 products, and attention multiplies fp32
    copies of queries, keys and values.
    """
    q_size, kv_size = shape.heads * shape.head, 2 * shape.kv_heads * shape.head
    wide = 4 if widened else bytes_each
    cast = bytes_each if wide < 4 else 0
    layer = (
        2 * (4 + bytes_each) * shape.hidden
        + bytes_each * q_size
        + wide * (q_size + kv_size * spread)
        + shape.heads * keys * (4 + cast)
    )
    more = megatron_bytes(shape, bytes_each) if megatron else 0
    return int(shape.layers * layer + bytes_each * (normed_heads_size(shape) + feed_forward_size(shape))) + more


def halves_bytes(shape: ModelShape, bytes_each: float, keys: float, spread: float) -> int:
    """The same of layers in halves (models/layer_halves.py): the stream before and behind attention in fp32; of
    queries, keys and values those that attend, before their norms too where they have any; what they attend to; gate
    and up. Of the whole model the last norm's input and the angles of positions.
    """
    q_size, kv_size = shape.heads * shape.head, shape.kv_heads * shape.head
    attention = bytes_each * 2 * (q_size + kv_size * spread) + 4 * shape.heads * keys
    layer = 2 * 4 * shape.hidden + attention + bytes_each * 2 * shape.intermediate
    ends = 4 * shape.hidden + 2 * 4 * shape.head
    return int(shape.layers * layer + bytes_each * normed_heads_size(shape) + ends)


def megatron_bytes(shape: ModelShape, bytes_each: float = 2) -> int:
    """What Megatron-Core's layers (models/megatron) keep beyond that, bytes a token: of each norm its input over its
    root mean square, in fp32; of each gate and up the joined product, and up once more, copied by Megatron's
    offset of 0. Matrices that are joined for a pass are not kept.

    Normed queries and keys: in fp32 their inputs and these over their root mean squares; where all is fp32 the
    joined product of query, key and value, too.
    """
    norms = 2 * 4 * shape.layers * shape.hidden
    heads = normed_heads_size(shape) * (8 + (4 if bytes_each == 4 else 0) - bytes_each)
    return int(norms + heads + 2 * bytes_each * gated_size(shape))


def normed_heads_size(shape: ModelShape) -> int:
    """Numbers of queries and keys in all layers that have norms of their own."""
    return shape.attention_layers * (shape.heads + shape.kv_heads) * shape.head * shape.qk_norm


def gated_size(shape: ModelShape) -> int:
    """Numbers of silu(gate) · up of a token in all layers."""
    sparse = (shape.layers - shape.dense_layers) * (shape.per_token * shape.expert + shape.shared)
    return shape.dense_layers * shape.intermediate + sparse


def feed_forward_size(shape: ModelShape) -> int:
    """Numbers that the feed-forward parts of all layers keep of a token: gate, up and their product, and what each
    expert of it reads and writes.
    """
    return 3 * gated_size(shape) + 2 * (shape.layers - shape.dense_layers) * shape.per_token * shape.hidden


def kept_bytes(
    shape: ModelShape,
    bytes_each: float,
    everything: float,
    recompute: str,
    activations: str = "device",
    *,
    in_halves: bool = False,
) -> float:
    """Activations of a token for the backward pass, in bytes: of `everything`, what `trainer.memory.recompute` keeps.

    layers   the input of each layer, in fp32 (where it waits elsewhere, of two layers), and one layer's own at a time
    mlp      all but what the feed-forward parts keep, and one layer's at a time
    """
    if recompute == "layers":
        inputs = shape.layers if activations == "device" else min(2, shape.layers)
        return 4 * inputs * shape.hidden + everything / shape.layers
    if recompute == "mlp":
        numbers = 2 * gated_size(shape) if in_halves else feed_forward_size(shape)
        return everything - bytes_each * numbers * (1 - 1 / shape.layers)
    return everything
