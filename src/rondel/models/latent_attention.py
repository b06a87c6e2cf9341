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
from rondel.models.adapter_state import NAME
from rondel.models.attention import attention_layout
from rondel.models.nf4 import Nf4
from rondel.models.processor import is_widened

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}  # of the largest score or value


class UpProjection:
    """W_UK and W_UV of one attention module, as its layer `kv_b_proj` has them now: adapted, or in 4 bits."""

    def __init__(self, module: Any) -> None:
        self.module, self.rank = module, module.kv_lora_rank
        self.nope, self.value = module.qk_nope_head_dim, module.v_head_dim

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
            a, b = (
                layer.lora_A[NAME].weight,
                layer.lora_B[NAME].weight.view(x.shape[1], -1, layer.lora_A[NAME].out_features),
            )
            low = by_head.float() @ (a.t() if is_transposed else b[:, rows])
            low = low @ (b[:, rows].transpose(1, 2) if is_transposed else a)
            out = (out.float() + layer.scaling[NAME] * low).to(x.dtype)
        return out.transpose(0, 1)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    if a.is_cpu and is_widened(a.dtype):
        return (a.float() @ b.float()).to(a.dtype)
    return a @ b


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
