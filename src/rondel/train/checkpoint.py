"""Checkpoints: plain Hugging Face files, the optimizer apart, the manifest last.

checkpoints/step-000010/
    model.safetensors config.json tokenizer.json ...   what any other tool loads
    adapter_model.safetensors adapter_config.json      in their place where an adapter is
    trained, with base.json, which says of what optimizer.safetensors
    fp32 masters and AdamW moments: what a resume needs
    draft.safetensors                                  the same of a draft that is trained beside the policy
    critic.safetensors                                 the same of a critic, and how many steps it has taken part in
    policies/critic/                                   another policy of the run, with the
    files above: a model folder like any other state.json
    ledger, versions, numbers: what the loop needs
    manifest.json                                      sizes and checksums of all the above, written last
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rondel.core.errors import CheckpointError, error_boundary, size_text
from rondel.core.events import Warned, emit
from rondel.models import adapter_files, names
from rondel.models.save import make_readable, save_model
from rondel.system.files import (
    checkpoints_in,
    guard_write,
    make_folder,
    numbered_paths,
    step_of,
    sync_folder,
    sync_tree,
)
from rondel.train.part_checkpoint import OptimizerFile, lies_in_shards, save_parts

if TYPE_CHECKING:
    from rondel.models.loaded_model import LoadedModel
    from rondel.train.adaptive_coefs import AdaptiveCoefs
    from rondel.train.critic import Critic
    from rondel.train.draft import DraftTrainer
    from rondel.train.optim import MasterWeights
    from rondel.train.parallel import SingleRank


class TrainerState(Protocol):
    """What a checkpoint holds of a trainer."""

    loaded: LoadedModel
    weights: MasterWeights
    ranks: SingleRank
    critic: Critic | None
    draft: DraftTrainer | None
    coefs: AdaptiveCoefs
    step_number: int
    version: int
    bad_steps: int


MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"


# -- the trainer's part --------------------------------------------------------------------------


def save_trainer(trainer: TrainerState, folder: Path) -> None:
    """Model and optimizer into `folder`, then read back what can be checked cheaply. Ranks that have shards write them
    themselves, into the same files.
    """
    weights, loaded = trainer.weights, trainer.loaded
    optimizer = {
        "rng": torch.get_rng_state(),
        "numbers": torch.tensor([trainer.step_number, trainer.version, trainer.bad_steps]),
    }
    if trainer.coefs.values or trainer.coefs.rewards:
        optimizer |= trainer.coefs.stored()
    critic = trainer.critic
    trained = [weights, *([] if critic is None else [critic.weights])]
    if trainer.ranks.size > 1 and lies_in_shards(loaded, trained):
        files = [OptimizerFile("optimizer", weights, loaded.model, optimizer | _loss_scale(weights), alone=False)]
        if critic is not None:
            small = {"steps": torch.tensor(critic.steps)} | _loss_scale(critic.weights)
            files.append(OptimizerFile("critic", critic.weights, critic.loaded.model, small))
        save_parts(loaded, trainer.ranks, folder, files, bytes_needed(trainer))
        return
    file, state = (
        (MODEL, _model_tensors(trainer))
        if loaded.adapter is None
        else (adapter_files.WEIGHTS, dict(trainer.ranks.full_weights(loaded.model)))
    )
    masters, moments = _master_tensors(weights), _moments(weights)
    beside = {}  # every rank gives its shards of each
    if trainer.draft is not None:
        beside["draft"] = _master_tensors(trainer.draft.weights) | _moments(trainer.draft.weights)
    if trainer.critic is not None:
        beside["critic"] = _master_tensors(trainer.critic.weights) | _moments(trainer.critic.weights)
        beside["critic"]["steps"] = torch.tensor(trainer.critic.steps)
    if not trainer.ranks.is_leader:  # it gave its shards to the one that writes
        return
    with guard_write(folder, bytes_needed(trainer)):
        save_model(loaded, folder, state) if loaded.adapter is None else adapter_files.save_adapter(
            loaded, folder, state
        )
        plain = _stored_names(folder / file, state)
        rounded = loaded.adapter is None and loaded.dtype != torch.float32
        optimizer |= {
            key: master
            for key, master in masters.items()
            if rounded
            or (name := key.removeprefix("master.")) in weights.formatted_names
            or names.published_name(name) not in plain
        }
        save_file(optimizer | moments, folder / OPTIMIZER)
        for name, tensors in beside.items():
            save_file(tensors, folder / f"{name}.safetensors")


def _stored_names(path: Path, sent: dict[str, Tensor]) -> set[str]:
    """The names in a file that has all numbers of what was sent: a mixture's experts are
    joined in the module and apart there.
    """
    with safe_open(path, "pt") as written:
        plain = set(written.keys())
        arrived = sum(math.prod(written.get_slice(name).get_shape()) for name in plain)
    if arrived != (wanted := sum(t.numel() for t in sent.values())):
        lost = sorted(set(sent) - plain)
        raise CheckpointError(
            f"{arrived} of {wanted} numbers reached {path}" + (f", first missing {lost[0]}" if lost else "")
        )
    return plain


def _loss_scale(weights: MasterWeights) -> dict[str, Tensor]:
    """Of a model in float16, beside its moments."""
    return {} if weights.loss_scale is None else {"loss_scale": weights.loss_scale.state()}


def _master_tensors(weights: MasterWeights) -> dict[str, Tensor]:
    found = weights.gather_all(lambda i: {"master": weights.gather_full(i, weights.read_master(i))})
    return {f"master.{name}": tensors["master"].cpu() for name, tensors in found}


def _moments(weights: MasterWeights) -> dict[str, Tensor]:
    """The optimizer's state as `key.name`, and the loss scale."""
    return {
        f"{key}.{name}": value.cpu()
        for name, found in weights.gather_all(weights.moments)
        for key, value in found.items()
    } | _loss_scale(weights)


def _load_moments(weights: MasterWeights, saved: StoredTensors) -> None:
    if weights.loss_scale is not None and "loss_scale" in saved:
        weights.loss_scale.load(saved["loss_scale"])
    keys: dict[str, dict[str, str]] = {}
    for name in saved:
        key, _, of = name.partition(".")
        if of and key != "master":
            keys.setdefault(of, {})[key] = name
    for i, name in enumerate(weights.names):
        weights.load_moments(i, {key: saved[stored] for key, stored in keys.get(name, {}).items()})


def _model_tensors(trainer: TrainerState) -> dict[str, Tensor]:
    """Parameters, frozen ones too, and persistent buffers; a tied tensor once, under its first name."""
    model = trainer.loaded.model
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: t for name, t in model.state_dict().items() if name not in every}
    return {name: t.detach().cpu().contiguous() for name, t in [*trainer.ranks.full_weights(model), *buffers.items()]}


class StoredTensors(Mapping[str, Tensor]):
    """Tensors of a file, each read when it is asked for, under `prefix` + name. `behind`: those that the file lacks."""

    def __init__(self, path: Path, prefix: str = "", behind: Mapping[str, Tensor] | None = None) -> None:
        self._file, self._prefix, self._behind = safe_open(path, "pt"), prefix, behind or {}
        self._names = {name for name in list(self._file.keys()) if name.startswith(prefix)}

    def __getitem__(self, name: str) -> Tensor:
        if (stored := self._prefix + name) in self._names:
            return self._file.get_tensor(stored)
        return self._behind[names.published_name(name)]

    def __contains__(self, name: object) -> bool:
        return f"{self._prefix}{name}" in self._names or name in self._behind

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({name.removeprefix(self._prefix) for name in self._names} | set(self._behind)))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def load_trainer(trainer: TrainerState, folder: Path) -> None:
    """Masters, moments, step numbers; the compute copy is written in place, so an engine that shares it sees it too. A
    rank reads one tensor at a time, and keeps its part.
    """
    weights = trainer.weights
    with error_boundary(CheckpointError, f"reading {folder}"):
        model = (
            StoredTensors(folder / MODEL)
            if trainer.loaded.adapter is None
            else adapter_files.read_adapter(trainer.loaded, folder)
        )
        optimizer = StoredTensors(folder / OPTIMIZER)
        weights.load_masters(StoredTensors(folder / OPTIMIZER, "master.", behind=model))
        _load_moments(weights, optimizer)
        trainer.step_number, trainer.version, trainer.bad_steps = optimizer["numbers"].tolist()
        trainer.coefs.restore({name: optimizer[name] for name in optimizer if name.endswith("_coef")})
        torch.set_rng_state(optimizer["rng"])
        if trainer.critic is not None:
            path = folder / "critic.safetensors"
            trainer.critic.weights.load_masters(StoredTensors(path, "master."))
            saved = StoredTensors(path)
            _load_moments(trainer.critic.weights, saved)
            trainer.critic.steps = int(saved["steps"])
        if trainer.draft is not None:
            _load_draft(trainer.draft.weights, folder / "draft.safetensors")


def _load_draft(weights: MasterWeights, path: Path) -> None:
    """What a draft writes is judged by the policy, so one that begins anew costs time and no truth."""
    if not path.is_file():
        emit(
            Warned(
                f"{path.parent.name} holds no draft: it was written without training one. The draft starts again from "
                f"its own folder"
            )
        )
        return
    weights.load_masters(StoredTensors(path, "master."))
    _load_moments(weights, StoredTensors(path))


def bytes_needed(trainer: TrainerState) -> int:
    """Size of one checkpoint: compute copy, masters, moments; masters and moments of a draft and of a critic."""
    beside = sum(
        size * 12 for other in (trainer.draft, trainer.critic) if other is not None for size in other.weights.sizes
    )
    compute = sum(p.numel() * p.element_size() for p in trainer.weights.compute)
    masters = sum(size * 4 for size, copy in zip(trainer.weights.sizes, trainer.weights.has_copies) if copy)
    return round((beside + compute + masters + trainer.weights.moment_bytes) / trainer.weights.share)


# -- the folder ----------------------------------------------------------------------------------


class Checkpoints:
    """The checkpoints of one run: atomic, newest whole one wins, the last `keep` stay.
    What somebody else put there stays, too.

    needed  bytes of one
    pinned  the step of one that stays whatever its age
    """

    def __init__(self, folder: Path, keep: int, keeps_best: bool = False) -> None:
        self.folder, self.keep, self.keeps_best, self.needed = folder, keep, keeps_best, 0
        self.pinned: int | None = None

    def check_disk(self, needed: int) -> None:
        """Before the run starts: room for `keep` checkpoints and the one being written,
        less those that are there already.
        """
        make_folder(self.folder)
        most = self.keep + self.keeps_best
        self.needed, new = needed, most + 1 - min(most, len(self.list_checkpoints()))
        free, wanted = shutil.disk_usage(self.folder).free, needed * new
        if free < wanted:
            raise CheckpointError(
                f"{self.folder} has {size_text(free)} free, but {new} checkpoints of {size_text(needed)} need "
                f"{size_text(wanted)}: "
                "free some space, set run.checkpoint.keep lower, or move run.folder"
            )

    async def write(
        self,
        step: int,
        save: Callable[[Path], Awaitable[None]],
        state: dict[str, Any],
        encode: Callable[[Any], Any] | None = None,
    ) -> Path:
        """All files into a scratch folder, manifest last, then one rename. Files are read
        back on a thread: they may be large. What JSON cannot hold in `state` is encoded there, too, when its turn
        comes.
        """
        final, scratch = self.folder / f"step-{step:06d}", self.folder / f".writing-{step:06d}"
        with guard_write(final, self.needed):
            try:
                for left in numbered_paths(self.folder, ".writing-").values():  # of a run that died
                    shutil.rmtree(left, ignore_errors=True)
                scratch.mkdir(parents=True)
                await save(scratch)
                await asyncio.to_thread(self._finalize_checkpoint, scratch, final, step, state, encode)
            except Exception:
                shutil.rmtree(scratch, ignore_errors=True)
                raise
        return final

    def _finalize_checkpoint(
        self, scratch: Path, final: Path, step: int, state: dict[str, Any], encode: Callable[[Any], Any] | None
    ) -> None:
        """Nothing older goes before all of this one is on the disk: a power cut leaves one or the other."""
        for model in [scratch, *sorted(scratch.glob("policies/*"))]:
            make_readable(model)
        with (scratch / "state.json").open("w") as file:
            json.dump(state, file, default=encode)  # in pieces: `dumps` would have the interpreter for itself
        files = sorted(p for p in scratch.rglob("*") if p.is_file())
        rows = {p.relative_to(scratch).as_posix(): {"bytes": p.stat().st_size, "crc32": _file_crc(p)} for p in files}
        (scratch / "manifest.json").write_text(json.dumps({"step": step, "files": rows}, indent=1))
        sync_tree(scratch)
        shutil.rmtree(final, ignore_errors=True)
        scratch.rename(final)
        sync_folder(self.folder)
        # later ones are corrupt: a resume skipped them
        stay = [number for number in self.list_checkpoints() if number <= step][-self.keep :]
        for number, other in self.list_checkpoints().items():
            if number not in stay and number != self.pinned:
                shutil.rmtree(other, ignore_errors=True)

    def list_checkpoints(self) -> dict[int, Path]:
        """{step: folder} of what the run wrote, oldest first."""
        return checkpoints_in(self.folder)

    def find_latest(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest checkpoint whose manifest holds; corrupt ones are skipped with a
        message. None where there never was one.
        """
        flaws: list[str] = []
        for number, folder in reversed(self.list_checkpoints().items()):
            fault = find_flaw(folder)
            if fault is None:
                self._refuse_in_the_way(number)
                return folder, json.loads((folder / "state.json").read_text())
            flaws.append(f"{folder.name}: {fault}")
            emit(Warned(f"checkpoint {folder.name} is skipped: {fault}"))
        if flaws:
            raise CheckpointError(
                f"no checkpoint in {self.folder} is whole ({'; '.join(flaws)}): put a whole copy of one there under "
                "its own name, or begin again in another folder: --run.folder=..."
            )
        self._refuse_in_the_way(0)
        return None

    def _refuse_in_the_way(self, step: int) -> None:
        """A copy that lies where the run will write, under the number of another step."""
        for number, folder in numbered_paths(self.folder, "step-").items():
            if number > step and (of := step_of(folder)) not in (None, number):
                raise CheckpointError(
                    f"{folder} is a copy of step {of}, and the run will write its step {number} there: rename it, to "
                    f"{folder.name}-copy say"
                )


def find_flaw(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        files = json.loads((folder / "manifest.json").read_text())["files"]
        expected = {name: (row["bytes"], row["crc32"]) for name, row in files.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return f"its manifest cannot be read ({type(error).__name__}: {error})"
    for name in expected.keys() | {
        "state.json",
        adapter_files.WEIGHTS if adapter_files.CONFIG in expected else MODEL,
        OPTIMIZER,
    }:
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        size, crc = expected.get(name, (None, None))
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if _file_crc(path) != crc:
            return f"{name} is corrupt (checksum)"
    return None


def _file_crc(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            total = zlib.crc32(block, total)
    return total
