"""Experts that lie apart are those of one rank (law 3): the same gradient, with their own routes and with replayed ones
that starve experts and whole ranks; the same steps, checkpoints and published weights. Over gloo.
"""

from __future__ import annotations

import copy
from itertools import chain, product

import numpy as np
import pytest
import torch

from kits.families import model as family
from kits.ranks import Rank, apart, end_alike, hand_over
from kits.sweeps import covering
from kits.train import awkward_groups, batch, row
from kits.vision import groups_with_images
from kits.vision import model as looking
from rondel.core.config.place import PlaceConfig
from rondel.core.errors import RondelError
from rondel.core.mesh import AXES, Mesh
from rondel.core.row_split import PRODUCTS, deal_row
from rondel.models.expert_parallel import _compute_some
from rondel.train.pack import micro_batches

EP, WIDE = Mesh(shards=2, ep=2), Mesh(shards=4, ep=2)
SHARED = [
    Mesh(cp=2, ep=2),
    Mesh(shards=2, cp=2, ep=4),
    Mesh(replicas=2, shards=2, ep=2),
    Mesh(pp=2),
    Mesh(pp=2, shards=2, ep=2),
]
# whole experts over ranks that share every other matrix, alone and among shards, with rows apart and without
TWINS = [
    Mesh(tp=2, ep=2),
    Mesh(tp=2, ep=2, sp=False),
    Mesh(shards=2, tp=2, ep=2),
    Mesh(shards=2, tp=2, ep=4),
    Mesh(cp=2, tp=2, ep=4),
    Mesh(pp=2, tp=2, ep=2),
    Mesh(replicas=2, tp=2, ep=2),
]
KINDS = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
ROUTES = {  # of a token: its two experts of four, of which a rank holds two or one
    "skewed": lambda token: (3, 0) if token % 5 == 0 else (0, 1),  # expert 2 has no token
    "starved": lambda token: (0, 1) if token % 2 else (1, 0),  # ranks behind the first have none
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def one():
    """The gradient of one rank, of a family under its own or other routes: of a few groups, and of all."""
    known: dict[tuple[str, str], tuple] = {}

    def of(kind: str, routes: str):
        if (kind, routes) not in known:
            algo, alone = row("grpo", kl={"coef": 0.1}, entropy={"coef": 0.02}), Rank(0)
            alone.make(kind, algo=algo, replay_routes=routes != "own")
            few, b = (
                routed(batch(groups, algo), alone, routes) for groups in (awkward_groups()[1::3], awkward_groups())
            )
            known[kind, routes] = algo, *((x, alone.gradient(copy.deepcopy(x), algo)) for x in (few, b))
        return known[kind, routes]

    return of


def routed(b, rank: Rank, routes: str):
    """`b` with a record of where its tokens went, in every layer."""
    for s in b.samples if routes != "own" else ():
        pairs = torch.tensor([ROUTES[routes](int(token)) for token in s.tokens[:-1]])
        s.experts = pairs[:, None].repeat(1, rank.trainer.loaded.routers, 1).to(torch.uint8).numpy()
    return b


def same_gradient(every, kind: str, routes: str, algo, few, all_of_them) -> None:
    """The few in micro-batches of one sample: idle ones and rows of fewer tokens than ranks, too."""
    every.make(kind, algo=algo, replay_routes=routes != "own")
    for (b, whole), micro_tokens in ((few, 2), (all_of_them, 10**6)):
        assert np.linalg.norm(whole) > 1e-3
        for got in every.gradient(copy.deepcopy(b), algo, micro_tokens=micro_tokens):
            assert apart(got, whole) <= 1e-6


EACH = [(EP, kind, routes) for kind in KINDS for routes in ("own", *ROUTES)]
FEW = [*((WIDE, kind, "own") for kind in KINDS), (WIDE, "mixtral", "starved")]  # the same cuts on more ranks
# every kind of experts (qwen3_moe has those of mixtral, deepseek_v3 is below), and every record of routes, which replaces
# what a router chose, whatever chose it; starved: on more ranks
COVERING = [
    (EP, "gpt_oss", "own"),
    (EP, "mixtral", "skewed"),
    (WIDE, "mixtral", "starved"),
]


@pytest.mark.parametrize(("mesh", "kind", "routes"), covering([*EACH, *FEW], COVERING), ids=lambda value: str(value))
def test_experts_apart_have_the_gradient_of_one_rank(ranks, one, mesh, kind, routes):
    same_gradient(ranks(mesh), kind, routes, *one(kind, routes))


BESIDE = [(mesh, routes) for mesh in SHARED for routes in ("own", "starved")]


@pytest.mark.parametrize(
    ("mesh", "routes"), covering(BESIDE, [(mesh, "starved") for mesh in SHARED[1:3]]), ids=str
)  # cp without shards has a path less; in stages: computed again, and steps, below; stages of shards: test_mesh.py
def test_beside_other_axes_they_have_it_too(ranks, one, mesh, routes):
    """And whole, where a stage of a pipeline repeats the routes of its own layers."""
    same_gradient(ranks(mesh), "mixtral", routes, *one("mixtral", routes))


def test_experts_are_gathered_ahead_with_their_layer(ranks, one):
    """They are sharded by themselves. In the forward pass those of the first layer, too; the gradient stays what it is."""
    algo, _, (b, whole) = one("mixtral", "own")
    every = ranks(Mesh(shards=4, ep=2, prefetch=1))
    every.make("mixtral", algo=algo)
    for told in every.gathered_ahead(copy.deepcopy(b), algo):
        first, second = "model.layers.0", "model.layers.1"
        assert told["forward"] == [f"{first}.mlp.experts", second, f"{second}.mlp.experts"]
        assert {first, f"{first}.mlp.experts"} <= {*told["backward"]}
    for got in every.gradient(copy.deepcopy(b), algo):
        assert apart(got, whole) <= 1e-6


def test_every_axis_is_compared_beside_experts_that_lie_apart():
    told = [mesh for mesh in (EP, *SHARED, *TWINS) if mesh.ep > 1]
    assert [axis for axis in AXES if not any(getattr(mesh, axis) > 1 for mesh in told)] == []


BOTH = [(mesh, kind, routes) for mesh in TWINS for kind in KINDS for routes in ("own", "starved")]
# without sp, and among shards; kinds of experts: above
PLAIN = [(TWINS[1], "deepseek_v3", "own"), (TWINS[3], "mixtral", "starved")]


@pytest.mark.parametrize(("mesh", "kind", "routes"), covering(BOTH, PLAIN), ids=str)
def test_beside_tensor_parallel_they_have_it_too(ranks, one, mesh, kind, routes):
    same_gradient(ranks(mesh), kind, routes, *one(kind, routes))


@pytest.mark.parametrize("mesh", covering([EP, *TWINS], [TWINS[3]]), ids=str)  # over both axes at once
def test_what_travels_to_experts_elsewhere_is_what_the_routes_say(ranks, mesh):
    """A row of H numbers there and one back for each expert of a token that another rank has, forward and backward; of
    ranks that have the same rows, each sends its run.
    """
    algo, alone, every = row("grpo"), Rank(0), ranks(mesh)
    alone.make("mixtral", algo=algo, replay_routes=True)
    b = routed(batch(awkward_groups(), algo), alone, "skewed")
    every.make("mixtral", algo=algo, replay_routes=True, start_probe=0, every_answer=True)
    hidden = alone.trainer.loaded.model.config.hidden_size
    away = pairs_away(b, mesh, PRODUCTS * hidden)
    assert away > 0 and sum(every.dispatched_bytes(copy.deepcopy(b), algo)) == 4 * away * hidden * 4


def pairs_away(b, mesh: Mesh, cost: int) -> int:
    """By the recorded routes: tokens and experts, in all layers, of which the rank that has the token has not the expert."""
    away, inner = 0, mesh.world // mesh.pp
    for rank in range(inner):
        where = {"rank": mesh.data_index(rank), "ranks": mesh.data, "stages": mesh.pp}
        for packed in micro_batches(b, 10**6, **where):
            segments, rows = packed.layout.segments, np.arange(len(packed.tokens))
            if mesh.cp > 1:
                places = deal_row(segments, mesh.cp, cost).rank_places(segments)
                rows = np.array([*chain(*places[mesh.coordinate("cp", rank)])])
            run = np.array_split(rows, mesh.tp)[mesh.coordinate("tp", rank)]
            holder = packed.routes[run].numpy() // (4 // mesh.ep)
            away += int((holder != rank % (inner // mesh.replicas) % mesh.ep).sum())
    return away


def test_a_mixture_that_looks_has_it_too(ranks):
    algo, alone, every = row("grpo"), Rank(0), ranks(EP)
    b = batch(groups_with_images(looking("qwen3_vl_moe")), algo)
    alone.make("qwen3_vl_moe", algo=algo)
    whole = alone.gradient(copy.deepcopy(b), algo)
    assert np.linalg.norm(whole) > 1e-3
    every.make("qwen3_vl_moe", algo=algo)
    for got in every.gradient(copy.deepcopy(b), algo, micro_tokens=40):
        assert apart(got, whole) <= 1e-6


@pytest.mark.parametrize(
    ("mesh", "recompute"),
    covering(product((EP, Mesh(pp=2)), ("mlp", "layers")), [(EP, "layers"), (Mesh(pp=2), "mlp")]),
    ids=str,
)
def test_what_is_computed_again_is_dispatched_again(ranks, one, recompute, mesh):
    algo, _, (b, whole) = one("mixtral", "starved")
    every = ranks(mesh)
    every.make("mixtral", algo=algo, replay_routes=True, recompute=recompute)
    for got in every.gradient(copy.deepcopy(b), algo, micro_tokens=40):
        assert apart(got, whole) <= 1e-6


@pytest.mark.parametrize(
    ("mesh", "dtype"),
    covering(
        product((EP, WIDE, Mesh(pp=2), TWINS[2], TWINS[3]), ("float32", "bfloat16")),
        [(Mesh(pp=2), "bfloat16")],  # on ep: test_mesh_runs.py; files of all: test_deferred_weights.py
    ),
    ids=str,
)
def test_steps_end_where_one_rank_ends(ranks, mesh, dtype, tmp_path):
    """Metrics and masters, clipped, with a critic and a reference; a checkpoint of either resumes on the other; what is
    published is the same.
    """
    algo = row("ppo", kl={"coef": 0.05}) if dtype == "float32" else row("grpo")
    alone, every = Rank(0), ranks(mesh)
    how = {"lr": 1e-3, "clip": 0.5, "micro_tokens": 90, "start_probe": 8, "replay_routes": dtype == "bfloat16"}
    alone.make("mixture", dtype, algo, **how)
    every.make("mixture", dtype, algo, **how)

    def rollouts(number: int):
        return routed(batch(awkward_groups(number), algo), alone, "skewed" if how["replay_routes"] else "own")

    for told in end_alike(alone, every, algo, rollouts, tmp_path, exact=dtype == "float32"):
        assert told["train/grad_norm"] > how["clip"] and "train/expert_load_imbalance" in told


@pytest.mark.parametrize("mesh", covering([EP, WIDE, TWINS[0], TWINS[2]], [TWINS[0]]), ids=str)  # shards: test_mesh.py
def test_weights_flow_to_an_engine_of_any_layout(ranks, mesh):
    every = ranks(mesh)
    every.make("mixtral")
    for takers in (1, 2):
        hand_over(every, takers)


def test_each_rank_holds_its_share(ranks):
    alone = Rank(0)
    alone.make("mixture")
    whole = alone.resident()["trained"]
    for mesh, share in ((EP, 0.52), (WIDE, 0.27), (TWINS[0], 0.52)):
        every = ranks(mesh)
        every.make("mixture")
        assert max(rank["trained"] for rank in every.resident()) <= share * whole


def test_the_load_of_experts_is_counted():
    """By hand, of replayed routes: what the metric says is the busiest of a layer by its mean."""
    algo, alone = row("grpo"), Rank(0)
    alone.make("mixtral", algo=algo, replay_routes=True, share_prompts=False, start_probe=0)
    b = routed(batch(awkward_groups(), algo), alone, "skewed")
    went = np.concatenate([s.experts[:, 0].ravel() for s in b.samples])
    counts = np.bincount(went, minlength=4)
    metrics = alone.step(b, algo)[1]
    assert metrics["train/expert_load_imbalance"] == pytest.approx(counts.max() / counts.mean())
    assert metrics["train/starved_experts"] == 0.25


@pytest.mark.parametrize("how", ["eager", "grouped_mm"])
def test_experts_without_a_token_have_gradients_of_zeros(how):
    """FSDP sums what has a gradient: on all ranks it must be the same."""
    experts = copy.deepcopy(family("mixtral").model.model.layers[0].mlp.experts)
    experts.config._experts_implementation = how
    none = torch.zeros(0, 64, requires_grad=True)
    out = _compute_some(experts.requires_grad_().forward, none, torch.zeros(0, dtype=torch.int64))
    out.sum().backward()
    assert out.shape == none.grad.shape == none.shape
    assert all(not p.grad.any() for p in experts.parameters())


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("llama", "no experts that ep could lay apart"),
        ("dbrx", "no experts that ep could lay apart"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(ranks, kind, said):
    with pytest.raises(RondelError, match=said):
        ranks(EP).make(kind)


def test_a_teacher_that_cannot_be_cut_is_named(ranks):
    """Beside a mixture that can: of a dense one it is no help to read that "the model" has no experts."""
    with pytest.raises(RondelError, match=r"model\.teacher: .*no experts that ep could lay apart"):
        ranks(EP).make("mixtral", algo=row("opd"), teacher=True)


def test_ranks_that_do_not_divide_the_experts_are_refused(ranks):
    with pytest.raises(RondelError, match="ep = 3 does not divide the 4 experts"):
        ranks(Mesh(shards=3, ep=3)).make("mixtral")


@pytest.mark.parametrize(
    ("mesh", "said"), [({"ep": 4, "tp": 2, "shards": 1}, "ep = 4"), ({"ep": 3, "shards": 2}, "ep = 3")]
)
def test_a_recipe_is_told_which_meshes_there_are(mesh, said):
    with pytest.raises(ValueError, match=said):
        PlaceConfig(kind="split", mesh=mesh)
    assert PlaceConfig(kind="split", mesh={"ep": 4, "cp": 2}).ranks == 4
    assert [PlaceConfig(kind="split", mesh={"ep": ep, "tp": 2}).ranks for ep in (2, 4)] == [2, 4]
