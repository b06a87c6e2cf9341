"""Log-probability and entropy of chosen tokens on a GPU: the forward pass has logits as tiles alone.

    forward    a program: one tile of tokens, one split of the vocabulary     tiles of hidden [B_t, D] and weight [B_v,
               D] are multiplied D block by D block, online softmax: max m, sum e^(z-m), sum e^(z-m) (z-m)
               splits are merged by torch: 4 numbers a token and split
    backward   a chunk of tokens at a time: z = h W^T by the library's product, in fp32; one kernel reads it once and
               writes its gradient dz in the dtype of the weight; dh = dz W and dW += dz^T h by the library again

    p = softmax(z)    dz = onehot(target) g_logprob - p (g_logprob + g_entropy (log p + entropy))

On an H100 the forward pass reaches 67 to 75 % of what the library's product does; kernels of our own for both products
of the backward pass were 2.2 to 3.6 times slower than these chunks (docs/LOG.md). The order of all sums is fixed:
results have the same bits in every run, and those of the forward pass in every batch. The products, and the plain code,
are in train/logprobs.py. Tests compare the two through Triton's interpreter, count what is read and written against
`bytes_moved`, and compile for sm_80, sm_90 and sm_100, on machines without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLITS = 8  # of the vocabulary in the forward pass: few tokens occupy a GPU, too
COLUMNS = 1024  # of z that a program of the backward pass takes
NEGATIVE = tl.constexpr(-1.0e30)  # of a column that does not exist: finite, so that an empty split stays a number


class TileShape(NamedTuple):
    """What a program multiplies at a time: `tokens` and `vocab` are a tile of logits, summed over `size` of D at a
    time; `warps` and `stages` are Triton's.
    """

    tokens: int = 64
    vocab: int = 128
    size: int = 64
    warps: int = 8
    stages: int = 2

    @property
    def blocks(self) -> dict[str, int]:
        return {"TOKENS": self.tokens, "VOCAB": self.vocab, "SIZE": self.size}

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


class LogitShape(NamedTuple):
    """What becomes of h Wᵀ + b: softcap(scale · (h Wᵀ + b)) / temperature."""

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    @property
    def numbers(self) -> tuple[float, float, float]:
        return float(self.scale), float(self.softcap or 0.0), float(self.temperature)


LARGE, SMALL, FULL = TileShape(128, 256, stages=3), TileShape(), TileShape(32, 64, 16)
LARGE_MEMORY = 160 << 10  # bytes of shared memory that LARGE needs: A100, H100, B200 have them, other cards 99 KiB


def tile_of(element: int, shared_memory: int) -> TileShape:
    """For numbers of `element` bytes on a card with so many bytes of shared memory a program: 16 bits go to tensor
    cores, fp32 is multiplied in full.
    """
    if element != 2:
        return FULL
    return LARGE if shared_memory >= LARGE_MEMORY else SMALL


@cache
def _shared_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    card: Any = torch.cuda.get_device_properties(device)
    return int(card.shared_memory_per_block_optin)


def bytes_moved(tokens: int, vocab: int, size: int, element: int, tile: TileShape) -> tuple[int, int]:
    """-> (forward, dz) bytes that the kernels load and store, of a head [vocab, size] without bias, `element` bytes a
    number; what a cache keeps is counted each time. A tile of logits reads B_t + B_v rows. dz reads fp32 logits once,
    and five numbers of a token (target, lse, entropy, two gradients) for each of its programs.
    """
    n, m = triton.cdiv(tokens, tile.tokens), triton.cdiv(vocab, tile.vocab)
    logits = (m * tokens + n * vocab) * size * element  # every token for every tile of the vocabulary, and the reverse
    forward = logits + SPLITS * tokens * (8 + 4 * 4)  # target, four numbers of a split
    return forward, tokens * (vocab * (4 + element) + triton.cdiv(vocab, COLUMNS) * (8 + 4 * 4))


def forward_pass(
    rows: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, shape: LogitShape, tile: TileShape | None
) -> tuple[Tensor, Tensor, Tensor]:
    """rows [T, D] and weight [V, D] of one dtype, contiguous; bias [V], target [T] int64 -> (logprob, entropy, lse) [T]
    in fp32 of softmax(softcap(scale · (h Wᵀ + b)) / temperature). An id outside the vocabulary has the
    log-probability NaN.
    """
    tile = tile or tile_of(weight.element_size(), _shared_memory(weight.device))
    parts = torch.empty(4, SPLITS, len(rows), dtype=torch.float32, device=rows.device)
    if len(rows):
        grid = (triton.cdiv(len(rows), tile.tokens), SPLITS)
        _forward_kernel[grid](
            rows, weight, _or_any(bias, weight), target, parts, len(rows), *weight.shape, *shape.numbers,
            CAPPED=shape.softcap is not None, BIAS=bias is not None, SPLITS=SPLITS, **tile.blocks, **tile.options,
        )  # fmt: skip
    logprob, entropy, lse = _merge_splits(parts)
    return logprob.masked_fill_((target < 0) | (target >= len(weight)), torch.nan), entropy, lse


def logit_gradients(
    z: Tensor, bias: Tensor | None, of_tokens: Sequence[Tensor], shape: LogitShape, dtype: torch.dtype
) -> Tensor:
    """z = h Wᵀ [M, V] in fp32; target, lse, entropy and the gradients of log-probability and entropy, each [M] -> the
    gradient of h Wᵀ + b in `dtype`; in the place of z where that is its own.
    """
    dz = z if dtype == z.dtype else torch.empty(z.shape, dtype=dtype, device=z.device)
    _dz_kernel[(len(z), triton.cdiv(z.shape[1], COLUMNS))](
        z, _or_any(bias, z), *of_tokens, dz, z.shape[1], *shape.numbers,
        CAPPED=shape.softcap is not None, BIAS=bias is not None, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    return dz


def _or_any(bias: Tensor | None, other: Tensor) -> Tensor:
    """A kernel's argument is a tensor, also where it is not read."""
    return other if bias is None else bias


def _merge_splits(parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[4, SPLITS, T]: max, sum e^(z-max), sum e^(z-max) (z-max), logit of the target -> logprob, entropy, lse [T]."""
    best, total, shifted, picked = parts
    top = best.amax(0)
    fade = (best - top).exp()
    whole = (total * fade).sum(0)
    log_total = whole.log()
    mean = ((shifted + total * (best - top)) * fade).sum(0) / whole
    return picked.sum(0) - top - log_total, log_total - mean, top + log_total


@triton.jit
def _logit_tile(
    hidden, weight, token, word, tokens, vocab, size, TOKENS: tl.constexpr, VOCAB: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """-> h Wᵀ [TOKENS, VOCAB] in fp32."""
    z = tl.zeros([TOKENS, VOCAB], tl.float32)
    for first in range(0, size, SIZE):
        d = first + tl.arange(0, SIZE)
        h = tl.load(
            hidden + token[:, None] * size + d[None, :],
            mask=(token[:, None] < tokens) & (d[None, :] < size),
            other=0.0,
        )
        w = tl.load(
            weight + word[:, None] * size + d[None, :], mask=(word[:, None] < vocab) & (d[None, :] < size), other=0.0
        )
        z = tl.dot(h, tl.trans(w), z, input_precision="ieee")
    return z


@triton.jit
def _shaped_logits(z, offset, scale, softcap, temperature, CAPPED: tl.constexpr):
    """h Wᵀ and the bias -> z over the temperature, and what dz is multiplied with on the way back."""
    z = (z + offset) * scale
    if CAPPED:
        bent = 2.0 * tl.sigmoid(2.0 * z / softcap) - 1.0  # tanh
        return softcap * bent / temperature, (1.0 - bent * bent) * (scale / temperature)
    else:
        return z / temperature, scale / temperature


@triton.jit
def _forward_kernel(
    hidden, weight, bias, target, parts, tokens, vocab, size, scale, softcap, temperature,
    CAPPED: tl.constexpr, BIAS: tl.constexpr, TOKENS: tl.constexpr, VOCAB: tl.constexpr, SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    token = tile.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    real = token < tokens
    chosen = tl.load(target + token, mask=real, other=-1)
    share = tl.cdiv(tl.cdiv(vocab, SPLITS), VOCAB) * VOCAB
    begin = split * share
    end = tl.minimum(begin + share, vocab)

    best = tl.full([TOKENS], NEGATIVE, tl.float32)
    total = tl.zeros([TOKENS], tl.float32)
    shifted = tl.zeros([TOKENS], tl.float32)
    picked = tl.zeros([TOKENS], tl.float32)
    for first in range(begin, end, VOCAB):
        word = first + tl.arange(0, VOCAB).to(tl.int64)
        z = _logit_tile(hidden, weight, token, word, tokens, vocab, size, TOKENS, VOCAB, SIZE)
        offset = tl.zeros([VOCAB], tl.float32)
        if BIAS:
            offset = tl.load(bias + word, mask=word < vocab, other=0.0).to(tl.float32)
        z, _ = _shaped_logits(z, offset[None, :], scale, softcap, temperature, CAPPED)
        picked += tl.sum(tl.where(word[None, :] == chosen[:, None], z, 0.0), 1)
        z = tl.where(word[None, :] < vocab, z, NEGATIVE)
        higher = tl.maximum(best, tl.max(z, 1))
        z -= higher[:, None]
        weights = tl.exp(z)
        fade = tl.exp(best - higher)
        shifted = fade * (shifted + total * (best - higher)) + tl.sum(weights * z, 1)
        total = fade * total + tl.sum(weights, 1)
        best = higher
    place = parts + split * tokens + token
    each = SPLITS * tokens
    tl.store(place, best, mask=real)
    tl.store(place + each, total, mask=real)
    tl.store(place + 2 * each, shifted, mask=real)
    tl.store(place + 3 * each, picked, mask=real)


@triton.jit
def _dz_kernel(
    logits, bias, target, lse, entropy, grad_logprob, grad_entropy, out, vocab, scale, softcap, temperature,
    CAPPED: tl.constexpr, BIAS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """h Wᵀ [M, V] -> the gradient of h Wᵀ + b, which may lie in the same place. A program: one row, COLUMNS of it."""
    row, word = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = word < vocab
    z = tl.load(logits + row * vocab + word, mask=exists, other=0.0)
    offset = tl.zeros([COLUMNS], tl.float32)
    if BIAS:
        offset = tl.load(bias + word, mask=exists, other=0.0).to(tl.float32)
    z, bend = _shaped_logits(z, offset, scale, softcap, temperature, CAPPED)
    pull, logp = tl.load(grad_logprob + row), z - tl.load(lse + row)
    dz = -tl.exp(logp) * (pull + tl.load(grad_entropy + row) * (logp + tl.load(entropy + row)))
    dz += tl.where(word == tl.load(target + row), pull, 0.0)
    tl.store(out + row * vocab + word, (dz * bend).to(out.dtype.element_ty), mask=exists)
