"""The bill: figures that are known, and the bytes that a real trainer and engine have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rondel.core.config.job import Job
from rondel.core.errors import ConfigError
from rondel.formats import FORMATS, format_of
from rondel.planner import cost, memory, resolve, workload
from rondel.planner.activations import activation_bytes, megatron_bytes
from rondel.planner.advice import bill_sentences, least_room, rank_changes
from rondel.planner.hardware import GB, find_hardware
from rondel.planner.memory import (
    FSDP2,
    MIXED,
    PHASES,
    RONDEL,
    RONDEL32,
    job_memory_bytes,
    kv_advice,
    kv_room,
    memory_bills,
    pool_sentence,
)
from rondel.planner.plan import make_plan
from rondel.planner.shapes import model_shape
from rondel.planner.workload import Workload, of_job, what_if


def test_the_account_of_seventy_billion():
    told = job_memory_bytes(70e9)
    assert told == {"train": 1120 * GB, "reference": 140 * GB, "reward model": 140 * GB, "actor copy": 140 * GB}
    assert sum(told.values()) == 1540 * GB
    assert job_memory_bytes(70e9, critic=True)["critic"] == 1120 * GB, "16 N more"


def test_bytes_of_a_trained_number():
    assert [s.persistent_bytes for s in (MIXED, FSDP2, RONDEL, RONDEL32)] == [16, 16, 18, 16]
    assert FSDP2.transient == 2
    assert 7e9 * MIXED.moments == 56 * GB, "Adam's two moments in fp32; 28 GB would be half of them"


def test_a_terabyte_of_parameters_is_not_on_one_card():
    """C12: half a byte a weight."""
    assert 1e12 / 2 == 500 * GB > find_hardware("h200").memory


@pytest.mark.parametrize(
    "share, room, says", [(0.7, -5.4, "raise mem_fraction_static above 0.77"), (0.85, 6.3, "lower mem_fraction_static")]
)
def test_mem_fraction_static(share, room, says):
    pre, post = 78 * GB, (78 - 60) * GB
    assert kv_room(pre, post, share) / GB == pytest.approx(room)
    assert says in kv_advice(pre, post, share)


def test_offloading_takes_turns():
    [together] = memory_bills(what_if(["model=7b", "reference=7b"]))
    [turns] = memory_bills(what_if(["model=7b", "reference=7b", "offload=yes"]))
    assert all(turns.phase_bytes(phase) <= together.phase_bytes(phase) for phase in PHASES)
    assert turns.rows["KV cache"]["train"] == turns.rows["moments"]["generate"] == turns.rows["reference"]["train"] == 0
    assert turns.rows["reference"]["logprob"] == 2 * model_shape("7b").parameter_count


def test_shards_add_up():
    """Over all ranks the state is 18 N, whatever their number."""
    for ranks in (2, 8, 64):
        bill, _ = memory_bills(what_if(["model=7b", f"gpus={ranks + 8}", "place=split", f"trainers={ranks}"]))
        state = sum(bill.rows[tenant]["train"] for tenant in ("policy weights", "masters", "gradients", "moments"))
        assert state * ranks == pytest.approx(18 * model_shape("7b").parameter_count)


def test_the_gradient_of_the_largest_block_lies_whole_on_every_rank():
    """Beside its gathered weights, in bfloat16 and in fp32, until it is summed; counted in test_deferred_weights.py."""
    s = model_shape("7b")
    block = max(s.body_parameters / s.layers, s.embedding_parameters * (1 if s.tied else 2))
    for ranks, wanted in ((1, 0.0), (2, 6 * block), (64, 6 * block)):
        bill, _ = memory_bills(what_if(["model=7b", f"gpus={ranks + 8}", "place=split", f"trainers={ranks}"]))
        assert bill.rows.get("gradient of a layer", {}).get("train", 0.0) == pytest.approx(wanted)


def test_what_is_advised_helps():
    tight = what_if(["model=32b", "gpus=8"])
    assert least_room(tight) < 0
    found = rank_changes(tight)
    assert found and all(saved > 0 for _, saved, _ in found)
    assert any("change: " in line for line in bill_sentences(tight))
    assert not any("change: " in line for line in bill_sentences(what_if(["model=0.5b"])))


def test_an_adapter_needs_no_reference_and_little_state():
    plain, thin = (memory_bills(what_if(["model=7b", *more]))[0] for more in ([], ["lora=16"]))
    assert thin.rows["moments"]["train"] == 8 * model_shape("7b").lora_parameters(16)
    assert (
        least_room(what_if(["model=7b", "lora=16"])) - least_room(what_if(["model=7b"]))
        > 15.5 * model_shape("7b").parameter_count
    )
    assert "masters" in plain.rows and "masters" not in thin.rows


def test_a_recipe_is_read(tmp_path):
    from kits.runs import tiny

    job = tiny(tmp_path, algo__kind="ppo", algo__kl={"kind": "k3", "coef": 0.1}, trainer__micro_tokens=512)
    setting = of_job(job)
    assert (setting.prompts, setting.group, setting.output, setting.micro, setting.width) == (4, 4, 4, 512, 4)
    assert setting.critic is not None and setting.reference is not None
    assert of_job(tiny(tmp_path, algo__kind="opd", model__teacher="8b")).teacher == model_shape("8b")
    rows = []
    for teachers in (["8b"], ["8b", "7b", "8b"]):  # of which as many as lie in memory count
        for kept in ("all", "one"):
            told = {"model__teacher": [{"path": path} for path in teachers], "trainer__memory__teachers": kept}
            rows.append(memory_bills(of_job(tiny(tmp_path, algo__kind="opd", **told)))[0].rows["teacher"]["logprob"])
    assert rows == [rows[0], rows[0], 3 * rows[0], rows[0]] and rows[0] > 0


def test_sizes_that_stand_elsewhere_are_those():
    """As above: the planner may import neither."""
    from rondel.planner import memory
    from rondel.sync import from_distributed
    from rondel.train import logprobs

    assert memory.LOGITS == logprobs.LOGITS and memory.BUCKET == from_distributed.BUCKET


def test_which_rows_need_whom():
    """The planner may not import the table, so it is compared here."""
    from rondel.algos.table import TABLE

    needs = {name: row.needs for name, row in TABLE.items()}
    assert {n for n, needed in needs.items() if "values" in needed} == workload.CRITICS
    assert {n for n, needed in needs.items() if needed & {"teacher_logprobs", "teacher_hidden"}} == workload.TEACHERS
    assert {n for n, needed in needs.items() if "ref_logprobs" in needed} == workload.REFERENCES
    assert {n for n, needed in needs.items() if "proximal_logprobs" in needed} == workload.PROXIMAL


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bill_is_what_a_run_holds(tmp_path, dtype):
    """Bytes of tensors, tenant by tenant, that a whole tiny run counts on its device while it trains."""
    from kits.runs import events, tiny
    from rondel.assemble import train

    job = tiny(
        tmp_path,
        model__dtype=dtype,
        algo__kl={"kind": "k3", "coef": 0.1},
        loop__warmup__steps=0,
        loop__steps=2,
        engine__kv_pages=512,
    )
    train(job, quiet=True)
    held = events(tmp_path, "Resident")[-1]["held"]["train"]
    [bill] = memory_bills(of_job(job))
    planned = {tenant: row["train"] for tenant, row in bill.rows.items()}
    names = {
        "weights": "policy weights",
        "masters": "masters",
        "gradients": "gradients",
        "moments": "moments",
        "reference": "reference",
    }
    for theirs, ours in names.items():
        assert held[theirs] == pytest.approx(planned.get(ours, 0), rel=0.03, abs=2000), theirs
    assert held["kv_cache"] == pytest.approx(planned["KV cache"], rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("tower", ["frozen", "trained"])
def test_the_bill_of_a_model_that_sees_is_what_a_run_holds(tmp_path, tower):
    """The recipe with pictures: a frozen tower has weights and nothing else, one that learns has
    all of the rest, too.
    """
    from kits.runs import events
    from rondel.assemble import train
    from rondel.core.config.job import Job

    small = {
        "loop.warmup.steps": 0, "loop.steps": 2, "loop.groups_per_step": 2, "algo.group_size": 2, "task.data.size": 12, "task.data.holdout": 4,
        "run.checkpoint.every": 0, "run.sinks": [], "run.folder": str(tmp_path), "model.vision.tower": tower, "engine.kv_pages": 512,
        "model.dtype": "float32",
    }  # fmt: skip
    job = Job.read(Path(__file__).parents[2] / "recipes" / "vision.toml", small)
    train(job, quiet=True)
    held, setting = events(tmp_path, "Resident")[-1]["held"]["train"], of_job(job)
    [bill] = memory_bills(setting)
    planned = {tenant: row["train"] for tenant, row in bill.rows.items()}
    assert setting.tower == (tower == "trained") and setting.image and planned["images"] > 0
    for theirs, ours in {"weights": "policy weights", "gradients": "gradients", "moments": "moments"}.items():
        assert held[theirs] == pytest.approx(planned[ours], rel=0.005, abs=2000), theirs


def test_an_image_costs_room_and_time_by_its_size_and_more_where_the_tower_learns():
    def asked(*more):
        return what_if(["model=qwen2.5-vl-7b", "gpus=8", *more])

    plain, large, learning = asked(), asked("image=4096"), asked("tower=yes")
    assert (plain.image, plain.prompt, large.prompt) == (1024, 1536, 512 + 4096) and asked("image=0").prompt == 512
    images = [memory_bills(s)[0].rows["images"]["train"] for s in (plain, learning)]
    assert images[1] > 10 * images[0] > 0 and "images" not in memory_bills(asked("image=0"))[0].rows
    assert learning.trained_parameters - plain.trained_parameters == plain.shape.tower.parameter_count
    looks = [cost.look_seconds(s, 1, 1, 0.4) for s in (plain, large)]
    assert looks[1] > 4 * looks[0] > 0 and cost.train_seconds(learning) > cost.train_seconds(plain)
    with pytest.raises(ConfigError, match=r"image and tower: qwen2\.5-7b reads text alone"):
        what_if(["model=7b", "image=100"])


def test_an_encoder_has_the_tower_and_takes_its_time_off_the_engine():
    def asked(*more):
        return what_if(["model=qwen2.5-vl-7b", "hardware=h200", "place=split", "trainers=4", "image=4096", *more])

    plain, apart = asked("gpus=6"), asked("gpus=8", "encoders=1")
    assert (plain.engine_count, apart.engine_count, apart.engine_size, apart.engine_unit) == (2, 2, 1, 2)
    pools = {bill.pool: bill for bill in memory_bills(apart)}
    assert list(pools) == ["trainer", "encoder", "engine"] and [b.pool for b in memory_bills(plain)] == [
        "trainer",
        "engine",
    ]
    weights = 2 * plain.shape.tower.parameter_count
    assert pools["encoder"].rows["tower weights"] == dict.fromkeys(PHASES, weights)
    assert pools["engine"].rows == memory_bills(plain)[1].rows, "the engine keeps the tower, too"
    looking = cost.look_seconds(plain, plain.prompts / 2, 1, plain.hardware.efficiency)
    assert cost.generation_time(plain).work - cost.generation_time(apart).work == pytest.approx(looking)
    cut = asked("gpus=10", "encoders=1", "tensor=2")
    assert (cut.engine_count, cut.engine_size, cut.engine_unit) == (2, 2, 3)
    assert make_plan(cut)["devices"]["engine"] == "tp = 2, encoders = 1"
    matrices = 2 * plain.shape.parameter_count - weights
    rows = {bill.pool: bill.rows for bill in memory_bills(cut)}
    assert rows["engine"]["engine weights"]["generate"] == pytest.approx(matrices / 2 + weights), "the tower is not cut"
    assert rows["encoder"] == pools["encoder"].rows
    slow = replace(apart, image=1 << 22)
    assert cost.generation_time(slow).work == cost.look_seconds(slow, slow.prompts / 2, 1, slow.hardware.efficiency)
    with pytest.raises(ConfigError, match=r"encoders = 1 encodes pictures, and qwen2\.5-7b reads text alone"):
        what_if(["model=7b", "gpus=8", "place=split", "trainers=4", "encoders=1"])


def test_prompts_computed_apart_take_their_time_beside_decoding():
    def asked(*more):
        return what_if(["model=7b", "hardware=h200", "place=split", "trainers=4", "prompt=8192", "output=256", *more])

    plain, apart = asked("gpus=6"), asked("gpus=8", "prefills=1")
    assert (plain.engine_count, apart.engine_count, apart.engine_size, apart.engine_unit) == (2, 2, 1, 2)
    _, prefill, engine = memory_bills(apart)
    assert [prefill.pool, engine.pool] == ["prefill", "engine"] and engine.rows == memory_bills(plain)[1].rows
    assert prefill.rows == {name: row for name, row in engine.rows.items() if name != "KV cache"}
    tokens = plain.prompts * plain.prompt / 2
    prompts = cost.prefill_seconds(plain.shape, plain.hardware, tokens, width=plain.width)
    whole, longer = cost.generation_time(plain).work, cost.generation_time(apart).work
    assert prompts > 0.1 * whole and longer == pytest.approx(max(prompts, whole - prompts))
    job = Job.read(
        Path(__file__).parents[2] / "recipes" / "tiny.toml",
        {"place.kind": "split", "place.engines": {"count": 2, "prefill": True}},
    )
    assert (of_job(job).engine_count, of_job(job).engine_unit, of_job(job).gpus) == (2, 2, 5)
    halves = {"place.kind": "split", "place.engines": {"tp": 2, "prefill": True}}
    both = of_job(Job.read(Path(__file__).parents[2] / "recipes" / "tiny.toml", halves))
    assert (both.engine_count, both.engine_unit, both.gpus, both.prefills) == (1, 4, 5, 2)
    cut, together = asked("gpus=8", "tensor=2", "prefills=2"), asked("gpus=6", "tensor=2")
    _, prefill, engine = memory_bills(cut)
    assert cut.engine_unit == 4 and prefill.rows == {name: r for name, r in engine.rows.items() if name != "KV cache"}
    prompts = cost.prefill_seconds(cut.shape, cut.hardware, 2 * tokens, tensor=2, width=cut.width)
    whole = cost.generation_time(together).work
    assert cost.generation_time(cut).work == pytest.approx(max(prompts, whole - prompts))
    with pytest.raises(ConfigError, match="prefills = 1 beside tensor = 2: as many devices compute prompts as decode"):
        asked("gpus=8", "tensor=2", "prefills=1")
    with pytest.raises(ConfigError, match="prefills = 1, but only 1 devices serve, and an engine is 2"):
        asked("gpus=5", "prefills=1")


def test_phases_and_tenants_have_names():
    bill = memory_bills(
        replace(
            Workload(model_shape("7b"), find_hardware("h100")),
            critic=model_shape("7b"),
            teacher=model_shape("32b"),
            reward=model_shape("7b"),
        )
    )[0]
    assert {"critic", "teacher", "reward model"} <= bill.rows.keys()
    assert memory.PHASES == ("generate", "logprob", "train", "sync", "wake")


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96},
}


@pytest.mark.parametrize("layers", ["transformers", "megatron"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype, width", [("float32", 4), ("bfloat16", 2)])
def test_activations_on_a_cpu_are_what_autograd_keeps(dtype, width, family, layers, monkeypatch):
    """Bytes of saved tensors of a prompt and eight siblings, norms in fp32 and written-out scores included. Megatron's
    layers keep more, but for the matrices that are joined for a pass."""
    import torch
    from torch.autograd.graph import saved_tensors_hooks

    from kits.engine import LLAMA
    from rondel.models.linear import has_tiles
    from rondel.models.load import load_model
    from rondel.models.packed_layout import PackedLayout, PackedSegment
    from rondel.models.processor import is_widened

    spec = {**LLAMA, "random": family, "hidden_size": 128, "intermediate_size": 384, **FAMILIES[family]}
    loaded = load_model(spec, dtype=dtype)
    if layers == "megatron":
        pytest.importorskip("megatron.core")
        from rondel.models.megatron import layers as megatron

        megatron.install_megatron_layers(loaded)
        monkeypatch.setattr(
            megatron, "saved_tensors_hooks", lambda pack, _: saved_tensors_hooks(lambda x: keep(pack(x)), lambda t: t)
        )
    prompt, each = 40, 24
    segments = [PackedSegment(0, prompt), *(PackedSegment(prompt + i * each, each, 0) for i in range(8))]
    total = prompt + 8 * each
    places = torch.tensor([*range(prompt), *(prompt + j for _ in range(8) for j in range(each))])
    kept, own = {}, {p.untyped_storage().data_ptr() for p in loaded.model.parameters()}

    def keep(t):
        if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t  # alive, so that no address comes twice
        return t

    with saved_tensors_hooks(keep, lambda t: t):
        loaded.hidden_states(torch.arange(total) % 50, places, PackedLayout(segments))
    held = sum(t.untyped_storage().nbytes() for t in kept.values())
    s = model_shape(spec)
    setting = replace(
        Workload(s, find_hardware("cpu")),
        prompts=1,
        group=8,
        prompt=prompt,
        output=each,
        mean=each,
        width=width,
        micro=total,
        widened=is_widened(loaded.dtype),
        tiles=has_tiles(loaded.dtype),
        megatron=layers == "megatron",
    )
    assert held / total == pytest.approx(memory.layer_bytes(setting, total), rel=0.1)
    fused = memory.layer_bytes(replace(setting, hardware=find_hardware("h100"), tiles=False), total)
    assert fused == activation_bytes(s, width, megatron=setting.megatron)
    assert fused < memory.layer_bytes(replace(setting, tiles=False), total)


def test_a_recipe_with_the_layers_of_megatron_is_planned_with_theirs():
    path = Path(__file__).parents[2] / "recipes" / "tiny.toml"
    mesh = {"place.kind": "split", "place.mesh": {"tp": 2, "sp": False}}
    plain, megatron = (
        of_job(Job.read(path, mesh | {"place.mesh": mesh["place.mesh"] | {"layers": layers}}))
        for layers in ("transformers", "megatron")
    )
    more = (
        memory.trainer_memory(megatron)["activations"]["train"] - memory.trainer_memory(plain)["activations"]["train"]
    )
    assert more == megatron_bytes(megatron.shape, 4) * memory.micro_batch_tokens(megatron) > 0
    assert what_if(["megatron=yes"], plain) == replace(plain, megatron=True)


def test_the_bill_of_the_quickstart_is_its_resident_memory(monkeypatch):
    """3.62 GB at most in all of its steps (benchmarks/README.md): each part is a row, and their sum is within 15 %."""
    monkeypatch.setattr(workload, "_has_tiles", lambda: False)  # as where that was measured
    job = Job.read(Path(__file__).parents[2] / "recipes" / "quickstart.toml", {"model.dtype": "float32"})
    [bill] = memory_bills(of_job(job))
    assert {
        "packed weights",
        "starting weights",
        "Python and libraries",
        "compiled products",
        "activations",
        "freed and kept",
    } <= bill.rows.keys()
    assert bill.peak_phase[0] == "train" and bill.peak_phase[1] == pytest.approx(3.62 * GB, rel=0.15)
    assert bill.rows["gradients"]["generate"] == bill.rows["packed weights"]["train"] == 0
    assert 0 < bill.rows["starting weights"]["logprob"] < 0.25 * bill.rows["policy weights"]["logprob"], "from a file"


def test_a_micro_batch_of_a_cpu_has_one_chunk_of_logits(tmp_path):
    def chosen(wanted="auto", **how) -> int:
        return resolve.micro_tokens(wanted, **how).value

    assert chosen(on_gpu=True, vocab=49152) == 16384 and chosen(7, on_gpu=False, vocab=49152) == 7
    assert chosen(on_gpu=False, vocab=50) == 4096, "whose logits are small"
    assert chosen(on_gpu=False, vocab=49152) == (1 << 25) // 49152 == 682 and chosen(on_gpu=False, vocab=151936) == 512
    path = Path(__file__).parents[2] / "recipes" / "quickstart.toml"

    def planned(tokens: int) -> int:
        return of_job(Job.read(path, {"trainer.micro_tokens": "auto", "engine.sampling.max_tokens": tokens})).micro

    assert [planned(n) for n in (16, 64, 256, 1024)] == [682, 682, 64 + 8 * 256, 4096], "a larger group stays whole"


def test_rows_that_stand_elsewhere_too():
    from rondel.runtime import devices
    from rondel.train import offload

    assert resolve.PROGRAMS == devices.PRODUCTS and memory.LEAST_MAPPED == offload.LEAST_MAPPED


@pytest.mark.slow
def test_the_bill_of_a_run_is_its_resident_memory(tmp_path):
    """The tiny recipe in a process of its own: what the kernel says that it had at most."""
    import subprocess
    import sys

    program = (
        "import os, sys\n"
        "from rondel.assemble import train\nfrom rondel.core.config.job import Job\n"
        "train(Job.read(sys.argv[1], "
        "{'run.folder': sys.argv[2], 'loop.steps': 1, 'loop.warmup.steps': 1, 'run.sinks': [], 'place.threads': 1}), "
        "quiet=True)\n"
        "from rondel.system.process_memory import resident_memory\n"
        # not ru_maxrss, which begins with that of whoever started the process
        "print('PEAK', resident_memory(os.getpid())['peak'])"
    )
    recipe = Path(__file__).parents[2] / "recipes" / "tiny.toml"
    done = subprocess.run(
        [sys.executable, "-c", program, str(recipe), str(tmp_path / "run")], capture_output=True, text=True, check=True
    )
    peak = int(done.stdout.rpartition("PEAK ")[2])
    assert memory_bills(of_job(Job.read(recipe, {})))[0].peak_phase[1] == pytest.approx(peak, rel=0.15)


def test_a_rank_loads_its_shards_a_block_at_a_time():
    """Its part of the masters in fp32 and of the starting weights, and the largest block as it is read and in fp32;
    under an adapter its part of the base as it is. With one device there is nothing to cut.
    """
    how = ["model=7b", "gpus=16", "place=split", "trainers=8"]
    setting, over = what_if(how), what_if([*how, "lora=8"])
    s, trainer = setting.shape, memory_bills(setting)[0]
    block = max(2 * s.embedding_parameters, s.body_parameters / s.layers)
    assert trainer.loading == (4 + 2) * s.parameter_count / 8 + (4 + 2) * block
    assert memory_bills(replace(setting, width=4))[0].loading == 8 * s.parameter_count / 8 + 8 * block
    assert memory_bills(what_if(["model=7b"]))[0].loading == 0 and memory_bills(setting)[1].loading == 0
    assert memory_bills(over)[0].loading == 2 * s.parameter_count / 8 + 4 * over.trained_parameters + 2 * block
    assert trainer.peak_phase[0] == "train"
    large = what_if(["model=70b", "gpus=72", "place=split", "trainers=64", "micro=512", "output=512", "lora=16"])
    [bill] = [b for b in memory_bills(large) if b.pool == "trainer"]
    assert bill.peak_phase[0] == "train" and bill.free_bytes > 0, "what fits can be loaded"
    heavy = replace(bill, loading=2.0 * bill.memory)
    assert heavy.peak_phase == ("load", heavy.loading) and heavy.free_bytes < 0
    assert "most in load" in (line := pool_sentence(heavy)) and "the whole model is 100%" in line


def test_quantised_rollouts_are_counted(tmp_path):
    """The engine's own weights beside the trainer's, and what an update sends: by hand for the tiny model."""
    from kits.runs import tiny

    plain = of_job(tiny(tmp_path))
    assert plain.has_one_module and plain.sync_bytes == plain.weight_bytes
    [before] = memory_bills(plain)
    assert "engine weights" not in before.rows
    layers, hidden, inner = 2, 32, 64
    matrices = layers * (2 * hidden * hidden + 2 * hidden * hidden // 2 + 3 * hidden * inner)
    rest = plain.shape.parameter_count - matrices
    assert plain.shape.matrix_parameters == matrices
    for name in FORMATS:
        setting = of_job(tiny(tmp_path, model__format={"engine": name}))
        assert setting.sent_bits == pytest.approx(format_of(name).bits, rel=1e-3)
        assert setting.sync_bytes == pytest.approx(matrices * setting.sent_bits / 8 + rest * 4)
        [bill] = memory_bills(setting)
        assert bill.rows["engine weights"]["train"] == 4 * plain.shape.parameter_count
        assert bill.rows["sync buckets"]["sync"] == setting.sync_bytes == sum(bill.rows["sync buckets"].values())
        assert cost.sync_options(setting)[0].seconds > 0 == cost.sync_options(plain)[0].seconds
        held = of_job(tiny(tmp_path, model__format={"engine": name, "held": "encoded"}))
        [smaller] = memory_bills(held)
        assert smaller.rows["engine weights"]["generate"] == pytest.approx(setting.sync_bytes)
        assert cost.generation_time(held).rate < cost.generation_time(setting).rate
        both = of_job(tiny(tmp_path, model__format=name, place__kind="split"))
        assert both.sync_bytes == setting.sync_bytes and not both.engine_rounds
