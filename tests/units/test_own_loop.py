"""rondel.Trainer: a loop written by hand moves the weights as the run's own step does, and is refused what would be a lie."""

import asyncio

import numpy as np
import pytest

import rondel
from kits.runs import FAST, RECIPE
from rondel.core.errors import UserError
from rondel.core.types import Group, Score, Task
from rondel.train.pack import batch_of

ASK = ["3+4=", "2+2=", "1+5=", "4+4="]
SAMPLING = rondel.Sampling(n=4, max_tokens=3)


def small(**more):
    tree: dict = {}
    for dotted, value in FAST.items():
        section, _, key = dotted.partition(".")
        if section not in ("run", "task"):
            tree.setdefault(section, {})[key] = value
    for section, keys in more.items():
        tree.setdefault(section, {}).update(keys)
    return rondel.Trainer(RECIPE, **tree)


def rewarded(answers):
    return [[float((sum(map(ord, t.text)) + i) % 3) for i, t in enumerate(group)] for group in answers]


def weights(trainer):
    return np.concatenate([m.detach().float().flatten().numpy() for m in trainer._trainer.weights.masters])


@pytest.mark.slow
def test_two_halves_are_the_step_of_a_run_and_what_is_added_up_is_the_sum():
    with small() as by_hand, small() as whole, small() as in_parts:
        answers = by_hand.sample(ASK, SAMPLING)
        assert [[list(t.tokens) for t in g] for g in answers] == [
            [list(t.tokens) for t in g] for g in whole.sample(ASK, SAMPLING)
        ]
        rewards = rewarded(answers)
        told = by_hand.forward_backward(answers, rewards)
        moved = by_hand.optim_step()
        groups = [Group(i, Task(str(i), "own", {}), list(g), 0) for i, g in enumerate(answers)]
        for group, numbers in zip(groups, rewards):
            for t, number in zip(group.trajectories, numbers):
                t.score = Score(number)
        done = asyncio.run_coroutine_threadsafe(whole._trainer.step(batch_of(groups), whole.algo), whole._loop).result()
        np.testing.assert_array_equal(weights(by_hand), weights(whole))
        for name in ("train/loss", "train/entropy", "train/grad_norm"):
            assert {**told, **moved}[name] == pytest.approx(done.metrics[name], abs=1e-7), name
        for half in (slice(0, 2), slice(2, 4)):
            in_parts.forward_backward(answers[half], rewards[half], weight=0.5)
        assert in_parts.optim_step()["train/grad_norm"] == pytest.approx(moved["train/grad_norm"], rel=1e-4)
        assert by_hand.version == 1 and by_hand.sample(ASK[:1], SAMPLING)[0][0].versions[-1] == 1


@pytest.mark.slow
def test_a_state_goes_on_with_equal_bits_and_the_model_is_saved(tmp_path):
    from transformers import AutoModelForCausalLM

    with small() as one, small() as other:
        for trainer in (one, other):
            answers = trainer.sample(ASK, SAMPLING)
            trainer.forward_backward(answers, rewarded(answers))
            trainer.optim_step(lr=1e-3)
        one.save_state(tmp_path / "state")
        answers = one.sample(ASK, SAMPLING)
        for _ in range(2):
            one.forward_backward(answers, rewarded(answers))
            one.optim_step(lr=1e-2)
        one.load_state(tmp_path / "state")
        np.testing.assert_array_equal(weights(one), weights(other))
        assert one.logprobs([5, 6, 7]) == other.logprobs([5, 6, 7])
        one.save(tmp_path / "model")
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        assert sum(p.numel() for p in saved.parameters()) >= weights(one).size


def test_what_would_not_be_true_is_refused():
    with small() as trainer:
        answers = trainer.sample(ASK[:2], SAMPLING)
        with pytest.raises(UserError, match="call forward_backward before"):
            trainer.optim_step()
        with pytest.raises(UserError, match="one number for each answer"):
            trainer.forward_backward(answers, [[1.0]])
        with pytest.raises(UserError, match="nothing to train on"):
            trainer.forward_backward(answers)
        greedy = trainer.sample(ASK[:1], rondel.Sampling(temperature=0, max_tokens=2))
        with pytest.raises(UserError, match="the policy did not draw them"):
            trainer.forward_backward(greedy, [[1.0]])
        for wrong in (rondel.Sampling(temperature=0.5), rondel.Sampling(min_p=0.2)):
            with pytest.raises(UserError, match="trained at temperature 1"):
                trainer.sample(ASK, wrong)
        with pytest.raises(UserError, match="give a list of them"):
            trainer.sample("3+4=")
    with pytest.raises(UserError, match="this trainer is closed"):
        trainer.sample(ASK)
    for wrong in ({"place": {"kind": "split"}}, {"algo": {"kind": "ppo"}}):
        with pytest.raises(UserError, match=r"use rondel\.run"), small(**wrong) as trainer:
            answers = trainer.sample(ASK[:1], SAMPLING)
            trainer.forward_backward(answers, rewarded(answers))


def test_a_row_that_reads_the_likeliest_tokens_of_every_draw_gets_them():
    with small(algo={"kind": "score_centering", "surrogate": {"top": 5}}) as trainer:
        answers = trainer.sample(ASK[:2], SAMPLING)
        for t in (t for group in answers for t in group):
            ids, logprobs = t.behavior_top[-1]
            assert len(ids) == 5 and max(logprobs) >= t.logprobs[-1] - 1e-6
        trainer.forward_backward(answers, rewarded(answers))
        assert trainer.optim_step()["train/grad_norm"] > 0
