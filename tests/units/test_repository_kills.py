"""kill -9 at random places of an episode in a repository: it goes on to the same folder and the same tokens."""

from __future__ import annotations

import random
import shutil
import signal

import pytest

from kits.repositories import needs_walls
from kits.repository_kills import found_in, life, make_folder
from kits.runs import context

KILLS = 2  # `rondel bench repository_kills` makes twenty, at moments of the clock


def in_a_process(folder, at):
    process = context.Process(target=life, args=(folder, None, 0, at))
    process.start()
    process.join(300)
    assert process.exitcode == (0 if at is None else -signal.SIGKILL)


@pytest.mark.slow
@needs_walls
def test_kills_at_random_places_leave_no_trace(tmp_path):
    """All of one episode, each in the life that goes on from the one before."""
    folder = make_folder(tmp_path)
    in_a_process(folder, None)
    whole = found_in(folder)
    assert len(whole["folders"]) == 6 and len(set(whole["folders"])) > 3 and whole["replayed"] == 0
    shutil.rmtree(folder / "wal")
    for at in sorted(random.Random(0).sample(range(1, whole["places"] + 1), KILLS)):
        in_a_process(folder, at)
    in_a_process(folder, None)
    again = found_in(folder)
    assert again["replayed"] > 0
    assert {name: again[name] for name in ("tokens", "folders", "score")} == {
        name: whole[name] for name in ("tokens", "folders", "score")
    }
