"""A flow on any mesh is a flow on one rank (law 3): shards, replicas, and the tokens of a sample over several ranks, over gloo."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from kits.flows import FLOWS, drawn_groups, flow
from kits.ranks import Rank, apart, end_alike, hand_over
from kits.train import batch, row
from rondel.core.errors import ConfigError
from rondel.core.mesh import Mesh

CP, SHARDS = Mesh(cp=2), Mesh(shards=2)
LENGTHS = [[3, 5, 1], [2, 2], [4, 4, 4, 1]]
CASES = [
    (CP, "videos"),
    (CP, "images"),
    (SHARDS, "videos"),
    (SHARDS, "points"),
    (Mesh(cp=4), "videos"),  # 18 tokens over 4 ranks
    (Mesh(shards=2, cp=2), "videos"),
    (Mesh(replicas=2, cp=2, reduce="update", reshard="update", prefetch=1), "videos"),
]

pytestmark = pytest.mark.slow


def rollouts(kind: str, seed: int = 0):
    return drawn_groups(flow(**FLOWS[kind]), LENGTHS, seed)


@pytest.mark.parametrize(("mesh", "kind"), CASES, ids=str)
def test_any_mesh_has_the_gradient_of_one_rank(ranks, mesh, kind):
    """Of a Flow-GRPO step with a reference; in one micro-batch and in many, layers computed again or kept."""
    algo, alone, every = row("flow_grpo", kl={"coef": 0.1}), Rank(0), ranks(mesh)
    b = batch(rollouts(kind), algo)
    alone.make(kind, algo=algo)
    whole = alone.gradient(copy.deepcopy(b), algo)
    assert np.linalg.norm(whole) > 1e-3
    for recompute, micro_tokens in (("none", 10**6), ("none", 6), ("layers", 20)):
        if recompute == "layers" and kind == "points":
            continue
        every.make(kind, algo=algo, recompute=recompute)
        for got in every.gradient(copy.deepcopy(b), algo, micro_tokens=micro_tokens):
            assert apart(got, whole) <= 1e-6
