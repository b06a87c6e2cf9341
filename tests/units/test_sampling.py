"""Law 4 for everything that changes the distribution: bias, penalties, grammar, min_tokens,
temperature, truncation; and the raw streams.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, SequenceBiasLogitsProcessor
from transformers.generation import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kits.engine import all_of, ask, engine, idle, plain_logits, plain_logprobs, prompt, tiny
from kits.sampling import chi_square, draw
from kits.sampling import reference as truncated
from kits.sweeps import covering
from rondel.core.errors import ConfigError, UserError
from rondel.core.types import Request, Sampling, sample_key
from rondel.generate.engine.builtin.logits_processors import process_logits
from rondel.generate.engine.builtin.request import SequenceState
from rondel.generate.engine.builtin.sampler import draw_uniform, draw_uniforms, sampling_weights
from rondel.generate.engine.builtin.text import open_reader, split_stops

MODEL = tiny()
END = 0  # <eos> of the character tokenizer
EVERYTHING = dict(
    temperature=0.8, top_k=60, top_p=0.95, min_p=0.001, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=-0.3,
    logit_bias={7: 3.0, 9: -2.0, 50: 1.0}, min_tokens=9, ignore_eos=False,
)  # fmt: skip
ALL = frozenset({"raw_logprobs", "top_logprobs:3", "prompt_logprobs", "support"})


def standing(sampling: Sampling, given: list[int], own: list[int], *, continued: int = 0) -> SequenceState:
    """A request that has written `own`; the first `continued` of them in an earlier life."""
    request = Request(given + own[:continued], sampling, continuation=continued)
    live = SequenceState(request, lambda _: None, given + own, len(given) + continued)
    live.ends = frozenset({END})
    return live


def reference(
    logits: torch.Tensor, s: Sampling, given: list[int], own: list[int], *, written: int | None = None
) -> np.ndarray:
    """Straight from the definitions, one token after the other, in double precision."""
    row = logits.double().clone()
    for token, bias in s.logit_bias.items():
        row[token] += bias
    for token in set(given + own):
        row[token] = row[token] / s.repetition_penalty if row[token] > 0 else row[token] * s.repetition_penalty
    for token in set(own):
        row[token] -= s.presence_penalty + s.frequency_penalty * own.count(token)
    if (len(own) if written is None else written) < s.min_tokens:
        row[END] = -math.inf
    return truncated(row, s)


# -- one step: the distribution that is stated is the one by definition, and the draws follow it ------

SHAPES = [
    dict(repetition_penalty=1.5), dict(repetition_penalty=0.7), dict(presence_penalty=1.1), dict(presence_penalty=-0.8),
    dict(frequency_penalty=0.6), dict(frequency_penalty=-0.4), dict(logit_bias={3: 4.0, 4: -100.0, 11: 1.5}), dict(min_tokens=5),
    dict(repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2, logit_bias={8: 2.0}, min_tokens=6, temperature=0.7),
    {k: v for k, v in EVERYTHING.items() if k != "ignore_eos"} | {"logit_bias": {7: 3.0, 9: -2.0}},
]  # fmt: skip
GIVEN, OWN = [3, 9, 9, 14, 7], [8, 11, 8, 8]


# each transform once, and two sums of them; the other sign of a penalty is another number in the same line
@pytest.mark.parametrize("how", covering(SHAPES, [SHAPES[i] for i in (1, 2, 5, 6, 7, 8, 9)]), ids=str)
@pytest.mark.slow
def test_draws_have_the_stated_distribution(how):
    logits = torch.randn(60, generator=torch.Generator().manual_seed(60)) * 2
    logits[sorted({END, *GIVEN, *OWN})] += 2  # what the transforms touch is likely
    s, n = Sampling(**how), 3_000
    shaped = logits.repeat(n, 1)
    process_logits(shaped, [(row, standing(s, GIVEN, OWN)) for row in range(n)])
    key = sample_key(1, 0, SHAPES.index(how))
    tokens, logprobs = draw(shaped, [s] * n, [draw_uniform(key, t) for t in range(n)])
    p = reference(logits, s, GIVEN, OWN)
    stated = {t: math.exp(lp) for t, lp in zip(tokens, logprobs)}
    assert all(p[t] == pytest.approx(x, rel=2e-5) for t, x in stated.items())
    assert chi_square(np.bincount(tokens, minlength=60), p) > 1e-3
    assert np.abs(p - truncated(logits, s)).sum() > 0.02  # the transform does something: the test can fail


@pytest.mark.slow
@pytest.mark.parametrize("seed", covering(range(5), [0]))
def test_the_stated_distribution_sums_to_one_over_its_support(seed):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(8, 3000, generator=g) * 3
    hows = [
        Sampling(**how)
        for how in (dict(), dict(top_k=5), dict(top_p=0.9), dict(min_p=0.1), dict(top_p=0.999, temperature=3.0))
    ]
    hows += [Sampling(**EVERYTHING), Sampling(top_k=1), Sampling(top_p=1e-6)]
    process_logits(logits, [(5, standing(hows[5], GIVEN, OWN))])
    before = logits.clone()
    p = sampling_weights(logits, hows)
    for row, s in enumerate(hows):
        kept = p[row].double() / p[row].double().sum()
        assert torch.allclose(kept, torch.from_numpy(truncated(before[row], s)), atol=1e-7)
        assert ((kept > 0).numpy() == (truncated(before[row], s) > 0)).all()
        drawn = draw(
            before[row].repeat(2000, 1), [s] * 2000, torch.rand(2000, generator=g, dtype=torch.float64).tolist()
        )
        stated = dict(zip(*drawn))
        assert float(kept.sum()) == pytest.approx(1, abs=1e-9) and sum(map(math.exp, stated.values())) <= 1 + 1e-5
        assert len(stated) < int((kept > 0).sum()) or sum(map(math.exp, stated.values())) == pytest.approx(1, abs=1e-5)
        assert all(math.exp(lp) == pytest.approx(float(kept[t]), rel=1e-5) for t, lp in stated.items())


def test_top_p_that_needs_more_than_the_likely_ones():
    logits = torch.randn(2, 5000, generator=torch.Generator().manual_seed(1)) * 0.1
    p = sampling_weights(logits.clone(), [Sampling(top_p=0.9), Sampling(top_p=0.01)])
    for row, s in enumerate([Sampling(top_p=0.9), Sampling(top_p=0.01)]):
        assert ((p[row] > 0).numpy() == (truncated(logits[row], s) > 0)).all()
    assert int((p[0] > 0).sum()) > 4000


@pytest.mark.parametrize("seed", range(3))
def test_each_transform_is_that_of_transformers(seed):
    g = torch.Generator().manual_seed(seed)
    logits, ids = torch.randn(1, 200, generator=g) * 3, torch.randint(0, 200, (1, 30), generator=g)
    given, own = ids[0, :20].tolist(), ids[0, 20:].tolist()
    for how, theirs in (
        (dict(repetition_penalty=1.4), [RepetitionPenaltyLogitsProcessor(1.4)]),
        (dict(repetition_penalty=0.6), [RepetitionPenaltyLogitsProcessor(0.6)]),
        (dict(logit_bias={5: 2.5, 6: -3.0}), [SequenceBiasLogitsProcessor({(5,): 2.5, (6,): -3.0})]),
        (dict(min_tokens=11), [MinNewTokensLengthLogitsProcessor(20, 11, [END])]),
        (dict(min_tokens=10), [MinNewTokensLengthLogitsProcessor(20, 10, [END])]),
        (dict(temperature=0.7), [TemperatureLogitsWarper(0.7)]),
        (dict(top_k=13), [TopKLogitsWarper(13)]),
        (dict(top_p=0.83), [TopPLogitsWarper(0.83)]),
        (dict(min_p=0.07), [MinPLogitsWarper(0.07)]),
        (
            dict(logit_bias={5: 2.5}, repetition_penalty=1.2, min_tokens=12, temperature=1.4, top_k=50, top_p=0.9),
            [
                SequenceBiasLogitsProcessor({(5,): 2.5}), RepetitionPenaltyLogitsProcessor(1.2), MinNewTokensLengthLogitsProcessor(20, 12, [END]),
                TemperatureLogitsWarper(1.4), TopKLogitsWarper(50), TopPLogitsWarper(0.9),
            ],
        ),
    ):  # fmt: skip
        s, ours = Sampling(**how), logits.clone()
        process_logits(ours, [(0, standing(s, given, own))])
        p = sampling_weights(ours, [s])[0]
        expected = LogitsProcessorList(theirs)(ids, logits.clone())[0].softmax(-1)
        assert torch.allclose(p / p.sum(), expected, atol=1e-6), how
        assert ((p > 0) == (expected > 0)).all(), how


def test_a_row_does_not_change_its_neighbours():
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(2))
    together = logits.clone()
    rows = [
        (1, standing(Sampling(**EVERYTHING), GIVEN, OWN)),
        (3, standing(Sampling(presence_penalty=1.0, logit_bias={299: 1.0}), GIVEN, OWN)),
    ]
    process_logits(together, rows)
    assert torch.equal(together[0], logits[0]) and torch.equal(together[2], logits[2])
    for row, live in rows:
        alone = logits[row : row + 1].clone()
        process_logits(alone, [(0, live)])
        assert torch.equal(alone[0], together[row])


def test_a_continuation_counts_as_written():
    logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(3))
    s = Sampling(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.1)
    whole, rest = logits.clone(), logits.clone()
    process_logits(whole, [(0, standing(s, GIVEN, OWN))])
    process_logits(rest, [(0, standing(s, GIVEN, OWN, continued=3))])
    assert torch.equal(whole, rest)


# -- the engine --------------------------------------------------------------------------------------


def check_stated(model, request, completion):
    """Every stored logprob against the definitions on a plain forward."""
    s, given = request.sampling, request.tokens
    logits = plain_logits(model, given + completion.tokens)[len(given) - 1 : -1]
    for t, (row, token, logprob) in enumerate(zip(logits, completion.tokens, completion.logprobs)):
        p = reference(row, s, given, completion.tokens[:t])
        assert p[token] > 0 and math.log(p[token]) == pytest.approx(logprob, abs=1e-5)
        if completion.support and completion.support[t] is not None:
            assert completion.support[t] == np.flatnonzero(p).tolist()


@pytest.mark.slow
def test_everything_at_once_states_the_truth_whatever_the_schedule():
    requests = [
        replace(ask(prompt(i, 5 + 3 * i), key=i, n=20, **(EVERYTHING if i % 3 else {})), wants=ALL) for i in range(9)
    ]
    free = asyncio.run(all_of(engine(MODEL), requests))
    for request, c in zip(requests, free):
        check_stated(MODEL, request, c)
        assert END not in c.tokens[:9] or request.sampling.min_tokens == 0
    tight = engine(MODEL, kv_pages=100, prefill_tokens=9, max_running=5)
    pressed = asyncio.run(all_of(tight, requests))
    assert tight.scheduler.retracted > 0
    idle(tight)
    for a, b in zip(pressed, free):
        assert (a.tokens, a.support, a.finish_reason, a.text) == (b.tokens, b.support, b.finish_reason, b.text)
        for stream in ("logprobs", "raw_logprobs", "prompt_logprobs"):
            assert getattr(a, stream) == pytest.approx(getattr(b, stream), abs=1e-5)
        assert [[i for i, _ in row] for row in a.top_logprobs] == [[i for i, _ in row] for row in b.top_logprobs]


@pytest.mark.parametrize("how", [dict(), dict(temperature=0.6, top_k=5), dict(temperature=0.0), EVERYTHING], ids=str)
def test_raw_streams_are_a_plain_forward(how):
    p = prompt(3, 20)
    e = engine(MODEL, prefill_tokens=7)
    asyncio.run(e.generate(ask(p, n=2)))  # the prompt is cached now, and its logprobs are wanted nevertheless
    c = asyncio.run(e.generate(replace(ask(p, n=12, **how), wants=ALL)))
    assert c.cached_tokens > 0
    plain = plain_logits(MODEL, p + c.tokens).log_softmax(-1)
    assert c.prompt_logprobs == pytest.approx([0.0, *plain_logprobs(MODEL, p)], abs=1e-5)
    assert c.raw_logprobs == pytest.approx(plain_logprobs(MODEL, p + c.tokens)[len(p) - 1 :], abs=1e-5)
    for row, best in zip(plain[len(p) - 1 : -1], c.top_logprobs, strict=True):
        values, ids = row.topk(3)
        assert [i for i, _ in best] == ids.tolist() and [v for _, v in best] == pytest.approx(values.tolist(), abs=1e-5)
    assert all(entry is None for entry in c.support) == (not how or how["temperature"] == 0)
    bare = asyncio.run(e.generate(ask(p, n=12, **how)))
    assert (bare.tokens, bare.raw_logprobs, bare.top_logprobs, bare.prompt_logprobs, bare.support) == (
        c.tokens,
        None,
        None,
        None,
        None,
    )


def test_the_support_is_all_that_the_logprob_needs():
    """What a trainer would do: logits over temperature, normalised over the recorded ids."""
    p, how = prompt(4, 12), dict(temperature=1.2, top_k=9, top_p=0.9, min_p=0.01)
    c = asyncio.run(engine(MODEL).generate(replace(ask(p, n=20, **how), wants=frozenset({"support"}))))
    logits = plain_logits(MODEL, p + c.tokens)[len(p) - 1 : -1] / 1.2
    for row, token, ids, logprob in zip(logits, c.tokens, c.support, c.logprobs):
        assert float(row[token] - row[ids].logsumexp(0)) == pytest.approx(logprob, abs=1e-5)
        assert 1 <= len(ids) <= 9 and token in ids


@pytest.mark.parametrize(
    "wants, says",
    [
        ("raw_logprob", "no raw_logprob; it has raw_logprobs"),
        ("top_logprobs", "top_logprobs:5"),
        ("top_logprobs:0", "at least 1"),
        ("top_logprobs:999", "at most 105"),
    ],
)
def test_a_wish_that_nobody_reads_is_an_error(wants, says):
    with pytest.raises(UserError, match=says):
        asyncio.run(engine(MODEL).generate(replace(ask([5, 6]), wants=frozenset({wants}))))


@pytest.mark.parametrize("how", [dict(logit_bias={105: 1.0}), dict(logit_bias={-1: 1.0}), dict(stop=(400,))])
def test_a_token_that_does_not_exist_is_refused(how):
    with pytest.raises(UserError, match="this model's tokens are 0 to 104"):
        asyncio.run(engine(MODEL).generate(ask([5, 6], **how)))


@pytest.mark.parametrize(
    "how, says",
    [
        (dict(repetition_penalty=0.0), "repetition_penalty"), (dict(presence_penalty=3), "presence_penalty"),
        (dict(frequency_penalty=math.nan), "frequency_penalty"), (dict(logit_bias={3: math.inf}), "logit_bias"),
        (dict(logit_bias={3: math.nan}), "logit_bias"), (dict(stop="end"), "give a tuple"), (dict(stop=("",)), "empty string"),
        (dict(grammar={}), "exactly one"), (dict(grammar={"regexp": "a"}), "exactly one"),
        (dict(grammar={"regex": "a"}, ignore_eos=True), "ignore_eos with a grammar"),
    ],
)  # fmt: skip
def test_values_that_mean_nothing(how, says):
    with pytest.raises(ValueError, match=says):
        Sampling(**how)


def test_what_cannot_be_trained_is_named():
    assert Sampling(temperature=0.7, stop=("x", 3), ignore_eos=True, n=4, seed=3).untrainable_settings == ""
    assert Sampling(**EVERYTHING | {"min_tokens": 0}).untrainable_settings == (
        "repetition_penalty, presence_penalty, frequency_penalty, logit_bias"
    )
    assert (
        Sampling(temperature=0, min_tokens=2, grammar={"regex": "a"}).untrainable_settings
        == "temperature, min_tokens, grammar"
    )


def test_training_refuses_what_evaluation_may_use():
    from rondel.core.config.task import EvaluationConfig
    from rondel.driver.evaluation import evaluation_sampling
    from rondel.generate.envs.episode import refuse_untrainable

    more = {"top_p": 0.9, "logit_bias": {"5": 1.0}, "repetition_penalty": 1.1, "stop": ["x", 7]}
    s = evaluation_sampling(
        EvaluationConfig(sampling={"temperature": 0.5, **more}), Sampling(max_tokens=9, stop=("y",))
    )
    assert s == Sampling(
        temperature=0.5, max_tokens=9, top_p=0.9, logit_bias={5: 1.0}, repetition_penalty=1.1, stop=("x", 7)
    )
    assert evaluation_sampling(EvaluationConfig(), Sampling(max_tokens=9, stop=("y",))) == Sampling(
        temperature=0, max_tokens=9, stop=("y",)
    )
    with pytest.raises(ConfigError, match="drawn with repetition_penalty, logit_bias cannot be trained"):
        refuse_untrainable(s)


# -- where a sample ends -----------------------------------------------------------------------------


def text_of(tokens):
    return MODEL.tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.slow
def test_stop_strings_end_a_sample_across_tokens():
    p = prompt(8, 9)
    free = asyncio.run(engine(MODEL).generate(ask(p, key=1, n=30)))
    for at, size in ((3, 1), (6, 3), (12, 5), (25, 5)):
        stop = text_of(free.tokens[at : at + size])
        ends = free.text.find(stop) + len(stop)
        c = asyncio.run(engine(MODEL).generate(ask(p, key=1, n=30, stop=(stop, "never written"))))
        assert (
            c.finish_reason == "stop"
            and c.tokens == free.tokens[: len(c.tokens)]
            and c.logprobs == free.logprobs[: len(c.tokens)]
        )
        assert len(text_of(c.tokens)) == ends and c.text == free.text[: ends - len(stop)]


def test_a_stop_string_may_begin_in_a_continuation_and_not_end_there():
    p = prompt(8, 9)
    free = asyncio.run(engine(MODEL).generate(ask(p, key=1, n=30)))
    stop = text_of(free.tokens[8:13])
    rest = replace(ask(p + free.tokens[:10], key=1, n=20, stop=(stop,)), continuation=10)
    c = asyncio.run(engine(MODEL).generate(rest))
    assert (c.tokens, c.text, c.finish_reason) == (free.tokens[10:13], "", "stop")
    over = replace(ask(p + free.tokens[:13], key=1, n=17, stop=(stop,)), continuation=13)
    assert asyncio.run(engine(MODEL).generate(over)).tokens == free.tokens[13:]


@pytest.mark.slow
def test_min_tokens_forbids_ends_and_passes_over_early_stop_strings():
    """As in vLLM: ends are masked, so the logprob is that of what is left; strings cannot be masked."""
    model, p = tiny(), prompt(8, 9)
    free = asyncio.run(engine(model).generate(ask(p, key=1, n=20)))
    model.stop_ids = frozenset([free.tokens[3]])
    early = asyncio.run(engine(model).generate(ask(p, key=1, n=20, ignore_eos=False)))
    assert (early.tokens, early.finish_reason) == (free.tokens[:4], "stop")
    late = asyncio.run(
        engine(model).generate(ask(p, key=1, n=20, ignore_eos=False, min_tokens=7, stop=(free.tokens[1],)))
    )
    assert not {free.tokens[3], free.tokens[1]} & set(late.tokens[:7]) and len(late.tokens) >= 7
    row = plain_logits(model, p + late.tokens)[len(p) - 1]
    row[[free.tokens[3], free.tokens[1]]] = -math.inf
    assert late.logprobs[0] == pytest.approx(float(row.log_softmax(-1)[late.tokens[0]]), abs=1e-5)
    first, second = text_of(free.tokens[2:4]), text_of(free.tokens[14:16])
    assert free.text.count(first) == free.text.count(second) == 1
    c = asyncio.run(engine(model).generate(ask(p, key=1, n=20, min_tokens=4, stop=(first, second))))
    assert (c.text, c.tokens) == (text_of(free.tokens[:14]), free.tokens[:16])


def test_the_name_of_a_special_token_is_its_id():
    tokenizer = MODEL.tokenizer
    assert split_stops(tokenizer, ("<user>", "ab", 7)) == ({7, tokenizer.convert_tokens_to_ids("<user>")}, ("ab",))
    with pytest.raises(UserError, match="special token '<user>'"):
        split_stops(tokenizer, ("ab<user>",))


@pytest.fixture(scope="module")
def bytes_tokenizer():
    """One token a byte: characters of several bytes arrive in pieces."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("seed", range(20))
def test_the_reader_finds_what_a_search_of_the_whole_text_finds(bytes_tokenizer, seed):
    rng = np.random.default_rng(seed)
    text = "".join(rng.choice(list("aé 漢🙂b\n"), 60))
    tokens = bytes_tokenizer.encode(text)
    at, size, given = int(rng.integers(5, 40)), int(rng.integers(1, 6)), int(rng.integers(0, 4))
    stops = (text[at : at + size], "zz")
    before = text.find(stops[0])
    reader = open_reader(bytes_tokenizer, stops, tokens[:given])
    for n in range(given + 1, len(tokens) + 1):
        if (said := reader.find_stop(tokens[:n])) is not None:
            break
    assert bytes_tokenizer.decode(tokens[:n]) == text[: before + len(stops[0])] and n > given
    assert text[:before].endswith(said) and len(said) >= before - given


@pytest.mark.parametrize("n", [0, 1, 8, 9, 100])
def test_many_uniforms_are_those_drawn_one_by_one(n):
    noise = np.random.default_rng(n)
    keys = [int.from_bytes(noise.bytes(16), "little") for _ in range(n)]
    ts = [0, 2**63, *noise.integers(0, 2**62, 100).tolist()][:n]
    assert draw_uniforms(keys, ts) == [draw_uniform(key, t) for key, t in zip(keys, ts, strict=True)]
