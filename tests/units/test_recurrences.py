"""Each recurrence over many tokens is its definition token by token, however its states are cut and padded."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from kits.engine import prompt
from kits.families import FAMILIES
from rondel.models.load import load_model
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.models.recurrent.convolved_qkv import ConvolutionPair
from rondel.models.recurrent.gated_delta import GatedDelta
from rondel.models.recurrent.mamba import SelectiveScan
from rondel.models.recurrent.mamba2 import Mamba2Scan
from rondel.models.recurrent.mlstm import FadingMaximum
from rondel.models.recurrent.rg_lru import LinearRecurrence, _bounded_sqrt
from rondel.models.recurrent.window_compression import WindowCompression
from rondel.models.recurrent.wkv import FadingAverage, PreviousToken

B, L, H, K, V = 2, 37, 4, 6, 5


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def delta(channels, steep=1.0):
    """(rule, inputs): keys of unit length, decays down to e^-`steep` and far beyond."""
    q, k = (draw(seed, B, L, H, K) for seed in (1, 2))
    k = k / k.norm(dim=-1, keepdim=True)
    return GatedDelta(H, K, V), [
        q, k, draw(3, B, L, H, V), -steep * draw(4, B, L, H, channels).abs(), draw(5, B, L, H).sigmoid(),
    ]  # fmt: skip


def windows(width):
    rule = WindowCompression(draw(1, 5, width), K, torch.float32)
    return rule, [draw(2, B, L, width), draw(3, B, L, width), torch.arange(L).expand(B, -1)]


@pytest.mark.parametrize("width", [K, 2 * K])
def test_a_window_is_the_weighted_sum_of_its_definition(width):
    rule, (kv, gate, _) = windows(width)
    out, _ = rule(start(rule), [kv, gate, torch.arange(L).expand(B, -1)], None)
    for t in range(L):
        own = slice(t - 4, t + 1)
        if (t + 1) % 5:
            assert not out[:, t].any()
            continue
        values, logits = kv[:, own, -K:], gate[:, own, -K:] + rule.bias[:, -K:]
        if width > K and t > 4:
            before = slice(t - 9, t - 4)
            values = torch.cat([kv[:, before, :K], values], 1)
            logits = torch.cat([gate[:, before, :K] + rule.bias[:, :K], logits], 1)
        assert torch.allclose(out[:, t], (values * logits.softmax(1)).sum(1), atol=1e-6)


RULES = {
    "gated delta": lambda: delta(1),
    "gated delta by channel": lambda: delta(K),
    "gated delta by channel, forgetting all": lambda: delta(K, 200.0),
    "Mamba-2": lambda: (
        Mamba2Scan(H, K, V),
        [draw(1, B, L, H, K), -draw(2, B, L, H).abs(), draw(3, B, L, 2, V), draw(4, B, L, 2, V)],
    ),
    "Mamba": lambda: (
        SelectiveScan(-draw(1, H, V).abs()),
        [draw(2, B, L, H), draw(3, B, L, H).abs(), draw(4, B, L, V), draw(5, B, L, V)],
    ),
    "linear recurrence": lambda: (LinearRecurrence(H), [-draw(1, B, L, H).abs(), draw(2, B, L, H)]),
    "fading average": lambda: (
        FadingAverage(-draw(1, H).exp(), draw(2, H)),
        [40 * draw(3, B, L, H), draw(4, B, L, H)],
    ),
    "previous token": lambda: (PreviousToken(H, torch.float32, "x"), [draw(1, B, L, H)]),
    "windows": lambda: windows(K),
    "overlapping windows": lambda: windows(2 * K),
    "fading maximum": lambda: (FadingMaximum(H), [-draw(1, B, L, H).abs(), 3 * draw(2, B, L, H)]),
    "two convolutions": lambda: (
        ConvolutionPair(nn.Conv1d(8, 8, 3, groups=8), nn.Conv1d(8, 8, 2, groups=2)),
        [draw(1, B, L, 8)],
    ),
}


def start(rule):
    return torch.zeros(B, *rule.state_shape, dtype=rule.state_dtype)


@pytest.mark.parametrize("name", RULES)
def test_many_tokens_at_once_are_one_after_the_other(name):
    """Values and gradients; and a state in the middle is as good as the tokens before it."""
    rule, inputs = RULES[name]()
    whole, after = rule(start(rule), inputs, None)
    state, outs = start(rule), []
    for t in range(L):
        out, state = rule(state, [x[:, t : t + 1] for x in inputs], None)
        outs.append(out)
    single = torch.cat(outs, 1)
    first, middle = rule(start(rule), [x[:, :20] for x in inputs], None)
    rest, end = rule(middle, [x[:, 20:] for x in inputs], None)
    leaves = [x for x in inputs if x.requires_grad]
    weight = draw(9, *whole.shape).detach()
    grads = [torch.autograd.grad((x * weight).sum(), leaves) for x in (whole, single, torch.cat([first, rest], 1))]
    for other in (single, torch.cat([first, rest], 1)):
        assert torch.allclose(whole, other, atol=1e-5, rtol=1e-5)
    for other in (state, end):
        assert torch.allclose(after, other, atol=1e-5, rtol=1e-5)
    for a, b, c in zip(*grads, strict=True):
        assert a.isfinite().all() and torch.allclose(a, b, atol=1e-4, rtol=1e-4)
        assert torch.allclose(a, c, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", RULES)
@torch.no_grad()
def test_padding_leaves_a_state_as_it_is(name):
    rule, inputs = RULES[name]()
    lengths = torch.tensor([L, 11])
    real = torch.arange(L) < lengths[:, None]
    padded = [x * real.view(B, L, *[1] * (x.ndim - 2)) for x in inputs]
    out, after = rule(start(rule), padded, lengths)
    short, end = rule(start(rule)[1:], [x[1:, :11] for x in inputs], None)
    assert torch.allclose(out[1:, :11], short, atol=1e-6) and torch.allclose(after[1:], end, atol=1e-6)


def test_the_square_root_of_nothing_has_a_bounded_gradient():
    x = torch.tensor([0.0, 1e-12, 0.25], requires_grad=True)
    y = _bounded_sqrt(x)
    y.sum().backward()
    assert torch.allclose(y, x.sqrt()) and torch.allclose(x.grad, torch.tensor([1000.0, 1000.0, 1.0]))


@pytest.mark.slow
def test_rwkv_is_not_halved_where_it_serves():
    """transformers divides weights in place at the first pass that does not train; here they stay what was loaded, and
    both sides compute what it computes where it trains.
    """
    sizes = FAMILIES["rwkv"] | {"num_hidden_layers": 3}
    loaded, given = load_model({"random": "rwkv", **sizes}, dtype="float32"), torch.tensor(prompt(3, 20))
    theirs = type(loaded.model)(copy.deepcopy(loaded.model.config)).eval()
    theirs.load_state_dict(loaded.model.state_dict())
    theirs.config.rescale_every = 1
    layout = PackedLayout([PackedSegment(0, 20)])
    ours = loaded.head.logits(loaded.hidden_states(given, torch.arange(20), layout))
    serving = theirs(given[None], use_cache=False).logits[0]
    weights = [m.rwkv.blocks[2].attention.output.weight for m in (loaded.model, theirs)]
    assert torch.equal(weights[0], 4 * weights[1])
    training = theirs.train()(given[None], use_cache=False).logits[0]
    assert float((ours - training).detach().abs().max()) <= 1e-5
    # a norm's eps counts for more beside halved numbers
    assert float((ours - serving).detach().abs().max()) <= 1e-3


@torch.no_grad()
def test_rows_of_xlstm_are_not_cut():
    """transformers serves rows above a length in parts, and the states between them would be those of no segment."""
    loaded = load_model({"random": "xlstm", **FAMILIES["xlstm"], "max_inference_chunksize": 8}, dtype="float32")
    rows = [torch.tensor(prompt(3, 11)), torch.tensor(prompt(4, 14))]
    apart = [loaded.hidden_states(r, torch.arange(len(r)), PackedLayout([PackedSegment(0, len(r))])) for r in rows]
    layout = PackedLayout([PackedSegment(0, 11), PackedSegment(11, 14)])
    both = loaded.hidden_states(torch.cat(rows), torch.cat([torch.arange(11), torch.arange(14)]), layout)
    assert torch.allclose(both, torch.cat(apart), atol=1e-5)
