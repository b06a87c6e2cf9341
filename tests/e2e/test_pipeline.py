"""`rondel pipeline` with stages in processes of their own, which end with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import pytest
import tomli_w

from kits.forked import Forked
from kits.runs import FAST, RECIPE, events
from rondel.cli import main
from rondel.core.config.toml_reader import set_dotted
from rondel.pipeline import pipeline_run
from rondel.pipeline.pipeline_file import read_pipeline
from rondel.pipeline.pipeline_record import PipelineRecord
from rondel.pipeline.pipeline_run import log_of, prepare_stage
from rondel.pipeline.stage_process import ChildProcess
from rondel.pipeline.stage_result import last_step


@pytest.mark.slow
def test_a_stage_ends_with_its_pipeline_and_the_command_goes_on(tmp_path, capfd, monkeypatch):
    shared: dict = {}
    for dotted, value in FAST.items():
        set_dotted(shared, dotted, value)
    loop = {"steps": 0, "warmup": {"steps": 20}}
    tree = {"folder": str(tmp_path / "out"), "shared": shared, "stages": {"one": {"recipe": str(RECIPE), "loop": loop}}}
    (tmp_path / "p.toml").write_text(tomli_w.dumps(tree))
    pipeline = read_pipeline(tmp_path / "p.toml")
    stage = pipeline.stages["one"]
    words, _ = prepare_stage(pipeline, stage, {})
    PipelineRecord(pipeline).begin(stage, {}, words)
    child = ChildProcess(words, log_of(pipeline, "one"), None)
    deadline = time.monotonic() + 120
    while last_step(stage.folder) is None:
        assert child.poll() is None and time.monotonic() < deadline, log_of(pipeline, "one").read_text()
        time.sleep(0.02)
    os.close(child._alive)  # as if the pipeline had been killed
    child._alive = -1
    assert child.wait() == 128 + signal.SIGTERM, "it keeps a checkpoint and ends"
    done = last_step(stage.folder)
    assert done is not None and 0 < done[0] < 20 and events(stage.folder, "Checkpointed")[-1]["step"] == done[0]

    def start(words, log, out, cores=()):
        with log.open("a") as said:
            return Forked(words, stdout=said, stderr=subprocess.STDOUT)

    monkeypatch.setitem(pipeline_run.run_pipeline.__kwdefaults__, "start", start)
    with pytest.raises(SystemExit) as end:
        main(["pipeline", str(tmp_path / "p.toml"), "--json"])
    told = capfd.readouterr()
    assert not end.value.code, told.err
    known = json.loads(told.out)["stages"]["one"]
    assert known["status"] == "finished" and known["steps"] == 20 and "one: goes on, trains 20 steps" in told.err
    assert [e["step"] for e in events(stage.folder, "Resumed")] == [done[0]]
