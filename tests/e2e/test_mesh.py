"""Any mesh is one rank (law 3): matrices cut (tp), rows between them (sp), one packed row shared (cp), layers behind each other
(pp), shards, replicas and compositions have its gradient, end where it ends, publish its weights and exchange checkpoints with it, over gloo.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

from kits.algos import lively
from kits.ranks import Rank, apart, end_alike, hand_over, made, written_bytes
from kits.sweeps import covering
from kits.train import awkward_groups, batch, make_stale, row
from kits.vision import groups_with_images
from kits.vision import model as looking
from rondel.algos.table import TABLE
from rondel.cli import main
from rondel.core.errors import RondelError
from rondel.core.mesh import AXES, Mesh
from rondel.core.types import Score
from rondel.models.save import save_model
from rondel.train.annotate import compute_advantages
from rondel.train.pack import batch_of
from rondel.train.teachers import Teacher, TeacherEnsemble

TP, PLAIN_TP, CP, PP = Mesh(tp=2), Mesh(tp=2, sp=False), Mesh(cp=2), Mesh(pp=2)
PAIRS = [
    Mesh(cp=2, tp=2),
    Mesh(shards=2, tp=2),
    Mesh(shards=2, cp=2),
    Mesh(replicas=2, shards=2),
    Mesh(replicas=2, tp=2),
    Mesh(pp=2, shards=2),
    Mesh(pp=2, tp=2),
    Mesh(pp=2, cp=2),
    Mesh(pp=2, replicas=2),
    Mesh(replicas=2, cp=2),
]
FAMILIES = ("llama", "tied", "qwen3", "gemma2", "qwen3_5_text", "lfm2", "mixtral", "deepseek_v3", "gpt_oss")
CASES = [  # what each axis changes: all of them through tp; through cp who sees whom, and who keeps a state
    *((TP, kind) for kind in FAMILIES),
    *((CP, kind) for kind in ("llama", "gemma2", "qwen3_5_text", "mixtral", "deepseek_v3", "deepseek_v4")),
    *((PLAIN_TP, kind) for kind in ("tied", "mixtral", "lfm2")),
    *((PP, kind) for kind in ("llama", "qwen3", "gemma2", "qwen3_5_text", "qwen3_moe")),
    (Mesh(pp=3), "deep"),  # five layers: a stage between two others, and of other lengths
]
# llama and tied are in the rows and steps below, mixtral through cp and tp in PAIRS, gpt_oss in
# test_async_tp.py and by its weights below, experts through pp in test_expert_parallel.py, cp of every other family in test_context_parallel.py
ELSEWHERE = [
    (TP, "llama"),
    (TP, "tied"),
    (CP, "llama"),
    (TP, "mixtral"),
    (TP, "gpt_oss"),
    *((CP, kind) for kind in ("gemma2", "qwen3_5_text", "mixtral", "deepseek_v3", "deepseek_v4")),
    (PP, "llama"),
    (PP, "qwen3_moe"),
]
# by the paths of tied, tied over stages and mixtral without sp, lfm2 with sp, and gemma2
AGAIN = [(TP, "gemma2"), (PLAIN_TP, "tied"), (PLAIN_TP, "lfm2"), (PP, "qwen3")]
ROWS = ("grpo", "gspo", "ppo", "dapo", "reinforce_pp")
STEPS = [(mesh, dtype) for mesh in (TP, CP, PP, Mesh(shards=2, tp=2)) for dtype in ("float32", "bfloat16")]
TURNS = [(Mesh(pp=2, chunks=2), dtype) for dtype in ("float32", "bfloat16")]
FLOWS = [
    (Mesh(shards=2, tp=2), "llama", "bfloat16"),
    (Mesh(shards=2, tp=2), "tied", "float32"),
    (Mesh(tp=2), "gpt_oss", "float32"),
    (Mesh(replicas=2, shards=2), "gemma2", "bfloat16"),
    (Mesh(shards=2, cp=2), "llama + used", "float32"),
    (Mesh(pp=2, tp=2), "tied", "bfloat16"),
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def one():
    """The gradient of one rank, of a family: of all groups, and of a few in micro-batches of one sample."""
    known: dict[str, tuple] = {}

    def of(kind: str):
        if kind not in known:
            algo, alone = row("grpo", kl={"coef": 0.1}, entropy={"coef": 0.02}), Rank(0)
            alone.make(kind, algo=algo)
            cut = [(batch(awkward_groups()[1::3], algo), 2), (batch(awkward_groups(), algo), 10**6)]
            known[kind] = algo, [(b, micro, alone.gradient(copy.deepcopy(b), algo)) for b, micro in cut]
        return known[kind]

    return of


def _same_gradient(every, kind, algo, known, near):
    every.make(kind, algo=algo)
    for b, micro_tokens, whole in known:  # rows of fewer tokens than ranks, too
        assert np.linalg.norm(whole) > 1e-3
        for got in every.gradient(copy.deepcopy(b), algo, micro_tokens=micro_tokens):
            assert apart(got, whole) <= near


@pytest.mark.parametrize(
    ("mesh", "kind"), covering(CASES, [case for case in CASES if case not in [*ELSEWHERE, *AGAIN]]), ids=str
)
def test_any_mesh_has_the_gradient_of_one_rank(ranks, one, mesh, kind):
    _same_gradient(ranks(mesh), kind, *one(kind), 2e-6 if kind == "qwen3_5_text" else 1e-6)


BOTH = [
    (mesh, kind)
    for mesh in PAIRS
    for kind in (
        ("lfm2", "mixtral") if mesh.cp > 1 == mesh.pp else ("tied",) if mesh.tp > 1 < mesh.pp else ("mixtral",)
    )
]


@pytest.mark.parametrize(
    ("mesh", "kind"),
    covering(BOTH, [(Mesh(cp=2, tp=2), "mixtral"), (Mesh(pp=2, cp=2), "mixtral")]),
    ids=str,
)  # shards beside tp, cp, pp and replicas: with experts apart in test_expert_parallel.py; replicas beside cp:
# test_flow_mesh.py; pp beside tp: test_async_tp.py, and its weights below
def test_two_axes_together_have_it_too(ranks, one, mesh, kind):
    _same_gradient(ranks(mesh), kind, *one(kind), 1e-6)


def test_every_pair_of_axes_is_compared():
    """Beside experts that lie apart: test_expert_parallel.py."""
    told = {frozenset(axis for axis in AXES if getattr(mesh, axis) > 1) for mesh in PAIRS}
    assert told == {frozenset(pair) for pair in combinations(AXES, 2)}


TRAVELS = [
    Mesh(shards=2, reduce="update", reshard="update", prefetch=1),
    Mesh(pp=2, shards=2, reduce="update", reshard="update"),
    Mesh(cp=2, reduce="update"),  # shards like any others
    Mesh(tp=2, prefetch=2),  # nothing to gather
]


@pytest.mark.parametrize("mesh", covering(TRAVELS, TRAVELS[1:2]), ids=str)  # alone with prefetch: test_flow_mesh.py
def test_when_shards_travel_does_not_matter(ranks, one, mesh):
    """Sums once an update, weights kept until its end, layers gathered ahead; two updates, so that what one leaves is seen."""
    algo, (_, (b, _, whole)) = one("mixtral")
    every = ranks(mesh)
    every.make("mixtral", algo=algo)
    for _ in range(2):
        for got in every.gradient(copy.deepcopy(b), algo, micro_tokens=45):
            assert apart(got, whole) <= 1e-6


CHUNKS = Mesh(pp=2, chunks=2)
CUTS = (60, 90)  # into three micro-batches, and into two
TAKING_TURNS = [
    CHUNKS,
    Mesh(pp=2, shards=2, chunks=2),
    Mesh(pp=2, tp=2, chunks=2),
    Mesh(pp=2, cp=2, chunks=2),
    Mesh(pp=2, shards=2, ep=2, chunks=2),
    Mesh(pp=2, shards=2, chunks=2, reduce="update", reshard="update"),
]
DEEP = [(mesh, kind) for mesh in TAKING_TURNS for kind in ("deep", "deep_mixture") if kind != "deep" or mesh.ep == 1]


@pytest.mark.parametrize(
    ("mesh", "kind"),
    covering(DEEP, [(CHUNKS, "deep_mixture")]),
    ids=str,
)  # axes beside stages: above, and in test_expert_parallel.py
def test_chunks_of_stages_have_the_bits_of_plain_stages(ranks, mesh, kind):
    """Of ragged micro-batches, in number even and odd, with a reference: what takes turns adds up in the same order."""
    algo = row("grpo", kl={"coef": 0.1}, entropy={"coef": 0.02})
    b = batch(awkward_groups(), algo)
    alone = Rank(0)
    alone.make(kind, algo=algo)
    whole = alone.gradient(copy.deepcopy(b), algo)
    told = {}
    for each in (replace(mesh, chunks=1), mesh):
        every = ranks(each)
        every.make(kind, algo=algo)
        told[each] = [every.gradient(copy.deepcopy(b), algo, micro_tokens=n) for n in CUTS]
    plain, turns = told.values()
    for ours, theirs in zip(turns, plain):
        for got, expected in zip(ours, theirs):
            np.testing.assert_array_equal(got, expected)
            assert apart(got, whole) <= 1e-6


@pytest.mark.sweep  # on a ring of as many ranks in test_async_tp.py
def test_more_ranks_than_key_heads_share_them(ranks, one):
    _same_gradient(ranks(Mesh(tp=4)), "llama", *one("llama"), 1e-6)


# ratios of whole samples, and a critic; grpo with a reference and an entropy is in the tests above
@pytest.mark.parametrize("name", covering(ROWS, ["gspo", "ppo"]))
def test_every_kind_of_row_has_it(ranks, name):
    """A stale batch with demonstrations: ratios of whole samples, a critic, a reference."""
    algo, rng = lively(TABLE[name]), np.random.default_rng(0)
    groups = awkward_groups()
    for x in (x for g in groups for x in g.trajectories):
        x.score = Score(x.reward + 0.7, {"right": float(rng.integers(2))})
    alone, b = Rank(0), batch_of(groups)
    alone.make("llama", algo=algo)
    alone.trainer._annotate(b, algo.needs | {"proximal_logprobs"})
    compute_advantages(b, algo)
    make_stale(b, rng)
    whole = alone.gradient(copy.deepcopy(b), algo, noted=True)
    for every in (ranks(TP), ranks(CP), ranks(PP)):
        every.make("llama", algo=algo)
        for got in every.gradient(copy.deepcopy(b), algo, noted=True, micro_tokens=90):
            assert apart(got, whole) <= 1e-6


@pytest.mark.parametrize(
    ("mesh", "dtype"), covering([*STEPS, *TURNS], [STEPS[4]]), ids=str
)  # tp among shards, with masters of bfloat16 behind stages, in test_expert_parallel.py; chunks in test_deferred_weights.py
def test_steps_end_where_one_rank_ends(ranks, mesh, dtype, tmp_path):
    """Metrics, masters, and what is published; a checkpoint of the mesh resumes on one rank, and the reverse."""
    algo = row("ppo", kl={"coef": 0.05}) if dtype == "float32" else row("grpo")
    alone, every = Rank(0), ranks(mesh)
    how = {"lr": 1e-3, "micro_tokens": 90, "updates_per_step": 2, "start_probe": 8}
    kind = "deep" if mesh.chunks > 1 else "tied"
    alone.make(kind, dtype, algo, **how)
    every.make(kind, dtype, algo, **how)
    end_alike(alone, every, algo, lambda n: batch(awkward_groups(n), algo), tmp_path, exact=dtype == "float32")


@pytest.mark.parametrize(("mesh", "kind", "dtype"), covering(FLOWS, [FLOWS[2], *FLOWS[4:]]), ids=str)
def test_weights_flow_to_an_engine_of_any_layout(ranks, mesh, kind, dtype):
    """From each rank's own shards, gathered nowhere, to engines of one rank and of two."""
    every = ranks(mesh)
    every.make(kind, dtype)
    for takers in (1, 2):
        hand_over(every, takers)


TCP = [(Mesh(shards=2), "tied", "bfloat16"), (Mesh(shards=2, tp=2), "tied", "float32"), (Mesh(pp=2), "tied", "float32")]
TCP += [(Mesh(shards=2, ep=2), "mixtral", "float32")]


@pytest.mark.parametrize(("mesh", "kind", "dtype"), covering(TCP, [TCP[1]]), ids=str)
def test_ranks_of_several_machines_serve_their_own_parts_and_gather_nothing(ranks, mesh, kind, dtype):
    """Over a connection to each of them: every part by digest, bytes that came = the plan's."""
    every = ranks(mesh)
    every.make(kind, dtype)
    for number, rank in enumerate(every.ranks):
        rank.now("move_to", f"node-{number}")
    for takers in (1, 2):
        hand_over(every, takers, "tcp")
    for rank in every.ranks:
        rank.now("move_to")


def test_ranks_write_alike_much_and_replicas_share(ranks):
    every = ranks(Mesh(replicas=2, shards=2))
    every.make("llama")
    ((manifest, route), _), *_ = every.publish_apart()
    written = written_bytes(route, dict.fromkeys((t.name for t in manifest.tensors), 4))
    assert max(written) < 1.35 * sum(written) / 4, written


def test_a_rank_that_cannot_write_is_everyones_error(ranks):
    """Nobody waits for it, and the next update is whole."""
    every = ranks(TP)
    every.make("llama")
    assert every.publish_apart()[0][0] is not None
    every.ranks[1].ask("break_transport").result(60)
    with pytest.raises(RondelError, match="no space"):
        every.publish_apart()
    assert every.publish_apart()[0][0] is not None


def test_each_rank_holds_its_share(ranks):
    """Numbers of weights: matrices and vocabulary over tp, all of it over shards, layers over pp."""
    alone = Rank(0)
    alone.make("llama")
    whole = alone.resident()["trained"]
    for mesh, share in ((TP, 0.52), (Mesh(shards=2, tp=2), 0.27), (CP, 0.51), (PP, 0.52)):
        every = ranks(mesh)
        every.make("llama")
        held = [rank["trained"] for rank in every.resident()]
        assert max(held) <= share * whole


@pytest.mark.parametrize(
    ("mesh", "kind", "said"),
    [
        (TP, "mamba", "no plan for tensor parallelism"),
        (TP, "bitnet", "cannot be cut that way"),
        (CP, "gemma3", "tokens of an image see those behind them"),
        (Mesh(tp=2, overlap=True), "llama + fresh", "layers with an adapter do not travel"),
        (Mesh(tp=4), "deepseek_v32", "indexer"),
        (PP, "deepseek_v32", "indexers"),
        (PP, "deepseek_v4", "several residual streams"),
        (PP, "zamba2", "cut over pp = 2 ranks, its logprobs differ by nan"),
        (PP, "hrm_text", "cut over pp = 2 ranks, it does not run"),
        (Mesh(pp=4), "llama", "has 2 layers"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(ranks, mesh, kind, said):
    with pytest.raises(RondelError, match=said):
        ranks(mesh).make(kind)


WHOLE, JS, FORWARD = {"beta": 1.0}, {"beta": 0.5}, {"beta": 0.0}
TOP, ALONE_TOP = {"beta": 0.5, "top": 8}, {"top": 30, "tail": False}  # of 97 tokens
DISTILLED = [
    *((TP, how) for how in (WHOLE, JS, TOP, ALONE_TOP)),
    *((Mesh(tp=4), how) for how in (TOP, ALONE_TOP, {"top": 90})),  # ranks with fewer columns than are compared
    (PLAIN_TP, FORWARD),
    *((Mesh(shards=2, tp=2), how) for how in (WHOLE, TOP)),
    (Mesh(replicas=2, tp=2), JS),
    *((mesh, how) for mesh in (CP, PP) for how in (WHOLE, TOP)),
    (replace(CP, cp_attention="ring"), JS),
    (Mesh(cp=2, tp=2), TOP),
    (Mesh(pp=2, tp=2), ALONE_TOP),
    (Mesh(pp=2, cp=2), WHOLE),
]
DISTILL_CHOSEN = [
    (TP, WHOLE),
    (Mesh(tp=4), {"top": 90}),
    (Mesh(shards=2, tp=2), TOP),
    (Mesh(cp=2, tp=2), TOP),
    (PP, WHOLE),
]


@pytest.mark.parametrize(("mesh", "how"), covering(DISTILLED, DISTILL_CHOSEN), ids=str)
def test_whole_distributions_of_a_teacher_have_it(ranks, mesh, how):
    """The teacher lies whole on every rank, which multiplies with its rows of the teacher's head alone; in one chunk of
    logits, whose softmax is kept, and in many; what is told of the divergence, and what it moves: a sum over the ranks is
    a number a target, of which the teacher's softmax has two in either pass, the reverse KL one, the others two in either.
    """
    bare = row("grpo", entropy={"coef": 0.02})  # of every token, too
    algo = replace(bare, distill=row("grpo", distill={"kind": "full", "coef": 1.0, **how}).distill)
    alone, every, b = Rank(0), ranks(mesh), batch(awkward_groups(), algo)
    alone.make("llama", algo=algo, teacher=True)
    every.make("llama", algo=algo, teacher=True)
    whole, told = alone.gradient(copy.deepcopy(b), algo), alone.step(copy.deepcopy(b), algo)[1]
    alone.make("llama", algo=bare)
    assert apart(alone.gradient(copy.deepcopy(b), bare), whole) > 1e-3, "the teacher is heard"
    for micro_tokens, entries in ((40, 1 << 25), (10**6, 800)):
        every.limit_logits(entries)
        for got in every.gradient(copy.deepcopy(b), algo, micro_tokens=micro_tokens):
            assert apart(got, whole) <= 1e-6
    every.limit_logits(1 << 25)
    if mesh in (TP, PLAIN_TP) and "top" not in how:
        sums = every.summed_bytes(copy.deepcopy(b), algo)
        every.make("llama", algo=bare)
        plain = every.summed_bytes(copy.deepcopy(b), bare)
        each = 4 * b.total_tokens * (5 if how == WHOLE else 8)
        assert [x - y for x, y in zip(sums, plain)] == [each] * mesh.world
        every.make("llama", algo=algo, teacher=True)
    for _, theirs, *_ in every.step(copy.deepcopy(b), algo):
        assert theirs["train/kl_teacher"] == pytest.approx(told["train/kl_teacher"], rel=1e-5)


SHARING = [
    TP,
    PLAIN_TP,
    CP,
    PP,
    replace(CP, cp_attention="ring"),
    *PAIRS[:3],
    *PAIRS[5:8],
    Mesh(tp=4),
]


@pytest.mark.parametrize("mesh", covering(SHARING, [PAIRS[0], PP]), ids=str)
def test_scores_behind_a_hint_have_it(ranks, mesh):
    """Of a row of the policy's own scores: the best token is the best of all parts of the vocabulary, of the targets of all
    parts of a row, and the last stage tells the others.
    """
    algo = row("cripo", distill={"coef": 3.0, "threshold": 0.9, "criteria": {"form": 0}})
    groups, alone, every = awkward_groups(), Rank(0), ranks(mesh)
    for i, x in enumerate(x for g in groups for x in g.trajectories):
        x.score = Score(x.reward, {"form": float(i % 2)})
    b = batch_of(groups)
    alone.make("llama", algo=algo, teacher=True)
    every.make("llama", algo=algo, teacher=True)
    whole = alone.gradient(copy.deepcopy(b), algo)
    plain = row("cripo", distill={"coef": 0.0})
    assert apart(alone.gradient(copy.deepcopy(b), plain), whole) > 1e-3, "the criterion counts"
    for micro_tokens, entries in ((40, 1 << 25), (10**6, 800)):
        every.limit_logits(entries)
        for got in every.gradient(copy.deepcopy(b), algo, micro_tokens=micro_tokens):
            assert apart(got, whole) <= 1e-6
    every.limit_logits(1 << 25)


@pytest.mark.parametrize(
    ("mesh", "form"),
    covering(
        [(mesh, form) for mesh in SHARING for form in ("distill", "full")],
        [(PAIRS[0], "distill"), (PP, "distill"), (PAIRS[1], "full")],
    ),
    ids=str,
)
def test_teachers_that_are_read_for_their_own_pass_have_it(ranks, tmp_path, mesh, form):
    """Two of them, as heavy as they are named: those that lie in memory teach the same, and none is left behind. Of whole
    distributions each rank reads all of a teacher, of tokens its part.
    """
    algo = row("grpo", distill={"kind": form, "coef": 1.0})
    for name, other in (("a", "tied"), ("long", "llama")):
        save_model(made(other, "float32"), tmp_path / name)
    folders = [str(tmp_path / name) for name in ("a", "long")]
    alone, every, b = Rank(0), ranks(mesh), batch(awkward_groups(), algo)
    alone.make("llama", algo=algo, read=folders)
    whole = alone.gradient(copy.deepcopy(b), algo)
    lying = [Teacher(made(f"from {path}", "float32"), t.weight) for path, t in zip(folders, alone.trainer.teachers)]
    alone.trainer.teachers = TeacherEnsemble(lying)
    np.testing.assert_array_equal(alone.gradient(copy.deepcopy(b), algo), whole)
    alone.trainer.teachers = TeacherEnsemble(lying[:1])
    assert apart(alone.gradient(copy.deepcopy(b), algo), whole) > 1e-3, "both are heard"
    every.make("llama", algo=algo, read=folders)
    for micro_tokens in (40, 10**6):
        for got in every.gradient(copy.deepcopy(b), algo, micro_tokens=micro_tokens):
            assert apart(got, whole) <= 1e-6
        assert [left for left, _ in every.models_in_memory()] == [0] * mesh.world


@pytest.mark.parametrize("mesh", covering([TP, CP, PP, Mesh(cp=2, tp=2)], [Mesh(cp=2, tp=2)]), ids=str)
def test_the_likeliest_tokens_of_every_draw_have_it(ranks, mesh):
    """A row that reads their log-probabilities beside the token's own, wherever their logits lie."""
    algo, rng = row("score_centering", surrogate={"low": 0.8, "high": 1.2, "top": 6}), np.random.default_rng(0)
    alone, every, b = Rank(0), ranks(mesh), batch(awkward_groups(), algo)
    for known in (s.known for s in b.samples):
        n = len(known.sample)
        known.top_ids = torch.from_numpy(np.array([rng.choice(97, 6, replace=False) for _ in range(n)]))
        known.top_behavior = torch.from_numpy(np.log(rng.dirichlet(np.ones(7), n)[:, :6]).astype(np.float32))
    alone.make("llama", algo=algo)
    whole = alone.gradient(copy.deepcopy(b), algo)
    every.make("llama", algo=algo)
    for micro_tokens in (40, 10**6):
        for got in every.gradient(copy.deepcopy(b), algo, micro_tokens=micro_tokens):
            assert apart(got, whole) <= 1e-6


ADAPTED = [
    *(
        (mesh, kind)
        for mesh in (TP, PLAIN_TP, CP, PP)
        for kind in ("llama", "qwen3", "gemma2", "lfm2", "mixtral", "deepseek_v3")
    ),
    *((mesh, "tied") for mesh in (*PAIRS[:3], PAIRS[6], PAIRS[7], Mesh(tp=4))),
    *((Mesh(**axis, ep=2), "gpt_oss") for axis in ({"shards": 2}, {"tp": 2}, {"cp": 2})),
]
# keys for fewer heads than ranks; parts that lie whole on ranks that all have the same rows; experts apart
ADAPTED_CHOSEN = [(Mesh(tp=4), "tied"), (PLAIN_TP, "lfm2"), (Mesh(tp=2, ep=2), "gpt_oss"), (CP, "gemma2")]


@pytest.mark.parametrize(("mesh", "kind"), covering(ADAPTED, ADAPTED_CHOSEN), ids=str)
def test_an_adapter_over_a_mesh_has_the_gradient_of_one_rank(ranks, mesh, kind):
    """Its factors lie whole on every rank, and each computes with those of its part of a matrix; with a critic's own."""
    algo = row("ppo", kl={"coef": 0.05}) if kind == "tied" else row("grpo", kl={"coef": 0.1}, entropy={"coef": 0.02})
    alone, every, b = Rank(0), ranks(mesh), batch(awkward_groups(), algo)
    alone.make(f"{kind} + used", algo=algo)
    whole = alone.gradient(copy.deepcopy(b), algo)
    assert np.linalg.norm(whole) > 1e-3
    every.make(f"{kind} + used", algo=algo)
    for micro_tokens in (40, 10**6):
        for got in every.gradient(copy.deepcopy(b), algo, micro_tokens=micro_tokens):
            assert apart(got, whole) <= 1e-6


@pytest.mark.parametrize("mesh", covering([PP, TP, PLAIN_TP, *PAIRS[:2]], [TP]), ids=str)
def test_an_adapter_over_a_mesh_ends_where_that_of_one_rank_ends(ranks, tmp_path, mesh):
    """A critic has its own, and the reference is the base; it is stored and published as that of one rank."""
    algo = row("ppo", kl={"coef": 0.05})
    alone, every = Rank(0), ranks(mesh)
    how = {"lr": 1e-3, "micro_tokens": 90, "updates_per_step": 2, "start_probe": 8, "clip": 0.5}
    alone.make("tied + fresh", algo=algo, **how)
    every.make("tied + fresh", algo=algo, **how)
    end_alike(alone, every, algo, lambda n: batch(awkward_groups(n), algo), tmp_path, exact=True)
    every.save(tmp_path / "cut")
    alone.load(tmp_path / "cut")
    alone.save(tmp_path / "whole")
    for name in ("adapter_model.safetensors", "optimizer.safetensors", "adapter_config.json", "base.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_stages_have_the_bits_of_one_rank(ranks):
    """Layers laid behind each other compute what they would in one place: aligned numerics stay bit for bit (law 4)."""
    alone, every, tokens = Rank(0), ranks(PP), [(7 * i + 3) % 100 for i in range(40)]
    alone.make("tied + aligned", "bfloat16")
    every.make("tied + aligned", "bfloat16")
    assert every.logprobs(tokens) == [alone.logprobs(tokens)] * 2


LOOKING = [
    *((mesh, kind) for mesh in (PP, TP, PLAIN_TP) for kind in ("qwen2_5_vl", "qwen3_vl", "gemma3")),
    *((mesh, kind) for mesh in (CP, PLAIN_TP) for kind in ("qwen3_5", "gemma4")),
    *(
        (mesh, "qwen3_vl")
        for mesh in (CP, replace(CP, cp_attention="ring"), PAIRS[0], PAIRS[1], PAIRS[2], PAIRS[6], PAIRS[7])
    ),
    *((mesh, kind) for mesh in (CP, TP) for kind in ("idefics3", "qwen2_vl")),
    *((Mesh(**axis, ep=2), "qwen3_vl_moe") for axis in ({"tp": 2}, {"cp": 2})),
]
LOOKING_CHOSEN = [(PP, "qwen3_vl"), (PP, "gemma3"), (TP, "gemma3"), (PAIRS[0], "qwen3_vl")]
APART = {"qwen3_5": 2e-6, "gemma4": 4e-6}  # hybrids; of one rank in two cuts gemma4 is 6e-7 from itself, others 3e-7


@pytest.mark.parametrize(("mesh", "kind"), covering(LOOKING, LOOKING_CHOSEN), ids=str)
def test_a_mesh_that_looks_has_the_gradient_of_one_rank(ranks, mesh, kind):
    """The tower is frozen and on every rank: stages behind the first, and layers whose rows lie apart, may want what it
    saw; ranks that share a row see what their tokens see.
    """
    algo, alone, every = row("grpo", entropy={"coef": 0.02}), Rank(0), ranks(mesh)
    b = batch(groups_with_images(looking(kind)), algo)
    alone.make(kind, algo=algo)
    whole = alone.gradient(copy.deepcopy(b), algo)
    every.make(kind, algo=algo)
    for got in every.gradient(copy.deepcopy(b), algo, micro_tokens=40):
        assert apart(got, whole) <= APART.get(kind, 1e-6)


COMPOSED = [
    *(("pp=2,tp=2", "llama"), ("shards=2,cp=2", "llama"), ("shards=2,cp=2,cp_attention=ring", "llama")),
    *((mesh, "qwen3_5_text") for mesh in ("tp=2", "tp=2,sp=false", "cp=2", "cp=2,cp_attention=ring", "pp=2,tp=2")),
    *((mesh, "gemma2") for mesh in ("tp=2", "shards=2,tp=2", "pp=2,cp=2")),
    *((mesh, "qwen3") for mesh in ("replicas=2,tp=2", "cp=2,tp=2")),
]


@pytest.mark.parametrize(
    ("mesh", "family"), covering(COMPOSED, [("shards=2,cp=2", "llama"), ("cp=2", "qwen3_5_text"), ("tp=2", "gemma2")])
)  # pp in test_bench.py
def test_a_rank_of_composed_axes_receives_the_bytes_of_their_formulas(capsys, mesh, family):
    """Counted in the collectives of one update, with long samples, whose keys all ranks of cp gather: recurrent layers gather
    more, tp leaves them whole, and a cap of logits has a softmax computed again.
    """
    sizes = ["--groups", "2", "--samples", "2", "--long", "150"]
    row = "ppo" if family == "gemma2" else "grpo"
    with pytest.raises(SystemExit) as end:
        main(["bench", "mesh", "--meshes", mesh, "--families", family, "--rows", row, *sizes, "--json"])
    assert not end.value.code
    cell = json.loads(capsys.readouterr().out.splitlines()[-1])[mesh][f"{family} {row}"]
    assert cell["moved"] == pytest.approx(cell["formula"], rel=0.005)
    assert cell["difference"] < (3e-6 if family == "qwen3_5_text" else 1e-6)
    assert cell["planned"] <= cell["held"] <= 1.005 * cell["planned"], "but rows that fill up uneven shards"
