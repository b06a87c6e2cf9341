"""Which worker gets which device: by the node's address as numbers, then by the GPU;
and how ranks of several machines meet.
"""

from __future__ import annotations

import random
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from kits.runs import tiny
from rondel.assemble.deployment import _spawn_trainers
from rondel.assemble.recipe_parts import sampling_of
from rondel.assemble.rows import rows_of
from rondel.assemble.workers import TrainerHost
from rondel.core.events import subscribe
from rondel.sync.from_distributed import FromDistributed

pytestmark = pytest.mark.slow

ray = pytest.importorskip("rondel.runtime.cluster.ray")


def test_a_shuffled_inventory_always_comes_out_in_the_same_order():
    nodes = [f"10.0.0.{n}" for n in (2, 3, 10, 11, 100)] + [
        "10.0.1.1",
        "10.1.0.0",
        "192.168.0.9",
        "host-b.invalid",
        "host-c.invalid",
    ]
    expected = [(node, [gpu]) for node in nodes for gpu in range(12)]
    rng = random.Random(0)
    for _ in range(4):  # names that nobody knows are asked for each time
        found = rng.sample(expected, len(expected))
        assert [found[i] for i in ray.sort_bundles(found)] == expected


def test_names_count_as_their_addresses_and_nodes_without_gpus_keep_together():
    found = [("10.0.0.10", []), ("10.0.0.2", []), ("10.0.0.10", []), ("localhost", []), ("10.0.0.2", [])]
    assert ray.sort_bundles(found) == [1, 4, 0, 2, 3]
    assert ray.sort_bundles([("10.0.0.2", [10]), ("10.0.0.2", [9]), ("10.0.0.2", [0, 1])]) == [2, 1, 0]


def test_workers_go_into_bundles_in_that_order(monkeypatch):
    """As the placement group tells it: bundle 0 on 10.0.0.10, the others on 10.0.0.2."""
    monkeypatch.setattr(
        ray.ray, "nodes", lambda: [{"NodeID": n, "NodeManagerAddress": f"10.0.0.{a}"} for n, a in (("x", 10), ("y", 2))]
    )
    monkeypatch.setattr(ray, "placement_group_table", lambda group: {"bundles_to_node_id": {0: "x", 1: "y", 2: "y"}})
    cluster = ray.RayCluster.__new__(ray.RayCluster)
    cluster._group, cluster.gpus, cluster.cpus = None, 0, 1
    found = cluster._find_bundles(3)
    assert found == [("10.0.0.10", []), ("10.0.0.2", []), ("10.0.0.2", [])] and ray.sort_bundles(found) == [1, 2, 0]


def test_ranks_of_several_machines_meet_where_the_first_one_is():
    """Its address is what its worker says, and not the loopback of whoever asks."""
    asked = []

    class Worker:
        host = "10.9.8.7"

        def now(self, verb="", *args):
            asked.append((verb, *args))
            return ("10.9.8.7", 4242) if verb == "meet" else None

        def ask(self, verb, *args):
            asked.append((verb, *args))
            done: Future = Future()
            done.set_result(("10.9.8.7", 4242) if verb == "meet" else ("known", {}, 1))
            return done

    plan = SimpleNamespace(
        job=None, needs=frozenset(), sampling=None, new_transport=lambda: None, worker_name=lambda who, i: f"{who}-{i}"
    )
    _spawn_trainers(plan, SimpleNamespace(spawn=lambda *a, **k: Worker()), ["cpu", "cpu"], [(), ()], 1)
    assert ("meet", "10.9.8.7", 2) in asked
    assert [a for a in asked if a[0] == "join"] == [("join", rank, 2, ("10.9.8.7", 4242)) for rank in range(2)]


def test_weights_are_broadcast_from_the_address_that_others_reach(tmp_path):
    """Another loopback address stands for another machine's: the store listens there, and engines are told so."""
    job = tiny(tmp_path)
    host = TrainerHost(job, rows_of(job).needs, sampling_of(job), "cpu", 1, FromDistributed())
    try:
        assert host.meet("127.0.0.2", 2)[0] == "127.0.0.2"
        host.join()

        async def published():
            from rondel.core.types import Route

            return await host.publish(Route("distributed", (1, 1)))

        import asyncio

        _, route = asyncio.run(published())
        assert (route.data.host, route.data.size) == ("127.0.0.2", 2)
        assert type(host.trainer.transport)().host == "127.0.0.1", "the default, of one machine"
    finally:
        host.trainer.transport.close()
        host.close()


def test_under_torchrun_each_rank_has_the_gpu_of_its_number(monkeypatch):
    from rondel.runtime.cluster import torchrun

    (
        monkeypatch.setenv("LOCAL_RANK", "3"),
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "7"),
        monkeypatch.setenv("WORLD_SIZE", "15"),
    )
    assert (torchrun.own_device("cuda"), torchrun.own_device("cpu"), torchrun.ranks_here()) == ("cuda:3", "cpu", 7)


@pytest.mark.parametrize(("mode", "told"), [(None, True), ("disabled", True), ("token", False)])
def test_a_cluster_that_asks_for_no_token_is_said_aloud(monkeypatch, mode, told):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    heard = []
    stop = subscribe(heard.append)
    ray.warn_if_open()
    stop()
    assert bool(heard) == told and all("RAY_AUTH_MODE=token" in e.message for e in heard)
