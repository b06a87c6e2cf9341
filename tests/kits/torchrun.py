"""torchrun, whose ranks are forked before it begins, where it would start an interpreter for each: five seconds of a core, and
three more for the fork server of each. A script of `kits.forked.Forked`: its words are torchrun's, and `rondel *words`.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from typing import Any

from kits.forked import _command
from kits.nursery import Nursery

RANKS = 2


class Own:
    """A descriptor of this process, as one that was sent to it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def detach(self) -> int:
        return os.dup(self.number)


def fork_rank(others: list[tuple[int, int]]) -> tuple[int, int]:
    """-> (process, the end of a pipe that takes its environment and words in one line)"""
    told, tells = os.pipe()
    if pid := os.fork():
        os.close(told)
        return pid, tells
    atexit._clear()  # what its parent has to end
    for end in (tells, *(end for _, end in others)):
        os.close(end)
    with os.fdopen(told) as lines:
        line = lines.readline()
    if line:
        env, words = json.loads(line)
        _command([Own(1), Own(2)], True, env, words, None, os.getcwd())
    os._exit(0)


def main() -> None:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.run import main as torchrun

    ranks: list[tuple[int, int]] = []
    for _ in range(RANKS):
        ranks.append(fork_rank(ranks))

    def start(args: tuple[str, ...], env: dict[str, str], **how: Any) -> Nursery:
        assert args[0] == "rondel" and how == {"stdout": None, "stderr": None, "start_new_session": True}
        pid, tells = ranks.pop(0)
        with os.fdopen(tells, "w") as line:
            print(json.dumps((env, args[1:])), file=line)
        return Nursery(pid)

    subprocess_handler.Popen = start  # type: ignore[assignment, misc]
    torchrun(sys.argv[1:])


if __name__ == "__main__":
    main()
