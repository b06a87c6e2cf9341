"""Linear layers on a CPU, through oneDNN: packed weights for serving, the same bits in training.

oneDNN reaches twice MKL's speed in fp32 where MKL does not know the processor, its
packed weights save the reordering of a weight at every call, and a row's result does not
depend on how many rows there are (`_in_company`), which is what aligned numerics need.

    grad mode off    PackedLinear: weights that read the same input (q, k, v; gate, up) lie packed
                     below each other where their widths are multiples of 16: one product
    grad mode on     product: fp32 through oneDNN forward and backward; bf16 gets there by torch's own way
    bf16 on a CPU    without bf16 instructions: the fp32 product of the same numbers, rounded to bf16, which is what
                     such instructions compute; oneDNN's emulation takes five times as long
    AVX2 alone       packed products go by a loop of our own with oneDNN's bits (models/cpu_kernels.py: has_panels)

A packed copy notices when its weights change: before every use it compares their storage
and version counter with what it packed. Who writes them where torch does not count
(its fused optimizers, another process in
shared memory) calls `weights_changed`; the trainer does so at every step, the engine at every commit.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rondel.models.cpu_kernels import (
    add_gradient,
    add_weight_gradient,
    has_kernels,
    has_panels,
    join_halves,
    library,
    pack_panels,
    pack_words,
    pair_product,
    panel_product,
)
from rondel.models.main_grad import Stamp, main_grad, stamp_of
from rondel.models.processor import HALVES, has_avx2_alone, is_widened, knows_mkl, multiplies_in_vectors
from rondel.models.torch_library import LIBRARY

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
ROWS = 8192  # of a vocabulary's gradient that are computed at a time: 19 MB at D = 576
BLOCK = 64  # rows of each product under `equal_blocks`
RUN = 256  # tokens whose products are one sum in the gradient of a weight
# of a product that one kernel of oneDNN computes on AVX2; those of a narrower rest have other bits (3.10 in fp32, of 4 or
# more rows), and weights that lie below each other would move the rest
COLUMNS = 16
# numbers of rows that `_rows_alike` tries, for oneDNN compiles a kernel for each, a millisecond in every process: all
# small ones, so every rest behind kernels of 6, 8 and 16 rows, then multiples of these and of 32, and some rests
PROBED = (*range(2, 19), 24, 30, 32, 36, 48, 64, 65, 96, 97, 109, 119)
PANELS, PAIRS, ONEDNN = "panels", "pairs", "oneDNN"  # how weights are packed: models/cpu_kernels.py has the first two
SPARE = 4  # packing doubles the memory of the weights: only where so many times as much is available


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., I] @ weight [O, I]^T + bias [O] -> [..., O], differentiable; in the dtype of the weight where that has 16
    bits (models/fp32_sums.py).
    """
    x = as_factor(x, weight)
    if is_tracing():
        return torch.ops.rondel.product(x, weight, bias)
    if not _is_packable(weight) or x.dtype != weight.dtype:
        return F.linear(x, weight, bias)
    if weight.dtype != torch.float32 and not is_widened(weight.dtype):
        return _in_company(x, lambda rows: F.linear(rows, weight, bias))
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return LinearProduct.apply(x, weight, bias)
    return _mkldnn_linear(x, weight, bias)


def as_factor(x: Tensor, weight: Tensor) -> Tensor:
    """fp32 sums are rounded to 16 bits where they meet a weight of 16 bits."""
    return x.to(weight.dtype) if x.dtype == torch.float32 and weight.dtype in HALVES else x


def fp32_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, I] @ weight [O, I]^T + bias [O] -> [N, O] in fp32, not differentiable: of 16-bit factors, too.

    A GPU sums and gives fp32. oneDNN sums in fp32 and gives what it was given; a second product gives what the first
    one rounded away, r = h Wᵀ - round(h Wᵀ) before its own rounding, so that 16 of the 24 bits are right.
    """
    x = as_factor(x, weight)
    if x.dtype == torch.float32 or x.dtype != weight.dtype:
        return product(x, weight, bias).float()
    if x.is_cuda and type(weight) in (nn.Parameter, Tensor):
        out = torch.mm(x, weight.t(), out_dtype=torch.float32)
        return out if bias is None else out.add_(bias)
    if is_widened(x.dtype) or not _is_packable(weight):
        parts = [
            product(x.float(), weight[first : first + ROWS].float()) for first in range(0, len(weight), ROWS)
        ]  # a part of the weight in fp32 at a time
        out = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
        return out if bias is None else out.add_(bias)
    return _fp32_mkldnn_linear(x, weight, bias)


def _fp32_mkldnn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    def both(rows: Tensor) -> Tensor:
        high = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
        return join_halves(high, torch.ops.mkldnn._linear_pointwise.binary(rows, high, weight, bias, "sub"))

    return _in_company(x, both)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a [..., N] @ b [N, P] -> [..., P], not differentiable: `product` in the notation of gradients."""
    if not _is_faster_by_mkl(a, b):
        return product(a, b.t())
    if len(b) <= ROWS or a.dtype == b.dtype == torch.float32:
        return torch.matmul(a.float(), b.float()).to(b.dtype)
    flat = a.reshape(-1, len(b))
    out = torch.zeros(len(flat), b.shape[1], dtype=torch.float32)
    for first in range(0, len(b), ROWS):  # a part of a vocabulary in fp32 at a time
        part = slice(first, first + ROWS)
        out.addmm_(flat[:, part].float(), b[part].float())
    return out.view(*a.shape[:-1], b.shape[1]).to(b.dtype)


def _is_faster_by_mkl(a: Tensor, b: Tensor) -> bool:
    """Whether products of a gradient go to MKL: on CPUs with AVX2 alone, where oneDNN takes 1.1 to 1.5 times as long.
    The products of values do not: their bits are those of the engine's.
    """
    fp32 = all(type(x) in (nn.Parameter, Tensor) and (x.dtype == torch.float32 or is_widened(x.dtype)) for x in (a, b))
    return fp32 and a.is_cpu and has_avx2_alone() and knows_mkl()


def add_product(main: Tensor, a: Tensor, b: Tensor, *, fresh: bool = False) -> None:
    """main [V, D] += a [M, V]ᵀ @ b [M, D]; on a CPU a part of V at a time. `fresh`: nothing is in `main` yet."""
    by_tiles = _adds_by_tiles(main, a, b) and not _is_faster_by_mkl(a, b)
    if fresh and not by_tiles:
        main.zero_()
    if a.is_cuda and a.dtype in HALVES:  # summed in fp32 on the way out of the product
        torch.addmm(main, a.t(), b, out_dtype=torch.float32, out=main)
        return
    for first in range(0, len(main), ROWS):
        part, own = main[first : first + ROWS], a[:, first : first + ROWS].t()
        if by_tiles:
            add_weight_gradient(part, own.t(), b, fresh=fresh)
        elif _is_faster_by_mkl(a, b):
            part.addmm_(own.float(), b.float())
        else:
            add_gradient(part, product(own, b.t()))


def _adds_by_tiles(main: Tensor, a: Tensor, b: Tensor) -> bool:
    """Whether `add_product` goes by tiles: oneDNN takes 1.2 to 1.3 times as long for a vocabulary in fp32, and gives a
    product in bfloat16 rounded, which is to be added then.
    """
    plain = _is_plain_on_cpu(main, a, b) and main.dtype == torch.float32
    fits = plain and a.dtype == b.dtype in (torch.float32, torch.bfloat16)
    return fits and main.is_contiguous() and a.stride(1) == 1 and has_tiles(a.dtype) and has_kernels(a, b)


class LinearProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None):
        ctx.save_for_backward(x, weight)
        return as_base_tensor(_mkldnn_linear(x, weight, bias))

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        flat = grad.flatten(0, -2)
        return (
            matmul(flat, weight).view_as(x) if wants_x else None,
            weight_gradient(weight, flat, x.flatten(0, -2)) if wants_weight else None,
            flat.sum(0) if wants_bias else None,
        )


def weight_gradient(weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
    """grad [N, O]ᵀ @ x [N, I]: added to the optimizer's accumulator in fp32 where there is one (-> None), else
    returned. On a CPU no sum in fp32 is longer than some hundred products: rounding grows with the root of its length.
    """
    main = main_grad(weight)
    if main is None:
        if not _is_plain_on_cpu(grad, x) or grad.dtype != torch.float32 or x.dtype != torch.float32:
            return matmul(grad.t(), x)
        total = grad.new_zeros(grad.shape[1], x.shape[1])
        _add_weight_gradient(total, grad, x)
        return total
    _add_weight_gradient(main, grad.float(), x.float())
    return None


def _add_weight_gradient(total: Tensor, grad: Tensor, x: Tensor) -> None:
    if knows_mkl():
        total.addmm_(grad.t(), x)  # three quarters of the time of the product and the sum
    elif _adds_by_tiles(total, grad, x):
        add_weight_gradient(total, grad, x)
    else:  # oneDNN adds up a thousand products one after the other
        for own, rows in zip(grad.split(RUN), x.split(RUN)):
            total.add_(_mkldnn_linear(own.t(), rows.t(), None))


def _is_plain_on_cpu(*tensors: Tensor) -> bool:
    return all(type(x) in (nn.Parameter, Tensor) and x.is_cpu for x in tensors)


def as_base_tensor(out: Tensor) -> Tensor:
    """The same tensor, not as a view: torch forbids a model to write in place (OLMo clamps q, k
    and v) into a view that a Function returns.
    """
    return torch.ops.aten._unsafe_view(out, out.shape)


def _mkldnn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if is_widened(x.dtype):
        weight, bias = weight.float(), None if bias is None else bias.float()
        return _mkldnn_linear(x.float(), weight, bias).to(x.dtype)
    return _in_company(x, lambda rows: torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], ""))


def _in_company(x: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
    """oneDNN takes another kernel for a single row, and some of its versions for the last few: more are computed, so
    that the bits of a row do not depend on who is beside it. Under `equal_blocks` every product has as many rows.
    """
    rows, block = x.numel() // x.shape[-1], getattr(_company, "rows", 0)
    alike = _rows_alike() if x.dtype == torch.float32 else 1
    short = (-rows % block) if block else max(-rows % alike, 2 - rows)
    if not rows or not (short or block):
        return product(x)
    flat = x.reshape(rows, -1)
    if short:
        flat = torch.cat([flat, flat[:1].expand(short, -1)])
    out = product(flat) if not block else torch.cat([product(part) for part in flat.split(block)])
    return out[:rows].view(*x.shape[:-1], -1)


@functools.cache
def _rows_alike() -> int:
    """Of how many rows a product in fp32 has a multiple for each row to have the bits that it has among others, from
    two rows on. oneDNN 3.10 on AVX2 computes 6 rows at a time, and a rest of up to 3 by another kernel;
    3.12 needs none.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 48, generator=generator, device="cpu", dtype=torch.float32) for n in (120, 80))
    whole = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")

    def alike(rows: int) -> bool:
        return torch.equal(torch.ops.mkldnn._linear_pointwise(x[:rows], weight, None, "none", [], ""), whole[:rows])

    return next((n for n in (1, 6, 8, 16, 32) if all(alike(rows) for rows in PROBED if rows % n == 0)), BLOCK)


@contextmanager
def equal_blocks(dtype: torch.dtype) -> Iterator[None]:
    """While it holds, a row of a product has the same bits however many are beside it: for aligned numerics. oneDNN's
    bfloat16 takes other kernels for few rows and for many, at sizes that differ by matrix, so each product has `BLOCK`.
    """
    outer = getattr(_company, "rows", 0), is_compared()
    _company.rows = BLOCK if dtype == torch.bfloat16 and not is_widened(dtype) else outer[0]
    _company.compared = True
    try:
        yield
    finally:
        _company.rows, _company.compared = outer


def is_compared() -> bool:
    """Whether this is inside `equal_blocks`, so that bits are compared with those of others."""
    return getattr(_company, "compared", False)


@contextmanager
def modules_alone() -> Iterator[None]:
    """Inside, every layer is computed by its modules, and none in halves (models/layer_halves.py)."""
    outer, _company.alone = is_alone(), True
    try:
        yield
    finally:
        _company.alone = outer


def is_alone() -> bool:
    """Whether this is inside `modules_alone`."""
    return getattr(_company, "alone", False)


@contextmanager
def without_packing() -> Iterator[None]:
    """Inside, nothing is packed that is not: for one short pass over weights that no other pass reads packed."""
    outer, _company.packs = getattr(_company, "packs", True), False
    try:
        yield
    finally:
        _company.packs = outer


class PackedLinear:
    """Weights [O_i, I] that read the same input, as one packed product whenever nobody wants gradients.
    `sums`: its results are wanted in fp32, and no pass with gradients has other bits beside them.
    """

    def __init__(self, *, sums: bool = False) -> None:
        self.stamp: list[Stamp] = []  # storage and counters of the weights and biases that are packed
        self._packed: tuple[Tensor, Tensor | None, list[int]] | None = None
        self._size, self._sums, self._form = 0, sums, ""

    def can_pack(self, x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> bool:
        """Whether packing is possible, changes no bits and is worth its memory; what is packed is then up to date."""
        if torch.is_grad_enabled() or as_factor(x, weights[0]).dtype != weights[0].dtype:
            return False
        if len(weights) > 1 and any(len(w) % COLUMNS for w in weights):
            return False
        stamp = (
            [stamp_of(w) for w in weights] + [stamp_of(b) for b in biases]
            if all(_is_packable(w) for w in weights)
            else []
        )
        moved = self._packed is not None and self._form != self._form_of(weights[0])
        if (stamp != self.stamp or moved) and not getattr(_company, "packs", True):
            return False
        if stamp != self.stamp or moved:
            if stamp and (self._packed is not None or has_spare_memory(weights)):
                self._pack_weights(weights, biases)
                self.stamp = stamp
            else:
                self.drop_packed()
        return self._packed is not None

    def _pack_weights(self, weights: list[Tensor], biases: list[Tensor]) -> None:
        bias = torch.cat([b.detach() for b in biases]) if biases else None
        self._form = self._form_of(weights[0])
        if is_widened(weights[0].dtype):
            bias = None if bias is None else bias.float()
        held = [w.detach() if self._form == PAIRS else w.detach().to(_packed_dtype(w.dtype)) for w in weights]
        if self._form == PAIRS:
            packed, bias = pack_words(held), None if bias is None else bias.float()
        elif self._form == PANELS:
            packed = pack_panels(held)
        else:
            packed = torch.ops.mkldnn._reorder_linear_weight(torch.cat(held) if len(held) > 1 else held[0], 64)
        self._size = packed.numel() * held[0].element_size()
        self._packed = packed, bias, [len(w) for w in weights]

    def _form_of(self, weight: Tensor) -> str:
        """How a weight is packed here. Where bits are compared with those of ranks that pack nothing,
        oneDNN has both."""
        if (
            self._sums
            and not is_compared()
            and weight.dtype == torch.bfloat16
            and not weight.shape[1] % 2
            and has_tiles(weight.dtype)
        ):
            return PAIRS
        return PANELS if _in_panels(weight.dtype) else ONEDNN

    def __call__(self, x: Tensor) -> list[Tensor]:
        """After `carries`: x [..., I] -> [..., O_i] for each of the weights."""
        assert self._packed is not None
        out, sizes = self.forward_joined(x), self._packed[2]
        return [part.contiguous() for part in out.split(sizes, -1)] if len(sizes) > 1 else [out]

    def forward_joined(self, x: Tensor) -> Tensor:
        """The same as one tensor [..., sum of O_i]."""
        return self._multiply(x.float()).to(x.dtype) if is_widened(x.dtype) else self._multiply(x)

    def fp32_product(self, x: Tensor) -> Tensor:
        """`fp32_product` with what is packed."""
        assert self._packed is not None
        packed, bias, sizes = self._packed
        if self._form == PAIRS:
            return pair_product(x.to(torch.bfloat16), packed, bias, sum(sizes))
        if is_widened(x.dtype) or x.dtype == torch.float32:
            return self._multiply(x.float())
        return _fp32_mkldnn_linear(x, packed, bias)

    def _multiply(self, x: Tensor) -> Tensor:
        assert self._packed is not None
        packed, bias, sizes = self._packed
        if self._form == PAIRS:
            return self.fp32_product(x).to(x.dtype)
        return panel_product(x, packed, bias, sum(sizes)) if self._form == PANELS else _mkldnn_linear(x, packed, bias)

    @property
    def packed_bytes(self) -> int:
        """Of the copies; as a packed weight has no storage that could be asked, those of what was packed."""
        return self._size if self._packed is not None else 0

    @property
    def is_trained(self) -> bool:
        """Whether an optimizer writes what is packed; the frozen base of an adapter stays as it is."""
        return any(changes >= 0 for _, _, changes in self.stamp)

    def drop_packed(self) -> None:
        """Until the next use."""
        self.stamp, self._packed = [], None

    def __deepcopy__(self, memo: Any) -> PackedLinear:
        return PackedLinear(sums=self._sums)  # what is packed belongs to the weights it was packed from


class UnpackedLinear(PackedLinear):
    """Of weights that come and go: nothing is packed, since a copy would outlive them."""

    def can_pack(self, x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> bool:
        return False

    def __deepcopy__(self, memo: Any) -> UnpackedLinear:
        return self


class _Members:
    """The layers of one stack: whoever is called first computes all, the others find
    their part if they ask with the same input.
    """

    def __init__(self, layers: list[nn.Linear]) -> None:
        self.layers, self.stack = layers, PackedLinear()
        self._asked: Tensor | None = None
        self._parts: dict[int, Tensor] = {}

    def forward(self, i: int, x: Tensor) -> Tensor:
        layer, traced = self.layers[i], is_tracing()
        if (
            x is self._asked
            and i in self._parts
            and not torch.is_grad_enabled()
            and (traced or self.stack.stamp[i : i + 1] == [stamp_of(layer.weight)])
        ):
            part = self._parts.pop(i)
            if not self._parts:
                self._asked = None
            return part
        factor = as_factor(x, layer.weight)
        if traced:
            sizes = [la.out_features for la in self.layers]
            parts = list(call_joint_product(self, factor, sum(sizes)).split(sizes, -1))
        elif self.stack.can_pack(factor, *self._member_tensors()):
            parts = self.stack(factor)
        else:
            return product(factor, layer.weight, layer.bias)
        if len(parts) > 1:
            self._asked, self._parts = x, {j: part for j, part in enumerate(parts) if j != i}
        return parts[i]

    def forward_joined(self, x: Tensor) -> Tensor:
        """x [..., I] -> [..., sum of O_i], for a graph."""
        if self.stack.can_pack(x, *self._member_tensors()):
            return self.stack.forward_joined(x)
        return torch.cat([product(x, la.weight, la.bias) for la in self.layers], -1)

    def _member_tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        return [la.weight for la in self.layers], [la.bias for la in self.layers] if self.layers[
            0
        ].bias is not None else []


@contextmanager
def outside_graph() -> Iterator[None]:
    """While a graph is traced, a linear layer is one operation, which finds its weights when the graph runs."""
    _tracing.on = True
    try:
        yield
    finally:
        _tracing.on = False


def is_tracing() -> bool:
    return getattr(_tracing, "on", False)


class JointProduct(Protocol):
    """A product, or several of one input, that finds its weights itself."""

    def forward_joined(self, x: Tensor) -> Tensor: ...


def call_joint_product(owner: JointProduct, x: Tensor, size: int) -> Tensor:
    """`owner.together(x)`, [..., I] -> [..., size], as one operation of a graph.

    It is named there by a number. Counted, so that it is the same in the next process,
    which then finds the compiled graph on disk.
    """
    number = next(_numbers)
    _traced[number] = owner
    return torch.ops.rondel.together(x, number, size)


_tracing = threading.local()
_company = threading.local()
_numbers = itertools.count()
_traced: WeakValueDictionary[int, JointProduct] = WeakValueDictionary()
LIBRARY.define("product(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
LIBRARY.define("together(Tensor x, int owner, int size) -> Tensor")
LIBRARY.impl("product", product, "CPU")
LIBRARY.impl("together", lambda x, owner, size: _traced[owner].forward_joined(x), "CPU")
torch.library.register_fake(
    "rondel::product", lambda x, weight, bias: x.new_empty(*x.shape[:-1], weight.shape[0]), lib=LIBRARY
)
torch.library.register_fake("rondel::together", lambda x, owner, size: x.new_empty(*x.shape[:-1], size), lib=LIBRARY)


def install_cpu_linear(model: nn.Module) -> None:
    """Every nn.Linear of a model on a CPU goes this way; its parameters stay where they are."""
    seen: set[int] = set()
    for module in model.modules():
        for names in TOGETHER:
            layers = [getattr(module, name, None) for name in names]
            linears = [layer for layer in layers if type(layer) is nn.Linear]
            if len(linears) == len(names) and len({(layer.in_features, layer.bias is None) for layer in linears}) == 1:
                _pack_layers(linears, seen)
    for module in model.modules():
        if type(module) is nn.Linear and id(module) not in seen:
            _pack_layers([module], seen)
        elif type(module) is Conv1D:
            setattr(module, "forward", functools.partial(_transposed_linear, module))  # noqa: B010


def unpack_linears(model: nn.Module) -> None:
    """Undo the packing, keep the products."""
    for module in model.modules():
        if isinstance(own := module.__dict__.get("forward"), functools.partial) and isinstance(
            members := getattr(own.func, "__self__", None), _Members
        ):
            members.stack = UnpackedLinear()


class PackedCopy(Protocol):
    """Weights that are packed for products."""

    @property
    def is_trained(self) -> bool: ...

    @property
    def packed_bytes(self) -> int: ...

    def drop_packed(self) -> None: ...


def has_packed_layers(model: nn.Module) -> bool:
    """Whether an engine computes it with packed layers, and needs no packed products of its modules."""
    layers = model.__dict__.get("packed_layers")
    return layers is not None and bool(layers.may_fit)


def packed_linears(model: nn.Module) -> list[PackedCopy]:
    """All packed products of a model, and its packed layers (models/packed_layers.py)."""
    found: dict[int, PackedCopy] = {}
    if (layers := model.__dict__.get("packed_layers")) is not None:
        found[id(layers)] = layers
    for module in model.modules():
        if isinstance(own := module.__dict__.get("forward"), functools.partial):
            members = getattr(own.func, "__self__", None)
            if isinstance(members, _Members):
                found[id(members)] = members.stack
    return list(found.values())


def _transposed_linear(layer: Conv1D, x: Tensor) -> Tensor:
    """gpt2's linear layer: its weight lies [I, O]."""
    return product(x, layer.weight.t(), layer.bias)


def _pack_layers(layers: list[nn.Linear], seen: set[int]) -> None:
    members = _Members(layers)
    for i, layer in enumerate(layers):
        setattr(layer, "forward", functools.partial(members.forward, i))  # noqa: B010  # an instance may have its own
        seen.add(id(layer))


def is_installed(layer: nn.Module) -> bool:
    """Whether a layer is an nn.Linear whose forward pass is the one of this module."""
    own = layer.__dict__.get("forward")
    members = getattr(getattr(own, "func", None), "__self__", None)
    return type(layer) is nn.Linear and isinstance(members, _Members) and any(one is layer for one in members.layers)


def _is_packable(weight: Tensor) -> bool:
    return weight.is_cpu and type(weight) in (nn.Parameter, Tensor) and _available(weight.dtype)


@functools.cache
def _available(dtype: torch.dtype) -> bool:
    """Whether this build and this processor have oneDNN products of the dtype, asked by making one."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16) or not torch.backends.mkldnn.is_available():
        return False
    if is_widened(dtype):
        return _available(torch.float32)
    x, w = torch.linspace(-1, 1, 48).view(3, 16).to(dtype), torch.linspace(-1, 1, 80).view(5, 16).to(dtype)
    try:
        with torch.no_grad():
            ours = _mkldnn_linear(x, torch.ops.mkldnn._reorder_linear_weight(w, 64), None)
    except (AttributeError, RuntimeError):
        return False
    return torch.allclose(ours.float(), F.linear(x.float(), w.float()), atol=0.05 if dtype == torch.bfloat16 else 1e-5)


def _in_panels(dtype: torch.dtype) -> bool:
    """Whether weights are packed as models/cpu_kernels.py has them, and not as oneDNN does."""
    return (dtype == torch.float32 or is_widened(dtype)) and has_avx2_alone() and has_panels()


def has_tiles(dtype: torch.dtype) -> bool:
    """Whether products by the tiles of cpu_tiles.h are the faster ones here."""
    return library() is not None and multiplies_in_vectors(dtype)


def _packed_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of packed weights: panels of bfloat16 are multiplied in fp32 as they are."""
    return torch.float32 if is_widened(dtype) and not (dtype == torch.bfloat16 and _in_panels(dtype)) else dtype


def has_spare_memory(weights: list[Tensor]) -> bool:
    """Whether a packed copy of these is worth its memory."""
    need = sum(w.numel() * _packed_dtype(w.dtype).itemsize for w in weights)
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") > SPARE * need
    except (ValueError, OSError):  # not Linux
        return True
