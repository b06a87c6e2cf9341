"""Errors as the policy reads them: what is wrong, and nothing of the machine on which it went wrong.

RuntimeError: Traceback (most recent call last):        RuntimeError: KeyError: 'x'
  File "/home/me/run/tools.py", line 7, in get    ->
KeyError: 'x'
FileNotFoundError: '/home/me/run/data/a.txt'      ->    FileNotFoundError: 'a.txt'
"""

from __future__ import annotations

import json
import re
from typing import Any

FRAMES = re.compile(r"(?:[|+ ]*(?:Exception Group )?Traceback \(most recent call last\):\n)(?:[ \t|+].*(?:\n|\Z))*")
FRAME = re.compile(r'^\s*File "[^"\n]*", line \d+.*\n?', re.MULTILINE)
# an absolute path of two names or more, which is not the end of an address or of a fraction
PATH = re.compile(r"(?<![\w/:.~-])(?:~|[A-Za-z]:)?/(?:[\w.+@ -]*[\w.+@-]/)+[\w.+@-]*")


def visible_error(text: str, said: Any = None) -> str:
    """The same without frames of tracebacks, and without the folders of absolute paths; those that the policy itself
    has named (`said`, the arguments of its call) stay."""
    text = FRAME.sub("", FRAMES.sub("", text))
    known = "" if said is None else json.dumps(said, ensure_ascii=False, default=str)

    def shorten(found: re.Match[str]) -> str:
        path = found[0]
        return path if path in known else path.rstrip("/").rpartition("/")[2]

    return PATH.sub(shorten, text)
