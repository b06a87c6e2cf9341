"""A column of a trajectory has a list's manners and an array's size, and a long answer's text is that of one decode."""

import asyncio
import copy
import json
import pickle
import sys
import threading

import numpy as np
import pytest

from kits.chat import tokenizer as chat_tokenizer
from kits.engine import tiny
from rondel.core.types import FLAGS, IDS, NUMBERS, PIECE, Completion, Sampling, TokenColumn, Trajectory
from rondel.generate.envs.chat import TokenChat
from rondel.text.tokenization import decode_answer, decode_in_pieces


@pytest.mark.parametrize(
    "kind, values", [(IDS, [3, -1, 7]), (FLAGS, [True, False, True]), (NUMBERS, [-0.5, -0.0, -2.25])]
)
def test_it_is_a_list_to_whoever_reads_it(kind, values):
    column = TokenColumn.of(kind, values)
    assert column == values and values == column and column != values[:2]
    assert (column != values) is False
    assert column[1:] == values[1:] and type(column[1:]) is TokenColumn and column[-1] == values[-1]
    assert column + values == values + values == values + column and column * 2 == values * 2
    assert (
        [*column] == values and bool(column) and not TokenColumn(kind) and str(column[:1]) in (f"[{values[0]}]", "[1]")
    )
    for protocol in (4, 5):
        again = pickle.loads(pickle.dumps(column, protocol))
        assert again == column and type(again) is TokenColumn
    twin = copy.deepcopy(column)
    twin += values
    assert column == values and len(twin) == 6 and type(copy.copy(column)) is TokenColumn
    text = json.loads(json.dumps(column.to_text()))
    assert TokenColumn.from_text(kind, text) == values == TokenColumn.from_text(kind, values)


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_long_column_is_written_in_pieces(more):
    """Each a few milliseconds of the interpreter, and no bit is lost where they meet."""
    column = TokenColumn(IDS, range(PIECE // 4 + more))
    text = json.loads(json.dumps(column.to_text()))
    assert isinstance(text, list if more > 0 else str) and TokenColumn.from_text(IDS, text) == column


def test_what_it_cannot_hold_is_refused_and_changes_nothing():
    t = Trajectory()
    t.extend([1, 2])
    for tokens, error in (([2**40], OverflowError), ([0.5], TypeError), (["a"], TypeError)):
        with pytest.raises(error):
            t.extend(tokens)
    with pytest.raises(ValueError, match="token 8 was drawn with a log-probability of nan"):
        t.extend([9, 8], logprobs=[-1.0, float("nan")], versions=[0, 0])
    with pytest.raises(ValueError, match=r"token 9 .* 0\.5"):
        t.extend([9, 8], logprobs=[0.5, -float("inf")], versions=[0, 0])
    assert (t.tokens, t.mask, t.logprobs, t.versions) == ([1, 2], [0, 0], [0, 0], [-1, -1])


def test_a_token_takes_17_bytes():
    t = Trajectory()
    n = 100_000
    t.extend(range(n), logprobs=np.full(n, -1.0), versions=[3] * n)
    held = sum(map(sys.getsizeof, (t.tokens, t.mask, t.logprobs, t.versions)))
    assert 17 * n <= held <= 20 * n and len(pickle.dumps(t, 5)) <= 17 * n + 2000
    assert np.asarray(t.tokens).dtype == np.int32 and np.shares_memory(np.asarray(t.tokens), np.asarray(t.tokens))


class Bytes:
    """A tokenizer of one byte a token, half characters and all; 0 is special."""

    def decode(self, ids, skip_special_tokens):
        return bytes(i for i in ids if i).decode("utf-8", "replace")


class Spaces:
    """One that drops the space of the first word, as sentencepiece does."""

    def decode(self, ids, skip_special_tokens):
        return "".join(f" {i}" for i in ids if i).removeprefix(" ")


@pytest.mark.parametrize("tokenizer", [Bytes(), Spaces(), "real"])
@pytest.mark.parametrize("size", [1, 7, 64])
@pytest.mark.parametrize("skip", [True, False])
def test_pieces_say_what_the_whole_says(tokenizer, size, skip):
    random = np.random.default_rng(size)
    if tokenizer == "real":
        tokenizer = tiny().tokenizer
        ids = random.integers(0, len(tokenizer), 2000).tolist()
    else:
        text = "".join(random.choice(list("aé€😀 \n"), 500)).encode()
        ids = [*text, *[0] * 30, *text, *random.integers(0, 256, 300).tolist()]
    pieces = decode_in_pieces(tokenizer, ids, size, skip_special_tokens=skip)
    assert pieces == tokenizer.decode(ids, skip_special_tokens=skip)


def test_a_long_answer_leaves_the_event_loop_alone(monkeypatch):
    """Its pieces are decoded on another thread, one at a time."""
    threads = []

    class Slow(Bytes):
        def decode(self, ids, skip_special_tokens):
            threads.append(len(ids))
            return super().decode(ids, skip_special_tokens)

    ids = [97 + i % 26 for i in range(30_000)]
    assert len(asyncio.run(decode_answer(Slow(), TokenColumn(IDS, ids)))) == len(ids)
    assert len(threads) > 3 and max(threads) <= 8192 + 8


def test_calls_of_a_long_answer_are_read_beside_the_event_loop():
    """Its special tokens are kept, its pieces decoded on another thread, and the calls found behind them all."""
    calls, own = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', threading.get_ident()
    seen = set()

    class Slow(Bytes):
        def decode(self, ids, skip_special_tokens):
            assert not skip_special_tokens
            seen.add(threading.get_ident())
            return super().decode(ids, skip_special_tokens)

    chat = TokenChat(chat_tokenizer(), None, sampling=Sampling(), key=int, max_context=1)
    expected = chat.template.call_format.parse_calls(calls)
    chat.tokenizer = Slow()
    ids = TokenColumn(IDS, [*b"x" * 20_000, *calls.encode()])
    done = Completion(ids, TokenColumn(NUMBERS, [0.0] * len(ids)), TokenColumn(IDS, [0] * len(ids)), "stop")
    assert asyncio.run(chat.calls(done)) == expected and expected[0].name == "add"
    assert own not in seen


def test_beside_a_pickle_it_is_read_whatever_its_bytes_are_called():
    """As Ray hands them over: numbers of 4 bytes, and not bytes."""
    column, beside = TokenColumn(IDS, range(5)), []
    packed = pickle.dumps(column, 5, buffer_callback=beside.append)
    assert pickle.loads(packed, buffers=beside) == column
    assert pickle.loads(packed, buffers=[memoryview(column)]) == column
