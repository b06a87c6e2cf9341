"""Numbers of a stream of tokens, one behind the other in memory."""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterable
from pickle import PickleBuffer
from typing import Any

IDS, FLAGS, NUMBERS = "i", "b", "d"  # int32, one byte, float64


class TokenColumn(array):
    """A list of numbers in 1, 4 or 8 bytes each, where a list of Python's takes 36: `column += [3, 4]`, `column[2:]`,
    `column == [1, 2]`, `[0] + column`. numpy reads it without a copy, and a pickle of it is one run of bytes.

    The first argument is the kind: IDS, FLAGS or NUMBERS. A number that it cannot hold is a TypeError or OverflowError.
    """

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def of(cls, kind: str, values: Iterable[Any]) -> TokenColumn:
        """The same column, or a new one of these values."""
        if type(values) is cls and values.typecode == kind:
            return values
        return cls(kind, list(values) if isinstance(values, array) else values)

    @classmethod
    def from_text(cls, kind: str, text: str | list[Any]) -> TokenColumn:
        """The inverse of `to_text`; a list is taken, too."""
        return cls(kind, text) if isinstance(text, list) else _from_bytes(kind, b64decode(text))

    def to_text(self) -> str:
        """Its bytes, little-endian, in base64: what JSON can hold, of a million tokens in milliseconds."""
        return b64encode(self).decode()

    def copy(self) -> TokenColumn:
        return type(self)(self.typecode, self)

    def extend(self, values: Iterable[Any]) -> None:
        if isinstance(values, array) and values.typecode != self.typecode:
            values = list(values)
        super().extend(values)

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        return type(self)(self.typecode, found) if isinstance(at, slice) else found

    def __iadd__(self, values: Iterable[Any]) -> TokenColumn:  # type: ignore[override]
        self.extend(values)
        return self

    def __add__(self, values: Iterable[Any]) -> TokenColumn:  # type: ignore[override]
        both = self.copy()
        both.extend(values)
        return both

    def __radd__(self, values: Iterable[Any]) -> TokenColumn:
        both = type(self)(self.typecode, values)
        both.extend(self)
        return both

    def __mul__(self, times: int) -> TokenColumn:
        return type(self)(self.typecode, super().__mul__(times))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, list | tuple):
            return len(self) == len(other) and all(a == b for a, b in zip(self, other))
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __copy__(self) -> TokenColumn:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> TokenColumn:
        return self.copy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raw = PickleBuffer(self) if protocol >= 5 else self.tobytes()
        return _from_bytes, (self.typecode, raw)

    def __repr__(self) -> str:
        return repr(self.tolist())


def _from_bytes(kind: str, raw: Any) -> TokenColumn:
    column = TokenColumn(kind)
    column.frombytes(raw)
    return column
