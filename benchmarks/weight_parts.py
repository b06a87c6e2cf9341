"""Weights from a trainer of several ranks to an engine of one or two through shared memory: gathered by the first rank,
against each rank's own shards. Update by update in turn, every tensor compared by digest.

    rondel bench weight_parts --mesh shards=2,tp=2 --json

gathered    bytes of other ranks that came to the first one for one update
publish     seconds until the route is known, median
read        bytes that all ranks of the engine read, and what the plan says
receive     seconds in which one engine of one rank takes them and computes every digest
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
WAYS = ("gathered", "apart")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="rondel bench weight_parts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mesh", default="shards=2,tp=2", help="axis=size, ...")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args(argv)

    from _work import report

    report(measure(a), only_json=a.json)


def measure(a: argparse.Namespace) -> dict[str, Any]:
    import torch
    from _ranks import RankTrainer
    from _work import median

    from rondel.algos.table import TABLE
    from rondel.core.mesh import Mesh
    from rondel.core.tensor_parts import TensorPart
    from rondel.models import names
    from rondel.models.shard_cut import part_of
    from rondel.runtime.cluster.process import ProcessCluster
    from rondel.sync.from_ipc import FromIpc
    from rondel.sync.transfer_plan import plan_transfer

    torch.set_num_threads(1)
    mesh = Mesh(**{axis: int(size) for axis, _, size in (word.partition("=") for word in a.mesh.split(","))})
    spec = {
        "random": "llama", "hidden_size": a.hidden, "intermediate_size": 3 * a.hidden, "num_hidden_layers": a.layers,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096,
    }  # fmt: skip
    told: dict[str, Any] = {way: defaultdict(list) for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        cluster = ProcessCluster(Path(folder))
        try:
            workers = [cluster.spawn(f"rank-{r}", RankTrainer, r) for r in range(mesh.world)]
            address = workers[0].now("meet")

            def ask(verb: str, *args: Any) -> list[Any]:
                return [answer.result(300) for answer in [worker.ask(verb, *args) for worker in workers]]

            ask("join", address, mesh)
            ask("make", spec, TABLE["grpo"])
            told_layout = ask("weight_layout")
            layout, cuts = [own for own, _ in told_layout], told_layout[0][1]
            engine = FromIpc()
            for number in range(2 * (a.pairs + 1)):
                way = WAYS[number % 2]
                ask("move_weights")
                began = time.perf_counter()
                (published, gathered), *_ = ask("publish_by_ipc", way == "apart")
                seconds = time.perf_counter() - began
                manifest, route = published
                began = time.perf_counter()
                got = dict(engine.receive(route, manifest, {}))
                wrong = [row.name for row in manifest.tensors if names.tensor_digest(got[row.name]) != row.digest]
                received = time.perf_counter() - began
                assert not wrong, wrong
                if number < 2:  # segments are mapped at their first use
                    continue
                row = told[way]
                row["gathered"].append(gathered)
                row["publish"].append(seconds)
                row["receive"].append(received)
            size = {row.name: getattr(torch, row.dtype).itemsize for row in manifest.tensors}
            for ranks in (1, 2):  # of the engine; the last way was "apart"
                want = [
                    {r.name: part_of(TensorPart.whole(r.shape), cuts.get(r.name), ranks, i) for r in manifest.tensors}
                    for i in range(ranks)
                ]
                read = 0
                for parts in want:
                    reader = FromIpc()
                    for _ in reader.receive_parts(route, manifest, parts):
                        pass
                    read += reader.reader.bytes_read
                planned = sum(copy.bytes for copy in plan_transfer(layout, want, size))
                told["apart"][f"read by {ranks}"] = [read]
                told["apart"][f"planned for {ranks}"] = [planned]
            del got
        finally:
            cluster.close()
    rows = {way: {name: round(median(values), 4) for name, values in row.items()} for way, row in told.items()}
    return {"mesh": str(mesh), "bytes": sum(t.nbytes for t in _meta(manifest)), **rows}


def _meta(manifest: Any) -> list[Any]:
    import torch

    return [torch.empty(row.shape, dtype=getattr(torch, row.dtype), device="meta") for row in manifest.tensors]


if __name__ == "__main__":
    main()
