"""A command ends as an interpreter would end it, without the seconds in which modules are taken apart."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest

from rondel.system.interpreter import BROKEN_OUTPUT, import_whole

ENDS = """
import atexit, sys, threading, time
from rondel.system.interpreter import end_process

def last():
    time.sleep(0.2)
    print("thread")

class Whole:
    def __del__(self):
        print("taken apart")

kept = Whole()
kept.itself = kept  # a circle
text, raw = open(sys.argv[1], "w"), open(sys.argv[2], "wb")
text.write("text"), raw.write(b"raw")
threading.Thread(target=last).start()
atexit.register(print, "called")
print("said")
end_process(3)
"""


def end(*words, how=()):
    command = [sys.executable, *how, "-c", ENDS, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_threads_are_waited_for_and_all_is_written(tmp_path):
    text, raw = tmp_path / "text", tmp_path / "raw"
    done = end(text, raw)
    assert (done.returncode, done.stdout, done.stderr) == (3, "said\nthread\ncalled\n", "")
    assert (text.read_text(), raw.read_bytes()) == ("text", b"raw")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "taken_apart"), [(["-m", "rondel"], ""), (["-m", "cProfile", "-m", "rondel"], "taken apart\n")]
)
def test_a_command_is_gone_at_once_and_a_profiler_has_its_say(tmp_path, how, taken_apart):
    (tmp_path / "sitecustomize.py").write_text(
        "class Whole:\n    def __del__(self, print=print):\n        print('taken apart')\nkept = Whole()\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, *how, "--version"], env=env, capture_output=True, text=True, timeout=60)
    first, *rest = done.stdout.splitlines(keepends=True)
    assert done.returncode == 0 and first.startswith("rondel ") and "".join(rest).endswith(taken_apart)
    assert ("function calls" in done.stdout) == bool(taken_apart) and (taken_apart or not rest)


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_output_that_could_not_be_written_is_told(tmp_path):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", ENDS, str(tmp_path / "text"), str(tmp_path / "raw")]
        buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
        assert subprocess.run(command, stdout=full, env=buffered, timeout=60).returncode == BROKEN_OUTPUT
    assert (tmp_path / "text").read_text() == "text"


@pytest.mark.slow
def test_nothing_collects_while_a_module_is_imported(tmp_path, monkeypatch):
    (tmp_path / "large_module_of_a_test.py").write_text(
        "import gc\ncollects = gc.isenabled()\nkept = [[] for _ in range(2000)]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    before = gc.get_freeze_count()
    module = import_whole("large_module_of_a_test")
    assert not module.collects and gc.isenabled() and gc.get_freeze_count() >= before + 2000
    assert import_whole("large_module_of_a_test") is module
    (tmp_path / "broken_module_of_a_test.py").write_text("raise ValueError('its own')\n")
    with pytest.raises(ValueError, match="its own"):
        import_whole("broken_module_of_a_test")
    assert gc.isenabled()
