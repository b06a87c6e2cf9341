"""Rows that ranks share are dealt by length (law 3): short families whole on one rank, long samples over all, whatever the
mixture; the gradient is that of one rank, and what is gathered is what the dealing says.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from kits.ranks import Rank, apart, end_alike
from kits.sweeps import covering
from kits.train import batch, model, row, trajectory
from rondel.core.mesh import Mesh
from rondel.core.ring_blocks import ring_tokens
from rondel.core.row_split import PRODUCTS, deal_row
from rondel.core.types import Group, Task
from rondel.train.pack import micro_batches

pytestmark = pytest.mark.slow

LENGTHS = {  # of each group: its prompt, and its answers
    "short": [(5, [4, 6]), (5, [5, 5]), (5, [3, 7]), (5, [6, 4]), (5, [7, 3]), (5, [2, 8]), (5, [8, 2]), (5, [5, 5])],
    "long": [(9, [140])],
    "mixed": [(5, [4, 6]), (3, [7, 2, 5]), (9, [140]), (6, [3, 9]), (4, [8])],
    "family": [(40, [30, 31, 28, 33])],  # too large for a rank: its prompt is shared, its answers are whole
}
CP, FOUR = Mesh(cp=2), Mesh(cp=4)
RING, FOUR_RING = (replace(mesh, cp_attention="ring") for mesh in (CP, FOUR))
BESIDE = [Mesh(shards=2, cp=2), Mesh(cp=2, tp=2), Mesh(pp=2, cp=2), Mesh(cp=2, ep=2)]
FAMILIES = ("llama", "gemma2", "qwen3_5_text", "mixtral", "deepseek_v3", "deepseek_v4")
EVERY = [
    *product((CP, FOUR), FAMILIES, LENGTHS),
    *product(BESIDE, ("mixtral",), LENGTHS),
]
COVERING = [
    *((CP, "llama", lengths) for lengths in LENGTHS),
    *((CP, kind, "mixed") for kind in FAMILIES[1:]),  # beside shards: test_expert_parallel.py
    (CP, "qwen3_5_text", "family"),  # a state that is shared, and goes on in what is whole
]


def groups_of(lengths: str) -> list[Group]:
    rng = np.random.default_rng(0)
    found = []
    for n, (prompt, answers) in enumerate(LENGTHS[lengths]):
        asked = rng.integers(5, 100, prompt).tolist()
        found.append(Group(n, Task(f"t{n}", "fake", {}), [trajectory([(m, 1)], rng, prompt=asked) for m in answers], 0))
    return found


@pytest.fixture(scope="module")
def one():
    """A row, its batch of a mixture of lengths, and the gradient of one rank."""
    known: dict[tuple[str, str], tuple] = {}

    def of(kind: str, lengths: str):
        if (kind, lengths) not in known:
            algo, alone = row("grpo", kl={"coef": 0.1}, entropy={"coef": 0.02}), Rank(0)
            b = batch(groups_of(lengths), algo)
            alone.make(kind, algo=algo)
            known[kind, lengths] = algo, b, alone.gradient(copy.deepcopy(b), algo)
        return known[kind, lengths]

    return of


@pytest.mark.parametrize(("mesh", "kind", "lengths"), covering(EVERY, COVERING), ids=str)
def test_any_mixture_of_lengths_has_the_gradient_of_one_rank(ranks, one, mesh, kind, lengths):
    (algo, b, whole), every = one(kind, lengths), ranks(mesh)
    every.make(kind, algo=algo)
    assert np.linalg.norm(whole) > 1e-3
    for micro_tokens in (60, 10**6) if kind == "llama" else (10**6,):  # whole and long ones in rows apart; in one row
        for got in every.gradient(copy.deepcopy(b), algo, micro_tokens=micro_tokens):
            assert apart(got, whole) <= (2e-6 if kind == "qwen3_5_text" else 1e-6)


@pytest.mark.parametrize(
    ("mesh", "lengths"),
    covering(
        product((CP, FOUR, RING, FOUR_RING), LENGTHS),
        [*product((CP,), LENGTHS), (RING, "mixed"), (FOUR_RING, "family")],
    ),
    ids=str,
)
def test_what_is_gathered_is_what_the_dealing_says(ranks, mesh, lengths):
    """In each layer keys and values of S shared tokens: twice, and their gradients once; of rows that are all spread, T.
    In a ring as far as they are seen.
    """
    algo, every = row("grpo"), ranks(mesh)
    b = batch(groups_of(lengths), algo)
    every.make("llama", algo=algo, start_probe=0, every_answer=True)
    config = model("llama").model.config
    rows = [packed.layout.segments for packed in micro_batches(b, 10**6)]
    dealt = [(row, deal_row(row, mesh.cp, PRODUCTS * config.hidden_size)) for row in rows]
    shared = sum(dealing.shared_tokens for _, dealing in dealt)
    total = sum(s.length for row in rows for s in row)
    head = config.hidden_size // config.num_attention_heads
    each = 2 * config.num_key_value_heads * head * 4  # bytes of a token's keys and values in a layer
    moved = every.gathered_bytes(copy.deepcopy(b), algo)
    arrived = (mesh.cp - 1) * shared
    if mesh.cp_attention == "ring":
        arrived = sum(ring_tokens(*row) for row in dealt)
        assert arrived <= (mesh.cp - 1) * shared and (lengths != "long" or arrived < 0.6 * (mesh.cp - 1) * shared)
    assert sum(moved) == 3 * arrived * each * config.num_hidden_layers
    assert {"short": shared == 0, "long": shared == total}.get(lengths, 0 < shared < total)


RINGED = [
    *product((RING, FOUR_RING), ("llama", "qwen3", "gemma2", "gpt_oss", "qwen3_5_text", "mixtral"), LENGTHS),
    *((replace(mesh, cp_attention="ring"), "mixtral", lengths) for mesh, lengths in product(BESIDE, LENGTHS)),
]
RING_CHOSEN = [
    (RING, "gemma2", "long"),  # windows, so that most of a block is never seen, and a softcap
    (FOUR_RING, "qwen3", "mixed"),
    (FOUR_RING, "llama", "family"),
    (replace(BESIDE[1], cp_attention="ring"), "mixtral", "mixed"),  # beside tp
]


@pytest.mark.parametrize(("mesh", "kind", "lengths"), covering(RINGED, RING_CHOSEN), ids=str)
def test_a_ring_has_the_gradient_of_one_rank_and_of_gathered_keys(ranks, one, mesh, kind, lengths):
    algo, b, whole = one(kind, lengths)
    near = 2e-6 if kind == "qwen3_5_text" else 1e-6
    every = ranks(replace(mesh, cp_attention="all_gather"))
    every.make(kind, algo=algo)
    gathered = every.gradient(copy.deepcopy(b), algo)
    every = ranks(mesh)
    every.make(kind, algo=algo)
    for got, theirs in zip(every.gradient(copy.deepcopy(b), algo), gathered):
        assert apart(got, whole) <= near and apart(got, theirs) <= near


AGAIN = [("tied", {"recompute": "layers"}), ("gemma2", {"recompute": "mlp"}), ("tied", {"activations": "host"})]


@pytest.mark.parametrize(("kind", "how"), covering([*AGAIN, ("llama + used", {})], ()), ids=str)
def test_a_ring_goes_round_again_where_layers_are_computed_again(ranks, kind, how):
    """Or their inputs wait elsewhere, or an adapter is trained."""
    algo, alone, every = row("grpo"), Rank(0), ranks(FOUR_RING)
    b = batch(groups_of("mixed"), algo)
    alone.make(kind, algo=algo)
    whole = alone.gradient(copy.deepcopy(b), algo)
    every.make(kind, algo=algo, **how)
    for got in every.gradient(copy.deepcopy(b), algo):
        assert apart(got, whole) <= 1e-6


@pytest.mark.parametrize("dtype", covering(["float32", "bfloat16"], ()))  # a run on a ring is in test_mesh_runs.py
def test_steps_of_a_ring_end_where_one_rank_ends(ranks, tmp_path, dtype):
    algo = row("ppo", kl={"coef": 0.05}) if dtype == "float32" else row("grpo")
    alone, every = Rank(0), ranks(RING)
    how = {"lr": 1e-3, "micro_tokens": 90, "updates_per_step": 2, "start_probe": 8}
    alone.make("tied", dtype, algo, **how)
    every.make("tied", dtype, algo, **how)
    end_alike(alone, every, algo, lambda n: batch(groups_of("mixed"), algo), tmp_path, exact=dtype == "float32")


def test_a_step_says_how_many_tokens_were_shared(ranks):
    algo, every = row("grpo"), ranks(CP)
    for lengths, least, most in (("short", 0, 9), ("mixed", 148, 160)):
        every.make("llama", algo=algo, start_probe=0, micro_tokens=10**6, every_answer=True)
        told = every.step(batch(groups_of(lengths), algo), algo)
        assert all(least <= metrics.get("train/shared_tokens", 0) <= most for _, metrics, *_ in told), lengths
