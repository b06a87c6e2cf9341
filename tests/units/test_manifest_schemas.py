"""Manifests against the schemas that the API servers of Kubernetes publish: no unknown field, no wrong type.

pip install kubernetes-validate (108 MB of schemas). A RayJob's own fields are in tests/units/test_submit.py.
"""

from __future__ import annotations

import pytest
import yaml

from kits.submits import layout
from rondel.planner.kubernetes_job import PodSettings, indexed_job, kuberay

validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
VERSIONS = ("1.28", "1.32", "1.37")
PODS = PodSettings("registry/rondel:1", "disk", "keys")


def check(document: dict) -> None:
    for version in VERSIONS:
        validator.validate(document, version, strict=True)


@pytest.mark.parametrize("gpus", [0, 8])
def test_an_indexed_job_and_what_is_beside_it_are_what_the_server_reads(gpus):
    ranks = ["--place.ranks=3"] * (not gpus)
    documents = list(yaml.safe_load_all(indexed_job(layout(3, gpus, *ranks, way="torchrun"), PODS)))
    assert [document["kind"] for document in documents] == ["ConfigMap", "Service", "NetworkPolicy", "Job"]
    for document in documents:
        check(document)
    documents[-1]["spec"]["completion"] = documents[-1]["spec"].pop("completions")
    with pytest.raises(validator.ValidationError, match="completion"):
        check(documents[-1])


def test_pods_of_a_ray_job_are_what_the_server_reads():
    config, job = yaml.safe_load_all(kuberay(layout(2, 8, "--place.engines=2"), PODS))
    check(config)
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        check({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "a"}, "template": group["template"]})
