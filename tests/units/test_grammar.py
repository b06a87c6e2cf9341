"""Constrained decoding: the mask is what brute force finds, what is written is a
sentence, and the stated logprob is the masked one.
"""

from __future__ import annotations

import asyncio
import builtins
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from kits.engine import SIZE, all_of, ask, engine, idle, plain_logits, prompt, tiny
from kits.sampling import chi_square, draw
from kits.sweeps import covering
from rondel.core.errors import EngineError, UserError
from rondel.core.types import Request, Sampling
from rondel.generate.engine.builtin.grammar import GrammarCache
from rondel.generate.engine.builtin.logits_processors import process_logits
from rondel.generate.engine.builtin.request import SequenceState
from rondel.generate.engine.builtin.sampler import draw_uniform

pytest.importorskip("llguidance")
MODEL = tiny()
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,6}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", None]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PARENTHESES = 'start: item~1..3\nitem: "(" item? ")" | "[" item? "]"'


def grammatical(p, *, n=120, **how):
    return ask(p, n=n, ignore_eos=False, **how)


def trained_on_text():
    """A byte-level BPE with tokens of several characters, as real models have."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<end>", "<other>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = [
        '{"name": "anna", "age": 17, "tags": ["red", "green"]} the blue and red trees are true, abab abba false null 1234567'
    ] * 30
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def words_model():
    """A random model over that tokenizer, with more rows in its head than there are tokens."""
    tokenizer = trained_on_text()
    loaded = tiny("llama", **SIZE, vocab_size=448)
    loaded.tokenizer, loaded.stop_ids = tokenizer, frozenset({tokenizer.eos_token_id})
    return loaded


WORDS = words_model()


# -- the mask ----------------------------------------------------------------------------------------


def mask(loaded, constraint, drawn):
    """Allowed ids, through the vectorised path."""
    live = SequenceState(
        Request([5, *drawn], Sampling(grammar={"regex": "."}), continuation=len(drawn)),
        lambda _: None,
        [5, *drawn],
        1 + len(drawn),
    )
    live.constraint = constraint
    logits = torch.zeros(2, loaded.head.weight.shape[0])
    process_logits(logits, [(1, live)])
    assert live.fault is None and (logits[0] == 0).all()
    return set((logits[1] == 0).nonzero()[:, 0].tolist())


SENTENCES = ["red", "reddish", "true", "abba", "ab ab", "the blue", '{"age": 17}', "123", "12", "é漢", "a"]


@pytest.mark.slow
@pytest.mark.parametrize("loaded", [MODEL, WORDS], ids=["characters", "bytes"])
@pytest.mark.parametrize("kind", ["regex", "grammar"])
def test_the_mask_is_that_of_brute_force(loaded, kind):
    """A token is allowed exactly if a sentence goes on with it; the end exactly where a sentence is whole."""
    sentences = [s for s in SENTENCES if loaded is WORDS or s.isascii()]
    alternatives = [
        re.escape(s).replace("\\ ", " ") if kind == "regex" else json.dumps(s, ensure_ascii=False) for s in sentences
    ]
    given = {"regex": "|".join(alternatives)} if kind == "regex" else {"grammar": "start: " + " | ".join(alternatives)}
    spelled = {i: _bytes(loaded, i) for i in range(len(loaded.tokenizer)) if i not in loaded.tokenizer.all_special_ids}
    ends, goals = set(loaded.stop_ids), [s.encode() for s in sentences]
    grammars, rng, seen = GrammarCache(loaded), np.random.default_rng(0), 0
    for _ in range(25):
        constraint, drawn, written = grammars.start_constraint(given, []), [], b""
        while True:
            expected = {i for i, b in spelled.items() if b and any(g.startswith(written + b) for g in goals)}
            allowed = mask(loaded, constraint, drawn)
            assert allowed == expected | (ends if written in goals else set()), written
            seen += 1
            choice = int(rng.choice(sorted(allowed)))
            if choice in ends:
                break
            drawn.append(choice)
            written += spelled[choice]
    assert seen > 60


def _bytes(loaded, token):
    if loaded is MODEL:
        return loaded.tokenizer.decode([token]).encode()
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    back = {c: b for b, c in bytes_to_unicode().items()}
    return bytes(back[c] for c in loaded.tokenizer.convert_ids_to_tokens(token))


@pytest.mark.slow
def test_draws_under_a_grammar_have_the_stated_distribution():
    logits = torch.randn(105, generator=torch.Generator().manual_seed(4)) * 2
    constraint = GrammarCache(MODEL).start_constraint({"regex": "[a-m]+"}, [])
    kept = mask(MODEL, constraint, [])
    s, n = Sampling(grammar={"regex": "[a-m]+"}, temperature=0.8, top_p=0.95), 20_000
    live = SequenceState(Request([5], s), lambda _: None, [5], 1)
    live.constraint = constraint
    row = logits[None].clone()
    process_logits(row, [(0, live)])
    tokens, logprobs = draw(row.repeat(n, 1), [s] * n, [draw_uniform(9, t) for t in range(n)])
    p = (logits.double() / 0.8).softmax(-1).numpy()
    p[[i for i in range(105) if i not in kept]] = 0
    p /= p.sum()
    order = np.argsort(-p)
    p[order[np.concatenate([[0], np.cumsum(p[order])[:-1]]) >= 0.95]] = 0
    p /= p.sum()
    assert all(math.exp(lp) == pytest.approx(p[t], rel=1e-5) for t, lp in zip(tokens, logprobs))
    assert chi_square(np.bincount(tokens, minlength=105), p) > 1e-3


# -- what the engine writes --------------------------------------------------------------------------


def fits(value):
    assert set(value) == {"name", "age", "tags"} and re.fullmatch("[a-z]{1,6}", value["name"])
    assert isinstance(value["age"], int) and 0 <= value["age"] <= 120
    assert len(value["tags"]) <= 2 and all(t in ("red", "green", None) for t in value["tags"])


YIELDS = [(MODEL, 0.0), (MODEL, 1.5), (WORDS, 1.0)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "loaded, temperature",
    covering(YIELDS, YIELDS[1:]),
    ids=["characters, greedy", "characters, flattened", "bytes"],
)
def test_a_schema_always_yields_its_json(loaded, temperature):
    e = engine(loaded)
    requests = [
        grammatical(prompt(i, 6), key=i, temperature=temperature, grammar={"json_schema": SCHEMA}) for i in range(24)
    ]
    done = asyncio.run(all_of(e, requests))
    for c in done:
        assert c.finish_reason == "stop" and c.tokens[-1] in loaded.stop_ids
        fits(json.loads(c.text))
    assert len({c.text for c in done}) > 5 and len(e.grammars._starts) == 1
    idle(e)


@pytest.mark.slow
@pytest.mark.parametrize(
    "grammar, right",
    [
        ({"regex": r"(\d{3}-){2}[xyz]"}, lambda t: re.fullmatch(r"(\d{3}-){2}[xyz]", t)),
        ({"regex": "/a\"b\\\\c|'"}, lambda t: t in ('/a"b\\c', "'")),
        ({"json_schema": json.dumps({"enum": [1, "two", None]})}, lambda t: json.loads(t) in [1, "two", None]),
        ({"grammar": PARENTHESES}, lambda t: balanced(t)),
    ],
    ids=["digits", "quotes", "schema as text", "parentheses"],
)
def test_every_kind_of_grammar(grammar, right):
    requests = [grammatical(prompt(i, 4), key=i, grammar=grammar, n=300, temperature=0.8) for i in range(30)]
    done = [c for c in asyncio.run(all_of(engine(MODEL), requests)) if c.finish_reason == "stop"]
    assert len(done) > 20 and all(right(c.text) for c in done), [c.text for c in done]


def balanced(text):
    while (shorter := text.replace("()", "").replace("[]", "")) != text:
        text = shorter
    return not text


def test_the_stated_logprob_is_that_of_what_was_allowed():
    request = replace(
        grammatical(prompt(1, 8), grammar={"json_schema": SCHEMA}, temperature=0.9),
        wants=frozenset({"support", "raw_logprobs"}),
    )
    c = asyncio.run(engine(MODEL).generate(request))
    logits = plain_logits(MODEL, request.tokens + c.tokens)[len(request.tokens) - 1 : -1]
    constraint = GrammarCache(MODEL).start_constraint({"json_schema": SCHEMA}, [])
    for t, (row, token) in enumerate(zip(logits, c.tokens)):
        allowed = sorted(mask(MODEL, constraint, c.tokens[:t]))
        assert c.support[t] == allowed
        assert c.logprobs[t] == pytest.approx(float(row[token] / 0.9 - (row[allowed] / 0.9).logsumexp(0)), abs=1e-5)
        assert c.raw_logprobs[t] == pytest.approx(float(row.log_softmax(-1)[token]), abs=1e-5)
    forced = [t for t, ids in enumerate(c.support) if len(ids) == 1]
    assert forced and all(c.logprobs[t] == 0 for t in forced)


@pytest.mark.slow
def test_retraction_and_continuation_change_nothing():
    requests = [
        grammatical(prompt(i, 10), key=i, grammar={"json_schema": SCHEMA} if i % 2 else None, n=40) for i in range(6)
    ]
    free = asyncio.run(all_of(engine(MODEL), requests))
    tight = engine(MODEL, kv_pages=80, prefill_tokens=9)
    pressed = asyncio.run(all_of(tight, requests))
    assert tight.scheduler.retracted > 0
    assert [c.tokens for c in pressed] == [c.tokens for c in free]
    for request, c in zip(requests[1::2], free[1::2]):
        sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens - 9)
        rest = replace(request, tokens=request.tokens + c.tokens[:9], sampling=sampling, continuation=9)
        assert asyncio.run(engine(MODEL).generate(rest)).tokens == c.tokens[9:]
    broken = replace(requests[1], tokens=[*requests[1].tokens, 50, 50], continuation=2)
    with pytest.raises(UserError, match="does not fit the grammar"):
        asyncio.run(engine(MODEL).generate(broken))


@pytest.mark.slow
def test_a_whole_sentence_ends_before_min_tokens_and_an_open_one_does_not():
    short = asyncio.run(engine(MODEL).generate(grammatical([5, 6], grammar={"regex": "ab"}, min_tokens=9)))
    assert (short.text, short.finish_reason, len(short.tokens)) == (
        "ab",
        "stop",
        3,
    ) and short.logprobs == pytest.approx([0, 0, 0])
    long = [
        asyncio.run(engine(MODEL).generate(grammatical([5, 6], key=i, grammar={"regex": "[ab]*"}, min_tokens=9)))
        for i in range(3)
    ]
    assert all(len(c.text) >= 9 and set(c.text) <= {"a", "b"} for c in long)


# -- what goes wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "grammar, says",
    [
        ({"regex": "a(b"}, "unclosed group"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"regex": ""}, "not an empty one"),
        ({"regex": 5}, "must be a text"),
        ({"regex": r"[^\s\S]"}, "no sentence that can be written"),
        ({"regex": "漢+"}, "no sentence that can be written"),
        ({"json_schema": {"type": "strin"}}, "Invalid type: strin"),
        ({"json_schema": {"type": "string", "minLength": 5, "maxLength": 2}}, "Unsatisfiable"),
        ({"json_schema": "{'type': 'string'}"}, "is not JSON"),
        ({"json_schema": {"type": {1, 2}}}, "is not JSON"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"grammar": 'start: x\ny: "a"'}, r'at 1\(8\): unknown name: "x"'),
    ],
    ids=str,
)
def test_a_bad_grammar_is_refused_before_anything_is_generated(grammar, says):
    async def main():
        e = engine(MODEL)
        good = asyncio.create_task(e.generate(grammatical([5, 6, 7], grammar={"regex": "[a-z]{12}"})))
        with pytest.raises(UserError, match=says):
            await e.generate(grammatical([5, 6], grammar=grammar))
        assert len((await good).text) == 12
        idle(e)

    asyncio.run(main())


def test_a_grammar_that_runs_into_a_wall_ends_alone():
    """Its third character has no token."""

    async def main():
        e = engine(MODEL)
        good = [asyncio.create_task(e.generate(ask(prompt(i, 9), key=i, n=20))) for i in range(3)]
        with pytest.raises(EngineError, match="cannot spell what the grammar demands"):
            await e.generate(grammatical([5, 6], grammar={"regex": "ab漢"}))
        assert [len(c.tokens) for c in await asyncio.gather(*good)] == [20] * 3
        idle(e)
        assert e.state == "serving"

    asyncio.run(main())


def test_without_the_library(monkeypatch):
    real = builtins.__import__

    def missing(name, *rest, **more):
        if name.startswith("llguidance"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    for grammar in ({"regex": "a"}, {"json_schema": True}):
        with pytest.raises(UserError, match=r"pip install 'rondel\[grammar\]'"):
            asyncio.run(engine(MODEL).generate(grammatical([5, 6], grammar=grammar)))


def test_a_model_without_an_end_token():
    model = tiny()
    model.stop_ids = frozenset()
    with pytest.raises(UserError, match="no end token"):
        asyncio.run(engine(model).generate(grammatical([5, 6], grammar={"regex": "a"})))
