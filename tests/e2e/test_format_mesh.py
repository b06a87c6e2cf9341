"""A number format on both sides over several ranks is one rank (law 3): each rounds what it holds, where blocks lie whole on it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from kits.ranks import Rank, apart, end_alike, made
from kits.runs import events, run
from kits.sweeps import covering
from kits.train import awkward_groups, batch, row
from rondel.core.errors import ConfigError
from rondel.core.mesh import Mesh
from rondel.core.tensor_parts import Block, TensorPart
from rondel.formats import FORMATS, format_of
from rondel.models.rounded_weights import WeightFormat
from rondel.models.tensor_parallel import check_tensor_parallel
from rondel.train.whole_blocks import check_blocks, has_whole_blocks

SHARDS, CP, TP = Mesh(shards=2), Mesh(cp=2), Mesh(tp=2)
CASES = [
    (SHARDS, "llama + int4"),
    (SHARDS, "tied + mxfp8"),
    (CP, "mixtral + mxfp4"),
    (Mesh(replicas=2), "llama + nvfp4"),
    (Mesh(shards=2, cp=2), "llama + fp8_row"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "kind"), covering(CASES, CASES[2:3]), ids=str)  # steps among shards: below
def test_ranks_have_the_gradient_of_one(ranks, mesh, kind):
    algo, alone, every = row("grpo", kl={"coef": 0.1}, entropy={"coef": 0.02}), Rank(0), ranks(mesh)
    alone.make(kind, algo=algo)
    every.make(kind, algo=algo)
    for groups, micro_tokens in ((awkward_groups()[1::3], 2), (awkward_groups(), 10**6)):
        whole = alone.gradient(copy.deepcopy(batch(groups, algo)), algo)
        assert np.linalg.norm(whole) > 1e-3
        for got in every.gradient(copy.deepcopy(batch(groups, algo)), algo, micro_tokens=micro_tokens):
            assert apart(got, whole) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "kind", "dtype"),
    covering(
        [(SHARDS, "llama + int4", "float32"), (SHARDS, "llama + mxfp8", "bfloat16")],
        [(SHARDS, "llama + int4", "float32")],  # bfloat16 over ranks: test_ranks.py, and rounded: tests/units
    ),
    ids=str,
)
def test_ranks_end_where_one_ends(ranks, tmp_path, mesh, kind, dtype):
    """Steps, checkpoints in either direction, and published codes: equal masters publish equal digests."""
    algo = row("grpo", kl={"coef": 0.05})
    alone, every = Rank(0), ranks(mesh)
    how = {"dtype": dtype, "algo": algo, "lr": 1e-3, "micro_tokens": 40, "start_probe": 0, "clip": 0.5}
    alone.make(kind, **how)
    every.make(kind, **how)
    end_alike(alone, every, algo, lambda n: batch(awkward_groups(n), algo), tmp_path, exact=dtype == "float32")
    held, form = every.weights()[0], format_of(kind.partition(" + ")[2])
    rounded = [torch.from_numpy(w) for name, w in held.items() if name.endswith("proj.weight")]
    near = 0 if dtype == "float32" else 1e-2
    assert rounded and all(torch.allclose(form.fake(w), w, rtol=near, atol=0) for w in rounded)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "kind", "said"),
    [
        (SHARDS, "llama + fp8", "has blocks of 128 x 128.*which cuts some"),
        (SHARDS, "llama + nvfp4", "a scale of the whole tensor"),
        (SHARDS, "llama + fp8_tensor", "blocks of all x all"),
        (TP, "llama + int4", r"blocks of 1 x 32.*\[48, 24\] of .*o_proj"),
    ],
)
def test_a_block_that_ranks_would_share_is_refused_by_name(ranks, mesh, kind, said):
    """By the ranks, and before there are any."""
    with pytest.raises(ConfigError, match=said):
        ranks(mesh).make(kind)
    model = made(kind, "float32").model
    with pytest.raises(ConfigError, match=said):
        check_blocks(model, mesh, check_tensor_parallel(model, mesh.tp))


@pytest.mark.parametrize(("mesh", "kind"), CASES, ids=str)
def test_what_ranks_take_is_refused_by_nobody(mesh, kind):
    check_blocks(made(kind, "float32").model, mesh, {})


WIDE = {"model__path__hidden_size": 64, "model__path__num_attention_heads": 4, "model__path__num_key_value_heads": 2}
OVER_TP = WIDE | {
    "place__kind": "split",
    "place__cluster": "process",
    "loop__warmup__steps": 1,
}


@pytest.mark.slow
@pytest.mark.parametrize("overlap", covering([False, True], [True]))
def test_a_run_in_a_format_over_tp_computes_on_both_sides_with_the_same_weights(tmp_path, overlap):
    """Rows of 32 numbers lie whole on two ranks of a small model; blocks of 128 do not, and are refused with the remedy."""
    over_tp = OVER_TP | {"place__mesh": {"tp": 2, "overlap": overlap}}
    run(tmp_path / "int4", **over_tp, model__format="int4", loop__steps=1)
    [*_, last] = events(tmp_path / "int4", "StepDone")
    assert last["step"] == 2 and last["metrics"]["train/gap_max"] < 1e-4
    with pytest.raises(ConfigError, match=r"blocks of 128 x 128.*take a format whose blocks lie in rows"):
        run(tmp_path / "fp8", **over_tp, model__format="fp8", loop__steps=1)


def test_which_parts_have_whole_blocks():
    """Against rounding the part and the whole: where it says so, both are the same bits."""
    weight = torch.randn(96, 160, generator=torch.Generator().manual_seed(0))
    cases = [((0, 0), (96, 160)), ((0, 0), (48, 160)), ((48, 0), (48, 160)), ((0, 0), (96, 64)), ((0, 96), (96, 64))]
    cases += [((0, 0), (96, 48)), ((5, 0), (7, 160)), ((0, 32), (96, 128))]
    agreed = 0
    for name in FORMATS:
        form = format_of(name)
        whole = form.fake(weight)
        for (r, c), (rows, columns) in cases:
            part = TensorPart((rows, columns), (Block((r, c), (rows, columns), (0, 0)),))
            own = form.fake(weight[r : r + rows, c : c + columns].contiguous())
            good = has_whole_blocks(WeightFormat(form), part, (96, 160))
            if good:
                assert torch.equal(own, whole[r : r + rows, c : c + columns]), (name, r, c, rows, columns)
                agreed += 1
            turned = TensorPart((columns, rows), (Block((c, r), (columns, rows), (0, 0)),))
            assert has_whole_blocks(WeightFormat(form, True), turned, (160, 96)) == good
    assert agreed > 20
