"""How many of Rondel's files one steady step of the tiny recipe passes through: each is one that a reader has to open. It
writes no checkpoint, as 49 of 50 do not. One of them is that of layers in halves, on the processors that have them.
"""

import sys
import threading
from pathlib import Path

import pytest
import torch

import rondel
from kits.runs import run
from rondel.core.events import StepDone, subscribe
from rondel.models.linear import has_tiles


@pytest.mark.slow
def test_files_of_a_steady_step(tmp_path, monkeypatch):
    source, seen = str(Path(rondel.__file__).parent), set()
    monkeypatch.setattr(threading, "_profile_hook", None)
    done = []

    def note_call(frame, kind, _):
        if done == [3] and kind == "call" and frame.f_code.co_filename.startswith(source):
            seen.add(frame.f_code.co_filename)

    forget = subscribe(
        lambda event: done.__setitem__(slice(None), [event.step]) if isinstance(event, StepDone) else None
    )
    threading.setprofile(note_call)
    sys.setprofile(note_call)
    run(tmp_path, loop__steps=4, loop__warmup__steps=0, run__checkpoint__every=0)
    sys.setprofile(None)
    forget()
    assert 56 < len(seen) <= 66 + has_tiles(torch.float32), sorted(seen)
