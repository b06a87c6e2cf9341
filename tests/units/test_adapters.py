"""Adapters: what serves is what is trained, the base never moves, and only the
adapter travels and is stored.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kits.adapters import noise, publisher, trained
from kits.engine import SIZE, all_of, ask, engine, plain_logprobs, prompt
from kits.runs import events, final, run, run_and_die, steps, tiny
from kits.sweeps import covering
from kits.sync import update
from kits.train import awkward_groups, batch, model, row, step, trainer
from rondel.core.errors import ConfigError, EngineError, ModelError, SyncError
from rondel.models import adapter_files, adapters, names
from rondel.models.aligned_numerics import align_numerics
from rondel.models.compilation import CompiledModel
from rondel.models.load import load_model
from rondel.models.loaded_model import LoadedModel
from rondel.models.main_grad import weights_changed
from rondel.models.merge import merge
from rondel.models.save import save_model as save_model
from rondel.train.checkpoint import find_flaw, load_trainer, save_trainer

peft = pytest.importorskip("peft")
FAMILIES = {
    "llama": SIZE,
    "qwen3": SIZE | {"head_dim": 16},
    "gemma2": SIZE | {"head_dim": 16, "sliding_window": 8, "final_logit_softcapping": 6.0},
    "gpt2": dict(n_embd=64, n_layer=2, n_head=4, n_positions=512),
}


def adapted(kind: str = "llama", dtype: str = "float32", size: dict | None = None, **how) -> LoadedModel:
    loaded = load_model({"random": kind, "seed": 3, **(size or FAMILIES[kind])}, dtype=dtype)
    with torch.no_grad():
        for p in loaded.model.parameters():
            if p.dim() > 1:
                p.mul_(3)
    adapters.add_adapter(loaded, **{"rank": 4, "alpha": 8, **how})
    return noise(loaded)


def merged(loaded: LoadedModel) -> LoadedModel:
    """The oracle: a plain module in float64 whose weights are W + alpha/r · B A, by hand."""
    plain = load_model(
        {"random": loaded.model.config.model_type, "seed": 3, **FAMILIES[loaded.model.config.model_type]},
        dtype="float32",
    )
    state = {
        n.replace(".base_layer.", "."): p.detach().double()
        for n, p in loaded.model.named_parameters()
        if ".lora_" not in n
    }
    for name, layer in loaded.adapter.layers.items():
        a, b = (m["default"].weight.detach().double() for m in (layer.lora_A, layer.lora_B))
        delta = loaded.adapter.config.lora_alpha / loaded.adapter.config.r * b @ a
        state[f"{name}.weight"] = state[f"{name}.weight"] + (
            delta.T if loaded.model.config.model_type == "gpt2" else delta
        )
    plain.model.double()
    plain.model.load_state_dict(state, strict=False)
    return plain


# -- what serves is what is trained ----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype", "limit"),
    covering(
        [(kind, *how) for kind in FAMILIES for how in (("float32", 1e-5), ("bfloat16", 0.12))],
        [*((kind, "float32", 1e-5) for kind in FAMILIES), ("llama", "bfloat16", 0.12)],
    ),
)
def test_engine_and_trainer_compute_with_the_adapter(kind, dtype, limit):
    """Sampled logprobs, scores and the trainer's agree with merged float64 weights, and not with the base."""
    loaded = adapted(kind, dtype)
    e = engine(loaded, prefill_tokens=16)
    asks = [ask(prompt(g, 5 + 9 * g), key=10 * g + s, n=6) for g in range(3) for s in range(2)]
    done = asyncio.run(all_of(e, asks))
    rows = [[*a.tokens, *c.tokens] for a, c in zip(asks, done)]
    ours, oracle = trained(loaded, rows), merged(loaded)
    base = loaded.copy_trainable()
    base.adapter.off = True
    far = 0.0
    for request, c, own in zip(asks, done, ours, strict=True):
        whole = [*request.tokens, *c.tokens]
        true = plain_logprobs(oracle, whole)
        scored = asyncio.run(e.score(ask(whole))).logprobs[1:]
        new = slice(len(request.tokens) - 1, None)
        for other in (c.logprobs, own[new], scored[new]):
            assert sum(abs(x - y) for x, y in zip(other, true[new], strict=True)) / len(other) < limit
        far = max(far, max(abs(x - y) for x, y in zip(own, plain_logprobs(base, whole))))
    assert far > 0.5


@pytest.mark.slow
def test_the_forward_pass_is_that_of_peft(tmp_path):
    """Base and adapter as files, read by transformers and peft alone."""
    loaded = adapted("llama")
    plain = load_model({"random": "llama", "seed": 3, **SIZE}, dtype="float32")
    plain.model.load_state_dict(
        {n.replace(".base_layer.", "."): p for n, p in loaded.model.state_dict().items() if ".lora_" not in n},
        strict=True,
    )
    save_model(plain, tmp_path / "base")
    (tmp_path / "adapter").mkdir()
    adapter_files.save_adapter(loaded, tmp_path / "adapter")
    from transformers import AutoModelForCausalLM

    theirs = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
    ).eval()
    stored = load_file(tmp_path / "adapter" / adapter_files.WEIGHTS)
    assert stored.keys() == peft.get_peft_model_state_dict(theirs).keys()
    tokens = prompt(0, 30)
    with torch.no_grad():
        logp = theirs(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    wanted = logp.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
    assert max(abs(a - b) for a, b in zip(trained(loaded, [tokens])[0], wanted, strict=True)) < 1e-5
    config = json.loads((tmp_path / "adapter" / adapter_files.CONFIG).read_text())  # what vLLM reads of it
    assert (config["r"], config["lora_alpha"], config["bias"], config["peft_type"]) == (4, 8, "none", "LORA")
    assert (
        config["target_modules"] == sorted(config["target_modules"])
        and not config["use_dora"]
        and not config["modules_to_save"]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layers"),
    covering([("llama", "num_hidden_layers"), ("gpt2", "n_layer")], []),
)
def test_the_compiled_pass_has_it(kind, layers):
    """As over a base of four bits, in test_qlora.py."""
    loaded = noise(adapted(kind, size=FAMILIES[kind] | {layers: 1}), size=0.0)
    compiled = CompiledModel(loaded)  # made of a fresh adapter, as in a run
    for seed in range(2):
        noise(loaded, seed)
        asks = [ask(prompt(g, 5 + 9 * g), key=g, n=5) for g in range(3)]
        done = asyncio.run(all_of(engine(loaded, compiled=compiled), asks))
        for a, c in zip(asks, done):
            own = trained(loaded, [[*a.tokens, *c.tokens]])[0][-len(c.tokens) :]
            assert max(abs(x - y) for x, y in zip(c.logprobs, own, strict=True)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("dtype", covering(["float32", "bfloat16"], ["bfloat16"]))
def test_aligned_numerics_have_it_with_the_same_bits(dtype):
    loaded = adapted("llama", dtype)
    align_numerics(loaded)
    asks = [ask(prompt(g, n), key=g, n=7) for g, n in enumerate((1, 37, 90))]
    together = asyncio.run(all_of(engine(loaded, prefill_tokens=16), asks))
    for a, c in zip(asks, together):
        (alone,) = asyncio.run(all_of(engine(loaded), [a]))
        assert (alone.tokens, alone.logprobs) == (c.tokens, c.logprobs)
        assert trained(loaded, [[*a.tokens, *c.tokens]])[0][-7:] == c.logprobs


def test_the_proof_of_aligned_numerics_sees_a_fresh_adapter(monkeypatch):
    loaded = noise(adapted("llama"), size=0.0)
    seen = []
    monkeypatch.setattr("rondel.models.aligned_numerics.check_invariance", lambda of: seen.append(of.adapter.is_zero))
    align_numerics(loaded)
    assert seen == [False] and loaded.adapter.is_zero


# -- the base never moves --------------------------------------------------------------------------


def bits(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in loaded.model.named_parameters()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_moves_the_adapter_and_nothing_else(dtype):
    loaded = model("llama", dtype)
    adapters.add_adapter(loaded, rank=2, alpha=4)
    t, algo = trainer(loaded, row()), row()
    before = bits(loaded)
    for _ in range(2):  # in the first one A has no gradient yet
        assert step(t, batch(awkward_groups(), algo), algo).metrics["train/weights_changed"] > 0
    moved = {n for n, p in loaded.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n in before if ".lora_" in n} == set(t.weights.names)
    assert all(m is p and m.dtype == torch.float32 for m, p in zip(t.weights.masters, t.weights.compute))
    assert sum(m.numel() for m in t.weights.masters) == loaded.adapter.parameter_count


def test_the_reference_is_the_base_without_a_copy():
    loaded = model("llama")
    wanted = plain_logprobs(loaded, tokens := prompt(1, 20))
    adapters.add_adapter(loaded, rank=2, alpha=4)
    algo = row("grpo", kl={"coef": 0.1})
    t = trainer(loaded, algo, start_probe=8)
    assert t.start.model is loaded.model
    noise(loaded)
    ref, own = trained(t.start, [tokens])[0], trained(loaded, [tokens])[0]
    assert max(abs(a - b) for a, b in zip(ref, wanted)) < 1e-5 and max(abs(a - b) for a, b in zip(own, wanted)) > 0.5
    assert not loaded.adapter.off and step(t, batch(awkward_groups(), algo), algo).metrics["train/kl_to_start"] > 0.01


def test_an_adapter_that_is_trained_on_starts_from_itself():
    """Its reference is what it was, in an adapter of its own over the same base."""
    loaded = noise(model_adapted())
    t = trainer(loaded, row("grpo", kl={"coef": 0.1}))
    before = trained(loaded, [tokens := prompt(1, 20)])
    noise(loaded, seed=1)
    assert trained(t.start, [tokens]) == before != trained(loaded, [tokens])
    theirs, mine = dict(t.start.model.named_parameters()), dict(loaded.model.named_parameters())
    assert all((theirs[n] is mine[n]) == (".lora_" not in n) for n in mine)


def model_adapted(kind: str = "llama", **how) -> LoadedModel:
    loaded = model(kind)
    adapters.add_adapter(loaded, **{"rank": 3, "alpha": 6, **how})
    return loaded


@pytest.mark.slow
@pytest.mark.parametrize("kind", covering(["llama", "tied", "gemma3_text"], ["tied", "gemma3_text"]))
def test_the_gradient_is_that_of_the_merged_weights(kind):
    """dL/dA = s · Bᵀ G and dL/dB = s · G Aᵀ, with G the gradient of the merged weight in a
    model without an adapter; for any split (law 3).
    """
    algo, loaded = row(), noise(model_adapted(kind))
    wanted = {}
    plain = model(kind)
    mine = dict(loaded.model.named_parameters())
    with torch.no_grad():
        for name, layer in loaded.adapter.layers.items():
            plain.model.get_submodule(name).weight.add_(layer.get_delta_weight("default"))
    p = trainer(plain, algo)
    p.step_number, b = 0, batch(awkward_groups(), algo)
    _accumulate(p, b, algo)
    for name, layer in loaded.adapter.layers.items():
        g = plain.model.get_submodule(name).weight.grad.double()
        a, b_ = (m["default"].weight.detach().double() for m in (layer.lora_A, layer.lora_B))
        wanted[f"{name}.lora_A.default.weight"] = 2.0 * b_.T @ g
        wanted[f"{name}.lora_B.default.weight"] = 2.0 * g @ a.T
    for micro_tokens, share in ((10**6, True), (20, True), (1, False)):
        t = trainer(loaded, algo, micro_tokens=micro_tokens, share_prompts=share)
        t.weights.zero_grad()
        _accumulate(t, batch(awkward_groups(), algo), algo)
        for name, g in wanted.items():
            assert torch.norm(mine[name].grad.double() - g) <= 2e-5 * torch.norm(g) + 1e-9, name
            mine[name].grad = None
    assert all(p.grad is None for n, p in mine.items() if ".lora_" not in n)


def _accumulate(t, b, algo):
    from rondel.train.step_metrics import StepMetricSums

    t.weights.zero_grad()
    t._accumulate_gradients(b, algo, StepMetricSums(), proximal_noted=False)


@pytest.mark.slow
def test_a_critic_reads_the_same_base_with_an_adapter_of_its_own():
    loaded, algo = model_adapted(), row("ppo")
    t = trainer(loaded, algo, critic_lr=1e-2)
    theirs, mine = dict(t.critic.loaded.model.named_parameters()), bits(loaded)
    shared = {n for n, p in loaded.model.named_parameters() if n in theirs and theirs[n] is p}
    assert shared == {n for n in mine if ".lora_" not in n and not n.startswith("lm_head")}
    for _ in range(2):
        assert step(t, batch(awkward_groups(), algo), algo).stepped
    moved = {n for n, p in loaded.model.named_parameters() if not torch.equal(p, mine[n])}
    assert moved == {n for n in mine if ".lora_" in n}
    assert all(not torch.equal(theirs[n], dict(loaded.model.named_parameters())[n]) for n in moved)
    asyncio.run(t.sleep(())), asyncio.run(t.wake(()))
    assert step(t, batch(awkward_groups(), algo), algo).stepped


def test_a_step_packs_the_base_no_second_time():
    """On a CPU the engine's packed copies of the base outlive every step of the adapter."""
    loaded = adapted()
    packed = []
    layer = loaded.adapter.layers["model.layers.0.mlp.down_proj"].base_layer
    stack = layer.forward.func.__self__.stack
    for _ in range(2):
        trained(loaded, [prompt(0, 9)])
        packed.append(stack._packed)
        weights_changed()
    assert packed[0] is packed[1] is not None


# -- what travels ------------------------------------------------------------------------------------


def bytes_of(manifest) -> int:
    assert {t.dtype for t in manifest.tensors} == {"float32"}
    return sum(torch.Size(t.shape).numel() * 4 for t in manifest.tensors)


def test_only_the_adapter_travels():
    loaded = adapted("llama", "bfloat16", rank=4, targets=["q_proj", "v_proj"])
    manifest = names.build_manifest(loaded.model, 1)
    h = SIZE["hidden_size"]
    kv = h // SIZE["num_attention_heads"] * SIZE["num_key_value_heads"]
    assert bytes_of(manifest) == SIZE["num_hidden_layers"] * (4 * (h + h) + 4 * (h + kv)) * 4
    assert all(t.name.startswith("base_model.model.model.layers.") for t in manifest.tensors) and manifest.base


@pytest.mark.slow
def test_an_engine_with_a_base_of_its_own_gets_the_adapter():
    theirs, mine = adapted(), adapted()
    noise(mine, size=0.0)
    p, e = publisher(theirs), engine(mine)
    sync = update(p, score=lambda tokens: _scored(theirs, tokens))
    for version in (1, 2):
        noise(theirs, seed=version)
        p.version = version
        assert asyncio.run(sync(p, e)) == version
        assert (
            e.arrivals.bytes_copied
            == bytes_of(names.build_manifest(mine.model, 0))
            == 4 * theirs.adapter.parameter_count
        )
        assert trained(mine, [prompt(1, 20)]) == trained(theirs, [prompt(1, 20)])


async def _scored(loaded, tokens):
    return [0.0, *trained(loaded, [tokens])[0]]


def test_an_adapter_of_another_base_is_refused():
    theirs, mine = adapted(), adapted()
    with torch.no_grad():
        mine.model.model.norm.weight[0] += 1e-3
    e = engine(mine)
    with pytest.raises(SyncError, match="another base"):
        asyncio.run(update(publisher(theirs), score=lambda tokens: _scored(theirs, tokens))(publisher(theirs), e))
    with pytest.raises(EngineError, match="refuses"):
        asyncio.run(e.generate(ask(prompt(0, 5))))


def test_the_digest_of_the_base_is_taken_once(monkeypatch):
    loaded = adapted()
    counted, plain = [], names.tensor_digest
    monkeypatch.setattr(names, "tensor_digest", lambda t: counted.append(t) or plain(t))
    first = names.build_manifest(loaded.model, 0)
    whole, travels = len(counted), len(first.tensors)
    assert whole == len(list(loaded.model.parameters()))
    assert names.build_manifest(loaded.model, 1).base == first.base and len(counted) == whole + travels
    with torch.no_grad():
        loaded.model.model.norm.weight[0] += 1
    assert names.build_manifest(loaded.model, 2).base != first.base


# -- files ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype", "lost"),
    covering(
        [(kind, *how) for kind in ("llama", "gpt2") for how in (("float32", 1e-6), ("bfloat16", 0.2))],
        [("llama", "bfloat16", 0.2), ("gpt2", "float32", 1e-6)],
    ),
)
def test_merged_weights_give_the_same_logits(tmp_path, kind, dtype, lost):
    loaded = noise(adapted_from(kind))
    (tmp_path / "adapter").mkdir()
    adapter_files.save_adapter(loaded, tmp_path / "adapter")
    assert merge(tmp_path / "adapter", tmp_path / "merged", dtype=dtype) < lost
    whole, tokens = load_model(str(tmp_path / "merged"), dtype="float32"), prompt(2, 40)
    assert whole.adapter is None and not (tmp_path / "merged" / adapter_files.CONFIG).exists()
    apart = max(abs(a - b) for a, b in zip(trained(whole, [tokens])[0], trained(loaded, [tokens])[0], strict=True))
    assert apart < (1e-5 if dtype == "float32" else 0.1)


def adapted_from(kind: str) -> LoadedModel:
    """A random base that `load` finds again."""
    loaded = load_model({"random": kind, "seed": 3, **FAMILIES[kind]}, dtype="float32")
    adapters.add_adapter(loaded, rank=4, alpha=8)
    return loaded


@pytest.mark.slow
def test_a_checkpoint_is_the_adapter_alone_and_resumes_to_the_same_bits(tmp_path):
    algo = row("ppo")
    t = trainer(adapted_from("llama"), algo)
    (tmp_path / "c").mkdir()
    for _ in range(2):
        step(t, batch(awkward_groups(), algo), algo)
    save_trainer(t, tmp_path / "c")
    stored = load_file(tmp_path / "c" / adapter_files.WEIGHTS)
    assert (
        sum(x.numel() for x in stored.values()) == t.loaded.adapter.parameter_count
        and not (tmp_path / "c" / "model.safetensors").exists()
    )
    assert not any(key.startswith("master.") for key in load_file(tmp_path / "c" / "optimizer.safetensors"))
    other = trainer(adapted_from("llama"), algo)
    load_trainer(other, tmp_path / "c")
    again = load_model(str(tmp_path / "c"), dtype="float32")
    tokens = prompt(3, 25)
    assert trained(again, [tokens]) == trained(other.loaded, [tokens]) == trained(t.loaded, [tokens])
    for x in (t, other):
        step(x, batch(awkward_groups(1), algo), algo)
    for mine, theirs in ((t.weights, other.weights), (t.critic.weights, other.critic.weights)):
        assert all(torch.equal(a, b) for a, b in zip(mine.masters, theirs.masters))


@pytest.mark.slow
def test_files_that_do_not_fit_are_refused(tmp_path):
    loaded = noise(adapted_from("llama"))
    (tmp_path / "a").mkdir()
    adapter_files.save_adapter(loaded, tmp_path / "a")

    def refused(match: str, other: LoadedModel, error: type[Exception] = ModelError) -> None:
        with pytest.raises(error, match=match):
            adapter_files.read_adapter(other, tmp_path / "a")

    wide = load_model({"random": "llama", "seed": 3, **SIZE}, dtype="float32")
    adapters.add_adapter(wide, rank=8, alpha=16)
    refused("28 tensors differ", wide)
    loud = load_model({"random": "llama", "seed": 3, **SIZE}, dtype="float32")
    adapters.add_adapter(loud, rank=4, alpha=9)
    refused("alpha/r = 2", loud)
    stranger = load_model({"random": "llama", "seed": 4, **SIZE}, dtype="float32")
    adapters.add_adapter(stranger, rank=4, alpha=8)
    refused("other bits than the base", stranger)
    with pytest.raises(ModelError, match="has an adapter already"):
        adapters.attach_adapter(loaded, tmp_path / "a")
    config = json.loads((tmp_path / "a" / adapter_files.CONFIG).read_text())
    (tmp_path / "a" / adapter_files.CONFIG).write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(ModelError, match="only plain LoRA"):
        load_model(str(tmp_path / "a"))
    (tmp_path / "a" / adapter_files.BASE).unlink()
    with pytest.raises(ModelError, match="base_model_name_or_path"):
        load_model(str(tmp_path / "a"))


# -- what cannot be ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "targets, match",
    [
        (["q_prj"], "'q_prj' is no linear layer.*Did you mean 'q_proj'"),
        (["lm_head"], "'lm_head' is no linear layer"),
        (["embed_tokens"], "'embed_tokens' is no linear layer"),
        ([], "nothing would be trained"),
    ],
)
def test_targets_that_match_nothing_are_refused(targets, match):
    loaded = load_model({"random": "llama", **SIZE})
    with pytest.raises(ConfigError, match=match):
        adapters.add_adapter(loaded, rank=4, alpha=8, targets=targets)
    assert loaded.adapter is None


def test_a_mixture_of_experts_is_adapted_by_name_only():
    loaded = load_model({"random": "mixtral", **SIZE, "num_local_experts": 4}, dtype="float32")
    with pytest.raises(ConfigError, match=r"mixture of experts.*targets = \['k_proj'"):
        adapters.add_adapter(loaded, rank=4, alpha=8)
    with pytest.raises(ConfigError, match="'gate_up_proj' is no linear layer"):
        adapters.add_adapter(loaded, rank=4, alpha=8, targets=["gate_up_proj"])
    adapters.add_adapter(loaded, rank=4, alpha=8, targets=["q_proj", "o_proj"])
    assert len(loaded.adapter.layers) == 2 * SIZE["num_hidden_layers"]


def test_a_model_that_reads_a_layer_past_its_adapter_is_refused():
    loaded = load_model({"random": "llama", **SIZE}, dtype="float32")
    mlp = loaded.model.model.layers[1].mlp
    mlp.forward = lambda x: torch.nn.functional.linear(x, mlp.gate_proj.weight)[..., : SIZE["hidden_size"]]
    with pytest.raises(ModelError, match=r"3 adapted layers .* first model.layers.1.mlp.down_proj"):
        adapters.add_adapter(loaded, rank=4, alpha=8)


RECIPES = {
    "rank = 0": ({"kind": "lora", "rank": 0}, "rank = 0: input should be greater than or equal to 1"),
    "kind": ({"kind": "dora"}, "kind = 'dora': input should be 'off', 'lora' or 'qlora'"),
    "dropout": (
        {"kind": "lora", "dropout": 0.1},
        "'model.adapter.dropout' is no key any more; in its place stands nothing: with dropout",
    ),
    "one name": ({"kind": "lora", "targets": "q_proj"}, "a list of names"),
    "no kind": ({"rank": 8}, "rank has no effect without a kind"),
    "typo": ({"kind": "lora", "rnk": 8}, "unknown key 'model.adapter.rnk'.*rank"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_that_cannot_be_are_refused_by_name(tmp_path, name):
    section, match = RECIPES[name]
    with pytest.raises(ConfigError, match=match):
        tiny(tmp_path, model__adapter=section)


# -- whole runs ----------------------------------------------------------------------------------------

LORA = {
    "model__adapter": {"kind": "lora", "rank": 4, "alpha": 8}, "model__dtype": "bfloat16", "trainer__lr": 1e-2,
    "loop__warmup__steps": 3, "loop__steps": 5,
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(folder, **LORA)
    return folder


@pytest.mark.slow
def test_a_run_trains_publishes_and_stores_the_adapter_alone(whole):
    newest = sorted((whole / "checkpoints").glob("step-*"))[-1]
    assert find_flaw(newest) is None and adapter_files.is_adapter(newest)
    assert not (newest / "model.safetensors").exists()
    done = events(whole, "StepDone")
    assert all(e["metrics"]["train/gap_mean"] < 0.05 for e in done if "train/gap_mean" in e["metrics"])
    assert len({e["root"] for e in events(whole, "Synced")}) > 5
    assert "numbers are trained" in (whole / "card.md").read_text()


@pytest.mark.slow
@pytest.mark.sweep  # law 9 kills a run that has this among others
def test_a_killed_run_ends_with_the_same_bits(whole, tmp_path):
    assert run_and_die(tmp_path / "run", ("StepDone", 5), **LORA) == -9
    run(tmp_path / "run", **LORA)
    ours, theirs = final(tmp_path / "run"), final(whole)
    assert ours.keys() == theirs.keys() and [n for n in ours if not torch.equal(ours[n], theirs[n])] == []
    assert steps(tmp_path / "run") == steps(whole)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", covering(["local", "process"], ["process"]))
def test_engine_and_trainer_apart_make_the_same_run(whole, tmp_path, cluster):
    """Law 2: each side adapts a base of its own, and the adapter travels."""
    run(tmp_path / "run", **LORA, place__kind="split", place__cluster=cluster, place__threads=1)
    ours, theirs = final(tmp_path / "run"), final(whole)
    assert [n for n in ours if not torch.equal(ours[n], theirs[n])] == []
    newest = sorted((whole / "checkpoints").glob("step-*"))[-1]
    sent = sum(t.numel() * 4 for t in load_file(newest / adapter_files.WEIGHTS).values())
    assert {e["bytes_copied"] for e in events(tmp_path / "run", "Synced")} == {sent}


@pytest.mark.slow
@pytest.mark.sweep  # tests/e2e/test_ranks.py: two ranks have the adapter's gradient of one, store it and publish it
def test_two_ranks_train_and_publish_the_adapter_of_one(whole, tmp_path):
    run(tmp_path / "run", **LORA | {"loop__steps": 2}, place__kind="split", place__ranks=2, place__threads=1)
    sizes = load_file(sorted((whole / "checkpoints").glob("step-*"))[-1] / adapter_files.WEIGHTS).values()
    assert {e["bytes_copied"] for e in events(tmp_path / "run", "Synced")} == {sum(t.numel() * 4 for t in sizes)}
    # later a token may fall otherwise
    for two, one in zip(events(tmp_path / "run", "StepDone")[:3], events(whole, "StepDone")):
        assert two["metrics"]["train/loss"] == pytest.approx(one["metrics"]["train/loss"], rel=0.02)


@pytest.mark.slow
def test_eval_of_its_checkpoint_is_the_number_of_the_run(whole):
    from rondel.driver.checkpoint_evaluation import evaluate_checkpoint

    last = events(whole, "Evaluated")[-1]
    for target in (whole, sorted((whole / "checkpoints").glob("step-*"))[-1]):
        found = evaluate_checkpoint(str(target), None, {})
        assert (found.score, found.n) == (last["score"], last["n"])
        assert [s["text"] for s in found.samples] == [s["text"] for s in last["samples"]]


@pytest.mark.slow
def test_a_served_adapter_takes_the_next_one_from_disk(whole):
    from rondel.generate.engine.builtin import staged_update

    first, second = sorted((whole / "checkpoints").glob("step-*"))[-2:]
    mine, theirs = (load_model(str(folder), dtype="bfloat16") for folder in (first, second))
    tokens, e = prompt(0, 12), engine(mine)
    assert trained(mine, [tokens]) != trained(theirs, [tokens])

    async def inline(f, *args):
        return f(*args)

    assert (
        asyncio.run(staged_update.apply_update(e, inline, staged_update.from_disk, str(second), version=1, keep=False))
        == 1
    )
    assert trained(mine, [tokens]) == trained(theirs, [tokens])
    plain = engine(load_model(mine.path, dtype="bfloat16"))
    with pytest.raises(SyncError, match="the model that serves has none"):
        asyncio.run(
            staged_update.apply_update(plain, inline, staged_update.from_disk, str(second), version=1, keep=False)
        )
