"""A vision-language-action model: what it reads against transformers' own pass, its densities, its engine, its backbone."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from kits.control import engine, pictured, vla_policy
from kits.flows import publish_in_place
from rondel.core.errors import ModelError
from rondel.core.media import Image, ImagePlaceholder
from rondel.generate.envs.experts import matching_chain
from rondel.models import vision
from rondel.models.load import load_model, tokenizer_of
from rondel.models.packed_steps import PackedSteps
from rondel.runtime.journal.wal import TokenLog

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]


def random_steps(loaded, counts, seed=0):
    """Steps of episodes under instructions of different lengths; the first two read the same picture."""
    noise, n = np.random.default_rng(seed), sum(counts)
    rows = np.concatenate(
        [noise.integers(0, 256, (n, loaded.head.observed)), noise.normal(size=(n, loaded.head.dim))], 1
    )
    rows[1, : loaded.head.observed] = rows[0, : loaded.head.observed]
    prompts = [noise.integers(5, 90, 3 + 2 * i).tolist() for i in range(len(counts))]
    return PackedSteps.of(np.split(rows.astype(np.float32), np.cumsum(counts)[:-1]), prompts, "cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_the_backbone_in_transformers_own_pass(family):
    loaded = vla_policy(family)
    steps, inner = random_steps(loaded, [2, 3]), loaded.model.backbone
    found = loaded.head.states(steps)
    inner.set_attn_implementation("eager")
    (begin, end, place), sight = (
        (inner.config.vision_start_token_id, inner.config.vision_end_token_id, inner.config.image_token_id),
        loaded.model.sight,
    )
    prompts = [own.tolist() for own in steps.prompt.tensor_split(steps.begins[1:])]
    for row, of, state in zip(steps.rows, steps.prompt_of.tolist(), found, strict=True):
        image = Image.from_pixels(row[: loaded.head.observed].numpy().astype(np.uint8).reshape(28, 28, 3), 14)
        tokens = [begin, *[place] * 4, end, *prompts[of]]
        given = vision.as_given(sight, tokens, [ImagePlaceholder(1, image)])
        with torch.no_grad():
            hidden = inner(torch.tensor([tokens]), use_cache=False, **given).last_hidden_state[0, -1]
            [layer] = loaded.model.layers
            assert torch.allclose(layer(hidden).tanh(), state, atol=2e-5)


def test_a_step_has_the_same_density_alone_and_in_company():
    loaded = vla_policy()
    steps = random_steps(loaded, [2, 4, 1])
    together, entropy = loaded.head.evaluate_steps(steps, temperature=0.7)
    prompts = [own.tolist() for own in steps.prompt.tensor_split(steps.begins[1:])]
    for row, of, density in zip(steps.rows, steps.prompt_of.tolist(), together, strict=True):
        own = PackedSteps.of([row[None].numpy()], [prompts[of]], "cpu")
        assert loaded.head.evaluate_steps(own, temperature=0.7)[0].item() == density.item()
    assert len(set(together.tolist())) == 7 and len(set(entropy.tolist())) == 1


def test_equal_pictures_are_read_once_and_have_the_gradient_of_two():
    loaded = vla_policy()
    steps, read = random_steps(loaded, [2]), []
    loaded.model.register_forward_pre_hook(lambda module, given: read.append(len(given[0].images)))
    loaded.head.evaluate_steps(steps)[0].sum().backward()
    whole = [p.grad.clone() for p in loaded.model.parameters()]
    loaded.model.zero_grad()
    for row in steps.rows:
        own = PackedSteps.of([row[None].numpy()], [steps.prompt.tolist()], "cpu")
        loaded.head.evaluate_steps(own)[0].sum().backward()
    assert read == [1, 1, 1]
    for one, two in zip(loaded.model.parameters(), whole, strict=True):
        assert torch.allclose(one.grad, two, atol=1e-5 * (1 + two.abs().max()))


def test_without_noise_a_demonstrated_chain_is_flow_matching():
    """-½ of the squared distance of v to noise - chunk, a mean of the K levels, and a constant; in float64."""
    loaded = vla_policy()
    loaded.model.double()
    steps = random_steps(loaded, [4])
    chunk = np.random.default_rng(1).normal(size=(4, 6))
    chains = np.stack([matching_chain(own, 3, key=9, t=t) for t, own in enumerate(chunk)])
    assert np.array_equal(chains, [matching_chain(own, 3, key=9, t=t) for t, own in enumerate(chunk)])
    assert np.allclose(chains[:, -6:], chunk)
    rows = torch.cat([steps.rows[:, : loaded.head.observed].double(), torch.from_numpy(chains)], 1)
    steps = replace(steps, rows=rows)
    density, _ = loaded.head.evaluate_steps(steps, temperature=0.0)
    density.sum().backward()
    found = {name: p.grad.clone() for name, p in loaded.model.named_parameters()}
    loaded.model.zero_grad()
    noise = torch.from_numpy(chains[:, :6])
    sigma = torch.tensor([1, 2 / 3, 1 / 3], dtype=torch.float64)
    x = (1 - sigma)[:, None] * torch.from_numpy(chunk)[:, None] + sigma[:, None] * noise[:, None]
    away = loaded.model.velocity(x, sigma, loaded.head.states(steps)) - (noise - torch.from_numpy(chunk))[:, None]
    wanted = -0.5 * away.square().sum(-1).mean(1) - 6 * (0.5 * np.log(2 * np.pi) - np.log(3))
    assert torch.allclose(density, wanted, atol=1e-9)
    wanted.sum().backward()
    for name, p in loaded.model.named_parameters():
        assert torch.allclose(p.grad, found[name], atol=1e-8 * (1 + p.grad.abs().max())), name


def test_a_chunk_is_drawn_the_same_in_company_and_has_the_trainers_density():
    loaded = vla_policy()

    async def ask(n, **how):
        e = engine(loaded, **how)
        return await asyncio.gather(*(e.generate(pictured(i)) for i in range(n)))

    crowd, narrow = asyncio.run(ask(5)), asyncio.run(ask(5, max_running=2))
    assert [d.steps for d in crowd] == [d.steps for d in narrow]
    steps = PackedSteps.of([d.steps.rows for d in crowd], [pictured(i).tokens for i in range(5)], "cpu")
    with torch.no_grad():
        assert loaded.head.evaluate_steps(steps)[0].tolist() == [d.logprobs[0] for d in crowd]
    assert crowd[0].actions.shape == (2, 3)


def test_after_a_crash_a_chunk_is_taken_from_the_log_under_the_same_instruction_alone(tmp_path):
    async def serve(requests):
        e = engine(vla_policy(), log=TokenLog(tmp_path))
        await publish_in_place(e, 1)
        done = await asyncio.gather(*(e.generate(r) for r in requests))
        return [(d.steps, d.logprobs) for d in done], e.account.counts["tokens"]

    first, drawn = asyncio.run(serve([pictured(i) for i in range(3)]))
    told = replace(pictured(2), tokens=[7, 8, 9])
    again, anew = asyncio.run(serve([pictured(0), pictured(1), told]))
    assert (drawn, anew) == (3, 1) and again[:2] == first[:2] and again[2] != first[2]


@pytest.mark.slow
def test_a_backbone_from_a_folder_keeps_its_weights_and_the_whole_survives_a_folder(tmp_path):
    vl = load_model({"random": "qwen2_5_vl", **vla_policy.backbone}, dtype="float32")
    vl.model.save_pretrained(tmp_path / "vl")
    vl.tokenizer.save_pretrained(tmp_path / "vl")
    table = {"random": "flow_vla", "backbone": str(tmp_path / "vl"), **vla_policy.sizes}
    loaded = load_model(table)
    own, plain = loaded.model.backbone.state_dict(), AutoModelForImageTextToText.from_pretrained(tmp_path / "vl")
    assert all(torch.equal(value, own[name]) for name, value in plain.model.state_dict().items())
    assert tokenizer_of(table)[0].get_vocab() == loaded.tokenizer.get_vocab() and tokenizer_of(table)[2] is None
    loaded.model.save_pretrained(tmp_path / "vla")
    loaded.tokenizer.save_pretrained(tmp_path / "vla")
    again, steps = load_model(str(tmp_path / "vla")), random_steps(loaded, [2, 1])
    assert torch.equal(again.head.evaluate_steps(steps)[0], loaded.head.evaluate_steps(steps)[0])


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"backbone": None}, "no backbone"),
        ({"backbone": {"random": "gemma3"}}, "the backbone of model.path is a gemma3"),
        ({"backbone": {"random": "llama"}}, "the backbone of model.path is a llama"),
        ({"frame": [28, 30]}, r"28·30 pixels for a backbone with cells of 14·14"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused(changes, why):
    table = {"random": "flow_vla", "backbone": {"random": "qwen2_5_vl", **vla_policy.backbone}, **vla_policy.sizes}
    with pytest.raises(ModelError, match=why):
        load_model({**table, **changes})
