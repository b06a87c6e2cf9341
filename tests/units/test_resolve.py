"""What "auto" becomes, and why."""

from __future__ import annotations

import json

import pytest

from kits.runs import events, tiny
from rondel.assemble import build, deployment, train
from rondel.assemble.components import _prompt_counter, with_steps
from rondel.core.config.job import Job
from rondel.core.errors import ConfigError, DataError
from rondel.core.events import Warned, subscribe
from rondel.core.types import Sampling
from rondel.planner import cost, memory
from rondel.planner.hardware import find_hardware
from rondel.planner.resolve import SPARE, engine_reserve, kv_pages, resolve_transport
from rondel.planner.workload import what_if

GB = 10**9


@pytest.mark.parametrize(
    "wanted, apart, weights, room, value, why",
    [
        ("auto", "module", GB, 0, "tensor", "0 bytes move"),
        ("tensor", "module", GB, 0, "tensor", "0 bytes move"),
        ("auto", "process", GB, 2 * GB, "ipc", "share a machine"),
        (
            "auto",
            "process",
            GB,
            2 * GB - 1,
            "distributed",
            "two versions need 2.0 GB of shared memory, and 2.0 GB are free",
        ),
        ("auto", "process", GB, 0, "distributed", "0.0 GB are free"),
        ("auto", "machine", GB, 9 * GB, "distributed", "different machines"),
        ("disk", "machine", GB, 0, "disk", "set"),
        ("delta", "process", GB, 0, "delta", "set"),
    ],
)
def test_how_weights_travel(wanted, apart, weights, room, value, why):
    found = resolve_transport(wanted, apart=apart, weights=weights, room=room)
    assert found.value == value and why in found.why


@pytest.mark.parametrize("wanted", ["ipc", "tcp", "disk", "distributed", "delta"])
def test_one_module_needs_no_transport(wanted):
    with pytest.raises(ConfigError, match=f"sync.kind = '{wanted}' has no effect with place.kind = 'shared'"):
        resolve_transport(wanted, apart="module")


def test_tensors_cannot_leave_their_process():
    with pytest.raises(ConfigError, match="hands over the tensors of one process"):
        resolve_transport("tensor", apart="process")


def test_a_recipe_may_name_each_of_them():
    for kind in ("auto", "tensor", "ipc", "tcp", "disk", "distributed", "delta"):
        job = Job.parse(
            {
                "model": {"path": "x"},
                "task": {"data": {}},
                "loop": {"steps": 1},
                "run": {"folder": "x"},
                "sync": {"kind": kind},
            }
        )
        assert job.sync.kind == kind


# -- passes over the data ---------------------------------------------------------------------------


def job(tmp_path, **changes):
    data = {"kind": "jsonl", "path": str(tmp_path / "tasks.jsonl"), "answer": "answer"}
    lengths = [3 * i for i in range(1, 22)]
    rows = [json.dumps({"prompt": f"{i:02d}{'x' * (n - 2)}", "answer": "1"}) for i, n in enumerate(lengths)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(rows))
    return tiny(
        tmp_path / "run",
        **{
            "task.data": data,
            "model.path.max_position_embeddings": 256,
            "loop.warmup.steps": 0,
            "loop.groups_per_step": 5,
            **changes,
        },
    )


@pytest.mark.parametrize("passes, steps", [(1, 5), (2, 9), (0.5, 3), (5, 21), (0.01, 1)])
def test_passes_become_steps_over_the_tasks_that_are_there(tmp_path, passes, steps):
    """21 tasks, 5 groups a step."""
    said = job(tmp_path, **{"loop.steps": None, "loop.passes": passes})
    found, why = with_steps(said)
    assert (found.steps, found.loop.passes) == (steps, None) and f"{passes:g} · 21 / 5" in why
    assert with_steps(found) == (found, "")


def test_exactly_one_of_steps_and_passes_is_set(tmp_path):
    with pytest.raises(ConfigError, match=r"steps = 3 and passes = 2 both say"):
        job(tmp_path, **{"loop.steps": 3, "loop.passes": 2})
    with pytest.raises(ConfigError, match=r"steps is not set: steps = 100 .* passes = 2"):
        job(tmp_path, **{"loop.steps": None})


@pytest.mark.slow
def test_prompts_that_are_too_long_are_left_out_and_counted(tmp_path):
    """A character is a token of this model; the template adds as many to each. Passes count what is left."""
    every = job(tmp_path)
    parts = build(every)
    parts.close()
    render = _prompt_counter(every, parts.env, parts.model_info.tokenizer, None, 10_000, parts.sampling, {})
    sizes = sorted(render(task) for task in parts.tasks.train)
    most = sizes[12]
    few = job(tmp_path, **{"task.max_prompt_tokens": most, "loop.steps": None, "loop.passes": 1})
    seen = []
    end = subscribe(seen.append)
    parts = build(few)
    parts.close()
    end()
    assert (
        [render(task) for task in parts.tasks.train] == sizes[:13]
        and parts.tasks.too_long == 8
        and parts.job.steps == 3
    )
    assert any("8 tasks are left out" in event.message for event in seen if isinstance(event, Warned))
    with pytest.raises(DataError, match=r"task.max_prompt_tokens = 1 leaves no training task"):
        build(job(tmp_path, **{"task.max_prompt_tokens": 1}))


@pytest.mark.slow
def test_a_run_of_passes_is_continued_as_the_steps_that_it_became(tmp_path):
    few = {"loop.groups_per_step": 10, "loop.steps": None, "run.checkpoint.every": 1, "engine.sampling.max_tokens": 4}
    train(job(tmp_path, **few, **{"loop.passes": 0.4}), quiet=True)
    kept = Job.read(tmp_path / "run" / "job.toml")
    assert (kept.loop.steps, kept.loop.passes) == (1, None)
    train(job(tmp_path, **few, **{"loop.passes": 0.9}), quiet=True)
    assert [e["step"] for e in events(tmp_path / "run", "StepDone")] == [1, 2]


def test_ipc_without_room_is_refused_before_anything_is_loaded():
    with pytest.raises(
        ConfigError, match=r"'ipc': two versions need 2.0 GB of shared memory, and 1.9 GB are free. Leave it at 'auto'"
    ):
        resolve_transport("ipc", apart="process", weights=GB, room=19 * GB // 10)
    assert resolve_transport("ipc", apart="process", weights=GB, room=2 * GB).value == "ipc"


@pytest.mark.parametrize(("room", "kind"), [(0, "distributed"), (GB, "ipc")])
def test_a_run_asks_for_the_room_that_its_weights_need(room, kind, monkeypatch):
    model = {"random": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}
    tree = {"model": {"path": model}, "task": {"data": {}}, "loop": {"steps": 1}, "run": {"folder": "x"}}
    job = Job.parse({**tree, "place": {"kind": "split", "cluster": "process", "device": "cpu"}})
    monkeypatch.setattr(deployment.planner, "shared_memory", lambda: room)
    plan = deployment.DeploymentPlan(job, frozenset(), Sampling(), lambda known: 8, None)
    assert plan.kind == kind and 4e5 < deployment.bytes_sent(job) < 1e6


def test_an_engine_on_its_own_device_gives_the_cache_what_is_left():
    how = dict(max_running=512, longest=32768, page_bytes=100_000)
    shared, own = (kv_pages("auto", free_bytes=60 * GB, reserve_bytes=reserve, **how) for reserve in (None, 6 * GB))
    assert shared.value == 60 * GB // 4 // 100_000 and "a quarter of 60.0 GB" in shared.why
    assert own.value == 54 * GB // 100_000 and "less a reserve of 6.0 GB" in own.why
    assert (
        kv_pages("auto", free_bytes=60 * GB, reserve_bytes=6 * GB, max_running=2, longest=100, page_bytes=100_000).value
        == 200
    )
    assert kv_pages("auto", free_bytes=GB, reserve_bytes=6 * GB, **how).value == 32768, (
        "one request at its longest, and the bill says that it does not fit"
    )


@pytest.mark.parametrize("more", [[], ["sync=distributed"], ["tensor=2"], ["model=32b", "tensor=4"], ["lora=16"]])
def test_a_cache_of_its_own_gives_the_throughput_that_the_formula_says(more):
    """Weights, cache and reserve fill the device and no more, and the engines reach the rate
    of as many requests as that cache holds.
    """
    sync = "distributed" if "sync=distributed" in more else "auto"
    from dataclasses import replace

    setting = what_if(
        [
            "model=7b",
            "gpus=8",
            "place=split",
            "output=16k",
            "prompts=512",
            "running=2048",
            *[m for m in more if "sync" not in m],
        ]
    )
    setting = replace(setting, sync=sync)
    s, on = setting.shape, setting.hardware
    [bill] = [b for b in memory.memory_bills(setting) if b.pool == "engine"]
    assert bill.free_bytes >= 0
    left = on.memory * (1 - SPARE) - setting.weight_bytes / setting.tensor
    tokens = memory.kv_tokens(setting)
    assert tokens * s.kv_bytes() / setting.tensor > 0.6 * (left - memory.staged_bytes(setting)), (
        "most of what the weights leave"
    )
    requests = int(tokens // (setting.prompt + setting.mean))
    assert cost.decode_concurrency(setting) == min(requests, setting.samples // setting.engine_count)
    quarter = int(left / 4 / (s.kv_bytes() / setting.tensor) // (setting.prompt + setting.mean))
    middle = setting.prompt + setting.mean / 2

    def rate(n):
        return n / cost.decode_seconds(s, on, n, middle, tensor=setting.tensor)

    assert rate(cost.decode_concurrency(setting)) >= rate(quarter)


def test_a_cache_that_takes_turns_with_the_trainer_fills_the_device_and_no_more():
    for words in (["model=7b"], ["model=7b", "gpus=8"], ["model=7b", "gpus=8", "lora=16", "reference=7b"]):
        [turns] = memory.memory_bills(what_if([*words, "offload=yes", "running=4096", "output=16k"]))
        peak = turns.phase_bytes("generate")
        assert 0.9 * turns.memory * (1 - SPARE) < peak <= turns.memory * (1 - SPARE), words


def test_the_reserve_has_a_second_version_where_weights_are_staged():
    known = dict(memory=80 * GB, hidden=4096, vocab=128256, width=2, prefill=2048, max_running=256)
    assert engine_reserve(**known, staged=16 * GB) - engine_reserve(**known) == pytest.approx(
        16 * GB - 2 * memory.BUCKET, abs=2
    )
    assert engine_reserve(**known) > SPARE * 80 * GB
    assert find_hardware("h100").on_gpu and not find_hardware("cpu").on_gpu
