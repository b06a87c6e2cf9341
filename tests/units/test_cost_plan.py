"""Times, splits and layouts: figures that are known, and limits that must hold."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from rondel.core.row_split import PRODUCTS, deal_row
from rondel.planner import cost, layout, split, traffic
from rondel.planner.hardware import GB, find_hardware
from rondel.planner.memory import memory_bills
from rondel.planner.overlap import best_engine_devices
from rondel.planner.shapes import model_shape
from rondel.planner.workload import OtherPolicy, Workload, of_job, what_if


def test_generation_of_a_long_step():
    new = cost.batch_tokens(64, 8, 32768)
    assert new == 16_777_216
    assert cost.rollout_seconds(new, 1200) / 3600 == pytest.approx(3.88, abs=0.005)
    assert cost.rollout_seconds(new, 1200, 8) / 60 == pytest.approx(29.1, abs=0.05)


@pytest.mark.parametrize(
    "size, bandwidth, seconds", [(140, 900, 0.156), (140, 50, 2.8), (64, 900, 0.071), (64, 50, 1.28)]
)
def test_a_transfer(size, bandwidth, seconds):
    assert cost.transfer_seconds(size * GB, bandwidth * GB) == pytest.approx(seconds, rel=0.01)


def test_64_gb_in_20_ms_is_a_bucket():
    """C5: it would need 3.2 TB/s."""
    assert 64 * GB / 0.02 == 3.2e12 > max(find_hardware(name).link for name in ("h100", "b200"))


def test_decoding_is_bound_by_reading_then_by_arithmetic():
    s, on = model_shape("7b"), find_hardware("h100")
    alone = cost.decode_seconds(s, on, 1, 0)
    assert alone == pytest.approx((s.body_parameters + s.embedding_parameters) * 2 / (on.bandwidth * on.stream))
    assert cost.decode_seconds(s, on, 8, 0) == alone, "the weights are read once for all"
    many = 4096
    assert cost.decode_seconds(s, on, many, 0) == pytest.approx(
        2 * s.active_parameters * many / (on.flops * on.decode_efficiency)
    )
    assert cost.decode_seconds(s, on, 8, 4096) - alone == pytest.approx(
        8 * 4096 * s.kv_bytes() / (on.bandwidth * on.stream)
    )


def test_few_requests_read_few_experts():
    s = model_shape("235b-a22b")
    assert cost.decode_parameters(s, 1) == pytest.approx(s.active_parameters)
    assert cost.decode_parameters(s, 10_000) == pytest.approx(s.body_parameters + s.embedding_parameters)
    assert s.active_parameters < cost.decode_parameters(s, 16) < s.body_parameters


def test_an_engine_has_the_cache_of_its_own_policy():
    """Another policy's engine, on devices of its own, may be fuller or emptier."""
    setting = Workload(model_shape("7b"), find_hardware("h100"), place="split", gpus=4, trainers=2, output=8192)
    for size in ("0.6b", "32b"):
        beside = replace(setting, policies=(OtherPolicy("b", model_shape(size)),))
        assert cost.decode_concurrency(beside) == cost.decode_concurrency(setting)


def test_an_adapter_looks_once_more_where_the_reference_is_its_base(tmp_path):
    """2N a token, by its own weights: none are added to the bill."""
    from kits.runs import tiny

    adapter = {"kind": "lora", "rank": 4}
    plain, pulled = (
        of_job(tiny(tmp_path, model__adapter=adapter, algo__kl={"kind": "k3", "coef": coef})) for coef in (0.0, 0.1)
    )
    more = cost.tokens_seconds(pulled) - cost.tokens_seconds(plain)
    own = cost.forward_flops(plain.shape, plain.prompt + plain.mean) * plain.packed_tokens
    rate = plain.train_devices * plain.hardware.flops * plain.hardware.efficiency * 2 / plain.width
    assert more == pytest.approx(own / rate)
    assert [bill.rows for bill in memory_bills(pulled)] == [bill.rows for bill in memory_bills(plain)]


def test_training_is_six_or_eight_n_a_token():
    s = model_shape("8b")
    setting = Workload(s, find_hardware("h100"), prompt=0, mean=1, output=1)
    plain, again = (
        cost.train_seconds(one) - cost.update_seconds(one) for one in (setting, replace(setting, recompute="layers"))
    )
    assert plain * 989e12 * 0.4 / setting.packed_tokens == pytest.approx(6 * s.active_parameters, rel=1e-3)
    assert again / plain == pytest.approx(8 / 6)
    assert cost.update_seconds(setting) == pytest.approx(36 * s.parameter_count / 3350e9)


def test_ways_of_new_weights():
    assert [way.kind for way in cost.sync_options(what_if(["model=7b"]))] == ["tensor"]
    inside = {way.kind: way.seconds for way in cost.sync_options(what_if(["model=70b", "gpus=8", "place=split"]))}
    across = {way.kind: way.seconds for way in cost.sync_options(what_if(["model=70b", "gpus=128"]))}
    assert "ipc" in inside and "ipc" not in across
    assert across["distributed"] == pytest.approx(141.1 / 50, rel=0.01)
    assert across["delta"] < across["disk"] / 10
    thin = {way.kind: way.seconds for way in cost.sync_options(what_if(["model=70b", "gpus=128", "lora=16"]))}
    assert thin["distributed"] < across["distributed"] / 100


def test_what_an_interruption_costs():
    found = cost.interrupt_seconds(what_if(["model=7b", "gpus=16", "place=split", "output=16k"]))
    assert found["hold"] == 0.01 < found["abort"] < found["drain"]


# -- splits ------------------------------------------------------------------------------------------


def test_advice():
    found = split.advise_split(64, 1.0, 3.0, trainers=32)
    assert (found.bound, found.engines, found.trainers) == ("rollout", 48, 16)
    assert "48:16 would give +50%" in found.text
    # 32 a second, then 96: of 4 parts of the time the trainer has one and the engines three, and S = 1 ends that
    turns = split.advise_split(64, 1.0, 3.0, trainers=32, overlap=False)
    assert "the trainer idles 75%, the engines 25%; loop.max_staleness = 1 would give +33%" in turns.text
    assert "the longest answer sets the pace" not in split.advise_split(8, 4.0, 1.0, trainers=2, most=12.0).text
    assert "the longest answer sets the pace" in split.advise_split(8, 4.0, 9.0, trainers=2, most=12.0).text
    apart = split.advise_split(8, 4.0, 4.0, most=2.0, most_overlapped=4.0)
    assert apart.gain_colocated == pytest.approx(4.0 * (1 / 2.0 + 1 / 32.0))
    assert split.advise_split(1, 1.0, 3.0).text == "one device: 75% of the time generates, 25% trains"
    assert split.advise_split(64, 3.0, 1.0, unit=8).engines % 8 == 0
    assert [split.recommend_placement(n)[:5] for n in (8, 64, 96, 1024)] == ["all r", "all r", "engin", "pools"]


# -- layouts -----------------------------------------------------------------------------------------


def test_bubbles():
    assert (
        traffic.pipeline_bubble(4, 12) == 3 / 15
        and traffic.pipeline_bubble(4, 12, 2) == 3 / 27
        and traffic.pipeline_bubble(1, 5) == 0
    )


def test_bubble_is_that_of_a_schedule():
    """1F1B on a clock whose ticks are one forward plus one backward: the last stage ends
    m + p - 1 ticks after the first began.
    """
    for p, m in ((2, 4), (4, 4), (8, 32)):
        ends = [[0.0] * m for _ in range(p)]
        for i in range(m):
            for stage in range(p):
                before = max(ends[stage - 1][i] if stage else 0.0, ends[stage][i - 1] if i else 0.0)
                ends[stage][i] = before + 1
        assert 1 - m / ends[-1][-1] == pytest.approx(traffic.pipeline_bubble(p, m))


def test_traffic():
    assert [traffic.zero_traffic(1, stage) for stage in (0, 1, 2, 3)] == [2, 2, 2, 3], (
        "C17: ZeRO-1 does not cut traffic"
    )
    assert traffic.zero_traffic(1, 3, micro_batches=5) == 15 and traffic.zero_traffic(1, 2, micro_batches=5) == 2
    assert traffic.tensor_traffic(8, 1.0) == 1.75
    assert traffic.expert_traffic(8, 1.0, 2) == pytest.approx(2 * 7 / 8 * 2 / 8)


def test_shards_travel_in_every_micro_batch():
    """Data parallel in bfloat16: 2 + 2 + 4 bytes a number of a layer, 2 + 4 of embedding
    and head, (n-1)/n of them, a micro-batch.
    """
    setting = replace(what_if(["model=7b", "gpus=4", "prompts=16", "group=8", "mean=1000", "prompt=480"]), micro=8192)
    s = setting.shape
    assert (setting.packed_tokens, setting.packed_tokens / 4 / 8192) == (135680, pytest.approx(4.14, abs=0.01))
    once = 3 / 4 * (8 * s.body_parameters + 6 * 2 * s.embedding_parameters)

    def traffic(**changed):
        return next(row.traffic for row in layout.parallel_layouts(replace(setting, **changed)) if row.dp == 4)

    assert traffic() == pytest.approx(5 * once)
    assert traffic(micro=1 << 20) == pytest.approx(once)
    assert traffic(updates=3) == pytest.approx(3 * 2 * once) and traffic(epochs=2) == pytest.approx(2 * 5 * once)


@pytest.mark.slow
def test_traffic_of_shards_is_what_fsdp_sends():
    """Bytes that torch's collectives are given in three passes of a tiny model, on one of
    four ranks that only seem to be there.
    """
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode

    from kits.engine import tiny
    from rondel.core.mesh import Mesh
    from rondel.models.packed_layout import PackedLayout, PackedSegment
    from rondel.planner.shapes import of_config
    from rondel.train.fsdp import FsdpRank
    from rondel.train.logprobs import logprob_and_entropy

    sent = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            name = str(op)
            if "allgather" in name.replace("_", "") and torch.is_tensor(args[0]):  # and no list of objects
                sent.append(args[0].nbytes * 3 / 4)
            elif "reduce_scatter" in name:
                sent.append(args[1].nbytes * 3 / 4)
            return op(*args, **(kwargs or {}))

    ids = torch.arange(12)
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        held = FsdpRank(0, Mesh(shards=4), None).shard_model(tiny("llama"))

        def work(head):
            return logprob_and_entropy(held.hidden_states(ids, ids, PackedLayout([PackedSegment(0, 12)])), ids, head)[0]

        for _ in range(3):
            with Count():
                held.run_with_head(work).sum().backward()
    finally:
        dist.destroy_process_group()
    s = of_config(held.model.config.to_dict())
    root = s.embedding_parameters * (1 if s.tied else 2)
    assert sum(sent) == pytest.approx(
        traffic.sharded_traffic(s.body_parameters, root, ranks=4, micro_batches=3, width=4), rel=0.01
    )


@pytest.mark.parametrize(
    "words", [["model=70b", "gpus=64"], ["model=235b-a22b", "gpus=128", "trainers=64", "output=32k"]]
)
def test_layouts_fill_the_devices_and_the_best_fits(words):
    setting = what_if([*words, "recompute=layers"])
    found = layout.parallel_layouts(setting)
    assert all(
        row.dp * row.tp * row.pp * row.cp == setting.train_devices and row.dp * row.cp * row.tp % row.ep == 0
        for row in found
    )
    assert len({(row.dp, row.tp, row.pp, row.cp, row.ep, row.chunks) for row in found}) == len(found)
    by = {(row.dp, row.tp, row.pp, row.cp, row.ep, row.chunks): row for row in found}
    turns = [(row, by[(*place[:5], 1)]) for place, row in by.items() if row.chunks > 1]
    assert turns and all(row.bubble < plain.bubble and row.traffic > plain.traffic for row, plain in turns)
    assert found[0].fits and found[0].seconds == min(row.seconds for row in found if row.fits)
    assert all(18 * setting.shape.parameter_count / setting.train_devices <= row.memory for row in found)
    assert any(row.tp > 1 for row in found) and any(row.pp > 1 and row.bubble > 0 for row in found)
    if setting.shape.experts:
        assert any(row.ep > 1 for row in found)


@pytest.mark.parametrize("model", ["70b", "235b-a22b"])
def test_rows_that_travel_beside_products_take_no_time_of_their_own(model):
    """All of a ring but one round, and of a mixture its attention's alone; as many bytes travel."""
    plain, ringed = (
        layout.parallel_layouts(what_if([f"model={model}", "gpus=64", "recompute=layers", f"overlap={said}"]))
        for said in ("false", "true")
    )
    by = {replace(row.mesh, overlap=False): row for row in ringed}
    for row in plain:
        beside = by[row.mesh]
        assert beside.mesh.overlap == (row.tp > 1) and (beside.traffic, beside.memory) == (row.traffic, row.memory)
        assert beside.seconds < row.seconds if row.tp > 1 == row.dp else beside.seconds <= row.seconds


@pytest.mark.parametrize("link", [1.0, 1e-3])  # all is hidden; as much as there is arithmetic beside
def test_a_ring_of_four_hides_three_of_four_rounds_behind_arithmetic(link):
    setting = what_if(["model=7b", "gpus=4"])
    setting = replace(setting, hardware=replace(setting.hardware, link=setting.hardware.link * link))
    rows = [layout.parallel_layouts(replace(setting, overlap=on)) for on in (False, True)]
    plain, ringed = (next(row for row in found if row.tp == 4) for found in rows)
    travels = plain.traffic / setting.hardware.link
    arithmetic = plain.seconds - travels
    assert plain.seconds - ringed.seconds == pytest.approx(min(travels, 3 / 4 * 0.8 * arithmetic))


def test_a_ring_of_context_holds_less_and_moves_less():
    """One long sample: half as many keys and values travel as are gathered, to ranks that hold two blocks in place of all."""
    setting = what_if(["model=7b", "gpus=8", "prompt=0", "output=65536", "mean=65536", "group=1", "micro=8192"])
    rows = [
        next(row for row in layout.parallel_layouts(replace(setting, ring=on)) if (row.cp, row.tp, row.pp) == (8, 1, 1))
        for on in (False, True)
    ]
    gathered, ringed = rows
    each, tokens = setting.shape.trained_kv_bytes(), setting.packed_tokens
    assert [row.mesh.cp_attention for row in rows] == ["all_gather", "ring"]
    row = each / setting.shape.attention_layers * 65536  # bytes of a layer's keys and values in a micro-batch
    assert gathered.memory - ringed.memory == pytest.approx(2 * row - 2 * row / 8 * 3, rel=0.01)
    # 2 + 2 + 4 bytes of a number, to the ranks behind, for 2 + 2 + 2 to all; runs of equal work are longer in front
    lengths = deal_row([layout.MeanSegment(0, 65536)], 8, PRODUCTS * setting.shape.hidden).lengths
    behind = sum(n * length for n, length in zip(range(7, -1, -1), lengths)) / sum(lengths) / 8
    assert gathered.traffic - ringed.traffic == pytest.approx(tokens * each * (3 * 7 / 8 - 4 * behind), rel=1e-3)


@pytest.mark.parametrize("unit", [1, 2])
@pytest.mark.parametrize("capped", [False, True])
def test_the_best_split_is_the_best_of_all_and_none_worse_is_advised(unit, capped):
    rng = random.Random(0)
    for _ in range(200):
        G, r, t = rng.randrange(3 * unit, 64), rng.uniform(0.1, 5), rng.uniform(0.1, 5)
        most = rng.uniform(0.1, 40) if capped else float("inf")
        best = best_engine_devices(G, r, t, unit=unit, most=most)
        every = {a: min(a * r, most, (G - a) * t) for a in range(unit, G, unit)}
        assert every[best] == max(every.values())
        trainers = rng.randrange(1, G)
        told = split.advise_split(G, r, t, trainers=trainers, unit=unit, most=most).text
        assert ("would give" in told) == (
            every[best] > min((G - trainers) * r, most, trainers * t)
        ) and "give -" not in told


@pytest.mark.slow
@pytest.mark.parametrize("place", ["shared", "split"])
@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_no_step_is_shorter_than_its_longest_answer(place, staleness):
    """At S = 0 a step waits for it; an answer that may be S versions late has S + 1 steps."""
    from rondel.planner.plan import make_plan

    for words in itertools.product(["7b", "70b"], ["h100", "h200"], ["8", "64"], ["2k", "16k"], ["16", "512"]):
        names = ("model", "hardware", "gpus", "output", "prompts")
        setting = what_if([f"{n}={w}" for n, w in zip(names, words)] + [f"place={place}", f"staleness={staleness}"])
        late = setting.prompt + setting.output / 2
        alone = cost.decode_seconds(setting.shape, setting.hardware, 1, late, tensor=setting.tensor) * setting.output
        told = make_plan(setting)
        assert told["step_seconds"] >= alone / (staleness + 1), words
        assert (
            told["generate"]["seconds"] >= alone / (staleness + 1)
            and told["generate"]["longest_answer_seconds"] == alone
        )
        assert told["generate"]["tokens_per_second"] * told["generate"]["seconds"] == pytest.approx(setting.new_tokens)
