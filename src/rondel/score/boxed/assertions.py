"""What a test asserts. Its text is compiled with a count behind each assertion, so that
one whose assertions never ran has not passed.

an assertion           counted
assert x               behind it
if wrong: raise ...    behind the if
try: f(-1)             where the error is caught, if the text says that going on is wrong,
and what is caught is no failed assertion
     assert False
except ValueError: ...
self.assertEqual(...)  when the call returns; so is every function whose name begins with "assert", and pytest.raises
what always holds      not counted: assert True, assert (x, "a tuple"), a function of the text that cannot fail

This text also runs in boxes, joined with harness.py: standard library only, and no import of ours.
"""

from __future__ import annotations

import ast
from typing import Any

MADE, CAUGHT, MAKES = " made", " caught", " makes"  # names that no text can say
ENDS = ("fail", "exit", "_exit", "quit")
CALLS = ("raises", "warns")
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
UNCALLED = "nothing gives {} its arguments, for fixtures and parametrize are not run: call it in the text"


class AssertionCounter(ast.NodeTransformer):
    """Adds the counts to a tree; `found` says how many.

    harmless  functions of the text that are called like assertions and cannot fail
    """

    def __init__(self, harmless: set[str]) -> None:
        self.found, self.harmless = 0, harmless

    def visit_Assert(self, node: ast.Assert) -> Any:
        self.generic_visit(node)
        known = _is_false(node.test) or _always_holds(node.test)
        return [node] if known else [node, self._counting_call(MADE, node)]

    def visit_If(self, node: ast.If) -> Any:
        wrong = any(map(_is_failure, (*node.body, *node.orelse)))
        self.generic_visit(node)
        return [node, self._counting_call(MADE, node)] if wrong else node

    def visit_Try(self, node: Any) -> Any:
        wrong = any(
            _is_failure(inner) for statement in (*node.body, *node.orelse) for inner in _walk_statement(statement)
        )
        self.generic_visit(node)
        for handler in node.handlers if wrong else ():
            handler.body.insert(0, self._counting_call(CAUGHT, handler))
        return node

    visit_TryStar = visit_Try

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        """A class that only helps is no test, though it may refuse its arguments."""
        return self.generic_visit(node) if node.bases or node.name.startswith("Test") else node

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        name = _function_name(node.func)
        asserts = name.startswith("assert") and not self._is_harmless(node)
        if asserts or (name in CALLS and isinstance(node.func, ast.Attribute)):
            self.found += 1
            node.func = ast.copy_location(
                ast.Call(ast.copy_location(ast.Name(MAKES, ast.Load()), node), [node.func], []), node
            )
        return node

    def _is_harmless(self, call: ast.Call) -> bool:
        """Whether a call that looks like an assertion cannot fail."""
        on = call.func
        own = isinstance(on, ast.Name) or (
            isinstance(on, ast.Attribute) and isinstance(on.value, ast.Name) and on.value.id in ("self", "cls")
        )
        name = _function_name(on)
        return (own and name in self.harmless) or (
            name == "assertTrue" and bool(call.args) and _always_holds(call.args[0])
        )

    def _counting_call(self, name: str, where: ast.AST) -> ast.stmt:
        self.found += 1
        call = ast.Expr(ast.Call(ast.Name(name, ast.Load()), [], []))
        return ast.fix_missing_locations(ast.copy_location(call, where))


def instrument_test(test: str) -> Any:
    """The test as a tree with counts."""
    tree = ast.parse(test)
    return AssertionCounter(_harmless_functions(tree)).visit(tree)


def has_assertions(*statements: ast.stmt, harmless: set[str]) -> bool:
    """Whether anything is asserted there. The statements are changed."""
    counting = AssertionCounter(harmless)
    for statement in statements:
        counting.visit(statement)
    return counting.found > 0


def explain_untested(test: str, entry: str) -> str:
    """Why a text that can be parsed tests nothing when it is run, and what to write instead; or nothing.

    entry: the name of the function that a `check(candidate)` is called with
    """
    tree = ast.parse(test)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Tuple) and node.test.elts:
            return (
                f"line {node.lineno} asserts a tuple, which always holds: write assert x, 'message' without parentheses"
            )
    harmless = _harmless_functions(tree)
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    run: list[ast.stmt] = []
    for statement in tree.body:
        if isinstance(statement, FUNCTION) and statement.name not in loaded:
            if statement.name == "check" and _required_arguments(statement) == 1:
                if not entry:
                    return (
                        "nothing calls its check(...): set data['entry_point'] to the name of the function, "
                        "or call it in the text"
                    )
            elif not statement.name.startswith("test"):
                continue  # nothing runs it
            elif _required_arguments(statement):
                return UNCALLED.format(statement.name)
        elif isinstance(statement, ast.ClassDef):
            for method in statement.body:
                if (
                    isinstance(method, FUNCTION)
                    and method.name.startswith("test")
                    and _required_arguments(method) > 1
                    and method.name not in loaded
                ):
                    return UNCALLED.format(method.name)
        run.append(statement)
    return (
        ""
        if has_assertions(*run, harmless=harmless)
        else "it asserts nothing that is run: write assert, a method of unittest, or a function test_... with them"
    )


def _required_arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many arguments it cannot do without."""
    arguments = function.args
    named = sum(default is None for default in arguments.kw_defaults)
    return len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults) + named


def _is_false(test: ast.expr) -> bool:
    return isinstance(test, ast.Constant) and not test.value


def _always_holds(test: ast.expr) -> bool:
    """Whether a value is true whatever the candidate does: a constant, a filled tuple or list, a function."""
    if isinstance(test, ast.Constant):
        return bool(test.value)
    if isinstance(test, ast.Tuple | ast.List | ast.Set):
        return any(not isinstance(one, ast.Starred) for one in test.elts)
    return isinstance(test, ast.Lambda | ast.GeneratorExp)


def _harmless_functions(tree: ast.AST) -> set[str]:
    """Functions called assert... in which nothing can fail: they say whether, and nobody reads it."""
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, FUNCTION) and node.name.startswith("assert") and not any(map(_may_fail, ast.walk(node)))
    }


def _may_fail(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        name = _function_name(node.func)
        return name.startswith("assert") or name in (*CALLS, *ENDS)
    return isinstance(node, ast.Raise | ast.Assert)


def _is_failure(statement: ast.AST) -> bool:
    """Whether coming here is wrong: raise, assert False, self.fail(), sys.exit(1)."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return _function_name(statement.value.func) in ENDS
    return isinstance(statement, ast.Raise) or (isinstance(statement, ast.Assert) and _is_false(statement.test))


def _walk_statement(statement: ast.AST) -> Any:
    """It and all below it, but no function that is only made there."""
    yield statement
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, (*FUNCTION, ast.ClassDef, ast.Lambda)):
            yield from _walk_statement(child)


def _function_name(function: ast.expr) -> str:
    return (
        function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
    )
