"""The time that an answer makes a library compute. It is the answer's own: one that takes too long is wrong, and no
failure of the reward, which is not trained on; else writing it would be a way not to be judged.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SHARE = 0.5  # of the reward's deadline


class AnswerTooSlow(BaseException):
    """No Exception, which a library would catch."""


@contextmanager
def limit_answer_time(deadline: float) -> Iterator[None]:
    """AnswerTooSlow is raised after half of the deadline, and again until it gets through. Where only the reward's
    process can be ended (no main thread, no signals) there is no limit of its own.
    """

    def ring(*_: object) -> None:
        raise AnswerTooSlow

    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, SHARE * deadline, 0.1)
        yield
    finally:
        while True:  # it may ring here, too, and must not be left running
            try:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
                break
            except AnswerTooSlow:
                continue
