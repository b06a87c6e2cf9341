"""Random classifiers of several families on disk, as reward models."""

from __future__ import annotations

import torch
import transformers

from kits.engine import SIZE, tiny

FAMILIES = {
    "llama": {},
    "qwen2": {},
    "gemma2": {"head_dim": 16, "sliding_window": 8},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
}


def saved(folder, family="llama", labels=1, what="SequenceClassification"):
    """A random classifier with weights large enough that attention looks somewhere,
    and the tokenizer of the tiny models.
    """
    torch.manual_seed(5)
    tokenizer = tiny().tokenizer
    size = FAMILIES[family] if family == "gpt2" else {**SIZE, **FAMILIES[family]}
    config = transformers.AutoConfig.for_model(
        family,
        **size,
        vocab_size=len(tokenizer),
        num_labels=labels,
        pad_token_id=len(tokenizer) - 1,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = getattr(transformers, f"AutoModelFor{what}").from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(4)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
