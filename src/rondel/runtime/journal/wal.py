"""The token log: every drawn token with its logprob and version is on file before anyone sees it (law 15).  SPEC Y7.

wal/engine-0/000012.bin      one segment a weight version
    block = magic, rows, crc32 | key, index, prompt, logprob, token, version      one block a step of the engine (group commit)
    the first block names the root of the weights; a torn or wrong block ends its segment

A sample that a crash interrupted goes on from its tokens instead of starting again: starting again favours short answers. With a hazard
h of ending at each token and q of being interrupted, restarts give a mean length of 1 / (1 - (1 - h)(1 - q)), the log keeps 1 / h.
A token counts only if its version is in this run's past: the same number with the same root, not one that a lost life had trained.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, takewhile
from pathlib import Path
from typing import BinaryIO

import numpy as np

ROW = np.dtype([("key", "V16"), ("index", "<u4"), ("prompt", "<u4"), ("logprob", "<f8"), ("token", "<i4"), ("version", "<i4")])
HEAD = np.dtype([("magic", "<u4"), ("rows", "<u4"), ("crc", "<u4")])
MAGIC = 0x4C415752
ROOT = 32  # bytes of the root in hex, in a block of its own: rows = 0

Drawn = tuple[int, int, int, float, int, int]  # key, index, prompt, logprob, token, version: a row


class TokenLog:
    """`log.write(drawn)` before the tokens are shown; after a crash `log.written(key, prompt)` has them.

    durable   fsync each block: it survives the machine and not only the process
    keep      segments (versions) that stay on disk
    beside    logs of the other engines: a sample may go on elsewhere than it began
    """

    def __init__(self, folder: Path, *, durable: bool = False, keep: int = 64, beside: Iterable[Path] = ()) -> None:
        self.folder, self.durable, self.keep = folder, durable, keep
        folder.mkdir(parents=True, exist_ok=True)
        self._past: dict[int, str] = {}  # version -> root
        self._lost: dict[
            bytes, dict[Path, list[tuple[np.void, str]]]
        ] = {}  # key -> log -> rows of earlier lives, with the root that drew each
        self._whole: dict[Path, int] = {}  # bytes of each segment before what is torn
        self._began = False
        self._segment: BinaryIO | None = None
        for log in {folder, *beside}:
            for path in sorted(log.glob("*.bin")):
                whole = self._read(path)
                if log == folder:
                    self._whole[path] = whole

    def committed(self, version: int, root: str) -> None:
        """Another version serves. The first one of a life says which past it has: what was trained after it is lost."""
        if not self._began:
            mine = self._past.get(version) == root
            self._past = {v: r for v, r in self._past.items() if mine and v <= version}
            self._began = True
        self._past[version] = root
        self.close()
        path = self.folder / f"{version:06d}.bin"
        if path in self._whole:
            os.truncate(path, self._whole.pop(path))
        self._segment = path.open("ab", buffering=0)
        self._segment.write(_block(0, root.encode().ljust(ROOT)[:ROOT]))
        for old in sorted(self.folder.glob("*.bin"))[: -self.keep]:
            old.unlink(missing_ok=True)

    def write(self, drawn: Sequence[Drawn]) -> None:
        """The tokens of one step of the engine, of all its requests, in one block."""
        if self._segment is None or not drawn:
            return
        rows = np.empty(len(drawn), ROW)
        for name, values in zip(ROW.names or (), zip(*drawn, strict=True), strict=True):
            rows[name] = [_bytes(key) for key in values] if name == "key" else values
        self._segment.write(_block(len(rows), rows.tobytes()))
        if self.durable:
            os.fdatasync(self._segment.fileno())

    def written(self, key: int, prompt: int, *, first: int = 0) -> Iterator[tuple[int, float, int]]:
        """(token, logprob, version) that a sample had drawn from its token `first` on, as far as this life's past reaches."""
        found = [self._run(rows, prompt, first) for rows in self._lost.get(_bytes(key), {}).values()]
        longest = max(found, key=len, default=[])  # of one log alone: another may have drawn it, too
        if longest:
            del self._lost[_bytes(key)]
        for row in longest:
            yield int(row["token"]), float(row["logprob"]), int(row["version"])

    def _run(self, rows: list[tuple[np.void, str]], prompt: int, first: int) -> list[np.void]:
        mine = {int(row["index"]): row for row, root in rows if row["prompt"] == prompt and self._past.get(int(row["version"])) == root}
        return [mine[at] for at in takewhile(mine.__contains__, count(first))]

    @staticmethod
    def mark(tokens: Sequence[int]) -> int:
        """Of the text that a sample answers, never 0: a key whose task has changed finds nothing."""
        return zlib.crc32(np.asarray(tokens, np.int64).tobytes()) | 1

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
        self._segment = None

    def _read(self, path: Path) -> int:
        """-> bytes before what is torn."""
        data, at, root = path.read_bytes(), 0, ""
        while at + HEAD.itemsize <= len(data):
            head = np.frombuffer(data, HEAD, 1, at)[0]
            size = int(head["rows"]) * ROW.itemsize or ROOT
            body = data[at + HEAD.itemsize : at + HEAD.itemsize + size]
            if int(head["magic"]) != MAGIC or len(body) < size or zlib.crc32(body) != int(head["crc"]):
                break
            at += HEAD.itemsize + size
            if head["rows"]:
                for row in np.frombuffer(body, ROW):
                    self._lost.setdefault(bytes(row["key"]), {}).setdefault(path.parent, []).append((row, root))
            else:
                root = self._past[int(path.stem)] = body.decode().strip()
        return at


def _bytes(key: int) -> bytes:
    return key.to_bytes(16, "little")


def _block(rows: int, body: bytes) -> bytes:
    return np.array([(MAGIC, rows, zlib.crc32(body))], HEAD).tobytes() + body
