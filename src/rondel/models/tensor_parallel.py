"""A model over several devices, a part of every matrix on each (arXiv:1909.08053),
and of the rows between (arXiv:2205.05198).

    rows lie apart          every rank, all rows                          rows lie apart
    norm, residual ──► gather │ own heads or columns of q k v, gate up ──► own rows of o, down │ ──► sum, own rows ──►

Which matrix is cut how is the family's own plan (`base_model_tp_plan` of transformers), read as words; what it says is
done here on plain tensors, at the borders of a layer's parts and not of single matrices, so that a part enters and
leaves once. What a part keeps whole (a norm of heads, a router, keys for fewer heads than ranks, an adapter) has the
gradient of its own share of the work on each rank, and is summed once an update (`partial`).

A part whose plan cannot be followed stays whole on every rank, and computes the same on all.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from rondel.core.errors import ModelError
from rondel.models.adapter_state import FactorCut
from rondel.models.attention import current_layout
from rondel.models.blocks import decoder_blocks, map_hidden
from rondel.models.collectives import RankGroup, enter_cut, gather_rows, keep_rows, leave_cut
from rondel.models.head import decoder_of
from rondel.models.linear import product
from rondel.models.ring_products import install_ring, ring_products
from rondel.models.shard_cut import ShardCut, even_runs, split_shards
from rondel.models.tensor_cuts import TensorCuts
from rondel.models.vision import language_model
from rondel.models.vision_families import tower_parts
from rondel.models.vocabulary_part import VocabularyPart

MESH = "place.mesh with shards or cp instead of tp"
COLUMNS, ROWS = ("colwise", "packed_colwise"), ("rowwise", "packed_rowwise")
# of families without a plan of their own
COMMON = {
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
    "self_attn.o_proj": "rowwise",
    "mlp.gate_proj": "colwise",
    "mlp.up_proj": "colwise",
    "mlp.down_proj": "rowwise",
    "self_attn.out_proj": "rowwise",
    "feed_forward.w1": "colwise",
    "feed_forward.w3": "colwise",
    "feed_forward.w2": "rowwise",
}
# where the plan gathers because of a `chunk` of two stacked halves, which can be cut half by half
STACKED = {"mlp.gate_up_proj": "packed_colwise", "mlp.down_proj": "rowwise"}
BASE = ".base_layer"  # of an adapted layer
# what stands beside routed experts, where a plan names only these
BESIDE = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise", "gate_up_proj": "packed_colwise"}


def cut_model(
    model: Any,
    ranks: RankGroup,
    *,
    sequence: bool = True,
    overlap: bool = False,
    runs: Sequence[Sequence[nn.Module]] | None = None,
    instead: str = MESH,
    apart: Collection[str] = (),
) -> TensorCuts:
    """Keep this rank's part of a whole model, in place. `sequence`: rows between the parts of a layer lie apart, too.
    `overlap`: these travel while the products beside them compute (models/ring_products.py); with `sequence`.
    `runs`: of a stage of a pipeline, its runs of layers. `instead`: what is to be used where a model cannot be cut.
    `apart`: parameters that are not cut, of experts that lie whole on some rank each (models/expert_parallel.py).

    Raises ModelError where heads and ranks do not divide, or nothing could be cut or overlapped.
    """
    decoder, found = _text_decoder(model), TensorCuts(ranks, sequence)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    above = next(name for name, module in model.named_modules() if module is decoder)
    prefix = f"{above}." if above else ""
    runs = [decoder_blocks(model, decoder)] if runs is None else runs
    planned = _planned_cuts(
        decoder, model.config.get_text_config(), ranks.size, {n.removeprefix(prefix) for n in apart}
    )
    if overlap:
        _check_overlap(model, decoder, planned)
    for block in chain.from_iterable(runs):
        name = next(n for n, module in decoder.named_modules() if module is block)
        for part_name, part in block.named_children():
            own = {n: cut for n, cut in planned.items() if n.startswith(f"{name}.{part_name}.")}
            if own or any(n.startswith(f"{prefix}{name}.{part_name}.") for n in apart):
                cut_part(decoder, part, own, ranks)
                if overlap and (products := ring_products(part, _cuts_inside(own, f"{name}.{part_name}"))):
                    install_ring(part, products, ranks, functools.partial(_runs, ranks))
                else:
                    _add_borders(part, found, cut=True)
                found.cuts |= {prefix + n: cut for n, cut in own.items()}
                found.partial |= (
                    {f"{prefix}{name}.{part_name}.{n}" for n, _ in part.named_parameters()}
                    - found.cuts.keys()
                    - {*apart}
                )
            elif sequence and _needs_all_rows(part):
                _add_borders(part, found, cut=False)
        if sequence:
            every = {f"{prefix}{name}.{n}" for n, _ in block.named_parameters()}
            found.partial |= every - found.cuts.keys() - {*apart}
    if not found.cuts:
        raise _uncut(model, instead)
    if sequence and hasattr(decoder, "_deepstack_process"):
        setattr(decoder, "_deepstack_process", functools.partial(_add_own_features, ranks, decoder._deepstack_process))  # noqa: B010
    for run in runs if sequence else ():
        run[0].register_forward_pre_hook(functools.partial(_keep_own_rows, ranks), with_kwargs=True)
        run[-1].register_forward_hook(functools.partial(_gather_all_rows, ranks))
    _cut_vocabulary(model, found)
    found.shapes = {name: shapes[name] for name in found.cuts}
    return found


def check_tensor_parallel(model: Any, tp: int, instead: str = MESH, *, overlap: bool = False) -> dict[str, ShardCut]:
    """What `cut_model` would refuse of a model that lies whole here, or on "meta". Raises ModelError. -> how it would
    cut the layers' parameters, by the model's names.
    """
    if tp == 1:
        return {}
    if not (planned := _planned_cuts(decoder := _text_decoder(model), model.config.get_text_config(), tp, set())):
        raise _uncut(model, instead)
    if overlap:
        _check_overlap(model, decoder, planned)
    own, named = {id(p): name for name, p in decoder.named_parameters()}, model.named_parameters()
    return {name: planned[own[id(p)]] for name, p in named if own.get(id(p)) in planned}


def _text_decoder(model: Any) -> Any:
    """The module whose layers are cut: of a model that looks at images the part beside its tower."""
    return language_model(model) if tower_parts(model) else decoder_of(model)


def _check_overlap(model: Any, decoder: Any, planned: dict[str, ShardCut]) -> None:
    parts = {_part_of(name) for name in planned}
    if not any(ring_products(decoder.get_submodule(part), _cuts_inside(planned, part)) for part in parts):
        raise ModelError(
            f"overlap = true has no effect on model type '{model.config.model_type}': no attention or feed-forward "
            "part of its layers has only matrices that read its input and one that makes its output; leave overlap out"
        )


def _cuts_inside(cuts: dict[str, ShardCut], part: str) -> dict[str, ShardCut]:
    """By the names that parameters have in a part."""
    return {name.removeprefix(f"{part}."): cut for name, cut in cuts.items() if name.startswith(f"{part}.")}


def _uncut(model: Any, instead: str) -> ModelError:
    return ModelError(
        f"model type '{model.config.model_type}' has no plan for tensor parallelism, and no matrices under the names "
        f"that have one everywhere (q_proj ... down_proj): use {instead}"
    )


# -- what is cut how -----------------------------------------------------------------------------


def _planned_cuts(decoder: Any, config: Any, tp: int, apart: set[str]) -> dict[str, ShardCut]:
    """By the decoder's names. A part of a layer is cut only as a whole: into it and out of it. `apart`:
    not to be cut."""
    plan = getattr(config, "base_model_tp_plan", None) or {}
    plan = {re.sub(r"^model\.", "", key): how for key, how in plan.items()}
    shapes = {name: parameter.shape for name, parameter in decoder.named_parameters()}
    words: dict[str, str] = {}
    for name in shapes:
        plain = name.replace(f"{BASE}.", ".")  # under an adapter, whose factors stay whole
        owner = plain.rpartition(".")[0]
        words[name] = _word_of(plan, plain) or _word_of(plan, owner)
    mixtures = {_part_of(name) for name, word in words.items() if word and ".experts." in name}
    for name in shapes:
        if _part_of(name) in mixtures and not words[name]:
            words[name] = BESIDE.get(name.replace(f"{BASE}.", ".").split(".")[-2], "")
    _check_heads(config, words, tp)
    cuts: dict[str, ShardCut] = {}
    for name, word in words.items():
        cut = None if name in apart or _shares_keys(config, name, tp) else _cut_of(name, word, shapes[name])
        if cut is not None:
            cuts[name] = cut
    into = {_part_of(n) for n, word in words.items() if word in COLUMNS and n in cuts}
    out = {_part_of(n) for n, word in words.items() if word in ROWS and n in cuts}
    return {name: cut for name, cut in cuts.items() if _part_of(name) in into & out}


def _word_of(plan: dict[str, str], name: str) -> str:
    generic = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)
    if plan:
        word = plan.get(generic, "")
        if word in ("colwise_gather_output", "rowwise_split_input"):
            return next((how for ending, how in STACKED.items() if generic.endswith(f".{ending}")), "")
        return word
    return next((how for ending, how in COMMON.items() if generic.endswith(f".{ending}")), "")


def _part_of(name: str) -> str:
    """ "layers.3.mlp.experts.down_proj" -> "layers.3.mlp"."""
    found = re.match(r"(?:.*?\.)?\d+\.[^.]+", name)
    return found[0] if found else name


def _cut_of(name: str, word: str, shape: torch.Size) -> ShardCut | None:
    vector = len(shape) == 1
    if name.endswith(".sinks"):
        return ShardCut(0)
    if word == "colwise":
        return ShardCut(0 if vector else len(shape) - 2)
    if word == "rowwise" and not name.endswith("bias"):
        return ShardCut(len(shape) - 1)
    if word in ("packed_colwise", "packed_rowwise"):
        dim = 0 if vector else len(shape) - (2 if word == "packed_colwise" else 1)
        half = shape[dim] // 2
        return ShardCut(dim, parts=((half, ShardCut(dim)), (half, ShardCut(dim))))
    return None


def _check_heads(config: Any, words: dict[str, str], tp: int) -> None:
    heads = getattr(config, "num_attention_heads", 0)
    keys = getattr(config, "num_key_value_heads", None) or heads
    cut = any(word == "colwise" and ".q_proj." in name for name, word in words.items())
    if cut and (heads % tp or (keys % tp and tp % keys)):
        raise ModelError(
            f"tp = {tp} does not divide the {heads} attention heads and {keys} key heads of model type "
            f"'{config.model_type}': take a tp that divides both, or a multiple of the key heads"
        )


def _shares_keys(config: Any, name: str, tp: int) -> bool:
    """Fewer key heads than ranks: every rank keeps them whole, and attends to the one of its queries."""
    keys: int = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None) or 0
    return keys < tp and (".k_proj." in name or ".v_proj." in name)


# -- cutting -------------------------------------------------------------------------------------


def cut_part(decoder: Any, part: nn.Module, cuts: dict[str, ShardCut], ranks: RankGroup) -> None:
    """Keep this rank's pieces of parameters, by the names that they have in `decoder`, in place. What multiplies own
    columns adds a share of its bias, so that the sum over the ranks has it once.
    """
    for name, cut in cuts.items():
        owner_name, _, own = name.rpartition(".")
        owner = decoder.get_submodule(owner_name)
        whole = getattr(owner, own)
        with torch.no_grad():
            mine = split_shards(whole.detach(), cut, ranks.size)[ranks.index].clone()
        setattr(owner, own, nn.Parameter(mine, requires_grad=whole.requires_grad))
        if own == "weight" and (layer := owner_name.removesuffix(BASE)) != owner_name:
            setattr(decoder.get_submodule(layer), "factor_cut", FactorCut(cut, ranks.index, ranks.size))  # noqa: B010
        if isinstance(owner, nn.Linear) and own == "weight":
            owner.out_features, owner.in_features = mine.shape
            if cut.dim == 1 and owner.bias is not None:
                setattr(owner, "forward", functools.partial(_add_bias_once, owner, ranks.size))  # noqa: B010
    for module in part.modules():
        if hasattr(module, "k_proj") and hasattr(module, "q_proj"):
            held = getattr(module, "config", None)
            keys = getattr(held, "num_key_value_heads", None)
            if keys and keys < ranks.size:
                setattr(module, "own_key_heads", slice(i := ranks.index * keys // ranks.size, i + 1))  # noqa: B010


def _add_bias_once(linear: nn.Linear, n: int, x: Tensor) -> Tensor:
    """A part of the sum over n ranks, of which each adds its share of the bias."""
    assert linear.bias is not None
    return product(x, linear.weight, (linear.bias / n).to(x.dtype))


def _cut_vocabulary(model: Any, found: TensorCuts) -> None:
    ranks, embedding, head = found.ranks, model.get_input_embeddings(), model.get_output_embeddings()
    names = {id(p): n for n, p in model.named_parameters()}
    tied = head is not None and head.weight is embedding.weight
    for module in (embedding, head):
        if (
            not isinstance(module, (nn.Embedding, nn.Linear))
            or module.weight.shape[0] < ranks.size
            or (module is head and tied)
        ):
            continue
        runs = even_runs(module.weight.shape[0], ranks.size)
        part = VocabularyPart(sum(runs[: ranks.index]), runs[ranks.index], max(runs), sum(runs), ranks)
        for own in ("weight", "bias"):
            whole = getattr(module, own, None)
            if isinstance(whole, nn.Parameter):
                cut = ShardCut(0, uneven=True)
                found.cuts[names[id(whole)]] = cut
                mine = split_shards(whole.detach(), cut, ranks.size)[ranks.index].clone()
                setattr(module, own, nn.Parameter(mine, requires_grad=whole.requires_grad))
        if module is embedding:
            if module.padding_idx is not None:
                inside = part.first <= module.padding_idx < part.first + part.size
                module.padding_idx = module.padding_idx - part.first if inside else None
            setattr(module, "forward", functools.partial(_look_up_part, module.forward, part))  # noqa: B010
        if module is head or tied:
            found.vocabulary = part
    if tied:
        head.weight = embedding.weight


def _look_up_part(forward: Callable[..., Tensor], part: VocabularyPart, ids: Tensor) -> Tensor:
    """Rows of this rank's part of the vocabulary, and the others' from them."""
    local, mine = part.own_ids(ids)
    return leave_cut(forward(local) * mine[..., None], part.ranks)


# -- borders -------------------------------------------------------------------------------------


def _needs_all_rows(part: nn.Module) -> bool:
    """Attention, recurrent mixers and mixtures of experts: what one row becomes depends on others,
    or on a record of all."""
    return any(hasattr(m, "layer_idx") or type(m).__name__.endswith("Experts") for m in part.modules())


def _add_borders(part: nn.Module, found: TensorCuts, *, cut: bool) -> None:
    how = functools.partial(_enter_part, found), functools.partial(_leave_part, found, cut)
    part.register_forward_pre_hook(how[0], with_kwargs=True)
    part.register_forward_hook(how[1])


def _runs(ranks: RankGroup) -> list[int]:
    return even_runs(current_layout().rows, ranks.size)


def _enter_part(found: TensorCuts, part: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    def enter(x: Tensor) -> Tensor:
        if not found.sequence:
            return enter_cut(x, found.ranks)
        return gather_rows(x[0], _runs(found.ranks), found.ranks, summed=True)[None]

    return map_hidden(enter, args, kwargs)


def _leave_part(found: TensorCuts, cut: bool, part: Any, args: tuple, out: Any) -> Any:
    def leave(x: Tensor) -> Tensor:
        shape = x.shape
        if not found.sequence:
            return leave_cut(x, found.ranks)
        rows, runs = x.reshape(-1, shape[-1]), _runs(found.ranks)
        if cut:
            return keep_rows(rows, runs, found.ranks, summed=True).view(*shape[:-2], -1, shape[-1])
        first = sum(runs[: found.ranks.index])
        return rows[first : first + runs[found.ranks.index]].view(*shape[:-2], -1, shape[-1])

    return (leave(out[0]), *out[1:]) if isinstance(out, tuple) else leave(out)


def _keep_own_rows(ranks: RankGroup, block: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    return map_hidden(lambda x: keep_rows(x[0], _runs(ranks), ranks, summed=False)[None], args, kwargs)


def _add_own_features(
    ranks: RankGroup, add: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, mask: Tensor, features: Tensor
) -> Tensor:
    """What a tower adds between layers to rows [1, T] of pictures, where x [1, t, D] are this rank's;
    features [n, D]."""
    runs = _runs(ranks)
    if x.shape[1] == mask.shape[1]:  # behind the last layer of a run
        return add(x, mask, features)
    first = sum(runs[: ranks.index])
    own = mask[:, first : first + runs[ranks.index]]
    before = int(mask[:, :first].sum())
    return add(x, own, features[before : before + int(own.sum())])


def _gather_all_rows(ranks: RankGroup, block: Any, args: tuple, out: Any) -> Any:
    def gather(x: Tensor) -> Tensor:
        return gather_rows(x[0], _runs(ranks), ranks, summed=False)[None]

    return (gather(out[0]), *out[1:]) if isinstance(out, tuple) else gather(out)
