"""What to go on from and how to draw, read from a request: the fields that the APIs share."""

from __future__ import annotations

import secrets
from typing import Any

from rondel.generate.engine.server.fields import RequestFields

COLDEST = 1e-3  # below it the logits of a float overflow; 0 is greedy
BIGGEST = 1 << 30


def read_draw(f: RequestFields, *, hottest: float = 2.0) -> dict[str, Any]:
    """Keyword arguments of Sampling."""
    temperature = f.take_number("temperature", 1.0, 0.0, hottest)
    if 0 < temperature < COLDEST:
        raise f.field_error("temperature", f"use 0 for greedy, or at least {COLDEST}")
    top_k = f.read_integer("top_k", 0, -1, BIGGEST)
    return {
        "temperature": temperature,
        "top_p": f.take_number("top_p", 1.0, 1e-9, 1.0),
        "top_k": max(0, top_k),  # -1 keeps everything, too
        "min_p": f.take_number("min_p", 0.0, 0.0, 1 - 1e-9),
        "stop": (*f.read_integers("stop_token_ids", 64), *f.read_strings("stop", 16)),
        "ignore_eos": f.read_flag("ignore_eos"),
        "repetition_penalty": f.take_number("repetition_penalty", 1.0, 0.01, 100.0),
        "presence_penalty": f.take_number("presence_penalty", 0.0, -2.0, 2.0),
        "frequency_penalty": f.take_number("frequency_penalty", 0.0, -2.0, 2.0),
        "logit_bias": _read_logit_bias(f),
    }


def _read_logit_bias(f: RequestFields) -> dict[int, float]:
    """JSON's keys are texts."""
    given = f.read_field("logit_bias", {})
    if not isinstance(given, dict) or len(given) > 1024:
        raise f.field_error("logit_bias", "it must be an object of at most 1024 token ids")
    for key, value in given.items():
        if (
            not (key.isascii() and key.isdecimal() and len(key) < 10)
            or type(value) not in (int, float)
            or not -100 <= value <= 100
        ):
            raise f.field_error("logit_bias", "its keys must be token ids, its values numbers from -100 to 100")
    return {int(key): float(value) for key, value in given.items()}


def read_seed(f: RequestFields, name: str = "seed") -> int:
    """A request without one gets its own, so that two of them are not the same."""
    seed = f.read_integer(name, None, -(1 << 63), (1 << 64) - 1)
    return secrets.randbits(63) if seed is None else seed


def read_prompts(f: RequestFields, prompt: Any, name: str = "prompt") -> list[str | list[int]]:
    def is_ids(value: Any) -> bool:
        return isinstance(value, list) and bool(value) and all(type(t) is int and 0 <= t < BIGGEST for t in value)

    rows = [prompt] if isinstance(prompt, str) or is_ids(prompt) else prompt
    if not isinstance(rows, list) or not rows or not all(isinstance(r, str) or is_ids(r) for r in rows):
        raise f.field_error(name, "it must be a string, a list of token ids, or a list of either")
    return rows
