"""models/megatron: a converted checkpoint is the same model in Megatron-Core's own code, and comes back bit for bit."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.planner import WriteItemType
from transformers import AutoConfig, AutoModelForCausalLM

from kits.megatron_core import gpt_model, logits_of, megatron_on_cpu
from rondel.cli import main
from rondel.core.errors import ModelError
from rondel.models.megatron.checkpoint_files import SafeReader
from rondel.models.megatron.convert import find_megatron, write_hugging_face, write_megatron
from rondel.models.megatron.tensor_rules import megatron_tensors

SIZE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts_per_tok": 2}
MODELS = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"head_dim": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mixtral": EXPERTS | {"num_local_experts": 4},
    "qwen3_moe": EXPERTS | {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 16, "norm_topk_prob": True},
}


def saved(folder, kind, dtype="float32", **changes):
    """A random model of Hugging Face in a folder."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZE, **MODELS[kind], **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(getattr(torch, dtype))
    with torch.no_grad():
        for p in model.parameters():  # norms and biases, too: all ones, all zeros would hide that two were exchanged
            p.add_(torch.randn(p.shape) * 0.1)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_megatron_core_loads_it_and_computes_what_transformers_does(tmp_path, kind):
    """Its own loader, its own layers: the oracle of every rule."""
    theirs = saved(tmp_path / "model", kind)
    count = write_megatron(str(tmp_path / "model"), tmp_path / "megatron")
    assert count == sum(p.numel() for p in theirs.parameters())
    folder = find_megatron(tmp_path / "megatron")
    with megatron_on_cpu(tmp_path):
        from megatron.core import dist_checkpointing

        ours = gpt_model(theirs.config)
        ours.load_state_dict(dist_checkpointing.load(ours.sharded_state_dict(), str(folder)))
        tokens = torch.randint(0, 96, (1, 17), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            torch.testing.assert_close(logits_of(ours, tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_what_megatron_core_saves_is_read(tmp_path):
    theirs = saved(tmp_path / "model", "qwen3", tie_word_embeddings=False)
    write_megatron(str(tmp_path / "model"), tmp_path / "ours")
    with megatron_on_cpu(tmp_path):
        from megatron.core import dist_checkpointing

        model = gpt_model(theirs.config)
        model.load_state_dict(
            dist_checkpointing.load(model.sharded_state_dict(), str(find_megatron(tmp_path / "ours")))
        )
        (tmp_path / "theirs").mkdir()
        dist_checkpointing.save(model.sharded_state_dict(), str(tmp_path / "theirs"))
    write_hugging_face(find_megatron(tmp_path / "theirs"), str(tmp_path / "model"), tmp_path / "back")
    assert same_files(tmp_path / "model", tmp_path / "back")


def same_files(one, other):
    a, b = (load_file(folder / "model.safetensors") for folder in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


@pytest.mark.parametrize(("kind", "dtype"), [("llama", "bfloat16"), ("qwen2", "float32"), ("qwen3_moe", "bfloat16")])
def test_there_and_back_changes_no_bit(tmp_path, monkeypatch, kind, dtype):
    saved(tmp_path / "model", kind, dtype)
    write_megatron(str(tmp_path / "model"), tmp_path / "megatron")
    write_hugging_face(find_megatron(tmp_path / "megatron"), str(tmp_path / "model"), tmp_path / "back")
    assert same_files(tmp_path / "model", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == kind
    monkeypatch.setattr("rondel.models.megatron.convert.FILE_BYTES", 20_000)
    write_hugging_face(find_megatron(tmp_path / "megatron"), str(tmp_path / "model"), tmp_path / "pieces")
    assert len(list((tmp_path / "pieces").glob("model-*-of-*.safetensors"))) > 1
    one, many = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("model", "pieces"))
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_an_index_that_runs_code_is_not_read(tmp_path):
    class Runs:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Runs()))
    with pytest.raises(ModelError, match=r"names (posix|nt)\.mkdir"):
        SafeReader(tmp_path).read_metadata()
    assert not (tmp_path / "ran").exists()


class Asks:
    """Pickled as Python 3.11.0 to 3.11.3 pickle a member of an enumeration."""

    def __init__(self, *what):
        self.what = what

    def __reduce__(self):
        return getattr, self.what


def test_an_index_of_an_older_python_names_members_and_nothing_else(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Asks(WriteItemType, "TENSOR")))
    with pytest.raises(ModelError, match="it holds a WriteItemType"):
        SafeReader(tmp_path).read_metadata()
    for asked in ((Path, "unlink"), (WriteItemType, "mro"), (WriteItemType, "__class__")):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(Asks(*asked)))
        with pytest.raises(ModelError, match=r"asks for .* which no index needs"):
            SafeReader(tmp_path).read_metadata()


def test_refusals_say_what_to_do(tmp_path):
    saved(tmp_path / "model", "llama")
    with pytest.raises(ModelError, match=r"'gemma2' has no rules .* llama, mistral"):
        megatron_tensors(AutoConfig.for_model("gemma2"))
    with pytest.raises(ModelError, match="dense layers between"):
        megatron_tensors(AutoConfig.for_model("qwen3_moe", mlp_only_layers=[0]))
    write_megatron(str(tmp_path / "model"), tmp_path / "megatron")
    saved(tmp_path / "wider", "llama", intermediate_size=64)
    found = find_megatron(tmp_path / "megatron")
    with pytest.raises(ModelError, match=r"linear_fc1.weight as \(2, 96, 32\); a model like .* has \(2, 128, 32\)"):
        write_hugging_face(found, str(tmp_path / "wider"), tmp_path / "no")
    with pytest.raises(ModelError, match=r"holds no output_layer\.weight"):
        saved(tmp_path / "untied", "llama", tie_word_embeddings=False)
        write_hugging_face(found, str(tmp_path / "untied"), tmp_path / "no")
    assert find_megatron(tmp_path / "model") is None and not (tmp_path / "no").exists()
    (tmp_path / "old" / "iter_0000100").mkdir(parents=True)
    (tmp_path / "old" / "latest_checkpointed_iteration.txt").write_text("100\n")
    with pytest.raises(ModelError, match="--ckpt-format torch_dist"):
        find_megatron(tmp_path / "old")


def test_the_command(tmp_path, capsys):
    def call(*words):
        with pytest.raises(SystemExit) as end:
            main(["convert", *map(str, words)])
        return (end.value.code or 0, *capsys.readouterr())

    saved(tmp_path / "model", "llama")
    code, out, _ = call(tmp_path / "model", tmp_path / "megatron")
    assert code == 0 and "numbers as Megatron-Core loads them" in out and "next    --load" in out
    code, _, err = call(tmp_path / "megatron", tmp_path / "back")
    assert code == 1 and "name a model of that kind with --like" in err
    code, out, _ = call(tmp_path / "megatron", tmp_path / "back", "--like", tmp_path / "model")
    assert code == 0 and "next    rondel serve" in out and same_files(tmp_path / "model", tmp_path / "back")
    code, _, err = call(tmp_path / "model", tmp_path / "back")
    assert code == 1 and "exists already" in err
    code, _, err = call(tmp_path / "model", tmp_path / "new", "--like", tmp_path / "model")
    assert code == 1 and "leave it out" in err
