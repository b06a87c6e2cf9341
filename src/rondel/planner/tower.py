"""How large the eye of a vision-language model is, and what one image costs it. No torch.

E width  F feed-forward  L layers  m cells: m^2 patches become one token  p patches of an image
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

# What transformers' configs leave unsaid, beside three facts that stand in none: what its
# norms and its patches have, and its feed-forward.
_QWEN3 = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "out_hidden_size": 3584,
    "patch_size": 16,
    "num_position_embeddings": 2304,
}
_SIGLIP = {
    "num_hidden_layers": 12,
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "image_size": 224,
    "patch_size": 32,
    "vision_use_head": False,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "hidden_size": 3584, "patch_size": 14},
    "qwen2_5_vl": {
        "depth": 32,
        "hidden_size": 3584,
        "intermediate_size": 3420,
        "out_hidden_size": 3584,
        "patch_size": 14,
    },
    "qwen3_vl": {**_QWEN3, "deepstack_visual_indexes": (8, 16, 24)},
    "qwen3_vl_moe": {**_QWEN3, "deepstack_visual_indexes": (8, 16, 24)},
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "gemma3": {
        "num_hidden_layers": 12,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "image_size": 224,
        "patch_size": 16,
        "vision_use_head": True,
    },
    "idefics3": _SIGLIP,
    "smolvlm": _SIGLIP,
}


@dataclass(frozen=True, slots=True)
class VisionTower:
    """
    out     width of the language model
    gated   a feed-forward of three matrices, and norms without biases; else two, with
    pooled  a projector averages cells behind one more norm; head: a pooling head that no image passes
    joined  a projector is one matrix of the joined patches of a cell (pixel shuffle)
    places  learned positions;  deep: layers whose features go to the language model's first layers, too
    """

    width: int
    layers: int
    feed: int
    out: int
    patch: int
    merge: int
    temporal: int
    gated: bool = False
    pooled: bool = False
    joined: bool = False
    head: bool = False
    places: int = 0
    deep: int = 0

    @property
    def _layer_parameters(self) -> int:
        """Numbers of one layer's matrices."""
        return 4 * self.width**2 + (3 if self.gated else 2) * self.width * self.feed

    @property
    def _merger_parameters(self) -> int:
        if self.pooled:
            return self.width * self.out
        wide = self.width * self.merge**2
        return wide * self.out if self.joined else wide**2 + wide * self.out

    @property
    def parameter_count(self) -> int:
        e, wide, norm = self.width, self.width * self.merge**2, 1 if self.gated else 2
        patches = 3 * self.temporal * self.patch**2 * e + (e if self.places else 0)
        biases = 5 * e + (2 if self.gated else 1) * self.feed  # 3E + E of the attention, E and F of the feed-forward
        if self.pooled or self.joined:
            layer = self._layer_parameters + biases + 4 * e
            head = self.head * (layer - 2 * e + e)  # a probe, and one norm of the two
            return (
                patches
                + self.places * e
                + self.layers * layer
                + 2 * e
                + head
                + self._merger_parameters
                + e * self.pooled
            )
        mergers = (1 + self.deep) * (self._merger_parameters + wide + self.out) + norm * (e + self.deep * wide)
        return patches + self.places * e + self.layers * (self._layer_parameters + biases + 2 * norm * e) + mergers

    def forward_flops(self, tokens: float) -> float:
        """A forward pass over an image of so many tokens: 2 a number and patch, and attention
        4*p^2*E a layer, as if every layer saw all of it.
        """
        p = tokens * self.merge**2
        patches = 3 * self.temporal * self.patch**2 * self.width
        return (
            2 * p * (patches + self.layers * self._layer_parameters)
            + 4 * p**2 * self.width * self.layers
            + 2 * tokens * (1 + self.deep) * self._merger_parameters
        )

    def activation_bytes(self, tokens: float, bytes_each: float = 2, *, trained: bool = True) -> float:
        """Activations of an image, bytes: its patches, and all layers' as Shape.saved counts them
        where the tower learns; else one layer's, and what it says."""
        p = tokens * self.merge**2
        pixels = 3 * self.temporal * self.patch**2
        layer = 8 * self.width + (4 if self.gated else 2) * self.feed
        said = tokens * (
            (1 + self.deep) * self.out + (2 * (1 + self.deep) * self.width * self.merge**2 if trained else 0)
        )
        return bytes_each * (p * (pixels + layer * (self.layers if trained else 1)) + said)


def of_config(kind: str, outer: dict[str, Any]) -> VisionTower:
    """What the config of a model of this kind says of its tower."""
    config = outer.get("vision_config") or {}
    numbers: dict[str, Any] = {**DEFAULTS[kind], **{k: v for k, v in config.items() if v is not None}}
    if "image_size" in numbers:
        return _square_tower(numbers, outer, joined=kind in ("idefics3", "smolvlm"))
    width = numbers["embed_dim"] if kind == "qwen2_vl" else numbers["hidden_size"]
    return VisionTower(
        width=width,
        layers=numbers["depth"],
        feed=int(width * numbers["mlp_ratio"]) if kind == "qwen2_vl" else numbers["intermediate_size"],
        out=numbers["hidden_size"] if kind == "qwen2_vl" else numbers["out_hidden_size"],
        patch=numbers["patch_size"],
        merge=numbers.get("spatial_merge_size", 2),
        temporal=numbers.get("temporal_patch_size", 2),
        gated=kind == "qwen2_5_vl",
        places=numbers.get("num_position_embeddings", 0),
        deep=len(numbers.get("deepstack_visual_indexes", ())),
    )


def _square_tower(numbers: dict[str, Any], outer: dict[str, Any], *, joined: bool) -> VisionTower:
    """SigLIP, whose projector makes `mm_tokens_per_image` tokens of the language model's width, or one of each cell of
    `scale_factor` patches a side.
    """
    side = numbers["image_size"] // numbers["patch_size"]
    text = outer.get("text_config") or outer
    return VisionTower(
        width=numbers["hidden_size"],
        layers=numbers["num_hidden_layers"],
        feed=numbers["intermediate_size"],
        out=text.get("hidden_size") or 2304,
        patch=numbers["patch_size"],
        merge=outer.get("scale_factor") or 2 if joined else side // math.isqrt(outer.get("mm_tokens_per_image") or 256),
        temporal=1,
        pooled=not joined,
        joined=joined,
        head=bool(numbers["vision_use_head"]),
        places=side**2,
    )
