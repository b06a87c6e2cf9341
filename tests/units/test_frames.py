"""What travels between a worker and its controller arrives as it was, large arrays without a copy in the pickle."""

import os
import socket
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch

from rondel.algos.tokens import TokenBatch
from rondel.core.types import IDS, TokenColumn
from rondel.runtime.cluster import frames


@pytest.fixture
def pipes():
    ours, theirs = socket.socketpair()
    ends = Connection(ours.detach()), Connection(theirs.detach())
    yield ends
    for end in ends:
        end.close()


def over(pipes, *frames_):
    """Sent by one thread, received by another."""
    sender = threading.Thread(target=lambda: [frames.send_frame(pipes[0], frame) for frame in frames_])
    sender.start()
    found = [frames.receive_frame(pipes[1]) for _ in frames_]
    sender.join()
    return found


def open_files():
    return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0


def test_small_and_large_messages_in_turn(pipes):
    large, small = np.arange(100_000, dtype=np.int64), np.arange(3)
    known = TokenBatch(
        torch.zeros(1, dtype=torch.int64).expand(50_000),
        behavior=torch.randn(50_000),
        teachers={2: torch.randn(50_000)},
    )
    column, before = TokenColumn(IDS, range(70_000)), open_files()
    sent = [
        frames.pack((1, "step", (large, small), {})),
        frames.pack((0, None)),
        frames.pack((2, "result", [known, column])),
    ]
    assert len(sent[0].head) < 2000 and sent[0].memory is not None and sent[1].memory is None
    assert sum(sent[2].memory.sizes) == 2 * 200_000 + 280_000 and len(sent[2].head) < 2000
    (_, verb, (a, b), _), end, (_, _, (told, ids)) = over(pipes, *sent)
    assert verb == "step" and end == (0, None) and (a == large).all() and (b == small).all() and ids == column
    assert torch.equal(told.behavior, known.behavior) and torch.equal(told.teachers[2], known.teachers[2])
    assert torch.equal(told.sample, known.sample) and told.sample.dtype == torch.int64 and told.reference is None
    a[0] = 7  # a copy of the page is written, and not what others read
    told.behavior[0] = 0.0
    assert large[0] == 0 and known.behavior[0] != 0.0
    del sent, a, told, ids
    assert open_files() <= before + 1  # the maps keep no file open, and frames that are gone none either


def test_arguments_of_several_calls_are_packed_once(pipes):
    batch = {"tokens": np.arange(1 << 16), "name": "a"}
    packed = frames.pack_arguments((batch, 3))
    calls = [frames.pack_call(i, "step", (packed,), {"how": i}) for i in range(3)]
    assert all(call.memory is packed.memory for call in calls) and max(len(call.head) for call in calls) < 2000
    for i, (number, verb, args, how) in enumerate(over(pipes, *calls)):
        assert (number, verb, args[1], how) == (i, "step", 3, {"how": i})
        assert (args[0]["tokens"] == batch["tokens"]).all() and args[0]["tokens"].flags.writeable
        args[0]["tokens"][:] = -1  # one worker's own
    plain = frames.pack_call(9, "close", (), {})
    assert plain.memory is None and over(pipes, plain) == [(9, "close", (), {})]


def test_the_end_of_the_other_side(pipes):
    pipes[0].close()
    with pytest.raises((EOFError, OSError)):
        frames.receive_frame(pipes[1])
