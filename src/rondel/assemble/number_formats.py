"""What the number formats of a recipe (model.format) mean for the parts of its run."""

from __future__ import annotations

from rondel.core.config.job import Job
from rondel.formats import format_of

PROBE_GAP = {8: 1.0, 4: 6.0}  # nats a token on the probe, by the bits of an engine that rounds its weights alone


def rollout_bits(job: Job) -> float:
    """Of a weight of an engine that rounds its weights alone; 32 where it does not."""
    name = job.model.rollout_format
    return 32 if name == "none" else format_of(name).bits


def probe_gap(job: Job) -> float:
    """Largest allowed mean difference on the probe that the format explains, in nats a token: that the weights arrived
    is told by their digests.
    """
    bits = rollout_bits(job)
    return max((gap for width, gap in PROBE_GAP.items() if bits < width + 1), default=0.0)


def format_fact(job: Job) -> str:
    """For the run card."""
    if (name := job.model.engine_format) == "none":
        return "none: whole weights on both sides"
    bits = f"{name}, {format_of(name).bits:.4g} bits a weight"
    bits += ", held encoded" if job.model.engine_holds_codes else ""
    if job.model.rollout_format == "none":
        return f"{bits}, in engine, trainer and reference"
    return f"{bits}, in the engine alone: rollouts and evaluations are of rounded weights, training is of whole ones"
