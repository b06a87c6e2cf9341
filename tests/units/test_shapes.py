"""Sizes from a config: counted beside transformers, which makes the model."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from rondel.core.errors import ModelError
from rondel.planner import memory, tower
from rondel.planner.families import DEFAULTS, MODELS, PUBLIC
from rondel.planner.hardware import find_hardware
from rondel.planner.host_memory import bytes_beside
from rondel.planner.memory import memory_bills
from rondel.planner.shapes import model_shape, of_config, route_bytes
from rondel.planner.workload import Workload

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 105,
}
LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
DEEPSEEK = {
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "q_lora_rank": 20, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10, "first_k_dense_replace": 1,
}  # fmt: skip
TINY = {
    "llama": {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    "mistral": {"num_key_value_heads": 2, "head_dim": 24},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 32},
    "qwen3_moe": {"num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "mlp_only_layers": [1]},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 16},
    "gemma3_text": {"num_key_value_heads": 2, "head_dim": 16},
    "phi3": {"num_key_value_heads": 2, "pad_token_id": 0},
    "gpt_oss": {"num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {
        "num_key_value_heads": 2, "head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "attention_bias": True,
        "use_qk_norm": True,
    },
    "qwen3_5_text": {"num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 4, **LINEAR},
    "qwen3_5_moe_text": {
        "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 4, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 24, **LINEAR,
    },
    "deepseek_v3": DEEPSEEK,
    "deepseek_v32": {**DEEPSEEK, "index_topk": 8, "index_n_heads": 3, "index_head_dim": 16},
    "glm_moe_dsa": {
        **DEEPSEEK, "index_topk": 8, "index_n_heads": 3, "index_head_dim": 16, "indexer_types": ["full", "shared", "full"],
    },
    "kimi_linear": {
        **{k: v for k, v in DEEPSEEK.items() if k in ("num_key_value_heads", "moe_intermediate_size") or k.endswith(("kv_lora_rank", "head_dim"))},
        "num_experts": 4, "num_experts_per_token": 2, "num_hidden_layers": 6, "linear_head_dim": 8, "linear_num_heads": 3, "pad_token_id": 0,
    },
    "minimax": {"num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


def built(kind):
    config = CONFIG_MAPPING[kind](**(SMALL | TINY[kind]))
    return config, AutoModelForCausalLM.from_config(config)


@pytest.mark.slow
def test_every_number_of_a_model_that_sees_is_counted(tmp_path):
    """The eye, too: of a random model and of the folder that it is saved to, with what
    each family has that the others have not.
    """
    from kits.vision import EYES, model, recipe
    from rondel.models import vision
    from rondel.models.save import save_model

    assert EYES.keys() - tower.DEFAULTS.keys() == {"gemma4"}, "whose layers the planner does not know"
    for kind in tower.DEFAULTS:
        loaded, found = model(kind), model_shape(recipe(kind))
        exact = sum(p.numel() for p in loaded.model.parameters())
        eye = sum(p.numel() for p in vision.vision_tower(loaded.model).parameters())
        assert (found.parameter_count, found.tower.parameter_count) == (exact, eye), kind
        head = found.embedding_parameters * (not found.tied)
        idle = found.expert_parameters * (found.experts - found.per_token) // max(1, found.experts)
        assert found.active_parameters == exact - eye - head - idle, "a token is multiplied with none of it"
        save_model(loaded, tmp_path / kind)
        assert model_shape(str(tmp_path / kind)).parameter_count == exact


@pytest.mark.slow
def test_what_an_image_costs_is_what_the_tower_computes_and_keeps():
    """Arithmetic against torch's own counter; activations that are kept, in bytes of saved
    tensors, within what fusing them leaves open.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForImageTextToText

    from kits.vision import image, model, recipe
    from rondel.models import vision

    for kind in tower.DEFAULTS:
        loaded, found = model(kind), model_shape(recipe(kind)).tower
        one = image(loaded, 1, 6, 8)
        plain = AutoModelForImageTextToText.from_config(
            loaded.model.config, attn_implementation="eager"
        )  # whose operations are torch's own
        with FlopCounterMode(display=False) as counted:
            vision.encode_images(plain, loaded.sight, [one])
        # its windows see less than all
        fused = 0 if kind != "qwen2_5_vl" else 4 * (one.tokens * 4) ** 2 * found.width * found.layers
        told = found.forward_flops(one.tokens)
        assert 0.999 * (told - fused) <= counted.get_total_flops() <= 1.001 * told, kind
        kept: dict[int, int] = {}
        mine = {p.untyped_storage().data_ptr() for p in plain.parameters()}
        plain.set_attn_implementation("sdpa")

        def keep(t, kept=kept, mine=mine):
            if t.untyped_storage().data_ptr() not in mine:
                kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            features = vision.encode_images(plain, loaded.sight, [one])
        assert features.main.requires_grad and 0.7 < sum(kept.values()) / found.activation_bytes(one.tokens, 4) < 1.5, (
            kind,
            kept,
        )
        assert found.activation_bytes(one.tokens, 4, trained=False) < found.activation_bytes(one.tokens, 4)


@pytest.mark.parametrize("kind", TINY)
def test_every_number_of_a_family_is_counted(kind, tmp_path):
    config, model = built(kind)
    exact = sum(p.numel() for p in model.parameters())
    config.save_pretrained(tmp_path)
    assert of_config({"model_type": kind, **(SMALL | TINY[kind])}).parameter_count == exact
    assert model_shape(str(tmp_path)).parameter_count == exact, "from the file that transformers writes"
    assert TINY.keys() == DEFAULTS.keys() - tower.DEFAULTS.keys()


@pytest.mark.parametrize("kind", TINY)
def test_a_token_is_multiplied_with_what_it_is_routed_to(kind):
    _, model = built(kind)
    s = of_config({"model_type": kind, **(SMALL | TINY[kind])})
    idle = s.expert_parameters * (s.experts - s.per_token) // s.experts if s.experts else 0
    assert s.active_parameters == sum(p.numel() for p in model.parameters()) - idle - s.embedding_parameters * (
        not s.tied
    )


@pytest.mark.parametrize(
    "name, billions, kv",
    [
        ("70b", 70.553706496, 2 * 80 * 8 * 128 * 2), ("llama3-8b", 8.030261248, 131072), ("7b", 7.615616512, 57344),
        ("235b-a22b", 235.093634560, 192512), ("671b", 671.026404352, None), ("smollm2-135m", 0.134515008, None),
        ("qwen3-30b-a3b", 30.532122624, None), ("mixtral-8x7b", 46.702792704, None), ("qwen2-vl-2b", 2.208985600, None),
        ("qwen2-vl-7b", 8.291375616, None), ("qwen2.5-vl-3b", 3.754622976, None), ("qwen2.5-vl-7b", 8.292166656, 57344),
        ("qwen3-vl-4b", 4.437815808, None), ("Qwen/Qwen3-VL-8B-Instruct", 8.767123696, 147456),
    ],
)  # fmt: skip
def test_public_models_are_as_large_as_their_cards_say(name, billions, kv):
    found = model_shape(name)
    assert found.parameter_count == round(billions * 1e9) and found.source
    assert kv is None or found.kv_bytes() == kv


@pytest.mark.parametrize(
    "name, billions",
    [
        ("gemma-3-270m", 0.268), ("gemma-3-1b", 1.0), ("gemma-3-4b", 3.88), ("gemma-3-12b", 11.77), ("google/gemma-3-27b-it", 27.0), ("phi-4", 14.7),
        ("phi-4-mini", 3.84), ("gpt-oss-20b", 20.9), ("gpt-oss-120b", 116.8), ("glm-4.5", 353), ("glm-4.5-air", 107), ("qwen3.5-27b", 27),
        ("qwen3.5-397b-a17b", 397),
    ],
)  # fmt: skip
def test_sizes_of_cards_are_met_within_three_percent(name, billions):
    assert model_shape(name).parameter_count == pytest.approx(billions * 1e9, rel=0.03)
    assert model_shape("gpt-oss-120b").active_parameters == pytest.approx(5.1e9, rel=0.03) and model_shape(
        "qwen3.5-397b-a17b"
    ).active_parameters == pytest.approx(17e9, rel=0.05)


def test_the_cache_is_as_large_as_the_model_writes():
    """What transformers' own cache holds: keys and values, or latents."""
    import torch

    for kind in ("llama", "gemma3_text", "deepseek_v3"):
        _, model = built(kind)
        cache = model(torch.zeros(1, 7, dtype=torch.long), use_cache=True).past_key_values
        held = sum(t.numel() for layer in cache.layers for t in (layer.keys, layer.values))
        assert of_config({"model_type": kind, **(SMALL | TINY[kind])}).kv_bytes(1) * 7 == held
    v3, llama = model_shape("deepseek-v3"), model_shape("llama3-8b")
    assert v3.kv_bytes() == v3.kv_bytes(tensor=8) == 61 * (512 + 64) * 2, "every device has all of the latents"
    assert v3.trained_kv_bytes() == 61 * 128 * (192 + 128) * 2
    assert llama.kv_bytes() == llama.trained_kv_bytes() == 8 * llama.kv_bytes(tensor=8)


@pytest.mark.slow
def test_the_record_of_experts_and_chosen_keys_is_as_large_as_engine_and_trainer_keep_it():
    """A token's, where indexers choose (more pages than keys that one chooses), where none needs to, and without any."""
    import asyncio

    import numpy as np

    from kits.engine import ask, engine, prompt, tiny
    from rondel.core.types import Group, Score, Task, Trajectory
    from rondel.train.pack import batch_of, pack_samples

    sizes = SMALL | {"max_position_embeddings": 64}
    found = []
    for kind, pages in (("deepseek_v32", 100), ("glm_moe_dsa", 100), ("deepseek_v32", 8), ("qwen3_moe", 100)):
        loaded = tiny(kind, **(sizes | TINY[kind]))
        e, given = engine(loaded, kv_pages=pages, routes=True), prompt(1, 4)
        done = asyncio.run(e.generate(replace(ask(given, n=3), wants=frozenset({"experts"}))))
        each = route_bytes(of_config({"model_type": kind, **sizes, **TINY[kind]}), pages)
        assert e.pages.routes.nbytes == (pages + 1) * each, kind
        t = Trajectory()
        t.extend(given)
        t.extend(done.tokens, logprobs=done.logprobs, versions=[0] * len(done.tokens))
        t.experts = done.experts
        t.score = Score(1.0)
        sample_batch = batch_of([Group(0, Task("t", "x", {}), [t], 0)])
        assert np.asarray(t.experts).nbytes == (len(t.tokens) - 1) * each
        packed = pack_samples(sample_batch, [0])
        assert packed.routes.nbytes == 4 * len(packed.tokens) * each
        found.append(each)
    assert found[0] > found[2] and route_bytes(of_config({"model_type": "llama", **SMALL}), 100) == 0


def test_the_plan_bills_the_record_where_it_lies():
    """In host memory beside GPUs, 250 kB a token of DeepSeek V3.2; on a CPU with all the rest; not without a replay."""
    v32 = of_config({"model_type": "deepseek_v32", **DEFAULTS["deepseek_v32"]})
    gpu = Workload(v32, find_hardware("h200"), gpus=64)
    each = route_bytes(gpu.shape, 1 << 20)
    assert each == 2 * (58 * 8 + 61 * 2048) and each / 1000 == pytest.approx(250, rel=0.01)
    told, tokens = bytes_beside(gpu)["host"], gpu.samples * (gpu.prompt + gpu.mean)
    assert told["routes of a step"] == tokens * each
    assert told["routes of cached tokens"] == memory.kv_tokens(gpu) * gpu.engine_count * each
    assert "routes of cached tokens" not in memory_bills(gpu)[0].rows
    assert bytes_beside(replace(gpu, replays=False)) == {}
    [cpu] = memory_bills(replace(gpu, hardware=find_hardware("cpu"), gpus=1))
    assert {"routes of cached tokens", "routes of a step", "replayed routes"} <= cpu.rows.keys()


@pytest.mark.slow
def test_the_cache_is_as_large_as_the_engine_keeps():
    """Bytes of the pools after a request, a page: grouped heads, one head for each query, latents, a
    sliding window (all kept).
    """
    import asyncio

    from kits.engine import ask, engine, prompt, tiny

    sizes = SMALL | {"max_position_embeddings": 64}
    kinds = {
        "llama": {"num_key_value_heads": 2},
        "qwen2": {"num_key_value_heads": 4},
        "mistral": {"num_key_value_heads": 2, "sliding_window": 8},
    }
    kinds |= {kind: TINY[kind] for kind in ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_linear", "minimax")}
    for kind, more in kinds.items():
        loaded = tiny(kind, **(sizes | more))
        e = engine(loaded, kv_pages=100)
        asyncio.run(e.generate(ask(prompt(1, 10), n=3)))
        held = (e.pages.keys.pool_bytes + e.pages.values.pool_bytes) / 101
        found = of_config({"model_type": kind, **sizes, **more})
        assert found.kv_bytes(4) == held == loaded.cached, kind
        assert found.state_bytes(4) == loaded.state_bytes, kind


def test_an_adapter_is_as_large_as_peft_makes_it():
    peft = pytest.importorskip("peft")
    _, model = built("qwen3")
    s = of_config({"model_type": "qwen3", **SMALL, **TINY["qwen3"]})
    for targets in ("all-linear", ["q_proj", "v_proj"]):
        wrapped = peft.get_peft_model(
            built("qwen3")[1], peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
        )
        assert s.lora_parameters(4, targets) == sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
    assert sum(p.numel() for p in model.parameters()) == s.parameter_count


def test_fifty_megabytes_fit_only_two_projections():
    """C19: an adapter of rank 32 on a 32B model."""
    big = model_shape("qwen2.5-32b")
    assert 2 * big.lora_parameters(32, ["q_proj", "v_proj"]) == pytest.approx(67e6, rel=0.02)
    assert 2 * big.lora_parameters(32) == pytest.approx(537e6, rel=0.02)


def test_quantised_weights_are_read_off_the_config():
    base = {"model_type": "llama", **SMALL}
    assert of_config(base).bits == 16
    assert of_config({**base, "quantization_config": {"quant_method": "gptq", "bits": 4}}).bits == 4
    assert of_config({**base, "quantization_config": {"quant_method": "fp8"}}).bits == 8


def test_who_is_unknown_is_told_the_nearest():
    with pytest.raises(ModelError, match="Did you mean 'qwen3-8b'"):
        model_shape("qwen3-8bb")
    with pytest.raises(ModelError, match=r"model type 'llamma'\. Did you mean 'llama'"):
        of_config({"model_type": "llamma"})


def test_every_name_leads_to_a_shape(tmp_path):
    assert all(model_shape(name).parameter_count > 1e8 for name in [*MODELS, *PUBLIC])
    assert model_shape("Qwen/Qwen3-8B").name == "qwen3-8b"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"})[:-2])
    with pytest.raises(ModelError, match="is no config of a model"):
        model_shape(str(tmp_path))
