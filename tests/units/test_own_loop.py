"""rondel.Trainer: a loop written by hand moves the weights as the run's own step does, and is refused what would be a lie."""

import asyncio

import numpy as np
import pytest

import rondel
from kits.runs import FAST, RECIPE
from rondel.assemble.own_loop import _complete_job
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


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
def test_a_second_move_on_the_same_answers_is_clipped_as_the_second_epoch_of_a_step(kind):
    """Each move over all answers, as `loop.epochs = 2` makes them: the ratio starts where the answers were drawn."""
    rest = {"algo": {"kind": kind}, "trainer": {"lr": 3e-2}}
    with small(**rest) as by_hand, small(**rest, loop={"epochs": 2}) as whole:
        answers = by_hand.sample(ASK[:2], SAMPLING)
        for _ in range(2):
            told = by_hand.forward_backward(answers, rewarded(answers))
            by_hand.optim_step()
        groups = [Group(i, Task(str(i), "own", {}), list(g), 0) for i, g in enumerate(answers)]
        for group, numbers in zip(groups, rewarded(answers)):
            for t, number in zip(group.trajectories, numbers):
                t.score = Score(number)
        asyncio.run_coroutine_threadsafe(whole._trainer.step(batch_of(groups), whole.algo), whole._loop).result()
        assert told["train/clip_fraction"] > 0.1 and told["train/ratio_max_deviation"] > 0.2
        np.testing.assert_allclose(weights(by_hand), weights(whole), atol=1e-4)


def test_the_first_moves_have_the_rate_that_the_trainer_names():
    """The recipe has a supervised phase at 0.003, which a loop by hand does not have."""
    with small(trainer={"lr": 0.01}) as trainer:
        answers = trainer.sample(ASK[:1], SAMPLING)
        trainer.forward_backward(answers, rewarded(answers))
        assert trainer.optim_step()["train/lr"] == 0.01


def test_a_schedule_is_refused_and_tables_that_say_little_are_completed():
    for tables in ({"trainer": {"schedule": "cosine"}}, {}):
        with pytest.raises(UserError, match="needs to know the last step"):
            rondel.Trainer({"model": {"path": "m"}} | tables, **({} if tables else {"trainer": {"schedule": "linear"}}))
    job = _complete_job({"model": {"path": "m"}, "loop": {"seed": 3}, "run": {"sinks": []}}, {}, "folder")
    assert (job.loop.seed, job.loop.steps, job.run.folder) == (3, 1, "folder")
    assert _complete_job({"model": {"path": "m"}, "loop": {"passes": 2}}, {}, "folder").loop.passes == 2


def test_what_would_not_be_true_is_refused():
    with small() as trainer:
        answers = trainer.sample(ASK[:2], SAMPLING)
        with pytest.raises(UserError, match="call forward_backward before"):
            trainer.optim_step()
        with pytest.raises(UserError, match="one number for each answer"):
            trainer.forward_backward(answers, [[1.0]])
        with pytest.raises(UserError, match="one number for each answer"):
            trainer.forward_backward(answers, [1.0, 0.0])
        for wrong, told in ((None, "is None"), (float("nan"), "is nan"), ("1", "is str")):
            rewards = [[1.0 for _ in group] for group in answers]
            rewards[1][0] = wrong
            with pytest.raises(UserError, match=rf"rewards\[1\]\[0\] {told}: give a finite number"):
                trainer.forward_backward(answers, rewards)
        with pytest.raises(UserError, match="nothing to train on"):
            trainer.forward_backward(answers)
        greedy = trainer.sample(ASK[:1], rondel.Sampling(temperature=0, max_tokens=2))
        with pytest.raises(UserError, match="the policy did not draw them"):
            trainer.forward_backward(greedy, [[1.0]])
        for wrong in (rondel.Sampling(temperature=0.5), rondel.Sampling(repetition_penalty=1.2)):
            with pytest.raises(UserError, match="trained at temperature 1"):
                trainer.sample(ASK, wrong)
        with pytest.raises(UserError, match="give a list of them"):
            trainer.sample("3+4=")
    with pytest.raises(UserError, match="this trainer is closed"):
        trainer.sample(ASK)
    for wrong in (
        *({"place": {"kind": "split"}}, {"algo": {"kind": "ppo"}}, {"algo": {"kind": "rae"}}),
        *({"algo": {"kind": "remax"}}, {"algo": {"kind": "ngu"}}),
        *({"algo": {"entropy": {"coef": 0.01, "target": 2.0, "delta": 1e-3}}}, {"algo": {"beside": [{"kind": "sft"}]}}),
    ):
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
