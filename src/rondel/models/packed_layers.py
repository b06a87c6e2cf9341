"""Layers of an engine's pass on a CPU in one call: all of a decode step, or those parts of a layer that lie around the
attention of a prompt (cpu_layers.cpp).

    stream fp32 ──> [norm, q k v, rotary, cache | attention | product, sum, norm, gate up, product, sum] x layers ──> norm
                     one team of threads, a barrier between two operations

A step of few requests spends half of its time in Python and between threads that begin and end, a thousand times a
step. For dense decoders written like llama's, in bfloat16 or float32 with their residual stream in fp32, on CPUs for
which models/linear.py has tiles (`has_tiles`); every other pass goes through the modules. It rounds where they do, and
its products have other last bits than oneDNN's, and those of the trainer (models/layer_halves.py). Before the first
pass of an engine each layer is computed both ways from the same stream, and where one differs the modules stay.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rondel.core.events import Warned, emit
from rondel.models import cpu_kernels
from rondel.models.attention import NotedCalls
from rondel.models.blocks import LIKE_LLAMA, decoder_blocks
from rondel.models.cache_pools import LayerPools
from rondel.models.dense_attention import ScoreRule
from rondel.models.linear import has_spare_memory, has_tiles, modules_alone, packed_linears, without_packing
from rondel.models.main_grad import Stamps, stamps_of
from rondel.models.paged_layout import DecodeBatch, PagedLayout, PrefillChunk
from rondel.models.prompt_attention import PromptAttention
from rondel.models.tree_loops import takes_tree

if TYPE_CHECKING:
    from rondel.models.attention import AttentionLayout
    from rondel.models.loaded_model import LoadedModel

FRONT, ATTENTION, BACK, NORM = 1, 2, 4, 8  # parts of a layer, and what is behind all layers, as in cpu_layers.cpp
PARTS = 13  # addresses of a layer; those of keys and values are the last but two and the last but one
LONGEST = 512  # numbers of a head
UNIT = 16  # outputs that are packed together
# of what a layer adds to the stream: five half steps of bfloat16
TOLERANCE = {torch.bfloat16: 0.02, torch.float32: 1e-4}
PROBE = (5, 9, 2)  # tokens of the sequences that are computed both ways


def serving_pass_of(loaded: LoadedModel) -> Callable[[Tensor, Tensor, AttentionLayout], Tensor]:
    """What an engine of this model computes hidden states with, where nothing else was asked for."""
    layers = PackedLayers(loaded)
    return layers.hidden_states if layers.may_fit else loaded.hidden_states


class PackedLayers:
    """`PackedLayers(loaded).hidden_states` is `loaded.hidden_states` without gradients and without a tape."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self._layers: list[Any] = decoder_blocks(loaded.model, loaded.decoder) if _may_fit(loaded) else []
        modules = list(loaded.decoder.modules()) if self._layers else []
        self._inside = [one._modules for one in modules if one._modules]
        self._parts = _values(self._inside)
        self._weights = [one._parameters for one in modules if one._parameters]
        plain = bool(self._layers) and all(
            _is_plain(layer, getattr(loaded.decoder, "norm", None)) for layer in self._layers
        )
        self._fits: bool | None = None if plain else False
        self._stamp: Stamps | None = None
        self._packed: PackedWeights | None = None
        self._rules: list[ScoreRule] = []
        if self._fits is None:
            loaded.model.packed_layers = self  # who frees packed copies finds it there (models/linear.py)

    @property
    def may_fit(self) -> bool:
        """Whether it computes any pass, as far as is known yet."""
        return self._fits is not False

    @torch.no_grad()
    def hidden_states(self, tokens: Tensor, positions: Tensor, layout: AttentionLayout) -> Tensor:
        """[T], [T] -> [T, D]."""
        if self._fits is None:
            self._fits = self._is_like_modules()
        plain = isinstance(layout, PagedLayout) and layout.states is None and positions.ndim == 1 and len(tokens) > 0
        if not (self._fits and plain and self._is_unchanged() and self._is_packed()):
            return self.loaded.hidden_states(tokens, positions, layout)
        return self._compute(tokens, positions, cast(PagedLayout, layout))

    # -- packed weights ------------------------------------------------------------------------------

    is_trained = True

    @property
    def packed_memory(self) -> list[Tensor]:
        """The copies; one piece."""
        return [] if self._packed is None else [self._packed.room]

    @property
    def packed_bytes(self) -> int:
        """Of the copies."""
        return sum(room.nbytes for room in self.packed_memory)

    def drop_packed(self) -> None:
        """Until the next use."""
        self._stamp, self._packed = None, None

    def __deepcopy__(self, memo: Any) -> None:
        return None  # what is packed belongs to the weights it was packed from

    def _is_unchanged(self) -> bool:
        """Whether the model is still the one that was looked at."""
        return _may_fit(self.loaded) and _values(self._inside) == self._parts

    def _is_packed(self) -> bool:
        """Whether what is packed is up to date, now."""
        weights = [p for p in _values(self._weights) if p is not None]
        if (stamp := stamps_of(weights)) != self._stamp:
            if self._packed is None and not has_spare_memory(weights):
                return False
            self._packed = None  # before it is made anew: memory for one
            for copies in (copies for layer in self._layers for copies in packed_linears(layer)):
                copies.drop_packed()  # made by a pass through the modules, as when the model was loaded
            self._packed = _packed_weights(self._layers, self.loaded.decoder.norm, self._rules)
            self._stamp = stamp
        return True

    # -- a pass ----------------------------------------------------------------------------------------

    def _begin(self, tokens: Tensor, positions: Tensor, layout: PagedLayout) -> LayerPass:
        assert self._packed is not None
        embedding = self.loaded.model.get_input_embeddings().weight
        stream = F.embedding(tokens, embedding).float()
        angles = [x[0].contiguous() for x in self.loaded.decoder.rotary_emb(stream[None], positions[None])]
        return LayerPass(self._packed, self._rules, stream, angles, layout)

    def _compute(self, tokens: Tensor, positions: Tensor, layout: PagedLayout) -> Tensor:
        under_way = self._begin(tokens, positions, layout)
        if layout.chunks:
            for at in range(len(self._layers)):
                under_way.run_around_chunks(at)
            under_way.run(0, 0, NORM)
        else:
            under_way.run(0, len(self._layers), FRONT | ATTENTION | BACK | NORM)
        return under_way.hidden

    # -- proof ------------------------------------------------------------------------------------------

    def _is_like_modules(self) -> bool:
        """Prompts and a decode step behind them through the modules, then each layer of them in one call over what the
        module read. From the modules' pass are the rules of attention, too.
        """
        size = self._layers[0].self_attn.head_dim
        if self.loaded.decoder.rotary_emb(torch.zeros(1, 1, size), torch.zeros(1, 1).long())[0].shape != (1, 1, size):
            return False  # a part of a head stays as it is
        pools, own_pools = ((LayerPools(PROBE_SLOTS), LayerPools(PROBE_SLOTS)) for _ in range(2))
        worst = 0.0
        for given, own in zip(_probe_steps(pools, self.loaded), _probe_steps(own_pools, self.loaded), strict=True):
            tokens, positions, layout = given
            with _Streams(self._layers) as streams, modules_alone(), without_packing():
                noted = NotedCalls(layout)
                self.loaded.hidden_states(tokens, positions, noted)
            rules = {layer: rule for layer, rule, _, _ in noted.calls}
            self._rules = [rules[layer.self_attn.layer_idx] for layer in self._layers]
            if not all(_is_windowed(rule, self._rules[0].scale) for rule in self._rules) or not self._is_packed():
                return False
            under_way = self._begin(*own)
            for at, (before, after) in enumerate(zip(streams.before, streams.after, strict=True)):
                under_way.stream.copy_(before)
                under_way.run_around_chunks(at)
                worst = max(worst, _share(under_way.stream - after, after - before))
            under_way.run(0, 0, NORM)
            wanted = self.loaded.decoder.norm(under_way.stream)
            worst = max(worst, _share(under_way.hidden - wanted, wanted))
        if worst <= (limit := TOLERANCE[self.loaded.dtype]):
            return True
        emit(
            Warned(
                f"'{self.loaded.name}': in one call a layer, or the norm behind them, gives something else than its "
                f"module, by {worst:.2g} of it (limit {limit:g}), so the engine computes with modules, slower"
            )
        )
        return False


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Of all layers, as the call in C++ reads them.

    room       the copies, one behind the other
    parts      of each layer, in the order of LayerParts in cpu_layers.cpp, up to the cache
    table      [L, PARTS] their addresses, 0 where a layer has no such part; room for two pools; its window
    layers     which layer's pools each has
    heads      of queries, of keys; `size` numbers each, `inner` between gate and down
    last_norm  behind all layers
    """

    room: Tensor
    parts: list[list[Tensor | None]]
    table: array[int]
    layers: list[int]
    heads: tuple[int, int]
    size: int
    inner: int
    last_norm: Tensor
    eps: float


class LayerPass:
    """One pass over layers, under way: the residual stream [T, D] in fp32, `hidden` [T, D] behind the last norm, and
    where everything else lies.
    """

    def __init__(
        self, packed: PackedWeights, rules: list[ScoreRule], stream: Tensor, angles: list[Tensor], layout: PagedLayout
    ) -> None:
        self.stream, self._packed, self._layout, self._rules = stream, packed, layout, rules
        (rows, width), (heads, shared), dtype = stream.shape, packed.heads, packed.last_norm.dtype
        like = torch.empty(1, shared, packed.size, dtype=dtype)
        self._keys, self._values = (
            [pool.layer_pool(at, like) for at in packed.layers] for pool in (layout.keys, layout.values)
        )
        self._table = packed.table[:]
        for column, pools in enumerate((self._keys, self._values), PARTS - 3):
            self._table[column::PARTS] = array("q", [pool.data_ptr() for pool in pools])
        joined, asked = (rows, (heads + 2 * shared) * packed.size), (rows, heads, packed.size)
        normed, attended, inner = (
            cpu_kernels.row_room(rows, n, dtype) for n in (width, heads * packed.size, packed.inner)
        )
        qkv, self._q, self.hidden = (torch.empty(shape, dtype=dtype) for shape in (joined, asked, (rows, width)))
        rooms, self._attended = [normed, qkv, self._q, attended, inner], attended.unflatten(1, asked[1:])
        batch = layout.decoding
        self._decoding = 0 if batch is None else len(batch.own)
        contexts, family = [None] * 5, (0, 0, 1)  # type: list[Tensor | None], tuple[int, int, int]
        if batch is not None:
            given = (batch.own, batch.lengths, batch.prefix, batch.shared, batch.place)
            contexts = [x if x is None else x.contiguous() for x in given]
            members = 1 if batch.grid is None else batch.grid.shape[1]
            family = (batch.own.shape[1], 0 if batch.prefix is None else batch.prefix.shape[1], members)
        self._read = [stream, *angles, layout.write.contiguous(), *rooms, packed.last_norm, self.hidden], contexts
        steps = [room.stride(0) for room in (normed, attended, inner)]
        sizes = [rows, width, heads, shared, packed.size, packed.inner, self._keys[0].shape[1], *steps]
        first, then = ([_address(x) for x in tensors] for tensors in self._read)
        self._numbers = array("q", [*sizes, *first, self._decoding, *then, *family, 0, 0])

    def run(self, first: int, count: int, parts: int) -> None:
        """These parts of `count` layers from `first` on."""
        table, numbers = (cpu_kernels.place_of(one) for one in (self._table, self._numbers))
        cpu_kernels.library().rondel_layers(
            cpu_kernels.CODES[self.hidden.dtype], table + first * PARTS * self._table.itemsize, count, parts, numbers,
            self._packed.eps, self._rules[0].scale, torch.get_num_threads(),
        )  # fmt: skip

    def run_around_chunks(self, at: int) -> None:
        """One layer, with the attention of prompts in between."""
        self.run(at, 1, FRONT | (ATTENTION if self._decoding else 0))
        if takes_tree(self._q, self._keys[at].transpose(0, 1), self._values[at].transpose(0, 1), self._rules[at]):
            prompts, out = len(self._q) - self._decoding, torch.empty_like(self._q)
            self._prompts.attend(self._q, self._keys[at], self._values[at], self._rules[at], out)
            self._attended[:prompts] = out[:prompts]
            return self.run(at, 1, BACK)
        for chunk in self._layout.chunks:
            own = slice(chunk.start, chunk.start + chunk.length)
            k, v = (chunk.slots.read(pool)[None] for pool in (self._keys[at], self._values[at]))
            self._attended[own] = chunk.attend(self._q[own], k, v, self._rules[at])
        return self.run(at, 1, BACK)

    @cached_property
    def _prompts(self) -> PromptAttention:
        return PromptAttention(self._layout)


def _values(of: list[dict[str, Any]]) -> list[Any]:
    """Of all, in one reading: a pass over weights has driven them out of the processor's caches."""
    return list(chain.from_iterable(map(dict.values, of)))


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class _Streams:
    """The residual stream [T, D] before and behind every layer of a pass."""

    def __init__(self, layers: list[Any]) -> None:
        self._layers, self._hooks = layers, list[Any]()
        self.before, self.after = list[Tensor](), list[Tensor]()

    def __enter__(self) -> _Streams:
        for layer in self._layers:
            self._hooks.append(layer.register_forward_pre_hook(lambda _, args: self.before.append(args[0][0].clone())))
            self._hooks.append(
                layer.register_forward_hook(lambda _, __, out: self.after.append(_first(out)[0].clone()))
            )
        return self

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()


def _share(off: Tensor, whole: Tensor) -> float:
    """Infinite where it is no number."""
    share = float(off.norm() / whole.norm().clamp_min(1e-30))
    return share if share == share else math.inf


def _first(out: Any) -> Tensor:
    found: Tensor = out[0] if isinstance(out, tuple) else out
    return found


def _is_windowed(rule: ScoreRule, scale: float) -> bool:
    """Whether it is a softmax of scores with this scale, over a window of tokens or all."""
    others = (rule.softcap, rule.chunk, rule.sinks, rule.slopes, rule.chosen, rule.images)
    return rule.scale == scale and all(other is None for other in others)


PROBE_SLOTS = sum(PROBE) + 2 * len(PROBE)


def _probe_steps(
    pools: tuple[LayerPools, LayerPools], loaded: LoadedModel
) -> Iterator[tuple[Tensor, Tensor, PagedLayout]]:
    """Tokens, positions and layouts of prompts of PROBE tokens, then of a step in which each has one more token."""
    slots = list(torch.arange(PROBE_SLOTS).split([n + 2 for n in PROBE]))
    token = (torch.arange(PROBE_SLOTS) * 7919 + 3) % loaded.token_count
    prompts = [own[:n] for own, n in zip(slots, PROBE)]
    starts = [sum(PROBE[:i]) for i in range(len(PROBE))]
    chunks = [PrefillChunk(start, n, own) for start, n, own in zip(starts, PROBE, prompts)]
    write = torch.cat(prompts)
    yield token[write], torch.cat([torch.arange(n) for n in PROBE]), PagedLayout(*pools, write, chunks)
    write = torch.stack([own[n] for own, n in zip(slots, PROBE)])
    own = nn.utils.rnn.pad_sequence([one[: n + 1] for one, n in zip(slots, PROBE)], batch_first=True)
    lengths = torch.tensor(PROBE) + 1
    yield token[write], lengths - 1, PagedLayout(*pools, write, [], DecodeBatch(own, lengths))


# -- which models -----------------------------------------------------------------------------------------


def _may_fit(loaded: LoadedModel) -> bool:
    """Whether its passes are those of one process and of plain weights in bfloat16 here."""
    return (
        loaded.device.type == "cpu"
        and loaded.dtype in cpu_kernels.CODES
        and has_tiles(loaded.dtype)
        and (loaded.fp32_stream or loaded.dtype == torch.float32)
        and not (loaded.aligned or loaded.leads_ranks or loaded.routers or loaded.indexers or loaded.compressed)
        and loaded.state_bytes == 0
        and loaded.adapter is None
        and loaded.bank is None
        and loaded.sight is None
        and loaded.stage is None
        and loaded.blocks is None
        and loaded.weights is None
    )


def _is_plain(layer: Any, last_norm: Any) -> bool:
    """Whether a layer is written like llama's, of weights that lie as they are, and the norm behind it like its own."""
    if type(layer).__name__ not in LIKE_LLAMA or last_norm is None:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    products = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    gated = [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    norms = [layer.input_layernorm, layer.post_attention_layernorm, last_norm, *_head_norms(attention)]
    return (
        len({type(norm) for norm in norms}) == 1
        and all(type(one) is nn.Linear and type(one.weight) is nn.Parameter for one in [*products, *gated])
        and all(one.bias is None for one in gated)
        and len({one.bias is None for one in products[:3]}) == 1
        and all(p.dtype == norms[0].weight.dtype and p.is_contiguous() for p in [*layer.parameters(), last_norm.weight])
        and all(n % UNIT == 0 for one in [*products, *gated] for n in one.weight.shape)
        and attention.head_dim % UNIT == 0
        and attention.head_dim <= LONGEST
        and all(norm.variance_epsilon == norms[0].variance_epsilon for norm in norms)
        and type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
    )


def _head_norms(attention: Any) -> list[Any]:
    return [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []


PRODUCTS = (1, 5, 8, 9)  # of the parts below, those that are copies


def _packed_weights(layers: list[Any], last_norm: Any, rules: list[ScoreRule]) -> PackedWeights:
    """In one piece of memory: its pages are those of a large tensor, 2 MB, where a matrix alone would have pages of
    4 KB. One request reads all of them for every token.
    """
    attention, dtype = layers[0].self_attn, layers[0].input_layernorm.weight.dtype
    sizes = [cpu_kernels.packed_size(weights) for layer in layers for weights in _products(layer)]
    room = torch.empty(sum(sizes), dtype=dtype)
    rooms = iter(room.split(sizes))
    parts = [_packed_parts(layer, [next(rooms) for _ in PRODUCTS]) for layer in layers]
    table = array("q")
    for own, rule in zip(parts, rules, strict=True):
        table.extend([*map(_address, own), 0, 0, rule.window or 0])
    size = attention.head_dim
    return PackedWeights(
        room,
        parts,
        table=table,
        layers=[layer.self_attn.layer_idx for layer in layers],
        heads=(attention.q_proj.out_features // size, attention.k_proj.out_features // size),
        size=size,
        inner=layers[0].mlp.gate_proj.out_features,
        last_norm=last_norm.weight.detach(),
        eps=last_norm.variance_epsilon,
    )


def _products(layer: Any) -> list[list[Tensor]]:
    """Weights that are multiplied at once."""
    attention, mlp = layer.self_attn, layer.mlp
    joined = [attention.q_proj, attention.k_proj, attention.v_proj]
    return [
        [one.weight for one in own]
        for own in (joined, [attention.o_proj], [mlp.gate_proj, mlp.up_proj], [mlp.down_proj])
    ]


def _packed_parts(layer: Any, rooms: list[Tensor]) -> list[Tensor | None]:
    """As LayerParts in cpu_layers.cpp names them, up to the cache."""
    attention = layer.self_attn
    joined = [attention.q_proj, attention.k_proj, attention.v_proj]
    biases = None if joined[0].bias is None else torch.cat([one.bias.detach() for one in joined]).float()
    q_norm, k_norm = [norm.weight.detach() for norm in _head_norms(attention)] or (None, None)
    out = attention.o_proj
    first, second, gated, last = (
        cpu_kernels.pack_words(weights, in_turns=at == 2, room=room)
        for at, (weights, room) in enumerate(zip(_products(layer), rooms, strict=True))
    )
    return [
        layer.input_layernorm.weight.detach(),
        first,
        biases,
        q_norm,
        k_norm,
        second,
        None if out.bias is None else out.bias.detach().float(),
        layer.post_attention_layernorm.weight.detach(),
        gated,
        last,
    ]
