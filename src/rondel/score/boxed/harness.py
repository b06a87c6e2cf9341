"""In the box of the tests: runs one, whose names of the candidate's are reached by asking the candidate, in its own box.

stdin   the candidate's answers       stdout   what it is asked        exit code   the verdict
What a candidate returns arrives as plain data, or as a Far object that is equal to nothing but itself.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
from typing import Any

from rondel.score.boxed.plain import pack, unpack

PASSED, WRONG, BROKEN, GONE = 40, 41, 42, 43  # not what a process says that ends for another reason


class Gone(BaseException):
    """The candidate answers no more, or nonsense."""


class CandidateError(Exception):
    """It raised something of its own."""


class Line:
    def __init__(self) -> None:
        self.answers, self.asks = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def ask(self, order: dict[str, Any]) -> Any:
        try:
            self.asks.write(json.dumps(order).encode() + b"\n")
            self.asks.flush()
            line = self.answers.readline(1 << 24)
            answer = json.loads(line)
            if "raised" not in answer:
                return unpack(answer["value"], lambda number: Far(self, number))
            name, said = str(answer["raised"]), str(answer["said"])
        except Exception as error:
            raise Gone from error
        kind = getattr(builtins, name, None)
        if not isinstance(kind, type) or not issubclass(kind, Exception) or issubclass(kind, UnicodeError | AssertionError):
            raise CandidateError(f"{name}: {said}")
        raise kind(said)


class Far:
    """An object of the candidate's: it is asked for everything but what decides a comparison."""

    def __init__(self, line: Line, number: Any) -> None:
        self.__dict__.update(_line=line, _number=number)

    def _do(self, what: str, *args: Any, **kwargs: Any) -> Any:
        sent = [pack(one, _number) for one in args], {name: pack(one, _number) for name, one in kwargs.items()}
        return self._line.ask({"on": self._number, "do": what, "args": sent[0], "kwargs": sent[1]})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._do("call", *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._do("get", name)

    def __len__(self) -> int:
        return self._do("len")

    def __bool__(self) -> bool:
        return self._do("bool") is True

    def __str__(self) -> str:
        return str(self._do("str"))

    def __getitem__(self, key: Any) -> Any:
        return self._do("item", key)

    def __contains__(self, key: Any) -> bool:
        return self._do("has", key) is True

    def __iter__(self) -> Any:
        return iter(self._do("iter"))

    def __next__(self) -> Any:
        return self._do("next")


def _number(value: Any) -> Any:
    if isinstance(value, Far):
        return value._number
    raise TypeError(
        f"a test cannot hand a {type(value).__name__} to the candidate: its code runs elsewhere, and only plain data goes there"
    )


def judge(code: str, test: str, names: list[str], entry: str) -> None:
    """`names`: those that the test uses and does not make. Ends the process with the verdict."""
    verdict = BROKEN
    try:
        line = Line()
        line.ask({"code": code})
        space: dict[str, Any] = {"__name__": "test"}
        solution = type(sys)("solution")
        for name in names:
            try:
                space[name] = line.ask({"name": name})
            except KeyError:
                continue
            setattr(solution, name, space[name])
        sys.modules["solution"] = solution
        exec(compile(test, "<test>", "exec"), space)
        if entry and callable(space.get("check")):
            space["check"](space.get(entry) or line.ask({"name": entry}))
        for name, value in list(space.items()):
            if name.startswith("test") and callable(value) and not isinstance(value, Far):
                value()
        verdict = PASSED
    except Gone:
        verdict = GONE
    except AssertionError:
        verdict = WRONG
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}"[:2000])
        sys.stderr.flush()
    finally:
        os._exit(verdict)
