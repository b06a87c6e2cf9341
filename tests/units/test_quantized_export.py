"""`rondel export`: codes and scales in the layout of other tools, which decode to the bits that the run computed with."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kits.runs import run
from kits.sweeps import covering
from rondel.cli import main
from rondel.core.errors import CheckpointError, ModelError
from rondel.formats import format_of
from rondel.models.quantized_export import LAYOUTS, export_quantized

pytestmark = pytest.mark.slow


def trained(tmp_path, name, **changes):
    how = {"model__dtype": "bfloat16", "loop__warmup__steps": 1, "loop__steps": 1, "run__checkpoint__every": 0}
    run(tmp_path / "run", model__format=name, **how, **changes)
    return max((tmp_path / "run" / "checkpoints").glob("step-*"))


def decoded(folder, name):
    """Module -> weight, of all that has scales."""
    stored, found = load_file(folder / "model.safetensors"), {}
    for key in stored:
        module, _, part = key.rpartition(".")
        if part.startswith("weight_scale"):
            parts = {k.rpartition(".")[2]: t for k, t in stored.items() if k.rpartition(".")[0] == module}
            if "weight_packed" in parts and "weight_shape" not in parts:
                rows, columns = parts["weight_packed"].shape
                parts["weight_shape"] = torch.tensor([rows, 2 * columns])
            found[module] = parts
    return {module: (format_of(name).decode(parts, torch.bfloat16), parts) for module, parts in found.items()}


@pytest.mark.parametrize(
    "name", covering(["int4", "nvfp4", "fp8"], ["fp8"])
)  # the others: by compressed_tensors, below
def test_an_export_decodes_to_what_the_run_computed_with(tmp_path, capsys, name):
    checkpoint, into = trained(tmp_path, name), tmp_path / "out"
    with pytest.raises(SystemExit) as end:
        main(["export", str(tmp_path / "run"), str(into)])
    assert not end.value.code and f"in {name}, " in (said := capsys.readouterr().out) and f"vllm serve {into}" in said
    held, stored = load_file(checkpoint / "model.safetensors"), load_file(into / "model.safetensors")
    weights = decoded(into, name)
    assert len(weights) == 2 * 7 and all(torch.equal(w, held[f"{module}.weight"]) for module, (w, _) in weights.items())
    plain = {key for key in stored if key.rpartition(".")[0] not in weights}
    assert plain and all(torch.equal(stored[key], held[key]) for key in plain)
    config = json.loads((into / "config.json").read_text())
    said = config["quantization_config"]
    assert "rondel_number_format" not in config and (into / "tokenizer_config.json").is_file()
    assert said["weight_block_size"] == [128, 128] if name == "fp8" else said["format"] == LAYOUTS[name][0]


@pytest.mark.parametrize("name", ["int4", "mxfp4", "nvfp4", "mxfp8"])
def test_compressed_tensors_decodes_the_same(tmp_path, name):
    """By the package that vLLM and transformers read such checkpoints with."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    checkpoint, into = trained(tmp_path, name), tmp_path / "out"
    export_quantized(checkpoint, into)
    described = json.loads((into / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(described).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(LAYOUTS[name][0])
    held = load_file(checkpoint / "model.safetensors")
    for module, (_, parts) in decoded(into, name).items():
        given = {k: t for k, t in parts.items() if name == "int4" or k != "weight_shape"}
        theirs = compressor.decompress(given, scheme)["weight"]
        assert torch.equal(theirs.to(torch.bfloat16), held[f"{module}.weight"]), module


def test_a_checkpoint_of_a_format_is_not_rounded_again(tmp_path):
    """In 16 bits a second time would find other scales: a run that starts from it computes with its bits."""
    checkpoint = trained(tmp_path, "int4")
    again = {"model__path": str(checkpoint), "trainer__lr": 0.0, "loop__warmup__steps": 0, "loop__steps": 1}
    run(tmp_path / "again", model__format="int4", **again)
    (last,) = (tmp_path / "again" / "checkpoints").glob("step-*")
    a, b = load_file(checkpoint / "model.safetensors"), load_file(last / "model.safetensors")
    assert all(torch.equal(a[key], b[key]) for key in a)
    run(tmp_path / "whole", **again)
    (last,) = (tmp_path / "whole" / "checkpoints").glob("step-*")
    assert "rondel_number_format" not in (last / "config.json").read_text()


def test_what_cannot_be_exported_says_so(tmp_path, capsys):
    checkpoint = trained(tmp_path, "int4_128")
    with pytest.raises(ModelError, match="whole blocks of 128"):
        export_quantized(checkpoint, tmp_path / "a")
    config = json.loads((checkpoint / "config.json").read_text())
    for name, said in (("fp8_row", "no checkpoint of other tools has"), (None, "of no run with model.format")):
        changed = (
            {**config, "rondel_number_format": name} if name else {k: v for k, v in config.items() if "rondel" not in k}
        )
        (checkpoint / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ModelError, match=said):
            export_quantized(checkpoint, tmp_path / "b")
    (checkpoint / "config.json").write_text(json.dumps(config | {"rondel_number_format": "int4"}))
    weights = load_file(checkpoint / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] += 1.0
    save_file(weights, checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match="is not what int4 decodes to"):
        export_quantized(checkpoint, tmp_path / "c")
    assert not any((tmp_path / name).exists() for name in "abc")
    for words in ((str(tmp_path), str(tmp_path / "d")), (str(checkpoint), str(tmp_path))):
        with pytest.raises(SystemExit) as end:
            main(["export", *words])
        assert end.value.code == 1 and (
            "neither a run folder" in (err := capsys.readouterr().err) or "exists already" in err
        )
