"""kill -9 at random moments of an episode in a repository: it goes on to the same folder and the same tokens."""

from __future__ import annotations

import shutil
import signal

import pytest

from kits.repositories import has_walls
from kits.repository_kills import found_in, life, make_folder, moments
from kits.runs import context

KILLS = 5  # `rondel bench repository_kills` makes twenty


def in_a_process(folder, delay):
    process = context.Process(target=life, args=(folder, delay, 0))
    process.start()
    process.join(120)
    assert process.exitcode in ((0,) if delay is None else (0, -signal.SIGKILL))
    return process.exitcode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.skipif(not has_walls(), reason="nothing would contain the code")
def test_kills_at_random_moments_leave_no_trace(tmp_path):
    """All of one episode, each in the life that goes on from the one before."""
    folder = make_folder(tmp_path)
    in_a_process(folder, None)
    whole = found_in(folder)
    assert len(whole["folders"]) == 6 and len(set(whole["folders"])) > 3 and whole["replayed"] == 0
    shutil.rmtree(folder / "wal")
    killed = 0
    for delay in moments(3 * KILLS, whole["seconds"]):
        killed += in_a_process(folder, delay)
        if killed == KILLS:
            break
    (folder / "found.json").unlink(missing_ok=True)
    in_a_process(folder, None)
    again = found_in(folder)
    assert killed == KILLS and again["replayed"] > 0
    assert {name: again[name] for name in ("tokens", "folders", "score")} == {
        name: whole[name] for name in ("tokens", "folders", "score")
    }
