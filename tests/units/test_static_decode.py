"""Decode steps of fixed shapes: the tokens and log-probabilities of ordinary ones, and one graph for each shape."""

from __future__ import annotations

import asyncio

import pytest
import torch
from torch._logging._internal import trace_log

from kits.engine import SIZE, all_of, ask, engine, idle, prompt, tiny
from rondel.core.errors import ConfigError
from rondel.models.static_decode import StaticDecode, StaticDecodeStep, pools_of

SMALL = SIZE | {"num_hidden_layers": 1}


@pytest.fixture(autouse=True)
def no_trace(monkeypatch):
    """torch writes all that it traces to a log that pytest would keep: ten times the time."""
    monkeypatch.setattr(trace_log, "handlers", [])


class Watched(StaticDecode):
    """Remembers what a step was given, and where its buffers lay."""

    def __init__(self, loaded, most):
        super().__init__(loaded, most)
        self.steps, self.addresses = [], {}

    def _fill(self, shape, *given):
        room = super()._fill(shape, *given)
        self.steps.append(shape)
        addresses = [x.data_ptr() for x in room.values()]
        assert self.addresses.setdefault(shape, addresses) == addresses
        return room

    def hidden_states(self, tokens, positions, layout):
        self.layout = layout
        return super().hidden_states(tokens, positions, layout)


def requests():
    """Siblings, a lone one, and lengths that let the batch shrink while contexts grow over 64 tokens."""
    asked = [(g, s) for g in range(2) for s in range(3)]
    return [ask(prompt(g, 20 + 30 * g), key=10 * g + s, n=4 + 6 * s) for g, s in asked]


@pytest.mark.slow
def test_tokens_are_those_of_ordinary_steps_and_each_shape_is_traced_once():
    loaded = tiny("llama", **SMALL)
    plain = asyncio.run(all_of(engine(loaded), requests()))
    static = Watched(loaded, 8)
    for _ in range(2):
        e = engine(loaded, compiled=static, max_running=8)
        found = asyncio.run(all_of(e, requests()))
        idle(e)
        for ours, theirs in zip(found, plain, strict=True):
            assert ours.tokens == theirs.tokens
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
    assert len(static.steps) > 12 and static.graphs.keys() == set(static.steps)
    assert len(static.graphs) <= 4 and all(rows in (1, 2, 4, 8) and width in (64, 128) for rows, width in static.graphs)


@pytest.mark.slow
def test_a_step_can_be_exported():
    """torch.export accepts it: no branch, no shape and nothing on the host depends on a number."""
    loaded = tiny("llama", **SMALL)
    static = Watched(loaded, 8)
    asyncio.run(all_of(engine(loaded, compiled=static, max_running=8), requests()[:1]))
    given, pools = next(iter(static.buffers.values())), [p.clone() for p in pools_of(static.layout)]
    with torch.no_grad():
        program = torch.export.export(StaticDecodeStep(loaded), (dict(given), pools), strict=False).module()
        ours, theirs = (f(given, [p.clone() for p in pools]) for f in (program, StaticDecodeStep(loaded)))
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_what_has_no_fixed_shapes_is_refused():
    with pytest.raises(ConfigError, match="mixture of experts"):
        StaticDecode(tiny("mixtral"), 4)
