"""Every formula of the table once more: Python floats, one token at a time, loops. Only logp
and entropy are tensors, for their gradient.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kits.algos import F64, Ragged
from rondel.algos.table import Algorithm


def bounded(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def mean(values: list) -> float:
    return sum(values) / len(values)


def std(values: list[float]) -> float:
    return math.sqrt(sum((v - mean(values)) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else 0.0


def whiten(values: list[float]) -> list[float]:
    return [(v - mean(values)) / math.sqrt(std(values) ** 2 + 1e-8) for v in values]


def naive(row: Algorithm, batch: Ragged) -> tuple[Tensor, Tensor]:
    """(loss, gradient on the logits) of the whole batch."""
    leaf = batch.logits_TV.clone().requires_grad_()
    logps = leaf.log_softmax(-1)
    logp, entropy = list(logps[:, 0]), list(-(logps.exp() * logps).sum(-1))
    old, mu, ref = batch.others_3T.tolist()
    guided_T = [g for g, n in zip(batch.guided_N.tolist(), batch.lengths_N.tolist(), strict=True) for _ in range(n)]
    mu = [o if g else m for o, m, g in zip(old, mu, guided_T, strict=True)]  # nobody drew a demonstration
    lengths, total = batch.lengths_N.tolist(), torch.zeros((), dtype=F64)
    owner = [i for i, n in enumerate(lengths) for _ in range(n)]
    mates = {t: [s for s in range(len(owner)) if owner[s] == owner[t]] for t in range(len(owner))}
    advantages = token_advantages(row, batch)
    anchor = {"behavior": mu, "reference": ref}.get(row.ratio.anchor, old)
    gap = [o - m for o, m in zip(old, mu, strict=True)]
    if type(row.correction).__name__ == "LeastLikely":
        weights = least_likely(row.correction, old, [h.item() for h in entropy])
    elif type(row.correction).__name__ in MASKS:
        rule = MASKS[type(row.correction).__name__]
        ages = batch.age_T.tolist()
        weights = [
            rule(row.correction, old[t], mu[t], advantages[t], [gap[s] for s in mates[t]], ages[t]) for t in mates
        ]
    else:
        weights = corrections(row, gap, mates, advantages)
    kept = [
        counts_at_all(row, weights[t], [old[s] - mu[s] for s in mates[t]], old[t] - mu[t]) for t in range(len(owner))
    ]
    counts = [sum(kept[t] for t in range(len(owner)) if owner[t] == i) for i in range(len(lengths))]
    nats = [h.item() for h in entropy]
    chosen, acts = selected(row, advantages, old, mu, nats), bonus_acts(row, nats)
    x = [logp[t] - anchor[t] for t in range(len(owner))]
    name = type(row.distill).__name__
    for t in range(len(owner)):
        a, score, guided = advantages[t], float(batch.rewards_N[owner[t]]), bool(batch.guided_N[owner[t]])
        drift = [logp[s].item() - mu[s] for s in mates[t]]
        spread = [row_ratio(row, x, mates[s], s) for s in mates[t]]
        own = row_ratio(row, x, mates[t], t)
        loss = centered(row.surrogate, logps[t], batch.behavior_TV[t].tolist(), a, drift[mates[t].index(t)], guided)
        loss = loss if loss is not None else regressed(row.surrogate, batch, logps, mates[t], t, a)
        loss = loss if loss is not None else SURROGATES[type(row.surrogate).__name__](
            row.surrogate, lp=logp[t], x=own, a=a, score=score, guided=guided, chosen=chosen[t],
            drift=logp[t].item() - mu[t], drifts=drift, xs=spread, at=mates[t].index(t),
        )  # fmt: skip
        total = total + per_token(row, counts, owner[t], batch.group_N.tolist()) * (
            weights[t] * loss
            + (gated(row.distill, logp[t], batch.teacher_T[t].item()) if kept[t] and name == "GatedDistill" else 0.0)
            + (apart(row.distill, logps[t], batch.teacher_TV[t]) if kept[t] and name == "FullDistill" else 0.0)
            + row.kl.coef * (penalty(row.kl, logp[t], ref[t], mu[t]) if kept[t] and row.kl.in_loss else 0.0)
            - (row.entropy.coef * entropy[t] if acts[t] and kept[t] else 0.0)
        )
    if not owner:
        return total, torch.zeros_like(leaf)
    return total.detach(), torch.autograd.grad(total, leaf, allow_unused=True)[0]


# -- rewards to advantages
# ------------------------------------------------------------------------------------------------


def token_advantages(row: Algorithm, batch: Ragged) -> list[float]:
    earned = rewarded(row, batch)
    mu, teacher, ref = batch.others_3T[1].tolist(), batch.teacher_T.tolist(), batch.others_3T[2].tolist()
    if row.kl.in_advantage:
        owner = [i for i, n in enumerate(batch.lengths_N.tolist()) for _ in range(n)]
        cost = [
            row.kl.coef * penalty(replace(row.kl, through="own"), torch.tensor(m, dtype=F64), r, m).item()
            for m, r in zip(mu, ref, strict=True)
        ]
        earned = [a - sum(cost[s] for s in range(t, len(cost)) if owner[s] == owner[t]) for t, a in enumerate(earned)]
    if type(row.distill).__name__ in ("GatedDistill", "Observations", "FullDistill"):
        return earned
    if type(row.distill).__name__ == "CriterionBonus":
        return criterion_credit(row.distill, batch, earned)
    gaps = [m - q for m, q in zip(mu, teacher, strict=True)]
    if type(row.distill).__name__ == "ScaledAdvantage":
        rule, factors = row.distill, []
        for a, gap in zip(earned, gaps, strict=True):
            evidence = math.exp(-gap if a > 0 else gap if a < 0 else 0.0)
            factors.append(bounded(evidence, 1 - rule.clip, 1 + rule.clip) if a < 0 or not rule.only_negative else 1.0)
        return [a * (1 - rule.coef + rule.coef * f) for a, f in zip(earned, factors, strict=True)]
    weights = [1.0] * len(gaps)
    if type(row.distill).__name__ == "EarlyDistill":
        owner = [i for i, n in enumerate(batch.lengths_N.tolist()) for _ in range(n)]
        for t, i in enumerate(owner):
            own = [abs(gaps[s]) for s in range(len(gaps)) if owner[s] == i]
            before = [abs(gaps[s]) for s in range(t) if owner[s] == i]
            weights[t] = 1 + row.distill.gamma * (1 - sum(before) / sum(own))
    return [a - row.distill.coef * w * gap for a, w, gap in zip(earned, weights, gaps, strict=True)]


def centered(rule, logps: Tensor, log_q: list[float], a: float, drift: float, guided: bool) -> Tensor | None:
    """Score centering by its sums: the head as recorded, the tail as a multiple of the policy's."""
    if type(rule).__name__ != "CenteredScore":
        return None
    q, p = [math.exp(x) for x in log_q], [math.exp(x) for x in logps.tolist()]
    head = sorted(range(len(q)), key=lambda v: -q[v])[: rule.top]
    tail = [v for v in range(len(q)) if v not in head]
    rho = sum(q[v] for v in tail) / sum(p[v] for v in tail) if tail else 1.0
    guess = [q[v] if v in head else rho * p[v] for v in range(len(q))]
    mean_score = sum(
        g * bounded(own / g, rule.low, rule.high) * logps[v] for v, (g, own) in enumerate(zip(guess, p, strict=True))
    )
    # the tail's probabilities are of the policy, which sums to 1: its mean log-probability has no gradient
    of_tail = bounded(1 / rho, rule.low, rule.high) * rho
    mean_score = mean_score - of_tail * sum(own * logps[v] for v, own in enumerate(p))
    return -a * (bounded(math.exp(drift), rule.low, rule.high) * logps[0] - (0.0 if guided else mean_score))


def regressed(rule, batch: Ragged, logps: Tensor, mates: list[int], t: int, a: float) -> Tensor | None:
    """KLPO as TRL's trainer has it, a token and a word at a time; `mates` are the tokens of the answer."""
    if type(rule).__name__ != "KlRegression":
        return None
    log_q, mu, words = batch.behavior_TV.tolist(), batch.others_3T[1].tolist(), range(5)
    old = batch.others_3T[0].tolist()
    shown = batch.guided_N.repeat_interleave(batch.lengths_N).tolist()
    ell = {u: logps[u, 0].item() - (old[u] if shown[u] else mu[u]) for u in mates}
    draws = batch.draws_TM(rule.draws).tolist()

    def parts(u: int) -> tuple[Tensor, Tensor]:
        """(z of the token route, k with its gradient)."""
        if rule.estimator == "mc":
            own = [logps[u, v] for v in draws[u]]
            return logps[u, 0] - mean(own), mean([log_q[u][v] - logps[u, v] for v in draws[u]])
        if rule.estimator == "binary":
            p = math.exp(logps[u, 0].item())
            q = math.exp(logps[u, 0].item() - ell[u])
            k = -q * ell[u] + (1 - q) * math.log((1 - q) / (1 - p))
            return (1 - q) / (1 - p) * logps[u, 0], torch.tensor(k, dtype=F64)
        head = sorted(words, key=lambda v: -log_q[u][v])[: rule.top]
        q = {v: math.exp(log_q[u][v]) for v in head}
        tail_q, tail_p = max(1 - sum(q.values()), 1e-6), 1 - sum(logps[u, v].exp() for v in head)
        tail_p = tail_p if tail_p.item() > 1e-6 else torch.tensor(1e-6, dtype=F64)
        k = sum(q[v] * (log_q[u][v] - logps[u, v]) for v in head) + tail_q * (math.log(tail_q) - tail_p.log())
        rho = tail_q / tail_p.item()
        return logps[u, 0] - sum((q[v] - rho * math.exp(logps[u, v].item())) * logps[u, v] for v in head), k

    if rule.route == "token":
        return -(a - rule.beta * ell[t]) * parts(t)[0]
    if rule.estimator != "mc":
        residual = a - rule.beta * sum(ell[u] + parts(u)[1].item() for u in mates)
        return -residual * (parts(t)[0] if rule.estimator == "binary" else logps[t, 0] + parts(t)[1])
    columns = range(rule.draws)
    residuals = [
        a - rule.beta * sum(ell[u] + log_q[u][draws[u][j]] - logps[u, draws[u][j]].item() for u in mates)
        for j in columns
    ]
    others = [mean([residuals[i] for i in columns if i != j]) for j in columns]
    return -mean([others[j] * (logps[t, 0] - logps[t, draws[t][j]]) for j in columns])


def apart(rule, log_p: Tensor, log_q: Tensor) -> Tensor:
    """The divergence of two distributions, word by word; the choice of words takes no gradient."""
    at = sorted(range(len(log_p)), key=lambda v: -log_p[v].item())[: rule.top or len(log_p)]
    p, q = [log_p[v].exp() for v in at], [log_q[v].exp() for v in at]
    if rule.top and not rule.tail:
        p, q = [x / sum(p) for x in p], [x / sum(q) for x in q]
    m = [(1 - rule.beta) * x + rule.beta * y for x, y in zip(p, q, strict=True)]
    to_p = sum(x * (x / z).log() for x, z in zip(p, m, strict=True))
    to_q = sum(y * (y / z).log() for y, z in zip(q, m, strict=True))
    if rule.beta in (0, 1):
        return rule.coef * (to_p if rule.beta else to_q)
    return rule.coef * (rule.beta * to_q + (1 - rule.beta) * to_p)


def gated(rule, lp: Tensor, teacher: float) -> Tensor:
    return rule.coef / (1 + math.exp(-rule.beta * (teacher - lp.item()))) * (teacher - lp)


def preferred(rule, batch: Ragged, shaped: list[float]) -> list[float]:
    """DPO, pair by pair: the slope of -log sigmoid(m) on each of the two sums."""
    old, _, ref = batch.others_3T.tolist()
    ends = batch.lengths_N.cumsum(0).tolist()
    moved = [
        sum(old[t] - ref[t] for t in range(end - n, end)) for end, n in zip(ends, batch.lengths_N.tolist(), strict=True)
    ]
    written = [i for i, n in enumerate(batch.lengths_N.tolist()) if n > 0]
    out, pairs = [0.0] * len(shaped), []
    for g in set(batch.group_N.tolist()):
        members = [i for i in written if batch.group_N[i] == g]
        best = [i for i in members if shaped[i] == max(shaped[j] for j in members)]
        worst = [i for i in members if shaped[i] == min(shaped[j] for j in members)]
        if members and shaped[best[0]] > shaped[worst[0]]:
            pairs.append([(w, b) for b in best for w in worst])
    for group in pairs:
        for w, b in group:
            push = (
                rule.beta / (1 + math.exp(rule.beta * (moved[b] - moved[w]))) * len(written) / len(pairs) / len(group)
            )
            out[b] += push
            out[w] -= push
    return out


def rewarded(row: Algorithm, batch: Ragged) -> list[float]:
    rewards, group, lengths = batch.rewards_N.tolist(), batch.group_N.tolist(), batch.lengths_N.tolist()
    rule, name = row.advantage, type(row.advantage).__name__
    mates = [[j for j in range(len(group)) if group[j] == g] for g in group]
    shaped = [shape(row.shaping, rewards[i], lengths[i], [lengths[j] for j in mates[i]]) for i in range(len(group))]
    if name == "TokenBaseline":
        return by_place(batch, shaped)
    if name in ("StepGroups", "TurnGae"):
        return by_turn(rule, name, batch, shaped)
    if name == "Returns":
        flat = [rule.gamma ** (n - 1 - k) * shaped[i] for i, n in enumerate(lengths) for k in range(n)]
        return whiten(flat) if flat else []
    if name == "Gae":
        flat, values = [], iter(batch.values_T.tolist())
        for i, n in enumerate(lengths):
            v = [next(values) for _ in range(n)] + [0.0]
            deltas = [(shaped[i] if k == n - 1 else 0.0) + rule.gamma * v[k + 1] - v[k] for k in range(n)]
            flat += [sum((rule.gamma * rule.lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]
        return whiten(flat) if flat else []
    if name == "WhitenedCenter":
        flat = [shaped[i] - mean([shaped[j] for j in mates[i]]) for i, n in enumerate(lengths) for _ in range(n)]
        return whiten(flat) if flat else []
    if name == "PartsNorm":
        sums = [0.0] * len(group)
        for part, values_N in batch.parts.items():
            values = values_N.tolist()
            for i in (i for i in range(len(group)) if not math.isnan(values[i])):
                peers = [values[j] for j in mates[i] if not math.isnan(values[j])]
                sums[i] += rule.weights.get(part, 1.0) * (values[i] - mean(peers)) / (std(peers) + rule.eps)
        each = whiten(sums) if sums else []
    elif name == "Preference":
        each = preferred(rule, batch, shaped)
    elif name == "Anchored":
        each = [anchored([float(rewards[j] > 0) for j in m], float(rewards[i] > 0)) for i, m in enumerate(mates)]
    elif name == "QuestionValue":
        each = [valued(rule, batch, shaped, rewards, i, m) for i, m in enumerate(mates)]
    elif name == "BatchNorm":
        apart = [shaped[i] - mean([shaped[j] for j in mates[i]]) for i in range(len(group))]
        each = [a / (std(apart if rule.over == "deviations" else shaped) + rule.eps) for a in apart]
    elif name == "Classify":
        each = classified(rule, batch, shaped)
    elif name == "Redistribute":
        each = redistributed(rule, batch, shaped, mates)
    elif name == "PromptNorm":
        each = by_prompt(rule, ["xyz"[g % 3] for g in group], shaped, group)
    elif name == "AgentBaseline":
        each = [r - rule.baselines.get("ab"[g % 2], 0.0) for r, g in zip(shaped, group, strict=True)]
    else:
        each = [one(rule, name, i, shaped, mates[i], lengths, group, mates) for i in range(len(group))]
    return [each[i] for i, n in enumerate(lengths) for _ in range(n)]


def criterion_credit(rule, batch: Ragged, earned: list[float]) -> list[float]:
    """CriPO-S group by group: the active criteria, then each positive answer's chosen tokens."""
    out, group, lengths = list(earned), batch.group_N.tolist(), batch.lengths_N.tolist()
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    for g in set(group):
        members = [i for i in range(len(group)) if group[i] == g]
        credit = {}
        for name in sorted(rule.criteria):
            values = batch.parts[name].tolist()
            credit[name] = {i: values[i] - mean([values[j] for j in members]) for i in members}
        active = [(n, max(c.values())) for n, c in credit.items() if max(c.values()) > 0]
        for name, _ in sorted(active, key=lambda item: item[1], reverse=True)[: rule.most]:
            margins = batch.margins[int(rule.criteria[name])].tolist()
            for i in (i for i in members if credit[name][i] > 0):
                for t in range(starts[i], starts[i] + lengths[i]):
                    likelier = margins[t] >= 0
                    if likelier and -margins[t] < math.log(rule.threshold):
                        out[t] += credit[name][i] * rule.coef
    return out


def anchored(rewards: list[float], own: float, attempts: int = 0, solved: int = 0) -> float:
    """NGU's positive-anchored, zero-sum advantages; without history the group is all there was."""
    positives = sum(rewards)
    negatives = len(rewards) - positives
    if not positives or not negatives:
        return 0.0
    above = 1 - (solved / attempts if attempts else positives / len(rewards))
    return above if own else -above * positives / negatives


def valued(rule, batch: Ragged, shaped: list[float], rewards: list[float], i: int, mates: list[int]) -> float:
    """CoDaPO: confidence, difficulty, and GRPO's advantage."""
    mu, lengths = batch.others_3T[1].tolist(), batch.lengths_N.tolist()
    starts = [sum(lengths[:j]) for j in range(len(lengths))]
    sure = [mean(mu[starts[j] : starts[j] + lengths[j]]) for j in mates if lengths[j]]
    right = batch.parts[rule.part].tolist() if rule.part else rewards
    difficulty = 1 - mean([float(right[j] > rule.above) for j in mates])
    value = (math.exp(mean(sure)) if sure else 1.0) * (1 - 4 * (difficulty - 0.5) ** 2)
    peers = [shaped[j] for j in mates]
    return (value + rule.delta) * (shaped[i] - mean(peers)) / (std(peers) + rule.eps)


def by_prompt(rule, prompts: list[str], shaped: list[float], groups: list[int]) -> list[float]:
    """DDPO as its authors' PerPromptStatTracker has it (ddpo-pytorch): a deque for each prompt, numpy's mean and std.
    A step of more rewards than it holds is kept whole, or the order of its samples would choose.
    """
    out = [0.0] * len(shaped)
    for prompt in set(prompts):
        own = [i for i in range(len(prompts)) if prompts[i] == prompt]
        stats = deque(rule.history.get(prompt, ()), maxlen=max(rule.window, len(own)))
        stats.extend(shaped[i] for i in sorted(own, key=lambda i: groups[i]))
        kept = shaped if len(stats) < rule.least else list(stats)
        for i in own:
            out[i] = bounded((shaped[i] - np.mean(kept)) / (np.std(kept) + rule.eps), -rule.bound, rule.bound)
    return out


def classified(rule, batch: Ragged, shaped: list[float]) -> list[float]:
    """REAL by its derivative: the loss of each group in s, by autograd; times -N, for the weight 1/N of a sample."""
    lengths, ends, group = batch.lengths_N.tolist(), batch.lengths_N.cumsum(0).tolist(), batch.group_N.tolist()
    old, mu, _ = batch.others_3T.tolist()
    score = [
        torch.tensor(mean([old[t] - mu[t] for t in range(end - n, end)]) if n else 0.0, dtype=F64, requires_grad=True)
        for n, end in zip(lengths, ends, strict=True)
    ]
    written = [i for i, n in enumerate(lengths) if n]
    groups, loss = {group[i] for i in written}, torch.zeros((), dtype=F64)
    for g in groups:
        average = mean([shaped[i] for i in range(len(group)) if group[i] == g])
        good = [i for i in written if group[i] == g and shaped[i] > average]
        bad = [i for i in written if group[i] == g and shaped[i] <= average]
        if good and bad:
            loss = loss + (1 + sum((score[i] / rule.tau).exp() for i in bad)).log() / len(groups)
            loss = loss + (1 + sum((-score[i] / rule.tau).exp() for i in good)).log() / len(groups)
    if not loss.requires_grad:
        return [0.0] * len(group)
    pushed = torch.autograd.grad(loss, score, allow_unused=True)
    return [0.0 if push is None else -len(written) * push.item() for push in pushed]


def redistributed(rule, batch: Ragged, shaped: list[float], mates: list[list[int]]) -> list[float]:
    """prime-rl's `redistribute`, group by group, with f from the judge's part."""
    judged, out = batch.parts[rule.part].tolist(), [0.0] * len(shaped)
    for members in {tuple(m) for m in mates}:
        average = mean([shaped[i] for i in members])
        own = {i: shaped[i] - average for i in members}
        f = {i: rule.least + (1 - rule.least) * judged[i] for i in members}
        above = [i for i in members if own[i] > 0]
        if above:
            lam = min(rule.most, sum(own[i] for i in above) / sum(f[i] * own[i] for i in above))
            own |= {i: lam * f[i] * own[i] for i in above}
        shift = mean(list(own.values()))
        for i in members:
            out[i] = own[i] - shift
    return out


def by_place(batch: Ragged, shaped: list[float]) -> list[float]:
    """verl's optimal token baseline, a place at a time: returns are the reward at every token of an answer."""
    lengths, group, flat = batch.lengths_N.tolist(), batch.group_N.tolist(), []
    pi, square = batch.others_3T[0].exp().tolist(), batch.collision_T.tolist()
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    w = [
        [sum(1 - 2 * pi[s + j] + square[s + j] for j in range(t + 1)) for t in range(n)]
        for s, n in zip(starts, lengths, strict=True)
    ]
    for i, n in enumerate(lengths):
        for t in range(n):
            there = [j for j in range(len(group)) if group[j] == group[i] and lengths[j] > t]
            base = sum(w[j][t] * shaped[j] for j in there) / sum(w[j][t] for j in there) if len(there) > 1 else 0.0
            flat.append(shaped[i] - base)
    return flat


def by_turn(rule, name: str, batch: Ragged, shaped: list[float]) -> list[float]:
    """GiGPO, or GAE over turns: turns are lists of tokens; the reward is earned by the last."""
    values, group, number, turns = batch.values_T.tolist(), batch.group_N.tolist(), 0, []
    for i, n in enumerate(batch.lengths_N.tolist()):
        own = [list(range(number + k, number + min(k + 3, n))) for k in range(0, n, 3)]
        turns += [(i, k, tokens, shaped[i] if k == len(own) - 1 else 0.0) for k, tokens in enumerate(own)]
        number += n
    flat = [0.0] * number
    for i, k, tokens, _ in turns:
        later = [(j, values[t[0]], r) for s, j, t, r in turns if s == i and j >= k]
        if name == "TurnGae":
            deltas = [
                r + rule.gamma * (later[d + 1][1] if d + 1 < len(later) else 0.0) - v
                for d, (_, v, r) in enumerate(later)
            ]
            found = sum((rule.gamma * rule.lam) ** d * delta for d, delta in enumerate(deltas))
        else:

            def backed(s: int, from_turn: int) -> float:
                return sum(rule.gamma ** (j - from_turn) * r for o, j, _, r in turns if o == s and j >= from_turn)

            alike = [backed(s, j) for s, j, _, _ in turns if group[s] == group[i] and j % 2 == k % 2]
            whole = [shaped[s] for s in range(len(group)) if group[s] == group[i]]
            found = (shaped[i] - mean(whole)) / (std(whole) + rule.eps)
            found += rule.weight * (backed(i, k) - mean(alike)) / (std(alike) + rule.eps)
        for t in tokens:
            flat[t] = found
    return whiten(flat) if name == "TurnGae" and flat else flat


def one(rule, name, i, shaped, mates, lengths, group, all_mates) -> float:
    peers, r, n = [shaped[j] for j in mates], shaped[i], len(mates)
    others = [shaped[j] for j in mates if j != i]
    if name == "GroupNorm":
        return (r - mean(peers)) / (std(peers) + rule.eps)
    if name == "GroupCenter":
        return r - mean(peers)
    if name == "LeaveOneOut":
        return r - mean(others) if n > 1 else 0.0
    if name == "LengthBaseline":
        words = [lengths[j] for j in mates]
        low = min(peers)  # without a single token the baseline is the lowest reward
        return r - (sum(w * p for w, p in zip(words, peers, strict=True)) / sum(words) if sum(words) else low)
    if name == "Greedy":
        return r - group[i] / 10
    if name == "PassAtK":
        lead = r - max(others) if others and r > max(others) else 0.0
        return lead / (std(peers) + rule.eps) if rule.divide else lead
    if name == "MeanNorm":
        return (r - mean(peers)) / (mean(peers) + rule.eps) if mean(peers) > 0 else 0.0
    if name == "NegativeExp":
        costs = [math.exp(-(p - mean(peers)) / (std(peers) + rule.eps)) for p in peers]
        return mean(costs) - math.exp(-(r - mean(peers)) / (std(peers) + rule.eps))
    if name == "SoftValue":
        return r - rule.beta * math.log(mean([math.exp(p / rule.beta) for p in peers]))
    if name == "SignalCenter":
        telling = sum(len({shaped[j] for j in m}) > 1 for m in all_mates)
        return len(group) / max(1, telling) * (r - mean(peers))
    if name == "Accept":
        return 1.0 if r > rule.above else 0.0
    return r if name == "Raw" else rule.value


def shape(rule, reward: float, length: int, siblings: list[int]) -> float:
    if type(rule).__name__ == "ClipReward":
        return bounded(reward, -rule.limit, rule.limit)
    if type(rule).__name__ == "Overlong":
        longest = min(length, 3)  # of its turns
        return reward - rule.factor * bounded((longest - (rule.max_tokens - rule.buffer)) / rule.buffer, 0, 1)
    if type(rule).__name__ == "KimiLength":
        short, long = min(siblings), max(siblings)
        point = 0.5 - (length - short) / (long - short) if long > short else 0.0
        return reward + rule.factor * (point if reward > rule.above else min(0.0, point))
    return reward


# -- corrections and choices
# ----------------------------------------------------------------------------------------------


def corrections(row: Algorithm, gap: list[float], mates: dict[int, list[int]], advantages: list[float]) -> list[float]:
    rule, name = row.correction, type(row.correction).__name__
    if name == "NoCorrection":
        return [1.0] * len(gap)
    if name == "OffPolicyMask":
        return [0.0 if advantages[t] < 0 and mean([-gap[s] for s in mates[t]]) > rule.delta else 1.0 for t in mates]

    def ratio(t: int, level: str) -> float:
        inside = [gap[s] for s in mates[t]]
        return math.exp(bounded({"token": gap[t], "sequence": sum(inside), "geometric": mean(inside)}[level], -20, 20))

    out = []
    for t in mates:
        w = 1.0 if rule.level == "none" else ratio(t, rule.level)
        w = (
            1.0
            if rule.level == "none"
            else {
                "truncate": min(w, rule.high),
                "clip": bounded(w, rule.low, rule.high),
                "mask": w if rule.low <= w <= rule.high else 0.0,
            }[rule.action]
        )
        if rule.reject != "none" and not rule.reject_low <= ratio(t, rule.reject) <= rule.reject_high:
            w = 0.0
        if any(gap[s] < math.log(rule.veto) for s in mates[t] if rule.veto):
            w = 0.0
        out.append(w)
    if rule.normalize != "none" and any(out):
        share = [1.0 if rule.normalize == "token" else 1 / len(mates[t]) for t in mates]
        scale = sum(s * w for s, w in zip(share, out, strict=True)) / sum(share)
        out = [w / scale for w in out]
    return out


def kl_of_two(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def kpop(rule, old, mu, a, gaps, age):
    p, q = math.exp(old), math.exp(mu)
    return p / q if max(kl_of_two(p, q), kl_of_two(q, p)) <= rule.phi else 0.0


def vaco(rule, old, mu, a, gaps, age):
    variation = mean([abs(math.exp(g) - 1) for g in gaps]) / 2
    return 0.0 if variation > rule.delta and a * (old - mu) > 0 else 1.0


def fresh(rule, old, mu, a, gaps, age):
    return 0.0 if rule.oldest is not None and age > rule.oldest else 0.5 ** (age / rule.half_life)


def least_likely(rule, old: list[float], entropy: list[float]) -> list[float]:
    """OPSA as its authors write it: a stable order, then A_max + (A_min - A_max)·rank, here without the sign."""
    chosen = sorted(range(len(old)), key=old.__getitem__)[: max(1, math.floor(rule.share * len(old)))]
    nats = [entropy[t] for t in chosen]
    spread = max(nats) - min(nats)
    rank = {t: (entropy[t] - min(nats)) / spread if spread > 1e-12 else 1.0 for t in chosen}
    return [-(-rule.least + (-rule.most + rule.least) * rank[t]) if t in rank else 0.0 for t in range(len(old))]


MASKS = {"BinaryKlMask": kpop, "VariationMask": vaco, "Freshness": fresh}


def counts_at_all(row: Algorithm, weight: float, gaps: list[float], own: float) -> bool:
    """Does the token count in the denominators, and pay for its distance?"""
    rule = row.correction
    how = getattr(rule, "denominator", "all")
    if how != "accepted":
        return how == "all" or weight != 0
    found = {"none": 0.0, "token": own, "sequence": sum(gaps), "geometric": mean(gaps)}[rule.reject]
    vetoed = bool(rule.veto) and min(gaps) < math.log(rule.veto)
    return not vetoed and (
        rule.reject == "none" or rule.reject_low <= math.exp(bounded(found, -20, 20)) <= rule.reject_high
    )


def largest(values: list[float], share: float, whole=math.ceil) -> list[bool]:
    bar = sorted(values, reverse=True)[max(1, whole(share * len(values))) - 1] if values else 0.0
    return [v >= bar for v in values]


def selected(
    row: Algorithm, advantages: list[float], old: list[float], mu: list[float], entropy: list[float]
) -> list[bool]:
    rule, name, t = row.surrogate, type(row.surrogate).__name__, len(old)
    if not t:
        return []
    cov = [(a - mean(advantages)) * (o - mean(old)) for a, o in zip(advantages, old, strict=True)]
    if name == "ClipCov":
        inside = sorted((s for s in range(t) if rule.least < cov[s] < rule.most), key=cov.__getitem__)
        count = min(max(1, int(rule.share * t)), len(inside))
        taken = {inside[int((k + 0.5) * len(inside) / count)] for k in range(count)}
        return [s in taken for s in range(t)]
    if name == "KlCov":
        return largest(cov, rule.share, math.floor)
    if name == "Forking":
        return largest(entropy, rule.top)
    if name == "SecondMoment":
        order = sorted(range(t), key=lambda s: (old[s] - mu[s]) ** 2)
        while order and mean([(old[s] - mu[s]) ** 2 for s in order]) > rule.threshold:
            order.pop()
        return [s in order for s in range(t)]
    return [False] * t


def bonus_acts(row: Algorithm, entropy: list[float]) -> list[bool]:
    rule = row.entropy
    if not entropy or (rule.target is not None and not mean(entropy) < rule.target):
        return [False] * len(entropy)
    return largest(entropy, rule.top) if rule.top < 1 else [True] * len(entropy)


# -- one token
# --------------------------------------------------------------------------------------------------------------


def row_ratio(row: Algorithm, x: list[Tensor], mates: list[int], t: int) -> Tensor:
    name = type(row.ratio).__name__
    if name == "TokenRatio":
        return x[t]
    whole = sum(x[s] for s in mates) / len(mates)
    return whole if name == "SequenceRatio" else whole.detach() + x[t] - x[t].detach()


def clip(rule, *, x, a, **_):
    r, low, high = x.exp(), 1 - rule.low, 1 + rule.high
    held = r if low <= r.item() <= high else torch.tensor(low if r.item() < low else high, dtype=F64)
    loss = max(-r * a, -held * a, key=Tensor.item)
    if rule.dual is not None and a < 0 and loss.item() > -rule.dual * a:
        loss = torch.tensor(-rule.dual * a, dtype=F64)
    return loss


def gate(rule, *, x, a, **_):
    tau = rule.positive if a > 0 else rule.negative
    return -4 / tau / (1 + (-tau * (x.exp() - 1)).exp()) * a


def geometric(rule, *, xs, a, **_):
    held = [torch.tensor(rule.high, dtype=F64) if a > 0 and v.item() > rule.high else v for v in xs]
    held = [torch.tensor(-rule.low, dtype=F64) if a < 0 and v.item() < -rule.low else v for v in held]
    return -a * (sum(held) / len(held)).exp()


def divergence(rule, *, lp, x, a, **_):
    p, q = math.exp(lp.item()), math.exp(lp.item() - x.item())
    apart = abs(p - q) if rule.divergence == "tv" else q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    left = (a > 0 and x > 0 and apart > rule.high) or (a < 0 and x < 0 and apart > rule.low)
    if rule.cap is not None and x.exp() > rule.cap:
        return 0.0 if left else -rule.cap * a * (1 + lp - lp.detach())
    return 0.0 if left else -x.exp() * a


def tapered(rule, *, lp, a, score, drift, drifts, **_):
    u = math.exp(sum(drifts) if rule.level == "trajectory" else drift)
    return -(1.0 if score > rule.above else min(u, 1.0)) * a * lp


def gamma_weight(rule, *, lp, a, drifts, **_):
    w = math.exp(bounded(sum(drifts), math.log(1e-8), 20))
    k, lam = (rule.k_pos, rule.lambda_pos) if a >= 0 else (rule.k_neg, rule.lambda_neg)
    return -math.exp(lam) * w**k * math.exp(-lam * w) * a * lp


def drpo(rule, *, lp, x, a, **_):
    q = math.exp(lp.item() - x.item())
    return -(x.exp() * a - abs(a) / (2 * rule.delta) * q * (x.exp() - 1) ** 2)


def future_kl(rule, *, a, x, xs, at, **rest):
    gamma = 2 ** (-1 / rule.half_life)
    moved = [v.item() if rule.dual is None or v.exp() <= rule.dual else 0.0 for v in xs]
    f = bounded(math.exp(sum(gamma ** (k - at) * moved[k] for k in range(at, len(xs)))), rule.least, rule.most)
    if rule.safe is not None and a < 0 and x.exp() > rule.safe:
        f = bounded(f, 0.8, 1.0)
    return f * clip(rule, x=x, a=a)


SURROGATES = {
    "GammaWeight": gamma_weight,
    "DivergencePenalty": drpo,
    "UnboundedPositive": lambda rule, *, lp, a, **rest: -a * lp if a > 0 else clip(rule, a=a, **rest),
    "FutureKl": future_kl,
    "SquaredGap": lambda rule, *, xs, a, **_: (rule.beta * sum(xs) - a) ** 2 / len(xs),
    "Clip": clip,
    "PolicyGradient": lambda rule, *, lp, a, **_: -a * lp,
    "LogLikelihood": lambda rule, *, lp, **_: -lp,
    "WholeLikelihood": lambda rule, *, lp, **_: -lp,
    "ClippedWeight": lambda rule, *, lp, x, a, **_: -bounded(math.exp(x.item()), 1 - rule.low, 1 + rule.high) * a * lp,
    "SoftGate": gate,
    "GeometricMean": geometric,
    "DivergenceMask": divergence,
    "MirrorDescent": lambda rule, *, lp, x, xs, a, **_: (
        -a * lp + rule.tau / 2 * x * (sum(xs) if rule.level == "sequence" else x)
    ),
    "ClipCov": lambda rule, *, chosen, **rest: 0.0 if chosen else clip(rule, **rest),
    "KlCov": lambda rule, *, x, a, chosen, **_: -x.exp() * a + (rule.coef * x.abs() if chosen else 0.0),
    "Forking": lambda rule, *, chosen, **rest: clip(rule, **rest) if chosen else 0.0,
    "Tapered": tapered,
    "CappedWeight": lambda rule, *, lp, a, drift, **_: -min(math.exp(drift), rule.cap) * a * lp,
    "SecondMoment": lambda rule, *, lp, a, drift, chosen, **_: -(drift + lp - lp.detach()).exp() * a if chosen else 0.0,
    "Guided": lambda rule, *, lp, a, guided, **rest: (
        -lp.exp() / (lp.exp() + rule.gamma) * a if guided else clip(rule, a=a, **rest)
    ),
}


def penalty(rule, lp: Tensor, ref: float, mu: float) -> Tensor:
    x = lp - ref
    value = {"k1": x, "k2": x * x / 2, "k3": (-x).exp() - 1 + x}[rule.kind]
    if rule.clamp is not None and abs(value.item()) > rule.clamp:
        value = torch.tensor(math.copysign(rule.clamp, value.item()), dtype=F64)
    if rule.through == "k2":
        value = value.detach() + x * x / 2 - (x * x / 2).detach()
    return (lp - mu).exp() * value if rule.unbiased else value


def per_token(row: Algorithm, counts: list[int], i: int, group: list[int]) -> float:
    counted = sum(n > 0 for n in counts)
    name = type(row.aggregate).__name__
    if not counts[i]:
        return 0.0
    return (
        1
        / {
            "TokenMean": sum(counts),
            "SeqMeanTokenMean": counted * counts[i],
            "SeqMeanTokenSum": counted,
            "PromptMean": len({g for g, n in zip(group, counts, strict=True) if n})
            * sum(n for g, n in zip(group, counts, strict=True) if g == group[i]),
            "FixedNorm": counted * getattr(row.aggregate, "length", 1),
        }[name]
    )


# -- verl's losses, once more
# -----------------------------------------------------------------------------------------------

ROOT, CORR = "actor_rollout_ref.actor", "algorithm.rollout_correction"
VERL = {  # a config beside adv_estimator = grpo
    "rejects tokens": {f"{CORR}.rollout_rs": "token_k1", f"{CORR}.rollout_rs_threshold": "0.8_1.3"},
    "rejects answers": {f"{CORR}.rollout_rs": "seq_mean_k1", f"{CORR}.rollout_rs_threshold": 1.12},
    "icepop": {f"{CORR}.rollout_is": "token", f"{CORR}.rollout_is_threshold": "0.8_1.3"},
    "icepop, rejects": {
        **{f"{CORR}.rollout_is": "token", f"{CORR}.rollout_is_threshold": "0.8_1.3"},
        **{f"{CORR}.rollout_rs": "seq_mean_k1", f"{CORR}.rollout_rs_threshold": "0.85_1.1"},
    },
    "sapo": {f"{ROOT}.policy_loss.loss_mode": "sapo"},
    "geo_mean": {f"{ROOT}.policy_loss.loss_mode": "geo_mean", f"{ROOT}.clip_ratio_high": 0.3},
    "dppo_tv": {f"{ROOT}.policy_loss.loss_mode": "dppo_tv", f"{ROOT}.clip_ratio_low": 0.05, f"{ROOT}.clip_ratio_high": 0.1, f"{ROOT}.clip_ratio_c": 1.2},
    "dppo_kl": {f"{ROOT}.policy_loss.loss_mode": "dppo_kl", f"{ROOT}.clip_ratio_low": 0.01, f"{ROOT}.clip_ratio_high": 0.02},
    "k3": {},
}  # fmt: skip
for _name in ("rejects tokens", "rejects answers", "icepop, rejects", "k3"):
    VERL[_name] |= {f"{ROOT}.use_kl_loss": True, f"{ROOT}.kl_loss_coef": 0.1, f"{ROOT}.entropy_coeff": 0.05}


def far_reference(batch: Ragged) -> Ragged:
    """Some tokens lie so far from the reference that k3 is above 10; nobody is a
    demonstration, of which the peers know nothing.
    """
    old, mu, ref = batch.others_3T
    return replace(batch, others_3T=torch.stack([old, mu, ref + 1.5]), guided_N=torch.zeros_like(batch.guided_N))


def of_verl(given: dict, batch: Ragged, advantages: list[float], how: str = "token-mean") -> Tensor:
    """The gradient on the logits; loss_mode, rejection and weights as verl/trainer/ppo has them."""
    leaf = batch.logits_TV.clone().requires_grad_()
    logps = leaf.log_softmax(-1)
    logp, entropy = list(logps[:, 0]), list(-(logps.exp() * logps).sum(-1))
    old, mu, ref = batch.others_3T.tolist()
    owner = [i for i, n in enumerate(batch.lengths_N.tolist()) for _ in range(n)]
    answers = [[t for t in range(len(owner)) if owner[t] == i] for i in range(len(batch.lengths_N))]
    mode = given.get(f"{ROOT}.policy_loss.loss_mode", "vanilla")
    low, high, cap = (
        given.get(f"{ROOT}.clip_ratio_low", 0.2),
        given.get(f"{ROOT}.clip_ratio_high", 0.2),
        given.get(f"{ROOT}.clip_ratio_c", 3.0),
    )

    def two(spec) -> tuple[float, float]:
        first, _, last = str(spec).partition("_")
        return (float(first), float(last)) if last else (1 / float(first), float(first))

    keep, weight = [True] * len(owner), [1.0] * len(owner)
    if reject := given.get(f"{CORR}.rollout_rs"):
        least, most = two(given[f"{CORR}.rollout_rs_threshold"])
        for t in range(len(owner)):
            inside = [mu[s] - old[s] for s in ([t] if reject == "token_k1" else answers[owner[t]])]
            keep[t] = least <= math.exp(mean(inside)) <= most
    if given.get(f"{CORR}.rollout_is"):
        least, most = two(given[f"{CORR}.rollout_is_threshold"])
        weight = [w if least <= w <= most else 0.0 for w in (math.exp(o - m) for o, m in zip(old, mu, strict=True))]

    def added(values: list, mode: str) -> Tensor:
        if mode == "token-mean":
            return sum(v for v, k in zip(values, keep, strict=True) if k) / sum(keep)
        means = [mean([values[t] for t in own if keep[t]]) for own in answers if any(keep[t] for t in own)]
        return sum(means) / len(means)

    losses = []
    for t, a in enumerate(advantages):
        r, p, q = (logp[t] - old[t]).exp(), math.exp(logp[t].item()), math.exp(old[t])
        if mode == "sapo":
            tau = 1.0 if a > 0 else 1.05
            loss = -a * 4 / tau * torch.sigmoid(tau * (r - 1))
        elif mode == "geo_mean":
            x = [logp[s] - old[s] for s in answers[owner[t]]]
            x = [min(v, torch.tensor(high, dtype=F64)) if a > 0 else max(v, torch.tensor(-low, dtype=F64)) for v in x]
            loss = -a * mean(x).exp()
        elif mode in ("dppo_tv", "dppo_kl"):
            apart = abs(p - q) if mode == "dppo_tv" else q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
            left = apart > high and p > q if a > 0 else apart > low and p < q
            loss = -a * min(r.item(), cap) * logp[t] * (not left)
        else:
            held = bounded(r.item(), 1 - low, 1 + high)
            loss = -a * r if -a * r.item() >= -a * held else torch.tensor(-a * held, dtype=F64)
            loss = torch.tensor(-a * cap, dtype=F64) if a < 0 and loss.item() > -a * cap else loss
        losses.append(weight[t] * loss)
    total = added(losses, "seq-mean-token-mean" if mode in ("sapo", "geo_mean") else how)
    if given.get(f"{ROOT}.use_kl_loss"):
        kl = [(r - p).exp() - (r - p) - 1 for p, r in zip(logp, ref, strict=True)]
        kl = [k if k.item() < 10 else torch.tensor(10.0, dtype=F64) for k in kl]
        total = total + given[f"{ROOT}.kl_loss_coef"] * added(kl, how)
    total = total - given.get(f"{ROOT}.entropy_coeff", 0.0) * added(entropy, how)
    return torch.autograd.grad(total, leaf)[0]
