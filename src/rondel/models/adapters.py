"""LoRA through peft: y = W x + alpha/r · B (A x).  A [r, I], B [O, r].
arXiv:2106.09685. W stays as it was loaded, B starts at 0.

    x [T, I] ──> W, in the model's dtype, packed ──────> + ──> y [T, O] in the model's dtype
       └──> float32 ──> A ──> B ──> · alpha/r ───────────┘
            ^ what is trained, published and stored; float32, because bfloat16 swallows small steps

Nobody owns the base: engine, trainer, reference (the adapter switched off) and critic read
the same tensors. Its files: models/adapter_files.py.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rondel.core.errors import ConfigError, ModelError, error_boundary
from rondel.core.registry import suggest_name
from rondel.models import linear, names
from rondel.models.adapter_files import read_adapter
from rondel.models.adapter_state import NAME, ModelAdapter, own_factors
from rondel.models.deferred_weights import present_parameters
from rondel.models.lora_product import LoraProduct
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.models.vision_families import tower_parts

if TYPE_CHECKING:
    from rondel.models.loaded_model import LoadedModel

ALL = "all-linear"


def add_adapter(loaded: LoadedModel, *, rank: int, alpha: int, targets: str | list[str] = ALL, seed: int = 0) -> None:
    """From now on only an adapter of `loaded` is trained. A model that came with one keeps
    it, if it is the one that is asked for.
    """
    require_peft()
    found = _find_layers(loaded, targets)
    if (old := loaded.adapter) is not None:
        for what, has, wanted in (
            ("rank", old.config.r, rank),
            ("alpha", old.config.lora_alpha, alpha),
            ("targets", sorted(old.layers), sorted(found)),
        ):
            if has != wanted:
                raise ConfigError(
                    f"model.adapter.{what} is another than that of the adapter '{loaded.name}' (rank {old.config.r}, "
                    f"alpha "
                    f"{old.config.lora_alpha}, {len(old.layers)} layers). Leave model.adapter out to go on with that "
                    f"one, or merge it first"
                )
        return
    from peft import LoraConfig

    ends = sorted({name.rpartition(".")[2] for name in found})
    # else peft would reach into the tower, too
    exact = loaded.sight is None and set(_find_layers(loaded, ends)) == set(found)
    with error_boundary(ModelError, f"adapting '{loaded.name}'"):
        _inject_adapter(
            loaded,
            LoraConfig(
                r=rank,
                lora_alpha=alpha,
                target_modules=ends if exact else sorted(found),
                lora_dropout=0.0,
                bias="none",
                task_type="CAUSAL_LM",
                fan_in_fan_out=any(isinstance(module, Conv1D) for module in found.values()),
            ),
            seed,
        )
        assert loaded.adapter is not None
        if odd := sorted(loaded.adapter.layers.keys() ^ found.keys()):
            raise ModelError(
                f"peft adapts other layers than were asked for, first {odd[0]}: name them in full in "
                f"model.adapter.targets"
            )


def require_peft() -> None:
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("adapters need the package peft, which is not installed: pip install 'rondel[lora]'")


def linear_layers(loaded: LoadedModel) -> dict[str, nn.Module]:
    """{full name: layer} of what can be adapted: not the head, a mixture's experts, a tower, or what chooses."""
    model = loaded.model
    head = model.get_output_embeddings()
    tower = {module for part in tower_parts(model) for module in part.modules()}
    choosing = [n for n, m in model.named_modules() if type(m).__name__.lower().endswith(("router", "indexer"))]
    return {
        name: module
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear | Conv1D) or hasattr(module, "lora_A"))
        and module is not head
        and not type(module).__name__.endswith("GroupedLinear")  # whose product is one for each group
        and not any(part in name for part in (".base_layer", ".lora_A.", ".lora_B."))
        and module not in tower
        and not any(name == module or name.startswith(f"{module}.") for module in choosing)
    }


def _find_layers(loaded: LoadedModel, targets: str | Iterable[str]) -> dict[str, nn.Module]:
    """{full name: layer} of what shall be adapted; every target must mean at least one layer."""
    layers = linear_layers(loaded)
    if targets == ALL:
        if loaded.routers:
            raise ConfigError(
                f"model.adapter.targets = '{ALL}': '{loaded.name}' is a mixture of experts, whose experts are joined "
                f"tensors and no linear "
                "layers: an adapter cannot reach them. Name the layers that it shall have: targets = "
                f"{_layer_suffixes(layers)}",
                page="docs/train.md#adapters",
            )
        return layers
    chosen: dict[str, nn.Module] = {}
    for target in [targets] if isinstance(targets, str) else targets:
        hits = {name: module for name, module in layers.items() if name == target or name.endswith(f".{target}")}
        if not hits:
            raise ConfigError(
                f"model.adapter.targets: '{target}' is no linear layer inside '{loaded.name}' that can be adapted."
                f"{suggest_name(target, _layer_suffixes(layers))} It has: {', '.join(_layer_suffixes(layers))} (the "
                f"head, a mixture's experts and what chooses experts or keys cannot)"
            )
        chosen |= hits
    if not chosen:
        raise ConfigError(
            f"model.adapter.targets = []: nothing would be trained. Name layers, or write targets = '{ALL}'"
        )
    return chosen


def _layer_suffixes(layers: Iterable[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in layers})


def _inject_adapter(loaded: LoadedModel, config: Any, seed: int) -> None:
    """peft puts its layers around the model's; their forward pass is ours, so that engine and
    trainer share one switch.
    """
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    model, later = loaded.model, loaded.weights
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]), nullcontext() if later is None else present_parameters(model, later.device):
        torch.manual_seed(seed)  # on the CPU whatever the device, so the start is the same everywhere
        inject_adapter_in_model(config, model, NAME)
    names.forget_pieces(model)
    if later is not None:
        names.pin_digest(model, lambda name, like: later.read(name, like.shape, like.dtype))
    layers: dict[str, Any] = {name: m for name, m in model.named_modules() if isinstance(m, LoraLayer)}
    adapter = ModelAdapter(config, layers)
    for name, layer in layers.items():
        if getattr(layer, "lora_variant", None) or not hasattr(layer.get_base_layer(), "weight") or not layer.lora_A:
            raise ModelError(
                f"the adapter of '{name}' is a {type(layer).__name__} of a kind that is not carried: only plain LoRA is"
            )
        for part in (layer.lora_A[NAME], layer.lora_B[NAME]):
            part.float().requires_grad_(True)
        layer.model_adapter = adapter
        setattr(layer, "forward", functools.partial(_adapted_forward, adapter, layer))  # noqa: B010  # as linear.adopt does
    loaded.adapter = adapter
    if later is None:  # else those who read the weights check it
        check_adapter(loaded, functools.partial(run_few_tokens, loaded))


def _adapted_forward(adapter: ModelAdapter, layer: Any, x: Tensor) -> Tensor:
    """W x + alpha/r · B (A x), the sum in float32."""
    out = layer.base_layer(x)
    if adapter.off:
        return out
    a, b, scale = *own_factors(layer), layer.scaling[NAME]
    if adapter.exact:
        return (out + scale * linear.product(linear.product(x.float(), a), b)).to(out.dtype)
    flat, wide = x.flatten(0, -2), out.flatten(0, -2)
    if torch.is_grad_enabled():
        return LoraProduct.apply(wide, flat, a, b, scale).view_as(out)
    return torch.addmm(wide.float(), F.linear(flat.float(), a), b.t(), alpha=scale).to(out.dtype).view_as(out)


def check_adapter(loaded: LoadedModel, forward: Callable[[], object]) -> None:
    """Every adapted layer must be asked in a pass, which `forward` is: a model that reads a layer's
    weight itself would go past the adapter. A stage of a pipeline has some of the layers.
    """
    adapter = loaded.adapter
    assert adapter is not None
    here = {name: layer for name, layer in adapter.layers.items() if not layer.lora_A[NAME].weight.is_meta}
    asked = asked_layers(here, forward)
    if silent := sorted(here.keys() - asked.keys()):
        raise ModelError(
            f"{len(silent)} adapted layers of '{loaded.name}' take no part in a forward pass, first {silent[0]}: "
            "their adapter would be ignored. Leave them out of model.adapter.targets"
        )


@torch.no_grad()
def run_few_tokens(loaded: LoadedModel) -> None:
    """A forward pass for those who watch which layers take part in it."""
    ids, layout = torch.arange(3, 8, device=loaded.device), PackedLayout([PackedSegment(0, 5)], loaded.device)
    loaded.hidden_states(ids, torch.arange(5, device=loaded.device), layout)


def asked_layers(layers: dict[str, Any], forward: Callable[[], object]) -> dict[str, Any]:
    """Those that take part in a forward pass by being called."""
    asked: set[str] = set()
    hooks = [layer.register_forward_hook(lambda *_, name=name: asked.add(name)) for name, layer in layers.items()]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    return {name: layer for name, layer in layers.items() if name in asked}


def attach_adapter(loaded: LoadedModel, folder: str | Path) -> None:
    """Give a base the adapter that lies in `folder`, whoever wrote it."""
    require_peft()
    from peft import LoraConfig, PeftConfig

    if loaded.adapter is not None:
        raise ModelError(
            f"the adapter in '{folder}' belongs to '{loaded.name}', which has an adapter already: merge that one first"
        )
    with error_boundary(ModelError, f"reading the adapter in '{folder}'"):
        config = PeftConfig.from_pretrained(str(Path(folder).expanduser()))
        if not isinstance(config, LoraConfig):
            raise ModelError(f"the adapter in '{folder}' is {config.peft_type}; LoRA is what is carried")
        _inject_adapter(loaded, config, 0)
    theirs = read_adapter(loaded, folder)
    with torch.no_grad():
        for name, tensor in names.named_weights(loaded.model):
            tensor.copy_(theirs[name])
