"""Exceptions of the other end, raised here so that they can be caught by their classes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from rondel.score.boxed.plain import unpack


class RemoteExceptions:
    """
    proxies   number -> what stands here for an object or class of the other end
    standing  classes made here for exception classes there: id -> number
    unpack    of the end whose exceptions these are
    """

    def __init__(self, proxies: dict[int, Any], unpack: Callable[[Any], Any], gone: type[BaseException]) -> None:
        self.proxies, self._unpack, self._gone = proxies, unpack, gone
        self.standing: dict[int, int] = {}

    def class_for(self, number: int, module: str, name: str, bases: list[Any]) -> Any:
        """A class here for an exception class there, so that it can be caught: the library's own
        if it is loaded here.
        """
        if number not in self.proxies and module.partition(".")[0] in sys.stdlib_module_names:
            found = getattr(sys.modules.get(module), name, None)
            if isinstance(found, type) and issubclass(found, Exception):
                return found
        if number not in self.proxies:
            above = tuple(self._unpack(base) for base in bases) or (Exception,)
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

    def raise_error(self, message: dict[str, Any]) -> None:
        try:
            kind = self._unpack(message["raised"])
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                kind = RuntimeError
            args = tuple(unpack(one) for one in message["args"])
            error = kind.__new__(kind, *args)
            error.args, error._said, error._far = args, str(message["said"]), self._unpack(message["error"])  # type: ignore[attr-defined]
            if isinstance(error, StopIteration) and args:
                error.value = args[0]
        except Exception as broken:
            raise self._gone from broken
        raise error
