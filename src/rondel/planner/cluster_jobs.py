"""Files that start a run on a cluster: a batch script for SLURM, or a RayJob for Kubernetes.
Text from a recipe; nothing is started here.

    nodes · gpus a node = ranks of the trainer + engines        place.engines of them are
    engines, the others ranks, unless the recipe says
    torchrun   the first node's last GPUs are the engines', since its first rank starts them
    ray        a worker a GPU, on any node

What is submitted again goes on from its last checkpoint: the run folder is on storage that every node sees.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from rondel.core.config.job import Job
from rondel.core.errors import UserError

PORT = 6379  # of Ray's head, and Ray's own default
RAY = "2.60.0"  # of the image of a RayJob, and of constraints.txt; since 2.52 a cluster can ask for a token
SHARED = "/runs"  # where a pod finds the claim that keeps run folders


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """How a recipe fills a cluster."""

    recipe: Path
    job: Job
    nodes: int
    gpus: int
    overrides: tuple[str, ...] = ()

    @property
    def engine_count(self) -> int:
        """Of this house: those of others are where their url says."""
        return self.job.place.engine_count if self.job.engine.kind == "builtin" else 0

    @property
    def engine_gpus(self) -> int:
        return self.engine_count * self.job.place.engine_processes

    @property
    def ranks(self) -> int:
        return (
            self.job.place.ranks
            if "ranks" in self.job.place.model_fields_set or self.job.place.mesh.shards != "auto"
            else self.nodes * self.gpus - self.engine_gpus
        )

    @property
    def name(self) -> str:
        """Lower case, as Kubernetes wants it."""
        return (
            "".join(c if c.isalnum() and c.isascii() else "-" for c in self.recipe.stem.lower()).strip("-")[:40]
            or "run"
        )

    def check_layout(self, way: str) -> ClusterLayout:
        n = self.job.place.engine_processes
        each = f" of {n} GPUs" * (n > 1)
        here, all_of_them = f"{self.nodes} x {self.gpus} GPUs", self.nodes * self.gpus
        if self.ranks < 1 or self.ranks + self.engine_gpus > all_of_them:
            raise UserError(
                f"{self.ranks} ranks and {self.engine_count} engines{each} do not fit on {here}: ask for more "
                f"--nodes or --gpus, or set fewer "
                "place.engines and place.ranks"
            )
        if way != "torchrun" and n > 1:
            raise UserError(
                "engines of several processes are on the machine of the run, which Ray does not promise: use --with "
                f"torchrun, or place.engines = {self.engine_count}"
            )
        if way == "torchrun" and self.engine_gpus >= self.gpus:
            raise UserError(
                f"under torchrun the engines are on the first node, and {self.engine_gpus} of them leave no GPU of "
                f"{self.gpus} for its first rank: "
                "use --with ray, or fewer place.engines"
            )
        if way == "torchrun" and self.ranks + self.engine_gpus != all_of_them:
            raise UserError(
                f"torchrun fills every node: {here} are {all_of_them - self.engine_gpus} ranks beside "
                f"{self.engine_gpus} engines, and place.ranks = "
                f"{self.ranks}. Leave place.ranks out"
            )
        return self

    def train_command(self, recipe: str, cluster: str, *more: str) -> str:
        place = self.job.place
        engines = str(max(1, self.engine_count))
        if place.engine_processes > 1:
            engines = f"{{ count = {place.engine_count}, tp = {place.engine_tp}, prefill = {str(place.engine_prefill).lower()} }}"
        ranks = [f"--place.ranks={self.ranks}"] if cluster != "torchrun" else []
        words = [
            "--place.kind=split",
            f"--place.cluster={cluster}",
            f"--place.engines={engines}",
            *ranks,
            *more,
        ]
        return shlex.join(["rondel", "train", recipe, *self.overrides, *words])


def slurm_script(layout: ClusterLayout, *, way: str) -> str:
    """A script for sbatch. `way`: torchrun or ray."""
    head = f"""#!/bin/bash
#SBATCH --job-name={layout.name}
#SBATCH --nodes={layout.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={layout.gpus}
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# Ranks of the trainer: {layout.ranks}, engines: {layout.engine_count}, by {way}. Add --partition, --account and --time as your cluster wants them.
# Submitted again it goes on from the last checkpoint: {layout.job.run.folder} must be on storage that every node sees.
set -euo pipefail

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${{nodes[0]}}
on() {{ srun --nodes=1 --ntasks=1 --overlap --gpus-per-node={layout.gpus} -w "$@"; }}
"""
    return head + (_with_torchrun(layout) if way == "torchrun" else _with_ray(layout))


def _with_torchrun(layout: ClusterLayout) -> str:
    return f"""
port=$((20000 + SLURM_JOB_ID % 20000))

started=()
for ((i = 0; i < ${{#nodes[@]}}; i++)); do
    ranks={layout.gpus}
    if ((i == 0)); then
        ranks={layout.gpus - layout.engine_gpus}
    fi
    on "${{nodes[i]}}" torchrun --nnodes {layout.nodes} --node-rank "$i" --nproc-per-node "$ranks" \\
        --master-addr "$first" --master-port "$port" --no-python \\
        {layout.train_command(str(layout.recipe), "torchrun")} &
    started+=("$!")
done
for one in "${{started[@]}}"; do
    wait "$one"
done
"""


def _with_ray(layout: ClusterLayout) -> str:
    return f"""
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN # of this job alone: without it whoever reaches a port of Ray could run code (Ray 2.52 or newer)
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')

read -r address _ < <(on "$first" hostname --ip-address)
head="$address:{PORT}"

on "$first" ray start --head --node-ip-address="$address" --port={PORT} --num-gpus={layout.gpus} --block &
started=$!
until on "$first" ray status --address "$head" > /dev/null 2>&1; do
    kill -0 "$started" # ends the job if the head has ended
    sleep 2
done
for node in "${{nodes[@]:1}}"; do
    on "$node" ray start --address="$head" --num-gpus={layout.gpus} --block &
done

on "$first" {layout.train_command(str(layout.recipe), "ray:auto")}
"""


def kuberay(layout: ClusterLayout, *, image: str, claim: str) -> str:
    """A ConfigMap with the recipe, and a RayJob whose cluster lives as long as it: one
    head, the other nodes workers. YAML.
    """
    import yaml

    recipe, volumes = layout.recipe.name, [
        {"name": "recipe", "configMap": {"name": f"{layout.name}-recipe"}},
        {"name": "runs", "persistentVolumeClaim": {"claimName": claim}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]  # fmt: skip
    mounts = [
        {"name": name, "mountPath": path}
        for name, path in (("recipe", "/recipe"), ("runs", SHARED), ("shm", "/dev/shm"))
    ]

    def pod_spec(role: str) -> dict:
        room = {"limits": {"nvidia.com/gpu": layout.gpus}}
        container = {
            "name": f"ray-{role}",
            "image": image,
            "resources": room,
            "workingDir": SHARED,
            "volumeMounts": mounts,
        }
        return {"spec": {"containers": [container], "volumes": volumes}}

    command = layout.train_command(f"/recipe/{recipe}", "ray:auto", f"--run.folder={SHARED}/{layout.name}")
    workers = {
        "groupName": "gpus",
        "replicas": layout.nodes - 1,
        "minReplicas": layout.nodes - 1,
        "maxReplicas": layout.nodes - 1,
        "rayStartParams": {},
        "template": pod_spec("worker"),
    }
    cluster = {
        "rayVersion": RAY,
        "authOptions": {"mode": "token"},
        "headGroupSpec": {"rayStartParams": {"dashboard-host": "0.0.0.0"}, "template": pod_spec("head")},
        **({"workerGroupSpecs": [workers]} if layout.nodes > 1 else {}),
    }
    documents = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"{layout.name}-recipe"},
            "data": {recipe: layout.recipe.read_text(encoding="utf-8")},
        },
        {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "metadata": {"name": layout.name},
            "spec": {
                "entrypoint": command,
                "shutdownAfterJobFinishes": True,
                "backoffLimit": 2,
                "rayClusterSpec": cluster,
            },
        },
    ]
    said = (
        f"# Ranks of the trainer: {layout.ranks}, engines: {layout.engine_count}, nodes: {layout.nodes}. kubectl "
        f"apply -f this file.\n"
        f"# The image has Rondel and Ray: FROM rayproject/ray:{RAY}-gpu, RUN pip install 'rondel[cluster]'; rayVersion "
        f"below is that of the image.\n"
        f"# KubeRay 1.5.1 or newer makes the token that all pods of this job need (authOptions); without one any pod "
        f"could run code in them.\n"
        f"# The claim '{claim}' keeps the run folder and is mounted by every pod (ReadWriteMany): a job that is "
        f"retried goes on from there.\n"
    )
    return said + yaml.dump_all(documents, sort_keys=False, width=1000, Dumper=_yaml_dumper(yaml))


def _yaml_dumper(yaml: object) -> type:
    """A recipe as a block of its lines, and every part written out."""

    class Dumper(yaml.SafeDumper):  # type: ignore[name-defined, attr-defined, misc]
        def ignore_aliases(self, data: object) -> bool:
            return True

    def represent_text(dumper: Dumper, value: str) -> object:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, represent_text)
    return Dumper
