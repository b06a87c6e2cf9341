"""What stands between the products of a transformer on a CPU, one pass each (cpu_kernels.cpp); float32 and bfloat16.
On CPUs with AVX2 alone also the products with packed weights (cpu_product.cpp).

    rms_norm    y = w · x̂,  x̂ = x r,  r = 1 / sqrt(mean(x²) + eps)     dx = r (g w - x̂ mean(g w x̂)),  dw = sum_rows g x̂
    swiglu      y = silu(g) · u                                          dg = dy u σ(g) (1 + g (1 - σ(g))),  du = dy silu(g)
    rotate      y = x cos + (-x₂, x₁) sin, with the halves x₁, x₂ of x   dx = dy cos + ((dy sin)₂, -(dy sin)₁)
    attention   p = softmax(scale q kᵀ under a mask),  o = p v           ds = scale p (do vᵀ - sum(p do vᵀ)),  p as rounded
    decode      the same for one query a request, over keys and values where they lie in the cache
    add         an fp32 sum += a bfloat16 gradient
    logprobs    of chosen tokens, with entropies                         formulas in train/logprobs.py
    draw        a token a row, as generate/engine/builtin/sampler.py draws it                           none
    product     y = x wᵀ + b, of w in panels [O / 16, I, 16]             none: training multiplies through oneDNN
    words       the same in fp32 of panels [O / 32, I, 32] of fp32 numbers or [O / 32, I / 2, 32, 2] of bfloat16 ones   none

torch reads and writes what a norm needs seven times, and a bfloat16 number beside a float32 one is first copied.
Trainer and engine both call these, in every pass: what decides is the model and the sizes of a call, and never what a
pass wants, so that two passes over the same weights have the same bits. A row has the same bits wherever it lies,
whoever is beside it, and on any number of threads. Each rounds where torch's operations do, but for
scores of a decode step, which stay in fp32. Where models/tree_loops.py does not take it, the products of training
attention are torch's; what lies between them is one pass over the scores, in their place.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from rondel.models.dense_attention import ScoreRule

LOOPS, PLAIN_KERNELS = "loops in C++", "torch's operations"
CODES = {torch.float32: 0, torch.bfloat16: 1}
LANES = 16  # numbers of a head that a decode step adds at once
PANEL = 16  # rows of a weight that are packed together, as in cpu_product.cpp
WIDTH, HALF = 32, 16  # outputs of a panel of words, and those that are packed together, as in cpu_tiles.h
SETS, LINE = 1024, 64  # bytes: no rows are a multiple of it apart, or each fourth has the same sets of a first cache
PROOF = ((80, 48), (37, 100), (49, 2100))  # O and I of the weights of which a product is asked both ways
ROWS = 64  # of a norm whose share of the weight's gradient is summed one after the other
PLAIN = (Tensor, nn.Parameter)  # a copy that `contiguous` makes needs a name: without one it is freed before it is read

_loaded: Any = None


def use_library(library: Any) -> None:
    """What models/native_library.py has compiled computes from now on, in this process; None: torch's operations do."""
    global _loaded
    _loaded = library


def kernels_of(device: torch.device) -> str:
    """What computes there in this process between products, as a run's facts name it;
    "" for another device than a CPU."""
    return "" if device.type != "cpu" else PLAIN_KERNELS if _loaded is None else LOOPS


def row_room(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """[rows, width], of which a product by tiles reads some rows at a time: no multiple of SETS bytes apart."""
    step = width if width * dtype.itemsize % SETS else width + LINE // dtype.itemsize
    return torch.empty(rows, step, dtype=dtype)[:, :width]


def apart(x: Tensor) -> Tensor:
    """x [rows, width] as it is, or where its rows do not lie as in `row_room`, a copy."""
    if x.stride(1) == 1 and (len(x) == 1 or x.stride(0) * x.itemsize % SETS):
        return x
    return row_room(len(x), x.shape[1], x.dtype).copy_(x)


def has_kernels(*tensors: Tensor) -> bool:
    """Whether these are numbers that the kernels can read: on a CPU, of a dtype they know,
    in no pass that is traced."""
    return (
        all(type(x) in PLAIN and x.device.type == "cpu" and x.dtype in CODES for x in tensors)
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is None
        and _loaded is not None
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], weight [D] -> [..., D] in the dtype of the weight, which is that of x or bfloat16."""
    return RMSNorm.apply(x, weight, eps) if _wants_gradient(x, weight) else norm_forward(x.contiguous(), weight, eps)


def norm_layer(plain: Callable[[Tensor], Tensor], norm: Any, hidden_states: Tensor) -> Tensor:
    """The forward pass of a norm that is `rms_norm`; `plain` of what the kernel does not compute."""
    weight = norm.weight
    if weight.dtype in (hidden_states.dtype, torch.bfloat16) and has_kernels(hidden_states, weight):
        return rms_norm(hidden_states, weight, norm.variance_epsilon)
    return plain(hidden_states)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, of one shape and dtype."""
    gate, up = gate.contiguous(), up.contiguous()
    return SwiGLU.apply(gate, up) if _wants_gradient(gate, up) else _gate_forward(gate, up)


def gated_layer(plain: Callable[[Tensor, Tensor], Tensor], mlp: Any, x: Tensor) -> Tensor:
    """The forward pass of a gated MLP with SiLU; `plain` of gate and up where the kernel does not compute `swiglu`."""
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    fits = gate.dtype == up.dtype and has_kernels(gate, up)
    out: Tensor = mlp.down_proj(swiglu(gate, up) if fits else plain(gate, up))
    return out


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x [T,H,D] with whole heads side by side in memory, cosine and sine [T,D] -> [T,H,D] in the dtype of x."""
    return Rotation.apply(x, cosine, sine) if _wants_gradient(x) else turned(x, cosine, sine)


def rotate_pair(
    plain: Any, q: Tensor, k: Tensor, cosine: Tensor, sine: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """q [1,H,T,D], k [1,K,T,D], cosine and sine [1,T,D] -> the same shapes;
    `plain` of what the kernel does not compute."""
    fits = (
        unsqueeze_dim == 1
        and q.dim() == 4
        and len(q) == 1
        and cosine.shape == (1, q.shape[2], q.shape[3])
        and cosine.is_contiguous()
        and sine.is_contiguous()
        and q.dtype == k.dtype
        and CODES.get(q.dtype, 0) >= CODES.get(cosine.dtype, 2)
        and q.stride(3) == k.stride(3) == 1
        and has_kernels(q, k, cosine, sine)
    )
    if not fits:
        out: tuple[Tensor, Tensor] = plain(q, k, cosine, sine, unsqueeze_dim=unsqueeze_dim)
        return out
    turned_q, turned_k = (rotate(x[0].transpose(0, 1), cosine[0], sine[0]).transpose(0, 1)[None] for x in (q, k))
    return turned_q, turned_k


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return norm_forward(x.contiguous(), weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dx, share = norm_backward(x, weight, grad, ctx.eps)
        return dx, share.to(weight.dtype) if ctx.needs_input_grad[1] else None, None


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _gate_forward(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Any:
        (gate, up), grad = ctx.saved_tensors, grad.contiguous()
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        library().rondel_gate_backward(
            CODES[gate.dtype], gate.data_ptr(), up.data_ptr(), grad.data_ptr(), dgate.data_ptr(),
            dup.data_ptr(), gate.numel(), torch.get_num_threads(),
        )  # fmt: skip
        return dgate, dup


class Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return turned(x, cosine, sine)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Any:
        return turned(grad.contiguous(), *ctx.saved_tensors, back=True), None, None


class LogprobTerms(NamedTuple):
    """Of each row of logits z [M,V] / temperature."""

    logprob: Tensor  # [M] of the target
    entropy: Tensor  # [M]
    top: Tensor  # [M] the largest of the row
    log_total: Tensor  # [M] log sum exp(z - top)


def logprob_terms(z: Tensor, target: Tensor, temperature: float) -> LogprobTerms:
    """z [M,V] contiguous, target [M]; z stays as it is."""
    found, target = LogprobTerms(*torch.empty(4, len(z), dtype=torch.float32).unbind()), target.contiguous()
    library().rondel_logprob_forward(
        z.data_ptr(), target.data_ptr(), *(x.data_ptr() for x in found), *z.shape, 1.0 / temperature,
        torch.get_num_threads(),
    )  # fmt: skip
    return found


def logit_gradients(
    z: Tensor,
    target: Tensor,
    terms: LogprobTerms,
    grads: tuple[Tensor, Tensor | None],
    scale: float,
    temperature: float,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """-> [M,V] in `dtype`: scale · dz of g · logprob + h · entropy for the grads (g, h), in the place of z."""
    out, target = z.view(dtype).flatten()[: z.numel()].view(z.shape), target.contiguous()
    of_logprob, of_entropy = (x if x is None else x.float().contiguous() for x in grads)
    assert of_logprob is not None
    library().rondel_logprob_backward(
        CODES[dtype], z.data_ptr(), target.data_ptr(), terms.top.data_ptr(), terms.log_total.data_ptr(),
        terms.entropy.data_ptr(), of_logprob.data_ptr(), 0 if of_entropy is None else of_entropy.data_ptr(),
        out.data_ptr(), *z.shape, 1.0 / temperature, scale / temperature, torch.get_num_threads(),
    )  # fmt: skip
    return out


def add_gradient(total: Tensor, grad: Tensor) -> None:
    """total += grad, of one shape; a bfloat16 gradient is not copied to fp32 first."""
    kernel = grad.dtype == torch.bfloat16 and total.dtype == torch.float32 and has_kernels(total, grad)
    if kernel and total.is_contiguous() and grad.is_contiguous():
        library().rondel_add(total.data_ptr(), grad.data_ptr(), total.numel(), torch.get_num_threads())
    else:
        total.add_(grad.to(total.device))


def round_into(held: Tensor, exact: Tensor) -> int:
    """held = exact, rounded to its dtype -> how many numbers have other bits than before; of one shape."""
    kernel = held.dtype == torch.bfloat16 and exact.dtype == torch.float32 and has_kernels(held, exact)
    if kernel and held.is_contiguous() and exact.is_contiguous():
        changed: int = library().rondel_round(exact.data_ptr(), held.data_ptr(), held.numel(), torch.get_num_threads())
        return changed
    fresh = exact.to(held.dtype).to(held.device)
    changed = int((fresh != held).sum())
    held.copy_(fresh)
    return changed


TIE = 1 << 15  # the half of an interval of bfloat16: 16 bits say -2^15, and not 2^15


def split_bits(held: Tensor, exact: Tensor, low: Tensor | None = None) -> tuple[int, tuple[Tensor, Tensor] | None]:
    """held = exact, rounded to bfloat16 -> how many of `held` have other bits than before, and what `exact` has beyond
    it: the difference of their bits, int16 of one shape (in `low`, where that is given), and where among all of them it
    is 2^15, [K]. No second where more are so than chance has.
    """
    low = torch.empty(exact.shape, dtype=torch.int16) if low is None else low
    most = 1024 + exact.numel() // 4096
    if not has_kernels(exact, held):
        changed = round_into(held, exact)
        more = exact.view(torch.int32) - (held.view(torch.int16).to(torch.int32) << 16)
        low.copy_(more)
        ties = (more.view(-1) == TIE).nonzero()[:, 0]
        return changed, (low, ties) if len(ties) <= most else None
    ties, counts = torch.empty(most, dtype=torch.int64), array("q", [0, 0])
    places = exact.data_ptr(), held.data_ptr(), low.data_ptr(), ties.data_ptr(), place_of(counts)
    library().rondel_split(*places, most, exact.numel(), torch.get_num_threads())
    changed, found = counts
    return changed, (low, ties[:found].clone()) if found <= most else None


def join_bits(exact: Tensor, held: Tensor, low: Tensor, ties: Tensor) -> None:
    """exact = the numbers of which `split_bits` told these."""
    bits = exact.view(torch.int32)
    if has_kernels(exact, held):
        places = held.data_ptr(), low.data_ptr(), exact.data_ptr()
        library().rondel_unsplit(*places, exact.numel(), torch.get_num_threads())
    else:
        bits.copy_((held.view(torch.int16).to(torch.int32) << 16) + low)
    bits.view(-1)[ties] += 2 * TIE


def join_halves(high: Tensor, low: Tensor) -> Tensor:
    """high + low in fp32, of one shape; two bfloat16 tensors are read once."""
    if high.dtype != torch.bfloat16 or not (high.is_contiguous() and low.is_contiguous() and has_kernels(high, low)):
        return high.float().add_(low)
    out = torch.empty(high.shape, dtype=torch.float32)
    library().rondel_join(high.data_ptr(), low.data_ptr(), out.data_ptr(), out.numel(), torch.get_num_threads())
    return out


def place_of(numbers: array[int]) -> int:
    """The address of a table of addresses and sizes: making such a table of a tensor takes ten times as long."""
    return numbers.buffer_info()[0]


def library() -> Any:
    """The functions of cpu_kernels.cpp, after `has_kernels`."""
    return _loaded


def _wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def norm_forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` of a contiguous x without a graph."""
    out = torch.empty(x.shape, dtype=weight.dtype)
    size = x.shape[-1]
    library().rondel_norm_forward(
        x.data_ptr(), CODES[x.dtype], weight.data_ptr(), CODES[weight.dtype], out.data_ptr(), x.numel() // size, size,
        eps, torch.get_num_threads(),
    )  # fmt: skip
    return out


def norm_backward(x: Tensor, weight: Tensor, grad: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """-> the gradients of x and, in fp32, of the weight."""
    x, grad, size = x.contiguous(), grad.contiguous(), x.shape[-1]
    rows, dx = x.numel() // size, torch.empty_like(x)
    shares = torch.zeros(-(-rows // ROWS), size, dtype=torch.float32)  # [blocks of ROWS rows, D]
    library().rondel_norm_backward(
        x.data_ptr(), CODES[x.dtype], weight.data_ptr(), CODES[weight.dtype], grad.data_ptr(),
        dx.data_ptr(), shares.data_ptr(), rows, size, eps, ROWS, torch.get_num_threads(),
    )  # fmt: skip
    return dx, shares.sum(0)


def _gate_forward(gate: Tensor, up: Tensor) -> Tensor:
    out, size = torch.empty_like(gate), gate.shape[-1]
    library().rondel_gate_forward(
        CODES[gate.dtype], gate.data_ptr(), up.data_ptr(), out.data_ptr(), gate.numel() // size, size, size, size,
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def turned(x: Tensor, cosine: Tensor, sine: Tensor, *, back: bool = False) -> Tensor:
    """`rotate` without a graph; `back`: its gradient."""
    out = torch.empty(x.shape, dtype=x.dtype)
    tokens, heads, size = x.shape
    library().rondel_rotate(
        x.data_ptr(), CODES[x.dtype], cosine.data_ptr(), sine.data_ptr(), CODES[cosine.dtype], out.data_ptr(), tokens,
        heads, size, x.stride(0), x.stride(1), int(back), torch.get_num_threads(),
    )  # fmt: skip
    return out


# -- attention ------------------------------------------------------------------------------------------


def takes_mask(q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> bool:
    """Whether `attend_masked` computes it."""
    return _is_softmax(rule) and q.dtype == k.dtype == v.dtype and has_kernels(q, k, v)


def takes_pools(q: Tensor, keys: Tensor, values: Tensor, rule: ScoreRule) -> bool:
    """Whether `attend_decode` computes it."""
    return (
        _is_softmax(rule)
        and rule.chosen is None
        and q.shape[-1] == keys.shape[-1] == values.shape[-1]
        and not q.shape[-1] % LANES
        and q.dtype == keys.dtype == values.dtype
        and keys.is_contiguous()
        and values.is_contiguous()
        and has_kernels(q, keys, values)
    )


def _is_softmax(rule: ScoreRule) -> bool:
    return rule.softcap is None and rule.slopes is None and rule.sinks is None


def attend_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """q [B,H,L,D], k and v [B,K,C,D], mask [B or 1,1,L,C] True where a query may look -> [B,H,L,D]."""
    batch, heads, length, size = q.shape
    assert mask.dtype == torch.bool and mask.shape[1:] == (1, length, k.shape[2]) and len(mask) in (1, batch)
    rows = [x.flatten(0, 1) for x in (q.reshape(batch, k.shape[1], -1, size), k, v)]
    out = MaskedAttention.apply(*rows, mask.contiguous(), scale, (heads * length if len(mask) > 1 else 0, length))
    return out.view(batch, heads, length, v.shape[-1])


class MaskedAttention(torch.autograd.Function):
    """q [N, R·L, D], k and v [N, C, D] of N = B·K key heads, mask [B or 1, L, C]. Kept: q, k, v and the weights."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, shape: tuple[int, int]) -> Tensor:
        weights = torch.bmm(q, k.transpose(1, 2))
        many, length = shape
        library().rondel_softmax(
            CODES[q.dtype], weights.data_ptr(), mask.data_ptr(), scale, weights.numel() // k.shape[1], k.shape[1],
            length, many, torch.get_num_threads(),
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, weights)
        ctx.scale = scale
        return torch.bmm(weights, v)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Any:
        q, k, v, weights = ctx.saved_tensors
        scores = torch.bmm(grad, v.transpose(1, 2))
        library().rondel_softmax_backward(
            CODES[q.dtype], weights.data_ptr(), scores.data_ptr(), ctx.scale, scores.numel() // k.shape[1],
            k.shape[1], torch.get_num_threads(),
        )  # fmt: skip
        dv = torch.bmm(weights.transpose(1, 2), grad)
        return torch.bmm(scores, k), torch.bmm(scores.transpose(1, 2), q), dv, None, None, None


class DecodeContexts(NamedTuple):
    """Slots of what each request sees, as in models/paged_layout.py: DecodeBatch."""

    own: Tensor  # [B,C]
    lengths: Tensor  # [B]
    prefix: Tensor | None  # [F,P]
    shared: Tensor | None  # [F]
    place: Tensor | None  # [B], family · members + number
    members: int  # of each family


def attend_decode(q: Tensor, keys: Tensor, values: Tensor, contexts: DecodeContexts, rule: ScoreRule) -> Tensor:
    """q [B,H,D] over pools [K,pages,D] -> [B,H,D]; all that a request sees of its context, in the order of its tokens,
    so that who shares a prefix with whom changes no bits.
    """
    q, (own, lengths, prefix, *family, members) = q.contiguous(), contexts
    out, heads = torch.empty_like(q), len(keys)
    places = [x if x is None else x.contiguous() for x in (own, lengths, prefix, *family)]
    library().rondel_decode(
        CODES[q.dtype], q.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr(),
        *(0 if x is None else x.data_ptr() for x in places), own.shape[1], 0 if prefix is None else prefix.shape[1],
        members, rule.window or 0, rule.chunk or 0, len(q), heads, q.shape[1] // heads, q.shape[2], keys.shape[1],
        rule.scale, torch.get_num_threads(),
    )  # fmt: skip
    return out


# -- products with packed weights -----------------------------------------------------------------------


def has_panels() -> bool:
    """Whether products with packed weights can go this way here: where the loops are and their bits are oneDNN's.
    Faster they are on CPUs with AVX2 alone.

    Each sum takes up to 1,024 products in their order, none of them rounded, and sums of what is longer are added. So
    do oneDNN's in version 3.12, in training, too: a row's bits are the same in engine and trainer, alone and in
    company. But for few rows oneDNN reads weights at half the speed of this memory,
    and bfloat16 ones as copies in fp32.
    """
    return _loaded is not None and _have_equal_bits()


def pack_panels(weights: list[Tensor]) -> Tensor:
    """Weights [O_i, I], of which all but the last have whole panels -> [panels, I, 16] in float32 or bfloat16."""
    weights = [w.detach().contiguous() for w in weights]
    counts, inside = [-(-len(w) // PANEL) for w in weights], weights[0].shape[1]
    panels = torch.empty(sum(counts), inside, PANEL, dtype=weights[0].dtype)
    for weight, part in zip(weights, panels.split(counts), strict=True):
        library().rondel_pack(
            CODES[weight.dtype], weight.data_ptr(), part.data_ptr(), inside, len(weight),
            torch.get_num_threads(),
        )  # fmt: skip
    return panels


def panel_product(x: Tensor, panels: Tensor, bias: Tensor | None, width: int) -> Tensor:
    """x [..., I], bias [width] in fp32 -> [..., width] in fp32."""
    inside, out = x.shape[-1], torch.empty(*x.shape[:-1], width, dtype=torch.float32)
    rows = apart(x.reshape(-1, inside))
    assert x.dtype == torch.float32 and panels.shape[1] == inside, (x.dtype, x.shape, panels.shape)
    library().rondel_product(
        CODES[panels.dtype], rows.data_ptr(), rows.stride(0), panels.data_ptr(), 0 if bias is None else bias.data_ptr(),
        out.data_ptr(), len(rows), inside, width, torch.get_num_threads(),
    )  # fmt: skip
    return out


@functools.cache
def _have_equal_bits() -> bool:
    """Whether oneDNN's products have these bits, which is a matter of its version."""
    generator = torch.Generator().manual_seed(0)
    for width, inside in PROOF:
        x, weight, bias = (
            torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32)
            for shape in ((PANEL, inside), (width, inside), (width,))
        )
        theirs = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        if not torch.equal(theirs, panel_product(x, pack_panels([weight]), bias, width)):
            return False
    return True


# -- products of words: an fp32 number, or two bfloat16 numbers of a row -----------------------------------


def packed_size(weights: list[Tensor]) -> int:
    """Numbers of their panels."""
    return -(-sum(-(-len(w) // HALF) for w in weights) // 2) * WIDTH * weights[0].shape[1]


def pack_words(weights: list[Tensor], *, in_turns: bool = False, room: Tensor | None = None) -> Tensor:
    """Weights [O_i, I] of one dtype, I even in bfloat16, of which all but the last have a multiple of 16 outputs ->
    [panels, I, 32] in fp32, [panels, I / 2, 32, 2] in bfloat16. `in_turns`: 16 outputs of each of two at a time.
    `room`: memory of `packed_size` numbers to lie in.
    """
    weights, dtype = [w.detach().contiguous() for w in weights], weights[0].dtype
    units, joined = [-(-len(w) // HALF) for w in weights], 4 // dtype.itemsize
    words = weights[0].shape[1] // joined
    room = torch.empty(packed_size(weights), dtype=dtype) if room is None else room
    panels = room.view(-1, words, WIDTH, *([joined] if joined > 1 else []))
    if sum(units) % 2 or len(weights[-1]) % HALF:
        panels[-1].zero_()
    for i, weight in enumerate(weights):
        first, stride = (i, len(weights)) if in_turns else (sum(units[:i]), 1)
        library().rondel_pack_words(
            weight.data_ptr(), panels.data_ptr(), words, len(weight), first, stride, torch.get_num_threads()
        )
    return panels


def draw_rows(logits: Tensor, temperatures: Sequence[float], uniforms: Sequence[float]) -> Tensor:
    """A token of each row of logits [B, V] in fp32: [3, B] float64 of tokens, log-probabilities and masses."""
    logits, warm = logits.contiguous(), torch.tensor(temperatures, dtype=torch.float32)
    noise, out = torch.tensor(uniforms, dtype=torch.float64), torch.empty(3, len(logits), dtype=torch.float64)
    assert len(warm) == len(noise) == len(logits) and logits.dtype == torch.float32
    library().rondel_draw(
        logits.data_ptr(), warm.data_ptr(), noise.data_ptr(), out.data_ptr(), *logits.shape, torch.get_num_threads()
    )
    return out


def whole_digest(raw: Tensor, inside: Tensor, across: Tensor) -> tuple[int, int] | None:
    """The two numbers of a tensor's digest, of its bytes and of the multipliers inside a row and across rows
    (models/names.py); None where the library cannot read them.
    """
    if _loaded is None or raw.device.type != "cpu" or raw.data_ptr() % 8:
        return None
    out = (ctypes.c_uint64 * 2)()
    library().rondel_digest(
        raw.data_ptr(), raw.numel(), inside.data_ptr(), across.data_ptr(), len(inside), ctypes.addressof(out),
        torch.get_num_threads(),
    )  # fmt: skip
    return out[0], out[1]


def hop_ns(count: int = 100) -> float:
    """Nanoseconds until one of two threads has a line of memory that the other has written, which is how far their cores
    are from each other; 0 where nothing can be told. On the thread that computes: a second pool would slow both.
    """
    return 0.0 if _loaded is None or torch.get_num_threads() < 2 else float(_loaded.rondel_hop(count))


def add_weight_gradient(main: Tensor, grad: Tensor, x: Tensor, *, fresh: bool = False) -> None:
    """main [O, I] += grad [N, O]ᵀ @ x [N, I], summed in fp32 and not rounded; `grad` and `x` both bfloat16 or fp32, of
    `grad` rows may lie apart. `fresh`: nothing is in `main` yet.
    """
    rows, width = grad.shape
    x, tiles = x.contiguous(), tile_room(rows, [width], grad.dtype)
    assert grad.stride(1) == 1 and main.is_contiguous() and main.dtype == torch.float32 and grad.dtype == x.dtype
    library().rondel_add_weight_gradient(
        CODES[x.dtype], grad.data_ptr(), grad.stride(0), x.data_ptr(), rows, width, x.shape[1], main.data_ptr(),
        int(fresh), tiles.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip


def tile_room(rows: int, widths: Sequence[int], dtype: torch.dtype) -> Tensor:
    """For the gradients [rows, width] of products whose weights' gradients are computed together."""
    return torch.empty(sum(library().rondel_tile_room(CODES[dtype], rows, width) for width in widths), dtype=dtype)


def pair_product(x: Tensor, panels: Tensor, bias: Tensor | None, width: int) -> Tensor:
    """x [..., I] in bfloat16, bias [width] in fp32 -> [..., width] in fp32; a row has the same bits in any company."""
    inside, out = x.shape[-1], torch.empty(*x.shape[:-1], width, dtype=torch.float32)
    rows = apart(x.reshape(-1, inside))
    assert x.dtype == torch.bfloat16 and panels.shape[1] * 2 == inside, (x.dtype, x.shape, panels.shape)
    library().rondel_pair_product(
        rows.data_ptr(), rows.stride(0), panels.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
        len(rows), inside, width, torch.get_num_threads(),
    )  # fmt: skip
    return out
