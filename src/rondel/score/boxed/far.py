"""One end of the line between a candidate and its tests: each has objects that the other one holds a stand-in for.

    test's box                                    candidate's box
    m = [[1, 2], [3, 4]]      {"do": "call"} ──>  m' = [[1, 2], [3, 4]], a container that is shared: whatever either side
    rotate(m)                 <── {"value"}       does to it is told with the next message, and done to the other's as well
    f(lambda x: x + 1)        <── {"do": "call"}  a stand-in of the lambda, which is carried out where it was made

Both ends may ask while they are asked. No end trusts what the other says: it is data, or the number of an object.
"""

from __future__ import annotations

import builtins
import copy
import importlib
import itertools
import json
import operator
import sys
import types
from typing import Any

from rondel.score.boxed.plain import pack, type_key, unpack

LONGEST = 1 << 24  # characters of one message


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


BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift"]
UNARY = ["neg", "pos", "abs", "invert"]
CONVERT = {"int": int, "float": float, "complex": complex, "index": operator.index, "round": round}
ORDER = ["lt", "le", "gt", "ge"]
BASES = {base.__name__: base for base in (list, tuple, dict, set, frozenset)}
DO: dict[str, Any] = {
    **{name: getattr(operator, name) for name in (*BINARY, *UNARY, *ORDER, "eq", "ne")},
    **CONVERT,
    "call": lambda on, /, *args, **kwargs: on(*args, **kwargs),
    "get": getattr, "set": setattr, "delete": delattr,
    "len": len, "bool": bool, "str": str, "repr": repr, "format": format, "hash": hash,
    "item": operator.getitem, "set_item": operator.setitem, "delete_item": operator.delitem,
    "has": lambda on, key: key in on,
    "iter": iter, "next": next, "reversed": lambda on: iter(reversed(on)),
    "enter": lambda on: type(on).__enter__(on),
    "exit": lambda on, *how: bool(type(on).__exit__(on, *how)),
    "isinstance": lambda kind, one: isinstance(one, kind),
    "issubclass": lambda kind, one: issubclass(one, kind),
    "copy": copy.copy, "deepcopy": copy.deepcopy,
    "data": lambda on: _container_data(on),
    "await": lambda on: importlib.import_module("asyncio").run(on),
}  # fmt: skip


def _base_container(kind: type) -> str:
    """The container that a class of the user's is a subclass of, or ""."""
    return next((name for name, base in BASES.items() if issubclass(kind, base)), "")


def _container_data(value: Any) -> Any:
    base = BASES[_base_container(type(value))]
    return dict(dict.items(value)) if base is dict else base(base.__iter__(value))


class Gone(BaseException):
    """The other end answers no more, or nonsense."""


class UncrossableValue(TypeError):
    """A value that cannot cross."""


class SharedContainer:
    def __init__(self, value: Any) -> None:
        self.value, self.key, self.items = value, type_key(type(value), CONTAINERS), None


class Proxy:
    """Stands for an object of the other end, which carries out what is done to it."""

    __slots__ = ("__weakref__", "_far_base", "_far_end", "_far_mixed", "_far_number", "_far_steps")

    def __init__(self, end: End, number: int, base: str) -> None:
        for name, value in (("end", end), ("number", number), ("base", base), ("mixed", False), ("steps", False)):
            object.__setattr__(self, f"_far_{name}", value)

    def _far_do(self, what: str, *args: Any, **kwargs: Any) -> Any:
        return self._far_end.ask(what, (self, *args), kwargs)

    def _far_operate(self, what: str, *args: Any) -> Any:
        return self._far_end.ask(what, args, {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__qualname__", "__doc__", "__dict__", "__wrapped__"):
            raise AttributeError(name)
        return self._far_do("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._far_do("set", name, value)

    def __delattr__(self, name: str) -> None:
        self._far_do("delete", name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._far_do("call", *args, **kwargs)

    def __bool__(self) -> bool:
        return self._far_operate("bool", self) is True

    def __eq__(self, other: object) -> Any:
        return self._far_do("eq", other) is True

    def __ne__(self, other: object) -> Any:
        return self._far_do("ne", other) is True

    def __hash__(self) -> int:
        return hash(self._far_do("hash"))

    def __contains__(self, key: Any) -> bool:
        return self._far_do("has", key) is True

    def __enter__(self) -> Any:
        return self._far_do("enter")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        return self._far_do("exit", kind, None, None) is True

    def __instancecheck__(self, one: Any) -> bool:
        return self._far_do("isinstance", one) is True

    def __subclasscheck__(self, one: Any) -> bool:
        return self._far_do("issubclass", one) is True

    def __deepcopy__(self, memo: Any) -> Any:
        return self._far_do("deepcopy")


def _delegate_method(name: str, what: str) -> None:
    setattr(Proxy, f"__{name}__", lambda self, *args: self._far_do(what, *args))


def _define_operators() -> None:
    for name in BINARY:
        plain = name.rstrip("_")
        setattr(Proxy, f"__{plain}__", lambda self, other, name=name: self._far_operate(name, self, other))
        setattr(Proxy, f"__r{plain}__", lambda self, other, name=name: self._far_operate(name, other, self))
    for name in ("neg", "pos", "abs", "invert", "len", *CONVERT):
        setattr(Proxy, f"__{name}__", lambda self, *more, name=name: self._far_operate(name, self, *more))
    for name in ORDER:
        setattr(Proxy, f"__{name}__", lambda self, other, name=name: self._far_do(name, other) is True)
    for name, what in (
        ("str", "str"),
        ("repr", "repr"),
        ("format", "format"),
        ("iter", "iter"),
        ("next", "next"),
        ("reversed", "reversed"),
        ("getitem", "item"),
        ("setitem", "set_item"),
        ("delitem", "delete_item"),
        ("copy", "copy"),
    ):
        _delegate_method(name, what)


_define_operators()


class End:
    """`End(reads, writes, Proxy, first=0)`: asks, and carries out what the other end asks meanwhile."""

    def __init__(self, reads: Any, writes: Any, proxy: type[Proxy], first: int) -> None:
        self.reads, self.writes, self.proxy = reads, writes, proxy
        self.shared: dict[int, SharedContainer] = {}
        self.share_numbers: dict[int, int] = {}  # by id
        self.free = itertools.count(first, 2)
        self.objects: list[Any] = []  # of this end, by the number that the other one knows
        self.object_numbers: dict[int, int] = {}
        self.proxies: dict[int, Any] = {}
        self.dropped: list[int] = []
        self.standing: dict[int, int] = {}  # classes made here for exception classes there, by id

    # -- messages --------------------------------------------------------------------------------

    def ask(self, what: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.forget_unused()
        sent = [self.pack(one) for one in args], {name: self.pack(one) for name, one in kwargs.items()}
        self.send({"do": what, "args": sent[0], "kwargs": sent[1]})
        return self.receive_answer()

    def receive_answer(self, copied: bool = False) -> Any:
        """What the other end answers; until then it may ask. `copied`: plain data, or nothing."""
        while "do" in (message := self.receive()):
            self.serve(message)
        if "raised" in message:
            self.raise_remote(message)
        return unpack(message["value"]) if copied else self.unpack(message["value"])

    def serve(self, order: dict[str, Any]) -> None:
        self.send(self.carried_out(order))

    def carried_out(self, order: dict[str, Any]) -> dict[str, Any]:
        try:
            args = [self.unpack(one) for one in order["args"]]
            kwargs = {str(name): self.unpack(one) for name, one in order["kwargs"].items()}
            self.allow(order["do"], args)
            return {"value": self.pack(DO[order["do"]](*args, **kwargs))}
        except Exception as error:
            return self.pack_error(error)

    def pack_error(self, error: Exception) -> dict[str, Any]:
        def pack_or_text(value: Any) -> Any:
            try:
                return pack(value)
            except Exception:
                return str(value)[:500]

        try:
            said = str(error)[:500]
        except Exception:
            said = ""
        return {
            "raised": self.pack(type(error)),
            "args": [pack_or_text(one) for one in error.args],
            "said": said,
            "error": {"r": [self.object_number(error), ""]},
        }

    def send(self, message: dict[str, Any]) -> None:
        """With all that has changed in shared containers since the last message of either side."""
        changed: dict[int, Any] = {}
        again = True
        while again:
            again = False
            for number, shared in list(self.shared.items()):
                more, _, items_of, _ = CONTAINERS[shared.key]  # type: ignore[index]
                items = items_of(shared.value)
                if shared.items is None or not _same_items(items, shared.items):
                    shared.items, again = items, True
                    packed = [self.pack(one) for one in items]
                    changed[number] = [*shared.key, self.pack(more(shared.value)), packed]  # type: ignore[misc]
        message |= {"shared": [[number, *what] for number, what in changed.items()], "dropped": self.dropped}
        self.dropped = []
        try:
            self.writes.write(json.dumps(message).encode() + b"\n")
            self.writes.flush()
        except OSError as error:
            raise Gone from error

    def receive(self) -> dict[str, Any]:
        try:
            line = self.reads.readline(LONGEST)
            message = json.loads(line)
            for number in message["dropped"]:
                self.drop_shared(number)
            told = message["shared"]
            for number, module, name, more, _ in told:
                if number not in self.shared:
                    empty = CONTAINERS[module, name][1](
                        getattr(importlib.import_module(module), name), self.unpack(more)
                    )
                    self.share_container(number, empty)
            for number, module, name, _, items in told:
                shared = self.shared[number]
                _, _, items_of, fill = CONTAINERS[module, name]
                fill(shared.value, [self.unpack(one) for one in items])
                shared.items = items_of(shared.value)
            return message
        except Exception as error:
            raise Gone from error

    # -- values ----------------------------------------------------------------------------------

    def pack(self, value: Any) -> Any:
        return pack(value, self.pack_reference)

    def pack_reference(self, value: Any) -> Any:
        kind = type(value)
        if issubclass(kind, Proxy):
            return {"y": value._far_number}
        if type_key(kind, CONTAINERS):
            if id(value) not in self.share_numbers:
                self.share_container(next(self.free), value)
            return {"m": self.share_numbers[id(value)]}
        if id(value) in self.standing:
            return {"y": self.standing[id(value)]}
        if (known := self.importable_name(value)) is not None:
            return {"n": known}
        if isinstance(value, type) and issubclass(value, Exception):
            bases = [self.pack(base) for base in value.__bases__ if issubclass(base, Exception)]
            return {"x": [self.object_number(value), value.__module__, value.__name__, bases]}
        return {
            "r": [
                self.object_number(value),
                "await" if issubclass(kind, types.CoroutineType) else _base_container(kind),
            ]
        }

    def object_number(self, value: Any) -> int:
        self.refuse_export(value)
        if id(value) not in self.object_numbers:
            self.object_numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return self.object_numbers[id(value)]

    def unpack(self, value: Any) -> Any:
        return unpack(value, self.unpack_reference)

    def unpack_reference(self, tag: str, body: Any) -> Any:
        if tag == "m":
            return self.shared[body].value
        if tag == "y":
            return self.objects[body]
        if tag == "n":
            return self.looked_up(*body)
        if tag == "x":
            return self.exception_class(*body)
        number, base = body
        if number not in self.proxies:
            self.proxies[number] = self.stand_in(number, base)
        return self.proxies[number]

    def stand_in(self, number: int, base: str) -> Proxy:
        return self.proxy(self, number, base)

    def exception_class(self, number: int, module: str, name: str, bases: list[Any]) -> Any:
        """A class here for an exception class there, so that it can be caught: the library's own
        if it is loaded here.
        """
        if number not in self.proxies and module.partition(".")[0] in sys.stdlib_module_names:
            found = getattr(sys.modules.get(module), name, None)
            if isinstance(found, type) and issubclass(found, Exception):
                return found
        if number not in self.proxies:
            above = tuple(self.unpack(base) for base in bases) or (Exception,)
            if not all(isinstance(base, type) and issubclass(base, Exception) for base in above):
                raise TypeError("what an exception comes from is one, too")
            body = {
                "__str__": lambda error: error._said,
                "__getattr__": lambda error, name: getattr(error.__dict__["_far"], name),
                "_said": "",
            }
            self.proxies[number] = made = type(str(name), above, body)
            self.standing[id(made)] = number
        return self.proxies[number]

    def raise_remote(self, message: dict[str, Any]) -> None:
        try:
            kind = self.unpack(message["raised"])
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                kind = RuntimeError
            args = tuple(unpack(one) for one in message["args"])
            error = kind.__new__(kind, *args)
            error.args, error._said, error._far = args, str(message["said"]), self.unpack(message["error"])  # type: ignore[attr-defined]
            if isinstance(error, StopIteration) and args:
                error.value = args[0]
        except Exception as broken:
            raise Gone from broken
        raise error

    # -- shared containers -----------------------------------------------------------------------

    def share_container(self, number: int, value: Any) -> None:
        self.shared[number] = SharedContainer(value)
        self.share_numbers[id(value)] = number

    def drop_shared(self, number: int) -> None:
        if shared := self.shared.pop(number, None):
            del self.share_numbers[id(shared.value)]

    def forget_unused(self) -> None:
        """What nobody here can look at any more needs no telling."""

    # -- what each side decides ------------------------------------------------------------------

    def importable_name(self, value: Any) -> list[str] | None:
        """(module, name) of what both ends have: built-in types."""
        name = value.__name__ if isinstance(value, type) and value.__module__ == "builtins" else ""
        if name and getattr(builtins, name, None) is value:
            return ["builtins", name]
        return None

    def looked_up(self, module: str, name: str) -> Any:
        return getattr(importlib.import_module(module), name)

    def refuse_export(self, value: Any) -> None:
        """Refuse to hand over an object of this end."""

    def allow(self, what: str, args: list[Any]) -> None:
        """Refuse what the other end asks for."""
