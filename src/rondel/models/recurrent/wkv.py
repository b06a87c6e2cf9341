"""RWKV-4 (arXiv:2305.13048): an average of values that fades, and each token mixed with the one before it.

    wkv_t = (a_{t-1} + e^{u + k_t} v_t) / (b_{t-1} + e^{u + k_t})      a_t = e^{-w} a_{t-1} + e^{k_t} v_t,  b_t alike
    x'_t  = m x_t + (1 - m) x_{t-1}                                    w > 0 and u: constants of a channel

Both sums are kept over a common e^{top}, so that none overflows: state (a, b, top) [3, A] in fp32,
and empty where b = 0.

B rows · L tokens · A channels
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rondel.models.recurrent.layout import RecurrentLayout

NONE = -1e38  # the logarithm of nothing


@dataclass(frozen=True, slots=True)
class FadingAverage:
    """fade -w and bonus u [A]; inputs k and v [B, L, A], fp32."""

    fade: Tensor
    bonus: Tensor
    name: str = "average"

    @property
    def state_shape(self) -> tuple[int, ...]:
        return 3, len(self.fade)

    @property
    def state_dtype(self) -> torch.dtype:
        return torch.float32

    def __call__(self, state: Tensor, inputs: Sequence[Tensor], lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        out = []
        for t, (k, v) in enumerate(zip(*(x.unbind(1) for x in inputs), strict=True)):
            a, b, top = state.unbind(1)
            top = torch.where(b > 0, top, NONE)
            a_now, b_now, _ = _joined(a, b, top, k + self.bonus, v)
            out.append(a_now / b_now)
            after = torch.stack(_joined(a, b, top + self.fade, k, v), 1)
            state = after if lengths is None else torch.where((t < lengths)[:, None, None], after, state)
        return torch.stack(out, 1), state


def _joined(a: Tensor, b: Tensor, top: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """e^top (a, b) + e^k (v, 1), over the larger exponent, which is the third."""
    higher = torch.maximum(top, k)
    old, new = (top - higher).exp(), (k - higher).exp()
    return old * a + new * v, old * b + new, higher


@dataclass(frozen=True, slots=True)
class PreviousToken:
    """x_{t-1} of inputs x [B, L, D], zero before the first; state [B, D]."""

    width: int
    dtype: torch.dtype
    name: str

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.width,)

    @property
    def state_dtype(self) -> torch.dtype:
        return self.dtype

    def __call__(self, state: Tensor, inputs: Sequence[Tensor], lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        (x,) = inputs
        seen = torch.cat([state[:, None].to(x.dtype), x], 1)
        after = seen[:, -1] if lengths is None else seen[torch.arange(len(x), device=x.device), lengths]
        return seen[:, :-1], after


def keep_unscaled(model: Any) -> None:
    """transformers halves RWKV's weights every few layers once it serves, against overflow in fp16: in place, so that
    they would be trained and saved halved.
    """
    if model.config.model_type == "rwkv":
        model.config.rescale_every = 0


def forward_wkv(mixer: Any, states: RecurrentLayout, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
    """hidden [1, T, D] -> [1, T, D] and None: RWKV's attention."""
    x, before = hidden[0], _previous(mixer, states, hidden[0], "attention")
    k, v, r = (
        side(_mixed(x, before, weight))
        for side, weight in (
            (mixer.key, mixer.time_mix_key),
            (mixer.value, mixer.time_mix_value),
            (mixer.receptance, mixer.time_mix_receptance),
        )
    )
    rule = FadingAverage(-mixer.time_decay.float().exp(), mixer.time_first.float())
    y = states.scan(mixer.layer_idx, rule, k.float(), v.float()).to(hidden.dtype)
    return mixer.output(r.sigmoid() * y)[None], None


def forward_channel_mix(mixer: Any, states: RecurrentLayout, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
    """hidden [1, T, D] -> [1, T, D] and None: RWKV's feed-forward part."""
    x, before = hidden[0], _previous(mixer, states, hidden[0], "feed_forward")
    inside = mixer.key(_mixed(x, before, mixer.time_mix_key)).relu().square()
    gate = mixer.receptance(_mixed(x, before, mixer.time_mix_receptance)).sigmoid()
    return (gate * mixer.value(inside))[None], None


def _previous(mixer: Any, states: RecurrentLayout, x: Tensor, name: str) -> Tensor:
    return states.scan(mixer.layer_idx, PreviousToken(x.shape[-1], x.dtype, name), x)


def _mixed(x: Tensor, before: Tensor, weight: Tensor) -> Tensor:
    return x * weight[0] + before * (1 - weight[0])
