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

from rondel.runtime.journal.wal_format import HEAD, MAGIC, ROOT, ROUTED, ROW, SHAPE, SPAN, Drawn, Routes
from rondel.runtime.journal.wal_past import EarlierToken, EarlierTokens
from rondel.system.files import guard_write, make_folder, numbered_paths


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
        self._lost: list[EarlierTokens] = []  # what earlier lives drew, by log
        self._taken: set[bytes] = set()  # keys of samples that went on here
        self._known: set[bytes] = set()  # digests of the routes that stand in this life's part of the segment
        self._whole: dict[Path, int] = {}  # bytes of each segment before what is torn
        self._began = False
        self._segment: BinaryIO | None = None
        for log in {folder, *beside}:
            earlier = EarlierTokens(log)
            self._past |= earlier.roots
            if log == folder:
                self._whole = earlier.whole
            if earlier.segments:
                self._lost.append(earlier)

    def record_version(self, version: int, root: str) -> None:
        """Another version serves. The first one of a life says which past it has: what was trained after it is lost."""
        if not self._began:
            mine = self._past.get(version) == root
            self._past = {v: r for v, r in self._past.items() if mine and v <= version}
            self._began = True
            for earlier in self._lost:
                earlier.keep_past(version, self._past)
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

    def _consecutive_rows(self, rows: list[EarlierToken], prompt: int, first: int) -> list[EarlierToken]:
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
    def context_hash(tokens: Sequence[int] | np.ndarray) -> int:
        """Of the text that a sample answers, never 0: a key whose task has changed finds nothing."""
        return zlib.crc32(np.asarray(tokens, np.int64).tobytes()) | 1

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
        self._segment = None


def _key_bytes(key: int) -> bytes:
    return key.to_bytes(16, "little")


def _encode_block(rows: int, body: bytes, magic: int = MAGIC) -> bytes:
    return np.array([(magic, rows, zlib.crc32(body))], HEAD).tobytes() + body
