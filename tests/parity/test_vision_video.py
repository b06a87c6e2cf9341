"""Videos: the tokens, pixels and positions of transformers' processor, its forward pass, and shares that are no errors."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as smart_resize_frame
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize

from kits.engine import engine, idle, watched
from kits.sweeps import covering
from kits.train import row, trainer
from kits.vision import EYES, ask, gradient, groups_with_images, image, model, own_logprobs, stream, trajectory
from rondel.core.media import Image, content_keys, position_shift, rope_positions
from rondel.core.types import Group, Sampling, Score, Task
from rondel.generate.envs.chat import TokenChat
from rondel.models import vision
from rondel.models.load import load_model
from rondel.models.save import save_model
from rondel.models.vision_families import FAMILIES
from rondel.runtime.journal.image_store import ImageStore
from rondel.train import annotate as notes
from rondel.train.pack import batch_of

STEPS = sorted(kind for kind in EYES if FAMILIES[kind].video)
# steps joined to one video, with a rate and without; steps behind their times, with a state and without. Mixtures see alike
SEEN = ["qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_vl"]
JOINED_AND_APART = ["qwen2_5_vl", "qwen3_5"]
IMAGES = sorted(kind for kind in EYES if not FAMILIES[kind].video and FAMILIES[kind].form.name != "tiles")
LIMIT = 1e-4
KEYS = {"qwen3_vl_moe": 51}  # of the request: under others its policy draws a placeholder
ROW = row("grpo", kl={"coef": 0.1})


def frames(n: int, height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, height, width, 3), dtype=np.uint8)


def conversation(m, *content):
    chat = TokenChat(m.tokenizer, None, sampling=Sampling(), key=int, max_context=512, sight=m.sight)
    chat.give(
        [{"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in content]}]
    )
    return chat.trajectory


def processed(m, text: str, video: np.ndarray, fps: float):
    """What transformers' processor makes of a text with one video: its tokens and the inputs of its forward pass. The
    processor itself wants torchvision; its methods do not.
    """
    sight, tok, joined = m.sight, m.tokenizer, m.sight.video.frame is None
    mean, std = (torch.tensor(x)[:, None, None] for x in (sight.mean, sight.std))
    scaled = (torch.from_numpy(video).permute(0, 3, 1, 2) / 255 - mean) / std
    pixels, *grid = Qwen3VLVideoProcessor.patchify(None, scaled[None], sight.patch, sight.merge, sight.temporal)
    p = object.__new__(Qwen2_5_VLProcessor if joined else Qwen3VLProcessor)
    p.image_token, p.video_token = "<|image_pad|>", "<|video_pad|>"
    p.vision_start_token, p.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    p.video_processor = SimpleNamespace(merge_size=sight.merge, temporal_patch_size=sight.temporal)
    metadata = SimpleNamespace(fps=fps, frames_indices=list(range(len(video))))
    grids = torch.tensor([grid])
    written = p.replace_video_token({"video_grid_thw": grids, "video_metadata": [metadata]}, 0)
    tokens = tok.encode(text.replace(p.video_token, written), add_special_tokens=False)
    kinds = 2 * (torch.tensor([tokens]) == sight.video.placeholder).long()
    given = {"pixel_values_videos": pixels[0], "video_grid_thw": grids, "mm_token_type_ids": kinds}
    if sight.video.rate is not None:
        given["second_per_grid_ts"] = torch.tensor([sight.temporal / fps])
    return tokens, given


@pytest.mark.slow
@pytest.mark.parametrize("kind", covering(STEPS, SEEN))
def test_a_video_is_read_as_transformers_reads_it(kind):
    """Five frames in three steps: tokens, pixels, positions, greedy tokens, logprobs of engine and trainer."""
    m = model(kind)
    cell, video = m.sight.token_pixels, frames(5, 2 * m.sight.token_pixels, 3 * m.sight.token_pixels)
    joined, fps = m.sight.video.frame is None, 8.0 if m.sight.video.frame is None else 3.0
    seen = conversation(m, "a ", {"type": "video", "video": list(video), "fps": fps}, " what?")
    text = "<user>a <|vision_start|><|video_pad|><|vision_end|> what?<assistant>"
    tokens, given = processed(m, text, video, fps)
    assert seen.tokens == tokens
    assert joined or "<0.2 seconds>" in m.tokenizer.decode(tokens), "frames 0 and 1, at 3 a second"
    assert [p.image.time for p in seen.media] == ([None, 1, 2] if joined else [None] * 3)
    assert [(p.image.frames, p.image.rows, p.image.columns, p.image.cell) for p in seen.media] == [(2, 2, 3, cell)] * 3
    ours = vision.as_given(m.sight, seen.tokens, seen.media)
    assert (ours["pixel_values_videos"] - given["pixel_values_videos"]).abs().max() < 1e-6
    assert torch.equal(ours["mm_token_type_ids"], given["mm_token_type_ids"])
    times = {name: given[name] for name in ("video_grid_thw", "second_per_grid_ts") if name in given}
    assert not joined or all(torch.equal(ours[name], value) for name, value in times.items())
    theirs = m.model.model.get_rope_index(torch.tensor([tokens]), given["mm_token_type_ids"], **times)[0]
    assert np.array_equal(rope_positions(len(tokens), seen.media), theirs[:, 0].numpy())

    other = copy.deepcopy(m.model)
    other.set_attn_implementation("eager")
    greedy = other.generate(torch.tensor([tokens]), **given, max_new_tokens=6, do_sample=False, eos_token_id=None)
    e = watched(engine(m, prefill_tokens=7))
    mine = asyncio.run(e.generate(ask(tokens, seen.media, n=6, temperature=0.0)))
    assert mine.tokens == greedy[0, len(tokens) :].tolist()
    done = asyncio.run(e.generate(ask(tokens, seen.media, key=KEYS.get(kind, 31))))
    idle(e)
    assert e.runner.eyes.looked == 3 and not m.sight.placeholders & set(done.tokens)
    ids = torch.tensor([tokens + done.tokens])
    kinds = torch.nn.functional.pad(given["mm_token_type_ids"], (0, len(done.tokens)))
    with torch.no_grad():
        whole = other(ids, use_cache=False, **{**given, "mm_token_type_ids": kinds}).logits.double().log_softmax(-1)
    own = whole[0, :-1].gather(1, ids[0, 1:, None])[-len(done.tokens) :, 0].tolist()
    assert max(abs(np.subtract(done.logprobs, own))) < LIMIT, "engine"
    t = trajectory(m, (tokens, seen.media), done.tokens, done.logprobs)
    t.score = Score(1.0)
    batch = notes.annotate_logprobs(
        m, batch_of([Group(0, Task("t", "x", {}), [t], 0)]), "proximal", budget=10**6, temperature=1.0
    )
    assert np.abs(batch.samples[0].known.proximal.numpy() - own).max() < LIMIT, "trainer"


def test_text_goes_on_behind_the_time_of_a_long_video():
    """As the models were trained (arXiv:2409.12191: behind the largest position so far, and so transformers before 5.3),
    where transformers 5.23 goes on behind rows and columns alone.
    """
    m = model("qwen2_5_vl")
    cell = m.sight.token_pixels
    seen = conversation(m, "a", {"type": "video", "video": frames(5, 2 * cell, 2 * cell), "fps": 1.5}, "b")
    first, n = seen.media[0].start, len(seen.tokens)
    times = [0, 5, 10]  # 4 positions a second, 2 / 1.5 seconds a step: 5.33 and 10.67
    assert [place.image.time or 0 for place in seen.media] == times
    at = rope_positions(n, seen.media)
    cells = np.array([[t, row, column] for t in times for row in (0, 1) for column in (0, 1)]).T
    assert np.array_equal(at[:, first : first + 12], first + cells)
    behind = np.arange(n - first - 12) + first + 11
    assert np.array_equal(at[:, first + 12 :], np.stack([behind] * 3))
    assert n - 1 + position_shift(seen.media) == at[0, -1]
    other = conversation(m, "a", {"type": "video", "video": frames(5, 2 * cell, 2 * cell), "fps": 3}, "b")
    assert seen.tokens == other.tokens and content_keys(seen.tokens, seen.media) != content_keys(
        other.tokens, other.media
    )
    stored = [Image.from_stored_fields(place.image.stored_fields) for place in seen.media]
    assert [(x.digest, x.frames, x.time) for x in stored] == [
        (p.image.digest, p.image.frames, p.image.time) for p in seen.media
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", covering(["qwen2_vl", "qwen2_5_vl"], ["qwen2_5_vl"]))
def test_joined_steps_are_cut_by_chunks_and_packs_and_change_nothing(kind, tmp_path):
    """Engine in chunks of 5 tokens, an answer that is continued, a journal, a pack behind a shared prompt."""
    m = model(kind)
    a, b, c = (replace(image(m, seed, frames=2), time=time) for seed, time in ((1, None), (2, 1), (3, 4)))
    a, b, c = (Image.from_pixels(x.pixels, x.cell, 2, x.time) for x in (a, b, c))
    tokens, media = stream(m, 4, a, b, c, 6, image(m, 4), 3)
    e = watched(engine(m, prefill_tokens=5))
    first, again = (asyncio.run(e.generate(ask(tokens, media, key=k))) for k in (3, 3))
    whole = asyncio.run(engine(m).generate(ask(tokens, media, key=3)))
    assert first.tokens == whole.tokens == again.tokens and again.cached_tokens == len(tokens) - 1
    assert first.logprobs == pytest.approx(whole.logprobs, abs=1e-5)
    idle(e)
    t = trajectory(m, (tokens, media), first.tokens, first.logprobs)
    t.score = Score(1.0)
    batch = notes.annotate_logprobs(
        m, batch_of([Group(0, Task("t", "x", {}), [t, copy.deepcopy(t)], 0)]), "proximal", budget=10**6, temperature=1.0
    )
    for sample in batch.samples:
        assert np.abs(sample.known.proximal.numpy() - np.array(first.logprobs)).max() < LIMIT
    store = ImageStore(tmp_path)
    assert ImageStore(tmp_path).load_images(store.store_images(media)) == media


def test_frames_are_as_large_as_transformers_makes_them():
    sight = replace(model("qwen2_vl").sight, most=1 << 40)
    assert sight.video.frame is None
    for height, width in ((64, 96), (613, 801), (20, 9), (1900, 1400)):
        theirs = smart_resize_frame(height, width, sight.token_pixels, sight.video.least, sight.video.most)
        assert sight.frame_size(width, height, 4) == theirs[::-1]
    video, cell = model("qwen3_vl").sight.video, model("qwen3_vl").sight.token_pixels
    for height, width, n in ((64, 96, 4), (613, 801, 5), (1900, 1400, 16), (20, 9, 2), (480, 640, 64), (33, 31, 7)):
        theirs = smart_resize(n, height, width, video.step, cell, video.least, video.most)
        assert video.target_size(width, height, n, cell=cell, image_most=1 << 40) == theirs[::-1]
    assert video.target_size(640, 480, 8, cell=cell, image_most=6 * cell**2) == (2 * cell, 2 * cell), "image_tokens = 6"


@pytest.mark.slow
@pytest.mark.parametrize("kind", covering(STEPS, JOINED_AND_APART))
def test_a_step_is_found_cached_and_takes_no_other(kind):
    """The same tokens over other frames, and over the same frames as pictures: what differs is computed anew."""
    m = model(kind)
    a, b = image(m, 1, frames=2), image(m, 2, frames=2)
    prompts = [stream(m, 4, a, 3, step, 9, seed=5) for step in (a, b, a)]
    e = watched(engine(m))
    first, other, again = (asyncio.run(e.generate(ask(*prompt))) for prompt in prompts)
    assert e.runner.eyes.looked == 2 and again.cached_tokens == len(prompts[0][0]) - 1
    assert other.cached_tokens == (0 if m.state_bytes else 4 + a.tokens + 3)
    assert again.tokens == first.tokens and again.logprobs == pytest.approx(first.logprobs, abs=1e-5)
    cold = asyncio.run(engine(m).generate(ask(*prompts[1])))
    assert other.tokens == cold.tokens and other.logprobs == pytest.approx(cold.logprobs, abs=1e-5)
    assert other.logprobs != pytest.approx(first.logprobs, abs=1e-3)
    idle(e)


@pytest.mark.slow
@pytest.mark.parametrize("kind", covering(STEPS, JOINED_AND_APART))
def test_the_gradient_over_videos_does_not_depend_on_the_cut(kind):
    """Packed behind shared prompts against one sample at a time."""
    m = model(kind)
    t = trainer(m, ROW)
    groups = groups_with_images(m, frames=2)
    exact = gradient(t, ROW, batch_of(groups), budget=1, share=False)
    assert exact.norm() > 0
    for budget, share in ((10**6, True), (40, True)):
        got = gradient(t, ROW, batch_of(groups), budget=budget, share=share)
        assert (got - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.slow
@pytest.mark.parametrize("kind", covering(STEPS, JOINED_AND_APART))
def test_pictures_and_steps_stand_in_one_prompt(kind):
    m = model(kind)
    given = stream(m, 3, image(m, 1), 2, image(m, 2, 2, 3, frames=2), 4, image(m, 3, frames=2), 3)
    scored = asyncio.run(engine(m, prefill_tokens=7).score(ask(*given))).logprobs
    assert max(abs(np.subtract(scored[1:], own_logprobs(m, [given])[0]))) < LIMIT


@pytest.mark.parametrize("kind", IMAGES)
def test_elsewhere_each_frame_is_an_image(kind):
    m, video = model(kind), frames(3, 48, 96)
    as_video = conversation(m, "a", {"type": "video", "video": video, "fps": 1}, "b")
    as_images = conversation(m, "a", *({"type": "image", "image": frame} for frame in video), "b")
    assert as_video.tokens == as_images.tokens and as_video.media == as_images.media and len(as_video.media) == 3


def test_how_videos_are_read_is_saved(tmp_path):
    m = model("qwen3_vl")
    save_model(m, tmp_path)
    assert load_model(str(tmp_path), dtype="float32").sight == m.sight
