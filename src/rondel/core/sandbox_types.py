"""What a box may use, and what came of a command in it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from rondel.core.errors import UserError


@dataclass(frozen=True, slots=True)
class Limits:
    """`Limits(wall=2.0, memory=256 << 20)`.

    cpu        seconds of computing, of each process
    wall       seconds from the start of a command to its end
    memory     bytes: of the whole box where control groups can be made, else of each process
    processes  at one time, threads among them
    disk       bytes of all that it writes; in memory unless the box has a folder of the host's
    file       bytes of one file
    files      how many files and folders
    output     bytes of stdout and of stderr; a command that writes more is ended
    open_files at one time, of each process
    network    False: there is none, not even the host's own addresses
    """

    cpu: float = 10.0
    wall: float = 10.0
    memory: int = 512 << 20
    processes: int = 32
    disk: int = 64 << 20
    file: int = 32 << 20
    files: int = 4096
    output: int = 64 << 10
    open_files: int = 128
    network: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "network" and (
                isinstance(value, bool) or not isinstance(value, int | float) or not value > 0
            ):
                raise UserError(f"sandbox limit {field.name} = {value!r}; it is a number above 0")
        if self.memory < 64 << 20:
            raise UserError(f"sandbox limit memory = {self.memory}; an interpreter alone wants 64 MiB: {64 << 20}")


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What came of a command: `CommandResult(0, 0, b"4\\n", b"", "", 0.02)`.

    exit      its code; 0 when a signal ended it
    signal    which one, or 0
    limit     which limit ended it: "wall", "cpu", "memory", "output", "disk", or ""
    seconds   of wall clock
    """

    exit: int
    signal: int
    stdout: bytes
    stderr: bytes
    limit: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not (self.exit or self.signal or self.limit)

    @property
    def ended(self) -> str:
        """In words: "exit code 1", "SIGKILL, over its memory limit"."""
        import signal as signals

        known = self.signal in set(signals.Signals)
        name = signals.Signals(self.signal).name if known else f"exit code {128 + self.signal}"
        how = name if self.signal else f"exit code {self.exit}"
        return f"{how}, over its {self.limit} limit" if self.limit else how


@dataclass(frozen=True, slots=True)
class BoxUsage:
    """What a box has used so far: `BoxUsage(cpu=0.31, peak=24 << 20)`; None for what nobody counts.

    cpu    seconds of computing, of all its processes
    peak   bytes of memory, at most at one time
    """

    cpu: float | None = None
    peak: int | None = None


class BoxFileError(OSError):
    """A file of a box could not be written or read: it is not there, or code in the box
    closed its folder or filled its disk.
    """
