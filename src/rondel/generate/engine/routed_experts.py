"""Which experts tokens went to, as SGLang's servers tell it: `return_routed_experts` of /generate.

    meta_info["routed_experts"] = base64 of int32 [P + T - 1, depth, K]      P tokens of the prompt, T of the answer

All layers of the decoder are in it, those without experts as zeros; the last token has not been computed.
"""

from __future__ import annotations

import binascii
import re
from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rondel.core.errors import EngineError
from rondel.models.routing_tape import expert_count, router_names

if TYPE_CHECKING:
    from rondel.models.loaded_model import LoadedModel


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """layers   of the decoder that have a router, in the order of the routing tape: L of them
    depth    layers of the decoder
    experts  among how many a router chooses
    """

    layers: tuple[int, ...]
    depth: int
    experts: int

    @classmethod
    def of_model(cls, loaded: LoadedModel) -> RoutedExperts | None:
        """None of a dense model, of one that chooses keys, too, and where layers have several routers or no number."""
        text = loaded.model.config.get_text_config()
        numbers = [re.search(r"\.(\d+)\.", f".{name}.") for name in router_names(loaded.model)]
        layers = tuple(int(found[1]) for found in numbers if found is not None)
        if not layers or loaded.indexers or len(set(layers)) < loaded.routers:
            return None
        return cls(layers, text.num_hidden_layers, expert_count(text))

    def encode(self, routes: Any) -> str:
        """[N, L, K] -> text."""
        rows = np.zeros((len(routes), self.depth, routes.shape[2]), np.int32)
        rows[:, self.layers] = routes
        return b64encode(rows.tobytes()).decode("ascii")

    def decode(self, text: str, tokens: int, where: str) -> np.ndarray:
        """-> uint16 [tokens - 1, L, K]. EngineError where it has another shape, or names no expert."""
        try:
            rows = np.frombuffer(b64decode(text, validate=True), np.int32)
        except (binascii.Error, ValueError) as error:
            raise EngineError(f"{where}: routed_experts is no base64 of int32: {error}") from error
        each, odd = divmod(len(rows), max(1, tokens - 1) * self.depth)
        if odd or not each:
            raise EngineError(
                f"{where}: routed_experts has {len(rows)} numbers, which are not as many for each of {tokens - 1} "
                f"tokens and {self.depth} layers: does it serve another model, or tell a part of them?"
            )
        routes = rows.reshape(-1, self.depth, each)[:, self.layers]
        if len(routes) and not 0 <= routes.min() <= routes.max() < self.experts:
            raise EngineError(
                f"{where}: routed_experts names expert {routes.max() if routes.min() >= 0 else routes.min()}, and a "
                f"layer has {self.experts}"
            )
        return routes.astype(np.uint16)
