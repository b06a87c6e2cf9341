"""How large a flow is, by the sizes in its config: its weights, its arithmetic, what a pass keeps. No torch.

P tokens (patches) of a sample · N numbers of a patch, D = P·N of a sample · W width · L layers · H heads · F of the MLP
inside · V vocabulary of prompts · f frequencies of the noise level

A denoising step reads and writes all P tokens, each of which attends to all of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rondel.core.errors import ModelError

DIT, VIDEO = "flow_dit", "flow_video"
DEFAULTS: dict[str, dict[str, Any]] = {  # as models/flow/ has them
    DIT: {"dim": 64, "patch_size": 2, "num_attention_heads": 4, "mlp_ratio": 4},
    VIDEO: {"frames": 4, "height": 8, "width": 8, "channels": 1}
    | {"patch_frames": 1, "patch_size": 2, "num_attention_heads": 4, "intermediate_size": 256},
}
COMMON = {"vocab_size": 105, "hidden_size": 64, "num_hidden_layers": 3, "frequencies": 6}
WIDTH = 4  # bytes of a number: flows are in float32


@dataclass(frozen=True, slots=True)
class FlowShape:
    """One diffusion transformer: `flow_shape({"random": "flow_video", ...}).parameter_count`. `places`:
    learned ones."""

    name: str
    tokens: int
    numbers: int
    hidden: int
    layers: int
    heads: int
    inner: int
    vocab: int
    frequencies: int
    places: int = 0

    @property
    def dim(self) -> int:
        """D."""
        return self.tokens * self.numbers

    @property
    def layer_parameters(self) -> int:
        """10·W² + 2·W·F and biases: 4·W² of attention, 6·W² of the modulation."""
        w, f = self.hidden, self.inner
        return 10 * w * w + 2 * w * f + 11 * w + f

    @property
    def cut_parameters(self) -> int:
        """Of a layer those that tp divides: 4·W² + 2·W·F of the products, and the biases of q, k, v and up."""
        w, f = self.hidden, self.inner
        return 4 * w * w + 2 * w * f + 3 * w + f

    @property
    def root_parameters(self) -> int:
        """Of what is in no layer: prompts, noise level, patches in and out, places, the last modulation."""
        w, n = self.hidden, self.numbers
        return (self.vocab + self.places + 2 * self.frequencies + 1) * w + (n + 1) * w + 2 * w * (w + 1) + n * (w + 1)

    @property
    def parameter_count(self) -> int:
        """All weights, exactly."""
        return self.layers * self.layer_parameters + self.root_parameters

    @property
    def product_flops(self) -> int:
        """Of one denoising step of one sample forward, without attention:
        2·P·(L·(4·W² + 2·W·F) + 2·N·W) + 2·(L·6·W² + 2·W² + 2·f·W).
        """
        w, each = self.hidden, 4 * self.hidden**2 + 2 * self.hidden * self.inner
        steering = self.layers * 6 * w * w + 2 * w * w + 2 * self.frequencies * w
        return 2 * self.tokens * (self.layers * each + 2 * self.numbers * w) + 2 * steering

    @property
    def attention_flops(self) -> int:
        """Of the same, scores and values of every token with every token: 4·L·P²·W."""
        return 4 * self.layers * self.tokens**2 * self.hidden

    @property
    def forward_flops(self) -> int:
        return self.product_flops + self.attention_flops

    def train_flops(self, *, recompute: bool, shared: bool) -> float:
        """Forward and backward of the same. A backward pass is two forward ones of the products, and 2.5 of attention,
        whose scores it computes again (arXiv:2307.08691). `recompute`: a forward pass of the layers more. `shared`:
        over several ranks (cp), attention is computed again once more.
        """
        times = (3.0 + recompute, 3.5 + recompute + shared)
        return times[0] * self.product_flops + times[1] * self.attention_flops

    def kept_numbers(self, *, shared: bool, tp: int = 1, sp: bool = False) -> float:
        """That one layer keeps of a token for its backward pass: 8·W + 4 + (7·W + 2·F + H) / tp, or with shared tokens,
        whose keys and values are gathered again, 8·W + 4 + (4·W + 2·F) / tp. With `sp` tp divides all of it but 2·W, what
        attention and MLP read.
        """
        inside = 4 * self.hidden + 2 * self.inner if shared else 7 * self.hidden + 2 * self.inner + self.heads
        between = 6 * self.hidden + 4
        return 2 * self.hidden + between / (tp if sp else 1) + inside / tp

    def activation_bytes(self, *, recompute: bool, shared: bool, tp: int = 1, sp: bool = False) -> float:
        """Of a token in a pass with a gradient: of all layers; with `recompute` their inputs,
        and one layer at a time."""
        each, rows = self.kept_numbers(shared=shared, tp=tp, sp=sp), self.hidden / (tp if sp else 1)
        return WIDTH * (self.layers * rows + each if recompute else self.layers * each)

    @property
    def modulation_parameters(self) -> int:
        """Of a layer: 6·W² and biases."""
        return 6 * self.hidden * (self.hidden + 1)

    @property
    def gathered_bytes(self) -> int:
        """Keys and values of one layer of a sample, whole on every rank that shares its tokens: 2·P·W numbers."""
        return 2 * self.tokens * self.hidden * WIDTH


def is_planned_flow(model: str | dict[str, Any]) -> bool:
    """Whether model.path is that of a diffusion transformer."""
    return _read_config(model).get("model_type") in DEFAULTS


def flow_shape(model: str | dict[str, Any]) -> FlowShape:
    """Of a recipe's model.path: a table, or a folder. ModelError for other models, or sizes that do not fit."""
    given = _read_config(model)
    kind = given.get("model_type")
    if kind not in DEFAULTS:
        raise ModelError(f"the planner does not know the layers of '{kind}'. Of flows it knows {', '.join(DEFAULTS)}")
    c = {**COMMON, **DEFAULTS[kind], **given}
    name = f"random-{kind}" if isinstance(model, dict) else Path(model).name
    try:
        grid, numbers = _image_patches(c) if kind == DIT else _video_patches(c)
    except (TypeError, ZeroDivisionError) as error:
        raise ModelError(f"a {kind} of these sizes cannot be made: {error}") from error
    inner = c["mlp_ratio"] * c["hidden_size"] if kind == DIT else c["intermediate_size"]
    return FlowShape(
        name,
        grid,
        numbers,
        c["hidden_size"],
        c["num_hidden_layers"],
        c["num_attention_heads"],
        inner,
        c["vocab_size"],
        c["frequencies"],
        places=grid if kind == DIT else 0,
    )


def _image_patches(c: dict[str, Any]) -> tuple[int, int]:
    side = round(c["dim"] ** 0.5)
    if side * side != c["dim"] or side % c["patch_size"]:
        raise ModelError(f"dim = {c['dim']} is no square image of patches of {c['patch_size']}·{c['patch_size']}")
    return (side // c["patch_size"]) ** 2, c["patch_size"] ** 2


def _video_patches(c: dict[str, Any]) -> tuple[int, int]:
    tokens = 1
    for name, patch in (("frames", "patch_frames"), ("height", "patch_size"), ("width", "patch_size")):
        if c[name] % c[patch]:
            raise ModelError(f"{name} = {c[name]} cannot be cut into patches of {patch} = {c[patch]}")
        tokens *= c[name] // c[patch]
    return tokens, c["patch_frames"] * c["patch_size"] ** 2 * c["channels"]


def _read_config(model: str | dict[str, Any]) -> dict[str, Any]:
    """A table's sizes, or those of a folder's config.json; none where there is no such file."""
    if isinstance(model, dict):
        return {**model, "model_type": model.get("random")}
    try:
        found = json.loads((Path(model).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):
        return {}
    return found if isinstance(found, dict) else {}
