"""A journal as it grows: whole lines only, a stretch at a time, and word of it when the file has become another one."""

from __future__ import annotations

from pathlib import Path

STRETCH = 1 << 18  # bytes of one look: some 20 ms, for which whoever asks has to wait


class FileTail:
    """`lines()` is what was written since the last call, up to a stretch of it; a torn last line waits for its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.at = 0  # bytes that were given out
        self.size = 0
        self.unread = 0  # bytes after the last look, a torn last line not counted
        self._file = 0  # inode

    @property
    def unread_bytes(self) -> int:
        return self.size - self.at

    def was_replaced(self) -> bool:
        """Whether the file is a new one, or shorter than what was read of it: then reading begins again."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            self.size, fresh = 0, self.at > 0
        else:
            fresh = self._file not in (0, found.st_ino) or found.st_size < self.at
            self.size, self._file = found.st_size, found.st_ino
        if fresh:
            self.at = 0
        return fresh

    def read_lines(self, stretch: int = STRETCH) -> list[bytes]:
        self.unread = 0
        if self.size <= self.at:
            return []
        with self.path.open("rb") as file:
            file.seek(self.at)
            data = file.read(stretch)
            if b"\n" not in data and len(data) == stretch:
                data += file.readline()  # one line longer than a stretch
        end = data.rfind(b"\n") + 1
        self.unread = max(0, self.size - self.at - len(data))
        self.at += end
        return data[:end].split(b"\n")[:-1]


def kind_of(line: bytes) -> str:
    """The kind of an event without reading the rest: it is the third field (journal/log.py)."""
    at = line.find(b'"kind":"', 0, 96) + 8
    return line[at : line.find(b'"', at, at + 40)].decode("ascii", "replace") if at > 7 else ""
