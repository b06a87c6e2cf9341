"""Split of a model over the stages of a pipeline: its layers by equal work,
its parameters by who computes with them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from rondel.core.errors import ModelError
from rondel.models.blocks import decoder_blocks
from rondel.models.routing_tape import expert_count

BEHIND = ("final", "project_out")  # how names begin that families list before their layers and call behind them
INSTEAD = "Use place.mesh with shards, tp or cp instead of pp"


def split_layers(costs: Sequence[float], stages: int, *, head: float = 0.0) -> list[range]:
    """Runs of layers, at least one a stage, so that the costliest stage is as cheap as can be. `head`: what the last
    stage computes beside its layers.

    >>> split_layers([1, 1, 1, 1], 2, head=2)
    [range(0, 3), range(3, 4)]
    """
    n = len(costs)
    done = [0.0, *accumulate(costs)]
    # best[i]: the costliest of the stages so far, whose layers end before i, and where the last of them begins
    best: list[tuple[float, list[int]]] = [(done[i], [0]) if i else (float("inf"), []) for i in range(n + 1)]
    for stage in range(1, stages):
        more = head if stage == stages - 1 else 0.0
        best = [
            min(
                ((max(best[j][0], done[i] - done[j] + more), [*best[j][1], j]) for j in range(stage, i)),
                default=(float("inf"), []),
            )
            for i in range(n + 1)
        ]
    starts = [*best[n][1], n]
    return [range(a, b) for a, b in pairwise(starts)]


@dataclass(frozen=True, slots=True)
class StageLayers:
    """One stage's part of a model.

    blocks    all layers of the decoder
    runs      those of them that are this stage's: one run, or one for each of its chunks
    held      names of the parameters that it holds
    shared    names of those that several stages hold: a matrix that is embedding and head (of the first and the last),
              a tower that is frozen (of all)
    """

    blocks: list[nn.Module]
    runs: list[range]
    held: frozenset[str]
    shared: frozenset[str]

    @property
    def own_runs(self) -> list[list[nn.Module]]:
        return [[self.blocks[i] for i in run] for run in self.runs]

    @property
    def own_blocks(self) -> list[nn.Module]:
        return [block for run in self.own_runs for block in run]


def layers_of_stage(
    model: Any, decoder: Any, stages: int, index: int, *, chunks: int = 1, whole: Collection[nn.Parameter] = ()
) -> StageLayers:
    """Stage `index` of `stages`: embedding and what else comes before the layers on the first, what comes behind them
    on the last. A critic's backbone is split like that of its policy. `chunks`: runs of layers of each stage, of which
    the first ones of all stages come before the second ones. `whole`: what all stages hold.

    Raises ModelError where there are fewer layers than stages, or layers share weights.
    """
    kind, blocks = model.config.model_type, decoder_blocks(model, decoder)
    if len(blocks) < stages * chunks:
        each = f"pp = {stages}" + (f" and chunks = {chunks}" if chunks > 1 else "")
        raise ModelError(
            f"place.mesh has {each}, and a model of type '{kind}' here has {len(blocks)} layers: every "
            f"{'chunk of a stage' if chunks > 1 else 'stage'} needs one. Use a smaller "
            f"pp{' or fewer chunks' * (chunks > 1)}"
        )
    text = model.config.get_text_config()
    head = float(text.vocab_size * model.get_input_embeddings().weight.shape[1])
    runs = split_layers([_block_cost(block, text) for block in blocks], stages * chunks, head=head)
    stage_of = _stages_of_parameters(model, blocks, runs, stages)
    ends = {id(p) for end in (model.get_input_embeddings(), model.get_output_embeddings()) for p in end.parameters()}
    ends |= (everywhere := {id(p) for p in whole})
    tied = {name for name, p in model.named_parameters() if id(p) in ends}
    stage_of |= {name: {*range(stages)} for name, p in model.named_parameters() if id(p) in everywhere}
    if torn := next((name for name, held in stage_of.items() if len(held) > 1 and name not in tied), None):
        raise ModelError(f"layers of model type '{kind}' share {torn}, and pp would lay them apart. {INSTEAD}")
    return StageLayers(
        blocks,
        runs[index::stages],
        frozenset(name for name, held in stage_of.items() if index in held),
        frozenset(name for name, held in stage_of.items() if len(held) > 1),
    )


def _block_cost(block: nn.Module, text: Any) -> float:
    """Products of a token: its matrices, and of a mixture those of the experts that it goes to."""
    experts = expert_count(text)
    chosen = getattr(text, "num_experts_per_tok", None) or getattr(text, "moe_topk", None) or 1
    share = chosen / experts if experts else 1.0
    return sum(
        p.numel() * (share if ".experts." in f".{name}" else 1.0) for name, p in block.named_parameters() if p.ndim > 1
    )


def _stages_of_parameters(model: Any, blocks: list[nn.Module], runs: list[range], stages: int) -> dict[str, set[int]]:
    """Of each parameter the stages that compute with it; tied ones under their first name."""
    last = stages - 1
    stage_of = {id(blocks[i]): place % stages for place, run in enumerate(runs) for i in run}
    stage_of |= {id(model.get_input_embeddings()): 0, id(model.get_output_embeddings()): last}
    owners = {name: stage_of[id(module)] for name, module in model.named_modules() if id(module) in stage_of}
    first_names: dict[int, str] = {}
    found: dict[str, set[int]] = {}
    behind = False  # the layers: a last norm
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = next((path for path in owners if name.startswith(f"{path}.")), None)
        late = behind or any(part.startswith(BEHIND) for part in name.split("."))
        stage = owners[owner] if owner is not None else last if late else 0
        behind = behind or (owner is not None and model.get_submodule(owner) in blocks)
        found.setdefault(first_names.setdefault(id(parameter), name), set()).add(stage)
    return found


def drop_parameters(model: nn.Module, held: frozenset[str]) -> None:
    """Parameters that are not `held` here keep their name and shape, and no memory: on "meta", and not trained."""
    names = {id(p): n for n, p in model.named_parameters()}
    dropped: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for own, parameter in module._parameters.items():
            if parameter is None or names.get(id(parameter), "") in held or id(parameter) not in names:
                continue
            if id(parameter) not in dropped:
                empty = torch.empty_like(parameter, device="meta")
                dropped[id(parameter)] = nn.Parameter(empty, requires_grad=False)
            module._parameters[own] = dropped[id(parameter)]
