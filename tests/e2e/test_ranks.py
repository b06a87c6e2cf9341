"""Two ranks of FSDP2 over gloo are one rank: gradients, steps, metrics, faults and
checkpoints, whatever the row (law 3).
"""

from __future__ import annotations

import copy
import shutil

import numpy as np
import pytest
import torch

from kits.algos import FORMULAS_ONLY, lively
from kits.ranks import Rank, apart
from kits.sweeps import covering
from kits.train import awkward_groups, batch, make_stale, row
from kits.vision import groups_with_images
from kits.vision import model as looking
from rondel.algos.table import TABLE
from rondel.core.mesh import Mesh
from rondel.core.types import Score
from rondel.train.annotate import compute_advantages
from rondel.train.pack import batch_of

MODELS = ("llama", "tied", "qwen3", "gemma3_text")
# what ranks tell each other: counts of tokens, ratios of whole samples, a choice and a bound over the update, a critic's values,
# a teacher's logprobs, a baseline, demonstrations. The other SPLIT_ROWS of law 3 cross in one of these ways
CROSSING = ["dapo", "gspo", "clip_cov", "m2po", "scalerl", "ppo", "opd", "otb", "luffy"]


@pytest.fixture
def pair(ranks):
    return ranks(Mesh(shards=2))


@pytest.mark.parametrize("kind", covering(MODELS, MODELS[:2]))  # a matrix that two layers share; the rest are matrices
@pytest.mark.slow
def test_two_ranks_have_the_gradient_of_one(pair, kind):
    algo = row("grpo", kl={"coef": 0.1}, entropy={"coef": 0.02})
    alone, b = Rank(0), batch(awkward_groups(), algo)
    alone.make(kind, algo=algo)
    pair.make(kind, algo=algo)
    whole = alone.gradient(copy.deepcopy(b), algo)
    for micro_tokens in (60, 10**6) if kind == "llama" else (40,):  # an odd and an even number of micro-batches
        for got in pair.gradient(copy.deepcopy(b), algo, micro_tokens=micro_tokens):
            assert apart(got, whole) <= 1e-6


@pytest.mark.slow
def test_ranks_that_see_pictures_at_different_times_have_the_gradient_of_one(pair):
    """A micro-batch of text beside one with pictures: nobody waits in a tower for who does not look."""
    algo = row("grpo", entropy={"coef": 0.02})
    alone, b = Rank(0), batch(groups_with_images(looking()), algo)
    alone.make("qwen2_5_vl", algo=algo)
    pair.make("qwen2_5_vl", algo=algo)
    whole = alone.gradient(copy.deepcopy(b), algo)
    for micro_tokens in (1, 10**6):
        for got in pair.gradient(copy.deepcopy(b), algo, micro_tokens=micro_tokens):
            assert apart(got, whole) <= 1e-6


@pytest.mark.slow
def test_whole_distributions_of_a_teacher_have_the_gradient_of_one(pair):
    """Each rank has the teacher whole, computes the hidden states of its share and is told the others'."""
    algo = row("grpo", distill={"kind": "full", "coef": 1.0})
    alone, b = Rank(0), batch(awkward_groups(), algo)
    alone.make("llama", algo=algo, teacher=True)
    pair.make("llama", algo=algo, teacher=True)
    whole = alone.gradient(copy.deepcopy(b), algo)
    bare = row("grpo")
    alone.make("llama", algo=bare)
    assert apart(alone.gradient(copy.deepcopy(b), bare), whole) > 1e-3, "the teacher is heard"
    for got in pair.gradient(copy.deepcopy(b), algo, micro_tokens=40):
        assert apart(got, whole) <= 1e-6


@pytest.mark.slow
def test_scores_behind_a_hint_have_the_gradient_of_one(pair):
    """Each rank scores its share behind the hint, and is told the others' margins."""
    algo = row("cripo", distill={"coef": 3.0, "threshold": 0.9, "criteria": {"form": 0}})
    groups = awkward_groups()
    for i, x in enumerate(x for g in groups for x in g.trajectories):
        x.score = Score(x.reward, {"form": float(i % 2)})
    alone, b = Rank(0), batch_of(groups)
    for r in (alone, pair):
        r.make("llama", algo=algo, teacher=True)
    whole = alone.gradient(copy.deepcopy(b), algo)
    plain = row("cripo", distill={"coef": 0.0})
    assert apart(alone.gradient(copy.deepcopy(b), plain), whole) > 1e-3, "the criterion counts"
    for got in pair.gradient(copy.deepcopy(b), algo, micro_tokens=40):
        assert apart(got, whole) <= 1e-6


@pytest.mark.slow
def test_the_likeliest_tokens_of_every_draw_have_the_gradient_of_one(pair):
    """The head is whole for a micro-batch on each rank: what is looked up in it needs no other."""
    algo = row("score_centering", surrogate={"low": 0.8, "high": 1.2, "top": 5})
    rng, groups = np.random.default_rng(2), awkward_groups()
    for t in (t for group in groups for t in group.trajectories):
        ids = [rng.choice(np.arange(5, 100), 5, replace=False).astype(np.int32) for _ in t.tokens]
        logprobs = [np.log(rng.dirichlet(np.ones(6))[:5]).astype(np.float32) for _ in t.tokens]
        t.behavior_top = [top if mine else None for top, mine in zip(zip(ids, logprobs), t.mask)]
    alone, b = Rank(0), batch(groups, algo)
    alone.make("llama", algo=algo)
    pair.make("llama", algo=algo)
    whole = alone.gradient(copy.deepcopy(b), algo)
    assert np.linalg.norm(whole) > 1e-3
    for got in pair.gradient(copy.deepcopy(b), algo, micro_tokens=40):
        assert apart(got, whole) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", covering([name for name in TABLE if name not in FORMULAS_ONLY], CROSSING))
def test_every_row_has_the_same_gradient_on_two_ranks(pair, name):
    """As tests/laws/test_law_03_split.py has it for micro-batches: a stale batch with demonstrations and
    singled-out tokens.
    """
    algo, rng = lively(TABLE[name]), np.random.default_rng(0)
    groups = awkward_groups()
    for x in (x for g in groups for x in g.trajectories):
        x.score = Score(x.reward + 0.7, {"right": float(rng.integers(2)), "form": float(rng.integers(3))})
    alone, b = Rank(0), batch(groups, algo) if not algo.needs & {"greedy"} else None
    if b is None:
        b = batch_of(groups)
        for s in b.samples:
            s.baseline = 0.3
    alone.make("llama", algo=algo, teacher=True)
    alone.trainer._annotate(b, algo.needs | {"proximal_logprobs"})
    compute_advantages(b, algo)
    make_stale(b, rng)
    pair.make("llama", algo=algo, teacher=True)
    whole = alone.gradient(copy.deepcopy(b), algo, noted=True)
    assert np.linalg.norm(whole) > 1e-3
    for got in pair.gradient(copy.deepcopy(b), algo, noted=True, micro_tokens=40):
        assert apart(got, whole) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype"),
    covering(
        [("llama", "float32"), ("tied", "float32"), ("gemma3_text", "float32"), ("llama", "bfloat16")],
        [("llama", "float32")],
    ),
)  # bfloat16: in stages, in test_expert_parallel.py
def test_steps_on_two_ranks_end_where_one_ends(pair, kind, dtype):
    algo = row("ppo", kl={"coef": 0.05}) if kind == "llama" else row("grpo", kl={"coef": 0.1})
    alone = Rank(0)
    how = {"lr": 1e-3, "micro_tokens": 40, "updates_per_step": 2, "start_probe": 8}
    alone.make(kind, dtype, algo, **how)
    pair.make(kind, dtype, algo, **how)
    for number in range(2):
        groups = awkward_groups(number)
        one = alone.step(batch(groups, algo), algo)
        two = pair.step(batch(groups, algo), algo)
        near = 2e-4 if dtype == "float32" else 0.1
        assert two[0][0] and {k for k in two[0][1]} == {k for k in one[1]}
        for name in (
            one[1].keys() - {k for k in one[1] if k.endswith("_s")} - {"train/packed_tokens", "train/weights_changed"}
        ):
            assert two[0][1][name] == pytest.approx(one[1][name], rel=near, abs=near), name
            assert two[0][1][name] == two[1][1][name], name
        for mine, theirs, others in zip(one[3], two[0][3], two[1][3]):
            assert mine.keys() == theirs.keys() == others.keys()
            for name in mine:
                np.testing.assert_allclose(theirs[name], mine[name], atol=near * 5, rtol=near)
                np.testing.assert_array_equal(theirs[name], others[name])
    ours = alone.masters()
    for masters in pair.masters():
        assert apart(masters, ours) <= (1e-5 if dtype == "float32" else 2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("model", covering(["llama", "llama + fresh"], ["llama"]))  # adapters: below
def test_gradients_agree_at_each_step_from_equal_parameters(pair, tmp_path, model):
    """AdamW turns rounding of a gradient near zero into a whole step, so parameters
    are made equal again after every one.
    """
    algo, alone = row("grpo"), Rank(0)
    alone.make(model, algo=algo)
    pair.make(model, algo=algo)
    for number in range(2):
        b = batch(awkward_groups(number), algo)
        whole = alone.gradient(copy.deepcopy(b), algo)
        assert all(apart(got, whole) <= 1e-6 for got in pair.gradient(copy.deepcopy(b), algo, micro_tokens=40))
        alone.step(copy.deepcopy(b), algo)
        alone.save(tmp_path / str(number))
        pair.load(tmp_path / str(number))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", covering(["float32", "bfloat16"], ["float32"]))  # bfloat16: test_deferred_weights.py
def test_a_checkpoint_of_two_resumes_on_one_and_the_reverse(pair, tmp_path, dtype):
    algo, alone = row("grpo", kl={"coef": 0.1}), Rank(0)
    alone.make("tied", dtype, algo)
    pair.make("tied", dtype, algo)
    pair.step(batch(awkward_groups(1), algo), algo)
    pair.save(tmp_path / "two")
    alone.load(tmp_path / "two")
    np.testing.assert_array_equal(alone.masters(), pair.masters()[0])
    assert pair.weights()[0].keys() == alone.weights().keys()
    for name, tensor in alone.weights().items():
        np.testing.assert_array_equal(tensor, pair.weights()[0][name])
    alone.save(tmp_path / "one")
    for file in ("model.safetensors", "optimizer.safetensors"):
        from safetensors.torch import load_file

        ours, theirs = load_file(tmp_path / "one" / file), load_file(tmp_path / "two" / file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[k], theirs[k]) for k in ours if k != "rng")
    pair.load(tmp_path / "one")
    one, two = (r.step(batch(awkward_groups(2), algo), algo) for r in (alone, pair))
    assert two[0][1]["train/grad_norm"] == pytest.approx(
        one[1]["train/grad_norm"], rel=1e-4 if dtype == "float32" else 0.05
    )
    shutil.rmtree(tmp_path)


@pytest.mark.slow
def test_what_two_ranks_publish_is_what_one_would(pair):
    alone = Rank(0)
    alone.make("tied", "bfloat16")
    pair.make("tied", "bfloat16")
    assert [told for told in pair.published()] == [alone.published(), None]


@pytest.mark.slow
def test_a_fault_on_one_rank_is_everyones(pair):
    """A rank that stopped alone would leave the others waiting in the next gathering."""
    algo, alone = row("grpo"), Rank(0)
    b = batch(awkward_groups(), algo)
    b.samples[3].tokens = b.samples[3].tokens.copy()
    alone.make("llama", algo=algo)
    pair.make("llama", algo=algo)
    before = pair.masters()[0]
    b.samples[3].known.advantages.numpy()[:] = 1.0
    b.samples[3].known.behavior.numpy()[:] = -np.inf
    (stepped, _, note, _), (other, _, same, _) = pair.step(b, row("grpo", correction={"kind": "importance"}))
    assert (stepped, other) == (False, False) and note == same and "group 3, sample 3" in note
    np.testing.assert_array_equal(pair.masters()[0], before)


# -- float16: one loss scale ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mesh"),
    covering(
        [("llama", Mesh(shards=2)), ("llama + used", Mesh(shards=2)), ("llama", Mesh(pp=2))],
        [("llama", Mesh(shards=2)), ("llama", Mesh(pp=2))],
    ),
    ids=str,
)
def test_several_ranks_in_float16_have_the_gradient_and_the_loss_scale_of_one(ranks, tmp_path, kind, mesh):
    algo, every, (exact, alone) = row("grpo", entropy={"coef": 0.02}), ranks(mesh), (Rank(0), Rank(0))
    for rank, dtype in ((exact, "float32"), (alone, "float16"), (every, "float16")):
        rank.make(kind, dtype, algo, micro_tokens=40)
    truth, scaled = (rank.gradient(batch(awkward_groups(), algo), algo, micro_tokens=40) for rank in (exact, alone))
    scale, _ = alone.loss_scale()
    for got in every.gradient(batch(awkward_groups(), algo), algo, micro_tokens=40):
        assert apart(got / scale, truth) <= 1.5 * apart(scaled / scale, truth) < 0.02
    (_, told, *_), theirs = (rank.step(batch(awkward_groups(), algo), algo) for rank in (alone, every))
    for stepped, metrics, *_ in theirs:
        assert stepped and metrics["train/grad_norm"] == pytest.approx(told["train/grad_norm"], rel=0.01)
    assert every.loss_scale() == [alone.loss_scale()] * 2 == [(scale, 1)] * 2
    every.loss_scale(2.0**60)
    before = every.masters()
    for stepped, metrics, note, _ in every.step(batch(awkward_groups(1), algo), algo):
        assert not stepped and note.startswith("overflow: 1 of 1") and metrics["train/loss_scale"] == 2.0**59
    assert all(np.array_equal(a, b) for a, b in zip(every.masters(), before))
    every.save(tmp_path / "several")
    alone.load(tmp_path / "several")
    assert every.loss_scale() == [alone.loss_scale()] * 2 == [(2.0**59, 0)] * 2


@pytest.mark.slow
def test_what_overflows_on_one_rank_is_skipped_by_all(pair):
    """The gradient of one group is infinite in float16, and one rank alone computes it."""
    algo = row("dr_grpo")
    pair.make("llama", "float16", algo, micro_tokens=1)
    groups = awkward_groups()[3:]
    plain = [batch(groups, algo), batch(groups[:-1], algo)]
    for x, sign in zip(groups[-1].trajectories, (1, -1)):
        x.score = Score(sign * 1e8)
    assert all(stepped for b in plain for stepped, *_ in pair.step(b, algo))
    before = pair.masters()
    told = pair.step(batch(groups, algo), algo)
    assert [(stepped, note[:9]) for stepped, _, note, _ in told] == [(False, "overflow:")] * 2
    assert all(np.array_equal(a, b) for a, b in zip(pair.masters(), before))
    assert pair.loss_scale() == [(told[0][1]["train/loss_scale"], 0)] * 2
    assert all(stepped for stepped, *_ in pair.step(plain[0], algo))


# -- an adapter: the base in shards, what is trained whole on every rank ------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype"),
    covering(
        [("llama + fresh", "float32"), ("tied + used", "float32"), ("gemma3_text + used", "bfloat16")],
        [("tied + used", "float32")],
    ),
)
def test_an_adapter_has_the_gradient_of_one_rank_and_ends_where_it_ends(pair, kind, dtype):
    """Gradients of each of two steps, and the parameters behind them; with a critic whose adapter is its own."""
    algo = (
        row("ppo", kl={"coef": 0.05})
        if kind == "tied + used"
        else row("grpo", kl={"coef": 0.1}, entropy={"coef": 0.02})
    )
    alone, how, exact = Rank(0), {"lr": 1e-3, "micro_tokens": 40, "start_probe": 8}, dtype == "float32"
    alone.make(kind, dtype, algo, **how)
    pair.make(kind, dtype, algo, **how)
    for number in range(2):
        b = batch(awkward_groups(number), algo)
        whole = alone.gradient(copy.deepcopy(b), algo)
        assert np.linalg.norm(whole) > 1e-3
        for got in pair.gradient(copy.deepcopy(b), algo, micro_tokens=40):
            assert apart(got, whole) <= (1e-6 if exact and number == 0 else 1e-4 if exact else 0.05)
        one, two = alone.step(copy.deepcopy(b), algo), pair.step(b, algo)
        assert two[0][0] and two[0][1]["train/grad_norm"] == pytest.approx(
            one[1]["train/grad_norm"], rel=1e-4 if exact else 0.05
        )
    first, second = pair.masters()
    np.testing.assert_array_equal(first, second)
    assert apart(first, alone.masters()) <= (1e-5 if exact else 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", covering(["float32", "bfloat16"], ["bfloat16"]))
def test_an_adapter_of_two_ranks_is_stored_and_published_as_that_of_one(pair, tmp_path, dtype):
    algo, alone = row("grpo", kl={"coef": 0.1}), Rank(0)
    alone.make("tied + fresh", dtype, algo)
    pair.make("tied + fresh", dtype, algo)
    pair.step(batch(awkward_groups(), algo), algo)
    pair.save(tmp_path / "two")
    alone.load(tmp_path / "two")
    alone.save(tmp_path / "one")
    for name in ("adapter_model.safetensors", "optimizer.safetensors", "adapter_config.json", "base.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    pair.load(tmp_path / "one")
    for masters in pair.masters():
        np.testing.assert_array_equal(masters, alone.masters())
    published = alone.published()
    assert pair.published() == [published, None] and published[0][1]
    loaded = alone.trainer.loaded
    sizes = [
        (p.in_features, p.out_features) for p in (layer.get_base_layer() for layer in loaded.adapter.layers.values())
    ]
    # float32, rank 4
    assert sum(4 * t.size for t in alone.weights().values()) == 4 * sum(4 * (i + o) for i, o in sizes)
    assert {n: t.shape for n, t in pair.weights()[0].items()} == {n: t.shape for n, t in alone.weights().items()}


@pytest.mark.slow
def test_the_base_lies_in_shards_and_is_the_reference(pair):
    """Not in a second copy: the policy without its adapter is what it started as, whatever was trained since."""
    algo, b, alone = row("grpo", kl={"coef": 0.1}), batch(awkward_groups(), row("grpo")), Rank(0)
    alone.make("llama + fresh", "float32", algo)
    pair.make("llama + fresh", "float32", algo)
    whole, parts = alone.resident(), pair.resident()
    assert (
        sum(part["frozen"] for part in parts) == whole["frozen"]
        and max(part["frozen"] for part in parts) <= 0.51 * whole["frozen"]
    )
    assert [part["trained"] for part in parts] == [whole["trained"]] * 2
    before = pair.reference(copy.deepcopy(b))[0]
    pair.step(batch(awkward_groups(1), algo), algo)
    for after in pair.reference(copy.deepcopy(b)):
        for mine, theirs in zip(before, after):
            np.testing.assert_array_equal(mine, theirs)
    for mine, theirs in zip(before, alone.reference(copy.deepcopy(b))):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
