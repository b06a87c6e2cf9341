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
    ratio     of seconds to those of the first mesh in the same pair: median, least, most
    """
    from rondel.algos.table import resolve_algorithm
    from rondel.runtime.cluster.process import ProcessCluster
    from rondel.train.pack import batch_of

    algo = resolve_algorithm({"kind": row}).bounded(8)
    batch = batch_of(synthetic_groups(0, **size))
    seconds: dict[str, list[float]] = {words: [] for words in meshes}
    waited: dict[str, list[float]] = {words: [] for words in meshes}
    with ExitStack() as stack:
        every = {}
        for number, (words, mesh) in enumerate(meshes.items()):
            cluster = ProcessCluster(Path(stack.enter_context(tempfile.TemporaryDirectory())))
            stack.callback(cluster.close)
            every[words] = ranks = [cluster.spawn(f"mesh-{number}-rank-{r}", RankTrainer, r) for r in range(mesh.world)]
            _ask(ranks, "join", ranks[0].now("meet"), mesh)
            _ask(ranks, "make", spec, algo)
        for pair in range(-1, pairs):
            for words, ranks in every.items():
                told = _ask(ranks, "time_passes", batch, algo, 10**6, link)
                if pair >= 0:
                    seconds[words].append(max(each for each, _ in told))
                    waited[words].append(sum(each for _, each in told) / len(told))
    first = seconds[next(iter(meshes))]
    return {words: _cell(seconds[words], waited[words], first) for words in meshes}


def _ask(ranks: list[Any], verb: str, *args: Any) -> list[Any]:
    asked = [rank.ask(verb, *args) for rank in ranks]
    return [answer.result(600) for answer in asked]


def _cell(seconds: list[float], waited: list[float], first: list[float]) -> dict[str, Any]:
    ratios = [mine / theirs for mine, theirs in zip(seconds, first)]
    return {
        "seconds": [round(x, 4) for x in (median(seconds), min(seconds))],
        "waited": [round(x, 4) for x in (median(waited), min(waited))],
        "ratio": [round(x, 3) for x in (median(ratios), min(ratios), max(ratios))],
    }
