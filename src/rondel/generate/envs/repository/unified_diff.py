"""Unified diffs, as `diff -u` and `git diff` write them: read, and applied to the files of a repository."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from rondel.core.errors import DataError
from rondel.core.repository_files import RepositoryFile, Tree, is_inside

HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
NOTHING = "/dev/null"


@dataclass
class FilePatch:
    """The changes of one file. `old` or `new` is "" where there is none."""

    old: str
    new: str
    hunks: list[tuple[int, list[str]]] = field(default_factory=list)  # first old line (from 1), lines with their mark
    executable: bool | None = None


def patched_files(text: str) -> list[str]:
    """The paths that a diff writes or removes."""
    return [patch.new or patch.old for patch in read_diff(text)]


def read_diff(text: str) -> list[FilePatch]:
    """The files of a diff. DataError where it breaks off, is binary or leads out of the repository."""
    found: list[FilePatch] = []
    lines = text.split("\n")
    at, made, mode, old = 0, None, None, ""
    while at < len(lines):
        line = lines[at]
        if line.startswith("diff --git "):
            made, mode = None, None
        elif line.startswith(("new file mode ", "new mode ")):
            mode = line.endswith("755")
        elif line.startswith("rename from "):
            old = line.removeprefix("rename from ")
        elif line.startswith("rename to "):
            made = FilePatch(old, _checked_path(line.removeprefix("rename to ")), executable=mode)
            found.append(made)
        elif line.startswith(("GIT binary patch", "Binary files ")):
            raise DataError(
                f"line {at + 1} of the diff is of a binary file: give that file in the hidden folder instead"
            )
        elif line.startswith("--- ") and at + 1 < len(lines) and lines[at + 1].startswith("+++ "):
            before, after = _path_of(line), _path_of(lines[at + 1])
            if made is None or made.hunks or made.new != after:  # else that of the rename above
                made = FilePatch(before, after, executable=mode)
                found.append(made)
            at += 1
        elif (hunk := HUNK.match(line)) and made is not None:
            at = _read_hunk(lines, at, hunk, made)
        at += 1
    return found


def _read_hunk(lines: list[str], at: int, hunk: re.Match[str], made: FilePatch) -> int:
    """-> the place of its last line."""
    old, new = (1 if hunk[place] is None else int(hunk[place]) for place in (2, 4))
    body: list[str] = []
    while old > 0 or new > 0:
        at += 1
        line = lines[at] if at < len(lines) else None
        if line is None or (line and line[0] not in " +-\\"):
            raise DataError(f"line {at + 1} of the diff: its part '{hunk[0]}' is not whole")
        mark = line[:1] or " "
        old -= mark in " -"
        new -= mark in " +"
        body.append(line or " ")
    if at + 1 < len(lines) and lines[at + 1].startswith("\\"):
        body.append(lines[at + 1])
        at += 1
    made.hunks.append((int(hunk[1]), body))
    return at


def _path_of(line: str) -> str:
    path = line[4:].split("\t")[0].strip()
    if path == NOTHING:
        return ""
    return _checked_path(path[2:] if path[:2] in ("a/", "b/") else path)


def _checked_path(path: str) -> str:
    if not is_inside(path):
        raise DataError(f"the diff writes {path}, which is out of the repository")
    return path


def apply_diff(tree: Mapping[str, RepositoryFile], text: str) -> Tree:
    """The files behind a diff. DataError, with file and line, where the diff is of other files."""
    result = dict(tree)
    for patch in read_diff(text):
        if patch.old and patch.old not in result:
            raise DataError(f"the diff changes {patch.old}, and the repository has no such file")
        before = result.pop(patch.old) if patch.old else RepositoryFile()
        if not patch.new:
            continue
        data = _apply_hunks(before.data.decode("utf-8", "surrogateescape"), patch)
        runs = before.executable if patch.executable is None else patch.executable
        result[patch.new] = RepositoryFile(data.encode("utf-8", "surrogateescape"), runs)
    return dict(sorted(result.items()))


def _apply_hunks(text: str, patch: FilePatch) -> str:
    lines = text.split("\n")
    shift = 0
    for first, body in patch.hunks:
        old = [line[1:] for line in body if line[0] in " -"]
        new = [line[1:] for line in body if line[0] in " +"]
        ends = [at for at, line in enumerate(body) if line[0] == "\\"]
        last = {body[at - 1][0] for at in ends}  # whose last line has no line break
        if not {"-", " "} & last and ends:
            old.append("")
        if not {"+", " "} & last and ends:
            new.append("")
        at = max(0, first - 1 + shift)
        if lines[at : at + len(old)] != old:
            at = _only_place(lines, old)
        if at < 0:
            raise DataError(f"{patch.new}: the diff does not fit at line {first}: it is of another version of the file")
        lines[at : at + len(old)] = new
        shift += len(new) - len(old)
    return "\n".join(lines)


def _only_place(lines: list[str], old: list[str]) -> int:
    """Where these lines stand, if at one place alone; else -1."""
    found = [at for at in range(len(lines) - len(old) + 1) if lines[at : at + len(old)] == old] if old else []
    return found[0] if len(found) == 1 else -1


def write_diff(before: Mapping[str, RepositoryFile], after: Mapping[str, RepositoryFile]) -> str:
    """What turns the text files of the one tree into those of the other."""
    text = ""
    for path in sorted(before.keys() | after.keys()):
        old, new = before.get(path), after.get(path)
        if old == new:
            continue
        names = (NOTHING if old is None else f"a/{path}", NOTHING if new is None else f"b/{path}")
        for line in difflib.unified_diff(_lines_of(old), _lines_of(new), *names):
            text += line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
    return text


def _lines_of(file: RepositoryFile | None) -> list[str]:
    """Split at line feeds alone, as diffs are."""
    text = "" if file is None else file.data.decode("utf-8", "surrogateescape")
    return [f"{line}\n" for line in text.split("\n")[:-1]] + [line for line in text.split("\n")[-1:] if line]
