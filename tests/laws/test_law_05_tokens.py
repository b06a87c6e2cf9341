"""Law 5, tokens: trained ids are the sampled ids. Nothing the model wrote is tokenized again. Masks come from
provenance.

Text of others, through every door, is in tests/units/test_foreign_text.py.
"""

from __future__ import annotations

import asyncio
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.chat import PREAMBLE, TEMPLATES, Engine, chat, tokenizer

# ids 1..; "ab" is a+b or ab, "\n\n" one token or two
PIECES = ["", "a", "b", "ab", "ba", "\n", "\n\n", "u", "<e>", "<u>", "<p>"]


class Ambiguous:
    """Longest match first, so almost no sampled sequence survives decode and encode. Its template brings a preamble."""

    chat_template = "yes"
    eos_token_id = PIECES.index("<e>")

    def encode(self, text, add_special_tokens=True):
        ids = []
        while text:
            best = max((p for p in PIECES[1:] if text.startswith(p)), key=len)
            ids.append(PIECES.index(best))
            text = text[len(best) :]
        return ids

    def decode(self, ids, skip_special_tokens=False):
        return "".join(PIECES[i] for i in ids if not (skip_special_tokens and PIECES[i].startswith("<")))

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
        text = "" if messages[0]["role"] == "system" else "<p>\n"
        for m in messages:
            text += {"system": "<p>", "user": "<u>", "assistant": ""}[m["role"]] + self.allowed(m["content"]) + "<e>\n"
        return text + ("<u>" if add_generation_prompt else "")

    def allowed(self, text):
        return "".join(c for c in text if c in "abu\n") or "ba"


TURN = st.lists(st.integers(1, len(PIECES) - 1), min_size=1, max_size=8)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(turns=st.lists(TURN, min_size=1, max_size=4), finish=st.sampled_from(["stop", "length"]))
def test_trained_tokens_are_the_sampled_ones(turns, finish):
    tok, engine = Ambiguous(), Engine(*turns, finish=finish)
    trajectory = asyncio.run(talk(chat(tok, engine), [{"role": "user", "content": "ab\n\n"}], len(turns)))
    assert [t for t, m in zip(trajectory.tokens, trajectory.mask) if m] == list(chain(*turns))
    # append-only: every request continues the one before and its completion
    for n, request in enumerate(engine.requests[1:], 1):
        before = engine.requests[n - 1].tokens + turns[n - 1]
        assert request.tokens[: len(before)] == before
    assert trajectory.tokens.count(PIECES.index("<p>")) - list(chain(*turns)).count(PIECES.index("<p>")) == 1


def test_the_tokenizer_is_adversarial_enough():
    tok = Ambiguous()
    sampled = [PIECES.index(p) for p in ("a", "b", "\n", "\n")]
    assert tok.encode(tok.decode(sampled)) != sampled


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_preamble_appears_once_in_three_turns(template):
    tok = tokenizer(template)
    odd = [tok.convert_tokens_to_ids(t) for t in ("t", "h", "e")] + [tok.eos_token_id]  # its own encoding is one token
    assert len(tok.encode("the")) < 3
    engine = Engine(odd, odd, odd)
    trajectory = asyncio.run(talk(chat(tok, engine), [{"role": "user", "content": "look again."}], 3))
    assert [t for t, m in zip(trajectory.tokens, trajectory.mask) if m] == odd * 3
    read = tok.decode(trajectory.tokens)
    assert read.count(PREAMBLE) == (template == "injecting") and read.count("look again.") == 3


async def talk(conversation, messages, turns):
    for _ in range(turns):
        conversation.give(messages)
        await conversation.reply()
    return conversation.trajectory
