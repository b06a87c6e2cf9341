"""Stages of layers behind each other are one rank (law 3): the same gradient on ragged packs, the same steps, checkpoints and
published weights, alone and beside other axes. Over gloo.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest

from kits.ranks import Rank, apart
from kits.train import awkward_groups, batch, row
from rondel.core.mesh import Mesh

PP = Mesh(pp=2)
FAMILIES = ("llama", "tied", "qwen3", "gemma2", "qwen3_5_text", "qwen3_moe")

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
