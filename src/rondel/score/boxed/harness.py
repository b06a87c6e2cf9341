"""In the box of the tests: runs one, whose names of the candidate's are reached by asking the candidate, in its own box.

stdin   the candidate's answers       stdout   what it is asked       stderr   why the test cannot be judged      exit code   the verdict
What a candidate returns arrives as plain data, or as a Far object. A candidate never decides how its object compares with plain data:
that would be a way to be equal to whatever is expected, or to be told what that is.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
import types
from numbers import Number
from typing import Any

from rondel.score.boxed.far import BASES, CONTAINERS, ORDER, End, Gone, Proxy, Refused
from rondel.score.boxed.plain import VALUES, named

PASSED, WRONG, BROKEN, GONE, FAULT = 40, 41, 42, 43, 44  # not what a process says that ends for another reason
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, type)
INNARDS = (types.ModuleType, types.FrameType, types.CodeType, types.TracebackType, types.CoroutineType, types.AsyncGeneratorType)
OUTSIDE = ("call", "bool", "eq", "ne", "hash", "str", "repr", "isinstance", "issubclass")  # what may be done to a function or a class


class Far(Proxy):
    """An object of the candidate's: it is asked for everything but what decides a comparison with plain data."""

    __slots__ = ()

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return BASES.get(self._far_base, Far)

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
        """Beside a number of the test's the result must be an object of the candidate's again, and must stay one until it is asked for a part:
        `abs(f(3) - 9) < 1e-6` would otherwise tell the 9 to whoever answers."""
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


def _ordered(name: str) -> Any:
    def compare(self: Far, other: Any) -> Any:
        if issubclass(type(other), Proxy):
            return self._far_do(name, other) is True
        return getattr(operator, name)(self._far_plain(), other) if self._far_base and is_plain(other) else NotImplemented

    return compare


for _name in ORDER:
    setattr(Far, f"__{_name}__", _ordered(_name))


def is_theirs(error: BaseException) -> bool:
    """Whether the candidate raised it."""
    return "_far" in vars(error)


def is_plain(value: Any) -> bool:
    kind = type(value)
    return kind in (int, float, complex, str, bytes, bool, tuple, frozenset, type(None)) or bool(
        named(kind, VALUES) or named(kind, CONTAINERS)
    )


class Line(End):
    """The end of the tests."""

    def __init__(self) -> None:
        self.tells = os.dup(2)
        super().__init__(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"), Far, first=0)
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(nothing, fd)
        self.fault, self.gone = "", False
        self.asked = 0  # depth of orders of the candidate's

    def order(self, order: dict[str, Any]) -> Any:
        self.send(order)
        return self.answer()

    def answer(self) -> Any:
        try:
            return super().answer()
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            if is_theirs(error):
                raise
            self.gone = True
            raise Gone from error
        except Gone:
            self.gone = True  # also if the test catches whatever comes
            raise

    def carried_out(self, order: dict[str, Any]) -> dict[str, Any]:
        self.asked += 1
        try:
            return super().carried_out(order)
        finally:
            self.asked -= 1

    def forget(self) -> None:
        for number, shared in list(self.shared.items()):
            if sys.getrefcount(shared.value) <= 2:
                self.drop(number)
                self.dropped.append(number)

    def known(self, value: Any) -> list[str] | None:
        """What the candidate can import itself: functions and classes of the standard library."""
        module, name = getattr(value, "__module__", None), getattr(value, "__name__", "")
        if isinstance(value, FUNCTIONS) and module in sys.stdlib_module_names and getattr(sys.modules.get(module), name, None) is value:
            return [module, name]
        return super().known(value)

    def looked_up(self, module: str, name: Any) -> Any:
        found = super().looked_up(module, name) if module == "builtins" else None
        if not isinstance(found, type):
            raise ValueError(f"{module}.{name}")
        return found

    def admit(self, value: Any) -> None:
        if not isinstance(value, INNARDS):
            return
        reason = (
            f"a test hands a {type(value).__name__} to the candidate, whose code runs in another box; data, functions and objects go there"
        )
        if not self.asked:
            self.fault = self.fault or reason
        raise Refused(reason)

    def allow(self, what: str, args: list[Any]) -> None:
        on = args[0]
        inside = what in ("get", "set", "delete") and (isinstance(on, types.GeneratorType) or str(args[1]).startswith("__"))
        if inside or (isinstance(on, FUNCTIONS) and what not in OUTSIDE):
            raise AttributeError(f"'{what}' of a {type(on).__name__} of the test's")


def judge(code: str, test: str, names: list[str], entry: str) -> None:
    """`names`: those that the test uses and does not make. Ends the process with the verdict."""
    verdict, line = BROKEN, Line()
    try:
        line.order({"code": code})
        module = sys.modules["task_test"] = type(sys)("task_test")
        space = module.__dict__
        solution = type(sys)("solution")
        for name in names:
            try:
                space[name] = line.order({"name": name})
            except KeyError:
                continue
            setattr(solution, name, space[name])
        sys.modules["solution"] = solution
        exec(compile(test, "<test>", "exec", dont_inherit=True), space)
        if entry and callable(space.get("check")):
            space["check"](space[entry] if entry in space else line.order({"name": entry}))
        for name, value in list(space.items()):
            if name.startswith("test") and callable(value) and not issubclass(type(value), Proxy):
                value()
        verdict = PASSED
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
