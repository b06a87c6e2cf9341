"""Names and digests of weights: Hugging Face names are the lingua franca of every path that weights travel."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from rondel.words.types import Manifest, TensorInfo

_ROW = 1 << 15
_odd: dict[tuple[str, int], Tensor] = {}


def weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(HF name, tensor) of everything a receiver needs; a tied tensor appears once, under its first name."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()


def _multipliers(device: torch.device, n: int) -> Tensor:
    key = (str(device), n)
    if key not in _odd:
        generator = torch.Generator().manual_seed(20261121)
        _odd[key] = (torch.randint(-(2**62), 2**62, (n,), generator=generator) | 1).to(device)
    return _odd[key]


def digest(tensor: Tensor) -> str:
    """A fast fingerprint of the bits, wherever they live: a multilinear hash modulo 2^64 over 8-byte words.

    Any single changed word changes it (the multipliers are odd); it is a check against accidents, not against an adversary.
    """
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = raw[: raw.numel() // 8 * 8].view(torch.int64)
    rows, rest = whole[: whole.numel() // _ROW * _ROW].view(-1, _ROW), whole[whole.numel() // _ROW * _ROW :]
    odd = _multipliers(raw.device, _ROW)
    total = (rest * odd[: rest.numel()]).sum()
    if len(rows):
        per_row = torch.stack([(row * odd).sum() for row in rows])
        outer = _multipliers(raw.device, len(rows) + 1)[1:]
        total = total + (per_row * outer).sum()
    tail = int.from_bytes(bytes(raw[whole.numel() * 8 :].tolist()), "little")
    return f"{(int(total.item()) + tail * 0x9E3779B97F4A7C15 + raw.numel()) & (2**64 - 1):016x}"


def manifest(model: nn.Module, version: int) -> Manifest:
    """Every tensor of `model` with shape, dtype and digest."""
    rows = (TensorInfo(n, tuple(t.shape), str(t.dtype).removeprefix("torch."), digest(t)) for n, t in weights(model))
    return Manifest(version, tuple(rows))
