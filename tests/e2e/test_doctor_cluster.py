"""`rondel doctor --cluster`: every fault by a cluster that has it, as seen; and clusters that are there, looked at."""

from __future__ import annotations

import asyncio
import json
from copy import deepcopy

import pytest

from rondel.cli import main
from rondel.runtime.cluster.cluster_check import ClusterProbe
from rondel.runtime.cluster.node_probe import ProbedNode, ProbeResult, probe_nodes, probe_rows

FACTS = {
    "host": "a",
    "resolves_to": "10.0.0.1",
    "versions": {"python": "3.11.7", "rondel": "0.1.0", "torch": "2.13.0"},
    "gpus": 8,
}
LINK = {"latency": 5e-5, "bandwidth": 10e9}


def two():
    nodes = [
        ProbedNode("node-0", "10.0.0.1", deepcopy(FACTS), sees=True),
        ProbedNode("node-1", "10.0.0.2", deepcopy(FACTS), sees=True),
    ]
    nodes[1].facts |= {"host": "b", "resolves_to": "10.0.0.2"}
    return ProbeResult(nodes, {("node-0", "node-1"): dict(LINK), ("node-1", "node-0"): dict(LINK)}, "runs", "Ray")


def test_a_fit_cluster_has_no_fault():
    assert [state for _, state, _, _ in probe_rows(two())] == ["ok"] * 5


def older(seen):
    seen.nodes[1].facts["versions"]["torch"] = "2.11.0"


def without(seen):
    del seen.nodes[1].facts["versions"]["rondel"]


def snake(seen):
    seen.nodes[1].facts["versions"]["python"] = "3.12.1"


def loopback(seen):
    seen.nodes[1].address = "127.0.0.1"


def named(seen):
    seen.nodes[1].facts["resolves_to"] = "127.0.1.1"


def walled(seen):
    seen.links["node-0", "node-1"] = {"error": "timed out"}


def ahead(seen):
    seen.nodes[1].skew = 42.0


def behind(seen):
    seen.nodes[1].skew = -1.0


def blind(seen):
    seen.nodes[1].sees = False


def fewer(seen):
    seen.nodes[1].facts["gpus"] = 4


def slow(seen):
    seen.links |= {("node-0", f"x{i}"): dict(LINK) for i in range(3)}
    seen.links["node-1", "node-0"]["bandwidth"] = 0.1e9


def empty(seen):
    seen.nodes[1].error = "ModuleNotFoundError: No module named 'rondel'"


def gone(seen):
    seen.nodes[1].error = "the actor died"


def unasked(seen):
    seen.asks = False


@pytest.mark.parametrize(
    ("fault", "state", "what", "fix"),
    [
        (older, "broken", "torch of node-1", "on node-1: pip install 'torch==2.13.0'"),
        (without, "broken", "rondel of node-1", "on node-1: pip install 'rondel==0.1.0'"),
        (snake, "broken", "python of node-1", "on node-1: install Python 3.11.7"),
        (loopback, "broken", "address of node-1", "--node-ip-address=ITS_ADDRESS"),
        (named, "note", "name of node-1", "put '10.0.0.2 b' into /etc/hosts"),
        (walled, "broken", "node-0 to node-1", "let TCP through from node-0 to 10.0.0.2"),
        (ahead, "broken", "clock of node-1", "on node-1: sudo chronyc makestep"),
        (behind, "note", "clock of node-1", "on node-1: sudo chronyc makestep"),
        (blind, "note", "shared folder", "set run.folder to storage that every node mounts"),
        (fewer, "note", "GPUs", "on node-1: nvidia-smi"),
        (slow, "note", "node-1 to node-0", "GLOO_SOCKET_IFNAME"),
        (empty, "broken", "node-1", "on node-1: pip install 'rondel[cluster]==0.1.0'"),
        (gone, "broken", "node-1", "ray start --address"),
        (unasked, "note", "token", "RAY_AUTH_MODE=token"),
    ],
)
def test_each_fault_has_its_one_fix(fault, state, what, fix):
    seen = two()
    fault(seen)
    [row] = [row for row in probe_rows(seen) if row[1] != "ok"]
    assert row[:2] == (what, state) and fix in row[3] and row[2]


class Near:
    """A Lookout in this process, as a proxy calls it."""

    def __init__(self, ahead=0.0):
        self.real, self.ahead = ClusterProbe(), ahead

    async def ready(self): ...

    def __getattr__(self, verb):
        async def call(*args):
            told = await asyncio.to_thread(getattr(self.real, verb), *args)
            return told + self.ahead if verb == "clock" else told

        return call


def test_it_looks_through_sockets_clocks_and_files(tmp_path):
    seen = asyncio.run(
        probe_nodes({"a": ("127.0.0.1", Near()), "b": ("127.0.0.1", Near(ahead=30.0))}, folder=str(tmp_path / "runs"))
    )
    assert [node.sees for node in seen.nodes] == [True, True] and not list((tmp_path / "runs").iterdir())
    assert seen.nodes[0].skew == pytest.approx(0, abs=0.5) and seen.nodes[1].skew == pytest.approx(30, abs=0.5)
    assert (
        all(link["bandwidth"] > 1e6 and 0 < link["latency"] < 5 for link in seen.links.values())
        and len(seen.links) == 2
    )
    assert ClusterProbe().reach("127.0.0.1", 9)["error"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ClusterProbe, "sees", lambda self, path: False)
        seen = asyncio.run(probe_nodes({"a": ("127.0.0.1", Near())}, folder=str(tmp_path)))
    assert seen.nodes[0].sees is False


def doctor(capsys, *words):
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--cluster", *map(str, words)])
    out, err = capsys.readouterr()
    return end.value.code or 0, out, err


def test_an_address_where_nobody_is_says_so(capsys):
    pytest.importorskip("ray")
    code, _, err = doctor(capsys, "--address", "127.0.0.1:9")
    assert code and "nobody answers at '127.0.0.1:9'" in err


@pytest.mark.slow
def test_two_nodes_of_ray(tmp_path, capsys):
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    how = {"num_cpus": 1, "object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={**how, "include_dashboard": False})
    try:
        cluster.add_node(**how)
        cluster.wait_for_nodes()
        code, out, _ = doctor(capsys, "--address", cluster.address, "--folder", tmp_path, "--json")
    finally:
        cluster.shutdown()
    told = json.loads(out.strip().splitlines()[-1])
    found = {sign["what"]: sign for sign in told["signs"]}
    assert told["healthy"] and code == 0, [sign for sign in told["signs"] if sign["state"] != "ok"]
    assert (
        "Ray, 2 nodes" in found["cluster"]["found"]
        and "2 ways of TCP" in found["links"]["found"]
        and found["shared folder"]["state"] == "ok"
    )
