"""[trainer]: optimizer, critic, micro-batches, offloading."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from rondel.core.config.section import ConfigSection, Count, SettingsTable

Beta = Annotated[float, Field(ge=0, lt=1)]


class CriticConfig(SettingsTable):
    """The critic of a row that needs values: its own backbone with one number a token."""

    lr: float = Field(1e-5, ge=0, description="its own, under the trainer's schedule")
    warmup: int = Field(
        0, ge=0, description="first steps in which only the critic learns; the policy stays bit for bit as it is"
    )
    path: str | dict[str, Any] | None = Field(
        None, description="where its backbone starts, as model.path; unset, a copy of the policy"
    )


class OptimizerConfig(SettingsTable):
    """The optimizer beside its learning rate."""

    kind: Literal["adamw", "adamw_8bit", "muon"] = Field(
        "adamw",
        description="adamw; adamw_8bit: its moments in 8 bits, 2 bytes of a number in place of 8 (arXiv:2110.02861); "
        "muon: matrices of the layers move orthogonally, at AdamW's rate (arXiv:2502.16982), the rest by AdamW",
    )
    warmup_steps: int = Field(0, ge=0, description="steps in which the learning rate rises to lr")
    weight_decay: float = Field(0.0, ge=0, description="on matrices only")
    betas: tuple[Beta, Beta] = Field((0.9, 0.99), strict=False, description="of AdamW; Muon has a momentum of 0.95")


class MemoryConfig(SettingsTable):
    """What costs time and saves memory. No setting changes a result."""

    recompute: Literal["none", "mlp", "layers"] = Field(
        "none",
        description="activations that are not kept for the backward pass but computed again in it: none, those of "
        "feed-forward parts, or all but the input of each layer (arXiv:1604.06174)",
    )
    activations: Literal["device", "host", "disk"] = Field(
        "device",
        description='where the inputs of layers wait for the backward pass under recompute = "layers": on the device, '
        "in host memory beside a GPU, or in a file in the folder of the run",
    )
    optimizer: Literal["device", "host"] = Field(
        "device",
        description="where masters, gradients and moments lie and the step is taken: on the GPU, or in host memory by "
        "the CPU (arXiv:2101.06840); 2 bytes of a number stay on the GPU in bfloat16, and gradients and weights travel",
    )
    offload: bool = Field(
        False,
        description="shared device: while the engine writes, optimizer, critic, reference and teacher lie in host "
        "memory, while the trainer works there is no KV cache; reference and teacher are on the device for their own "
        "pass only",
    )

    teachers: Literal["all", "one"] = Field(
        "all",
        description="teachers with a path that lie in memory: all of them, or one at a time, which is read from its "
        "files for its own pass in every step",
    )

    @model_validator(mode="after")
    def _require_recompute(self) -> MemoryConfig:
        kept, parts = self.__dict__["activations"], self.__dict__["recompute"]
        if kept != "device" and parts != "layers":
            raise ValueError(
                f'activations = "{kept}" moves the inputs of layers, and recompute = "{parts}" keeps more than these: '
                'set recompute = "layers", or remove it'
            )
        return self


class StaticShapesConfig(SettingsTable):
    """Micro-batches of a few fixed shapes. Padding counts in no result and no figure."""

    buckets: Annotated[list[Count], Field(min_length=1, max_length=64)] | Literal["auto"] = Field(
        "auto",
        description="tokens of each shape, as `[256, 512]`; auto: powers of two up to `most`, at most six, and for a "
        "longer sample one more",
    )
    targets: Annotated[list[Count], Field(min_length=1, max_length=64)] | Literal["auto"] = Field(
        "auto", description="trained tokens of each shape, one for each of `buckets`; auto: as many as it has tokens"
    )
    most: Count | Literal["auto"] = Field("auto", description='tokens of the largest shape with buckets = "auto"')
    compile: bool | Literal["record"] = Field(
        False,
        description="forward and backward pass of each shape as one graph, compiled by torch's inductor when the shape "
        'is first met; "record": as a CUDA graph, without a compiler',
    )

    @model_validator(mode="after")
    def _require_pairs(self) -> StaticShapesConfig:
        buckets, targets, most = (self.__dict__[name] for name in ("buckets", "targets", "most"))
        if targets != "auto" and (buckets == "auto" or len(targets) != len(buckets)):
            raise ValueError(f"targets = {targets} goes with as many buckets, and buckets = {buckets}")
        if most != "auto" and buckets != "auto":
            raise ValueError(f'most = {most} is for buckets = "auto", and these are {buckets}: remove it')
        return self


class TrainerConfig(ConfigSection):
    lr: float = Field(1e-5, ge=0, description="learning rate")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="of the learning rate after its warmup"
    )
    clip: float = Field(1.0, gt=0, allow_inf_nan=True, description="global gradient norm; inf clips nothing")
    optimizer: OptimizerConfig = Field(
        OptimizerConfig(), description="the optimizer beside its learning rate: kind, warmup_steps, weight_decay, betas"
    )
    micro_tokens: Annotated[Count | Literal["auto"], Tag("int")] | Annotated[StaticShapesConfig, Tag("[table]")] = (
        Field(
            "auto",
            discriminator=Discriminator(
                lambda given: "[table]" if isinstance(given, (dict, StaticShapesConfig)) else "int"
            ),
            description="tokens in one forward and backward pass; speed and memory, never the result; or the table of "
            'a few fixed shapes, `{ buckets = "auto" }`',
        )
    )
    routing_replay: bool | Literal["auto"] = Field(
        "auto", description="a MoE's tokens go to the experts that the engine chose; auto: if it has any"
    )
    memory: MemoryConfig = Field(
        MemoryConfig(), description="what costs time and saves memory: recompute, activations, optimizer, offload"
    )
    critic: CriticConfig = Field(CriticConfig(), description="of a row that needs values")
    max_bad_steps: int = Field(3, ge=1, description="stop after so many steps in a row that a finite-check refused")

    @property
    def static_shapes(self) -> StaticShapesConfig | None:
        """Of micro-batches that are padded to a few shapes."""
        return self.micro_tokens if isinstance(self.micro_tokens, StaticShapesConfig) else None

    @property
    def micro_budget(self) -> int | Literal["auto"]:
        """Tokens in one forward and backward pass."""
        given = self.micro_tokens
        if not isinstance(given, StaticShapesConfig):
            return given
        return given.most if given.buckets == "auto" else max(given.buckets)
