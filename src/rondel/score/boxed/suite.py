"""Runs the text of a test: its statements, then check(candidate), functions
test_..., and classes of unittest and pytest.

A test passes if nothing is raised and at least one assertion was carried out by the text
itself: what runs because the candidate asked for it is not counted, nor is what the test skips.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

from rondel.score.boxed.assertions import CAUGHT, MADE, MAKES, instrument_test
from rondel.score.boxed.proxy import Proxy


def is_theirs(error: BaseException | None) -> bool:
    """Whether the candidate raised it."""
    return error is not None and "_far" in vars(error)


class Suite:
    """`Suite(test, called_back).run(names, "f")`: afterwards `made` assertions have held.

    called_back  whether the candidate's code is calling the test's now
    """

    def __init__(self, test: str, called_back: Callable[[], bool]) -> None:
        self.test, self.called_back, self.made = test, called_back, 0
        self.module = types.ModuleType("__main__")
        self.space = self.module.__dict__

    def run(self, names: dict[str, Any], entry: str) -> None:
        """names: those of the candidate's that the test uses. `entry`: its function for a check(candidate), or ""."""
        solution = types.ModuleType("solution")
        solution.__dict__.update(names)
        sys.modules.update({"__main__": self.module, "solution": solution})
        self.space.update(names)
        self.space.update({MADE: self._count_assertion, CAUGHT: self._count_caught, MAKES: self._count_calls})
        if "unittest" in self.test:  # its main would look for the tests by itself, and end the process
            importlib.import_module("unittest").main = lambda *_, **__: None  # type: ignore[attr-defined]
        self._run_statements()
        if entry and callable(check := self.space.get("check")):
            run_to_end(check(names[entry]))
        self._call_if_defined("setUpModule")
        for name, value in list(self.space.items()):
            if issubclass(type(value), Proxy):
                continue
            if isinstance(value, type):
                self._run_class(name, value)
            elif name.startswith("test") and callable(value) and not needs_arguments(value):
                run_to_end(value())
        self._call_if_defined("tearDownModule")

    def _run_statements(self) -> None:
        try:
            exec(compile(instrument_test(self.test), "<test>", "exec", dont_inherit=True), self.space)
        except SystemExit as error:  # the end of a main block
            if error.code:
                raise

    def _run_class(self, name: str, kind: Any) -> None:
        unittest = sys.modules.get("unittest")
        if kind.__module__ != "__main__":
            return
        if unittest and issubclass(kind, unittest.TestCase):
            self._run_cases(unittest, kind)
        elif name.startswith("Test") and kind.__init__ is object.__init__:
            self._run_methods(kind)

    def _run_cases(self, unittest: Any, kind: Any) -> None:
        """Not by its runner, which would take what a candidate raises for a test that is skipped."""
        try:
            kind.setUpClass()
            for method in unittest.defaultTestLoader.getTestCaseNames(kind):
                case = kind(method)
                if getattr(getattr(case, method), "__unittest_expecting_failure__", False):
                    continue
                try:
                    case.debug()
                except unittest.SkipTest as error:
                    if is_theirs(error):
                        raise
            kind.tearDownClass()
        finally:
            kind.doClassCleanups()

    def _run_methods(self, kind: Any) -> None:
        for name in sorted(dir(kind)):
            if name.startswith("test") and callable(getattr(kind, name)):
                one = kind()
                for step in ("setup_class", "setup_method", name, "teardown_method", "teardown_class"):
                    if (method := getattr(one, step, None)) is not None:
                        run_to_end(method(getattr(one, name)) if step != name and needs_arguments(method) else method())

    def _call_if_defined(self, name: str) -> None:
        if isinstance(self.space.get(name), types.FunctionType):
            self.space[name]()

    # -- what the text calls behind its assertions -----------------------------------------------

    def _count_assertion(self) -> None:
        self.made += not self.called_back()

    def _count_caught(self) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, AssertionError) or is_theirs(error):
            self._count_assertion()

    def _count_calls(self, assertion: Any) -> Any:
        """The same function, counted when it returns; one of the candidate's is no assertion of the test's."""
        if issubclass(type(assertion), Proxy):
            return assertion

        def counted_assertion(*args: Any, **kwargs: Any) -> Any:
            result = assertion(*args, **kwargs)
            self._count_assertion()
            return result

        return counted_assertion


def needs_arguments(function: Any) -> bool:
    """Whether a function or method of the text cannot be called without any."""
    bound = isinstance(function, types.MethodType)
    code = getattr(function, "__code__", None)
    if not isinstance(code, types.CodeType):
        return False
    return code.co_argcount - len(function.__defaults__ or ()) > bound


def run_to_end(result: Any) -> None:
    """What a test returns is run to its end: a coroutine, a generator."""
    if isinstance(result, types.CoroutineType):
        importlib.import_module("asyncio").run(result)
    elif isinstance(result, types.GeneratorType):
        for _ in result:
            pass
