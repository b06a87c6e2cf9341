"""rondel launch: the file that starts a recipe on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rondel.cli import OVERRIDES, read_job

SETTINGS = OVERRIDES


def run(
    ctx: typer.Context,
    scheduler: Annotated[
        Literal["slurm", "kuberay"], typer.Argument(help="A script for sbatch, or a RayJob for kubectl.")
    ],
    recipe: Annotated[str, typer.Argument(metavar="RUN.toml", help="What it will train.")],
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of each.")] = 8,
    way: Annotated[
        Literal["torchrun", "ray"], typer.Option("--with", help="SLURM: what starts the processes.")
    ] = "ray",
    image: Annotated[str, typer.Option(help="KubeRay: a container image with Rondel and Ray.")] = "rondel:latest",
    claim: Annotated[str, typer.Option(help="KubeRay: the volume claim that keeps run folders.")] = "runs",
) -> None:
    """Print the file that starts a recipe on a cluster.

    Nothing is submitted.

    --section.key=value goes along to `rondel train`.
    """
    way = "ray" if scheduler == "kuberay" else way
    job, _ = read_job(recipe, *ctx.args, "--place.kind=split", f"--place.cluster={way}")
    from rondel.planner.cluster_jobs import ClusterLayout, kuberay, slurm_script

    layout = ClusterLayout(Path(recipe), job, nodes, gpus, tuple(ctx.args)).check_layout(way)
    print(slurm_script(layout, way=way) if scheduler == "slurm" else kuberay(layout, image=image, claim=claim), end="")
