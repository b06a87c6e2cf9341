"""A SLURM cluster of two nodes (kits.nodes): the real munged, slurmctld and slurmd, in a folder of the test.

    with SlurmCluster(folder) as cluster:
        cluster.run("sbatch", "job.sh")        a command on the first node, which is the login node as well
        cluster.nodes[1].end()                 as if the second node's plug were pulled

Needs the Debian packages slurm-wlm and munge, and what kits.nodes needs. Nothing outside the folder is read or written:
own key, own ports (of the nodes' own networks), own configuration by SLURM_CONF.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from kits import nodes

NODES = (("node-a", "10.77.0.1"), ("node-b", "10.77.0.2"))
MEMORY = 4000  # MiB of a node, as SLURM is told
CONF = """\
ClusterName=rondel
SlurmctldHost=node-a(10.77.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
GresTypes=gpu
KillWait=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
ReturnToService=2
SlurmdTimeout=20
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
{nodes}
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=120
PartitionName=urgent Nodes=ALL PriorityTier=2
"""
ALL = 540  # seconds of a cluster; pytest ends what takes 600


def missing() -> str:
    """Why there can be none here; empty where there can."""
    if absent := [tool for tool in ("munged", "slurmctld", "slurmd", "sbatch") if not _find(tool)]:
        return f"{', '.join(absent)} is missing: apt install slurm-wlm munge"
    return nodes.missing()


class SlurmCluster:
    """It. The nodes have 2 CPUs and 2 files for GPUs each; a job that asks for no memory gets 100 MiB a CPU. Jobs of the partition urgent
    preempt those of main, which are told 120 s before.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.nodes = folder, list[nodes.Node]()
        self._until = time.monotonic() + ALL
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._ends = ExitStack()

    def __enter__(self) -> Self:
        with self._ends:
            self._ends.callback(self._wait_for_ends)
            for name, address in NODES:
                hosts = nodes.hosts_file(self.folder / f"hosts-{name}", NODES)
                self.nodes.append(nodes.Node(name, address, hosts))
                self._ends.callback(self.nodes[-1].end)
                Path("/tmp/ray").mkdir(exist_ok=True)
                self.nodes[-1].run("mount", "-t", "tmpfs", "tmpfs", "/tmp/ray")  # of each node, as on a cluster
            nodes.join(*self.nodes)
            rows = [f"NodeName={n} NodeAddr={a} CPUs=2 RealMemory={MEMORY} Gres=gpu:2" for n, a in NODES]
            (self.folder / "slurm.conf").write_text(CONF.format(folder=self.folder, nodes="\n".join(rows)))
            (self.folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
            (self.folder / "state").mkdir()
            self._start("munged", 0, "--foreground", "--force", *self._munge_options())
            self.wait_for("munged", (self.folder / "munge.socket").exists)
            self._start("slurmctld", 0, "-D")
            for i, (name, _) in enumerate(NODES):
                self._start("slurmd", i, "-D", "-N", name)
            idle = ("sinfo", "--noheader", "--partition=main", "--format=%T %D")
            self.wait_for("two idle nodes", lambda: self.run(*idle) == "idle 2\n")
            self._ends = self._ends.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.close()

    def start(self, *words: str | Path, **how: Any) -> subprocess.Popen[Any]:
        """A command on the first node, where the controller is."""
        return self.nodes[0].start("env", f"--chdir={self.folder}", *words, env=self._environment(), **how)

    def run(self, *words: str | Path) -> str:
        """What a command on the first node prints, errors included."""
        process = self.start(*words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return str(process.communicate(timeout=120)[0])

    def wait_for(self, what: str, is_there: Callable[[], object]) -> None:
        while not is_there():
            gone = [name for name, process in self._daemons.items() if process.poll() is not None]
            if gone or time.monotonic() > self._until:
                logs = [f"== {path.name}\n{path.read_text()[-3000:]}" for path in self.folder.glob("*.log")]
                raise AssertionError("\n".join([f"no {what}; ended: {gone}", *logs]))
            time.sleep(0.1)

    def _environment(self) -> dict[str, str]:
        return os.environ | {"SLURM_CONF": f"{self.folder}/slurm.conf"}

    def _munge_options(self) -> list[str]:
        key = self.folder / "munge.key-file"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        return [f"--{name}={self.folder}/munge.{name}" for name in ("key-file", "socket", "pid-file", "seed-file")] + [
            f"--log-file={self.folder}/munge.text"
        ]

    def _start(self, tool: str, node: int, *words: str) -> None:
        name = f"{tool}-{node}"
        with (self.folder / f"{name}.log").open("wb") as log:
            how = {"env": self._environment(), "stdout": log, "stderr": log}
            self._daemons[name] = self.nodes[node].start(_find(tool), *words, **how)

    def _wait_for_ends(self) -> None:
        """The daemons end with their nodes."""
        for process in self._daemons.values():
            process.wait(20)


def _find(tool: str) -> str:
    return shutil.which(tool, path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin") or ""
