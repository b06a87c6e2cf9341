"""The config and the tokenizer of a model with random weights: { random = "llama", seed = 0, hidden_size = 128,
... }."""

from __future__ import annotations

import string
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedTokenizerFast

from rondel.core.errors import ModelError, error_boundary
from rondel.models import random_vision
from rondel.models.routing_tape import expert_count
from rondel.models.vision_families import FAMILIES
from rondel.planner.shapes import refuse_sizes

CHAT = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% if m['role'] == 'assistant' %}{{ '<eos>' "
    "}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def character_tokenizer(beside: Sequence[str] = (), template: str | None = None) -> PreTrainedTokenizerFast:
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
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=template or (random_vision.CHAT if beside else CHAT),
    )


def random_tokenizer(recipe: dict[str, Any]) -> PreTrainedTokenizerFast:
    kind = recipe.get("random")
    if kind not in FAMILIES:
        return character_tokenizer()
    return character_tokenizer(random_vision.special_tokens(kind), random_vision.chat_template(kind))


def random_config(recipe: dict[str, Any], tokenizer: Any) -> Any:
    """The transformers config of a recipe's inline table; sizes it does not give are the family's own."""
    kind, seed, blocks = recipe.pop("random", None), recipe.pop("seed", 0), recipe.pop("block_diffusion", None)
    if kind is None:
        raise ModelError(
            f'model.path = {recipe}: an inline table makes a random model and needs random = "llama" (a transformers '
            "model type)"
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
        vocabulary = len(tokenizer) + (blocks is not None)  # the mask is no token of the tokenizer
        given = {"vocab_size": vocabulary, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None, **recipe}
        if kind in FAMILIES:
            config, fields = random_vision.random_vision_config(kind, given, tokenizer)
        else:
            config = AutoConfig.for_model(kind, **given)
            fields = {*type(config)().to_dict(), *config.attribute_map, "head_dim"}
        unknown = [k for k in recipe if k not in fields]
        if unknown:
            raise ModelError(f"a {kind} config has no '{unknown[0]}'")
        text = config.get_text_config()
        if (each := getattr(text, "num_experts_per_tok", None) or 0) > (all_of_them := expert_count(text)) > 0:
            raise ModelError(
                f"a {kind} of {all_of_them} experts cannot send every token to {each} of them: set num_experts_per_tok"
            )
    if blocks is not None:
        from rondel.models.block_diffusion.settings import add_block_settings

        add_block_settings(config, blocks, first=len(tokenizer))
    return config
