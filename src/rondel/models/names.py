"""Names and digests of weights. What leaves for another program has the names and shapes
of the family's checkpoints on Hugging Face.

    module       mlp.experts.gate_up_proj [E, 2I, H]            what the module computes with:
                 transformers stacks the experts of a mixture
    checkpoint   mlp.experts.0.gate_proj.weight [I, H] ...      what `save_pretrained` writes,
                 and what every other program reads

A tensor of the checkpoint is a view of one of the module's, so that none of them is copied to be named.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rondel.core.errors import ModelError
from rondel.core.types import Manifest, TensorInfo
from rondel.models.tensor_digest import tensor_digest

LORA = ".lora_"
_bases: WeakKeyDictionary[nn.Module, tuple[list[tuple[int, int]] | None, str]] = WeakKeyDictionary()
_pieces: WeakKeyDictionary[nn.Module, dict[str, tuple[TensorSlice, ...]]] = WeakKeyDictionary()
_loaded_in: WeakKeyDictionary[nn.Module, dict[str, torch.dtype]] = WeakKeyDictionary()


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
        named += _persistent_buffers(model)
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


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Persistent buffers, which a checkpoint holds too, in the dtype that they were loaded in."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                where = f"{prefix}.{name}" if prefix else name
                yield where, buffer.detach().to(_loaded_in.get(model, {}).get(where, buffer.dtype))


def remember_dtypes(model: nn.Module) -> None:
    """Before a model is computed with in another dtype: its buffers go on being published in that of now."""
    _loaded_in[model] = {name: buffer.dtype for name, buffer in _persistent_buffers(model)}


def published_tensors(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The module's `tensors`, gathered where they lie in shards, under the checkpoint's
    names; behind them its persistent buffers.
    """
    places = checkpoint_pieces(model)
    for name, tensor in chain(tensors, _persistent_buffers(model)):
        for piece in places.get(name, ()):
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


def base_digest(model: nn.Module) -> str:
    """One digest of the frozen weights under an adapter, "" where there is none: taken once,
    and again only when one of them was written.
    """
    if model in _bases and _bases[model][0] is None:
        return _bases[model][1]
    named = dict(model.named_parameters())
    frozen = {name.replace(".base_layer.", "."): p for name, p in named.items() if LORA not in name}
    if len(frozen) == len(named):
        return ""
    stamp = [(p.data_ptr(), p._version) for p in frozen.values()]
    if model not in _bases or _bases[model][0] != stamp:
        rows = "\n".join(sorted(f"{name}|{tuple(p.shape)}|{p.dtype}|{tensor_digest(p)}" for name, p in frozen.items()))
        _bases[model] = stamp, blake2b(rows.encode(), digest_size=16).hexdigest()
    return _bases[model][1]


def pin_digest(model: nn.Module) -> None:
    """The frozen weights will lie in shards, which nobody has whole any more: their digest stays what it is now."""
    _bases[model] = None, base_digest(model)


def is_finite(tensor: Tensor) -> Tensor:
    """[...] -> [...] bool: neither NaN nor infinity. torch has no isfinite for every float
    of 8 bits, and bfloat16 holds all of them.
    """
    return (tensor.to(torch.bfloat16) if tensor.is_floating_point() and tensor.itemsize == 1 else tensor).isfinite()


def tensor_info(name: str, tensor: Tensor) -> TensorInfo:
    return TensorInfo(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor_digest(tensor))


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
