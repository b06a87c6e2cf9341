"""A recipe turns the knobs of a row; whatever it says that cannot be meant is an error with its remedy (law 12)."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from rondel.algos import (
    advantage,
    aggregate,
    correction,
    kl,
    masked_surrogates,
    reward_transforms,
    surrogate,
    trust_region_surrogates,
)
from rondel.algos.component import Component, LossTerm
from rondel.algos.explanation import explain_objective
from rondel.algos.objective import objective
from rondel.algos.table import DAPO, DR_GRPO, FAMILIES, GRPO, REINFORCE, RLOO, SFT, TABLE, resolve_algorithm
from rondel.algos.tokens import TokenBatch
from rondel.core.errors import ConfigError

# -- rows
# -----------------------------------------------------------------------------------------------------------------


def test_the_rows_are_what_their_papers_say():
    assert list(TABLE)[:7] == ["grpo", "dr_grpo", "dapo", "ppo", "rloo", "reinforce", "sft"] and len(TABLE) == 66
    assert GRPO.advantage == advantage.GroupNorm(1e-6) and GRPO.aggregate == aggregate.SeqMeanTokenMean()
    assert DR_GRPO.advantage == advantage.GroupCenter() and DR_GRPO.aggregate == aggregate.FixedNorm()
    assert DR_GRPO.surrogate == GRPO.surrogate == surrogate.Clip(0.2, 0.2) and DR_GRPO.kl == GRPO.kl == kl.Kl("k3", 0.0)
    assert (
        DAPO.surrogate == surrogate.Clip(0.2, 0.28)
        and DAPO.filters == ("signal",)
        and DAPO.shaping == reward_transforms.Overlong()
    )
    assert (
        RLOO.advantage == advantage.LeaveOneOut()
        and RLOO.surrogate == REINFORCE.surrogate == surrogate.PolicyGradient()
    )
    assert SFT.surrogate == surrogate.LogLikelihood() and SFT.aggregate == aggregate.TokenMean()
    assert (
        TABLE["gspo"].surrogate == surrogate.Clip(3e-4, 4e-4)
        and TABLE["gspo"].aggregate == aggregate.SeqMeanTokenMean()
    )
    assert TABLE["gmpo"].surrogate == trust_region_surrogates.GeometricMean(0.4, 0.4) and TABLE[
        "sapo"
    ].surrogate == trust_region_surrogates.SoftGate(1.0, 1.05)
    assert (
        TABLE["clip_cov"].surrogate == masked_surrogates.ClipCov(share=2e-4, least=1.0, most=5.0)
        and TABLE["m2po"].surrogate.threshold == 0.04
    )
    assert (
        TABLE["forking"].surrogate == masked_surrogates.Forking(0.2, 0.28, top=0.2)
        and TABLE["luffy"].surrogate.gamma == 0.1
    )
    assert TABLE["topr"].surrogate.level == "trajectory" and TABLE["kimi"].shaping == reward_transforms.KimiLength()


def test_a_row_needs_what_its_parts_read():
    assert GRPO.needs == {"advantages"} and SFT.needs == frozenset()
    full = replace(GRPO, correction=correction.Importance(), kl=kl.Kl("k2", 0.1))
    assert full.needs == {"advantages", "behavior_logprobs", "ref_logprobs"}
    assert replace(full, correction=correction.Importance(normalize="token")).needs == full.needs | {
        "proximal_logprobs"
    }
    compares = {name for name, row in TABLE.items() if "proximal_logprobs" in row.needs}
    assert compares == {"clip_cov", "kl_cov", "forking", "m2po", "online_dpo", "real", "otb", "opsa"}
    assert {name for name, row in TABLE.items() if row.needs & {"greedy", "guidance"}} == {"remax", "luffy"}
    assert {name for name, row in TABLE.items() if "behavior_logprobs" in row.needs} == {
        "dppo_tv",
        "dppo_kl",
        "decoupled",
        "topr",
        "aipo",
        "m2po",
        "opd",
        "vespo",
        "drpo",
        "vaco",
        "kpop",
        "real",
        "iw_opd",
        "score_centering",
        "sdpo",
        "rlsd",
        "codapo",
        "klpo",
    }
    assert {name for name, row in TABLE.items() if "teacher_logprobs" in row.needs} == {
        *("opd", "iw_opd", "sdar", "sdpo", "rlsd")
    }


def test_what_reads_the_behavior_need_not_correct_for_it():
    assert {name for name, row in TABLE.items() if row.corrects_staleness} == {
        "dppo_tv",
        "dppo_kl",
        "decoupled",
        "topr",
        "aipo",
        "m2po",
        "vespo",
        "drpo",
        "vaco",
        "kpop",
        "score_centering",
        "sdpo",
        "klpo",
    }
    charged = replace(GRPO, kl=kl.Kl("k1", 0.1, where="reward"))
    assert "behavior_logprobs" in charged.needs and not charged.corrects_staleness
    assert replace(charged, correction=correction.OffPolicyMask()).corrects_staleness
    assert replace(GRPO, ratio=surrogate.TokenRatio("behavior")).corrects_staleness


def test_a_teacher_makes_advantages_that_can_be_negative():
    assert (
        resolve_algorithm({"kind": "opd", "correction": {"kind": "off_policy_mask"}}).correction
        == correction.OffPolicyMask()
    )


def test_lengths_left_open_become_the_recipes_max_tokens():
    assert DR_GRPO.bounded(64).aggregate.length == 64 and DAPO.bounded(64).shaping.max_tokens == 64
    assert replace(DAPO, shaping=reward_transforms.Overlong(max_tokens=32)).bounded(64).shaping.max_tokens == 32
    assert GRPO.bounded(64) == GRPO


# -- overrides
# ------------------------------------------------------------------------------------------------------------

OVERRIDES = [
    ({"kind": "grpo"}, GRPO),
    ({"kind": "dapo", "surrogate": {"high": 0.3}}, replace(DAPO, surrogate=surrogate.Clip(0.2, 0.3))),
    ({"kind": "grpo", "kl": {"kind": "k2", "coef": 0.01}}, replace(GRPO, kl=kl.Kl("k2", 0.01))),
    ({"kind": "grpo", "kl": {"coef": 1}}, replace(GRPO, kl=kl.Kl("k3", 1))),
    ({"kind": "grpo", "surrogate": {"kind": "policy_gradient"}}, replace(GRPO, surrogate=surrogate.PolicyGradient())),
    ({"kind": "dapo", "surrogate": {"kind": "clip", "dual": 3}}, replace(DAPO, surrogate=surrogate.Clip(0.2, 0.28, 3))),
    ({"kind": "rloo", "surrogate": {"kind": "clip", "low": 0.1}}, replace(RLOO, surrogate=surrogate.Clip(0.1, 0.2))),
    (
        {"kind": "grpo", "correction": {"kind": "importance", "high": 5.0}},
        replace(GRPO, correction=correction.Importance(high=5.0)),
    ),
    (
        {"kind": "grpo", "correction": {"kind": "importance", "action": "mask", "low": 0.5, "high": 5.0}},
        replace(GRPO, correction=correction.Importance(action="mask", high=5.0)),
    ),
    (
        {"kind": "gdpo", "advantage": {"weights": {"form": 0.5}}},
        replace(TABLE["gdpo"], advantage=advantage.PartsNorm({"form": 0.5})),
    ),
    ({"kind": "grpo", "kl": {"coef": 0.1, "unbiased": True}}, replace(GRPO, kl=kl.Kl("k3", 0.1, unbiased=True))),
    ({"kind": "dapo", "filters": ["truncated"]}, replace(DAPO, filters=("truncated",))),
    ({"kind": "dapo", "shaping": {"kind": "none"}}, replace(DAPO, shaping=reward_transforms.NoShaping())),
    ({"kind": f"{__name__}:MINE"}, replace(GRPO, name="mine")),
    ({"kind": "grpo", "advantage": {"kind": f"{__name__}:Halved", "by": 3.0}}, None),
]


@dataclass(frozen=True)
class Halved(Component):
    by: float = 2.0

    def __call__(self, scored):
        return scored.rewards_N / self.by


MINE = replace(GRPO, name="mine")


@pytest.mark.parametrize("section,row", OVERRIDES, ids=lambda x: str(x)[:60] if isinstance(x, dict) else "")
def test_an_override_changes_its_knob_and_nothing_else(section, row):
    assert resolve_algorithm(section) == (replace(GRPO, advantage=Halved(3.0)) if row is None else row)


def test_every_family_is_a_field_of_the_row_and_every_class_can_be_chosen():
    for family, classes in FAMILIES.items():
        assert hasattr(GRPO, family)
        for kind, cls in classes.items():
            if family in ("kl", "entropy", "value"):
                continue  # one class each, and kl.kind is its own knob
            base = {"least_likely": "opsa"}.get(kind, "grpo")  # what refuses rewards
            assert type(getattr(resolve_algorithm({"kind": base, family: {"kind": kind}}), family)) is cls


# -- errors
# ---------------------------------------------------------------------------------------------------------------

MISTAKES = [
    ({}, "algo.kind = None; it must name a row: grpo, dr_grpo"),
    ({"kind": 3}, "algo.kind = 3; it must name a row"),
    ({"kind": "grop"}, "algo.kind 'grop' does not exist. Did you mean 'grpo'?"),
    ({"kind": "math:pi"}, "is 3.141592653589793; it must be a rondel.algos.table.Algorithm"),
    ({"kind": "grpo", "sorrogate": {}}, "algo.sorrogate does not exist. Did you mean 'surrogate'?"),
    ({"kind": "grpo", "name": "x"}, "algo.name does not exist."),
    (
        {"kind": "grpo", "surrogate": "clip"},
        "algo.surrogate = 'clip' is not a table; write algo.surrogate = { kind = ... }",
    ),
    (
        {"kind": "grpo", "surrogate": {"hi": 1}},
        "algo.surrogate.hi: Clip has no such knob. Did you mean 'high'? Its knobs: low, high, dual.",
    ),
    (
        {"kind": "grpo", "surrogate": {"kind": "clop"}},
        "algo.surrogate.kind 'clop' does not exist. Did you mean 'clip'?",
    ),
    ({"kind": "grpo", "surrogate": {"kind": 1}}, "algo.surrogate.kind = 1 is not a text"),
    ({"kind": "grpo", "surrogate": {"kind": "math:sin"}}, "must be a dataclass whose fields are its knobs"),
    (
        {"kind": "rloo", "surrogate": {"dual": 3.0}},
        "PolicyGradient has no such knob. It is a knob of kind = 'clip'. Its knobs: none.",
    ),
    (
        {"kind": "grpo", "surrogate": {"high": "0.3"}},
        "algo.surrogate.high = '0.3' is not a number (write 0.3 without quotes)",
    ),
    ({"kind": "grpo", "surrogate": {"high": True}}, "algo.surrogate.high = True is not a number"),
    ({"kind": "grpo", "surrogate": {"high": float("nan")}}, "algo.surrogate.high = nan is not a number"),
    ({"kind": "dapo", "shaping": {"buffer": 3.5}}, "algo.shaping.buffer = 3.5 is not a whole number"),
    ({"kind": "grpo", "kl": {"kind": 2, "coef": 0.1}}, "algo.kl.kind = 2 is not a text"),
    (
        {"kind": "grpo", "kl": {"kind": "k4", "coef": 0.1}},
        "algo.kl: kind = 'k4'; it must be one of k1, k2, k3, closed_form.",
    ),
    ({"kind": "grpo", "kl": {"coef": -0.1}}, "algo.kl: coef = -0.1; it must not be negative"),
    ({"kind": "grpo", "surrogate": {"low": 1.5}}, "algo.surrogate: low = 1.5; it must lie in [0, 1]"),
    ({"kind": "grpo", "surrogate": {"high": -0.1}}, "algo.surrogate: high = -0.1; it must not be negative"),
    ({"kind": "grpo", "surrogate": {"dual": 1.0}}, "algo.surrogate: dual = 1.0; it must be above 1"),
    ({"kind": "grpo", "advantage": {"eps": 0.0}}, "algo.advantage: eps = 0.0; it must be positive"),
    (
        {"kind": "grpo", "correction": {"kind": "importance", "high": 0.5}},
        "algo.correction: high = 0.5; it must be at least 1",
    ),
    (
        {"kind": "grpo", "correction": {"kind": "importance", "level": "tokn"}},
        "level = 'tokn'; it must be one of none, token, sequence, geometric. Did",
    ),
    (
        {"kind": "grpo", "correction": {"kind": "importance", "veto": 1.0}},
        "algo.correction: veto = 1.0; it must lie in [0, 1)",
    ),
    (
        {"kind": "gdpo", "advantage": {"weights": {"form": "1"}}},
        "algo.advantage.weights = {'form': '1'} is not a table of numbers by name",
    ),
    (
        {"kind": "grpo", "ratio": {"anchor": "ref"}},
        "algo.ratio: anchor = 'ref'; it must be one of proximal, behavior, reference.",
    ),
    ({"kind": "topr", "correction": {"kind": "importance"}}, "would be weighed twice. Remove the correction"),
    (
        {"kind": "dppo_tv", "ratio": {"kind": "sequence"}},
        "it compares the token's own probabilities. Use ratio.kind = 'token'",
    ),
    ({"kind": "m2po", "surrogate": {"threshold": 0}}, "algo.surrogate: threshold = 0; it must be positive"),
    ({"kind": "kl_cov", "surrogate": {"share": 2}}, "algo.surrogate: share = 2; it must lie in (0, 1]"),
    ({"kind": "kimi", "shaping": {"factor": -1}}, "algo.shaping: factor = -1; it must not be negative"),
    ({"kind": "dr_grpo", "aggregate": {"length": 0}}, "algo.aggregate: length = 0; it must be at least 1 token"),
    (
        {"kind": "dapo", "shaping": {"max_tokens": 8, "buffer": 9}},
        "algo.shaping: buffer = 9; it must not exceed max_tokens = 8",
    ),
    ({"kind": "dapo", "shaping": {"max_tokens": 0}}, "algo.shaping: max_tokens = 0; it must be at least 1"),
    ({"kind": "dapo", "shaping": {"buffer": 0}}, "algo.shaping: buffer = 0; it must be at least 1 token"),
    ({"kind": "dapo", "shaping": {"factor": -1}}, "algo.shaping: factor = -1; it must not be negative"),
    (
        {"kind": "grpo", "filters": "signal"},
        "[algo] filters = 'signal' is not a list of names; write filters = ['signal']",
    ),
    # overrides without effect
    (
        {"kind": "grpo", "kl": {"kind": "k2"}},
        "algo.kl.kind = 'k2' has no effect: kl.coef is 0. Change that or remove it.",
    ),
    (
        {"kind": "dapo", "shaping": {"factor": 0, "buffer": 3}},
        "algo.shaping.buffer = 3 has no effect: shaping.factor is 0.",
    ),
    (
        {"kind": "grpo", "correction": {"kind": "importance", "low": 0.1}},
        "algo.correction.low = 0.1 has no effect: truncate has no lower bound.",
    ),
    (
        {"kind": "grpo", "correction": {"kind": "importance", "denominator": "kept"}},
        "has no effect: nothing is masked, rejected or vetoed.",
    ),
    (
        {"kind": "grpo", "correction": {"kind": "importance", "reject_low": 0.1}},
        "has no effect: correction.reject is none.",
    ),
    ({"kind": "grpo", "entropy": {"top": 0.2}}, "algo.entropy.top = 0.2 has no effect: entropy.coef is 0."),
    ({"kind": "gdpo", "shaping": {"kind": "overlong"}}, "has no effect: the advantage reads the parts of the reward."),
    ({"kind": "sft", "correction": {"kind": "off_policy_mask"}}, "has no effect: no advantage is negative."),
    (
        {"kind": "kimi", "surrogate": {"tau": 0, "level": "token"}},
        "algo.surrogate.level = 'token' has no effect: surrogate.tau is 0.",
    ),
    ({"kind": "topr", "ratio": {"anchor": "behavior"}}, "has no effect: the surrogate"),
    (
        {"kind": "sft", "advantage": {"value": 2}},
        "algo.advantage = {'value': 2} has no effect: the surrogate -logp does not read it.",
    ),
    (
        {"kind": "sft", "shaping": {"kind": "overlong"}},
        "algo.shaping = {'kind': 'overlong'} has no effect: no reward is read.",
    ),
    (
        {"kind": "dapo", "advantage": {"kind": "constant"}, "shaping": {"factor": 2}},
        "has no effect: no reward is read.",
    ),
    ({"kind": "reinforce", "ratio": {"kind": "token"}}, "has no effect: the surrogate -A·logp does not read it."),
    # nobody drew a demonstration: its log-probability of 0 would pay a KL of many nats
    ({"kind": "luffy", "kl": {"coef": 0.1, "where": "reward"}}, "algo.kl.where = 'reward' beside surrogate.kind = 'gu"),
    ({"kind": "luffy", "kl": {"coef": 0.1, "where": "advantage"}}, "algo.kl.where = 'advantage' beside surrogate.ki"),
    ({"kind": "luffy", "kl": {"coef": 0.1, "target": 2.0}}, "algo.kl.target beside surrogate.kind = 'guided'"),
    ({"kind": "luffy", "advantage": {"kind": "question_value"}}, "algo.advantage beside surrogate.kind = 'guided'"),
    ({"kind": "luffy", "distill": {"coef": 0.5}}, "algo.distill beside surrogate.kind = 'guided'"),
    ({"kind": "luffy", "correction": {"kind": "freshness"}}, "algo.correction beside surrogate.kind = 'guided'"),
]


def plain_advantage(scored):
    return scored.rewards_N


def __getattr__(name):
    """Rows that are refused as they are made."""
    if name == "OF_A_FUNCTION":
        return replace(GRPO, name="mine", advantage=plain_advantage)
    if name == "OF_A_CLASS":
        return replace(GRPO, name="mine", surrogate=surrogate.Clip)
    raise AttributeError(name)


MISTAKES += [
    (
        {"kind": "test_table:plain_advantage"},
        "it must be a rondel.algos.table.Algorithm: replace(GRPO, name=..., advantage=MyAdvantage())",
    ),
    (
        {"kind": "test_table:OF_A_FUNCTION"},
        "derives from rondel.algos.component.Component, and its fields are the knobs of [algo.advantage]",
    ),
    (
        {"kind": "test_table:OF_A_CLASS"},
        "the surrogate of the algorithm 'mine' is <class 'rondel.algos.surrogate.Clip'>; a part is an instance",
    ),
]


@pytest.mark.parametrize("section,message", MISTAKES, ids=[message[:50] for _, message in MISTAKES])
def test_a_mistake_is_named_with_its_remedy(section, message):
    with pytest.raises(ConfigError) as caught:
        resolve_algorithm(section)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_buffer_longer_than_the_recipes_answers_is_found_when_they_meet():
    with pytest.raises(ConfigError, match="buffer = 4096; it must not exceed max_tokens = 64"):
        resolve_algorithm({"kind": "dapo", "shaping": {"buffer": 4096}}).bounded(64)


def test_an_unset_limit_is_said_aloud():
    with pytest.raises(ConfigError, match=r"algo.shaping.max_tokens is not set"):
        reward_transforms.Overlong()(None)


@pytest.mark.slow
def test_the_public_import_needs_torch_and_words_only():
    code = (
        "import sys; from rondel.algos import advantage, surrogate, correction, kl, aggregate, table;"
        "print(*sorted({'.'.join(m.split('.')[:2]) for m in sys.modules if m.startswith('rondel.')}))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert set(found.stdout.split()) == {"rondel.algos", "rondel.core"}


# -- loss terms of one's own -----------------------------------------------------------------------


def test_a_loss_term_of_ones_own_is_added_to_every_token_that_counts():
    section = {"kind": "grpo", "terms": [{"kind": "my_loss_term:StayClose", "coef": 0.5, "free": 0.1}]}
    row, plain = resolve_algorithm(section), resolve_algorithm({"kind": "grpo"})
    assert "behavior_logprobs" in row.needs and "0.5·stay_close" in explain_objective(row)
    assert "  stay_close = StayClose(coef=0.5, free=0.1)" in explain_objective(row)
    logp = torch.tensor([-1.0, -0.5, -2.0], dtype=torch.float64).requires_grad_()
    behavior = torch.tensor([-1.3, -0.55, -1.0], dtype=torch.float64)
    weight = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    batch = TokenBatch(torch.tensor([0, 0, 1]), logprobs=logp, behavior=behavior, advantages=torch.ones(3).double())
    (loss, terms), (other, _) = objective(row, batch, weight), objective(plain, batch, weight)
    wanted = 0.5 * (weight * torch.tensor([0.2, 0.0, 0.9], dtype=torch.float64) ** 2).sum()
    assert float((loss - other).detach()) == pytest.approx(float(wanted)) and float(
        terms["term_stay_close"][2]
    ) == pytest.approx(0.81)
    slope = torch.autograd.grad(loss - other, logp)[0]
    assert slope.tolist() == pytest.approx([0.5 * 0.5 * 2 * 0.2, 0.0, -0.5 * 0.25 * 2 * 0.9])


@dataclass(frozen=True)
class Greedy(LossTerm):
    needs: ClassVar[frozenset[str]] = frozenset({"values"})


@pytest.mark.parametrize(
    "terms, told",
    [
        (3, "write algo.terms = [{ kind = 'module:MyTerm', coef = 0.1 }]"),
        ([{"coef": 1.0}], "write algo.terms = [{ kind = 'module:MyTerm', coef = 0.1 }]"),
        ([{"kind": f"{__name__}:Halved"}], "derives from rondel.algos.component.LossTerm"),
        ([{"kind": "my_loss_term:StayClose", "fre": 1.0}], "StayClose has no such knob. Did you mean 'free'?"),
        ([{"kind": "my_loss_term:StayClose"}] * 2, "algo.terms has a term twice: stay_close"),
        ([{"kind": f"{__name__}:Greedy"}], "needs values; a loss term may need advantages, behavior_logprobs"),
    ],
)
def test_a_loss_term_that_is_none_is_refused(terms, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        resolve_algorithm({"kind": "grpo", "terms": terms})
