"""Trainers among their ranks, in processes of their own, and the same question to all of them."""

from __future__ import annotations

import copy
import math
import platform
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import peft  # noqa: F401  (adapters import it when they are made: once, not in every rank)
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from kits.families import model as family
from kits.flows import FLOWS, flow
from kits.train import KINDS, inline, model
from kits.vision import EYES
from kits.vision import model as looking
from rondel.algos.tokens import TokenBatch
from rondel.core.errors import SyncError
from rondel.core.mesh import Mesh
from rondel.core.tensor_parts import TensorPart
from rondel.core.types import Route
from rondel.formats import FORMATS
from rondel.models import adapters, collectives, names
from rondel.models.aligned_numerics import align_numerics
from rondel.models.load import load_model
from rondel.models.loaded_model import LoadedModel
from rondel.models.rendezvous import Rendezvous
from rondel.models.shard_cut import ShardCut, part_of, split_shards
from rondel.models.vision import vision_tower
from rondel.models.weight_formats import apply_format
from rondel.runtime.cluster import forkserver
from rondel.runtime.cluster.process import ProcessCluster
from rondel.sync.from_ipc import FromIpc
from rondel.sync.from_tcp import FromTcp
from rondel.sync.from_tensor import FromTensor
from rondel.sync.transfer_plan import plan_transfer
from rondel.train import logprobs, part_checkpoint, part_file, weight_publisher
from rondel.train.annotate import compute_advantages
from rondel.train.critic import Critic
from rondel.train.fsdp import FsdpRank
from rondel.train.parallel import ALONE
from rondel.train.settings import TrainSettings
from rondel.train.step import LocalTrainer
from rondel.train.step_metrics import StepMetricSums
from rondel.train.teachers import Teacher
from rondel.train.weight_publisher import RankPublisher


def made(kind: str, dtype: str, *, deferred: bool = False) -> LoadedModel:
    """A kind of kits.train or a family of kits.families; "llama + fresh" with an adapter that changes nothing yet, "llama + used" with one that does,
    "llama + aligned" with those numerics, "llama + int4" in a number format; "from FOLDER" a stored one; or a flow of kits.flows.
    """
    kind, _, adapter = kind.partition(" + ")
    if kind.startswith("from "):
        loaded = load_model(kind.removeprefix("from "), dtype=dtype, deferred=deferred)
        if loaded.sight is not None:  # as a run has it
            vision_tower(loaded.model).requires_grad_(False)
        return adapted(loaded, adapter) if adapter else loaded
    if kind in FLOWS:
        return flow(**FLOWS[kind])
    if kind in EYES:
        loaded = looking(kind)
    else:
        loaded = model(kind, dtype) if kind in KINDS else copy.deepcopy(family(kind))
    if adapter == "aligned":
        align_numerics(loaded)
    elif adapter in FORMATS:
        apply_format(loaded.model, adapter)
    elif adapter:
        adapted(loaded, adapter)
    return loaded


def adapted(loaded: LoadedModel, adapter: str) -> LoadedModel:
    """With an adapter that is "fresh" or "used"."""
    layers = {name.rpartition(".")[2] for name in adapters.linear_layers(loaded)}
    # of a mixture what is no expert
    some = sorted(layers & {"q_proj", "k_proj", "kv_b_proj", "o_proj"}) if loaded.routers else "all-linear"
    adapters.add_adapter(loaded, rank=4, alpha=8, targets=some)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in loaded.adapter.layers.values() if adapter == "used" else ():
            layer.lora_B["default"].weight.copy_(
                0.1 * torch.randn(layer.lora_B["default"].weight.shape, generator=generator)
            )
    return loaded


def _numpy_fields(known: TokenBatch) -> dict[str, np.ndarray]:
    """What is known of the tokens of a sample, by name."""
    found = {f.name: getattr(known, f.name) for f in fields(known) if f.name not in ("sample", "teachers", "margins")}
    return {name: x.numpy() for name, x in found.items() if x is not None}


APART = {"ipc": FromIpc, "tcp": FromTcp}  # in which each rank gives its own shards


class Rank:
    """A trainer among its ranks, in a process of its own."""

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        self.rank, self.ranks = rank, ALONE  # type: int, Alone

    def meet(self) -> tuple[str, int]:
        self.meeting = Rendezvous("127.0.0.1")
        return self.meeting.address

    def join(self, address: tuple[str, int], mesh: Mesh, patience: float = 60) -> None:
        if dist.is_initialized():  # another mesh before this one
            self.trainer = None
            dist.destroy_process_group()
        meeting = self.meeting if self.rank == 0 else Rendezvous.connect_to(address)
        self.ranks = FsdpRank(self.rank, mesh, meeting, patience=patience)

    def make(
        self,
        kind: str,
        dtype: str = "float32",
        algo=None,
        *,
        teacher: bool = False,
        read: Sequence[str] = (),
        megatron: bool = False,
        **settings,
    ) -> None:
        """`teacher`: one that lies in memory; `read`: folders of others, each read for its own pass."""
        loaded, chosen = (
            made(kind, dtype, deferred=self.ranks.size > 1),
            TrainSettings(**{"lr": 1e-3, "critic_lr": 1e-3, "start_probe": 0, **settings}),
        )
        needs = algo.needs if algo else frozenset()
        if megatron:
            from rondel.models.megatron.layers import install_megatron_layers

            install_megatron_layers(loaded, self.ranks.tensor, run_twice=chosen.recompute == "layers")
        own = loaded if loaded.weights is not None else copy.deepcopy(loaded)
        critic = Critic(own, chosen, ranks=self.ranks) if "values" in needs else None
        self.trainer = LocalTrainer(
            loaded,
            chosen,
            run=inline,
            needs=needs,
            critic=critic,
            teachers=[Teacher(model("tied"))]
            if teacher
            else [self._read_teacher(folder, whole="teacher_hidden" in needs) for folder in read],
            ranks=self.ranks,
            transport=FromTensor(),
        )

    def _read_teacher(self, folder: str, *, whole: bool) -> Teacher:
        """The longer its name, the more it counts."""
        self.read_models: list[weakref.ref] = getattr(self, "read_models", [])

        def read_model() -> LoadedModel:
            loaded = made(f"from {folder}", "float32", deferred=self.ranks.size > 1 and not whole)
            loaded.model.requires_grad_(False)
            self.read_models.append(weakref.ref(loaded.model))
            return loaded

        return Teacher(None, weight=1.0 + len(Path(folder).name), read=read_model)

    def models_in_memory(self) -> tuple[int, int]:
        """Of those that were read for a pass: how many still are, and how many were."""
        return sum(each() is not None for each in self.read_models), len(self.read_models)

    def make_past_a_layer(self, kind: str) -> None:
        """As `make`, of a model whose second layer has no feed-forward part."""
        loaded = made(kind, "float32", deferred=True)
        loaded.model.model.layers[1].mlp.forward = lambda x: x
        self.ranks.shard_model(loaded)

    def load_counted(self, kind: str) -> tuple[int, int]:
        """Load a policy in shards. -> bytes of its weights here, and the most bytes of tensors alive at once."""
        with AliveBytes() as counted:
            held = self.ranks.shard_model(made(kind, "float32", deferred=True))
        own = [p for p in held.model.parameters() if not p.is_meta]
        return sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in own), counted.most

    def step_counted(self, b, algo, kind: str, **how) -> int:
        """Load a policy and take two steps, the second beside moments. -> the most bytes of tensors alive at once."""
        with AliveBytes() as counted:
            self.make(kind, algo=algo, **how)
            assert all(self.step(copy.deepcopy(b), algo)[0] for _ in range(2))
        return counted.most

    def gradient(self, b, algo, *, micro_tokens: int = 10**6, noted: bool = False) -> np.ndarray:
        """Of one update, whole, in one vector."""
        t = self.trainer
        t.main = replace(t.main, micro_tokens=micro_tokens)
        t.weights.zero_grad()
        if not noted:
            t._annotate(b, algo.needs)
            compute_advantages(b, algo)
        t._accumulate_gradients(b, algo, StepMetricSums(), proximal_noted=noted)
        t.weights.gradient_norm()
        return self._whole(t.weights, [torch.zeros_like(m) if m.grad is None else m.grad for m in t.weights.masters])

    def gathered_ahead(self, b, algo) -> dict[str, list[str]]:
        """Modules whose weights are asked for while another one computes, in the passes of one update."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as watched:
            self.gradient(b, algo)
        labels = {event.key.partition("_prefetch for ") for event in watched.key_averages()}
        return {
            way: sorted(name for of, cut, name in labels if cut and of == f"FSDP::{way}")
            for way in ("forward", "backward")
        }

    def limit_logits(self, entries: int) -> None:
        """Of a chunk."""
        logprobs.LOGITS = entries

    def gathered_bytes(self, b, algo) -> int:
        """Keys, values and their gradients that came to this rank of rows that ranks share, in one update."""
        moved = []

        def counting(own):
            def call(x, lengths, ranks):
                if x.ndim == 3:  # [tokens, heads, size]
                    moved.append((sum(lengths) - lengths[ranks.index]) * x[:1].nbytes)
                return own(x, lengths, ranks)

            return call

        def messages(ranks, sent, got):
            moved.extend(x.nbytes for x, _ in got)
            return own(ranks, sent, got)

        own = collectives.RankGroup.exchange_messages
        with pytest.MonkeyPatch.context() as patch:
            for name in ("gather_runs", "reduce_runs"):
                patch.setattr(collectives, name, counting(getattr(collectives, name)))
            patch.setattr(collectives.RankGroup, "exchange_messages", messages)
            self.gradient(b, algo)
        return sum(moved)

    def summed_bytes(self, b, algo) -> int:
        """Of tensors that this rank's groups sum whole, in one update."""
        summed, own = [], collectives.RankGroup.all_reduce

        def counting(ranks, x, *how):
            summed.append(x.nbytes)
            return own(ranks, x, *how)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collectives.RankGroup, "all_reduce", counting)
            self.gradient(b, algo)
        return sum(summed)

    def shift_once(self) -> None:
        """One step of a ring."""
        with self.ranks.collective_section("a step of a ring"):
            self.ranks.tensor.shift(torch.zeros(3), torch.zeros(3))()

    def dispatched_bytes(self, b, algo) -> int:
        """Rows that came to this rank's experts, what came back from others', and the gradients of both, in one update."""
        moved, own = [], collectives._all_to_all

        def counting(x, sent, got, ranks):
            moved.append((sum(got) - got[ranks.index]) * x.shape[1] * x.element_size())
            return own(x, sent, got, ranks)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collectives, "_all_to_all", counting)
            self.gradient(b, algo)
        return sum(moved)

    def _whole(self, w, pieces: list[torch.Tensor]) -> np.ndarray:
        """Tensors that are kept like the masters, of all stages of a pipeline, in one vector in the order of the model; what
        two stages hold is the same on both.
        """
        own = {name: w.gather_full(i, piece).flatten() for i, (name, piece) in enumerate(zip(w.names, pieces))}
        told: dict[str, torch.Tensor] = {}
        for found in self.ranks.all_gather_object(own):
            assert all(torch.equal(told[name], x) for name, x in found.items() if name in told)
            told |= found
        order = [name for name, _ in self.trainer.loaded.model.named_parameters() if name in told]
        return torch.cat([told[name] for name in order]).double().numpy()

    def step(self, b, algo) -> tuple[bool, dict[str, float], str, list[dict[str, np.ndarray]]]:
        done = _now(self.trainer.step(b, algo))
        return done.stepped, done.metrics, done.note, [_numpy_fields(s.known) for s in b.samples]

    def loss_scale(self, value: float | None = None) -> tuple[float, int]:
        """Of float16; `value`: from now on."""
        scale = self.trainer.weights.loss_scale
        scale.value = scale.value if value is None else value
        return scale.value, scale.finite

    def resident(self) -> dict[str, int]:
        """Numbers of this rank, by who is trained."""
        held = {"frozen": 0, "trained": 0}
        for p in (p for p in self.trainer.loaded.model.parameters() if not p.is_meta):
            held["trained" if p.requires_grad else "frozen"] += (p.to_local() if isinstance(p, DTensor) else p).numel()
        return held

    def reference(self, b) -> list[np.ndarray]:
        self.trainer._annotate(b, frozenset({"ref_logprobs"}))
        return [s.known.reference.numpy() for s in b.samples]

    def logprobs(self, tokens: list[int]) -> list[float]:
        return _now(self.trainer.logprobs(tokens))

    def weights(self) -> dict[str, np.ndarray]:
        return {name: t.float().numpy().copy() for name, t in self.ranks.full_weights(self.trainer.loaded.model)}

    def masters(self) -> np.ndarray:
        return self._whole(self.trainer.weights, [m.detach() for m in self.trainer.weights.masters])

    def save(self, path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        _now(self.trainer.save(path))

    def load(self, path) -> None:
        _now(self.trainer.load(path))

    def save_counted(self, path: Path) -> tuple[int, int]:
        """-> bytes of weights, masters and moments here, and the most bytes of tensors that saving made beside them."""
        with AliveBytes() as counted:
            self.save(path)
        held = [*self.trainer.weights.masters, *self.trainer.weights.state_tensors()["moments"]]
        return sum(t.nbytes for t in held), counted.most

    def restore_counted(self, path: Path) -> int:
        """-> the most bytes of tensors that loading a checkpoint made, what stays included."""
        with AliveBytes() as counted:
            self.load(path)
        return counted.most

    def move_to(self, node: str = "") -> None:
        """As if this rank were on another machine; by default back on this one, where other ranks of the next mesh are."""
        here: Any = SimpleNamespace(node=lambda: node) if node else platform
        part_checkpoint.platform = weight_publisher.platform = here

    def fill_disk(self) -> None:
        """What this rank writes next finds no room."""

        def full(*args):
            part_file._write_box = write
            raise OSError(28, "No space left on device")

        write, part_file._write_box = part_file._write_box, full

    def published(self) -> tuple[tuple[str, str], dict[str, str]] | None:
        if (told := _now(self.trainer.publish(Route("tensor")))) is None:
            return None  # it gave its shards to the first
        manifest, route = told
        return (manifest.root, manifest.base), {name: names.tensor_digest(t) for name, t in route.data.items()}

    def publish_apart(self, kind: str = "ipc") -> tuple[Any, int]:
        """-> (manifest and route, or None) of an update in which each rank writes its shards, and bytes gathered here."""
        trainer = self.trainer
        if not hasattr(trainer, "apart") or type(trainer.apart.transport) is not APART[kind]:
            trainer.apart = RankPublisher(trainer.loaded, self.ranks, APART[kind]())
        trainer.publisher, plain = trainer.apart, trainer.publisher
        try:
            return _now(trainer.publish(Route(kind))), trainer.apart.gathered
        finally:
            trainer.publisher = plain

    def change(self) -> None:
        with torch.no_grad():
            for p in self.trainer.loaded.model.parameters():
                (p.to_local() if isinstance(p, DTensor) else p).mul_(1.01)

    def layout(self) -> tuple[dict[str, TensorPart], dict[str, ShardCut]]:
        """What this rank holds of the weights, and how they are cut by tp or ep."""
        model, cuts = self.trainer.loaded.model, {}
        for found in (self.ranks._cuts.get(model), self.ranks._expert_cuts.get(model)):
            cuts |= found.cuts if found is not None else {}
        return self.ranks.weight_parts(model), cuts

    def break_transport(self) -> None:
        """What it writes next finds no memory."""
        transport = self.trainer.apart.transport

        def full(pieces):
            del transport.write_parts
            raise SyncError("there is no space for the weights")

        transport.write_parts = full


def _now(coroutine):
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waited")


class AliveBytes(TorchDispatchMode):
    """The most bytes of storage, made by operations inside, that were alive at once. What FSDP empties and keeps counts
    as long as it is full.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._alive: dict[int, Any] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in args if isinstance(x, torch.Tensor) and not x.is_meta}
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor) and x.device.type == "cpu" and type(x) is not DTensor:
                storage = x.untyped_storage()
                if storage._cdata not in given and not hasattr(storage, "_counted"):
                    storage._counted = True
                    self._alive[id(storage)] = weakref.ref(storage)
                    weakref.finalize(storage, self._alive.pop, id(storage), None)
        self.most = max(self.most, self.alive)
        return out

    @property
    def alive(self) -> int:
        found = [ref() for ref in list(self._alive.values())]
        return sum(storage.nbytes() for storage in found if storage is not None)


class EveryRank:
    """The same call on all ranks."""

    def __init__(self, ranks) -> None:
        self.ranks = ranks

    def __getattr__(self, verb):
        def call(*args, **how):
            asked = [rank.ask(verb, *args, **how) for rank in self.ranks]
            return [answer.result(120) for answer in asked]

        return call


@contextmanager
def meshes(folder: Path) -> Iterator[Callable[[Mesh], EveryRank]]:
    """All ranks of a mesh: processes that are made once, and leave one mesh for the next."""
    forkserver.OURS = ("rondel.", __name__)  # type: ignore[assignment]  # ranks begin with what this module imports
    cluster = ProcessCluster(folder)
    workers: list[Any] = []
    current: list[tuple[Mesh, EveryRank]] = []

    def of(mesh: Mesh) -> EveryRank:
        if not current or current[0][0] != mesh:
            workers.extend(cluster.spawn(f"rank-{r}", Rank, r) for r in range(len(workers), mesh.world))
            every = EveryRank(workers[: mesh.world])
            every.join(workers[0].now("meet"), mesh)
            current[:] = [(mesh, every)]
        return current[0][1]

    yield of
    cluster.close()


def apart(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def end_alike(
    alone: Rank, every: EveryRank, algo: Any, rollouts: Callable[[int], Any], folder: Path, *, exact: bool
) -> list[dict[str, float]]:
    """Two steps: equal metrics, masters and published weights. Then a checkpoint of the mesh loaded by one rank, one of
    one rank by the mesh, and a step more, for their moments. `exact`: in fp32. -> metrics of one rank's
    two steps.
    """
    near, far = (2e-4, 1e-5) if exact else (0.1, 2e-3)
    metrics: list[dict[str, float]] = []
    for number in range(2):
        (_, told, *_), theirs = alone.step(rollouts(number), algo), every.step(rollouts(number), algo)
        timed = {k for k in told if k.endswith("_s")} | {"train/packed_tokens", "train/weights_changed"}
        assert theirs[0][0] and theirs[0][1].keys() - {"train/shared_tokens"} == told.keys()
        for name in told.keys() - timed:
            assert theirs[0][1][name] == pytest.approx(told[name], rel=near, abs=near), name
            assert all(rank[1][name] == theirs[0][1][name] for rank in theirs), name
        metrics.append(told)
    assert all(apart(masters, alone.masters()) <= far for masters in every.masters())
    every.save(folder / "mesh")
    alone.load(folder / "mesh")
    np.testing.assert_array_equal(alone.masters(), every.masters()[0])
    assert every.published() == [alone.published()] + [None] * (len(every.ranks) - 1)
    alone.step(rollouts(7), algo)
    alone.save(folder / "one")
    every.load(folder / "one")
    for masters in every.masters():
        np.testing.assert_array_equal(masters, alone.masters())
    ours, theirs = alone.step(rollouts(8), algo), every.step(rollouts(8), algo)
    assert theirs[0][1]["train/grad_norm"] == pytest.approx(ours[1]["train/grad_norm"], rel=near)
    assert all(apart(masters, alone.masters()) <= far for masters in every.masters())
    return metrics


def hand_over(every: EveryRank, takers: int, kind: str = "ipc") -> None:
    """Weights of all ranks to an engine of so many: each part bit for bit, by digest, and as many bytes as the plan has;
    the ranks gather nothing. Several times, so that segments take turns.
    """
    layout, cuts = [own for own, _ in every.layout()], every.layout()[0][1]
    engines, got = [APART[kind]() for _ in range(takers)], []
    for _ in range(3):
        (root, _), digests = every.published()[0]
        ((manifest, route), gathered), *others = every.publish_apart(kind)
        assert (gathered, others) == (0, [(None, 0)] * (len(every.ranks) - 1))
        assert manifest.root == root and {t.name: t.digest for t in manifest.tensors} == digests
        size = {t.name: getattr(torch, t.dtype).itemsize for t in manifest.tensors}
        wholes = {t.name: TensorPart.whole(t.shape) for t in manifest.tensors}
        want = [{n: part_of(p, cuts.get(n), takers, i) for n, p in wholes.items()} for i in range(takers)]
        got = [dict(engine.receive_parts(route, manifest, parts)) for engine, parts in zip(engines, want)]
        whole = dict(APART[kind]().receive(route, manifest, {}))
        assert {name: names.tensor_digest(t) for name, t in whole.items()} == digests
        for i, parts in enumerate(got):
            for name, part in parts.items():
                truth = split_shards(whole[name], cuts[name], takers)[i] if name in cuts else whole[name]
                assert names.tensor_digest(part) == names.tensor_digest(truth), name
        for engine, parts, mine in zip(engines, want, got):
            planned = sum(c.bytes for c in plan_transfer(layout, [parts], size))
            assert engine.bytes_read == planned == sum(t.nbytes for t in mine.values())
        assert sum(written_bytes(route, size)) == route.bytes == sum(t.nbytes for t in whole.values())
        every.change()


def written_bytes(route: Route, itemsize: dict[str, int]) -> list[int]:
    """By each rank."""
    return [sum(math.prod(p.size) * itemsize[p.name] for p in pieces) for pieces in route.data.pieces]
