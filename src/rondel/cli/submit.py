"""rondel submit: a run on a cluster."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rondel.cli import OVERRIDES, read_job
from rondel.core.errors import UserError

if TYPE_CHECKING:
    from rondel.planner.cluster_layout import ClusterLayout
    from rondel.runtime.cluster.schedulers import Scheduler, SubmittedJob

SETTINGS = OVERRIDES
FILES = {"slurm": "job.sh", "kubernetes": "job.yaml", "kuberay": "rayjob.yaml", "ray": "job.sh"}
BETWEEN, REST = 10.0, 2.0  # seconds between two looks at a job whose output is followed; for what it printed last
Target = Literal["slurm", "kubernetes", "kuberay", "ray"]


def run(
    ctx: typer.Context,
    recipe: Annotated[
        str, typer.Argument(metavar="RUN.toml", help="What it will train; later the run's folder does as well.")
    ],
    to: Annotated[
        Target | None,
        typer.Option(
            help="slurm: sbatch. kubernetes: an indexed Job with torchrun. kuberay: a RayJob. ray: `ray job submit`."
        ),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of each; 0: CPUs alone, place.ranks says how many ranks.")] = 8,
    way: Annotated[
        Literal["torchrun", "ray"], typer.Option("--with", help="SLURM: what starts the processes.")
    ] = "ray",
    partition: Annotated[str, typer.Option(help="SLURM.")] = "",
    account: Annotated[str, typer.Option(help="SLURM.")] = "",
    limit: Annotated[str, typer.Option("--time", help="SLURM: 24:00:00; then it goes on in another job.")] = "",
    stage: Annotated[
        str, typer.Option(metavar="DIR", help="SLURM: `rondel prepare --stage DIR` on every node first.")
    ] = "",
    image: Annotated[str, typer.Option(help="Kubernetes: a container image with Rondel.")] = "rondel:latest",
    claim: Annotated[str, typer.Option(help="Kubernetes: the volume claim that keeps run folders.")] = "runs",
    secret: Annotated[str, typer.Option(help="Kubernetes: a Secret that becomes environment variables.")] = "",
    namespace: Annotated[str, typer.Option(help="Kubernetes; otherwise that of kubectl's context.")] = "",
    address: Annotated[str, typer.Option(help="Ray: http://HEAD:8265; otherwise RAY_ADDRESS.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the file that would be submitted.")] = False,
    status: Annotated[bool, typer.Option("--status", help="What the scheduler says of the run's job.")] = False,
    logs: Annotated[bool, typer.Option("--logs", help="Its output, followed while it runs.")] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="End it; submitted again it goes on.")] = False,
) -> None:
    """Put a run on a cluster: SLURM, Kubernetes or Ray.

    --section.key=value goes along to `rondel train`. RUN/submit/ keeps what was submitted.
    """
    if status or logs or cancel:
        if to is not None or dry_run or status + logs + cancel > 1:
            raise UserError("--status, --logs and --cancel stand alone: rondel submit RUN --status")
        _ask_about(_run_folder(recipe, ctx.args), "status" if status else "logs" if logs else "cancel")
        return
    if to is None:
        raise UserError(f"where to? --to {', --to '.join(FILES)}")
    from rondel.planner.cluster_layout import ClusterLayout

    way = {"slurm": way, "kubernetes": "torchrun"}.get(to, "ray")  # type: ignore[assignment]
    job, _ = read_job(recipe, *ctx.args, "--place.kind=split", f"--place.cluster={way}")
    layout = ClusterLayout(Path(recipe), job, nodes, gpus, tuple(ctx.args)).check_layout(way)
    if stage and to != "slurm":
        raise UserError(
            "--stage is for --to slurm: elsewhere run `rondel prepare --stage DIR` on the nodes, or in the image"
        )
    asked = {"partition": partition, "account": account, "time": limit}
    text = _job_file(layout, to, way, {k: v for k, v in asked.items() if v}, (image, claim, secret), stage)
    if dry_run:
        print(text, end="")
        return
    from rondel.runtime.cluster.schedulers import KubernetesScheduler, RayJobScheduler, SlurmScheduler

    scheduler: Scheduler
    if to == "slurm":
        scheduler = SlurmScheduler()
    elif to == "ray":
        scheduler = RayJobScheduler(address, layout.name)
    else:
        kind = "rayjob" if to == "kuberay" else "job"
        scheduler = KubernetesScheduler(to, kind, layout.name, namespace, claim)
    _submit(Path(job.run.folder), scheduler, FILES[to], text)


def _job_file(
    layout: ClusterLayout, to: Target, way: str, directives: dict[str, str], pods: tuple[str, str, str], stage: str
) -> str:
    own = str(Path(sys.executable).parent) if sys.prefix != sys.base_prefix else ""
    if to == "slurm":
        from rondel.planner.slurm_script import slurm_script

        return slurm_script(layout, way=way, bin_folder=own, directives=directives, stage=stage)
    if to == "ray":
        return _ray_script(layout, own)
    from rondel.planner.kubernetes_job import PodSettings, indexed_job, kuberay

    return (kuberay if to == "kuberay" else indexed_job)(layout, PodSettings(*pods))


def _ray_script(layout: ClusterLayout, bin_folder: str) -> str:
    """What the head node of a Ray cluster runs: it sees this folder, or says that it does not."""
    here = shlex.quote(os.getcwd())
    path = f"export PATH={shlex.quote(bin_folder)}:$PATH\n" * bool(bin_folder)
    return f"""#!/bin/bash
# Ranks of the trainer: {layout.ranks}, engines: {layout.engine_count}, on a Ray cluster.
# Submitted again it goes on from the last checkpoint. The folder must be on storage that every node sees.
set -euo pipefail
{path}cd {here}
exec {layout.train_command(str(layout.recipe), "ray:auto")}
"""


def _submit(folder: Path, scheduler: Scheduler, name: str, text: str) -> None:
    from rondel.runtime.cluster import schedulers
    from rondel.system.files import make_folder, write_text

    schedulers.find_tool(scheduler.tool)
    before = schedulers.submitted_job(folder)
    if before and not (state := _scheduler_of(before).state(before)).over:
        raise UserError(
            f"{folder} has job {before.id} already ({state.text}), and two jobs cannot train into one folder: "
            f"rondel submit {folder} --cancel first, or set another run.folder"
        )
    file = make_folder(folder / schedulers.FOLDER) / name
    write_text(file, text)
    job = scheduler.submit(file)
    schedulers.save_job(folder, job)
    print(f"submitted   {job.to} job {job.id}, by {file}")
    print(f"next        rondel submit {folder} --status        --logs follows its output, --cancel ends it")


def _ask_about(folder: Path, what: str) -> None:
    from rondel.runtime.cluster import schedulers

    job = schedulers.submitted_job(folder)
    if job is None:
        raise UserError(f"{folder} was not submitted from here: rondel submit RUN.toml --to {', '.join(FILES)}")
    scheduler = _scheduler_of(job)
    if what == "status":
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(job.time))
        print(f"{job.to} job {job.id}, submitted {since}: {scheduler.state(job).text}")
        for line in _last_steps(folder):
            print(line)
        return
    if what == "logs":
        over = scheduler.state(job).over
        if job.log and over and not Path(job.log).exists():
            raise UserError(f"job {job.id} has written nothing: {job.log} does not exist")
        command = scheduler.log_command(job, follow=not over)
        code = _follow(command, lambda: scheduler.state(job).over)
    else:
        command = scheduler.cancel_command(job)
        code = subprocess.call([schedulers.find_tool(command[0]), *command[1:]])
    if code:
        raise SystemExit(code)


def _follow(command: list[str], is_over: Callable[[], bool]) -> int:
    """Show what a tool prints until it or the job has ended: `tail -F` waits for more of a job that is over."""
    from rondel.runtime.cluster.schedulers import find_tool

    process = subprocess.Popen([find_tool(command[0]), *command[1:]])
    try:
        while True:
            try:
                return process.wait(BETWEEN)
            except subprocess.TimeoutExpired:
                if is_over():
                    time.sleep(REST)
                    return 0
    finally:
        process.kill()
        process.wait()


def _scheduler_of(job: SubmittedJob) -> Scheduler:
    from rondel.runtime.cluster.schedulers import KubernetesScheduler, RayJobScheduler, SlurmScheduler

    if job.to == "slurm":
        return SlurmScheduler()
    if job.to == "ray":
        return RayJobScheduler(job.address, job.id)
    return KubernetesScheduler(job.to, "rayjob" if job.to == "kuberay" else "job", job.id, job.namespace)


def _run_folder(given: str, overrides: list[str]) -> Path:
    """A run's folder, or that of a recipe."""
    if Path(given).is_dir():
        return Path(given)
    job: Any = read_job(given, *overrides)[0]
    return Path(job.run.folder)


def _last_steps(folder: Path) -> list[str]:
    """What the run itself has written, where this machine sees it."""
    from rondel.system.files import checkpoints_in

    steps = sorted(checkpoints_in(folder / "checkpoints")) if (folder / "checkpoints").is_dir() else []
    return [f"last checkpoint: step {steps[-1]}"] if steps else []
