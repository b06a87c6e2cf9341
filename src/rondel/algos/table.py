"""An algorithm is a row: a product of small pure functions. A paper is a row; a recipe is a row
with some knobs turned.
"""

from __future__ import annotations

from dataclasses import dataclass, field, is_dataclass, replace
from functools import cached_property
from typing import Any

from rondel.algos.advantage import (
    Accept,
    Constant,
    Greedy,
    GroupCenter,
    GroupNorm,
    LeaveOneOut,
    LengthBaseline,
    MeanNorm,
    NegativeExp,
    PartsNorm,
    PassAtK,
    Preference,
    Raw,
    SignalCenter,
    WhitenedCenter,
)
from rondel.algos.aggregate import FixedNorm, PromptMean, SeqMeanTokenMean, SeqMeanTokenSum, TokenMean
from rondel.algos.component import Component, LossTerm
from rondel.algos.correction import Importance, NoCorrection, OffPolicyMask
from rondel.algos.criteria import CriterionBonus
from rondel.algos.distill import Distill, EarlyDistill, FullDistill, GatedDistill, Observations, ScaledAdvantage
from rondel.algos.divergence import Divergence
from rondel.algos.entropy import EntropyBonus
from rondel.algos.gae import Gae, Returns
from rondel.algos.group_advantages import AgentBaseline, BatchNorm, Classify, Redistribute, SoftValue
from rondel.algos.kl import Kl
from rondel.algos.kl_regression import KlRegression
from rondel.algos.least_likely import LeastLikely
from rondel.algos.mask_corrections import BinaryKlMask, Freshness, VariationMask
from rondel.algos.masked_surrogates import ClipCov, Forking, KlCov
from rondel.algos.off_policy_surrogates import CappedWeight, CenteredScore, Guided, SecondMoment, Tapered
from rondel.algos.override import checked_bool, filter_names, loss_terms, override_knobs
from rondel.algos.prompt_norm import PromptNorm
from rondel.algos.question_value import QuestionValue
from rondel.algos.reward_transforms import ClipReward, KimiLength, NoShaping, Overlong
from rondel.algos.soft_surrogates import DivergencePenalty, FutureKl, GammaWeight, SquaredGap, UnboundedPositive
from rondel.algos.surrogate import (
    Clip,
    LogLikelihood,
    PolicyGradient,
    SequenceRatio,
    SequenceTokenRatio,
    TokenRatio,
    WholeLikelihood,
)
from rondel.algos.trust_region_surrogates import ClippedWeight, DivergenceMask, GeometricMean, MirrorDescent, SoftGate
from rondel.algos.turn_advantages import StepGroups, TokenBaseline, TurnGae
from rondel.algos.value import ClippedValue
from rondel.algos.visit_advantage import Anchored
from rondel.core.errors import ConfigError
from rondel.core.registry import find_registered, suggest_name

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
        "negative_exp": NegativeExp,
        "classify": Classify,
        "redistribute": Redistribute,
        "agent_baseline": AgentBaseline,
        "step_groups": StepGroups,
        "turn_gae": TurnGae,
        "token_baseline": TokenBaseline,
        "preference": Preference,
        "prompt_norm": PromptNorm,
        "question_value": QuestionValue,
        "anchored": Anchored,
    },
    "distill": {
        "distill": Distill,
        "early": EarlyDistill,
        "gated": GatedDistill,
        "scaled": ScaledAdvantage,
        "criteria": CriterionBonus,
        "full": FullDistill,
        "observations": Observations,
    },
    "ratio": {"token": TokenRatio, "sequence": SequenceRatio, "sequence_token": SequenceTokenRatio},
    "surrogate": {
        "clip": Clip,
        "policy_gradient": PolicyGradient,
        "log_likelihood": LogLikelihood,
        "whole_likelihood": WholeLikelihood,
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
        "centered_score": CenteredScore,
        "kl_regression": KlRegression,
    },
    "correction": {
        "none": NoCorrection,
        "importance": Importance,
        "off_policy_mask": OffPolicyMask,
        "binary_kl_mask": BinaryKlMask,
        "variation_mask": VariationMask,
        "freshness": Freshness,
        "least_likely": LeastLikely,
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


@dataclass(frozen=True)
class Algorithm:
    """One row: `replace(GRPO, name="dr_grpo", advantage=GroupCenter(), aggregate=FixedNorm())`.

    Read downwards it is the way of a reward into the loss; `objective.py` puts the parts together.
    """

    name: str
    paper: str
    shaping: Component  # (scored) -> rewards_N
    advantage: Component  # (scored) -> advantages_N, or advantages_T if it is `per_token`
    ratio: Component  # (log_ratio_T, sample_T) -> log_ratio_T
    surrogate: Component  # (tokens) -> Surrogate: loss_T, clipped_T
    correction: Component  # (log_weight_T, sample_T, advantages_T) -> weight_T
    kl: Kl  # (logprobs_T, ref_T, log_drift_T) -> kl_T
    entropy: EntropyBonus  # coef of entropy_T, on the tokens that `select` chose
    aggregate: Component  # lengths_N -> weight_N
    # (behavior_T, teacher_T) -> cost_T, or a term of the loss
    distill: Distill | GatedDistill | FullDistill | Observations = field(default_factory=Distill)
    value: ClippedValue = field(default_factory=ClippedValue)  # (values_T, old_T, returns_T) -> loss_T, clipped_T
    terms: tuple[LossTerm, ...] = ()  # per-token terms of your own, beside the surrogate
    filters: tuple[str, ...] = ()
    # an answer that the token limit cut off gives no gradient, of several turns one whose last was; its reward stays in
    # the group's baseline
    mask_truncated: bool = False

    def __post_init__(self) -> None:
        """What weighs by the behavior does it once; what compares two probabilities of a token gets its own ratio."""
        for family, part in [*self.parts.items(), *(("terms", term) for term in self.terms)]:
            if not isinstance(part, Component) or not is_dataclass(part):
                raise ConfigError(
                    f"the {family} of the algorithm '{self.name}' is {part!r}; a part is an instance of a frozen "
                    "dataclass that derives from "
                    f"rondel.algos.component.{'LossTerm' if family == 'terms' else 'Component'}, and its fields are "
                    f"the knobs of [algo.{family}]. Put a function into one as its __call__"
                )
        if self.surrogate.token_ratio and type(self.ratio) is not TokenRatio:
            raise ConfigError(
                f"algo.ratio beside {self.surrogate}: it compares the token's own probabilities. Use ratio.kind = "
                f"'token'"
            )
        if self.uses_behavior_ratio and self.correction.weighs:
            raise ConfigError(
                f"algo.correction beside {self.surrogate}: it already reaches from the behavior to the policy, and "
                f"would be weighed twice. "
                "Remove the correction, or let ratio.anchor be 'proximal' and the surrogate read the ratio"
            )
        for part in self.parts.values():
            part.refuse_beside({**self.parts, "terms": self.terms})

    @cached_property
    def parts(self) -> dict[str, Any]:
        return {family: getattr(self, family) for family in FAMILIES}

    @cached_property
    def needs(self) -> frozenset[str]:
        """What must be known of each token beside its logprob; all that the loop asks of an algorithm."""
        own = frozenset() if "advantage" in self.idle else frozenset({"advantages"})
        return own.union(*(part.needs for part in (*self.parts.values(), *self.terms)))

    @cached_property
    def uses_behavior_ratio(self) -> bool:
        """Whether its ratio, or what the surrogate weighs by, reaches from the behavior to the policy."""
        return "behavior" in self.surrogate.reads or self.ratio.anchor == "behavior"

    @property
    def corrects_staleness(self) -> bool:
        """Whether tokens that an older policy drew are weighed, masked or dropped for it."""
        return self.uses_behavior_ratio or bool(self.correction.needs & {"behavior_logprobs", "ages"})

    @property
    def corrects_numerics(self) -> bool:
        """Whether tokens that other numbers drew than the trainer computes with, at the same version, are weighed by
        the ratio of both.
        """
        return self.uses_behavior_ratio or self.correction.weighs

    @cached_property
    def idle(self) -> dict[str, str]:
        """What cannot reach the loss as the row stands, and why: {"advantage": ..., "kl.kind": ...}."""
        reads = self.surrogate.reads
        idle = {
            family: f"the surrogate {self.surrogate} does not read it"
            for family in ("advantage", "ratio")
            if family not in reads
        }
        if "advantage" in idle or isinstance(self.advantage, Constant):
            idle["shaping"] = "no reward is read"
        elif self.advantage.reads_parts:
            idle["shaping"] = "the advantage reads the parts of the reward"
        if "shaping" in idle and self.kl.in_reward:
            idle["kl"] = f"it is part of the reward, and {idle['shaping']}"
        if "advantage" in idle and self.kl.in_advantage:
            idle["kl"] = f"it is part of the advantage, and {idle['advantage']}"
        if "advantage" in idle and isinstance(self.distill, Distill):
            idle["distill"] = idle["advantage"]
        if "values" not in self.advantage.needs:
            idle["value"] = "the row has no critic"
        if (
            isinstance(self.correction, OffPolicyMask | VariationMask)
            and isinstance(self.advantage, Constant | Accept)
            and not self.distill.coef
        ):
            idle["correction"] = "no advantage is negative"
        for family, part in self.parts.items():
            idle |= {f"{family}.{knob}": why for knob, why in part.idle.items()}
        return idle

    @property
    def divergence(self) -> Divergence:
        """Between the policy and a teacher, of a row that compares their whole distributions."""
        assert isinstance(self.distill, FullDistill), f"the row {self.name} compares drawn tokens"
        return self.distill.divergence

    @cached_property
    def reading(self) -> tuple[Algorithm, float] | None:
        """The row by which it learns what its policy only read, and the weight of that beside its own loss."""
        return (SFT, self.distill.coef) if isinstance(self.distill, Observations) and self.distill.coef else None

    @cached_property
    def takes_rewards(self) -> bool:
        """Whether its advantage reads the rewards as they were given: nothing shapes them,
        and no KL is charged to them."""
        return isinstance(self.shaping, NoShaping) and not self.kl.in_reward

    @cached_property
    def charges_advantages(self) -> bool:
        """Whether tokens pay of their advantages: for a KL, or for what a teacher says."""
        return self.kl.in_advantage or self.charged_distill is not None

    @cached_property
    def charged_distill(self) -> Distill | None:
        """The distillation that tokens pay of their advantages; None without one."""
        return self.distill if isinstance(self.distill, Distill) and self.distill.coef else None

    @property
    def criterion_bonus(self) -> CriterionBonus | None:
        """The bonus of tokens that earned a criterion; None without one."""
        return self.distill if isinstance(self.distill, CriterionBonus) else None

    @cached_property
    def gated_distill(self) -> GatedDistill | None:
        """The distillation that is a term of the loss behind a gate; None without one."""
        return self.distill if isinstance(self.distill, GatedDistill) and self.distill.coef else None

    @cached_property
    def scales_advantage(self) -> bool:
        """Whether its loss is a multiple of the advantage, so that a token whose advantage is 0 has no gradient: there
        is a surrogate of that kind, and nothing else.
        """
        beside = self.kl.in_loss or self.entropy.coef or self.entropy.is_adaptive or self.terms or self.gated_distill
        return self.surrogate.scales_advantage and not (beside or self.needs & {"teacher_hidden", "ref_means"})

    @cached_property
    def corrects(self) -> bool:
        """Whether tokens of another policy are weighed by its correction."""
        return not isinstance(self.correction, NoCorrection)

    @cached_property
    def is_adaptive(self) -> bool:
        """Whether what one step has measured changes the row of the next: a coefficient with a target, a memory."""
        return self.kl.is_adaptive or self.entropy.is_adaptive or self.advantage.remembers

    def bounded(self, max_tokens: int) -> Algorithm:
        """Every length that the recipe left open becomes its max_tokens."""
        return replace(
            self,
            **{family: part.bounded(max_tokens) for family, part in self.parts.items()},
        )


GRPO = Algorithm(
    name="grpo",
    paper="arXiv:2402.03300",
    shaping=NoShaping(),
    advantage=GroupNorm(eps=1e-6),
    ratio=TokenRatio(),
    surrogate=Clip(low=0.2, high=0.2),
    correction=NoCorrection(),
    kl=Kl("k3", coef=0.0),
    entropy=EntropyBonus(coef=0.0),
    aggregate=SeqMeanTokenMean(),
)
DR_GRPO = replace(GRPO, name="dr_grpo", paper="arXiv:2503.20783", advantage=GroupCenter(), aggregate=FixedNorm())
DAPO = replace(
    GRPO,
    name="dapo",
    paper="arXiv:2503.14476",
    shaping=Overlong(),
    surrogate=Clip(low=0.2, high=0.28),
    aggregate=TokenMean(),
    filters=("signal",),
)
PPO = replace(
    GRPO,
    name="ppo",
    paper="arXiv:1707.06347",
    shaping=ClipReward(5.0),
    advantage=Gae(gamma=1.0, lam=0.95),
    kl=Kl("k1", coef=0.0, where="reward"),
    aggregate=TokenMean(),
    value=ClippedValue(0.2),
)
REINFORCE = replace(
    GRPO,
    name="reinforce",
    paper="doi:10.1007/BF00992696",
    advantage=Raw(),
    surrogate=PolicyGradient(),
    aggregate=SeqMeanTokenSum(),
)
RLOO = replace(REINFORCE, name="rloo", paper="arXiv:2402.14740", advantage=LeaveOneOut())
SFT = replace(
    GRPO,
    name="sft",
    paper="arXiv:2203.02155",
    advantage=Constant(1.0),
    surrogate=LogLikelihood(),
    aggregate=TokenMean(),
)
ONLINE_DPO = replace(REINFORCE, name="online_dpo", paper="arXiv:2402.04792", advantage=Preference(beta=0.1))
OPD = replace(
    GRPO,
    name="opd",
    paper="arXiv:2306.08543",
    advantage=Constant(0.0),
    distill=Distill(coef=1.0),
    aggregate=TokenMean(),
)

# another ratio or another bound on it
GSPO = replace(GRPO, name="gspo", paper="arXiv:2507.18071", ratio=SequenceRatio(), surrogate=Clip(low=3e-4, high=4e-4))
GSPO_TOKEN = replace(GSPO, name="gspo_token", ratio=SequenceTokenRatio())
GMPO = replace(GRPO, name="gmpo", paper="arXiv:2507.20673", surrogate=GeometricMean())
CISPO = replace(GRPO, name="cispo", paper="arXiv:2506.13585", surrogate=ClippedWeight(), aggregate=TokenMean())
SAPO = replace(GRPO, name="sapo", paper="arXiv:2511.20347", surrogate=SoftGate())
DPPO_TV = replace(
    DR_GRPO,
    name="dppo_tv",
    paper="arXiv:2602.04879",
    ratio=TokenRatio("behavior"),
    surrogate=DivergenceMask("tv", low=0.15, high=0.15),
)
DPPO_KL = replace(DPPO_TV, name="dppo_kl", surrogate=DivergenceMask("kl", low=0.05, high=0.05))
KIMI = replace(
    GRPO,
    name="kimi",
    paper="arXiv:2501.12599",
    shaping=KimiLength(),
    advantage=GroupCenter(),
    surrogate=MirrorDescent(),
    aggregate=SeqMeanTokenSum(),
)
CLIP_COV = replace(GRPO, name="clip_cov", paper="arXiv:2505.22617", surrogate=ClipCov(), aggregate=TokenMean())
KL_COV = replace(CLIP_COV, name="kl_cov", surrogate=KlCov())
FORKING = replace(DAPO, name="forking", paper="arXiv:2506.01939", surrogate=Forking(low=0.2, high=0.28))

# another baseline or scale
OPO = replace(REINFORCE, name="opo", paper="arXiv:2505.23585", advantage=LengthBaseline())
REMAX = replace(REINFORCE, name="remax", paper="arXiv:2310.10505", advantage=Greedy())
PASS_AT_K = replace(GRPO, name="pass_at_k", paper="arXiv:2503.19595", advantage=PassAtK())
MAXRL = replace(GRPO, name="maxrl", paper="arXiv:2602.02710", advantage=MeanNorm())
GPG = replace(REINFORCE, name="gpg", paper="arXiv:2504.02546", advantage=SignalCenter(), aggregate=TokenMean())
GDPO = replace(GRPO, name="gdpo", paper="arXiv:2601.05242", advantage=PartsNorm())
REINFORCE_PP = replace(
    GRPO,
    name="reinforce_pp",
    paper="arXiv:2501.03262",
    advantage=Returns(),
    kl=Kl("k1", coef=0.0, where="reward"),
    aggregate=TokenMean(),
)
REINFORCE_PP_BASELINE = replace(
    REINFORCE_PP, name="reinforce_pp_baseline", advantage=WhitenedCenter(), kl=Kl("k2", coef=0.0)
)
RAFT = replace(REINFORCE, name="raft", paper="arXiv:2304.06767", advantage=Accept(), aggregate=TokenMean())

# tokens of another policy
DECOUPLED = replace(
    GRPO, name="decoupled", paper="arXiv:2505.24298", correction=Importance(high=5.0), aggregate=TokenMean()
)
TOPR = replace(REINFORCE, name="topr", paper="arXiv:2503.14286", surrogate=Tapered())
AIPO = replace(
    REINFORCE,
    name="aipo",
    paper="arXiv:2505.24034",
    advantage=GroupCenter(),
    surrogate=CappedWeight(),
    aggregate=TokenMean(),
)
M2PO = replace(GRPO, name="m2po", paper="arXiv:2510.01161", surrogate=SecondMoment(), aggregate=TokenMean())
LUFFY = replace(
    GRPO, name="luffy", paper="arXiv:2504.14945", advantage=GroupCenter(), surrogate=Guided(), aggregate=FixedNorm()
)

# 2026
VESPO = replace(GRPO, name="vespo", paper="arXiv:2602.10693", surrogate=GammaWeight(), aggregate=TokenMean())
LUSPO = replace(
    GSPO, name="luspo", paper="arXiv:2602.05261", surrogate=Clip(low=2e-3, high=2.5e-3), aggregate=SeqMeanTokenSum()
)
DRPO = replace(
    DR_GRPO, name="drpo", paper="arXiv:2606.09821", ratio=TokenRatio("behavior"), surrogate=DivergencePenalty()
)
UP = replace(GRPO, name="up", paper="arXiv:2607.06987", surrogate=UnboundedPositive(), aggregate=TokenMean())
FIPO = replace(DAPO, name="fipo", paper="arXiv:2603.19835", surrogate=FutureKl(low=0.2, high=0.28))
VACO = replace(
    CISPO,
    name="vaco",
    paper="arXiv:2603.01365",
    ratio=TokenRatio("behavior"),
    surrogate=ClippedWeight(low=1.0, high=19.0),
    correction=VariationMask(),
)
KPOP = replace(DECOUPLED, name="kpop", paper="https://ringtech.notion.site/kpop", correction=BinaryKlMask())
A_STAR_PO = replace(
    REINFORCE,
    name="a_star_po",
    paper="arXiv:2505.20686",
    advantage=SoftValue(),
    ratio=TokenRatio("reference"),
    surrogate=SquaredGap(),
)
REAL = replace(REINFORCE, name="real", paper="arXiv:2602.05630", advantage=Classify(), aggregate=SeqMeanTokenMean())
SCALERL = replace(
    CISPO,
    name="scalerl",
    paper="arXiv:2510.13786",
    advantage=BatchNorm(),
    aggregate=PromptMean(),
    filters=("signal",),
)
GAR = replace(DR_GRPO, name="gar", paper="https://github.com/PrimeIntellect-ai/prime-rl", advantage=Redistribute())
OTB = replace(REINFORCE, name="otb", paper="arXiv:2602.07078", advantage=TokenBaseline(), aggregate=TokenMean())
IW_OPD = replace(OPD, name="iw_opd", paper="arXiv:2606.22600", distill=EarlyDistill(coef=1.0))
ECHO = replace(DR_GRPO, name="echo", paper="https://github.com/PrimeIntellect-ai/prime-rl", distill=Observations())
SDAR = replace(GRPO, name="sdar", paper="arXiv:2605.15155", distill=GatedDistill())
SDFT = replace(OPD, name="sdft", paper="arXiv:2601.19897", distill=FullDistill(beta=0.5, top=100, tail=False))
OPSD = replace(OPD, name="opsd", paper="arXiv:2601.18734", distill=FullDistill())
SDPO = replace(OPD, name="sdpo", paper="arXiv:2601.20802", surrogate=CappedWeight(2.0))
RLSD = replace(GRPO, name="rlsd", paper="arXiv:2604.03128", distill=ScaledAdvantage())
SCORE_CENTERING = replace(
    REINFORCE,
    name="score_centering",
    paper="arXiv:2609.20807",
    advantage=GroupCenter(),
    surrogate=CenteredScore(),
    aggregate=TokenMean(),
)
OPSA = replace(
    GRPO,
    name="opsa",
    paper="arXiv:2608.31046",
    advantage=Constant(-1.0),
    correction=LeastLikely(),
    aggregate=TokenMean(),
)
SSD = replace(SFT, name="ssd", paper="arXiv:2604.01193", surrogate=WholeLikelihood())
CODAPO = replace(GRPO, name="codapo", paper="arXiv:2606.07950", advantage=QuestionValue())
CRIPO = replace(
    GRPO,
    name="cripo",
    paper="arXiv:2607.18082",
    advantage=GroupCenter(),
    distill=CriterionBonus(),
    aggregate=TokenMean(),
)
NGU = replace(
    GRPO, name="ngu", paper="arXiv:2609.13443", advantage=Anchored(), aggregate=TokenMean(), filters=("signal",)
)
KLPO = replace(REINFORCE, name="klpo", paper="https://yifanzhang-pro.github.io/KLPO", surrogate=KlRegression())
RAE = replace(REINFORCE, name="rae", paper="arXiv:2506.24119", advantage=AgentBaseline())
GIGPO = replace(GRPO, name="gigpo", paper="arXiv:2505.10978", advantage=StepGroups())
TURN_PPO = replace(PPO, name="turn_ppo", paper="https://github.com/areal-project/AReaL/pull/1600", advantage=TurnGae())

# points instead of tokens: ratios of log-densities, which are averages over the dimensions and move little
FLOW_GRPO = replace(GRPO, name="flow_grpo", paper="arXiv:2505.05470", surrogate=Clip(low=1e-4, high=1e-4))
DDPO = replace(FLOW_GRPO, name="ddpo", paper="arXiv:2305.13301", advantage=PromptNorm())
DDRL = replace(FLOW_GRPO, name="ddrl", paper="arXiv:2512.04332", advantage=NegativeExp())

TABLE = {
    row.name: row
    for row in (
        *(GRPO, DR_GRPO, DAPO, PPO, RLOO, REINFORCE, SFT),
        *(GSPO, GSPO_TOKEN, GMPO, CISPO, SAPO, DPPO_TV, DPPO_KL, KIMI, CLIP_COV, KL_COV, FORKING),
        *(OPO, REMAX, PASS_AT_K, MAXRL, GPG, GDPO, REINFORCE_PP, REINFORCE_PP_BASELINE, RAFT),
        *(DECOUPLED, TOPR, AIPO, M2PO, LUFFY, OPD, ONLINE_DPO),
        *(VESPO, LUSPO, DRPO, UP, FIPO, VACO, KPOP, A_STAR_PO, REAL, SCALERL),
        *(GAR, RAE, GIGPO, TURN_PPO, OTB, IW_OPD, SDAR, ECHO),
        *(SCORE_CENTERING, SDFT, OPSD, SDPO, RLSD),
        *(OPSA, SSD, CODAPO, KLPO, NGU, CRIPO),
        *(FLOW_GRPO, DDRL, DDPO),
    )
}


def resolve_algorithm(section: dict[str, Any]) -> Algorithm:
    """The row that a recipe's [algo] means: {"kind": "dapo", "surrogate": {"high": 0.3}, "filters": []}."""
    known = ["kind", "filters", "mask_truncated", "terms", *FAMILIES]
    for key in section:
        if key not in known:
            raise ConfigError(f"algo.{key} does not exist.{suggest_name(key, known)} Known: {', '.join(known)}.")
    row = _find_row(section.get("kind"))
    changes = {
        family: override_knobs(row.parts[family], section[family], FAMILIES[family], f"algo.{family}")
        for family in FAMILIES
        if family in section
    }
    if "terms" in section:
        changes["terms"] = loss_terms(section["terms"])
    if "filters" in section:
        changes["filters"] = filter_names(section["filters"])
    if "mask_truncated" in section:
        changes["mask_truncated"] = checked_bool("algo.mask_truncated", section["mask_truncated"])
    row = replace(row, **changes)
    for path, why in row.idle.items():
        family, _, knob = path.partition(".")
        if family in section and (not knob or knob in section[family]):
            value = section[family][knob] if knob else section[family]
            raise ConfigError(f"algo.{path} = {value!r} has no effect: {why}. Change that or remove it.")
    return row


def _find_row(kind: Any) -> Algorithm:
    if not isinstance(kind, str):
        raise ConfigError(f"algo.kind = {kind!r}; it must name a row: {', '.join(TABLE)}, or your own as 'module:name'")
    row = find_registered("algo.kind", kind, TABLE, called=False)
    if not isinstance(row, Algorithm):
        raise ConfigError(
            f"algo.kind = '{kind}' is {row!r}; it must be a rondel.algos.table.Algorithm: "
            "replace(GRPO, name=..., advantage=MyAdvantage()), a row of ours with parts of yours"
        )
    return row
