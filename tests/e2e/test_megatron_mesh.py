"""Layers of Megatron-Core on meshes: the gradient is that of one rank and transformers (law 3)."""

from __future__ import annotations

import copy
import importlib.util

import pytest

from kits.ranks import Rank, apart, end_alike
from kits.sweeps import covering
from kits.train import awkward_groups, batch, row
from rondel.core.mesh import Mesh

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]
TP = Mesh(tp=2, sp=False)
CASES = [
    (TP, "tied"),
    (TP, "qwen3"),
    (Mesh(shards=2), "qwen3"),
    (Mesh(shards=2), "mixture"),
    (Mesh(cp=2), "tied"),
    (Mesh(pp=2), "mixture"),
    (Mesh(shards=2, tp=2, sp=False), "qwen3"),
]


@pytest.mark.parametrize(("mesh", "kind"), covering(CASES, [CASES[1], *CASES[3:6]]), ids=str)  # each axis once
def test_the_gradient_is_that_of_one_rank(ranks, mesh, kind):
    algo, alone, every = row("grpo", kl={"coef": 0.1}, entropy={"coef": 0.02}), Rank(0), ranks(mesh)
    alone.make(kind, algo=algo)
    every.make(kind, algo=algo, megatron=True)
    for groups, micro in ((awkward_groups()[1::3], 2), (awkward_groups(), 10**6)):
        b = batch(groups, algo)
        whole = alone.gradient(copy.deepcopy(b), algo, micro_tokens=micro)
        for got in every.gradient(copy.deepcopy(b), algo, micro_tokens=micro):
            assert apart(got, whole) <= 1e-6


@pytest.mark.parametrize("dtype", covering(["float32", "bfloat16"], ["float32"]))  # bfloat16: tests/units
def test_steps_weights_and_checkpoints_are_those_of_one_rank(ranks, tmp_path, dtype):
    """With Megatron's matrices cut over two ranks; checkpoints go there and back between both kinds of layers."""
    algo, alone, every = row("grpo"), Rank(0), ranks(TP)
    alone.make("qwen3", dtype, algo)
    every.make("qwen3", dtype, algo, megatron=True)
    end_alike(alone, every, algo, lambda n: batch(awkward_groups(n), algo), tmp_path, exact=dtype == "float32")
