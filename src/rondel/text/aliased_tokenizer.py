"""A twin of a tokenizer in which every control token has another name:
it reads control tokens that a text spells as text."""

from __future__ import annotations

import json
from typing import Any


def make_aliased_tokenizer(tokenizer: Any, names: dict[str, int], aliases: dict[str, str]) -> Any:
    """The backend of a tokenizer with the control tokens `names` renamed to their `aliases`, by the same numbers; None
    if it cannot be made.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    try:
        twin = type(backend).from_str(json.dumps(_rename_tokens(json.loads(backend.to_str()), aliases)))  # type: ignore[union-attr]
    except Exception:  # of Python, or of a form that is not known here; its own reader raises a bare Exception
        return None
    twin.no_truncation()
    twin.no_padding()
    return twin if all(twin.token_to_id(aliases[name]) == id for name, id in names.items()) else None


def _rename_tokens(spec: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """A tokenizer.json with tokens renamed wherever the text of one could be read as the token."""
    for token in spec["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = spec["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(word, word): id for word, id in vocab.items()}
    else:
        model["vocab"] = [[names.get(word, word), score] for word, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _makes_token(merge, names)]
    return spec


def _makes_token(merge: str | list[str], names: dict[str, str]) -> bool:
    """Whether a merge of two pieces is, or reads, one of these tokens."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in names or right in names or left + right in names
