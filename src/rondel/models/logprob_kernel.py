"""Log-probability and entropy of chosen tokens on a GPU, forward and backward: logits exist as tiles alone.

    forward    a program: one tile of tokens, one split of the vocabulary     tiles of hidden [B_t, D] and weight [B_v,
               D]
               online softmax: max m, sum e^(z-m), sum e^(z-m) (z-m)          are multiplied D block by D block
               splits are merged by torch: 4 numbers a token and split
    dhidden    a program: tiles of tokens, the whole vocabulary               logits again, dz from lse and entropy.
               The dz
    dweight    a program: tiles of the vocabulary, all tokens                 of `kept` tiles wait in 16 bits in a
               buffer
                                                                              of the program, [kept, B_t, B_v], and are
                                                                              multiplied from there for each slice of D

The order of all sums is fixed, so results have the same bits in every run, and those of a token in every batch. The
plain code is train/logprobs.py: formulas there. Tests compare the two through Triton's interpreter, count what is read
and written against `bytes_moved`, and compile for sm_80, sm_90 and sm_100, on machines without a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 148  # of a backward kernel at most, each with a buffer: as many as a B200 has multiprocessors
SPLITS = 8  # of the vocabulary in the forward pass: few tokens occupy a GPU, too
NEGATIVE = tl.constexpr(-1.0e30)  # of a column that does not exist: finite, so that an empty split stays a number


class TileShape(NamedTuple):
    """What a program multiplies at a time: `tokens` and `vocab` are a tile of logits, summed over `size` of D at a
    time.
    """

    tokens: int = 64
    vocab: int = 128
    size: int = 64
    kept: int = 16  # tiles of dz whose products are summed in registers before they meet the sum in memory

    def counts(self, tokens: int, vocab: int) -> tuple[int, int]:
        return triton.cdiv(tokens, self.tokens), triton.cdiv(vocab, self.vocab)

    @property
    def blocks(self) -> dict[str, int]:
        return {"TOKENS": self.tokens, "VOCAB": self.vocab, "SIZE": self.size, "KEPT": self.kept, "WIDE": 2 * self.size}


def tile_of(element: int) -> TileShape:
    """For numbers of `element` bytes: what registers hold. 16 bits go to tensor cores, fp32 is multiplied in full."""
    return TileShape() if element == 2 else TileShape(32, 64, 16)


OPTIONS = {"num_warps": 8, "num_stages": 2}


class Traffic(NamedTuple):
    """Bytes that the kernels load and store; what a cache keeps is counted each time."""

    forward: int
    dhidden: int
    dweight: int


def bytes_moved(tokens: int, vocab: int, size: int, element: int, tile: TileShape | None = None) -> Traffic:
    """Of a head [vocab, size] without bias, `element` bytes a number. A tile of logits reads B_t + B_v rows; a tile of
    dz reads one of them again, and an fp32 sum of as many rows is read and written for every `kept` tiles.
    """
    tile = tile or tile_of(element)
    n, m = tile.counts(tokens, vocab)
    logits = (m * tokens + n * vocab) * size * element  # every token for every tile of the vocabulary, and the reverse
    dz = (
        n * m * tile.tokens * tile.vocab * element * (1 + triton.cdiv(size, 2 * tile.size))
    )  # once written, read a slice
    sums = [size * 4 * (2 * triton.cdiv(tiles, tile.kept) - 1) for tiles in (m, n)]  # of a row; the first is not read
    of_tokens = 8 + 4 * 4  # target, lse, entropy, two gradients
    return Traffic(
        logits + SPLITS * tokens * (8 + 4 * 4),  # target, four numbers of a split
        logits + dz + n * vocab * size * element + tokens * (sums[0] + of_tokens),
        logits + dz + m * tokens * (size * element + of_tokens) + vocab * sums[1],
    )


class _FusedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        scale: float,
        softcap: float | None,
        temperature: float,
        tile: TileShape,
    ):
        rows, weight = hidden.contiguous(), weight.contiguous()
        fixed = _fixed_arguments(rows, weight, bias, scale, softcap, temperature, tile)
        parts = torch.empty(4, SPLITS, len(rows), dtype=torch.float32, device=rows.device)
        if len(rows):
            grid = (triton.cdiv(len(rows), tile.tokens), SPLITS)
            _forward_kernel[grid](rows, weight, _or_any(bias, weight), target, parts, SPLITS=SPLITS, **fixed)
        logprob, entropy, lse = _merge_splits(parts)
        logprob.masked_fill_((target < 0) | (target >= len(weight)), torch.nan)
        ctx.save_for_backward(rows, weight, bias, target, lse, entropy)
        ctx.fixed, ctx.tile = fixed, tile
        ctx.set_materialize_grads(False)
        return logprob, entropy.clone()

    @staticmethod
    def backward(ctx, grad_logprob: Tensor | None, grad_entropy: Tensor | None):
        rows, weight, bias, target, lse, entropy = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        grads = [torch.zeros_like(lse) if g is None else g.float().contiguous() for g in (grad_logprob, grad_entropy)]
        given = (rows, weight, _or_any(bias, weight), target, lse, entropy, *grads)
        n, m = ctx.tile.counts(len(rows), len(weight))
        dhidden = dweight = dbias = None
        if wants_hidden:
            dhidden = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
            if n:
                buffer = _dz_buffer(n, weight, ctx.tile)
                _dhidden_kernel[(len(buffer),)](*given, buffer, dhidden, PROGRAMS=len(buffer), **ctx.fixed)
            dhidden = dhidden.to(rows.dtype)
        if wants_weight or wants_bias:
            dweight = torch.zeros(weight.shape, dtype=torch.float32, device=rows.device)
            dbias = dweight.new_zeros(len(weight) if wants_bias else 0)
            if n:
                buffer = _dz_buffer(m, weight, ctx.tile)
                more = {"PROGRAMS": len(buffer), "WANTS_BIAS": wants_bias}
                _dweight_kernel[(len(buffer),)](*given, buffer, dweight, dbias, **more, **ctx.fixed)
            dweight = dweight.to(weight.dtype) if wants_weight else None
            dbias = dbias.to(bias.dtype) if wants_bias else None
        return dhidden, dweight, dbias, None, None, None, None, None


def fused_logprob_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    tile: TileShape | None = None,
) -> tuple[Tensor, Tensor]:
    """hidden [T, D] and weight [V, D] of one dtype, bias [V], target [T] int64 -> (logprob [T], entropy [T]) in fp32 of
    softmax(softcap(scale · (h Wᵀ + b)) / temperature). An id outside the vocabulary has the log-probability NaN.
    """
    return _FusedLogprobs.apply(
        hidden, weight, bias, target, scale, softcap, temperature, tile or tile_of(weight.element_size())
    )


def _fixed_arguments(
    rows: Tensor, weight: Tensor, bias: Tensor | None, scale: float, softcap: float | None, temperature: float, tile: TileShape
) -> dict[str, Any]:  # fmt: skip
    return {
        "tokens": len(rows),
        "vocab": len(weight),
        "size": rows.shape[1],
        "scale": float(scale),
        "softcap": softcap or 0.0,
        "temperature": float(temperature),
        "CAPPED": softcap is not None,
        "BIAS": bias is not None,
        **tile.blocks,
        **OPTIONS,
    }


def _dz_buffer(tiles: int, weight: Tensor, tile: TileShape) -> Tensor:
    """[programs, kept, tokens, vocab] of a tile: what a program keeps of dz."""
    return weight.new_empty(min(tiles, PROGRAMS), tile.kept, tile.tokens, tile.vocab)


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
    hidden, weight, bias, token, word, tokens, vocab, size, scale, softcap, temperature,
    CAPPED: tl.constexpr, BIAS: tl.constexpr, TOKENS: tl.constexpr, VOCAB: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """-> z [TOKENS, VOCAB] over the temperature, and what dz is multiplied with on the way to h Wᵀ + b."""
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
    if BIAS:
        z += tl.load(bias + word, mask=word < vocab, other=0.0).to(tl.float32)[None, :]
    z *= scale
    if CAPPED:
        bent = 2.0 * tl.sigmoid(2.0 * z / softcap) - 1.0  # tanh
        return softcap * bent / temperature, (1.0 - bent * bent) * (scale / temperature)
    else:
        return z / temperature, scale / temperature


@triton.jit
def _forward_kernel(
    hidden, weight, bias, target, parts, tokens, vocab, size, scale, softcap, temperature,
    CAPPED: tl.constexpr, BIAS: tl.constexpr, TOKENS: tl.constexpr, VOCAB: tl.constexpr, SIZE: tl.constexpr,
    SPLITS: tl.constexpr, KEPT: tl.constexpr, WIDE: tl.constexpr,
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
        z, _ = _logit_tile(
            hidden, weight, bias, token, word, tokens, vocab, size, scale, softcap, temperature,
            CAPPED, BIAS, TOKENS, VOCAB, SIZE,
        )  # fmt: skip
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
def _dz_tile(z, bend, word, vocab, chosen, lse, entropy, grad_logprob, grad_entropy):
    """-> the gradient of h Wᵀ + b, [TOKENS, VOCAB] in fp32; 0 for columns that do not exist."""
    logp = z - lse[:, None]
    p = tl.exp(logp)
    dz = -p * (grad_logprob[:, None] + grad_entropy[:, None] * (logp + entropy[:, None]))
    dz += tl.where(word[None, :] == chosen[:, None], grad_logprob[:, None], 0.0)
    return tl.where(word[None, :] < vocab, dz * bend, 0.0)


@triton.jit
def _dhidden_kernel(
    hidden, weight, bias, target, lse, entropy, grad_logprob, grad_entropy, buffer, out,
    tokens, vocab, size, scale, softcap, temperature,
    CAPPED: tl.constexpr, BIAS: tl.constexpr, TOKENS: tl.constexpr, VOCAB: tl.constexpr, SIZE: tl.constexpr,
    KEPT: tl.constexpr, WIDE: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    own, column = tl.arange(0, TOKENS), tl.arange(0, VOCAB)
    kept = buffer + tl.program_id(0).to(tl.int64) * KEPT * TOKENS * VOCAB + own[:, None] * VOCAB + column[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(tokens, TOKENS), PROGRAMS):
        token = tile * TOKENS + own.to(tl.int64)
        real = token < tokens
        chosen = tl.load(target + token, mask=real, other=-1)
        whole, mixed = tl.load(lse + token, mask=real, other=0.0), tl.load(entropy + token, mask=real, other=0.0)
        pull = tl.load(grad_logprob + token, mask=real, other=0.0)
        spread = tl.load(grad_entropy + token, mask=real, other=0.0)
        for first in range(0, vocab, KEPT * VOCAB):
            tiles = tl.cdiv(tl.minimum(vocab - first, KEPT * VOCAB), VOCAB)
            for k in range(0, tiles):
                word = first + k * VOCAB + column.to(tl.int64)
                z, bend = _logit_tile(
                    hidden, weight, bias, token, word, tokens, vocab, size, scale, softcap, temperature,
                    CAPPED, BIAS, TOKENS, VOCAB, SIZE,
                )  # fmt: skip
                dz = _dz_tile(z, bend, word, vocab, chosen, whole, mixed, pull, spread)
                tl.store(kept + k * TOKENS * VOCAB, dz.to(weight.dtype.element_ty))
            tl.debug_barrier()  # what other threads of the program wrote is read from here on
            for at in range(0, size, WIDE):
                d = at + tl.arange(0, WIDE)
                place, mine = out + token[:, None] * size + d[None, :], real[:, None] & (d[None, :] < size)
                so_far = tl.load(place, mask=mine & (first > 0), other=0.0)
                for k in range(0, tiles):
                    word = first + k * VOCAB + column.to(tl.int64)
                    w = tl.load(
                        weight + word[:, None] * size + d[None, :],
                        mask=(word[:, None] < vocab) & (d[None, :] < size),
                        other=0.0,
                    )
                    so_far = tl.dot(tl.load(kept + k * TOKENS * VOCAB), w, so_far, input_precision="ieee")
                tl.store(place, so_far, mask=mine)
            tl.debug_barrier()


@triton.jit
def _dweight_kernel(
    hidden, weight, bias, target, lse, entropy, grad_logprob, grad_entropy, buffer, out, out_bias,
    tokens, vocab, size, scale, softcap, temperature,
    CAPPED: tl.constexpr, BIAS: tl.constexpr, TOKENS: tl.constexpr, VOCAB: tl.constexpr, SIZE: tl.constexpr,
    KEPT: tl.constexpr, WIDE: tl.constexpr, PROGRAMS: tl.constexpr, WANTS_BIAS: tl.constexpr,
):  # fmt: skip
    row, own = tl.arange(0, TOKENS), tl.arange(0, VOCAB)
    kept = buffer + tl.program_id(0).to(tl.int64) * KEPT * TOKENS * VOCAB + row[:, None] * VOCAB + own[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(vocab, VOCAB), PROGRAMS):
        word = tile * VOCAB + own.to(tl.int64)
        of_bias = tl.zeros([VOCAB], tl.float32)
        for first in range(0, tokens, KEPT * TOKENS):
            tiles = tl.cdiv(tl.minimum(tokens - first, KEPT * TOKENS), TOKENS)
            for k in range(0, tiles):
                token = first + k * TOKENS + row.to(tl.int64)
                real = token < tokens
                chosen = tl.load(target + token, mask=real, other=-1)
                whole, mixed = (
                    tl.load(lse + token, mask=real, other=0.0),
                    tl.load(entropy + token, mask=real, other=0.0),
                )
                pull = tl.load(grad_logprob + token, mask=real, other=0.0)
                spread = tl.load(grad_entropy + token, mask=real, other=0.0)
                z, bend = _logit_tile(
                    hidden, weight, bias, token, word, tokens, vocab, size, scale, softcap, temperature,
                    CAPPED, BIAS, TOKENS, VOCAB, SIZE,
                )  # fmt: skip
                dz = _dz_tile(z, bend, word, vocab, chosen, whole, mixed, pull, spread)
                if WANTS_BIAS:
                    of_bias += tl.sum(dz, 0)
                tl.store(kept + k * TOKENS * VOCAB, dz.to(weight.dtype.element_ty))
            tl.debug_barrier()  # what other threads of the program wrote is read from here on
            for at in range(0, size, WIDE):
                d = at + tl.arange(0, WIDE)
                place, mine = out + word[:, None] * size + d[None, :], (word[:, None] < vocab) & (d[None, :] < size)
                so_far = tl.load(place, mask=mine & (first > 0), other=0.0)
                for k in range(0, tiles):
                    token = first + k * TOKENS + row.to(tl.int64)
                    h = tl.load(
                        hidden + token[:, None] * size + d[None, :],
                        mask=(token[:, None] < tokens) & (d[None, :] < size),
                        other=0.0,
                    )
                    dz = tl.trans(tl.load(kept + k * TOKENS * VOCAB))
                    so_far = tl.dot(dz, h, so_far, input_precision="ieee")
                tl.store(place, so_far, mask=mine)
            tl.debug_barrier()
        if WANTS_BIAS:
            tl.store(out_bias + word, of_bias, mask=word < vocab)
