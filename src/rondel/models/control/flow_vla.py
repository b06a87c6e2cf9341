"""A vision-language-action model: a flow from noise to a chunk of actions, given a picture and an instruction, as pi0
(arXiv:2410.24164) has it.

    picture [h, w, 3] + instruction [P] ──backbone──> last hidden state of the last token ──layers──> states [W]
    noise [H·A] ──────────────────── K denoising steps of an action expert, each under the states ──> chunk [H, A]

The expert reads one hidden state; that of pi0 attends to keys and values of all tokens in front of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel

from rondel.core.errors import ModelError
from rondel.core.media import Image, ImageProcessorConfig
from rondel.models import vision
from rondel.models.aligned_numerics import AlignedPacked
from rondel.models.attention import NAME, use_attention_layout
from rondel.models.control.flow_policy import FlowPolicy, FlowPolicyConfig
from rondel.models.control.kinds import FLOW_VLA
from rondel.models.elementwise import fill_activations
from rondel.models.image_features import VisionFeatures
from rondel.models.packed_layout import PackedLayout


class FlowVlaConfig(FlowPolicyConfig):
    """num_hidden_layers: on the hidden state. backbone: the config of a vision-language model, as its config.json has
    it. frame: [h, w] pixels of a picture, whole cells of the backbone's. image_mean, image_std: with which it reads
    pixels; unset is its family's.
    """

    model_type = FLOW_VLA
    num_hidden_layers: int = 1
    backbone: dict[str, Any] | None = None
    frame: list[int] | None = None
    image_mean: list[float] | None = None
    image_std: list[float] | None = None

    @property
    def input_size(self) -> int:
        return int(self.backbone_config.get_text_config().hidden_size)

    @property
    def backbone_config(self) -> Any:
        """As transformers has it."""
        given = dict(self.backbone or {})
        return CONFIG_MAPPING[given["model_type"]].from_dict(given)


@dataclass(frozen=True, slots=True)
class PicturePrefix:
    """What stands before the actions of n steps, packed: `tokens` [T], `positions` [4, T], each token of a picture's
    features in `rows`, and where each prefix ends in `last` [n].
    """

    tokens: Tensor
    positions: Tensor
    layout: PackedLayout
    images: list[Image]
    rows: Tensor
    last: Tensor


class FlowVla(FlowPolicy):
    """The flow of `FlowPolicy` under states that a vision-language model reads, without its head. A prefix has the same
    bits whatever is read beside it, so an action does not depend on which episodes wait with its own.
    """

    config_class = FlowVlaConfig

    def __init__(self, config: FlowVlaConfig) -> None:
        super().__init__(config)
        inner = config.backbone_config
        attention: Any = {"": NAME, "text_config": NAME, "vision_config": "sdpa"}
        self.backbone = AutoModel.from_config(inner, attn_implementation=attention)
        fill_activations(self.backbone)
        self.sight = _sight_of(config, inner)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        found: nn.Module = self.backbone.get_input_embeddings()
        return found

    def forward(self, prefix: PicturePrefix) -> Tensor:  # type: ignore[override]
        """-> states [n, W]"""
        with use_attention_layout(AlignedPacked(prefix.layout)):
            features = vision.encode_images(self.backbone, self.sight, prefix.images)
            seen = VisionFeatures(prefix.rows, features)
            hidden = vision.hidden_states(self.backbone, prefix.tokens, prefix.positions, seen)
        return super().forward(hidden.index_select(0, prefix.last))


def _sight_of(config: FlowVlaConfig, backbone: Any) -> ImageProcessorConfig:
    """How the backbone looks at pictures. ModelError where one is no whole number of its cells."""
    sight = vision.sight_of(backbone)
    assert sight is not None, f"a {backbone.model_type} reads text alone"
    frame, cell = config.frame or [0, 0], sight.token_pixels
    if not all(side > 0 and side % cell == 0 for side in frame):
        raise ModelError(
            f"pictures of {frame[0]}·{frame[1]} pixels for a backbone with cells of {cell}·{cell}: take "
            "task.env.pixels, or the patch_size of its vision_config, so that whole cells fill one"
        )
    colours = {name: tuple(own) for name, own in (("mean", config.image_mean), ("std", config.image_std)) if own}
    return replace(sight, **colours)  # type: ignore[arg-type]


AutoConfig.register(FlowVlaConfig.model_type, FlowVlaConfig)
AutoModel.register(FlowVlaConfig, FlowVla)
