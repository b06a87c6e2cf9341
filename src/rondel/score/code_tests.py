"""What the tests of a task ask of an answer: read, without running them."""

from __future__ import annotations

import ast
import builtins
import re
import symtable
import sys
from functools import lru_cache
from typing import Any, NamedTuple

from rondel.core.errors import DataError
from rondel.core.types import Task
from rondel.score.boxed.assertions import explain_untested
from rondel.score.boxed.plain import pack

FENCE = re.compile(r"^```[^\n`]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
ALIASES = {"np": "numpy", "numpy": "numpy", "pd": "pandas", "pandas": "pandas"}


def extract_code(text: str) -> str:
    """The last fenced block, or the whole text where there is none."""
    blocks = FENCE.findall(text)
    return blocks[-1] if blocks else text


def read_tests(task: Task) -> list[Any]:
    """The tests of a task, or what is wrong with them."""
    tests = task.data.get("tests")
    tests = [tests] if isinstance(tests, str) else tests
    if not isinstance(tests, list | tuple) or not tests:
        raise DataError(
            f"task {task.id} has no tests: data['tests'] is a list of asserts, of {{input, output}} or of {{call, "
            f"expected}}"
        )
    for number, test in enumerate(tests):
        if isinstance(test, str):
            wrong = _test_problem(test, str(task.data.get("entry_point", "")), reference_of(task))
        elif not isinstance(test, dict) or not (
            {"input", "output"} <= test.keys() or {"call", "expected"} <= test.keys()
        ):
            wrong = f"is {str(test)[:80]!r}; a test is Python text, {{input, output}} or {{call, expected}}"
        elif "call" in test:
            wrong = _call_problem(test, task)
        else:
            wrong = ""
        if wrong:
            raise DataError(f"test {number} of {task.id} {wrong}")
    if all(isinstance(test, dict) and "input" in test and not str(test["output"]).strip() for test in tests):
        raise DataError(f"no test of {task.id} expects any output: a program that does nothing would pass")
    if all(isinstance(test, dict) and "call" in test and test["expected"] is None for test in tests):
        raise DataError(f"no test of {task.id} expects anything but null: a function that does nothing would pass")
    return list(tests)


def reference_of(task: Task) -> str:
    """The code of the task's own answer, or ""."""
    answer = task.data.get("answer")
    return extract_code(answer) if isinstance(answer, str) else ""


@lru_cache(4096)
def _test_problem(test: str, entry: str, answer: str) -> str:
    """What is wrong with a text, or nothing."""
    try:
        if wrong := explain_untested(test, entry):
            return f"tests nothing: {wrong}"
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"is no Python: {error}"
    if names_of(test, entry, answer).asked:
        return ""
    known = ", ".join(sorted(names_read(test)))
    why = (
        f"calls nothing but built-in functions ({known}): set data['entry_point'] to the one that is asked for"
        if known
        else "asks nothing"
    )
    return f"tests nothing of an answer: it {why}"


def _call_problem(test: dict[str, Any], task: Task) -> str:
    if not isinstance(test.get("function", task.data.get("entry_point")), str):
        return "calls no named function: set data['entry_point'], or 'function' in the case"
    try:
        pack([test["call"], test["expected"]])
        return (
            ""
            if isinstance(test["call"], list | tuple)
            else f"calls with {test['call']!r:.80}; a list of arguments is needed"
        )
    except (TypeError, ValueError) as error:
        return f"has what is no plain data: {error}"


def harness_call(code: str, test: Any, task: Task) -> str:
    """What the box of the tests carries out, behind the text of HARNESS."""
    entry = str(task.data.get("entry_point", ""))
    if isinstance(test, str):
        asked, needed, modules = names_of(test, entry, reference_of(task))
        return f"judge({code!r}, {test!r}, {asked!r}, {needed!r}, {modules!r}, {entry!r})"
    arguments = [pack(one) for one in test["call"]]
    return f"judge_call({code!r}, {test.get('function', entry)!r}, {arguments!r}, {pack(test['expected'])!r})"


class TestedNames(NamedTuple):
    """What a text asks for. asked: of the candidate; needed: those of them that are built in,
    without which the text is not run; modules: (name, module, attributes) that it uses and
    does not import, because its prompt does. A
    candidate's `math` is asked for nothing."""

    asked: list[str]
    needed: list[str]
    modules: list[tuple[str, str, list[str]]]


@lru_cache(4096)
def names_of(test: str, entry: str, answer: str) -> TestedNames:
    """A candidate replaces no built-in function, but for the one that is tested: the entry
    point; in a text that knows no other name, what the task's own answer defines, or the only one that it calls."""
    free = set(free_names(test))
    builtin = names_read(test) - free
    needed = builtin & {entry}
    modules = _implicit_modules(test, free - {entry, *defined_names(answer)})
    asked = free - {name for name, *_ in modules} | needed
    if not asked:
        modules, asked = [], free
    if not asked:
        asked = needed = builtin & defined_names(answer) or (builtin if len(builtin) == 1 else set())
    checks = {entry} if entry and re.search(r"\bcheck\b", test) else set()
    return TestedNames(sorted(asked | checks), sorted(needed), modules)


def _implicit_modules(test: str, names: set[str]) -> list[tuple[str, str, list[str]]]:
    """Those of the names that are called like a module, and of which nothing is read but attributes."""
    tree = ast.parse(test)
    roots = {id(node.value): node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    read: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            read.setdefault(node.id, set()).add(roots.get(id(node), ""))
    known = [name for name in sorted(names & read.keys()) if name in sys.stdlib_module_names or name in ALIASES]
    return [(name, ALIASES.get(name, name), sorted(read[name])) for name in known if "" not in read[name]]


@lru_cache(4096)
def defined_names(answer: str) -> set[str]:
    """Names that the top of a task's own answer makes."""
    try:
        tree = ast.parse(answer)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    made = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    return made | {target.id for target in targets if isinstance(target, ast.Name)}


def free_names(test: str) -> list[str]:
    """Names that a test reads and neither makes nor finds among the built-in ones: the candidate's."""
    return sorted(name for name in names_read(test) if not hasattr(builtins, name))


def names_read(test: str) -> set[str]:
    """Names that a test reads and does not make."""
    top = symtable.symtable(test, "<test>", "exec")
    made = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    tables, read = [top], set()
    for table in tables:
        tables += table.get_children()
        read |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (s.is_global() or table is top)}
        made |= {s.get_name() for s in table.get_symbols() if s.is_declared_global() and s.is_assigned()}
    for node in ast.walk(ast.parse(test)):
        if isinstance(node, ast.ImportFrom) and node.module == "solution":
            read |= {alias.name for alias in node.names}
            made -= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "solution":
            read.add(node.attr)
    return read - made - {"__name__"}
