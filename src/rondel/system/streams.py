"""A terminal, pipe or file that a person reads along in. It may go away or fill up, and may
not know every character: a run outlives that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO


class PatientStream:
    """`stream`, whose failures end nothing: after the first one, which `told` hears, the rest
    goes nowhere. Unknown characters become "?".
    """

    def __init__(self, stream: TextIO, told: Callable[[OSError], None]) -> None:
        self._stream, self._told = stream, told

    def write(self, text: str) -> int:
        try:
            try:
                return self._stream.write(text)
            except UnicodeEncodeError as error:
                return self._stream.write(text.encode(error.encoding, "replace").decode(error.encoding))
        except OSError as error:
            self._give_up(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        discard_output(self._stream)
        self._told(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def discard_output(stream: TextIO) -> None:
    """What is still in its buffer, and all that follows, is thrown away: nothing fails again when the process ends."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def replace_unencodable(stream: TextIO) -> None:
    """A character that the terminal does not know is shown as "?"."""
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")


def reopen_closed_streams() -> None:
    """A standard stream that was closed before this process began (`rondel train RUN.toml >&-`) leads nowhere. Else the
    next file that is opened would have its number, and be written by whatever prints.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            with suppress(OSError):
                nowhere = os.open(os.devnull, os.O_RDWR)  # the lowest that is free
                os.set_inheritable(nowhere, True)
                if nowhere > number:  # it was free for nobody
                    os.close(nowhere)
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
