"""Calls that are written as lines, for models whose template knows none: "cancel: 51234 mistake"."""

from __future__ import annotations

import re
from typing import Any

from rondel.generate.calls import ToolCall
from rondel.generate.envs.shop.speech import LINE_NAMES

NAMES = {short: name for name, short in LINE_NAMES.items()}
LINE = re.compile(rf"^({'|'.join(NAMES)}): ?(.*)$", re.MULTILINE)
ONE = {"find_user": "who", "get_user": "customer", "get_order": "order", "get_product": "product",
       "search_products": "text", "transfer_to_human": "summary"}  # fmt: skip
TWO = {"cancel_order": "reason", "change_address": "address", "change_payment": "payment"}


def read_line_calls(text: str) -> list[ToolCall]:
    """The calls of a reply, in order."""
    return [_read_call(NAMES[short], rest.strip()) for short, rest in LINE.findall(text)]


def _read_call(name: str, rest: str) -> ToolCall:
    if name in ONE:
        return ToolCall(name, {ONE[name]: rest})
    order, _, rest = rest.partition(" ")
    if name in TWO:
        return ToolCall(name, {"order": order, TWO[name]: rest})
    *items, payment = rest.split() or [""]
    if name == "return_items":
        return ToolCall(name, {"order": order, "items": items, "refund_to": payment})
    pairs = [item.partition("=") for item in items]
    found: dict[str, Any] = {"items": [old for old, _, _ in pairs], "new_items": [new for _, _, new in pairs]}
    return ToolCall(name, {"order": order, **found, "payment": payment})
