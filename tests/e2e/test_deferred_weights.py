"""Ranks read their shards from a checkpoint, a layer at a time, and write theirs into one: the same bits as of one rank, in
the memory of a share.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kits.families import FAMILIES
from kits.families import model as family
from kits.ranks import Rank, adapted, apart, made
from kits.sweeps import covering
from kits.train import awkward_groups, batch, model, row
from kits.vision import EYES, groups_with_images
from kits.vision import model as looking
from rondel.core.errors import CheckpointError, ModelError
from rondel.core.mesh import Mesh
from rondel.models import names
from rondel.models.adapter_files import save_adapter
from rondel.models.deferred_weights import DeferredWeights
from rondel.models.image_features import feature_tensors
from rondel.models.load import load_model
from rondel.models.save import save_model
from rondel.models.vision import encode_images, tower_tensors
from rondel.planner.hardware import find_hardware
from rondel.planner.layout import parallel_layouts
from rondel.planner.shapes import model_shape
from rondel.planner.workload import Workload

pytestmark = pytest.mark.slow
NOTES = 40 << 10  # bytes of a random state, and of what ranks tell each other of some twenty tensors
FILES = ("model.safetensors", "optimizer.safetensors", "critic.safetensors")
KINDS = ("llama", "gemma2", "mixtral", "qwen3_5_text", "gpt_oss", "deepseek_v3")


WIDE = {
    "random": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "max_position_embeddings": 64,
}
WIDE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "dtype": "float32"}
DEEP = WIDE | {"num_hidden_layers": 8}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A folder with a tiny model of a family."""
    made = {}

    def of(kind: str):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            loaded = family(kind) if kind in FAMILIES else model(kind)
            state = {n: p.detach() for n, p in loaded.model.state_dict().items()}
            save_model(loaded, made[kind], state)
        return made[kind]

    return of


@pytest.mark.parametrize(
    ("kind", "dtype"),
    covering(
        [(kind, dtype) for kind in KINDS for dtype in ("float32", "bfloat16")],
        [*((kind, "bfloat16") for kind in KINDS), ("llama", "float32")],
    ),
)
def test_what_is_read_later_is_what_is_loaded_whole(stored, kind, dtype):
    whole, empty = (load_model(str(stored(kind)), dtype=dtype, deferred=later) for later in (False, True))
    assert empty.weights is not None and all(p.is_meta for p in empty.model.parameters())
    ours = dict(empty.model.named_parameters())
    for name, parameter in whole.model.named_parameters():
        assert ours[name].dtype == parameter.dtype, name
        assert torch.equal(empty.weights.read(name, parameter.shape, parameter.dtype), parameter), name
    for (name, mine), (_, theirs) in zip(empty.model.named_buffers(), whole.model.named_buffers(), strict=True):
        assert torch.equal(mine, theirs), name
    assert (empty.routers, empty.max_context, empty.stop_ids) == (whole.routers, whole.max_context, whole.stop_ids)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """A folder with a tiny vision-language model of each kind."""
    made = {}

    def of(kind: str):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            loaded = looking(kind)
            save_model(loaded, made[kind], {n: p.detach() for n, p in loaded.model.state_dict().items()})
        return made[kind]

    return of


@pytest.mark.parametrize("kind", covering(EYES, ["qwen3_vl", "gemma3", "idefics3"]))
def test_of_a_model_that_looks_the_tower_alone_is_read_at_once(seeing, kind):
    """Its attention is its own, as in a model that is loaded whole; the images of both have the same features."""
    whole, empty = (load_model(str(seeing(kind)), dtype="float32", deferred=later) for later in (False, True))
    assert empty.weights is not None and empty.sight == whole.sight and empty.routers == whole.routers
    tower = tower_tensors(whole.model)
    for name, parameter in empty.model.named_parameters():
        assert parameter.is_meta == (name not in tower), name
    for name, mine in tower_tensors(empty.model).items():
        assert torch.equal(mine, tower[name]), name
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(empty.weights.read(name, parameter.shape, parameter.dtype), parameter), name
    images = [m.image for t in groups_with_images(whole)[0].trajectories for m in t.media]
    ours, theirs = (feature_tensors(encode_images(x.model, whole.sight, images)) for x in (empty, whole))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


LOOK = [
    (mesh, kind) for kind in ("qwen3_vl", "gemma3") for mesh in (Mesh(shards=2), Mesh(tp=2), Mesh(pp=2), Mesh(cp=2))
]
LOOK = [case for case in LOOK if case != (Mesh(cp=2), "gemma3")]


@pytest.mark.parametrize(("mesh", "kind"), covering(LOOK, [LOOK[0], LOOK[2]]), ids=str)
def test_ranks_that_read_their_shards_of_a_model_that_looks_train_as_one_rank(seeing, ranks, mesh, kind):
    algo, alone, every = row("grpo", entropy={"coef": 0.02}), Rank(0), ranks(mesh)
    b = batch(groups_with_images(looking(kind)), algo)
    alone.make(f"from {seeing(kind)}", algo=algo)
    whole = alone.gradient(copy.deepcopy(b), algo)
    every.make(f"from {seeing(kind)}", algo=algo)
    for masters in every.masters():
        np.testing.assert_array_equal(masters, alone.masters())
    for got in every.gradient(copy.deepcopy(b), algo, micro_tokens=40):
        assert apart(got, whole) <= 1e-6


def test_a_model_that_is_stored_otherwise_is_loaded_whole(stored, tmp_path):
    from safetensors.torch import save_file

    folder = tmp_path / "renamed"
    folder.mkdir()
    for file in stored("llama").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    save_file({n.removeprefix("model."): t for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    assert load_model(str(folder), dtype="float32", deferred=True).weights is None


READ = [
    *[(Mesh(shards=2), "llama", "bfloat16"), (Mesh(shards=2), "mixtral", "float32")],
    *[(Mesh(shards=2, tp=2), "llama", "bfloat16"), (Mesh(tp=2), "mixtral", "float32")],
    *[(Mesh(shards=2, ep=2), "mixtral", "bfloat16"), (Mesh(shards=2, ep=2), "mixtral", "float32")],
    *[(Mesh(pp=2), "llama", "bfloat16"), (Mesh(pp=2), "mixtral", "float32")],
    *[(Mesh(tp=2, ep=2), "mixtral", "float32"), (Mesh(shards=2, tp=2, ep=4), "mixtral", "float32")],
    *[(Mesh(pp=2, chunks=2), "deep", "float32"), (Mesh(shards=2, tp=2), "mixtral", "float32")],
]


@pytest.mark.parametrize(("mesh", "kind", "dtype"), covering(READ, [READ[0], READ[3], READ[8], READ[10]]), ids=str)
def test_ranks_that_read_their_shards_train_as_one_rank(stored, ranks, mesh, kind, dtype):
    """Masters are those of one rank bit for bit, gradients to 1e-6, with a reference and a critic beside the policy."""
    algo, alone, every = row("ppo", kl={"coef": 0.1}), Rank(0), ranks(mesh)
    b = batch(awkward_groups(), algo)
    alone.make(f"from {stored(kind)}", dtype, algo)
    every.make(f"from {stored(kind)}", dtype, algo)
    for masters in every.masters():
        np.testing.assert_array_equal(masters, alone.masters())
    whole = alone.gradient(copy.deepcopy(b), algo)
    for got in every.gradient(copy.deepcopy(b), algo):
        assert apart(got, whole) <= (1e-6 if dtype == "float32" else 0.05)


@pytest.mark.parametrize("shards", covering([2, 4], [2]))
def test_a_rank_never_holds_more_than_its_share_and_a_layer(stored, ranks, shards):
    """Bytes of tensors that are alive at once, counted at every operation while a rank loads."""
    loaded = family("llama")
    whole = sum(4 * p.numel() for p in loaded.model.parameters())
    blocks = [sum(4 * p.numel() for p in block.parameters()) for block in loaded.model.model.layers]
    for held, most in ranks(Mesh(shards=shards)).load_counted(f"from {stored('llama')}"):
        assert held <= 1.05 * whole / shards
        assert most <= held + max(*blocks, whole - sum(blocks))


def test_a_stage_reads_its_layers_only(ranks, tmp_path):
    """Three layers and the embedding, or two layers, norm and head, which is the embedding. The pass that tries the model
    gathers each once, and has activations of 11 tokens.
    """
    loaded = model("deep")
    save_model(loaded, tmp_path, {n: p.detach() for n, p in loaded.model.state_dict().items()})
    size = {name: 4 * p.numel() for name, p in loaded.model.named_parameters()}
    tied, layer = size["model.embed_tokens.weight"], sum(n for name, n in size.items() if "layers.0." in name)
    told = ranks(Mesh(pp=2)).load_counted(f"from {tmp_path}")
    assert [held for held, _ in told] == [3 * layer + tied, 2 * layer + tied + size["model.norm.weight"]]
    assert all(most <= 2 * held + 48 * 1024 for held, most in told)


# -- an adapter over a base that is read later ---------------------------------------------------------------


@pytest.mark.parametrize("kind", covering([*KINDS, "tied"], ["tied", "mixtral"]))
def test_an_adapter_begins_with_the_bits_that_it_has_over_a_whole_base(stored, tmp_path, kind):
    """In bfloat16, to which peft rounds the first factors; the digest of the base is that of all its weights. What
    was stored of an adapter is read over either, and refused over another base.
    """
    whole, empty = (made(f"from {stored(kind)} + used", "bfloat16", deferred=later) for later in (False, True))
    ours, theirs = (dict(names.named_weights(loaded.model)) for loaded in (empty, whole))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
    assert all(p.is_meta for n, p in empty.model.named_parameters() if names.LORA not in n)
    assert names.base_digest(empty.model) == names.base_digest(whole.model) != ""
    save_adapter(whole, tmp_path)
    again = load_model(str(tmp_path), dtype="bfloat16", deferred=True)
    assert again.weights is not None and again.name == str(tmp_path)
    assert all(torch.equal(t, theirs[n]) for n, t in names.named_weights(again.model))
    note = tmp_path / "base.json"
    note.write_text(note.read_text().replace(names.base_digest(whole.model), "0" * 32))
    with pytest.raises(ModelError, match="with other bits than the base"):
        load_model(str(tmp_path), dtype="bfloat16", deferred=True)


OVER = [
    *[(Mesh(shards=2), "tied", "float32"), (Mesh(tp=2), "tied", "float32"), (Mesh(shards=2, tp=2), "tied", "float32")],
    *[(Mesh(pp=2), "tied", "float32"), (Mesh(shards=2), "tied", "bfloat16"), (Mesh(cp=2), "gemma2", "float32")],
    *[(Mesh(tp=2, ep=2), "mixtral", "float32"), (Mesh(shards=2, ep=2), "gpt_oss", "float32")],
]


@pytest.mark.parametrize(("mesh", "kind", "dtype"), covering(OVER, [OVER[0], OVER[2], OVER[3], OVER[6]]), ids=str)
def test_an_adapter_over_a_base_that_ranks_read_trains_as_one_rank(stored, ranks, tmp_path, mesh, kind, dtype):
    """With a critic, whose adapter is its own, and the base as the reference. Of the base a rank has its share; what is
    published and stored is that of one rank, with the same digest of the base.
    """
    algo = row("ppo", kl={"coef": 0.05}) if kind == "tied" else row("grpo", kl={"coef": 0.1})
    alone, every, b = Rank(0), ranks(mesh), batch(awkward_groups(), algo)
    alone.make(f"from {stored(kind)} + used", dtype, algo)
    every.make(f"from {stored(kind)} + used", dtype, algo)
    whole = alone.gradient(copy.deepcopy(b), algo)
    assert np.linalg.norm(whole) > 1e-3
    for got in every.gradient(copy.deepcopy(b), algo, micro_tokens=40):
        assert apart(got, whole) <= (1e-6 if dtype == "float32" else 0.05)
    frozen = alone.resident()["frozen"]
    if mesh in (Mesh(shards=2), Mesh(shards=2, tp=2)) and kind == "tied":
        assert max(part["frozen"] for part in every.resident()) <= 1.05 * frozen / mesh.world
    assert every.published() == [alone.published()] + [None] * (mesh.world - 1)
    every.save(tmp_path / "mesh")
    alone.load(tmp_path / "mesh")
    alone.save(tmp_path / "one")
    for name in ("adapter_model.safetensors", "adapter_config.json", "base.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "mesh" / name).read_bytes(), name
    every.load(tmp_path / "one")


def test_an_adapted_layer_that_takes_no_part_is_named_by_ranks_that_read_their_shards(stored, ranks):
    every = ranks(Mesh(shards=2))
    asked = [rank.ask("make_past_a_layer", f"from {stored('llama')} + fresh") for rank in every.ranks]
    for answer in asked:
        with pytest.raises(ModelError, match=r"take no part in a forward pass, first model\.layers\.1\.mlp"):
            answer.result(60)


ADAPTED = [Mesh(shards=2), Mesh(tp=2), Mesh(shards=2, tp=2)]


@pytest.mark.parametrize("mesh", covering(ADAPTED, [ADAPTED[0], ADAPTED[2]]), ids=str)
def test_a_rank_under_an_adapter_holds_its_share_of_the_base_and_what_a_pass_gathers(ranks, tmp_path, mesh):
    """Bytes of tensors alive at once, counted at every operation while a rank loads; the adapter lies whole beside them.
    The pass that asks whether every adapted layer takes part gathers the ends, and has three layers at once, one let go,
    one as it comes and as it is computed with; and activations of 11 tokens.
    """
    loaded = load_model(DEEP, dtype="float32")
    save_model(loaded, tmp_path, {n: p.detach() for n, p in loaded.model.state_dict().items()})
    size = {name: 4 * p.numel() for name, p in loaded.model.named_parameters()}
    layer = sum(n for name, n in size.items() if "layers.0." in name)
    ends = sum(n for name, n in size.items() if "layers." not in name)
    trained = 4 * adapted(loaded, "fresh").adapter.parameter_count
    share = sum(size.values()) / mesh.world
    for held, most in ranks(mesh).load_counted(f"from {tmp_path} + fresh"):
        assert held <= 1.02 * share + trained
        assert most <= held + (3 * layer + ends) / mesh.tp + 256 * 1024 < sum(size.values()) + trained


def test_the_reader_names_what_is_missing(stored, tmp_path):
    loaded = load_model(str(stored("llama")), dtype="float32", deferred=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(Exception, match="holds no tensor"):
        DeferredWeights(str(tmp_path / "empty"), loaded.model, torch.device("cpu"))


# -- checkpoints of a run ------------------------------------------------------------------------------


def equal_files(ours, theirs) -> bool:
    """The same tensors and settings; random states are each rank's own."""
    names = {f.name for f in ours.iterdir()}
    assert names == {f.name for f in theirs.iterdir()}
    for file in names & set(FILES):
        a, b = load_file(ours / file), load_file(theirs / file)
        assert a.keys() == b.keys() and all(a[k].dtype == b[k].dtype for k in a), file
        assert all(torch.equal(a[k], b[k]) for k in a.keys() - {"rng"}), file
    return (ours / "config.json").read_bytes() == (theirs / "config.json").read_bytes()


SAVED = [
    (Mesh(shards=2, tp=2), "tied", "bfloat16"),
    (Mesh(shards=2, ep=2), "mixtral", "float32"),
    (Mesh(shards=2, tp=2, ep=2), "mixtral", "float32"),
    (Mesh(pp=2), "tied", "float32"),
    (Mesh(pp=2, chunks=2), "deep", "float32"),
    (Mesh(shards=2), "gpt_oss", "float32"),
    (Mesh(shards=2), "qwen3_5_text", "bfloat16"),
]


@pytest.mark.parametrize(
    ("mesh", "kind", "dtype"),
    covering(SAVED, [*SAVED[4:]]),  # shards and tp beside ep
    ids=str,
)
def test_ranks_write_the_files_that_one_rank_would(ranks, tmp_path, mesh, kind, dtype):
    """A critic beside the policy; experts that a family stores one by one, or interleaved; buffers. One rank that reads
    them writes the same files, and so do ranks of several machines, whose first one writes."""
    algo, alone, every = row("ppo"), Rank(0), ranks(mesh)
    alone.make(kind, dtype, algo)
    every.make(kind, dtype, algo)
    every.step(batch(awkward_groups(0), algo), algo)
    every.logprobs([1, 2, 3, 4])  # a pass that leaves embedding and head gathered
    every.save(tmp_path / "parts")
    alone.load(tmp_path / "parts")
    alone.save(tmp_path / "one")
    assert equal_files(tmp_path / "parts", tmp_path / "one")
    for number, rank in enumerate(every.ranks):
        rank.now("move_to", f"node-{number}")
    every.save(tmp_path / "far")
    for rank in every.ranks:
        rank.now("move_to")
    assert equal_files(tmp_path / "far", tmp_path / "one")
    every.load(tmp_path / "far")


@pytest.mark.parametrize("shards", covering([2, 4], [2]))
def test_a_rank_saves_and_loads_with_its_share_and_the_largest_tensor(ranks, tmp_path, shards):
    """Bytes that saving makes beside what is held, and that loading makes in all, counted at every operation."""
    algo, every = row("grpo"), ranks(Mesh(shards=shards))
    every.make("llama", "bfloat16", algo)
    every.step(batch(awkward_groups(0), algo), algo)
    told = every.save_counted(tmp_path)
    stored = load_file(tmp_path / "optimizer.safetensors").values()
    largest, whole = max(t.nbytes for t in stored), sum(t.nbytes for t in stored)
    for (held, extra), loaded in zip(told, every.restore_counted(tmp_path), strict=True):
        assert extra <= largest + NOTES < whole / 4
        assert loaded <= held + largest + NOTES


SHARES = [Mesh(shards=2), Mesh(shards=4), Mesh(shards=2, tp=2)]


@pytest.mark.parametrize("mesh", covering(SHARES, SHARES[:2]), ids=str)
def test_a_rank_trains_within_its_share_of_18_bytes_a_weight_and_a_block(ranks, tmp_path, mesh):
    """From loading to the end of a second step: 2 bytes of a weight, 4 of its master, 4 of its gradient, 8 of its moments.
    Of the largest block 12 at most: it is gathered (2), has a gradient (2), which is summed in fp32 (4) while the sum of
    the one before is on its way. Layers are computed again, of tokens that weigh little beside them.
    """
    loaded = load_model(WIDE)
    save_model(loaded, tmp_path, {n: p.detach() for n, p in loaded.model.state_dict().items()})
    count = {name: p.numel() for name, p in loaded.model.named_parameters()}
    share, layer = sum(count.values()) / mesh.world, sum(n for name, n in count.items() if "layers.0." in name)
    algo, how = row("grpo"), {"dtype": "bfloat16", "recompute": "layers", "micro_tokens": 16}
    for most in ranks(mesh).step_counted(batch(awkward_groups()[3:4], algo), algo, f"from {tmp_path}", **how):
        assert 16 * share < most <= 18 * share + 12 * layer / mesh.tp


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 64}
PEAKS = [
    *((mesh, DEEP) for mesh in (Mesh(shards=2), Mesh(pp=2), Mesh(cp=2), Mesh(tp=2), Mesh(pp=2, shards=2))),
    *((mesh, WIDE | EXPERTS | {"random": "qwen3_moe"}) for mesh in (Mesh(shards=2, ep=2), Mesh(tp=2, ep=2))),
]


@pytest.mark.parametrize(
    ("mesh", "spec"),
    covering(PEAKS, [PEAKS[1], PEAKS[2], PEAKS[5]]),
    ids=lambda x: str(x) if isinstance(x, Mesh) else x["random"],
)
def test_the_peak_of_a_rank_is_what_the_planner_says_of_its_layout(ranks, tmp_path, mesh, spec):
    """Within 15 %, counted from loading to the end of a second step, in fp32, of the fullest rank."""
    loaded = load_model(spec)
    save_model(loaded, tmp_path, {n: p.detach() for n, p in loaded.model.state_dict().items()})
    algo, how = row("grpo"), {"dtype": "float32", "recompute": "layers", "micro_tokens": 16}
    found = ranks(mesh).step_counted(batch(awkward_groups()[3:4], algo), algo, f"from {tmp_path}", **how)
    few = {"prompts": 1, "group": 1, "prompt": 8, "output": 8, "mean": 8, "micro": 16, "recompute": "layers"}
    asked = Workload(model_shape(spec), find_hardware("h100"), gpus=mesh.world, width=4, **few)
    asked = replace(asked, prompt=8192) if mesh.cp > 1 else asked  # which has no layout of less
    [layout] = [each for each in parallel_layouts(asked) if each.mesh == mesh]
    assert max(found) == pytest.approx(layout.memory, rel=0.15)


def test_a_full_disk_of_one_rank_is_everyones(ranks, tmp_path):
    """None goes on alone, and the next checkpoint is whole."""
    every = ranks(Mesh(shards=2))
    every.make("llama")
    every.ranks[1].now("fill_disk")
    asked = [rank.ask("save", tmp_path / "a") for rank in every.ranks]
    for answer in asked:
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            answer.result(60)
    every.save(tmp_path / "b")
    every.load(tmp_path / "b")
