"""What a plan of a flow is asked: one diffusion transformer on some devices, and the work of a step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil
from typing import TYPE_CHECKING, Any

from rondel.core.errors import ConfigError
from rondel.core.mesh import Mesh
from rondel.planner.flow_shape import WIDTH, FlowShape, flow_shape
from rondel.planner.hardware import Hardware, find_hardware
from rondel.planner.workload import ON_THIS_CPU, QUESTIONS, loop_fields, parse_questions

if TYPE_CHECKING:
    from rondel.core.config.job import Job

PROMPT = 16  # tokens of a prompt, which is text: nothing beside P tokens of latents
ASKED = (  # what of --what-if a flow has, too
    "hardware",
    "gpus",
    "place",
    "trainers",
    "prompts",
    "group",
    "output",
    "micro",
    "running",
    "staleness",
    "updates",
    "epochs",
    "recompute",
)


@dataclass(frozen=True, slots=True)
class FlowWorkload:
    """`prompts` groups of `group` samples a step, each drawn in `output` denoising steps, of which every `every`-th is
    trained.

    mesh      of the devices that train; engines are one device each, and have the whole model
    micro     tokens of one forward and backward pass at most; a sample's trained steps are never divided
    running   samples that one engine denoises together
    proximal  a pass without a gradient before the updates;  reference: one of the starting weights
    """

    shape: FlowShape
    hardware: Hardware
    gpus: int = 1
    place: str = "shared"
    trainers: int = 0
    mesh: Mesh = field(default_factory=Mesh)
    prompts: int = 16
    group: int = 8
    output: int = 10
    every: int = 1
    micro: int = 16384
    running: int = 256
    staleness: int = 0
    in_flight: str = "hold"
    updates: int = 1
    epochs: int = 1
    recompute: str = "none"
    proximal: bool = False
    reference: bool = False
    sync: str = "auto"
    rank: int = 0  # of an adapter: a flow has none
    assumed: tuple[str, ...] = ()

    @property
    def split(self) -> bool:
        return self.place == "split"

    @property
    def has_one_module(self) -> bool:
        """Whether engine and trainer compute with the same tensors."""
        return not self.split and self.gpus == 1

    @property
    def train_devices(self) -> int:
        return self.trainers if self.split else self.gpus

    @property
    def engine_devices(self) -> int:
        return self.gpus - self.trainers if self.split else self.gpus

    @property
    def engine_count(self) -> int:
        """One device each."""
        return max(1, self.engine_devices)

    @property
    def samples(self) -> int:
        return self.prompts * self.group

    @property
    def trained_steps(self) -> int:
        """Denoising steps of a sample that have a gradient."""
        return ceil(self.output / self.every)

    @property
    def pass_samples(self) -> int:
        """Samples of one forward and backward pass."""
        steps = max(1, self.micro // self.shape.tokens)  # counted as training counts them: all of a sample
        return max(1, min(steps // (self.output + PROMPT), ceil(self.samples / self.updates / self.mesh.data)))

    @property
    def pass_steps(self) -> int:
        """Denoising steps of one pass: the M of models/flow/."""
        return self.pass_samples * self.trained_steps

    @property
    def passes(self) -> int:
        """Of each rank in an update; the last one may be idle."""
        return ceil(self.samples / self.updates / self.mesh.data / self.pass_samples)

    @property
    def drawn_together(self) -> int:
        """Samples that an engine denoises in one pass."""
        return max(1, min(self.running, ceil(self.samples * (self.staleness + 1) / self.engine_count)))

    @property
    def weight_bytes(self) -> float:
        """Of one whole copy that computes."""
        return self.sync_bytes

    @property
    def sync_bytes(self) -> float:
        return self.shape.parameter_count * WIDTH

    @property
    def unit(self) -> str:
        """What an engine draws, one after the other."""
        return "denoising steps"

    def on_devices(self, **more: Any) -> FlowWorkload:
        """The same on other devices; those that train are shards beside the tp and cp of the mesh,
        as far as they divide."""
        found = replace(self, **more)
        if found.split and not 0 < found.trainers < found.gpus:
            if found.gpus < 2:
                raise ConfigError("place = split needs at least 2 devices: gpus=2")
            found = replace(found, trainers=max(1, found.gpus // 2))
        if found.train_devices == found.mesh.world:
            return found
        left, cp = found.train_devices, self.mesh.cp
        tp = self.mesh.tp if left % self.mesh.tp == 0 else 1  # it must divide the heads, too
        while left // tp % cp:
            cp -= 1
        return replace(found, mesh=Mesh(shards=left // (tp * cp), cp=cp, tp=tp))


def flow_of_job(job: Job, device: str = "") -> FlowWorkload:
    """What the recipe says; `device` names hardware, else it is the place's."""
    where = find_hardware(device or ("h100" if job.place.device.startswith("cuda") else "cpu"))
    micro, split = job.trainer.micro_budget, job.place.kind == "split"
    ranks = job.place.mesh.to_mesh(job.place.ranks)
    every = job.task.env_settings.get("every", 1)
    return FlowWorkload(
        flow_shape(job.model.path),
        where,
        gpus=ranks.world + (job.place.engine_count if split else 0),
        trainers=ranks.world if split else 0,
        mesh=ranks,
        output=job.engine.sampling.max_tokens,
        every=every,
        micro=(16384 if where.on_gpu else 4096) if micro == "auto" else int(micro),
        proximal=job.loop.updates_per_step * job.loop.epochs > 1,
        reference=bool(job.algo.kl.get("coef")),
        assumed=() if device or job.place.device != "auto" else (ON_THIS_CPU,),
        **loop_fields(job),
    )


def flow_what_if(words: list[str], start: FlowWorkload) -> FlowWorkload:
    """["gpus=64", "hardware=h100"] laid over a recipe's setting."""
    if other := [word for word in words if (name := word.partition("=")[0]) in QUESTIONS and name not in ASKED]:
        raise ConfigError(f"--what-if {other[0]}: of a flow it is one of {', '.join(ASKED)}")
    given = parse_questions(words)
    if given.get("recompute") == "mlp":
        raise ConfigError("--what-if recompute=mlp: of a flow it is none or layers")
    assumed = tuple(text for text in start.assumed if text != ON_THIS_CPU or "hardware" not in given)
    if given.get("place") == "shared":
        given["trainers"] = 0
    return start.on_devices(**given, assumed=assumed)
