"""Images in tiles: the tiles, the text between them and the greedy answer are those of transformers' processor and model."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from transformers import PreTrainedTokenizerFast
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from kits.engine import engine, idle, watched
from kits.vision import EYES, ask, model, trajectory
from rondel.core.types import Group, Sampling, Score, Task
from rondel.generate.envs.chat import TokenChat
from rondel.generate.pictures import process_tiles
from rondel.models import vision
from rondel.models.load import load_model
from rondel.models.save import save_model
from rondel.models.vision_families import FAMILIES
from rondel.train import annotate as notes
from rondel.train.pack import batch_of

KINDS = sorted(kind for kind in EYES if FAMILIES[kind].form.name == "tiles")
LIMIT = 1e-4


def raw(width: int, height: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def processor(sight, **changes):
    return Idefics3ImageProcessorPil(**{**{"size": {"longest_edge": sight.tiles.longest}, **changes}}, **{
        "max_image_size": {"longest_edge": sight.side}, "return_row_col_info": True,
    })  # fmt: skip


def conversation(m, *content):
    chat = TokenChat(m.tokenizer, None, sampling=Sampling(), key=int, max_context=512, sight=m.sight)
    chat.give(
        [{"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in content]}]
    )
    return chat.trajectory


@pytest.mark.parametrize("longest", [64, 96, 128])
def test_tiles_are_those_of_the_processor_of_transformers(longest):
    sight = model("smolvlm").sight
    sight = replace(sight, tiles=replace(sight.tiles, longest=longest))
    theirs = processor(sight)
    for width, height in ((32, 32), (100, 37), (37, 100), (613, 801), (300, 20), (20, 300), (64, 64), (5, 5), (97, 61)):
        given = theirs(Pillow.fromarray(raw(width, height)), return_tensors="np")
        ours = process_tiles(raw(width, height), sight)
        assert [[ours.rows]] == given["rows"] and [[ours.columns]] == given["cols"], (width, height)
        assert len(ours.images) == sight.tiles.tile_count(width, height) == len(given["pixel_values"][0])
        mine = np.concatenate([vision.image_patches(tile, sight) for tile in ours.images])
        assert np.abs(mine - given["pixel_values"][0]).max() < 1e-5, (width, height)
    alone = replace(sight, tiles=replace(sight.tiles, longest=None))
    given = processor(sight, do_image_splitting=False, size={"height": 32, "width": 32})(
        Pillow.fromarray(raw(100, 37)), return_tensors="np"
    )
    [tile] = process_tiles(raw(100, 37), alone).images
    assert np.abs(vision.image_patches(tile, alone) - given["pixel_values"][0]).max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_image_in_tiles_is_read_as_transformers_reads_it(kind):
    """Two images of several tiles each: tokens, pixels, the greedy answer, logprobs of engine and trainer."""
    m = model(kind)
    pictures = [raw(60, 30, 1), raw(30, 60, 2)]
    seen = conversation(
        m, "a", {"type": "image", "image": pictures[0]}, "b", {"type": "image", "image": pictures[1]}, "?"
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=copy.deepcopy(m.tokenizer.backend_tokenizer), eos_token="<eos>"
    )
    theirs = Idefics3Processor(processor(m.sight), tokenizer, image_seq_len=seen.media[0].image.tokens)
    given = theirs(
        images=[[Pillow.fromarray(p) for p in pictures]], text="<user>a<image>b<image>?<assistant>", return_tensors="pt"
    )
    assert seen.tokens == given["input_ids"][0].tolist() and len(seen.media) == 6
    ours = vision.as_given(m.sight, seen.tokens, seen.media)
    assert (ours["pixel_values"] - given["pixel_values"]).abs().max() < 1e-5
    marks = "<fake_token_around_image>", "<image>", "<global-img>"
    written = m.sight.tiles.written(1, 2, "<image>" * 4)
    assert written == get_image_prompt_string(1, 2, 4, *marks) and written != get_image_prompt_string(2, 1, 4, *marks)
    assert m.sight.tiles.written(0, 0, "<image>" * 4) == get_image_prompt_string(0, 0, 4, *marks)

    other = copy.deepcopy(m.model)
    other.set_attn_implementation("eager")
    inputs = {"pixel_values": given["pixel_values"], "pixel_attention_mask": given["pixel_attention_mask"]}
    ids = torch.tensor([seen.tokens])
    greedy = other.generate(ids, **inputs, max_new_tokens=6, do_sample=False, eos_token_id=None)
    e = watched(engine(m, prefill_tokens=7))
    mine = asyncio.run(e.generate(ask(seen.tokens, seen.media, n=6, temperature=0.0)))
    assert mine.tokens == greedy[0, ids.shape[1] :].tolist()
    done = asyncio.run(e.generate(ask(seen.tokens, seen.media, key=31)))
    idle(e)
    assert e.runner.eyes.looked == 6 and m.sight.placeholder not in done.tokens
    ids = torch.tensor([seen.tokens + done.tokens])
    with torch.no_grad():
        whole = other(ids, use_cache=False, **inputs).logits.double().log_softmax(-1)
    own = whole[0, :-1].gather(1, ids[0, 1:, None])[-len(done.tokens) :, 0].tolist()
    assert max(abs(np.subtract(done.logprobs, own))) < LIMIT, "engine"
    t = trajectory(m, (seen.tokens, seen.media), done.tokens, done.logprobs)
    t.score = Score(1.0)
    batch = notes.annotate_logprobs(
        m, batch_of([Group(0, Task("t", "x", {}), [t], 0)]), "proximal", budget=10**6, temperature=1.0
    )
    assert np.abs(batch.samples[0].known.proximal.numpy() - own).max() < LIMIT, "trainer"


def test_equal_tiles_are_encoded_once_and_another_tile_is_another_prefix():
    m = model("smolvlm")
    picture, other = raw(64, 32, 1), raw(64, 32, 1)
    other[:, 32:] = 7  # its second tile, and the whole
    first, again, changed = (
        conversation(m, "x", {"type": "image", "image": image}, "what?") for image in (picture, picture, other)
    )
    assert first.tokens == changed.tokens
    e = watched(engine(m))
    answers = [asyncio.run(e.generate(ask(t.tokens, t.media))) for t in (first, again, changed)]
    assert e.runner.eyes.looked == 3 + 2
    assert answers[1].cached_tokens == len(first.tokens) - 1 and answers[1].tokens == answers[0].tokens
    assert answers[2].cached_tokens == first.media[1].start, "up to the second tile"
    cold = asyncio.run(engine(m).generate(ask(changed.tokens, changed.media)))
    assert answers[2].tokens == cold.tokens and answers[2].logprobs == pytest.approx(cold.logprobs, abs=1e-5)
    idle(e)


def test_a_frame_of_a_video_is_one_tile():
    m = model("smolvlm")
    video = np.stack([raw(64, 32, seed) for seed in (1, 2)])
    seen = conversation(m, {"type": "video", "video": video, "fps": 1}, "b")
    single = m.sight.tiles.written(0, 0, "<image>" * 4)
    assert seen.tokens == m.tokenizer.encode(f"<user>{single * 2}b<assistant>", add_special_tokens=False)
    assert [place.image.tokens for place in seen.media] == [4, 4]


@pytest.mark.parametrize("kind", KINDS)
def test_how_images_are_cut_is_saved(kind, tmp_path):
    m = model(kind)
    save_model(m, tmp_path)
    assert load_model(str(tmp_path), dtype="float32").sight == m.sight
