"""What moves the masters, and what it remembers of each number between two steps:

adamw        two fp32 moments, 8 bytes                                        arXiv:1711.05101
adamw_8bit   the same moments in blocks of 256 numbers, 8 bits each and a scale a block: 2.03 bytes, from 4,096
             numbers in a tensor on (bitsandbytes)                            arXiv:2110.02861
muon         of a matrix one fp32 momentum, 4 bytes: it moves by the nearest semi-orthogonal matrix, scaled to the size
             that AdamW's moves have, so that a learning rate keeps its meaning
             (torch.optim.Muon; Jordan et al., 2024; the scale: arXiv:2502.16982). Embedding, head and all that is
             no matrix (vectors, fused experts) go with AdamW
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

TABLES = {"qmap1": "dynamic", "qmap2": "udynamic"}  # bitsandbytes' 256 numbers of 8 bits: signed, and not
ONE_RANK = ("adamw_8bit", "muon")  # they need a tensor whole, or blocks of it that no rank divides


def build_optimizers(
    kind: str, masters: Sequence[Tensor], hidden: Sequence[bool], *, betas: tuple[float, float], weight_decay: float
) -> list[torch.optim.Optimizer]:
    """`hidden`: which masters are of the layers, neither embedding nor head. Weight decay is for matrices. Each
    learning rate is set before each step.
    """
    if kind == "muon":
        matrices = [m for m, inside in zip(masters, hidden) if inside and m.ndim == 2]
        chosen = {id(m) for m in matrices}
        others = build_optimizers(
            "adamw", [m for m in masters if id(m) not in chosen], [], betas=betas, weight_decay=weight_decay
        )
        if not matrices:
            return others
        muon = torch.optim.Muon(matrices, lr=0.0, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        return [muon, *others]
    groups = [
        {"params": [m for m in masters if m.ndim >= 2], "weight_decay": weight_decay},
        {"params": [m for m in masters if m.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        return []
    if kind == "adamw_8bit":
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it tells that there is no GPU
        from bitsandbytes.optim import AdamW8bit

        return [AdamW8bit(groups, lr=0.0, betas=betas, eps=1e-8)]
    return [torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=1e-8, fused=True)]


def is_hidden(model: nn.Module) -> dict[int, bool]:
    """By the id of a parameter: whether it is of the layers, neither embedding nor head."""
    ends = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    ends.add(id(getattr(head, "weight", None)))
    return {id(parameter): id(parameter) not in ends for parameter in model.parameters()}


def bytes_each(optimizer: torch.optim.Optimizer) -> float:
    """What it remembers of a number."""
    if isinstance(optimizer, torch.optim.AdamW):
        return 8.0
    return 4.0 if isinstance(optimizer, torch.optim.Muon) else 2 + 2 * 4 / 256
