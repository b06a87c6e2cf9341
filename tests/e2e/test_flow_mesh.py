"""A flow on any mesh is a flow on one rank (law 3): shards, replicas, the tokens of a sample and the heads over several ranks, over gloo."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest

from kits.flows import FLOWS, drawn_groups, flow
from kits.ranks import Rank, apart, end_alike, hand_over
from kits.runs import FLOW, check, events, run
from kits.sweeps import covering
from kits.train import batch, row
from rondel.cli import main
from rondel.core.errors import ConfigError, ModelError
from rondel.core.mesh import Mesh
from rondel.driver import replay

CP, SHARDS, TP, BOTH = Mesh(cp=2), Mesh(shards=2), Mesh(tp=2), Mesh(cp=2, tp=2)
WHOLE = Mesh(tp=2, sp=False)  # rows between the parts of a block lie whole on each rank
LENGTHS = [[3, 5, 1], [2, 2], [4, 4, 4, 1]]
CASES = [
    (CP, "videos"),
    (CP, "images"),
    (SHARDS, "videos"),
    (SHARDS, "points"),
    (Mesh(cp=4), "videos"),  # 18 tokens over 4 ranks
    (Mesh(shards=2, cp=2), "videos"),
    (Mesh(replicas=2, cp=2, reduce="update", reshard="update", prefetch=1), "videos"),
    (TP, "videos"),
    (TP, "images"),
    (BOTH, "videos"),
    (Mesh(shards=2, tp=2, reduce="update", reshard="update"), "images"),
    (Mesh(replicas=2, tp=2), "videos"),
    (WHOLE, "videos"),
    (Mesh(cp=2, tp=2, sp=False), "images"),
]

pytestmark = pytest.mark.slow


def rollouts(kind: str, seed: int = 0):
    return drawn_groups(flow(**FLOWS[kind]), LENGTHS, seed)


@pytest.mark.parametrize(
    ("mesh", "kind"), covering(CASES, [CASES[1], CASES[3], CASES[6], CASES[8], CASES[9], CASES[11], CASES[12]]), ids=str
)  # videos: replicas and cp, cp and tp
def test_any_mesh_has_the_gradient_of_one_rank(ranks, mesh, kind):
    """Of a Flow-GRPO step with a reference; in one micro-batch and in many, layers computed again or kept."""
    exact = {"kind": "closed_form"} if mesh in (SHARDS, TP, WHOLE) else {}
    algo, alone, every = row("flow_grpo", kl={"coef": 0.1, **exact}), Rank(0), ranks(mesh)
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


@pytest.mark.parametrize(
    "mesh", covering([CP, Mesh(shards=2, cp=2), TP, Mesh(shards=2, tp=2), Mesh(replicas=2, tp=2)], [CP, TP]), ids=str
)  # shards over cp, too
def test_steps_end_where_one_rank_ends(ranks, mesh, tmp_path):
    """Metrics, masters, and what is published; a checkpoint of the mesh resumes on one rank, and the reverse, and on the
    same mesh bit for bit.
    """
    algo, alone, every = row("grpo"), Rank(0), ranks(mesh)
    how = {"lr": 1e-3, "micro_tokens": 12, "updates_per_step": 2, "start_probe": 4}
    alone.make("videos", algo=algo, **how)
    every.make("videos", algo=algo, **how)
    end_alike(alone, every, algo, lambda n: batch(rollouts("videos", n), algo), tmp_path, exact=True)
    every.save(tmp_path / "again")
    every.step(batch(rollouts("videos", 9), algo), algo)
    straight = every.masters()
    every.load(tmp_path / "again")
    every.step(batch(rollouts("videos", 9), algo), algo)
    np.testing.assert_array_equal(every.masters(), straight)
    alone.load(tmp_path / "again")
    alone.step(batch(rollouts("videos", 9), algo), algo)
    tokens = [5, 40, 9, 7]
    assert every.logprobs(tokens) == [pytest.approx(alone.logprobs(tokens), abs=1e-4)] * mesh.world
    hand_over(every, 1)


@pytest.mark.parametrize(
    ("mesh", "kind", "said"),
    [
        (Mesh(pp=2), "videos", "leave pp and ep out"),
        (CP, "points", "no tokens to share"),
        (TP, "points", "no attention heads to share"),
        (Mesh(tp=2, overlap=True), "videos", "leave overlap out"),
        (Mesh(tp=3), "videos", "does not divide the 2 attention heads"),
    ],
)
def test_what_cannot_be_cut_is_refused(ranks, mesh, kind, said):
    with pytest.raises((ConfigError, ModelError), match=said):
        ranks(mesh).make(kind)


@pytest.mark.parametrize(
    ("place", "axis"),
    covering(
        [("split", "cp"), ("shared", "cp"), ("split", "tp"), ("shared", "tp")], [("split", "cp"), ("split", "tp")]
    ),
)
def test_a_run_of_videos_over_a_mesh(tmp_path, place, axis):
    """Flow matching, then RL: the points that engines draw have the densities that the mesh computes for them."""
    sizes = {"random": "flow_video", "frames": 3, "height": 6, "width": 4, "channels": 2, "intermediate_size": 24}
    run(
        tmp_path / "run",
        recipe=FLOW,
        model__path={**sizes, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
        task__data={"kind": "points", "name": "kits.flows:clips", "holdout": 0.0},
        task__reward={"kind": "near", "points": [[1.0] * 144], "width": 9.0},
        place__kind=place,
        place__mesh={axis: 2},
        loop__steps=1,
        loop__warmup__steps=1,
        trainer__memory__recompute="layers",
    )
    check(tmp_path / "run", staleness=0, total=2)
    done = [e["metrics"] for e in events(tmp_path / "run", "StepDone")]
    assert all(m["train/gap_max"] < 1e-5 and m["train/grad_norm"] > 0 for m in done[1:])
    again = replay.replay(tmp_path / "run", 2)  # by the job.toml of the run, which names every key, in one process
    assert again["train/grad_norm"] == pytest.approx(done[1]["train/grad_norm"], rel=1e-4)


@pytest.mark.parametrize("mesh", covering(["cp=2", "tp=2", "cp=2,tp=2"], ["cp=2", "tp=2"]))
def test_a_rank_receives_the_bytes_of_the_plan(capsys, mesh):
    """Counted in the collectives of one update against planner/flow_cost.py: keys and values of cp, weights of its shards,
    sums of tp.
    """
    with pytest.raises(SystemExit) as end:
        main(
            [
                "bench",
                "mesh",
                "--meshes",
                mesh,
                "--families",
                "flow_video",
                "--groups",
                "1",
                "--json",
            ]
        )
    assert not end.value.code
    told = json.loads(capsys.readouterr().out.splitlines()[-1])[mesh]["flow_video flow_grpo"]
    assert told["moved"] == pytest.approx(told["formula"], rel=1e-3) and told["difference"] < 1e-6
    assert told["held"] == pytest.approx(told["planned"], rel=1e-3)
