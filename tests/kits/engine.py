"""Tiny random models, an engine that runs inline, and the plain forward pass that judges both."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace

import torch

from rondel.core.types import Begin, Commit, Group, Request, Route, Sampling, Score, Task, Trajectory, sample_key
from rondel.generate.engine.builtin.engine import BuiltinEngine
from rondel.models import names
from rondel.models.head import LMHead
from rondel.models.load import load_model
from rondel.models.loaded_model import LoadedModel

torch.set_num_threads(1)

SIZE = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
)
LLAMA = {"random": "llama", **SIZE, "seed": 3}


def tiny(kind: str = "llama", **config) -> LoadedModel:
    """Random weights, larger than initialised, so that attention looks somewhere and
    distributions are far from uniform. A llama has SIZE where it is not told otherwise; another family, whose keys may be
    others, all of its sizes or none.
    """
    sizes = SIZE | config if kind == "llama" else config or SIZE
    loaded = load_model({"random": kind, "seed": 3, **sizes}, dtype="float32")
    with torch.no_grad():
        for name, p in loaded.model.named_parameters():
            if p.dim() > 1:
                p.mul_(8 if any(end in name for end in ("embed", "wte", "wpe", "lm_head")) else 3)
            elif name.endswith("sinks"):
                p.copy_(torch.linspace(-1, 3, len(p)))
            if name.endswith(("position_bias", "qk_norm.temp", "ple.conv1d.weight")):  # zeros at first
                p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p))
            elif name.endswith(
                ("igate_preact.weight", "fgate_preact.weight")
            ):  # zeros, too, and biases of -10 and 3 to 6
                p.copy_(torch.linspace(-0.1, 0.1, p.numel()).view_as(p))
            elif name.endswith(
                ("igate_preact.bias", "fgate_preact.bias")
            ):  # larger, transformers is off by 1e-4 in fp32
                p.copy_(torch.linspace(3, 5, len(p)) * (-1 if "igate" in name else 0.5))
    return loaded


def twin(loaded: LoadedModel) -> LoadedModel:
    """The same weights in other memory."""
    model = copy.deepcopy(loaded.model)
    return replace(loaded, model=model, head=LMHead.from_model(model))


async def inline(f, *args):
    await asyncio.sleep(0)  # others get a turn while the device works, as with a thread
    return f(*args)


async def publish_in_place(e: BuiltinEngine, version: int) -> None:
    """A hand-over of the weights that the engine's own module holds, as the trainer of the same process does it."""
    manifest = names.build_manifest(e.loaded.model, version)
    await e.receive(Begin(manifest))
    await e.receive(Route("tensor", dict(names.named_weights(e.loaded.model))))
    await e.receive(Commit(version, manifest.root))


def engine(loaded: LoadedModel, **settings) -> BuiltinEngine:
    return BuiltinEngine(
        loaded, **{"run": inline, "kv_pages": 4096, "max_running": 16, "prefill_tokens": 256, **settings}
    )


def ask(tokens: list[int], *, key: int | None = None, n: int = 16, **sampling) -> Request:
    key = sample_key(0, sum(tokens), len(tokens)) if key is None else key
    return Request(list(tokens), Sampling(**{"max_tokens": n, "ignore_eos": True, **sampling}), key=key)


def prompt(seed: int, n: int, vocab: int = 100) -> list[int]:
    return torch.randint(5, vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


async def all_of(e: BuiltinEngine, requests: list[Request]):
    return await asyncio.gather(*(e.generate(r) for r in requests))


def drawn_groups(
    loaded: LoadedModel, wants: set[str] | None = None, *, temperature: float = 0.7, **sampling
) -> list[Group]:
    """Four answers of five tokens to each of three prompts, with what the engine tells of every draw; a third is right."""
    asked = [
        replace(
            ask([5 + i, 11, 23], key=64 * i + s, n=5, temperature=temperature, **sampling),
            wants=frozenset({*(wants or ()), "support"}),
        )
        for i in range(3)
        for s in range(4)
    ]
    groups = [Group(i, Task(f"t{i}", "fake", {}), [], 0) for i in range(3)]
    for n, (request, done) in enumerate(zip(asked, asyncio.run(all_of(engine(loaded, max_running=16), asked)))):
        t = Trajectory()
        t.extend(list(request.tokens))
        t.extend(
            done.tokens,
            logprobs=done.logprobs,
            versions=done.versions,
            support=done.support,
            behavior_top=done.behavior_top,
        )
        t.score = Score(float(n % 3 == 0))
        groups[n // 4].trajectories.append(t)
    return groups


@torch.no_grad()
def plain_logits(loaded: LoadedModel, tokens: list[int]) -> torch.Tensor:
    """transformers' own eager attention, one sequence, no cache. [T, V]"""
    attention = loaded.model.config._attn_implementation
    loaded.model.set_attn_implementation("eager")
    try:
        return loaded.model(torch.tensor([tokens]), use_cache=False).logits[0].double()
    finally:
        loaded.model.set_attn_implementation(attention)


def plain_logprobs(loaded: LoadedModel, tokens: list[int], *, temperature: float = 1.0) -> list[float]:
    """log p(token t | tokens before) for t >= 1."""
    logp = (plain_logits(loaded, tokens)[:-1] / temperature).log_softmax(-1)
    return logp.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()


def idle(e: BuiltinEngine) -> None:
    """Nothing runs, nothing waits, nothing is locked, every page is free or cached."""
    assert not e.scheduler.running and not e.scheduler.waiting and not e.serving.gone
    trees = [cache.tree for cache in e.scheduler.caches]
    assert all(tree.held == 0 and all(n.locks == 0 for n in tree.iter_nodes()) for tree in trees)
    assert all(c.pages.free_count + c.tree.cached == e.pages.count for c in e.scheduler.caches)
    same_pages(e, [p for tree in trees for n in tree.iter_nodes() for p in n.pages])


def same_pages(e: BuiltinEngine, taken: list[int]) -> None:
    """These are in use, and all others free."""
    free = [p for cache in e.scheduler.caches for p in cache.pages.free]
    total = e.scheduler.caches.page_counts["total"]
    assert sorted(taken + free) == list(range(1, total + 1)), "a page is lost or twice somewhere"


def watched(e: BuiltinEngine) -> BuiltinEngine:
    """Law 7 after every step, before anything is delivered, on the pages themselves; no guess is in the tree."""
    computed = e.scheduler.mark_computed

    def after(plan):
        computed(plan)
        e.scheduler.check_invariants()
        s = e.scheduler
        private = [p for live in s.running for p in [*live.pages[live.shared :], *live.ahead]]
        cached = [p for cache in s.caches for node in cache.tree.iter_nodes() for p in node.pages]
        same_pages(e, private + cached)
        for owner, cache in enumerate(s.caches):
            assert cache.tree.held == sum(len(n.pages) for n in cache.tree.iter_nodes() if n.locks)
            own = range(owner * e.pages.count + 1, (owner + 1) * e.pages.count + 1)
            assert all(p in own for live in s.running if live.owner == owner for p in live.pages)
        assert all(len(live.guess) in (0, len(live.ahead)) for live in s.running)
        assert all(live.written + len(live.guess) < live.request.sampling.max_tokens for live in s.running)

    e.scheduler.mark_computed = after
    return e
