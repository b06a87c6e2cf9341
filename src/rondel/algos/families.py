"""The parts of a row by the names that a recipe gives them."""

from __future__ import annotations

from rondel.algos.advantage import (
    Accept,
    Constant,
    Greedy,
    GroupCenter,
    GroupNorm,
    LeaveOneOut,
    LengthBaseline,
    MeanNorm,
    PartsNorm,
    PassAtK,
    Preference,
    Raw,
    SignalCenter,
    WhitenedCenter,
)
from rondel.algos.aggregate import FixedNorm, PromptMean, SeqMeanTokenMean, SeqMeanTokenSum, TokenMean
from rondel.algos.correction import Importance, NoCorrection, OffPolicyMask
from rondel.algos.distill import Distill, EarlyDistill, FullDistill, GatedDistill, Observations
from rondel.algos.entropy import EntropyBonus
from rondel.algos.gae import Gae, Returns
from rondel.algos.group_advantages import AgentBaseline, BatchNorm, Classify, Redistribute, SoftValue
from rondel.algos.kl import Kl
from rondel.algos.mask_corrections import BinaryKlMask, Freshness, VariationMask
from rondel.algos.masked_surrogates import ClipCov, Forking, KlCov
from rondel.algos.off_policy_surrogates import CappedWeight, Guided, SecondMoment, Tapered
from rondel.algos.ratio import SequenceRatio, SequenceTokenRatio, TokenRatio
from rondel.algos.reward_transforms import ClipReward, KimiLength, NoShaping, Overlong
from rondel.algos.soft_surrogates import DivergencePenalty, FutureKl, GammaWeight, SquaredGap, UnboundedPositive
from rondel.algos.surrogate import Clip, LogLikelihood, PolicyGradient
from rondel.algos.trust_region_surrogates import ClippedWeight, DivergenceMask, GeometricMean, MirrorDescent, SoftGate
from rondel.algos.turn_advantages import StepGroups, TokenBaseline, TurnGae
from rondel.algos.value import ClippedValue

FAMILIES: dict[str, dict[str, type]] = {
    "shaping": {"none": NoShaping, "clip": ClipReward, "overlong": Overlong, "kimi_length": KimiLength},
    "advantage": {
        "group_norm": GroupNorm,
        "group_center": GroupCenter,
        "leave_one_out": LeaveOneOut,
        "length_baseline": LengthBaseline,
        "greedy": Greedy,
        "pass_at_k": PassAtK,
        "mean_norm": MeanNorm,
        "signal_center": SignalCenter,
        "parts_norm": PartsNorm,
        "whitened_center": WhitenedCenter,
        "accept": Accept,
        "raw": Raw,
        "gae": Gae,
        "returns": Returns,
        "constant": Constant,
        "batch_norm": BatchNorm,
        "soft_value": SoftValue,
        "classify": Classify,
        "redistribute": Redistribute,
        "agent_baseline": AgentBaseline,
        "step_groups": StepGroups,
        "turn_gae": TurnGae,
        "token_baseline": TokenBaseline,
        "preference": Preference,
    },
    "distill": {
        "distill": Distill,
        "early": EarlyDistill,
        "gated": GatedDistill,
        "full": FullDistill,
        "observations": Observations,
    },
    "ratio": {"token": TokenRatio, "sequence": SequenceRatio, "sequence_token": SequenceTokenRatio},
    "surrogate": {
        "clip": Clip,
        "policy_gradient": PolicyGradient,
        "log_likelihood": LogLikelihood,
        "clipped_weight": ClippedWeight,
        "soft_gate": SoftGate,
        "geometric_mean": GeometricMean,
        "divergence_mask": DivergenceMask,
        "mirror_descent": MirrorDescent,
        "clip_cov": ClipCov,
        "kl_cov": KlCov,
        "forking": Forking,
        "tapered": Tapered,
        "capped_weight": CappedWeight,
        "second_moment": SecondMoment,
        "guided": Guided,
        "gamma_weight": GammaWeight,
        "divergence_penalty": DivergencePenalty,
        "unbounded_positive": UnboundedPositive,
        "future_kl": FutureKl,
        "squared_gap": SquaredGap,
    },
    "correction": {
        "none": NoCorrection,
        "importance": Importance,
        "off_policy_mask": OffPolicyMask,
        "binary_kl_mask": BinaryKlMask,
        "variation_mask": VariationMask,
        "freshness": Freshness,
    },
    "kl": {"kl": Kl},
    "entropy": {"bonus": EntropyBonus},
    "aggregate": {
        "token_mean": TokenMean,
        "seq_mean_token_mean": SeqMeanTokenMean,
        "seq_mean_token_sum": SeqMeanTokenSum,
        "prompt_mean": PromptMean,
        "fixed_norm": FixedNorm,
    },
    "value": {"clipped": ClippedValue},
}
