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
import json
import operator
import types
from typing import Any

from rondel.score.boxed.containers import CONTAINERS, SharedContainers
from rondel.score.boxed.plain import pack, type_key, unpack
from rondel.score.boxed.proxy import BINARY, CONVERT, ORDER, UNARY, Proxy
from rondel.score.boxed.remote_exceptions import RemoteExceptions

LONGEST = 1 << 24  # characters of one message


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


class End:
    """`End(reads, writes, Proxy, first=0)`: asks, and carries out what the other end asks meanwhile."""

    def __init__(self, reads: Any, writes: Any, proxy: type[Proxy], first: int) -> None:
        self.reads, self.writes, self.proxy = reads, writes, proxy
        self.shared = SharedContainers(first)
        self.objects: list[Any] = []  # of this end, by the number that the other one knows
        self.object_numbers: dict[int, int] = {}
        self.proxies: dict[int, Any] = {}
        self.exceptions = RemoteExceptions(self.proxies, self.unpack, Gone)

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
            self.exceptions.raise_error(message)
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
        message |= {"shared": self.shared.take_changed(self.pack), "dropped": self.shared.take_dropped()}
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
                self.shared.drop(number)
            self.shared.fill(message["shared"], self.unpack)
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
            return {"m": self.shared.number_of(value)}
        if id(value) in self.exceptions.standing:
            return {"y": self.exceptions.standing[id(value)]}
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
            return self.shared.by_number[body].value
        if tag == "y":
            return self.objects[body]
        if tag == "n":
            return self.looked_up(*body)
        if tag == "x":
            return self.exceptions.class_for(*body)
        number, base = body
        if number not in self.proxies:
            self.proxies[number] = self.stand_in(number, base)
        return self.proxies[number]

    def stand_in(self, number: int, base: str) -> Proxy:
        return self.proxy(self, number, base)

    # -- what each side decides ------------------------------------------------------------------

    def forget_unused(self) -> None:
        """What nobody here can look at any more needs no telling."""

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
