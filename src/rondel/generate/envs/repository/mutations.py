"""Bugs that a program can have: small changes of one function, each written into the text at its place.

comparison   < becomes <=, == becomes !=, in becomes not in      operator    + becomes -, // becomes /, and becomes or
off_by_one   a whole number becomes its neighbour                negation    a `not` is dropped, a condition turned round
arguments    the first two arguments of a call are swapped       default     another default of a parameter
early_end    continue becomes break, a value becomes None        lost        a statement is left out

What is not changed keeps its form to the character: nothing but the bug itself shows where it is.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

COMPARISONS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}  # fmt: skip
OPERATORS = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "//"), ast.FloorDiv: ("//", "/"), ast.Div: ("/", "//"),
    ast.Mod: ("%", "//"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"),
}  # fmt: skip
LARGEST = 1000  # numbers above are not counts
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Mutation(NamedTuple):
    """One bug: bytes `first` to `last` of the file become `text`. `function` is the dotted name of what it is in,
    `line` the first line of that function.
    """

    kind: str
    function: str
    line: int
    first: int
    last: int
    text: bytes

    def apply(self, source: bytes) -> bytes:
        return source[: self.first] + self.text + source[self.last :]


def mutations_of(source: bytes) -> list[Mutation]:
    """All bugs of these kinds in the functions of a file, in the order of the file."""
    tree = ast.parse(source)
    text = _Text(source)
    return [
        Mutation(kind, name, _first_line(function), first, last, new)
        for name, function in _functions(tree, "")
        for kind, first, last, new in _changes(function, text)
        if source[first:last] != new
    ]


@dataclass
class _Text:
    """The bytes of a file, and where its nodes stand."""

    source: bytes

    def __post_init__(self) -> None:
        self.lines = [0]
        for line in self.source.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))

    def span(self, node: Any) -> tuple[int, int]:
        first = self.lines[node.lineno - 1] + node.col_offset
        return first, self.lines[node.end_lineno - 1] + node.end_col_offset

    def of(self, node: ast.AST) -> bytes:
        first, last = self.span(node)
        return self.source[first:last]

    def between(self, left: ast.AST, right: ast.AST, old: str) -> tuple[int, int] | None:
        """Where a word stands between two nodes, if once."""
        first, last = self.span(left)[1], self.span(right)[0]
        gap = self.source[first:last]
        if gap.count(old.encode()) != 1 or b"#" in gap:
            return None
        at = first + gap.index(old.encode())
        return at, at + len(old)


Change = tuple[str, int, int, bytes]  # kind, first and last byte, what stands there instead


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{child.name}", child
        elif isinstance(child, ast.ClassDef | ast.If | ast.Try):
            yield from _functions(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)


def _first_line(function: Function) -> int:
    """As a code object has it: that of the first decorator."""
    return min([function.lineno, *(one.lineno for one in function.decorator_list)])


def _changes(function: Function, text: _Text) -> Iterator[Change]:
    for default in [*function.args.defaults, *(one for one in function.args.kw_defaults if one is not None)]:
        if isinstance(default, ast.Constant) and isinstance(default.value, int):
            other = not default.value if isinstance(default.value, bool) else default.value + 1
            yield "default", *text.span(default), str(other).encode()
    for node in _walk(function.body):
        for changes in CHANGES.get(type(node), ()):
            yield from changes(node, text)
        yield from _lost(node, text)


def _walk(nodes: list[Any]) -> Iterator[ast.AST]:
    """Statements and expressions, without annotations, docstrings and texts."""
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        yield node
        if isinstance(node, ast.JoinedStr | ast.arguments | ast.Lambda):
            continue
        skipped = {"annotation", "returns", "decorator_list", "type_comment", "ctx", "op", "ops"}
        for field, value in ast.iter_fields(node):
            if field not in skipped:
                inner = value if isinstance(value, list) else [value]
                yield from _walk([one for one in inner if isinstance(one, ast.AST)])


def _comparison(node: ast.Compare, text: _Text) -> Iterator[Change]:
    if len(node.ops) == 1:
        old, new = COMPARISONS[type(node.ops[0])]
        if place := text.between(node.left, node.comparators[0], old):
            yield "comparison", *place, new.encode()


def _operator(node: ast.BinOp, text: _Text) -> Iterator[Change]:
    if type(node.op) in OPERATORS and not _is_text(node.left) and not _is_text(node.right):
        old, new = OPERATORS[type(node.op)]
        if place := text.between(node.left, node.right, old):
            yield "operator", *place, new.encode()


def _junction(node: ast.BoolOp, text: _Text) -> Iterator[Change]:
    old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
    if len(node.values) == 2 and (place := text.between(node.values[0], node.values[1], old)):
        yield "operator", *place, new.encode()


def _assignment(node: ast.AugAssign, text: _Text) -> Iterator[Change]:
    if type(node.op) in OPERATORS:
        old, new = OPERATORS[type(node.op)]
        if place := text.between(node.target, node.value, f"{old}="):
            yield "operator", *place, f"{new}=".encode()


def _constant(node: ast.Constant, text: _Text) -> Iterator[Change]:
    if type(node.value) is int and abs(node.value) <= LARGEST:
        for other in (node.value + 1, node.value - 1):
            if other >= 0:
                yield "off_by_one", *text.span(node), str(other).encode()


def _dropped_not(node: ast.UnaryOp, text: _Text) -> Iterator[Change]:
    if isinstance(node.op, ast.Not):
        yield "negation", text.span(node)[0], text.span(node.operand)[0], b""


def _condition(node: ast.If | ast.IfExp | ast.While, text: _Text) -> Iterator[Change]:
    if isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
        first, _ = text.span(node.test)
        yield "negation", first, first, b"not "


def _arguments(node: ast.Call, text: _Text) -> Iterator[Change]:
    if len(node.args) >= 2 and not any(isinstance(one, ast.Starred | ast.GeneratorExp) for one in node.args[:2]):
        (first, end), (begin, last) = text.span(node.args[0]), text.span(node.args[1])
        swapped = text.of(node.args[1]) + text.source[end:begin] + text.of(node.args[0])
        yield "arguments", first, last, swapped


def _end(node: ast.Continue | ast.Break, text: _Text) -> Iterator[Change]:
    yield "early_end", *text.span(node), b"break" if isinstance(node, ast.Continue) else b"continue"


def _return(node: ast.Return, text: _Text) -> Iterator[Change]:
    if node.value is not None and not isinstance(node.value, ast.Constant):
        yield "early_end", *text.span(node), b"return None"


def _lost(node: ast.AST, text: _Text) -> Iterator[Change]:
    """A statement among others: a call, or another value of a name that is part of it."""
    for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
        for one in body if isinstance(body, list) and len(body) > 1 else ():
            call = isinstance(one, ast.Expr) and isinstance(one.value, ast.Call)
            if call or (isinstance(one, ast.Assign) and _is_update(one)):
                first, last = text.lines[one.lineno - 1], text.lines[one.end_lineno or one.lineno]
                if text.source[first:last].strip() == text.of(one).strip():
                    yield "lost", first, last, b""


def _is_update(node: ast.Assign) -> bool:
    target = node.targets[0]
    used = (one.id for one in ast.walk(node.value) if isinstance(one, ast.Name))
    return len(node.targets) == 1 and isinstance(target, ast.Name) and target.id in used


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


CHANGES: dict[type[ast.AST], tuple[Callable[[Any, _Text], Iterator[Change]], ...]] = {
    ast.Compare: (_comparison,), ast.BinOp: (_operator,), ast.BoolOp: (_junction,), ast.AugAssign: (_assignment,),
    ast.Constant: (_constant,), ast.UnaryOp: (_dropped_not,), ast.If: (_condition,), ast.IfExp: (_condition,),
    ast.While: (_condition,), ast.Call: (_arguments,), ast.Continue: (_end,), ast.Break: (_end,), ast.Return: (_return,),
}  # fmt: skip


def without_tests(source: str, gone: set[str]) -> str | None:
    """A file of tests without some of them (`test_a`, `TestB.test_a`); None where nothing would be left of it, or of
    one of its classes.
    """
    tree = ast.parse(source)
    tests = [(name, node) for name, node in _functions(tree, "") if name.rpartition(".")[2].startswith("test")]
    scopes = {name.rpartition(".")[0] for name in gone}
    for scope in scopes:
        if all(name in gone for name, _ in tests if name.rpartition(".")[0] == scope):
            return None
    spans = [(_first_line(node), node.end_lineno or node.lineno) for name, node in tests if name in gone]
    lines = source.splitlines(keepends=True)
    kept = (line for at, line in enumerate(lines, 1) if not any(first <= at <= last for first, last in spans))
    return "".join(kept)
