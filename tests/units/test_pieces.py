"""The text of an answer that was written in several pieces: that of its tokens, whatever lies at the borders."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kits.runs import tiny
from rondel.assemble.components import build
from rondel.core.types import Completion, Request, Sampling
from rondel.driver.rollouts import rollouts_of
from rondel.generate.engine.builtin.text import open_reader
from rondel.generate.engine.resumption import end_at_stop

TEXT = "Grüße an alle 世界 🙂##and more"


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte: a character has up to four."""
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(alphabet, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


class Pieces:
    """An engine that is interrupted behind the first `at` tokens: it gives them back, or, as a server, goes on itself."""

    def __init__(self, tokenizer, tokens: list[int], at: int, stop: str, *, itself: bool):
        self.tokenizer, self.tokens, self.at, self.stop, self.itself = tokenizer, tokens, at, stop, itself

    async def generate(self, request: Request) -> Completion:
        begin, end = self.tokenizer.decode(self.tokens[: self.at]), self.tokenizer.decode(self.tokens[self.at :])
        end = end.removesuffix(self.stop) if self.stop else end
        n, rest = self.at, len(self.tokens) - self.at
        if self.itself:
            versions = [0] * n + [1] * rest
            return Completion(self.tokens, [-1.0] * len(self.tokens), versions, "stop", text=begin + end)
        if request.continuation:
            return Completion(self.tokens[n:], [-1.0] * rest, [1] * rest, "stop", text=end)
        return Completion(self.tokens[:n], [-1.0] * n, [0] * n, "abort", text=begin)


@pytest.mark.parametrize("stop", ["", "##"])
@pytest.mark.parametrize("itself", [False, True])
def test_a_border_may_lie_in_a_character_or_a_stop_string(tmp_path, stop, itself):
    parts, tokenizer = build(tiny(tmp_path)), bytes_tokenizer()
    try:
        whole = TEXT[: TEXT.index("##")] if stop else TEXT
        tokens = tokenizer(whole + stop)["input_ids"]
        parts.model_info = replace(parts.model_info, tokenizer=tokenizer)
        for at in range(1, len(tokens)):
            parts.engine = Pieces(tokenizer, tokens, at, stop, itself=itself)
            chat = rollouts_of(parts).open_chat(lambda turn: turn)
            asked = Request([1], replace(chat.sampling, max_tokens=200, stop=(stop,) if stop else ()))
            done = asyncio.run(chat.generate(asked))
            assert (list(done.tokens), done.text) == (tokens, whole), at
    finally:
        parts.close()


def test_a_server_that_does_not_see_the_stop_string_at_a_border_ends_there_all_the_same(tmp_path):
    """It wrote "#" before the new weights and "#and more" behind them."""
    parts, tokenizer = build(tiny(tmp_path)), bytes_tokenizer()
    try:
        tokens, whole = tokenizer(TEXT)["input_ids"], TEXT[: TEXT.index("##")]
        end = len(tokenizer(whole + "##")["input_ids"])
        parts.model_info = replace(parts.model_info, tokenizer=tokenizer)
        parts.engine = Pieces(tokenizer, tokens, end - 1, "", itself=True)
        chat = rollouts_of(parts).open_chat(lambda turn: turn)
        asked = Request([1], replace(chat.sampling, max_tokens=200, stop=("##",)))
        done = asyncio.run(chat.generate(asked))
        assert (list(done.tokens), done.text, done.finish_reason) == (tokens[:end], whole, "stop")
        assert list(done.versions) == [0] * (end - 1) + [1] and len(done.logprobs) == end
    finally:
        parts.close()


@pytest.mark.parametrize("least", [0, 3, 4, 5])
def test_a_stop_string_that_is_complete_by_the_least_length_ends_no_answer_of_pieces_either(least):
    """The string is complete with token 4: an engine passes over it if 4 tokens must be there, whole or in pieces."""
    tokenizer = bytes_tokenizer()
    tokens = tokenizer("ab##cd")["input_ids"]
    n = len(tokens)
    joined = Completion(tokens, [-1.0] * n, [0] * 2 + [1] * (n - 2), "length", text="ab##cd")
    done = asyncio.run(end_at_stop(tokenizer, joined, Sampling(max_tokens=n, min_tokens=least, stop=("##",))))
    reader, live = open_reader(tokenizer, ("##",), []), []
    for token in tokens:  # as `SequenceState.check_finish` reads it
        live.append(token)
        if reader.find_stop(live) is not None and len(live) > least:
            break
    assert list(done.tokens) == live and done.text == ("ab" if least < 4 else "ab##cd")


def test_a_name_of_a_special_token_that_the_text_spells_ends_no_answer_of_pieces_either():
    """As `stop` the name means the token: an answer of one piece may write it in letters."""
    tokenizer = bytes_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    tokens = tokenizer("ab<end>cd##", split_special_tokens=True)["input_ids"]
    assert len(tokens) == 11 and tokenizer.convert_tokens_to_ids("<end>") not in tokens
    joined = Completion(tokens, [-1.0] * 11, [0] * 2 + [1] * 9, "length", text="ab<end>cd##")
    for stop, text in ((("<end>",), "ab<end>cd##"), (("<end>", "##"), "ab<end>cd")):
        done = asyncio.run(end_at_stop(tokenizer, joined, Sampling(max_tokens=11, stop=stop)))
        assert (list(done.tokens), done.text) == (tokens, text)
