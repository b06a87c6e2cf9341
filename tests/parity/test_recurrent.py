"""Recurrent layers keep the laws of attention: what packing shares, what a cache finds and who is beside a sample change
nothing.
"""

from __future__ import annotations

import asyncio
import copy
import math
import re
from itertools import product
from pathlib import Path

import pytest
import torch

from kits.engine import all_of, ask, engine, idle, prompt, watched
from kits.families import FAMILIES, RECURRENT_FAMILIES, STATES, model, run_tiny_recipe
from kits.sweeps import covering
from kits.sync import Publisher, updater, wrote
from kits.token_log import asked, dies, serving
from kits.train import apart, awkward_groups, batch, gradient, row, trainer
from rondel.core.errors import ConfigError, ModelError
from rondel.generate.engine.builtin.speculative import SpeculativeDecoder
from rondel.models.aligned_numerics import align_numerics
from rondel.models.compilation import CompiledModel
from rondel.models.load import load_model
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.models.recurrent.gated_delta import GatedDelta
from rondel.planner.resolve import state_slots
from rondel.planner.shapes import model_shape
from rondel.train.annotate import forward
from rondel.train.pack import micro_batches


def copy_of(kind):
    return copy.deepcopy(model(kind))


TAILS = (9, 1, 30)
# one of each mixer, of layers that have nothing else and of layers that attend, too: what the scheduler does with a
# state depends on nothing else of a family
ONE_OF_EACH = [
    "bamba",
    "deepseek_v4",
    "falcon_h1",
    "kimi_linear",
    "lfm2",
    "mamba",
    "minimax",
    "qwen3_5_text",
    "qwen4_exp_text",
    "recurrent_gemma",
    "rwkv",
    "xlstm",
    "zamba",
    "zamba2",
    "zaya",
]
# one with convolutions alone and one with a state in the fast tests
# windows alone, states beside attention, states alone, compressed keys
KEPT = ["deepseek_v4", "lfm2", "mamba", "qwen3_5_text"]
# how a mixer carries its state through a tree and over cuts is in tests/units/test_recurrences.py and, against transformers,
# in test_families.py; here: scans, and layers that run several times
SCANS = [*KEPT, "bamba", "rwkv", "zamba"]
AT_ONCE = ("lfm2", "qwen3_5_text")


def rows_of(shared, tails):
    """A tree of three levels: a stranger, a prompt, its answers, and what follows the last of them."""
    segments = [PackedSegment(0, 7)]
    rows, first = [prompt(99, 7), shared], [0, 0]
    segments.append(PackedSegment(7, len(shared)))
    for tail in tails:
        segments.append(PackedSegment(sum(map(len, rows)), len(tail), 1))
        rows.append(tail)
        first.append(len(shared))
    turn = prompt(55, 11)
    segments.append(PackedSegment(sum(map(len, rows)), len(turn), len(rows) - 1))
    rows.append(turn)
    first.append(len(shared) + len(tails[-1]))
    return rows, first, segments


def logits_of(loaded, rows, first, segments):
    tokens = torch.tensor([t for row in rows for t in row])
    positions = torch.cat([torch.arange(at, at + len(row)) for at, row in zip(first, rows)])
    hidden = loaded.hidden_states(tokens, positions, PackedLayout(segments))
    return loaded.head.logits(hidden).log_softmax(-1).split([len(row) for row in rows])


def alone(loaded, row):
    return logits_of(loaded, [row], [0], [PackedSegment(0, len(row))])[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", covering(RECURRENT_FAMILIES, SCANS, fast=AT_ONCE))
def test_a_shared_prompt_has_the_gradient_of_unshared_samples(kind):
    """One backward pass through the tree against a sum of passes over whole samples."""
    loaded, shared, tails = model(kind), prompt(7, 70), [prompt(20 + n, n) for n in TAILS]
    rows, first, segments = rows_of(shared, tails)
    whole = [rows[0], *(shared + tail for tail in tails[:-1]), shared + tails[-1] + rows[-1]]
    weight = torch.Generator().manual_seed(1)
    named = [(name, p) for name, p in loaded.model.named_parameters() if p.requires_grad]
    with torch.enable_grad():
        packed = logits_of(loaded, rows, first, segments)
        wanted = [torch.randn(x.shape, generator=weight) for x in packed]
        ours = torch.autograd.grad(
            sum((x * w).sum() for x, w in zip(packed, wanted)), [p for _, p in named], allow_unused=True
        )
        plain = [alone(loaded, row) for row in whole]
        n = len(shared)
        # the prompt is counted once: in the sample that comes first
        parts = [plain[0], plain[1][:n], *(x[n : n + len(t)] for x, t in zip(plain[1:], tails)), plain[-1][-11:]]
        theirs = torch.autograd.grad(
            sum((x * w).sum() for x, w in zip(parts, wanted)), [p for _, p in named], allow_unused=True
        )
    assert max(float((a - b).detach().abs().max()) for a, b in zip(packed, parts)) <= 1e-4
    assert [a is None for a in ours] == [b is None for b in theirs]
    pairs = [(a, b) for a, b in zip(ours, theirs) if a is not None and b is not None]
    whole_norm = math.sqrt(sum(float(b.norm()) ** 2 for _, b in pairs))
    worst = math.sqrt(sum(float((a - b).norm()) ** 2 for a, b in pairs)) / whole_norm
    assert worst <= 1e-5
    # what is a small difference of large sums (a decay's bias) is exact to what fp32 makes of the whole
    assert all(float((a - b).norm()) <= 1e-5 * float(b.norm()) + 1e-6 * whole_norm for a, b in pairs)
    print(f"GRADIENT {kind}: {worst:.1e}")


@pytest.mark.parametrize("kind", covering(RECURRENT_FAMILIES, KEPT, fast=ONE_OF_EACH))
@torch.no_grad()
def test_neighbours_change_nothing(kind):
    """A sample of the pack is what it is with other samples beside it, however long or short they are."""
    loaded, mine = model(kind), prompt(3, 23)
    own = alone(loaded, mine)
    for others in ([5], [90, 1], [23, 22, 12, 60]):
        rows = [mine, *(prompt(40 + n, n) for n in others)]
        starts = [sum(map(len, rows[:i])) for i in range(len(rows))]
        segments = [PackedSegment(at, len(row)) for at, row in zip(starts, rows)]
        assert float((logits_of(loaded, rows, [0] * len(rows), segments)[0] - own).abs().max()) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", covering(RECURRENT_FAMILIES, [*KEPT, "zamba"], fast=AT_ONCE))
def test_a_cached_prompt_answers_as_a_cold_one(kind):
    """Siblings share the state behind their prompt; a second turn continues the state of the first answer."""
    loaded, shared = model(kind), prompt(7, 40)
    e = watched(engine(loaded, prefill_tokens=16))
    asked = [ask(shared, key=i, n=n) for i, n in enumerate((5, 3, 4))]
    done = asyncio.run(all_of(e, asked))
    idle(e)
    assert [c.cached_tokens for c in done] == [0, 39, 39]
    turn = shared + done[0].tokens + prompt(8, 9)
    again = asyncio.run(all_of(e, [ask(turn, key=9, n=4)]))[0]
    assert again.cached_tokens == len(shared) + 4
    idle(e)
    cold = asyncio.run(engine(loaded).generate(ask(turn, key=9, n=4)))
    assert cold.tokens == again.tokens
    assert max(abs(a - b) for a, b in zip(cold.logprobs, again.logprobs)) <= 1e-5
    for request, warm in [*zip(asked, done), (ask(turn, key=9, n=4), again)]:
        with torch.no_grad():
            logp = alone(loaded, request.tokens + warm.tokens)
        for i, (token, logprob) in enumerate(zip(warm.tokens, warm.logprobs)):
            assert abs(float(logp[len(request.tokens) + i - 1, token]) - logprob) <= 1e-5


def test_each_way_to_keep_a_state_is_among_those_of_one_each():
    lines = (Path(__file__).parents[2] / "docs" / "families.md").read_text(encoding="utf-8").splitlines()
    notes = "".join(line for line in lines if line.startswith("| `") and line.split("`")[1] in ONE_OF_EACH)
    assert set(ONE_OF_EACH) <= set(RECURRENT_FAMILIES) and all(note in notes for note in STATES.values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", covering(ONE_OF_EACH, KEPT))
def test_retraction_parking_and_abort_change_no_answer(kind):
    """Too few pages for all, a pause in the middle, one request taken away: the others write what they write where
    there is room.
    """
    loaded = model(kind)
    asked = [ask(prompt(60 + i, 20), key=i, n=12) for i in range(5)]
    undisturbed = asyncio.run(all_of(engine(loaded), asked))
    e = watched(engine(loaded, kv_pages=80, prefill_tokens=16))

    async def run():
        tasks = [asyncio.ensure_future(e.generate(r)) for r in asked]
        for _ in range(30):
            await asyncio.sleep(0)
        await e.pause("hold")
        await e.resume()
        await asyncio.sleep(0)
        assert await e.abort(lambda request: request.key == 2) == 1
        return await asyncio.gather(*tasks)

    done = asyncio.run(run())
    idle(e)
    assert e.scheduler.retracted and done[2].finish_reason == "abort"
    for one, other in zip(undisturbed, done):
        n = len(other.tokens)
        assert one.tokens[:n] == other.tokens
        # the exponential gates of xlstm enlarge last bits: 1.07e-5 was seen on a processor without AVX-512
        most = 2e-5 if kind == "xlstm" else 1e-5
        assert max((abs(a - b) for a, b in zip(one.logprobs, other.logprobs)), default=0) <= most


@pytest.mark.slow
@pytest.mark.parametrize("kind", covering(ONE_OF_EACH, KEPT))
def test_snapshots_are_few_and_none_is_lost(kind):
    """More prompts than snapshots: the oldest states go, their prompts are computed again, and slots add up."""
    loaded = model(kind)
    e = watched(engine(loaded, max_running=2, prefill_tokens=64))
    given = [prompt(70 + i, 12) for i in range(e.scheduler.states.count + 2)]
    first = [asyncio.run(e.generate(ask(p, key=i, n=2))) for i, p in enumerate(given)]
    again = [asyncio.run(e.generate(ask(p, key=i, n=2))) for i, p in enumerate(given)]
    assert [c.tokens for c in first] == [c.tokens for c in again]
    assert max(abs(a - b) for c, d in zip(first, again) for a, b in zip(c.logprobs, d.logprobs)) <= 1e-5
    held = [n.state for n in e.scheduler.caches[0].tree.iter_nodes() if n.state is not None]
    assert len(set(held)) == len(held) == e.scheduler.states.held <= e.scheduler.states.count
    asyncio.run(e.flush_cache())
    assert e.scheduler.states.held == 0
    idle(e)


def test_what_needs_another_state_is_refused_by_name():
    loaded = model("lfm2")
    with pytest.raises(ConfigError, match=re.escape('engine.speculative.kind = "off"')):
        engine(loaded, speculation=SpeculativeDecoder(2))
    for kind in ("qwen3_5_text", "bamba", "mamba", "recurrent_gemma"):
        with pytest.raises(ConfigError, match=r"recurrent layers, whose sums depend on how a prompt is cut.*'fast'"):
            align_numerics(model(kind))
    with pytest.raises(ConfigError, match=re.escape("engine.compile = false")):
        CompiledModel(loaded)
    with pytest.raises(ModelError, match="use_attention_layout"):
        loaded.model(torch.tensor([[5, 6, 7]]), use_cache=False)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_short_convolutions_have_the_same_bits_in_any_chunk_and_in_the_trainer(dtype):
    """Aligned numerics: prompts cut everywhere, cached and cold, siblings in one batch, and the trainer's packed row."""
    loaded = load_model({"random": "lfm2", **FAMILIES["lfm2"]}, dtype=dtype)
    align_numerics(loaded)
    given, told = prompt(3, 21), []
    for prefill_tokens in (1, 5, 64):
        e = engine(loaded, prefill_tokens=prefill_tokens)
        told += asyncio.run(all_of(e, [ask(given, key=k, n=6) for k in (1, 2, 1)]))
        told.append(asyncio.run(e.generate(ask(given, key=2, n=6))))
        idle(e)
    for done in told:
        same = told[0] if done.tokens == told[0].tokens else told[1]
        assert done.tokens == same.tokens and done.logprobs == same.logprobs
    t = trainer(loaded)
    for done in told[:2]:
        ours = asyncio.run(t.logprobs([*given, *done.tokens]))[len(given) :]
        assert ours == done.logprobs


@pytest.mark.slow
@pytest.mark.parametrize("kind", covering(RECURRENT_FAMILIES, [*KEPT, "minimax"]))
def test_bfloat16_serves_and_scores_alike(kind):
    """Loading proves the forward pass; convolution windows are kept in bf16, recurrent states in fp32."""
    loaded = load_model({"random": kind, **FAMILIES[kind]}, dtype="bfloat16")
    e = engine(loaded)
    done = asyncio.run(all_of(e, [ask(prompt(1, 20), key=i, n=5) for i in range(2)]))
    idle(e)
    scores = asyncio.run(e.score(ask(prompt(1, 20) + done[0].tokens))).logprobs[20:]
    assert max(abs(a - b) for a, b in zip(scores, done[0].logprobs)) <= 0.02
    windows = kind not in ("minimax", "xlstm")  # which have no convolution
    assert (loaded.state_bytes < model(kind).state_bytes) == windows


@torch.no_grad()
def test_scores_are_those_of_the_trainer():
    loaded, row = model("lfm2"), prompt(4, 50)
    e = engine(loaded)
    got = asyncio.run(e.score(ask(row))).logprobs
    logp = alone(loaded, row)
    assert max(abs(float(logp[i, t]) - s) for i, (t, s) in enumerate(zip(row[1:], got[1:]))) <= 1e-5
    idle(e)


@pytest.mark.slow
def test_the_planner_counts_the_states():
    for kind in ("qwen3_5_text", "qwen3_5_moe_text"):
        assert model_shape({"random": kind, **FAMILIES[kind]}).state_bytes(4) == model(kind).state_bytes
    e = engine(model("lfm2"), max_running=6)
    asyncio.run(all_of(e, [ask(prompt(1, 9))]))
    assert e.runner.states.memory.pool_bytes == state_slots(6) * model("lfm2").state_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    covering(["lfm2", "qwen3_5_text", "bamba", "mamba"], ["lfm2", "mamba"]),  # the third: test_vision_video.py
)
def test_the_trainer_has_one_gradient_for_any_split(kind):
    """Law 3, with prompts shared and not; episodes of several turns among the samples."""
    algo, t = row("grpo"), trainer(copy_of(kind))
    b = batch(awkward_groups(), algo)
    whole = gradient(t, b, algo)
    for micro_tokens, share in ((10**6, False), (40, True), (40, False)):
        assert apart(gradient(t, b, algo, micro_tokens=micro_tokens, share=share), whole) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", covering(["lfm2", "qwen3_5_text", "bamba"], ["qwen3_5_text"]))
def test_a_crash_continues_from_the_token_log(kind, tmp_path):
    """Law 15: what was drawn is read again, its states are computed again."""
    loaded, requests = model(kind), asked()
    whole = asyncio.run(all_of(serving(tmp_path / "whole", loaded), requests))
    asyncio.run(dies(serving(tmp_path / "log", loaded), requests, 7))
    e = serving(tmp_path / "log", loaded)
    done = asyncio.run(all_of(e, requests))
    idle(e)
    for a, b in zip(done, whole):
        assert a.tokens == b.tokens
        assert max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs)) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dropped"),
    covering(product(["lfm2", "qwen3_5_text"], [False, True]), [("lfm2", False), ("qwen3_5_text", True)]),
)
def test_new_weights_in_the_middle_keep_or_recompute_the_states(kind, dropped):
    """Law 7: a running answer keeps its states under new weights, a new request finds none of them."""
    loaded, trained = copy_of(kind), Publisher(copy_of(kind))
    requests = [ask(prompt(1, 20), key=i, n=30) for i in range(2)]

    async def main():
        e, sync = watched(engine(loaded)), updater()
        await sync(trained, e)
        tasks = [asyncio.create_task(e.generate(r)) for r in requests]
        await wrote(e, 9)
        await e.pause("hold")
        if dropped:
            await e.sleep(("kv_cache",))
            assert (await e.status()).memory["kv_cache"] == 0
        trained.train()
        await sync(trained, e)
        if dropped:
            await e.wake(("kv_cache",))
        await e.resume()
        late = await e.generate(ask(prompt(1, 20), key=5, n=4))
        done = await asyncio.gather(*tasks)
        idle(e)
        return late, done

    late, done = asyncio.run(main())
    assert late.cached_tokens == (19 if dropped else 0) and set(late.versions) == {1}  # its siblings computed it again
    assert all(set(c.versions) == {0, 1} for c in done)
    with torch.no_grad():
        if dropped:  # then what follows is of the new weights alone
            logp = alone(loaded, prompt(1, 20) + done[0].tokens)
            assert all(abs(float(logp[19 + i, done[0].tokens[i]]) - done[0].logprobs[i]) <= 1e-5 for i in range(20, 30))
        logp = alone(loaded, prompt(1, 20) + late.tokens)
    assert max(abs(float(logp[19 + i, t]) - p) for i, (t, p) in enumerate(zip(late.tokens, late.logprobs))) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", covering(["lfm2", "qwen3_5_text", "bamba"], ["lfm2"]))
def test_the_tiny_recipe_runs(kind, tmp_path):
    """Supervised phase and two steps of RL, asynchronous, with the ratio of trainer and engine at one."""
    run_tiny_recipe(kind, tmp_path)


class RoundedOnce(torch.autograd.Function):
    """To the nearest number of float32, in float64."""

    to = torch.Tensor.to

    @staticmethod
    def forward(ctx, x):
        return RoundedOnce.to(RoundedOnce.to(x, torch.float32), torch.float64)

    @staticmethod
    def backward(ctx, grad):
        return grad


WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 16}
WIDE |= {"num_key_value_heads": 2, "max_position_embeddings": 512}
HYBRID = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_conv_kernel_dim": 4}
HYBRID |= {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}


@pytest.mark.slow
def test_how_far_float32_is_from_float64_is_the_condition_of_the_model(monkeypatch):
    """In float64 the gradient is that of any split to 1e-12: nothing is lost where parts are added. One rounding to float32
    of what each linear layer gives moves that of a hybrid more than twice as far as llama's, and float32 is as many times as
    far from float64 in both. So a hybrid is further apart on a mesh (2e-6 where others are 1e-6) by no sum that could be better.
    """
    as_given = torch.Tensor.to

    def wide(x, *how, **named):
        how = tuple(torch.float64 if each is torch.float32 else each for each in how)
        return as_given(x, *how, **{k: torch.float64 if v is torch.float32 else v for k, v in named.items()})

    def gradient_of(spec, *, double=False, rounded=False, budget=10**6):
        loaded = load_model({"seed": 3, **WIDE, **spec}, dtype="float32")
        with torch.no_grad():
            for p in loaded.model.parameters():  # far from the flat start
                p.mul_(3.0 if p.ndim > 1 else 1.0)
        b = batch(awkward_groups(), row("grpo"))
        generator = torch.Generator().manual_seed(0)
        push = [torch.randn(len(s.trainable), generator=generator) for s in b.samples]
        with monkeypatch.context() as patch:
            if double:
                loaded.model.double()
                loaded.head, loaded.compute = loaded.head.of_copy(loaded.model), torch.float64
                patch.setattr(torch.Tensor, "to", wide)
                patch.setattr(torch.Tensor, "float", torch.Tensor.double)
                patch.setattr(GatedDelta, "state_dtype", torch.float64)
            for layer in loaded.model.modules() if rounded else ():
                if isinstance(layer, torch.nn.Linear):
                    layer.register_forward_hook(lambda layer, given, out: RoundedOnce.apply(out))
            for packed in micro_batches(b, budget):
                logprobs, _ = forward(loaded, packed, temperature=1.0)
                (logprobs * torch.cat([push[i] for i in packed.samples])).sum().backward()
        return torch.cat([p.grad.double().flatten() for p in loaded.model.parameters()])

    def distance(a, b):
        return float((a - b).norm() / b.norm())

    moved, times = dict[str, float](), dict[str, float]()
    for kind, spec in (("llama", {}), ("qwen3_5_text", HYBRID)):
        true = gradient_of({"random": kind, **spec}, double=True)
        assert distance(gradient_of({"random": kind, **spec}, double=True, budget=60), true) < 1e-12
        moved[kind] = distance(gradient_of({"random": kind, **spec}, double=True, rounded=True), true)
        times[kind] = distance(gradient_of({"random": kind, **spec}), true) / moved[kind]
    assert moved["qwen3_5_text"] > 2 * moved["llama"]
    assert 0.5 < times["qwen3_5_text"] / times["llama"] < 2
