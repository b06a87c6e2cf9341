"""Stages of layers behind each other are one rank (law 3): the same gradient on ragged packs, the same steps, checkpoints and
published weights, alone and beside other axes. Over gloo.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest

from kits.algos import lively
from kits.ranks import Rank, apart, end_alike
from kits.train import awkward_groups, batch, make_stale, row
from rondel.algos.table import TABLE
from rondel.core.mesh import Mesh
from rondel.core.types import Score
from rondel.train.advantages import compute_advantages
from rondel.train.pack import batch_of

PP, DEEP = Mesh(pp=2), Mesh(pp=4)
FAMILIES = ("llama", "tied", "qwen3", "gemma2", "qwen3_5_text", "qwen3_moe")
ROWS = ("grpo", "gspo", "ppo", "dapo", "reinforce_pp")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def one():
    """The gradient of one rank, of a family."""
    known: dict[str, tuple] = {}

    def of(kind: str):
        if kind not in known:
            algo = row("grpo", kl={"coef": 0.1}, entropy={"coef": 0.02})
            alone, b = Rank(0), batch(awkward_groups(), algo)
            alone.make(kind, algo=algo)
            known[kind] = algo, b, alone.gradient(copy.deepcopy(b), algo)
        return known[kind]

    return of


def same_gradient(every, kind, algo, b, whole, near=1e-6):
    every.make(kind, algo=algo)
    for micro_tokens in (20, 10**6):
        for got in every.gradient(copy.deepcopy(b), algo, micro_tokens=micro_tokens):
            assert apart(got, whole) <= near


@pytest.mark.parametrize("kind", FAMILIES)
def test_two_stages_have_the_gradient_of_one_rank(ranks, one, kind):
    algo, b, whole = one(kind)
    assert np.linalg.norm(whole) > 1e-3
    same_gradient(ranks(PP), kind, algo, b, whole, 2e-6 if kind == "qwen3_5_text" else 1e-6)


PAIRS = [Mesh(pp=2, shards=2), Mesh(pp=2, tp=2), Mesh(pp=2, cp=2), Mesh(pp=2, shards=2, ep=2), Mesh(pp=2, replicas=2)]


@pytest.mark.parametrize("mesh", PAIRS, ids=str)
def test_beside_another_axis_they_have_it_too(ranks, one, mesh):
    for kind in ("tied", "qwen3_moe") if mesh.ep == 1 else ("qwen3_moe",):
        same_gradient(ranks(mesh), kind, *one(kind))


@pytest.mark.parametrize("name", ROWS)
def test_every_kind_of_row_has_it(ranks, name):
    """A stale batch with demonstrations: ratios of whole samples, a critic, a reference; four stages, one with two layers."""
    algo, rng = lively(TABLE[name]), np.random.default_rng(0)
    groups = awkward_groups()
    for x in (x for g in groups for x in g.trajectories):
        x.score = Score(x.reward + 0.7, {"right": float(rng.integers(2))})
    alone, b = Rank(0), batch_of(groups)
    alone.make("deep", algo=algo)
    alone.trainer._annotate(b, algo.needs | {"proximal_logprobs"})
    compute_advantages(b, algo)
    make_stale(b, rng)
    whole = alone.gradient(copy.deepcopy(b), algo, noted=True)
    every = ranks(DEEP)
    every.make("deep", algo=algo)
    for got in every.gradient(copy.deepcopy(b), algo, noted=True, micro_tokens=20):
        assert apart(got, whole) <= 1e-6


@pytest.mark.parametrize("mesh", [PP, Mesh(pp=2, shards=2)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_end_where_one_rank_ends(ranks, mesh, dtype, tmp_path):
    """Metrics, masters, and what is published; a checkpoint of the mesh resumes on one rank, and the reverse."""
    algo = row("ppo", kl={"coef": 0.05}) if dtype == "float32" else row("grpo")
    alone, every = Rank(0), ranks(mesh)
    how = {"lr": 1e-3, "micro_tokens": 40, "updates_per_step": 2, "start_probe": 8, "clip": 0.5}
    alone.make("tied", dtype, algo, **how)
    every.make("tied", dtype, algo, **how)
    end_alike(alone, every, algo, lambda n: batch(awkward_groups(n), algo), tmp_path, exact=dtype == "float32")
