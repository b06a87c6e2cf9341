"""Whole runs on meshes: they end where one rank ends, go on bit for bit after kill -9, and on another mesh."""

from __future__ import annotations

import pytest
import torch

from kits.runs import final, run, run_and_die
from kits.sweeps import covering

pytestmark = pytest.mark.slow
STEPS = {"loop__warmup__steps": 2, "loop__steps": 2, "run__checkpoint__every": 2, "place__kind": "split"}
MESHES = {"tp": {"tp": 2}, "ring": {"tp": 2, "overlap": True}, "cp": {"cp": 2}, "ep": {"ep": 2}, "pp": {"pp": 2}}
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
    """The folder of an uninterrupted run of four steps, by mesh."""
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
    return STEPS | mesh | ({"model__path": MIXTURE} if name.endswith("ep") else {})


def apart(a: dict, b: dict) -> float:
    """The largest relative distance of a tensor, where weights and masters are compared."""
    names = [n for n in a if "optimizer" not in n or "/master." in n]
    assert names and a.keys() == b.keys()
    return max(float((a[n] - b[n]).double().norm() / b[n].double().norm().clamp_min(1e-9)) for n in names)


# that of tp goes on on cp below, and ends there; a ring is in test_format_mesh.py; steps on pp are in test_mesh.py
@pytest.mark.parametrize("name", covering(MESHES, {"ep"}))
def test_four_steps_on_a_mesh_end_where_one_rank_ends(ended, name):
    one = "one rank for ep" if name == "ep" else "one"
    assert apart(final(ended(name)), final(ended(one))) <= 1e-5


# tp writes and cp reads in the next test; a rank of a killed stage goes on in test_chaos.py
@pytest.mark.parametrize("name", covering(MESHES, {"ep"}))
def test_a_killed_run_on_a_mesh_ends_with_the_same_bits(ended, tmp_path, name):
    assert run_and_die(tmp_path, ("StepDone", 3), **settings(name)) == -9
    run(tmp_path, **settings(name))
    mine, whole = final(tmp_path), final(ended(name))
    assert mine.keys() == whole.keys() and all(torch.equal(mine[n], whole[n]) for n in whole)


@pytest.mark.parametrize(
    ("first", "then"), covering([({"tp": 2}, {"cp": 2}), ({"pp": 2}, {"tp": 2})], [({"tp": 2}, {"cp": 2})])
)
def test_a_run_goes_on_on_another_mesh(ended, tmp_path, first, then):
    how = STEPS | {"model__path": MIXTURE}
    assert run_and_die(tmp_path, ("StepDone", 3), **how, place__mesh=first) == -9
    run(tmp_path, **how, place__mesh=then)
    assert apart(final(tmp_path), final(ended("one rank for ep"))) <= 1e-5
