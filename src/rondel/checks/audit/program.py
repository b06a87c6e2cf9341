"""What an answer's code says, read as a syntax tree and never run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

NOTHING = object()


def parse_code(text: str) -> ast.Module:
    """Empty where it is no Python."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def literal_of(node: ast.AST | None) -> Any:
    """The value that stands there, or NOTHING."""
    try:
        return NOTHING if node is None else ast.literal_eval(node)  # type: ignore[arg-type]
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return NOTHING


def is_main_block(node: ast.AST) -> bool:
    """if __name__ == "__main__":"""
    return isinstance(node, ast.If) and any(isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(node.test))


def without_main_block(text: str) -> str:
    """Code without what runs only as a program; the same text where there is no such block."""
    lines = text.split("\n")
    for node in parse_code(text).body:
        if is_main_block(node):
            for i in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[i] = ""
    return "\n".join(lines)


def constant_comparisons(text: str) -> Iterator[str]:
    """Methods `__eq__` that always say True, and `__ne__` that always say False, by whatever expression."""
    for node in ast.walk(parse_code(text)):
        if not isinstance(node, ast.FunctionDef) or node.name not in ("__eq__", "__req__", "__ne__"):
            continue
        inside = list(ast.walk(node))
        assigned: dict[str, list[ast.expr]] = {}
        for one in inside:
            if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name):
                assigned.setdefault(one.targets[0].id, []).append(one.value)
        told = [_truth(one.value, assigned) for one in inside if isinstance(one, ast.Return)]
        if told and set(told) == {node.name != "__ne__"}:
            yield " ".join(ast.unparse(node).split())[:120]


def _truth(node: ast.expr | None, assigned: dict[str, list[ast.expr]], depth: int = 8) -> bool | None:
    """What an expression is whatever the arguments are; None where that is not plain."""
    if node is None or depth == 0:
        return None
    if isinstance(node, ast.Constant):
        return None if node.value is NotImplemented else bool(node.value)
    if isinstance(node, ast.Name):
        told = {_truth(value, assigned, depth - 1) for value in assigned.get(node.id, [])}
        return told.pop() if len(told) == 1 else None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inner = _truth(node.operand, assigned, depth - 1)
        return None if inner is None else not inner
    if isinstance(node, ast.BoolOp):
        sides = [_truth(value, assigned, depth - 1) for value in node.values]
        decides = isinstance(node.op, ast.Or)
        return decides if decides in sides else (not decides if set(sides) == {not decides} else None)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and ast.dump(node.left) == ast.dump(node.comparators[0]):
        return True if isinstance(node.ops[0], ast.Eq | ast.Is) else None
    return None
