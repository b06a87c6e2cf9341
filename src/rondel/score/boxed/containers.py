"""Mutable containers that both ends of a line have: what either side does to one is told with the next message, and
done to the other's as well.
"""

from __future__ import annotations

import importlib
import itertools
import operator
from collections.abc import Callable
from typing import Any

from rondel.score.boxed.plain import type_key


def _container_filler(name: str) -> Any:
    """Put these items into a container, in place."""
    if name == "list":
        return lambda box, items: operator.setitem(box, slice(None), items)
    if name == "set":
        return lambda box, items: (box.clear(), box.update(items))
    if name == "dict":
        return lambda box, items: (box.clear(), [operator.setitem(box, key, value) for key, value in items])
    return lambda box, items: (box.clear(), box.extend(items))


# mutable containers: type -> (more about it, an empty one, its items, filling one)
CONTAINERS: dict[tuple[str, str], tuple[Any, Any, Any, Any]] = {
    ("builtins", "list"): (lambda v: None, lambda cls, more: cls(), list, _container_filler("list")),
    ("builtins", "set"): (lambda v: None, lambda cls, more: cls(), list, _container_filler("set")),
    ("builtins", "bytearray"): (lambda v: None, lambda cls, more: cls(), list, _container_filler("list")),
    ("collections", "deque"): (
        lambda v: v.maxlen,
        lambda cls, more: cls(maxlen=more),
        list,
        _container_filler("deque"),
    ),
    ("collections", "defaultdict"): (
        lambda v: v.default_factory,
        lambda cls, more: cls(more),
        lambda v: list(v.items()),
        _container_filler("dict"),
    ),
    **{
        (module, name): (lambda v: None, lambda cls, more: cls(), lambda v: list(v.items()), _container_filler("dict"))
        for module, name in (("builtins", "dict"), ("collections", "OrderedDict"), ("collections", "Counter"))
    },
    ("numpy", "ndarray"): (
        lambda v: (v.dtype.str, v.shape),
        lambda cls, more: cls(more[1], importlib.import_module("numpy").dtype(more[0])),
        lambda v: [_array_bytes(v)],
        lambda v, items: _fill_array(v, items[0]),
    ),
}


def _array_bytes(array: Any) -> bytes:
    if array.dtype.hasobject:
        raise TypeError("an array of objects is no plain data")
    return array.tobytes()


def _fill_array(array: Any, data: bytes) -> None:
    array[...] = importlib.import_module("numpy").frombuffer(data, array.dtype).reshape(array.shape)


def _same_items(one: Any, other: Any) -> bool:
    """Whether nothing was put in or taken out; what stands in it tells its own changes."""

    def items_identical(a: Any, b: Any) -> bool:
        if type(a) is tuple and type(b) is tuple and len(a) == len(b):
            return all(map(operator.is_, a, b))
        return a is b or (type(a) is bytes and type(b) is bytes and a == b)

    return len(one) == len(other) and all(map(items_identical, one, other))


class SharedContainer:
    def __init__(self, value: Any) -> None:
        self.value, self.key, self.items = value, type_key(type(value), CONTAINERS), None


class SharedContainers:
    """`SharedContainers(first=0)`: those of one end, by numbers that both ends know; ends count by two,
    from 0 and 1."""

    def __init__(self, first: int) -> None:
        self.by_number: dict[int, SharedContainer] = {}
        self.numbers: dict[int, int] = {}  # by id
        self.free = itertools.count(first, 2)
        self.dropped: list[int] = []  # since the last message

    def number_of(self, value: Any) -> int:
        if id(value) not in self.numbers:
            self.add(next(self.free), value)
        return self.numbers[id(value)]

    def add(self, number: int, value: Any) -> None:
        self.by_number[number] = SharedContainer(value)
        self.numbers[id(value)] = number

    def drop(self, number: int) -> None:
        if shared := self.by_number.pop(number, None):
            del self.numbers[id(shared.value)]

    def take_changed(self, pack: Callable[[Any], Any]) -> list[list[Any]]:
        """All that has changed since the last message of either side; packing one may share another."""
        changed: dict[int, Any] = {}
        again = True
        while again:
            again = False
            for number, shared in list(self.by_number.items()):
                more, _, items_of, _ = CONTAINERS[shared.key]  # type: ignore[index]
                items = items_of(shared.value)
                if shared.items is None or not _same_items(items, shared.items):
                    shared.items, again = items, True
                    packed = [pack(one) for one in items]
                    changed[number] = [*shared.key, pack(more(shared.value)), packed]  # type: ignore[misc]
        return [[number, *what] for number, what in changed.items()]

    def take_dropped(self) -> list[int]:
        dropped, self.dropped = self.dropped, []
        return dropped

    def fill(self, told: list[list[Any]], unpack: Callable[[Any], Any]) -> None:
        """What the other end has told: new ones are made first, since one may hold another."""
        for number, module, name, more, _ in told:
            if number not in self.by_number:
                empty = CONTAINERS[module, name][1](getattr(importlib.import_module(module), name), unpack(more))
                self.add(number, empty)
        for number, module, name, _, items in told:
            shared = self.by_number[number]
            _, _, items_of, fill = CONTAINERS[module, name]
            fill(shared.value, [unpack(one) for one in items])
            shared.items = items_of(shared.value)
