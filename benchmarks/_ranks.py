"""A trainer among its ranks, in a process of its own, that gives its gradient and counts the bytes of its collectives."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

# `single` as of torch 2.13
COLLECTIVES = (
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_reduce",
    "broadcast",
    "reduce",
    "recv",
)


def synthetic_groups(seed: int, *, groups: int, samples: int, prompt: int, new: int, long: int = 0) -> list[Any]:
    """Groups of random tokens: answers of different lengths to a prompt that their group shares; and one of a single
    answer of `long` tokens.
    """
    from rondel.core.types import Group, Score, Task, Trajectory

    rng = np.random.default_rng(seed)

    def answer(asked: list[int], exactly: int = 0) -> Any:
        t, n = Trajectory(), exactly or int(rng.integers(max(1, new // 2), new + 1))
        t.extend(asked)
        t.extend(rng.integers(5, 90, n).tolist(), logprobs=(-rng.uniform(2.0, 7.0, n)).tolist(), versions=[0] * n)
        t.score = Score(float(rng.normal()))
        return t

    prompts = [rng.integers(5, 90, prompt).tolist() for _ in range(groups)]
    found = [Group(i, Task(f"t{i}", "none", {}), [answer(p) for _ in range(samples)], 0) for i, p in enumerate(prompts)]
    if long:
        found.append(Group(groups, Task("long", "none", {}), [answer(prompts[0], exactly=long)], 0))
    return found


def synthetic_chains(loaded: Any, seed: int, *, groups: int, samples: int, new: int) -> list[Any]:
    """The same of a flow: denoising steps between random points, with the densities that the model gives them."""
    import torch

    from rondel.core.continuous_steps import ContinuousSteps
    from rondel.core.types import Group, Score, Task, Trajectory
    from rondel.models.packed_steps import PackedSteps

    rng = np.random.default_rng(seed)

    def chain(asked: list[int]) -> Any:
        t, n = Trajectory(), int(rng.integers(max(1, new // 2), new + 1))
        points = rng.normal(size=(2, n, loaded.head.dim))
        steps = ContinuousSteps.of(*points, sigma=rng.uniform(size=n), scale_x=0.9, scale_v=-0.2, std=0.7)
        t.extend(asked)
        with torch.no_grad():
            density = loaded.head.evaluate_steps(PackedSteps.of([steps.rows], [asked], "cpu"))[0].tolist()
        t.extend(list(range(n)), logprobs=density, versions=[0] * n, steps=steps)
        t.score = Score(float(rng.normal()))
        return t

    prompts = [rng.integers(5, 90, 3).tolist() for _ in range(groups)]
    return [Group(i, Task(f"t{i}", "flow", {}), [chain(p) for _ in range(samples)], 0) for i, p in enumerate(prompts)]


def lively_model(spec: dict[str, Any]) -> Any:
    """A random model whose weights are far from the flat start, where mistakes would cancel. A flow begins with weights of
    1 / sqrt(inputs): three times as large, float32 on one rank is 3e-4 from float64, and without, 3e-7. Recurrent layers
    are half as bad: three times as large, one rank is 3e-6 from float64 and 1.3e-6 from itself in other micro-batches.
    """
    import torch

    from rondel.models.load import load_model
    from rondel.models.step_head import StepHead

    torch.set_num_threads(1)
    loaded = load_model(spec, dtype="float32")
    times = 1.0 if isinstance(loaded.head, StepHead) else 1.5 if loaded.state_bytes else 3.0
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(times)
                if not parameter.any():  # of a flow the last layers begin at 0
                    torch.nn.init.normal_(parameter, std=0.1)
    return loaded


class RankTrainer:
    """`RankTrainer(0)` is one of several after `join`, and the only one without."""

    def __init__(self, rank: int) -> None:
        from rondel.train.parallel import ALONE

        self.rank, self.ranks = rank, ALONE

    def meet(self) -> tuple[str, int]:
        from rondel.train.fsdp import Rendezvous

        self.meeting = Rendezvous("127.0.0.1")
        return self.meeting.address

    def join(self, address: tuple[str, int], mesh: Any) -> None:
        from rondel.train.fsdp import FsdpRank, Rendezvous

        meeting = self.meeting if self.rank == 0 else Rendezvous.connect_to(address)
        self.ranks = FsdpRank(self.rank, mesh, meeting, patience=120)

    def weight_layout(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What this rank holds of the weights, and how they are cut by tp."""
        model = self.trainer.loaded.model
        cuts = self.ranks._cuts.get(model)
        return self.ranks.weight_parts(model), cuts.cuts if cuts else {}

    def move_weights(self) -> None:
        import torch

        with torch.no_grad():
            for master in self.trainer.weights.masters:
                master.mul_(1.001)

    def publish_by_ipc(self, apart: bool) -> tuple[Any, int]:
        """-> (manifest, route) on the first rank, and the bytes that came to this one."""
        from rondel.core.types import Route
        from rondel.sync.from_ipc import FromIpc
        from rondel.train.weight_publisher import RankPublisher

        if not hasattr(self, "publishers"):
            self.publishers = {way: RankPublisher(self.trainer.loaded, self.ranks, FromIpc()) for way in (True, False)}
            self.publishers[False]._parts["ipc"] = None
        publisher = self.publishers[apart]
        return publisher.publish(Route("ipc"), 0), publisher.gathered

    def make(self, spec: dict[str, Any], algo: Any) -> None:
        from rondel.train.critic import Critic
        from rondel.train.settings import TrainSettings
        from rondel.train.step import LocalTrainer

        async def here(function: Callable[..., Any], *args: Any) -> Any:
            return function(*args)

        loaded, chosen = lively_model(spec), TrainSettings(lr=1e-3, start_probe=0, every_answer=True)
        critic = Critic(copy.deepcopy(loaded), chosen, ranks=self.ranks) if "values" in algo.needs else None
        self.trainer = LocalTrainer(loaded, chosen, run=here, needs=algo.needs, critic=critic, ranks=self.ranks)

    def held_bytes(self) -> int:
        """Of weights, gradients and both moments of the policy, in fp32, on this rank."""
        return 16 * sum(m.numel() for m in self.trainer.weights.masters)

    def planned_bytes(self, mesh: Any) -> int:
        """The same of the fullest rank of a mesh, by what tp cuts and which layers a stage has, of this whole model."""
        from rondel.models.layer_split import layers_of_stage
        from rondel.models.tensor_parallel import check_tensor_parallel

        loaded = self.trainer.loaded
        apart = check_tensor_parallel(loaded.model, mesh.tp).keys()
        size = {}
        for name, p in loaded.model.named_parameters():
            cut = name in apart or (p.ndim > 1 and ".layers." not in name) or (mesh.ep > 1 and ".experts." in name)
            size[name] = p.numel() / (mesh.tp if cut else 1)
        stages = [
            layers_of_stage(loaded.model, loaded.decoder, mesh.pp, i, chunks=mesh.chunks).held for i in range(mesh.pp)
        ]
        return round(16 * max(sum(size[name] for name in held) for held in stages) / (mesh.shards * mesh.cp))

    def gradient(self, batch: Any, algo: Any, micro_tokens: int) -> tuple[np.ndarray, dict[str, int], int]:
        """Of one update, whole, in one vector; the bytes that this rank moved for it; the packed tokens that it saw."""
        moved, tokens, _ = self._accumulate(batch, algo, micro_tokens)
        self.trainer.weights.gradient_norm()
        return self._whole_gradient(), moved.bytes, sum(self.ranks.gather_data_ranks(tokens))

    def time_passes(self, batch: Any, algo: Any, micro_tokens: int, link: float) -> dict[str, float]:
        """`seconds` of the forward and backward passes of one update, those of them inside of collectives (`waited`), and
        `cpu` seconds of all threads. `link`: bytes a second that at most arrive.
        """
        moved, _, (seconds, cpu) = self._accumulate(batch, algo, micro_tokens, link)
        return {"seconds": seconds, "waited": moved.seconds, "cpu": cpu}

    def _accumulate(
        self, batch: Any, algo: Any, micro_tokens: int, link: float = math.inf
    ) -> tuple[MovedData, Any, tuple[float, float]]:
        """What the passes of one update moved, the packed tokens of this rank, and their seconds, of the clock and of CPU."""
        from rondel.train.annotate import compute_advantages
        from rondel.train.step_metrics import StepMetricSums

        t, sums = self.trainer, StepMetricSums()
        t.main = replace(t.main, micro_tokens=micro_tokens)
        t.weights.zero_grad()
        t._annotate(batch, algo.needs)
        compute_advantages(batch, algo)
        with counted_collectives(link) as moved:
            began, cpu = time.perf_counter(), time.process_time()
            t._accumulate_gradients(batch, algo, sums, proximal_noted=False)
            spent = time.perf_counter() - began, time.process_time() - cpu
        return moved, sums.packed, spent

    def _whole_gradient(self) -> np.ndarray:
        """Of all stages of a pipeline, in the order of the model."""
        import torch

        w = self.trainer.weights
        grads = [torch.zeros_like(m) if m.grad is None else m.grad for m in w.masters]
        own = {name: w.gather_full(i, grad).flatten() for i, (name, grad) in enumerate(zip(w.names, grads))}
        told = {name: grad for found in self.ranks.all_gather_object(own) for name, grad in found.items()}
        order = [name for name, _ in self.trainer.loaded.model.named_parameters() if name in told]
        return torch.cat([told[name] for name in order]).double().numpy()


@dataclass
class MovedData:
    """Bytes that a rank received, by operation, and the seconds that it spent in them.

    link  bytes a second of a slower link: no operation ends before its bytes could have come, and nobody computes meanwhile
    """

    bytes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    link: float = math.inf

    @contextmanager
    def operation(self, name: str, bytes_: float, since: float | None = None) -> Iterator[None]:
        """`since`: when its bytes set out; now without."""
        self.bytes[name] = self.bytes.get(name, 0) + round(bytes_)
        began = time.perf_counter()
        yield
        arrival = (began if since is None else since) + bytes_ / self.link
        time.sleep(max(0.0, arrival - time.perf_counter()))
        self.seconds += time.perf_counter() - began


@contextmanager
def counted_collectives(link: float = math.inf) -> Iterator[MovedData]:
    """What this rank receives: of S bytes over n ranks (n-1)/n S in a gather, a reduce-scatter or a broadcast of one's
    part, twice that in an all-reduce, and S from a neighbour, or from the one before in a ring. `link`: of `MovedData`.
    """
    import torch.distributed as dist

    from rondel.models.collectives import RankGroup

    moved = MovedData(link=link)

    def larger(args: tuple[Any, ...], how: dict[str, Any]) -> int:
        return max(x.nbytes for x in (*args, *how.values()) if hasattr(x, "nbytes"))

    def group_of(args: tuple[Any, ...], how: dict[str, Any]) -> Any:
        return how.get("group") or next((x for x in args if isinstance(x, dist.ProcessGroup)), None)

    def counting(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **how: Any) -> Any:
            group, bytes_ = group_of(args, how), larger(args, how)
            if name == "recv":
                share = 1.0
            elif name in ("broadcast", "reduce"):
                share = float(dist.get_rank(group) != max(how.get("group_src", -1), how.get("group_dst", -1)))
            else:
                share = (1 - 1 / dist.get_world_size(group)) * (2 if name == "all_reduce" else 1)
            with moved.operation(name, share * bytes_):
                return own(*args, **how)

        return call

    def exchange(ranks: RankGroup, x: Any, out: Any, sent: Any = None, got: Any = None) -> Any:
        """Received, rows of each rank; without `got` as many of each."""
        runs = got or [len(out) // ranks.size] * ranks.size
        with moved.operation("all_to_all", out[:1].nbytes * (sum(runs) - runs[ranks.index])):
            return own_exchange(ranks, x, out, sent, got)

    def messages(ranks: RankGroup, sent: Any, got: Any) -> Callable[[], None]:
        began = time.perf_counter()
        with moved.operation("messages", 0):
            wait = own_messages(ranks, sent, got)

        def timed_wait() -> None:
            with moved.operation("messages", sum(x.nbytes for x, _ in got), since=began):
                wait()

        return timed_wait

    own_exchange, own_messages = RankGroup.all_to_all, RankGroup.exchange_messages
    known = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}
    try:
        for name, own in known.items():
            setattr(dist, name, counting(name, own))
        RankGroup.all_to_all, RankGroup.exchange_messages = exchange, messages
        yield moved
    finally:
        RankGroup.all_to_all, RankGroup.exchange_messages = own_exchange, own_messages
        for name, own in known.items():
            setattr(dist, name, own)
