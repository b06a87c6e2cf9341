"""models/megatron/layers.py: through Megatron-Core's layers a model computes and trains the same."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from kits.engine import ask, engine, plain_logits, prompt
from kits.ranks import AliveBytes
from kits.runs import final, run, run_and_die, tiny
from kits.train import SMALL, apart, awkward_groups, batch, forked_group, gradient, model, row, trainer
from rondel.assemble.layer_refusals import refuse_layers
from rondel.checks.layout_check import check_layouts
from rondel.core.errors import ConfigError, ModelError
from rondel.models.load import load_model
from rondel.models.packed_layout import PackedLayout, PackedSegment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]
EXPERTS = {"num_experts_per_tok": 2}
FAMILIES = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"head_dim": 16, "sliding_window": 4},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mixtral": EXPERTS | {"num_local_experts": 4},
    "qwen3_moe": EXPERTS | {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 16, "norm_topk_prob": True},
}
MESH = {"place__mesh": {"layers": "megatron"}}
SHORT = {"loop__warmup__steps": 3, "loop__steps": 4, "run__checkpoint__every": 2}


def installed(loaded, **how):
    from rondel.models.megatron.layers import install_megatron_layers

    install_megatron_layers(loaded, **how)
    return loaded


def counted(monkeypatch):
    """Every product that Megatron's linear layers compute."""
    from megatron.core.tensor_parallel import layers

    calls = []
    for kind in (layers.ColumnParallelLinear, layers.RowParallelLinear):
        own = kind.forward
        monkeypatch.setattr(kind, "forward", lambda self, *a, own=own, **k: calls.append(self) or own(self, *a, **k))
    return calls


def seen(kind, **changes):
    """Random weights far from flat, norms and biases too."""
    loaded = load_model({"random": kind, **SMALL, **FAMILIES[kind], **changes}, dtype="float32")
    with torch.no_grad():
        for p in loaded.model.parameters():
            p.mul_(2.0) if p.ndim >= 2 else p.add_(0.1 * torch.randn_like(p))
    return loaded


@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_are_those_of_transformers(kind, monkeypatch):
    """Of its own eager attention over each answer behind the prompt; here the prompt is computed once."""
    loaded, calls = installed(seen(kind)), counted(monkeypatch)
    shared, answers = [5, 9, 2, 41, 17, 33], [[7, 8, 60, 2, 11], [3, 90, 4]]
    truth = [plain_logits(loaded, shared + answer) for answer in answers]
    assert not calls
    tokens, places = torch.tensor(shared + answers[0] + answers[1]), torch.tensor([*range(11), 6, 7, 8])
    layout = PackedLayout([PackedSegment(0, 6), PackedSegment(6, 5, 0), PackedSegment(11, 3, 0)])
    with torch.no_grad():
        ours = loaded.head.logits(loaded.hidden_states(tokens, places, layout)).double()
    for got, whole in ((ours[:11], truth[0]), (ours[11:], truth[1][6:])):
        assert float((got - whole).abs().max()) <= 1e-5 * max(1.0, float(whole.abs().max()))
    assert len(calls) == 2 * (4 if "moe" not in kind and kind != "mixtral" else 2 + 2 * 4)


@pytest.mark.parametrize(
    ("kind", "name", "recompute", "micro"),
    [
        ("tied", "grpo", "none", 10**6),
        ("tied", "ppo", "none", 10**6),
        ("qwen3", "grpo", "none", 20),
        ("qwen3", "grpo", "layers", 10**6),
        ("mixture", "grpo", "none", 10**6),
    ],
)
def test_the_gradient_is_that_of_the_layers_of_transformers(kind, name, recompute, micro):
    """Shared prompts, trees of turns, a reference, a critic; twice, so that what one pass leaves is seen."""
    algo = row(name, kl={"coef": 0.1}, entropy={"coef": 0.02})
    groups = awkward_groups() + [forked_group(number=20)] * (name == "grpo")
    own = trainer(model(kind), algo)
    theirs = trainer(installed(model(kind), run_twice=recompute == "layers"), algo, recompute=recompute)
    truth = gradient(own, batch(groups, algo), algo, micro_tokens=micro)
    assert truth.norm() > 1e-3
    for _ in range(2):
        assert apart(gradient(theirs, batch(groups, algo), algo, micro_tokens=micro), truth) <= 1e-6


def test_bfloat16_keeps_the_stream_in_float32():
    """As near to float32 as the layers of transformers are, whose stream is fp32 too."""
    algo, groups = row(), awkward_groups()
    truth = gradient(trainer(model("qwen3")), batch(groups, algo), algo)
    own = load_model({"random": "qwen3", **SMALL, "head_dim": 16}, dtype="bfloat16")
    own.model.load_state_dict(model("qwen3", "bfloat16").model.state_dict())
    theirs = installed(copy.deepcopy(own))
    gaps = [apart(gradient(trainer(m), batch(groups, algo), algo), truth) for m in (own, theirs)]
    assert own.fp32_stream and gaps[1] <= 1.2 * gaps[0] < 0.1


def test_replayed_routes_reach_the_experts():
    """Of Megatron's mixture: other routes, another result; the recorded ones, the same."""
    plain, loaded = seen("mixtral"), installed(seen("mixtral"))
    loaded.model.load_state_dict(plain.model.state_dict())
    tokens, places = torch.arange(5, 17), torch.arange(12)
    routes = torch.randint(0, 4, (12, 2, 1), generator=torch.Generator().manual_seed(0))
    routes = torch.cat([routes, (routes + 1) % 4], -1)

    def hidden(of, tape):
        with torch.no_grad():
            return of.hidden_states(tokens, places, PackedLayout([PackedSegment(0, 12)]), tape)

    own, theirs = (hidden(m, m.routing_tape(routes)) for m in (plain, loaded))
    free = hidden(loaded, tape := loaded.routing_tape())
    assert float((own - theirs).abs().max()) <= 1e-5 < 1e-2 < float((free - theirs).abs().max())
    assert torch.equal(hidden(loaded, loaded.routing_tape(tape.recorded_routes)), free)


def test_an_engine_of_the_same_module_decodes_as_before(monkeypatch):
    plain, loaded = model("qwen3"), installed(model("qwen3"))
    calls = counted(monkeypatch)
    a, b = (asyncio.run(engine(m).generate(ask(prompt(9, 5), key=3, n=6))) for m in (plain, loaded))
    assert a.tokens == b.tokens and a.logprobs == b.logprobs and not calls


def test_joined_matrices_are_not_kept():
    """Between forward and backward pass there is as much as without joining, but for a layer."""
    held = {}
    for keeps in (True, False):
        loaded = installed(model("llama"), run_twice=keeps)
        joined = sum(
            p.nbytes
            for n, p in loaded.model.named_parameters()
            if any(x in n for x in ("q_p", "k_p", "v_p", "gate", "up_p"))
        )
        with AliveBytes() as alive:
            out = loaded.hidden_states(torch.arange(5, 9), torch.arange(4), PackedLayout([PackedSegment(0, 4)]))
            held[keeps] = alive.alive
        out.sum().backward()
    assert held[True] - held[False] >= 0.9 * joined


def test_a_run_ends_where_that_of_transformers_does(tmp_path):
    """Weights after 3 steps to 1e-5; killed and continued, bit for bit; and transformers reads the checkpoint."""
    short = {"loop__warmup__steps": 1, "loop__steps": 2}
    run(tmp_path / "own", **short)
    run(tmp_path / "theirs", **short, **MESH)
    ours, theirs = final(tmp_path / "own"), final(tmp_path / "theirs")
    weights = [name for name in ours if name.startswith("model/")]
    assert weights and ours.keys() == theirs.keys()
    assert max(float((ours[n] - theirs[n]).abs().max()) for n in weights) <= 1e-5
    newest = sorted((tmp_path / "theirs" / "checkpoints").glob("step-*"))[-1]
    read = AutoModelForCausalLM.from_pretrained(newest).state_dict()
    assert all(torch.equal(read[n.removeprefix("model/")], theirs[n]) for n in weights)


@pytest.mark.sweep  # checkpoints of both kinds of layers go there and back in tests/e2e/test_megatron_mesh.py
def test_a_killed_run_ends_with_the_same_bits(tmp_path):
    run(tmp_path / "whole", **SHORT, **MESH)
    assert run_and_die(tmp_path / "dies", ("StepDone", 5), **SHORT, **MESH) == -9
    run(tmp_path / "dies", **SHORT, **MESH)
    whole, dies = final(tmp_path / "whole"), final(tmp_path / "dies")
    assert whole.keys() == dies.keys() and all(torch.equal(whole[n], dies[n]) for n in whole)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model__adapter__kind": "lora"}, "drop model.adapter"),
        ({"engine__numerics": "aligned"}, 'engine.numerics = "fast"'),
        ({"place__mesh": {"layers": "megatron", "tp": 2}}, "set sp = false beside tp"),
        ({"place__mesh": {"layers": "megatron", "tp": 2, "overlap": True}}, "leave overlap out"),
        ({"place__mesh": {"layers": "megatron", "shards": 2, "ep": 2}}, "ep = 2"),
        ({"trainer__memory": {"recompute": "mlp"}}, 'recompute = "layers"'),
        ({"trainer__micro_tokens": {"buckets": "auto"}}, "give trainer.micro_tokens a number"),
        ({"model__format": "int4"}, 'model.format = "int4"'),
    ],
)
def test_what_it_is_not_carried_with_is_refused(tmp_path, changes, told):
    with pytest.raises(ConfigError, match=told):
        refuse_layers(tiny(tmp_path, **MESH | changes))


def test_without_the_package_it_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'rondel\[megatron\]'"):
        refuse_layers(tiny(tmp_path, **MESH))


def test_models_that_it_does_not_compute_are_refused(monkeypatch):
    for changes, told in (
        ({"random": "gemma2", **SMALL}, "'gemma2' has no rules"),
        ({"random": "llama", **SMALL, "attention_bias": True}, "ends in a bias"),
        ({"random": "llama", **SMALL, "hidden_act": "gelu"}, "its activation is gelu"),
    ):
        with pytest.raises(ModelError, match=told):
            installed(load_model(changes, dtype="float32"))
    module = sys.modules["rondel.models.megatron.layers"]
    for kind, told in (("mixtral", "experts are not cut by tp"), ("llama", "does not divide its 4 heads and 2 key")):
        with pytest.raises(ModelError, match=told):
            module.refuse_model(seen(kind), 2 if kind == "mixtral" else 4)
    monkeypatch.setattr(
        sys.modules["rondel.models.megatron.transformer_layer"].PackedAttention,
        "forward",
        lambda self, q, k, v, *a, **how: 2 * v.repeat(1, 1, 2, 1).flatten(2),
    )
    with pytest.raises(ModelError, match=r"its logprobs differ by .* place.mesh.layers"):
        installed(model("llama"))


def test_a_check_says_so_before_ranks_start(tmp_path):
    mesh = {"tp": 2, "sp": False, "layers": "megatron"}
    trainer = SimpleNamespace(loaded=seen("mixtral"))
    parts = SimpleNamespace(trainer=trainer, placed=SimpleNamespace(trainers={"policy": trainer}))
    [found] = check_layouts(tiny(tmp_path, place__mesh=mesh, place__kind="split"), parts)
    assert not found.ok and "experts are not cut by tp" in found.message
