"""What a loaded model must prove: packed as here, its layers give the logprobs of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rondel.core.errors import LawError, ModelError
from rondel.core.media import ImagePlaceholder, ImageProcessorConfig, position_rows
from rondel.models import vision
from rondel.models.attention import NAME, LatentProjection, use_attention_layout
from rondel.models.compressed_entries import CompressedEntries
from rondel.models.dense_attention import ScoreRule
from rondel.models.fp32_sums import StreamProbe, keep_fp32_stream, keeps_fp32_stream
from rondel.models.head import LMHead, decoder_of
from rondel.models.image_features import VisionFeatures
from rondel.models.key_choice import IndexedTokens
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.models.recurrent.state_count import StateCount
from rondel.models.routing_tape import RoutingTape, use_tape

# mean logprob difference to the model's own attention
PARITY = {torch.float32: 1e-4, torch.bfloat16: 0.2, torch.float16: 0.05}


def check_loaded(
    model: Any, name: str, sight: ImageProcessorConfig | None, tape: RoutingTape | None, recurrent: list[int]
) -> tuple[int, int]:
    """`check_attention`, once more with a rounded residual stream where the layers of this family do not take one in
    fp32.
    """
    try:
        return check_attention(model, name, sight, None if tape is None else tape.repeated(), recurrent)
    except ModelError:
        if not keeps_fp32_stream(model):
            raise
    keep_fp32_stream(model, False)
    model.set_attn_implementation("eager")
    return check_attention(model, name, sight, tape, recurrent)


def packed_attention(sight: ImageProcessorConfig | None) -> str | dict[str, str]:
    """Whose attention each part of a model has, as transformers takes it: a tower keeps its own."""
    return NAME if sight is None else {"": NAME, "text_config": NAME, "vision_config": "sdpa"}


def check_attention(
    model: Any, name: str, sight: ImageProcessorConfig | None, tape: RoutingTape | None, recurrent: list[int]
) -> tuple[int, int]:
    """Switch to the packed attention and compare it with the model's own on a probe of two
    sequences; one that looks sees a picture, too. On `tape` routers must leave a record. `recurrent`: layers with a
    mixer that keeps a state.

    -> bytes of keys and values of one token in all layers, bytes of one sequence's recurrent states.
    """
    vocab = model.config.get_text_config().vocab_size
    probe = [[(7 * i + 3) % vocab for i in range(9)], [(5 * i + 1) % vocab for i in range(6)]]
    media: list[ImagePlaceholder] = []
    if sight is not None:
        probe = [[0 if t in sight.placeholders else t for t in row] for row in probe]
        media = [ImagePlaceholder(3, vision.checkered_image(sight))]
        probe[0][3:3] = [sight.placeholder] * media[0].image.tokens
    device = next(model.parameters()).device
    tolerance = PARITY[model.dtype]
    with torch.inference_mode():
        how = [vision.as_given(sight, probe[0], media, device) if sight is not None else {}, {}]
        rows = [torch.tensor([row], device=device) for row in probe]
        own = [model(row, use_cache=False, **more).logits[0].float().log_softmax(-1) for row, more in zip(rows, how)]
        try:
            model.set_attn_implementation(packed_attention(sight))
            tokens = torch.cat(rows, 1)[0]
            places = [position_rows(len(probe[0]), media), position_rows(len(probe[1]), [])]
            where = torch.from_numpy(np.concatenate(places, 1)).to(device)
            layout = CountingLayout(
                [PackedSegment(0, len(probe[0])), PackedSegment(len(probe[0]), len(probe[1]))], device
            )
            with use_attention_layout(layout), use_tape(tape), StreamProbe(model, decoder_of(model)) as stream:
                if sight is None:
                    hidden = decoder_of(model)(
                        input_ids=tokens[None], position_ids=where[:1], use_cache=False
                    ).last_hidden_state[0]
                else:
                    seen = VisionFeatures(
                        torch.arange(3, media[0].end, device=device),
                        vision.encode_images(model, sight, [media[0].image]),
                    )
                    hidden = vision.hidden_states(model, tokens, where, seen)
            packed = LMHead.from_model(model).logits(hidden.to(model.dtype)).log_softmax(-1)
        except ModelError:
            raise
        except LawError as error:
            raise ModelError(
                f"'{name}' ({model.config.model_type}): its routing cannot be replayed: {error}"
            ) from error
        except Exception as error:
            raise ModelError(
                f"'{name}' ({model.config.model_type}) does not go through transformers' attention interface as packed "
                f"tokens: {type(error).__name__}: {error}"
            ) from error
    _refuse_silent_layers(model.config, name, layout, recurrent)
    if keeps_fp32_stream(model) and not stream.is_fp32:
        raise ModelError(f"'{name}' ({model.config.model_type}): its layers round a residual stream that is fp32")
    if not all(bool(logprobs.isfinite().all()) for logprobs in own):
        raise ModelError(
            f"'{name}' ({model.config.model_type}): its logits are not finite in {str(model.dtype).removeprefix('torch.')}, "
            "though its weights are: something overflows. Load it in bfloat16 or float32, or take another checkpoint"
        )
    gap = float((packed - torch.cat(own)).abs().mean())
    if not gap <= tolerance:
        raise ModelError(
            f"'{name}' ({model.config.model_type}): packed attention differs from the model's own by {gap:.3g} in "
            f"logprob (limit {tolerance}); some part of its attention or head is not carried by the built-in path"
        )
    return layout.cached, layout.counted.bytes


def _refuse_silent_layers(config: Any, name: str, layout: CountingLayout, recurrent: list[int]) -> None:
    """Each layer must ask once for its keys and values, and each recurrent mixer for its states."""
    text, asked = config.get_text_config(), sorted(layout.layers)
    every = list(range(text.num_hidden_layers))
    if recurrent:  # a layer may be a feed-forward alone
        every = [
            i for i in every if (getattr(text, "layer_types", None) or ["?"] * len(every))[i] not in ("mlp", "moe")
        ]
    if sorted({*asked, *recurrent}) != every or len(set(asked)) != len(asked):
        raise ModelError(
            f"'{name}' ({config.model_type}): its {len(every)} layers asked for attention as {asked}; each must ask "
            f"once, for the cache keeps one set of keys and values a layer"
        )
    if sorted(layout.counted.layers) != sorted(recurrent):
        raise ModelError(
            f"'{name}' ({config.model_type}): its recurrent layers {sorted(recurrent)} asked for states as "
            f"{sorted(layout.counted.layers)}; each must ask once, for a sequence keeps one state a layer"
        )


class CountingLayout(PackedLayout):
    """Notes which layers ask: a gap between logprobs of flat random weights would not show one
    that goes its own way.
    """

    def __init__(self, segments: list[PackedSegment], device: torch.device) -> None:
        super().__init__(segments, device)
        self.layers: list[int] = []
        self.cached = (
            0  # bytes of one token's keys and values or latents, and of indexers' keys, in the layers that have asked
        )
        self.states = self.counted = StateCount(segments, device)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: ScoreRule) -> torch.Tensor:
        self.layers.append(layer)
        self.cached += (k.nbytes + v.nbytes) // len(k)
        return super().attend(layer, q, k, v, rule)

    def attend_latents(
        self, layer: int, q: torch.Tensor, c: torch.Tensor, r: torch.Tensor, up: LatentProjection, rule: ScoreRule
    ) -> torch.Tensor:
        self.layers.append(layer)
        self.cached += (c.nbytes + r.nbytes) // len(c)
        k, v = up.expand(c, r)
        return super().attend(layer, q, k, v, rule)

    def attend_compressed(
        self, layer: int, q: torch.Tensor, kv: torch.Tensor, entries: CompressedEntries | None, rule: ScoreRule
    ) -> torch.Tensor:
        self.layers.append(layer)
        self.cached += (kv.nbytes + (0 if entries is None else entries.rows.nbytes)) // len(kv)
        return super().attend_compressed(layer, q, kv, entries, rule)

    def choose_keys(self, layer: int, tokens: IndexedTokens) -> torch.Tensor:
        self.cached += tokens.k.nbytes // len(tokens.k)
        return super().choose_keys(layer, tokens)
