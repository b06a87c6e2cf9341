"""The weight of the entropy that follows a target (arXiv:2505.22312): up below it, down
above it, within its bounds, over a resume. And a weight beside which nothing else counts.
"""

from __future__ import annotations

import pytest

from kits.train import awkward_groups, batch, model, row, step, trainer
from rondel.algos.mixture import Mixture
from rondel.assemble.rows import warn_of_entropy
from rondel.core.errors import ConfigError
from rondel.core.events import Warned, subscribe
from rondel.train.adaptive_coefs import AdaptiveCoefs
from rondel.train.checkpoint import load_trainer, save_trainer


@pytest.mark.slow
def test_the_weight_follows_the_entropy_and_outlives_a_resume(tmp_path):
    mean = step(trainer(model(), row("grpo"), lr=0.0), batch(awkward_groups(), row("grpo")), row("grpo")).metrics[
        "train/entropy"
    ]
    for target, expected in ((mean + 0.5, [0.01, 0.03, 0.05, 0.06, 0.06]), (mean - 0.5, [0.01, 0.0, 0.0, 0.0, 0.0])):
        algo = row("grpo", entropy={"coef": 0.01, "target": target, "delta": 0.02, "most": 0.06})
        t = trainer(model(), algo, lr=1e-4)
        told = [step(t, batch(awkward_groups(n), algo), algo).metrics["train/entropy_coef"] for n in range(5)]
        assert told == pytest.approx(expected)
        save_trainer(t, tmp_path / f"{target}")
        other = trainer(model(), algo, lr=1e-4)
        load_trainer(other, tmp_path / f"{target}")
        assert other.coefs.values == t.coefs.values


def test_it_begins_from_nothing():
    """coef = 0 with a delta is no idle knob: the first step only measures."""
    algo = row("grpo", entropy={"target": 99.0, "delta": 0.1})
    t = trainer(model(), algo, lr=1e-4)
    assert [
        step(t, batch(awkward_groups(n), algo), algo).metrics["train/entropy_coef"] for n in range(3)
    ] == pytest.approx([0, 0.1, 0.2])


@pytest.mark.parametrize(
    ("entropy", "says"),
    [
        ({"coef": 0.1, "delta": 0.1}, "there is none: set entropy.target"),
        ({"coef": 0.1, "target": 1.0, "least": 0.1}, "entropy.delta is 0"),
        ({"coef": 0.1, "target": 1.0, "delta": 0.1, "least": 2.0}, "least at most most"),
        ({"delta": -0.1, "target": 1.0}, "delta is at least 0"),
    ],
)
def test_knobs(entropy, says):
    with pytest.raises(ConfigError, match=says):
        row("grpo", entropy=entropy)


@pytest.mark.parametrize(
    ("kind", "coef", "says"),
    [
        ("grpo", 0.01, ""),
        ("grpo", -0.01, "paid for being certain"),
        ("a_star_po", 2e-5, ""),
        ("a_star_po", 0.01, "more than a_star_po moves for an advantage of 1 (0.002, `rondel explain a_star_po`)"),
    ],
)
def test_a_bonus_that_outweighs_the_loss_is_told(kind, coef, says):
    heard = []
    forget = subscribe(lambda event: heard.append(event.message) if isinstance(event, Warned) else None)
    warn_of_entropy(row(kind, entropy={"coef": coef}))
    forget()
    assert len(heard) == bool(says) and all(says in text for text in heard)


@pytest.mark.parametrize("steer", ["doubling", "proportional"])
def test_a_coefficient_stays_where_a_step_has_no_sample_of_its_row(steer):
    """All tasks of the step are of another source, so nothing is known of the KL."""
    main = row("grpo", kl={"coef": 0.1, "target": 2.0, "steer": steer})
    algo = Mixture(main, {"code": (row("rloo"), 1.0)})
    b = batch(awkward_groups(), main)
    for sample in b.samples:
        sample.stream = "code"
    coefs = AdaptiveCoefs()
    assert coefs.update_coefs(b, algo, main) == {} and coefs.apply_coefs(main).kl.coef == 0.1
