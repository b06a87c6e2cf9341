"""The config of a vision-language model with random weights, and what its tokenizer has for images."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

from rondel.core.errors import ModelError
from rondel.core.tiles import AROUND, WHOLE
from rondel.models.vision_families import FAMILIES

MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TILE_MARKS = (AROUND, WHOLE, "<image>", "<row_1_col_1>")  # other rows and columns are spelled
CHAT = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' }}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'video' %}"
    "{{ '<|vision_start|><|video_pad|><|vision_end|>' }}{% else %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% endif %}{% endfor %}{% endif %}"
    "{% if m['role'] == 'assistant' %}{{ '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def chat_template(kind: Any) -> str:
    """A processor writes the frame of an image, or its tiles, where the template does not."""
    mark = {"tiles": TILE_MARKS[2], "positions": MARKS[2]}.get(FAMILIES[kind].form.name, MARKS[0])
    return CHAT if FAMILIES[kind].mrope else CHAT.replace("<|vision_start|><|image_pad|><|vision_end|>", mark)


def special_tokens(kind: Any) -> tuple[str, ...]:
    """What a tokenizer has for images: begin, end, placeholder, and one more."""
    return TILE_MARKS if FAMILIES[kind].form.name == "tiles" else MARKS


def random_vision_config(kind: str, given: dict[str, Any], tokenizer: Any) -> tuple[Any, set[str]]:
    """Keys of the language model as for any family, those of the tower in `vision_config`.
    -> the config, and the keys that it has.
    """
    text, tower, family = dict(given), dict(given.get("vision_config") or {}), FAMILIES[kind]
    text.pop("vision_config", None)
    plain = AutoConfig.for_model(kind)
    if plain.vision_config is None:  # a family that may come without a tower
        plain = AutoConfig.for_model(kind, vision_config={})
    known = {*type(plain.text_config)().to_dict(), *plain.text_config.attribute_map, "head_dim", "vision_config"}
    if odd := [
        k for k in tower if k not in {*type(plain.vision_config)().to_dict(), *plain.vision_config.attribute_map}
    ]:
        raise ModelError(f"the vision_config of a {kind} has no '{odd[0]}'")
    if family.mrope:
        text.setdefault("rope_parameters", _rope_parameters(plain.text_config, text))
    if family.width is not None:
        tower.setdefault(family.width, text.get("hidden_size", plain.text_config.hidden_size))
    outer = plain.to_dict().keys() - known  # of the model as a whole
    begin, end, image, video = tokenizer.convert_tokens_to_ids(list(special_tokens(kind)))
    config = AutoConfig.for_model(
        kind,
        text_config={k: v for k, v in text.items() if k in known},
        vision_config=tower,
        tie_word_embeddings=bool(text.get("tie_word_embeddings", False)),
        **{mark: token for mark, token in zip(family.marks, (begin, end, image)) if mark},
        **({"video_token_id": video} if "video_token_id" in outer else {}),
        **{k: v for k, v in text.items() if k in outer},
    )
    return config, known | outer


def _rope_parameters(plain: Any, text: dict[str, Any]) -> dict[str, Any]:
    """Half of the rotary pairs of a head turn with the time, a quarter each with row and column."""
    heads = text.get("num_attention_heads", plain.num_attention_heads)
    width = text.get("hidden_size", plain.hidden_size)
    head = text.get("head_dim") or getattr(type(plain), "head_dim", None) or width // heads
    part = (plain.rope_parameters or {}).get("partial_rotary_factor", 1.0)
    pairs = int(head * part) // 2
    side = 3 * pairs // 8
    sections = {"mrope_section": [pairs - 2 * side, side, side]}
    return {
        "rope_type": "default",
        "rope_theta": 1e4,
        **sections,
        **({} if part == 1.0 else {"partial_rotary_factor": part}),
    }
