"""What "auto" becomes, and why."""

from __future__ import annotations

import pytest

from rondel.planner.resolve import transport
from rondel.words.config import Job
from rondel.words.errors import ConfigError

GB = 10**9


@pytest.mark.parametrize(
    "wanted, apart, weights, room, value, why",
    [
        ("auto", "module", GB, 0, "tensor", "0 bytes move"),
        ("tensor", "module", GB, 0, "tensor", "0 bytes move"),
        ("auto", "process", GB, 2 * GB, "ipc", "share a machine"),
        ("auto", "process", GB, 2 * GB - 1, "distributed", "two versions need 2.0 GB of shared memory, and 2.0 GB are free"),
        ("auto", "process", GB, 0, "distributed", "0.0 GB are free"),
        ("auto", "machine", GB, 9 * GB, "distributed", "different machines"),
        ("disk", "machine", GB, 0, "disk", "set"),
        ("delta", "process", GB, 0, "delta", "set"),
    ],
)
def test_how_weights_travel(wanted, apart, weights, room, value, why):
    found = transport(wanted, apart=apart, weights=weights, room=room)
    assert found.value == value and why in found.why


@pytest.mark.parametrize("wanted", ["ipc", "disk", "distributed", "delta"])
def test_one_module_needs_no_transport(wanted):
    with pytest.raises(ConfigError, match=f"sync.kind = '{wanted}' has no effect with place.kind = 'shared'"):
        transport(wanted, apart="module")


def test_tensors_cannot_leave_their_process():
    with pytest.raises(ConfigError, match="hands over the tensors of one process"):
        transport("tensor", apart="process")


def test_a_recipe_may_name_each_of_them():
    for kind in ("auto", "tensor", "ipc", "disk", "distributed", "delta"):
        job = Job.parse(
            {"model": {"path": "x"}, "task": {"data": {}}, "loop": {"steps": 1}, "run": {"folder": "x"}, "sync": {"kind": kind}}
        )
        assert job.sync.kind == kind
