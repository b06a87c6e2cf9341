"""Which architectures are carried, and for every other one the part that is missing."""

from __future__ import annotations

from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from rondel.core.errors import ModelError
from rondel.models import alibi
from rondel.models.vision_families import FAMILIES
from rondel.planner.shapes import SIZES, refuse_sizes

# families whose recurrent layers are all carried
RECURRENT_KINDS = frozenset(
    {
        "bailing_hybrid",
        "bamba",
        "deepseek_v4",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "mamba",
        "mamba2",
        "minimax",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "qwen4_exp_text",
        "recurrent_gemma",
        "rwkv",
        "zamba",
        "xlstm",
        "zamba2",
        "zaya",
    }
)

# families whose indexers are all carried (models/indexer.py, models/block_indexer.py)
INDEXED_KINDS = frozenset({"axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4", "qwen4_exp_text"})


# families whose layers compress windows of tokens (models/compressed_attention.py)
COMPRESSED_KINDS = frozenset({"deepseek_v4"})
COMPRESSED_LAYERS = {"compressed_sparse_attention", "heavily_compressed_attention"}


def auto_class(config: Any) -> Any:
    return AutoModelForCausalLM if config.model_type not in FAMILIES else AutoModelForImageTextToText


def refuse_architecture(config: Any) -> None:
    """Architectures that this house cannot carry, each by the part that is missing. docs/families.md has the list."""
    text, kind = config.get_text_config(), config.model_type
    refuse_sizes(kind, {name: _uniform_size(text, name) for name in SIZES})
    layers = set(getattr(text, "layer_types", None) or ())
    recurrent = {t for t in layers if t.startswith(("linear", "mamba", "conv", "recurrent", "hybrid"))}
    strange = (
        layers
        - recurrent
        - {"full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "dense", "sparse"}
        - {"moe", "mlp"}
        - (COMPRESSED_LAYERS if kind in COMPRESSED_KINDS else set())
    )
    if kind in RECURRENT_KINDS or kind in ODD:
        recurrent = set()
    reasons = [
        (
            getattr(config, "is_encoder_decoder", False),
            "it is an encoder-decoder; only decoder-only models are carried",
        ),
        (
            bool(recurrent),
            f"it has recurrent layers ({', '.join(sorted(recurrent))}); their state cannot be packed or paged yet",
        ),
        (kind in ODD, ODD.get(kind, "")),
        (
            bool(strange),
            f"it has layers of type {', '.join(sorted(strange))}; the packed attention carries full, sliding, chunked "
            "and indexed ones",
        ),
        ("indexed_attention" in layers and kind not in INDEXED_KINDS, "its indexer chooses keys in a way of its own"),
        (
            getattr(text, "alibi", False) and kind not in alibi.FAMILIES,
            "it uses ALiBi, which is carried for bloom and mpt alone",
        ),
        (not _shares_attention(config), "its attention does not go through transformers' attention interface"),
        (_looks_otherwise(config), f"it looks at images in a way of its own; {', '.join(FAMILIES)} are carried"),
        (_is_encoder(config), "it is an encoder, whose tokens see those behind them; only decoders are carried"),
    ]
    for holds, why in reasons:
        if holds:
            raise ModelError(f"model type '{kind}' is not supported: {why}. {REMEDY}", page="docs/families.md")


REMEDY = (
    "Engine and trainer load the same module, so another engine does not help: take a model of a family listed as "
    "equal in docs/families.md."
)
ODD = {
    "qwen4_exp": "its tower and its three rows of positions are not carried; its part for text is (qwen4_exp_text)",
    **dict.fromkeys(
        ("inkling_text", "inkling2_text"),
        "its scores have a learned bias for each query, head and distance, which no attention here adds",
    ),
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
        and (config.model_type not in FAMILIES)
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
    kinds = {"biogpt", "stablelm", *alibi.FAMILIES, *RECURRENT_KINDS}
    return getattr(known, "_supports_attention_backend", True) or config.model_type in kinds
