"""In the box of the tests: runs one, whose names of the candidate's are reached by
asking the candidate, in its own box.

stdin   the candidate's answers       stdout   what it is asked       stderr   why the test
        cannot be judged      exit code   the verdict
What a candidate returns arrives as plain data, or as a Far object. A candidate never
decides how its object compares with plain data: that would be a way to be equal to whatever is
expected, or to be told what that is. Nor does
it ask for anything here but what may be done to an object that a test has handed to it.
"""

from __future__ import annotations

import functools
import importlib
import io
import operator
import os
import sys
import types
from numbers import Number
from typing import Any

from rondel.score.boxed.compare import values_equal
from rondel.score.boxed.containers import CONTAINERS, SharedContainers
from rondel.score.boxed.far import BASES, End, Gone, UncrossableValue
from rondel.score.boxed.plain import VALUES, type_key, unpack
from rondel.score.boxed.proxy import BINARY, ORDER, Proxy
from rondel.score.boxed.remote_exceptions import RemoteExceptions
from rondel.score.boxed.suite import Suite, is_theirs

# not what a process says that ends for another reason
PASSED, WRONG, BROKEN, GONE, FAULT, EMPTY = 40, 41, 42, 43, 44, 45
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, type)
INNARDS = (
    types.ModuleType,
    types.FrameType,
    types.CodeType,
    types.TracebackType,
    types.CoroutineType,
    types.AsyncGeneratorType,
    End,
    SharedContainers,
    RemoteExceptions,
)
TEXTS = (io.StringIO, io.BytesIO)  # the files that are no files
STEPS = ("send", "throw")  # methods of a generator: it may end there
# what may be done to a function or a class
OUTSIDE = ("call", "bool", "eq", "ne", "hash", "str", "repr", "isinstance", "issubclass")


class Far(Proxy):
    """An object of the candidate's: it is asked for everything but what decides a comparison with plain data."""

    __slots__ = ()

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return BASES.get(self._far_base, Far)

    def __getattr__(self, name: str) -> Any:
        found = Proxy.__getattr__(self, name)
        if name in STEPS and issubclass(type(found), Proxy):
            object.__setattr__(found, "_far_steps", True)
        return found

    def _far_plain(self) -> Any:
        """What it is underneath, if it is a container."""
        data = self._far_end.ask("data", (self,), {})
        if type(data) is not BASES[self._far_base]:
            raise Gone
        return data

    def __eq__(self, other: object) -> Any:
        if issubclass(type(other), Proxy):
            return Proxy.__eq__(self, other)
        return self._far_plain() == other if self._far_base and is_plain(other) else NotImplemented

    def __ne__(self, other: object) -> Any:
        if issubclass(type(other), Proxy):
            return Proxy.__ne__(self, other)
        return self._far_plain() != other if self._far_base and is_plain(other) else NotImplemented

    __hash__ = Proxy.__hash__

    def _far_operate(self, what: str, *args: Any) -> Any:
        """Beside a number of the test's the result must be an object of the candidate's again, and
        must stay one until it is asked for a part: `abs(f(3) - 9) < 1e-6` would otherwise
        tell the 9 to whoever answers."""
        mine = [one for one in args if issubclass(type(one), Proxy)]
        given = [] if what == "round" else [one for one in args if not issubclass(type(one), Proxy)]
        if given and any(one._far_base for one in mine):
            return getattr(operator, what)(*(one._far_plain() if issubclass(type(one), Far) else one for one in args))
        if any(not isinstance(one, Number) or isinstance(one, bool) for one in given):
            return NotImplemented
        found = Proxy._far_operate(self, what, *args)
        if given or any(one._far_mixed for one in mine):
            if not issubclass(type(found), Proxy):
                raise TypeError(f"'{what}' of the candidate's object with a number gave a {type(found).__name__}")
            object.__setattr__(found, "_far_mixed", True)
        return found


class FarCoroutine(Far):
    """One that the candidate has begun; it runs to its end when it is awaited."""

    __slots__ = ()

    def __await__(self) -> Any:
        return self._far_do("await")
        yield

    def send(self, value: Any) -> Any:
        raise StopIteration(self._far_do("await"))

    def __next__(self) -> Any:
        return self.send(None)

    def throw(self, *error: Any) -> Any:
        raise error[-1]

    def close(self) -> None:
        pass


def _make_comparison(name: str) -> Any:
    def compare(self: Far, other: Any) -> Any:
        if issubclass(type(other), Proxy):
            return self._far_do(name, other) is True
        return (
            getattr(operator, name)(self._far_plain(), other) if self._far_base and is_plain(other) else NotImplemented
        )

    return compare


for _name in ORDER:
    setattr(Far, f"__{_name}__", _make_comparison(_name))


def is_plain(value: Any) -> bool:
    kind = type(value)
    return kind in (int, float, complex, str, bytes, bool, tuple, frozenset, type(None)) or bool(
        type_key(kind, VALUES) or type_key(kind, CONTAINERS)
    )


class TestsEnd(End):
    """The end of the tests."""

    def __init__(self) -> None:
        self.tells = os.dup(2)
        super().__init__(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"), Far, first=0)
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(nothing, fd)
        self.fault, self.gone = "", False
        self.asked = 0  # depth of orders of the candidate's
        self.consulted = False  # whether the test has asked more than what a name stands for

    def send_order(self, order: dict[str, Any]) -> Any:
        self.send(order)
        return self.receive_answer()

    def order_plain_data(self, order: dict[str, Any]) -> Any:
        """The answer as plain data alone: nothing in it asks the candidate again."""
        self.send(order)
        return self.receive_answer(copied=True)

    def ask(self, what: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Only an iterator may say that it has ended: raised by a function, it would end a
        map() or zip() of the test's unseen.
        """
        self.consulted = True
        try:
            return super().ask(what, args, kwargs)
        except (StopIteration, StopAsyncIteration) as error:
            on = args[0]
            if not is_theirs(error) or what == "next" or (issubclass(type(on), Proxy) and on._far_steps):
                raise
            wrong = RuntimeError(f"the candidate raised {type(error).__name__}, which only an iterator may")
            wrong._far = error.__dict__["_far"]  # type: ignore[attr-defined]
            raise wrong from None

    def receive_answer(self, copied: bool = False) -> Any:
        try:
            return super().receive_answer(copied)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            if is_theirs(error):
                raise
            self.gone = True
            raise Gone from error
        except Gone:
            self.gone = True  # also if the test catches whatever comes
            raise

    def serve(self, order: dict[str, Any]) -> None:
        self.asked += 1
        try:
            super().serve(order)
        finally:
            self.asked -= 1

    def carried_out(self, order: dict[str, Any]) -> dict[str, Any]:
        """Something is done to objects of the test's and to nothing else: what both ends
        have, a type say, the candidate has itself.
        """
        handed = [isinstance(one, dict) and one.keys() == {"y"} for one in order["args"]]
        if not any(handed[:2] if order["do"] in BINARY else handed[:1]):
            raise Gone
        return super().carried_out(order)

    def stand_in(self, number: int, base: str) -> Proxy:
        return FarCoroutine(self, number, "") if base == "await" else super().stand_in(number, base)

    def forget_unused(self) -> None:
        for number, shared in list(self.shared.by_number.items()):
            if sys.getrefcount(shared.value) <= 2:
                self.shared.drop(number)
                self.shared.dropped.append(number)

    def importable_name(self, value: Any) -> list[str] | None:
        """What the candidate can import itself: functions and classes of the standard library."""
        module, name = getattr(value, "__module__", None), getattr(value, "__name__", "")
        if (
            isinstance(value, FUNCTIONS)
            and module in sys.stdlib_module_names
            and getattr(sys.modules.get(module), name, None) is value
        ):
            return [module, name]
        return super().importable_name(value)

    def looked_up(self, module: str, name: Any) -> Any:
        found = super().looked_up(module, name) if module == "builtins" and not name.startswith("_") else None
        if not isinstance(found, type):
            raise ValueError(f"{module}.{name}")
        return found

    def refuse_export(self, value: Any) -> None:
        file = isinstance(value, io.IOBase) and not isinstance(value, TEXTS)
        kept = file or isinstance(value, INNARDS) or (isinstance(value, type) and issubclass(value, Proxy))
        if not kept:
            return
        reason = (
            f"a test hands a {type(value).__name__} to the candidate, whose code runs in another box; data, functions "
            f"and objects go there"
        )
        if not self.asked:
            self.fault = self.fault or reason
        raise UncrossableValue(reason)

    def allow(self, what: str, args: list[Any]) -> None:
        on = args[0]
        inside = what in ("get", "set", "delete") and (
            isinstance(on, types.GeneratorType) or is_internal(on, str(args[1]))
        )
        if inside or (isinstance(on, FUNCTIONS) and what not in OUTSIDE):
            raise AttributeError(f"'{what}' of a {type(on).__name__} of the test's")


def is_internal(on: Any, name: str) -> bool:
    """Whether an attribute is not for the candidate: what is Python's or ours, the
    library's own, and how a mock is made to compare.
    """
    return name.startswith(("__", "_far", "configure_mock")) or (
        name.startswith("_") and type(on).__module__ != "__main__"
    )


def judge(
    code: str, test: str, names: list[str], needed: list[str], modules: list[tuple[str, str, list[str]]], entry: str
) -> None:
    """The verdict of a text, as the exit code.

    names    those that it uses and does not make; without the `needed` ones it is not run
    modules  (name, module, attributes) that it uses without importing them: the candidate's only
             if the module has no such attributes
    """

    def run_suite(line: TestsEnd) -> int:
        given = {name: importlib.import_module(module) for name, module, _ in modules}
        theirs = [name for name, _, attributes in modules if not all(hasattr(given[name], one) for one in attributes)]
        found = {}
        for name in [*names, *theirs]:
            try:
                found[name] = line.send_order({"name": name})
            except KeyError:
                if name in needed:
                    return BROKEN
        if not found:
            return BROKEN
        suite = Suite(test, lambda: line.asked > 0)
        suite.run({**given, **found}, entry)
        # nothing of the candidate's led here
        if not line.consulted and all(issubclass(type(one), Proxy) for one in found.values()):
            how = "whatever it answers, the test passes" if suite.made else "none of its assertions is carried out"
            line.fault = f"the candidate is asked nothing, and {how}"
            return EMPTY
        return PASSED if suite.made else EMPTY

    _run_and_exit(code, run_suite)


def judge_call(code: str, name: str, args: list[Any], expected: Any) -> None:
    """The verdict of one call, whose result is compared as a copy. `args`, `expected`: packed."""

    def run_call(line: TestsEnd) -> int:
        return PASSED if values_equal(line.order_plain_data({"plain": name, "args": args}), unpack(expected)) else WRONG

    _run_and_exit(code, run_call)


def _run_and_exit(code: str, run: Any) -> None:
    """Runs it beside the candidate, and ends the process with the verdict."""
    verdict, line = BROKEN, TestsEnd()
    try:
        line.send_order({"code": code})
        verdict = run(line)
    except Gone:
        verdict = GONE
    except AssertionError:
        verdict = WRONG
    except ModuleNotFoundError as error:
        if not is_theirs(error):
            line.fault = f"the tests import '{error.name}', which is not in their box"
    except BaseException as error:
        del error
    finally:
        if line.gone:
            verdict = GONE
        elif line.fault and verdict != PASSED:
            os.write(line.tells, line.fault.encode()[:2000])
            verdict = FAULT
        os._exit(verdict)
