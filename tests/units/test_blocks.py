"""Block-diffusion models: log-probabilities and gradients against passes without any packing, and the bound of masked
diffusion against all its masks."""

import json
from itertools import combinations, permutations

import numpy as np
import pytest
import torch

from kits.blocks import block_model, brute_force, plain_model, unmasked_groups
from rondel.buffer.state import decode, encode
from rondel.core.errors import ModelError, TrainError
from rondel.core.types import Group, Score, Task, Trajectory
from rondel.core.unmasking_steps import MASKED, SHOWN, UnmaskingSteps
from rondel.generate.envs.block_turn import mask_blocks
from rondel.models.aligned_numerics import align_numerics
from rondel.models.load import load_model
from rondel.models.save import save_model
from rondel.runtime.journal.store import groups_of, read_step, write_step
from rondel.train.annotate import forward, logprobs_of
from rondel.train.pack import batch_of, micro_batches

MODEL = block_model()


def of_trainer(loaded, trajectories):
    groups = [Group(0, Task("t", "single_turn", {}), trajectories, 0)]
    [packed] = micro_batches(batch_of(groups), 10**6)
    return forward(loaded, packed, temperature=1.0)[0]


@pytest.mark.parametrize("aligned", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_logprobs_and_gradient_are_those_of_single_passes(aligned):
    loaded = block_model(num_hidden_layers=2)
    if aligned:
        align_numerics(loaded)
    samples = [t for group in unmasked_groups() for t in group.trajectories]
    ours = of_trainer(loaded, samples)
    weights = torch.from_numpy(np.concatenate([t.steps.weights for t in samples]))
    (ours * torch.linspace(-1, 1, len(ours))).sum().backward()
    other = plain_model(loaded)
    theirs = torch.cat([brute_force(other, t) for t in samples]) * weights
    assert len(ours) == 42 and torch.allclose(ours, theirs, rtol=0, atol=1e-5)
    (theirs * torch.linspace(-1, 1, len(theirs))).sum().backward()
    for mine, wanted in zip(loaded.model.parameters(), other.parameters(), strict=True):
        assert float((mine.grad - wanted.grad).norm()) <= 1e-5 * max(1.0, float(wanted.grad.norm()))


def test_the_loss_of_demonstrations_is_the_mean_over_all_orders():
    """Of a block of three, over all masks that `mask_blocks` can draw, each with its chance: sum log p of one token after
    the other, averaged over the orders (arXiv:2502.09992, eq. 14), which is a bound below log p of the block."""
    prompt, answer = [7, 30], np.array([44, 12, 9], np.int32)

    def shown(hidden):
        own = answer.copy()
        own[list(hidden)] = MASKED
        t = Trajectory(score=Score(1.0))
        t.extend(prompt)
        rows = np.concatenate([[SHOWN], own]).astype(np.int32)
        t.extend(answer.tolist(), logprobs=[0.0] * 3, versions=[0] * 3, steps=UnmaskingSteps(np.stack([rows] * 3)))
        return t

    loaded = block_model(block=3)
    mean, of_mask = 0.0, {}
    for n in (1, 2, 3):
        masks = list(combinations(range(3), n))
        for hidden in masks:
            own = of_trainer(loaded, [shown(hidden)])
            of_mask[hidden] = own * n / 3  # without its weight L / n
            mean += float(own.sum().detach()) / 3 / len(masks)
    orders = [
        sum(float(of_mask[tuple(sorted(order[i:]))][order[i]].detach()) for i in range(3))
        for order in permutations(range(3))
    ]
    assert mean == pytest.approx(sum(orders) / 6, abs=1e-5)
    assert mean <= np.log(np.mean(np.exp(orders))) + 1e-6


def test_masks_of_a_demonstration_are_even():
    """n from 1 to L is as likely as any other, and so is each position."""
    drawn = [mask_blocks(np.arange(5, 10, dtype=np.int32), 3, key) for key in range(3000)]
    counts = np.bincount([int((steps.seen[0] == MASKED).sum()) for steps in drawn], minlength=4)
    places = sum((steps.seen[0] == MASKED) for steps in drawn)
    assert counts[0] == 0 and (abs(counts[1:] - 1000) < 100).all() and (abs(places - 2000) < 100).all()
    assert all(steps.seen[3].tolist()[2] == -2 for steps in drawn) and drawn[0] == mask_blocks(
        np.arange(5, 10, dtype=np.int32), 3, 0
    )
    assert np.mean([steps.weights.sum() for steps in drawn]) == pytest.approx(5)


@pytest.mark.parametrize("folded", ["store", "buffer"])
def test_what_a_token_saw_comes_back_with_the_same_bits(tmp_path, folded):
    group = unmasked_groups()[0]
    if folded == "store":
        write_step(tmp_path, 1, [group])
        [back] = groups_of(read_step(tmp_path, 1))
    else:
        back = decode(json.loads(json.dumps(encode(group))))
    for mine, theirs in zip(group.trajectories, back.trajectories, strict=True):
        assert theirs.steps == mine.steps and theirs.tokens == mine.tokens
    steps = group.trajectories[1].steps
    assert (
        steps[:4] + steps[4:] == steps
        and steps.copied == len({*map(bytes, steps.rows[:4])}) * 4 + len({*map(bytes, steps.rows[4:8])}) * 4 + 1
    )


def test_a_saved_model_is_one_of_blocks_again_and_scores_alike(tmp_path):
    save_model(MODEL, tmp_path)
    again = load_model(str(tmp_path), dtype="float32")
    assert again.blocks == MODEL.blocks and again.head.bias is not None
    tokens = [7, 8, 30, 41, 9, 10, 77]
    scored = logprobs_of(again, tokens)
    assert scored == logprobs_of(MODEL, tokens) and scored[0] == 0 and len(scored) == 7
    assert logprobs_of(MODEL.copy_trainable(), tokens) == scored


def test_what_cannot_be_is_refused():
    for blocks, why in (
        ({"size": 3}, "has no 'size'"),
        (3, "no table"),
        ({"block": 0}, "at least 1"),
        ({"block": 2, "steps": 3}, "one token at least"),
        ({"mask_token": 3}, "no token has"),
    ):
        with pytest.raises(ModelError, match=why):
            block_model(block_diffusion=blocks)
    with pytest.raises(ModelError, match="take llama or qwen3"):
        load_model({"random": "mistral", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
                    "num_key_value_heads": 2, "intermediate_size": 32, "sliding_window": 8, "block_diffusion": {}})  # fmt: skip
    bare = Trajectory(score=Score(1.0))
    bare.extend([7])
    bare.extend([8], logprobs=[-1.0], versions=[0])
    with pytest.raises(TrainError, match=r"Completion\.steps"):
        of_trainer(MODEL, [bare])
    split = unmasked_groups()[0].trajectories[1]
    split.extend([5])
    with pytest.raises(ValueError, match="answers once"):
        of_trainer(MODEL, [split])
