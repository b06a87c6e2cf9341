"""Ranks of a trainer that join: one that ends is named, and not those who complain that it is gone."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from rondel.assemble.deployment import _spawn_trainers
from rondel.core.errors import WorkerError


class Joining:
    """A worker of which only joining is asked."""

    host = "127.0.0.1"

    def __init__(self, outcome) -> None:
        self.outcome, self.alive = outcome, not isinstance(outcome, WorkerError)

    def now(self, *asked):
        return None

    def ask(self, verb, *args):
        answer = Future()
        if isinstance(self.outcome, Exception):
            answer.set_exception(self.outcome)
        else:
            answer.set_result(self.outcome)
        return answer


def join(*outcomes):
    waiting = iter(outcomes)
    plan = SimpleNamespace(
        job=None,
        needs=frozenset(),
        sampling=None,
        worker_name=lambda kind, i: f"{kind}-{i}",
        new_transport=lambda: None,
    )
    cluster = SimpleNamespace(spawn=lambda *made_of, **how: Joining(next(waiting)))
    return _spawn_trainers(plan, cluster, ["cpu"] * len(outcomes), [()] * len(outcomes), 1)[1]


def test_the_first_one_speaks_for_all():
    assert join("first", "second") == "first"


def test_the_rank_that_ended_is_named():
    with pytest.raises(WorkerError, match="trainer-1 ended"):
        join(RuntimeError("Connection closed by peer"), WorkerError("worker trainer-1 ended by SIGKILL"))


def test_else_the_first_error():
    with pytest.raises(ValueError, match="no plan"):
        join(ValueError("no plan"), ValueError("the same"))
