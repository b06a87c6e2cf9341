"""Whether models, which `rondel check` holds whole, can be cut as the processes of the run will cut them."""

from __future__ import annotations

from collections.abc import Callable

from rondel.assemble.engine_encoder import refuse_text_model
from rondel.assemble.run_components import Components
from rondel.core.config.job import Job
from rondel.core.errors import ConfigError, ModelError
from rondel.core.mesh import Mesh
from rondel.models.expert_parallel import check_experts, expert_parameters
from rondel.models.layer_split import layers_of_stage
from rondel.models.loaded_model import LoadedModel
from rondel.models.serving_part import SEVERAL, refuse_part
from rondel.models.step_head import StepHead
from rondel.models.tensor_parallel import check_tensor_parallel
from rondel.score.preflight import CheckFinding
from rondel.train.mesh_checks import refuse_mesh
from rondel.train.whole_blocks import check_blocks


def check_layouts(job: Job, parts: Components) -> list[CheckFinding]:
    """Of the trainer's ranks, and of engines of several processes."""
    mesh, found = job.place.mesh.to_mesh(job.place.ranks), list[CheckFinding]()
    if mesh.world > 1:
        megatron = job.place.mesh.layers == "megatron"
        found.append(_try_layout(f"place.mesh = {mesh}", lambda: _check_models(parts, mesh, megatron=megatron)))
    if job.place.engine_processes > 1:
        found.append(
            _try_layout(f"place.engines: {job.place.engine_sizes}", lambda: _check_engine(job, parts.trainer.loaded))
        )
    return found


def _check_engine(job: Job, loaded: LoadedModel) -> None:
    """What the processes of an engine would refuse as they load. Raises ConfigError, ModelError."""
    p = job.place
    if (size := p.engine_processes - p.engine_encoders) > 1:
        apart = p.engine_dp > 1
        whole = apart or p.engine_tp == 1
        refuse_part(loaded, size, whole=whole, experts_apart=p.engine_experts_apart)
        check_tensor_parallel(loaded.model, p.engine_tp, "engines of one process")
        if p.engine_experts_apart:
            check_experts(loaded.model, p.engine_tp * p.engine_dp, SEVERAL if apart else "leave ep out")
    if p.engine_encoders:
        refuse_text_model(loaded.name, loaded.sight)


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
    cuts = check_tensor_parallel(loaded.model, mesh.tp, overlap=mesh.overlap)
    if mesh.ep > 1:
        check_experts(loaded.model, mesh.ep)
        cuts = {name: cut for name, cut in cuts.items() if name not in expert_parameters(loaded.model)}
    check_blocks(loaded.model, mesh, cuts)
    if mesh.pp > 1:
        layers_of_stage(loaded.model, loaded.decoder, mesh.pp, 0, chunks=mesh.chunks)
