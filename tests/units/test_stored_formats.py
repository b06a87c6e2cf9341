"""Quantised checkpoints of others are read: each layout against a loop over its definition, and whole models through `rondel prepare`."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kits.engine import SIZE, plain_logprobs, prompt
from kits.train import model
from rondel.core.errors import ModelError
from rondel.formats import format_of
from rondel.formats.checkpoint_layouts import decode_stored
from rondel.models.load import load_model
from rondel.models.prepare import prepare_model
from rondel.models.save import save_model

G = torch.Generator().manual_seed(0)


def draw(*shape, high=16):
    return torch.randint(0, high, shape, generator=G)


def words(codes, order=range(8)):
    """[..., 8 N] of 0 to 15 -> int32 [..., N]: the nibble at place i is code order[i]."""
    out = torch.zeros(*codes.shape[:-1], codes.shape[-1] // 8, dtype=torch.int64)
    for n in range(out.shape[-1]):
        for place, which in enumerate(order):
            out[..., n] |= codes[..., 8 * n + which] << (4 * place)
    return torch.where(out >= 1 << 31, out - (1 << 32), out).to(torch.int32)


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_gptq(version, shuffled):
    o, i, groups = 16, 64, 4
    codes, zeros, scales = draw(i, o), draw(groups, o), torch.rand(groups, o, generator=G).half()
    index = torch.arange(i) // (i // groups)
    index = index[torch.randperm(i, generator=G)] if shuffled else index
    parts = {"qweight": words(codes.t()).t().contiguous(), "qzeros": words(zeros), "scales": scales}
    parts |= {"g_idx": index.int()} if shuffled else {}
    got = decode_stored(parts, {"quant_method": "gptq", "bits": 4, "checkpoint_format": version})
    for row in range(o):
        for column in range(0, i, 7):
            g = int(index[column])
            zero = int(zeros[g, row]) + (version == "gptq")
            assert float(got[row, column]) == (int(codes[column, row]) - zero) * float(scales[g, row])


def test_awq():
    o, i, groups = 16, 64, 4
    codes, zeros, scales = draw(i, o), draw(groups, o), torch.rand(groups, o, generator=G).half()
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {"qweight": words(codes, order), "qzeros": words(zeros, order), "scales": scales}
    got = decode_stored(parts, {"quant_method": "awq", "bits": 4, "version": "gemm"})
    group = torch.arange(i) // (i // groups)
    assert torch.equal(got, ((codes - zeros[group]) * scales.float()[group]).t())


@pytest.mark.parametrize("name", ["int4", "mxfp4", "nvfp4", "mxfp8"])
def test_compressed_tensors(name):
    w = torch.randn(64, 128, generator=G)
    parts = format_of(name).encode(w)
    if "fp" in name:
        parts.pop("weight_shape", None)
    config = {"quant_method": "compressed-tensors", "format": f"{name}-quantized"}
    assert torch.equal(decode_stored(parts, config), format_of(name).fake(w))


def test_compressed_tensors_of_whole_numbers_and_zero_points():
    codes, scale = draw(32, 64, high=255) - 127, torch.rand(32, 1, generator=G)
    config = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    got = decode_stored({"weight": codes.to(torch.int8), "weight_scale": scale}, config)
    assert torch.equal(got, codes.float() * scale)
    codes, zeros, scale = draw(32, 64), draw(32, 2), torch.rand(32, 2, generator=G)
    packed = {"weight_packed": words(codes), "weight_scale": scale, "weight_shape": torch.tensor([32, 64])}
    packed |= {"weight_zero_point": words(zeros.t()).t().contiguous()}
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {"g": {"weights": {"num_bits": 4, "group_size": 32}}},
    }
    group = torch.arange(64) // 32
    assert torch.equal(decode_stored(packed, config), (codes - zeros[:, group]) * scale[:, group])


def words_of_8_bits(codes):
    """[..., 4 N] of 0 to 255 -> int32 [..., N]."""
    out = sum(codes[..., i::4].long() << 8 * i for i in range(4))
    return torch.where(out >= 1 << 31, out - (1 << 32), out).to(torch.int32)


def test_a_module_is_decoded_as_the_config_group_that_stored_it():
    """Of two groups the one whose bits and scales its tensors have; the first would give half of its columns twice."""
    channel, group = {"num_bits": 4, "strategy": "channel"}, {"num_bits": 4, "strategy": "group", "group_size": 16}
    wide = {"num_bits": 8, "strategy": "channel"}
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {name: {"weights": w} for name, w in (("a", channel), ("b", group), ("c", wide))},
    }
    codes, scale = draw(16, 64, high=256), torch.rand(16, 1, generator=G)
    stored = {"weight_packed": words_of_8_bits(codes), "weight_scale": scale, "weight_shape": torch.tensor([16, 64])}
    assert torch.equal(decode_stored(stored, config), (codes - 128) * scale)
    codes, scale = draw(16, 64), torch.rand(16, 4, generator=G)
    stored = {"weight_packed": words(codes), "weight_scale": scale, "weight_shape": torch.tensor([16, 64])}
    assert torch.equal(decode_stored(stored, config), (codes - 8) * scale.repeat_interleave(16, 1))
    contradiction = config | {"config_groups": {"b": {"weights": group}}}
    narrow = {"weight_shape": torch.tensor([16, 32]), "weight_scale": scale[:, :2]}
    for wrong in (narrow, {"weight_scale": scale[:, :3]}, {"weight_scale": scale[1:]}):
        with pytest.raises(ModelError, match="q_proj: none of the config_groups stores weight_packed"):
            decode_stored(stored | wrong, contradiction, "q_proj")


def test_compressed_tensors_in_the_order_of_activations_with_zero_points_and_in_blocks():
    method = {"quant_method": "compressed-tensors"}
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32, "actorder": "group"}
    codes, scale = draw(16, 64), torch.rand(16, 2, generator=G)
    index = (torch.arange(64) // 32)[torch.randperm(64, generator=G)]
    stored = {"weight_packed": words(codes), "weight_scale": scale, "weight_shape": torch.tensor([16, 64])}
    config = method | {"config_groups": {"a": {"weights": weights}}}
    assert torch.equal(decode_stored(stored | {"weight_g_idx": index.int()}, config), (codes - 8) * scale[:, index])
    unordered = decode_stored(stored | {"weight_g_idx": torch.full((64,), -1)}, config)
    assert torch.equal(unordered, (codes - 8) * scale.repeat_interleave(32, 1))
    with pytest.raises(ModelError, match=r"w: g_idx .* names groups 0 to 2 for 64 columns and 2 groups"):
        decode_stored(stored | {"weight_g_idx": torch.arange(64) // 30}, config, "w")

    codes, zeros, scale = draw(16, 64, high=256) - 128, draw(16, 1) - 8, torch.rand(16, 1, generator=G)
    stored = {"weight": codes.to(torch.int8), "weight_scale": scale, "weight_zero_point": zeros.to(torch.int8)}
    assert torch.equal(decode_stored(stored, method | {"format": "int-quantized"}), (codes - zeros) * scale)

    w, scale = torch.randn(200, 300, generator=G).to(torch.float8_e4m3fn), torch.rand(2, 3, generator=G)
    weights = {"num_bits": 8, "strategy": "block", "block_structure": [128, 128]}
    config = method | {"format": "float-quantized", "config_groups": {"a": {"weights": weights}}}
    each = scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    assert torch.equal(decode_stored({"weight": w, "weight_scale": scale}, config), w.float() * each)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"g_idx": torch.full((64,), -1)}, "names groups -1 to -1 for 64 columns and 2 groups"),
        ({"g_idx": torch.arange(64) // 16}, "names groups 0 to 3 for 64 columns and 2 groups"),
        ({"g_idx": torch.zeros(8)}, "for 64 columns"),
        (
            {"scales": torch.full((2, 16), float("nan"))},
            "with scales that are not finite numbers: fetch its file again",
        ),
        ({"scales": torch.full((2, 16), float("inf"))}, "with scales that are not finite"),
        ({"scales": torch.ones(2, 1)}, "beside codes .*: of each group there are 16"),
        ({"scales": torch.ones(4, 16), "qzeros": words(torch.zeros(4, 16).long())}, "group_size = 32 makes others"),
        ({"qzeros": words(torch.zeros(4, 16).long())}, "scales .* and zeros"),
        ({"desc_act": True}, "desc_act = true, but without g_idx"),
    ],
)
def test_gptq_whose_tensors_and_config_contradict_each_other(change, says):
    codes = words(draw(16, 64)).t().contiguous()
    parts = {"qweight": codes, "qzeros": words(draw(2, 16)), "scales": torch.ones(2, 16)}
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    more = {key: value for key, value in change.items() if key in config or key == "desc_act"}
    with pytest.raises(ModelError, match=f"w.*{says}"):
        decode_stored(parts | {k: v for k, v in change.items() if k not in more}, config | more, "w")


def test_a_last_group_that_is_shorter():
    codes, zeros, scales = draw(80, 16), draw(3, 16), torch.rand(3, 16, generator=G).half()
    parts = {"qweight": words(codes.t()).t().contiguous(), "qzeros": words(zeros), "scales": scales}
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}
    group = torch.arange(80) // 32
    assert torch.equal(decode_stored(parts, config), ((codes - zeros[group]) * scales.float()[group]).t())


def test_what_is_not_known_says_so():
    with pytest.raises(ModelError, match="stored in bitnet; what is decoded is compressed-tensors, gptq, awq"):
        decode_stored({}, {"quant_method": "bitnet"}, "w")
    with pytest.raises(ModelError, match="w is stored in gptq, but without 'qweight'"):
        decode_stored({}, {"quant_method": "gptq"}, "w")
    with pytest.raises(ModelError, match="3 bits a weight do not fill a word"):
        decode_stored({}, {"quant_method": "gptq", "bits": 3})


@pytest.mark.slow
@pytest.mark.parametrize("files", [1, 3])
def test_a_quantised_model_is_prepared(tmp_path, monkeypatch, files):
    """Its tensors in one file, and spread so that a weight and its scales are apart."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    loaded = model("llama", "bfloat16")
    source = tmp_path / "source"
    save_model(loaded, source)
    whole, stored = load_file(source / "model.safetensors"), {}
    wanted = dict(whole)
    for name, w in whole.items():
        if not name.endswith("proj.weight"):
            stored[name] = w
            continue
        parts = format_of("int4").encode(w)
        wanted[name] = format_of("int4").decode(parts, torch.bfloat16)
        stored |= {name.removesuffix("weight") + part: t for part, t in parts.items()}
    (source / "model.safetensors").unlink()
    names = sorted(stored)
    index = {}
    for n in range(files):
        own = names[n::files]
        save_file({name: stored[name] for name in own}, source / f"m{n}.safetensors", metadata={"format": "pt"})
        index |= dict.fromkeys(own, f"m{n}.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = json.loads((source / "config.json").read_text())
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"g": group},
    }
    (source / "config.json").write_text(json.dumps(config))
    said = []
    ready = prepare_model(str(source), None, tmp_path / "cache", lambda *words: said.append(words))
    got = load_file(ready / "model.safetensors")
    assert got.keys() == wanted.keys()
    assert [n for n in got if not torch.equal(got[n], wanted[n])] == []
    assert all(torch.equal(got[n], wanted[n]) for n in got)
    assert any("stored in compressed-tensors" in text for _, text in said)


def write_gptq(w, size=32):
    """[O, I] -> the tensors of a GPTQ module, written here, and what they stand for."""
    o, i = w.shape
    scales, zeros = (w.abs().view(o, -1, size).amax(-1) / 7).half(), torch.full((o, i // size), 8)
    codes = (w.view(o, -1, size) / scales.float()[..., None]).round().clamp(-8, 7).long() + 8
    meant = ((codes - 8) * scales.float()[..., None]).view(o, i)
    codes = codes.view(o, i)
    stored = {
        "qweight": words(codes).t().contiguous(),
        "qzeros": words(zeros.t() - 1),
        "scales": scales.t().contiguous(),
        "g_idx": (torch.arange(i) // size).int(),
    }
    return stored, meant


def write_awq(w, size=32):
    """The same of AWQ."""
    o, i = w.shape
    low, high = w.view(o, -1, size).amin(-1), w.view(o, -1, size).amax(-1)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(0, 15).long()
    codes = (w.view(o, -1, size) / scales.float()[..., None]).round().long() + zeros[..., None]
    codes = codes.clamp(0, 15)
    meant = ((codes - zeros[..., None]) * scales.float()[..., None]).view(o, i)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    stored = {
        "qweight": words(codes.view(o, i).t().contiguous(), order),
        "qzeros": words(zeros.t().contiguous(), order),
        "scales": scales.t().contiguous(),
    }
    return stored, meant


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "write", "more"),
    [
        ("gptq", write_gptq, {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}),
        ("awq", write_awq, {"bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}),
    ],
)
def test_a_model_of_gptq_or_awq_is_read(tmp_path, monkeypatch, method, write, more):
    """Prepared, it computes with the numbers that its codes stand for; before, an error names the command."""
    monkeypatch.setenv("RONDEL_CACHE", str(tmp_path / "cache"))
    loaded = load_model({"random": "llama", **SIZE}, dtype="bfloat16")
    source = tmp_path / "source"
    save_model(loaded, source)
    whole, stored = load_file(source / "model.safetensors"), {}
    for name, w in whole.items():
        if not name.endswith("proj.weight"):
            stored[name] = w
            continue
        parts, meant = write(w.float())
        assert float((meant - w.float()).abs().max()) < 0.2 * float(w.float().abs().max())
        with torch.no_grad():
            loaded.model.get_parameter(name).copy_(meant)
        stored |= {name.removesuffix("weight") + part: t for part, t in parts.items()}
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method, **more}}))
    with pytest.raises(ModelError, match=f"stored in {method}: decode it once, rondel prepare"):
        load_model(str(source))
    prepare_model(str(source), None, tmp_path / "cache", lambda *words: None)
    got, tokens = load_model(str(source), dtype="bfloat16"), prompt(3, 12)
    mine = dict(got.model.named_parameters())
    assert all(torch.equal(mine[name], p) for name, p in loaded.model.named_parameters())
    assert plain_logprobs(got, tokens) == pytest.approx(plain_logprobs(loaded, tokens), abs=0.01)
