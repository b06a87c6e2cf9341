"""What the sampler should draw, written out, and a test of whether it does."""

from __future__ import annotations

import math

import numpy as np

from rondel.generate.engine.builtin.sampler import sample_tokens, sampling_weights


def draw(logits, samplings, noise):
    return sample_tokens(sampling_weights(logits, samplings), samplings, noise)


def reference(logits, s):
    """Straight from the definitions, in double precision: temperature, top-k, top-p, min-p, then normalise."""
    p = (logits.double() / s.temperature).softmax(-1).numpy().copy()
    if s.top_k:
        p[p < np.sort(p)[-s.top_k]] = 0
    if s.top_p < 1:
        order = np.argsort(-p, kind="stable")
        before = np.concatenate([[0], np.cumsum(p[order])[:-1]])
        p[order[before >= s.top_p * p.sum()]] = 0
    if s.min_p:
        p[p < s.min_p * p.max()] = 0
    return p / p.sum()


def chi_square(counts, p):
    """p-value of a chi-square test; cells that expect fewer than 5 are pooled. Wilson-Hilferty for the tail."""
    expected = p * counts.sum()
    assert counts[expected == 0].sum() == 0
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    x, k = ((observed - expected) ** 2 / expected).sum(), len(expected) - 1
    return 0.5 * math.erfc(((x / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k)) / math.sqrt(2))
