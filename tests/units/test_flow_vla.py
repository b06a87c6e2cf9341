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
from rondel.models.control.action_expert import _AttendPlaces, attend_places
from rondel.models.flow.transition import sinusoidal
from rondel.models.load import load_model, tokenizer_of
from rondel.models.packed_steps import PackedSteps
from rondel.runtime.journal.wal import TokenLog

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
READS = pytest.mark.parametrize("reads", ["last", "all"])


def random_steps(loaded, counts, seed=0):
    """Steps of episodes under instructions of different lengths; the first two read the same picture."""
    noise, n = np.random.default_rng(seed), sum(counts)
    rows = np.concatenate(
        [noise.integers(0, 256, (n, loaded.head.observed)), noise.normal(size=(n, loaded.head.dim))], 1
    )
    rows[1, : loaded.head.observed] = rows[0, : loaded.head.observed]
    prompts = [noise.integers(5, 90, 3 + 2 * i).tolist() for i in range(len(counts))]
    return PackedSteps.of(np.split(rows.astype(np.float32), np.cumsum(counts)[:-1]), prompts, "cpu")


def own_passes(loaded, steps):
    """Of each step what transformers' own pass of the backbone says of its picture and instruction alone."""
    inner, sight = loaded.model.backbone, loaded.model.sight
    inner.set_attn_implementation("eager")
    config = inner.config
    begin, end, place = config.vision_start_token_id, config.vision_end_token_id, config.image_token_id
    prompts = [own.tolist() for own in steps.prompt.tensor_split(steps.begins[1:])]
    for row, of in zip(steps.rows, steps.prompt_of.tolist(), strict=True):
        image = Image.from_pixels(row[: loaded.head.observed].numpy().astype(np.uint8).reshape(28, 28, 3), 14)
        tokens = [begin, *[place] * 4, end, *prompts[of]]
        given = vision.as_given(sight, tokens, [ImagePlaceholder(1, image)])
        with torch.no_grad():
            yield inner(torch.tensor([tokens]), use_cache=True, **given), image


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_the_backbone_in_transformers_own_pass(family):
    loaded = vla_policy(family)
    steps = random_steps(loaded, [2, 3])
    found = loaded.head.states(steps)
    [layer] = loaded.model.layers
    for (said, _), state in zip(own_passes(loaded, steps), found, strict=True):
        assert torch.allclose(layer(said.last_hidden_state[0, -1]).tanh(), state, atol=2e-5)


def norm(x, layer):
    return (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt() * layer.weight + layer.bias


def turned(x, at, config):
    """A head of a query or key at the place `at` of text, by complex numbers (arXiv:2104.09864)."""
    half, theta = len(x) // 2, config.rope_parameters["rope_theta"]
    angles = at * theta ** (-torch.arange(half) / half)
    found = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones(half), angles.float())
    return torch.cat([found.real, found.imag])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_expert_attends_to_keys_and_values_of_transformers_own_pass(family):
    """Velocities, token by token and head by head: a query sees the whole prefix and the chunk's own, both ways."""
    loaded = vla_policy(family, reads="all")
    steps, model = random_steps(loaded, [1, 2]), loaded.model
    x, sigma = torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(5)), torch.tensor([1.0, 1 / 3])
    with torch.no_grad():
        ours = model.velocity(x, sigma, loaded.head.states(steps))
    text, expert = model.config.backbone_config.get_text_config(), model.expert
    heads, groups = text.num_attention_heads, text.num_attention_heads // text.num_key_value_heads
    for n, (said, image) in enumerate(own_passes(loaded, steps)):
        prefix = said.last_hidden_state.shape[1]
        places = prefix - image.tokens + max(image.rows, image.columns)  # a picture takes as many as its longest side
        state = model.layers[0](said.last_hidden_state[0, -1]).tanh()
        for s, level in enumerate(sigma):
            chunk = [expert.enter(torch.cat([a, sinusoidal(level[None], 6)[0]])) + state for a in x[n, s].view(2, 3)]
            for layer, cached in zip(expert.layers, said.past_key_values.layers, strict=True):
                normed = [norm(h, layer.norm) for h in chunk]
                q, k, v = (
                    [part(h).view(-1, layer.size) for h in normed] for part in (layer.query, layer.key, layer.value)
                )
                for h, hidden in enumerate(chunk):
                    seen = []
                    for head in range(heads):
                        group = head // groups
                        keys = [*cached.keys[0, group], *(turned(k[i][group], places + i, text) for i in range(2))]
                        values = torch.stack([*cached.values[0, group], *(v[i][group] for i in range(2))])
                        query = turned(q[h][head], places + h, text)
                        scores = torch.stack([query @ key for key in keys]) / layer.size**0.5
                        seen.append(scores.softmax(0) @ values)
                    chunk[h] = hidden + layer.out(torch.cat(seen))
                chunk = [h + layer.down(torch.nn.functional.silu(layer.up(norm(h, layer.norm_up)))) for h in chunk]
            acted = torch.cat([model.act(norm(h, expert.norm)) for h in chunk])
            assert torch.allclose((x[n, s] - acted) / level, ours[n, s], atol=2e-4), (n, s)


def test_the_gradient_of_the_experts_attention_is_that_of_torch():
    """Over contexts of 3, 70 and 66 places, more than a block of them, of which some are shared."""
    noise = torch.Generator().manual_seed(0)
    q, keys, values = (torch.randn(n, h, 8, generator=noise) for n, h in ((3, 4), (90, 2), (90, 2)))
    places, lengths = torch.randint(0, 90, (3, 70), generator=noise), torch.tensor([3, 70, 66])
    given = [x.requires_grad_() for x in (q, keys, values)]
    weight, found = torch.randn(3, 4, 8, generator=noise), []
    for attend in (_AttendPlaces.apply, attend_places):
        out = attend(*given, places, lengths)
        found.append((out.detach(), *torch.autograd.grad((out * weight).sum(), given)))
    plain = []
    for i, n in enumerate(lengths.tolist()):
        k, v = (x[places[i, :n]].repeat_interleave(2, 1) for x in (keys, values))
        plain.append(torch.einsum("hc,chd->hd", (torch.einsum("hd,chd->hc", q[i], k) / 8**0.5).softmax(1), v))
    found.append((torch.stack(plain).detach(), *torch.autograd.grad((torch.stack(plain) * weight).sum(), given)))
    for one in found[:2]:
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(one, found[2], strict=True))


def test_an_expert_reads_what_the_last_hidden_state_does_not_tell():
    """Of keys and values of the first layer, which the states are not computed from."""
    loaded = vla_policy(reads="all")
    read = loaded.head.states(random_steps(loaded, [2]))
    x, sigma = torch.zeros(2, 1, 6), torch.tensor([0.5])
    before = loaded.model.velocity(x, sigma, read)
    for layer in range(2):
        for token in range(len(read.values[0])):
            values = [v.clone() for v in read.values]
            values[layer][token] += 1.0
            assert not torch.equal(loaded.model.velocity(x, sigma, replace(read, values=values)), before)


@READS
def test_a_step_has_the_same_density_alone_and_in_company(reads):
    loaded = vla_policy(reads=reads)
    steps = random_steps(loaded, [2, 4, 1])
    together, entropy = loaded.head.evaluate_steps(steps, temperature=0.7)
    prompts = [own.tolist() for own in steps.prompt.tensor_split(steps.begins[1:])]
    for row, of, density in zip(steps.rows, steps.prompt_of.tolist(), together, strict=True):
        own = PackedSteps.of([row[None].numpy()], [prompts[of]], "cpu")
        assert loaded.head.evaluate_steps(own, temperature=0.7)[0].item() == density.item()
    assert len(set(together.tolist())) == 7 and len(set(entropy.tolist())) == 1


@READS
def test_equal_pictures_are_read_once_and_have_the_gradient_of_two(reads):
    loaded = vla_policy(reads=reads)
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


@READS
def test_without_noise_a_demonstrated_chain_is_flow_matching(reads):
    """-½ of the squared distance of v to noise - chunk, a mean of the K levels, and a constant; in float64."""
    loaded = vla_policy(reads=reads)
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


@READS
def test_a_chunk_is_drawn_the_same_in_company_and_has_the_trainers_density(reads):
    loaded = vla_policy(reads=reads)

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
        ({"reads": "all", "num_denoising_layers": 2}, "a layer for each of the backbone's; leave it out"),
        ({"reads": "some"}, 'reads = "some" of model.path: take "last" or "all"'),
        ({"frame": [28, 30]}, r"28·30 pixels for a backbone with cells of 14·14"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused(changes, why):
    table = {"random": "flow_vla", "backbone": {"random": "qwen2_5_vl", **vla_policy.backbone}, **vla_policy.sizes}
    with pytest.raises(ModelError, match=why):
        load_model({**table, **changes})
