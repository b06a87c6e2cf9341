"""Where the trainer's tensors lie while somebody else has the device: host memory, each
tensor the same object before and after.

    device   masters  moments  gradients  critic  draft's optimizer          reference,
             teacher: there for their own pass
                │ put ▲ fetch      └ spent: let go, zeros again                     │ put
                (nothing changed: no copy) ▲ fetch
    host     a room for each, pinned beside a GPU, kept from one time to the next

On a CPU the host is the device and nothing is saved; the copies and the count of bytes are
the same, so laws that hold here hold there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rondel.core.errors import RondelError, TrainError
from rondel.core.events import Warned, emit
from rondel.models.host import HostMemory
from rondel.models.mapped_weights import MappedWeights
from rondel.system.process_memory import release_freed_memory, storage_bytes

if TYPE_CHECKING:
    from rondel.core.protocols import MemoryClaim
    from rondel.models.loaded_model import LoadedModel
    from rondel.train.optim import MasterWeights

LEAST_MAPPED = 64 << 20  # bytes of a reference that are worth a file


class Offload:
    """What a trainer keeps, and whether it lies on the device; all on the device's thread.

    policy   its weights stay: the engine reads them, too
    owners   optimizers: of the policy, of a critic, of a draft
    beside   other models by what they are: "critic" is awake with the trainer; "reference" and
             teachers are there for their own pass only
    mapped   the file that the reference is read from; without a claim, on a CPU
    claim    on the memory of a device that an engine wants, too. With one the trainer begins
             asleep, without one nothing moves by itself
    high     most bytes on the device that were seen, until somebody sets it to 0 again
    """

    def __init__(
        self,
        policy: LoadedModel,
        owners: list[MasterWeights],
        beside: dict[str, LoadedModel | None],
        claim: MemoryClaim | None,
        folder: str = "",
    ) -> None:
        """`folder`: where the reference may have a file to be mapped from; empty, the system's for temporary files."""
        self.policy, self.owners, self.beside, self.claim = policy, owners, beside, claim
        self.host, self.asleep, self.high = HostMemory(), False, 0
        self.mapped = self._map_reference(folder) if claim is None else None
        if claim is not None:
            for owner in owners:
                owner.keep_whole()
            for name, model in beside.items():
                if name != "critic":
                    self.host.put(self._own_tensors(model))
            self.sleep()

    def _map_reference(self, folder: str) -> MappedWeights | None:
        """The reference in a mapped file, where it is large and lies in host memory; None where it stays."""
        reference = self.beside.get("reference")
        own = [t for t in self._own_tensors(reference) if isinstance(t, torch.nn.Parameter)]
        own = [t for t in own if type(t.data) is Tensor and t.is_cpu and not t.requires_grad]
        if reference is None or sum(t.nbytes for t in own) < LEAST_MAPPED:
            return None
        try:
            place = folder if Path(folder or "?").is_dir() else tempfile.gettempdir()
            return MappedWeights(reference.model, own, place)
        except RondelError as fault:
            emit(Warned(f"the starting weights stay in memory: {fault}"))
            return None

    def memory(self, seen: set[int] | None = None) -> dict[str, int]:
        """Bytes on the device by what they are, each storage once; those of `seen`, by address, were counted before."""
        seen = set() if seen is None else seen
        seen |= self.mapped.addresses if self.mapped is not None else set()
        models = {name: self._own_tensors(model) for name, model in self.beside.items()}
        states = {owner: owner.state_tensors() for owner in self.owners}
        optimizers = {
            name: [t for owner, state in states.items() if not owner.on_host for t in state[name]]
            for name in states[self.owners[0]]
        }
        what = {"weights": _module_tensors(self.policy), **models, **optimizers}
        count = storage_bytes if self._lies_here else self.host.resident_bytes
        return {name: count(tensors, seen) for name, tensors in what.items()}

    @property
    def _lies_here(self) -> bool:
        """Whether all of it is on the device: nobody claims its place, and it is awake."""
        return self.claim is None and not self.asleep

    def end_step(self) -> None:
        """Gradients are spent: what generates next has their place. Where all goes to the host, `sleep` clears them."""
        if self.claim is None:
            for owner in self.owners:
                owner.clear_grads()
        release_freed_memory()

    def sleep(self) -> None:
        if self.asleep:
            return
        for owner in self.owners:
            owner.clear_grads()
        self.host.put(self._step_state())
        self.asleep = True
        if self.claim is not None:
            self.claim.leave("trainer")

    def wake(self) -> None:
        if self.claim is not None:
            self.claim.take("trainer")
        self.host.fetch_tensors(self._step_state())
        for owner in self.owners:
            owner.restore_grads()
        self.asleep = False

    def offload_new_state(self) -> None:
        """What was made while it slept, by a checkpoint, sleeps too."""
        if self.asleep:
            self.host.put(self._step_state())

    @contextmanager
    def on_device(self, model: LoadedModel | None) -> Iterator[None]:
        """For a pass of a frozen model."""
        if self.claim is None:
            try:
                yield
            finally:
                if self.mapped is not None and model is not None and model is self.beside["reference"]:
                    self.mapped.release()
                    for copy in model.packed_copies:
                        copy.drop_packed()
            return
        mine = self._own_tensors(model)
        self.host.fetch_tensors(mine)
        if mine:
            self.high = max(self.high, sum(self.memory().values()))
        try:
            yield
        finally:
            self.host.put(mine, changed=False)

    def refuse_asleep(self, verb: str) -> None:
        if self.asleep:
            raise TrainError(f"{verb} of a trainer that is asleep: its optimizer lies in host memory; wake it first")

    def _step_state(self) -> list[Tensor]:
        """What a step needs and nobody else reads, of the device; an optimizer on the host never leaves it."""
        return [
            *(
                t
                for owner in self.owners
                if not owner.on_host
                for tensors in owner.state_tensors().values()
                for t in tensors
            ),
            *self._own_tensors(self.beside["critic"]),
        ]

    def _own_tensors(self, model: LoadedModel | None) -> list[Tensor]:
        """What a model has for itself: the base under an adapter is the policy's."""
        if model is None:
            return []
        policy = {id(t) for t in _module_tensors(self.policy)}
        return [t for t in _module_tensors(model) if id(t) not in policy]


def _module_tensors(loaded: LoadedModel) -> list[Tensor]:
    """All parameters and buffers, each once. Without the names that `parameters()` makes on its way: the tensors
    are asked for three times a step, on the event loop.
    """
    modules: list[torch.nn.Module] = [loaded.model]
    tensors: dict[int, Tensor] = {}
    known = {id(loaded.model)}
    for module in modules:
        tensors |= {id(t): t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None}
        for child in module._modules.values():
            if child is not None and id(child) not in known:
                known.add(id(child))
                modules.append(child)
    return [*tensors.values()]
