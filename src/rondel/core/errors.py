"""One flat family of errors; each names the boundary it crossed and carries the remedy in its
text. And the words of what a machine refuses.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager


class RondelError(Exception):
    """Every error that is not a bug of ours. The command line prints its text as one line, without a traceback, and in
    a second one the page that knows more, where there is one: `raise ConfigError("...", page="docs/place.md#mesh")`.
    """

    page = ""  # of the docs, as --help of a command names its own

    def __init__(self, *words: object, page: str = "") -> None:
        super().__init__(*words)
        if page:
            self.page = page


class UserError(RondelError, ValueError):
    """Something in the recipe, the data or the call: text = the value, the rule, the remedy."""


SECTIONS = ("model", "task", "algo", "loop", "engine", "trainer", "place", "sync", "policies", "run")
_KEY = re.compile(rf"(?<![\w./'\"-])({'|'.join(SECTIONS)})\.[a-z]\w*")  # of a recipe, and no file or module


class ConfigError(UserError):
    """A recipe that cannot mean what it says. Its page is the section of the first key that it names, unless it names
    another page.
    """

    def __init__(self, *words: object, page: str = "") -> None:
        named = _KEY.search(str(words[0])) if words else None
        super().__init__(*words, page=page or (f"docs/recipe.md#{named[1]}" if named else ""))


class DataError(UserError):
    """Tasks that cannot be read."""

    page = "docs/generate.md#tasks"


class ModelError(UserError):
    """A model that cannot be loaded, or that the attention of this house cannot carry."""

    page = "docs/families.md"


class RewardError(RondelError):
    """A reward broke: becomes `Failed`, is counted, and is never the number 0."""

    page = "docs/score.md#what-broke-is-not-a-0"


class EnvError(RondelError):
    """An environment broke: becomes `EnvFault`."""

    page = "docs/generate.md#environments"


class TemplateError(EnvError):
    """A chat template refused messages: the fault of the episode that they are from, as another's may be well."""


class SandboxError(RondelError):
    """A box could not be made, or broke: the world's fault, never that of the code in it."""

    page = "docs/generate.md#sandboxes"


class BoxError(SandboxError):
    """A box ended while a command ran in it."""


class UnknownOutcome(SandboxError):
    """A command was begun and nobody knows whether it was carried out; it may not be done twice."""


class EngineError(RondelError):
    """The engine refused or could not serve."""

    page = "docs/generate.md#the-engine"


class SyncError(RondelError):
    """A weight update did not arrive whole."""

    page = "docs/sync.md"


class TrainError(RondelError):
    """The trainer could not step; the batch is dumped for `rondel replay`."""

    page = "docs/runs.md#the-same-run-again"


class CheckpointError(RondelError):
    """A checkpoint that cannot be written or read."""

    page = "docs/runs.md#the-folder"


class WorkerError(RondelError):
    """A process or machine that does a part of the work ended, or broke at it."""

    page = "docs/place.md#what-ends-and-what-then"


class LawError(RondelError):
    """An invariant of the house was broken. Always a bug; never ignored."""

    page = "docs/design.md#the-laws"


class StalledError(RondelError):
    """A wait passed its deadline: "A waits for B since t"."""


class SilentError(WorkerError, StalledError):
    """A worker that was waited for stands still: it is given up like one that ended."""


class Stopped(RondelError):
    """The run was asked to end and did: nobody's fault. The exit code is that of the signal."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)
        self.code = 128 + number


def leaf_errors(error: BaseException) -> list[BaseException]:
    """The single errors of an exception group, in order; any other error alone."""
    return (
        [leaf for inner in error.exceptions for leaf in leaf_errors(inner)]
        if isinstance(error, BaseExceptionGroup)
        else [error]
    )


def root_cause(error: BaseException) -> BaseException:
    """The error of a task group that its caller must see: a signal or a stop, then one of
    ours, then an environment's, then the first.
    """
    found = leaf_errors(error)
    for wanted in (
        lambda e: isinstance(e, Stopped) or not isinstance(e, Exception),
        ends_the_run,
        lambda e: isinstance(e, RondelError),
    ):
        if first := next(filter(wanted, found), None):
            return first
    return found[0]


def ends_the_run(error: BaseException) -> bool:
    """Whether it is more than one episode's: environments, rewards and boxes break, and that is data."""
    return isinstance(error, RondelError) and not isinstance(error, EnvError | RewardError | SandboxError)


def error_text(error: BaseException) -> str:
    """Its kind and words, also where it cannot say them: "ValueError: no such page"."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as other:  # raised by the error itself
        return f"{type(error).__name__}, whose text cannot be read ({type(other).__name__})"


@contextmanager
def unwrap_exception_group() -> Iterator[None]:
    """An exception group raised inside leaves as its root cause."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise root_cause(group) from group


@contextmanager
def error_boundary(error: type[RondelError], what: str) -> Iterator[None]:
    """Anything raised inside becomes `error`, prefixed with what was being crossed. Our own errors pass unchanged."""
    try:
        with unwrap_exception_group():
            yield
    except RondelError:
        raise
    except Exception as cause:
        refused = disk_refusal(cause, what) if isinstance(cause, OSError) and cause.filename is not None else None
        raise error(refused or f"{what}: {type(cause).__name__}: {cause}") from cause


# -- what a machine refuses ------------------------------------------------------------------------

FULL = {errno.ENOSPC, errno.EDQUOT}
REASONS = {  # of an OSError that is the machine's and nobody's bug: what is wrong, what to do
    errno.ENOSPC: ("the disk is full", "free some space, or move the folder to a larger disk"),
    errno.EDQUOT: ("the quota of the disk is used up", "free some space, or move the folder to another disk"),
    errno.EFBIG: ("the file may not become so large", "raise the limit with `ulimit -f unlimited`"),
    errno.EROFS: ("the file system is read-only", "make it writable, or choose another folder"),
    errno.EACCES: ("permission denied", "change the permissions, or choose another folder"),
    errno.EPERM: ("permission denied", "change the permissions, or choose another folder"),
    errno.EIO: ("the disk reports an input/output error", "look at `dmesg`, and move the folder to another disk"),
    errno.EEXIST: ("something else of that name is there", "move it away"),
    errno.EISDIR: ("a folder of that name is there", "move it away"),
    errno.ENOTDIR: ("a file is where a folder is needed", "move it away"),
    errno.ENOTEMPTY: ("a folder of that name is there and not empty", "move it away"),
    errno.ENOENT: ("there is no such file or folder", "correct the path; a link must lead to something that exists"),
    errno.ELOOP: ("a link leads nowhere", "remove the link"),
    errno.ENXIO: ("it is no ordinary file", "move it away"),
    errno.ENAMETOOLONG: ("the name is too long", "choose a shorter one"),
    errno.ESTALE: ("the network file system has lost it", "mount it again"),
    errno.EMFILE: ("too many files are open", "raise the limit with `ulimit -n 65536`"),
    errno.ENFILE: ("the machine has too many files open", "raise fs.file-max"),
}


def disk_refusal(error: BaseException, what: str = "", wanted: int = 0) -> str | None:
    """Why the disk refused, in one line with the remedy; None where `error` is something else.

    what    what was being done, "writing runs/a/journal.jsonl"
    wanted  bytes that were to be written, where they are known
    """
    number = error.errno if isinstance(error, OSError) else _foreign_number(error)
    if number not in REASONS:
        return None
    reason, remedy = REASONS[number]
    named = [os.fspath(name) for name in (getattr(error, "filename", None),) if isinstance(name, str | bytes)]
    at = "" if not named or _display_path(named[0])[:100] in what else f" ({_display_path(named[0])})"
    room = f", {size_text(wanted)} are wanted" if wanted and number in FULL else ""
    return f"{what + ': ' if what else ''}{reason}{at}{room}: {remedy}"


def _display_path(name: str | bytes) -> str:
    text = os.fsdecode(name)
    return text if len(text) <= 300 else f"{text[:140]}...{text[-140:]}"


def _foreign_number(error: BaseException) -> int | None:
    """Of an error that a library made of the system's: safetensors says "(os error 28)", Arrow "[errno 28]"."""
    found = re.search(r"os error (\d+)\)|\[errno (\d+)\]", str(error), re.IGNORECASE)
    return int(found[1] or found[2]) if found else None


def size_text(n: float) -> str:
    """1.4e6 -> "1.4 MB"."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if n >= unit:
            return f"{n / unit:.3g} {name}"
    return f"{n:.0f} bytes"
