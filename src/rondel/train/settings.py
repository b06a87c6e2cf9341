"""Settings of a trainer, as numbers: what a recipe's sections trainer, loop,
algo and engine.sampling mean for one step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """What the recipe says about training; `temperature` is the sampler's, because it is part of the policy."""

    lr: float
    temperature: float = 1.0
    schedule: str = "constant"
    warmup_steps: int = 0
    steps: int = 1
    first_step: int = 0  # where the schedule starts counting
    clip: float = 1.0
    optimizer: str = "adamw"  # train/optimizers.py
    optimizer_on_host: bool = (
        False  # masters, gradients and moments in host memory, the step on the CPU (train/optim.py)
    )
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.99)
    micro_tokens: int = 4096
    micro_group: int = 0  # a larger group stays whole, with its prompt once, up to so many tokens
    shapes: tuple[tuple[int, int], ...] = ()  # (tokens, targets) that micro-batches are padded to; none: no padding
    shapes_grow: bool = False  # a sample that none of them holds adds one
    compile_passes: bool | Literal["record"] = False  # each of these shapes as one compiled or recorded graph
    updates_per_step: int = 1
    epochs: int = 1  # passes over the batch, all against the same proximal logprobs and the same advantages
    recompute: str = (
        "none"  # activations that the backward pass computes again: "mlp" or "layers" (models/recompute.py)
    )
    activations: str = (
        "device"  # where the inputs of layers wait for it: "host" or "disk" (models/activation_offload.py)
    )
    folder: str = ""  # of that file; empty, the system's for temporary files
    share_prompts: bool = True
    every_answer: bool = False  # those without an advantage are computed, too
    max_bad_steps: int = 3
    replay_routes: bool = False
    critic_lr: float = 1e-5
    critic_warmup: int = 0  # first steps of the critic, in which the policy stays bit for bit as it is
    rollout_format: str = ""  # number format of an engine that rounds its weights alone
    mismatch_bound: float = 1e-2  # K3 of fresh tokens, in nats a token, above which the run warns
    start_probe: int = 4  # samples a step, at most, on which the KL to the starting weights is measured; 0: never

    @property
    def optimizer_options(self) -> dict[str, Any]:
        """Of `MasterWeights`."""
        return {
            "optimizer": self.optimizer,
            "betas": self.betas,
            "weight_decay": self.weight_decay,
            "host": self.optimizer_on_host,
        }

    def at_rest(self) -> TrainSettings:
        """The same with lr = 0: a step that must change nothing, and looks at every answer."""
        return replace(
            self,
            every_answer=True,
            lr=0.0,
            critic_lr=0.0,
            critic_warmup=0,
            weight_decay=0.0,
            schedule="constant",
            warmup_steps=0,
            first_step=0,
        )
