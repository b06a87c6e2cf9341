"""The diffusion transformer: its sum written out, the same bits alone and in company, saved and loaded."""

import asyncio
import math

import pytest
import torch

from kits.flows import asked, engine, flow
from rondel.core.errors import UserError
from rondel.models.flow.kinds import is_flow
from rondel.models.load import load_model
from rondel.models.packed_steps import PackedSteps

SIZES = {"random": "flow_dit", "dim": 16, "num_attention_heads": 2, "num_hidden_layers": 2}


def test_its_velocity_is_that_of_the_paper():
    """Patch by patch and head by head, in float64 (arXiv:2212.09748)."""
    model = flow(**SIZES).model.double()
    torch.manual_seed(1)
    x, sigma, condition = (torch.randn(*shape, dtype=torch.float64) for shape in ((3, 16), (3,), (3, 16)))
    sigma = sigma.sigmoid()

    def norm(h, shift, scale):
        return (h - h.mean()) / (h.var(unbiased=False) + 1e-5).sqrt() * (1 + scale) + shift

    def silu(h):
        return h / (1 + (-h).exp())

    def linear(layer, h):
        return layer.weight @ h + layer.bias

    @torch.no_grad()
    def velocity(image, level, prompt):
        angles = [level * math.pi * 2 ** (i / 2) for i in range(6)]
        waves = torch.stack([*(a.sin() for a in angles), *(a.cos() for a in angles)])
        steer = silu(linear(model.level, waves) + prompt)
        corners = [(i, j) for i in (0, 2) for j in (0, 2)]
        image = image.view(4, 4)
        patches = [image[i : i + 2, j : j + 2].flatten() for i, j in corners]
        h = [linear(model.enter, patch) + model.places.weight[at] for at, patch in enumerate(patches)]
        for block in model.layers:
            a, b, gate, c, d, gate_up = linear(block.modulation, steer).chunk(6)
            q, k, v = zip(*(linear(block.qkv, norm(one, a, b)).chunk(3) for one in h))
            seen = [torch.zeros(16, dtype=torch.float64) for _ in h]
            for part in (slice(0, 8), slice(8, 16)):  # the two heads
                for at in range(4):
                    weights = torch.stack([(q[at][part] @ other[part]) / math.sqrt(8) for other in k]).exp()
                    seen[at][part] = sum(w / weights.sum() * other[part] for w, other in zip(weights, v))
            h = [one + gate * linear(block.out, said) for one, said in zip(h, seen)]
            h = [one + gate_up * linear(block.down, silu(linear(block.up, norm(one, c, d)))) for one in h]
        shift, scale = linear(model.modulation, steer).chunk(2)
        out = torch.zeros(4, 4, dtype=torch.float64)
        for (i, j), one in zip(corners, h):
            out[i : i + 2, j : j + 2] = linear(model.leave, norm(one, shift, scale)).view(2, 2)
        return out.flatten()

    wanted = torch.stack([velocity(*one) for one in zip(x, sigma, condition)])
    assert torch.allclose(model(x, sigma, condition), wanted, rtol=0, atol=1e-10) and wanted.std() > 0.1


@pytest.mark.slow
def test_an_image_has_the_same_bits_alone_and_in_company():
    """Of the size of recipes/digits.toml, with and without a gradient; then chains in the engine."""
    model = flow(random="flow_dit", hidden_size=64, num_hidden_layers=3).model
    torch.manual_seed(0)
    x, sigma, condition = torch.randn(65, 64), torch.rand(65), torch.randn(65, 64)
    whole = model(x, sigma, condition)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            for n in (1, 2, 7, 17, 64, 65):
                assert torch.equal(model(x[:n], sigma[:n], condition[:n]), whole[:n]), (grad, n)

    async def draw(n, **how):
        e = engine(flow(**SIZES), **how)
        return await asyncio.gather(*(e.generate(asked(i)) for i in range(n)))

    alone, crowd, narrow = (asyncio.run(draw(n, **how)) for n, how in ((1, {}), (9, {}), (9, {"max_running": 2})))
    assert alone[0].steps == crowd[0].steps and alone[0].logprobs == crowd[0].logprobs
    assert all(a.steps == b.steps and a.logprobs == b.logprobs for a, b in zip(crowd, narrow))
    with torch.no_grad():
        density = flow(**SIZES).head.evaluate_steps(PackedSteps.of([crowd[3].steps.rows], [asked(3).tokens], "cpu"))[0]
    assert density.tolist() == list(crowd[3].logprobs)


def test_it_is_saved_and_loaded_as_any_model(tmp_path):
    ours = flow(**SIZES)
    ours.model.save_pretrained(tmp_path)
    ours.tokenizer.save_pretrained(tmp_path)
    assert is_flow(str(tmp_path))
    theirs = load_model(str(tmp_path))
    assert theirs.head.score_prompt([1, 2, 3]) == ours.head.score_prompt([1, 2, 3]) and theirs.head.dim == 16
    assert theirs.model.config.patch_size == 2


def test_a_new_one_says_that_nothing_moves():
    model = load_model(SIZES | {"hidden_size": 16}).model
    assert not model(torch.randn(3, 16), torch.rand(3), torch.randn(3, 16)).any()
    for odd, why in (
        ({"dim": 60}, "no square image"),
        ({"patch_size": 3}, "patches of 3"),
        ({"num_attention_heads": 3}, "no multiple"),
    ):
        with pytest.raises(UserError, match=why):
            load_model(SIZES | {"hidden_size": 16} | odd)
