"""What turns the outputs of a learned model of a world into densities of its transitions, draws, and errors.

M transitions · E members · O numbers of an observation, D of an action · y = (change [O], reward)

    member m drew it       log p = -log E + log N(y; mean_m, std_m²) + log Bernoulli(end; sigmoid(logit_m(x + change)))
    the world made it      log p = 1/E · Σ_m of the same without -log E: each member learns by maximum likelihood, and
                           the mean bounds the log-density of their mixture from below
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rondel.core.transitions import EXTRA
from rondel.models.control.distribution import LOG_2PI
from rondel.models.elementwise import sigmoid, softplus
from rondel.models.noise import draw_normal
from rondel.models.packed_steps import PackedSteps
from rondel.models.step_head import StepHead

PROBE_KEY = 20261128  # of the transitions in which both sides of a weight update score a prompt
INSIDE = 1.2815515655446004  # standard deviations within which a Gaussian has 80 % of its mass


@dataclass(frozen=True, slots=True)
class TransitionFit:
    """How well recorded transitions of one episode, in their order, agree with a model that was not trained on them.

    log_density  [T]    as `WorldHead.evaluate_steps`
    errors       [4+h]  under `error_names(h)`
    """

    log_density: np.ndarray
    errors: np.ndarray


def error_names(horizon: int) -> tuple[str, ...]:
    """What `WorldHead.fit` measures, the error after 1, 2, .. h predicted steps among it."""
    steps = (f"error_{j}" for j in range(1, horizon + 1))
    return ("reward_error", "end_error", "coverage", "disagreement", *steps)


class WorldHead(StepHead):
    """Over a module whose `forward` gives means and log standard deviations of each member.

    rows of a step  observation [O], action [D], then what followed: member, change [O], reward, end (core/transitions.py)
    """

    kind = "world"

    def describe(self, max_tokens: int, temperature: float) -> str:
        config = self.model.config
        return f"world: {config.ensemble} models of a world of {config.observation_size} numbers"

    @property
    def weight(self) -> Tensor:
        """Where the weights lie, and in what."""
        found: Tensor = self.model.get_output_embeddings().weight
        return found

    @property
    def size(self) -> int:
        """O"""
        return int(self.model.config.observation_size)

    @property
    def observed(self) -> int:
        """O + D: what a transition begins with."""
        return self.size + (1 if self.model.config.discrete else int(self.model.config.action_size))

    @property
    def dim(self) -> int:
        """How many numbers are drawn."""
        return self.size + EXTRA

    def predict(self, given: Tensor) -> tuple[Tensor, Tensor]:
        """[M, O + D] -> mean and log_std [M, E, O + 1] of change and reward."""
        n, step = self.size + 1, self.model.step_scale(given)
        mean, log_std = self.model(self.model.features(given[:, : self.size], given[:, self.size :]))
        return mean[..., :n] * step, log_std[..., :n] + step.log()

    def end_logits(self, given: Tensor, change: Tensor) -> Tensor:
        """[M, O + D], [M, E, O] or [M, 1, O] -> [M, E]"""
        after = given[:, None, : self.size] + change
        found: Tensor = self.model.end_logits(after.expand(-1, self.model.config.ensemble, -1))
        return found

    def evaluate_steps(self, steps: PackedSteps, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """In the dtype of the module; the entropy is the mean of the members'. It has no temperature but 1."""
        if steps.rows.shape[1] != self.observed + self.dim:
            raise ValueError(
                f"steps of {steps.rows.shape[1]} numbers for a model of a world whose transitions have "
                f"{self.observed + self.dim}"
            )
        if temperature != 1.0:
            raise ValueError(f"temperature = {temperature:g}: a model of a world has none but 1")
        given, drawn = steps.rows[:, : self.observed], steps.rows[:, self.observed :]
        (mean, log_std), logit = self.predict(given), self.end_logits(given, drawn[:, None, 1:-2])
        return density_of(drawn, mean, log_std, logit), entropy_of(log_std, logit)

    @torch.no_grad()
    def draw(self, given: np.ndarray, uniform: np.ndarray, normal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What follows [n, O + 3] and its log-density [n].

        given    [n, O + D] observation and action
        uniform  [n, 2] in [0, 1): which member, and whether it ends
        normal   [n, O + 1] of a standard normal
        """
        members, device = self.model.config.ensemble, self.weight.device
        asked = torch.from_numpy(given).to(device)
        mean, log_std = self.predict(asked)
        rows, member = np.arange(len(given)), np.minimum((uniform[:, 0] * members).astype(np.int64), members - 1)
        means, stds = (t.cpu().numpy()[rows, member] for t in (mean, log_std.exp()))
        follows = (means + stds * normal).astype(np.float32)
        logit = self.end_logits(asked, torch.from_numpy(follows[:, None, :-1]).to(device))
        ended = uniform[:, 1] < 1 / (1 + np.exp(-logit.double().cpu().numpy()[rows, member]))
        drawn = np.concatenate([member[:, None], follows, ended[:, None]], 1).astype(np.float32)
        density = density_of(torch.from_numpy(drawn).to(device), mean, log_std, logit)
        return drawn, density.cpu().numpy()

    @torch.no_grad()
    def fit(self, rows: np.ndarray, horizon: int) -> TransitionFit:
        """Of the T transitions of one episode, [T, O + D + O + 3] in their order.

        reward_error  root mean square of the reward less the mean of the members
        end_error     mean square of the end less its probability where the world has come to (Brier), in units of its
                      variance: 1 is as good as to know how often it ends; nan where it did not
        coverage      share of numbers within the central 80 % of what a member predicts; 0.8 is calibrated
        disagreement  root mean square deviation of the members' means from their mean, in units of the change's
                      deviation
        error_j       each member predicts j steps from where the world was, with the actions that were
                      taken; root mean square error in units of the standard deviation of what the world changed in j
                      steps: 1 is as good as to know the mean change. nan where an episode is too short, or
                      nothing moved
        """
        size, given = self.size, torch.from_numpy(rows).to(self.weight.device)
        mean, log_std = self.predict(given[:, : self.observed])
        drawn = given[:, self.observed :]
        logit = self.end_logits(given[:, : self.observed], drawn[:, None, 1:-2])
        log_density = density_of(drawn, mean, log_std, logit)
        target = drawn[:, 1:-1]
        spread = target[:, :size].std(0, unbiased=False)
        moved = spread > 1e-6
        inside = (((target[:, None] - mean).abs() * (-log_std).exp()) < INSIDE)[
            ..., torch.cat([moved, moved.new_ones(1)])
        ]
        centre = mean.mean(1, keepdim=True)
        apart = ((mean - centre)[..., :size] / spread)[..., moved]
        errors = [
            (target[:, -1] - centre[:, 0, -1]).square().mean().sqrt(),
            (drawn[:, -1] - sigmoid(logit).mean(1)).square().mean() / drawn[:, -1].var(unbiased=False),
            inside.float().mean(),
            apart.square().mean().sqrt(),
            *self._open_loop(given, horizon),
        ]
        return TransitionFit(log_density.cpu().numpy(), torch.stack(errors).double().cpu().numpy())

    def _open_loop(self, given: Tensor, horizon: int) -> list[Tensor]:
        """The last part of `fit`."""
        size, members, T = self.size, self.model.config.ensemble, len(given)
        change = given[:, self.observed + 1 : self.observed + 1 + size]
        real = torch.cat([given[:1, :size], given[:, :size] + change])  # [T + 1, O]; the last is what came then
        at, errors = given[:, None, :size].expand(T, members, size), list[Tensor]()
        for j in range(1, horizon + 1):
            n = T + 1 - j  # starts from which the world took j steps
            if n < 2:
                errors.append(given.new_tensor(math.nan))
                continue
            at = at[:n]
            actions = given[j - 1 : j - 1 + n, size : self.observed]
            inputs = torch.cat([at.reshape(n * members, size), actions.repeat_interleave(members, 0)], 1)
            mean = self.predict(inputs)[0].view(n, members, members, size + 1)
            at = at + mean.diagonal(dim1=1, dim2=2).transpose(1, 2)[..., :size]
            truth = real[j : j + n]
            spread = (truth - given[:n, :size]).std(0, unbiased=False)
            moved = spread > 1e-6
            errors.append((((at - truth[:, None]) / spread)[..., moved]).square().mean().sqrt())
        return errors

    def score_prompt(self, tokens: Sequence[int]) -> list[float]:
        """Log-densities of fixed transitions, as many as tokens follow the first."""
        n, config = len(tokens) - 1, self.model.config
        if n < 1:
            return [0.0] * len(tokens)
        rows = np.stack([draw_normal(PROBE_KEY, t, self.observed + self.dim) for t in range(n)])
        if config.discrete:
            rows[:, self.size] = np.arange(n) % config.action_size
        rows[:, self.observed] = np.arange(n) % (config.ensemble + 1) - 1
        rows[:, -1] = rows[:, -1] > 0
        with torch.no_grad():
            return [0.0, *self.evaluate_steps(PackedSteps.of([rows], [tokens], self.weight.device))[0].tolist()]


def density_of(drawn: Tensor, mean: Tensor, log_std: Tensor, logit: Tensor) -> Tensor:
    """[M, O + 3], [M, E, O + 1], [M, E, O + 1], [M, E] -> [M], as the top of this file has it."""
    z = (drawn[:, None, 1:-1] - mean) * (-log_std).exp()
    each = -(0.5 * z * z + log_std + 0.5 * LOG_2PI).sum(-1)
    each = each - F.binary_cross_entropy_with_logits(logit, drawn[:, -1:].expand_as(logit), reduction="none")
    member, n = drawn[:, 0].long(), each.shape[1]
    own = each.gather(1, member.clamp_min(0)[:, None])[:, 0] - math.log(n)
    return torch.where(member < 0, each.mean(1), own)


def entropy_of(log_std: Tensor, logit: Tensor) -> Tensor:
    """[M, E, O + 1], [M, E] -> [M], of change, reward and end, a member's on average."""
    end = softplus(logit) - logit * sigmoid(logit)
    return ((log_std + 0.5 * (LOG_2PI + 1)).sum(-1) + end).mean(1)
