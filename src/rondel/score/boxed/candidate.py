"""In the box of the policy's code: loads it, and carries out what it is asked, a JSON object a line, until nobody asks any more.

{"code"} first; then {"name"} | {"on", "do", "args", "kwargs"}  ->  {"value"} | {"raised", "said"}
Whatever the code does to this interpreter, to these functions or to the answers: it can only answer, and it does not know what is wanted.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from typing import Any

from rondel.score.boxed.plain import pack, unpack

DO: dict[str, Any] = {
    "call": lambda on, *args, **kwargs: on(*args, **kwargs),
    "get": getattr,
    "len": len,
    "bool": bool,
    "str": str,
    "item": lambda on, key: on[key],
    "has": lambda on, key: key in on,
    "iter": lambda on: list(itertools.islice(on, 100_000)),
    "next": next,
}


def serve() -> None:
    asked, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the code prints is no answer
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.setrecursionlimit(10_000)
    main = type(sys)("candidate")
    kept: list[Any] = []

    def keep(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    for line in asked:
        order = json.loads(line)
        try:
            if "code" in order:
                exec(compile(order["code"], "<candidate>", "exec"), main.__dict__)
                value: Any = None
            elif "name" in order:
                value = main.__dict__[order["name"]]
            else:
                args = [unpack(one, kept.__getitem__) for one in order["args"]]
                named = {name: unpack(one, kept.__getitem__) for name, one in order["kwargs"].items()}
                value = DO[order["do"]](kept[order["on"]], *args, **named)
            answer = {"value": pack(value, keep)}
        except Exception as error:
            answer = {"raised": type(error).__name__, "said": str(error)[:500]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
