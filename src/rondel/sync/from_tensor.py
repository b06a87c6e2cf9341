"""Hand over the tensors themselves: in one process nothing is copied when trainer and engine share the module."""

from __future__ import annotations

from rondel.words.protocols import Engine, Trainer
from rondel.words.types import Route


class FromTensor:
    """The route carries {HF name: tensor}. An engine whose tensors are the trainer's own finds 0 bytes to copy."""

    def route(self, trainer: Trainer, engines: list[Engine]) -> Route:
        return Route("tensor", {})
