"""rondel plan: what it answers, how it refuses, and that it starts without torch."""

from __future__ import annotations

import ast
import copy
import json
import re
import subprocess
import sys
import tomllib
import typing
from dataclasses import replace
from pathlib import Path

import pytest

import rondel
from kits.runs import RECIPE
from rondel.cli import main
from rondel.core.config.job import Job
from rondel.core.config.place import MeshConfig
from rondel.core.config.renamed_keys import MOVED_KEYS
from rondel.core.config.section import ConfigSection
from rondel.core.config.toml_reader import set_dotted
from rondel.core.errors import ConfigError
from rondel.planner import cost, memory
from rondel.planner.advice import suggest_changes
from rondel.planner.hardware import DEVICES, calibration_file, save_calibration, this_machine
from rondel.planner.layout import parallel_layouts
from rondel.planner.plan import make_plan
from rondel.planner.shapes import model_shape
from rondel.planner.workload import what_if


def ask(capsys, *words):
    with pytest.raises(SystemExit) as end:
        main(["plan", *words])
    out, err = capsys.readouterr()
    return end.value.code or 0, out, err


def test_a_recipe_and_what_if(capsys):
    code, out, _ = ask(capsys, str(RECIPE), "--json")
    told = json.loads(out)
    assert code == 0 and told["fits"] and told["model"]["parameters"] == 324960
    code, out, _ = ask(
        capsys, str(RECIPE), "--loop.groups_per_step=4", "--what-if", "model=70b", "gpus=64", "hardware=h100", "--json"
    )
    told = json.loads(out)
    assert (told["work"]["prompts"], told["devices"]["count"], told["devices"]["hardware"]) == (4, 64, "h100")
    assert told["model"]["parameters"] == model_shape("70b").parameter_count


def test_shared_devices_are_as_many_as_there_are_ranks(capsys):
    """place.kind = "shared" with four ranks: a rank of the trainer and an engine on each of four devices."""
    words = (str(RECIPE), "--place.ranks=4", "--place.device=cuda", "--json")
    told = json.loads(ask(capsys, *words)[1])
    alone = json.loads(ask(capsys, str(RECIPE), "--place.device=cuda", "--json")[1])
    devices = told["devices"]
    assert (devices["count"], devices["train"], devices["generate"], devices["place"]) == (4, 4, 4, "shared")
    moments, whole = (t["memory"][0]["rows"]["moments"]["train"] for t in (told, alone))
    assert moments == pytest.approx(whole / 4, rel=0.01)


def test_the_table_says_what_dominates(capsys):
    code, out, _ = ask(capsys, "--what-if", "model=70b gpus=64 output=16k group=8 prompts=256")
    assert code == 0 and "too much; activations is" in out
    assert "assumed" in out and "rollout-bound" in out and "sync      distributed, 2.82 s" in out
    assert 'trainer.memory.recompute = "layers"' in out and "not in Rondel yet: recomputing" not in out
    assert "together they fit: " in ask(capsys, "--what-if", "model=14b gpus=8 critic=14b")[1]


def test_layouts_are_printed_as_a_recipe_says_them(capsys):
    """All of them, experts apart beside tensor parallel too."""
    words = ["model=235b-a22b", "gpus=64", "recompute=layers"]
    rows = make_plan(what_if(words))["layouts"]
    assert [row["exists"] for row in rows] == [True] * 3
    lines = [line for line in ask(capsys, "--what-if", " ".join(words))[1].splitlines() if line.startswith("layout")]
    assert len(lines) == 3 and all("(place.mesh = { " in line for line in lines)


def test_a_layout_exists_where_a_recipe_can_ask_for_it():
    rows = parallel_layouts(what_if(["model=235b-a22b", "gpus=64", "recompute=layers"]))
    for row in rows:
        mesh = MeshConfig(pp=row.pp, shards=row.dp, cp=row.cp, tp=row.tp, ep=row.ep, chunks=row.chunks)
        assert row.is_supported and mesh.to_mesh(row.pp * row.dp * row.cp * row.tp) == row.mesh, row.name
    assert any(row.ep > 1 < row.pp for row in rows) and any(row.tp > 1 < row.ep for row in rows)


def test_layouts_that_the_trainer_refuses_come_last_and_are_marked(capsys, tmp_path):
    """Indexers that choose keys lie whole on every rank, and a base in 4 bits is not cut."""
    config = {
        "model_type": "deepseek_v32", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "intermediate_size": 18432, "vocab_size": 129280, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3,
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    setting = what_if([f"model={tmp_path}", "gpus=512", "hardware=h200", "recompute=layers"])
    assert setting.shape.indexer.layers == 61
    rows = parallel_layouts(setting)
    assert [row.is_supported for row in rows] == sorted((row.tp * row.pp == 1 for row in rows), reverse=True)
    assert {row.is_supported for row in rows} == {True, False}
    whole = parallel_layouts(replace(what_if(["model=14b", "gpus=8"]), four_bits=True))
    assert {(row.tp > 1, row.is_supported) for row in whole} == {(False, True), (True, False)}
    megatron = parallel_layouts(what_if(["model=235b-a22b", "gpus=16", "megatron=yes"]))
    assert all(row.is_supported == (row.ep == row.tp == 1) for row in megatron)


def test_a_policy_is_printed_once(capsys):
    out = ask(capsys, str(RECIPE.parent / "relay.toml"))[1]
    assert out.count("listener: random-llama") == 1
    told = json.loads(ask(capsys, str(RECIPE.parent / "relay.toml"), "--json")[1])
    assert [policy["name"] for policy in told["policies"]] == ["listener"] and told["work"]["mean_tokens"] == 1, (
        "an answer has a token at least"
    )


@pytest.mark.parametrize(
    "words, says",
    [
        (["--what-if", "modle=7b"], "Did you mean 'model'?"),
        (["--what-if", "model=7bb"], "no shape is known of '7bb'. Did you mean '7b'?"),
        (["--what-if", "model=7b", "hardware=h1000"], "Did you mean 'h100'?"),
        (["--what-if", "model=7b", "gpus=0"], "it is at least 1"),
        (["--what-if", "model=7b", "gpus=many"], "'many' is not a value of gpus"),
        (["--what-if", "model=7b", "place=split"], "place = split needs at least 2 devices"),
        (["--what-if", "gpus=8"], "needs a model"),
        ([], "a recipe or a model is needed"),
    ],
)
def test_what_cannot_be_planned(capsys, words, says):
    code, _, err = ask(capsys, *words)
    assert code == 1 and says in err.split("\nMore: ")[0] and err.split("\nMore: ")[0].rstrip().count("\n") == 0


def test_what_is_planned_for_another_device_is_not_said_to_be_this_cpu(capsys):
    for verb in ("plan", "simulate"):
        outs = []
        for more in ([], ["--what-if", "hardware=h100"]):
            with pytest.raises(SystemExit):
                main([verb, str(RECIPE), *more, *(["--steps", "2"] if verb == "simulate" else [])])
            outs.append(capsys.readouterr().out)
        assert ["this machine's CPU" in out for out in outs] == [True, False], verb
        assert "1 x h100" in outs[1]


def test_devices_have_sources_and_plausible_figures():
    """Laptops and Apple's chips have the machine's memory, so the rows of a process on a CPU;
    arithmetic per byte as such devices have.
    """
    for name, on in DEVICES.items():
        assert on.name == name and on.source and 5 < on.flops / on.bandwidth < 400, name
        assert on.on_gpu == (
            "cpu" not in name and "laptop" not in name and not name.startswith("m2") and name[:2] not in ("m3", "m4")
        ), name
    assert make_plan(what_if(["model=135m", "hardware=m4-max"]))["memory"][0]["rows"]["Python and libraries"]
    assert [DEVICES[n].bandwidth / 1e9 for n in ("m2-max", "m3-max", "m4-max", "rtx5090", "mi300x")] == [
        400,
        400,
        546,
        1792,
        5300,
    ]


@pytest.mark.slow
def test_it_starts_without_torch():
    program = (
        "import sys, rondel.cli as cli\n"
        "try: cli.main(['plan', '--what-if', 'model=7b', '--json'])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'transformers', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


def test_more_of_everything_never_takes_less():
    """More tokens, more prompts, a larger model: no step gets shorter; more devices: none gets longer."""
    base = ["model=7b", "gpus=8"]
    step = make_plan(what_if(base))["step_seconds"]
    for more in ("output=8k", "prompts=64", "group=32", "model=32b", "recompute=layers", "reference=7b", "critic=7b"):
        assert make_plan(what_if([*base, more]))["step_seconds"] > step, more
    assert make_plan(what_if(["model=7b", "gpus=16"]))["step_seconds"] < step
    assert make_plan(what_if([*base, "hardware=b200"]))["step_seconds"] < step


def test_what_was_measured_is_used(tmp_path, monkeypatch):
    from dataclasses import replace

    monkeypatch.setenv("RONDEL_CACHE", str(tmp_path))
    guess = this_machine()
    assert save_calibration(replace(guess, flops=123e9, source="measured")) == calibration_file()
    assert this_machine().flops == 123e9 and this_machine().memory == guess.memory
    calibration_file().write_text("{}")
    with pytest.raises(ValueError, match="delete it"):
        this_machine()


# those of peers, a row's own, a method, tensors of a checkpoint
KEYS_OF_OTHERS = ("rondel/importing", "algos/table.py", "engine/notebook.py", "models/megatron/tensor_rules.py")


def is_a_key(dotted):
    section = Job
    for word in dotted.split("."):
        if word not in section.model_fields:
            return False
        kinds = typing.get_args(section.model_fields[word].annotation) or [section.model_fields[word].annotation]
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, ConfigSection)), None)
        if inner is None:
            return True  # a value, or a table of the user's own names
        section = inner
    return True


@pytest.mark.slow
def test_every_key_that_a_message_names_exists():
    """All strings of the source that are no docstring: advice, remedies, refusals."""
    key = re.compile(rf"(?<![\w./'-])(?:{'|'.join(Job.model_fields)})(?:\.[a-z_]+)+\b(?![(/])")
    section = re.compile(rf"(?:{'|'.join(Job.model_fields)})[.'\"]")  # also where a line of a text ends
    source, named = Path(rondel.__file__).parent, 0
    for path in source.rglob("*.py"):
        if any(part in str(path) for part in KEYS_OF_OTHERS):
            continue
        if not section.search(text := path.read_text(encoding="utf-8")):
            continue
        nodes = list(ast.walk(ast.parse(text)))
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docs = {
            id(node.body[0].value)
            for node in nodes
            if isinstance(node, kinds) and node.body and isinstance(node.body[0], ast.Expr)
        }
        texts = [
            node.value
            for node in nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
        ]
        found = [
            k
            for text in texts
            for k in key.findall(text)
            if ".safetensors" not in k and not k.endswith((".toml", ".yaml"))
        ]
        named += len(found)
        moved = MOVED_KEYS if path.match("core/config/renamed_keys.py") else ()
        assert [k for k in found if not is_a_key(k) and k not in moved] == [], path
    assert named > 100


def test_advice_is_a_key_that_can_be_written():
    """What is advised is read by the recipe as it stands, or it is a device more."""
    settings = [
        what_if(["model=7b", *more])
        for more in ([], ["critic=7b", "reference=7b"], ["gpus=8", "place=split"], ["lora=8"])
    ]
    told = {text.partition(":")[0] for setting in settings for text, _ in suggest_changes(setting)}
    assert len(told) >= 8
    base = {"model": {"path": "x"}, "task": {"data": {}}, "loop": {"steps": 1}, "run": {"folder": "x"}}
    for text in told:
        for assignment in re.split(r", (?=[a-z]+\.)", text):
            name, _, value = assignment.partition(" = ")
            tree = copy.deepcopy(base)
            set_dotted(tree, name, tomllib.loads(f"v = {value}")["v"])
            if name == "model.adapter.kind":
                set_dotted(tree, "model.adapter.rank", 16)
            if name.startswith(("place.ranks", "place.engines")):
                set_dotted(tree, "place.kind", "split")
            assert Job.parse(tree, "a test")


def test_an_engine_of_several_processes_is_planned_as_one(capsys):
    """A table on the command line is one word, and no question."""
    out = ask(capsys, str(RECIPE), "--place.kind=split", "--place.engines={ count = 2, tp = 2 }", "--json")[1]
    devices = json.loads(out)["devices"]
    assert (devices["count"], devices["generate"], devices["devices_an_engine"]) == (5, 4, 2)
    assert devices["engine"] == "tp = 2"


def test_an_engine_whose_devices_have_requests_of_their_own():
    """Bytes of one of its devices, by hand: all but 3/4 of the experts, keys and values of a quarter of the requests."""
    words = [
        "model=30b-a3b",
        "hardware=h200",
        "place=split",
        "gpus=5",
        "trainers=1",
        "running=64",
        "prompt=512",
        "output=512",
    ]
    one, four = what_if([*words, "tensor=1"]), what_if([*words, "data=4"])
    s = four.shape
    assert (four.engine_size, four.engine_count, one.engine_count) == (4, 1, 4)
    (a, b) = (memory.engine_memory(each) for each in (one, four))
    assert a["engine weights"]["generate"] == 2 * s.parameter_count
    assert b["engine weights"]["generate"] == pytest.approx(2 * (s.parameter_count - s.expert_parameters * 3 / 4))
    assert b["KV cache"]["generate"] == 16 * 1024 * s.kv_bytes(2) == a["KV cache"]["generate"] / 4
    # a rank sends half of what it has for one of two: 48 layers of 8 experts a token, to and fro
    sent = 48 * 2 * (3 / 4) * 8 * (64 / 4) * s.hidden * 2
    assert cost.exchange_bytes(s, 64, 4, 2) == pytest.approx(sent)
    told = make_plan(four)["devices"]["engine"]
    assert told.startswith(f"dp = 4, ep = 4: {s.experts // 4} of {s.experts} experts and a cache of ")
    assert "sends" in told and f"{sent / 1e6:.3g} MB in a decode step of 64 requests" in told
    assert cost.decode_seconds(s, four.hardware, 64, 768, data=4) < cost.decode_seconds(s, one.hardware, 64, 768)
    for more, said in ((["model=7b"], "no experts"), (["tensor=2"], r"tensor\) = 2"), (["data=3"], "128 experts")):
        with pytest.raises(ConfigError, match=said):
            what_if([*words[:3], "gpus=13", *words[4:], "data=4", *more])
