"""Multi-head latent attention (MLA, DeepSeek-V2, arXiv:2405.04434, section 2.1): latents are cached,
not keys and values.

    c_t = norm(W_DKV h_t)   r_t = rope(W_KR h_t)      cached: [c_t, r_t], R + E numbers a token, one for all heads
    k_t = [W_UK c_t, r_t]   v_t = W_UV c_t            of each head; W_UK [N,R] and W_UV [V,R] are rows of one matrix

    expanded   k_t and v_t are made of the latents; attention is that of any model        training, long prefill
    absorbed   score_ts = [W_UK' q_t, q^R_t] . [c_s, r_s]     o_t = W_UV sum_s p_ts c_s   decoding, short prefill

Both are the same sums in another order. Absorbed, all H heads read one key of R + E numbers, whose first R are its
value. transformers makes keys and values in `expand_kv`; under an attention layout it leaves the latents as they are,
and the layout decides (`attend_latents`).

T tokens · C cached tokens · H heads · R rank of the latents · E rotary, N other numbers of a key · V of a value
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from rondel.core.errors import ModelError
from rondel.models.adapter_rows import Run, ServedAdapters, runs_within
from rondel.models.adapter_state import NAME
from rondel.models.attention import LatentProjection, attention_layout
from rondel.models.nf4 import Nf4
from rondel.models.processor import is_widened

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}  # of the largest score or value


class UpProjection:
    """W_UK and W_UV of one attention module, as its layer `kv_b_proj` has them now: adapted, or in 4 bits."""

    def __init__(self, module: Any) -> None:
        self.module, self.rank = module, module.kv_lora_rank
        self.nope, self.value = module.qk_nope_head_dim, module.v_head_dim
        self.bank: ServedAdapters | None = None  # of a base that serves adapters to some requests each
        self.name = ""  # of `kv_b_proj` there

    def of_rows(self, first: int, count: int) -> LatentProjection:
        """For tokens [first, first + count) of the pass, and for the latents of the request whose they are."""
        runs = [] if self.bank is None else self.bank.runs_of(first, count)
        return RequestProjection(self, runs) if runs else self

    def expand(self, c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        """[C,R], [C,E] -> keys [C,H,N+E] and values [C,H,V], by the module's own code."""
        keys, values = type(self.module).expand_kv(self.module, c[None, None], r[None, None])
        return keys[0].transpose(0, 1), values[0].transpose(0, 1)

    def absorb_queries(self, q: Tensor) -> Tensor:
        """[T,H,N+E] -> [T,H,R+E], whose products with latents are those of q with keys."""
        nope, rope = q.split([self.nope, q.shape[2] - self.nope], -1)
        return torch.cat([self._multiply(nope, slice(None, self.nope), is_transposed=False), rope], -1)

    def project_values(self, out: Tensor) -> Tensor:
        """Weighted sums of latents [T,H,R] -> of values [T,H,V]."""
        return self._multiply(out, slice(self.nope, None), is_transposed=True)

    def expansion_pays(self, new: int) -> bool:
        """Whether `new` queries over one context are cheaper with it expanded: R (N + V) multiplications a head and key
        once, against 2R - N - V more a query.
        """
        return new * (2 * self.rank - self.nope - self.value) >= self.rank * (self.nope + self.value)

    def _multiply(self, x: Tensor, rows: slice, *, is_transposed: bool) -> Tensor:
        """x [T,H,n] times some rows [H,n,R] of the matrix, or x [T,H,R] times their transpose -> [T,H,R] or [T,H,n].

        An adapter's W + s B A is not summed: in 16 bits most of B A would be lost.
        """
        layer, by_head = self.module.kv_b_proj, x.transpose(0, 1)
        adapter = getattr(layer, "model_adapter", None)
        base = layer if adapter is None else layer.get_base_layer()
        weight = base.decode_weight(x.dtype) if isinstance(base, Nf4) else base.weight
        whole = weight.view(x.shape[1], -1, self.rank)[:, rows]
        out = _matmul(by_head, whole.transpose(1, 2) if is_transposed else whole)
        if adapter is not None and not adapter.off:
            a, b = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
            low = _multiply_low(by_head, a, b, rows, is_transposed=is_transposed)
            out = (out.float() + layer.scaling[NAME] * low).to(x.dtype)
        return out.transpose(0, 1)


class RequestProjection(UpProjection):
    """The same where tokens are read with adapters of their requests: `runs` of them in turn."""

    def __init__(self, up: UpProjection, runs: list[Run]) -> None:
        super().__init__(up.module)
        self.bank, self.name, self.runs = up.bank, up.name, runs

    def of_rows(self, first: int, count: int) -> RequestProjection:
        return RequestProjection(self, runs_within(self.runs, first, count))

    def expand(self, c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        """Of the whole context of one request, which is more than its tokens of the pass."""
        assert self.bank is not None
        owner, *others = dict.fromkeys(adapter for adapter, _ in self.runs)
        assert not others, "the context of one request is read with one adapter"
        with self.bank.use([(owner, len(c))]):
            return super().expand(c, r)

    def _multiply(self, x: Tensor, rows: slice, *, is_transposed: bool) -> Tensor:
        out, first = super()._multiply(x, rows, is_transposed=is_transposed), 0
        for adapter, n in self.runs:
            own, first = slice(first, first + n), first + n
            if adapter is not None and self.name in adapter.layers:
                by_head = x[own].transpose(0, 1)
                low = _multiply_low(by_head, *adapter.layers[self.name], rows, is_transposed=is_transposed)
                out[own] = (out[own].float() + adapter.scale * low.transpose(0, 1)).to(out.dtype)
        return out


def _multiply_low(x: Tensor, a: Tensor, b: Tensor, rows: slice, *, is_transposed: bool) -> Tensor:
    """x [H,T,n] times some rows [H,n,R] of B A, or x [H,T,R] times their transpose, in fp32."""
    own = b.view(len(x), -1, len(a))[:, rows]
    return x.float() @ a.t() @ own.transpose(1, 2) if is_transposed else x.float() @ own @ a


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    if a.is_cpu and is_widened(a.dtype):
        return (a.float() @ b.float()).to(a.dtype)
    return a @ b


def latent_projections(model: Any) -> list[UpProjection]:
    """Those of a model's modules of latent attention."""
    return [module.up_projection for module in model.modules() if hasattr(module, "up_projection")]


def install_latent_attention(model: Any) -> list[UpProjection]:
    """Make modules of latent attention hand their latents to the layout in force, where there is one."""
    found = []
    for module in model.modules():
        if hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj"):
            module.up_projection = UpProjection(module)
            module.expand_kv = functools.partial(_leave_latents, module, type(module).expand_kv)
            found.append(module.up_projection)
    return found


def _leave_latents(module: Any, own: Any, c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """c [1,1,T,R] and r [1,1,T,E] -> r in place of keys, c in place of values, where a layout asks for them."""
    return own(module, c, r) if attention_layout() is None else (r, c)


@torch.no_grad()
def check_up_projections(model: Any, name: str, projections: list[UpProjection]) -> None:
    """Absorbed products must be those of the module's own keys and values: its matrix may have another order."""
    for up in projections:
        noise = functools.partial(torch.randn, generator=torch.Generator().manual_seed(5))
        c, r = (noise(5, size).to(model.device, model.dtype) for size in (up.rank, up.module.qk_rope_head_dim))
        keys, values = up.expand(c, r)
        q = noise(3, *keys.shape[1:]).to(model.device, model.dtype)
        pairs = (
            (
                torch.einsum("thd,chd->htc", q, keys),
                torch.einsum("thr,cr->htc", up.absorb_queries(q), torch.cat([c, r], 1)),
            ),
            (values, up.project_values(c[:, None].expand(-1, keys.shape[1], -1))),
        )
        for theirs, ours in pairs:
            gap, most = float((theirs - ours).abs().max()), float(theirs.abs().max())
            if not gap <= TOLERANCE[model.dtype] * most:
                raise ModelError(
                    f"'{name}' ({model.config.model_type}): keys and values that layer {up.module.layer_idx} makes of "
                    f"its latents differ by {gap:.3g} from the absorbed products (largest {most:.3g}); its latent "
                    "attention is not carried by the built-in path"
                )
