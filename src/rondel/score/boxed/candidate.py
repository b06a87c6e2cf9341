"""In the box of the policy's code: loads it, and carries out what it is asked, a JSON
object a line, until nobody asks any more.

{"code"} first; then {"name"} | {"plain"} | {"do", "args", "kwargs"}  ->  {"value"} | {"raised", "said"}
Whatever the code does to this interpreter, to these functions or to the answers: it can only
answer, and it does not know what is wanted.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from rondel.score.boxed.far import End, Gone
from rondel.score.boxed.plain import pack, unpack
from rondel.score.boxed.proxy import Proxy


def serve() -> None:
    end = End(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"), Proxy, first=1)
    os.dup2(2, 1)  # what the code prints is no answer
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.setrecursionlimit(10_000)
    main = sys.modules["candidate"] = type(sys)("candidate")

    def carried_out(order: dict[str, Any]) -> dict[str, Any]:
        if "do" in order:
            return end.carried_out(order)
        try:
            if "code" in order:
                exec(compile(order["code"], "<candidate>", "exec", dont_inherit=True), main.__dict__)
                return {"value": None}
            if "plain" in order:  # of a function whose result is compared as a copy
                return {"value": pack(main.__dict__[order["plain"]](*map(unpack, order["args"])))}
            return {"value": end.pack(main.__dict__[order["name"]])}
        except Exception as error:
            return end.pack_error(error)

    try:
        while True:
            end.send(carried_out(end.receive()))
    except Gone:
        return
