"""The blocks of a diffusion transformer over several ranks, a part of every matrix on each (arXiv:1909.08053).

    all tokens, whole                                                                  all tokens, whole
    norm, shift, scale ──► own heads of q k v │ attention │ own columns of out ──► sum ──► gate, residual
                       ──► own rows of up     │           │ own columns of down ──► sum ──►

What a rank does not share (embeddings, entry, exit) it computes whole, and its gradient is the same on all of them. Each
adds its share of the two biases behind a sum: their gradients are parts of a sum, too. The rows between the parts lie
whole on every rank, or apart (`sequence`, arXiv:2205.05198), and then so does the work of modulations on them:

    own tokens                    all tokens                              own tokens
    norm, shift, scale ──► gather │ own heads ... own columns of out │ sum, own ──► gate, residual
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from rondel.core.errors import ModelError
from rondel.models.blocks import model_blocks
from rondel.models.collectives import RankGroup, enter_cut, leave_cut
from rondel.models.flow.dit_block import DitBlock
from rondel.models.flow.patch_transformer import PatchTransformer
from rondel.models.flow.token_share import SplitTokens
from rondel.models.shard_cut import ShardCut
from rondel.models.tensor_cuts import TensorCuts
from rondel.models.tensor_parallel import cut_part


def cut_blocks(model: PatchTransformer, ranks: RankGroup, *, sequence: bool = False) -> TensorCuts:
    """Keep this rank's part of the whole model, in place. `sequence`: tokens between the parts of a block lie apart.
    ModelError where heads, or the MLP, and ranks do not divide.
    """
    found, shapes = TensorCuts(ranks, sequence), {name: p.shape for name, p in model.named_parameters()}
    between = model.between = SplitTokens(ranks) if sequence else None
    enter = partial(_enter, ranks) if between is None else partial(_gather, between)
    leave = partial(_leave, ranks) if between is None else partial(_scatter, between)
    blocks = {id(block) for block in model_blocks(model)}
    for name, block in [(n, m) for n, m in model.named_modules() if id(m) in blocks]:
        assert isinstance(block, DitBlock)
        _check_divides(block, ranks.size)
        own = {f"{name}.{inside}": cut for inside, cut in _cuts_of(block).items()}
        cut_part(model, block, own, ranks)
        block.heads //= ranks.size
        for into, out in ((block.qkv, block.out), (block.up, block.down)):
            into.register_forward_pre_hook(enter)
            out.register_forward_hook(leave)
        found.cuts |= own
        found.partial |= {f"{name}.out.bias", f"{name}.down.bias"}
        found.partial |= {f"{name}.modulation.weight", f"{name}.modulation.bias"} if sequence else set()
    found.shapes = {name: shapes[name] for name in found.cuts}
    return found


def _cuts_of(block: DitBlock) -> dict[str, ShardCut]:
    """By the names that parameters have in the block. q, k and v are stacked in one matrix."""
    rows, columns, width = ShardCut(0), ShardCut(1), block.out.out_features
    stacked = ShardCut(0, parts=((width, rows),) * 3)
    cuts = {"qkv.weight": stacked, "qkv.bias": stacked, "up.weight": rows, "up.bias": rows}
    return cuts | {"out.weight": columns, "down.weight": columns}


def _check_divides(block: DitBlock, tp: int) -> None:
    for n, what in ((block.heads, "attention heads"), (block.up.out_features, "numbers inside the MLP")):
        if n % tp:
            raise ModelError(
                f"place.mesh has tp = {tp}, which does not divide the {n} {what} of a block: take a tp that does, or "
                "cp or shards instead"
            )


def _enter(ranks: RankGroup, part: Any, args: tuple[Tensor]) -> Tensor:
    return enter_cut(args[0], ranks)


def _leave(ranks: RankGroup, part: Any, args: tuple[Tensor], out: Tensor) -> Tensor:
    return leave_cut(out, ranks)


def _gather(between: SplitTokens, part: Any, args: tuple[Tensor]) -> Tensor:
    return between.join(args[0], summed=True)


def _scatter(between: SplitTokens, part: Any, args: tuple[Tensor], out: Tensor) -> Tensor:
    return between.keep(out, summed=True)
