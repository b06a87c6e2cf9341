"""The trainer on meshes of ranks against one rank: the difference of the gradient, and the bytes that a rank holds and moves.

    rondel bench mesh --json
    rondel bench mesh --meshes tp=2 cp=2 shards=2,tp=2 --families llama qwen3_moe --rows grpo ppo

difference   |g - g1| / |g1| of the update's whole gradient, fp32, the largest over ranks and sizes of micro-batch
of_one_rank  the same of one rank that computes in smaller micro-batches: what rounding alone makes of this model
held         bytes of weights, gradients and both moments on the fullest rank
planned      the same by the plan of cuts: what tp cuts / tp, and what it leaves whole, / (shards · cp); with pp of the fullest
             stage, whose layers are whole ones
moved        bytes that a rank receives in one update of the policy, mean over the ranks, of one micro-batch (`in_parts`: of
             several, of at most 60 tokens)
formula      the same by the sum of what each axis moves, L layers of two parts, D wide, of P numbers, T packed tokens and M
             targets of one data rank, 4 bytes each, where n is the size of the axis:
             shards   m (3 P) (n-1)/n over shards · cp      gather for the forward and the backward pass, scatter of gradients
                      (what lies at the root is gathered once: 2 P)
             replicas 2 P (n-1)/n of a shard's numbers      sum of its gradients
             tp, sp   ((8 L + 2) T D + 2 T D + 2 M D + 8 M) (n-1)/n     borders of parts and of the run of layers, embedding,
                      head, four sums a target (six under a cap of logits, whose softmax is computed again); of matrices,
                      vocabulary, keys and values / n; round a ring (overlap) as many. A part that tp leaves whole, as a
                      recurrent layer, has 2 T D of 4 with sp and nothing without
             cp       6 L S K d (n-1)/n     K, V gathered twice and scattered once, of the S tokens that are shared
                      (core/row_split.py): none of short families, all of one long sample (--long); T / n, M / n
                      with cp_attention=ring K, V of the R tokens that arrive somewhere travel twice, and their gradients
                      once: 6 L R K d / n, where R is S (n-1) / 2 of one long sample (core/ring_blocks.py), in place of S (n-1)
                      of a recurrent layer 2 S W (n-1)/n     the W numbers a token of its convolution and its rule, gathered
                      and their gradients scattered
             pp       2 T D (n v-1)/n + M (n-1)/n     states forward, their gradient back, of v chunks; logprobs to all;
                      L / n, embedding and head once (a tied one at both ends); of tp a run of layers a chunk
             ep       4 k L T D (n-1)/n and experts over shards · cp · tp / n     k rows of each token to its experts and
                      back, in both passes: where the router sends tokens evenly, which an untrained one does not quite
             Left out: what data ranks tell each other of their tokens, rows that fill up uneven shards, and sums of norms
             whose matrices are cut: below 1 %. Of flow_video, whose samples lie over cp and whose modulations tp leaves
             whole, that of `rondel plan` (planner/flow_cost.py), `held` as well; with sp the sum of modulations behind
             the passes is left out, which the plan counts.
All ranks are processes of this machine over gloo: their speed says little of devices, and is measured on request alone,

    rondel bench mesh --meshes tp=2 tp=2,overlap=true --families llama --rows grpo --hidden 512 --pairs 12

which gives seconds of an update on each mesh, in turn, and how many of them ranks spend in collectives; with --link 100e6 as if messages took longer (_mesh_time.py).
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
SIZE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZE |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "head_dim": 16}
EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SIZE,
    "tied": SIZE | {"random": "llama", "tie_word_embeddings": True},
    "deep": SIZE | {"random": "llama", "tie_word_embeddings": True, "num_hidden_layers": 6},
    "qwen3": SIZE,
    "gemma2": SIZE | {"sliding_window": 8, "query_pre_attn_scalar": 16},
    "qwen3_5_text": SIZE
    | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    | {"linear_value_head_dim": 16, "linear_conv_kernel_dim": 4},
    "qwen3_moe": SIZE | EXPERTS,
    "flow_video": {"frames": 4, "height": 8, "width": 8, "hidden_size": 64, "intermediate_size": 192}
    | {"num_hidden_layers": 3, "num_attention_heads": 4},
}
FLOW = "flow_video"
FLOW_ROW = "flow_grpo"  # the row that a flow is trained with
MESHES = [
    "shards=2",
    "tp=2",
    "tp=2,sp=false",
    "cp=2",
    "replicas=2,shards=2",
    "shards=2,tp=2",
    "shards=2,cp=2",
    "cp=2,cp_attention=ring",
    "cp=2,tp=2",
    "tp=4",
    "shards=2,ep=2",
    "shards=4,ep=2",
    "tp=2,ep=2",
    "shards=2,tp=2,ep=2",
    "shards=2,tp=2,ep=4",
    "cp=2,ep=2",
    "pp=2,shards=2,ep=2",
    "pp=2,tp=2,ep=2",
    "pp=2",
    "pp=4",
    "pp=2,chunks=2",
    "pp=2,chunks=3",
    "pp=2,shards=2",
    "pp=2,tp=2",
    "pp=2,cp=2",
    "replicas=2,tp=2",
    "replicas=2,cp=2",
    "pp=2,replicas=2",
    "shards=2,tp=2,sp=false",
]
ROWS = ["grpo", "gspo", "ppo", "dapo", "reinforce_pp"]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="rondel bench mesh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--meshes", nargs="+", default=MESHES, metavar="AXIS=N,...")
    parser.add_argument("--families", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rows", nargs="+", default=ROWS)
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--long", type=int, default=0, help="tokens of one long sample beside the groups")
    parser.add_argument(
        "--pairs", type=int, default=0, help="time so many updates on each mesh in turn, and nothing else"
    )
    parser.add_argument(
        "--link", type=float, default=math.inf, help="with --pairs: bytes a second that a rank receives at most"
    )
    parser.add_argument("--hidden", type=int, default=0, help="width of the model that is timed, 64 without")
    parser.add_argument("--prompt", type=int, default=11, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=24, help="tokens of the longest answers")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args(argv)

    from _work import report

    from rondel.core.errors import UserError
    from rondel.core.mesh import Mesh

    meshes = {}
    for words in a.meshes:
        try:
            meshes[words] = Mesh(**{key: _value(text) for key, _, text in (w.partition("=") for w in words.split(","))})
        except TypeError:
            raise UserError(f"--meshes {words}: each part is a key of place.mesh and its value, as tp=2") from None
        except ValueError as error:
            raise UserError(f"--meshes {words}: {error}") from None
    told: dict[str, Any] = {}
    if a.pairs:
        from _mesh_time import time_in_turn

        size = {"groups": a.groups, "samples": a.samples, "prompt": a.prompt, "new": a.new, "long": a.long}
        for family in a.families:
            for row in a.rows:
                told[f"{family} {row}"] = time_in_turn(
                    meshes, _spec(family, a.hidden), row, pairs=a.pairs, link=a.link, **size
                )
        report(told, only_json=a.json)
        return
    alone = _alone(a)
    for words, mesh in meshes.items():
        told[words] = on_mesh(mesh, alone, a)
    worst = max(cell["difference"] for rows in told.values() for cell in rows.values())
    report({"worst_difference": worst, **told}, only_json=a.json)


def _value(text: str) -> int | bool | str:
    return {"true": True, "false": False}[text] if text in ("true", "false") else int(text) if text.isdigit() else text


def _difference(got: Any, whole: Any) -> float:
    return float(((got - whole) ** 2).sum() ** 0.5 / (whole**2).sum() ** 0.5)


def _alone(a: argparse.Namespace) -> dict[tuple[str, str], tuple[Any, Any, Any, Any, float]]:
    """Of a family and a row: the row, its batch, the gradient of one rank, that rank, and how far its own gradient moves when
    it computes it in smaller micro-batches.
    """
    from _ranks import RankTrainer, lively_model, synthetic_chains, synthetic_groups

    from rondel.algos.table import resolve_algorithm
    from rondel.train.pack import batch_of

    found = {}
    for family in a.families:
        for name in a.rows if family != FLOW else [FLOW_ROW]:
            algo = resolve_algorithm({"kind": name}).bounded(8)
            how = {"groups": a.groups, "samples": a.samples}
            if family == FLOW:
                batch = batch_of(synthetic_chains(lively_model(_spec(family)), 0, **how, new=6))
            else:
                batch = batch_of(synthetic_groups(0, **how, prompt=a.prompt, new=a.new, long=a.long))
            one = RankTrainer(0)
            one.make(_spec(family), algo)
            whole = one.gradient(copy.deepcopy(batch), algo, 10**6)[0]
            split = _difference(one.gradient(copy.deepcopy(batch), algo, 60)[0], whole)
            found[family, name] = algo, batch, whole, one, split
    return found


def _spec(family: str, hidden: int = 0) -> dict[str, Any]:
    """`hidden`: another width, with the rest of the model in proportion."""
    spec = {"random": family, "seed": 3, **MODELS[family]}
    wider = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "head_dim": hidden // 4}
    return spec | (wider | {"max_position_embeddings": 4096} if hidden else {})


def on_mesh(mesh: Any, alone: dict[tuple[str, str], Any], a: argparse.Namespace) -> dict[str, Any]:
    from _ranks import RankTrainer

    from rondel.runtime.cluster.process import ProcessCluster

    def every(verb: str, *args: Any) -> list[Any]:
        asked = [rank.ask(verb, *args) for rank in ranks]
        return [answer.result(300) for answer in asked]

    cells: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        cluster = ProcessCluster(Path(scratch))
        try:
            ranks = [cluster.spawn(f"rank-{r}", RankTrainer, r) for r in range(mesh.world)]
            every("join", ranks[0].now("meet"), mesh)
            for (family, name), (algo, batch, whole, one, split) in alone.items():
                if mesh.ep > 1 and "num_experts" not in MODELS[family]:
                    continue  # a dense model has nothing that could lie apart
                ring = mesh.overlap or mesh.cp_attention == "ring"
                if mesh.pp * mesh.chunks > MODELS[family]["num_hidden_layers"] or (
                    family == FLOW and (mesh.pp * mesh.ep > 1 or ring)
                ):
                    continue
                every("make", _spec(family), algo)
                differences, moved, tokens = [], dict.fromkeys((60, 10**6), 0.0), 0
                for micro_tokens in (60, 10**6):
                    for got, bytes_moved, packed in every("gradient", copy.deepcopy(batch), algo, micro_tokens):
                        differences.append(_difference(got, whole))
                        moved[micro_tokens] += sum(bytes_moved.values()) / mesh.world
                        tokens = packed if micro_tokens == 10**6 else 0
                cell: dict[str, Any] = {
                    "difference": max(differences),
                    "of_one_rank": split,
                    "held": max(every("held_bytes")),
                    "moved": round(moved[10**6]),
                    "moved_in_parts": round(moved[60]),
                }
                if family == FLOW:
                    cell["planned"], cell["formula"] = _flow_formulas(mesh, family, batch)
                else:
                    cell["planned"] = one.planned_bytes(mesh)
                    cell["formula"] = round(
                        bytes_of_axes(mesh, ModelNumbers.of(one.trainer.loaded, mesh), batch, tokens)
                    )
                cells[f"{family} {name}"] = cell
                print(f"{mesh!s:<28} {family:<13} {name:<13} {cell}", file=sys.stderr, flush=True)
        finally:
            cluster.close()
    return cells


@dataclass
class ModelNumbers:
    """What a model has of everything that an axis moves, in numbers of one rank of tp.

    layers   parameters of all layers but experts that lie apart        experts   these, of all ranks
    root     of embedding, last norm and head
    cut      parts of layers that tp cuts, whole   and those that it does not
    keys     of a token's keys and values, in all layers that attend
    scanned  of what a token gives the convolutions and the rules of recurrent layers
    sums     over the vocabulary of each target
    """

    hidden: int
    layers: float = 0.0
    experts: float = 0.0
    root: float = 0.0
    cut: int = 0
    whole: int = 0
    keys: float = 0.0
    scanned: float = 0.0
    sums: int = 8
    chosen: int = 0

    @classmethod
    def of(cls, loaded: Any, mesh: Any) -> ModelNumbers:
        from rondel.models.tensor_parallel import check_tensor_parallel

        model, c = loaded.model, loaded.model.config.get_text_config()
        cuts = check_tensor_parallel(model, mesh.tp)
        found = cls(c.hidden_size, chosen=getattr(c, "num_experts_per_tok", 0), sums=12 if loaded.head.softcap else 8)
        for name, p in model.named_parameters():
            if ".layers." not in name:
                found.root += p.numel() / (mesh.tp if p.ndim > 1 else 1)
            elif mesh.ep > 1 and ".experts." in name:
                found.experts += p.numel()
            else:
                found.layers += p.numel() / (mesh.tp if name in cuts else 1)
        if mesh.pp > 1 and c.tie_word_embeddings:  # at both ends
            found.root += model.get_input_embeddings().weight.numel() / mesh.tp
        kinds = getattr(c, "layer_types", None) or ["attention"] * c.num_hidden_layers
        for kind in kinds:
            if kind == "linear_attention":
                keys, values = c.linear_num_key_heads * c.linear_key_head_dim, c.linear_num_value_heads
                values *= c.linear_value_head_dim
                found.scanned += 2 * (2 * keys + values) + 2 * c.linear_num_value_heads
                found.whole += 1
            else:
                found.keys += 2 * c.num_key_value_heads * c.head_dim / mesh.tp
                found.cut += 1
        found.cut += len(kinds)
        return found


def bytes_of_axes(mesh: Any, model: ModelNumbers, batch: Any, tokens: int) -> float:
    """Bytes of one rank in an update of one micro-batch a data rank, mean over the ranks: the sum of what each axis moves,
    of a decoder in fp32 whose heads tp divides. `tokens`: packed, of all data ranks.
    """
    n, targets = mesh.shards * mesh.cp, batch.total_tokens
    rows, chosen = tokens / mesh.data / mesh.cp, targets / mesh.data / mesh.cp
    moved = _received(n) * (3 * model.layers + 2 * model.root) / mesh.pp
    moved += _received(n * mesh.tp // mesh.ep) * 3 * model.experts / mesh.ep / mesh.pp
    moved += 2 * _received(mesh.replicas) * ((model.layers + model.root) / n + model.experts / (n * mesh.tp)) / mesh.pp
    around, gathered = (_shared(mesh, batch, model.hidden, ring) for ring in (mesh.cp_attention == "ring", False))
    moved += (3 * model.keys * around + 2 * model.scanned * gathered) / mesh.pp / mesh.data / mesh.cp
    moved += 2 * rows * model.hidden * (mesh.pp * mesh.chunks - 1) / mesh.pp + _received(mesh.pp) * chosen
    if mesh.tp > 1:
        passes = (4 * model.cut + 2 * model.whole * mesh.sp) / mesh.pp + 2 * mesh.chunks * mesh.sp
        at_ends = 2 * (rows + chosen) * model.hidden + model.sums * chosen
        moved += _received(mesh.tp) * (passes * rows * model.hidden + at_ends / mesh.pp)
    if mesh.ep > 1:
        layers = model.cut / 2
        moved += 4 * _received(mesh.ep) * layers / mesh.pp * model.chosen * rows / mesh.tp * model.hidden
    return 4 * moved


def _received(ranks: int) -> float:
    """The share of a tensor that comes from the others."""
    return (ranks - 1) / ranks


def _shared(mesh: Any, batch: Any, hidden: int, ring: bool) -> int:
    """Tokens whose keys and values come to a rank of cp that has others, summed over the ranks, in the rows of all data
    ranks: round a ring, or gathered.
    """
    from rondel.core.ring_blocks import ring_tokens
    from rondel.core.row_split import PRODUCTS, deal_row
    from rondel.train.pack import micro_batches

    how = {"ranks": mesh.data, "stages": mesh.pp}
    packs = (packed for rank in range(mesh.data) for packed in micro_batches(batch, 10**6, rank=rank, **how))
    found = 0
    for segments in (packed.layout.segments for packed in packs):
        dealing = deal_row(segments, mesh.cp, PRODUCTS * hidden)
        found += ring_tokens(segments, dealing) if ring else (mesh.cp - 1) * dealing.shared_tokens
    return found


def _flow_formulas(mesh: Any, family: str, batch: Any) -> tuple[int, int]:
    """Bytes that a rank of a flow holds, and receives of one micro-batch that has the steps of all its samples, mean over
    the ranks.
    """
    from dataclasses import replace

    from rondel.planner import flow_cost
    from rondel.planner.flow_shape import flow_shape
    from rondel.planner.flow_workload import FlowWorkload
    from rondel.planner.hardware import find_hardware

    one = FlowWorkload(flow_shape(_spec(family)), find_hardware("h100"), mesh=mesh, prompts=1, group=1, output=1)
    one = replace(one, micro=10**9)
    steps = batch.total_tokens / mesh.data
    inside = flow_cost.context_bytes(one, mesh) + flow_cost.tensor_bytes(one, mesh)
    return round(16 * flow_cost.held_numbers(one, mesh)), round(steps * inside + flow_cost.shard_bytes(one, mesh))


if __name__ == "__main__":
    main()
