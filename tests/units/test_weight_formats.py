"""A policy in a number format: both sides compute with what it decodes to, and masters move between its codes."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch

from kits.families import model as family
from kits.runs import events, final, run, run_and_die, tiny
from kits.sweeps import covering
from kits.train import awkward_groups, batch, gradient, model, row, step, trainer
from rondel.assemble import train
from rondel.core.errors import ConfigError
from rondel.formats import FORMATS, format_of
from rondel.models.rounded_weights import forget_whole, take_whole, weight_format
from rondel.models.weight_formats import apply_format, formatted_parameters

PLACES = {
    "shared": {},
    "split": {"place__kind": "split"},
    "parts of an engine": {"place__kind": "split", "place__engines": {"tp": 2}},
    "ranks": {"place__ranks": 2},
}
SMALL = {"loop__warmup__steps": 0, "loop__steps": 3, "algo__kl": {"coef": 0.05}}


def formatted(kind: str, name: str, dtype: str = "float32"):
    loaded = copy.deepcopy(family(kind)) if kind not in ("llama", "tied") else model(kind, dtype)
    plain = {n: p.detach().clone() for n, p in loaded.model.named_parameters()}
    apply_format(loaded.model, name)
    return loaded, plain


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3_moe", "gpt_oss", "lfm2"])
def test_the_matrices_of_layers_are_rounded_and_nothing_else_is(kind):
    form = format_of("int4")
    loaded, plain = formatted(kind, "int4")
    chosen = formatted_parameters(loaded.model)
    assert len(chosen) >= 4 and not any("embed" in n or "norm" in n or "lm_head" in n or "bias" in n for n in chosen)
    for name, p in loaded.model.named_parameters():
        if name not in chosen:
            assert torch.equal(p, plain[name]) and weight_format(p) is None
        else:  # blocks lie along what a product sums over
            turned = plain[name].mT if chosen[name] else plain[name]
            assert torch.equal(p.mT if chosen[name] else p, form.fake(turned)) and not torch.equal(p, plain[name])
            assert torch.equal(take_whole(p), plain[name]) and take_whole(p) is p
    assert any("experts" in n for n in chosen) == (kind in ("qwen3_moe", "gpt_oss"))
    assert {chosen[n] for n in chosen} == ({False, True} if kind == "gpt_oss" else {kind == "gpt2"})


def test_where_nothing_is_trained_the_whole_numbers_go():
    loaded, _ = formatted("llama", "fp8")
    forget_whole(loaded.model)
    assert all(take_whole(p) is p for p in loaded.model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["int4", "fp8", "nvfp4"])
def test_masters_move_between_the_codes(name, dtype):
    """They begin as the checkpoint's numbers, take the gradient that the rounded weights have, and are rounded again; small
    updates gather in them until a code changes.
    """
    algo = row("grpo")
    loaded, plain = formatted("llama", name, dtype)
    fixed = {n: p.detach().clone() for n, p in loaded.model.named_parameters()}
    t = trainer(loaded, lr=1e-5, weight_decay=0.0)
    chosen = formatted_parameters(loaded.model)
    masters = dict(zip(t.weights.names, t.weights.masters))
    assert all(torch.equal(masters[n], plain[n].float()) for n in chosen)
    assert all(torch.equal(p, fixed[n]) for n, p in zip(t.weights.names, t.weights.compute))
    b = batch(awkward_groups(), algo)
    without = model("llama", dtype)
    with torch.no_grad():
        for n, p in without.model.named_parameters():
            p.copy_(fixed[n])
    assert torch.equal(gradient(t, b, algo), gradient(trainer(without), b, algo)), "straight through"
    changed = []
    for number in range(3):
        changed.append(step(t, batch(awkward_groups(number), algo), algo).metrics["train/weights_changed"])
        for n, p, master in zip(t.weights.names, t.weights.compute, t.weights.masters):
            if n in chosen:
                assert torch.equal(p, format_of(name).fake(master, p.dtype))
    assert all(not torch.equal(masters[n], plain[n].float()) for n in chosen) and 0 < changed[-1] < 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "place"),
    covering(
        product(["int4", "mxfp4"], PLACES),
        [("int4", "shared"), ("mxfp4", "split"), ("int4", "ranks")],
    ),
)
def test_engine_trainer_and_reference_have_the_same_weights(tmp_path, name, place):
    """In another process, too, to which codes travel, and in two that share every matrix: the gap is that of fp32, and the
    KL of step 0 is 0.
    """
    place = PLACES[place]
    run(tmp_path, **SMALL, model__format=name, **place)
    done = [e["metrics"] for e in events(tmp_path, "StepDone") if "train/gap_max" in e["metrics"]]
    assert done and max(m["train/gap_max"] for m in done) < 1e-4, done
    assert done[0]["train/kl_ref"] == 0.0 < done[-1]["train/kl_ref"]
    assert all(e["probe_gap"] < 1e-4 for e in events(tmp_path, "Synced"))
    held = final(tmp_path)
    matrices = [t for n, t in held.items() if n.startswith("model/") and n.endswith("proj.weight")]
    assert matrices and all(torch.equal(format_of(name).fake(t.float()).to(t.dtype), t) for t in matrices)


@pytest.mark.slow
@pytest.mark.sweep  # law 9 kills a run that has this among others
def test_a_killed_run_ends_with_the_same_bits(tmp_path):
    how = {"model__format": "int4", "loop__warmup__steps": 2, "loop__steps": 6, "run__checkpoint__every": 2}
    run(tmp_path / "whole", **how)
    assert run_and_die(tmp_path / "killed", ("StepDone", 5), **how) == -9
    run(tmp_path / "killed", **how)
    a, b = final(tmp_path / "whole"), final(tmp_path / "killed")
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model__adapter": {"kind": "lora"}}, "model.adapter.kind"),
        ({"place__kind": "split", "place__mesh": {"pp": 2}}, "place.mesh.pp = 2"),
        ({"engine__kind": "vllm", "engine__url": "http://127.0.0.1:1", "place__kind": "split"}, "rules of its own"),
    ],
)
def test_what_is_not_carried_is_refused_by_name(tmp_path, changes, said):
    with pytest.raises(ConfigError, match=rf'model.format = "int4" with .*{said}'):
        train(tiny(tmp_path, model__format="int4", **changes), quiet=True)


def test_every_format_is_a_choice_of_the_recipe(tmp_path):
    for name in FORMATS:
        assert tiny(tmp_path, model__format=name).model.format == name
    with pytest.raises(ConfigError, match="format"):
        tiny(tmp_path, model__format="fp5")
