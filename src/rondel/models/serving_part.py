"""One rank's part of a model that an engine serves from several processes.

    every rank, at the same time:  load ──> cut_for_serving ──> check_part        the first one has loaded all of it,
    and
                                                                                  compares its logprobs with those of
                                                                                  the parts
Rows between the parts of a layer are whole on every rank (no sequence parallel): a decode step has few of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from rondel.core.errors import ConfigError, ModelError
from rondel.models import names
from rondel.models.collectives import RankGroup, gather_columns
from rondel.models.deferred_weights import fill_parameters
from rondel.models.expert_parallel import cut_experts, expert_parameters
from rondel.models.load_check import PARITY, CountingLayout
from rondel.models.loaded_model import LoadedModel
from rondel.models.packed_layout import PackedSegment
from rondel.models.shard_cut import even_runs
from rondel.models.tensor_cuts import TensorCuts
from rondel.models.tensor_parallel import cut_model

INSTEAD = "tp = 1 for this engine, or an engine of another kind"
SEVERAL = "dp of attention shares experts; use several engines instead, place.engines = { count = 2 }"
TensorShapes = dict[str, tuple[tuple[int, ...], str]]


@dataclass(slots=True)
class ServingPart:
    """A model of which this rank holds its part, and what was known of the whole.

    module      (shape, dtype) of every whole tensor, by the module's names
    checkpoint  the same by the checkpoint's names; empty where its checkpoints have another form
    vocabulary  rows of the whole head          token_count  rows of the whole embedding
    """

    loaded: LoadedModel
    cuts: TensorCuts
    module: TensorShapes
    checkpoint: TensorShapes
    vocabulary: int
    token_count: int

    def join_logits(self, z: Tensor) -> Tensor | None:
        """Logits [C, own] of this rank -> [C, V] on the first one."""
        ranks = self.cuts.ranks
        if self.loaded.head.part is None:
            return z
        return gather_columns(z, even_runs(self.vocabulary, ranks.size), ranks)


def probe_tokens(loaded: LoadedModel) -> list[int]:
    return [(7 * i + 3) % loaded.model.config.get_text_config().vocab_size for i in range(11)]


@torch.inference_mode()
def probe_logprobs(loaded: LoadedModel) -> Tensor:
    """[11, V] of a whole model."""
    hidden, _ = _probe_hidden(loaded)
    return loaded.head.logits(hidden).log_softmax(-1)


def cut_for_serving(
    loaded: LoadedModel,
    ranks: RankGroup,
    device: str,
    *,
    whole: bool = False,
    experts_apart: bool = False,
) -> ServingPart:
    """Keep this rank's part of a model that lies whole on the host or is still in its checkpoint. -> the part, on
    `device`.

    whole          every rank keeps all of it: they share passes, and not matrices
    experts_apart  experts of a mixture are not cut: each lies whole on one rank. With `whole` the ranks have rows of
                   their own, which travel to them
    """
    refuse_part(loaded, ranks.size, whole=whole, experts_apart=experts_apart)
    model = loaded.model
    module, checkpoint = _shapes_of(names.named_weights(model)), _checkpoint_shapes(model)
    vocabulary, token_count = loaded.vocabulary, loaded.token_count
    if whole:
        cuts = TensorCuts(ranks, False)
    else:
        apart = expert_parameters(model) if experts_apart else []
        cuts = cut_model(model, ranks, sequence=False, instead=INSTEAD, apart=apart)
    if experts_apart:
        own = cut_experts(model, ranks, exchange=whole, instead=SEVERAL if whole else "leave ep out")
        cuts.cuts, cuts.shapes = cuts.cuts | own.cuts, cuts.shapes | own.shapes
    if (weights := loaded.weights) is not None:

        def read(name: str, like: nn.Parameter) -> Tensor:
            mine = cuts.split(name, weights.read(name, cuts.shapes.get(name, like.shape), like.dtype))
            return mine.clone() if name in cuts.cuts else mine

        fill_parameters(model, model, read)
    model.to(device)  # still with gradients: packed copies of frozen weights are never made again (models/linear.py)
    head = replace(loaded.head.of_copy(model), part=cuts.vocabulary)
    return ServingPart(replace(loaded, head=head, weights=None), cuts, module, checkpoint, vocabulary, token_count)


@torch.inference_mode()
def check_part(part: ServingPart, expected: Tensor | None) -> None:
    """Cut over the ranks, a model must give the logprobs that it gave whole. Counts what one token takes in this
    rank's cache.

    expected  [11, V] of `probe_logprobs`, on the first rank
    """
    loaded, ranks = part.loaded, part.cuts.ranks
    who = f"'{loaded.name}' ({loaded.model.config.model_type}): cut over {ranks.size} processes of an engine,"
    remedy = f"some part of it cannot be cut that way. Use {INSTEAD}"
    try:
        hidden, layout = _probe_hidden(loaded)
        logits = part.join_logits(loaded.head.logits(hidden))
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        if "timed out" in (said := str(error).lower()) or "connection" in said:
            raise
        raise ModelError(f"{who} it does not run ({type(error).__name__}: {error}): {remedy}") from error
    loaded.cached, loaded.state_bytes = layout.cached, layout.counted.bytes
    if expected is None or logits is None:
        return
    gap = float((logits.log_softmax(-1) - expected.to(logits.device)).abs().mean())
    if not gap <= PARITY[loaded.dtype]:
        raise ModelError(
            f"{who} its logprobs differ by {gap:.3g} from those of the whole model (limit {PARITY[loaded.dtype]}): "
            f"{remedy}"
        )


def _probe_hidden(loaded: LoadedModel) -> tuple[Tensor, CountingLayout]:
    tokens = torch.tensor(probe_tokens(loaded), device=loaded.device)
    layout = CountingLayout([PackedSegment(0, len(tokens))], loaded.device)
    where = torch.arange(len(tokens), device=loaded.device)
    return loaded.hidden_states(tokens, where, layout), layout


def _shapes_of(tensors: Iterable[tuple[str, Tensor]]) -> TensorShapes:
    return {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors}


def _checkpoint_shapes(model: nn.Module) -> TensorShapes:
    try:
        return _shapes_of(names.published_tensors(model, names.named_weights(model)))
    except ModelError:  # they cannot be named as the checkpoint names them
        return {}


def refuse_part(loaded: LoadedModel, size: int, *, whole: bool, experts_apart: bool) -> None:
    """ConfigError for a model that `cut_for_serving` does not take, whatever its sizes."""
    cuts_attention = not (whole and experts_apart)
    for found, what in (
        (loaded.adapter is not None, "an adapter cannot be cut"),
        (loaded.aligned, 'numerics = "aligned" is proved for whole matrices'),
        (cuts_attention and loaded.indexers > 0, "an indexer cannot be cut"),
        (cuts_attention and loaded.compressed, "compressed attention cannot be cut"),
        (loaded.in_four_bits, "weights in 4 bits cannot be cut"),
    ):
        if found:
            raise ConfigError(f"an engine of {size} processes serves '{loaded.name}': {what}. Use one process instead")
