"""Weights in a number format on their way to an engine: codes and scales travel in the place of numbers.

    trainer   W ── encode ──> W's parts ── any transport, a digest each ──> decode ──> W as the engine computes with it
              q_proj.weight ──> q_proj.weight_packed, q_proj.weight_scale, q_proj.weight_shape         (int4, say)

What the engine holds is decode(encode(W)), bit for bit: W the master where the trainer computes with rounded weights,
too, and else what the trainer computes with. Parts have the names of the module, whatever the others travel under.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rondel.models import names
from rondel.models.encoded_linear import encoded_layers
from rondel.models.rounded_weights import WeightFormat


def part_name(parameter: str, part: str) -> str:
    """ "q_proj.weight", "weight_scale" -> "q_proj.weight_scale"; of joined experts "gate_up_proj.weight_scale"."""
    owner = parameter.removesuffix("weight") if parameter.endswith(".weight") else f"{parameter}."
    return owner + part


@dataclass(frozen=True)
class EncodedWeights:
    """forms    how each parameter is encoded that travels so, by name"""

    forms: Mapping[str, WeightFormat]

    def publish(
        self,
        model: nn.Module,
        tensors: Iterable[tuple[str, Tensor]],
        *,
        checkpoint: bool,
    ) -> Iterator[tuple[str, Tensor]]:
        """Parts of what travels encoded, the others as they are, under the checkpoint's names or the module's."""
        for name, tensor in tensors:
            if (form := self.forms.get(name)) is not None:
                for part, encoded in form.encode(tensor).items():
                    yield part_name(name, part), encoded
            elif checkpoint:
                yield from names.checkpoint_views(model, name, tensor)
            else:
                yield name, tensor
        if checkpoint:
            for name, buffer in names.persistent_buffers(model):
                yield from names.checkpoint_views(model, name, buffer)

    def open_arrival(
        self,
        model: nn.Module,
        asked: Collection[str],
        *,
        keep: bool,
        held: Mapping[str, Tensor],
        shapes: Mapping[str, names.TensorShape],
    ) -> EncodedArrival:
        """The engine's side of an update that announces the names `asked`. `shapes`: of whole parameters, where a rank
        holds a part of some.
        """
        return EncodedArrival(model, self.forms, asked, keep=keep, held=held, shapes=shapes)


class EncodedArrival:
    """The engine's side of one update: collects parts, and decodes a weight when it has all of its own.

    asked   the names that the update announces
    keep    parts are kept beside what they decode to, for transports that send what changed
    held    parts of the version that serves, where they are kept
    """

    def __init__(
        self,
        model: nn.Module,
        forms: Mapping[str, WeightFormat],
        asked: Collection[str],
        *,
        keep: bool,
        held: Mapping[str, Tensor],
        shapes: Mapping[str, names.TensorShape],
    ) -> None:
        self.model, self.forms, self.keep = model, forms, keep
        self.shapes: dict[str, names.TensorShape] = {}
        self.kept: dict[str, Tensor] = {}
        self.digests: dict[str, str] = {}  # of what was decoded, by the parameter
        self._held = held
        self._owner: dict[str, tuple[str, str]] = {}
        self._parts: dict[str, dict[str, Tensor]] = {}
        self._layers = encoded_layers(model)  # whose parts are kept as they come
        self._ready: dict[str, dict[str, Tensor]] = {}  # what they take at the commit
        self._whole = {name: shapes[name][0] if name in shapes else self._own_shape(name) for name in self.forms}
        for name, form in self.forms.items():
            for part, shape in part_shapes(form, self._whole[name]).items():
                full = part_name(name, part)
                self.shapes[full], self._owner[full] = shape, (name, part)
        # what decoded weights are written to
        self.targets = {n: model.get_parameter(n).detach() for n in self.forms if n not in self._layers}
        plain = {name for name, _ in names.named_weights(model) if name not in self.forms}
        self.under_module = plain >= {name for name in asked if name not in self.shapes}

    def _own_shape(self, name: str) -> tuple[int, ...]:
        if (layer := self._layers.get(name)) is not None:
            return layer.out_features, layer.in_features
        return tuple(self.model.get_parameter(name).shape)

    def __contains__(self, name: str) -> bool:
        return name in self._owner

    def plain_slices(self) -> dict[str, tuple[str, names.TensorSlice]]:
        """`names.tensor_slices` of what does not travel encoded."""
        if self.under_module:
            return {}
        pieces = names.checkpoint_pieces(self.model)
        return {piece.name: (of, piece) for of, held in pieces.items() if of not in self.forms for piece in held}

    def plain_tensors(self) -> dict[str, Tensor]:
        """`names.updatable_tensors` of the same."""
        if self.under_module:
            return {name: tensor for name, tensor in names.named_weights(self.model) if name not in self.forms}
        tensors = [*names.named_weights(self.model), *names.persistent_buffers(self.model)]
        return {
            piece: view
            for name, tensor in tensors
            if name not in self.forms
            for piece, view in names.checkpoint_views(self.model, name, tensor)
        }

    def plain_shapes(self, whole: Mapping[str, names.TensorShape]) -> dict[str, names.TensorShape]:
        """Of these shapes, by the module's names or the checkpoint's, those of what does not travel encoded."""
        encoded = set(self.forms)
        if not self.under_module:
            encoded = {piece.name for of in self.forms for piece in names.checkpoint_pieces(self.model)[of]}
        return {name: shape for name, shape in whole.items() if name not in encoded}

    def base_tensors(self) -> dict[str, Tensor]:
        """Parts of the version that serves, for a transport that changes them; before the first update placeholders."""
        if not self.keep:
            return {}
        own = {part_name(of, p): value for of, layer in self._layers.items() for p, value in layer.parts.items()}
        missing = {name: shape for name, shape in self.shapes.items() if name not in self._held and name not in own}
        empty = {n: torch.empty(s, dtype=getattr(torch, d), device="meta") for n, (s, d) in missing.items()}
        return {**self._held, **own, **empty}

    def add_part(self, name: str, tensor: Tensor, *, beside: bool) -> tuple[str, Tensor] | None:
        """The next part. -> the parameter's name and its numbers, in its own layout, once all of its parts are here and
        it is not kept encoded. `beside`: what is goes on serving until the commit.
        """
        of, part = self._owner[name]
        form, own = self.forms[of], self._parts.setdefault(of, {})
        last = len(own) + 1 == len(part_shapes(form, self._whole[of]))
        own[part] = tensor if last or beside else tensor.clone()  # else its transport may write over it
        if not last:
            return None
        parts = self._parts.pop(of)
        if (layer := self._layers.get(of)) is not None:
            device = next(iter(layer.parts.values())).device
            if beside and device == tensor.device:
                self._ready[of] = parts
            else:
                self._ready[of] = {part: value.to(device, copy=True) for part, value in parts.items()}
            if not beside:
                self.swap_in()
            return None
        like = self.model.get_parameter(of)
        if self.keep:
            self.kept |= {part_name(of, part): value.cpu().clone() for part, value in parts.items()}
        decoded = form.decode({part: value.to(like.device) for part, value in parts.items()}, like.dtype).contiguous()
        self.digests[of] = names.tensor_digest(decoded)
        return of, decoded

    def swap_in(self) -> None:
        """Layers that keep their weights encoded take what has come."""
        for of, parts in self._ready.items():
            self._layers[of].set_parts(parts)
        self._ready = {}

    def wrong_weights(self, sent: Mapping[str, str]) -> list[str]:
        """Names of parameters that are not what was decoded, and of parts that are not what was sent."""
        kept = {part_name(of, p): value for of, layer in self._layers.items() for p, value in layer.parts.items()}
        wrong = [n for n, digest in self.digests.items() if names.tensor_digest(self.model.get_parameter(n)) != digest]
        return wrong + [name for name, part in kept.items() if names.tensor_digest(part) != sent[name]]


@functools.lru_cache(maxsize=4096)
def part_shapes(form: WeightFormat, shape: tuple[int, ...]) -> dict[str, names.TensorShape]:
    """Of a parameter [..., O, I] of this shape, (shape, dtype) of each of its parts."""
    *lead, rows, columns = shape
    parts = form.encode(torch.zeros(*(1 for _ in lead), rows, columns))

    def shape_of_part(part: Tensor) -> names.TensorShape:
        found, dtype = names.shape_of(part)
        return ((*lead, *found[len(lead) :]) if part.ndim == len(shape) else found), dtype

    return {name: shape_of_part(part) for name, part in parts.items()}
