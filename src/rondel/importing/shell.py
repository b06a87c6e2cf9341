"""As much of a shell as the peers' examples use: comments, continued lines, variables,
defaults, sums, arrays. Nothing is run.
"""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from collections.abc import Iterator

ASSIGN = re.compile(r"^\s*(?:export\s+|declare\s+-\w+\s+|local\s+)?([A-Za-z_]\w*)(\+?)=(?!=)(.*)$", re.DOTALL)
VARIABLE = re.compile(r"\$\{(\w+)(?::?[-=]([^{}]*))?\}|\$([A-Za-z_]\w*)")
ARRAY = re.compile(r"\"?\$\{(\w+)\[[@*]\](?::\+[^}]*)?\}\"?")
SUM = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
}


def read_commands(text: str) -> Iterator[list[str]]:
    """The words of each command, with the values that variables have where it stands."""
    values: dict[str, str] = {name: os.environ[name] for name in ("HOME", "PWD", "USER") if name in os.environ}
    arrays: dict[str, list[str]] = {}
    for line in _logical_lines(text):
        match = ASSIGN.match(line)
        if match and match[3].lstrip().startswith("("):
            words = _split_words(_expand_variables(match[3].strip()[1:].rstrip().removesuffix(")"), values, arrays))
            arrays[match[1]] = [*(arrays.get(match[1], []) if match[2] else []), *words]
        elif match and len(words := _split_words(_expand_arithmetic(match[3], values))) <= 1:
            values[match[1]] = (values.get(match[1], "") if match[2] else "") + _expand_variables(
                "".join(words), values, arrays
            )
        elif words := _split_words(_expand_variables(line, values, arrays)):
            yield words


def _logical_lines(text: str) -> Iterator[str]:
    """Logical lines: a backslash, an open quote and an open array go on."""
    held = ""
    for line in text.splitlines():
        bare = line.rstrip()
        if bare.lstrip().startswith("#") or not (bare or held):
            continue
        goes_on = bare.endswith("\\")
        held += bare.removesuffix("\\") + (" " if goes_on else "\n")
        if not goes_on and _is_complete(held):
            yield held.strip()
            held = ""
    if held.strip():
        yield held.strip()


def _is_complete(text: str) -> bool:
    """Are all quotes closed, and the array if it is one?"""
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    match = ASSIGN.match(text)
    bare = "\n".join(line.partition(" #")[0] for line in text.splitlines())
    return not (match and match[3].startswith("(")) or bare.count("(") <= bare.count(")")


def _expand_variables(text: str, values: dict[str, str], arrays: dict[str, list[str]]) -> str:
    """Variables, arrays and sums replaced by what they hold; what is not known stays as it is written."""
    for _ in range(12):  # a default may hold a variable, which holds another
        before = text
        text = ARRAY.sub(lambda m: shlex.join(arrays[m[1]]) if m[1] in arrays else m[0], text)
        text = VARIABLE.sub(lambda m: values.get(m[1] or m[3], _expand_default(m)), text)
        text = _expand_arithmetic(text, values)
        if text == before:
            break
    return text


def _expand_arithmetic(text: str, values: dict[str, str]) -> str:
    """$((1024 * 20)) -> 20480"""
    return SUM.sub(
        lambda m: (
            _evaluate_arithmetic(VARIABLE.sub(lambda v: values.get(v[1] or v[3], _expand_default(v)), m[1]), values)
            or m[0]
        ),
        text,
    )


def _expand_default(match: re.Match[str]) -> str:
    return match[0] if match[2] is None else match[2].strip("\"'")


def _evaluate_arithmetic(text: str, values: dict[str, str]) -> str:
    """ "1024 * 20" -> "20480"; names are variables; "" for anything else."""
    filled = re.sub(r"[A-Za-z_]\w*", lambda m: values.get(m[0], m[0]), text)

    def node_value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            return int(OPERATORS[type(node.op)](node_value(node.left), node_value(node.right)))
        assert isinstance(node, ast.Constant) and isinstance(node.value, int)
        return node.value

    try:
        return str(node_value(ast.parse(filled.strip(), mode="eval").body))
    except (SyntaxError, KeyError, AssertionError, ZeroDivisionError):
        return ""


def _split_words(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return text.split()
