"""A dense decoder's layer on a CPU in two calls, before and behind its attention,
forward and backward (cpu_halves.cpp).

    front   q, k, v = norm(h) Wᵀ + b                                       kept: h
    back    m = h + o Woᵀ + b,   h' = m + (silu(g) · u) Wdᵀ,               kept: o, m, g, u
            g = norm(m) Wgᵀ,     u = norm(m) Wuᵀ                           or o, m, where a feed-forward part runs twice

Between them q and k are turned by their positions and the loops of models/tree_loops.py attend, all in one step of
autograd, where that has the bits of the attention module's own code; other attentions run as they are.

Here a half is one team of threads that shares its work out as it comes, so a neighbour on the same cores costs its
share, and nothing between two products is kept. For layers written like llama's in bfloat16 or float32, with their
residual stream in fp32, on CPUs for which models/linear.py has tiles; trainer, critic and reference alike, with gradients
and without, so that two passes over the same weights have the same bits. It rounds where the modules do, but for
gradients of weights, which are added to the optimizer's sums in fp32. Before a layer's first pass both ways compute
some rows, values and gradients, and where they differ the modules stay.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from rondel.core.events import Warned, emit
from rondel.models import cpu_kernels
from rondel.models.attention import NotedCalls, attention_layout, use_attention_layout
from rondel.models.blocks import LIKE_LLAMA
from rondel.models.cpu_kernels import CODES, apart, place_of, row_room, tile_room
from rondel.models.dense_attention import ScoreRule
from rondel.models.fp32_sums import narrow_norm
from rondel.models.linear import has_tiles, is_alone, is_compared, is_installed, is_tracing, modules_alone
from rondel.models.main_grad import main_grad, returned_gradients, room_of_gradient
from rondel.models.packed_layout import PackedLayout
from rondel.models.tree_loops import TreeTable, takes_tree, tree_backward, tree_forward

FRONT, FRONT_BACKWARD, BACK, BACK_BACKWARD, GATES = range(5)  # as in cpu_halves.cpp
UNIT = 16  # of which all sizes are multiples
NORM_ROWS = 64  # of a norm whose share of the weight's gradient is summed one after the other, as in cpu_halves.cpp
ROWS = 8  # that are computed both ways
# of the norm of what a half gives and of each gradient: ten times what bfloat16 rounds away, a hundred times fp32's
TOLERANCE = {torch.bfloat16: 0.05, torch.float32: 1e-4}


def install_layer_halves(layers: list[Any]) -> None:
    """Layers written like llama's compute in halves from now on, wherever that is possible and the faster way."""
    for layer in layers:
        if type(layer).__name__ in LIKE_LLAMA and "forward" not in layer.__dict__ and _is_plain(layer):
            own = functools.partial(LayerHalves(layer).forward, layer.forward)
            setattr(layer, "forward", own)  # noqa: B010


class LayerHalves:
    """The forward pass of one layer."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._fits: bool | None = None  # whether both ways agree
        self._rule: ScoreRule | bool | None = None  # by which loops attend as the module does; False: they do not
        self._asked: tuple[Any, ...] = ()  # what the module said of it

    def __deepcopy__(self, memo: Any) -> LayerHalves:
        return LayerHalves(memo.get(id(self._layer), self._layer))

    def forward(self, plain: Callable[..., Tensor], hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`plain`: through the modules."""
        if args or not self._may_fit(hidden_states):
            return plain(hidden_states, *args, **kwargs)
        attention = self._layer.self_attn
        stream = hidden_states[0].contiguous()
        if self._fits is None:
            self._fits = self._is_like_modules(stream)
        if not self._fits:
            return plain(hidden_states, **kwargs)
        if (loops := self._loops_of(len(stream), **kwargs)) is not None:
            return _whole(self._layer, stream, loops)[None]
        q, k, v, stream = _front(self._layer, stream)
        given = _GivenProjections(attention, {"q_proj": q, "k_proj": k, "v_proj": v})
        noted, known = NotedCalls(attention_layout()), self._rule is not None and self._asked == _asked_of(attention)
        with nullcontext() if known else use_attention_layout(noted):
            attended, _ = _forward_of(attention)(given, hidden_states=hidden_states, **kwargs)
        if not known:
            self._rule, self._asked = self._own_rule((q, k, v), noted, attended[0], **kwargs), _asked_of(attention)
        return _back(self._layer, attended[0], stream)[None]

    def _loops_of(self, tokens: int, **kwargs: Any) -> _Loops | None:
        """What attends in this pass where the module's own code is left out; None where it is not."""
        attention, rule, layout = self._layer.self_attn, self._rule, attention_layout()
        plain = (
            self._asked == _asked_of(attention) and _has_plain_head_norms(attention) and _is_by_loops(layout, attention)
        )
        return _loops(attention, layout, rule, tokens, **kwargs) if plain and isinstance(rule, ScoreRule) else None

    def _own_rule(
        self,
        given: tuple[Tensor, Tensor, Tensor],
        noted: NotedCalls,
        attended: Tensor,
        **kwargs: Any,
    ) -> ScoreRule | bool | None:
        """The rule by which the module has attended, if it attended once, to queries and keys with the bits of ours, and
        gave what loops give; None where it cannot be told yet.
        """
        attention, layout = self._layer.self_attn, attention_layout()
        if len(noted.calls) != 1 or attention.__dict__.get("forward") is None or not _has_plain_head_norms(attention):
            return False
        if not _is_by_loops(layout, attention):
            return None
        (_, rule, *theirs), (q, k, v) = noted.calls[0], (x.unflatten(1, (-1, attention.head_dim)) for x in given)
        loops = _loops(attention, layout, rule, len(q), **kwargs) if takes_tree(q, k, v, rule) else None
        if loops is None:
            return False
        with torch.no_grad():
            own, kept = loops.attend(q, k, v, _head_norms(attention))
        same = all(map(torch.equal, (*kept[:2], own.flatten(1)), (*theirs, attended)))
        return rule if same else False

    def _may_fit(self, hidden: Tensor) -> bool:
        return (
            self._fits is not False
            and hidden.dtype == torch.float32
            and hidden.dim() == 3
            and len(hidden) == 1
            and hidden.shape[1] > 0
            and not is_alone()
            and attention_layout() is not None
            and has_tiles(self._layer.input_layernorm.weight.dtype)
            and not (is_compared() or is_tracing())
            and cpu_kernels.has_kernels(hidden)
            and _is_plain(self._layer)
        )

    def _is_like_modules(self, stream: Tensor) -> bool:
        """Some rows through the modules and in halves: what these give, and all gradients."""
        layer, generator = self._layer, torch.Generator().manual_seed(0)
        as_they_are = saved_tensors_hooks(lambda x: x, lambda x: x)  # a layer that runs twice has hooks of its own
        with torch.inference_mode(False), torch.enable_grad(), returned_gradients(), as_they_are:
            rows = stream[:ROWS].detach().clone().requires_grad_()
            wide = layer.self_attn.o_proj.in_features
            front, back = _weights_of(layer)
            attended = torch.randn(len(rows), wide, generator=generator).to(front[0].dtype).requires_grad_()
            with modules_alone():
                normed = layer.input_layernorm(rows)
                attention = layer.self_attn
                theirs = [one(normed) for one in (attention.q_proj, attention.k_proj, attention.v_proj)]
                middle = rows + attention.o_proj(attended)
                theirs.append(layer.mlp(layer.post_attention_layernorm(middle)) + middle - rows)
            ours = [*_front(layer, rows)[:3], _back(layer, attended, rows) - rows]
            asked = [rows, attended, *(w for w in (*front, *back) if w is not None and w.requires_grad)]
            grads = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in theirs]
            theirs += torch.autograd.grad(theirs, asked, grads)
            ours += torch.autograd.grad(ours, asked, grads)
        worst = max(_distance(own, their) for own, their in zip(ours, theirs, strict=True))
        if worst <= (limit := TOLERANCE[attended.dtype]):
            return True
        emit(
            Warned(
                f"layer {layer.self_attn.layer_idx} ({type(layer).__name__}) in halves gives something else than its "
                f"modules, by {worst:.2g} (limit {limit:g}), so modules compute it, slower"
            )
        )
        return False


def _distance(own: Tensor, their: Tensor) -> float:
    """|own - their| / |their|"""
    off = float((own.detach().float() - their.detach().float()).norm() / their.detach().float().norm().clamp_min(1e-30))
    return off if off == off else math.inf


class _GivenProjections:
    """An attention module whose products have been computed; its own code does the rest."""

    def __init__(self, attention: Any, given: dict[str, Tensor]) -> None:
        self._attention = attention
        for name, out in given.items():
            setattr(self, name, functools.partial(_take, out[None]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attention, name)

    def o_proj(self, attended: Tensor) -> Tensor:
        return attended


def _take(out: Tensor, _: Tensor) -> Tensor:
    return out


def _forward_of(attention: Any) -> Callable[..., Any]:
    """What an attention computes, with itself as the first argument."""
    own = attention.__dict__.get("forward")
    forward: Callable[..., Any] = type(attention).forward if own is None else own.func
    return forward


# -- attention by loops ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Loops:
    """Queries and keys turned by their positions, behind their norms where they have some, and the loops over a tree.

    size          of a head
    eps           of the norms of heads
    cosine, sine  [T, size]
    """

    size: int
    eps: float
    cosine: Tensor
    sine: Tensor
    table: TreeTable
    rule: ScoreRule

    def attend(self, q: Tensor, k: Tensor, v: Tensor, norms: Weights) -> tuple[Tensor, list[Tensor]]:
        """q [T,H,size], k and v [T,K,size] -> what was attended [T,H,size], and what the gradient needs."""
        own = [x if w is None else cpu_kernels.norm_forward(x, w, self.eps) for x, w in zip((q, k), norms, strict=True)]
        turned_q, turned_k = (cpu_kernels.turned(x, self.cosine, self.sine) for x in own)
        out, log_sums = tree_forward(turned_q, turned_k, v, self.table, self.rule, cpu_kernels.library())
        before = [x for x, w in zip((q, k), norms, strict=True) if w is not None]
        return out, [turned_q, turned_k, v, log_sums, *before]

    def backward(
        self, grad: Tensor, kept: Sequence[Tensor], norms: Weights
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """`grad` [T,H,size] -> the gradients of q, k and v, and those of the norms' weights in fp32."""
        dq, dk, dv = tree_backward(kept[:4], grad, self.table, self.rule, cpu_kernels.library())
        back, shares, before = list[Tensor](), list[Tensor | None](), iter(kept[4:])
        for x, w in zip((dq, dk), norms, strict=True):
            dx, share = cpu_kernels.turned(x, self.cosine, self.sine, back=True), None
            if w is not None:
                dx, share = cpu_kernels.norm_backward(next(before), w, dx, self.eps)
            back.append(dx)
            shares.append(share)
        return [*back, dv], shares


def _loops(
    attention: Any, layout: Any, rule: ScoreRule, tokens: int, position_embeddings: Any = None,
    past_key_values: Any = None, **kwargs: Any,
) -> _Loops | None:  # fmt: skip
    """Those of a pass, where it asks for nothing else."""
    size, norms = attention.head_dim, _head_norms(attention)
    if position_embeddings is None or past_key_values is not None or kwargs.get("query_scale") is not None:
        return None
    cosine, sine = (x[0].contiguous() for x in position_embeddings)
    if cosine.shape != (tokens, size) or CODES[attention.q_proj.weight.dtype] < CODES.get(cosine.dtype, 2):
        return None
    eps = 0.0 if norms[0] is None else attention.q_norm.variance_epsilon
    return _Loops(size, eps, cosine, sine, layout.table, rule)


def _asked_of(attention: Any) -> tuple[Any, ...]:
    """Its code, and what decides its rule."""
    windows = (getattr(one, "sliding_window", None) for one in (attention, attention.config))
    return attention.__dict__.get("forward"), type(attention), attention.scaling, *windows


def _is_by_loops(layout: Any, attention: Any) -> bool:
    return isinstance(layout, PackedLayout) and layout.takes_loops(attention.q_proj.weight.dtype)


def _head_norms(attention: Any) -> Weights:
    """The weights of the norms of queries and keys."""
    return [attention.q_norm.weight, attention.k_norm.weight] if hasattr(attention, "q_norm") else [None, None]


def _has_plain_head_norms(attention: Any) -> bool:
    norms = [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
    return all(_is_plain_norm(one) and one.variance_epsilon == norms[0].variance_epsilon for one in norms)


# -- which layers ---------------------------------------------------------------------------------------


def _is_plain(layer: Any) -> bool:
    """Whether a layer consists of weights that lie as they are, and of what was installed when it was loaded."""
    attention, mlp = layer.self_attn, layer.mlp
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    gated = [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    own, gate = attention.__dict__.get("forward"), mlp.__dict__.get("forward")
    if _runs_twice(mlp):
        gate = gate.args[0]
    return (
        all(is_installed(one) and not _has_hooks(one) for one in (*linears, *gated))
        and all(_is_plain_norm(one) for one in norms)
        and norms[0].variance_epsilon == norms[1].variance_epsilon
        and not _has_hooks(attention)
        and not _has_hooks(mlp)
        and (own is None or getattr(own, "args", None) == (attention,))
        and (gate is None or getattr(gate, "func", None) is cpu_kernels.gated_layer)
        and all(one.bias is None for one in gated)
        and all(_is_plain_weight(w, norms[0].weight.dtype) for half in _weights_of(layer) for w in half)
        and type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
    )


def _runs_twice(mlp: Any) -> bool:
    """Whether a feed-forward part is computed again in the backward pass (models/recompute.py),
    and no more was asked."""
    return getattr(mlp, "runs_twice", False)


def _is_plain_weight(weight: Any, dtype: torch.dtype) -> bool:
    return weight is None or (
        type(weight) is nn.Parameter
        and weight.dtype == dtype in CODES
        and weight.is_cpu
        and weight.is_contiguous()
        and not any(n % UNIT for n in weight.shape)
    )


def _is_plain_norm(norm: Any) -> bool:
    own, narrowed = norm.__dict__.get("forward"), [*norm._forward_hooks.values()] == [narrow_norm]
    if own is not None and getattr(own, "func", None) is not cpu_kernels.norm_layer:
        return False
    as_it_is = norm.weight.dtype == torch.float32 and not norm._forward_hooks
    return type(norm).__name__.endswith("RMSNorm") and (narrowed or as_it_is) and not norm._forward_pre_hooks


def _has_hooks(module: Any) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


# -- halves ---------------------------------------------------------------------------------------------

Weights = list[Any]  # parameters, or None for a bias that is not there


def _weights_of(layer: Any) -> tuple[Weights, Weights]:
    """Of each half: its norm, then weights, then as many biases."""
    attention, mlp = layer.self_attn, layer.mlp
    front, back = [attention.q_proj, attention.k_proj, attention.v_proj], [attention.o_proj]
    gated: Weights = [one.weight for one in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
    return (
        [layer.input_layernorm.weight, *(one.weight for one in front), *(one.bias for one in front)],
        [layer.post_attention_layernorm.weight, back[0].weight, *gated, back[0].bias, None, None, None],
    )


def _front(layer: Any, stream: Tensor) -> list[Tensor]:
    """stream [T, D] -> q, k, v [T, O_i], and the stream for the other half, whose gradient comes back by it."""
    weights, eps = _weights_of(layer)[0], layer.input_layernorm.variance_epsilon
    if _wants_gradient(stream, *weights):
        return [*FrontHalf.apply(eps, stream, *weights)]
    return [*_front_forward(eps, stream, weights), stream]


def _back(layer: Any, attended: Tensor, stream: Tensor) -> Tensor:
    """attended [T, I], stream [T, D] -> the stream behind the layer."""
    weights, eps = _weights_of(layer)[1], layer.post_attention_layernorm.variance_epsilon
    attended = attended.contiguous()
    if _wants_gradient(attended, stream, *weights):
        out: Tensor = BackHalf.apply(eps, _runs_twice(layer.mlp), attended, stream, *weights)
        return out
    return _back_forward(eps, attended, stream, weights, keep=False)[0]


def _whole(layer: Any, stream: Tensor, loops: _Loops) -> Tensor:
    """stream [T, D] -> the stream behind the layer."""
    front, back = _weights_of(layer)
    heads, twice = _head_norms(layer.self_attn), _runs_twice(layer.mlp)
    eps = layer.input_layernorm.variance_epsilon
    if _wants_gradient(stream, *front, *back, *heads):
        out: Tensor = WholeLayer.apply((eps, twice, loops), stream, *heads, *front, *back)
        return out
    return _whole_forward(eps, loops, stream, (heads, front, back), keep=False)[0]


def _whole_forward(
    eps: float, loops: _Loops, stream: Tensor, weights: tuple[Weights, Weights, Weights], *, keep: bool
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """-> the stream behind the layer, and what the gradients of attention and of the half behind it need."""
    heads, front, back = weights
    q, k, v = (x.unflatten(1, (-1, loops.size)) for x in _front_forward(eps, stream, front))
    attended, kept = loops.attend(q, k, v, heads)
    attended = attended.flatten(1)
    out, *own = _back_forward(eps, attended, stream, back, keep=keep)
    return out, kept, [attended, *own]


def _wants_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _front_forward(eps: float, stream: Tensor, weights: Weights) -> list[Tensor]:
    norm, *products = weights
    own = products[: len(products) // 2]
    outs = [_room(len(stream), len(w), norm) for w in own if w is not None]
    half = _Half(stream=stream, norm=norm, normed=row_room(len(stream), stream.shape[1], norm.dtype))
    half.run(FRONT, eps, products, outs, [NO_TOTAL] * len(own))
    return outs


def _back_forward(eps: float, attended: Tensor, stream: Tensor, weights: Weights, *, keep: bool) -> list[Tensor]:
    """-> the stream behind the layer and behind its attention, gate and up."""
    norm, *products = weights
    rows, width = stream.shape
    assert products[1] is not None
    inner = len(products[1])
    middle, out = torch.empty_like(stream), torch.empty_like(stream)
    kept = [_room(rows, inner, norm), _room(rows, inner, norm)] if keep else []
    half = _Half(
        stream=stream, norm=norm, normed=row_room(rows, width, norm.dtype), attended=apart(attended), middle=middle,
        inner=row_room(rows, inner, norm.dtype), out=out,
    )  # fmt: skip
    half.run(BACK, eps, products, [None, *kept, None] if keep else [None] * 4, [NO_TOTAL] * 4)
    return [out, middle, *kept]


def _gates_again(eps: float, middle: Tensor, weights: Sequence[Any]) -> list[Tensor]:
    """Gate and up of the stream behind attention, as they were."""
    norm, *products = weights
    gates = [_room(len(middle), len(products[1]), norm) for _ in range(2)]
    half = _Half(norm=norm, normed=row_room(len(middle), middle.shape[1], norm.dtype), middle=middle)
    half.run(GATES, eps, products, [None, *gates, None], [NO_TOTAL] * 4, inner=len(products[1]))
    return gates


Gradients = list[Tensor | None]


def _front_backward(
    eps: float,
    stream: Tensor,
    weights: Sequence[Any],
    grads: Sequence[Tensor | None],
    dout: Tensor | None,
    wants: Sequence[bool],
) -> tuple[Tensor, Gradients]:
    """Of q, k and v, and of the stream from behind -> the gradients of the stream and of the weights, some of which are
    added where the optimizer adds them up.
    """
    norm, *products = weights
    own, rows = products[: len(products) // 2], len(stream)
    given = [
        _room(rows, len(w), norm).zero_() if g is None else g.to(norm.dtype).contiguous()
        for g, w in zip(grads, own, strict=True)
    ]
    of_norm, *totals = _totals([norm, *own], wants)
    dstream = torch.empty_like(stream)
    widths = [len(w) for w in own]
    half = _Half(
        stream=stream, norm=norm, normed=row_room(rows, stream.shape[1], norm.dtype),
        dout=None if dout is None else dout.contiguous(), joined=row_room(rows, sum(widths), norm.dtype),
        tiles=tile_room(rows, widths, norm.dtype),
        dnormed=row_room(rows, stream.shape[1], norm.dtype), dstream=dstream, shares=_shares(stream),
        norm_total=of_norm[0],
    )  # fmt: skip
    half.run(FRONT_BACKWARD, eps, products, given, totals, norm_fresh=of_norm[2])
    biases = [None if b is None else g.float().sum(0).to(b.dtype) for b, g in zip(products[len(own) :], given)]
    return dstream, [*_returned([norm, *own], [of_norm, *totals]), *biases]


def _back_backward(
    eps: float, grad: Tensor, kept: Sequence[Tensor], weights: Sequence[Any], wants: Sequence[bool]
) -> tuple[Tensor, Tensor, Gradients]:
    """`kept`: attended, the stream behind attention, gate and up, where they were kept. -> the gradients of what was
    attended, of the stream, and of the weights.
    """
    attended, middle, *gates = kept
    norm, *products = weights
    gate, up = gates or _gates_again(eps, middle, weights)
    own = products[: len(products) // 2]
    of_norm, *totals = _totals([norm, *own], wants)
    dattended, dstream = torch.empty_like(attended), torch.empty_like(middle)
    rows, inner = gate.shape
    half = _Half(
        norm=norm, normed=row_room(rows, middle.shape[1], norm.dtype), attended=attended, middle=middle,
        inner=row_room(rows, inner, norm.dtype), dout=grad.contiguous(),
        joined=row_room(rows, 2 * inner, norm.dtype),
        tiles=tile_room(rows, [inner, max(inner, middle.shape[1])], norm.dtype),
        dnormed=row_room(rows, middle.shape[1], norm.dtype), dattended=dattended, dstream=dstream,
        shares=_shares(middle), norm_total=of_norm[0],
    )  # fmt: skip
    half.run(BACK_BACKWARD, eps, products, [None, gate, up, None], totals, norm_fresh=of_norm[2])
    bias = None if products[len(own)] is None else dstream.sum(0).to(norm.dtype)
    found = [*_returned([norm, *own], [of_norm, *totals]), bias, None, None, None]
    return dattended, dstream, found


class FrontHalf(torch.autograd.Function):
    @staticmethod
    def forward(ctx, eps: float, stream: Tensor, *weights: Tensor | None):
        ctx.eps, ctx.weights = eps, weights
        ctx.save_for_backward(stream, *weights)  # the weights, too: torch then notices when one was written to
        ctx.set_materialize_grads(False)
        return *_front_forward(eps, stream, [*weights]), stream.view_as(stream)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor | None) -> Any:
        stream, wants = ctx.saved_tensors[0], ctx.needs_input_grad[2:]
        dstream, found = _front_backward(ctx.eps, stream, ctx.weights, grads[:-1], grads[-1], wants)
        return None, dstream, *found


class BackHalf(torch.autograd.Function):
    @staticmethod
    def forward(ctx, eps: float, twice: bool, attended: Tensor, stream: Tensor, *weights: Tensor | None):
        out, *kept = _back_forward(eps, attended, stream, [*weights], keep=not twice)
        ctx.eps, ctx.weights, ctx.kept = eps, weights, 1 + len(kept)
        ctx.save_for_backward(attended, *kept, *weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Any:
        kept = ctx.saved_tensors[: ctx.kept]  # asked for once: a layer that runs twice gives them once
        dattended, dstream, found = _back_backward(ctx.eps, grad, kept, ctx.weights, ctx.needs_input_grad[4:])
        return None, None, dattended, dstream, *found


class WholeLayer(torch.autograd.Function):
    """Both halves and the loops between them. Of the weights the norms of heads are the first two, then come those of
    the halves."""

    @staticmethod
    def forward(ctx, how: tuple[float, bool, _Loops], stream: Tensor, *weights: Tensor | None):
        eps, twice, loops = ctx.how = how
        ctx.weights = heads, front, back = [*weights[:2]], [*weights[2:9]], [*weights[9:]]
        out, between, behind = _whole_forward(eps, loops, stream, (heads, front, back), keep=not twice)
        ctx.counts = 1, 1 + len(between), 1 + len(between) + len(behind)
        ctx.save_for_backward(stream, *between, *behind, *weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Any:
        (eps, _, loops), (heads, front, back), (first, then, end) = ctx.how, ctx.weights, ctx.counts
        kept, wants = ctx.saved_tensors, ctx.needs_input_grad[2:]
        dattended, dstream, of_back = _back_backward(eps, grad, kept[then:end], back, wants[9:])
        pulled, shares = loops.backward(dattended.unflatten(1, (-1, loops.size)), kept[first:then], heads)
        pulled = [x.flatten(1) for x in pulled]
        dstream, of_front = _front_backward(eps, kept[0], front, pulled, dstream, wants[2:9])
        of_heads = [None if g is None else _added(w, g, asked) for w, g, asked in zip(heads, shares, wants)]
        return None, dstream, *of_heads, *of_front, *of_back


def _added(weight: Tensor, grad: Tensor, wanted: bool) -> Tensor | None:
    """The gradient of a norm of heads in fp32, added where the optimizer adds it up, else what autograd gets."""
    main = main_grad(weight) if wanted else None
    if main is None or main.dtype != torch.float32:
        return grad.to(weight.dtype)
    main.add_(grad)
    return None


Total = tuple[Tensor | None, bool, bool]  # where a weight's gradient is added, is that the optimizer's, is it empty yet


NO_TOTAL: Total = None, False, False


def _totals(weights: Weights, wanted: Sequence[bool]) -> list[Total]:
    """For each weight."""
    found = list[Total]()
    for weight, wants in zip(weights, wanted, strict=False):
        main, fresh = room_of_gradient(weight) if wants and weight is not None else (None, False)
        if main is not None and main.is_contiguous() and main.dtype == torch.float32:
            found.append((main, True, fresh))
        else:
            if main is not None and fresh:
                main.zero_()
            found.append((torch.empty(weight.shape) if wants and weight is not None else None, False, True))
    return found


def _returned(weights: Weights, totals: list[Total]) -> list[Tensor | None]:
    """What autograd gets of them."""
    return [
        None if total is None or is_main else total.to(weight.dtype)
        for weight, (total, is_main, _) in zip(weights, totals, strict=True)
    ]


def _room(rows: int, width: int, like: Tensor) -> Tensor:
    """[rows, width] in the dtype of a weight."""
    return torch.empty(rows, width, dtype=like.dtype)


def _shares(stream: Tensor) -> Tensor:
    """Room for a norm's gradient."""
    return torch.empty(-(-len(stream) // NORM_ROWS), stream.shape[1])


class _Half:
    """What one call reads and writes, as cpu_halves.cpp names it: Half, Product."""

    PLACES = (
        "stream", "norm", "normed", "attended", "middle", "inner", "out", "dout", "joined", "tiles", "dnormed",
        "dattended", "dstream", "shares", "norm_total",
    )  # fmt: skip

    def __init__(self, **tensors: Tensor | None) -> None:
        self._tensors = tensors

    def run(
        self,
        kind: int,
        eps: float,
        products: Weights,
        outs: Sequence[Tensor | None],
        totals: Sequence[Total],
        *,
        inner: int = 0,
        norm_fresh: bool = False,
    ) -> None:
        own, biases = products[: len(outs)], products[len(outs) :]
        floats = [None if b is None else b.detach().float() for b in biases]
        rooms = [self._tensors.get(name) for name in ("normed", "attended", "inner", "joined")]
        normed, attended, room, _ = rooms
        assert normed is not None
        widths = [inner if room is None else room.shape[1], 0 if attended is None else attended.shape[1]]
        steps = [0 if one is None else one.stride(0) for one in rooms]
        sizes = [*normed.shape, *widths, len(own), *steps]
        half = array("q", [*sizes, *(_address(self._tensors.get(name)) for name in self.PLACES), int(norm_fresh)])
        table = array("q")
        for w, b, out, (total, _, fresh) in zip(own, floats, outs, totals, strict=True):
            table.extend([_address(x) for x in (w, b, out, total)])
            table.extend([0 if w is None else len(w), int(fresh)])
        cpu_kernels.library().rondel_layer_half(
            CODES[normed.dtype], kind, place_of(half), place_of(table), eps, torch.get_num_threads()
        )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
