"""Values as JSON and back: what crosses between a candidate, its tests and us is plain data, or the number of an object that stays where it is.

Exact built-in types only. A subclass is sent as what it is underneath, so that no method of a candidate's runs where answers are compared.
This text also runs in boxes, joined with candidate.py or harness.py: standard library only, and no import of ours.
"""

from __future__ import annotations

from typing import Any

DEEPEST = 200


def pack(value: Any, keep: Any = None, depth: int = 0) -> Any:
    """keep: object -> its number, for what is no plain data; without it that is a TypeError."""
    if depth > DEEPEST:
        raise ValueError(f"nested deeper than {DEEPEST}")

    def inner(values: Any) -> list[Any]:
        return [pack(one, keep, depth + 1) for one in values]

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
    if issubclass(kind, bytes | bytearray):
        return {"b": (bytes if issubclass(kind, bytes) else bytearray).hex(value)}
    for base, name in ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "z")):
        if issubclass(kind, base):
            return {name: inner(base.__iter__(value))}
    if issubclass(kind, dict):
        return {"d": [inner(pair) for pair in dict.items(value)]}
    if keep is None:
        raise TypeError(f"a {kind.__name__} is no plain data")
    return {"r": keep(value)}


def unpack(value: Any, found: Any = None) -> Any:
    """found: number -> what stands for the object here."""
    if not isinstance(value, dict):
        return value
    ((name, body),) = value.items()
    if name == "r":
        if found is None:
            raise TypeError("an object that is no plain data")
        return found(body)
    if name in ("i", "f", "b"):
        return {"i": lambda: int(body, 16), "f": lambda: float.fromhex(body), "b": lambda: bytes.fromhex(body)}[name]()
    if name == "c":
        return complex(*map(float.fromhex, body))
    inner = [unpack(one, found) for one in body] if name != "d" else []
    if name == "d":
        return {unpack(key, found): unpack(one, found) for key, one in body}
    return {"l": list, "t": tuple, "s": set, "z": frozenset}[name](inner)
