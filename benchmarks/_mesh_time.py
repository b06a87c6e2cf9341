"""Seconds of an update on several meshes in turn, and how many of them ranks spend in collectives."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _ranks import RankTrainer, synthetic_groups
from _work import median


def time_in_turn(
    meshes: dict[str, Any], spec: dict[str, Any], row: str, *, pairs: int, link: float, **size: int
) -> dict[str, Any]:
    """Forward and backward passes of one update of one micro-batch, `pairs` times on each mesh: A B A B, behind one that
    is not counted. All ranks are processes of this machine with a thread each, and those of other meshes wait meanwhile.

    link      bytes a second that a rank receives at most: sleep stands for a link that is slower than memory
    seconds   of an update, of the slowest rank: median, least
    waited    of them in collectives, of a rank in the mean: others' work, copies, the link. Median, least
    cpu       seconds of a processor, of a rank in the mean, threads that carry messages included. Median, least
    ratio     of seconds to those of the first mesh in the same pair: median, least, most; cpu_ratio likewise
    """
    from rondel.algos.table import resolve_algorithm
    from rondel.runtime.cluster.process import ProcessCluster
    from rondel.train.pack import batch_of

    algo = resolve_algorithm({"kind": row}).bounded(8)
    batch = batch_of(synthetic_groups(0, **size))
    told: dict[str, list[dict[str, float]]] = {words: [] for words in meshes}
    with ExitStack() as stack:
        every = {}
        for number, (words, mesh) in enumerate(meshes.items()):
            cluster = ProcessCluster(Path(stack.enter_context(tempfile.TemporaryDirectory())))
            stack.callback(cluster.close)
            every[words] = ranks = [cluster.spawn(f"mesh-{number}-rank-{r}", RankTrainer, r) for r in range(mesh.world)]
            _ask(ranks, "join", ranks[0].now("meet"), mesh)
            _ask(ranks, "make", spec, algo)
        for _ in range(pairs + 1):
            for words, ranks in every.items():
                every_rank = _ask(ranks, "time_passes", batch, algo, 10**6, link)
                mean = {key: sum(each[key] for each in every_rank) / len(ranks) for key in ("waited", "cpu")}
                told[words].append(mean | {"seconds": max(each["seconds"] for each in every_rank)})
    first = told[next(iter(meshes))][1:]
    return {words: _cell(updates[1:], first) for words, updates in told.items()}


def _ask(ranks: list[Any], verb: str, *args: Any) -> list[Any]:
    asked = [rank.ask(verb, *args) for rank in ranks]
    return [answer.result(600) for answer in asked]


def _cell(updates: list[dict[str, float]], first: list[dict[str, float]]) -> dict[str, Any]:
    def ratio(key: str) -> list[float]:
        found = [mine[key] / theirs[key] for mine, theirs in zip(updates, first)]
        return [round(x, 3) for x in (median(found), min(found), max(found))]

    cell: dict[str, Any] = {}
    for key in ("seconds", "waited", "cpu"):
        values = [update[key] for update in updates]
        cell[key] = [round(x, 4) for x in (median(values), min(values))]
    return cell | {"ratio": ratio("seconds"), "cpu_ratio": ratio("cpu")}
