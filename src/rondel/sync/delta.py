"""Only what changed since the version that the engines serve: after a small step in bf16 most weights keep their bits.

    of each tensor    n changed elements -> their gaps (differences of positions) and old xor new,
                      byte by byte as planes, deflated
    whole             where no version is known to all engines, or where it would be smaller

Both lie in one file a version. The engine lays base xor change beside what it serves and
compares every digest, also of tensors that did not change, so a delta on another base is
refused even if it claims to be on this one.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from rondel.core.errors import SyncError, error_boundary
from rondel.core.protocols import RolloutEngine, Tensors, Trainer, Weights
from rondel.core.types import Manifest, Route
from rondel.sync.from_disk import outdated_versions
from rondel.system.files import drop_on_error, guard_write, numbered_paths

PIECE = 1 << 18  # elements at a time: what is compared stays in the cache
LEVEL = 1  # of zlib: 6 makes 7 % less of random positions and takes five times as long
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def view_as_integers(tensor: Tensor) -> Tensor:
    """Flat, as whole numbers of the same size, on the CPU."""
    return tensor.detach().cpu().contiguous().view(-1).view(WORDS[tensor.element_size()])


def encode(old: Tensor, new: Tensor) -> bytes:
    """b"" where nothing changed. [M] whole numbers each -> planes of the n gaps (4
    bytes), planes of the n values old xor new.
    """
    if len(new) > 2**31 - 1:
        raise SyncError(f"a tensor of {len(new)} elements: a delta counts positions in 4 bytes")
    positions, values = [], []
    for start in range(0, len(new), PIECE):
        change = old[start : start + PIECE] ^ new[start : start + PIECE]
        here = change.nonzero().view(-1)
        positions.append(here + start)
        values.append(change[here])
    if not (at := torch.cat(positions) if positions else new.new_zeros(0)).numel():
        return b""
    gaps = at.diff(prepend=at.new_zeros(1)).to(torch.int32)
    return zlib.compress(_split_planes(gaps) + _split_planes(torch.cat(values)), LEVEL)


def decode(old: Tensor, blob: bytes) -> Tensor:
    """The inverse: decode(old, encode(old, new)) is new, bit for bit, in memory of its own."""
    raw, width = torch.frombuffer(bytearray(zlib.decompress(blob)), dtype=torch.uint8), old.element_size()
    n, rest = divmod(len(raw), 4 + width)
    if rest or not n:
        raise SyncError(f"a delta of {len(raw)} bytes is no whole number of changes of {4 + width} bytes")
    at = _join_planes(raw[: 4 * n], torch.int32).long().cumsum(0)
    if int(at.min()) < 0 or int(at[-1]) >= len(old):
        raise SyncError(f"a delta changes element {int(at[-1])} of a tensor that has {len(old)}")
    new = old.clone()
    new[at] ^= _join_planes(raw[4 * n :], old.dtype)
    return new


def _split_planes(values: Tensor) -> bytes:
    """The lowest bytes of all, then the next: what is 0 almost everywhere lies together."""
    return values.view(torch.uint8).view(-1, values.element_size()).t().contiguous().numpy().tobytes()


def _join_planes(planes: Tensor, dtype: torch.dtype) -> Tensor:
    return planes.view(dtype.itemsize, -1).t().clone(memory_format=torch.contiguous_format).view(-1).view(dtype)


class Delta:
    """`folder` is seen by the engines under the same name. The trainer keeps the last
    version's bits in memory, to compare with.
    """

    holds: Literal["commit"] = "commit"
    names: Literal["module", "checkpoint"] = "checkpoint"

    def __init__(self, folder: str | Path, *, keep: int = 2) -> None:
        self.folder, self.keep = Path(folder), keep
        self._root, self._last = "", {}  # type: str, dict[str, Tensor]

    async def plan_route(self, trainer: Trainer, engines: list[RolloutEngine]) -> Route:
        """On the version that all engines serve, if there is one."""
        states = [await engine.status() for engine in engines]
        roots = {"" if state.state == "refusing" else state.root for state in states}
        return Route("delta", base=roots.pop() if len(roots) == 1 else "")

    def publish(self, route: Route, version: int, weights: Weights) -> tuple[Manifest, Route]:
        base = route.base if route.base == self._root else ""
        place, rows, last = self.folder / f"d-{version:06d}", [], {}
        draft = place.with_name(f".{place.name}.tmp")
        with guard_write(place, error=SyncError), drop_on_error(draft):
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self.folder.glob(".d-*.tmp"):  # of a writer that died
                left.unlink(missing_ok=True)
            index = {}
            with open(draft, "wb") as file:
                for row, tensor in weights:
                    new = view_as_integers(tensor)
                    kind, blob = self._encode_smallest(self._last.get(row.name) if base else None, new)
                    index[row.name] = kind, file.tell(), len(blob)
                    with guard_write(draft, len(blob), SyncError):
                        file.write(blob)
                    rows.append(row)
                    last[row.name] = new.clone() if new.data_ptr() == tensor.data_ptr() else new
                tail = json.dumps({"base": base, "tensors": index}).encode()
                file.write(tail + len(tail).to_bytes(8, "little"))
                size = file.tell()
            os.replace(draft, place)
            for path in outdated_versions(numbered_paths(self.folder, "d-"), version, self.keep):
                path.unlink(missing_ok=True)
        manifest = Manifest(version, tuple(rows))
        self._root, self._last = manifest.root, last
        return manifest, Route("delta", (str(place), size), base=base, bytes=size)

    def _encode_smallest(self, old: Tensor | None, new: Tensor) -> tuple[str, bytes | memoryview]:
        whole = new.view(torch.uint8).numpy().data
        if old is None or (len(old), old.dtype) != (len(new), new.dtype):
            return "whole", whole
        blob = encode(old, new)
        if len(blob) >= len(whole):
            return "whole", whole
        return ("changed" if blob else "same"), blob

    def send(self, route: Route, weights: Tensors) -> None: ...

    def receive(self, route: Route, manifest: Manifest, mine: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        path, size = route.data
        shapes = {row.name: row for row in manifest.tensors}
        with error_boundary(SyncError, f"reading the changes in {path}"), open(path, "rb") as file:
            if (found := os.fstat(file.fileno()).st_size) != size:
                raise SyncError(f"it has {found} bytes and not {size}")
            file.seek(size - 8)
            length = int.from_bytes(file.read(8), "little")
            file.seek(size - 8 - length)
            index = json.loads(file.read(length))
            if index["base"] != route.base:
                raise SyncError(f"it changes weights with root {index['base'][:8]}, and not {route.base[:8]}")
            for name, (kind, at, count) in index["tensors"].items():
                if name not in shapes or name not in mine:
                    raise SyncError(f"it changes {name}, which was not announced")
                row, base = shapes[name], mine[name]
                file.seek(at)
                if kind == "same":
                    yield name, base
                elif kind == "changed":
                    yield name, decode(view_as_integers(base), file.read(count)).view(base.dtype).view(base.shape)
                else:
                    raw = torch.frombuffer(bytearray(file.read(count)), dtype=torch.uint8)
                    yield name, raw.view(getattr(torch, row.dtype)).view(row.shape)

    def close(self) -> None:
        self._last = {}
