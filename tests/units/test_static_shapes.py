"""Training passes of fixed shapes: what they compute is what ragged ones do, and nothing of them depends on a number."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._logging._internal import trace_log

from kits.runs import tiny
from kits.train import apart, awkward_groups, batch, forked_group, gradient, model, row, step, trainer
from rondel.assemble.static_shapes import refuse_static_shapes, with_static_shapes
from rondel.core.errors import ConfigError, TrainError
from rondel.core.events import Warned, subscribe
from rondel.core.types import Sampling
from rondel.models.dense_attention import ScoreRule
from rondel.models.static_layout import StaticLayout
from rondel.runtime.telemetry.card import count_shapes, shapes_text
from rondel.train.annotate import forward
from rondel.train.joint_graph import GraphRun, traced
from rondel.train.pack import batch_of, micro_batches, pack_samples
from rondel.train.shape_buckets import ShapeBucket, ShapeBuckets, buckets_upto
from rondel.train.static_batch import StaticShapes, pad_packed
from rondel.train.static_passes import StaticLoss
from rondel.train.step import token_loss

SHAPES = ((32, 32), (64, 64))
FULL = row("grpo", kl={"coef": 0.1}, entropy={"coef": 0.02})


@pytest.fixture(autouse=True)
def no_trace(monkeypatch):
    """torch writes all that it traces to a log that pytest would keep: ten times the time."""
    monkeypatch.setattr(trace_log, "handlers", [])


def static_trainer(kind="llama", algo=FULL, *, graphs=False, shapes=SHAPES, **how):
    t = trainer(model(kind), algo, micro_tokens=shapes[-1][0], shapes=shapes, **how)
    if graphs:
        t.static._make = traced(lambda graph, inputs: graph)  # the graph itself, operation by operation
    return t


@pytest.mark.parametrize("rule", [ScoreRule(1.0), ScoreRule(1.0, window=5), ScoreRule(1.0, chunk=4)])
def test_two_numbers_a_token_say_who_sees_whom(rule):
    """Against a walk from each segment to the root."""
    b = batch_of([forked_group(), *awkward_groups()])
    packed = pack_samples(b, list(range(len(b.samples))))
    total = len(packed.tokens) + 3
    seen = torch.eye(total, dtype=torch.bool)
    at = packed.positions.tolist()
    for s in packed.layout.segments:
        above, up = [], s.parent
        while up is not None:
            parent = packed.layout.segments[up]
            above, up = [*range(parent.start, parent.start + parent.length), *above], parent.parent
        for i in range(s.start, s.start + s.length):
            for j in [*above, *range(s.start, i + 1)]:
                near = rule.window is None or at[i] - at[j] < rule.window
                seen[i, j] = near and (rule.chunk is None or at[i] // rule.chunk == at[j] // rule.chunk)
    layout = StaticLayout.from_segments(packed.layout.segments).padded(total)
    assert torch.equal(layout.at[: total - 3], packed.positions)
    assert torch.equal(layout.attention_mask(rule), seen)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "algo"), [("llama", FULL), ("gemma3_text", row("gspo"))], ids=["llama, grpo", "gemma3, gspo"]
)
def test_padding_changes_no_gradient(kind, algo):
    whole = gradient(trainer(model(kind), algo), batch(awkward_groups(), algo), algo)
    t = static_trainer(kind, algo)
    assert apart(gradient(t, batch(awkward_groups(), algo), algo, micro_tokens=40), whole) <= 1e-6
    told = t.static.take_metrics()
    assert told["train/shapes"] == 2 and told["train/padding_share"] > 0.1


@pytest.mark.slow
def test_padding_enters_no_figure():
    plain = step(trainer(model(), FULL, micro_tokens=40), batch(awkward_groups(), FULL), FULL).metrics
    static = step(static_trainer(lr=1e-3), batch(awkward_groups(), FULL), FULL).metrics
    counts = ("train/tokens", "train/packed_tokens")
    assert [static[name] for name in counts[:1]] == [plain[name] for name in counts[:1]]
    cut = ShapeBuckets(SHAPES, grows=False)
    packs = micro_batches(batch(awkward_groups(), FULL), 64, shapes=StaticShapes(cut))
    assert static["train/packed_tokens"] == sum(packed.real for packed in packs)
    for name in plain.keys() - {*counts, *(n for n in plain if n.endswith("_s"))}:
        assert static[name] == pytest.approx(plain[name], rel=1e-5, abs=1e-6), name
    assert static.keys() - plain.keys() == {
        "train/shapes",
        "train/padding_share",
        "train/shape_32x32",
        "train/shape_64x64",
    }


def test_more_padding_gives_the_same_bits():
    """Of one layout in rows of several lengths: what is masked adds zeros."""
    loaded, b = model(), batch_of(awkward_groups())
    packed = pack_samples(b, [0, 1, 2], lay_out=StaticLayout.from_segments)
    with torch.no_grad():
        found = [
            forward(loaded, pad_packed(packed, ShapeBucket(t, m)), temperature=1.0)[0]
            for t, m in ((len(packed.tokens), len(packed.target)), (64, 48), (96, 80))
        ]
    assert len(found[0]) == len(found[1]) == len(packed.target)
    assert torch.equal(found[1], found[0]) and torch.equal(found[2], found[0])


@pytest.mark.slow
def test_there_are_as_many_graphs_as_shapes_and_they_compute_the_same():
    """A graph is made of tensors without numbers, so one that was made depends on none."""
    t = static_trainer("shallow", graphs=True)
    whole = gradient(trainer(model("shallow"), FULL), batch(awkward_groups(), FULL), FULL)
    for seed in (0, 0, 1):
        b = batch(awkward_groups(seed), FULL)
        found = gradient(t, b, FULL, micro_tokens=40)
        if seed == 0:
            assert apart(found, whole) <= 1e-6
    assert t.static.graph_count == len(t.static.buckets.buckets) == 2
    told = t.static.take_metrics()
    assert told["train/compiled_graphs"] == 2 and told["train/shapes"] == 2


class Recording:
    """What a CUDA graph does, on a CPU: the pass again, over the tensors of its recording, into the same outputs."""

    made = 0

    def __init__(self, work, change=0.0):
        Recording.made += 1
        self.work, self.out, self.change = work, work(), change

    def replay(self):
        for room, found in zip(self.out, self.work(), strict=True):
            room.copy_(found + self.change)
        return self.out


def recorded_trainer(record=Recording):
    t = static_trainer("shallow")
    t.static._make = lambda joint, tensors: GraphRun(joint, tensors, record)
    return t


@pytest.mark.slow
def test_recorded_passes_are_those_that_were_not_recorded():
    """One recording a shape, of new numbers in the same buffers; and another where weights have moved."""
    Recording.made, t = 0, recorded_trainer()
    for seed in (0, 1, 0):
        b = batch(awkward_groups(seed), FULL)
        whole = gradient(trainer(model("shallow"), FULL), b, FULL)
        assert apart(gradient(t, b, FULL, micro_tokens=40), whole) <= 1e-6
    assert Recording.made == len(t.static.buckets.buckets) == 2
    for p in t.loaded.model.parameters():
        p.data = p.data.clone()
    assert apart(gradient(t, b, FULL, micro_tokens=40), whole) <= 1e-6
    assert Recording.made == 4, "addresses are what a graph remembers"


def test_a_recording_that_lies_or_fails_stops_the_run():
    with pytest.raises(ConfigError, match=r"differs from the plain one by .* set compile = false"):
        gradient(recorded_trainer(partial(Recording, change=0.5)), batch(awkward_groups(), FULL), FULL, micro_tokens=40)

    def fails(work):
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(ConfigError, match="cannot be recorded as a CUDA graph: operation not permitted"):
        gradient(recorded_trainer(fails), batch(awkward_groups(), FULL), FULL, micro_tokens=40)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph is recorded on a GPU")
def test_a_cuda_graph_of_training_has_the_gradient_of_the_plain_pass():
    b = batch(awkward_groups(), FULL)
    whole = gradient(trainer(model("shallow"), FULL), b, FULL)
    t = static_trainer("shallow")
    t.loaded.model.to("cuda")
    t.static._make = GraphRun
    for _ in range(2):
        assert apart(gradient(t, b, FULL, micro_tokens=40).cpu(), whole) <= 1e-5


@pytest.mark.slow
def test_a_pass_can_be_exported():
    """torch.export traces the loss of a micro-batch; its program computes the same numbers of another one."""
    t = static_trainer("shallow", shapes=((64, 64),))
    gradient(t, batch(awkward_groups(), FULL), FULL, micro_tokens=64)
    (buffers,) = t.static._buffers.values()
    loss_of = StaticLoss(token_loss, t.loaded, FULL, 1.0)
    program = torch.export.export(loss_of, (dict(buffers.tensors),), strict=False).module()
    gradient(t, batch(awkward_groups(1), FULL), FULL, micro_tokens=64)  # other numbers in the same buffers
    (loss, measured), (wanted, known) = program(buffers.tensors), loss_of(buffers.tensors)
    assert torch.allclose(loss, wanted, rtol=1e-5)
    assert all(torch.allclose(measured[name], known[name], atol=1e-5) for name in known)


@pytest.mark.slow
def test_the_buffers_of_a_shape_stay_where_they_are():
    """What records addresses, as CUDA graphs do, finds the next micro-batch there."""
    t, addresses = static_trainer("shallow"), []
    for seed in range(3):
        gradient(t, batch(awkward_groups(seed), FULL), FULL, micro_tokens=40)
        addresses.append({k: [x.data_ptr() for x in b.tensors.values()] for k, b in t.static._buffers.items()})
    assert addresses[0] == addresses[1] == addresses[2] and len(addresses[0]) == 2


def test_auto_chooses_few_powers_of_two_and_a_longer_sample_adds_its_own_aloud():
    assert buckets_upto(500) == tuple(ShapeBucket(n, n) for n in (32, 64, 128, 256, 512))
    assert len(buckets_upto(4096)) == 6 and buckets_upto(4096)[-1].tokens == 4096
    told = []
    forget = subscribe(lambda e: told.append(e.message) if isinstance(e, Warned) else None)
    try:
        found = [ShapeBuckets(buckets_upto(64), grows=True)]
        assert found[0].choose(300, 290, "group 3, sample 1") == (512, 512)
        assert found[0].choose(300, 290, "group 3, sample 1") == (512, 512)
        assert found[0].choose(100, 90, "a sample") == (128, 128)  # as a resumed run, which has not seen the other
    finally:
        forget()
    assert len(told) == 2 and "group 3, sample 1 has 300 tokens" in told[0]
    with pytest.raises(TrainError, match=r"has 300 tokens.*add a larger one to trainer.micro_tokens.buckets"):
        ShapeBuckets(SHAPES, grows=False).choose(300, 290, "group 3, sample 1")


def test_a_pass_outside_of_the_shapes_is_an_error():
    buckets = ShapeBuckets(SHAPES, grows=True)
    with pytest.raises(TrainError, match="33x32 is outside of the static shapes 32x32, 64x64"):
        buckets.count_pass(ShapeBucket(33, 32), 20)


def test_a_micro_batch_of_too_many_targets_is_halved():
    b = batch_of(awkward_groups())
    shapes = StaticShapes(ShapeBuckets(((128, 32),), grows=False))
    cuts = shapes.split_cuts(b, [list(range(len(b.samples)))])
    assert [i for cut in cuts for i in cut] == list(range(len(b.samples)))
    assert all(sum(len(b.samples[i].trainable) for i in cut) <= 32 for cut in cuts)


def test_a_recipe_says_its_shapes(tmp_path):
    def settings_of(table):
        t = trainer(model("shallow"), FULL, micro_tokens=100)
        job = tiny(tmp_path, trainer__micro_tokens=table)
        return job, with_static_shapes(t.settings, job, Sampling(), t.loaded, FULL.needs)

    job, auto = settings_of({"most": 100})
    assert (
        auto.shapes == ((32, 32), (64, 64), (128, 128)) and auto.micro_tokens == 128 and job.trainer.micro_budget == 100
    )
    _, given = settings_of({"buckets": [64, 32], "targets": [48, 24], "compile": True})
    assert given.shapes == ((32, 24), (64, 48)) and given.compile_passes and not given.shapes_grow
    with pytest.raises(ConfigError, match="as many buckets"):
        tiny(tmp_path, trainer__micro_tokens={"buckets": [64], "targets": [1, 2]})
    with pytest.raises(ConfigError, match="mixture of experts"):
        refuse_static_shapes(job, Sampling(), model("mixture"), frozenset())
    with pytest.raises(ConfigError, match="'grpo' needs a critic"):
        refuse_static_shapes(job, Sampling(), model("shallow"), frozenset({"values"}))
    with pytest.raises(ConfigError, match="top_k, top_p and min_p"):
        refuse_static_shapes(job, Sampling(top_k=5), model("shallow"), frozenset())


def test_coefficients_that_follow_a_target_are_not_compiled():
    steered = row("grpo", kl={"coef": 0.1, "target": 0.5})
    t = static_trainer("shallow", steered, graphs=True)
    with pytest.raises(ConfigError, match="follow what was measured"):
        gradient(t, batch(awkward_groups(), steered), steered, micro_tokens=40)


def test_the_card_counts_the_shapes_of_a_run():
    metrics = [{"train/shape_64x64": 2.0, "train/shape_128x128": 1.0}, {"train/shape_64x64": 3.0}]
    found = count_shapes([{"metrics": m} for m in metrics])
    assert found == {"64x64": 5, "128x128": 1}
    assert "2 (64x64 in 5 passes, 128x128 in 1 passes)" in shapes_text(found)
