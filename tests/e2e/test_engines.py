"""Whole tiny runs over several engines, and over engines of others."""

from __future__ import annotations

import os
import signal

from run_kit import balances, events, run, tiny

from rondel.assemble import train
from rondel.words.events import StepDone, subscribe

SHORT = {"loop__warmup__steps": 2, "loop__steps": 3, "loop__max_staleness": 1, "loop__window": "auto"}


def ended_well(folder, total: int) -> None:
    done = events(folder, "StepDone")
    assert [e["step"] for e in done] == [e["version"] for e in done] == list(range(1, total + 1))
    assert all(balances(e["ledger"]) and not e["note"] for e in done)
    assert events(folder, "RunEnded")[-1]["step"] == total


def test_two_engines_in_processes_of_their_own(tmp_path):
    run(tmp_path, place__kind="split", place__engines=2, **SHORT)
    ended_well(tmp_path, 5)
    assert max(e["probe_gap"] for e in events(tmp_path, "Synced")) < 1e-4
    logs = [path for path in (tmp_path / "wal").glob("engine-*") if any(p.stat().st_size > 100 for p in path.glob("*.bin"))]
    assert len(logs) == 2, "one engine drew nothing"


def test_a_run_survives_the_death_of_an_engine(tmp_path):
    """SIGKILL to one of two after the third step: what it had is sent to the other, and the run ends as it should."""
    alive = []

    def kill(event) -> None:
        if isinstance(event, StepDone) and event.step == 3:
            os.kill(alive[0].replicas["engine-1"].engine._worker.pid, signal.SIGKILL)

    stop = subscribe(kill)
    try:
        job = tiny(tmp_path, place__kind="split", place__engines=2, **SHORT)
        train(job, quiet=True, built=lambda parts: alive.append(parts.engine))
    finally:
        stop()
    ended_well(tmp_path, 5)
    assert "SIGKILL" in alive[0].lost["engine-1"] and list(alive[0].replicas) == ["engine-0"]
    assert any("'engine-1' is lost" in e["message"] for e in events(tmp_path, "Warned"))
