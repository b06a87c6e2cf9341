"""`rondel.Engine` as the documentation shows it: usable alone, from a script or a notebook."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import rondel
from kits.engine import SIZE, plain_logprobs
from rondel.core.errors import EngineError, UserError
from rondel.models import compilation


@pytest.fixture(scope="module")
def engine():
    torch.set_num_threads(1)
    engine = rondel.Engine.load({"random": "llama", "seed": 1, **SIZE}, dtype="float32", device="cpu", kv_pages=2048)
    yield engine
    engine.close()


@pytest.mark.slow
def test_texts_in_n_samples_of_each_out(engine):
    outs = engine.generate(["3 + 4 =", "Say hello."], rondel.Sampling(n=8, temperature=1.0, max_tokens=12))
    assert [len(row) for row in outs] == [8, 8]
    for row, text in zip(outs, ["3 + 4 =", "Say hello."]):
        for c in row:
            assert 1 <= len(c.tokens) == len(c.logprobs) <= 12 and c.finish_reason in ("stop", "length")
            assert c.text == engine.tokenizer.decode(c.tokens, skip_special_tokens=True)
            tokens = engine.tokenizer.encode(text) + c.tokens
            assert c.logprobs == pytest.approx(plain_logprobs(engine.loaded, tokens)[-len(c.tokens) :], abs=1e-5)
    assert len({tuple(c.tokens) for row in outs for c in row}) == 16


def test_tokens_in_and_the_same_whatever_else_is_in_the_batch(engine):
    sampling = rondel.Sampling(n=3, max_tokens=10, seed=7)
    ids = [engine.tokenizer.encode("abc"), engine.tokenizer.encode("Once upon a time")]
    first = engine.generate(ids, sampling)
    assert [[c.tokens for c in row] for row in engine.generate(["abc", "Once upon a time"], sampling)] == [
        [c.tokens for c in row] for row in first
    ]
    alone = engine.generate([ids[0]], rondel.Sampling(n=2, max_tokens=10, seed=7))
    assert [c.tokens for c in alone[0]] == [c.tokens for c in first[0][:2]]
    other = engine.generate(ids, rondel.Sampling(n=3, max_tokens=10, seed=8))
    assert all(a.tokens != b.tokens for a, b in zip(first[0], other[0]))


def test_text_that_spells_a_control_token_is_text_unless_it_is_meant(engine):
    sampling, tokenizer = rondel.Sampling(max_tokens=4, temperature=0, ignore_eos=True), engine.tokenizer
    letters = [tokenizer.convert_tokens_to_ids(c) for c in "<user>a"]
    meant = [tokenizer.convert_tokens_to_ids("<user>"), letters[-1]]
    for ids, more in ((letters, {}), (meant, {"split_special_tokens": False})):
        (((said,),), ((same,),)) = engine.generate(["<user>a"], sampling, **more), engine.generate([ids], sampling)
        assert said.tokens == same.tokens and said.prompt_tokens == same.prompt_tokens == len(ids)
    talk = [{"role": "user", "content": "<user>a"}]
    assert engine.chat([talk], sampling)[0][0].prompt_tokens == len(letters) + 2


def test_no_prompt_no_answer_and_the_default_sampling(engine):
    assert engine.generate([]) == []
    assert len(engine.generate(["a"])[0]) == 1


@pytest.mark.parametrize("prompts", ["one text", [1, 2, 3]])
def test_one_prompt_without_its_list_is_an_error(engine, prompts):
    with pytest.raises(UserError, match=r"give a list of them: engine.generate\(\[prompt\]\)"):
        engine.generate(prompts)


def test_a_prompt_that_is_refused_ends_its_batch_and_not_the_engine(engine):
    for bad, says in ([[]], "empty prompt"), ([[5, 10**6]], "does not exist"), ([[5] * 600], "context of 512"):
        with pytest.raises(UserError, match=says):
            engine.generate([[5, 6], *bad], rondel.Sampling(max_tokens=400, ignore_eos=True))
    deadline = time.monotonic() + 5
    while engine._engine.scheduler.has_work and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not engine._engine.scheduler.has_work, "a request whose batch is gone still runs"
    assert len(engine.generate(["ok"])) == 1


def test_from_several_threads(engine):
    sampling, got = rondel.Sampling(n=2, max_tokens=8), {}
    want = {text: [c.tokens for c in engine.generate([text], sampling)[0]] for text in "abcd"}
    threads = [
        threading.Thread(target=lambda t=text: got.update({t: [c.tokens for c in engine.generate([t], sampling)[0]]}))
        for text in "abcd"
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    assert got == want


def test_close_ends_its_threads_and_a_closed_engine_says_so():
    before = set(threading.enumerate())
    engine = rondel.Engine.load({"random": "llama", **SIZE}, dtype="float32", device="cpu")
    engine.generate(["a"], rondel.Sampling(max_tokens=2))
    engine.close()
    engine.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(EngineError, match="closed"):
        engine.generate(["a"])


@pytest.mark.slow
def test_it_aligns_guesses_and_compiles_on_request(monkeypatch):
    """Aligned: the trainer's bits. Guessing ahead, and a compiled pass: the tokens of neither. What a compiler makes of it is
    in test_compiled.py.
    """
    load, asked = rondel.Engine.load, []

    def unfused(loaded):
        asked.append(loaded)
        return lambda t, p: loaded.decoder(input_ids=t[None], position_ids=p[None], use_cache=False)[0][0]

    monkeypatch.setattr(compilation, "_compile", unfused)
    how, sampling = (
        {"dtype": "float32", "device": "cpu", "kv_pages": 2048},
        rondel.Sampling(n=2, max_tokens=12, temperature=0.0),
    )
    size = {"random": "llama", "seed": 1, **SIZE}
    told = {}
    for name, more in {
        "plain": {}, "aligned": {"numerics": "aligned"}, "ngram": {"speculative": "ngram"}, "compiled": {"compile": True},
    }.items():  # fmt: skip
        engine = load(size, **how, **more)
        told[name] = [[c.tokens for c in row] for row in engine.generate(["a b a b a b", "xyz"], sampling)]
        if name == "aligned":
            [[c]] = engine.generate(["abc"], rondel.Sampling(max_tokens=8, seed=3))
            alone = plain_logprobs(engine.loaded, engine.tokenizer.encode("abc") + c.tokens)[-len(c.tokens) :]
            assert c.logprobs == pytest.approx(alone, abs=1e-6) and engine.loaded.aligned
        assert asked == ([engine.loaded] if name == "compiled" else [])
        engine.close()
    assert all(tokens == told["plain"] for tokens in told.values())
    for wrong, says in ({"numerics": "alinged"}, "fast, aligned or rounded"), ({"speculative": "draft"}, "draft:MODEL"):
        with pytest.raises(UserError, match=says):
            load(size, **how, **wrong)


def test_a_conversation_goes_through_the_template(engine):
    with pytest.raises(UserError, match=r"engine.chat\(\[messages\]\)"):
        engine.chat([{"role": "user", "content": "Hi"}])
    messages = [{"role": "user", "content": "Hi"}]
    tokens = engine.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    sampling = rondel.Sampling(max_tokens=6, seed=2)
    assert engine.chat([messages], sampling)[0][0].tokens == engine.generate([tokens], sampling)[0][0].tokens
