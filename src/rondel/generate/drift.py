"""Where the tokens of a conversation differ from what its chat template would write now, and why.

    written    what the policy read and wrote, token by token: what is trained
    rendered   encode(tpl(messages so far, gen_prompt=True)): what a server sends that renders every request anew

Kinds of the first difference:

    thought       the template drops a thought of an earlier turn, or puts an empty one in (Qwen3)
    tool_call     it writes the same call in another way
    whitespace    white space alone
    tokenization  the same text in other tokens
    other         anything else
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rondel.generate.calls import CallFormat

KINDS = ("thought", "tool_call", "whitespace", "tokenization", "other")
THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)


def first_difference(written: Sequence[int], rendered: Sequence[int]) -> int | None:
    """Place of the first token in which two streams differ; the shorter length where one begins with the other."""
    n = min(len(written), len(rendered))
    unequal = np.asarray(written[:n]) != np.asarray(rendered[:n])
    if unequal.any():
        return int(unequal.argmax())
    return None if len(written) == len(rendered) else n


def drift_kind(written: str, rendered: str, at: int, form: CallFormat) -> str:
    """One of KINDS: what must be left out of both texts for them to be equal. `at` is the character of `written` at
    which they part, and decides where several kinds came together."""
    if written == rendered:
        return "tokenization"
    if _squeezed(written) == _squeezed(rendered):
        return "whitespace"
    if _squeezed(_without_thoughts(written)) == _squeezed(_without_thoughts(rendered)):
        return "thought"
    if _squeezed(_plain_calls(written, form)) == _squeezed(_plain_calls(rendered, form)):
        return "tool_call"
    both = [_squeezed(_plain_calls(_without_thoughts(text), form)) for text in (written, rendered)]
    if both[0] == both[1]:
        ends = max((thought.end() for thought in THOUGHT.finditer(written) if thought.start() <= at), default=0)
        return "thought" if at < ends or written[at:].lstrip().startswith("<think>") else "tool_call"
    return "other"


def _without_thoughts(text: str) -> str:
    return THOUGHT.sub("", text)


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _plain_calls(text: str, form: CallFormat) -> str:
    """Calls that are JSON between two marks, each with its keys in order."""
    opens, closes = getattr(form, "opens", "<tool_call>"), getattr(form, "closes", "</tool_call>")
    if not opens or not closes:
        return text

    def rewrite(found: re.Match[str]) -> str:
        try:
            value: Any = json.loads(found[1])
        except (ValueError, RecursionError):
            return found[0]
        return f"{opens}{json.dumps(value, sort_keys=True)}{closes}"

    return re.sub(f"{re.escape(opens)}(.*?){re.escape(closes)}", rewrite, text, flags=re.DOTALL)
