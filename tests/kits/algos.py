"""Tokens and scored samples by hand, for the tests of algos/."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from rondel.algos import aggregate, correction, kl, table
from rondel.algos.correction import Importance
from rondel.algos.criteria import CriterionBonus
from rondel.algos.distill import FullDistill, ScaledAdvantage
from rondel.algos.entropy import EntropyBonus
from rondel.algos.group_advantages import AgentBaseline, Redistribute
from rondel.algos.kl_regression import KlRegression
from rondel.algos.mask_corrections import BinaryKlMask
from rondel.algos.masked_surrogates import ClipCov, KlCov
from rondel.algos.objective import decide_update, objective
from rondel.algos.off_policy_surrogates import CenteredScore
from rondel.algos.prompt_norm import PromptNorm
from rondel.algos.question_value import QuestionValue
from rondel.algos.reward_transforms import Overlong
from rondel.algos.scored_samples import ScoredSamples
from rondel.algos.soft_surrogates import DivergencePenalty, FutureKl, GammaWeight, SquaredGap, UnboundedPositive
from rondel.algos.surrogate import Clip
from rondel.algos.table import Algorithm
from rondel.algos.tokens import TokenBatch, Tokens
from rondel.algos.trust_region_surrogates import ClippedWeight, DivergenceMask, GeometricMean
from rondel.train.annotate import advantages_of

torch.set_num_threads(1)
F64 = torch.float64


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


def near(found: Tensor, wanted: Tensor | list[float], within: float = 1e-10) -> bool:
    wanted = torch.as_tensor(wanted, dtype=found.dtype)
    return found.shape == wanted.shape and bool(((found - wanted).abs() <= within).all())


def slope(value: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(value, of, retain_graph=True)[0]


def tokens(logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, **more: Tensor) -> Tokens:
    """Whatever is not given is 0: one sample, no behavior, nothing guided, nothing selected."""
    flat, none = torch.zeros_like(logprobs.detach()), torch.zeros(logprobs.shape, dtype=torch.bool)
    zeros = dict.fromkeys(("log_weight", "log_drift", "score", "entropy", "age"), flat)
    rest = {**zeros, "sample": none.long(), "guided": none, "selected": none}
    return Tokens(logprobs=logprobs, log_ratio=log_ratio, advantages=advantages, **{**rest, **more})


def scored(
    rewards: Tensor, group: Tensor | None = None, lengths: Tensor | None = None, **parts: Tensor
) -> ScoredSamples:
    """One group of samples of one token, unless told otherwise."""
    group = torch.zeros(len(rewards), dtype=torch.int64) if group is None else group
    return ScoredSamples(
        rewards, group, torch.ones(len(rewards), dtype=torch.int64) if lengths is None else lengths, parts
    )


@dataclass
class Ragged:
    """N samples of random tokens over 5 words, whose logits carry the gradient; three more policies near by."""

    lengths_N: Tensor
    group_N: Tensor
    rewards_N: Tensor
    parts: dict[str, Tensor]
    guided_N: Tensor
    logits_TV: Tensor
    others_3T: Tensor  # log proximal, log behavior, log reference

    @classmethod
    def make(cls, lengths: list[int], seed: int, *, groups: int = 3, noise: float = 0.4) -> Ragged:
        make, n, t = torch.Generator().manual_seed(seed), len(lengths), sum(lengths)
        parts = {name: torch.randint(0, 3, (n,), generator=make).to(F64) for name in ("right", "form")}
        parts["half"] = parts["form"] / 2
        logits_TV = 2 * torch.randn(t, 5, generator=make, dtype=F64)
        return cls(
            torch.tensor(lengths, dtype=torch.int64),
            torch.randint(0, groups, (n,), generator=make) * 7 - 5,
            torch.randint(-1, 3, (n,), generator=make).to(F64) / 2,
            parts,
            torch.rand(n, generator=make) < 0.3,
            logits_TV,
            (logits_TV + noise * torch.randn(3, t, 5, generator=make, dtype=F64)).log_softmax(-1)[..., 0],
        )

    def scored(self, order: list[int] | None = None) -> ScoredSamples:
        at = torch.tensor(range(len(self.lengths_N)) if order is None else order, dtype=torch.int64)
        parts = {name: part_N[at] for name, part_N in self.parts.items()}
        old_T, mu_T, ref_T = self.others_3T
        by_token = {
            "values_T": self.values_T,
            "proximal_T": old_T,
            "behavior_T": mu_T,
            "ref_T": ref_T,
            "teacher_T": self.teacher_T,
            "turn_T": self.turn_T,
            "collision_T": self.collision_T,
            "state_T": self.state_T,
        }
        by_token = {name: self._ordered(x_T, at.tolist()) for name, x_T in by_token.items()}
        margins = {place: self._ordered(x_T, at.tolist()) for place, x_T in self.margins.items()}
        greedy_N = self.group_N[at].to(F64) / 10
        return ScoredSamples(
            self.rewards_N[at],
            self.group_N[at],
            self.lengths_N[at],
            parts,
            greedy_N=greedy_N,
            **by_token,
            margins=margins,
            agents=tuple("ab"[g % 2] for g in self.group_N[at].tolist()),
            tasks=tuple("xyz"[g % 3] for g in self.group_N[at].tolist()),
        )

    def _ordered(self, x_T: Tensor, order: list[int]) -> Tensor:
        pieces = x_T.split(self.lengths_N.tolist())
        return torch.cat([pieces[i] for i in order] or [x_T])

    @property
    def teacher_T(self) -> Tensor:
        """What a teacher might have said."""
        return self.others_3T.flip(0)[0] - 0.3

    @property
    def margins(self) -> dict[int, Tensor]:
        """How far behind two hints a token might have been from the best one."""
        return {place: self.others_3T[place].abs() - 0.8 for place in (0, 1)}

    @property
    def values_T(self) -> Tensor:
        """What a critic might have said."""
        return self.others_3T.mean(0) / 3

    @property
    def turn_T(self) -> Tensor:
        """A turn is three tokens long, or what is left of its sample."""
        starts_N = self.lengths_N.cumsum(0) - self.lengths_N
        return torch.cat(
            [1000 * i + torch.arange(n) // 3 for i, n in enumerate(self.lengths_N.tolist())] or [starts_N]
        ).long()

    @property
    def state_T(self) -> Tensor:
        """Every other turn of a group saw the same."""
        return 2 * self.group_N.repeat_interleave(self.lengths_N) + self.turn_T % 1000 % 2

    @property
    def collision_T(self) -> Tensor:
        """Of the policy."""
        return self.logits_TV.softmax(-1).square().sum(-1)

    @property
    def behavior_TV(self) -> Tensor:
        """Log-probabilities of every word, by the behavior."""
        return self._whole(self.others_3T[1], 1.3)

    def draws_TM(self, count: int) -> Tensor:
        """Words that might have been drawn beside each token."""
        return (torch.arange(len(self.logits_TV))[:, None] * 3 + 7 * torch.arange(count) ** 2) % 5

    @property
    def teacher_TV(self) -> Tensor:
        """Log-probabilities of every word, by the teacher."""
        return self._whole(self.teacher_T, -0.4)

    def _whole(self, first_T: Tensor, like: float) -> Tensor:
        rest_TV = (like * self.logits_TV[:, 1:]).log_softmax(-1) + torch.log1p(-first_T.exp())[:, None]
        return torch.cat([first_T[:, None], rest_TV], -1)

    @property
    def age_T(self) -> Tensor:
        """How many versions ago a token might have been drawn."""
        return (torch.arange(len(self.others_3T[0])) % 4).to(F64)

    def loss(
        self,
        row: Algorithm,
        *,
        order: list[int] | None = None,
        cuts: list[int] | None = None,
        noted: bool | None = None,
    ) -> tuple[Tensor, Tensor, list[dict[str, Tensor]]]:
        """(loss, gradient on the logits, terms of each micro-batch); the samples in
        `order`, cut before the positions `cuts`.

        `noted`: decide over the whole update; by default only where the row asks for it.
        """
        order = list(range(len(self.lengths_N))) if order is None else order
        noted = "proximal_logprobs" in row.needs if noted is None else noted
        scored, starts = self.scored(order), (self.lengths_N.cumsum(0) - self.lengths_N).tolist()
        at_T = torch.cat(
            [torch.arange(starts[i], starts[i] + int(self.lengths_N[i])) for i in order] or [torch.zeros(0)]
        ).long()
        leaf_TV = self.logits_TV.clone().requires_grad_()
        own_TV = self.logits_TV.log_softmax(-1)
        known = TokenBatch(
            scored.spread_to_tokens(torch.arange(len(order))),
            entropy=-(own_TV.exp() * own_TV).sum(-1)[at_T],
            proximal=self.others_3T[0, at_T],
            behavior=self.others_3T[1, at_T],
            reference=self.others_3T[2, at_T],
            advantages=advantages_of(row, scored),
            score=scored.spread_to_tokens(scored.rewards_N),
            demonstration=scored.spread_to_tokens(self.guided_N[order]),
            age=self.age_T[at_T],
            teacher=scored.teacher_T,
        )
        if row.surrogate.behavior_top:
            likeliest = self.behavior_TV[at_T].topk(min(5, row.surrogate.behavior_top), -1)
            known = known.with_fields(top_ids=likeliest.indices, top_behavior=likeliest.values)
        if row.surrogate.behavior_draws:
            ids_TM = self.draws_TM(row.surrogate.behavior_draws)[at_T]
            known = known.with_fields(top_ids=ids_TM, top_behavior=self.behavior_TV[at_T].gather(-1, ids_TM))
        if noted:
            known, _ = decide_update(row, known)
        counted_N = aggregate.counted_tokens(scored.lengths_N, known.counts)
        weight_T = scored.spread_to_tokens(aggregate.sample_weights(row.aggregate, counted_N, scored.group_N))
        total, terms = torch.zeros((), dtype=F64), []
        for first, end in pairwise([0, *(cuts or []), len(order)]):
            here = slice(int(scored.lengths_N[:first].sum()), int(scored.lengths_N[:end].sum()))
            logps = leaf_TV[at_T[here]].log_softmax(-1)
            own = {f.name: x[here] for f in fields(known) if isinstance(x := getattr(known, f.name), Tensor)} | {
                "logprobs": logps[:, 0],
                "entropy": -(logps.exp() * logps).sum(-1),
            }
            if known.top_ids is not None:
                own["top_logprobs"] = logps.gather(-1, own["top_ids"])
            if isinstance(row.distill, FullDistill):
                own["full_kl"] = row.divergence(logps.exp(), self.teacher_TV[at_T[here]])[0]
            loss, found = objective(row, TokenBatch(**own), weight_T[here])
            loss.backward()
            total, terms = total + loss.detach(), [*terms, found]
        return total, torch.zeros_like(leaf_TV) if leaf_TV.grad is None else leaf_TV.grad, terms


def lively(row: Algorithm) -> Algorithm:
    """The row with its lengths set, and with bounds and shares that a few dozen tokens can reach."""
    knobs = {
        "gspo": {"surrogate": Clip(0.05, 0.1)},
        "gspo_token": {"surrogate": Clip(0.05, 0.1)},
        "gmpo": {"surrogate": GeometricMean(0.2, 0.3)},
        "cispo": {"surrogate": ClippedWeight(0.2, 0.2)},
        "dppo_tv": {"surrogate": DivergenceMask("tv", 0.02, 0.03)},
        "dppo_kl": {"surrogate": DivergenceMask("kl", 0.002, 0.003)},
        "clip_cov": {"surrogate": ClipCov(share=0.1, least=0.05)},
        "kl_cov": {"surrogate": KlCov(share=0.2)},
        "decoupled": {"correction": Importance(high=1.2)},
        "vespo": {"surrogate": GammaWeight(1.0, 1.0, 1.5, 0.5)},
        "luspo": {"surrogate": Clip(0.05, 0.1)},
        "drpo": {"surrogate": DivergencePenalty(0.05)},
        "up": {"surrogate": UnboundedPositive(dual=1.25)},
        "fipo": {"surrogate": FutureKl(half_life=3.0, least=0.7, most=1.5, safe=1.1)},
        "kpop": {"correction": BinaryKlMask(0.02)},
        "a_star_po": {"surrogate": SquaredGap(0.3)},
        "gar": {"advantage": Redistribute("half", most=1.2)},
        "score_centering": {"surrogate": CenteredScore(0.8, 1.2, top=3)},
        "klpo": {"surrogate": KlRegression(beta=0.3, draws=4)},
        "cripo": {"distill": CriterionBonus(0.5, 0.6, most=1, criteria={"right": 0, "form": 1})},
        "codapo": {"advantage": QuestionValue(above=0.4)},
        "sdft": {"distill": FullDistill(beta=0.5, top=3, tail=False)},
        "rlsd": {"distill": ScaledAdvantage(0.6, 0.3)},
        "ddpo": {
            "advantage": PromptNorm(window=6, least=5, bound=1.2, history={"x": (0.5, -0.5, 1.0, 0.0), "y": (1.0,)})
        },
        "rae": {"advantage": AgentBaseline(baselines={"a": 0.4, "b": -0.2})},
    }
    shaping = Overlong(10, 9) if isinstance(row.shaping, Overlong) else row.shaping
    return replace(row, shaping=shaping, **knobs.get(row.name, {})).bounded(9)


AGGREGATES = [
    aggregate.TokenMean(),
    aggregate.SeqMeanTokenMean(),
    aggregate.SeqMeanTokenSum(),
    aggregate.FixedNorm(9),
    aggregate.PromptMean(),
]


TOGETHER = correction.Importance(
    high=1.2, reject="geometric", reject_low=0.7, reject_high=1.5, normalize="token", denominator="kept"
)


# rows whose parts ask nothing new of the trainer, or what one rank alone has (score_centering, opsd, sdft) and tests of
# their own show: that no split changes their formulas is enough
FORMULAS_ONLY = {
    *("vespo", "luspo", "drpo", "up", "fipo", "vaco", "a_star_po", "real", "gar", "rae", "gigpo", "iw_opd", "echo"),
    *("score_centering", "sdft", "opsd", "sdpo", "rlsd", "ddpo", "ssd", "codapo", "klpo", "ngu", "cripo"),
}

# rows that refuse a KL and what weighs tokens beside them
STANDS_ALONE = {"opsa", "ssd"}

# one row for each thing that a split could change: how tokens and samples are counted, a ratio of whole samples, a choice over
# the update, a correction that counts what it kept, a critic, a teacher, a second distribution, demonstrations. The others
# differ in the formula of a token or in advantages that are known before, and `rows` splits the formulas of all
# A row for each thing that a trainer hands over: a ratio of each level, what samples are compared by, values, what
# teachers say, a baseline, demonstrations. All rows are split by their formulas alone (law 3).
SPLIT_ROWS = [
    *("dapo", "gspo_token", "gmpo", "clip_cov", "forking", "m2po", "decoupled", "ppo", "otb", "sdar", "luffy", "opsa"),
]


def rows():
    """Every row as it stands; with everything beside it that compares samples; and every aggregate."""
    for row in table.TABLE.values():
        row = lively(row)
        beside = (
            correction.OffPolicyMask(0.02, "kept")
            if "behavior" in {*row.surrogate.reads, row.ratio.anchor}
            else TOGETHER
        )
        if row.name not in FORMULAS_ONLY - STANDS_ALONE:
            yield pytest.param(row, id=row.name)
        if row.name in STANDS_ALONE:
            continue
        full = replace(
            row, correction=beside, kl=kl.Kl("k3", 0.1, unbiased=True), entropy=EntropyBonus(0.01, target=9.0, top=0.4)
        )
        yield pytest.param(full, id=f"{row.name}+")
    for how in AGGREGATES:
        yield pytest.param(replace(table.GRPO, aggregate=how, correction=TOGETHER), id=type(how).__name__)


def relative_difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / max(1.0, float(wanted.norm())))
