"""Rows of tensor parallelism that travel round a ring beside the products (place.mesh.overlap): the gradient, the steps and the
checkpoints are those of one rank (law 3), over gloo.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest

from kits.ranks import Rank, apart, end_alike
from kits.sweeps import covering
from kits.train import awkward_groups, batch, row
from rondel.core.errors import RondelError
from rondel.core.mesh import Mesh

pytestmark = pytest.mark.slow
RING = Mesh(tp=2, overlap=True)
CASES = [
    *((RING, kind) for kind in ("llama", "tied", "qwen3", "gemma2", "lfm2", "qwen3_5_text", "mixtral", "gpt_oss")),
    # fewer key heads than ranks; rows of fewer tokens than ranks, so empty runs
    *((Mesh(tp=4, overlap=True), kind) for kind in ("llama", "gemma2", "lfm2")),
    *((Mesh(**axis, tp=2, overlap=True), "mixtral") for axis in ({"shards": 2}, {"cp": 2}, {"shards": 2, "ep": 2})),
    (Mesh(pp=2, tp=2, overlap=True), "tied"),
    (Mesh(pp=2, chunks=2, tp=2, overlap=True), "deep"),
]
# experts with biases; more than two ranks. Stages are below; shards beside tp in test_expert_parallel.py; gemma2 is tied with
# more norms, and they see whole rows
CHOSEN = [(RING, "gpt_oss"), CASES[8]]


def _same_gradient(every, kind, algo, near, **how):
    """Of ragged micro-batches, of which some have fewer rows than there are ranks, and of all at once."""
    alone = Rank(0)
    alone.make(kind, algo=algo)
    every.make(kind, algo=algo, **how)
    for groups, micro_tokens in ((awkward_groups()[1::3], 2), (awkward_groups(), 10**6)):
        b = batch(groups, algo)
        whole = alone.gradient(copy.deepcopy(b), algo)
        assert np.linalg.norm(whole) > 1e-3
        for got in every.gradient(copy.deepcopy(b), algo, micro_tokens=micro_tokens):
            assert apart(got, whole) <= near


@pytest.mark.parametrize(("mesh", "kind"), covering(CASES, CHOSEN), ids=str)
def test_a_ring_has_the_gradient_of_one_rank(ranks, mesh, kind):
    algo = row("grpo", kl={"coef": 0.1}, entropy={"coef": 0.02})
    _same_gradient(ranks(mesh), kind, algo, 2e-6 if kind == "qwen3_5_text" else 1e-6)


@pytest.mark.parametrize("recompute", covering(["mlp", "layers"], ["mlp"]))
def test_what_is_computed_again_is_gathered_again(ranks, recompute):
    """Between stages other micro-batches have passed through a layer before its backward pass."""
    _same_gradient(ranks(Mesh(pp=2, tp=2, overlap=True)), "tied", row("grpo"), 1e-6, recompute=recompute)


@pytest.mark.parametrize("dtype", covering(["float32", "bfloat16"], ()))  # a run on a ring is in test_format_mesh.py
def test_steps_end_where_one_rank_ends(ranks, dtype, tmp_path):
    """With a critic in fp32; checkpoints go to one rank and back."""
    algo = row("ppo", kl={"coef": 0.05}) if dtype == "float32" else row("grpo")
    alone, every = Rank(0), ranks(RING)
    how = {"lr": 1e-3, "micro_tokens": 90, "updates_per_step": 2, "start_probe": 8}
    alone.make("tied", dtype, algo, **how)
    every.make("tied", dtype, algo, **how)
    end_alike(alone, every, algo, lambda n: batch(awkward_groups(n), algo), tmp_path, exact=dtype == "float32")


def test_the_same_update_twice_has_the_same_bits(ranks):
    every, algo = ranks(RING), row("grpo")
    every.make("llama", algo=algo)
    b = batch(awkward_groups(), algo)
    for first, second in zip(*(every.gradient(copy.deepcopy(b), algo, micro_tokens=40) for _ in range(2))):
        np.testing.assert_array_equal(first, second)


def test_a_neighbour_that_does_not_come_is_named(ranks):
    """As in any collective (law 10)."""
    mesh = Mesh(tp=2, cp=1, overlap=True, prefetch=1)  # joined here alone
    every = ranks(mesh)
    every.join(every.ranks[0].now("meet"), mesh, 1.0)
    every.shift_once()
    with pytest.raises(
        RondelError, match=r"rank 0 of 2 waits for another one since 1 s, in wait_for_neighbours .*ring"
    ):
        every.ranks[0].ask("shift_once").result(30)
