"""Inputs of layers that wait elsewhere: the same bits, nothing kept on the device, nothing left in the file's place."""

from __future__ import annotations

import copy
import os
import weakref
from collections import deque
from dataclasses import replace

import pytest
import torch

from kits.families import model as family
from kits.runs import run
from kits.sweeps import covering
from kits.train import awkward_groups, batch, bits, gradient, model, row, step, trainer
from rondel.core.config.trainer import MemoryConfig
from rondel.core.errors import ConfigError, ModelError
from rondel.models.activation_offload import DiskActivations, HostActivations, activation_store
from rondel.models.adapters import add_adapter
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.models.recompute import install_recompute
from rondel.planner.advice import suggest_changes
from rondel.planner.host_memory import bytes_beside
from rondel.planner.memory import memory_bills, micro_batch_tokens
from rondel.planner.workload import what_if

STORES = {"host": lambda _: HostActivations(), "disk": DiskActivations}


def stored(loaded, store):
    """A trainer whose layers keep their inputs in `store`, also one that a recipe on this device would refuse."""
    t = trainer(loaded)
    install_recompute(t.loaded.model, "layers", t.loaded.adapter, store)
    return t


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, where",
    covering(
        [
            ("llama", "host"),
            ("gemma3n_text", "disk"),
            ("qwen3_moe", "host"),
            ("lfm2", "disk"),
            ("qwen3_5_text", "host"),
        ],
        [("gemma3n_text", "disk"), ("qwen3_moe", "host"), ("lfm2", "disk")],
    ),
)
def test_the_gradient_has_the_same_bits_and_all_inputs_went_out(tmp_path, kind, where):
    algo, store = row("grpo"), STORES[where](tmp_path)
    packed, came = [], []
    out, back = store.pack, store.unpack
    store.pack = lambda x: packed.append(x.shape) or out(x)
    store.unpack = lambda kept: came.append(kept) or back(kept)
    plain, away = trainer(copy.deepcopy(family(kind)), recompute="layers"), stored(copy.deepcopy(family(kind)), store)
    b = batch(awkward_groups(), algo)
    assert torch.equal(*(gradient(t, b, algo, micro_tokens=60) for t in (away, plain)))
    hidden = plain.loaded.head.weight.shape[1]
    wide = [shape for shape in packed if shape[-1] == hidden]
    layers = plain.loaded.model.config.get_text_config().num_hidden_layers
    assert len(wide) >= 2 * layers and len(came) == len(packed), "several micro-batches, each layer's input once"


@pytest.mark.parametrize("where", STORES)
def test_nobody_else_holds_an_input_that_went_out(tmp_path, where):
    """Between forward and backward pass no input of a layer is in memory any more, where torch alone keeps them all."""
    alive = {}
    for name, store in (("kept", None), (where, STORES[where](tmp_path))):
        t, seen = stored(model(), store), []
        for layer in t.loaded.model.model.layers[1:]:  # the first one's is no result of autograd alone
            layer.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(weakref.ref(args[0])))
        hidden = t.loaded.hidden_states(torch.arange(30), torch.arange(30), PackedLayout([PackedSegment(0, 30)]))
        alive[name] = sum(reference() is not None for reference in seen)
        assert seen and hidden.requires_grad
    assert alive["kept"] > 0 == alive[where]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", covering(["float32", "bfloat16"], ["bfloat16"]))
def test_a_step_moves_the_same_bits_with_a_critic_too(tmp_path, dtype):
    algo, moved = row("ppo"), []
    for where in ("device", "host", "disk"):
        t = trainer(model(dtype=dtype), algo, recompute="layers", activations=where, folder=str(tmp_path / "new"))
        assert step(t, batch(awkward_groups(), algo), algo).stepped
        moved.append((bits(t), [m.clone() for m in t.critic.weights.masters]))
    for other in moved[1:]:
        assert moved[0][0] == other[0] and all(map(torch.equal, moved[0][1], other[1]))
    assert list(tmp_path.iterdir()) == [tmp_path / "new"] and not list((tmp_path / "new").iterdir()), "it has no name"


def test_an_adapter_too(tmp_path):
    algo, grads = row("grpo"), []
    for store in (None, DiskActivations(tmp_path)):
        loaded = model()
        add_adapter(loaded, rank=4, alpha=8)
        with torch.no_grad():
            for n, p in enumerate(p for p in loaded.model.parameters() if p.requires_grad):
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(n)))
        grads.append(gradient(stored(loaded, store), batch(awkward_groups(), algo), algo))
    assert torch.equal(*grads) and grads[0].any()


def test_a_file_is_as_large_as_the_largest_micro_batch(tmp_path):
    store, algo = DiskActivations(tmp_path), row("grpo")
    t, sizes = stored(model(), store), []
    for _ in range(3):
        gradient(t, batch(awkward_groups(), algo), algo, micro_tokens=10**6)
        sizes.append(store.size)
    config = t.loaded.model.config
    tokens = sizes[0] / (4 * config.num_hidden_layers * config.hidden_size)
    assert sizes[0] == sizes[1] == sizes[2] > 0 and tokens == int(tokens)


def test_a_file_that_was_cut_is_named(tmp_path):
    store = DiskActivations(tmp_path)
    kept = store.pack(torch.randn(100))
    store._file.truncate(8)
    with pytest.raises(ModelError, match="end at byte 8"):
        store.unpack(kept)


def test_what_saves_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match='moves the inputs of layers, and recompute = "mlp"'):
        MemoryConfig(activations="disk", recompute="mlp")
    assert activation_store("device", "") is None
    with pytest.raises(ConfigError, match='where all is in host memory already: take "disk"'):
        run(tmp_path, trainer__memory={"recompute": "layers", "activations": "host"})


@pytest.mark.slow
def test_a_run_with_its_activations_on_disk_is_the_run_without(tmp_path):
    curves = []
    for where in ("device", "disk"):
        folder = tmp_path / where
        run(folder, loop__steps=2, loop__warmup__steps=0, trainer__memory={"recompute": "layers", "activations": where})
        curves.append(sorted((folder / "checkpoints").glob("*/model.safetensors"))[-1].read_bytes())
    assert curves[0] == curves[1]


def test_the_plan_counts_what_waits_and_where(tmp_path):
    words = ["model=7b", "hardware=h100", "recompute=layers", "micro=32k", "output=16k"]
    here, there = (what_if([*words, f"activations={where}"]) for where in ("device", "host"))
    (full,), (less,) = memory_bills(here), memory_bills(there)
    inputs, layers = bytes_beside(there)["host"]["layer inputs"], here.shape.layers
    saved = full.rows["activations"]["train"] - less.rows["activations"]["train"]
    assert bytes_beside(here) == {} and saved == pytest.approx(inputs * (layers - 2) / layers)
    assert any('memory.activations = "host"' in words for words, _ in suggest_changes(here))
    with pytest.raises(ConfigError, match="add recompute=layers"):
        what_if(["model=7b", "activations=disk"])
    store, t = DiskActivations(tmp_path), trainer(model())
    install_recompute(t.loaded.model, "layers", None, store)
    gradient(t, batch(awkward_groups(), row("grpo")), row("grpo"))
    config = t.loaded.model.config
    planned = what_if(["model=0.5b", "hardware=cpu", "recompute=layers", "activations=disk", "prompts=1", "group=1"])
    shape = replace(planned.shape, layers=config.num_hidden_layers, hidden=config.hidden_size)
    tokens = micro_batch_tokens(planned)
    packed = store.size / (4 * config.num_hidden_layers * config.hidden_size)
    each = bytes_beside(replace(planned, shape=shape, width=4))["disk"]["layer inputs"] / tokens
    assert each * packed == store.size


def test_a_file_is_as_large_as_what_is_wanted_at_once(tmp_path):
    """Micro-batches of a pipeline are used up in the order in which they began, never all at once."""
    store, wanted = DiskActivations(tmp_path), deque()
    for i in range(40):
        tensor = torch.full((50 + 7 * i % 30, 16), float(i))
        wanted.append((tensor, store.pack(tensor)))
        if len(wanted) == 3:
            told, kept = wanted.popleft()
            assert torch.equal(store.unpack(kept), told)
            del kept
    assert os.fstat(store._file.fileno()).st_size <= 5 * 80 * 16 * 4
