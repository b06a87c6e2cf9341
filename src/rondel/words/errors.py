"""One flat family of errors; each names the boundary it crossed and carries the remedy in its text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class RondelError(Exception):
    """Every error that is not a bug of ours. The command line prints its text as one line, without a traceback."""


class UserError(RondelError, ValueError):
    """Something in the recipe, the data or the call: text = the value, the rule, the remedy."""


class ConfigError(UserError):
    """A recipe that cannot mean what it says."""


class DataError(UserError):
    """Tasks that cannot be read."""


class ModelError(UserError):
    """A model that cannot be loaded, or that the attention of this house cannot carry."""


class RewardError(RondelError):
    """A reward broke: becomes `Failed`, is counted, and is never the number 0."""


class EnvError(RondelError):
    """An environment broke: becomes `EnvFault`."""


class SandboxError(RondelError):
    """A box could not be made, or broke: the world's fault, never that of the code in it."""


class UnknownOutcome(SandboxError):
    """A command was begun and nobody knows whether it was carried out; it may not be done twice."""


class EngineError(RondelError):
    """The engine refused or could not serve."""


class SyncError(RondelError):
    """A weight update did not arrive whole."""


class TrainError(RondelError):
    """The trainer could not step; the batch is dumped for `rondel replay`."""


class CheckpointError(RondelError):
    """A checkpoint that cannot be written or read."""


class WorkerError(RondelError):
    """A process or machine that does a part of the work ended, or broke at it."""


class LawError(RondelError):
    """An invariant of the house was broken. Always a bug; never ignored."""


class StalledError(RondelError):
    """A wait passed its deadline: "A waits for B since t"."""


class SilentError(WorkerError, StalledError):
    """A worker that was waited for stands still: it is given up like one that ended."""


class Stopped(RondelError):
    """The run was asked to end and did: nobody's fault. The exit code is that of the signal."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)
        self.code = 128 + number


def leaves(error: BaseException) -> list[BaseException]:
    """The single errors of an exception group, in order; any other error alone."""
    return [leaf for inner in error.exceptions for leaf in leaves(inner)] if isinstance(error, BaseExceptionGroup) else [error]


def root_cause(error: BaseException) -> BaseException:
    """The error of a task group that its caller must see: a signal or a stop, then one of ours, then an environment's, then the first."""
    found = leaves(error)
    for wanted in (lambda e: isinstance(e, Stopped) or not isinstance(e, Exception), _ends_the_run, lambda e: isinstance(e, RondelError)):
        if first := next(filter(wanted, found), None):
            return first
    return found[0]


def _ends_the_run(error: BaseException) -> bool:
    return isinstance(error, RondelError) and not isinstance(error, EnvError | RewardError)


@contextmanager
def ungrouped() -> Iterator[None]:
    """An exception group raised inside leaves as its root cause."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise root_cause(group) from group


@contextmanager
def boundary(error: type[RondelError], what: str) -> Iterator[None]:
    """Anything raised inside becomes `error`, prefixed with what was being crossed. Our own errors pass unchanged."""
    try:
        with ungrouped():
            yield
    except RondelError:
        raise
    except Exception as cause:
        raise error(f"{what}: {type(cause).__name__}: {cause}") from cause
