"""Jobs of other people's schedulers: SLURM, Kubernetes, Ray. Each is asked by its own command line.

    rondel submit ──> sbatch / kubectl apply / ray job submit ──> RUN/submit/job.json
                      squeue, sacct / kubectl get / ray job status     --status
                      the log file / kubectl logs / ray job logs       --logs
                      scancel / kubectl delete / ray job stop          --cancel

What a tool prints is shown as it is; one that is missing, silent or refuses is an error with a remedy.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from rondel.core.errors import UserError
from rondel.system.files import make_folder, replace_file

FOLDER, RECORD = "submit", "job.json"  # inside the run folder
DEADLINE = 120.0  # seconds in which a tool answers
SHOWN = "200"  # lines of a log before those to come
ENDED = {  # states of SLURM that a job does not leave
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED", "TIMEOUT"),
}
REMEDY = {
    "sbatch": "submit from a login node of the cluster, or print the script with --dry-run and take it there",
    "squeue": "ask from a login node of the cluster",
    "scancel": "cancel from a login node of the cluster",
    "kubectl": "install kubectl and point it at the cluster (kubectl config current-context), or print the manifest "
    "with --dry-run",
    "ray": "pip install 'rondel[cluster]' 'ray[default]'",
}


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """A job and where it was put: SubmittedJob("slurm", "41", ...)."""

    to: str
    id: str
    log: str = ""
    """SLURM: the file of its output"""
    address: str = ""
    """Ray: of the cluster's dashboard"""
    namespace: str = ""
    """Kubernetes; empty: that of kubectl's context"""
    time: float = 0.0


@dataclass(frozen=True, slots=True)
class JobState:
    """What the scheduler says of it."""

    text: str
    over: bool


class Scheduler(Protocol):
    """What a job is put on. A command is one whose output is shown as it is."""

    tool: str

    def submit(self, file: Path) -> SubmittedJob: ...
    def state(self, job: SubmittedJob) -> JobState: ...
    def log_command(self, job: SubmittedJob, *, follow: bool) -> list[str]: ...
    def cancel_command(self, job: SubmittedJob) -> list[str]: ...


class SlurmScheduler:
    """sbatch and its family."""

    tool = "sbatch"

    def submit(self, file: Path) -> SubmittedJob:
        log = str(file.parent / "slurm-%j.log")
        number = run_tool("sbatch", "--parsable", f"--output={log}", str(file)).strip().partition(";")[0]
        if not number.isdigit():
            raise UserError(f"sbatch printed no job number but {number!r}: see squeue --me whether the job is there")
        return SubmittedJob("slurm", number, log=log.replace("%j", number), time=time.time())

    def state(self, job: SubmittedJob) -> JobState:
        columns = "--format=%T %M of %l, %D nodes, %R"
        known = run_tool("squeue", "--noheader", "--states=all", "--jobs", job.id, columns, forgives="Invalid job id")
        if known.strip():  # an ended one is there for some minutes (MinJobAge)
            return JobState(known.strip(), over=known.split()[0] in ENDED)
        asked = ("sacct", "--noheader", "--allocations", "--jobs", job.id, "--format=State,ExitCode,Elapsed")
        ended = run_tool(*asked, forgives="accounting storage is disabled") if shutil.which("sacct") else ""
        return JobState(" ".join(ended.split()) or "no longer in the queue", over=True)

    def log_command(self, job: SubmittedJob, *, follow: bool) -> list[str]:
        return ["tail", "-n", SHOWN, *["-F"] * follow, job.log]

    def cancel_command(self, job: SubmittedJob) -> list[str]:
        return ["scancel", job.id]


class KubernetesScheduler:
    """kubectl; `kind`: job or rayjob. A RayJob's own output is that of the Job of its name."""

    tool = "kubectl"

    def __init__(self, to: str, kind: str, name: str, namespace: str, claim: str = "") -> None:
        self.to, self.kind, self.name, self.namespace, self.claim = to, kind, name, namespace, claim

    def submit(self, file: Path) -> SubmittedJob:
        if not run_tool(*self._kubectl("get", "pvc", self.claim, "--output=name"), forgives="NotFound").strip():
            raise UserError(
                f"there is no volume claim '{self.claim}', which keeps the run folder: kubectl get pvc lists those "
                "that there are; name one that every node can mount (ReadWriteMany) with --claim"
            )
        job = SubmittedJob(self.to, self.name, namespace=self.namespace, time=time.time())
        if not (state := self.state(job)).over:
            raise UserError(
                f"{self.kind} {self.name} is there already ({state.text}): kubectl delete {self.kind} {self.name}, or "
                "submit a recipe whose file has another name"
            )
        # one that has ended stays there, and applying it again would start nothing
        run_tool(*self._kubectl("delete", self.kind, self.name, "--ignore-not-found"))
        run_tool(*self._kubectl("apply", "--filename", str(file)))
        return job

    def state(self, job: SubmittedJob) -> JobState:
        found = run_tool(*self._kubectl("get", self.kind, job.id, "--ignore-not-found", "--output=json"))
        if not found.strip():
            return JobState("no longer there", over=True)
        status = json.loads(found).get("status", {})
        if self.kind == "rayjob":
            parts = [status.get("jobDeploymentStatus"), status.get("jobStatus"), status.get("message")]
            over = status.get("jobDeploymentStatus") in ("Complete", "Failed")
            return JobState(", ".join(part for part in parts if part) or "waiting", over)
        ended = [
            c for c in status.get("conditions", []) if c["type"] in ("Complete", "Failed") and c["status"] == "True"
        ]
        counts = ", ".join(
            f"{status[key]} {key}" for key in ("active", "ready", "succeeded", "failed") if status.get(key)
        )
        reasons = [": ".join(part for part in (c["type"], c.get("message")) if part) for c in ended]
        return JobState(" · ".join([*reasons, counts] if counts else reasons) or "waiting", over=bool(ended))

    def log_command(self, job: SubmittedJob, *, follow: bool) -> list[str]:
        if self.kind == "rayjob":
            return self._kubectl("logs", f"job/{job.id}", f"--tail={SHOWN}", *["--follow"] * follow)
        first = f"--selector=job-name={job.id},batch.kubernetes.io/job-completion-index=0"
        return self._kubectl("logs", first, f"--tail={SHOWN}", *["--follow"] * follow)

    def cancel_command(self, job: SubmittedJob) -> list[str]:
        return self._kubectl("delete", self.kind, job.id)

    def _kubectl(self, *words: str) -> list[str]:
        return ["kubectl", *([f"--namespace={self.namespace}"] if self.namespace else []), *words]


class RayJobScheduler:
    """`ray job`; the head node runs the file, which it sees where this machine does."""

    tool = "ray"

    def __init__(self, address: str, name: str) -> None:
        self.address, self.name = address, name
        if not address and not os.environ.get("RAY_API_SERVER_ADDRESS") and not os.environ.get("RAY_ADDRESS"):
            raise UserError("which Ray cluster? Name its dashboard: --address http://HEAD:8265, or set RAY_ADDRESS")

    def submit(self, file: Path) -> SubmittedJob:
        name = f"{self.name}-{int(time.time())}"
        command = ["bash", str(file.resolve())]
        run_tool("ray", "job", "submit", *self._address(), "--submission-id", name, "--no-wait", "--", *command)
        return SubmittedJob("ray", name, address=self.address, time=time.time())

    def state(self, job: SubmittedJob) -> JobState:
        said = run_tool("ray", "job", "status", *self._address(), job.id)
        lines = [line.strip() for line in said.splitlines() if "tatus" in line] or said.splitlines()[-1:]
        over = any(word in said for word in ("SUCCEEDED", "FAILED", "STOPPED", "succeeded", "failed", "stopped"))
        return JobState(lines[-1] if lines else "unknown", over)

    def log_command(self, job: SubmittedJob, *, follow: bool) -> list[str]:
        return ["ray", "job", "logs", *self._address(), *["--follow"] * follow, job.id]

    def cancel_command(self, job: SubmittedJob) -> list[str]:
        return ["ray", "job", "stop", *self._address(), job.id]

    def _address(self) -> list[str]:
        return ["--address", self.address] if self.address else []


def run_tool(tool: str, *words: str, forgives: str | None = None) -> str:
    """Its standard output; "" if it refuses with words that hold `forgives` (squeue:
    a number that it has forgotten)."""
    try:
        done = subprocess.run(
            [find_tool(tool), *words], capture_output=True, text=True, timeout=DEADLINE, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{tool} {words[0]} did not answer within {DEADLINE:g} s: is the cluster there?") from error
    if done.returncode and (forgives is None or forgives not in done.stderr):
        said = " ".join((done.stderr or done.stdout).split())[-600:]
        raise UserError(f"{tool} {words[0]} refused (exit {done.returncode}): {said or 'without a word'}")
    return "" if done.returncode else done.stdout


def find_tool(tool: str) -> str:
    found = shutil.which(tool)
    if not found:
        raise UserError(f"{tool} is not on the PATH: {REMEDY.get(tool, f'install {tool}')}")
    return found


def save_job(folder: Path, job: SubmittedJob) -> None:
    replace_file(make_folder(folder / FOLDER) / RECORD, json.dumps(asdict(job), indent=1) + "\n")


def submitted_job(folder: Path) -> SubmittedJob | None:
    """The last job of this run folder; None: none was submitted."""
    path = folder / FOLDER / RECORD
    if not path.exists():
        return None
    try:
        return SubmittedJob(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is no record of a submitted job ({error}): remove it, and submit again") from error
