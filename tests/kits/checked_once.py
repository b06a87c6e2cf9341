"""The check of a loaded model, made once a process for each model: of the same classes, settings and bits it is the same proof.

Three forward passes at every load were 8 % of the tests' CPU time. A test that replaces anything by `monkeypatch` has its own.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from rondel.models import load_check

LARGEST = 1 << 24  # bytes of weights that are hashed; larger models are checked at every load
enabled = True
_real = load_check.check_attention
_proven: dict[str, tuple[int, int]] = {}  # by model and how it was checked: what the check returned


def check_models_once() -> None:
    load_check.check_attention = _check_attention


def _check_attention(model: Any, name: str, sight: Any, tape: Any, recurrent: list[int]) -> tuple[int, int]:
    key = _key_of(model, sight, tape, recurrent) if enabled else None
    if key is None or key not in _proven:
        found = _real(model, name, sight, tape, recurrent)
        if key is not None:
            _proven[key] = found
        return found
    model.set_attn_implementation(load_check.packed_attention(sight))
    return _proven[key]


def _key_of(model: Any, sight: Any, tape: Any, recurrent: list[int]) -> str | None:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if sum(t.nbytes for _, t in tensors) > LARGEST or any(t.device.type != "cpu" for _, t in tensors):
        return None
    hashed = hashlib.blake2b(
        repr((model.config.to_json_string(), model.dtype, sight, tape is None, recurrent)).encode()
    )
    for module in model.modules():
        hashed.update(repr((type(module), _origin(module.forward))).encode())
    for name, tensor in tensors:
        hashed.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        hashed.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return hashed.hexdigest()


def _origin(forward: Any) -> tuple[str, str]:
    """Where the code of a module's forward pass is, also of one that was replaced."""
    forward = getattr(forward, "func", forward)  # of a partial
    return forward.__module__, forward.__qualname__
