"""Tools that come with the house."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

BINARY: dict[type, Callable[[Fraction, Fraction], Any]] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
          ast.Mod: operator.mod, ast.Pow: operator.pow}  # fmt: skip
UNARY: dict[type, Callable[[Fraction], Fraction]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
# characters of an expression, digits of a number on the way, the largest exponent
LONGEST, DIGITS, POWER = 1000, 1000, 1000


def calculator(expression: str) -> str:
    """The value of an arithmetic expression with + - * / // % ** and parentheses, for example "(3 + 4) * 12"."""
    if len(expression) > LONGEST:
        raise ValueError(f"an expression may have {LONGEST} characters")
    try:
        tree = ast.parse(
            expression.replace("^", "**").replace("\u00d7", "*").replace("\u00f7", "/").strip(), mode="eval"
        )
        value = _evaluate_node(tree.body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"'{expression[:40]}' is no arithmetic expression") from error
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"


def _evaluate_node(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(int() | float() as number) if not isinstance(number, bool):
            return Fraction(str(number))
        case ast.UnaryOp(op, operand) if type(op) in UNARY:
            return UNARY[type(op)](_evaluate_node(operand))
        case ast.BinOp(left, op, right) if type(op) in BINARY:
            a, b = _evaluate_node(left), _evaluate_node(right)
            if isinstance(op, ast.Pow) and (
                b.denominator != 1 or abs(b) > POWER or a.numerator.bit_length() * abs(b) > 4 * DIGITS
            ):
                raise ValueError("a power must have a whole exponent and a result of bearable size")
            value = Fraction(BINARY[type(op)](a, b))
            if max(value.numerator.bit_length(), value.denominator.bit_length()) > 4 * DIGITS:
                raise ValueError("the result is too large")
            return value
    raise ValueError("only numbers, + - * / // % ** and parentheses are allowed")
