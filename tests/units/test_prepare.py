"""rondel prepare: what ranks read afterwards has the values of the model, each file whole, and what was done is not done again."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kits.runs import context
from rondel.cli import main
from rondel.core.errors import ModelError
from rondel.models.load import load_model
from rondel.models.model_copies import MODELS, read_manifest
from rondel.models.model_folder import model_folder
from rondel.models.prepare import check_tensors, prepare_model, why_not_by_shards

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny.toml"
TINY = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # E2M1


def saved(folder: Path, family: str = "llama", dtype: str = "float32", **more: int) -> dict[str, torch.Tensor]:
    """A whole model's folder, and its tensors."""
    loaded = load_model({"random": family, "tie_word_embeddings": False, **TINY, **more}, dtype=dtype)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def in_fp8(folder: Path) -> dict[str, torch.Tensor]:
    """The same in FP8 with a scale a block of 128 x 128, and what it means: float8 · scale, in bfloat16."""
    stored, meant = {}, {}
    for name, t in saved(folder).items():
        meant[name] = stored[name] = t.bfloat16()
        if "proj" in name:
            scale = t.abs().max().reshape(1, 1) / 448
            stored[name], stored[f"{name}_scale_inv"] = (t / scale).to(torch.float8_e4m3fn), scale
            meant[name] = (stored[name].float() * scale).bfloat16()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    (folder / "config.json").write_text(json.dumps(config))
    return meant


def in_mxfp4(folder: Path) -> dict[str, torch.Tensor]:
    """Experts of GPT-OSS in 4 bits: two values a byte, the low one first, and a power of two for each 32."""
    tensors = saved(folder, "gpt_oss", "bfloat16", num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1)
    stored = {}
    for name, t in list(tensors.items()):
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = t
            continue
        experts, rows, columns = t.shape
        blocks = torch.randint(0, 256, (experts, columns, rows // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 126, blocks.shape[:3], dtype=torch.uint8)
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
        values = torch.stack([FP4[(blocks & 15).long()], FP4[(blocks >> 4).long()]], -1).flatten(-2)
        meant = (values * torch.exp2(scales.float() - 127)[..., None]).flatten(-2)
        tensors[name] = meant.transpose(1, 2).bfloat16()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def in_bin(folder: Path) -> dict[str, torch.Tensor]:
    """The same as older checkpoints are: a pickle."""
    tensors = saved(folder)
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return tensors


def under_bare_names(folder: Path) -> dict[str, torch.Tensor]:
    """The same as AutoModel writes it: without the name of the part below the head."""
    tensors = saved(folder)
    save_file({n.removeprefix("model."): t for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return tensors


def prepared(folder: Path, tmp_path: Path, stage: bool = True, reread: bool = False) -> tuple[Path, list[str]]:
    said: list[str] = []
    ready = prepare_model(
        str(folder),
        tmp_path / "disk" if stage else None,
        tmp_path / "cache",
        lambda what, text: said.append(f"{what} {text}"),
        reread=reread,
    )
    return ready, said


def die_at(n: int, folder: Path, tmp_path: Path) -> None:
    """Prepare, and be killed when the n-th line is said, or the n-th file is in place."""
    count = 0

    def step(*_: object) -> None:
        nonlocal count
        count += 1
        if count == n:
            os.kill(os.getpid(), signal.SIGKILL)

    own = os.replace

    def replace(source: str, target: str) -> None:
        step()
        own(source, target)

    os.replace = replace  # type: ignore[assignment]
    prepare_model(str(folder), tmp_path / "disk", tmp_path / "cache", step)


@pytest.mark.slow
@pytest.mark.parametrize("make", [in_fp8, in_mxfp4, in_bin, under_bare_names])
def test_what_ranks_could_not_read_is_converted_exactly_and_once(tmp_path, make):
    meant = make(tmp_path / "model")
    assert why_not_by_shards(tmp_path / "model")
    ready, _ = prepared(tmp_path / "model", tmp_path, stage=False)
    found = load_file(ready / "model.safetensors")
    assert found.keys() == meant.keys() and check_tensors(ready) == len(meant)
    assert all(torch.equal(found[name], t) and found[name].dtype == t.dtype for name, t in meant.items())
    assert load_model(str(ready), deferred=True).weights is not None
    before = (ready / "model.safetensors").stat().st_mtime_ns
    again, said = prepared(tmp_path / "model", tmp_path, stage=False)
    assert again == ready and (ready / "model.safetensors").stat().st_mtime_ns == before
    assert f"convert done before: {ready}" in said
    (ready / "model.safetensors").write_bytes(b"rot")
    again, said = prepared(tmp_path / "model", tmp_path, stage=False)
    assert "convert model.safetensors is not what was written: made again" in said
    assert torch.equal(load_file(again / "model.safetensors")["lm_head.weight"], meant["lm_head.weight"])


@pytest.mark.slow
def test_killed_anywhere_it_goes_on_and_ends_as_if_nothing_had_been(tmp_path):
    """SIGKILL at each line and each file that is put in place, one after the other on the same folders."""
    meant, deaths = in_bin(tmp_path / "model"), 0
    for n in (1, 2, 3, 4, 6, 8, 11):
        child = context.Process(target=die_at, args=(n, tmp_path / "model", tmp_path))
        child.start()
        child.join(60)
        deaths += child.exitcode == -signal.SIGKILL
        left = [folder for folder in (tmp_path / "disk").glob("model-*")] if (tmp_path / "disk").is_dir() else []
        for folder in left:
            for name in read_manifest(folder).get("files", {}):
                assert (folder / name).is_file(), "what is written down is there"
    ready, said = prepared(tmp_path / "model", tmp_path)
    assert deaths >= 5 and any(line.startswith("convert done before") for line in said)
    assert all(torch.equal(load_file(ready / "model.safetensors")[name], t) for name, t in meant.items())
    copies = [line for line in said if line.startswith("stage ") and "/" in line.split()[1]]
    files = [path for path in ready.iterdir() if path.name != "prepared.json"]
    assert len(copies) < len(files), "copies of before are not made again"
    assert not [path for path in (tmp_path / "cache" / "prepared").iterdir() if path.name.endswith("-draft")]


@pytest.mark.slow
def test_a_staged_copy_is_what_a_run_reads_and_a_corrupt_file_is_copied_again(tmp_path, monkeypatch):
    meant = saved(tmp_path / "model")
    (tmp_path / "model" / "optimizer.pt").write_bytes(b"not of the model")
    ready, said = prepared(tmp_path / "model", tmp_path)
    assert "convert not needed" in " ".join(said) and not (ready / "optimizer.pt").exists()
    monkeypatch.setenv("RONDEL_CACHE", str(tmp_path / "cache"))
    assert model_folder(str(tmp_path / "model")) == str(tmp_path / "model"), "nobody said where copies are"
    monkeypatch.setenv(MODELS, str(tmp_path / "disk"))
    assert model_folder(str(tmp_path / "model")) == str(ready)
    # one byte, size and time as before: found when the digests are read
    file = ready / "model.safetensors"
    stat, data = file.stat(), bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    _, said = prepared(tmp_path / "model", tmp_path, reread=True)
    assert "stage model.safetensors is not what was copied: copied again" in said
    assert torch.equal(load_file(file)["lm_head.weight"], meant["lm_head.weight"])
    _, said = prepared(tmp_path / "model", tmp_path)
    assert any(line.startswith("stage done before") for line in said)
    # half a file is no copy; a model that has changed has none
    file.write_bytes(data[:100])
    assert model_folder(str(tmp_path / "model")) == str(tmp_path / "model")
    prepared(tmp_path / "model", tmp_path)
    assert model_folder(str(tmp_path / "model")) == str(ready)
    os.utime(tmp_path / "model" / "model.safetensors")
    assert model_folder(str(tmp_path / "model")) == str(tmp_path / "model")


@pytest.mark.slow
def test_a_model_of_the_hub_is_found_where_the_node_has_no_cache_of_it(tmp_path, monkeypatch):
    from huggingface_hub import constants

    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / "abc"
    saved(snapshot)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("rondel.models.prepare.source_folder", lambda path: path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda path, allow_patterns: str(snapshot))
    ready = prepare_model("org/tiny", tmp_path / "disk", tmp_path / "cache", lambda *_: None)
    monkeypatch.setenv(MODELS, str(tmp_path / "disk"))
    assert model_folder("org/tiny") == str(ready)
    shutil.rmtree(tmp_path / "hub")
    assert model_folder("org/tiny") == str(ready) and model_folder("org/other") == "org/other"


def test_what_cannot_be_prepared_is_named(tmp_path):
    tensors = saved(tmp_path / "model")
    save_file(
        tensors | {"lm_head.weight": tensors["lm_head.weight"][:, :64].contiguous()},
        tmp_path / "model" / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(ModelError, match=r"holds lm_head\.weight as \(\d+, 64\), not \(\d+, 128\)"):
        check_tensors(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ModelError, match=r"reading .*model: SafetensorError"):
        check_tensors(tmp_path / "model")


@pytest.mark.slow
def test_the_command_says_what_it_did(tmp_path, monkeypatch, capsys):
    saved(tmp_path / "model")
    monkeypatch.setenv("RONDEL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(SystemExit) as end:
        main(["prepare", str(RECIPE), f"--model.path={tmp_path / 'model'}", "--stage", str(tmp_path / "disk")])
    said = capsys.readouterr().out
    assert not end.value.code and "80 to train on, 20 held out" in said
    assert f"ready: RONDEL_MODELS={tmp_path / 'disk'} rondel train" in said
    with pytest.raises(SystemExit) as end:
        main(["prepare", str(RECIPE)])
    assert not end.value.code and "no model is read" in capsys.readouterr().out
