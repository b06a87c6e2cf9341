"""One module for both sides: packed training, paged serving and transformers' own
attention give the same logprobs, family by family.
"""

from __future__ import annotations

import asyncio
import re

import pytest
import torch
from transformers import AutoConfig

from kits.engine import SIZE, all_of, ask, engine, idle, plain_logits, plain_logprobs, prompt
from kits.families import (
    AT_ONCE,
    FAMILIES,
    LINES,
    ONE_OF_EACH,
    PARTS,
    REFUSED,
    measure,
    model,
    own,
    refusal,
    rounding_noise,
)
from kits.families import row as line_of
from kits.pipeline import pass_through, siblings_row, stages_of
from kits.processor import rows_alike
from kits.sweeps import covering
from kits.train import apart
from rondel.core.errors import ModelError
from rondel.models.architectures import refuse_architecture
from rondel.models.load import _max_context, load_model
from rondel.models.packed_layout import PackedLayout, PackedSegment


def one_of_each_note(preferred):
    """A covering set: families that have, together, every note of docs/families.md that `ONE_OF_EACH` has in some company,
    and are dense and mixtures. A family is taken if it brings a note that none before has.
    """
    notes = {
        line.split("`")[1]: set(re.split(r"[,|] ", "|".join(line.split("|")[4:6]))) for line in LINES if "`" in line
    }
    found, seen = [], set()
    for kind in [*preferred, *(kind for kind in ONE_OF_EACH if kind not in preferred)]:
        if new := {note.strip() for note in notes.get(kind, {kind})} - seen:
            found.append(kind)
            seen |= new
    return found


# family by family: each is made once. Those of smaller companies come first
TRAITS = {*one_of_each_note([*AT_ONCE, "zamba", "bamba", "qwen3_5_text", "qwen2_vl"]), *AT_ONCE}
EACH_MECHANISM = pytest.mark.parametrize("kind", covering(FAMILIES, TRAITS, fast=AT_ONCE), scope="module")
# with them, each norm, each activation behind a gate and each way to join experts that any family has
KEPT_ALIKE = (
    "beam",
    "cohere",
    "gemma",
    "gpt_oss",
    "helium",
    "hy_v4",
    "mamba",
    "minimax_m3_vl_text",
    "nemotron_h",
    "olmo",
)
KEPT_ALIKE += ("qwen3_next", "vaultgemma")
EACH_MODULE = pytest.mark.parametrize("kind", covering(FAMILIES, {*TRAITS, *KEPT_ALIKE}, fast=AT_ONCE), scope="module")
# in one stage: inputs of each layer beside the hidden states, stacks that run several times, layers that read the
# embeddings again, one layer
ONE_STAGE = ("gemma3n_text", "gemma4_text", "gemma4", "hrm_text", "zamba", "zamba2", "longcat_flash", "zaya")


def packed_logprobs(loaded, shared, tails):
    """One shared prompt, siblings after it, and a stranger before both. -> log p of every tail token, one row a tail."""
    rows, segments, positions = [prompt(99, 13), shared, *tails], [], []
    for i, row in enumerate(rows):
        start = sum(map(len, rows[:i]))
        segments.append(PackedSegment(start, len(row), 1 if i > 1 else None))
        first = len(shared) if i > 1 else 0
        positions += range(first, first + len(row))
    tokens = torch.tensor([t for row in rows for t in row])
    hidden = loaded.hidden_states(tokens, torch.tensor(positions), PackedLayout(segments))
    logp = loaded.head.logits(hidden).log_softmax(-1)
    out = []
    for segment, tail in zip(segments[2:], tails):
        sources = [segments[1].start + len(shared) - 1, *range(segment.start, segment.start + len(tail) - 1)]
        out.append(logp[sources, tail])
    return out


def gap(a, b):
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


@pytest.mark.slow
@EACH_MECHANISM
def test_packed_and_paged_equal_the_plain_forward(kind):
    loaded, shared = model(kind), prompt(7, 21)
    e = engine(loaded, prefill_tokens=16)
    done = asyncio.run(all_of(e, [ask(shared, key=i, n=n) for i, n in enumerate((7, 3, 5, 1))]))
    idle(e)
    assert (e.pages.keys.pool_bytes + e.pages.values.pool_bytes) / (e.pages.count + 1) == loaded.cached, (
        "what a page is billed at"
    )
    assert loaded.cached or loaded.state_bytes
    tails = [c.tokens for c in done]
    plain = [plain_logprobs(loaded, shared + tail)[len(shared) - 1 :] for tail in tails]
    with torch.no_grad():
        packed = [row.tolist() for row in packed_logprobs(loaded, shared, tails)]
    again = asyncio.run(e.generate(ask(shared, key=0, n=7)))
    assert again.cached_tokens >= len(shared) - 1 and again.tokens == tails[0]
    off = gap(again.logprobs, done[0].logprobs)
    # or what fp32 costs the two of a family with large logits; one rounding of a logprob of 8 to 16 is 1e-6
    assert off <= 1e-5 or off <= 2 * rounding_noise(kind, shared + tails[0], 7) + 1e-6, "a cached prefix answers alike"
    worst = max(gap(a, b) for a, b in zip(packed, plain)), max(gap(c.logprobs, b) for c, b in zip(done, plain))
    print(f"GAP {kind}: packed {worst[0]:.1e}, paged {worst[1]:.1e}")
    assert max(worst) <= 1e-4
    assert max(map(max, plain)) - min(map(min, plain)) > 1  # neither uniform nor certain


@EACH_MECHANISM
def test_what_neighbours_say_changes_no_bit(kind):
    """Logprobs and gradient of a prompt and two answers, with other samples of other words and the same lengths before and behind
    them. A mixture's experts add up rows of everybody: their gradient is equal but for the order of its sums.
    """
    loaded, tails = model(kind), [prompt(8, 9), prompt(9, 4)]
    named = [p for p in loaded.model.parameters() if p.requires_grad]
    found = []
    for who in (99, 55):
        rows = [prompt(who, 13), prompt(7, 21), *tails, prompt(who + 1, 17)]
        starts = [sum(map(len, rows[:i])) for i in range(len(rows))]
        segments = [
            PackedSegment(at, len(row), 1 if i in (2, 3) else None) for i, (at, row) in enumerate(zip(starts, rows))
        ]
        positions = torch.cat([torch.arange(len(row)) + 21 * (i in (2, 3)) for i, row in enumerate(rows)])
        with torch.enable_grad():
            hidden = loaded.hidden_states(
                torch.tensor([t for row in rows for t in row]), positions, PackedLayout(segments)
            )
            logp = loaded.head.logits(hidden).log_softmax(-1)[13:47]
            weight = torch.randn(logp.shape, generator=torch.Generator().manual_seed(0))
            found.append((logp.detach(), torch.autograd.grad((logp * weight).sum(), named, allow_unused=True)))
    (one, ours), (other, theirs) = found
    if (
        loaded.routers and not rows_alike()
    ):  # an expert reads few rows, and how many there are is the neighbours' matter
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    else:
        assert torch.equal(one, other)
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None]
    if loaded.routers:
        norms = [(float((a - b).norm()), float(b.norm())) for a, b in pairs]
        assert sum(d * d for d, _ in norms) <= 1e-12 * sum(n * n for _, n in norms)
    else:
        assert all(torch.equal(a, b) for a, b in pairs)


SIGHTS = [
    (kind, key)
    for kind, config in FAMILIES.items()
    for key in ("sliding_window", "attention_chunk_size")
    if key in config
]


# of those that are compared in `make test`
@pytest.mark.parametrize("kind, key", covering(SIGHTS, [s for s in SIGHTS if s[0] in {*TRAITS, *KEPT_ALIKE}]))
def test_the_window_matters_here(kind, key):
    """A token just outside every window of one layer's reach would change the answer if it
    were seen: otherwise parity proves nothing.
    """
    loaded = model(kind)
    row = prompt(7, 40)
    config, text = loaded.model.config.get_text_config(), plain_logits(loaded, row)
    was = getattr(config, key)
    owners = [config, *(m for m in loaded.model.modules() if getattr(m, key, None))]
    for owner in owners:
        setattr(owner, key, 4096)
    try:
        assert float((plain_logits(loaded, row) - text).abs().max()) > 1e-3
    finally:
        for owner in owners:
            setattr(owner, key, was)


@pytest.mark.parametrize("kind", [kind for kind, part in PARTS.items() if "attention sinks" in part])
def test_the_sinks_matter_here(kind):
    loaded = model(kind)
    sinks = [p for name, p in loaded.model.named_parameters() if name.endswith("sinks")]
    row = torch.tensor(prompt(7, 20))
    with torch.no_grad():
        was, answers = [p.clone() for p in sinks], []
        for change in (0.0, 1.0):
            for p, own_value in zip(sinks, was):
                p.copy_(own_value + change)
            answers.append(loaded.hidden_states(row, torch.arange(20), PackedLayout([PackedSegment(0, 20)])))
        for p, own_value in zip(sinks, was):
            p.copy_(own_value)
    assert sinks and float((answers[0] - answers[1]).abs().max()) > 1e-2


@EACH_MODULE
def test_greedy_tokens_logprobs_and_routes_are_those_of_transformers(kind):
    """Against `generate` and a forward pass of a fresh module that has nothing of ours in it."""
    m = measure(kind)
    assert m.greedy and m.obeyed and m.gap <= 1e-4 and (m.replayed or 0) <= 1e-4, m
    assert (m.replayed is None) == (not model(kind).routers)
    assert line_of(kind) in LINES, "run: python docs/make_families.py"


@EACH_MODULE
def test_gradients_of_all_weights_are_those_of_transformers(kind):
    """Of a weighted sum of logprobs. Two answers behind one shared prompt, with a stranger in the same pack, against
    transformers with one row an answer: every family trains, and trains what it serves. What is ours in a backward pass
    is the attention and the states, which the notes of docs/families.md tell apart, and what is kept of norms and gates
    (models/kept_inputs.py): one family of each; `make sweeps` has all.
    """
    loaded, fresh = model(kind), own(kind)
    shared, tails = prompt(5, 14), [prompt(6, 10), prompt(7, 7)]
    with torch.enable_grad():
        rows = [torch.tensor(shared + tail) for tail in tails]
        plain = [fresh(row[None], use_cache=False).logits[0, :-1].log_softmax(-1) for row in rows]
        plain = [logp.gather(1, row[1:, None])[len(shared) - 1 :, 0] for logp, row in zip(plain, rows)]
        sums = [
            (torch.cat(x) * torch.linspace(-1, 1, 17)).sum() for x in (packed_logprobs(loaded, shared, tails), plain)
        ]
        named = [(name, p) for name, p in loaded.model.named_parameters() if p.requires_grad]
        ours = torch.autograd.grad(sums[0], [p for _, p in named], allow_unused=True)
        theirs = torch.autograd.grad(sums[1], [fresh.get_parameter(name) for name, _ in named], allow_unused=True)
    for (name, _), a, b in zip(named, ours, theirs, strict=True):
        assert (a is None) == (b is None), name
        assert a is None or float((a - b).norm()) <= 1e-3 * float(b.norm()) + 1e-5, name
    pairs = [(a, b) for a, b in zip(ours, theirs) if a is not None]
    whole = float(torch.stack([b.norm() for _, b in pairs]).norm())
    assert float(torch.stack([(a - b).norm() for a, b in pairs]).norm()) <= 1e-5 * whole


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    covering(
        [kind for kind in FAMILIES if kind not in ONE_STAGE],
        [kind for kind in FAMILIES if kind in TRAITS and kind not in ONE_STAGE],
    ),
    scope="module",
)
def test_a_family_in_two_stages_is_the_same_model(kind):
    """Two siblings behind a prompt pass through both stages of one process: hidden states, and gradients of all weights."""
    loaded, (tokens, positions, layout) = model(kind), siblings_row()
    weights = torch.randn(11, loaded.head.weight.shape[1], generator=torch.Generator().manual_seed(1))
    stages = stages_of(loaded, 2)
    for stage in stages:
        stage.model.requires_grad_(True)
    frozen = [p for p in loaded.model.parameters() if not p.requires_grad]
    loaded.model.requires_grad_(True)
    try:
        whole = loaded.hidden_states(tokens, positions, layout())
        names, owned = zip(*loaded.model.named_parameters())
        grads = torch.autograd.grad((whole * weights).sum(), owned, allow_unused=True)
    finally:
        for p in frozen:
            p.requires_grad_(False)
    hidden, sent = pass_through(stages, tokens, positions, layout)
    torch.testing.assert_close(hidden, whole)
    (hidden * weights).sum().backward()
    for one in reversed(sent):
        one.backward()
    expected = {name: grad for name, grad in zip(names, grads) if grad is not None}
    found: dict[str, torch.Tensor] = {}
    for stage in stages:
        for n, p in stage.model.named_parameters():
            if p.grad is not None:
                found[n] = found[n] + p.grad if n in found else p.grad
    assert found.keys() == expected.keys()
    assert apart(*(torch.cat([of[n].flatten() for n in expected]) for of in (found, expected))) <= 1e-6


@pytest.mark.slow
# one for each reason: gemma4 and gemma4_text are refused as gemma3n_text is, zamba2 as zamba, zaya as longcat_flash
@pytest.mark.parametrize(
    "kind", covering(ONE_STAGE, ["gemma3n_text", "hrm_text", "zamba", "longcat_flash"]), scope="module"
)
def test_what_needs_more_than_hidden_states_is_never_silently_wrong(kind):
    """In stages it does not run, or gives no number; a trainer tries every model and refuses it (train/fsdp.py)."""
    tokens, positions, layout = siblings_row()
    try:
        hidden, _ = pass_through(stages_of(model(kind), 2), tokens, positions, layout)
    except (RuntimeError, AttributeError, ModelError):
        return
    assert hidden.isnan().any()


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_carried_is_refused_by_name(kind):
    said = refusal(kind)
    assert REFUSED[kind][1] in said and f"'{kind}'" in said and "docs/families.md" in said and "vLLM" not in said
    assert line_of(kind) in LINES, "run: python docs/make_families.py"


def test_the_page_has_a_line_for_each_family_and_no_other():
    assert [line.split("`")[1] for line in LINES if line.startswith("| `")] == sorted([*FAMILIES, *REFUSED])


def test_falcon_is_refused_with_alibi_and_without():
    for alibi, why in ((True, "ALiBi"), (False, "attention interface")):
        with pytest.raises(ModelError, match=why):
            refuse_architecture(AutoConfig.for_model("falcon", alibi=alibi))


@pytest.mark.parametrize("kind", ["bert-generation", "roberta"])
def test_an_encoder_may_be_told_to_decode(kind):
    """Its class is the same; whether it then works is for the proof at load to say."""
    refuse_architecture(AutoConfig.for_model(kind, is_decoder=True))


def test_a_key_that_a_config_only_drags_along_refuses_nothing():
    """config.json of a decoder may still say "is_decoder": false, as all did once."""
    refuse_architecture(AutoConfig.for_model("llama", is_decoder=False))


def test_longrope_carries_the_range_in_which_a_position_means_the_same_in_every_batch():
    """Beyond it transformers takes other frequencies for the whole batch as soon as one token is there."""
    n = SIZE["hidden_size"] // SIZE["num_attention_heads"] // 2
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * n,
        "long_factor": [4.0] * n,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 64,
    }
    loaded = load_model(
        {"random": "phi3", **SIZE, "original_max_position_embeddings": 64, "rope_parameters": rope}, dtype="float32"
    )
    assert loaded.max_context == _max_context(loaded.model.config) == 64
    assert model("phi3").max_context == 512


def test_a_head_that_is_not_carried_is_noticed_at_load(monkeypatch):
    """The proof at load compares logprobs: a final softcap that the head forgot must not pass."""
    from rondel.models.head import LMHead

    whole = LMHead.from_model
    monkeypatch.setattr(LMHead, "from_model", lambda m: LMHead(whole(m).weight, scale=7.0))
    with pytest.raises(ModelError, match=re.escape("packed attention differs from the model's own by")):
        load_model({"random": "llama", **SIZE}, dtype="float32")
