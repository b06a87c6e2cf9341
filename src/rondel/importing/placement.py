"""How a peer spreads a run over devices -> [place]: the trainer's mesh, and engines of several devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rondel.importing.peer import MissingKeys, Part, PeerSettings, RecipeLine, SameKeys

UNREAD = "the config does not say what the variable is; place.mesh and place.engines say it here"


def translate_placement(
    s: PeerSettings,
    *,
    axes: Mapping[str, tuple[str, ...]],
    engine_tp: str,
    engines: str = "",
    apart: bool = False,
    without: Mapping[str, str] | None = None,
) -> Iterator[Part]:
    """The sizes that the user set; what is left at 1 needs no line.

    axes       of place.mesh -> their keys, the first that is above 1 counts
    engine_tp  devices of an engine; engines: how many there are
    apart      whether their engines have devices of their own
    without    keys of sizes that nothing here has -> why
    """
    mesh: dict[str, int] = {}
    sources: list[str] = []
    for axis, keys in axes.items():
        for key in keys:
            size, parts = _size(s, key)
            yield from parts
            if size > 1 and axis == "chunks" and mesh.get("pp", 1) == 1:
                yield MissingKeys((key,), "chunks are of the stages of a pipeline, and here is one stage")
            elif size > 1 and mesh.setdefault(axis, size) == size:
                sources.append(key)
            elif size > 1:
                yield MissingKeys((key,), f"another key says {mesh[axis]}")
    each: dict[str, int] = {}
    for name, key in (("count", engines), ("tp", engine_tp)):
        size, parts = _size(s, key)
        yield from parts
        each |= {name: size} if size > 1 else {}
    for key, why in (without or {}).items():
        size, parts = _size(s, key)
        yield from parts
        if size > 1:
            yield MissingKeys((key,), why)
    own = tuple(key for name, key in (("count", engines), ("tp", engine_tp)) if name in each)
    if mesh or each:
        split = bool(each) or apart
        more = "" if apart or not split else "theirs share the trainer's devices; here an engine of several has its own"
        note = "" if split else "engine and trainer take turns on the devices, as there"
        yield RecipeLine("place.kind", "split" if split else "shared", (*sources, *own), note, ask=more)
    if mesh:
        yield RecipeLine("place.mesh", mesh, tuple(sources), "the ranks that are left are shards: place.ranks")
    if each:
        yield RecipeLine("place.engines", each, own)


def _size(s: PeerSettings, key: str) -> tuple[int, list[Part]]:
    """What the user set there, 1 if nothing; and where a key that needs no line belongs."""
    if not key or not s.is_set(key):
        return 1, []
    value: Any = s[key]
    if value is None or (isinstance(value, int | float) and value <= 1):
        return 1, [SameKeys((key,), "nothing is divided")]
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        return 1, [MissingKeys((key,), UNREAD)]
    return int(value), []
