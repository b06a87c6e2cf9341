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
from rondel.core.errors import EngineError, ModelError, UserError
from rondel.generate.engine.builtin import runner
from rondel.generate.engine.builtin.engine import BuiltinEngine
from rondel.models import paged_attention
from rondel.models.adapter_bank import AdapterBank
from rondel.models.adapter_bank_files import read_weights, save_weights
from rondel.models.adapter_rows import HEAD
from rondel.models.aligned_numerics import align_numerics
from rondel.models.load import load_model
from rondel.models.merge import merge
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.models.save import save_model


# linear layers, those of gpt2, whose matrices lie the other way round, latents, and a router that is a linear layer
# itself, which nothing is added to; a head that an adapter has, and one without
@pytest.mark.slow
@pytest.mark.parametrize("kind", covering(FAMILIES, ["gpt2", "gemma2", "deepseek_v3", "llama4_text"]))
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


@pytest.mark.parametrize("how", ["fast", "aligned", pytest.param("kernel", marks=pytest.mark.slow)])
def test_latents_are_read_with_the_adapter_of_their_request(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Keys and values of latents are made of whole contexts, or not at all: prompts in chunks, long and short ones, and
    answers, of two adapters and the base in one batch. The adapters are those of `kv_b_proj` alone.
    """
    loaded, plain = banked("minicpm3")
    if how == "aligned":
        align_numerics(loaded)
    monkeypatch.setattr(runner, "has_kernel", lambda loaded: how == "kernel")
    monkeypatch.setattr(paged_attention, "SPLITS", 2)
    lengths, drawn = [(0, 40), (21, 3), (0, 2)], 5
    if how == "kernel":  # an interpreter takes milliseconds for a program
        lengths, drawn = [(0, 7), (4, 2)], 2
    served = [None, *loaded.bank.served.values()]
    for weights in served[1:]:
        for name in [name for name in weights.layers if not name.endswith("kv_b_proj")]:
            del weights.layers[name]
    asked = [
        replace(ask(prompt(9, 21)[:first] + prompt(i, n), n=drawn), adapter="" if w is None else w.name)
        for i, (first, n) in enumerate(lengths)
        for w in served
    ]
    e = engine(loaded, max_running=12, prefill_tokens=48)
    done = asyncio.run(all_of(e, asked))
    idle(e)
    for request, told in zip(asked, done):
        oracle = merged(plain, loaded.bank.served.get(request.adapter))
        wanted = plain_logprobs(oracle, [*request.tokens, *told.tokens])[len(request.tokens) - 1 :]
        assert told.logprobs == pytest.approx(wanted, abs=1e-4)


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


def test_prompts_that_are_scored_beside_many_rows_change_nobodys_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are made for a part of a step's rows at once; a prompt's pass has adapters of its own."""
    monkeypatch.setattr(runner, "ROWS", 2)
    loaded, plain = banked()
    wants = frozenset({"prompt_logprobs"})
    asked = [
        replace(
            ask(prompt(i, 7 + i), n=3), adapter=("", "a1", "a2", "a3")[i % 4], wants=wants if i < 6 else frozenset()
        )
        for i in range(8)
    ]
    for request, told in zip(asked, asyncio.run(all_of(engine(loaded), asked))):
        weights = loaded.bank.served[request.adapter] if request.adapter else None
        whole = plain_logprobs(merged(plain, weights), [*request.tokens, *told.tokens])
        assert told.logprobs == pytest.approx(whole[-3:], abs=1e-4)
        if request.wants:
            assert told.prompt_logprobs[1:] == pytest.approx(whole[:-3], abs=1e-4)


def test_what_is_not_served_is_refused_and_a_name_means_one_thing() -> None:
    loaded, _ = banked(adapters=1)
    e = engine(loaded)
    with pytest.raises(UserError, match="serves no adapter 'b'; it serves a1"):
        asyncio.run(e.generate(replace(ask(prompt(1, 4)), adapter="b")))
    with pytest.raises(ModelError, match="served already"):
        loaded.bank.add(noisy(loaded.bank, "a1", 5))


def test_another_adapter_under_a_name_reads_nothing_that_was_cached_before() -> None:
    loaded, plain = banked(adapters=1)
    e, tokens = engine(loaded), prompt(1, 40)
    asyncio.run(e.generate(replace(ask(tokens), adapter="a1")))
    loaded.bank.remove("a1")
    loaded.bank.add(noisy(loaded.bank, "a1", 5))
    told = asyncio.run(e.generate(replace(ask(tokens), adapter="a1")))
    wanted = plain_logprobs(merged(plain, loaded.bank.served["a1"]), [*tokens, *told.tokens])[len(tokens) - 1 :]
    assert list(told.logprobs) == pytest.approx(wanted, abs=1e-4) and told.cached_tokens == 0


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


@pytest.mark.parametrize("kind", ["runs", "joined", "aligned", "drafted"])
def test_an_adapter_that_overflows_fails_alone(kind: str) -> None:
    """The base and other adapters in the same steps answer as if it were not there, at once and afterwards."""
    loaded, _ = banked(adapters=3)
    for a, b in loaded.bank.served["a2"].layers.values():
        a.fill_(3e38), b.mul_(1e30)
    if kind == "aligned":
        align_numerics(loaded)

    def served() -> BuiltinEngine:
        return drafted(loaded, tiny(**LITTLE)) if kind == "drafted" else engine(loaded)

    e, names = served(), ["", "a2", "a1"] if kind == "runs" else ["", "a2", "a1", "a3", "a2", "", "a1"]
    asked = [replace(ask(prompt(i, 9), key=i, n=6), adapter=name) for i, name in enumerate(names)]
    asked[0].wants = frozenset({"top_logprobs:3"})
    asked[1].wants = frozenset({"top_logprobs:3", "prompt_logprobs"})
    alone = {i: asyncio.run(served().generate(replace(asked[i]))) for i, n in enumerate(names) if n != "a2"}

    async def together() -> list:
        return await asyncio.gather(*(e.generate(replace(r)) for r in asked), return_exceptions=True)

    for _ in range(2):
        for i, done in enumerate(asyncio.run(together())):
            if names[i] == "a2":
                assert isinstance(done, EngineError) and "adapter 'a2' are not finite" in str(done)
            else:
                assert list(done.logprobs) == pytest.approx(list(alone[i].logprobs), abs=1e-4)
                assert len(done.tokens) == 6
        assert e.state == "serving"
        idle(e)


def test_numbers_that_are_not_finite_are_not_served(tmp_path: Path) -> None:
    loaded, _ = banked(adapters=1)
    weights = loaded.bank.served["a1"]
    next(iter(weights.layers.values()))[1][0, 0] = float("nan")
    save_weights(loaded, weights, tmp_path)
    with pytest.raises(ModelError, match=r"'b' holds numbers of .* that are not finite: its training has diverged"):
        loaded.bank.load("b", tmp_path)
    assert list(loaded.bank.served) == ["a1"]


@pytest.mark.parametrize("grammar", [None, {"regex": "[a-z]*"}])
def test_requests_beside_the_removal_of_their_adapter_break_no_step(grammar: dict | None) -> None:
    """They come while a step is computed, or while their grammar is compiled: refused, and the base goes on."""
    loaded, _ = banked(adapters=2)

    async def slowly(function, *args):
        await asyncio.sleep(0.005)
        return function(*args)

    async def go() -> None:
        e = BuiltinEngine(loaded, run=slowly, kv_pages=2000)
        base = asyncio.create_task(e.generate(ask(prompt(1, 9), n=40)))
        first = asyncio.create_task(e.generate(replace(ask(prompt(2, 9), n=40), adapter="a1")))
        await asyncio.sleep(0.03)
        late = [
            asyncio.create_task(
                e.generate(replace(ask(prompt(3, 9), n=9, ignore_eos=False, grammar=grammar), adapter="a1"))
            )
            for _ in range(3)
        ]
        await asyncio.sleep(0)
        removal = asyncio.create_task(e.remove_adapter("a1"))
        for i in range(8):
            await asyncio.sleep(0.002)
            late.append(asyncio.create_task(e.generate(replace(ask(prompt(4 + i, 9), n=9), adapter="a1"))))
        with pytest.raises(UserError, match="no adapter 'a1'"):
            await e.remove_adapter("a1")
        await removal
        assert (await first).finish_reason == "abort" and len((await base).tokens) == 40
        for done in await asyncio.gather(*late, return_exceptions=True):
            assert (
                "serves no adapter 'a1'" in str(done) if isinstance(done, Exception) else done.finish_reason == "abort"
            )
        assert e.state == "serving" and "a1" not in loaded.bank.served

    asyncio.run(go())
