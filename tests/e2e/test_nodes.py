"""Two machines, made of this one (kits.nodes): the script that `rondel submit` writes, run by bash, with an `srun` that
enters them. The disk is common, as on a cluster; networks, processes and shared memory are not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from kits import nodes
from kits.runs import FAST
from rondel.cli import read_job
from rondel.planner.cluster_layout import ClusterLayout
from rondel.planner.slurm_script import slurm_script

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny.toml"
NODES = (("node-a", "10.77.0.1"), ("node-b", "10.77.0.2"))
SRUN = """while [ "$1" != -w ]; do shift; done
declare -A init=({inits})
node=$2; shift 2
exec nsenter --target="${{init[$node]}}" --net --uts --ipc --pid --mount --wdns="$PWD" -- "$@"
"""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(nodes.missing()), reason=nodes.missing() or "runs")]


def script_of(work: Path, *more: str) -> Path:
    """A run of two ranks on two nodes without GPUs, and what it calls in work/bin."""
    given = [f"--{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in FAST.items() if k != "run.sinks"]
    words = [
        *given,
        "--run.sinks=[]",
        "--place.ranks=2",
        "--run.checkpoint.every=1",
        f"--run.folder={work / 'run'}",
        *more,
    ]
    job, _ = read_job(str(RECIPE), *words, "--place.kind=split", "--place.cluster=torchrun")
    layout = ClusterLayout(RECIPE, job, 2, 0, tuple(words)).check_layout("torchrun")
    (work / "job.sh").write_text(slurm_script(layout, way="torchrun", bin_folder=str(work / "bin")))
    return work / "job.sh"


def put_tools(work: Path, made: list[nodes.Node]) -> None:
    """Stand-ins for SLURM, and this environment's own commands."""
    inits = " ".join(f"[{node.name}]={node.init}" for node in made)
    tools = {
        "scontrol": f"printf '{made[0].name}\\n{made[1].name}\\n'",
        "srun": SRUN.format(inits=inits),
        "rondel": f'exec {sys.executable} -m rondel "$@"',
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    }
    (work / "bin").mkdir()
    for name, body in tools.items():
        (work / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (work / "bin" / name).chmod(0o755)


def test_a_node_that_goes_is_named_and_ranks_listen_where_the_other_reaches_them(tmp_path):
    """On the first node its own name leads to a loopback address, as Debian has it."""
    with ExitStack() as ends:
        made = []
        for name, address in NODES:
            hosts = nodes.hosts_file(tmp_path / f"hosts-{name}", NODES, debian=name)
            made.append(nodes.Node(name, address, hosts))
            ends.callback(made[-1].end)
        nodes.join(*made)
        put_tools(tmp_path, made)
        env = os.environ | {"SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "node-[a-b]", "OMP_NUM_THREADS": "1"}
        with (tmp_path / "log").open("wb") as log:
            script = script_of(tmp_path, "--loop.steps=4000")
            run = subprocess.Popen(["bash", str(script)], env=env, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT)
        ends.callback(run.wait)
        ends.callback(run.kill)
        until = time.monotonic() + 240
        while not list((tmp_path / "run" / "checkpoints").glob("step-*")):
            assert run.poll() is None and time.monotonic() < until, (tmp_path / "log").read_text()
            time.sleep(0.2)
        at = [node.listening() for node in made]
        made[1].end()
        code = run.wait(120)
    said = (tmp_path / "log").read_text()
    assert at == [{"*", "10.77.0.1"}, {"10.77.0.2"}], "torchrun's own store takes all addresses, nothing else does"
    assert code and "ended, or its machine did" in said and "the same command continues from the last" in said, said
    assert "this is a bug of ours" not in said and list((tmp_path / "run" / "checkpoints").glob("step-*"))
