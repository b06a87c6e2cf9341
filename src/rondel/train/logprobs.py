"""Log-probability and entropy of chosen tokens, a chunk of rows at a time, with its
own backward: full logits never exist. Where one chunk is enough, its exp(z - max) is kept for the backward.
On a GPU models/logprob_kernel.py computes the same, forward tile by tile, where it can (`choose_logprob_kernel`); on a
CPU models/cpu_kernels.py what lies between the products, from logits that are kept instead: log-probability and entropy
in every pass, whatever else it asks for, so that the ratio of two passes over the same weights is 1 to the bit.

With z = logits / temperature, p = softmax(z):   logprob = z[target] - lse(z),   entropy = lse(z) - sum p z
    d logprob / dz = onehot(target) - p           d entropy / dz = -p (log p + entropy)
    top = z[more ids] - lse(z)                d top_k / dz = onehot(id_k) - p
    kl = sum p (log p - log q)                    d kl / dz = p (log p - log q - kl)
    with q of teachers, rebuilt for the chunk; other divergences by `algos/divergence.py`

A token that was drawn from a part of the vocabulary (top-k, top-p) has that part's
distribution: lse, p and entropy run over the ids that its draw kept, as recorded (law 4). The
same ids at every later version: what the policy
would cut today does not change the past draw.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rondel.algos.divergence import Divergence
from rondel.algos.tokens import select_logprobs
from rondel.models.cpu_kernels import LogprobTerms, has_kernels, logit_gradients, logprob_terms
from rondel.models.linear import UnpackedLinear, add_product, as_factor, fp32_product, matmul
from rondel.models.main_grad import room_of_gradient
from rondel.models.processor import HALVES
from rondel.system.kernel_choice import KernelChoice, choose_kernel
from rondel.train.sampling_mask import SupportMask
from rondel.train.teacher_distributions import TeacherDistribution

if TYPE_CHECKING:
    from rondel.models.head import LMHead
    from rondel.models.logprob_kernel import LogitShape, TileShape
    from rondel.models.vocabulary_part import VocabularyPart

REVERSE_KL = Divergence()
LOGITS = 1 << 25  # entries of a chunk of logits: 128 MB in fp32
GPU_LOGITS = 1 << 27  # on a GPU, whose products want more rows: 0.5 GB in fp32, and 0.25 GB of gradients


def _row_chunks(hidden: Tensor, head: LMHead) -> list[slice]:
    """As few chunks as the budget allows: each one also passes over the whole gradient of the head. As many on every
    rank that has a part of the vocabulary: they meet in each.
    """
    rows, vocab = len(hidden), len(head.weight) if head.part is None else head.part.widest
    n = -(-rows * vocab // (GPU_LOGITS if hidden.is_cuda else LOGITS))
    size = -(-rows // max(1, n))
    return [slice(first, first + size) for first in range(0, rows, size)] if rows else []


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: LMHead,
        target: Tensor,
        temperature: float,
        kept: SupportMask | None,
        taught: TeacherDistribution | None,
        apart_by: Divergence,
        top_ids: Tensor | None,
    ):
        ctx.save_for_backward(hidden, weight, bias, target)
        ctx.set_materialize_grads(
            False
        )  # what the loss does not use comes back as None: no host asks a device for zeros
        part = head.part
        if part is not None and kept is not None:
            kept = kept.of_vocabulary(part.first, part.size)
        if part is not None and taught is not None:
            taught = taught.of_vocabulary(part, UnpackedLinear())
        ctx.head, ctx.temperature, ctx.kept, ctx.taught, ctx.apart_by = head, temperature, kept, taught, apart_by
        ctx.top_ids = top_ids
        logprobs, entropies, apart, tops = [], [], [], []
        chunks = _row_chunks(hidden, head)
        keeps = len(chunks) == 1 and head.softcap is None and any(ctx.needs_input_grad)
        ctx.softmax, ctx.logits, ctx.terms = None, None, []
        fused = _has_cpu_kernel(hidden, head)
        for rows in chunks:
            z = head.logits(hidden[rows])
            if fused:
                z = (z if kept is None else kept.mask_logits(z, rows)).contiguous()
                terms = logprob_terms(z, target[rows], temperature)
                ctx.terms.append(terms)
                ctx.logits = z if keeps else None
                logprobs.append(terms.logprob)
                entropies.append(terms.entropy)
                if top_ids is not None:
                    tops.append(_log_probabilities(z.gather(-1, top_ids[rows]), terms, temperature))
                if taught is not None:
                    p = _log_probabilities(z, terms, temperature).exp_()
                    apart.append(
                        -terms.entropy - taught.log_q(rows).mul_(p).sum(-1)
                        if apart_by.is_reverse_kl
                        else apart_by(p, taught.log_q(rows))[0]
                    )
                continue
            if temperature != 1.0:
                z.div_(temperature)
            if kept is not None:
                z = kept.mask_logits(z, rows)
            logprob, shifted, e, total = (part.select_logprobs if part else select_logprobs)(z, target[rows])
            logprobs.append(logprob)
            if top_ids is not None:
                tops.append(_columns_of(shifted, top_ids[rows], part) - total.log())
            mean = shifted.mul_(e).sum(-1, keepdim=True)
            entropies.append((total.log() - (part.sum(mean) if part else mean) / total)[:, 0])
            if taught is not None and not apart_by.is_reverse_kl:
                apart.append(apart_by(e / total, taught.log_q(rows), part)[0])
            elif taught is not None:
                mean = taught.log_q(rows).mul_(e).sum(-1, keepdim=True)
                apart.append(-entropies[-1] - ((part.sum(mean) if part else mean) / total)[:, 0])
            if keeps:
                ctx.softmax = e.div_(total)
        ctx.entropy = _cat_pieces(entropies, hidden)
        ctx.kl = _cat_pieces(apart, hidden)
        nothing = hidden.new_zeros(0, dtype=torch.float32)
        return (
            _cat_pieces(logprobs, hidden),
            ctx.entropy.clone(),
            nothing if taught is None else ctx.kl.clone(),
            nothing if top_ids is None else torch.cat([nothing.view(0, top_ids.shape[1]), *tops]),
        )

    @staticmethod
    def backward(
        ctx,
        grad_logprob: Tensor | None,
        grad_entropy: Tensor | None,
        grad_kl: Tensor | None,
        grad_top: Tensor | None,
    ):
        hidden, weight, bias, target = ctx.saved_tensors
        if grad_logprob is None:
            grad_logprob = torch.zeros_like(ctx.entropy)
        of_all = grad_logprob if grad_top is None else grad_logprob + grad_top.sum(-1)  # of what p is subtracted from
        head, temperature = ctx.head, ctx.temperature
        grad_hidden = torch.empty_like(hidden)
        grad_weight: Tensor | None = None  # summed over the chunks in fp32
        grad_bias = None if bias is None else torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
        main, fresh = room_of_gradient(head.weight) if ctx.needs_input_grad[1] else (None, False)

        def add_chunk(rows: slice, h: Tensor, grad: Tensor) -> None:
            """The gradient of a chunk's logits, in the dtype of the weight."""
            nonlocal grad_weight, fresh
            grad_hidden[rows] = matmul(grad, weight)
            if main is not None:
                add_product(main, grad, h, fresh=fresh)
                fresh = False
            elif ctx.needs_input_grad[1]:  # not under an adapter
                piece = matmul(grad.t(), h)
                grad_weight = piece if grad_weight is None else grad_weight.float().add_(piece)

        for i, rows in enumerate(_row_chunks(hidden, head)):
            h = as_factor(hidden[rows], weight)
            bent = None
            if ctx.terms:
                z, ctx.logits = ctx.logits, None
                if z is None:
                    z = head.logits(h)
                    z = (z if ctx.kept is None else ctx.kept.mask_logits(z, rows)).contiguous()
            if ctx.terms and grad_kl is None and grad_top is None:
                pulls = grad_logprob[rows], None if grad_entropy is None else grad_entropy[rows]
                grad = logit_gradients(
                    z, target[rows], ctx.terms[i], pulls, head.scale, temperature, dtype=weight.dtype
                )
                del z
                if grad_bias is not None:
                    grad_bias += grad.sum(0, dtype=torch.float32)
                add_chunk(rows, h, grad)
                continue
            if ctx.terms:
                p = _log_probabilities(z, ctx.terms[i], temperature).exp_()
                del z
            elif ctx.softmax is not None:
                p, ctx.softmax = ctx.softmax, None
            else:
                logits = head.logits(h)
                bent = None if head.softcap is None else 1 - (logits / head.softcap) ** 2
                if temperature != 1.0:
                    logits.div_(temperature)
                masked = logits if ctx.kept is None else ctx.kept.mask_logits(logits, rows)
                p = torch.softmax(masked, -1) if head.part is None else head.part.softmax(masked)
                del masked
                del logits  # here a step needs most memory: two arrays of a chunk are held at a time, not four
            pull: Tensor | None = None
            if ctx.taught is not None and grad_kl is not None and not ctx.apart_by.is_reverse_kl:
                log_q = ctx.taught.log_q(rows)
                pull = ctx.apart_by(p, log_q, head.part)[1].mul_(grad_kl[rows, None])
            elif ctx.taught is not None and grad_kl is not None:
                pull = (
                    p.clamp_min(1e-38)
                    .log_()
                    .sub_(ctx.taught.log_q(rows))
                    .sub_(ctx.kl[rows, None])
                    .mul_(p)
                    .mul_(grad_kl[rows, None])
                )
            if grad_entropy is not None:
                grad = p.clamp_min(1e-38).log_().add_(ctx.entropy[rows, None]).mul_(grad_entropy[rows, None])
                grad.add_(of_all[rows, None]).mul_(p).neg_()
            else:
                grad = p.mul_(-of_all[rows, None])
            del p
            column, share = target[rows], grad_logprob[rows]
            if head.part is not None:
                column, mine = head.part.own_ids(column)
                share = share * mine
            grad.scatter_add_(-1, column[:, None], share[:, None])
            if grad_top is not None:
                columns, share = ctx.top_ids[rows], grad_top[rows]
                if head.part is not None:
                    columns, mine = head.part.own_ids(columns)
                    share = share * mine
                grad.scatter_add_(-1, columns, share)
            if pull is not None:
                grad += pull
            if temperature != 1.0:
                grad /= temperature
            if bent is not None:
                grad *= bent
            if head.scale != 1.0:
                grad *= head.scale
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            add_chunk(rows, h, grad.to(weight.dtype))
        if main is not None and fresh:  # of no rows
            main.zero_()
        if head.part is not None:
            head.part.sum(grad_hidden)
        if ctx.needs_input_grad[1] and main is None:
            grad_weight = torch.zeros_like(weight) if grad_weight is None else grad_weight.to(weight.dtype)
        return (
            grad_hidden,
            grad_weight,
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
            None,
            None,
            None,
        )


class _Fused(torch.autograd.Function):
    """The kernels of models/logprob_kernel.py, with the products of the backward pass a chunk of rows at a time."""

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        shape: LogitShape,
        tile: TileShape | None,
    ):
        from rondel.models.logprob_kernel import forward_pass

        rows = hidden.contiguous()
        logprob, entropy, lse = forward_pass(rows, weight.contiguous(), bias, target, shape, tile)
        ctx.save_for_backward(rows, weight, bias, target, lse, entropy)
        ctx.shape = shape
        ctx.set_materialize_grads(False)
        return logprob, entropy.clone()

    @staticmethod
    def backward(ctx, grad_logprob: Tensor | None, grad_entropy: Tensor | None):
        from rondel.models.logprob_kernel import logit_gradients

        hidden, weight, bias, target, lse, entropy = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        grads = [torch.zeros_like(lse) if g is None else g.float().contiguous() for g in (grad_logprob, grad_entropy)]
        dhidden = torch.empty_like(hidden) if wants_hidden else None
        dweight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if wants_weight else None
        dbias = torch.zeros(len(weight), dtype=torch.float32, device=weight.device) if wants_bias else None
        size = max(1, GPU_LOGITS // len(weight))
        for first in range(0, len(hidden), size):
            part = slice(first, first + size)
            of_tokens = [x[part] for x in (target, lse, entropy, *grads)]
            z = fp32_product(hidden[part], weight)
            dz = logit_gradients(z, bias, of_tokens, ctx.shape, weight.dtype)
            del z
            if dbias is not None:
                dbias += dz.sum(0, dtype=torch.float32)
            if dhidden is not None:
                dhidden[part] = matmul(dz, weight)
            if dweight is not None:
                add_product(dweight, dz, hidden[part])
        return (
            dhidden,
            None if dweight is None else dweight.to(weight.dtype),
            None if dbias is None else dbias.to(bias.dtype),
            *[None] * 3,
        )


def fused_logprob_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    shape: LogitShape,
    *,
    tile: TileShape | None = None,
) -> tuple[Tensor, Tensor]:
    """hidden [T, D] and weight [V, D] of one dtype, bias [V], target [T] int64 -> (logprob [T],
    entropy [T]) in fp32."""
    return _Fused.apply(hidden, weight, bias, target, shape, tile)


def logprob_and_entropy(
    hidden: Tensor, target: Tensor, head: LMHead, *, temperature: float = 1.0, kept: SupportMask | None = None
) -> tuple[Tensor, Tensor]:
    """hidden [M,D], target [M] -> (logprob [M], entropy [M]) in fp32, of the distribution
    softmax(logits / temperature) over what was kept.
    """
    if choose_logprob_kernel(hidden, head, kept).takes_kernel:
        from rondel.models.logprob_kernel import LogitShape

        shape = LogitShape(head.scale, head.softcap, temperature)
        return fused_logprob_and_entropy(as_factor(hidden, head.weight), head.weight, head.bias, target, shape)
    return _Chunked.apply(hidden, head.weight, head.bias, head, target, temperature, kept, None, REVERSE_KL, None)[:2]


@torch.no_grad()
def collision_probability(
    hidden: Tensor, head: LMHead, *, temperature: float = 1.0, kept: SupportMask | None = None
) -> Tensor:
    """hidden [M,D] -> sum of p² [M] of the same distributions."""
    part, out = head.part, []
    if part is not None and kept is not None:
        kept = kept.of_vocabulary(part.first, part.size)
    for rows in _row_chunks(hidden, head):
        z = head.logits(hidden[rows])
        if temperature != 1.0:
            z.div_(temperature)
        if kept is not None:
            z = kept.mask_logits(z, rows)
        own = (torch.softmax(z, -1) if part is None else part.softmax(z)).square_().sum(-1)
        out.append(own if part is None else part.sum(own))
    return _cat_pieces(out, hidden)


@torch.no_grad()
def logprob_and_best(hidden: Tensor, target: Tensor, head: LMHead, *, temperature: float) -> tuple[Tensor, Tensor]:
    """[M] log-probabilities of the targets, and of the likeliest token in the place of each."""
    own, best = [], []
    for rows in _row_chunks(hidden, head):
        if _has_cpu_kernel(hidden, head):
            terms = logprob_terms(head.logits(hidden[rows]).contiguous(), target[rows], temperature)
            own.append(terms.logprob)
            best.append(terms.log_total.neg())
            continue
        z = head.logits(hidden[rows]).float() / temperature
        logprob, _, _, total = (head.part.select_logprobs if head.part else select_logprobs)(z, target[rows])
        own.append(logprob)
        best.append(total.log().neg()[:, 0])  # of z - max z, which is 0 there
    return _cat_pieces(own, hidden), _cat_pieces(best, hidden)


def _columns_of(z: Tensor, ids: Tensor, part: VocabularyPart | None) -> Tensor:
    """Of [C, V] those of ids [C, K], wherever they lie."""
    if part is None:
        return z.gather(-1, ids)
    local, mine = part.own_ids(ids)
    return part.sum(z.gather(-1, local) * mine)


def _log_probabilities(z: Tensor, terms: LogprobTerms, temperature: float) -> Tensor:
    """z [C, ...] of the rows of these terms -> log softmax, with the bits of `terms.logprob`."""
    return (z * (1.0 / temperature)).sub_(terms.top[:, None]).sub_(terms.log_total[:, None])


def _has_cpu_kernel(hidden: Tensor, head: LMHead) -> bool:
    """Aligned numerics have the formula of the engine's draw; caps and parts of a vocabulary are for torch."""
    return head.part is None and head.softcap is None and not head.aligned and has_kernels(hidden, head.weight)


def choose_logprob_kernel(hidden: Tensor, head: LMHead, kept: SupportMask | None = None) -> KernelChoice:
    """Whether `logprob_and_entropy` takes the kernel."""
    weight, kind = head.weight, type(head.weight)
    fits = weight.dtype in (torch.float32, *HALVES) and hidden.dtype in (torch.float32, weight.dtype)
    unsupported = {
        "a part of the vocabulary": head.part is not None,
        "truncated support": kept is not None,
        "aligned numerics": head.aligned,
        "rounded logits": head.rounded and weight.dtype in HALVES,
        f"a head that is a {kind.__name__}": kind not in (Tensor, nn.Parameter),
        f"hidden states of {hidden.dtype} under a head of {weight.dtype}": not fits,
    }
    return choose_kernel(hidden.device.type, *(what for what, present in unsupported.items() if present))


def logprob_entropy_and_kl(
    hidden: Tensor,
    target: Tensor,
    head: LMHead,
    taught: TeacherDistribution,
    *,
    temperature: float = 1.0,
    apart_by: Divergence = REVERSE_KL,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, and how far the whole distributions are apart [M], by KL(policy || teacher) or another divergence."""
    return _Chunked.apply(hidden, head.weight, head.bias, head, target, temperature, None, taught, apart_by, None)[:3]


def logprob_entropy_and_top(
    hidden: Tensor,
    target: Tensor,
    head: LMHead,
    top_ids: Tensor,
    *,
    temperature: float = 1.0,
    kept: SupportMask | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same as `logprob_and_entropy`, and the log-probabilities of more tokens in its place:
    top_ids [M,K] -> [M,K]."""
    found = _Chunked.apply(hidden, head.weight, head.bias, head, target, temperature, kept, None, REVERSE_KL, top_ids)
    return found[0], found[1], found[3]


def _cat_pieces(pieces: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(pieces) if pieces else like.new_zeros(0, dtype=torch.float32)
