"""A model that looks: trainer = prefill = decode = transformers' own pass, and what must never be shared is not."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from kits.engine import all_of, engine, idle, watched
from kits.sweeps import covering
from kits.train import row, trainer
from kits.vision import (
    EYES,
    MUTUAL,
    ask,
    gradient,
    groups_with_images,
    image,
    model,
    own_logprobs,
    recipe,
    stream,
    trajectory,
)
from rondel.core.errors import ConfigError, ModelError, UserError
from rondel.core.media import rope_positions
from rondel.core.types import Group, Sampling, Score, Task
from rondel.generate.envs.chat import TokenChat
from rondel.models import nf4, packed_layout, vision
from rondel.models.adapters import add_adapter
from rondel.models.aligned_numerics import align_numerics
from rondel.models.load import load_model
from rondel.models.vision_families import FAMILIES
from rondel.train import annotate as notes
from rondel.train import pack as packing
from rondel.train.pack import batch_of, pack_samples

KINDS = sorted(EYES)
LIMIT = 1e-4
KEYS = {"qwen3_vl_moe": 51}  # of the first request: under 31 its policy draws a placeholder


def streams(m):
    a, b = image(m, 1), image(m, 2, 3, 4)
    return [stream(m, 3, a, 6, seed=1), stream(m, 2, b, 3, a, 9, seed=2), stream(m, 12, seed=3)]


@pytest.mark.slow
# mixtures: their routes are replayed below; gemma4 and idefics3: as with images that see themselves, and as smolvlm
@pytest.mark.parametrize(
    "kind",
    covering(
        [*KINDS, MUTUAL],
        [*(k for k in KINDS if k not in ("gemma4", "idefics3", "qwen3_5_moe", "qwen3_vl_moe")), MUTUAL],
    ),
)
def test_engine_trainer_and_transformers_agree(kind):
    m = model(kind)
    given = streams(m)
    e = watched(engine(m, prefill_tokens=7))  # chunks that cut pictures
    done = asyncio.run(all_of(e, [ask(*g, key=i + KEYS.get(kind, 31)) for i, g in enumerate(given)]))
    idle(e)
    assert e.runner.eyes.looked == 2, "two different pictures in three prompts"
    assert not any(m.sight.placeholder in d.tokens for d in done), "transformers could not judge it"
    whole = [(g[0] + d.tokens, g[1]) for g, d in zip(given, done)]
    own = own_logprobs(m, whole)
    groups = [
        Group(i, Task(f"t{i}", "x", {}), [trajectory(m, g, d.tokens, d.logprobs)], 0)
        for i, (g, d) in enumerate(zip(given, done))
    ]
    for g in groups:
        g.trajectories[0].score = Score(1.0)
    batch = notes.annotate_logprobs(m, batch_of(groups), "proximal", budget=10**6, temperature=1.0)
    for sample, d, theirs, (tokens, media) in zip(batch.samples, done, own, whole):
        written = theirs[-len(d.tokens) :]
        assert max(abs(np.subtract(d.logprobs, written))) < LIMIT, "decode"
        assert max(abs(np.subtract(sample.known.proximal.numpy(), written))) < LIMIT, "trainer"
        scored = asyncio.run(e.score(ask(tokens, media))).logprobs
        assert max(abs(np.subtract(scored[1:], theirs))) < LIMIT, "prefill"


@pytest.mark.slow
def test_aligned_numerics_have_the_same_bits_with_pictures():
    """Engine in chunks, several pictures encoded one by one; trainer with siblings and all pictures at once."""
    m = model()
    align_numerics(m)
    given = [g for g in streams(m) for _ in range(2)]
    done = asyncio.run(all_of(engine(m, prefill_tokens=7), [ask(*g, key=i + 1) for i, g in enumerate(given)]))
    groups = [
        Group(i // 2, Task("t", "x", {}), [trajectory(m, g, d.tokens, d.logprobs)], 0)
        for i, (g, d) in enumerate(zip(given, done))
    ]
    for g in groups:
        g.trajectories[0].score = Score(1.0)
    batch = notes.annotate_logprobs(m, batch_of(groups), "proximal", budget=10**6, temperature=1.0)
    assert all(np.array_equal(s.known.proximal.numpy(), s.known.behavior.numpy()) for s in batch.samples)


@pytest.mark.slow
def test_positions_and_pictures_are_what_makes_them_agree():
    """Text positions, or another picture, would show: a test that nothing can fail proves nothing."""
    m = model()
    tokens, media = stream(m, 3, image(m, 1, 2, 3), 6)
    [right] = own_logprobs(m, [(tokens, media)])
    other = [replace(place, image=image(m, 9, 2, 3)) for place in media]
    scored = asyncio.run(engine(m).score(ask(tokens, other))).logprobs[1:]
    assert max(abs(np.subtract(scored, right))) > 0.1
    ids, seen = (
        torch.tensor(tokens),
        vision.VisionFeatures(torch.arange(3, media[0].end), m.encode_images([media[0].image])),
    )
    layout = packing.PackedLayout([packing.PackedSegment(0, len(ids))])
    with torch.no_grad():
        hidden = m.hidden_states(ids, torch.arange(len(ids)), layout, seen=seen)
        plain = m.head.logits(hidden).log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
    assert max(abs(np.subtract(plain.tolist(), right))) > 0.01


@pytest.mark.parametrize("kind", [kind for kind in KINDS if FAMILIES[kind].mrope])
def test_positions_are_those_of_transformers(kind):
    m = model(kind)
    for tokens, media in streams(m)[:2]:
        given = vision.as_given(m.sight, tokens, media)
        theirs, delta = m.model.model.get_rope_index(
            torch.tensor([tokens]), mm_token_type_ids=given["mm_token_type_ids"], image_grid_thw=given["image_grid_thw"]
        )
        ours = rope_positions(len(tokens), media)
        assert np.array_equal(ours, theirs[:, 0].numpy())
        assert packing.media.position_shift(media) == int(delta)
        cut = media[0].end - 1  # in the middle of a picture
        assert np.array_equal(rope_positions(cut, media), ours[:, :cut])


@pytest.mark.slow
def test_patches_are_those_of_the_processor_of_transformers():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from rondel.generate.pictures import seen_as

    sight = model().sight
    theirs = Qwen2VLImageProcessorPil(min_pixels=sight.least, max_pixels=sight.most)
    for width, height in ((56, 56), (100, 37), (613, 801), (1900, 1400), (20, 9)):
        raw = Pillow.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))
        given, ours = theirs(raw), seen_as(raw, sight)
        assert given["image_grid_thw"][0].tolist() == [1, 2 * ours.rows, 2 * ours.columns]
        assert np.abs(vision.image_patches(ours, sight) - given["pixel_values"]).max() < 1e-5


@pytest.mark.slow
def test_squares_are_those_of_the_processor_of_transformers():
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    from rondel.generate.pictures import seen_as

    sight = model("gemma3").sight
    theirs = Gemma3ImageProcessorPil(size={"height": sight.side, "width": sight.side})
    for width, height in ((48, 48), (100, 37), (613, 801), (20, 9)):
        raw = Pillow.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))
        ours = vision.image_patches(seen_as(raw, sight), sight)
        assert np.abs(ours - theirs(raw, return_tensors="np")["pixel_values"]).max() < 1e-5


@pytest.mark.slow
def test_positioned_patches_are_those_of_the_processor_of_transformers():
    """Patches, their positions, and sizes that fill what an image may have."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    from rondel.generate.pictures import seen_as

    m = model("gemma4")
    sight = replace(m.sight, least=70 * m.sight.token_pixels**2, most=70 * m.sight.token_pixels**2)
    theirs = Gemma4ImageProcessorPil(patch_size=sight.patch, pooling_kernel_size=sight.merge, max_soft_tokens=70)
    for width, height in ((48, 48), (100, 37), (613, 801), (20, 9), (2000, 20), (9, 900)):
        raw = Pillow.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))
        given, ours = theirs(raw, return_tensors="pt"), seen_as(raw, sight)
        assert given["num_soft_tokens_per_image"].tolist() == [ours.tokens]
        mine = vision.as_given(sight, [sight.placeholder] * ours.tokens, [vision.ImagePlaceholder(0, ours)])
        assert (mine["pixel_values"] - given["pixel_values"]).abs().max() < 1e-5
        assert torch.equal(mine["image_position_ids"], given["image_position_ids"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", covering(["gemma3", MUTUAL], [MUTUAL]))  # it has layers of both kinds
def test_greedy_answers_are_those_of_transformers_where_image_tokens_see_each_other(kind):
    """In all layers of Gemma 3, in the sliding ones of Gemma 4; images are not cut, whatever a chunk may take."""
    m = model(kind)
    assert m.sight.mutual and not model("gemma4").sight.mutual
    tokens, media = stream(m, 3, image(m, 1), 2, image(m, 2), 6)
    other = copy.deepcopy(m.model)
    other.set_attn_implementation("eager")
    given = vision.as_given(m.sight, tokens, media)
    theirs = other.generate(torch.tensor([tokens]), **given, max_new_tokens=8, do_sample=False, eos_token_id=None)
    for prefill_tokens in (1, 5, 64):
        e = watched(engine(m, prefill_tokens=prefill_tokens))
        mine = asyncio.run(e.generate(ask(tokens, media, temperature=0.0)))
        assert mine.tokens == theirs[0, len(tokens) :].tolist()
        idle(e)


@pytest.mark.slow
@pytest.mark.parametrize("kind", covering(["gemma3", MUTUAL], ["gemma3"]))
def test_long_segments_are_computed_in_blocks_that_see_the_rest_of_an_image(kind, monkeypatch):
    m = model(kind)
    groups = groups_with_images(m)
    whole, blocks = (trainer(m, ROW), trainer(m, ROW))
    exact = gradient(whole, ROW, batch_of(groups))
    monkeypatch.setattr(packed_layout, "LONG", 1 << 6)
    assert (gradient(blocks, ROW, batch_of(groups)) - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "breaks", "cells"), [("gemma3", "\n\n", 9), ("gemma4", "", 10)])
def test_an_image_stands_in_the_frame_that_the_processor_writes(kind, breaks, cells):
    """The template writes one mark; the processor of Gemma 3 two breaks, the mark, the placeholders and the end, that
    of Gemma 4 no breaks.
    """
    m = model(kind)
    chat = TokenChat(m.tokenizer, engine(m).generate, sampling=Sampling(), key=int, max_context=512, sight=m.sight)
    raw = np.random.default_rng(1).integers(0, 256, (30, 70, 3), dtype=np.uint8)
    chat.give([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "image": raw}]}])
    begin, slot, end = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
    text = f"<user>a{breaks}{begin}{slot * cells}{end}{breaks}<assistant>"
    assert chat.trajectory.tokens == m.tokenizer.encode(text, add_special_tokens=False)
    [place] = chat.trajectory.media
    assert chat.trajectory.tokens[place.start : place.end] == [m.sight.placeholder] * cells


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3", MUTUAL])
def test_image_tokens_that_attend_both_ways_are_noticed(kind):
    """Without those behind a token in its image the logprobs differ, in the trainer's pass and in the engine's."""
    m = model(kind)
    tokens, media = stream(m, 3, image(m, 1), 6)
    [right] = own_logprobs(m, [(tokens, media)])
    ids, place = torch.tensor(tokens), media[0]
    features = m.encode_images([place.image])
    for images, agrees in ((None, True), (torch.arange(place.image.tokens), False)):
        seen = vision.VisionFeatures(torch.arange(place.start, place.end), features, images)
        layout = packing.PackedLayout([packing.PackedSegment(0, len(ids))])
        with torch.no_grad():
            hidden = m.hidden_states(ids, torch.arange(len(ids)), layout, seen=seen)
            ours = m.head.logits(hidden).log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        assert (max(abs(np.subtract(ours.tolist(), right))) < LIMIT) == agrees
    with pytest.raises(ConfigError, match=r"engine.numerics = 'aligned': the image tokens of .* behind them"):
        align_numerics(m)


@pytest.mark.slow
@pytest.mark.parametrize("kind", covering(["gemma3", MUTUAL], ["gemma3"]))
def test_an_image_that_ends_a_prompt_is_cached_but_for_its_last_token(kind):
    """A hit within an image: what is cached of it has seen all of it, and so does the token that is fed again."""
    m = model(kind)
    a, b = image(m, 1), image(m, 2)
    given = stream(m, 3, b, 2, a, seed=4)
    e = watched(engine(m, prefill_tokens=7))
    first, again = (asyncio.run(e.generate(ask(*given, key=5))) for _ in range(2))
    assert again.cached_tokens == len(given[0]) - 1 and again.tokens == first.tokens
    assert again.logprobs == pytest.approx(first.logprobs, abs=1e-5)
    whole = given[0] + first.tokens
    [own] = own_logprobs(m, [(whole, given[1])])
    assert max(abs(np.subtract(first.logprobs, own[-len(first.tokens) :]))) < LIMIT
    idle(e)


@pytest.mark.slow
@pytest.mark.parametrize("kind", covering(["qwen3_vl_moe", "qwen3_5_moe"], ["qwen3_vl_moe"]))
def test_experts_of_image_tokens_are_recorded_and_replayed(kind):
    """The trainer sends each token, of an image too, where the engine sent it."""
    m = model(kind)
    given = stream(m, 3, image(m, 1), 6)
    done = asyncio.run(engine(m, routes=True).generate(ask(*given, wants=frozenset({"experts"}))))
    ids, media = torch.tensor(given[0] + done.tokens), given[1]
    n, routes = len(done.experts), torch.from_numpy(np.asarray(done.experts)).long()
    seen = vision.VisionFeatures(torch.arange(3, media[0].end), m.encode_images([media[0].image]))
    at = torch.from_numpy(packing.media.position_rows(n, media))
    gaps = []
    for step in (0, 1):
        layout = packing.PackedLayout([packing.PackedSegment(0, n)])
        with torch.no_grad():
            hidden = m.hidden_states(ids[:n], at, layout, m.routing_tape((routes + step) % 4), seen)
            ours = m.head.logits(hidden).log_softmax(-1).gather(1, ids[1 : n + 1, None])[-len(done.tokens) :, 0]
        gaps.append(max(abs(np.subtract(ours.tolist(), done.logprobs))))
    assert gaps[0] < LIMIT and gaps[1] > 1e-3, "and another choice gives another answer"


# -- the prefix cache ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(  # one that is cut, one whole, one in tiles, and one that keeps a state
    "kind",
    covering(
        [*(kind for kind in KINDS if kind != "qwen2_5_vl"), MUTUAL],
        ["qwen3_vl", "qwen3_5", "smolvlm", "gemma3"],
    ),
)
def test_each_family_finds_its_image_cached_and_takes_no_other(kind):
    """The same tokens under two images: a hit answers like a cold start, a swapped image is computed anew."""
    m = model(kind)
    a, b = image(m, 1), image(m, 2)
    prompts = [stream(m, 4, picture, 20, seed=5) for picture in (a, b, a)]
    e = watched(engine(m))
    first, other, again = (asyncio.run(e.generate(ask(*prompt))) for prompt in prompts)
    assert first.cached_tokens == 0 and again.cached_tokens == len(prompts[0][0]) - 1 and e.runner.eyes.looked == 2
    assert other.cached_tokens == (0 if m.state_bytes else 4), "what stands before the image, where no state is kept"
    assert again.tokens == first.tokens and again.logprobs == pytest.approx(first.logprobs, abs=1e-5)
    assert other.logprobs != pytest.approx(first.logprobs, abs=1e-3)
    cold = asyncio.run(engine(m).generate(ask(*prompts[1])))
    assert other.tokens == cold.tokens and other.logprobs == pytest.approx(cold.logprobs, abs=1e-5)
    idle(e)


@pytest.mark.slow
def test_another_picture_is_another_prefix_and_the_same_one_is_shared():
    m = model()
    a, b = image(m, 1), image(m, 2)
    prompts = [stream(m, 4, picture, 20, seed=5) for picture in (a, b, a)]
    assert prompts[0][0] == prompts[1][0] and prompts[0][0] == prompts[2][0], "the same tokens"
    e = watched(engine(m))
    first = asyncio.run(e.generate(ask(*prompts[0])))
    other = asyncio.run(e.generate(ask(*prompts[1])))
    again = asyncio.run(e.generate(ask(*prompts[2])))
    assert (first.cached_tokens, other.cached_tokens) == (0, 4), "what stands before the picture, and nothing of it"
    assert (
        again.cached_tokens == len(prompts[0][0]) - 1
        and again.tokens == first.tokens
        and again.logprobs == pytest.approx(first.logprobs)
    )
    assert other.logprobs != pytest.approx(first.logprobs, abs=1e-3)
    assert e.runner.eyes.looked == 2
    siblings = asyncio.run(all_of(e, [ask(*stream(m, 6, a, 9, seed=8), key=k) for k in range(6)]))
    assert sum(d.cached_tokens for d in siblings) == 5 * 18 and e.runner.eyes.looked == 2
    idle(e)


@pytest.mark.slow
def test_what_was_seen_is_forgotten_with_the_weights_that_saw_it():
    """Parked in the middle of its prompt and of its answer; the tower learns; the
    sample goes on under what serves then.
    """
    from rondel.core.types import Begin, Commit, Route
    from rondel.models import names

    m = model()
    tokens, media = stream(m, 3, image(m, 1, 3, 3), 4)

    async def scenario():
        e = engine(m, prefill_tokens=6)
        task = asyncio.create_task(e.generate(ask(tokens, media, n=24)))
        while not e.scheduler.running or e.scheduler.running[0].written < 5:
            await asyncio.sleep(0)
        await e.pause("hold")
        assert e.runner.eyes.looked == 1
        await e.sleep(("kv_cache",))  # its cache is lost, its tokens are not
        manifest = names.build_manifest(m.model, 0)
        with torch.no_grad():
            vision.vision_tower(m.model).merger.mlp[0].weight.add_(0.5)
        changed = names.build_manifest(m.model, 1)
        assert changed.root != manifest.root, "the tower is among what travels"
        await e.receive(Begin(changed))
        await e.receive(Route("tensor", dict(names.named_weights(m.model))))
        await e.receive(Commit(1, changed.root))
        await e.wake(("kv_cache",))
        await e.resume()
        done = await task
        idle(e)
        return e, done

    e, done = asyncio.run(scenario())
    assert e.runner.eyes.looked == 2, "looked at again under the new weights"
    assert set(done.versions) == {0, 1}
    [own] = own_logprobs(m, [(tokens + done.tokens, media)])
    new = [i for i, v in enumerate(done.versions) if v == 1]
    assert max(abs(done.logprobs[i] - own[len(tokens) - 1 + i]) for i in new) < LIMIT
    old = [i for i, v in enumerate(done.versions) if v == 0]
    assert max(abs(done.logprobs[i] - own[len(tokens) - 1 + i]) for i in old) > 0.01, "else the change did not matter"


def test_an_observation_with_a_picture_costs_only_itself():
    """A tool answers with a picture in the middle: the second turn computes what is new,
    and the trainer agrees on both turns.
    """
    m = model()
    e = watched(engine(m))
    chat = TokenChat(
        m.tokenizer,
        e.generate,
        sampling=Sampling(max_tokens=5, ignore_eos=True),
        key=lambda t: t,
        max_context=512,
        sight=m.sight,
    )
    raw = [np.random.default_rng(seed).integers(0, 256, (56, 84, 3), dtype=np.uint8) for seed in (1, 2)]

    async def episode():
        chat.give(
            [{"role": "user", "content": [{"type": "image", "image": raw[0]}, {"type": "text", "text": "what?"}]}]
        )
        await chat.reply()
        before = len(chat.trajectory.tokens)
        chat.give([{"role": "tool", "content": [{"type": "image", "image": raw[1]}, {"type": "text", "text": "so?"}]}])
        return before, await chat.reply()

    before, done = asyncio.run(episode())
    assert done.cached_tokens == before - 1, "all but the token drawn last, whose keys nobody had computed"
    assert e.runner.eyes.looked == 2
    chat.trajectory.score = Score(1.0)
    batch = notes.annotate_logprobs(
        m, batch_of([Group(0, Task("t", "x", {}), [chat.trajectory], 0)]), "proximal", budget=999, temperature=1.0
    )
    assert np.abs(batch.samples[0].known.proximal.numpy() - batch.samples[0].known.behavior.numpy()).max() < LIMIT


def test_a_sample_that_goes_on_elsewhere_sees_the_same():
    """What an engine gave back is asked for again with its tokens: the same noise, the same positions (law 15)."""
    m = model()
    tokens, media = stream(m, 3, image(m, 1, 2, 3), 4)
    whole = asyncio.run(engine(m).generate(ask(tokens, media, n=10)))
    part = ask(tokens + whole.tokens[:4], media, n=6, continuation=4)
    rest = asyncio.run(engine(m, speculation=None).generate(part))
    assert rest.tokens == whole.tokens[4:] and rest.logprobs == pytest.approx(whole.logprobs[4:], abs=1e-5)


def test_a_placeholder_that_the_policy_draws_is_a_token_like_any_other():
    m = model()
    tokens, media = stream(m, 3, image(m, 1), 4)
    drawn = [7, m.sight.placeholder, m.sight.placeholder, 9]
    scored = asyncio.run(engine(m).score(ask(tokens + drawn, media))).logprobs[-4:]
    t = trajectory(m, (tokens, media), drawn, scored)
    t.score = Score(1.0)
    batch = notes.annotate_logprobs(
        m, batch_of([Group(0, Task("t", "x", {}), [t], 0)]), "proximal", budget=99, temperature=1.0
    )
    assert batch.samples[0].known.proximal.numpy() == pytest.approx(scored, abs=LIMIT)


# -- training --------------------------------------------------------------------------------------


ROW = row("grpo", kl={"coef": 0.1})


CUTS = [
    *[("qwen2_5_vl", False), ("qwen3_vl", True), ("qwen3_vl_moe", False), ("qwen3_5", True), ("qwen3_5_moe", False)],
    *[("gemma3", True), ("gemma4", True), (MUTUAL, True), ("smolvlm", True), ("idefics3", False)],
]


# one frozen, one whose tower reaches several layers, one in tiles, one that is never cut; with states: test_vision_video.py
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "trained"),
    covering(CUTS, [cut for cut in CUTS if cut[0] in ("qwen2_5_vl", "qwen3_vl", "smolvlm", MUTUAL)]),
)
def test_the_gradient_does_not_depend_on_the_cut(kind, trained):
    """Law 3 with pictures, the tower frozen or not: against one sample at a time with nothing shared."""
    m = model(kind)
    vision.vision_tower(m.model).requires_grad_(trained)
    t = trainer(m, ROW)
    groups = groups_with_images(m)
    exact = gradient(t, ROW, batch_of(groups), budget=1, share=False)
    eye = sum(p.numel() for p in vision.vision_tower(m.model).parameters())
    assert t.weights.gradient_norm() > 0 and len(exact) == sum(p.numel() for p in m.model.parameters()) - (
        0 if trained else eye
    )
    # a recurrence adds up in another order; Gemma 4 rounds more, over text alone 2e-6
    limit = 1e-5 if m.state_bytes or "gemma4" in kind else 1e-6
    for order, budget, share in ((groups[::-1], 10**6, True), (groups, 40, True)):
        got = gradient(t, ROW, batch_of(order), budget=budget, share=share)
        assert (got - exact).norm() <= limit * exact.norm()


@pytest.mark.slow
@pytest.mark.parametrize("kind", covering(["gemma3", "qwen3_5", "qwen3_vl", "smolvlm"], ["qwen3_vl", "smolvlm"]))
def test_an_adapter_and_four_bits_leave_the_tower_alone(kind):
    """What makes features of pixels keeps its weights: cached features stay true, and no image is seen in 4 bits."""
    m = model(kind)
    add_adapter(m, rank=2, alpha=4)
    tower = {id(p) for p in vision.vision_tower(m.model).parameters()}
    trained = [p for p in m.model.parameters() if p.requires_grad]
    assert trained and not any(id(p) in tower for p in trained)
    packed = load_model(recipe(kind), dtype="float32", four_bits=True)
    inside = set(vision.vision_tower(packed.model).modules())
    assert nf4.nf4_layers(packed.model) and not inside & set(nf4.nf4_layers(packed.model))


def test_a_micro_batch_joins_pixels_once_and_holds_each_picture_once(monkeypatch):
    m = model()
    batch = batch_of(groups_with_images(m))
    packed = pack_samples(batch, list(range(len(batch.samples))))
    assert len(packed.looks.images) == 3 and packed.positions.shape == (4, len(packed.tokens))
    assert len(packed.looks.rows) == 4 + (4 + 4) + 6 + (6 + 4), (
        "siblings share the picture that they were given together"
    )
    assert bool((packed.tokens[packed.looks.rows] == m.sight.placeholder).all()) and bool(
        (packed.looks.rows.diff() > 0).all()
    )
    joins = []
    real = np.concatenate
    monkeypatch.setattr(
        vision.np, "concatenate", lambda parts, *a, **k: (joins.append(len(parts)), real(parts, *a, **k))[1]
    )
    m.encode_images(packed.looks.images)
    assert joins == [3]
    text = pack_samples(batch, [i for i, s in enumerate(batch.samples) if s.group == 2])
    assert text.looks is None and text.positions.ndim == 1, "text alone is packed as ever"


# -- refusals --------------------------------------------------------------------------------------


def test_who_cannot_look_says_so():
    m, blind = (
        model(),
        load_model(
            {"random": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}, dtype="float32"
        ),
    )
    tokens, media = stream(m, 3, image(m, 1), 4)
    with pytest.raises(UserError, match=r"1 images for 'random-llama', which reads text alone.*vision-language"):
        asyncio.run(engine(blind).generate(ask([5] * 20, media)))
    with pytest.raises(ModelError, match="reads text alone"):
        blind.encode_images([media[0].image])
    with pytest.raises(UserError, match="an image of 4 tokens at token 3, where the prompt has no such run"):
        asyncio.run(engine(m).generate(ask([5] * 20, media)))
    assert (
        "images" in asyncio.run(engine(m).status()).capabilities
        and "images" not in asyncio.run(engine(blind).status()).capabilities
    )
    with pytest.raises(
        ModelError,
        match="'llava' is not supported: it looks at images in a way of its own; qwen2_vl, qwen2_5_vl, qwen3_vl",
    ):
        load_model({"random": "llava"})
    with pytest.raises(ModelError, match="the vision_config of a qwen2_5_vl has no 'dept'"):
        load_model(recipe() | {"vision_config": {"dept": 2}})
    t = trajectory(m, (tokens, media), [5], [-1.0])
    with pytest.raises(ValueError, match="5 placeholders for images of 4 cells"):
        t.extend([*tokens, m.sight.placeholder], media=media)
    with pytest.raises(ValueError, match="there it must find 4 placeholders of its own, and it finds 3"):
        t.extend(tokens[:6], media=media)


@pytest.mark.slow
@pytest.mark.parametrize("kind", covering(["qwen3_vl", "gemma3"], ["gemma3"]))
def test_a_saved_model_is_loaded_as_it_was(kind, tmp_path):
    from rondel.models.save import save_model

    m = model(kind)
    save_model(m, tmp_path)
    again = load_model(str(tmp_path), dtype="float32")
    tokens, media = stream(m, 3, image(m, 1), 4)
    assert again.sight == m.sight
    assert own_logprobs(again, [(tokens, media)]) == own_logprobs(m, [(tokens, media)])
