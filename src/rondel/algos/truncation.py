"""Where to cut importance weights off: the bound whose estimate has the least mean squared error on
the weights at hand."""

from __future__ import annotations

from typing import NamedTuple

from rondel.algos.tensors import Tensor, torch


class Bound(NamedTuple):
    """`high`, and the two parts of its error: bias² and variance of the mean of min(w, high)."""

    high: float
    bias_squared: float
    variance: float


def least_error_bound(weight_N: Tensor, share_N: Tensor) -> Bound:
    """The C ≥ 1 that minimises  (E (w - C)₊)² + Var(min(w, C)) / n  among 1 and the weights themselves.

    weight_N  importance weights of one update, proximal / behavior [N]
    share_N   of how many independent draws each is: 1 for a token, 1 / length for one of a sample's equal weights [N]

    n = sum of share. The first term is the squared bias of the truncated mean as an estimate of E w, the second its
    variance; a quantity of unit size beside the weight has at most these. A fixed bound of sqrt(n) has the same rate
    (Ionides 2008, Truncated Importance Sampling) and reads no weights. O(N log N), in float64. Variances are sums of
    squared distances to running means (Welford 1962): a difference of squares loses those of large weights.
    """
    if not len(weight_N):
        return Bound(1.0, 0.0, 0.0)
    order = weight_N.argsort()
    weight_N, share_N = weight_N[order].double(), share_N[order].double()
    below_N, n = share_N.cumsum(0), share_N.sum().clamp(min=1.0)
    first_N = (share_N * weight_N).cumsum(0)
    mean_N = first_N / below_N
    before_N = torch.cat([weight_N[:1], mean_N[:-1]])
    spread_N = (share_N * (weight_N - before_N) * (weight_N - mean_N)).cumsum(0)
    bounds = torch.cat([torch.ones_like(weight_N[:1]), weight_N.clamp(min=1.0)])
    index = torch.searchsorted(weight_N, bounds, right=True)

    def up_to(sums_N: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(sums_N[:1]), sums_N])[index]

    below, whole = up_to(below_N), up_to(mean_N)
    above = n - below
    mean = (up_to(first_N) + above * bounds) / n
    bias_squared = (first_N[-1] / n - mean) ** 2
    variance = (up_to(spread_N) + below * above / n * (bounds - whole) ** 2).clamp(min=0.0) / n**2
    best = int((bias_squared + variance).argmin())
    return Bound(float(bounds[best]), float(bias_squared[best]), float(variance[best]))
