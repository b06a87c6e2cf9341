"""Workers as Ray actors, on this machine or any of a Ray cluster: the same `spawn`, the same awaitable verbs.

One placement group holds a bundle for every worker, so that either all of them get their
devices or none. Ray numbers bundles as it likes; worker i is in the i-th by the
address of its node and then the GPU, so that
ranks that are neighbours are on one machine. An actor that ends, or does not answer a
ping for `patience` seconds while it is asked
for something, fails its calls by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import ipaddress
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rondel.core.clocks import running_time
from rondel.core.errors import ConfigError, SilentError, WorkerError
from rondel.core.events import Warned, emit, subscribe
from rondel.core.given_objects import pack_given, unpack_given
from rondel.runtime import busy
from rondel.runtime.cluster.process_activity import ProcessActivity, pid_namespace
from rondel.runtime.cluster.progress import WorkerProgress
from rondel.runtime.cluster.worker import START, RemoteWorker
from rondel.runtime.cluster.worker_main import portable_error
from rondel.system.signals import ENDING

NO_PROCESS = -1  # of which the kernel knows nothing
RESERVE = 120.0  # seconds that the cluster may take to find room for all workers


class RayCluster:
    """`names`: of the workers, in the order of their places; `address`: of a running cluster ("auto": the one of
    this machine), or None for one that lives as long as this process.
    """

    def __init__(
        self, names: Sequence[str], *, cpus: int = 1, gpus: int = 0, address: str | None = None, patience: float = 60.0
    ) -> None:
        workers = len(names)
        self.patience, self.cpus, self.gpus = patience, cpus, gpus
        self.workers: list[RayWorker] = []
        self._bundles: dict[str, int] = {}  # one that is started again goes where it was
        self._mine = not ray.is_initialized()
        if self._mine:
            path = os.pathsep.join(p or os.getcwd() for p in sys.path)
            more: dict[str, Any] = (
                {} if address else {"num_cpus": max(workers * cpus, os.cpu_count() or 1), "include_dashboard": False}
            )
            with own_signals():
                ray.init(
                    address=address or "local",  # without a word Ray would join whatever runs on this machine
                    runtime_env={"env_vars": {"PYTHONPATH": path}},
                    log_to_driver=True,
                    configure_logging=False,
                    **more,
                )
        warn_if_open()
        self._group = placement_group([{"CPU": cpus, **({"GPU": gpus} if gpus else {})}] * workers, strategy="PACK")
        if not self._group.wait(RESERVE):
            has = {k: v for k, v in ray.cluster_resources().items() if k in ("CPU", "GPU")}
            self.close()
            raise ConfigError(
                f"the Ray cluster found no room for {workers} workers of {cpus} CPU and {gpus} GPU within {RESERVE:g} "
                f"s; it has {has}. "
                "Use fewer place.engines and place.ranks, or wait until others have ended"
            )
        self._bundles = dict(zip(names, sort_bundles(self._find_bundles(workers)), strict=True))

    def _find_bundles(self, workers: int) -> list[tuple[str, list[int]]]:
        """The node and the GPUs of each bundle: the group tells the node, and only who is inside it sees its GPUs."""
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        gpus: list[list[int]] = [[] for _ in range(workers)]
        if self.gpus:
            inside = [self._bundle_strategy(i) for i in range(workers)]
            how = {"num_cpus": self.cpus, "num_gpus": self.gpus}
            probes: list[Any] = [ray.remote(BundleProbe).options(**how, scheduling_strategy=s).remote() for s in inside]
            gpus = [
                [int(gpu) for gpu in told]
                for told in ray.get([probe.gpus.remote() for probe in probes], timeout=RESERVE)
            ]
            for probe in probes:
                ray.kill(probe)
        return [(addresses[nodes[i]], gpus[i]) for i in range(workers)]

    def _bundle_strategy(self, bundle: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)

    def spawn(
        self, name: str, make: Callable[..., Any], *args: Any, cores: Sequence[int] = (), tells: bool = True
    ) -> RayWorker:
        """`cores` are this machine's and mean nothing on another: Ray places by its own count."""
        # one that joins later goes where Ray finds room
        place = self._bundle_strategy(self._bundles[name]) if name in self._bundles else "DEFAULT"
        actor = ray.remote(WorkerActor).options(
            name=f"rondel-{os.getpid()}-{name}-{len(self.workers)}",
            num_cpus=self.cpus,
            num_gpus=self.gpus,
            max_concurrency=4096,
            scheduling_strategy=place,
        )
        worker = RayWorker(
            name, actor.remote(name, tells, pack_given()), make, args, tells=tells, patience=self.patience
        )
        self.workers.append(worker)
        return worker

    def pids(self) -> dict[str, int]:
        """They may be on other machines, so nothing is said of them here."""
        return {}

    def dump(self) -> None:
        """Each actor writes its stacks into its log, which Ray shows here too."""
        for worker in self.workers:
            worker.dump()

    def close(self) -> None:
        for worker in self.workers:
            worker.dismiss()
        for worker in self.workers:
            worker.close()
        # and the group goes with the job: asked to remove it, Ray would wait without end for a node that has left
        if self._mine:
            ray.shutdown()
        else:
            with contextlib.suppress(RayError, AttributeError):
                remove_placement_group(self._group)


class EveryNode:
    """A worker on each node of a running cluster, in nobody's place: `workers` by name, each
    with the node's address; the driver's first.
    """

    def __init__(self, make: Callable[[], Any], *, address: str = "auto", patience: float = 60.0) -> None:
        self._mine = not ray.is_initialized()
        if self._mine:
            _check_reachable(address)
            try:
                with own_signals():
                    ray.init(address=address, log_to_driver=False, configure_logging=False)
            except ConnectionError as error:
                raise ConfigError(
                    f"no Ray cluster at '{address}': start one with `ray start --head`, or name another with --address"
                ) from error
        here = ray.get_runtime_context().get_node_id()
        alive = sorted(
            (n for n in ray.nodes() if n["Alive"]),
            key=lambda n: (n["NodeID"] != here, n["NodeManagerAddress"], n["NodeID"]),
        )
        self.workers: dict[str, tuple[str, RayWorker]] = {}
        for i, node in enumerate(alive):
            where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            name = f"node-{i}"
            actor = (
                ray.remote(WorkerActor)
                .options(num_cpus=0, scheduling_strategy=where, max_concurrency=64)
                .remote(name, False)
            )
            self.workers[name] = (
                node["NodeManagerAddress"],
                RayWorker(name, actor, make, (), tells=False, patience=patience),
            )

    def close(self) -> None:
        for _, worker in self.workers.values():
            worker.dismiss()
        for _, worker in self.workers.values():
            worker.close()
        if self._mine:
            ray.shutdown()


def _check_reachable(address: str) -> None:
    """Ray itself would try for a minute."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"nobody answers at '{address}' ({error}): is it the HOST:PORT that `ray start --head` printed?"
        ) from error


def asks_for_token() -> bool:
    """Once connected. Since 2.59 a Ray that a program starts for itself asks for one, and says so to that program."""
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def warn_if_open() -> None:
    """Ray's ports are on all interfaces."""
    if not asks_for_token():
        emit(
            Warned(
                f"this Ray cluster (Ray {ray.__version__}) asks nobody for a token: whoever reaches a port of its "
                f"machines can run code there. Set "
                "RAY_AUTH_MODE=token on all of them (Ray 2.52 or newer, "
                "https://docs.ray.io/en/latest/ray-security/token-auth.html)"
            )
        )


@contextlib.contextmanager
def own_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself, prints a stack and leaves; a run that is asked to end keeps
    a checkpoint first (runtime/termination.py).
    """
    before = {number: signal.getsignal(number) for number in ENDING}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


class BundleProbe:
    """Looks around in a bundle."""

    def gpus(self) -> list[Any]:
        return ray.get_gpu_ids()


def sort_bundles(bundles: Sequence[tuple[str, Sequence[int]]]) -> list[int]:
    """Numbers of (node, GPUs), by the node's address as numbers and then the GPUs:
    10.0.0.2 comes before 10.0.0.10.

    A host name counts as its address, and one without an address by its letters, behind all others.
    """

    def address_key(node: str) -> tuple[int, bytes]:
        try:
            return 0, ipaddress.ip_address(node).packed
        except ValueError:
            pass
        try:
            return 0, ipaddress.ip_address(socket.gethostbyname(node)).packed
        except (OSError, UnicodeError, ValueError):
            return 1, node.encode()

    known = {node: address_key(node) for node, _ in bundles}
    return sorted(range(len(bundles)), key=lambda i: (known[bundles[i][0]], bundles[i][0], list(bundles[i][1]), i))


class WorkerActor:
    """The actor: one object, the calls on it, and what it tells."""

    def __init__(self, name: str, tells: bool, given: bytes = b"") -> None:
        unpack_given(given)
        self.name, self.object = name, None
        busy.is_watched = True
        self.progress: WorkerProgress | None = None
        self.told: queue.SimpleQueue[Any] = queue.SimpleQueue()  # events come from any thread of the object
        if tells:
            subscribe(self.told.put)

    def __repr__(self) -> str:
        """Ray puts it before every line of the actor's log, and into its dashboard."""
        return self.name

    async def where(self) -> str:
        return ray.util.get_node_ip_address()

    async def find_process(self) -> tuple[str, int]:
        return pid_namespace(), os.getpid()

    async def ping(self) -> Any:
        """A sign that differs from the last one if anything advanced."""
        if self.progress is None:
            self.progress = WorkerProgress()
            self.turning = asyncio.get_running_loop().create_task(self.progress.count_turns())
        return self.progress.liveness_sign()

    async def dump(self) -> None:
        """Its stacks, to where Ray keeps its output; no signal reaches another machine."""
        faulthandler.dump_traceback(all_threads=True)

    async def listen(self) -> list[Any]:
        """Events since the last time; waits for one."""
        events = [await asyncio.to_thread(self.told.get)]
        while not self.told.empty():
            events.append(self.told.get())
        return events

    async def call(self, verb: str, words: bytes, after: object = None) -> tuple[str, Any]:
        """`words` are packed here and not by Ray, whose arrays cannot be written to.
        Ray begins it when it has what `after` names."""
        try:
            args, how = cloudpickle.loads(words)
            if not verb:
                make, made_of = args
                self.object = make(*made_of)
                return "result", None
            value = getattr(self.object, verb)(*args, **how)
            return "result", await value if asyncio.iscoroutine(value) else value
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return "error", portable_error(error, self.name, verb or "build")


class RayWorker(RemoteWorker):
    """An actor."""

    def __init__(
        self, name: str, actor: Any, make: Callable[..., Any], args: tuple[Any, ...], *, tells: bool, patience: float
    ) -> None:
        super().__init__(name, patience)
        self._actor = actor
        self._refs: dict[int, Any] = {}
        self._process = self._built = actor.find_process.remote()
        self._activity: ProcessActivity | None = None  # if it is on this machine
        self._made = self.ask("", make, args)
        self._closed = threading.Event()
        works = (self._watch, *([self._listen] if tells else []))
        self._threads = [
            threading.Thread(target=work, name=f"{name}-{work.__name__[1:]}", daemon=True) for work in works
        ]
        for thread in self._threads:
            thread.start()

    @property
    def host(self) -> str:
        """By which other workers reach it."""
        return ray.get(self._actor.where.remote(), timeout=START)

    def dismiss(self) -> None:
        """End the actor, and wait for nothing."""
        self._mark_lost(f"worker {self._name} was closed")
        self._closed.set()
        self._kill_actor()

    def close(self) -> None:
        self.dismiss()
        for thread in self._threads:  # one that asked after the shutdown would start another Ray
            thread.join(10)

    def dump(self) -> None:
        if not self._over:
            self._actor.dump.remote()

    def _send_call(self, number: int, verb: str, args: tuple[Any, ...], how: dict[str, Any]) -> None:
        # Ray does not keep the order of calls: first its process, for one that is built answers nothing; then what it is
        after = self._built if verb else self._process
        ref = self._refs[number] = self._actor.call.remote(verb, cloudpickle.dumps((args, how)), after)
        if not verb:
            self._built = ref
        ref.future().add_done_callback(lambda done: self._on_answer(number, done))

    def _cancel_call(self, number: int) -> None:
        if not self._over and (ref := self._refs.get(number)) is not None:
            ray.cancel(ref)

    def _on_answer(self, number: int, done: Future[Any]) -> None:
        self._refs.pop(number, None)
        try:
            self._resolve_call(number, *done.result())
        except RayActorError as error:  # all its calls end so, and it is not asked again
            self._mark_lost(f"worker {self._name} ended: {' '.join(str(error).split())}")
            # this thread is Ray's own: its calls would wait for themselves
            threading.Thread(target=self._kill_actor, daemon=True).start()
        except BaseException as error:
            self._resolve_call(number, "error", WorkerError(f"worker {self._name}: {type(error).__name__}: {error}"))

    def _kill_actor(self) -> None:
        with contextlib.suppress(RayError):
            ray.kill(self._actor)

    def _listen(self) -> None:
        while not self._over:
            try:
                events = ray.get(self._actor.listen.remote())
            except Exception:
                return
            for event in events:
                self._forward_event(event)

    def _watch(self) -> None:
        last, since = None, running_time()
        while not self._closed.wait(self._patience / 4) and not self._over:
            limit = self._silence_limit
            how = f"gives no sign of life for {limit:g} s"
            try:
                sign = self._wait_for_sign(since + limit)
                if sign != last or not self._pending_verbs():
                    last, since = sign, running_time()
                still = running_time() - since > limit
            except GetTimeoutError:
                still = True
                if self._is_stopped():
                    how = f"is stopped by a signal or a debugger for {self._patience:g} s"
            except Exception:
                return
            if not still:
                continue
            if waiting := self._pending_verbs():
                self._mark_lost(f"worker {self._name} {how}, asked for: {waiting}", SilentError)
                self._kill_actor()
            since = running_time()

    def _wait_for_sign(self, deadline: float) -> Any:
        """GetTimeoutError if none comes, at once where it is known to be stopped."""
        ping = self._actor.ping.remote()
        while True:
            left = deadline - running_time()
            try:
                return ray.get(ping, timeout=max(0.1, min(left, self._patience / 4)))
            except GetTimeoutError:
                if left <= self._patience / 4 or self._is_stopped():
                    raise

    def _is_stopped(self) -> bool:
        """For longer than patience, as the kernel of this machine tells it; False where it is on another."""
        if self._activity is None:
            if not ray.wait([self._process], timeout=0)[0]:
                return False
            namespace, pid = ray.get(self._process)
            self._activity = ProcessActivity(pid if namespace and namespace == pid_namespace() else NO_PROCESS)
        self._activity.look()
        return self._activity.is_stopped and self._activity.idle_seconds > self._patience
