"""The serving pass as one compiled graph: what stands between attention and linear layers becomes a few fused loops.

A step of few tokens spends much of its time between operations, of which a model of 30
layers has two thousand. Here the pass is traced once for any number of tokens;
attention and linear layers stay what they are,
each one call into the graph's outside, and torch's inductor fuses the rest:

    norm | linear | rotate q, k | attention | linear | add, norm | linear | activation | linear | add ...
    ^ compiled      ^ compiled                         ^ compiled          ^ compiled           ^ compiled

It rounds where the model rounds (most results have the same bits, the others differ in the
last bit of an exp or a cos) and reads the module's own parameters, so new weights need
no new graph. Only the engine uses it: the
trainer's passes must agree with each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from rondel.core.errors import ConfigError
from rondel.models import linear
from rondel.models.attention import AttentionLayout, LatentProjection, use_attention_layout
from rondel.models.dense_attention import ScoreRule
from rondel.models.packed_layout import PackedLayout, PackedSegment
from rondel.models.traced_attention import outside_graph

if TYPE_CHECKING:
    from rondel.models.loaded_model import LoadedModel

REMEDY = "leave engine.compile = false"
# mean logprob difference to the model as it is
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.05, torch.float16: 0.01}


class CompiledModel:
    """`CompiledModel(loaded).hidden` is `loaded.hidden` without gradients and without a tape.
    Takes seconds; ConfigError where it cannot be.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        refuse_compilation(
            loaded,
            "compiled",
            {f"it runs on {loaded.device}, and only the CPU's serving pass is compiled": loaded.device.type != "cpu"},
        )
        self._loaded = loaded
        self._run = _compile(loaded)
        with loaded.randomized_adapter():
            self._check_outputs()

    @torch.no_grad()
    def hidden_states(self, tokens: Tensor, positions: Tensor, layout: AttentionLayout) -> Tensor:
        """[T], [T] -> [T, D]. The graph is for two tokens and more: a single one goes twice."""
        alone = len(tokens) == 1
        if alone:
            tokens, positions, layout = tokens.repeat(2), positions.repeat(2), _Twice(layout)
        with use_attention_layout(layout):
            out = self._run(tokens, positions)
        return out[:1] if alone else out

    def forget_graphs(self) -> None:
        """Nothing was recorded: its graph has no addresses."""

    def _check_outputs(self) -> None:
        """Sizes that it was not traced with must give what the model gives."""
        loaded = self._loaded
        for n in (1, 2, 7, 40):
            tokens = torch.arange(3, 3 + 5 * n, 5) % len(loaded.head.weight)
            given = tokens, torch.arange(n), PackedLayout([PackedSegment(0, n)])
            ours = loaded.head.logits(self.hidden_states(*given)).log_softmax(-1)
            with torch.no_grad():
                gap = float((ours - loaded.head.logits(loaded.hidden_states(*given)).log_softmax(-1)).abs().mean())
            if not gap <= TOLERANCE[loaded.dtype]:
                raise ConfigError(
                    f"engine.compile: the compiled '{loaded.name}' differs by {gap:.3g} in logprob (limit "
                    f"{TOLERANCE[loaded.dtype]}); {REMEDY}"
                )


def refuse_compilation(loaded: LoadedModel, how: str, reasons: dict[str, bool]) -> None:
    """`reasons` of one way of making steps faster, beside those that all of them have."""
    shared = {
        "it is a mixture of experts, whose experts get other tokens at every step": loaded.routers > 0,
        "it looks at pictures, which stand outside of the graph and give positions three rows": loaded.sight
        is not None,
        "its recurrent layers ask for states, which the traced graph does not": loaded.state_bytes > 0,
        "its indexers choose keys by scores that the traced graph does not have": loaded.indexers > 0,
        "its attention reads compressed entries, which the traced graph does not have": loaded.compressed,
        "its numerics are aligned, an order of sums that the faster step does not promise": loaded.aligned,
    }
    for why, holds in (reasons | shared).items():
        if holds:
            raise ConfigError(f"engine.compile: '{loaded.name}' cannot be {how}: {why}; {REMEDY}")


def _compile(loaded: LoadedModel) -> Any:
    from torch._inductor import standalone_compile  # slow to import

    def forward_hidden(tokens: Tensor, positions: Tensor) -> Tensor:
        out = loaded.decoder(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
        return out.last_hidden_state[0]

    try:
        with torch.no_grad(), outside_graph(), linear.outside_graph():
            graph = make_fx(forward_hidden, tracing_mode="symbolic", _allow_non_fake_inputs=True)(
                torch.arange(11), torch.arange(11)
            )
            held = _lift_tensors(graph)
            inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
            options = {"config_patches": {"emulate_precision_casts": True}}
            run = standalone_compile(graph, inputs, dynamic_shapes="from_graph", options=options)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"engine.compile: '{loaded.name}' ({loaded.model.config.model_type}) cannot be compiled here: {reason}. It "
            f"needs a C++ compiler "
            f"(apt install g++, xcode-select --install) and a model whose pass does not depend on its numbers; or "
            f"{REMEDY}"
        ) from error

    def call(tokens: Tensor, positions: Tensor) -> Tensor:
        out = run(tokens, positions, *held)
        return out[0] if isinstance(out, tuple | list) else out

    return call


def _lift_tensors(graph: GraphModule) -> list[Tensor]:
    """Parameters and buffers become inputs, in the order returned: what a graph holds by itself it keeps a copy of."""
    nodes = list(graph.graph.nodes)
    last = [node for node in nodes if node.op == "placeholder"][-1]
    fakes, known = last.meta["val"].fake_mode, {}
    held: list[Tensor] = []
    for node in (node for node in nodes if node.op == "get_attr"):
        if node.target not in known:
            tensor = getattr(graph, node.target)
            with graph.graph.inserting_after(last):
                last = known[node.target] = graph.graph.placeholder(f"held_{len(held)}")
            last.meta["val"] = fakes.from_tensor(tensor, static_shapes=True)
            held.append(tensor)
        node.replace_all_uses_with(known[node.target])
        graph.graph.erase_node(node)
    graph.recompile()
    return held


class _Twice:
    """A layout of one token for a pass of two: the second is the first again, and
    only the first is written and attends.
    """

    def __init__(self, layout: AttentionLayout) -> None:
        self.layout = layout

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        return self.layout.attend(layer, q[:1], k[:1], v[:1], rule).repeat(2, 1, 1)

    def attend_latents(
        self, layer: int, q: Tensor, c: Tensor, r: Tensor, up: LatentProjection, rule: ScoreRule
    ) -> Tensor:
        return self.layout.attend_latents(layer, q[:1], c[:1], r[:1], up, rule).repeat(2, 1, 1)
