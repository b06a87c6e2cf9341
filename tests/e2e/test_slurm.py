"""`rondel submit --to slurm` on a real SLURM of two nodes (kits.slurm): what waits, what is out of time, what is cancelled."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from kits import slurm
from kits.runs import FAST, RECIPE

STEPS = 6 + 34  # supervised ones first
GIVEN = [
    *(f"--{key}={str(value).lower()}" for key, value in FAST.items() if key != "run.sinks"),
    *("--run.sinks=[]", "--run.checkpoint.every=1", f"--loop.steps={STEPS - 6}", "--place.ranks=2"),
]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing() or "runs")]


@pytest.mark.parametrize("way", ["torchrun", "ray"])
def test_a_job_that_is_out_of_time_lets_the_next_one_in_and_goes_on_where_it_was(tmp_path, way):
    with slurm.SlurmCluster(tmp_path) as cluster:

        def submit(*words: str) -> str:
            return cluster.run(sys.executable, "-m", "rondel", "submit", *words)

        def job(folder: str) -> str:
            return submit(
                *(str(RECIPE), *GIVEN, f"--run.folder={folder}"),
                *("--to", "slurm", "--nodes", "2", "--gpus", "0", "--with", way, "--time", "30"),
            )

        def state(number: int) -> str:
            return cluster.run("squeue", "--noheader", "--states=all", f"--jobs={number}", "--format=%T (%r)").strip()

        log, saved = tmp_path / "a" / "submit" / "slurm-1.log", tmp_path / "a" / "checkpoints"
        assert "slurm job 1, by a/submit/job.sh" in job("a") and "slurm job 2, by b/submit/job.sh" in job("b")
        cluster.wait_for("run", lambda: state(1).startswith("RUNNING"))
        assert "a has job 1 already (RUNNING" in job("a") and state(2) == "PENDING (Resources)"
        shown = cluster.run("scontrol", "show", "job", "1")
        assert f"cpu=4,mem={2 * slurm.MEMORY}M,node=2" in shown, "all of both nodes, memory included"
        cluster.wait_for("checkpoint", lambda: list(saved.glob("step-*")), 240)
        status = submit("a", "--status")
        assert re.search(r"slurm job 1, .*: RUNNING .*2 nodes, node-a,node-b\nlast checkpoint: step \d+\n", status), status

        cluster.run("scancel", "--batch", "--signal=USR1", "1")  # what SLURM does before --time is over
        cluster.wait_for("place in the line", lambda: state(1).startswith("PENDING"), 120)
        assert "stopped by SIGTERM after step" in log.read_text(), log.read_text()
        cluster.wait_for("next job", lambda: state(2).startswith("RUNNING"))
        submit("b", "--cancel")
        cluster.wait_for("end of a", lambda: state(1) == "COMPLETED (None)", 300)
        assert ": CANCELLED" in submit("b", "--status") and ": COMPLETED" in submit("a", "--status")
        shown = submit("a", "--logs")
    steps = [int(step) for step in re.findall(r"^step +(\d+)/", log.read_text(), re.MULTILINE)]
    assert steps == list(range(1, STEPS + 1)), "each once, over both times"
    assert f"step {STEPS:4}/{STEPS}" in shown
