"""Tiny models that look at pictures, streams with pictures in them, and
transformers' own forward pass that judges both.
"""

from __future__ import annotations

import copy
from functools import cache

import numpy as np
import torch

from kits.engine import SIZE
from rondel.core.media import Image, ImagePlaceholder
from rondel.core.types import Group, Request, Sampling, Score, Task, Trajectory
from rondel.models import vision
from rondel.models.load import load_model
from rondel.models.loaded_model import LoadedModel
from rondel.train.annotate import compute_advantages
from rondel.train.pack import TrainBatch
from rondel.train.step_metrics import StepMetricSums

torch.set_num_threads(1)
_QWEN3 = dict(depth=2, hidden_size=32, num_heads=2, intermediate_size=64, num_position_embeddings=64)
_TILES = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8
)
EYES = {
    "qwen2_vl": dict(depth=2, embed_dim=32, num_heads=2, mlp_ratio=2),
    "qwen2_5_vl": dict(
        depth=2, hidden_size=32, num_heads=2, intermediate_size=64, fullatt_block_indexes=[1], window_size=56
    ),
    "qwen3_vl": _QWEN3 | {"deepstack_visual_indexes": [0]},
    "qwen3_vl_moe": _QWEN3 | {"deepstack_visual_indexes": [0]},
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "gemma3": dict(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=48,
        patch_size=8,
        vision_use_head=False,
    ),
    "gemma4": dict(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        patch_size=8,
        pooling_kernel_size=2,
        position_embedding_size=16,
    ),
    "idefics3": _TILES,
    "smolvlm": _TILES,
}
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
_LINEAR = dict(
    head_dim=32, num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"],
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=16,
    linear_conv_kernel_dim=4,
)  # fmt: skip
MORE = {
    "qwen3_vl": {"head_dim": 16},
    "qwen3_vl_moe": {"head_dim": 16, **_EXPERTS},
    "qwen3_5": _LINEAR,
    "gemma3": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "mm_tokens_per_image": 9,
    },
    "gemma4": {
        "head_dim": 16,
        "per_layer_config": {1: {"head_dim": 24}, 3: {"head_dim": 24}},
        "final_logit_softcapping": 6.0,
        "sliding_window": 6,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 109,
        "pad_token_id": 0,
    },
    "qwen3_5_moe": {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 32},
}


MUTUAL = "gemma4 + mutual"  # a larger one: image tokens see each other in sliding layers


def recipe(kind: str = "qwen2_5_vl", **more) -> dict:
    sizes = SIZE | MORE.get(kind, {})
    if kind == "qwen3_5_moe":  # every layer has experts alone
        sizes.pop("intermediate_size")
    return {"random": kind, **sizes, "vision_config": EYES[kind], **more}


@cache
def _model(kind: str) -> LoadedModel:
    """Larger than initialised, so that attention and positions matter."""
    name, _, odd = kind.partition(" + ")
    more = {"use_bidirectional_attention": "vision"} if odd else {}
    loaded = load_model({**recipe(name, **more), "seed": 3}, dtype="float32")
    with torch.no_grad():
        for name, p in loaded.model.named_parameters():
            if p.dim() > 1:
                p.mul_(8 if "embed_tokens" in name or "lm_head" in name else 3)
    return loaded


def model(kind: str = "qwen2_5_vl", *, deferred: bool = False) -> LoadedModel:
    """A fresh copy; its tower is frozen, as a run's is. `deferred` changes nothing for random weights."""
    loaded = copy.deepcopy(_model(kind))
    vision.vision_tower(loaded.model).requires_grad_(False)
    return loaded


def image(loaded: LoadedModel, seed: int, rows: int = 2, columns: int = 2, frames: int = 1) -> Image:
    """Random pixels; where all images are made squares, of that size. Of several frames: a step of a video."""
    cell = loaded.sight.token_pixels
    if loaded.sight.side is not None:
        rows = columns = loaded.sight.side // cell
    pixels = np.random.default_rng(seed).integers(0, 256, (frames * rows * cell, columns * cell, 3), dtype=np.uint8)
    return Image.from_pixels(pixels, cell, frames)


def stream(loaded: LoadedModel, *pieces: int | Image, seed: int = 0) -> tuple[list[int], list[ImagePlaceholder]]:
    """Pieces are pictures, and numbers of tokens of text: `stream(m, 3, image(m, 1), 4)`."""
    rng, tokens, media = np.random.default_rng(seed), [], []
    for piece in pieces:
        if isinstance(piece, Image):
            media.append(ImagePlaceholder(len(tokens), piece))
            tokens += [loaded.sight.placeholder_of(piece)] * piece.tokens
        else:
            tokens += rng.integers(5, 100, piece).tolist()
    return tokens, media


def ask(tokens: list[int], media: list[ImagePlaceholder], *, key: int = 1, n: int = 8, **more) -> Request:
    sampling = {name: more.pop(name) for name in list(more) if name in ("temperature", "top_p", "min_tokens")}
    return Request(
        list(tokens), Sampling(max_tokens=n, ignore_eos=True, **sampling), key=key, media=tuple(media), **more
    )


def picture_requests(m: LoadedModel) -> list[Request]:
    """Text, one picture, two in a prompt, one of them seen before, twice the same; greedy and sampled."""
    a, b = image(m, 1), image(m, 2, 3, 4)
    given = [
        stream(m, 3, a, 6, seed=1),
        stream(m, 2, b, 3, a, 9, seed=2),
        stream(m, 12, seed=3),
        stream(m, 1, a, 2, a, 3, seed=4),
    ]
    return [ask(*g, key=31 + i, temperature=float(i % 2)) for i, g in enumerate(given * 2)]


def trajectory(
    loaded: LoadedModel, given: tuple[list[int], list[ImagePlaceholder]], written: list[int], logprobs: list[float]
) -> Trajectory:
    t = Trajectory()
    t.extend(given[0], media=given[1])
    t.extend(written, logprobs=logprobs, versions=[0] * len(written))
    return t


@torch.no_grad()
def own_logprobs(loaded: LoadedModel, rows: list[tuple[list[int], list[ImagePlaceholder]]]) -> list[list[float]]:
    """log p(token t | before) for t >= 1 by transformers' own eager pass, all rows in one
    padded batch, positions its own affair.
    """
    width = max(len(tokens) for tokens, _ in rows)
    ids, mask = (torch.zeros(len(rows), width, dtype=torch.int64) for _ in range(2))
    more: dict[str, list[torch.Tensor]] = {}
    kinds = next((name for name in ("mm_token_type_ids", "token_type_ids") if name in _given(loaded, rows)), None)
    for i, (tokens, media) in enumerate(rows):
        ids[i, : len(tokens)], mask[i, : len(tokens)] = torch.tensor(tokens), 1
        given = vision.as_given(loaded.sight, tokens, media) if media else {}
        if kinds is not None:
            own = given.pop(kinds, torch.zeros(1, len(tokens), dtype=torch.int64))
            more.setdefault(kinds, []).append(torch.nn.functional.pad(own, (0, width - len(tokens))))
        for name, value in given.items():
            more.setdefault(name, []).append(value)
    if loaded.sight.tiles is not None and more:  # rows of tiles, of which as many must be zeros
        most = max(value.shape[1] for value in more["pixel_values"])
        more["pixel_values"] = [
            torch.nn.functional.pad(value, (0,) * 7 + (most - value.shape[1],)) for value in more["pixel_values"]
        ]
    other = copy.deepcopy(loaded.model)
    other.set_attn_implementation("eager")
    joined = {name: torch.cat(values) for name, values in more.items()}
    logits = other(ids, attention_mask=mask, use_cache=False, **joined).logits.double().log_softmax(-1)
    return [
        logits[i, : len(tokens) - 1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
        for i, (tokens, _) in enumerate(rows)
    ]


def _given(loaded: LoadedModel, rows: list[tuple[list[int], list[ImagePlaceholder]]]) -> dict[str, torch.Tensor]:
    """What transformers' pass of the first row with images wants."""
    found = next(((tokens, media) for tokens, media in rows if media), None)
    return {} if found is None else vision.as_given(loaded.sight, *found)


def groups_with_images(m, *, seed: int = 0, frames: int = 1) -> list[Group]:
    """Siblings over one picture, over two pictures under the same tokens, a text group, and a
    picture that comes later. Of several frames: steps of videos in place of the pictures, but for one.
    """
    rng = np.random.default_rng(seed)

    def turn(t, n):
        t.extend(rng.integers(5, 100, n).tolist(), logprobs=(-rng.uniform(2, 6, n)).tolist(), versions=[0] * n)

    def member(*given):
        t = trajectory(m, given[0], [], [])
        turn(t, int(rng.integers(1, 7)))
        for tokens, media in given[1:]:
            t.extend(tokens, media=media)
            turn(t, int(rng.integers(1, 5)))
        t.score = Score(float(rng.normal()))
        return t

    a, b, c = image(m, 1, frames=frames), image(m, 2, frames=frames), image(m, 3, 2, 3)
    shared, other = stream(m, 4, a, 5, seed=1), stream(m, 4, b, 5, seed=1)
    later = [stream(m, 2, picture, 2, seed=4) for picture in (c, a)]
    rows = [
        [member(shared) for _ in range(2)],
        [member(shared), member(other)],
        [member(stream(m, 9, seed=2)) for _ in range(2)],
        [member(stream(m, 3, c, 2, seed=3), behind) for behind in later],
    ]
    return [Group(i, Task(f"t{i}", "x", {}), ts, 0) for i, ts in enumerate(rows)]


def lit_videos(size: int = 24, seed: int = 0):
    """Rows of a data set: five frames of four dark quarters, of which one is light in the last two."""
    rng = np.random.default_rng(seed)
    for number in range(size):
        frames, quarter = rng.integers(0, 60, (5, 64, 64, 3), dtype=np.uint8), number % 4
        y, x = 32 * (quarter // 2), 32 * (quarter % 2)
        frames[3:, y : y + 32, x : x + 32] += 180
        yield {"prompt": "<video>?", "answer": str(quarter + 1), "clip": {"video": list(frames), "fps": 2}}


def gradient(t, algo, batch: TrainBatch, *, budget: int = 10**6, share: bool = True) -> torch.Tensor:
    """Of all trained weights, in micro-batches of `budget` tokens."""
    object.__setattr__(t.settings, "micro_tokens", budget)
    object.__setattr__(t.settings, "share_prompts", share)
    t.weights.zero_grad()
    t._annotate(batch, algo.needs)
    compute_advantages(batch, algo)
    t._accumulate_gradients(batch, algo, StepMetricSums(), proximal_noted=False)
    return torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in t.weights.masters]
    ).double()
