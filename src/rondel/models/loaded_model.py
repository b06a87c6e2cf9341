"""A model as engine and trainer use it: module, head, tokenizer, adapter, vision."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from rondel.core.errors import ModelError
from rondel.core.media import Image, ImageProcessorConfig
from rondel.models import adapter_state, nf4, vision
from rondel.models.attention import use_attention_layout
from rondel.models.fp32_sums import keeps_fp32_stream, round_sums
from rondel.models.head import LMHead, decoder_of
from rondel.models.image_features import ImageFeatures, VisionFeatures
from rondel.models.linear import PackedCopy, equal_blocks, packed_linears
from rondel.models.routing_tape import RoutingTape, use_tape
from rondel.models.step_head import StepHead
from rondel.models.vision_families import FAMILIES

if TYPE_CHECKING:
    from rondel.models.adapter_rows import ServedAdapters
    from rondel.models.block_diffusion.settings import BlockSettings
    from rondel.models.context_parallel import ContextRanks
    from rondel.models.deferred_weights import DeferredWeights
    from rondel.models.pipeline_stage import PipelineStage


@dataclass(slots=True)
class LoadedModel:
    """One module for both sides: the trainer and the built-in engine call it with their own attention layouts."""

    model: Any
    tokenizer: Any
    head: Any  # LMHead, or StepHead of a model that draws points or actions
    name: str
    stop_ids: frozenset[int]
    max_context: int
    cached: int = (
        0  # bytes of keys and values (or latents) of one token in all layers, as the model hands them to its attention
    )
    routers: int = 0  # MoE layers whose choice of experts can be recorded and replayed
    aligned: bool = False  # numerics: bits that do not depend on the batch (models/aligned_numerics.py)
    align: Callable[[Any], Any] | None = None  # a layout as those numerics compute it
    enter: Callable[[Callable[[LMHead], Any]], Any] | None = None  # how a pass begins where the weights lie in shards
    compute: torch.dtype | None = None  # what passes compute in, where the masters are the module's own
    path: str | dict[str, Any] = ""  # where the weights came from, those under an adapter if there is one
    adapter: adapter_state.ModelAdapter | None = (
        None  # what is trained instead of the weights (models/adapter_state.py)
    )
    bank: ServedAdapters | None = None  # adapters that it serves to some requests each (models/adapter_bank.py)
    bare: bool = False  # compute without the adapter: the reference
    sight: ImageProcessorConfig | None = None  # how it looks at pictures; None for a model that reads text alone
    indexers: int = 0  # layers that choose the keys they attend to
    index_width: int = 0  # keys that one of them chooses
    weights: DeferredWeights | None = None  # still in the checkpoint, and on "meta" here
    context: ContextRanks | None = None  # who shares its packed rows
    stage: PipelineStage | None = None  # which of its layers are here, where other ranks have the others
    compressed: bool = False  # attends to compressed entries of windows (models/compressed_attention.py)
    state_bytes: int = 0  # of the recurrent states of one sequence, in all layers; 0: it has no recurrent layer
    blocks: BlockSettings | None = None  # it fills in blocks of masks, and does not write one token after the other

    @property
    def device(self) -> torch.device:
        if self.weights is not None:
            return self.weights.device
        return self.head.weight.device if self.stage is None else self.stage.link.device

    @property
    def dtype(self) -> torch.dtype:
        return self.compute or self.head.weight.dtype

    @property
    def parameter_count(self) -> int:
        """How many weights it has, whatever they lie in."""
        return nf4.count_parameters(self.model)

    @property
    def step_tokens(self) -> int:
        """Tokens that it computes for one step of a trajectory: one, or the patches of a point."""
        return self.head.step_tokens if isinstance(self.head, StepHead) else 1

    @property
    def has_head(self) -> bool:
        """Whether a pass ends in its head, and not in hidden states for the next stage of a pipeline."""
        return self.stage is None or self.stage.ends_in_head

    @property
    def leads_ranks(self) -> bool:
        """Whether other processes compute each of its passes beside this one."""
        return False

    @property
    def vocabulary(self) -> int:
        """How many logits a token has."""
        return len(self.head.weight)

    @property
    def token_count(self) -> int:
        """How many tokens it reads: 0 to this."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Of some rows of what `hidden_states` gave last: [T, D], [C] -> [C, V] in fp32."""
        return self.head.logits(hidden.index_select(0, rows))

    @property
    def decoder(self) -> Any:
        """Its module that ends in hidden states."""
        return decoder_of(self.model)

    @property
    def packed_copies(self) -> list[PackedCopy]:
        """Of its weights, for products: those of its module, and its head's."""
        return [*packed_linears(self.model), *([] if isinstance(self.head, StepHead) else [self.head.stack])]

    @property
    def in_four_bits(self) -> bool:
        """Whether its base lies in 4 bits."""
        return bool(nf4.nf4_layers(self.model))

    def routing_tape(self, routes: torch.Tensor | None = None, *, longest: int | None = None) -> RoutingTape:
        """Records the choices of a pass, or replays `routes`. Where no context is longer than `longest` tokens, an
        indexer may have nothing to choose, and its choice takes no room.
        """
        width = 0 if longest is not None and longest <= self.index_width else self.index_width
        own = None if self.stage is None else self.stage.routers
        return RoutingTape(self.routers, routes, indexers=self.indexers, width=width, own=own)

    def run_with_head(self, work: Callable[[LMHead], Any]) -> Any:
        """One pass through the module, ending in its head."""
        return work(self.head) if self.enter is None else self.enter(work)

    def hidden_states(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        layout: Any,
        tape: RoutingTape | None = None,
        seen: VisionFeatures | None = None,
    ) -> torch.Tensor:
        """Last hidden states of packed tokens: [T], [T] or [4,T] -> [T, D]; of a stage those of its last layer. On
        `tape` routers record their choice, or repeat a recorded one.
        """
        switches: AbstractContextManager[None] = nullcontext()
        if self.adapter is not None:
            switches = adapter_state.adapter_mode(self.adapter, off=self.bare, exact=self.aligned)
        with (
            use_attention_layout(self.align(layout) if self.aligned and self.align else layout),
            nullcontext() if tape is None else use_tape(tape),
            switches,
            equal_blocks(self.dtype) if self.aligned else nullcontext(),
        ):

            def forward() -> torch.Tensor:
                if self.sight is not None:
                    return vision.hidden_states(self.model, tokens, positions, seen)[None]
                out = self.decoder(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
                return out.last_hidden_state

            hidden = forward() if self.stage is None else self.stage.run(forward, len(tokens))
        return hidden[0].to(self.dtype) if self.has_head else hidden[0]  # Mamba's residual stream is fp32

    @property
    def preprocessor_config(self) -> dict[str, Any]:
        """How it looks, as the files that processors read: `preprocessor_config.json`, and one for videos."""
        assert self.sight is not None, f"'{self.name}' reads text alone"
        return vision.preprocessor_config(self.sight)

    def encode_images(self, images: list[Image]) -> ImageFeatures:
        """What it sees in the cells of these pictures. A frozen tower makes no graph."""
        if self.sight is None:
            raise ModelError(
                f"'{self.name}' reads text alone and cannot look at an image: take a vision-language model "
                f"({', '.join(FAMILIES)})"
            )
        with torch.set_grad_enabled(
            torch.is_grad_enabled() and any(p.requires_grad for p in vision.vision_tower(self.model).parameters())
        ):
            return vision.encode_images(self.model, self.sight, images)

    @property
    def fp32_stream(self) -> bool:
        """Whether it computes in 16 bits and keeps its residual stream in fp32."""
        return keeps_fp32_stream(self.model)

    def round_sums(self) -> None:
        """From now on stream and logits are rounded to the dtype of the products (models/fp32_sums.py)."""
        round_sums(self.model)
        self.head.rounded = True

    def copy_trainable(self) -> LoadedModel:
        """The same weights, free to go another way: what is trained is copied, what is frozen
        (the base of an adapter) stays shared.
        """
        frozen = {id(p): p for p in self.model.parameters() if not p.requires_grad}
        model, adapter = copy.deepcopy((self.model, self.adapter), frozen)
        return replace(self, model=model, head=self.head.of_copy(model), adapter=adapter)

    def randomized_adapter(self) -> AbstractContextManager[None]:
        """Inside, a fresh adapter is noise: what is proven of this model is then proven of its adapter, too."""
        return adapter_state.randomized_adapter(self.adapter)
