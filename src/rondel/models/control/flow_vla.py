"""A vision-language-action model: a flow from noise to a chunk of actions, given a picture and an instruction, as pi0
(arXiv:2410.24164) has it.

    picture [h, w, 3] + instruction [P] ──backbone──> last hidden state of the last token ──layers──> states [W]
    noise [H·A] ──────────────────── K denoising steps of an action expert, each under the states ──> chunk [H, A]

With `reads = "all"` the expert attends to keys and values of all tokens in front of it, in every layer, as that of pi0 does
(action_expert.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel

from rondel.core.errors import ModelError
from rondel.core.media import Image, ImageProcessorConfig
from rondel.models import vision
from rondel.models.aligned_numerics import AlignedPacked
from rondel.models.attention import NAME, LatentProjection, use_attention_layout
from rondel.models.control.action_expert import ActionExpert, PrefixStates
from rondel.models.control.flow_policy import FlowPolicy, FlowPolicyConfig
from rondel.models.control.kinds import FLOW_VLA
from rondel.models.dense_attention import ScoreRule
from rondel.models.elementwise import fill_activations
from rondel.models.flow.transition import sinusoidal
from rondel.models.image_features import VisionFeatures
from rondel.models.packed_layout import PackedLayout
from rondel.models.vision_families import FAMILIES


class FlowVlaConfig(FlowPolicyConfig):
    """num_hidden_layers: on the hidden state. backbone: the config of a vision-language model, as its config.json has
    it. reads: "last", the hidden state of the last token, or "all", what every layer has of every token, too. frame:
    [h, w] pixels of a picture, whole cells of the backbone's. image_mean, image_std: with which it reads pixels; unset is
    its family's.
    """

    model_type = FLOW_VLA
    num_hidden_layers: int = 1
    backbone: dict[str, Any] | None = None
    reads: str = "last"
    frame: list[int] | None = None
    image_mean: list[float] | None = None
    image_std: list[float] | None = None

    @property
    def input_size(self) -> int:
        return int(self.backbone_config.get_text_config().hidden_size)

    @property
    def act_size(self) -> int:
        return self.action_size if self.reads == "all" else super().act_size

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
    only_drawing: ClassVar[tuple[str, ...]] = (*FlowPolicy.only_drawing, "expert")

    def __init__(self, config: FlowVlaConfig) -> None:
        super().__init__(config)
        if config.reads not in ("last", "all"):
            raise ModelError(f'reads = "{config.reads}" of model.path: take "last" or "all"')
        if config.reads == "all" and config.num_denoising_layers != FlowVlaConfig.num_denoising_layers:
            raise ModelError(
                f'num_denoising_layers = {config.num_denoising_layers} of model.path with reads = "all": the expert has a '
                "layer for each of the backbone's; leave it out"
            )
        inner = config.backbone_config
        attention: Any = {"": NAME, "text_config": NAME, "vision_config": "sdpa"}
        self.backbone = AutoModel.from_config(inner, attn_implementation=attention)
        fill_activations(self.backbone)
        self.sight = _sight_of(config, inner)
        self.expert: ActionExpert | None = None
        if config.reads == "all":
            self.enter = self.mix = None  # type: ignore[assignment]
            entries = config.action_size + 2 * config.frequencies
            self.expert = ActionExpert(config.hidden_size, entries, inner.get_text_config())
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        found: nn.Module = self.backbone.get_input_embeddings()
        return found

    def forward(self, prefix: PicturePrefix, of_step: Tensor) -> Tensor | PrefixStates:  # type: ignore[override]
        """-> states [M, W] of steps under the prefixes of these numbers; for an expert that reads all, with what it reads"""
        layout = KeptKeys(AlignedPacked(prefix.layout))
        with use_attention_layout(layout):
            features = vision.encode_images(self.backbone, self.sight, prefix.images)
            seen = VisionFeatures(prefix.rows, features)
            hidden = vision.hidden_states(self.backbone, prefix.tokens, prefix.positions, seen)
        states = super().forward(hidden.index_select(0, prefix.last)).index_select(0, of_step)
        if self.expert is None:
            return states
        first = prefix.last.new_tensor([s.start for s in prefix.layout.segments])
        cos, sin = self._turns_behind(prefix.positions[1, prefix.last], hidden)
        keys, values = zip(*(layout.kept[layer] for layer in sorted(layout.kept)), strict=True)
        of_prefix = (first, prefix.last - first + 1, cos, sin)
        return PrefixStates(states, list(keys), list(values), *(x.index_select(0, of_step) for x in of_prefix))

    def _turns_behind(self, last: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the angles of the H places behind these [n] -> [n, H, d] each"""
        places = last[:, None] + 1 + torch.arange(self.config.chunk, device=last.device)
        text = self.backbone.get_submodule(FAMILIES[self.backbone.config.model_type].text)
        found = text.rotary_emb(like, places.flatten().expand(3, 1, -1))
        # text has the same place along all three axes of a picture
        cos, sin = (part.view(-1, places.numel(), part.shape[-1])[0].unflatten(0, places.shape) for part in found)
        return cos, sin

    def velocity(self, x: Tensor, sigma: Tensor, states: Tensor | PrefixStates) -> Tensor:
        if self.expert is None:
            assert isinstance(states, Tensor)
            return super().velocity(x, sigma, states)
        assert isinstance(states, PrefixStates)
        points = x.unflatten(2, (self.config.chunk, -1))
        level = sinusoidal(sigma, self.config.frequencies)[:, None].expand(*points.shape[:3], -1)
        chunk = self.act(self.expert(torch.cat([points, level], 3), states)).flatten(2)
        return (x - chunk) / sigma[:, None]


class KeptKeys:
    """A layout of which keys and values [T, K, d] of every layer are kept."""

    def __init__(self, layout: AlignedPacked) -> None:
        self.layout, self.kept = layout, dict[int, tuple[Tensor, Tensor]]()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        self.kept[layer] = (k, v)
        return self.layout.attend(layer, q, k, v, rule)

    def attend_latents(
        self, layer: int, q: Tensor, c: Tensor, r: Tensor, up: LatentProjection, rule: ScoreRule
    ) -> Tensor:
        return self.attend(layer, q, *up.expand(c, r), rule)


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
