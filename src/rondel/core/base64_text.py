"""Bytes as JSON can hold them: base64, of long ones in pieces, so that nobody has the interpreter for long at a time."""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any

PIECE = 3 << 18  # bytes of a piece, a whole number of letters: two milliseconds


def bytes_to_text(data: Any) -> str | list[str]:
    """Of whatever has a buffer; `text_to_bytes` gives it back."""
    view = memoryview(data)
    raw = view.cast("B") if view.nbytes else memoryview(b"")
    pieces = [b64encode(raw[at : at + PIECE]).decode() for at in range(0, len(raw) or 1, PIECE)]
    return pieces if len(pieces) > 1 else pieces[0]


def text_to_bytes(text: str | list[str]) -> bytes:
    return b64decode(text) if isinstance(text, str) else b"".join(map(b64decode, text))
