"""The token log: every drawn token with its logprob and version is on file before anyone sees it (law 15).

wal/engine-0/000012.bin      one segment a weight version
    block = magic, rows, crc32 | key, index, prompt, logprob, token, version      one
    block a step of the engine (group commit)
          = magic, bytes, crc32 | rows, layers, k, width | the same | first, n, inline, digest |
          routes      where experts are recorded
    the first block names the root of the weights; a torn or wrong block ends its segment

A token of a mixture of experts brings the routes of all tokens that were computed since the
one before it: of the prompt with the first, then one each, in one byte a choice (two
beyond 256 experts). Siblings' prompts have equal
routes, which stand in a segment once.

A sample that a crash interrupted goes on from its tokens instead of starting again:
starting again favours short answers. With a hazard h of ending at each token and q of being
interrupted, restarts give a mean length of 1 /
(1 - (1 - h)(1 - q)), the log keeps 1 / h. A token counts only if its version is in this
run's past: the same number with the same
root, not one that a lost life had trained.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import count, pairwise, takewhile
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from rondel.system.files import guard_write, make_folder, numbered_paths

ROW = np.dtype(
    [("key", "V16"), ("index", "<u4"), ("prompt", "<u4"), ("logprob", "<f8"), ("token", "<i4"), ("version", "<i4")]
)
HEAD = np.dtype([("magic", "<u4"), ("rows", "<u4"), ("crc", "<u4")])
SHAPE = np.dtype([("rows", "<u4"), ("layers", "<u4"), ("k", "<u4"), ("width", "<u4")])
SPAN = np.dtype([("first", "<u4"), ("n", "<u4"), ("inline", "<u4"), ("digest", "V8")])
MAGIC, ROUTED = 0x4C415752, 0x4C415753
ROOT = 32  # bytes of the root in hex, in a block of its own: rows = 0

Drawn = tuple[int, int, int, float, int, int]  # key, index, prompt, logprob, token, version: a row
Routes = tuple[int, np.ndarray]  # of the tokens of a request from this one on, [n, L, K]


class RecalledToken(NamedTuple):
    """A token that an earlier life drew."""

    token: int
    logprob: float
    version: int
    routes: Routes | None


class TokenLog:
    """`log.write(drawn)` before the tokens are shown; after a crash `log.written(key, prompt)` has them.

    durable   fsync each block: it survives the machine and not only the process
    keep      segments (versions) that stay on disk
    beside    logs of the other engines: a sample may go on elsewhere than it began
    """

    def __init__(self, folder: Path, *, durable: bool = False, keep: int = 64, beside: Iterable[Path] = ()) -> None:
        self.folder, self.durable, self.keep = folder, durable, keep
        make_folder(folder)
        self._past: dict[int, str] = {}  # version -> root
        self._lost: list[_Earlier] = []  # what earlier lives drew, by log
        self._taken: set[bytes] = set()  # keys of samples that went on here
        self._known: set[bytes] = set()  # digests of the routes that stand in this life's part of the segment
        self._whole: dict[Path, int] = {}  # bytes of each segment before what is torn
        self._began = False
        self._segment: BinaryIO | None = None
        for log in {folder, *beside}:
            blocks: list[_Block] = []
            for path in numbered_paths(log, "", ".bin").values():
                whole = self._read_segment(path, blocks)
                if log == folder:
                    self._whole[path] = whole
            if blocks:
                self._lost.append(_Earlier(blocks))

    def record_version(self, version: int, root: str) -> None:
        """Another version serves. The first one of a life says which past it has: what was trained after it is lost."""
        if not self._began:
            mine = self._past.get(version) == root
            self._past = {v: r for v, r in self._past.items() if mine and v <= version}
            self._began = True
            for earlier in self._lost:
                earlier.prune_rows(version, self._past)
        self._past[version] = root
        self.close()
        path = self.folder / f"{version:06d}.bin"
        with guard_write(path):
            if path in self._whole:
                os.truncate(path, self._whole.pop(path))
            self._segment, self._known = path.open("ab", buffering=0), set()
        self._append_block(_encode_block(0, root.encode().ljust(ROOT)[:ROOT]))
        segments = numbered_paths(self.folder, "", ".bin")
        # later: of a lost life
        for old in [segment for number, segment in segments.items() if number <= version][: -self.keep]:
            old.unlink(missing_ok=True)

    def write(self, drawn: Sequence[Drawn], routes: Sequence[Routes | None] = ()) -> None:
        """The tokens of one step of the engine, of all its requests, in one block;
        `routes` are theirs, in the same order.
        """
        if self._segment is None or not drawn:
            return
        rows = np.empty(len(drawn), ROW)
        for name, values in zip(ROW.names or (), zip(*drawn, strict=True), strict=True):
            rows[name] = [_key_bytes(key) for key in values] if name == "key" else values
        if any(routes):
            body = self._encode_routes(rows, routes)
            self._append_block(_encode_block(len(body), body, ROUTED))
        else:
            self._append_block(_encode_block(len(rows), rows.tobytes()))

    def _append_block(self, block: bytes) -> None:
        """Whole, or nothing of it counts: a torn block ends its segment."""
        assert self._segment is not None
        with guard_write(self._segment.name, len(block)):
            written = 0
            while written < len(block):
                written += self._segment.write(block[written:]) or 0
            if self.durable:
                os.fdatasync(self._segment.fileno())

    def _encode_routes(self, rows: np.ndarray, routes: Sequence[Routes | None]) -> bytes:
        shape = next(part[1].shape[1:] for part in routes if part)
        width = np.dtype(np.uint8 if all(int(part[1].max(initial=0)) < 256 for part in routes if part) else np.uint16)
        spans, payload = np.zeros(len(rows), SPAN), []
        for span, part in zip(spans, routes, strict=True):
            if part is None:
                continue
            data = part[1].astype(width).tobytes()
            digest = blake2b(data, digest_size=8).digest()
            span["first"], span["n"], span["digest"], span["inline"] = (
                part[0],
                len(part[1]),
                digest,
                digest not in self._known,
            )
            if span["inline"]:
                payload.append(data)
            if len(part[1]) > 1:
                self._known.add(digest)
        head = np.array([(len(rows), *shape, width.itemsize)], SHAPE)
        return b"".join([head.tobytes(), rows.tobytes(), spans.tobytes(), *payload])

    def recall_tokens(self, key: int, prompt: int, *, first: int = 0) -> Iterator[RecalledToken]:
        """What a sample had drawn from its token `first` on, as far as this life's past reaches."""
        if (mine := _key_bytes(key)) in self._taken:
            return
        found = [self._consecutive_rows(earlier.rows_of(mine), prompt, first) for earlier in self._lost]
        longest = max(found, key=len, default=[])  # of one log alone: another may have drawn it, too
        if longest:
            self._taken.add(mine)
        for row, _, routes in longest:
            yield RecalledToken(int(row["token"]), float(row["logprob"]), int(row["version"]), routes)

    def _consecutive_rows(self, rows: list[_Lost], prompt: int, first: int) -> list[_Lost]:
        """Of the same index the last counts. Versions only grow: behind an older one stands what another life drew."""
        mine = {
            int(r.row["index"]): r
            for r in rows
            if r.row["prompt"] == prompt and self._past.get(int(r.row["version"])) == r.root
        }
        run = [mine[at] for at in takewhile(mine.__contains__, count(first))]
        fall = next((i for i, (a, b) in enumerate(pairwise(run), 1) if b.row["version"] < a.row["version"]), len(run))
        return run[:fall]

    @staticmethod
    def context_hash(tokens: Sequence[int]) -> int:
        """Of the text that a sample answers, never 0: a key whose task has changed finds nothing."""
        return zlib.crc32(np.asarray(tokens, np.int64).tobytes()) | 1

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
        self._segment = None

    def _read_segment(self, path: Path, blocks: list[_Block]) -> int:
        """The blocks of a segment, behind those that are there. -> bytes before what is torn."""
        with guard_write(path, doing="reading"):
            data, at, root = path.read_bytes(), 0, ""
        known: dict[bytes, np.ndarray] = {}
        while at + HEAD.itemsize <= len(data):
            head = np.frombuffer(data, HEAD, 1, at)[0]
            routed = int(head["magic"]) == ROUTED
            size = int(head["rows"]) if routed else int(head["rows"]) * ROW.itemsize or ROOT
            body = data[at + HEAD.itemsize : at + HEAD.itemsize + size]
            if int(head["magic"]) not in (MAGIC, ROUTED) or len(body) < size or zlib.crc32(body) != int(head["crc"]):
                break
            at += HEAD.itemsize + size
            if head["rows"]:
                blocks.append(
                    _Block(*_routed_rows(body, known), root) if routed else _Block(np.frombuffer(body, ROW), {}, root)
                )
            else:
                root = self._past[int(path.stem)] = body.decode().strip()
        return at


def _key_bytes(key: int) -> bytes:
    return key.to_bytes(16, "little")


def _encode_block(rows: int, body: bytes, magic: int = MAGIC) -> bytes:
    return np.array([(magic, rows, zlib.crc32(body))], HEAD).tobytes() + body


class _Lost(NamedTuple):
    """A row of an earlier life, the root of the weights that drew it, and the routes that came with it."""

    row: np.void
    root: str
    routes: Routes | None


class _Block(NamedTuple):
    """Rows, the routes that came with some of them, by number, and the root of the weights that drew them."""

    rows: np.ndarray
    routes: dict[int, Routes]
    root: str


class _Earlier:
    """What earlier lives wrote into one log, in the order of the file: arrays, since a log has millions of tokens.

    rows    of `ROW`, 44 bytes a token
    by_key  numbers of the rows, those of one key together; `spans` says where
    """

    def __init__(self, blocks: list[_Block]) -> None:
        self.roots = sorted({block.root for block in blocks})
        number = {root: i for i, root in enumerate(self.roots)}
        starts = np.cumsum([0, *(len(block.rows) for block in blocks)])
        rows = np.concatenate([block.rows for block in blocks])
        root = np.repeat([number[block.root] for block in blocks], np.diff(starts)).astype(np.uint32)
        self._index_rows(
            rows,
            root,
            {int(start) + i: told for start, block in zip(starts, blocks) for i, told in block.routes.items()},
        )

    def _index_rows(self, rows: np.ndarray, root: np.ndarray, routes: dict[int, Routes]) -> None:
        self.rows, self.root, self.routes = rows, root, routes
        keys, which, n = np.unique(rows["key"].copy().view("S16"), return_inverse=True, return_counts=True)
        self.by_key = np.argsort(which, kind="stable").astype(np.uint32)
        ends = np.cumsum(n).tolist()
        self.spans = dict(zip((bytes(key).ljust(16, b"\0") for key in keys), zip([0, *ends[:-1]], ends)))

    def prune_rows(self, served: int, past: dict[int, str]) -> None:
        """Only what weights of this past drew, and of later versions, which may be trained again,
        bit for bit: nothing else can count any more.
        """
        stays = self.rows["version"] > served
        for version, root in past.items():
            if root in self.roots:
                stays |= (self.rows["version"] == version) & (self.root == self.roots.index(root))
        at = np.flatnonzero(stays)
        number = dict(zip(at.tolist(), range(len(at)))) if self.routes else {}
        self._index_rows(
            self.rows[at], self.root[at], {number[i]: told for i, told in self.routes.items() if i in number}
        )

    def rows_of(self, key: bytes) -> list[_Lost]:
        begin, end = self.spans.get(key, (0, 0))
        return [_Lost(self.rows[i], self.roots[self.root[i]], self.routes.get(int(i))) for i in self.by_key[begin:end]]


def _routed_rows(body: bytes, known: dict[bytes, np.ndarray]) -> tuple[np.ndarray, dict[int, Routes]]:
    """Rows of a block and the routes of some, by number; `known` are those of several
    tokens that its segment has so far.
    """
    shape = np.frombuffer(body, SHAPE, 1)[0]
    n, layers, k, width = (int(shape[name]) for name in SHAPE.names or ())
    rows = np.frombuffer(body, ROW, n, SHAPE.itemsize)
    spans = np.frombuffer(body, SPAN, n, SHAPE.itemsize + rows.nbytes)
    at = SHAPE.itemsize + rows.nbytes + spans.nbytes
    found: dict[int, Routes] = {}
    for i, span in enumerate(spans):
        if not span["n"]:
            continue
        if span["inline"]:
            routes = np.frombuffer(body, f"<u{width}", int(span["n"]) * layers * k, at).reshape(-1, layers, k)
            at += routes.nbytes
            if len(routes) > 1:
                known[bytes(span["digest"])] = routes
        found[i] = int(span["first"]), routes if span["inline"] else known[bytes(span["digest"])]
    return rows, found
