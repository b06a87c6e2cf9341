"""Whether models, which `rondel check` holds whole, can be cut as the processes of the run will cut them."""

from __future__ import annotations

from collections.abc import Callable

from rondel.assemble.run_components import Components
from rondel.core.config.job import Job
from rondel.core.errors import ConfigError, ModelError
from rondel.core.mesh import Mesh
from rondel.models.expert_parallel import check_experts
from rondel.models.layer_split import layers_of_stage
from rondel.models.loaded_model import LoadedModel
from rondel.models.serving_part import SEVERAL
from rondel.models.step_head import StepHead
from rondel.models.tensor_parallel import check_tensor_parallel
from rondel.score.preflight import CheckFinding
from rondel.train.mesh_checks import refuse_mesh


def check_layouts(job: Job, parts: Components) -> list[CheckFinding]:
    """Of the trainer's ranks, and of engines of several processes."""
    mesh, found = job.place.mesh.to_mesh(job.place.ranks), list[CheckFinding]()
    tp, dp = job.place.engine_tp, job.place.engine_dp
    if mesh.world > 1:
        megatron = job.place.mesh.layers == "megatron"
        found.append(_try_layout(f"place.mesh = {mesh}", lambda: _check_models(parts, mesh, megatron=megatron)))
    if tp > 1:
        loaded = parts.trainer.loaded
        what = f"place.engines: tp = {tp}"
        found.append(_try_layout(what, lambda: check_tensor_parallel(loaded.model, tp, "engines of one process")))
    if dp > 1:
        model = parts.trainer.loaded.model
        found.append(_try_layout(f"place.engines: dp = {dp}", lambda: check_experts(model, dp, SEVERAL)))
    return found


def _check_models(parts: Components, mesh: Mesh, *, megatron: bool) -> None:
    for trainer in parts.placed.trainers.values():
        if not isinstance(trainer.loaded.head, StepHead):
            _check_layout(trainer.loaded, mesh)
            if megatron:
                from rondel.models.megatron.layers import refuse_model

                refuse_model(trainer.loaded, mesh.tp)


def _try_layout(what: str, attempt: Callable[[], object]) -> CheckFinding:
    try:
        attempt()
    except (ConfigError, ModelError) as error:
        return CheckFinding("layout", False, str(error), "docs/place.md says what can be cut how")
    return CheckFinding("layout", True, f"{what}: heads, experts and layers divide")


def _check_layout(loaded: LoadedModel, mesh: Mesh) -> None:
    """What its ranks would refuse. Raises ConfigError, ModelError."""
    refuse_mesh(loaded, mesh)
    check_tensor_parallel(loaded.model, mesh.tp, overlap=mesh.overlap)
    if mesh.ep > 1:
        check_experts(loaded.model, mesh.ep)
    if mesh.pp > 1:
        layers_of_stage(loaded.model, loaded.decoder, mesh.pp, 0, chunks=mesh.chunks)
