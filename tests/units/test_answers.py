"""What a stream is given: every piece is final, together they are the text, and nothing of a stop string leaks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rondel.core.types import Completion
from rondel.generate.engine.builtin.text import IncrementalDetokenizer
from rondel.generate.engine.server.answers import SampleAnswer

BYTES = st.lists(
    st.sampled_from(list("abcé€🎉 ".encode())), max_size=40
)  # halves of characters and nonsense among them


def decode(tokens: list[int]) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")


def streamed(tokens: list[int], stops: tuple[str, ...]) -> tuple[list[str], str]:
    """A byte a token, ended as the engine ends a sample -> (pieces, the text of the completion)."""
    judge, said = IncrementalDetokenizer(decode, stops), None
    answer, pieces = SampleAnswer(0, [1], stops, IncrementalDetokenizer(decode, ())), []
    for n, token in enumerate(tokens, 1):
        said = judge.find_stop(tokens[:n])
        pieces.append(answer.append_token(answer.reader, token, -1.0, 0, None))
        if said is not None:
            tokens = tokens[:n]
            break
    text = decode(tokens) if said is None else said
    pieces.append(
        answer.finish_answer(Completion(list(tokens), [-1.0] * len(tokens), [0] * len(tokens), "stop", text=text))
    )
    return pieces, text


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(BYTES, st.lists(st.text("abcé", min_size=1, max_size=4), max_size=3))
def test_the_pieces_are_the_text(tokens, stops):
    pieces, text = streamed(tokens, tuple(stops))
    assert len("".join(pieces)) == len(text)
    if "\ufffd" not in text:  # a decoder may show broken bytes otherwise once more of them are there
        assert "".join(pieces) == text


def test_a_stop_string_that_is_passed_over_is_given_later():
    """min_tokens: it was complete too early, the sample went on."""
    answer = SampleAnswer(0, [1], ("ab",), IncrementalDetokenizer(decode, ()))
    pieces = [answer.append_token(answer.reader, token, -1.0, 0, None) for token in b"xabcd"]
    assert pieces == ["x", "", "", "abc", "d"]
