"""Text from outside, made fit to be read: valid Unicode where it comes in, nothing
hidden where it is shown on a terminal.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")  # how JSON spells half of a surrogate pair, or a whole one
HIDDEN = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def valid_unicode(value: Any) -> Any:
    r"""The same text or JSON-shaped data, keys included, that UTF-8 can write: valid("a\ud83d") -> "a\ufffd".

    Two halves of a surrogate pair that meet become their character. What is neither text,
    list nor table is returned as it came.
    """
    if isinstance(value, str):
        return (
            value if _is_encodable(value) else value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        )
    if isinstance(value, dict):
        return {valid_unicode(key): valid_unicode(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(valid_unicode, value))
    return value


def read_json(text: str | bytes) -> Any:
    """JSON from a client or a server as valid text. ValueError for what is no JSON or no UTF-8,
    RecursionError for what is nested too deeply.
    """
    text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    value = json.loads(text)
    return valid_unicode(value) if HALF_PAIR.search(text) else value


def write_json(value: Any) -> str:
    """One line of strict JSON; NaN and infinities survive."""
    how: dict[str, Any] = dict(ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    try:
        # nearly every event; rewriting each value in Python costs several times as much
        return json.dumps(value, **how)
    except (TypeError, ValueError):
        return json.dumps(_plain_json(value), **how)


def read_exact_json(text: str) -> Any:
    """The inverse of `write_json`, as valid text."""
    if '"$float"' not in text:
        return read_json(text)  # nearly every event; a hook is called for each object
    return valid_unicode(
        json.loads(text, object_hook=lambda node: float(node["$float"]) if node.keys() == {"$float"} else node)
    )


def visible_text(text: str) -> str:
    r"""For a terminal: control characters, marks that turn the direction of writing, and
    invalid text as escapes: "\x1b[2J" -> "\\x1b[2J".

    Line breaks and tabs stay.
    """
    return HIDDEN.sub(lambda found: _escape_code(ord(found[0])), text)


def _is_encodable(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _escape_code(code: int) -> str:
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def _plain_json(value: Any) -> Any:
    """Anything as JSON-shaped data: numpy scalars become numbers, paths become text."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, dict):
        return {str(k): _plain_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_json(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain_json(v) for v in value), key=str)
    if hasattr(value, "tolist"):
        return _plain_json(value.tolist())  # numpy and torch, without importing either
    return str(value)
