"""`rondel submit --to slurm` on a real SLURM of two nodes (kits.slurm): what waits, is cancelled, is preempted."""

from __future__ import annotations

import re
import sys

import pytest

from kits import slurm
from kits.runs import FAST, RECIPE
from kits.submits import layout
from rondel.planner.slurm_script import slurm_script

SUPERVISED, STEPS = FAST["loop.warmup.steps"], 16  # of these
GIVEN = [
    *(f"--{key}={str(value).lower()}" for key, value in FAST.items() if key != "run.sinks"),
    *("--run.sinks=[]", "--run.checkpoint.every=1", f"--loop.steps={STEPS - SUPERVISED}", "--place.ranks=2"),
]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing() or "runs")]


@pytest.mark.sweep
@pytest.mark.parametrize("way", ["torchrun", "ray"])
def test_a_job_that_is_preempted_writes_a_checkpoint_and_goes_on_where_it_was(tmp_path, way):
    with slurm.SlurmCluster(tmp_path) as cluster:

        def submit(*words: str) -> str:
            return cluster.run(sys.executable, "-m", "rondel", "submit", *words)

        def job(folder: str) -> str:
            size = ("--nodes", "2", "--gpus", "0", "--with", way, "--time", "30")
            return submit(str(RECIPE), *GIVEN, f"--run.folder={folder}", "--to", "slurm", *size)

        def state(number: int) -> str:
            return cluster.run("squeue", "--noheader", "--states=all", f"--jobs={number}", "--format=%T (%r)").strip()

        log, saved = tmp_path / "a" / "submit" / "slurm-1.log", tmp_path / "a" / "checkpoints"
        assert "slurm job 1, by a/submit/job.sh" in job("a")
        cluster.wait_for("first job", lambda: state(1).startswith("RUNNING"))
        shown = cluster.run("scontrol", "show", "job", "1")
        assert f"cpu=4,mem={2 * slurm.MEMORY}M,node=2" in shown, "all of both nodes, memory included"
        assert "slurm job 2, by b/submit/job.sh" in job("b") and "b has job 2 already (PENDING" in job("b")
        submit("b", "--cancel")
        assert ": CANCELLED" in submit("b", "--status") and state(1).startswith("RUNNING")

        cluster.wait_for("checkpoint", lambda: list(saved.glob("step-*")))
        cluster.run("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--wrap=srun sleep 600")
        cluster.wait_for("urgent job", lambda: state(3).startswith("RUNNING"))
        assert state(1).startswith("PENDING") and "stopped by SIGTERM after step" in log.read_text(), log.read_text()
        cluster.run("scancel", "3")
        cluster.wait_for("end of the first job", lambda: state(1) == "COMPLETED (None)")
        assert re.search(rf": COMPLETED .*\nlast checkpoint: step {STEPS}\n", submit("a", "--status"))
        shown = submit("a", "--logs")
    steps = [int(step) for step in re.findall(r"^step +(\d+)/", log.read_text(), re.MULTILINE)]
    assert steps == list(range(1, STEPS + 1)), "each once, over both times"
    assert f"all steps done after step {STEPS}" in shown


def test_steps_share_the_gpus_of_their_node_and_ray_is_started_again(tmp_path):
    """Ray, torchrun and rondel are stand-ins that say where they are, and which GPUs they see."""
    (tmp_path / "bin").mkdir()
    fails_once = f'[ "$(hostname)" = node-b ] && mkdir {tmp_path}/once && exit 1'
    tools = {
        "ray": f'[ "$1" != start ] || {{ {fails_once}; sleep 60; }}',
        "rondel": f"until [ $(grep -c 'node-b ray' {tmp_path}/calls) = 2 ]; do sleep 0.1; done",
        "torchrun": "",
    }
    for name, waits in tools.items():
        said = f'echo "$(hostname) {name} $1 $CUDA_VISIBLE_DEVICES" >> {tmp_path}/calls'
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{said}\n{waits}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    with slurm.SlurmCluster(tmp_path) as cluster:
        for number, way in enumerate(("ray", "torchrun"), 1):
            placed = layout(2, 2, f"--run.folder={tmp_path}/run", way=way)
            (tmp_path / way).write_text(slurm_script(placed, way=way, bin_folder=str(tmp_path / "bin")))
            cluster.run("sbatch", f"--output={tmp_path}/out-{way}", way)
            ended = ("squeue", "--noheader", "--states=all", f"--jobs={number}", "--format=%T")
            cluster.wait_for(f"end of {way}", lambda: cluster.run(*ended) == "COMPLETED\n")  # noqa: B023
    calls = (tmp_path / "calls").read_text().splitlines()
    every = ["node-a ray start 0,1", "node-a ray status 0,1", "node-b ray start 0,1", "node-a rondel train 0,1"]
    assert set(every) <= set(calls) and calls.count("node-b ray start 0,1") == 2
    assert sorted(c for c in calls if "torchrun" in c) == [
        "node-a torchrun --nnodes 0,1",
        "node-b torchrun --nnodes 0,1",
    ]
