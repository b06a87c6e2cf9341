"""CriPO: criteria that count, tokens that are chosen, and the policy's own scores behind its hints."""

from __future__ import annotations

import math

import pytest
import torch

from kits.algos import near, tensor
from kits.engine import drawn_groups
from kits.engine import tiny as tiny_model
from kits.runs import run
from kits.train import inline, row
from rondel.algos.criteria import CriterionBonus
from rondel.algos.scored_samples import ScoredSamples
from rondel.core.errors import ConfigError
from rondel.core.types import Score
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.runtime.journal import store
from rondel.train.annotate import compute_advantages
from rondel.train.pack import batch_of
from rondel.train.settings import TrainSettings
from rondel.train.step import LocalTrainer
from rondel.train.teachers import Teacher

HINTS = [{"context": "{prompt}\nMind the form."}, {"context": "{prompt}\nThe answer is {answer}."}]


def test_tokens_earn_the_credit_of_criteria_whose_hint_makes_them_likelier():
    """Two answers of three tokens; a_c = ±0.5 and ±1; with most = 1 the larger criterion alone counts."""
    margins = {
        0: tensor(-1.0, 3.0, 0.1, -1.0, 3.0, 3.0),  # not likelier; far from the best; nearly the best
        1: tensor(5.0, -1.0, 5.0, 5.0, 5.0, 5.0),
    }
    told = ScoredSamples(
        tensor(1, 0),
        torch.tensor([4, 4]),
        torch.tensor([3, 3]),
        {"form": tensor(1, 0), "right": tensor(2, 0), "more": tensor(0, 0)},
        margins=margins,
    )
    rule = CriterionBonus(0.5, 0.2, criteria={"form": 0, "right": 1, "more": 0})
    plain = tensor(*[0.5] * 3, *[-0.5] * 3)
    assert near(rule.shape_advantages(plain, told) - plain, [0.5, 0.25, 0.5, 0, 0, 0])
    one = CriterionBonus(0.5, 0.2, most=1, criteria={"form": 0, "right": 1})
    assert near(one.shape_advantages(plain, told) - plain, [0.5, 0, 0.5, 0, 0, 0])
    wide = CriterionBonus(0.5, math.exp(-0.05), criteria={"form": 0})
    assert near(wide.shape_advantages(plain, told) - plain, [0, 0.25, 0.25, 0, 0, 0])
    with pytest.raises(ConfigError, match="the reward has no such part; it has: form, right, more"):
        CriterionBonus(criteria={"style": 0}).shape_advantages(plain, told)


@pytest.mark.slow
def test_the_policy_scores_its_answers_again_behind_hints():
    """Margins against written-out logits behind each hint; the advantages are theirs; two packings agree."""
    loaded = tiny_model()
    algo = row("cripo", distill={"coef": 0.5, "threshold": 0.5, "criteria": {"form": 0, "right": 1}})
    groups = drawn_groups(loaded)
    hints = [[7, 8, 9], [40, 41, 42, 43, 44]]
    for group in groups:
        for i, t in enumerate(group.trajectories):
            t.score = Score(float(i % 2), {"form": float(i % 2), "right": float(i == 3)})
            t.teacher_prompts = hints
    settings = dict(lr=1e-3, start_probe=0, temperature=0.7)
    t = LocalTrainer(
        loaded,
        TrainSettings(**settings),
        run=inline,
        needs=algo.needs,
        teachers=[Teacher(None, is_policy=True) for _ in hints],
    )
    b = batch_of(groups)
    t._annotate(b, algo.needs)
    compute_advantages(b, algo)
    chosen = 0
    for s in b.samples:
        own = s.tokens.tolist()[s.prompt_length :]
        wanted = {}
        for place, hint in enumerate(hints):
            ids = torch.tensor([*hint, *own])
            logits = t.loaded.head.logits(
                t.loaded.hidden_states(ids, torch.arange(len(ids)), PackedLayout([PackedSegment(0, len(ids))]))
            )
            log_p = (logits.detach() / 0.7).log_softmax(-1)[len(hint) - 1 : -1]
            told = log_p.gather(-1, torch.tensor(own)[:, None])[:, 0]
            margin = torch.where(told > s.known.behavior, log_p.amax(-1) - told, -1.0)
            assert torch.allclose(s.known.margins[place], margin, atol=1e-5)
            wanted[place] = (margin >= 0) & (margin > math.log(2))
        credit = {0: s.parts["form"] - 0.5, 1: s.parts["right"] - 0.25}
        bonus = sum(0.5 * c * wanted[place].double() for place, c in credit.items() if c > 0)
        chosen += int(sum(wanted[place].sum() for place, c in credit.items() if c > 0))
        assert torch.allclose(
            s.known.advantages.double(), s.reward - 0.5 + bonus + torch.zeros(len(own)).double(), atol=1e-6
        )
    assert chosen > 5, "the case must tell something"
    again = batch_of(groups)
    object.__setattr__(t.settings, "micro_tokens", 1)
    t._annotate(again, algo.needs)
    for one, two in zip(b.samples, again.samples, strict=True):
        assert all(torch.allclose(one.known.margins[n], two.known.margins[n], atol=1e-5) for n in (0, 1))


@pytest.mark.slow
def test_a_tiny_run_of_criteria(tmp_path):
    run(
        tmp_path,
        algo={"kind": "cripo", "distill": {"criteria": {"number": 1}, "threshold": 1.0}},
        model__teacher=HINTS,
        task__reward={"kind": "combine", "parts": {"number": {"kind": "number", "weight": 1.0}}},
        loop__steps=2,
        loop__warmup__steps=1,
    )
    assert store.stored_steps(tmp_path)


@pytest.mark.parametrize(
    "changes,message",
    [
        ({}, "has no criteria: set algo.distill.criteria"),
        ({"algo__distill": {"criteria": {"form": 2}}}, "form = 2, and it has 2"),
        ({"algo__distill": {"criteria": {"form": 0.5}}}, "write the place of its hint"),
        (
            {"algo__distill": {"criteria": {"form": 0}}, "engine__sampling__top_k": 5},
            "top_k, top_p or min_p cut these: set them to 0, 1 and 0",
        ),
        (
            {"algo__distill": {"criteria": {"form": 0}}, "model__teacher": [{"context": "{prompt} {solution}"}]},
            "a context without {solution}",
        ),
    ],
)
def test_criteria_without_hints_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, **{"algo__kind": "cripo", "model__teacher": HINTS, **changes})
