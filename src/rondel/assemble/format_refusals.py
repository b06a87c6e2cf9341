"""Number formats of weights (model.format) beside settings that do not go with them: each is refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rondel.core.errors import ConfigError

if TYPE_CHECKING:
    from rondel.algos.table import Algorithm
    from rondel.assemble.rows import AlgorithmRows
    from rondel.core.config.job import Job

PAGE = "docs/train.md#number-formats"
# formats with a scale for a whole tensor, and for whole rows (rondel.formats, which imports torch)
TENSOR_SCALES, ROW_SCALES = {"fp8_tensor", "nvfp4"}, {"fp8_row"}


def refuse_formats(job: Job, rows: AlgorithmRows) -> None:
    """What cannot be carried with the formats of this recipe."""
    if job.model.engine_format != "none" and job.place.engine_encoders:
        raise ConfigError(
            f'model.format with place.engines.encoders = {job.place.engine_encoders}: weights in "'
            f'{job.model.engine_format}" do not reach the tower of an encoder process. Leave one of them out',
            page=PAGE,
        )
    if job.model.engine_holds_codes:
        _check_held_codes(job)
    if job.model.trained_format != "none":
        _check_trained_format(job)
    if job.model.rollout_format != "none":
        _check_rollout_format(job, rows)


def _check_held_codes(job: Job) -> None:
    """An engine that keeps codes and scales."""
    odd = {
        "place.engines.tp, dp, prefill or encoders, whose processes cut or share decoded weights": job.place.engine_processes
        > 1,
        "engine.compile, which records where weights lie": bool(job.engine.compile),
        'trainer = "rounded" on one device, where the engine reads the trainer\'s own tensors (use place.kind = "split")': (
            job.place.one_module and job.model.rollout_format == "none"
        ),
    }
    for what, found in odd.items():
        if found:
            raise ConfigError(f'model.format: held = "encoded" with {what}. Leave one of them out', page=PAGE)


def _check_trained_format(job: Job) -> None:
    """A format on both sides: where the two would compute with different weights."""
    _check_cut_scales(job)
    odd = {
        f'model.adapter.kind = "{job.model.adapter.kind}", whose base is not trained': job.model.adapter.kind != "off",
        f"place.mesh.pp = {job.place.mesh.pp}, whose stages do not gather masters": job.place.mesh.pp > 1,
        f'engine.kind = "{job.engine.kind}", which rounds by rules of its own': job.engine.kind != "builtin",
    }
    for what, found in odd.items():
        if found:
            raise ConfigError(
                f'model.format = "{job.model.trained_format}" with {what}: the two sides would compute with different '
                "weights. Leave one of them out",
                page=PAGE,
            )


def _check_cut_scales(job: Job) -> None:
    """A scale of a whole tensor, or of a whole row, that the trainer's ranks cut whatever the sizes of the model are.
    Whether they cut blocks depends on these (train/whole_blocks.py), and `rondel check` finds out.
    """
    name, mesh = job.model.trained_format, job.place.mesh.to_mesh(job.place.ranks)
    for found, what, instead in (
        (
            name in TENSOR_SCALES and mesh.tp * mesh.cp * mesh.shards > 1,
            "a whole tensor",
            "mxfp8, fp8_row), or replicas alone",
        ),
        (name in ROW_SCALES and mesh.tp > 1, "a whole row", "mxfp8), or shards or cp instead of tp"),
    ):
        if found:
            raise ConfigError(
                f'model.format = "{name}" has a scale for {what}, which the ranks of place.mesh = {mesh} cut: take a '
                f"format whose blocks lie in rows (int4, mxfp4, {instead}",
                page=PAGE,
            )


def _check_rollout_format(job: Job, rows: AlgorithmRows) -> None:
    """A format of the engine alone: its tokens are another policy's, and what trains on them has to weigh that."""
    form = f'model.format = {{ engine = "{job.model.rollout_format}" }}'
    odd = {
        f'model.adapter.kind = "{job.model.adapter.kind}": only the adapter travels, and it is not rounded': (
            job.model.adapter.kind != "off"
        ),
        f'engine.kind = "{job.engine.kind}": a server rounds by rules of its own, which it is told as it starts': (
            job.engine.kind != "builtin"
        ),
        'engine.numerics = "aligned", which promises equal bits on both sides': job.engine.numerics == "aligned",
    }
    for what, found in odd.items():
        if found:
            raise ConfigError(f"{form} with {what}. Leave one of them out", page=PAGE)
    bare = [row for row in rows.all_rows if "advantages" in row.needs and not row.corrects_numerics]
    if bare:
        raise ConfigError(
            f"{form}: the engine draws from other weights than are trained, and algo.kind = '{bare[0].name}' takes its "
            f"tokens for the trainer's own{_what_it_has(bare[0])}. Set algo.correction.kind = 'importance', which "
            "weighs each token by proximal / behavior, or algo.ratio.anchor = 'behavior', whose clipped ratio starts "
            "at the "
            f'engine\'s logprobs, or round both sides: model.format = "{job.model.rollout_format}"',
            page=PAGE,
        )


def _what_it_has(row: Algorithm) -> str:
    kind = type(row.correction).__name__
    return f" ({kind} masks or ages tokens, and weighs none)" if row.corrects_staleness else ""
