"""Engines of a run's own that join and leave while it goes on: nothing is lost, and nothing twice."""

from __future__ import annotations

import asyncio
import os
from contextlib import nullcontext, suppress

import pytest
import tomli_w

from kits.local_ray import local_ray
from kits.runs import check, events, tiny
from kits.sweeps import covering
from rondel.assemble import train
from rondel.core.config.differences import without_none
from rondel.core.errors import UserError
from rondel.core.events import StepDone, Warned, subscribe
from rondel.driver import elastic_engines
from rondel.driver.elastic_engines import ask_for_engines, registered_urls, wanted_engines

SPLIT = {"place__kind": "split", "loop__max_staleness": 1, "loop__warmup__steps": 0, "task__eval__n": 2}
CORRECTION = {"algo__correction": {"kind": "importance"}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cluster", "tp"), covering([("process", 1), ("process", 2), ("ray", 1)], [("process", 1), ("process", 2)])
)
def test_one_joins_after_step_3_and_leaves_three_steps_later(tmp_path, monkeypatch, cluster, tp):
    """Of one process each, or of two that share every matrix, which end with it. The run waits for it two steps after it was asked for, and two after it was told to go."""
    monkeypatch.setattr(elastic_engines, "EVERY", 0.05)
    said, joined, done = [], [0], [0]

    def hear(event):
        if isinstance(event, StepDone):
            done[0] = event.step
            if event.step == 3:
                ask_for_engines(tmp_path, 2)
            elif joined[0] and event.step == joined[0] + 3:
                ask_for_engines(tmp_path, 1)
        elif isinstance(event, Warned) and "serve now" in event.message:
            said.append(event.message)
            joined[0] = joined[0] or done[0]

    def built(parts):
        plain = parts.trainer.step

        async def step(*given):
            while len(said) < (done[0] >= 5) + (joined[0] > 0 and done[0] >= joined[0] + 5):
                await asyncio.sleep(0.05)
            return await plain(*given)

        parts.trainer.step = step

    forget = subscribe(hear)
    try:
        with local_ray(4) if cluster == "ray" else nullcontext():
            engines = {"place__engines": {"tp": tp}} if tp > 1 else {}
            job = tiny(tmp_path, loop__steps=12, place__cluster=cluster, **engines, **SPLIT, **CORRECTION)
            train(job, quiet=True, built=built)
    finally:
        forget()
    check(tmp_path, staleness=1, total=12)
    assert [message.split(" at ")[0] for message in said] == ["engine-1 has joined", "engine-1 has left"]
    assert "2 serve now" in said[0] and "1 serve now" in said[1] and 3 <= joined[0] <= 6
    drawn = [path for path in (tmp_path / "wal" / "engine-1").iterdir() if os.stat(path).st_size > 200]
    assert len(drawn) >= 2, "it has written, under several versions"
    assert all(e["probe_gap"] < 1e-3 for e in events(tmp_path, "Synced"))
    logs = {path.name for path in (tmp_path / "logs").glob("*")}  # an actor of Ray writes elsewhere
    assert tp == 1 or {f"engine-{i}-rank-1.log" for i in range(2)} <= logs
    assert not [pid for pid in filter(str.isdigit, os.listdir("/proc")) if _writes_below(pid, tmp_path)]


def _writes_below(pid, folder):
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/fd/1").startswith(str(folder))


def begun(folder, **changes):
    """The folder of a run with this recipe."""
    folder.mkdir(exist_ok=True)
    (folder / "job.toml").write_text(tomli_w.dumps(without_none(tiny(folder, **changes).to_dict())))
    return folder


def test_what_is_asked_for(tmp_path):
    with pytest.raises(UserError, match="no run has begun in"):
        ask_for_engines(tmp_path, 2)
    server = {"engine__kind": "sglang", "engine__url": "http://127.0.0.1:1", "place__kind": "split"}
    for changes, fault in (
        (server, "join with `rondel serve MODEL --join"),
        ({"place__kind": "shared"}, 'begin it with place.kind = "split"'),
        ({"place__kind": "shared", "place__ranks": 2}, "shares its devices with its trainer"),
        ({"place__kind": "split", "place__cluster": "local"}, 'begin it with place.cluster = "process"'),
        ({"place__kind": "split", "run__record": True}, "is recorded"),
    ):
        with pytest.raises(UserError, match=fault):
            ask_for_engines(begun(tmp_path / "other", **changes), 2)
    folder = begun(tmp_path / "run", place__kind="split", place__engines=2)
    assert wanted_engines(folder) is None
    for count in (0, 5000):
        with pytest.raises(UserError, match="from 1 to"):
            ask_for_engines(folder, count)
    ask_for_engines(folder, 3)
    assert wanted_engines(folder) == 3 and registered_urls(folder) == []
    for text in ("many", "0", "-2"):
        (folder / "engines" / "count").write_text(text)
        with pytest.raises(UserError, match="holds no number"):
            wanted_engines(folder)
