"""The signals that ask a run to end: of a scheduler, of Ctrl-C, of a terminal that was
closed. Only the controller decides what they mean.
"""

from __future__ import annotations

import ctypes
import signal
import sys

HANGUP = getattr(signal, "SIGHUP", None)
ENDING = tuple(number for number in (signal.SIGTERM, signal.SIGINT, HANGUP) if number is not None)


def handled_signals() -> tuple[signal.Signals, ...]:
    """What the controller listens to: not to a terminal that is closed if it was started with nohup."""
    return tuple(number for number in ENDING if number != HANGUP or signal.getsignal(number) != signal.SIG_IGN)


def leave_to_controller() -> None:
    """A worker goes on: a launcher or a terminal signals the whole group. Handled, not
    ignored, which its own children would inherit.
    """
    for number in ENDING:
        signal.signal(number, lambda *_: None)


def die_with_parent() -> None:
    """Law 14: the kernel ends this process when the thread that started it ends, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
