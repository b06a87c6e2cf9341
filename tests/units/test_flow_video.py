"""The video transformer: its sum written out with complex rotations, places that only count by their difference, its bits."""

import asyncio
import cmath
import itertools
import math

import pytest
import torch

from kits.flows import FLOWS, asked, engine, flow
from rondel.core.errors import UserError
from rondel.models.collectives import RankGroup
from rondel.models.flow.dit_block import rotate_pairs
from rondel.models.flow.token_share import TokenShare
from rondel.models.flow.video_dit import rotary_angles
from rondel.models.load import load_model

SIZES = FLOWS["videos"] | {"hidden_size": 32}  # two heads of 16 numbers: 4, 2 and 2 pairs


def test_its_velocity_is_that_of_a_transformer_whose_places_are_rotations():
    """Token by token and head by head, in float64; of 8 pairs of a head 4 turn with the frame, 2 with row and column."""
    model = flow(**SIZES).model.double()
    torch.manual_seed(1)
    x, sigma, condition = torch.randn(2, 144).double(), torch.rand(2).double(), torch.randn(2, 32).double()
    grid = list(itertools.product(range(3), range(3), range(2)))
    speeds = [10_000 ** -(i / 4) for i in range(4)], [1.0, 10_000**-0.5], [1.0, 10_000**-0.5]

    def norm(h, shift, scale):
        return (h - h.mean()) / (h.var(unbiased=False) + 1e-5).sqrt() * (1 + scale) + shift

    def silu(h):
        return h / (1 + (-h).exp())

    def linear(layer, h):
        return layer.weight @ h + layer.bias

    def turned(head, place):
        angles = [at * speed for at, own in zip(place, speeds) for speed in own]
        return [complex(*head[2 * i : 2 * i + 2].tolist()) * cmath.exp(1j * a) for i, a in enumerate(angles)]

    @torch.no_grad()
    def velocity(video, level, prompt):
        angles = [level * math.pi * 2 ** (i / 2) for i in range(6)]
        waves = torch.stack([*(a.sin() for a in angles), *(a.cos() for a in angles)])
        steer = silu(linear(model.level, waves) + prompt)
        video = video.view(3, 6, 4, 2)
        patches = [video[t, 2 * r : 2 * r + 2, 2 * c : 2 * c + 2].flatten() for t, r, c in grid]
        h = [linear(model.enter, patch) for patch in patches]
        for block in model.layers:
            a, b, gate, c, d, gate_up = linear(block.modulation, steer).chunk(6)
            q, k, v = zip(*(linear(block.qkv, norm(one, a, b)).chunk(3) for one in h))
            seen = [torch.zeros(32, dtype=torch.float64) for _ in h]
            for part in (slice(0, 16), slice(16, 32)):
                keys = [turned(one[part], place) for one, place in zip(k, grid)]
                for at, place in enumerate(grid):
                    own = turned(q[at][part], place)
                    scores = [sum((u * w.conjugate()).real for u, w in zip(own, other)) / 4 for other in keys]
                    weights = torch.tensor(scores, dtype=torch.float64).exp()
                    seen[at][part] = sum(w / weights.sum() * other[part] for w, other in zip(weights, v))
            h = [one + gate * linear(block.out, said) for one, said in zip(h, seen)]
            h = [one + gate_up * linear(block.down, silu(linear(block.up, norm(one, c, d)))) for one in h]
        shift, scale = linear(model.modulation, steer).chunk(2)
        out = torch.zeros(3, 6, 4, 2, dtype=torch.float64)
        for (t, r, c), one in zip(grid, h):
            out[t, 2 * r : 2 * r + 2, 2 * c : 2 * c + 2] = linear(model.leave, norm(one, shift, scale)).view(2, 2, 2)
        return out.flatten()

    wanted = torch.stack([velocity(*one) for one in zip(x, sigma, condition)])
    found = model(x, sigma, condition)  # the rotations themselves are float32
    assert torch.allclose(found, wanted, rtol=0, atol=1e-6) and wanted.std() > 0.1
    assert torch.equal(model.join_patches(model.cut_patches(x)), x)


def test_only_the_difference_of_two_places_counts():
    """The product of a query and a key that both move by the same frames, rows and columns is the same."""
    angles = rotary_angles((5, 4, 4), 24).view(5, 4, 4, 12)
    q, k = torch.randn(2, 24, dtype=torch.float64)

    def score(a, b):
        turns = torch.stack([angles[a], angles[b]])
        turned = rotate_pairs(torch.stack([q, k]), torch.stack([turns.cos(), turns.sin()]))
        return float(turned[0] @ turned[1])

    assert score((0, 0, 0), (2, 1, 3)) == pytest.approx(score((2, 2, 0), (4, 3, 3)), abs=1e-12)
    near = [score((0, 0, 0), moved) for moved in ((1, 0, 0), (0, 1, 0), (0, 0, 1))]
    assert min(abs(one - float(q @ k)) for one in near) > 1e-3  # each axis turns something


def test_a_video_has_the_same_bits_alone_and_in_company():
    async def draw(n):
        e = engine(flow(**SIZES))
        return await asyncio.gather(*(e.generate(asked(i)) for i in range(n)))

    alone, crowd = (asyncio.run(draw(n)) for n in (1, 5))
    assert alone[0].steps == crowd[0].steps and alone[0].logprobs == crowd[0].logprobs


def test_it_is_saved_and_loaded_as_any_model(tmp_path):
    ours = flow(**SIZES)
    ours.model.save_pretrained(tmp_path)
    ours.tokenizer.save_pretrained(tmp_path)
    theirs = load_model(str(tmp_path))
    assert theirs.head.score_prompt([1, 2, 3]) == ours.head.score_prompt([1, 2, 3])
    assert (theirs.head.dim, theirs.step_tokens) == (144, 18)


def test_sizes_that_do_not_fit_are_refused():
    for odd, why in (
        ({"frames": 3, "patch_frames": 2}, "frames = 3 cannot be cut"),
        ({"height": 5}, "height = 5 cannot be cut"),
        ({"num_attention_heads": 5}, "take a multiple of 10"),
        ({"num_attention_heads": 4, "hidden_size": 16}, "take at least 24"),
    ):
        with pytest.raises(UserError, match=why):
            load_model(SIZES | odd)
    with pytest.raises(ValueError, match="each needs one"):
        TokenShare.of(3, RankGroup(None, 0, 4))
    assert TokenShare.of(18, RankGroup(None, 3, 4)).lengths == (5, 5, 4, 4)
