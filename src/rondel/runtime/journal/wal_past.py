"""What earlier lives wrote into one token log, read where it lies.

    segment   mapped, not read: its pages are the system's, and go when memory is short
    index     16 bytes a token that can still count, made when the first sample asks

A block that is torn or wrong ends its segment.
"""

from __future__ import annotations

import mmap
import os
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from rondel.runtime.journal.wal_format import HEAD, MAGIC, ROOT, ROUTED, ROW, SHAPE, SPAN, Routes
from rondel.system.files import guard_write, numbered_paths


class EarlierToken(NamedTuple):
    """A row of an earlier life, the root of the weights that drew it, and the routes that came with it."""

    row: np.void
    root: str
    routes: Routes | None


class EarlierTokens:
    """Of one log. `roots`: of the weights of each version; `whole`: bytes of each segment before what is torn."""

    def __init__(self, folder: Path) -> None:
        self.segments = [Segment(path) for path in numbered_paths(folder, "", ".bin").values()]
        self.whole = {segment.path: segment.whole for segment in self.segments}
        self.roots = {int(segment.path.stem): root for segment in self.segments for root in segment.roots}
        self._counts: tuple[int, dict[int, str]] | None = None
        self._keys: np.ndarray | None = None  # [n] uint64, ascending: the first half of each key
        self._where = np.empty(0, np.uint64)  # [n] segment · 2^40 + byte of the row

    def keep_past(self, served: int, past: Mapping[int, str]) -> None:
        """Only what weights of this past drew counts, and of later versions, which may be trained again,
        bit for bit."""
        self._counts, self._keys = (served, dict(past)), None

    def rows_of(self, key: bytes) -> list[EarlierToken]:
        """In the order in which they were written."""
        if self._keys is None:
            self._make_index()
        assert self._keys is not None
        half = np.frombuffer(key, np.uint64, 1)[0]
        span = slice(np.searchsorted(self._keys, half), np.searchsorted(self._keys, half, "right"))
        found = (self.segments[int(at) >> 40].token_at(int(at) & (1 << 40) - 1) for at in self._where[span])
        return [token for token in found if bytes(token.row["key"]).ljust(16, b"\0") == key]

    def _make_index(self) -> None:
        keys, where = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
        for number, segment in enumerate(self.segments):
            for at, rows, root in segment.blocks():
                stays = self._that_count(rows["version"], root)
                halves = np.ascontiguousarray(rows["key"]).view(np.uint64)[::2]
                keys.append(halves[stays])
                where.append(((number << 40) + at + ROW.itemsize * np.flatnonzero(stays)).astype(np.uint64))
        self._keys, self._where = np.concatenate(keys), np.concatenate(where)
        order = np.argsort(self._keys, kind="stable")
        self._keys, self._where = self._keys[order], self._where[order]

    def _that_count(self, versions: np.ndarray, root: str) -> np.ndarray:
        if self._counts is None:
            return np.ones(len(versions), bool)
        served, past = self._counts
        return (versions > served) | np.isin(versions, [version for version, known in past.items() if known == root])


class Segment:
    """The tokens of one version, as far as they are whole."""

    def __init__(self, path: Path) -> None:
        self.path, self.whole = path, 0
        self.roots: list[str] = []
        # of each block of rows: where its body begins, and the root that stood before it
        self._bodies, self._root = array("Q"), array("I")
        self._known: dict[bytes, np.ndarray] = {}  # routes of several tokens, by digest
        with guard_write(path, doing="reading"), path.open("rb", buffering=1 << 17) as file:
            routed = self._scan(file)
            # what is torn is not mapped: whoever writes here next cuts it off
            self._data: mmap.mmap | bytes = (
                mmap.mmap(file.fileno(), self.whole, access=mmap.ACCESS_READ) if self.whole else b""
            )
        for body in routed:
            self._note_routes(body)

    def _scan(self, file: BinaryIO) -> list[int]:
        """Where the whole blocks are. -> bodies of those with routes."""
        routed, end = [], os.fstat(file.fileno()).st_size
        while len(head := file.read(HEAD.itemsize)) == HEAD.itemsize:
            magic, rows, crc = np.frombuffer(head, HEAD)[0].item()
            size = rows if magic == ROUTED else rows * ROW.itemsize or ROOT
            at = self.whole + HEAD.itemsize
            if magic not in (MAGIC, ROUTED) or at + size > end or zlib.crc32(body := file.read(size)) != crc:
                break
            if rows:
                self._bodies.append(at)
                self._root.append(max(0, len(self.roots) - 1))
                routed += [at] if magic == ROUTED else []
            else:
                self.roots.append(body.decode().strip())
            self.whole = at + size
        return routed

    def blocks(self) -> Iterator[tuple[int, np.ndarray, str]]:
        """Of each: the byte of its first row, its rows, and the root of the weights that drew them."""
        for at, root in zip(self._bodies, self._root):
            magic, rows, _ = np.frombuffer(self._data, HEAD, 1, at - HEAD.itemsize)[0].item()
            first = at + SHAPE.itemsize if magic == ROUTED else at
            n = int(np.frombuffer(self._data, SHAPE, 1, at)[0]["rows"]) if magic == ROUTED else rows
            yield first, np.frombuffer(self._data, ROW, n, first), self.roots[root] if self.roots else ""

    def token_at(self, at: int) -> EarlierToken:
        """That whose row begins at this byte."""
        block = bisect_right(self._bodies, at) - 1
        body = self._bodies[block]
        row = np.frombuffer(self._data, ROW, 1, at)[0]
        routed = int(np.frombuffer(self._data, HEAD, 1, body - HEAD.itemsize)[0]["magic"]) == ROUTED
        nth = (at - body - SHAPE.itemsize) // ROW.itemsize
        routes = dict(self._routes_of(body)).get(nth) if routed else None
        return EarlierToken(row, self.roots[self._root[block]] if self.roots else "", routes)

    def _note_routes(self, body: int) -> None:
        """Routes of several tokens stand in a segment once."""
        for _ in self._routes_of(body):
            pass

    def _routes_of(self, body: int) -> Iterator[tuple[int, Routes]]:
        """Of a block: number of a row, and its routes."""
        n, layers, k, width = np.frombuffer(self._data, SHAPE, 1, body)[0].item()
        at = body + SHAPE.itemsize + n * ROW.itemsize
        spans = np.frombuffer(self._data, SPAN, n, at)
        at += spans.nbytes
        for i, span in enumerate(spans):
            if not span["n"]:
                continue
            digest = bytes(span["digest"])
            if span["inline"]:
                routes = np.frombuffer(self._data, f"<u{width}", int(span["n"]) * layers * k, at).reshape(-1, layers, k)
                at += routes.nbytes
                if len(routes) > 1:
                    self._known[digest] = routes
            yield i, (int(span["first"]), routes if span["inline"] else self._known[digest])
