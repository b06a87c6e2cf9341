"""What is kept of requests: a line each in requests.jsonl, and their sums in card.json."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from rondel.core.errors import CheckpointError, disk_refusal
from rondel.system.files import replace_file

T = TypeVar("T")
_line: ContextVar[dict[str, Any]] = ContextVar("line")  # what a request adds to its own


class RequestLog:
    """`await log.run("forward", "session:train:0", work)`: a line when it has ended, whatever its end. A disk that takes
    no line is told on stderr and fails no request: what it did is done, and would be done twice.

    requests.jsonl   {"at", "what", "who", "seconds", "tokens"?, "failed"?}
    card.json        the counts, written anew with every step of an optimizer
    """

    def __init__(self, folder: Path, base_model: str) -> None:
        self.folder, self.base_model = folder, base_model
        self.counts = {"sessions": 0, "models": 0, "steps": 0, "trained_tokens": 0, "sampled_tokens": 0, "failures": 0}
        self._file = (folder / "requests.jsonl").open("a+b", buffering=0)
        self._torn = bool(end := self._file.tell()) and os.pread(self._file.fileno(), 1, end - 1) != b"\n"
        self._refused = ""

    async def run(self, what: str, who: str, work: Callable[[], Awaitable[T]]) -> T:
        began, fault = time.time(), ""
        told: dict[str, Any] = {}
        _line.set(told)
        try:
            return await work()
        except BaseException as error:
            fault = f"{type(error).__name__}: {error}"
            self.counts["failures"] += 1
            raise
        finally:
            line = {"at": round(began, 3), "what": what, "who": who, "seconds": round(time.time() - began, 4)} | told
            with self._telling_refusals():
                self._write_line(line | ({"failed": fault} if fault else {}))
                if what == "optim_step":
                    self.write_card()

    def _write_line(self, line: dict[str, Any]) -> None:
        if self._file.closed:
            return
        text = b"\n" * self._torn + json.dumps(line).encode() + b"\n"
        self._torn = self._file.write(text) != len(text)

    @contextmanager
    def _telling_refusals(self) -> Iterator[None]:
        """Once, until it takes lines again."""
        try:
            yield
        except (OSError, CheckpointError) as error:
            refused = disk_refusal(error, f"writing {self.folder / 'requests.jsonl'}") or str(error)
            if refused != self._refused:
                print(f"requests are not noted: {refused}", file=sys.stderr, flush=True)
            self._refused = refused
        else:
            self._refused = ""

    def count_tokens(self, kind: str, tokens: int) -> None:
        """Of the request that runs: "trained", "sampled", or "" for those that are in its line alone."""
        if kind:
            self.counts[f"{kind}_tokens"] += tokens
        _line.get()["tokens"] = tokens

    def write_card(self) -> None:
        card = {"base_model": self.base_model, **self.counts, "written": time.time()}
        replace_file(self.folder / "card.json", json.dumps(card, indent=2) + "\n")

    def close(self) -> None:
        with self._telling_refusals():
            self.write_card()
        self._file.close()
