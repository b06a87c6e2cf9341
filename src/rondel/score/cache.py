"""Verdicts that were paid for, in one file of the run folder: a resumed run asks nothing twice."""

from __future__ import annotations

import json
import sqlite3
from hashlib import blake2b
from pathlib import Path
from typing import Any


class ScoreCache:
    """`ScoreCache(folder / "judge.sqlite")`; None keeps it in memory.
    The key is a digest of everything that was asked."""

    def __init__(self, path: Path | None) -> None:
        self.link = sqlite3.connect(":memory:" if path is None else path, isolation_level=None, timeout=30)
        self.link.execute("PRAGMA journal_mode = WAL")
        self.link.execute("PRAGMA synchronous = NORMAL")
        self.link.execute("CREATE TABLE IF NOT EXISTS verdicts (asked BLOB PRIMARY KEY, said TEXT) WITHOUT ROWID")

    def get(self, asked: Any) -> str | None:
        row = self.link.execute("SELECT said FROM verdicts WHERE asked = ?", (request_digest(asked),)).fetchone()
        return row[0] if row else None

    def put(self, asked: Any, said: str) -> None:
        self.link.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", (request_digest(asked), said))


def request_digest(asked: Any) -> bytes:
    return blake2b(
        json.dumps(asked, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass"), digest_size=16
    ).digest()
