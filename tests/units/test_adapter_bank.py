"""Several adapters on one base: each request reads its own, as if it were alone with a merged model."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kits.adapter_bank import FAMILIES, banked, merged, noisy
from kits.drafts import LITTLE, drafted
from kits.engine import SIZE, all_of, ask, engine, idle, plain_logits, plain_logprobs, prompt, tiny, twin
from kits.sweeps import covering
from rondel.assemble.served_engine import ServerSettings, open_engine
from rondel.core.errors import ModelError, UserError
from rondel.models.adapter_bank import AdapterBank
from rondel.models.adapter_bank_files import read_weights, save_weights
from rondel.models.adapter_rows import HEAD
from rondel.models.aligned_numerics import align_numerics
from rondel.models.load import load_model
from rondel.models.merge import merge
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.models.save import save_model


# linear layers, and those of gpt2, whose matrices lie the other way round; a head that an adapter has, and one without
@pytest.mark.slow
@pytest.mark.parametrize("kind", covering(FAMILIES, ["gpt2", "gemma2"]))
def test_each_request_reads_its_own(kind: str) -> None:
    """Greedy tokens and logprobs of four models in one batch, prompts shared, against merged modules one by one."""
    loaded, plain = banked(kind, head=kind != "gemma2")
    served = [None, *loaded.bank.served.values()]
    e = engine(loaded, max_running=12)
    asked = [
        replace(ask(prompt(7, 21) + prompt(i, 3), n=8, temperature=0.0), adapter="" if w is None else w.name)
        for i in range(3)
        for w in served
    ]
    done = asyncio.run(all_of(e, asked))
    idle(e)
    for request, completion in zip(asked, done):
        oracle = merged(plain, loaded.bank.served.get(request.adapter))
        whole = [*request.tokens, *completion.tokens]
        wanted = plain_logprobs(oracle, whole)[len(request.tokens) - 1 :]
        likeliest = plain_logits(oracle, whole)[len(request.tokens) - 1 : -1].argmax(-1)
        assert likeliest.tolist() == list(completion.tokens)
        assert list(completion.logprobs) == pytest.approx(wanted, abs=1e-4)
    assert len({tuple(c.logprobs) for c in done[:4]}) == 4, "the adapters should not all say the same"


@pytest.mark.slow
def test_cached_prefixes_are_of_one_adapter() -> None:
    loaded, _ = banked()
    e = engine(loaded)
    first = asyncio.run(e.generate(replace(ask(prompt(1, 40)), adapter="a1")))
    again = asyncio.run(e.generate(replace(ask(prompt(1, 40)), adapter="a1")))
    other = asyncio.run(e.generate(replace(ask(prompt(1, 40)), adapter="a2")))
    assert (first.cached_tokens, again.cached_tokens, other.cached_tokens) == (0, 39, 0)
    assert list(first.tokens) == list(again.tokens)


def test_scores_and_prompt_logprobs_read_the_adapter() -> None:
    loaded, plain = banked()
    e, tokens = engine(loaded), prompt(3, 30)
    wanted = plain_logprobs(merged(plain, loaded.bank.served["a2"]), tokens)
    scored = asyncio.run(e.score(replace(ask(tokens), adapter="a2")))
    told = asyncio.run(e.generate(replace(ask(tokens), adapter="a2", wants=frozenset({"prompt_logprobs"}))))
    assert scored.logprobs[1:] == pytest.approx(wanted, abs=1e-4)
    assert told.prompt_logprobs[1:] == pytest.approx(wanted, abs=1e-4)


def test_what_is_not_served_is_refused_and_a_name_means_one_thing() -> None:
    loaded, _ = banked(adapters=1)
    e = engine(loaded)
    with pytest.raises(UserError, match="serves no adapter 'b'; it serves a1"):
        asyncio.run(e.generate(replace(ask(prompt(1, 4)), adapter="b")))
    with pytest.raises(ModelError, match="served already"):
        loaded.bank.add(noisy(loaded.bank, "a1", 5))


def test_files_are_those_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    loaded, plain = banked(adapters=2, head=False)
    weights, tokens = loaded.bank.served["a2"], torch.tensor([prompt(4, 12)])
    save_weights(loaded, weights, tmp_path)
    wanted = plain_logits(merged(plain, weights), tokens[0].tolist())
    base = merged(plain, None).model
    base.set_attn_implementation("eager")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path)
    with torch.no_grad():
        assert torch.allclose(theirs(tokens, use_cache=False).logits[0].double(), wanted, atol=1e-4)
    back = read_weights(loaded, "back", tmp_path)
    assert back.scale == weights.scale and all(
        torch.equal(x, y) for name in weights.layers for x, y in zip(weights.layers[name], back.layers[name])
    )


def test_layers_of_other_ranks_and_scales_are_those_of_peft(tmp_path: Path) -> None:
    """`rank_pattern` and `alpha_pattern` of peft: read into one rank, padded with zeros."""
    peft = pytest.importorskip("peft")
    loaded, plain = banked(adapters=0)
    base = merged(plain, None).model
    base.set_attn_implementation("eager")
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj", "down_proj"],
        rank_pattern={"q_proj": 2, "layers.1.self_attn.v_proj": 6},
        alpha_pattern={"down_proj": 3},
        init_lora_weights=False,
    )
    theirs, tokens = peft.get_peft_model(base, config), torch.tensor([prompt(4, 12)])
    theirs.save_pretrained(tmp_path)
    weights = read_weights(loaded, "x", tmp_path)
    with torch.no_grad():
        wanted = theirs(tokens, use_cache=False).logits[0].double()
    assert weights.rank == 6
    assert torch.allclose(plain_logits(merged(plain, weights), tokens[0].tolist()), wanted, atol=1e-4)


@pytest.mark.slow
def test_an_adapter_on_the_head_is_merged_and_the_embeddings_stay(tmp_path: Path) -> None:
    loaded = tiny("llama", **SIZE, tie_word_embeddings=True)
    plain, bank = twin(loaded), AdapterBank(loaded)
    bank.add(noisy(bank, "a1", 1))
    save_model(plain, tmp_path / "base")
    loaded.path = loaded.model.config.name_or_path = str(tmp_path / "base")
    weights, tokens = loaded.bank.served["a1"], prompt(4, 12)
    save_weights(loaded, weights, tmp_path / "adapter")
    assert "lm_head" in weights.layers and plain.model.config.tie_word_embeddings
    assert merge(tmp_path / "adapter", tmp_path / "merged") < 1e-6
    whole = load_model(str(tmp_path / "merged"), dtype="float32")
    assert torch.allclose(plain_logits(whole, tokens), plain_logits(merged(plain, weights), tokens), atol=1e-5)
    assert torch.equal(whole.model.get_input_embeddings().weight, plain.model.get_input_embeddings().weight)


@pytest.mark.slow
def test_a_server_with_aligned_numerics_gives_the_same_bits_in_company() -> None:
    settings = ServerSettings(numerics="aligned", dtype="float32", device="cpu", threads=1, kv_pages=2000, adapters={})
    with ExitStack() as ends:
        served = open_engine({"random": "llama", **SIZE}, settings, ends)
        served.device.call(lambda: served.engine.loaded.bank.add(noisy(served.engine.loaded.bank, "a1", 1)))
        asked = [replace(ask(prompt(i, 9), key=i, n=6), adapter=name) for i in range(4) for name in ("", "a1")]
        together = asyncio.run(all_of(served.engine, asked))
        for request, done in zip(asked, together):
            alone = asyncio.run(served.engine.generate(replace(request)))
            assert (alone.tokens, alone.logprobs) == (done.tokens, done.logprobs)
    for wrong in ({"numerics": "exact"}, {"numerics": "aligned", "tp": 2}, {"ep": 2}, {"ep": 2, "tp": 4}):
        with pytest.raises(UserError, match="--ep 2 with --tp" if "ep" in wrong else "--numerics"), ExitStack() as ends:
            open_engine("nowhere", ServerSettings(**wrong), ends)


@pytest.mark.slow
def test_guesses_are_verified_with_the_adapter() -> None:
    """Greedy answers of an adapter, with a draft that knows none, are the likeliest tokens of its merged model."""
    loaded, plain = banked()
    e = drafted(loaded, tiny(**LITTLE))
    asked = [replace(ask(prompt(7, 9) * 3, n=16, temperature=0.0), adapter=f"a{i}") for i in (1, 2, 3)]
    for request, completion in zip(asked, asyncio.run(all_of(e, asked))):
        whole = [*request.tokens, *completion.tokens]
        oracle = merged(plain, loaded.bank.served[request.adapter])
        likeliest = plain_logits(oracle, whole)[len(request.tokens) - 1 : -1].argmax(-1)
        assert likeliest.tolist() == list(completion.tokens)
        assert list(completion.logprobs) == pytest.approx(
            plain_logprobs(oracle, whole)[len(request.tokens) - 1 :], abs=1e-4
        )


def test_files_that_say_more_than_lora_or_another_base_are_refused(tmp_path: Path) -> None:
    loaded, _ = banked(adapters=1)
    save_weights(loaded, loaded.bank.served["a1"], tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(ModelError, match="use_dora = True: only plain LoRA"):
        read_weights(loaded, "x", tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    other, _ = banked(adapters=0)
    with torch.no_grad():
        other.model.get_input_embeddings().weight[0, 0] += 1
    with pytest.raises(ModelError, match="with other bits"):
        read_weights(other, "x", tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    save_file(
        tensors | {"base_model.model.x.lora_magnitude_vector": torch.ones(3)}, tmp_path / "adapter_model.safetensors"
    )
    with pytest.raises(ModelError, match="no part of a plain LoRA"):
        read_weights(loaded, "x", tmp_path)
    with pytest.raises(ModelError, match="is no adapter"):
        read_weights(loaded, "x", tmp_path / "nowhere")


def test_a_base_with_an_adapter_of_its_own_carries_no_bank() -> None:
    pytest.importorskip("peft")
    from rondel.models.adapters import add_adapter

    _, plain = banked(adapters=0)
    add_adapter(plain, rank=2, alpha=4)
    with pytest.raises(ModelError, match="merge it first"):
        AdapterBank(plain)


@pytest.mark.slow
def test_aligned_numerics_have_the_same_bits_in_every_batch() -> None:
    """Alone, and among requests of other adapters; and the gradient of the exact products is that of the fast ones."""
    loaded, plain = banked(adapters=2)
    fast = AdapterBank(plain)
    align_numerics(loaded)
    tokens = torch.tensor(prompt(5, 24))
    layout = PackedLayout([PackedSegment(0, 24)], "cpu")
    found = []
    for model, bank in ((loaded, loaded.bank), (plain, fast)):
        own = noisy(bank, "a", 2)
        for tensor in own.tensors:
            tensor.requires_grad_(True)
        with bank.use([(own, 24)]):
            model.hidden_states(tokens, torch.arange(24), layout).square().mean().backward()
        found.append([tensor.grad for name, pair in own.layers.items() if name != HEAD for tensor in pair])
    for exact, quick in zip(*found, strict=True):
        torch.testing.assert_close(exact, quick, rtol=1e-4, atol=1e-6)

    e = engine(loaded, max_running=12)
    asked = [replace(ask(prompt(i, 9), n=6), adapter=name) for i in range(3) for name in ("", "a1", "a2")]
    alone = [asyncio.run(engine(loaded).generate(request)) for request in asked[:3]]
    among = asyncio.run(all_of(e, asked))
    assert [(list(a.tokens), list(a.logprobs)) for a in alone] == [
        (list(b.tokens), list(b.logprobs)) for b in among[:3]
    ]
    assert len({tuple(a.logprobs) for a in alone}) == 3
