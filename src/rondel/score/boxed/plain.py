"""Values as JSON and back. Immutable plain values cross as copies; everything else
crosses by an `End` of far.py, or not at all.

Exact built-in types only. A subclass is sent as what it is underneath, so that no method of
a candidate's runs where answers are compared. This text also runs in boxes, joined
with far.py and candidate.py or harness.py:
standard library only, and no import of ours.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

DEEPEST = 200
# immutable values of the standard library: type -> (its parts, the value of them)
VALUES: dict[tuple[str, str], tuple[Callable[[Any], Any], Callable[..., Any]]] = {
    ("builtins", "range"): (lambda v: (v.start, v.stop, v.step), lambda cls, *parts: cls(*parts)),
    ("builtins", "slice"): (lambda v: (v.start, v.stop, v.step), lambda cls, *parts: cls(*parts)),
    ("fractions", "Fraction"): (lambda v: (v.numerator, v.denominator), lambda cls, *parts: cls(*parts)),
    ("decimal", "Decimal"): (lambda v: (str(v),), lambda cls, text: cls(text)),
    ("uuid", "UUID"): (lambda v: (v.hex,), lambda cls, text: cls(text)),
    ("datetime", "timedelta"): (lambda v: (v.days, v.seconds, v.microseconds), lambda cls, *parts: cls(*parts)),
    **{
        ("datetime", name): (lambda v: (v.isoformat(),), lambda cls, text: cls.fromisoformat(text))
        for name in ("date", "datetime", "time")
    },
}


def type_key(kind: type, table: Any) -> tuple[str, str] | None:
    """The key of exactly this type in a table by (module, name)."""
    key = (kind.__module__, kind.__qualname__)
    return key if key in table and getattr(sys.modules.get(key[0]), key[1], None) is kind else None


def pack(value: Any, cross: Any = None, depth: int = 0) -> Any:
    """cross: value -> JSON of what is neither a scalar nor a tuple; without it containers
    are copied and objects are a TypeError.
    """
    if depth > DEEPEST:
        raise ValueError(f"nested deeper than {DEEPEST}")

    def pack_items(values: Any) -> list[Any]:
        return [pack(one, cross, depth + 1) for one in values]

    kind = type(value)
    if value is None or kind is bool:
        return value
    if issubclass(kind, str):
        return str.__getitem__(value, slice(None))
    if issubclass(kind, int):
        return {"i": hex(int.__add__(value, 0))}
    if issubclass(kind, float):
        return {"f": float.hex(value)}
    if issubclass(kind, complex):
        return {"c": [float.hex(complex.__getattribute__(value, part)) for part in ("real", "imag")]}
    if issubclass(kind, bytes) or (issubclass(kind, bytearray) and cross is None):
        return {"b": (bytes if issubclass(kind, bytes) else bytearray).hex(value)}
    if kind.__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item"):
        return pack(value.item(), cross, depth + 1)  # a scalar
    if kind is tuple or kind is frozenset:
        return {"t" if kind is tuple else "z": pack_items(value)}
    if key := type_key(kind, VALUES):
        return {"o": [*key, pack_items(VALUES[key][0](value))]}
    if cross is not None:
        return cross(value)
    for base, name in ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "z")):
        if issubclass(kind, base):
            return {name: pack_items(base.__iter__(value))}
    if issubclass(kind, dict):
        return {"d": [pack_items(pair) for pair in dict.items(value)]}
    raise TypeError(f"a {kind.__name__} is no plain data")


def unpack(value: Any, found: Any = None) -> Any:
    """found: (tag, body) -> what `cross` sent."""
    if value is None or isinstance(value, bool | str):
        return value
    if not isinstance(value, dict):
        raise TypeError(f"{type(value).__name__} stands for no value")
    ((name, body),) = value.items()
    if name in ("i", "f", "b"):
        return {"i": lambda: int(body, 16), "f": lambda: float.fromhex(body), "b": lambda: bytes.fromhex(body)}[name]()
    if name == "c":
        return complex(*map(float.fromhex, body))
    if name == "d":
        return {unpack(key, found): unpack(one, found) for key, one in body}
    if name == "o":
        module, kind, parts = body
        return VALUES[module, kind][1](
            getattr(importlib.import_module(module), kind), *(unpack(one, found) for one in parts)
        )
    if name in ("l", "t", "s", "z"):
        return {"l": list, "t": tuple, "s": set, "z": frozenset}[name](unpack(one, found) for one in body)
    if found is None:
        raise TypeError("an object that is no plain data")
    return found(name, body)
