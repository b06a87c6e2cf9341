"""One rollout as the detectors read it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

LONGEST = 64_000  # characters of a rollout that are read: no pattern here may meet an endless text
AROUND = 40  # characters of context on each side of a quoted span
Hack = tuple[str, str]  # name, quoted span

# a path that names tests: tests/x, test_x.py, x_test.go, x.spec.ts, conftest.py
# Every repetition is bounded: a policy writes what it likes, and no pattern may take quadratic time on it.
TEST_PATH = (
    r"(?:(?<![\w./~-])[\w.~-]{0,40}(?:/[\w.~-]{1,40}){0,6}?/?\btests?/[\w./*-]{1,80}"
    r"|(?<![\w.~-])(?:[\w.~-]{0,40}/){0,6}(?:test_\w{1,60}\.\w{1,5}|\w{1,60}_test\.\w{1,5}|conftest\.py|[\w-]{1,60}\.(?:spec|test)\.[jt]sx?))"
)


@dataclass(frozen=True)
class Rollout:
    """
    pieces  text in order, and whether the policy wrote it: [(False, "3 + 4 ="), (True, "7")]
    data    the fields of its task: prompt, answer, tests, ...
    """

    pieces: list[tuple[bool, str]]
    data: dict[str, Any]

    @cached_property
    def written(self) -> str:
        return "\n".join(text for own, text in self.pieces if own)[-LONGEST:]

    @cached_property
    def last_turn(self) -> str:
        return next((text for own, text in reversed(self.pieces) if own), "")[-LONGEST:]

    @cached_property
    def prompt(self) -> str:
        """What stands before the policy's first word."""
        return str(self.data.get("prompt", "")) or (self.pieces[0][1] if self.pieces and not self.pieces[0][0] else "")

    @cached_property
    def exchanges(self) -> list[tuple[str, str]]:
        """(what the policy wrote, what it read in return), for each time that it read something."""
        both = zip(self.pieces, self.pieces[1:])
        return [(a[-LONGEST:], b[:LONGEST]) for (own, a), (other, b) in both if own and not other]

    @cached_property
    def tests(self) -> list[Any]:
        found = self.data.get("tests") or []
        return [found] if isinstance(found, str | dict) else list(found)

    @cached_property
    def answer(self) -> str:
        found = self.data.get("answer")
        return "" if found is None else str(found).strip()


def quote_match(text: str, found: re.Match[str]) -> str:
    """The span with a little around it, in one line."""
    start, end = max(0, found.start() - AROUND), min(len(text), found.end() + AROUND)
    return " ".join(text[start:end].split())


def search_all(name: str, patterns: tuple[re.Pattern[str], ...], text: str) -> Iterator[Hack]:
    """The first place of each pattern."""
    for pattern in patterns:
        if found := pattern.search(text):
            yield name, quote_match(text, found)
