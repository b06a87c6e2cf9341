"""Whole runs on meshes: they end where one rank ends, go on bit for bit after kill -9, and on another mesh.

How near: as one vector, as gradients are compared, weights are 1e-6 apart or less, a tensor of a dense model 2e-6 without its
farthest number, and with it 1e-5. One of a mixture is up to 1e-5 apart, as far as one rank's is from its own in smaller
micro-batches: where an expert's first gradient is below Adam's eps (5e-10 below 1e-8), Adam makes lr · 1e-11 / eps of a rounding
of 1e-11, which is 3e-6. In a dense model a number of 1,024 may have such a gradient; which one, the processor's sums decide.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch

from kits import torchrun
from kits.forked import Forked
from kits.local_ray import local_ray
from kits.runs import FAST, RECIPE, final, run, run_and_die
from kits.sweeps import covering
from rondel.runtime.telemetry.card import card_of

pytestmark = pytest.mark.slow
STEPS = {"loop__warmup__steps": 2, "loop__steps": 5, "run__checkpoint__every": 4, "place__kind": "split"}
MESHES = {axis: {axis: 2} for axis in ("shards", "replicas", "tp", "cp", "ep", "pp")}
MESHES |= {"ring": {"tp": 2, "overlap": True}, "cp ring": {"cp": 2, "cp_attention": "ring"}}
MESHES |= {"tp adapter": {"tp": 2}}
MIXTURE = {
    "random": "mixtral",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The folder of an uninterrupted run of five steps behind two of warm-up, by mesh."""
    made = {}

    def of(name: str):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            run(made[name], **settings(name))
        return made[name]

    return of


def settings(name: str) -> dict:
    """ "ep", or "one rank for ep": of the model that the mesh is for."""
    mesh = {"place__mesh": MESHES[name]} if name in MESHES else {}
    mesh |= {"trainer__micro_tokens": 48} if name == "cp ring" else {}  # a family each, whose prompt is shared
    mesh |= {"model__adapter": {"kind": "lora", "rank": 4, "alpha": 8}} if name.endswith("adapter") else {}
    return STEPS | mesh | ({"model__path": MIXTURE} if name.endswith("ep") else {})


def apart(a: dict, b: dict) -> tuple[float, float, float]:
    """The relative distance of all weights as one vector, and the largest of a tensor, masters included, with its farthest
    number and without it.
    """
    names = [n for n in a if "optimizer" not in n or "/master." in n]
    assert names and a.keys() == b.keys()
    squares = {n: (a[n] - b[n]).double().square() for n in names}
    sizes = {n: max(float(b[n].double().square().sum()), 1e-18) for n in names}
    weights = [n for n in names if n.startswith(("model/", "adapter_model/"))]
    whole = sum(float(squares[n].sum()) for n in weights) / sum(sizes[n] for n in weights)
    tensor = max(float(of.sum()) / sizes[n] for n, of in squares.items())
    others = max(float(of.sum() - of.max()) / sizes[n] for n, of in squares.items())
    return whole**0.5, tensor**0.5, max(others, 0.0) ** 0.5


def ends_alike(a: dict, b: dict, *, mixture: bool) -> None:
    whole, tensor, others = apart(a, b)
    assert whole <= 1e-6 and tensor <= 1e-5 and others <= (1e-5 if mixture else 2e-6)


# a ring: in test_format_mesh.py, too
@pytest.mark.parametrize("name", covering(MESHES, set(MESHES) - {"ring"}))
def test_five_steps_on_a_mesh_end_where_one_rank_ends(ended, name):
    one = {"ep": "one rank for ep", "tp adapter": "one adapter"}.get(name, "one")
    ends_alike(final(ended(name)), final(ended(one)), mixture=name == "ep")
    told = [("mesh { " in str(card_of(ended(which)))) for which in (name, one)]
    assert told == [True, False], "what the card says of the ranks"
    if name == "cp ring":
        assert "train/shared_tokens" in (ended(name) / "journal.jsonl").read_text()


@pytest.mark.parametrize(
    ("cluster", "mesh"),
    covering([("torchrun", "tp"), ("torchrun", "pp"), ("ray", "cp"), ("ray", "tp")], [("torchrun", "tp")]),
)
def test_a_mesh_whose_ranks_another_program_started_ends_where_one_rank_ends(ended, tmp_path, cluster, mesh):
    changes = {**STEPS, "place__cluster": cluster, "place__mesh": MESHES[mesh]}
    if cluster == "ray":
        with local_ray(4):
            run(tmp_path, **changes)
    else:
        given = FAST | {key.replace("__", "."): value for key, value in changes.items()} | {"run.folder": str(tmp_path)}
        given.pop("place.mesh")
        words = [f"--{key}={json.dumps(value)}" for key, value in given.items()]
        words = ["train", str(RECIPE), f"--place.mesh={{ {mesh} = 2 }}", *words]
        words = ["--nproc-per-node", "2", "--no-python", "rondel", *words]
        with Forked(words, script=Path(torchrun.__file__), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            told, said = process.communicate(timeout=300)
        assert process.returncode == 0, said
        assert len(re.findall(r"step +2/", told)) == 1, "the first rank alone speaks"
    ends_alike(final(tmp_path), final(ended("one")), mixture=False)
    assert f"mesh {{ {mesh} = 2 }}" in str(card_of(tmp_path))


# tp writes and cp reads in the next test; a rank of a killed stage goes on in test_chaos.py
@pytest.mark.parametrize("name", covering(MESHES, {"ep", "replicas"}))
def test_a_killed_run_on_a_mesh_ends_with_the_same_bits(ended, tmp_path, name):
    assert run_and_die(tmp_path, ("StepDone", 6), **settings(name)) == -9
    run(tmp_path, **settings(name))
    mine, whole = final(tmp_path), final(ended(name))
    assert mine.keys() == whole.keys() and all(torch.equal(mine[n], whole[n]) for n in whole)


OTHERS = [("tp", "cp", True), ("pp", "tp", True), ("ep", "shards", True), ("tp", "shards", False), ("cp", "pp", False)]
OTHERS += [("shards", "tp", False), ("replicas", "cp", False), ("pp", "replicas", False)]


@pytest.mark.parametrize(("first", "then", "mixture"), covering(OTHERS, [OTHERS[0], OTHERS[3]]))
def test_a_run_goes_on_on_another_mesh(ended, tmp_path, first, then, mixture):
    how = STEPS | ({"model__path": MIXTURE} if mixture else {})
    assert run_and_die(tmp_path, ("StepDone", 6), **how, place__mesh=MESHES[first]) == -9
    run(tmp_path, **how, place__mesh=MESHES[then])
    ends_alike(final(tmp_path), final(ended("one rank for ep" if mixture else "one")), mixture=mixture)


class WideEps(torch.optim.AdamW):
    def __init__(self, groups, **how):
        super().__init__(groups, **how | {"eps": 1e-5})


def test_what_tensors_of_a_mixture_are_apart_is_adams_division_of_rounding(tmp_path, monkeypatch):
    """One rank and itself in smaller micro-batches, whose gradients differ by rounding; with an eps above the least gradients
    the same rounding makes less than a fifth of the distance (4.0e-6 and 7.0e-8 on an AMD EPYC).
    """

    def distances() -> tuple[float, float]:
        how = STEPS | {"model__path": MIXTURE, "place__cluster": "local"}
        for name, micro in (("whole", {}), ("small", {"trainer__micro_tokens": 64})):
            run(folder / name, **how, **micro)
        return apart(final(folder / "whole"), final(folder / "small"))[:2]

    folder = tmp_path / "usual"
    whole, tensor = distances()
    assert whole <= 1e-6 and tensor <= 1e-5
    folder = tmp_path / "wide"
    monkeypatch.setattr(torch.optim, "AdamW", WideEps)
    assert distances()[1] <= min(1e-6, tensor / 5)
