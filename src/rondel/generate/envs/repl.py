"""An interpreter that keeps its variables: in a box, a JSON object a line, {"code"} ->
{"text"}, {} -> a digest of its folder. Standard library only, and no import of ours.

The last expression of a text is shown, as an interactive interpreter does.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import signal
import stat
import sys
import tempfile
import traceback
from contextlib import suppress
from typing import Any

LATE = "it took too long and was stopped; its variables are kept"


def execute_code(text: str, space: dict[str, Any]) -> None:
    try:
        tree = ast.parse(text, "<python>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<python>", "exec"), space)
        if (
            isinstance(last, ast.Expr)
            and (value := eval(compile(ast.Expression(last.value), "<python>", "eval"), space)) is not None
        ):
            print(repr(value))
    except BaseException as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename != "<python>":
            trace = trace.tb_next
        print_error(error.with_traceback(trace))


def print_error(error: BaseException) -> None:
    """Its traceback as far as it is the code's own: without frames of this file, and with libraries by their names."""
    told = traceback.TracebackException.from_exception(error)
    own = {(f.__code__.co_filename, f.__name__) for f in (execute_code, raise_timeout, serve)}
    seen, open_ones = set[int](), list[traceback.TracebackException | None]([told])
    while open_ones:
        one = open_ones.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.stack[:] = [frame for frame in one.stack if (frame.filename, frame.name) not in own]
        for frame in one.stack:
            frame.filename = library_name(frame.filename)
        open_ones += [one.__cause__, one.__context__, *(getattr(one, "exceptions", None) or ())]
    sys.stderr.write("".join(told.format()))


def library_name(path: str) -> str:
    """Without the folder that it was imported from: "json/decoder.py"."""
    homes = [home.rstrip("/") + "/" for home in sys.path if home.startswith("/")]
    return path[max((len(home) for home in homes if path.startswith(home)), default=0) :]


def folder_digest(folder: str = ".") -> str:
    """Of the names, modes and contents below a folder; without what Python compiled, which tells the time."""
    total = hashlib.blake2b(digest_size=16)
    for place, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        folders[:] = sorted(set(folders) - set(links) - {"__pycache__"})
        for name in ["", *sorted(files + links)]:
            path = os.path.join(place, name)
            mode = os.lstat(path).st_mode
            total.update(f"{os.path.relpath(path, folder)}\0{mode:o}\0".encode(errors="surrogateescape"))
            if stat.S_ISLNK(mode):
                total.update(os.readlink(path).encode(errors="surrogateescape"))
            elif stat.S_ISREG(mode):
                with open(path, "rb") as file:
                    total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def raise_timeout(*_: Any) -> None:
    raise TimeoutError(LATE)


def middle_out(file: int, most: int) -> str:
    """What was printed, and of too much the beginning and the end."""
    size = os.fstat(file).st_size
    if size <= most:
        return os.pread(file, most, 0).decode(errors="replace")
    begin, end = os.pread(file, most // 2, 0), os.pread(file, most // 2, size - most // 2)
    return f"{begin.decode(errors='replace')}\n[... {size - most} bytes left out ...]\n{end.decode(errors='replace')}"


def memory_file() -> int:
    """Where what is printed is kept: no full disk takes it away. A box whose memory is
    not counted has no files in memory.
    """
    try:
        return os.memfd_create("said")
    except OSError:
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())


def flush_streams() -> str:
    """What could not be written, in words, or nothing."""
    lost = ""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        try:
            getattr(sys, name).flush()
        except Exception as error:  # it was closed, or the disk is full
            lost = f"error: what was printed is lost ({error}); remove files if the disk is full\n"
            setattr(sys, name, open(fd, "w", closefd=False))  # noqa: SIM115
    return lost


def serve(seconds: float, most: int) -> None:
    asked, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    said = memory_file()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for fd in (1, 2):  # what its subprocesses print is shown too
        os.dup2(said, fd)
    main = type(sys)("__main__")
    sys.modules["__main__"] = main
    signal.signal(signal.SIGALRM, raise_timeout)
    for line in asked:
        os.ftruncate(said, 0)
        os.lseek(said, 0, os.SEEK_SET)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        given, found = json.loads(line), None
        try:
            if "code" in given:
                execute_code(given["code"], main.__dict__)
            else:
                found = folder_digest()
        except TimeoutError:  # while its traceback was written
            with suppress(OSError):
                os.write(2, f"TimeoutError: {LATE}\n".encode())
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        lost = flush_streams()
        answers.write(json.dumps({"text": middle_out(said, most) + lost if found is None else found}) + "\n")
        answers.flush()
