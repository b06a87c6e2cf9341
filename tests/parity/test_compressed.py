"""Attention over windows that are compressed to keys (DeepSeek V4), and to blocks that an indexer chooses (Qwen4-Exp):
what the laws of families and of recurrent layers do not say. Those are in test_families.py and test_recurrent.py.
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

from kits.engine import all_of, ask, engine, idle, prompt, watched
from kits.families import FAMILIES, model, own
from kits.sweeps import covering
from kits.train import apart, awkward_groups, batch, gradient, row, trainer
from rondel.core.errors import ConfigError, ModelError
from rondel.models import block_indexer, compressed_attention, packed_layout
from rondel.models.adapters import add_adapter
from rondel.models.aligned_numerics import align_numerics
from rondel.models.attention import use_attention_layout
from rondel.models.block_indexer import check_block_indexers
from rondel.models.compilation import CompiledModel
from rondel.models.compressed_attention import check_compressors
from rondel.models.key_choice import ALL
from rondel.models.load import load_model
from rondel.models.packed_layout import PackedLayout, PackedSegment

KIND, BLOCKS = "deepseek_v4", "qwen4_exp_text"
WAYS = {"chunked": {"prefill_tokens": 16}, "retracted": {"kv_pages": 70}}
COUNT, RATE = 4, 3  # entries or blocks that their indexers choose, tokens of one


def indexers(loaded_or_module):
    names = ("DeepseekV4Indexer", "Qwen4ExpTextQSAIndexer")
    return [m for m in loaded_or_module.modules() if type(m).__name__ in names]


def logprobs(loaded, tokens, tape=None):
    """[T-1] of each next token."""
    n = len(tokens)
    hidden = loaded.hidden_states(torch.tensor(tokens), torch.arange(n), PackedLayout([PackedSegment(0, n)]), tape)
    return loaded.head.logits(hidden).log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def rollout(kind, **settings):
    given = prompt(3, 22)
    e = watched(engine(model(kind), routes=True, **settings))
    asked = [replace(ask(given, key=i, n=13), wants=frozenset({"experts"})) for i in range(4)]
    done = asyncio.run(all_of(e, asked))
    idle(e)
    return given, done


def ends_of(choice):
    """Of each token the last positions of what it sees: of windows [T,k], -1 for none, or in a mask of tokens [1,T,T]."""
    if choice.dtype != torch.bool:
        return [{w * RATE + RATE - 1 for w in line if w >= 0} for line in choice.tolist()]
    ends = range(RATE - 1, choice.shape[2], RATE)
    return [{e for e in ends if line[e]} for line in choice[0].tolist()]


def chosen_sets(tape, routes):
    """[indexers, T] sets of positions in a record; empty where all are seen."""
    tape.routes = torch.from_numpy(routes.astype(np.int64))
    found = [tape.select_keys(i, torch.zeros(len(routes), 0)) for i in range(tape.indexers)]
    return [[{p for p in line if p != ALL} for line in keys.tolist()] for keys in found]


@pytest.mark.parametrize("kind", [KIND, BLOCKS])
def test_the_engine_reads_prompts_that_are_shorter_than_a_window(kind):
    """No window ends in such a step, so there is nothing to choose from."""
    given = prompt(5, RATE - 2)
    e = watched(engine(model(kind)))
    done = asyncio.run(e.generate(replace(ask(given, n=6), wants=frozenset({"raw_logprobs"}))))
    idle(e)
    whole = torch.tensor(given + done.tokens)
    with torch.no_grad():
        plain = own(kind)(whole[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    plain = plain.gather(1, whole[1:, None])[:, 0]
    assert plain[len(given) - 1 :].tolist() == pytest.approx(done.raw_logprobs, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how"),
    covering(product([KIND, BLOCKS], WAYS), [(KIND, "retracted"), (BLOCKS, "chunked")]),
)
@torch.no_grad()
def test_engine_and_transformers_choose_the_same_entries(kind, how):
    """The record of a token is the set of windows that transformers' own indexer takes, by the positions of their ends."""
    loaded, fresh = model(kind), own(kind)
    given, done = rollout(kind, **WAYS[how])
    theirs = []
    hooks = [m.register_forward_hook(lambda m, _, out: theirs.append(out[0])) for m in indexers(fresh)]
    try:
        for c in done:
            theirs.clear()
            fresh(torch.tensor([given + c.tokens]), use_cache=False)
            mine = chosen_sets(loaded.routing_tape(), c.experts)
            assert len(mine) == loaded.indexers == len(theirs) == 2
            for keys, wanted in zip(mine, theirs):
                ends = ends_of(wanted)
                assert keys == [ends[t] if (t + 1) // RATE > COUNT else set() for t in range(len(keys))]
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [KIND, BLOCKS])
@torch.no_grad()
def test_the_trainer_repeats_the_engines_choice(kind):
    loaded, moved = model(kind), copy.deepcopy(model(kind))
    for indexer in indexers(moved.model):
        weight = (indexer.kv_proj if kind == KIND else indexer.index_qk_proj).weight
        weight.copy_(weight.flip(1))
    given, done = rollout(kind)
    for c in done:
        tokens, routes = (given + c.tokens)[: len(c.experts)], torch.from_numpy(c.experts.astype(np.int64))
        experts, both = (
            logprobs(moved, tokens, loaded.routing_tape(r))[len(given) - 1 :]
            for r in (routes[:, : loaded.routers], routes)
        )
        drawn = torch.tensor(c.logprobs[: len(both)])
        assert float((both - drawn).abs().max()) <= 1e-4
        assert float((experts - drawn).abs().max()) > 1e-2, "the record of experts alone is not enough"


@pytest.mark.slow
def test_the_gradient_is_one_for_any_split_and_for_blocks_of_queries(monkeypatch):
    """Law 3, with prompts shared and not; long calls in blocks, and layers computed again in the backward pass."""
    algo = row("grpo")
    b = batch(awkward_groups(), algo)
    parts = gradient(trainer(copy.deepcopy(model(KIND))), b, algo, micro_tokens=40, share=False)
    monkeypatch.setattr(packed_layout, "LONG", 64)
    whole = trainer(copy.deepcopy(model(KIND)), recompute="layers")
    assert apart(gradient(whole, b, algo), parts) <= 1e-5


@pytest.mark.slow
def test_what_it_cannot_do_is_refused_by_name():
    loaded = model(KIND)
    with pytest.raises(ConfigError, match="numerics = 'fast'"):
        align_numerics(loaded)
    with pytest.raises(ConfigError, match=re.escape("engine.compile")):
        CompiledModel(replace(loaded, routers=0, state_bytes=0, indexers=0))
    with pytest.raises(ConfigError, match="'o_a_proj' is no linear layer"):
        add_adapter(copy.deepcopy(loaded), rank=4, alpha=8, targets=["o_a_proj"])
    layout = PackedLayout([PackedSegment(0, 3)])
    with use_attention_layout(layout), pytest.raises(ModelError, match="packed into one row"):
        loaded.model.model(torch.tensor([[5, 6, 7]] * 2), use_cache=False)


def test_a_compressor_that_is_not_carried_is_noticed_at_load(monkeypatch):
    """Its windows are longer than the probe of tokens, so each one is compared over noise of its own length."""
    plain = load_model({"random": KIND, "seed": 3, **FAMILIES[KIND]}, dtype="float32").model
    index_tokens = compressed_attention._index_tokens

    def reversed_scores(*given):
        tokens = index_tokens(*given)
        return replace(tokens, weights=-tokens.weights)

    for name, other in (("rotate_pairs", lambda x, cos, sin: x), ("_index_tokens", reversed_scores)):
        with monkeypatch.context() as patched, pytest.raises(ModelError, match="compresses its windows to, or chooses"):
            patched.setattr(compressed_attention, name, other)
            check_compressors(plain, "it")


def test_a_block_indexer_that_is_not_carried_is_noticed_at_load(monkeypatch):
    plain = load_model({"random": BLOCKS, "seed": 3, **FAMILIES[BLOCKS]}, dtype="float32").model
    found = indexers(plain)
    check_block_indexers(plain, "it", found)
    monkeypatch.setattr(block_indexer, "_rotated", lambda x, cos, sin: x)
    with pytest.raises(ModelError, match="chooses blocks that score"):
        check_block_indexers(plain, "it", found)


def test_a_random_model_sends_tokens_to_different_experts():
    table = model(KIND).model.model.layers[0].mlp.gate.tid2eid
    assert len(table.unique()) == 4 and bool((table[:, 0] != table[:, 1]).all())
