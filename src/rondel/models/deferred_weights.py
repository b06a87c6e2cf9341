"""A model without its weights, which are read later, one tensor at a time: what several ranks load.

    load_model(path, deferred=True)   module with all its parameters on "meta", tokenizer, head: no weight is read
    weights.read(name, ...)           one tensor of the checkpoint: a rank fills a layer, keeps its shards of it,
                                      and fills the next one
    add_adapter(loaded, ...)          around layers without weights, too: its factors lie whole on every rank

So a rank holds at most its shards and one layer (or embedding and head), whatever the size of the model. Files are
mapped into memory, and ranks of one machine read the same pages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.utils import cached_file

from rondel.core.errors import ModelError
from rondel.models import names
from rondel.system.files import INDEX, SINGLE

FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors calls what needs no scale


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules made inside have parameters without memory; their buffers are real."""
    own = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        own(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = own  # type: ignore[method-assign]


class DeferredWeights:
    """The checkpoint's tensors, as the module has them: joined where a mixture's experts are joined there."""

    def __init__(self, folder: str, model: nn.Module, device: torch.device) -> None:
        """Raises ModelError where the files do not hold every tensor under the name that the family stores it under."""
        self.device = device
        self._pieces = dict(names.checkpoint_pieces(model))
        self._files = stored_files(folder)
        wanted = {piece.name for held in self._pieces.values() for piece in held}
        if missing := sorted(wanted - self._files.keys()):
            raise ModelError(f"{folder} holds no tensor {missing[0]} ({len(missing)} of {len(wanted)} are missing)")

    def keys(self) -> tuple[set[str], set[str]]:
        """Of the files: those that the module takes, and the others."""
        taken = {piece.name for held in self._pieces.values() for piece in held}
        return taken, self._files.keys() - taken

    def read(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """One whole tensor of the module, on its device; what has an adapter now has its name from before."""
        pieces = self._pieces[names.base_name(name)]
        if len(pieces) == 1 and pieces[0].all:
            return self._stored(pieces[0].name, shape).to(self.device, dtype, copy=True).view(shape)
        whole = torch.empty(shape, dtype=dtype, device=self.device)
        for piece in pieces:
            own = piece.view(whole)
            own.copy_(self._stored(piece.name, own.shape))
        return whole

    def _stored(self, name: str, shape: torch.Size) -> Tensor:
        with safe_open(self._files[name], "pt") as file:
            tensor: Tensor = file.get_tensor(name)
        if tensor.shape != shape:
            raise ModelError(
                f"{self._files[name]} holds {name} as {list(tensor.shape)}, and the model's config makes it "
                f"{list(shape)}: one of the two is of another model"
            )
        names.refuse_weights_not_finite(self._files[name], [(name, tensor)])
        return tensor

    def fill_buffers(self, model: nn.Module) -> None:
        """Persistent buffers, in place."""
        for name, buffer in model.named_buffers():
            if name in self._pieces:
                buffer.copy_(self.read(name, buffer.shape, buffer.dtype))


@contextmanager
def present_parameters(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, parameters on "meta" have a device, where one number stands for all: what is made beside a layer is made
    where that layer will be.
    """
    held = [(m, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None and p.is_meta]
    for module, name, p in held:
        one = torch.zeros((), dtype=p.dtype, device=device).expand(p.shape)
        module._parameters[name] = nn.Parameter(one, requires_grad=False)
    try:
        yield
    finally:
        for module, name, p in held:
            module._parameters[name] = p


def fill_parameters(
    model: nn.Module,
    part: nn.Module,
    read: Callable[[str, nn.Parameter], Tensor],
    *,
    only: Container[str] | None = None,
) -> None:
    """Give the parameters of `part` that lie on "meta", or `only` those of these names, what `read` makes of their
    name in `model`; tied ones stay tied.
    """
    named = {id(p): n for n, p in model.named_parameters()}
    made: dict[int, nn.Parameter] = {}
    for module in part.modules():
        for own, parameter in module._parameters.items():
            if parameter is None or parameter.device.type != "meta":
                continue
            if only is not None and named[id(parameter)] not in only:
                continue
            if id(parameter) not in made:
                with torch.no_grad():
                    tensor = read(named[id(parameter)], parameter)
                made[id(parameter)] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
            module._parameters[own] = made[id(parameter)]


def keep_in_full_precision(model: Any, dtype: torch.dtype) -> None:
    """Parameters that a family keeps in fp32 whatever it computes in, as `from_pretrained` does."""
    wanted = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        wanted |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, parameter in model.named_parameters():
        if dtype != torch.float32 and any(part in name.split(".") or part in name for part in wanted):
            parameter.data = parameter.data.float()


def refuse_cast_codes(folder: str, config: Any) -> None:
    """ModelError where a weight is stored in whole numbers or in 8 bits and the config does not say how they are meant:
    they would be cast, and served without their scales.
    """
    if hasattr(config, "quantization_config"):
        return
    for path in sorted(set(stored_files(folder).values())):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # no mapping
                kind = file.get_slice(name).get_dtype() if name.endswith("weight") else FLOATS[0]
                if kind not in FLOATS:
                    raise ModelError(
                        f"{path} holds {name} in {kind}, and config.json has no quantization_config that says how its "
                        "numbers are meant: fetch config.json again, or take the model in 16 bits"
                    )


def stored_files(folder: str) -> dict[str, str]:
    """Of each stored tensor, its file."""

    def find(file: str) -> str | None:
        if Path(folder).is_dir():
            found = Path(folder) / file
            return str(found) if found.is_file() else None
        return cached_file(folder, file, _raise_exceptions_for_missing_entries=False)

    if (single := find(SINGLE)) is not None:  # which transformers reads, too, where both are there
        with safe_open(single, "pt") as file:
            return dict.fromkeys(file.keys(), single)
    if (index := find(INDEX)) is None:
        return {}
    placed = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
    files = {file: find(file) for file in set(placed.values())}
    return {name: file for name, of in placed.items() if (file := files[of]) is not None}
