"""Latent attention: what the cache holds, and that absorbed and expanded attention are one, on every path of the engine."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from kits.engine import all_of, ask, engine, idle, prompt, publish_in_place, tiny, watched
from kits.families import FAMILIES, model
from kits.sweeps import covering
from rondel.core.errors import ModelError
from rondel.generate.engine.builtin.draft import DraftModel
from rondel.generate.engine.builtin.speculative import SpeculativeDecoder
from rondel.models import latent_attention
from rondel.models.adapters import add_adapter
from rondel.models.aligned_numerics import align_numerics
from rondel.models.compilation import CompiledModel
from rondel.models.key_choice import ALL
from rondel.models.latent_attention import UpProjection, check_up_projections
from rondel.models.load import load_model
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.planner.shapes import model_shape

KINDS = [kind for kind, config in FAMILIES.items() if "kv_lora_rank" in config]
AT_ONCE = ("deepseek_v3", "youtu")
# latents alone, beside states, beside a choice of keys
SOME_AT_ONCE = covering(KINDS, ["deepseek_v3", "bailing_hybrid", "dots3_note_text"], fast=AT_ONCE)


def requests(count=4, n=12, **sampling):
    """Siblings behind one prompt, and a prompt of its own length for every other one."""
    return [ask(prompt(i // 2, 21 + 9 * (i // 2)), key=i, n=n, **sampling) for i in range(count)]


def answers(e, asked):
    done = asyncio.run(all_of(e, asked))
    idle(e)
    return done


@torch.no_grad()
def packed_logprobs(loaded, given, drawn):
    """[len(drawn)] as the trainer computes them: keys and values expanded."""
    tokens = torch.tensor(given + drawn)
    layout = PackedLayout([PackedSegment(0, len(tokens))])
    logp = loaded.head.logits(loaded.hidden_states(tokens, torch.arange(len(tokens)), layout)).log_softmax(-1)
    return logp[len(given) - 1 : -1].gather(1, tokens[len(given) :, None])[:, 0]


def gap_to_trainer(loaded, asked, done):
    return max(
        float((packed_logprobs(loaded, r.tokens, c.tokens) - torch.tensor(c.logprobs)).abs().max())
        for r, c in zip(asked, done, strict=True)
    )


@pytest.mark.parametrize("kind", SOME_AT_ONCE)
def test_a_token_takes_its_latents_and_nothing_else(kind):
    loaded = model(kind)
    e = engine(loaded, kv_pages=100)
    answers(e, requests(2))
    modules = [m for m in loaded.model.modules() if hasattr(m, "up_projection")]
    keys = [i.head_dim for m in modules if (i := getattr(m, "indexer", None)) is not None]
    wanted = sum(m.kv_lora_rank + m.qk_rope_head_dim for m in modules) + sum(keys)
    assert modules and loaded.cached == 4 * wanted == e.pages.keys.pool_bytes / 101
    assert e.pages.values.pool_bytes == 0
    whole = sum(m.num_heads * (m.qk_nope_head_dim + m.qk_rope_head_dim + m.v_head_dim) for m in modules)
    assert wanted < whole / 3


@pytest.mark.parametrize(
    ("kind", "expands"),
    covering(
        product(KINDS, [True, False]),
        [("deepseek_v3", True), ("deepseek_v3", False), ("bailing_hybrid", True), ("dots3_note_text", False)],
        fast=[*product(AT_ONCE, [True, False])],
    ),
)
def test_prompts_may_be_expanded_or_absorbed(kind, expands, monkeypatch):
    """In chunks behind what is cached, with siblings and rows of guesses: the logprobs are the trainer's."""
    monkeypatch.setattr(UpProjection, "expansion_pays", lambda self, new: expands)
    loaded, asked = model(kind), requests(n=8)
    if loaded.routers:
        asked = [replace(r, wants=frozenset({"experts"})) for r in asked]
    speculation = None if loaded.state_bytes else SpeculativeDecoder(3, always=True)
    e = watched(engine(loaded, prefill_tokens=8, routes=bool(loaded.routers), speculation=speculation))
    assert gap_to_trainer(loaded, asked, answers(e, asked)) <= 1e-4


@pytest.mark.parametrize("kind", SOME_AT_ONCE)
def test_training_is_that_of_keys_and_values_bit_for_bit(kind):
    """Under a packed layout with latents, and with the modules as transformers has them: hidden states and gradients."""
    loaded, tokens, grads = model(kind), torch.tensor(prompt(5, 40)), []
    at = torch.cat([torch.arange(10), torch.arange(10, 25), torch.arange(10, 25)])
    for which in (loaded, without_latents(loaded)):
        layout = PackedLayout([PackedSegment(0, 10), PackedSegment(10, 15, 0), PackedSegment(25, 15, 0)])
        named = [p for p in which.model.parameters() if p.requires_grad]
        with torch.enable_grad():
            hidden = which.hidden_states(tokens, at, layout)
            weighted = (hidden * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2))).sum()
            grads.append([hidden, *torch.autograd.grad(weighted, named, allow_unused=True)])
    for a, b in zip(*grads, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))


def without_latents(loaded):
    other = copy.deepcopy(loaded)
    for m in other.model.modules():
        if hasattr(m, "up_projection"):
            del m.up_projection, m.expand_kv
    return other


def test_a_text_is_scored_as_the_trainer_scores_it():
    loaded, tokens = model("deepseek_v3"), prompt(3, 40)
    scored = asyncio.run(engine(loaded).score(ask(tokens))).logprobs
    assert float((packed_logprobs(loaded, tokens[:1], tokens[1:]) - torch.tensor(scored[1:])).abs().max()) <= 1e-5


def test_expansion_pays_where_it_saves_multiplications():
    sizes = dict(kv_lora_rank=512, qk_nope_head_dim=128, v_head_dim=128)
    up = UpProjection(SimpleNamespace(**sizes))
    for new in (1, 170, 171, 4096):
        expanded, absorbed = 512 * 256 + new * 256, new * 1024
        assert up.expansion_pays(new) == (expanded <= absorbed) == (new >= 171)
    assert not UpProjection(SimpleNamespace(**sizes | {"kv_lora_rank": 96})).expansion_pays(1 << 20)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"kv_pages": 60}, {"max_running": 2}, {"prefill_tokens": 4}], ids=str)
def test_retracted_and_continued_requests_answer_alike(how):
    loaded, asked = model("youtu"), requests(6, 12)
    done, plain = answers(watched(engine(loaded, **how)), asked), answers(engine(loaded), asked)
    for a, b in zip(done, plain, strict=True):
        assert a.tokens == b.tokens
        torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=1e-4, rtol=0)


@pytest.mark.slow
def test_a_parked_request_goes_on_under_new_weights():
    loaded, asked = copy.deepcopy(model("youtu")), requests(4, 20)
    from rondel.sync.from_tensor import FromTensor

    e = watched(engine(loaded, transports={"tensor": FromTensor()}))

    async def main():
        work = asyncio.create_task(all_of(e, asked))
        while not e.scheduler.decoded:
            await asyncio.sleep(0)
        await e.pause("hold")
        await e.sleep(("kv_cache",))
        with torch.no_grad():
            for m in loaded.model.modules():
                if hasattr(m, "up_projection"):
                    m.kv_b_proj.weight.mul_(0.5)
        await e.wake(("kv_cache",))
        await publish_in_place(e, e.version + 1)
        await e.resume()
        return await work

    for request, done in zip(asked, asyncio.run(main()), strict=True):
        assert sorted(set(done.versions)) == [0, 1]
        first = done.versions.index(1)
        wanted = packed_logprobs(loaded, request.tokens, done.tokens)[first:]
        assert float((wanted - torch.tensor(done.logprobs[first:])).abs().max()) <= 1e-4
    idle(e)


def test_a_draft_model_has_latents_of_its_own():
    loaded, asked = model("youtu"), requests()
    e = watched(engine(loaded, speculation=SpeculativeDecoder(3, DraftModel(loaded), always=True)))
    assert gap_to_trainer(loaded, asked, answers(e, asked)) <= 1e-4 and e.speculation.accepted > 5


@pytest.mark.slow
@pytest.mark.parametrize("dtype, most", covering([("float32", 1e-5), ("bfloat16", 0.1)], [("float32", 1e-5)]))
def test_an_adapter_of_the_up_projection_is_served_as_it_is_trained(dtype, most):
    loaded = load_model({"random": "youtu", "seed": 3, **FAMILIES["youtu"]}, dtype=dtype)
    asked = requests()
    plain = answers(engine(loaded), asked)
    add_adapter(loaded, rank=4, alpha=64, targets=["kv_b_proj"])
    with loaded.randomized_adapter():
        done = answers(engine(loaded), asked)
        assert gap_to_trainer(loaded, asked, done) <= most
        assert any(a.logprobs != b.logprobs for a, b in zip(done, plain, strict=True)), "the adapter changes nothing"
        loaded.bare = True
        bare = answers(engine(loaded), asked)
    assert [c.logprobs for c in bare] == [c.logprobs for c in plain]


@pytest.mark.slow
def test_a_base_in_four_bits_is_absorbed():
    pytest.importorskip("bitsandbytes")
    loaded = load_model({"random": "youtu", "seed": 3, **FAMILIES["youtu"]}, dtype="float32", four_bits=True)
    add_adapter(loaded, rank=4, alpha=64, targets=["kv_b_proj", "o_proj"])
    with loaded.randomized_adapter():
        assert gap_to_trainer(loaded, requests(), answers(engine(loaded), requests())) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype"),
    covering(
        [(kind, dtype) for kind in ("youtu", "minicpm3") for dtype in ("float32", "bfloat16")],
        [("youtu", "bfloat16")],
    ),
)
def test_aligned_numerics_have_the_trainers_bits(kind, dtype):
    loaded = load_model({"random": kind, "seed": 3, **FAMILIES[kind]}, dtype=dtype)
    align_numerics(loaded)
    asked, told = requests(), []
    for how in ({}, {"prefill_tokens": 8}, {"kv_pages": 80}):
        done = answers(engine(loaded, **how), asked)
        assert gap_to_trainer(loaded, asked, done) <= 1e-6
        told.append([c.logprobs for c in done])
    assert told[0] == told[1]


@pytest.mark.slow
@pytest.mark.sweep  # a compiled pass is in tests/units/test_compiled.py
def test_the_compiled_pass_reads_latents_and_live_weights():
    loaded, asked = tiny("youtu", **FAMILIES["youtu"] | {"num_hidden_layers": 1}), requests()
    e = engine(loaded, compiled=CompiledModel(loaded), prefill_tokens=16)
    for _ in range(2):
        assert gap_to_trainer(loaded, asked, answers(e, asked)) <= 1e-4
        with torch.no_grad():
            for m in loaded.model.modules():
                if hasattr(m, "up_projection"):
                    m.kv_b_proj.weight.mul_(0.5)
        e.scheduler.drop_cache(e.version)


def test_indexers_choose_among_latents():
    """The keys that were chosen are those of a record, which the trainer repeats."""
    loaded = model("deepseek_v32")
    asked = [replace(r, wants=frozenset({"experts"})) for r in requests(2)]
    for request, done in zip(asked, answers(engine(loaded, routes=True), asked), strict=True):
        tape = loaded.routing_tape(torch.from_numpy(done.experts).long())
        assert any(int((keys != ALL).sum()) for keys in (tape.select_keys(0, torch.zeros(len(done.experts), 8)),))
        assert gap_to_trainer(loaded, [request], [done]) <= 1e-4


def test_a_matrix_of_another_order_is_noticed_at_load(monkeypatch):
    def values_first(self, module):
        init(self, module)
        self.nope, self.value = self.value, self.nope

    init = UpProjection.__init__
    monkeypatch.setattr(latent_attention.UpProjection, "__init__", values_first)
    with pytest.raises((ModelError, RuntimeError)):
        load_model({"random": "youtu", "seed": 3, **FAMILIES["youtu"]}, dtype="float32")
    monkeypatch.undo()
    loaded = copy.deepcopy(model("youtu"))
    ups = [m.up_projection for m in loaded.model.modules() if hasattr(m, "up_projection")]
    assert all(up.module in list(loaded.model.modules()) for up in ups), "a copy absorbs weights of its own"
    own = type(ups[0].module).expand_kv
    monkeypatch.setattr(type(ups[0].module), "expand_kv", lambda *given: tuple(x.flip(1) for x in own(*given)))
    with pytest.raises(ModelError, match="its latent attention is not carried"):
        check_up_projections(loaded.model, "it", ups)


def test_a_real_model_is_billed_at_what_its_paper_says():
    """DeepSeek-V3: 61 layers of 512 + 64 numbers."""
    v3 = model_shape("deepseek-v3")
    assert v3.kv_bytes(2) == 70_272 and v3.trained_kv_bytes(2) == 4_997_120
