"""How the token log lies on the disk: blocks of rows in segments (wal.py says what for)."""

from __future__ import annotations

import numpy as np

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
