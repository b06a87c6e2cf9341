"""Manifests for Kubernetes: a RayJob of KubeRay, or a plain indexed Job with torchrun. YAML from a recipe; nothing is
started here.

Both have a ConfigMap with the recipe. The run folder is on a volume claim that every pod mounts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rondel.planner.cluster_layout import ClusterLayout

RAY = "2.60.0"  # of the image of a RayJob, and of constraints.txt; since 2.52 a cluster can ask for a token
SHARED = "/runs"  # where a pod finds the claim that keeps run folders
TORCHRUN_PORT = 29500


@dataclass(frozen=True, slots=True)
class PodSettings:
    """What pods need beside a recipe: PodSettings("registry/rondel:1", "disk", "keys")."""

    image: str = "rondel:latest"
    claim: str = "runs"
    """the volume claim that keeps run folders (ReadWriteMany)"""
    secret: str = ""
    """a Secret whose entries become environment variables (HF_TOKEN, WANDB_API_KEY)"""


def kuberay(layout: ClusterLayout, pods: PodSettings) -> str:
    """A ConfigMap with the recipe, and a RayJob whose cluster lives as long as it: one
    head, the other nodes workers. YAML.
    """
    command = layout.train_command(f"/recipe/{layout.recipe.name}", "ray:auto", f"--run.folder={pod_folder(layout)}")
    workers = {
        "groupName": "gpus",
        "replicas": layout.nodes - 1,
        "minReplicas": layout.nodes - 1,
        "maxReplicas": layout.nodes - 1,
        "rayStartParams": {},
        "template": _pod_template(layout, pods, "ray-worker"),
    }
    cluster = {
        "rayVersion": RAY,
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            "rayStartParams": {"dashboard-host": "0.0.0.0"},
            "template": _pod_template(layout, pods, "ray-head"),
        },
        **({"workerGroupSpecs": [workers]} if layout.nodes > 1 else {}),
    }
    spec = {
        "entrypoint": command,
        "shutdownAfterJobFinishes": True,
        "backoffLimit": 2,
        "rayClusterSpec": cluster,
    }
    said = (
        f"# The image has Rondel and Ray: FROM rayproject/ray:{RAY}-gpu, RUN pip install 'rondel[cluster]'; rayVersion "
        f"below is that of the image.\n"
        f"# KubeRay 1.5.1 or newer makes the token that all pods of this job need (authOptions); without one any pod "
        f"could run code in them.\n"
    )
    return _write_manifest(
        layout,
        pods,
        said,
        {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": layout.name}, "spec": spec},
    )


def indexed_job(layout: ClusterLayout, pods: PodSettings) -> str:
    """A ConfigMap with the recipe, a Service that gives pods names, a NetworkPolicy, and an indexed Job: one pod a
    node, torchrun in each. YAML. Needs no operator.
    """
    name = layout.name
    command = layout.train_command(f"/recipe/{layout.recipe.name}", "torchrun", f"--run.folder={pod_folder(layout)}")
    ranks = f"$(( JOB_COMPLETION_INDEX ? {layout.ranks_of(1)} : {layout.ranks_of(0)} ))"
    script = (
        f"exec torchrun --nnodes {layout.nodes} --node-rank $JOB_COMPLETION_INDEX --nproc-per-node {ranks} "
        f"--master-addr {name}-0.{name} --master-port {TORCHRUN_PORT} --no-python {command}"
    )
    template = _pod_template(layout, pods, "rank")
    labels = {"rondel-job": name}
    template["metadata"] = {"labels": labels}
    template["spec"] |= {"subdomain": name, "restartPolicy": "Never", "terminationGracePeriodSeconds": 300}
    template["spec"]["containers"][0] |= {
        "command": ["bash", "-c", script],
        "env": [{"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": "240"}],
    }
    job = {
        "completionMode": "Indexed",
        "completions": layout.nodes,
        "parallelism": layout.nodes,
        "backoffLimit": 3 * layout.nodes,
        "template": template,
    }
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels}
    own_pods = [{"podSelector": {"matchLabels": labels}}]
    fence = {"podSelector": {"matchLabels": labels}, "policyTypes": ["Ingress"], "ingress": [{"from": own_pods}]}
    said = (
        "# The image has Rondel: FROM a CUDA image with Python, RUN pip install rondel.\n"
        "# torchrun's ports ask for no key, so a NetworkPolicy keeps other pods out (it needs a network that enforces "
        "them).\n"
    )
    return _write_manifest(
        layout,
        pods,
        said,
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": service},
        {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": name}, "spec": fence},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": job},
    )


def pod_folder(layout: ClusterLayout) -> str:
    """The run folder as pods see it."""
    return f"{SHARED}/{layout.name}"


def _pod_template(layout: ClusterLayout, pods: PodSettings, container_name: str) -> dict[str, Any]:
    volumes = [
        {"name": "recipe", "configMap": {"name": f"{layout.name}-recipe"}},
        {"name": "runs", "persistentVolumeClaim": {"claimName": pods.claim}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    mounts = [
        {"name": name, "mountPath": path}
        for name, path in (("recipe", "/recipe"), ("runs", SHARED), ("shm", "/dev/shm"))
    ]
    container = {
        "name": container_name,
        "image": pods.image,
        **({"resources": {"limits": {"nvidia.com/gpu": layout.gpus}}} if layout.gpus else {}),
        "workingDir": SHARED,
        "volumeMounts": mounts,
        **({"envFrom": [{"secretRef": {"name": pods.secret}}]} if pods.secret else {}),
    }
    return {"spec": {"containers": [container], "volumes": volumes}}


def _write_manifest(layout: ClusterLayout, pods: PodSettings, said: str, *documents: dict[str, Any]) -> str:
    import yaml

    recipe = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{layout.name}-recipe"},
        "data": {layout.recipe.name: layout.recipe.read_text(encoding="utf-8")},
    }
    head = (
        f"# Ranks of the trainer: {layout.ranks}, engines: {layout.engine_count}, nodes: {layout.nodes}. kubectl "
        f"apply -f this file.\n{said}"
        f"# The claim '{pods.claim}' keeps the run folder and is mounted by every pod (ReadWriteMany): a job that is "
        f"retried goes on from there.\n"
    )
    return head + yaml.dump_all([recipe, *documents], sort_keys=False, width=1000, Dumper=_yaml_dumper(yaml))


def _yaml_dumper(yaml: object) -> type:
    """A recipe as a block of its lines, and every part written out."""

    class Dumper(yaml.SafeDumper):  # type: ignore[name-defined, attr-defined, misc]
        def ignore_aliases(self, data: object) -> bool:
            return True

    def represent_text(dumper: Dumper, value: str) -> object:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, represent_text)
    return Dumper
