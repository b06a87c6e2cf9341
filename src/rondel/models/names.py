"""Names and digests of weights. What leaves for another program has the names and shapes
of the family's checkpoints on Hugging Face.

    module       mlp.experts.gate_up_proj [E, 2I, H]            what the module computes with:
                 transformers stacks the experts of a mixture
    checkpoint   mlp.experts.0.gate_proj.weight [I, H] ...      what `save_pretrained` writes,
                 and what every other program reads

A tensor of the checkpoint is a view of one of the module's, so that none of them is copied to be named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rondel.core.errors import ModelError
from rondel.core.types import Manifest, TensorInfo
from rondel.models.cpu_kernels import whole_digest

_ROW = 1023  # words; odd, so that flipping the highest bit of every word of a row shows
_ROWS = 128  # at a time: 1 MB, which the second pass finds in the cache
_INSIDE, _ACROSS = 20261121, 20261122  # seeds of the multipliers of words in a row, and of rows
_odd: dict[tuple[str, int, int], Tensor] = {}
LORA = ".lora_"
TensorShape = tuple[tuple[int, ...], str]  # shape and dtype, as a manifest has them
_bases: WeakKeyDictionary[nn.Module, tuple[list[tuple[int, int]] | None, str]] = WeakKeyDictionary()
_pieces: WeakKeyDictionary[nn.Module, dict[str, tuple[TensorSlice, ...]]] = WeakKeyDictionary()
_encoded: WeakKeyDictionary[nn.Module, WeightEncoding] = WeakKeyDictionary()
_loaded_in: WeakKeyDictionary[nn.Module, dict[str, torch.dtype]] = WeakKeyDictionary()


class WeightEncoding(Protocol):
    """What models/encoded_weights.py does to weights on their way."""

    def publish(
        self,
        model: nn.Module,
        tensors: Iterable[tuple[str, Tensor]],
        *,
        checkpoint: bool,
    ) -> Iterator[tuple[str, Tensor]]: ...

    def open_arrival(
        self,
        model: nn.Module,
        asked: Collection[str],
        *,
        keep: bool,
        held: Mapping[str, Tensor],
        shapes: Mapping[str, TensorShape],
    ) -> Any: ...


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Where a tensor of the checkpoint lies in one of the module's, in elements."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    all: bool  # it is the whole of it

    def view(self, whole: Tensor) -> Tensor:
        if self.all:
            return whole
        assert whole.is_contiguous(), f"{self.name} is a part of a tensor that is not contiguous"
        return whole.as_strided(self.size, self.stride, whole.storage_offset() + self.offset)


class _Uncopied(TorchDispatchMode):
    """Operations give views where they would copy to be contiguous: it is the places that are asked for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.ops.aten.clone.default else func(*args, **(kwargs or {}))


def checkpoint_pieces(model: nn.Module) -> Mapping[str, tuple[TensorSlice, ...]]:
    """The checkpoint's tensors in each of the module's, parameters and persistent buffers, as
    `save_pretrained` of this family writes them.
    """
    if model not in _pieces:
        _pieces[model] = _find_pieces(model)
    return _pieces[model]


def _find_pieces(model: nn.Module) -> dict[str, tuple[TensorSlice, ...]]:
    named = [*named_weights(model)]
    adapted = any(LORA in name for name, _ in named)
    if not adapted:
        named += persistent_buffers(model)
    shapes = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in named}
    found: dict[str, Tensor] = shapes
    if hasattr(model, "save_pretrained") and not adapted:
        from transformers.core_model_loading import revert_weight_conversion

        with _Uncopied():
            found = revert_weight_conversion(cast(Any, model), dict(shapes))
    owner = {t.untyped_storage()._cdata: name for name, t in shapes.items()}
    placed: dict[str, list[TensorSlice]] = {name: [] for name in shapes}
    for name, t in found.items():
        if (of := owner.get(t.untyped_storage()._cdata)) is None:
            raise ModelError(
                f"{name}: checkpoints of this family ({type(model).__name__}) hold it in another form than the model "
                f"computes with, not as a part "
                'of one tensor. Weights of it cannot be sent under the checkpoint\'s names: use sync.kind = "ipc", or '
                'place.kind = "shared"'
            )
        same = (t.shape, t.stride(), t.storage_offset()) == (shapes[of].shape, shapes[of].stride(), 0)
        placed[of].append(TensorSlice(name, tuple(t.shape), t.stride(), int(t.storage_offset()), same))
    return {name: tuple(sorted(held, key=lambda piece: piece.offset)) for name, held in placed.items()}


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Persistent buffers, which a checkpoint holds too, in the dtype that they were loaded in."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                where = f"{prefix}.{name}" if prefix else name
                yield where, buffer.detach().to(_loaded_in.get(model, {}).get(where, buffer.dtype))


def remember_dtypes(model: nn.Module) -> None:
    """Before a model is computed with in another dtype: its buffers go on being published in that of now."""
    _loaded_in[model] = {name: buffer.dtype for name, buffer in persistent_buffers(model)}


def published_tensors(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The module's `tensors`, gathered where they lie in shards, under the checkpoint's
    names; behind them its persistent buffers.
    """
    for name, tensor in chain(tensors, persistent_buffers(model)):
        yield from checkpoint_views(model, name, tensor)


def checkpoint_views(model: nn.Module, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint's tensors in one of the module's, which has this name."""
    for piece in checkpoint_pieces(model).get(name, ()):
        yield piece.name, piece.view(tensor)


def tensor_slices(model: nn.Module, asked: Collection[str]) -> dict[str, tuple[str, TensorSlice]]:
    """Of each tensor of the checkpoint the module's tensor that holds it, and where; empty
    if `asked` are the module's own names.
    """
    if {name for name, _ in named_weights(model)} >= set(asked):
        return {}
    return {piece.name: (of, piece) for of, held in checkpoint_pieces(model).items() for piece in held}


def updatable_tensors(model: nn.Module, asked: Collection[str]) -> dict[str, Tensor]:
    """The tensors of a model that an update writes: under the module's own names if these
    are `asked`, else under the checkpoint's.
    """
    return dict(published_tensors(model, named_weights(model)) if tensor_slices(model, asked) else named_weights(model))


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(HF name, tensor) of everything a receiver needs; a tied tensor appears once, under its
    first name. Of an adapted model the adapter.
    """
    named = list(model.named_parameters())
    for name, parameter in [(n, p) for n, p in named if LORA in n] or named:
        yield published_name(name), parameter.detach()


def published_name(name: str) -> str:
    """Under which name a parameter travels and is stored: an adapter's has peft's, any other its own."""
    return f"base_model.model.{name.replace('.default.', '.')}" if LORA in name else name


def send_encoded(model: nn.Module, encoding: WeightEncoding) -> None:
    """From now on some of the model's parameters are published and received encoded."""
    _encoded[model] = encoding


def encoding_of(model: nn.Module) -> WeightEncoding | None:
    """How parameters of a model travel that do so encoded; None where all travel as they are."""
    return _encoded.get(model)


def base_digest(model: nn.Module, *, whole: bool = False) -> str:
    """One digest of the frozen weights under an adapter, "" where there is none: taken once,
    and again only when one of them was written. `whole`: the model is a base, whose adapters lie apart.
    """
    if model in _bases and _bases[model][0] is None:
        return _bases[model][1]
    named = dict(model.named_parameters())
    frozen = _frozen_weights(named)
    if len(frozen) == len(named) and not whole:
        return ""
    stamp = [(p.data_ptr(), p._version) for p in frozen.values()]
    if model not in _bases or _bases[model][0] != stamp:
        _bases[model] = stamp, _digest_weights(frozen, lambda name, p: p)
    return _bases[model][1]


def _frozen_weights(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {base_name(name): p for name, p in named.items() if LORA not in name}


def base_name(name: str) -> str:
    """The name that a parameter of an adapted model has in its base."""
    return name.replace(".base_layer.", ".")


def _digest_weights(weights: Mapping[str, Tensor], read: Callable[[str, Tensor], Tensor]) -> str:
    rows = [f"{name}|{tuple(p.shape)}|{p.dtype}|{tensor_digest(read(name, p))}" for name, p in weights.items()]
    return blake2b("\n".join(sorted(rows)).encode(), digest_size=16).hexdigest()


def pin_digest(model: nn.Module, read: Callable[[str, Tensor], Tensor] | None = None) -> None:
    """The frozen weights will lie in shards, which nobody has whole any more: their digest stays what it is now.
    `read`: gives those that lie on "meta", one at a time, of a name and what has its shape and dtype.
    """
    if read is None:
        _bases[model] = None, base_digest(model)
        return
    frozen = _frozen_weights(dict(model.named_parameters()))
    _bases[model] = None, _digest_weights(frozen, lambda name, p: read(name, p) if p.is_meta else p)


def forget_pieces(model: nn.Module) -> None:
    """What travels and is stored of this model is another now: an adapter was put on it."""
    _pieces.pop(model, None)


def tensor_digest(tensor: Tensor) -> str:
    """A fast fingerprint of the bits, wherever they live. A check against accidents, not adversaries.

    8-byte words w[r, c] of the tensor in rows of 1023
        rows      R[r] = sum_c odd_c w[r, c]       columns   C[c] = sum_r w[r, c]       modulo 2^64
        digest    hash over r of R beside hash over c of C

    One or two changed words change it: in two columns both column sums move; in one column two rows move, each by an
    odd multiple.
    """
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    inside = _hash_multipliers(raw.device, _ROW, _INSIDE)
    across = _hash_multipliers(raw.device, 1 + raw.numel() // 8 // _ROW, _ACROSS)
    if found := whole_digest(raw, inside, across):
        return _as_text(*found)
    sums = DigestSums(raw.numel(), device=raw.device)
    sums.add_bytes(0, raw)
    return sums.digest()


class DigestSums:
    """R, C and the bytes behind the last word of one tensor of `size` bytes, so far as they were added: also from
    pieces that nobody has together. R and C are sums over words and a word is a sum over its bytes, so pieces that have
    every byte once add up to the digest of the whole, bit for bit.

    values  all of them in one vector of int64, to be added to those of other pieces: [tail, the last and incomplete
            row, whole rows ..., columns ...]
    """

    def __init__(self, size: int, *, device: torch.device, values: Tensor | None = None) -> None:
        self.size, self.words = size, size // 8
        self.full = self.words // _ROW  # whole rows
        length = digest_length(size)
        self.values = torch.zeros(length, dtype=torch.int64, device=device) if values is None else values
        assert len(self.values) == length, (len(self.values), length)
        self._rows, self._columns = self.values[1 : 2 + self.full], self.values[2 + self.full :]
        self._inside = _hash_multipliers(self.values.device, _ROW, _INSIDE)

    def add_bytes(self, at: int, raw: Tensor) -> None:
        """uint8 [n], which are bytes [at, at + n) of the tensor."""
        end = self.words * 8
        if (behind := at + len(raw) - end) > 0:
            tail = raw[len(raw) - min(behind, len(raw)) :]
            shift = 8 * (max(at, end) - end)
            self.values[0] += int.from_bytes(bytes(tail.tolist()), "little") << shift
            raw = raw[: len(raw) - len(tail)]
        if not len(raw):
            return
        before, after = at % 8, -(at + len(raw)) % 8
        if before or after:
            raw = torch.cat([raw.new_zeros(before), raw, raw.new_zeros(after)])
        elif raw.storage_offset() % 8:
            raw = raw.clone()
        self._add_words((at - before) // 8, raw.view(torch.int64))

    def add_box(self, shape: tuple[int, ...], start: tuple[int, ...], box: Tensor) -> None:
        """A box of the tensor, which has this shape, from `start` on; every number of it once, in any pieces."""
        if not box.numel():
            return
        inner, width = shape[1:], box.element_size()
        row = math.prod(inner) * width
        if tuple(box.shape[1:]) == inner:
            return self.add_bytes((start[0] if shape else 0) * row, box.contiguous().view(-1).view(torch.uint8))
        each = max(1, _ROWS * _ROW * 8 // row)  # whole rows of the tensor with nothing but the box in them
        for first in range(0, len(box), each):
            some = box[first : first + each]
            around = box.new_zeros((len(some), *inner))
            place = around
            for dim in range(1, box.ndim):
                place = place.narrow(dim, start[dim], box.shape[dim])
            place.copy_(some)
            self.add_bytes((start[0] + first) * row, around.view(-1).view(torch.uint8))

    def _add_words(self, at: int, words: Tensor) -> None:
        first = at % _ROW
        if first:
            n = min(_ROW - first, len(words))
            self._add_part_row(at // _ROW, first, words[:n])
            at, words = at + n, words[n:]
        row, count = at // _ROW, len(words) // _ROW
        for some in words[: count * _ROW].view(count, _ROW).split(_ROWS) if count else ():
            self._rows[1 + row : 1 + row + len(some)] += _row_products(some, self._inside)
            self._columns += some.sum(0)
            row += len(some)
        if len(rest := words[count * _ROW :]):
            self._add_part_row(row, 0, rest)

    def _add_part_row(self, row: int, column: int, words: Tensor) -> None:
        self._rows[0 if row == self.full else 1 + row] += (words * self._inside[column : column + len(words)]).sum()
        self._columns[column : column + len(words)] += words

    def digest(self) -> str:
        across = _hash_words(self._rows, _hash_multipliers(self.values.device, len(self._rows), _ACROSS))
        rows, columns, tail = torch.stack((across, _hash_words(self._columns, self._inside), self.values[0])).tolist()
        return _as_text(rows + tail * 0x9E3779B97F4A7C15 + self.size, columns)


def _as_text(rows: int, columns: int) -> str:
    return f"{rows & (2**64 - 1):016x}{columns & (2**64 - 1):016x}"


def digest_length(size: int) -> int:
    """How many numbers the sums of a tensor of `size` bytes are: some thousandth of its words, and the columns."""
    words = size // 8
    return 2 + words // _ROW + min(words, _ROW)


def _hash_multipliers(device: torch.device, n: int, seed: int) -> Tensor:
    key = (str(device), n, seed)
    if key not in _odd:
        generator = torch.Generator().manual_seed(seed)
        _odd[key] = (torch.randint(-(2**62), 2**62, (n,), generator=generator) | 1).to(device)
    return _odd[key]


def _hash_words(words: Tensor, odd: Tensor) -> Tensor:
    """sum_i odd_i (w_i xor w_i >> 29) modulo 2^64.

    A product carries only upwards, so two flipped signs (bit 63) would cancel; the fold
    copies the high bits down. 29 and not 32, because the two floats of a word may change alike.
    """
    return ((words ^ (words >> 29 & (1 << 35) - 1)) * odd[: len(words)]).sum()


def _row_products(rows: Tensor, odd: Tensor) -> Tensor:
    """sum_i odd_i w_ri of every row r, modulo 2^64. A GPU has no product of integer matrices."""
    return torch.mv(rows, odd) if rows.device.type == "cpu" else (rows * odd).sum(1)


def is_finite(tensor: Tensor) -> Tensor:
    """[...] -> [...] bool: neither NaN nor infinity. torch has no isfinite for every float
    of 8 bits, and bfloat16 holds all of them.
    """
    return (tensor.to(torch.bfloat16) if tensor.is_floating_point() and tensor.itemsize == 1 else tensor).isfinite()


def refuse_weights_not_finite(name: str, weights: Iterable[tuple[str, Tensor]]) -> None:
    """ModelError that names the first weight with NaN or infinity: every answer that meets it is lost."""
    for key, weight in weights:
        if not weight.is_floating_point() or not weight.numel():
            continue
        ends = torch.stack(weight.aminmax()) if weight.itemsize > 1 else weight  # one pass, and NaN comes through
        if not bool(is_finite(ends).all()):
            finite = is_finite(weight)
            raise ModelError(
                f"'{name}': {int((~finite).sum())} of {weight.numel()} numbers of {key} are not finite. Its file is "
                "damaged or its training diverged: fetch it again, or take an earlier checkpoint"
            )


def shape_of(tensor: Tensor) -> TensorShape:
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def tensor_info(name: str, tensor: Tensor) -> TensorInfo:
    return TensorInfo(name, *shape_of(tensor), tensor_digest(tensor))


def describe_tensors(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[TensorInfo, Tensor]]:
    """Each tensor with its name, shape, dtype and digest, one at a time: a gathered
    tensor can go when its turn is over.
    """
    for name, tensor in tensors:
        yield tensor_info(name, tensor), tensor


def build_manifest(model: nn.Module, version: int, asked: Collection[str] = ()) -> Manifest:
    """Every tensor of `model` that travels, with shape, dtype and digest, under the names of
    `served`; of those under an adapter one digest.
    """
    return Manifest(
        version, tuple(row for row, _ in describe_tensors(updatable_tensors(model, asked).items())), base_digest(model)
    )
