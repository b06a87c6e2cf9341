"""Constrained decoding: which tokens may come next, so that the text becomes a sentence
of a JSON schema, a regex or a grammar.

    {"json_schema": {...}} | {"regex": "..."} | {"grammar": "..."} ──> one Lark text ──compile once──> a matcher a request
                                            every step:  tokens drawn since ──> matcher ──> one bit a token ──> logits of the rest = -inf

The automata are llguidance's (Earley over derivatives of regular expressions, with a trie
of the vocabulary). It may force the canonical tokens of a text that has no alternative; here
that is off, so a token is allowed exactly if
some sentence goes on with its bytes, and the distribution is the model's own on that set. End
tokens are allowed exactly where the sentence is whole.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rondel.core.errors import EngineError, UserError

if TYPE_CHECKING:
    from rondel.models.loaded_model import LoadedModel

# JSON allows any run of them, and a model may never leave it; a schema's own x-guidance comes first
SPACES = {"whitespace_pattern": " ?"}
KEPT = 128  # compiled grammars
NO_FORCING = '\n%llguidance {"no_forcing": true}\n'  # at the end, so that line numbers in errors are the user's


@dataclass(slots=True)
class GrammarConstraint:
    """One request's place in its grammar. It follows the tokens, so it can be rebuilt from them."""

    matcher: Any
    consumed: int = 0

    def consume_tokens(self, drawn: list[int]) -> str:
        """Consume what was drawn since. -> what is wrong, or nothing."""
        for token in drawn[self.consumed :]:
            if not self.matcher.consume_token(token):
                return f"token {token}, number {self.consumed} of the answer, does not fit the grammar"
            self.consumed += 1
        return ""

    def fill_bitmask(self, drawn: list[int], bits: np.ndarray) -> str:
        """Write one bit a token into bits [ceil(V/32)] int32. -> what is wrong, or nothing."""
        if wrong := self.consume_tokens(drawn):
            return wrong
        self.matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if not self.matcher.is_error():
            return ""
        if self.matcher.stop_reason() in ("NoExtension", "NoExtensionBias", "InternalError"):
            return (
                f"after {self.consumed} tokens no token of this tokenizer can go on: "
                "it cannot spell what the grammar demands"
            )
        return (
            f"after {self.consumed} tokens it is too much for its library: {self.matcher.get_error().splitlines()[0]}"
        )


def apply_grammar_masks(logits: Tensor, rows: list[tuple[int, GrammarConstraint, list[int]]]) -> dict[int, EngineError]:
    """Forbid in logits [B, V] what the grammars of (row, constraint, drawn tokens) forbid. ->
    rows whose grammar broke; they stay free.
    """
    if not rows:
        return {}
    vocab, broken = logits.shape[1], {}
    bits = np.zeros((len(rows), -(-vocab // 32)), dtype=np.int32)
    for i, (row, constraint, drawn) in enumerate(rows):
        if wrong := constraint.fill_bitmask(drawn, bits[i]):
            broken[row] = EngineError(f"constrained decoding: {wrong}")
            bits[i] = -1
    allowed = torch.from_numpy(np.unpackbits(bits.view(np.uint8), axis=1, count=vocab, bitorder="little")).bool()
    at = torch.tensor([row for row, _, _ in rows], device=logits.device)
    logits[at] = logits[at].masked_fill_(~allowed.to(logits.device), float("-inf"))
    return broken


class GrammarCache:
    """The compiled grammars of one engine: a tokenizer is read once, a grammar compiled
    once, a request gets a copy of its start.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self._tokenizer: Any = None
        self._starts: dict[str, Any] = {}

    def start_constraint(self, grammar: dict[str, Any], drawn: list[int]) -> GrammarConstraint:
        """Where an answer stands that has `drawn` these tokens already. Every fault of the
        grammar is a UserError, before anything runs.
        """
        text = as_lark(grammar)
        start = self._starts.pop(text, None) or self._compile_grammar(text)
        self._starts[text] = start  # at the end again: the first is the one not used for longest
        if len(self._starts) > KEPT:
            del self._starts[next(iter(self._starts))]
        constraint = GrammarConstraint(start.deep_copy())
        if wrong := constraint.consume_tokens(drawn):
            raise UserError(f"a continuation that breaks its grammar: {wrong}")
        return constraint

    def _compile_grammar(self, text: str) -> Any:
        library = _grammar_library()
        if self._tokenizer is None:
            self._tokenizer = read_tokenizer(library, self.loaded)
        bad, said = library.LLMatcher.validate_grammar_with_warnings(text, self._tokenizer)
        if bad:
            raise UserError(f"the grammar cannot be compiled: {_first_line(said[0])}")
        for warning in said:
            warnings.warn(f"a grammar was compiled with a warning: {_first_line(warning)}", stacklevel=2)
        start = library.LLMatcher(self._tokenizer, text, log_level=0)
        if wrong := GrammarConstraint(start.deep_copy()).fill_bitmask(
            [], np.zeros(-(-self._tokenizer.vocab_size // 32), dtype=np.int32)
        ):
            raise UserError(f"the grammar has no sentence that can be written: {wrong}")
        return start


def as_lark(grammar: dict[str, Any]) -> str:
    """The three kinds in one notation, llguidance's Lark."""
    ((kind, given),) = grammar.items()
    if kind == "json_schema":
        try:
            schema = json.loads(given) if isinstance(given, str) else given
            schema = {"x-guidance": SPACES, **schema} if isinstance(schema, dict) else schema
            return f"start: %json {json.dumps(schema)}{NO_FORCING}"
        except (ValueError, TypeError) as error:
            raise UserError(f"grammar.json_schema is not JSON: {error}") from error
    if not isinstance(given, str) or not given.strip():
        raise UserError(f"grammar.{kind} = {given!r}; it must be a text, and not an empty one")
    if kind == "regex":
        return f"start: /{_grammar_library().regex_to_lark(given)}/{NO_FORCING}"
    return given if "%llguidance" in given else given + NO_FORCING


def read_tokenizer(library: Any, loaded: LoadedModel) -> Any:
    """llguidance's view of the tokenizer: the bytes of every token. What it cannot read is decoded token by token."""
    from llguidance.hf import from_tokenizer

    if not loaded.stop_ids:
        raise UserError(
            "this model has no end token, so a constrained answer could never end: set eos_token_id in its "
            "generation_config.json"
        )
    vocab, ends = loaded.vocabulary, sorted(loaded.stop_ids)
    try:
        return from_tokenizer(loaded.tokenizer, n_vocab=vocab, eos_token=ends)
    except ValueError as error:
        decode = loaded.tokenizer.decode
        known = range(min(vocab, len(loaded.tokenizer)))
        special = {i for i, token in loaded.tokenizer.added_tokens_decoder.items() if token.special} | loaded.stop_ids
        texts = ["" if i in special or "\ufffd" in (text := decode([i])) else text for i in known]
        plain = [i for i in known if texts[i]]
        if decode(plain) != "".join(texts[i] for i in plain):
            raise UserError(f"constrained decoding cannot read this tokenizer: {error}") from error
        names = [f"<special {i}>" if i in special else texts[i] for i in known] + [""] * (vocab - len(known))
        view = _Bytes([name.encode() for name in names], sorted(special), ends[0])
        return library.LLTokenizer(library.TokenizerWrapper(view), n_vocab=vocab, eos_token=ends)


def _first_line(said: str) -> str:
    """The library's message without its copy of the grammar."""
    return " ".join(said.partition("\n   1 |")[0].split())


class _Bytes(SimpleNamespace):
    """What llguidance asks of a tokenizer. It is called only to force canonical tokens, which is off."""

    def __init__(self, tokens: list[bytes], special: list[int], end: int) -> None:
        super().__init__(tokens=tokens, special_token_ids=special, eos_token_id=end, bos_token_id=None)

    def __call__(self, text: Any) -> list[int]:
        return []


def _grammar_library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise UserError("constrained decoding needs the package llguidance: pip install 'rondel[grammar]'") from error
    return llguidance
