"""Two machines, made of this one (kits.nodes): the script that `rondel submit` writes, run by bash, with an `srun` that
enters them. The disk is common, as on a cluster; networks, processes and shared memory are not.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from kits import nodes, runs
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


def script_of(work: Path, *more: str, way: str = "torchrun") -> Path:
    """A run of two ranks on two nodes without GPUs, and what it calls in work/bin."""
    given = [f"--{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in runs.FAST.items() if k != "run.sinks"]
    words = [
        *given,
        "--run.sinks=[]",
        "--place.ranks=2",
        "--run.checkpoint.every=1",
        f"--run.folder={work / 'run'}",
        *more,
    ]
    job, _ = read_job(str(RECIPE), *words, "--place.kind=split", f"--place.cluster={way}")
    layout = ClusterLayout(RECIPE, job, 2, 0, tuple(words)).check_layout(way)
    (work / "job.sh").write_text(slurm_script(layout, way=way, bin_folder=str(work / "bin")))
    return work / "job.sh"


def put_tools(work: Path, made: list[nodes.Node], tools: dict[str, str] | None = None) -> None:
    """Stand-ins for SLURM, and this environment's own commands, or others in their place."""
    inits = " ".join(f"[{node.name}]={node.init}" for node in made)
    given = {
        "scontrol": f"printf '{made[0].name}\\n{made[1].name}\\n'",
        "srun": SRUN.format(inits=inits),
        "rondel": f'exec {sys.executable} -m rondel "$@"',
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    }
    (work / "bin").mkdir()
    for name, body in (given | (tools or {})).items():
        (work / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (work / "bin" / name).chmod(0o755)


def start_nodes(work: Path, ends: ExitStack) -> list[nodes.Node]:
    made = []
    for name, address in NODES:
        hosts = nodes.hosts_file(work / f"hosts-{name}", NODES, debian=name)
        made.append(nodes.Node(name, address, hosts))
        ends.callback(made[-1].end)
    nodes.join(*made)
    return made


def test_a_node_that_goes_is_named_and_ranks_listen_where_the_other_reaches_them(tmp_path):
    """On the first node its own name leads to a loopback address, as Debian has it."""
    with ExitStack() as ends:
        made = start_nodes(tmp_path, ends)
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


# a CPU on the first node and two on the second
RAY = """cpus=2
if [ "$(hostname)" = node-a ]; then cpus=1; fi
case "$*" in
start*--head*) set -- "$@" --num-cpus="$cpus" --object-store-memory=80000000 --include-dashboard=false ;;
start*) set -- "$@" --num-cpus="$cpus" --object-store-memory=80000000 ;;
esac
exec {python} -c 'from ray.scripts.scripts import main; main()' "$@"
"""


def test_ranks_and_engine_of_ray_on_two_nodes_end_where_one_process_ends(tmp_path):
    """Of tp = 2 the first rank is on the first node, the other one and the engine are on the second. Each rank serves its
    own part of the weights, at its address; by broadcast: tests/e2e/test_mesh_runs.py.
    """
    pytest.importorskip("ray")
    with ExitStack() as ends:
        made = start_nodes(tmp_path, ends)
        rondel = shlex.join(made[0].command(sys.executable, "-m", "rondel"))
        own = {"ray": RAY.format(python=sys.executable), "rondel": f'exec {rondel} "$@"'}
        put_tools(tmp_path, made, own)
        env = os.environ | {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "node-[a-b]", "OMP_NUM_THREADS": "1"}
        script = script_of(tmp_path, "--place.mesh={ tp = 2 }", "--loop.steps=3", "--sync.kind=tcp", way="ray")
        with (tmp_path / "log").open("wb") as log:
            run = subprocess.Popen(["bash", str(script)], env=env, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT)
        ends.callback(run.wait)
        ends.callback(run.kill)
        code = run.wait(280)
        assert code == 0, (tmp_path / "log").read_text()
        told = [node.run("sh", "-c", "grep -rho ':actor_name:.*' /tmp/ray/session_latest/logs") for node in made]
    actors = [set(re.findall(r"(?:trainer|engine)-[0-9]", text)) for text in told]
    assert actors == [{"trainer-0"}, {"trainer-1", "engine-0"}], "ranks come first, in the order of nodes"
    tiny = {"place__kind": "split", "loop__steps": 3, "run__checkpoint__every": 1}
    runs.run(tmp_path / "one", **tiny)
    a, b = (runs.final(tmp_path / name) for name in ("run", "one"))
    weights = [name for name in a if name.startswith("model/")]
    assert weights and a.keys() == b.keys()
    moved = sum(float((a[n] - b[n]).double().square().sum()) for n in weights)
    assert (moved / sum(float(b[n].double().square().sum()) for n in weights)) ** 0.5 <= 1e-6
    resolved = json.loads((tmp_path / "run" / "card.json").read_text())["facts"]["resolved"]
    assert resolved["sync.kind"].startswith("tcp")
