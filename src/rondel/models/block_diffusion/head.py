"""The head of a block-diffusion model: that of the same model of text, which never says the mask."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from rondel.core.errors import ModelError
from rondel.models.block_diffusion.settings import block_settings
from rondel.models.head import LMHead

if TYPE_CHECKING:
    from rondel.models.loaded_model import LoadedModel

NEVER = -1e9  # a logit of which exp is 0 in float32, and 0 times which is 0


@dataclass(slots=True)
class BlockHead(LMHead):
    """`LMHead` whose bias forbids the mask. The position of a mask predicts its own token and not the next one."""

    @classmethod
    def from_model(cls, model: Any) -> LMHead:
        plain = LMHead.from_model(model)
        if plain.bias is not None or plain.softcap is not None or plain.scale != 1.0:
            raise ModelError(
                f"a {model.config.model_type} with blocks of masks: its head has a bias, a scale or a softcap, and the "
                "mask is forbidden by a bias of its own; take a family without, such as llama or qwen3"
            )
        bias = torch.zeros(len(plain.weight), dtype=plain.weight.dtype, device=plain.weight.device)
        bias[block_settings(model.config).mask_token] = NEVER
        return cls(plain.weight, bias, rounded=plain.rounded)

    def of_copy(self, model: Any) -> LMHead:
        return replace(BlockHead.from_model(model), aligned=self.aligned)


def with_block_head(loaded: LoadedModel) -> LoadedModel:
    """The same model as one that fills in blocks. ModelError where a layer cannot look both ways."""
    config, name = loaded.model.config, loaded.name
    plain = all(kind == "full_attention" for kind in getattr(config, "layer_types", None) or [])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if not plain or window or loaded.state_bytes or loaded.indexers or loaded.compressed or loaded.sight:
        raise ModelError(
            f"'{name}' ({config.model_type}) with blocks of masks: within a block every layer must look both ways, so "
            "it has full attention alone, and reads text alone; take llama or qwen3"
        )
    if loaded.routers:
        raise ModelError(
            f"'{name}' ({config.model_type}) with blocks of masks is a mixture of experts, whose routes would have to "
            "be recorded for every step of a block: take a dense model"
        )
    return replace(loaded, head=BlockHead.from_model(loaded.model), blocks=block_settings(config))
