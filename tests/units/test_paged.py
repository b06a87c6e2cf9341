"""models/paged_attention.py and models/cuda_graphs.py, the serving path of a GPU: Triton's interpreter computes what
the layout of models/paged_layout.py does, a whole engine on it draws the same tokens, and a
recorded step reads nothing but its inputs. On a
GPU the same tests run on the card."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from kits.engine import ask, engine, idle, plain_logprobs, prompt, tiny
from kits.families import FAMILIES
from kits.host_waits import BlockingUploads
from kits.sweeps import covering
from rondel.core.errors import ConfigError
from rondel.generate.engine.builtin import runner
from rondel.generate.engine.builtin.draft import DraftModel
from rondel.generate.engine.builtin.speculative import SpeculativeDecoder
from rondel.models.cuda_graphs import DecodeGraphs, sizes_upto
from rondel.models.dense_attention import ScoreRule
from rondel.models.loaded_model import LoadedModel
from rondel.models.paged_layout import DecodeBatch, PagedLayout, PrefillChunk
from rondel.models.recorded_graph import CudaGraph

pytest.importorskip("triton", reason="pip install triton")
from rondel.models import paged_attention
from rondel.models.paged_attention import LaunchBatch, TokenRun

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Pool:
    def __init__(self, tensor):
        self.tensor, self.data_pointers = tensor, [tensor.data_ptr()]

    def layer_pool(self, layer, like):
        return self.tensor


def laid(lengths: list[int], pages: int = 160) -> torch.Tensor:
    """A table whose lines name pages in no order."""
    order, at = torch.randperm(pages - 1) + 1, 0
    table = torch.zeros(len(lengths), max(lengths) + 9, dtype=torch.int32)
    for line, n in enumerate(lengths):
        table[line, :n] = order[at : at + n].int()
        at += n
    return table.to(DEVICE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "heads, shared, size, wide, how",
    [
        pytest.param(4, 2, 16, 16, {}, marks=pytest.mark.sweep),  # as with a rule, and in the engines below
        pytest.param(6, 2, 20, 12, {"window": 5}, marks=pytest.mark.sweep),
        pytest.param(3, 1, 24, 24, {"softcap": 3.0}, marks=pytest.mark.sweep),
        (4, 2, 20, 12, {"window": 66, "softcap": 2.0, "sinks": True}),
        (2, 2, 16, 16, {"chunk": 7, "sinks": True}),
        (3, 1, 24, 24, {"chunk": 64, "slopes": True}),
    ],
)
def test_the_kernel_computes_what_the_layouts_do(heads, shared, size, wide, how):
    """Contexts of 1 to 70 keys in blocks of 64 and 8 splits: some splits are empty, and under a window most are."""
    torch.manual_seed(0)
    lengths = [70, 33, 1, 50]
    by_head = {name: torch.rand(heads, device=DEVICE) for name in ("sinks", "slopes") if name in how}
    table, rule = laid(lengths), ScoreRule(0.3, **{**how, **by_head})
    keys, values = torch.randn(shared, 160, size, device=DEVICE), torch.randn(shared, 160, wide, device=DEVICE)

    q = torch.randn(4, heads, size, device=DEVICE)
    feeds = LaunchBatch.from_runs(table, [TokenRun(i, i, 1, n) for i, n in enumerate(lengths)])
    wanted = DecodeBatch(table[:, :70].long(), torch.tensor(lengths, device=DEVICE)).attend(q, keys, values, rule)
    assert feeds.splits > 1
    torch.testing.assert_close(feeds.attend(q, keys, values, rule), wanted, atol=2e-6, rtol=1e-5)

    # one of two tiles for two heads of a key head and more, a part, a whole prompt
    fed = [TokenRun(0, 0, 34, 70), TokenRun(1, 34, 5, 33), TokenRun(2, 39, 1, 1), TokenRun(3, 40, 9, 50)]
    q = torch.randn(49, heads, size, device=DEVICE)
    plain = PagedLayout(
        Pool(keys),
        Pool(values),
        torch.zeros(0, dtype=torch.int64),
        [PrefillChunk(f.row, f.new, table[f.line, : f.context].long()) for f in fed],
    )
    context = [[chunk.slots.read(pool)[None] for pool in (keys, values)] for chunk in plain.chunks]
    wanted = [c.attend(q[c.start : c.start + c.length], *kv, rule) for c, kv in zip(plain.chunks, context)]
    torch.testing.assert_close(
        LaunchBatch.from_runs(table, fed).attend(q, keys, values, rule), torch.cat(wanted), atol=2e-6, rtol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "heads"),  # 24 are more than one group
    covering(product([{}, {"window": 9, "sinks": True}], [4, 24]), [({}, 4), ({"window": 9, "sinks": True}, 24)]),
)
def test_values_that_are_part_of_their_keys_are_read_with_them(heads, how):
    """Latents: 20 numbers that are key and value, and 6 of the key alone, one for all heads."""
    torch.manual_seed(0)
    lengths = [70, 33]
    rule = ScoreRule(0.3, **({**how, "sinks": torch.rand(heads, device=DEVICE)} if "sinks" in how else how))
    table, pool = laid(lengths), torch.randn(1, 160, 26, device=DEVICE)
    q = torch.randn(2, heads, 26, device=DEVICE)
    feeds = LaunchBatch.from_runs(table, [TokenRun(i, i, 1, n) for i, n in enumerate(lengths)])
    batch = DecodeBatch(table[:, :70].long(), torch.tensor(lengths, device=DEVICE))
    wanted = batch.attend(q, pool, pool[..., :20].contiguous(), rule)
    torch.testing.assert_close(batch.attend(q, pool, pool[..., :20], rule), wanted, atol=2e-6, rtol=1e-5)
    groups = pool.expand(paged_attention._head_groups(heads), -1, -1)
    torch.testing.assert_close(feeds.attend(q, groups, groups[..., :20], rule), wanted, atol=2e-6, rtol=1e-5)


@pytest.mark.slow
def test_a_row_has_the_same_bits_in_every_batch():
    torch.manual_seed(1)
    lengths = [70, 33, 12]
    table, keys, values, q = (
        laid(lengths),
        *(torch.randn(1, 160, 16, device=DEVICE) for _ in range(2)),
        torch.randn(3, 2, 16, device=DEVICE),
    )
    rule = ScoreRule(0.3)
    together = LaunchBatch.from_runs(table, [TokenRun(i, i, 1, n) for i, n in enumerate(lengths)]).attend(
        q, keys, values, rule
    )
    for i, n in enumerate(lengths):
        assert torch.equal(
            LaunchBatch.from_runs(table, [TokenRun(i, 0, 1, n)]).attend(q[i : i + 1], keys, values, rule)[0],
            together[i],
        )


@pytest.fixture
def on_gpu(monkeypatch):
    """The engine takes the paged kernel, wherever it is; in two splits, because every
    program takes an interpreter milliseconds.
    """
    monkeypatch.setattr(paged_attention, "SPLITS", 2)
    monkeypatch.setattr(runner, "has_kernel", lambda loaded: not loaded.aligned)


# a program for each key head and each query head takes an interpreter milliseconds
FEW_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
ONE_LAYER = FAMILIES["llama"] | FEW_HEADS | {"num_hidden_layers": 1}


def on_card(kind: str, **config) -> LoadedModel:
    """The same weights as those of `tiny` without a card."""
    loaded = tiny(kind, **(config or FAMILIES[kind]))
    loaded.model.to(DEVICE)
    return loaded


def answers(e, requests):
    async def main():
        return await asyncio.gather(*(e.generate(r) for r in requests))

    return asyncio.run(main())


REQUESTS = [ask(prompt(g, 4 + 8 * g), key=10 * g + s, n=2 + 2 * s) for g in range(3) for s in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", covering(["llama", "gemma2", "youtu", "deepseek_v3"], ["gemma2"]))
def test_an_engine_on_the_kernel_draws_what_the_other_one_draws(on_gpu, kind):
    """Siblings, prefix hits, prompts in chunks, a batch that shrinks to one, pages that are used again."""
    config = FAMILIES[kind] | (FEW_HEADS if kind == "gemma2" else {})
    loaded = tiny(kind, **config)
    e = engine(on_card(kind, **config), prefill_tokens=16, kv_pages=64)
    assert e.runner.lines is not None
    for request, got in zip(REQUESTS, answers(e, REQUESTS), strict=True):
        wanted = plain_logprobs(loaded, [*request.tokens, *got.tokens])[-len(got.tokens) :]
        assert max(abs(a - b) for a, b in zip(got.logprobs, wanted, strict=True)) < 1e-4
    idle(e)


@pytest.mark.slow
def test_guesses_are_rows_of_a_feed(on_gpu):
    """A draft with pools of its own reads the same lines."""
    loaded = tiny("llama", **ONE_LAYER)
    draft = DraftModel(on_card("llama", **ONE_LAYER))
    e = engine(on_card("llama", **ONE_LAYER), speculation=SpeculativeDecoder(4, draft, always=True))
    requests = [ask(prompt(0, 12), key=3, n=9), ask(prompt(1, 9), key=4, n=6)]
    for request, got in zip(requests, answers(e, requests), strict=True):
        wanted = plain_logprobs(loaded, [*request.tokens, *got.tokens])[-len(got.tokens) :]
        assert max(abs(a - b) for a, b in zip(got.logprobs, wanted, strict=True)) < 1e-4
    assert e.speculation.accepted > 5


class Again:
    """A recording for machines without CUDA: the same work over the same inputs."""

    made = 0

    def __init__(self, work):
        self.work = work
        Again.made += 1

    def replay(self):
        return self.work()


@pytest.mark.slow
@pytest.mark.parametrize("kind", covering(["llama", "youtu"], ["llama"]))
def test_a_recorded_step_reads_only_its_inputs_and_notices_what_has_moved(on_gpu, kind):
    config = ONE_LAYER if kind == "llama" else FAMILIES[kind] | {"num_hidden_layers": 1}
    loaded, card = tiny(kind, **config), on_card(kind, **config)
    Again.made = 0
    graphs = DecodeGraphs(card, 4, **({} if DEVICE == "cuda" else {"record": Again}))
    e = engine(card, compiled=graphs, max_running=4)
    requests = [ask(prompt(g, 4), key=g, n=2 + g) for g in range(3)]
    for round_, asked in enumerate((requests, requests[:1])):
        for request, got in zip(asked, answers(e, asked), strict=True):
            wanted = plain_logprobs(loaded, [*request.tokens, *got.tokens])[-len(got.tokens) :]
            assert max(abs(a - b) for a, b in zip(got.logprobs, wanted, strict=True)) < 1e-4
        with torch.no_grad():  # other weights in the same tensors
            noise = torch.Generator().manual_seed(round_)
            for p, on in zip(loaded.model.parameters(), card.model.parameters(), strict=True):
                change = torch.randn(p.shape, generator=noise) * 0.05
                p.add_(change)
                on.add_(change.to(DEVICE))
        e.scheduler.drop_cache(e.version)
    assert sorted(graphs.recorded) == [1, 2, 4]

    kept = dict(graphs.recorded)
    answers(e, requests[:1])
    assert graphs.recorded == kept, "nothing moved, so nothing is recorded again"
    weight = card.model.model.layers[0].mlp.down_proj.weight
    weight.data = weight.data.clone()
    answers(e, [ask(prompt(5, 4), n=2)])
    assert not any(recording in graphs.recorded.values() for recording in kept.values())


@pytest.mark.slow
def test_a_step_that_begins_ahead_uploads_nothing_that_the_host_waits_for(on_gpu):
    """A recorded one, whose tokens come from the device."""
    loaded, card, uploads = tiny("llama", **ONE_LAYER), on_card("llama", **ONE_LAYER), []
    graphs = DecodeGraphs(card, 2, **({} if DEVICE == "cuda" else {"record": Again}))
    e = engine(card, compiled=graphs, max_running=2, decode_ahead=True)
    launch = e.runner._launch

    def watched(plan, after=None):
        with BlockingUploads() as found:
            out = launch(plan, after)
        if after is not None:
            uploads.append(found.found)
        return out

    e.runner._launch = watched
    requests = [ask(prompt(g, 4), key=g, n=5, temperature=0.9 * g) for g in range(2)]
    for request, got in zip(requests, answers(e, requests), strict=True):
        wanted = plain_logprobs(loaded, [*request.tokens, *got.tokens], temperature=request.sampling.temperature or 1)
        assert max(abs(a - b) for a, b in zip(got.logprobs, wanted[-len(got.tokens) :], strict=True)) < 1e-4
    assert uploads == [[]] * e.serving.ahead.steps and len(uploads) == 3
    idle(e)


@contextmanager
def captured(*_, **__):
    yield


def test_a_recording_keeps_its_work_and_a_pool_lasts_as_long_as_its_graphs(monkeypatch):
    """A card that only counts pools. Memory that only the work holds is read at every replay."""
    pools, stream = itertools.count(), SimpleNamespace(wait_stream=lambda other: None)
    for name, fake in {
        "graph_pool_handle": lambda: next(pools),
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "stream": captured,
        "graph": captured,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    assert not CudaGraph.alive
    read_only_there = torch.ones(1)
    held = weakref.ref(read_only_there)
    first = CudaGraph(lambda inside=read_only_there: inside)
    del read_only_there
    second = CudaGraph(lambda: torch.zeros(1))
    assert held() is not None and CudaGraph.pool == 0
    del first
    third = CudaGraph(lambda: torch.zeros(1))
    assert held() is None and CudaGraph.pool == 0
    del second, third
    last = CudaGraph(lambda: torch.zeros(1))
    assert CudaGraph.pool == 1 and [*CudaGraph.alive] == [last]


@pytest.mark.slow
def test_a_graph_that_computes_something_else_is_refused(on_gpu):
    class Wrong(Again):
        def replay(self):
            return super().replay() * 1.5

    e = engine(card := on_card("llama", **ONE_LAYER), compiled=DecodeGraphs(card, 4, record=Wrong))
    with pytest.raises(ConfigError, match=r"differs by .*engine\.compile = false"):
        answers(e, REQUESTS[:1])


@pytest.mark.slow
def test_what_cannot_be_recorded_is_refused_by_name(on_gpu):
    with pytest.raises(ConfigError, match="mixture of experts"):
        DecodeGraphs(tiny("mixtral"), 4)

    def fails(work):
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(
        ConfigError, match=r"cannot be recorded as a CUDA graph: operation not permitted.*engine\.compile = false"
    ):
        answers(
            engine(card := on_card("llama", **ONE_LAYER), compiled=DecodeGraphs(card, 4, record=fails)), REQUESTS[:1]
        )


@pytest.mark.parametrize("most, last", [(1, 1), (3, 4), (64, 64), (65, 80), (257, 288), (600, 608)])
def test_sizes(most, last):
    sizes = sizes_upto(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == last and (len(sizes) < 2 or sizes[-2] < most)
