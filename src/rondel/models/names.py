"""Names and digests of weights: Hugging Face names are the lingua franca of every path that weights travel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rondel.words.types import Manifest, TensorInfo

_ROW = 1023  # words; odd, so that flipping the highest bit of every word of a row shows
_ROWS = 128  # at a time: 1 MB, which the second pass finds in the cache
_INSIDE, _ACROSS = 20261121, 20261122  # seeds of the multipliers of words in a row, and of rows
LORA = ".lora_"
_bases: WeakKeyDictionary[nn.Module, tuple[list[tuple[int, int]] | None, str]] = WeakKeyDictionary()
_odd: dict[tuple[str, int, int], Tensor] = {}


def weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(HF name, tensor) of everything a receiver needs; a tied tensor appears once, under its first name. Of an adapted model the adapter."""
    named = list(model.named_parameters())
    for name, parameter in [(n, p) for n, p in named if LORA in n] or named:
        yield sent(name), parameter.detach()


def sent(name: str) -> str:
    """Under which name a parameter travels and is stored: an adapter's has peft's, any other its own."""
    return f"base_model.model.{name.replace('.default.', '.')}" if LORA in name else name


def base(model: nn.Module) -> str:
    """One digest of the frozen weights under an adapter, "" where there is none: taken once, and again only when one of them was written."""
    if model in _bases and _bases[model][0] is None:
        return _bases[model][1]
    named = dict(model.named_parameters())
    frozen = {name.replace(".base_layer.", "."): p for name, p in named.items() if LORA not in name}
    if len(frozen) == len(named):
        return ""
    stamp = [(p.data_ptr(), p._version) for p in frozen.values()]
    if model not in _bases or _bases[model][0] != stamp:
        rows = "\n".join(sorted(f"{name}|{tuple(p.shape)}|{p.dtype}|{digest(p)}" for name, p in frozen.items()))
        _bases[model] = stamp, blake2b(rows.encode(), digest_size=16).hexdigest()
    return _bases[model][1]


def pin(model: nn.Module) -> None:
    """The frozen weights will lie in shards, which nobody has whole any more: their digest stays what it is now."""
    _bases[model] = None, base(model)


def _multipliers(device: torch.device, n: int, seed: int) -> Tensor:
    key = (str(device), n, seed)
    if key not in _odd:
        generator = torch.Generator().manual_seed(seed)
        _odd[key] = (torch.randint(-(2**62), 2**62, (n,), generator=generator) | 1).to(device)
    return _odd[key]


def _hash(words: Tensor, odd: Tensor) -> Tensor:
    """sum_i odd_i (w_i xor w_i >> 29) modulo 2^64.

    A product carries only upwards, so two flipped signs (bit 63) would cancel; the fold copies the high bits down. 29 and not 32,
    because the two floats of a word may change alike.
    """
    return ((words ^ (words >> 29 & (1 << 35) - 1)) * odd[: len(words)]).sum()


def _inside(rows: Tensor, odd: Tensor) -> Tensor:
    """sum_i odd_i w_ri of every row r, modulo 2^64. A GPU has no product of integer matrices."""
    return torch.mv(rows, odd) if rows.device.type == "cpu" else (rows * odd).sum(1)


def digest(tensor: Tensor) -> str:
    """A fast fingerprint of the bits, wherever they live. A check against accidents, not adversaries.

    8-byte words w[r, c] in rows of 1023 -> the hash over r of sum_c odd_c w[r, c], beside the hash over c of sum_r w[r, c], modulo 2^64.
    One or two changed words change it: in two columns both column sums move; in one column two rows move, each by an odd multiple.
    """
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    words = raw[: raw.numel() // 8 * 8].view(torch.int64)
    whole = words[: len(words) // _ROW * _ROW].view(-1, _ROW)
    rest = words[whole.numel() :]
    odd = _multipliers(raw.device, _ROW, _INSIDE)
    columns = torch.zeros_like(odd)
    columns[: len(rest)] = rest
    rows = [(rest * odd[: len(rest)]).sum()[None]]
    for some in whole.split(_ROWS):
        rows.append(_inside(some, odd))
        columns += some.sum(0)
    row_hashes = torch.cat(rows)
    across = _hash(row_hashes, _multipliers(raw.device, len(row_hashes), _ACROSS))
    tail = int.from_bytes(bytes(raw[words.numel() * 8 :].tolist()), "little")
    first = int(across.item()) + tail * 0x9E3779B97F4A7C15 + raw.numel()
    return f"{first & (2**64 - 1):016x}{int(_hash(columns, odd).item()) & (2**64 - 1):016x}"


def info(name: str, tensor: Tensor) -> TensorInfo:
    return TensorInfo(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), digest(tensor))


def described(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[TensorInfo, Tensor]]:
    """Each tensor with its name, shape, dtype and digest, one at a time: a gathered tensor can go when its turn is over."""
    for name, tensor in tensors:
        yield info(name, tensor), tensor


def manifest(model: nn.Module, version: int) -> Manifest:
    """Every tensor of `model` that travels, with shape, dtype and digest; of those under an adapter one digest."""
    return Manifest(version, tuple(row for row, _ in described(weights(model))), base(model))
