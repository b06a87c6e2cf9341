"""Whole numbers of no fixed value, given to real code: every path through it is taken, and claims about what it
returns are proved for all values by z3.

    for path in paths(lambda: tensor_offsets(rows)):      rows of symbolic sizes
        path.prove(at[1] % 64 == 0)                       for all sizes that lead along this path, or Refuted with some
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import z3

_path: list[Path] = []  # the one that is being taken


class Refuted(AssertionError):
    """A claim is false for some values; the message names them."""


class Int:
    """A z3 integer with Python's operators. Compared, it is a `Truth`; where code asks whether that holds, paths part."""

    def __init__(self, value: Any) -> None:
        self.z = z3.Int(value) if isinstance(value, str) else value.z if isinstance(value, Int) else z3.IntVal(value)

    @classmethod
    def of(cls, z: Any) -> Int:
        out = cls.__new__(cls)
        out.z = z
        return out

    def __add__(self, other: Any) -> Int:
        return Int.of(self.z + Int(other).z)

    def __sub__(self, other: Any) -> Int:
        return Int.of(self.z - Int(other).z)

    def __rsub__(self, other: Any) -> Int:
        return Int.of(Int(other).z - self.z)

    def __mul__(self, other: Any) -> Int:
        return Int.of(self.z * Int(other).z)

    def __floordiv__(self, other: int) -> Int:
        assert other > 0, "z3's quotient is Python's for a positive divisor"
        return Int.of(self.z / other)

    def __mod__(self, other: int) -> Int:
        assert other > 0, other
        return Int.of(self.z % other)

    def __neg__(self) -> Int:
        return Int.of(-self.z)

    def __lt__(self, other: Any) -> Truth:
        return Truth(self.z < Int(other).z)

    def __le__(self, other: Any) -> Truth:
        return Truth(self.z <= Int(other).z)

    def __gt__(self, other: Any) -> Truth:
        return Truth(self.z > Int(other).z)

    def __ge__(self, other: Any) -> Truth:
        return Truth(self.z >= Int(other).z)

    def __eq__(self, other: object) -> Truth:  # type: ignore[override]
        return Truth(self.z == Int(other).z)

    def __ne__(self, other: object) -> Truth:  # type: ignore[override]
        return Truth(self.z != Int(other).z)

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __repr__(self) -> str:
        return str(self.z)

    __hash__ = None  # type: ignore[assignment]
    __radd__, __rmul__ = __add__, __mul__


class Truth:
    """What a comparison says. `&`, `|` and `~` join claims; `bool()` takes a side and remembers the other."""

    def __init__(self, z: Any) -> None:
        self.z = z if z3.is_expr(z) else z3.BoolVal(z)

    def __and__(self, other: Truth | bool) -> Truth:
        return Truth(z3.And(self.z, other.z if isinstance(other, Truth) else other))

    def __or__(self, other: Truth | bool) -> Truth:
        return Truth(z3.Or(self.z, other.z if isinstance(other, Truth) else other))

    def __invert__(self) -> Truth:
        return Truth(z3.Not(self.z))

    def __bool__(self) -> bool:
        (path,) = _path
        return path.take_side(self.z)

    __rand__, __ror__ = __and__, __or__


class Path:
    """One way through the code: which sides were taken, what holds there, and what the code returned or raised."""

    def __init__(self, sides: list[bool], assumed: list[Any]) -> None:
        self.sides, self.taken = sides, 0
        self.others: list[list[bool]] = []  # ways that part from this one
        self.result: Any = None
        self.error: Exception | None = None
        self._solver = z3.Solver()
        self._solver.add(*assumed)

    def take_side(self, claim: Any) -> bool:
        if self.taken == len(self.sides):
            sides = [side for side in (True, False) if self._may_hold(claim if side else z3.Not(claim))]
            assert sides, "a path that nothing leads to"
            if len(sides) == 2:
                self.others.append([*self.sides, False])
            self.sides.append(sides[0])
        side = self.sides[self.taken]
        self.taken += 1
        self._solver.add(claim if side else z3.Not(claim))
        return side

    def prove(self, claim: Truth | bool, what: str = "") -> None:
        """Refuted unless it holds for all values along this path."""
        claim = claim if isinstance(claim, Truth) else Truth(bool(claim))
        self._solver.push()
        self._solver.add(z3.Not(claim.z))
        answer = self._solver.check()
        values = str(self._solver.model()) if answer == z3.sat else str(answer)
        self._solver.pop()
        if answer != z3.unsat:
            raise Refuted(f"{what or claim.z}: false for {values}")

    def _may_hold(self, claim: Any) -> bool:
        self._solver.push()
        self._solver.add(claim)
        answer = self._solver.check()
        self._solver.pop()
        assert answer != z3.unknown, claim
        return bool(answer == z3.sat)


def paths(run: Callable[[], Any], *assumed: Truth, raises: type[Exception] | tuple[()] = ()) -> Iterator[Path]:
    """Every path through `run` that some values lead along; an error of the kind `raises` ends one, too."""
    todo: list[list[bool]] = [[]]
    while todo:
        path = Path(todo.pop(), [truth.z for truth in assumed])
        _path.append(path)
        try:
            path.result = run()
        except raises as error:
            path.error = error
        finally:
            _path.clear()
        todo += path.others
        yield path


def exactly_one(claims: list[Truth]) -> Truth:
    """One of them holds, and no other."""
    return Truth(z3.PbEq([(claim.z, 1) for claim in claims], 1)) if claims else Truth(False)


def some(claims: list[Truth]) -> Truth:
    return Truth(z3.Or([claim.z for claim in claims]))
