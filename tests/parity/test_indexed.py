"""Attention whose keys an indexer chooses: engine, trainer and transformers choose alike, and the trainer repeats the
engine's choice where its own would be another.
"""

from __future__ import annotations

import asyncio
import copy
import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from kits.engine import all_of, ask, engine, idle, plain_logits, prompt, watched
from kits.families import FAMILIES, model, own, run_tiny_recipe
from kits.routing import group_of
from kits.sweeps import covering
from kits.token_log import dies, serving
from kits.train import apart, awkward_groups, batch, gradient, row, trainer
from rondel.core.errors import ConfigError, LawError, ModelError, UserError
from rondel.generate.engine.builtin.speculative import SpeculativeDecoder
from rondel.models.adapters import add_adapter
from rondel.models.aligned_numerics import align_numerics
from rondel.models.architectures import INDEXED_KINDS, RECURRENT_KINDS
from rondel.models.compilation import CompiledModel
from rondel.models.indexer import ROTATION, check_indexers
from rondel.models.key_choice import ALL, choose_keys, is_chosen
from rondel.models.load import load_model
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.train import annotate
from rondel.train.pack import batch_of, micro_batches

# one that chooses blocks keeps states, too, and is in test_compressed.py
KINDS = [kind for kind in FAMILIES if kind in INDEXED_KINDS - RECURRENT_KINDS]
AT_ONCE = ("deepseek_v32", "glm_moe_dsa")
# the third has layers of their own sizes and a window beside the choice
SOME_AT_ONCE = covering(KINDS, [*AT_ONCE, "dots3_note_text"], fast=AT_ONCE)
# what is done with a choice is the same for all that choose
ONE = covering(KINDS, ["glm_moe_dsa"], fast=AT_ONCE)
COUNT = 8  # keys that the models of these tests choose


def indexers(loaded):
    return [m for m in loaded.model.modules() if type(m).__name__ in ROTATION]


def hidden(loaded, tokens, tape=None):
    n = len(tokens)
    return loaded.hidden_states(torch.tensor(tokens), torch.arange(n), PackedLayout([PackedSegment(0, n)]), tape)


def logprobs(loaded, tokens, tape=None):
    """[T-1] of each next token."""
    logp = loaded.head.logits(hidden(loaded, tokens, tape)).log_softmax(-1)
    return logp[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def rollout(loaded, n=4, **settings):
    given = prompt(3, 21)
    e = watched(engine(loaded, routes=True, **settings))
    requests = [replace(ask(given, key=i, n=14), wants=frozenset({"experts"})) for i in range(n)]
    done = asyncio.run(all_of(e, requests))
    idle(e)
    return given, done


def other(kind):
    """The same model with indexers that choose other keys."""
    loaded = copy.deepcopy(model(kind))
    for indexer in indexers(loaded):
        indexer.wk.weight.data = torch.randn(indexer.wk.weight.shape, generator=torch.Generator().manual_seed(5))
    return loaded


def chosen_sets(tape, routes):
    """[indexers, T] sets of positions in a record; empty where all are seen."""
    tape = copy.copy(tape)
    tape.routes, tape.keys = torch.from_numpy(routes.astype(np.int64)), [None] * tape.indexers
    found = [tape.select_keys(i, torch.zeros(len(routes), 0)) for i in range(tape.indexers)]
    return [[{p for p in line if p != ALL} for line in keys.tolist()] for keys in found]


WAYS = {"plain": {}, "chunked": {"prefill_tokens": 16}, "retracted": {"kv_pages": 60}, "two": {"max_running": 2}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how"),
    covering(
        product(KINDS, ["chunked", "retracted"]),
        [("deepseek_v32", "chunked"), ("glm_moe_dsa", "retracted"), ("dots3_note_text", "chunked")],
        fast=[*product(AT_ONCE, ["chunked", "retracted"])],
    ),
)
def test_engine_and_transformers_choose_the_same_keys(kind, how):
    check_choice(kind, WAYS[how])


@pytest.mark.slow
@pytest.mark.parametrize("how", [WAYS["plain"], WAYS["two"]], ids=["plain", "two"])
def test_they_do_so_with_whole_prompts_and_with_few_rows(how):
    check_choice("deepseek_v32", how)


@torch.no_grad()
def check_choice(kind, how):
    """Whatever was cached, shared, cut into chunks or computed again: the record of each token is the set of keys that
    transformers' own indexer takes, and empty as long as a token sees no more than it may choose.
    """
    loaded, fresh = model(kind), own(kind)
    given, done = rollout(loaded, **how)
    theirs = []
    hooks = [m.register_forward_hook(lambda m, _, out: theirs.append(out[0])) for m in fresh.modules() if type(m).__name__ in ROTATION]  # fmt: skip
    try:
        for c in done:
            theirs.clear()
            fresh(torch.tensor([given + c.tokens]), use_cache=False)
            mine = chosen_sets(loaded.routing_tape(), c.experts)
            assert len(mine) == loaded.indexers == len(theirs)
            for keys, wanted in zip(mine, theirs):
                assert keys == [set() if t < COUNT else set(wanted[t].tolist()) for t in range(len(keys))]
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("kind", SOME_AT_ONCE)
@torch.no_grad()
def test_the_choice_matters_here_and_only_beyond_its_size(kind):
    loaded, tokens = copy.deepcopy(model(kind)), prompt(7, 30)
    few = hidden(loaded, tokens)
    for indexer in indexers(loaded):
        indexer.index_topk = 4096
    whole = hidden(loaded, tokens)
    assert torch.equal(few[:COUNT], whole[:COUNT]) and float((few[COUNT:] - whole[COUNT:]).abs().max()) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ONE)
def test_the_trainer_repeats_the_engines_choice(kind):
    """A trainer whose indexers would choose other keys, given the record, computes the logprobs of the engine; and its
    gradient is that of a model which chooses so by itself.
    """
    loaded, moved = model(kind), other(kind)
    given, done = rollout(loaded)
    first = len(given) - 1
    for c in done:
        tokens, n = given + c.tokens, len(c.experts)
        routes = torch.from_numpy(c.experts.astype(np.int64))
        with torch.no_grad():
            experts = logprobs(moved, tokens[:n], loaded.routing_tape(routes[:, : loaded.routers]))[first:]
            both = logprobs(moved, tokens[:n], loaded.routing_tape(routes))[first:]
        drawn = torch.tensor(c.logprobs[: len(both)])
        assert float((both - drawn).abs().max()) <= 1e-4
        assert float((experts - drawn).abs().max()) > 1e-2, "the record of experts alone is not enough"
    with torch.enable_grad():
        grads = []
        for which in (loaded, moved):
            named = [p for p in which.model.parameters() if p.requires_grad]
            out = logprobs(which, tokens[:n], which.routing_tape(routes)).sum()
            grads.append(torch.autograd.grad(out, named, allow_unused=True))
    for a, b in zip(*grads, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))


@pytest.mark.slow
@pytest.mark.parametrize("kind", covering(AT_ONCE, ["deepseek_v32"]))
@torch.no_grad()
def test_replayed_keys_close_the_gap_that_rounding_opens(kind):
    """In bfloat16, with 200 to 250 keys to choose from: mean difference of logprobs without a record, with that of the
    experts, and with both.
    """
    loaded, given = load_model({"random": kind, "seed": 3, **FAMILIES[kind]}, dtype="bfloat16"), prompt(3, 200)
    for name, p in loaded.model.named_parameters():
        if p.dim() > 1:
            p.mul_(8 if any(end in name for end in ("embed", "lm_head")) else 3)
    e = engine(loaded, routes=True)
    asked = [replace(ask(given, key=i, n=50), wants=frozenset({"experts"})) for i in range(4)]
    gaps = {"none": [], "experts": [], "both": []}
    for c in asyncio.run(all_of(e, asked)):
        tokens, routes = (given + c.tokens)[: len(c.experts)], torch.from_numpy(c.experts.astype(np.int64))
        tapes = [None, loaded.routing_tape(routes[:, : loaded.routers]), loaded.routing_tape(routes)]
        for found, tape in zip(gaps.values(), tapes, strict=True):
            logp = logprobs(loaded, tokens, tape)[len(given) - 1 :]
            found.append((logp - torch.tensor(c.logprobs[: len(logp)])).abs())
    mean = {how: float(torch.cat(found).mean()) for how, found in gaps.items()}
    print(f"GAP {kind}: {mean}")
    assert mean["both"] < 0.8 * mean["experts"] < mean["none"]


@pytest.mark.slow
def test_a_batch_brings_its_choices_to_the_trainer():
    """Through trajectories, groups and packing, with a prompt that siblings share."""
    loaded, moved = model("deepseek_v32"), other("deepseek_v32")
    given, done = rollout(loaded)
    b = batch_of([group_of(given, done)])
    for share in (True, False):
        for packed in micro_batches(b, 1000, share=share):
            with torch.no_grad():
                tape = annotate.replay_tape(moved, packed)
                got, _ = annotate.forward(moved, packed, temperature=1.0, tape=tape)
            drawn = torch.tensor([p for i in packed.samples for p in done[i].logprobs])
            assert float((got - drawn).abs().max()) <= 1e-4


def test_every_choice_is_used_exactly_once():
    loaded = model("deepseek_v32")
    tape = loaded.routing_tape()
    with pytest.raises(LawError, match="left no record"):
        _ = tape.recorded_routes
    hidden(loaded, prompt(1, 12), tape)
    with pytest.raises(LawError, match="indexer 0 chose twice"):
        tape.select_keys(0, torch.zeros(12, COUNT))
    routes = tape.recorded_routes
    assert routes.shape == (12, loaded.routers + loaded.indexers * COUNT // 2, 2)
    with pytest.raises(LawError, match="has 12 tokens, the record 9"):
        hidden(loaded, prompt(1, 12), loaded.routing_tape(routes[:9]))


def test_what_can_never_be_chosen_takes_no_room():
    """An engine whose contexts are no longer than a choice records experts alone, and the trainer replays them."""
    loaded = model("deepseek_v32")
    few = engine(loaded, routes=True, kv_pages=COUNT, max_running=1)
    asked = replace(ask(prompt(1, 4), n=4), wants=frozenset({"experts"}))
    done = asyncio.run(few.generate(asked))
    assert done.experts.shape == (7, loaded.routers, 2)
    with torch.no_grad():
        routes = torch.from_numpy(done.experts.astype(np.int64))
        same = logprobs(loaded, (asked.tokens + done.tokens)[:7], loaded.routing_tape(routes))
    assert float((same[3:] - torch.tensor(done.logprobs[:3])).abs().max()) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ONE)
def test_guesses_and_new_turns_choose_alike(kind):
    """Speculative rows, and a prefix found in the cache, whose index keys are cached with it."""
    loaded, given = model(kind), prompt(7, 30)
    plain = asyncio.run(engine(loaded).generate(ask(given, n=24, temperature=0.0)))
    guessing = engine(loaded, speculation=SpeculativeDecoder(3))
    done = asyncio.run(guessing.generate(ask(given, n=24, temperature=0.0)))
    assert done.tokens == plain.tokens and np.abs(np.subtract(done.logprobs, plain.logprobs)).max() <= 1e-5
    turn = ask(given + done.tokens + prompt(8, 9), n=6, temperature=0.0)
    again, cold = asyncio.run(guessing.generate(turn)), asyncio.run(engine(loaded).generate(turn))
    assert again.cached_tokens >= 50 and again.tokens == cold.tokens
    assert np.abs(np.subtract(again.logprobs, cold.logprobs)).max() <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", covering(KINDS, ["dots3_note_text"]))
def test_the_trainer_has_one_gradient_for_any_split(kind):
    """Law 3, with prompts shared and not; the choice is made again where it is not recorded."""
    algo, t = row("grpo"), trainer(copy.deepcopy(model(kind)))
    b = batch(awkward_groups(), algo)
    whole = gradient(t, b, algo)
    for micro_tokens, share in ((10**6, False), (40, True), (40, False)):
        assert apart(gradient(t, b, algo, micro_tokens=micro_tokens, share=share), whole) <= 1e-5


@pytest.mark.slow
def test_a_crash_continues_with_the_recorded_choices(tmp_path):
    """Law 15: what was drawn is read again with the keys that it saw."""
    loaded = model("glm_moe_dsa")
    requests = [replace(ask(prompt(i, 12 + i), n=24, key=i + 1), wants=frozenset({"experts"})) for i in range(4)]
    whole = asyncio.run(all_of(serving(tmp_path / "whole", loaded, routes=True), requests))
    asyncio.run(dies(serving(tmp_path / "log", loaded, routes=True), requests, 7))
    done = asyncio.run(all_of(serving(tmp_path / "log", loaded, routes=True), requests))
    for a, b in zip(done, whole):
        assert a.tokens == b.tokens and a.experts.shape == b.experts.shape
        mine, theirs = (chosen_sets(loaded.routing_tape(), c.experts) for c in (a, b))
        assert mine == theirs


def test_what_needs_whole_contexts_is_refused_by_name():
    loaded = model("deepseek_v32")
    with pytest.raises(ConfigError, match="numerics = 'fast'"):
        align_numerics(loaded)
    with pytest.raises(ConfigError, match=re.escape("engine.compile")):
        CompiledModel(loaded)


def test_an_adapter_reaches_attention_and_no_indexer():
    algo, loaded = row("grpo"), copy.deepcopy(model("deepseek_v32"))
    with pytest.raises(ConfigError, match=re.escape("'wq_b' is no linear layer")):
        add_adapter(loaded, rank=4, alpha=8, targets=["wq_b"])
    add_adapter(loaded, rank=4, alpha=8, targets=["q_b_proj", "o_proj"])
    assert gradient(trainer(loaded), batch(awkward_groups(), algo), algo).any()


def test_contexts_whose_positions_do_not_fit_a_record_are_refused():
    loaded = replace(model("deepseek_v32"), max_context=1 << 17)
    e = engine(loaded, routes=True, kv_pages=1 << 17)
    with pytest.raises(UserError, match="65534"):
        asyncio.run(e.generate(replace(ask(prompt(1, 9), n=65_530), wants=frozenset({"experts"}))))


def test_an_indexer_that_is_not_carried_is_noticed_at_load(monkeypatch):
    loaded = copy.deepcopy(model("deepseek_v32"))
    plain = copy.deepcopy(loaded.model)
    plain.set_attn_implementation("eager")
    check_indexers(plain, "it", [m for m in plain.modules() if type(m).__name__ in ROTATION], torch.arange(5, 17)[None])
    monkeypatch.setitem(ROTATION, "DeepseekV32Indexer", (True, False))
    with pytest.raises(ModelError, match="its indexer of layer"):
        load_model({"random": "deepseek_v32", "seed": 3, **FAMILIES["deepseek_v32"]}, dtype="float32")


def test_equal_scores_go_to_the_earlier_key():
    """[L=3 queries at 2..4 over C=5 keys], in another order and with padding between."""
    q, weights = torch.ones(1, 3, 1, 2), torch.ones(1, 3, 1)
    k = torch.tensor([[[0.0, 0.0], [9.0, 9.0], [1.0, 0.0], [-1.0, 0.0], [1.0, 0.0], [0.0, -1.0]]])
    positions, at = torch.tensor([[0, ALL, 1, 2, 3, 4]]), torch.tensor([[2, 3, 4]])
    chosen = choose_keys(q, k, weights, at, positions, 3)[0].tolist()
    assert chosen == [[ALL] * 3, [1, 3, 0], [1, 3, 0]]
    seen = is_chosen(torch.tensor([chosen]), positions)[0]
    assert seen[0].all() and [seen[1][i].item() for i in (0, 2, 3, 4, 5)] == [True, True, False, True, False]


def test_logits_are_those_of_transformers_far_beyond_a_choice():
    loaded, tokens = model("deepseek_v32"), prompt(5, 200)
    with torch.no_grad():
        ours = loaded.head.logits(hidden(loaded, tokens)).log_softmax(-1)
    assert float((ours - plain_logits(loaded, tokens).log_softmax(-1)).abs().max()) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", covering(AT_ONCE, AT_ONCE[1:]))
def test_the_tiny_recipe_runs(kind, tmp_path):
    """Supervised phase and two steps of RL, asynchronous, with the choices replayed."""
    run_tiny_recipe(kind, tmp_path)
