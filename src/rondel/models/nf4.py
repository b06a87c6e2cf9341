"""A frozen base in 4 bits: NF4 with double quantisation, as bitsandbytes and QLoRA have it.  arXiv:2305.14314.

    W [O, I] row by row, in blocks of 64       w = q[c] · s      c: 4 bits, q: the 16
    quantiles of a normal distribution, -1 to 1 their scales s, in blocks of 256
    s = m[b] · t + u  b: 8 bits, m: 256
    numbers, denser near 0;  t, u: float32

    one tensor of bytes a layer:   | c, two in a byte | b | t | u |      4 + 8/64 + 32/(64 · 256) = 4.13 bits a number

A layer is decoded for a product and let go, forward and backward, on both sides by the
same two lines: engine, trainer and reference compute with the same bits. Bytes keep their
values wherever a module is cast, have one
digest, and are what an update leaves alone. The head, embeddings and norms stay in the
model's dtype. A layer's codes are those that
bitsandbytes makes of the same weights.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rondel.core.errors import ConfigError, ModelError
from rondel.models import linear
from rondel.models.vision_families import tower_parts

BLOCK, OUTER = 64, 256  # weights of one scale, scales of one float32
EXTRA = "pip install 'rondel[qlora]'"
INSTEAD = 'Use model.adapter.kind = "lora", whose base may be bfloat16'


class Nf4(nn.Linear):
    """y = W x + b, W [O, I] in 4 bits; `weight` is its bytes.

    transposed    its model has it as [I, O] (gpt2)
    """

    def __init__(
        self, packed: Tensor, bias: Tensor | None, *, out_features: int, in_features: int, transposed: bool = False
    ) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features, self.transposed = out_features, in_features, transposed
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))

    @property
    def parameter_count(self) -> int:
        return self.out_features * self.in_features

    def decode_weight(self, dtype: torch.dtype) -> Tensor:
        """W [O, I], a fresh tensor."""
        return decode(self.weight, self.parameter_count, dtype).view(self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        if linear.is_tracing():
            return linear.call_joint_product(self, x, self.out_features)
        return self.forward_joined(x)

    def forward_joined(self, x: Tensor) -> Tensor:
        """x [..., I] -> [..., O]; a gradient goes to x alone."""
        if torch.is_grad_enabled() and x.requires_grad:
            return DecodedProduct.apply(x, self)
        return linear.product(x, self.decode_weight(x.dtype), self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, nf4"


class DecodedProduct(torch.autograd.Function):
    """Decoded once more on the way back, so that nothing is kept between."""

    @staticmethod
    def forward(ctx, x: Tensor, layer: Nf4):
        ctx.layer = layer
        return linear.as_base_tensor(linear.product(x, layer.decode_weight(x.dtype), layer.bias))

    @staticmethod
    def backward(ctx, grad: Tensor):
        return linear.matmul(grad, ctx.layer.decode_weight(grad.dtype)), None


# -- bytes -----------------------------------------------------------------------------------------


def encode(weight: Tensor) -> Tensor:
    """[O, I] -> [bytes] on the same device."""
    functional = _nf4_library()
    flat = weight.detach().reshape(-1)
    flat = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).contiguous()
    return _join_parts(*functional.quantize_4bit(flat, blocksize=BLOCK, compress_statistics=True, quant_type="nf4"))


def _join_parts(codes: Tensor, state: Any) -> Tensor:
    """Of bitsandbytes' two."""
    parts = (codes.view(-1), state.absmax, state.state2.absmax, state.offset.reshape(1))
    return torch.cat([part.detach().contiguous().view(torch.uint8) for part in parts])


def decode(packed: Tensor, numbers: int, dtype: torch.dtype) -> Tensor:
    """[bytes] -> [numbers]."""
    functional = _nf4_library()
    codes, scales, outer, mean = _split_packed(packed, numbers)
    quantiles, steps = _code_tables(packed.device)
    inner = functional.QuantState(absmax=outer, code=steps, blocksize=OUTER, dtype=torch.float32)
    # Rows of one block each: of other lengths bitsandbytes' kernels for CPUs take the
    # scales of wrong blocks (0.50.2, 48 x 96).
    shape = torch.Size((len(codes) * 2 // BLOCK, BLOCK))
    state = functional.QuantState(
        absmax=scales,
        shape=shape,
        code=quantiles,
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=dtype,
        offset=mean,
        state2=inner,
    )
    return functional.dequantize_4bit(codes[:, None], state).view(-1)[:numbers]


def decode_reference(packed: Tensor, numbers: int, dtype: torch.dtype) -> Tensor:
    """`decode` by the formula above, a table entry a number: what a library's kernels must agree with."""
    codes, scales, outer, mean = _split_packed(packed, numbers)
    quantiles, steps = _code_tables(packed.device)
    s = steps[scales.long()] * outer.repeat_interleave(OUTER)[: len(scales)] + mean
    q = quantiles[torch.stack([codes >> 4, codes & 15], 1).view(-1).long()]
    return (q.view(-1, BLOCK) * s[:, None]).view(-1)[:numbers].to(dtype)


def layer_bytes(numbers: int) -> int:
    """Bytes of one layer of so many weights."""
    blocks = -(-numbers // BLOCK)
    return blocks * BLOCK // 2 + blocks + 4 * -(-blocks // OUTER) + 4


def _split_packed(packed: Tensor, numbers: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """c [N/2] uint8, b [N/64] uint8, t [N/(64·256)] float32, u [] float32."""
    blocks = -(-numbers // BLOCK)
    codes, scales, floats = packed.split([blocks * BLOCK // 2, blocks, len(packed) - blocks * BLOCK // 2 - blocks])
    if floats.storage_offset() % 4:
        floats = floats.clone()
    floats = floats.view(torch.float32)
    return codes, scales, floats[:-1], floats[-1]


@functools.cache
def _code_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """q [16] and m [256]."""
    functional = _nf4_library()
    return functional.get_4bit_type("nf4", device=device), functional.create_dynamic_map().to(device)


@functools.cache
def _nf4_library() -> Any:
    require_bitsandbytes()
    # it warns of a kernel that would be fetched and is not wanted
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes.functional as functional

    return functional


# -- a whole model ---------------------------------------------------------------------------------


def require_bitsandbytes() -> None:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"a base in 4 bits (model.adapter.kind = 'qlora') needs the package bitsandbytes, which is not installed: "
            f"{EXTRA}"
        )


@functools.cache
def check_decoding(device: torch.device) -> None:
    """The library has to give what the formula gives, on this device: whole blocks, odd rows and a rest."""
    weights = torch.randn(321, 130, generator=torch.Generator().manual_seed(3))
    for dtype in (torch.float32, torch.bfloat16):
        try:
            packed = encode(weights.to(device, dtype))
            gap = (
                (decode(packed, weights.numel(), dtype) - decode_reference(packed, weights.numel(), dtype))
                .float()
                .abs()
                .max()
            )
        except ConfigError:
            raise
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0]
            raise ConfigError(
                f"bitsandbytes cannot compute NF4 on '{device}': {type(error).__name__}: {reason}. {INSTEAD}"
            ) from error
        lost = (decode_reference(packed, weights.numel(), torch.float32).cpu() - weights.view(-1)).abs().mean()
        if not (float(gap) <= (2e-2 if dtype == torch.bfloat16 else 1e-6) and float(lost) < 0.1):
            raise ConfigError(
                f"bitsandbytes on '{device}' gives another NF4 than its definition (largest difference "
                f"{float(gap):.3g}, mean loss of a normal "
                f"weight {float(lost):.3g}, 0.07 is usual): the model would silently be another one. Install another "
                f"version. {INSTEAD}"
            )


def quantize_model(model: Any, device: str) -> None:
    """Every linear layer but the head and what looks at pictures, one at a time on
    `device`, where a copy in 16 bits is never whole.
    """
    check_decoding(torch.device(device))
    but = {model.get_output_embeddings(), *(m for part in tower_parts(model) for m in part.modules())}
    for parent in [module for module in model.modules() if module not in but]:
        for name, module in list(parent.named_children()):
            if isinstance(module, nn.Linear | Conv1D) and module not in but:
                _replace_layer(parent, name, module, device)


def _replace_layer(parent: nn.Module, name: str, module: Any, device: str) -> None:
    weight, bias = module.weight, None if module.bias is None else module.bias.detach().to(device)
    if (state := getattr(weight, "quant_state", None)) is not None:  # it comes from a file of bitsandbytes
        like = state.quant_type, state.blocksize, getattr(state.state2, "blocksize", None)
        if like != ("nf4", BLOCK, OUTER) or state.shape.numel() % BLOCK:
            raise ModelError(
                f"the layer '{name}' was stored as {like[0]} in blocks of "
                f"{like[1]}{'' if like[2] else ', without double quantisation'}: what is carried is nf4 in blocks of "
                "64 with double quantisation. Take the model in 16 bits, which is quantised as it is loaded"
            )
        packed, (o, i) = _join_parts(weight.data, state).to(device), state.shape
    else:
        dense = weight.detach().to(device)
        dense = dense.t() if isinstance(module, Conv1D) else dense
        packed, (o, i) = encode(dense), dense.shape
    setattr(parent, name, Nf4(packed, bias, out_features=o, in_features=i, transposed=isinstance(module, Conv1D)))


def restore_layers(model: nn.Module, dtype: torch.dtype) -> None:
    """The layers as their model had them: the decoded weights, in `dtype`."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, Nf4):
                setattr(parent, name, _dense_layer(module, dtype))
    linear.install_cpu_linear(model)  # the products of every other model, so the same bits


def _dense_layer(layer: Nf4, dtype: torch.dtype) -> nn.Module:
    weight = layer.decode_weight(dtype)
    found: nn.Module
    with torch.device("meta"):
        if layer.transposed:
            found = Conv1D(layer.out_features, layer.in_features)
        else:
            found = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    found.weight = nn.Parameter(weight.t().contiguous() if layer.transposed else weight, requires_grad=False)
    if layer.bias is not None:
        found.bias = nn.Parameter(layer.bias.detach().to(dtype), requires_grad=False)
    return found


def nf4_layers(model: nn.Module) -> list[Nf4]:
    return [module for module in model.modules() if isinstance(module, Nf4)]


def count_parameters(model: nn.Module) -> int:
    """How many weights a model has, whatever they lie in."""
    packed = nf4_layers(model)
    return sum(p.numel() for p in model.parameters()) + sum(
        layer.parameter_count - layer.weight.numel() for layer in packed
    )


def describe_quantization(model: nn.Module) -> str:
    """ "" for a base that is not in 4 bits."""
    if not (layers := nf4_layers(model)):
        return ""
    return (
        f"{len(layers)} linear layers in 4 bits (nf4, double quantisation), "
        f"{sum(layer.weight.numel() for layer in layers) / 1e6:.4g} MB"
    )


def refuse_other(model: nn.Module, name: str, *, wanted: bool) -> None:
    """A recipe that says lora must not get a base in 4 bits, nor one that says qlora another."""
    if bool(nf4_layers(model)) == wanted:
        return
    has, says = ("in 4 bits", "qlora") if not wanted else ("not in 4 bits", "lora")
    raise ModelError(f"the base of '{name}' is {has}: set model.adapter.kind = \"{says}\", as it was trained")
