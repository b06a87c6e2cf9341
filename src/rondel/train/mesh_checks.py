"""Whether a model can lie over a mesh: what is refused by name, and what it must say once it is cut."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rondel.core.errors import ConfigError, ModelError
from rondel.core.mesh import Mesh
from rondel.system import sockets

if TYPE_CHECKING:
    from rondel.models.loaded_model import LoadedModel


def refuse_mesh(loaded: LoadedModel, mesh: Mesh) -> None:
    """What a model cannot do yet where several ranks compute one sample."""
    if mesh.tp * mesh.cp * mesh.ep * mesh.pp == 1:
        return
    if mesh.cp_attention == "ring" and (reads := _unlike_keys(loaded)):
        raise ConfigError(
            f"place.mesh = {mesh}: {reads} cannot go round a ring. Leave cp_attention out: they are gathered, "
            "in each layer"
        )
    for found, what in (
        (mesh.overlap and loaded.adapter is not None, "rows of layers with an adapter do not travel beside products"),
        (mesh.tp > 1 and loaded.in_four_bits, "a base in 4 bits cannot be cut by tp"),
        (
            mesh.cp > 1 and loaded.sight is not None and loaded.sight.mutual,
            "tokens of an image see those behind them, which ranks that share a row do not have",
        ),
        (
            mesh.tp * mesh.cp * mesh.ep > 1 and loaded.aligned,
            'numerics = "aligned" is proved for whole rows and matrices',
        ),
        (mesh.tp > 1 and loaded.indexers > 0, "an indexer cannot be cut by tp"),
        (mesh.tp > 1 and loaded.compressed, "compressed attention cannot be cut by tp"),
        (mesh.pp > 1 and loaded.compressed, "several residual streams cannot go from stage to stage of pp"),
        (mesh.pp > 1 and loaded.indexers > 0, "indexers cannot be laid apart by pp"),
    ):
        if found:
            raise ConfigError(f"place.mesh = {mesh}: {what}. Use shards or replicas instead")


def _unlike_keys(loaded: LoadedModel) -> str:
    """What the attention of a model reads of a row in place of keys and values."""
    if loaded.compressed:
        return "compressed entries of windows"
    if loaded.indexers:
        return "keys that an indexer chooses"
    latents = any(hasattr(module, "up_projection") for module in loaded.model.modules())
    return "latents, which are smaller than the keys made of them," if latents else ""


@contextmanager
def names_model(key: str) -> Iterator[None]:
    """An error about how a model lies over the mesh says which model: the recipe's key, where it is not the policy."""
    try:
        yield
    except (ConfigError, ModelError) as error:
        raise type(error)(f"{key}: {error}") from error


def check_cut(
    held: LoadedModel,
    mesh: Mesh,
    probe: list[int],
    expected: list[float],
    limit: float,
    logprobs_of: Callable[[LoadedModel, list[int]], list[float]],
    gather: Callable[[Any], list[Any]],
) -> None:
    """Cut over the ranks, a model must give the logprobs of `probe` that it gave whole, to `limit` nats on average;
    without those, it must run. `gather`: one value of each rank -> those of all.
    """
    fault = ""
    axis = next(f"{name} = {n}" for name in ("tp", "ep", "pp") if (n := getattr(mesh, name)) > 1)
    name = f"'{held.name}' ({held.model.config.model_type}): cut over {axis} ranks,"
    remedy = "some part of it cannot be cut that way. Use place.mesh with shards or cp instead"
    if mesh.sp and mesh.tp > 1:
        remedy += ", or leave overlap out" if mesh.overlap else ", or try sp = false"
    try:
        found = logprobs_of(held, probe)
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError, KeyError) as error:
        if is_timeout(error) or sockets.is_lost_peer(error):
            raise
        fault = f"{type(error).__name__}: {error}"
        found = [math.nan] if held.stage is None else held.stage.give_up(len(probe)).tolist()
    if fault := next(filter(None, gather(fault)), ""):
        raise ModelError(f"{name} it does not run ({fault}): {remedy}")
    held.model.reshard()  # what lies at the root waits for a backward pass
    gap = statistics.fmean(abs(a - b) for a, b in zip(found, expected or found))
    if not gap <= limit:
        raise ModelError(
            f"{name} its logprobs differ by {gap:.3g} from those of the whole model (limit {limit}): {remedy}"
        )


def is_timeout(error: BaseException) -> bool:
    """Whether a collective waited for a rank that did not come."""
    return "timed out" in (said := str(error).lower()) or "timeout" in said
