"""Output that nobody can read any more: a pipe whose reader has left, a full disk, a terminal
of few characters. A run outlives all of them.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from kits.run_folder import step_events, write_run
from rondel.cli import main
from rondel.core.events import Advised
from rondel.runtime.telemetry.progress import ProgressPrinter
from rondel.system.streams import PatientStream


def left() -> io.TextIOWrapper:
    """A pipe whose reader has left."""
    reads, writes = os.pipe()
    os.close(reads)
    return os.fdopen(writes, "w")


def full() -> io.TextIOWrapper:
    return open("/dev/full", "w")


def ascii_only() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="ascii")


needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")


@pytest.mark.parametrize("broken", [left, pytest.param(full, marks=needs_full)])
def test_a_run_goes_on_without_its_reader(monkeypatch, capsys, broken):
    monkeypatch.setattr(sys, "stdout", stream := broken())
    with ProgressPrinter(3) as progress:
        for step in range(1, 4):
            for event in step_events(step):
                progress.on_event(event)
    stream.close()  # nothing is left in it that could fail
    said = capsys.readouterr().err
    assert said.count("warning: the output cannot be written") == 1 and "the run goes on" in said


def test_what_a_terminal_does_not_know_is_a_question_mark(monkeypatch):
    monkeypatch.setattr(sys, "stdout", stream := ascii_only())
    with ProgressPrinter(1) as progress:
        progress.on_event(Advised(1, "▁▂▃ 95 % · \ud83d", 1.0))
    assert stream.buffer.getvalue().decode() == "  ??? 95 % ? \\ud83d\n"


def test_a_rich_console_takes_such_a_stream():
    told: list[OSError] = []
    Console(file=PatientStream(stream := left(), told.append)).print("▁")
    stream.close()
    assert [type(error) for error in told] == [BrokenPipeError]


def ended(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(words))
    return int(end.value.code or 0)


@pytest.mark.parametrize("verb", ["card", "diagnose", "trace"])
def test_a_command_into_ascii_is_no_fault(monkeypatch, tmp_path, verb):
    folder = write_run(tmp_path / "run", steps=4)
    monkeypatch.setattr(sys, "stdout", stream := ascii_only())
    assert ended(verb, str(folder), *["-o", str(tmp_path / "t.json")] * (verb == "trace")) == 0
    assert stream.buffer.getvalue().isascii()


@needs_full
@pytest.mark.parametrize("verb", ["card", "diagnose"])
def test_a_command_onto_a_full_disk_says_so(monkeypatch, capsys, tmp_path, verb):
    folder = write_run(tmp_path / "run", steps=4)
    monkeypatch.setattr(sys, "stdout", stream := full())
    assert ended(verb, str(folder)) == 1
    stream.close()
    assert (
        capsys.readouterr().err
        == "error: writing the output: the disk is full: free some space, or move the folder to a larger disk\n"
    )


def test_a_command_whose_reader_has_left_ends_without_a_word(monkeypatch, capsys, tmp_path):
    folder = write_run(tmp_path / "run", steps=4)
    monkeypatch.setattr(sys, "stdout", stream := left())
    assert ended("card", str(folder)) == 1
    stream.close()
    assert capsys.readouterr().err == ""


def test_a_command_whose_terminal_was_closed_still_ends_with_its_code(monkeypatch, tmp_path):
    closed = SimpleNamespace(write=_gone, flush=_gone, fileno=_gone)
    monkeypatch.setattr(sys, "stderr", closed)
    assert ended("card", str(tmp_path / "nowhere")) == 1


@needs_full
def test_help_onto_a_full_disk_is_one_line(monkeypatch, capsys):
    """typer writes it itself, before there is a command."""
    monkeypatch.setattr(sys, "stdout", stream := full())
    assert ended("card", "--help") == 1
    stream.close()
    assert capsys.readouterr().err.startswith("error: writing the output: the disk is full")


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_a_stream_that_was_closed_before_is_no_fault_and_no_file_of_a_run_takes_its_place(tmp_path, closed):
    folder = write_run(tmp_path / "run", steps=4)
    program = "from rondel.cli import main; main()"
    words = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", program, "card", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == 0 and done.stderr == "", done
    assert ("# Run card" in done.stdout) == (not closed.startswith(">")), done
    opens = "from rondel.system.streams import reopen_closed_streams as r; r(); import os; os._exit(os.open('x', os.O_CREAT))"
    last = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", opens], cwd=tmp_path)
    assert last.returncode > 2, "a file has the number of a stream that somebody may print to"


def _gone(*given: object) -> None:
    raise OSError(5, "Input/output error")
