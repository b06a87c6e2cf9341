"""Stand-ins at one end of a line for the objects of the other."""

from __future__ import annotations

import operator
from typing import Any

BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift"]
UNARY = ["neg", "pos", "abs", "invert"]
CONVERT = {"int": int, "float": float, "complex": complex, "index": operator.index, "round": round}
ORDER = ["lt", "le", "gt", "ge"]


class Proxy:
    """Stands for an object of the other end, which carries out what is done to it."""

    __slots__ = ("__weakref__", "_far_base", "_far_end", "_far_mixed", "_far_number", "_far_steps")

    def __init__(self, end: Any, number: int, base: str) -> None:
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
