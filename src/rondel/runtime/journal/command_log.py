"""What episodes did in their sandboxes, a line for each command before anyone sees its result.

wal/commands/000003.jsonl   one file a life: {"episode", "n", "command", "exit", "folder"}
    episode   the 128-bit key of its noise, by which the token log knows it, too
    command   digest of what was run
    folder    digest of the working folder behind it

An episode that a crash cut off is played again from its tokens, and runs its commands again. As long as they are those
of an earlier life, each must end with the same exit code and leave the same folder: else what the policy reads next is
not what it read then, and the episode is a fault of its environment. With the first other command it goes another way
(its tokens were drawn anew), and nothing more is compared.
"""

from __future__ import annotations

import json
import os
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from rondel.core.errors import EnvError
from rondel.system.files import guard_write, make_folder, numbered_paths

LIVES = 4  # whose commands are kept


class LoggedCommand(NamedTuple):
    command: str
    exit: int
    folder: str


class EpisodeCommandLog:
    """`log.record(episode, 0, "pytest -q", exit=1, folder="9f3c...")`; `replayed` counts those that were compared."""

    def __init__(self, folder: Path, *, keep: int = LIVES) -> None:
        lives = numbered_paths(folder, "", ".jsonl") if folder.is_dir() else {}
        self._earlier: dict[str, dict[int, LoggedCommand]] = {}
        for path in lives.values():
            for row in _whole_rows(path):
                own = self._earlier.setdefault(row["episode"], {})
                own[row["n"]] = LoggedCommand(row["command"], row["exit"], row["folder"])
        self._left: set[str] = set()  # episodes that went another way
        self.replayed = 0
        self._path = folder / f"{max(lives, default=-1) + 1:06d}.jsonl"
        self._old = list(lives.values())[: max(0, len(lives) + 1 - keep)]
        self._fd: int | None = None  # opened with the first command: a run without sandboxes has no such folder

    def record(self, episode: int, n: int, command: Any, *, exit: int, folder: str) -> None:
        """Command `n` of an episode was run. EnvError where an earlier life ran it with another end."""
        name, text = f"{episode:032x}", json.dumps(command, sort_keys=True, default=str)
        now = LoggedCommand(blake2b(text.encode(), digest_size=16).hexdigest(), exit, folder)
        then = None if name in self._left else self._earlier.get(name, {}).get(n)
        if then is not None and then.command != now.command:
            self._left.add(name)
            then = None
        if then is not None:
            self.replayed += 1
            if then != now:
                raise EnvError(
                    f"command {n} of the episode ({text:.200}) was run again after an interruption and ended "
                    f"otherwise: exit code {then.exit} and folder {then.folder:.12} then, {exit} and {folder:.12} now; "
                    "such a command depends on time, chance or what lies outside of the folder"
                )
        self._append({"episode": name, "n": n, **now._asdict()})

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)

    def _open(self) -> int:
        make_folder(self._path.parent)
        for old in self._old:
            old.unlink(missing_ok=True)
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def _append(self, row: dict[str, Any]) -> None:
        line = json.dumps(row).encode() + b"\n"
        with guard_write(self._path, len(line)):
            self._fd = self._open() if self._fd is None else self._fd
            while line:
                line = line[os.write(self._fd, line) :]


def _whole_rows(path: Path) -> list[dict[str, Any]]:
    """A line that the end of a process cut in half never happened."""
    with guard_write(path, doing="reading"):
        lines = path.read_bytes().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith(b"\n")]
