"""Ranks of a trainer that join: one that ends is named, and not those who complain that it is gone."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from rondel.assemble.deployment import _join_ranks
from rondel.core.errors import WorkerError


class Joining:
    """A worker of which only joining is asked."""

    def __init__(self, outcome) -> None:
        self.outcome, self.alive = outcome, not isinstance(outcome, WorkerError)

    def ask(self, verb, *args):
        answer = Future()
        if verb == "meet":
            answer.set_result(args)
        elif isinstance(self.outcome, Exception):
            answer.set_exception(self.outcome)
        else:
            answer.set_result(self.outcome)
        return answer


def join(*outcomes):
    return _join_ranks([Joining(outcome) for outcome in outcomes], "127.0.0.1")


def test_the_first_one_speaks_for_all():
    assert join("first", "second") == "first"


def test_the_rank_that_ended_is_named():
    with pytest.raises(WorkerError, match="trainer-1 ended"):
        join(RuntimeError("Connection closed by peer"), WorkerError("worker trainer-1 ended by SIGKILL"))


def test_else_the_first_error():
    with pytest.raises(ValueError, match="no plan"):
        join(ValueError("no plan"), ValueError("the same"))
