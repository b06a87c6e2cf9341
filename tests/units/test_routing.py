"""Routing replay: the trainer sends every token to the experts that the
engine chose, each record exactly once.
"""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from kits.engine import SIZE, all_of, ask, engine, idle, prompt, tiny
from kits.routing import MOES, forward, group_of, own_routes
from kits.sweeps import covering
from rondel.core.errors import LawError, ModelError, TrainError, UserError
from rondel.models.head import LMHead
from rondel.models.load import load_model
from rondel.models.loaded_model import LoadedModel
from rondel.models.routing_tape import RoutingTape
from rondel.train import annotate
from rondel.train.pack import batch_of, micro_batches
from rondel.train.step_metrics import StepMetricSums


@cache
def model(kind: str) -> LoadedModel:
    return tiny(kind, **MOES[kind])


def rollout(loaded: LoadedModel, n: int = 6, **settings):
    """A group of n answers to one prompt."""
    given = prompt(3, 21)
    e = engine(loaded, routes=True, **settings)
    requests = [replace(ask(given, key=i, n=12), wants=frozenset({"experts"})) for i in range(n)]
    outs = asyncio.run(all_of(e, requests))
    idle(e)
    return e, given, outs


WAYS = {
    "plain": {},
    "chunked": {"prefill_tokens": 16},
    "retracted": {"kv_pages": 60},
    "two at a time": {"max_running": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how"),
    covering(
        product(MOES, WAYS),
        [("deepseek_v3", "chunked"), ("mixtral", "retracted"), ("qwen3_moe", "two at a time"), ("mixtral", "plain")],
    ),
)
def test_every_token_that_was_computed_has_its_route(kind, how):
    """Through shared prompts, chunks and retraction: the rows are those of a plain forward pass
    over the whole stream.
    """
    loaded = model(kind)
    e, given, outs = rollout(loaded, **WAYS[how])
    assert e.scheduler.reused > 0 and (e.scheduler.retracted > 0 or how != "retracted")
    for out in outs:
        stream = given + out.tokens
        assert out.experts.shape == (len(stream) - 1, loaded.routers, 2)
        assert (np.sort(out.experts, -1) == own_routes(loaded, stream)[:-1]).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rounding"),
    covering(
        product(MOES, [torch.float8_e4m3fn, torch.bfloat16]),
        [("deepseek_v3", torch.bfloat16), ("mixtral", torch.float8_e4m3fn), ("qwen3_moe", torch.float8_e4m3fn)],
    ),
)
def test_replay_closes_the_gap_that_a_rounded_router_opens(kind, rounding):
    """The trainer's routers are rounded, as by another kernel or precision: tokens flip to
    other experts unless their routes are replayed.
    """
    loaded = model(kind)
    _, given, outs = rollout(loaded, n=32)
    other = copy.deepcopy(loaded.model)
    with torch.no_grad():
        for name, p in other.named_parameters():
            if name.endswith("gate.weight"):
                p.copy_(p.to(rounding).float())
    rounded = replace(loaded, model=other, head=LMHead.from_model(other))
    batch = batch_of([group_of(given, outs)])
    gaps, flips, sums = {}, 0.0, StepMetricSums()
    for replay in (False, True):
        gap = []
        with torch.no_grad():
            for packed in micro_batches(batch, 10_000):
                tape = annotate.replay_tape(rounded, packed) if replay else None
                logprobs, _ = annotate.forward(rounded, packed, temperature=1.0, tape=tape)
                gap.append((logprobs - batch.tokens(packed.samples).behavior).abs())
                if tape:
                    flips = float(torch.cat(tape.flips).mean())
                    sums.add_routing_flips(tape.flips, tape.margins)
        gaps[replay] = float(torch.cat(gap).max())
    assert flips > 0 and gaps[True] * 10 <= gaps[False], (flips, gaps)
    told = sums.to_metrics(1)  # who chose otherwise stood nearer to the edge
    assert told["train/route_margin_flipped_p50"] < told["train/route_margin_p50"]
    assert told["train/route_margin_flipped_max"] < told["train/route_margin_max"]


@pytest.mark.parametrize("kind", MOES)
def test_the_margin_is_that_of_the_scores_between_which_the_router_chose(kind):
    loaded, tokens = model(kind), prompt(5, 40)
    tape, scores = RoutingTape(loaded.routers), []
    with torch.no_grad(), Scores(scores):
        forward(loaded, tokens, tape)
        again = RoutingTape(loaded.routers, tape.recorded_routes)
        del scores[:]
        forward(loaded, tokens, again)
    for margins_T, scores_TE in zip(again.margins, scores, strict=True):
        ordered = scores_TE.sort(-1, descending=True).values
        assert torch.equal(margins_T, ordered[:, 1] - ordered[:, 2]) and bool((margins_T >= 0).all())


class Scores(TorchFunctionMode):
    """What every topk of a router, two of many, was given."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.topk, torch.Tensor.topk) and out[1].ndim == 2 and out[1].shape[-1] == 2:
            self.seen.append(args[0].flatten(0, -2))
        return out


@pytest.mark.parametrize("kind", MOES)
def test_replaying_its_own_routes_changes_nothing(kind):
    """Not the output, not a gradient: the model's own scores of the recorded experts pass its own normalisation."""
    loaded, tokens = model(kind), prompt(5, 40)
    tape = RoutingTape(loaded.routers)
    with torch.no_grad():
        plain = forward(loaded, tokens, tape)
    gradients = []
    for routes in (None, tape.recorded_routes):
        loaded.model.zero_grad()
        out = forward(loaded, tokens, None if routes is None else RoutingTape(loaded.routers, routes))
        assert torch.equal(out, plain)
        out.pow(2).sum().backward()
        gradients.append({n: p.grad.clone() for n, p in loaded.model.named_parameters() if p.grad is not None})
    gates = [n for n in gradients[1] if n.endswith("gate.weight")]
    assert len(gates) == loaded.routers and all(gradients[1][n].abs().max() > 0 for n in gates)
    assert all(torch.equal(g, gradients[1][n]) for n, g in gradients[0].items())
    loaded.model.zero_grad()


def test_every_record_is_used_exactly_once():
    loaded, tokens = model("mixtral"), prompt(5, 9)
    routes = torch.zeros(9, loaded.routers, 2, dtype=torch.int64)
    with pytest.raises(LawError, match="9 tokens, the record 8"):
        forward(loaded, tokens, RoutingTape(loaded.routers, routes[:8]))
    with pytest.raises(LawError, match="exactly once"):
        tape = RoutingTape(loaded.routers, routes)
        forward(loaded, tokens, tape)
        forward(loaded, tokens, tape)
    with pytest.raises(LawError, match="router 2 of 3 left no record"):
        forward(loaded, tokens, RoutingTape(3, torch.zeros(9, 3, 2, dtype=torch.int64)))


@pytest.mark.parametrize("recorded", [None, 5])
def test_a_token_without_a_route_stops_the_step(recorded):
    loaded = model("mixtral")
    _, given, outs = rollout(loaded, n=2)
    for i, out in enumerate(outs):
        out.experts = None if recorded is None else out.experts[: recorded + i]
    batch = batch_of([group_of(given, outs)])
    with pytest.raises(TrainError, match=r"Completion\.experts"):
        annotate.annotate_logprobs(loaded, batch, "proximal", budget=1000, temperature=1.0, replay=True)


def test_who_cannot_record_says_so():
    dense = tiny()
    with pytest.raises(UserError, match="this model is dense"):
        asyncio.run(engine(dense).generate(replace(ask([5, 6]), wants=frozenset({"experts"}))))
    with pytest.raises(UserError, match="routes=True"):
        asyncio.run(engine(model("mixtral")).generate(replace(ask([5, 6]), wants=frozenset({"experts"}))))
    with pytest.raises(ModelError, match="no router of the kind"):
        from rondel.models import routing_tape

        strange = load_model({"random": "llama", **SIZE}, dtype="float32").model
        strange.config.num_experts = 4
        routing_tape.install_routing_tape(strange)
