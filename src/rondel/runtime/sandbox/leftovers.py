"""The list on the disk of boxes that are open at a service: what a killed run left there can still be ended.

One file for each process, `PID-START.jsonl`: a row before a box is made, one with its name when it is there, one when
it is gone. A file whose process is gone lists what is left. No key is in it.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class Leftovers:
    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or default_folder()
        self.path = self.folder / f"{os.getpid()}-{start_of(os.getpid())}.jsonl"
        self._lock = threading.Lock()

    @contextmanager
    def opening(self, provider: str, url: str) -> Iterator[Callable[[str], None]]:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        yield lambda name: self._write({"name": name, "provider": provider, "url": url})

    def forget(self, name: str) -> None:
        self._write({"gone": name})
        if not read_open(self.path):
            self.path.unlink(missing_ok=True)

    def _write(self, row: dict[str, str]) -> None:
        with self._lock, open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


def default_folder() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "rondel" / "sandboxes"


def start_of(pid: int) -> str:
    """When the process began, in ticks since the boot: a number that is given again is another process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return "0"


def paths_of_ended(folder: Path, prefix: str = "") -> list[Path]:
    """`folder`/`prefix`PID-...: those whose process is gone."""
    found = []
    for path in sorted(folder.glob(f"{prefix}*")):
        pid = path.name.removeprefix(prefix).partition("-")[0]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            found.append(path)
    return found


def read_open(path: Path) -> dict[str, dict[str, str]]:
    """name -> row of the boxes of one file that are not gone; a torn line never happened."""
    found: dict[str, dict[str, str]] = {}
    with suppress(OSError):
        for line in path.read_text().splitlines():
            with suppress(ValueError):
                row = json.loads(line)
                if "gone" in row:
                    found.pop(row["gone"], None)
                else:
                    found[row["name"]] = row
    return found


def left_boxes(folder: Path | None = None) -> list[tuple[Path, dict[str, str]]]:
    """Those of processes that are gone."""
    found: list[tuple[Path, dict[str, str]]] = []
    for path in sorted((folder or default_folder()).glob("*-*.jsonl")):
        pid, _, start = path.stem.partition("-")
        if not pid.isdigit() or start_of(int(pid)) == start:
            continue
        rows = read_open(path)
        if not rows:
            path.unlink(missing_ok=True)
        found += [(path, row) for row in rows.values()]
    return found


def end_left_boxes(delete: Callable[[str, str, str], None], folder: Path | None = None) -> int:
    """`delete(provider, url, name)` for each of them; -> how many are gone now."""
    ended = 0
    for path, row in left_boxes(folder):
        delete(row["provider"], row["url"], row["name"])
        with open(path, "a") as file:
            file.write(json.dumps({"gone": row["name"]}) + "\n")
        if not read_open(path):
            path.unlink(missing_ok=True)
        ended += 1
    return ended
