"""Activations that are computed again in the backward pass instead of being kept (arXiv:1604.06174).

    mlp      the feed-forward part of a layer: its four widest activations, for a quarter of a forward pass more
    layers   the whole layer: what is kept is its input, for one forward pass more

A layer runs again under the attention layout, the routes and the adapter of its first run, so the gradient is the same.
The engine, and every pass without a gradient, are not touched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from rondel.core.errors import ModelError
from rondel.models.activation_offload import ActivationStore
from rondel.models.adapter_state import ModelAdapter, adapter_mode
from rondel.models.attention import attention_layout, use_attention_layout
from rondel.models.blocks import decoder_blocks
from rondel.models.head import decoder_of
from rondel.models.routing_tape import repeated_tape

# under which families keep the feed-forward part of a layer
FEED_FORWARD = ("mlp", "feed_forward", "block_sparse_moe", "mixer_mlp", "ffn", "moe", "shared_mlp")


def install_recompute(
    model: Any, parts: str, adapter: ModelAdapter | None = None, store: ActivationStore | None = None
) -> None:
    """Let the `parts` "mlp" or "layers" of a model recompute; "none" changes nothing. `store`: what keeps their inputs.

    Raises ModelError where no such part is found.
    """
    if parts == "none":
        return
    chosen = decoder_blocks(model, decoder_of(model))
    if parts == "mlp":
        named = [next((p for name in FEED_FORWARD if (p := getattr(block, name, None))), None) for block in chosen]
        chosen = [part for part in named if isinstance(part, nn.Module)]
    if not chosen:
        instead = 'take "layers"' if parts == "mlp" else 'take "none"'
        raise ModelError(
            f"trainer.memory.recompute = '{parts}': no such part was found in a model of type "
            f"'{model.config.model_type}'; {instead}"
        )
    for module in chosen:
        setattr(module, "runs_twice", adapter is None and store is None)  # noqa: B010
        setattr(module, "forward", functools.partial(_run_twice, module.forward, adapter, store))  # noqa: B010


def _run_twice(
    forward: Callable[..., Any], adapter: ModelAdapter | None, store: ActivationStore | None, *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # an input that is passed by name waits beside the others: torch keeps positional ones alone as saved tensors
    names = [name for name, value in kwargs.items() if isinstance(value, Tensor) and value.requires_grad]
    own, given = [kwargs.pop(name) for name in names], len(args)

    def run(*inputs: Any) -> Any:  # it lives until the backward pass, and must hold none of the inputs itself
        return forward(*inputs[:given], **dict(zip(names, inputs[given:])), **kwargs)

    with nullcontext() if store is None else saved_tensors_hooks(store.pack, store.unpack):
        return checkpoint(
            run,
            *args,
            *own,
            use_reentrant=False,
            preserve_rng_state=False,  # nothing here is drawn: dropout is 0
            context_fn=functools.partial(_contexts, adapter),
        )


def _contexts(adapter: ModelAdapter | None) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Around the first run, and around the second."""
    layout, tape = attention_layout(), repeated_tape()  # a flow has neither
    mode = adapter_mode(adapter, off=adapter.off, exact=adapter.exact) if adapter is not None else nullcontext()

    @contextmanager
    def as_before() -> Iterator[None]:
        with nullcontext() if layout is None else use_attention_layout(layout), tape, mode:
            yield

    return nullcontext(), as_before()
