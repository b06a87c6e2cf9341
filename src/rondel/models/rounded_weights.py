"""Which weights hold what a number format decodes to, how each is rounded again, and their numbers before that:
what loading and optimizers tell each other (models/weight_formats.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary


class Rounding(Protocol):
    """The part of a `rondel.formats.NumberFormat` that rounds."""

    def decode(self, parts: dict[str, Tensor], dtype: torch.dtype) -> Tensor: ...

    def encode(self, weight: Tensor) -> dict[str, Tensor]: ...

    @property
    def block(self) -> tuple[int, int]: ...

    @property
    def scales_tensor(self) -> bool: ...


@dataclass(frozen=True)
class WeightFormat:
    """How one parameter is rounded: [..., O, I], or `transposed` [..., I, O]."""

    form: Rounding
    transposed: bool = False

    def encode(self, weight: Tensor) -> dict[str, Tensor]:
        """Codes and scales of a weight in the parameter's own layout."""
        return self.form.encode(weight.mT.contiguous() if self.transposed else weight)

    def decode(self, parts: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The reverse."""
        whole = self.form.decode(parts, dtype)
        return whole.mT if self.transposed else whole

    def fake(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """What the format decodes `weight` to, in the parameter's own layout."""
        return self.decode(self.encode(weight), dtype)


_formats: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> WeightFormat
_whole: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> its numbers before they were rounded


def weight_format(parameter: Tensor) -> WeightFormat | None:
    """Of a parameter that `apply_format` rounded."""
    return _formats.get(parameter)


def take_whole(parameter: Tensor) -> Tensor:
    """The numbers from which a parameter was rounded, once; later its own."""
    return _whole.pop(parameter, parameter)


@torch.no_grad()
def round_weight(parameter: nn.Parameter, form: WeightFormat, *, done: bool = False) -> None:
    """Round a parameter in place; its whole numbers are kept until `take_whole` asks. `done`: it is rounded already."""
    _formats[parameter] = form
    if done:
        return
    _whole[parameter] = parameter.detach().clone()
    parameter.copy_(form.fake(parameter, parameter.dtype))


def rounded_parameters(model: nn.Module) -> dict[str, tuple[WeightFormat, Tensor]]:
    """How each is rounded, and from what, by name: for who puts others in their place (`replace_rounded`)."""
    return {name: (_formats[p], take_whole(p)) for name, p in model.named_parameters() if p in _formats}


def replace_rounded(model: nn.Module, rounded: dict[str, tuple[WeightFormat, Tensor]]) -> None:
    """The same of the parameters that are there now, as those of several ranks;
    their whole numbers are whole tensors."""
    for name, parameter in model.named_parameters():
        if name in rounded:
            _formats[parameter], _whole[parameter] = rounded[name]


def forget_whole(model: nn.Module) -> None:
    """Where nothing is trained."""
    for parameter in model.parameters():
        _whole.pop(parameter, None)
