"""All nodes of a cluster looked at, and what is wrong between them: each fault with its one fix.

`look` asks, `judge` decides: a pure function of what was seen, so that every fault can be shown without having it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from rondel.system.sockets import is_loopback

ALL = 8  # nodes up to which every pair is measured, beyond them each with the next
SKEW, FAR = 0.5, 5.0  # seconds that clocks may differ: said, a fault
SLOW = 0.25  # of the median bandwidth
Row = tuple[str, str, str, str]  # what, state, found, fix: as `rondel doctor` prints them


@dataclass
class ProbedNode:
    """`address` is the one that the others are told; `error`: why nothing could be asked there."""

    name: str
    address: str
    facts: dict[str, Any] = field(default_factory=dict)
    skew: float = 0.0
    sees: bool | None = None
    error: str = ""


@dataclass
class ProbeResult:
    nodes: list[ProbedNode]
    links: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    folder: str = ""
    cluster: str = ""
    asks: bool | None = None  # whoever comes, for a token; None where nobody can come


async def probe_nodes(
    workers: Mapping[str, tuple[str, Any]], *, folder: str = "", cluster: str = "", asks: bool | None = None
) -> ProbeResult:
    """`workers`: name -> (address, a Lookout behind a proxy). The first is the one whose versions and clock count."""
    seen = ProbeResult(
        [ProbedNode(name, address) for name, (address, _) in workers.items()], folder=folder, cluster=cluster, asks=asks
    )
    for node in seen.nodes:
        who = workers[node.name][1]
        try:
            await who.ready()
            node.facts = await who.facts()
            node.skew = await _clock_skew(who)
        except Exception as error:  # whatever keeps a worker from starting there is the finding
            node.error = str(error).strip().splitlines()[-1][:300] if str(error).strip() else type(error).__name__
    there = [node for node in seen.nodes if not node.error]
    if folder and there:
        first = workers[there[0].name][1]
        path = await first.leave(os.path.abspath(folder))
        for node in there:
            node.sees = await workers[node.name][1].sees(path)
        await first.clear(path)
    for a, b in _node_pairs([node.name for node in there]):
        address, who = workers[b]
        try:
            port = await who.listen(address)
        except Exception as error:
            seen.links[a, b] = {"error": f"{b} cannot listen at its own address {address}: {error}"}
            continue
        seen.links[a, b] = await workers[a][1].reach(address, port)
    for node in there:
        await workers[node.name][1].stop()
    return seen


async def _clock_skew(who: Any) -> float:
    """Its clock by ours, from the quickest of five round trips."""
    found = []
    for _ in range(5):
        began = time.time()
        theirs = await who.clock()
        ended = time.time()
        found.append((ended - began, theirs - (began + ended) / 2))
    trip, off = min(found)
    return 0.0 if abs(off) <= trip / 2 else off  # less than that cannot be told


def _node_pairs(names: list[str]) -> list[tuple[str, str]]:
    if len(names) <= ALL:
        return [(a, b) for a in names for b in names if a != b]
    ring = list(pairwise([*names, names[0]]))
    return [*ring, *((b, a) for a, b in ring)]


# -- what is wrong ---------------------------------------------------------------------------------


def probe_rows(seen: ProbeResult) -> Iterator[Row]:
    there, several = [node for node in seen.nodes if not node.error], len(seen.nodes) > 1
    yield (
        "cluster",
        "ok",
        f"{seen.cluster}, {len(seen.nodes)} node{'s' * several}: {', '.join(node.address for node in seen.nodes)}",
        "",
    )
    if seen.asks is False:
        fix = (
            "RAY_AUTH_MODE=token in the environment of `ray start` on every node, "
            "and of what connects (Ray 2.52 or newer)"
        )
        yield "token", "note", "nobody is asked for one: whoever reaches a port of a node can run code there", fix
    for node in seen.nodes:
        if node.error:
            yield node.name, "broken", f"nothing can be started there: {node.error}", _install_hint(node, there)
    yield from _check_addresses(there)
    yield from _check_versions(there)
    yield from _check_gpus(there)
    for node in there:
        if abs(node.skew) > SKEW:
            state = "broken" if abs(node.skew) > FAR else "note"
            yield (
                f"clock of {node.name}",
                state,
                f"{abs(node.skew):.1f} s {'ahead' if node.skew > 0 else 'behind'}",
                f"on {node.name}: sudo chronyc makestep",
            )
    yield from _check_folder(seen, there)
    yield from _check_links(seen)


def _install_hint(node: ProbedNode, there: list[ProbedNode]) -> str:
    if "No module named" in node.error or "ModuleNotFoundError" in node.error:
        which = f"=={there[0].facts['versions'].get('rondel', '')}".removesuffix("==") if there else ""
        return f"on {node.name}: pip install 'rondel[cluster]{which}'"
    return f"ray status  (is {node.address} alive? if not, start it again: ray start --address=HEAD:6379)"


def _check_addresses(there: list[ProbedNode]) -> Iterator[Row]:
    """On one machine everybody may be called 127.0.0.1."""
    if len({node.facts["host"] for node in there}) < 2:
        return
    for node in there:
        if is_loopback(node.address):
            fix = f"on {node.name}: ray stop; ray start --address=HEAD:6379 --node-ip-address=ITS_ADDRESS"
            yield f"address of {node.name}", "broken", f"{node.address}, which every other node takes for itself", fix
        elif is_loopback(node.facts["resolves_to"]):
            found = (
                f"{node.facts['host']} is {node.facts['resolves_to']} to itself, "
                "so a rank there may listen where nobody comes"
            )
            fix = f"on {node.name}: put '{node.address} {node.facts['host']}' into /etc/hosts in place of that line"
            yield f"name of {node.name}", "note", found, fix


def _check_versions(there: list[ProbedNode]) -> Iterator[Row]:
    if not there:
        return
    first, wrong = there[0].facts["versions"], False
    for node in there[1:]:
        theirs = node.facts["versions"]
        for package in sorted(first.keys() | theirs.keys()):
            ours, other = first.get(package), theirs.get(package)
            if ours != other:
                wrong = True
                remedy = (
                    f"install Python {ours}"
                    if package == "python"
                    else f"pip install '{package}=={ours}'"
                    if ours
                    else f"pip uninstall {package}"
                )
                yield (
                    f"{package} of {node.name}",
                    "broken",
                    f"{other or 'not installed'}; {there[0].name} has {ours or 'none'}",
                    f"on {node.name}: {remedy}",
                )
    if not wrong:
        yield "versions", "ok", ", ".join(f"{name} {number}" for name, number in first.items()), ""


def _check_gpus(there: list[ProbedNode]) -> Iterator[Row]:
    counts = {node.name: node.facts["gpus"] for node in there}
    if len(set(counts.values())) <= 1:
        yield "GPUs", "ok", f"{next(iter(counts.values()), 0)} a node", ""
    else:
        most = max(counts.values())
        few = [name for name, n in counts.items() if n < most]
        yield (
            "GPUs",
            "note",
            ", ".join(f"{name} {n}" for name, n in counts.items()),
            f"on {few[0]}: nvidia-smi  (the others have {most})",
        )


def _check_folder(seen: ProbeResult, there: list[ProbedNode]) -> Iterator[Row]:
    blind = [node.name for node in there if node.sees is False]
    if blind:
        found = f"{seen.folder} of {there[0].name} is not there on {', '.join(blind)}"
        yield (
            "shared folder",
            "note",
            found,
            "set run.folder to storage that every node mounts: sync by disk or delta and a requeued run need it",
        )
    elif seen.folder and there:
        yield "shared folder", "ok", f"{seen.folder} is the same everywhere", ""


def _check_links(seen: ProbeResult) -> Iterator[Row]:
    good = {pair: link for pair, link in seen.links.items() if "error" not in link}
    for (a, b), link in seen.links.items():
        if "error" in link:
            where = next(node.address for node in seen.nodes if node.name == b)
            yield (
                f"{a} to {b}",
                "broken",
                link["error"],
                f"let TCP through from {a} to {where}, all ports from 1024 on: Ray, gloo and NCCL choose theirs",
            )
    if not good:
        return
    middle = median(link["bandwidth"] for link in good.values())
    for (a, b), link in good.items():
        if link["bandwidth"] < SLOW * middle:
            found = f"{link['bandwidth'] / 1e9:.2f} GB/s, where others have {middle / 1e9:.2f}"
            yield (
                f"{a} to {b}",
                "note",
                found,
                f"on {a}: ethtool the interface towards {b}, and name the fast one in GLOO_SOCKET_IFNAME and "
                f"NCCL_SOCKET_IFNAME",
            )
    slowest, latest = min(link["bandwidth"] for link in good.values()), max(link["latency"] for link in good.values())
    yield (
        "links",
        "ok",
        f"{len(good)} ways of TCP: at least {slowest / 1e9:.2f} GB/s, at most {latest * 1e6:.0f} us there and back",
        "",
    )
