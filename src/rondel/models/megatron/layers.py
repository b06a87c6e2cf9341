"""Training through Megatron-Core: each layer computes as Megatron's, with its joined products.

    embedding ─► [ norm · linear_qkv ─► attention ─► linear_proj · norm · linear_fc1 ─► linear_fc2 ] ─► norm, head
    transformers   Megatron-Core, a call a layer: column- and row-parallel linears, experts     transformers

Parameters stay those of transformers, under its names: optimizer, checkpoints, digests and weight updates know
nothing of this. What Megatron multiplies is joined from them in each pass (models/megatron/tensor_rules.py), and
autograd splits its gradient again. Joined matrices are not kept for the backward pass, which joins them again.
Megatron's own parameters are on "meta" and take no memory.

Attention is the layout's (models/attention.py), rotated by the positions of the row, so shared prompts, trees and
context parallel work as with the layers of transformers. Only training layouts come here: an engine that shares the
module decodes as before.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from rondel.core.errors import ModelError
from rondel.models.attention import attention_layout
from rondel.models.blocks import decoder_blocks
from rondel.models.collectives import RankGroup
from rondel.models.context_parallel import ContextLayout
from rondel.models.load_check import PARITY
from rondel.models.loaded_model import LoadedModel
from rondel.models.megatron.tensor_rules import LAYER, MegatronTensor, megatron_tensors
from rondel.models.megatron.transformer_layer import build_layer, head_size
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.models.routing_tape import expert_count

TRAINING = (PackedLayout, ContextLayout)
HERE = "decoder.layers."
INSTEAD = 'leave place.mesh.layers at "transformers"'


def install_megatron_layers(loaded: LoadedModel, ranks: RankGroup | None = None, *, run_twice: bool = False) -> None:
    """From now on the layers of a model compute as Megatron's under a training layout, which is proved where its
    weights are here.

    ranks      over which its matrices will be cut (models/tensor_parallel.py)
    run_twice  layers are computed again in the backward pass, and keep nothing (models/recompute.py)

    Raises ModelError where the family has no rules, or Megatron's layers compute something else.
    """
    refuse_model(loaded, 1 if ranks is None else ranks.size)
    config = loaded.model.config.get_text_config()
    expected = None if loaded.weights is not None else _probe_logprobs(loaded)
    layers = MegatronLayers(config, ranks, keeps_joined=run_twice)
    for block in decoder_blocks(loaded.model, loaded.decoder):
        setattr(block, "forward", functools.partial(layers.forward, block, block.forward))  # noqa: B010
    if expected is not None:
        gap, limit = float((_probe_logprobs(loaded) - expected).abs().mean()), PARITY[loaded.dtype]
        if not gap <= limit:
            raise ModelError(
                f"'{loaded.name}' ({config.model_type}): in Megatron-Core's layers its logprobs differ by {gap:.3g} "
                f"from those of transformers (limit {limit}): {INSTEAD}"
            )


def refuse_model(loaded: LoadedModel, tp: int) -> None:
    """What Megatron's layers, as they are built here, do not compute. Raises ModelError."""
    config = loaded.model.config.get_text_config()
    rules = megatron_tensors(config)
    heads, keys, experts = config.num_attention_heads, config.num_key_value_heads, expert_count(config)
    for found, what in (
        (loaded.blocks is not None, "its engine computes blocks in rows of the trainer's kind"),
        (any(rule.name.endswith("linear_proj.bias") for rule in rules), "its attention ends in a bias"),
        (config.hidden_act != "silu", f"its activation is {config.hidden_act}"),
        (tp > 1 and experts > 0, "experts are not cut by tp in Megatron's layers: use shards or cp"),
        (heads % tp + keys % tp > 0, f"tp = {tp} does not divide its {heads} heads and {keys} key heads"),
    ):
        if found:
            raise ModelError(
                f"'{loaded.name}' ({config.model_type}) in Megatron-Core's layers: {what}. Change that, or {INSTEAD}"
            )


@torch.no_grad()
def _probe_logprobs(loaded: LoadedModel) -> Tensor:
    """[T, V] of a prompt with two answers."""
    segments, positions = [PackedSegment(0, 6), PackedSegment(6, 5, 0), PackedSegment(11, 3, 0)], [*range(11), 6, 7, 8]
    tokens = torch.tensor([(7 * i + 3) % loaded.token_count for i in range(14)], device=loaded.device)
    layout = PackedLayout(segments, loaded.device)
    hidden = loaded.hidden_states(tokens, torch.tensor(positions, device=loaded.device), layout)
    return loaded.head.logits(hidden).log_softmax(-1)


class MegatronLayers:
    """Megatron's layer for every layer of a model: it holds no weights, so one is enough, and one more where these are
    cut.
    """

    def __init__(self, config: Any, ranks: RankGroup | None, *, keeps_joined: bool) -> None:
        self.config, self.ranks, self.keeps_joined = config, ranks, keeps_joined
        self._built: dict[int, tuple[Any, list[MegatronTensor]]] = {}  # by over how many ranks it is cut

    def __deepcopy__(self, memo: Any) -> MegatronLayers:
        return self  # of a copy of the model, too

    def forward(self, block: Any, own: Callable[..., Tensor], hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """In place of a layer of transformers, whose forward is `own`: [1, T, D] -> [1, T, D]."""
        if not isinstance(attention_layout(), TRAINING):
            return own(hidden, *args, **kwargs)
        layer, rules = self._layer_for(block)
        layer.self_attention.core_attention.settings = block.self_attn, *kwargs["position_embeddings"]
        if hasattr(block.mlp, "experts"):
            layer.mlp.router.gate = block.mlp.gate
        held, tensors, joined = dict(block.named_parameters()), _expert_tensors(block), {}
        for rule in rules:
            parts = [held[name.removeprefix(f"{LAYER}.")] for name in rule.sources]
            tensors[_local_name(rule)] = whole = rule.join(parts)
            if len(parts) > 1:
                joined[whole.data_ptr()] = rule, parts
        with nullcontext() if self.keeps_joined else _joined_again(joined):
            out, _ = functional_call(layer, tensors, (hidden.transpose(0, 1), None))
        return out.transpose(0, 1)

    def _layer_for(self, block: Any) -> tuple[Any, list[MegatronTensor]]:
        """As the weights of a layer are cut here, and how its tensors are joined."""
        cut = self.config.num_attention_heads * head_size(self.config) // block.self_attn.o_proj.weight.shape[1]
        if cut not in self._built:
            config = copy.copy(self.config)
            config.num_key_value_heads //= cut
            rules = [r for r in megatron_tensors(config) if r.name.startswith(HERE) and r.stacked == 1]
            group = None if cut == 1 or self.ranks is None else self.ranks.group
            self._built[cut] = build_layer(self.config, group), [r for r in rules if ".router." not in r.name]
        return self._built[cut]


def _joined_again(joined: dict[int, tuple[MegatronTensor, list[Tensor]]]) -> saved_tensors_hooks:
    """Inside, autograd keeps of a joined matrix what it is made of."""

    def pack(x: Tensor) -> Any:
        return joined.get(x.data_ptr(), x)

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        rule, parts = kept
        with torch.no_grad():
            return rule.join(parts)

    return saved_tensors_hooks(pack, unpack)


def _local_name(rule: MegatronTensor) -> str:
    """Where norms are modules of their own."""
    name = rule.name.removeprefix(HERE)
    name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    return name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")


def _expert_tensors(block: Any) -> dict[str, Tensor]:
    """transformers joins gate and up of all experts as Megatron does those of one."""
    if (experts := getattr(block.mlp, "experts", None)) is None:
        return {}
    tensors = {"fc1": experts.gate_up_proj.unbind(), "fc2": experts.down_proj.unbind()}
    return {
        f"mlp.experts.local_experts.{i}.linear_{part}.weight": weight
        for part, weights in tensors.items()
        for i, weight in enumerate(weights)
    }
