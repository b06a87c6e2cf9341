"""The peers' own functions on the same numbers, where they are installed: `make parity`
installs them beside each other and runs this.

Where they disagree, the test holds the difference, and docs/papers.md says who is right.
"""

from __future__ import annotations

import inspect
import textwrap
from collections import defaultdict
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from kits.algos import F64, Ragged, near, scored, tensor
from kits.algos_oracle import CORR, ROOT, far_reference, of_verl
from kits.algos_oracle import VERL as VERL_CASES
from rondel.algos import (
    advantage,
    aggregate,
    correction,
    discount,
    gae,
    kl,
    surrogate,
    table,
    turn_advantages,
)
from rondel.algos.component import Component
from rondel.algos.masked_surrogates import ClipCov, Forking, KlCov
from rondel.algos.trust_region_surrogates import ClippedWeight, DivergenceMask, GeometricMean, MirrorDescent, SoftGate
from rondel.algos.value import ClippedValue
from rondel.train.annotate import advantages_of

LENGTHS = [3, 7, 1, 10, 5, 2, 8, 4]
BATCH = Ragged.make(LENGTHS, 11)
LOOSE = 1e-6  # where the peer adds an epsilon of its own
TOKEN_MEAN, SEQ_MEAN = aggregate.TokenMean(), aggregate.SeqMeanTokenMean()


def padded(values_T: Tensor) -> Tensor:
    """[T] -> [N, longest], zeros behind."""
    return torch.nn.utils.rnn.pad_sequence(list(values_T.split(LENGTHS)), batch_first=True)


MASK = padded(torch.ones(sum(LENGTHS), dtype=F64))


def row_of(part, how=TOKEN_MEAN, **more) -> table.Algorithm:
    return replace(table.GRPO, surrogate=part, aggregate=how, **more)


def leaf() -> tuple[Tensor, Tensor, Tensor]:
    """(logits that take the gradient, log-probabilities [N, L], entropies [N, L])"""
    logits = BATCH.logits_TV.clone().requires_grad_()
    logps = logits.log_softmax(-1)
    return logits, padded(logps[:, 0]), padded(-(logps.exp() * logps).sum(-1))


# -- verl
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def verl():
    return pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)


def actor(**knobs):
    from verl.workers.config import ActorConfig

    rest = {"strategy": "fsdp", "rollout_n": 8, "ppo_micro_batch_size_per_gpu": 1}
    return ActorConfig(**rest, **knobs)


def verl_loss(
    verl, name: str, how: str, row: table.Algorithm, old: Tensor | None = None, policy_loss: dict | None = None, **knobs
):
    config = actor(**knobs)
    for key, value in (policy_loss or {}).items():
        object.__setattr__(config.policy_loss, key, value)
    logits, logp, _ = leaf()
    loss, _ = verl.get_policy_loss_fn(name)(
        old_log_prob=padded(BATCH.others_3T[0]) if old is None else old,
        log_prob=logp,
        advantages=padded(advantages_of(row, BATCH.scored())),
        response_mask=MASK,
        loss_agg_mode=how,
        config=config,
    )
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


LOSSES = [  # verl's name, its aggregation, its knobs, our row, is the value the same too
    ("vanilla", "token-mean", {"clip_ratio_high": 0.28, "clip_ratio_c": 3.0}, row_of(surrogate.Clip(0.2, 0.28, 3.0)), True),
    ("vanilla", "seq-mean-token-mean", {"clip_ratio_c": 3.0}, row_of(surrogate.Clip(dual=3.0), SEQ_MEAN), True),
    ("gspo", "seq-mean-token-mean", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1}, row_of(surrogate.Clip(0.05, 0.1), SEQ_MEAN, ratio=surrogate.SequenceTokenRatio()), True),
    ("gspo", "seq-mean-token-mean", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1}, row_of(surrogate.Clip(0.05, 0.1), SEQ_MEAN, ratio=surrogate.SequenceRatio()), True),
    ("sapo", "seq-mean-token-mean", {"tau_pos": 1.0, "tau_neg": 1.05}, row_of(SoftGate(), SEQ_MEAN), True),
    ("geo_mean", "token-mean", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}, row_of(GeometricMean(0.2, 0.3), SEQ_MEAN), True),
    ("cispo", "token-mean", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.1}, row_of(ClippedWeight(0.2, 0.1)), True),
    ("dppo_tv", "token-mean", {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03, "clip_ratio_c": 1e8}, row_of(DivergenceMask("tv", 0.02, 0.03)), False),
    ("dppo_kl", "token-mean", {"clip_ratio_low": 2e-3, "clip_ratio_high": 3e-3, "clip_ratio_c": 1e8}, row_of(DivergenceMask("kl", 2e-3, 3e-3)), False),
]  # fmt: skip


@pytest.mark.parametrize("name,how,knobs,row,value", LOSSES, ids=[f"{case[0]}-{i}" for i, case in enumerate(LOSSES)])
def test_losses_are_those_of_verl(verl, name, how, knobs, row, value):
    wanted, wanted_gradient = verl_loss(verl, name, how, row, **knobs)
    loss, gradient, _ = BATCH.loss(row)
    within = 1e-10 if how == "token-mean" and name != "geo_mean" else LOOSE  # verl adds 1e-8 to the length of a sample
    assert near(gradient, wanted_gradient, within) and (near(loss, wanted, within) or not value)


@pytest.mark.parametrize("name", VERL_CASES)
def test_the_oracle_of_verl_is_verl(verl, name):
    """What an imported config is compared with, in tests/units/test_import.py: loss, weights,
    rejection, KL and entropy by their functions.
    """
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights, compute_rollout_rejection_mask

    given, batch = VERL_CASES[name], far_reference(BATCH)
    own = {key.removeprefix(f"{ROOT}."): value for key, value in given.items() if key.startswith(ROOT)}
    corr = {key.removeprefix(f"{CORR}."): value for key, value in given.items() if key.startswith(CORR)}
    mode = own.pop("policy_loss.loss_mode", "vanilla")
    knobs = {key: value for key, value in own.items() if key.startswith("clip")}
    advantages = advantages_of(table.GRPO, batch.scored())
    logits = batch.logits_TV.clone().requires_grad_()
    logps = logits.log_softmax(-1)
    logp, entropy = padded(logps[:, 0]), padded(-(logps.exp() * logps).sum(-1))
    gap, mask, weights = padded(batch.others_3T[0] - batch.others_3T[1]), MASK, None
    if "rollout_is" in corr:
        weights = compute_rollout_correction_weights(gap, MASK, corr["rollout_is"], corr["rollout_is_threshold"])[0]
    if "rollout_rs" in corr:
        mask = compute_rollout_rejection_mask(gap, MASK, corr["rollout_rs"], corr["rollout_rs_threshold"])[0]
    loss, _ = verl.get_policy_loss_fn(mode)(
        old_log_prob=padded(batch.others_3T[0]), log_prob=logp, advantages=padded(advantages), response_mask=mask,
        loss_agg_mode="token-mean", config=actor(**knobs), rollout_is_weights=weights,
    )  # fmt: skip
    kl = verl.kl_penalty(logp, padded(batch.others_3T[2]), "low_var_kl")
    loss = loss + own.get("kl_loss_coef", 0.0) * verl.agg_loss(kl, mask, "token-mean")
    loss = loss - own.get("entropy_coeff", 0.0) * verl.agg_loss(entropy, mask, "token-mean")
    theirs = torch.autograd.grad(loss, logits)[0]
    assert near(of_verl(given, batch, advantages.tolist()), theirs, LOOSE)


def test_direct_reward_optimisation_is_mirror_descent_on_tokens(verl):
    row = row_of(MirrorDescent(0.3, "token"))
    wanted, wanted_gradient = verl_loss(verl, "dro", "token-mean", row, policy_loss={"dro_beta": 0.3})
    loss, gradient, _ = BATCH.loss(row)
    assert near(loss, wanted) and near(gradient, wanted_gradient)


@pytest.mark.parametrize("name", ["kl_cov", "clip_cov"])
def test_covariances_are_those_of_verl_on_the_first_update_of_an_undivided_batch(verl, name):
    """Its micro-batch is then the batch. clip_cov's dice are taken out: all of the range is silenced.

    The policy is the proximal one, or has moved by as much at every token: that changes no
    covariance, and a term in |log r| has a gradient.
    """
    row = row_of(KlCov(share=0.24) if name == "kl_cov" else ClipCov(share=1.0, least=0.05, most=9.0))
    knobs = (
        {"kl_cov_ratio": 0.24, "ppo_kl_coef": 1.0}
        if name == "kl_cov"
        else {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.05, "clip_cov_ub": 9.0}
    )
    own = BATCH.logits_TV.log_softmax(-1)[:, 0]
    for moved in (0.0, 0.1, -0.1):
        here = replace(BATCH, others_3T=torch.stack([own - moved] * 3))
        wanted, wanted_gradient = verl_loss(verl, name, "token-mean", row, old=padded(own - moved), policy_loss=knobs)
        loss, gradient, _ = here.loss(row)
        assert near(loss, wanted) and near(gradient, wanted_gradient)


def verl_advantages(verl, name: str, **more) -> Tensor:
    scored = BATCH.scored()
    last = MASK.cumsum(-1) == MASK.sum(-1, keepdim=True)
    found, _ = verl.get_adv_estimator_fn(name)(
        token_level_rewards=last * MASK * scored.rewards_N[:, None],
        response_mask=MASK,
        index=np.array([str(g) for g in scored.group_N.tolist()]),
        **more,
    )
    return torch.cat([found[i, :n] for i, n in enumerate(LENGTHS)])


ADVANTAGES = [
    ("grpo", advantage.GroupNorm(), {}),
    ("rloo", advantage.LeaveOneOut(), {}),
    ("rloo_vectorized", advantage.LeaveOneOut(), {}),
    ("opo", advantage.LengthBaseline(), {}),
    ("reinforce_plus_plus", gae.Returns(0.9), {"config": SimpleNamespace(gamma=0.9)}),
    ("reinforce_plus_plus_baseline", advantage.WhitenedCenter(), {}),
    (
        "optimal_token_baseline",
        turn_advantages.TokenBaseline(),
        {"old_log_probs": padded(BATCH.others_3T[0]), "sum_pi_squared": padded(BATCH.collision_T)},
    ),
    ("grpo_passk", advantage.PassAtK(divide=True), {"config": {"norm_adv_by_std_in_grpo": True}}),
    ("grpo_passk", advantage.PassAtK(), {"config": {"norm_adv_by_std_in_grpo": False}}),
]


@pytest.mark.parametrize("name,rule,more", ADVANTAGES, ids=[f"{case[0]}-{i}" for i, case in enumerate(ADVANTAGES)])
def test_advantages_are_those_of_verl(verl, name, rule, more):
    assert min(int((BATCH.group_N == g).sum()) for g in BATCH.group_N) > 1, "verl defines a group of 1 otherwise"
    found = advantages_of(replace(table.GRPO, advantage=rule), BATCH.scored())
    assert near(found, verl_advantages(verl, name, **more), LOOSE)


def test_gpg_counts_samples_with_signal_and_verl_counts_rewards_that_are_not_zero(verl):
    scored = BATCH.scored()
    ours, theirs = advantage.SignalCenter()(scored), verl_advantages(verl, "gpg")
    n, nonzero = len(LENGTHS), int((scored.rewards_N != 0).sum())
    telling = sum(len(set(scored.rewards_N[scored.group_N == g].tolist())) > 1 for g in scored.group_N)
    assert telling != nonzero and near(theirs, scored.spread_to_tokens(ours) * telling / n * n / nonzero, LOOSE)


def test_gdpo_is_whitened_over_samples_and_in_verl_over_tokens(verl):
    scored = BATCH.scored()
    sums = sum(advantage.standardize_rewards(part_N, scored.group_N, 1e-6) for part_N in scored.parts.values())
    assert near(advantage.PartsNorm()(scored), advantage.whiten_values(sums))
    from verl.utils.torch_functional import masked_whiten

    theirs = masked_whiten(padded(scored.spread_to_tokens(sums)), MASK) * MASK
    assert near(padded(advantage.whiten_values(scored.spread_to_tokens(sums))), theirs, LOOSE) and not near(
        padded(scored.spread_to_tokens(advantage.PartsNorm()(scored))), theirs, 0.01
    )


def test_kl_estimators_are_those_of_verl(verl):
    logp = BATCH.logits_TV.log_softmax(-1)[:, 0].requires_grad_()
    ref = BATCH.others_3T[2]
    for name, rule in (
        ("k1", kl.Kl("k1")),
        ("k2", kl.Kl("k2")),
        ("k3", kl.Kl("k3")),
        ("k3+", kl.Kl("k3", through="k2")),
    ):
        ours, theirs = rule(logp, ref, logp), verl.kl_penalty(logp, ref, name)
        assert near(ours, theirs)
        assert near(*(torch.autograd.grad(value.sum(), logp, retain_graph=True)[0] for value in (ours, theirs)))


WEIGHTS = [
    ({"rollout_is": "token", "rollout_is_threshold": 1.3}, correction.Importance(high=1.3)),
    ({"rollout_is": "token", "rollout_is_threshold": "0.8_1.3"}, correction.Importance(action="mask", low=0.8, high=1.3)),
    ({"rollout_is": "sequence", "rollout_is_threshold": 1.3}, correction.Importance("sequence", high=1.3)),
    ({"rollout_is": "token", "rollout_is_threshold": 1.3, "rollout_is_batch_normalize": True}, correction.Importance(high=1.3, normalize="token")),
    (
        {"rollout_is": "sequence", "rollout_is_threshold": 1.3, "rollout_is_batch_normalize": True},
        correction.Importance("sequence", high=1.3, normalize="sequence"),
    ),
]  # fmt: skip


@pytest.mark.parametrize("knobs,rule", WEIGHTS, ids=[str(rule)[:60] for _, rule in WEIGHTS])
def test_weights_are_those_of_verl(verl, knobs, rule):
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    gap = BATCH.others_3T[0] - BATCH.others_3T[1]
    ours = rule(gap, BATCH.scored().spread_to_tokens(torch.arange(len(LENGTHS))), gap)
    assert near(padded(ours), compute_rollout_correction_weights(padded(gap), MASK, **knobs)[0], LOOSE)


def test_rejection_bounds_are_on_the_ratio_and_in_verl_on_its_inverse(verl):
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

    gap, sample = BATCH.others_3T[0] - BATCH.others_3T[1], BATCH.scored().spread_to_tokens(torch.arange(len(LENGTHS)))
    rule = correction.Importance(high=1e9, reject="geometric", reject_low=0.95, reject_high=1.3)
    kept = padded((rule(gap, sample, gap) > 0).to(F64))
    theirs, same = (compute_rollout_rejection_mask(padded(g), MASK, "seq_mean_k1", "0.95_1.3")[0] for g in (gap, -gap))
    assert torch.equal(kept, same) and not torch.equal(kept, theirs)


def test_gae_and_the_value_loss_are_verls_with_observations_in_between(verl):
    draw = torch.Generator().manual_seed(0)
    mask = torch.rand(6, 40, generator=draw) < 0.7
    rewards, values, later, returns = torch.randn(4, 6, 40, generator=draw, dtype=F64)
    sample = torch.arange(6)[:, None].expand(6, 40)[mask]
    theirs, wanted = verl.compute_gae_advantage_return(rewards * mask, values, mask.to(F64), 0.97, 0.9)
    advantages, found = discount.gae(rewards[mask], values[mask], sample, gamma=0.97, lam=0.9)
    assert near(found, wanted[mask]) and near(advantage.whiten_values(advantages), theirs[mask], LOOSE)
    loss, clipped = verl.compute_value_loss(later, returns, values, mask.to(F64), 0.2)
    terms = ClippedValue(0.2)(later[mask], values[mask], returns[mask])
    assert near(terms.loss_T.mean(), loss, LOOSE) and near(terms.clipped_T.to(F64).mean(), clipped, LOOSE)


def test_the_steered_coefficient_is_verls(verl):
    """Of the KL that it is given: verl gives the mean over a sample's tokens, the paper and we its sum."""
    theirs = verl.AdaptiveKLController(0.1, 6.0, 10_000)
    rule = kl.Kl("k1", 0.1, "reward", target=6.0)
    for measured in (1.0, 5.5, 6.5, 99.0):
        theirs.update(measured, 128)
        rule = replace(rule, coef=rule.next_coef(measured, 128))
        assert abs(rule.coef - theirs.value) <= 1e-12


# -- TRL
# ----------------------------------------------------------------------------------------------------------------------


def test_vespo_is_trls_where_it_cuts_nothing():
    """Its weight of the sampler is that of every token, uncut; here one drift reaches from there to the policy."""
    trainer = pytest.importorskip("trl.trainer.grpo_trainer", exc_type=ImportError).GRPOTrainer
    batch = replace(BATCH, guided_N=BATCH.guided_N & False)
    logits, logp, _ = leaf()
    old, mu, _ = (padded(x) for x in batch.others_3T)
    advantages = padded(advantages_of(table.VESPO, batch.scored()))
    weight = torch.where(MASK > 0, (old - mu).exp(), 1.0)
    phi = trainer.get_gamma_weights(advantages[:, :1], (logp - old).detach(), MASK, weight)
    wanted = (-phi * advantages * logp * MASK).sum() / MASK.sum()
    loss, gradient, _ = batch.loss(table.VESPO)
    assert near(loss, wanted.detach()) and near(gradient, torch.autograd.grad(wanted, logits)[0])


def trl_loss(row: table.Algorithm, loss_type: str, *, masked: Tensor | None = None, **knobs):
    """TRL's own loss, of a trainer that is nothing but its settings."""
    trainer = pytest.importorskip("trl.trainer.grpo_trainer", exc_type=ImportError).GRPOTrainer
    logits, logp, entropy = leaf()
    args = SimpleNamespace(
        delta=None,
        use_bias_correction_kl=knobs.pop("unbiased", False),
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
    )
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, pad_across_processes=lambda x, **_: x, reduce=lambda x, **_: x
    )
    settings = dict(
        loss_type=loss_type, beta=0.0, epsilon_low=0.2, epsilon_high=0.2, importance_sampling_level="token", top_entropy_quantile=1.0,
        off_policy_mask_threshold=None, aux_loss_enabled=False, use_vllm=False, vllm_importance_sampling_correction=False,
        current_gradient_accumulation_steps=1, max_completion_length=9, _entropy_bonus_enabled=False, use_adaptive_entropy=False,
    )  # fmt: skip
    self = SimpleNamespace(
        **{**settings, **knobs}, args=args, accelerator=accelerator, _metrics={"train": defaultdict(list)}
    )
    self.args.steps_per_generation, self.model = 1, SimpleNamespace(training=True)
    self.get_off_policy_mask = trainer.get_off_policy_mask
    self.get_high_entropy_mask = lambda *a: trainer.get_high_entropy_mask(self, *a)
    self._get_per_token_logps_and_entropies = lambda *a, **k: (logp, entropy, None)
    inputs = {
        "prompt_ids": torch.zeros(len(LENGTHS), 1).long(), "prompt_mask": torch.ones(len(LENGTHS), 1).long(),
        "completion_ids": MASK.long(), "completion_mask": MASK.long(), "advantages": padded(advantages_of(row, BATCH.scored())),
        "old_per_token_logps": padded(BATCH.others_3T[0]), "sampling_per_token_logps": padded(BATCH.others_3T[1]),
        "ref_per_token_logps": padded(BATCH.others_3T[2]), "num_items_in_batch": MASK.sum(),
    }  # fmt: skip
    if masked is not None:
        inputs["completion_mask"] = inputs["completion_mask"] * ~masked[:, None]
        inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
    loss = trainer._compute_loss(self, self.model, inputs)
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


# behavior = proximal
PROBABLE = replace(BATCH, others_3T=torch.stack([BATCH.others_3T[0], BATCH.others_3T[0], BATCH.others_3T[2]]))
TRL = [  # loss_type, knobs, our row, batch
    ("grpo", {"epsilon_high": 0.28}, row_of(surrogate.Clip(0.2, 0.28), SEQ_MEAN), BATCH),
    ("dr_grpo", {}, row_of(surrogate.Clip(), aggregate.FixedNorm(9)), BATCH),
    ("dapo", {"beta": 0.1}, row_of(surrogate.Clip(), kl=kl.Kl("k3", 0.1)), BATCH),
    ("dapo", {"beta": 0.1, "unbiased": True}, row_of(surrogate.Clip(), kl=kl.Kl("k3", 0.1, unbiased=True)), PROBABLE),
    (
        "grpo",
        {"importance_sampling_level": "sequence"},
        row_of(surrogate.Clip(), SEQ_MEAN, ratio=surrogate.SequenceRatio()),
        BATCH,
    ),
    ("cispo", {"epsilon_high": 1.1}, row_of(ClippedWeight(1.0, 0.1)), BATCH),
    ("sapo", {}, row_of(SoftGate(), SEQ_MEAN), BATCH),
]


@pytest.mark.parametrize("loss_type,knobs,row,batch", TRL, ids=[f"{case[0]}-{i}" for i, case in enumerate(TRL)])
def test_losses_are_those_of_trl(loss_type, knobs, row, batch):
    wanted, wanted_gradient = trl_loss(row, loss_type, **knobs)
    loss, gradient, _ = batch.loss(row)
    within = LOOSE if loss_type == "sapo" else 1e-10  # its temperatures are float32
    assert near(loss, wanted, within) and near(gradient, wanted_gradient, within)


@pytest.mark.parametrize(
    "loss_type, how",
    [
        ("grpo", SEQ_MEAN),
        ("dapo", TOKEN_MEAN),
        ("dr_grpo", aggregate.FixedNorm(9)),
        ("luspo", aggregate.SeqMeanTokenSum()),
    ],
)
def test_masked_answers_leave_the_loss_as_in_trl(loss_type, how):
    """With the KL they would pay; a mean over samples counts them all the same, a mean over tokens does not."""
    row, cut = (
        row_of(surrogate.Clip(), how, kl=kl.Kl("k3", 0.1)),
        torch.tensor([n in (1, 3, 4) for n in range(len(LENGTHS))]),
    )
    wanted, wanted_gradient = trl_loss(row, loss_type, beta=0.1, masked=cut)
    order = (~cut).nonzero()[:, 0].tolist()
    known = torch.cat(
        [piece for piece, gone in zip(advantages_of(row, BATCH.scored()).split(LENGTHS), cut, strict=True) if not gone]
    )
    scale = aggregate.masked_scale(how, BATCH.lengths_N[~cut], BATCH.lengths_N)
    loss, gradient, _ = BATCH.loss(replace(row, advantage=Given(known)), order=order)
    assert near(scale * loss, wanted) and near(scale * gradient, wanted_gradient)


@dataclass(frozen=True)
class Given(Component):
    """Advantages that are known."""

    values_T: Tensor
    per_token: ClassVar[bool] = True

    def __call__(self, scored):
        return self.values_T


@pytest.mark.parametrize("missing", [False, True])
def test_parts_are_normalised_as_in_trl(missing):
    """Its own lines, cut out of the trainer; a part that a sample lacks is NaN there, too. Its epsilons are 1e-4."""
    module = pytest.importorskip("trl.trainer.grpo_trainer", exc_type=ImportError)
    source = inspect.getsource(module.GRPOTrainer._generate_and_score_completions)
    parts_NK = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 2], [1, 5], [1, 0]], dtype=F64)
    if missing:
        parts_NK[3:, 1] = torch.nan
    scope = {
        "torch": torch, "nanstd": module.nanstd, "rewards_per_func": parts_NK, "num_generations": 3, "device": "cpu",
        "self": SimpleNamespace(reward_funcs=[0, 1], reward_weights=tensor(1.0, 0.5)), "unscorable_mask": parts_NK.isnan().all(1),
    }  # fmt: skip
    at = source.index("elif self.multi_objective_aggregation ==")
    first, last = (source.index(mark, at) for mark in ("            grouped = ", "            is_std_zero"))
    exec(textwrap.dedent(source[first:last]), scope)
    rule = advantage.PartsNorm({"b": 0.5}, eps=1e-4)
    ours = rule(scored(parts_NK[:, 0], torch.arange(6) // 3, a=parts_NK[:, 0], b=parts_NK[:, 1]))
    assert near(ours, scope["advantages"], 1e-3)


def test_masks_are_those_of_trl_on_the_first_update():
    """There the policy is the proximal one; later TRL looks at the moved policy, and we at the anchor."""
    own = BATCH.logits_TV.log_softmax(-1)[:, 0]
    nobody = torch.zeros_like(BATCH.guided_N)  # is a demonstration: TRL has none
    first = replace(BATCH, others_3T=torch.stack([own, BATCH.others_3T[1], BATCH.others_3T[2]]), guided_N=nobody)
    row = row_of(surrogate.Clip(1.0, 99.0), correction=correction.OffPolicyMask(0.02))
    assert 0 < float((first.loss(row)[2][0]["correction"] == 0).double().mean()) < 1
    # TRL's ratio stays at its old anchor, so only what is masked can be compared
    _, theirs = trl_loss(row, "dapo", epsilon_low=1.0, epsilon_high=99.0, off_policy_mask_threshold=0.02)
    ours = first.loss(row)[1]
    assert torch.equal(ours.abs().sum(-1) > 0, theirs.abs().sum(-1) > 0)


def test_the_undecided_tokens_are_those_of_trl():
    """TRL takes entropies at or above an interpolated quantile; we take the given share, rounded up."""
    own = BATCH.logits_TV.log_softmax(-1)[:, 0]
    first = replace(BATCH, others_3T=torch.stack([own, own, own]))
    row = row_of(Forking(1.0, 99.0, top=0.25))
    _, theirs = trl_loss(row, "dapo", epsilon_low=1.0, epsilon_high=99.0, top_entropy_quantile=0.25)
    assert torch.equal(first.loss(row)[1].abs().sum(-1) > 0, theirs.abs().sum(-1) > 0)
