"""More than one rank: parameters, gradients and AdamW's moments in shards (FSDP2), gathered around each pass.

master   fp32, a shard a rank     what AdamW moves
compute  bf16 (the model's dtype), whole, from the gathering before a layer's pass to the end of it
gradient bf16 in the pass, summed over the ranks in fp32: summed and not averaged, since
every weight of the loss is global already
adapter  fp32, whole on every rank: 1-2 % of the numbers. The base under it lies in shards
         of its own dtype, cut by tp, too, and has no gradient
4 bits   whole on every rank: bytes are not cast, and cost a quarter of what sharding would gather
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import chain
from types import MethodType
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from rondel.core.errors import ConfigError, ModelError, StalledError
from rondel.core.mesh import Mesh
from rondel.core.row_split import PRODUCTS
from rondel.core.tensor_parts import TensorPart
from rondel.models import linear, names, vision
from rondel.models.adapter_state import randomized_adapter
from rondel.models.blocks import model_blocks
from rondel.models.collectives import RankGroup, gather_runs
from rondel.models.context_parallel import ContextRanks
from rondel.models.deferred_weights import fill_parameters
from rondel.models.expert_parallel import cut_experts, expert_parameters, routed_experts
from rondel.models.fp32_sums import keeps_fp32_stream
from rondel.models.head import LMHead
from rondel.models.layer_split import StageLayers, drop_parameters, layers_of_stage
from rondel.models.load_check import PARITY
from rondel.models.loaded_model import LoadedModel
from rondel.models.pipeline_stage import PipelineStage
from rondel.models.rendezvous import Rendezvous
from rondel.models.rounded_weights import replace_rounded, rounded_parameters
from rondel.models.step_head import StepHead
from rondel.models.tensor_cuts import TensorCuts, join_cuts
from rondel.models.tensor_parallel import cut_model
from rondel.train.annotate import logprobs_of
from rondel.train.loss_scale import LossScale
from rondel.train.mesh_checks import check_cut, is_timeout, refuse_mesh
from rondel.train.mesh_groups import MeshGroups
from rondel.train.mesh_layout import rank_part
from rondel.train.optim import MasterWeights, spread_within_rounding
from rondel.train.optimizers import ONE_RANK
from rondel.train.pack import MicroBatches, PackedBatch
from rondel.train.parallel import SingleRank
from rondel.train.pipeline_schedule import one_forward_one_backward, run_schedule
from rondel.train.rank_masters import ReplicatedWeights, ShardedWeights, computes_in
from rondel.train.whole_blocks import refuse_cut_blocks


class FsdpRank(SingleRank):
    """One rank of a mesh, all of which meet there; without a meeting, in the group that a launcher has made already.

    patience  seconds that one rank waits for another in a collective
    """

    def __init__(
        self, rank: int, mesh: Mesh, meeting: Rendezvous | None, *, device: str = "cpu", patience: float = 600.0
    ) -> None:
        self.rank, self.size, self.patience, self.mesh = rank, mesh.world, patience, mesh
        self.data_rank, self.data_size, self.stages = mesh.data_index(rank), mesh.data, mesh.pp
        self._cuts: WeakKeyDictionary[nn.Module, TensorCuts] = WeakKeyDictionary()
        self._expert_cuts: WeakKeyDictionary[nn.Module, TensorCuts] = WeakKeyDictionary()
        self._stages: WeakKeyDictionary[nn.Module, ReferenceType[PipelineStage]] = (
            WeakKeyDictionary()
        )  # they know the model
        self.groups = MeshGroups(rank, mesh, meeting, device=device, patience=patience)
        self.tensor = self.groups.tensor

    def shard_model(self, loaded: LoadedModel) -> LoadedModel:
        """Each layer is gathered when its pass begins and let go when it ends; embedding, last
        norm and head stay for the whole pass.
        """
        model, dtype = loaded.model, loaded.dtype
        if isinstance(loaded.head, StepHead):
            return self._shard_steps(loaded)
        probe = [(7 * i + 3) % loaded.head.weight.shape[0] for i in range(11)]
        expected: list[float] = []
        if not isinstance(model, FSDPModule):  # a reference that is the policy without its adapter is held already
            refuse_mesh(loaded, self.mesh)
            cut = self.tensor is not None or self.groups.experts is not None or self.groups.link is not None
            # a critic says one number and no logprobs, and what is not here yet says none
            if cut and len(loaded.head.weight) > 1 and loaded.weights is None:
                with randomized_adapter(loaded.adapter):
                    expected = logprobs_of(loaded, probe)
            self._shard_model(loaded)
        cuts, stage = self._cuts.get(model), self._stage_of(model)
        head = replace(loaded.head.of_copy(model), part=cuts.vocabulary if cuts else None)

        def enter_with_head(work: Callable[[LMHead], Any]) -> Any:
            return model.enter_pass(
                lambda: work(
                    replace(
                        head,
                        weight=_output_embeddings(model).weight,
                        bias=getattr(_output_embeddings(model), "bias", None),
                    )
                )
            )

        head.stack = linear.UnpackedLinear()
        context = None
        if self.groups.context is not None:
            spreads = loaded.compressed or loaded.indexers > 0
            ring = self.mesh.cp_attention == "ring"
            context = ContextRanks(self.groups.context, PRODUCTS * head.weight.shape[1], spreads, ring)
        held = replace(
            loaded,
            model=model,
            head=head,
            enter=enter_with_head,
            compute=dtype,
            context=context,
            stage=stage,
            weights=None,
        )
        if expected or (stage is not None and len(head.weight) > 1):
            with randomized_adapter(held.adapter):
                check_cut(held, self.mesh, probe, expected, PARITY[dtype], logprobs_of, self.all_gather_object)
        if loaded.weights is not None and loaded.adapter is not None and not held.bare and len(head.weight) > 1:
            from rondel.models.adapters import check_adapter

            check_adapter(held, lambda: logprobs_of(held, probe))
            _reshard(model)
        return held

    def _shard_steps(self, loaded: LoadedModel) -> LoadedModel:
        """The same of a model that draws points, whose samples are no rows of tokens."""
        mesh, model = self.mesh, loaded.model
        if mesh.pp * mesh.ep > 1:
            raise ConfigError(
                f"place.mesh = {mesh}: a {model.config.model_type} has no stages or experts; leave pp and ep out"
            )
        if mesh.overlap:
            raise ConfigError(
                f"place.mesh = {mesh}: rows between the parts of a {model.config.model_type} are gathered, and go round "
                "no ring; leave overlap out"
            )
        if mesh.cp_attention == "ring":
            raise ConfigError(
                f"place.mesh = {mesh}: keys and values of a {model.config.model_type} are gathered; "
                "leave cp_attention out"
            )
        head = loaded.head.shared_by(self.groups.context)
        if not isinstance(model, FSDPModule):
            self._shard_model(loaded)

        def enter_with_head(work: Callable[[Any], Any]) -> Any:
            return model.enter_pass(lambda: work(head))

        return replace(loaded, head=head, enter=enter_with_head, compute=loaded.dtype)

    def _shard_model(self, loaded: LoadedModel) -> None:
        model, dtype = loaded.model, loaded.dtype
        linear.unpack_linears(model)
        with suppress(ModelError) if self.tensor is None and self.groups.experts is None else nullcontext():
            # of whole tensors, in the family's own classes: FSDP makes others of them
            names.checkpoint_pieces(model)
        rounded = rounded_parameters(model)
        layers: StageLayers | None = None
        if loaded.adapter is not None and loaded.weights is None:
            names.pin_digest(model)
        if self.groups.link is not None:
            decoder, tower = loaded.decoder, list[nn.Parameter]()
            if loaded.sight is not None:
                decoder, tower = vision.language_model(model), [*vision.vision_tower(model).parameters()]
            layers = layers_of_stage(
                model, decoder, self.groups.link.size, self.groups.link.index, chunks=self.mesh.chunks, whole=tower
            )
            drop_parameters(model, layers.held)
        blocks = model_blocks(model) if layers is None else layers.own_blocks
        whole: set[nn.Parameter] = set()
        if loaded.adapter is not None:
            whole = {
                p
                for name, p in model.named_parameters()
                if names.LORA in name or p.requires_grad or not p.is_floating_point()
            }
        elif any(p.requires_grad for p in model.parameters()):
            names.remember_dtypes(model)
            for name, parameter in model.named_parameters():
                halves = parameter.requires_grad and parameter.dtype == dtype != torch.float32
                if halves and name not in rounded and not parameter.is_meta:
                    parameter.data = spread_within_rounding(name, parameter)
            model.float()
        if self.tensor is not None:
            if isinstance(loaded.head, StepHead):
                self._cuts[model] = loaded.head.cut_over(self.tensor, sequence=self.mesh.sp)
            else:
                own = None if layers is None else layers.own_runs
                apart = [] if self.groups.experts is None else expert_parameters(model)
                self._cuts[model] = cut_model(
                    model, self.tensor, sequence=self.mesh.sp, overlap=self.mesh.overlap, runs=own, apart=apart
                )
        if self.groups.experts is not None:
            self._expert_cuts[model] = cut_experts(model, self.groups.experts, self.tensor)
        eye = set(vision.vision_tower(model).modules()) if loaded.sight is not None else set()
        # whole on every rank, and frozen: no rank waits in a tower that another has no picture for
        if loaded.sight is not None:
            whole |= set(vision.vision_tower(model).to(dtype).parameters())
        if layers is not None:
            whole |= {p for name, p in model.named_parameters() if name not in layers.held}
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        head = model.get_output_embeddings()
        # a critic's: its one number is computed in full precision
        if head is not None and head.weight.shape[0] == 1 and head.weight not in whole:
            fully_shard(
                head,
                mesh=self.groups.fsdp_mesh,
                mp_policy=MixedPrecisionPolicy(torch.float32, torch.float32),
                reshard_after_forward=False,
            )
        for layer in [block for block in blocks if block not in eye]:
            self._fill(loaded, layer, dtype, layers)
            for experts in routed_experts(layer).values() if self.groups.experts is not None else ():
                fully_shard(experts, mesh=self.groups.expert_mesh, mp_policy=policy)
            fully_shard(layer, mesh=self.groups.fsdp_mesh, mp_policy=policy, ignored_params=whole)
        self._fill(loaded, model, dtype, layers)
        fully_shard(model, mesh=self.groups.fsdp_mesh, mp_policy=policy, ignored_params=whole)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        replace_rounded(model, rounded)
        _prefetch([block for block in blocks if isinstance(block, FSDPModule)], self.mesh.prefetch)
        if layers is not None:
            assert self.groups.link is not None
            stream = torch.float32 if keeps_fp32_stream(model) else dtype
            self._stages[model] = ref(PipelineStage(model, layers, self.groups.link, stream))  # its hooks keep it
        model.enter_pass = MethodType(_forward_root, model)
        register_fsdp_forward_method(model, "enter_pass")

    def _fill(self, loaded: LoadedModel, part: nn.Module, dtype: torch.dtype, layers: StageLayers | None) -> None:
        """Read the weights of a part of a model whose weights are still in its checkpoint, each as it lies here: spread
        within its rounding to `dtype` where it is trained, cut by tp or ep; of a stage of a pipeline, what it holds.
        """
        if (weights := loaded.weights) is None:
            return
        cuts = [c for c in (self._cuts.get(loaded.model), self._expert_cuts.get(loaded.model)) if c is not None]

        def read(name: str, like: nn.Parameter) -> Tensor:
            shape = next((c.shapes[name] for c in cuts if name in c.shapes), like.shape)
            whole = weights.read(name, shape, dtype if like.requires_grad else like.dtype)
            if like.requires_grad and dtype != torch.float32:
                whole = spread_within_rounding(name, whole)
            mine = whole
            for c in cuts:
                mine = c.split(name, mine)
            return mine.to(like.dtype, copy=mine is not whole)

        fill_parameters(loaded.model, part, read, only=None if layers is None else layers.held)

    def make_masters(self, model: nn.Module, **how: Any) -> MasterWeights:
        if (kind := how.get("optimizer")) in ONE_RANK:
            raise ConfigError(
                f'trainer.optimizer.kind = "{kind}" is for one rank, and this trainer has {self.size}: use "adamw"'
            )
        if how.get("host"):
            raise ConfigError(
                f'trainer.memory.optimizer = "host" is for one rank, and this trainer has {self.size}, which keep a '
                "shard each: leave it out"
            )
        refuse_cut_blocks(self, model)
        stage, experts = self._stage_of(model), self._expert_cuts.get(model)
        how["loss_scale"] = (
            LossScale() if computes_in(model) == torch.float16 else None
        )  # equal norms move it on all ranks
        if any(isinstance(p, DTensor) for p in model.parameters() if p.requires_grad):
            return ShardedWeights(
                model, self.groups.shard_group, self._cuts.get(model), experts=experts, stage=stage, **how
            )
        return ReplicatedWeights(model, self.groups.make_stage_group(), self._cuts.get(model), stage=stage, **how)

    def full_weights(self, model: nn.Module, only: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        dtype, cuts = computes_in(model), (self._cuts.get(model), self._expert_cuts.get(model))
        stage = self._stage_of(model)

        def own_weights() -> Iterator[tuple[str, dict[str, Tensor]]]:
            for name, parameter in names.named_weights(model):
                if not parameter.is_meta and (only is None or name in only):
                    whole = parameter.full_tensor().to(dtype) if isinstance(parameter, DTensor) else parameter
                    yield name, {"": join_cuts(cuts, name, whole)}

        for name, found in own_weights() if stage is None else stage.collect(own_weights()):
            yield name, found[""]

    def held_weights(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        _reshard(model)
        dtype = computes_in(model)
        for name, parameter in names.named_weights(model):
            if not parameter.is_meta:
                yield name, parameter.to_local().to(dtype) if isinstance(parameter, DTensor) else parameter

    def weight_parts(self, model: nn.Module) -> dict[str, TensorPart]:
        _reshard(model)
        cuts, experts, found = self._cuts.get(model), self._expert_cuts.get(model), {}
        for name, parameter in names.named_weights(model):
            if not parameter.is_meta:
                shape = next((c.shapes[name] for c in (cuts, experts) if c and name in c.shapes), parameter.shape)
                how = {"tp": cuts.cuts.get(name) if cuts else None, "ep": experts.cuts.get(name) if experts else None}
                sharded = isinstance(parameter, DTensor)
                found[name] = rank_part(self.mesh, self.rank, shape, **how, sharded=sharded)
        return found

    def all_reduce(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self.groups.everyone)
        return values

    def run_passes(
        self, packs: MicroBatches, forward: Callable[[PackedBatch, bool], Any], backward: Callable[[Any, bool], None]
    ) -> None:
        stages, stage = (1, 0) if self.groups.link is None else (self.groups.link.size, self.groups.link.index)
        order = one_forward_one_backward(stages, stage, len(packs), self.mesh.chunks)
        try:
            run_schedule(order, packs, forward, backward, self._enter_chunk)
        finally:
            self._enter_chunk(None)

    def _stage_of(self, model: nn.Module) -> PipelineStage | None:
        found = self._stages.get(model)
        return None if found is None else found()

    def _enter_chunk(self, chunk: int | None) -> None:
        """Which layers of a stage the next pass goes through; None: all of them in turn."""
        for model in self._stages:
            if (stage := self._stage_of(model)) is not None:
                stage.chunk = chunk

    def begin_pass(self, model: nn.Module, *, last: bool) -> None:
        if not isinstance(model, FSDPModule):
            return
        stage = self._stage_of(model)
        if self.mesh.reduce == "update" and stage is not None and stage.chunk is not None:
            own: list[list[Any]] = stage.layers.own_runs
            for chunk, blocks in enumerate(own):
                for block in blocks:
                    block.set_requires_gradient_sync(last and chunk == stage.chunk)
            # embedding, or last norm and head
            model.set_requires_gradient_sync(last and stage.chunk == stage.root_chunk, recurse=False)
        elif self.mesh.reduce == "update":
            model.set_requires_gradient_sync(last)
        if self.mesh.reshard == "update":
            model.set_reshard_after_forward(last)
            model.set_reshard_after_backward(last)

    def all_gather_object(self, value: Any) -> list[Any]:
        return _gather_objects(value, dist.group.WORLD)

    def gather_data_ranks(self, value: Any) -> list[Any]:
        return _gather_objects(value, self.groups.data_group)

    def gather_arrays(self, values: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        sizes = self.gather_data_ranks({name: len(x) for name, x in values.items()})
        own = torch.cat([torch.zeros(0), *(x.float() for x in values.values())])
        lengths = [sum(told.values()) for told in sizes]
        ranks = RankGroup.of(self.groups.data_group)
        runs = gather_runs(own.to(self.groups.fsdp_mesh.device_type), lengths, ranks).cpu().split(lengths)
        return [dict(zip(told, run.split(list(told.values())))) for told, run in zip(sizes, runs)]

    @contextmanager
    def collective_section(self, verb: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not is_timeout(error):
                raise
            raise StalledError(
                f"rank {self.rank} of {self.size} waits for another one since {self.patience:g} s, "
                f"{_failed_operation(error)}, asked for: {verb}"
            ) from error

    def close(self) -> None:
        dist.destroy_process_group()


def _prefetch(blocks: list[Any], ahead: int) -> None:
    """Gather so many layers while the one before them computes, in either direction; experts that are sharded by
    themselves with their layer.
    """
    parts = [[part for part in block.modules() if isinstance(part, FSDPModule)] for block in blocks]
    for i, block in enumerate(blocks if ahead else ()):
        own = parts[i][1:] if i == 0 else []  # nobody before the first layer gathers for it
        block.set_modules_to_forward_prefetch([*own, *chain.from_iterable(parts[i + 1 : i + 1 + ahead])])
        earlier = parts[max(0, i - ahead) : i]
        block.set_modules_to_backward_prefetch([*chain.from_iterable(reversed(earlier))])


def _gather_objects(value: Any, group: Any) -> list[Any]:
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, value, group=group)
    return told


def _failed_operation(error: BaseException) -> str:
    """ "in all_reduce (optim.py:71, step)": the operation, and which of our lines began it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = next((frame for frame in reversed(frames) if f"{os.sep}torch{os.sep}" not in frame.filename), frames[0])
    return f"in {frames[-1].name} ({os.path.basename(ours.filename)}:{ours.lineno}, {ours.name})"


def _forward_root(model: nn.Module, work: Callable[[], Any]) -> Any:
    """A pass through the model: FSDP gathers what lies at its root, and lets go of it after the backward pass."""
    return work()


def _reshard(model: nn.Module) -> None:
    """What a pass has left gathered, such as embedding and head, lies in shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _output_embeddings(model: Any) -> Any:
    return model.get_output_embeddings()
