"""`sandbox = { kind = ..., ... }` of task.env and task.reward: where code of the policy runs,
by the kind of substrate."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from rondel.core.config.section import CLOSED, LONGEST, read_settings, split_kind
from rondel.core.registry import one_of

LIMITS = ("memory", "cpu", "processes", "disk", "network")  # settings of every kind that are limits of a box


class SandboxConfig(BaseModel):
    """What every substrate has. An unset limit is that of the tool or the reward."""

    model_config = CLOSED
    memory: int | None = Field(None, ge=64 << 20, description="bytes of memory of one box")
    cpu: float | None = Field(None, gt=0, le=LONGEST, description="seconds of computing of each process of a box")
    processes: int | None = Field(None, ge=1, description="processes of a box at one time, threads among them")
    disk: int | None = Field(None, ge=1, description="bytes that a box may write")
    network: bool = Field(
        False, description="whether a box reaches the network; off, not even the host's own addresses"
    )
    warm: int = Field(
        0, ge=0, le=1000, description="boxes that wait started; each is used for one episode or test alone"
    )


class ContainerConfig(SandboxConfig):
    """Containers of an OCI image."""

    image: str = Field(
        "python:3.11-slim",
        description="the folder that `rondel sandbox image` wrote, a folder with a root file system, or the name of "
        "an image that the engine has or fetches (docker and podman alone)",
    )
    tool: Literal["auto", "docker", "podman", "crun", "runc"] = Field(
        "auto",
        description='what runs it: "auto" takes crun or runc for a folder, and docker or podman for a name',
    )


class GvisorConfig(SandboxConfig):
    """Containers whose kernel is gVisor's, by runsc."""

    image: str = Field(description="the folder that `rondel sandbox image` wrote, or one with a root file system")


class MachineConfig(SandboxConfig):
    """Virtual machines, whose init is the agent on the serial line."""

    kernel: str = Field(description="file of the kernel")
    root: str = Field(description="file of the root disk, whose init is the agent")


class RemoteConfig(SandboxConfig):
    """Boxes of a service, over its HTTP interface."""

    provider: Literal["e2b", "daytona", "kubernetes", "modal"] = Field(
        description="whose interface is spoken; its key is read from the environment, never from the recipe"
    )
    image: str = Field("", description="the template (e2b), snapshot (daytona) or image (kubernetes) of a box")
    url: str = Field("", description="where the service is, if it is not the provider's own address")
    timeout: float = Field(
        3600.0, gt=0, le=LONGEST, description="seconds after which the service itself ends a box that was forgotten"
    )
    namespace: str = Field("default", description="where boxes are made (kubernetes)")


SANDBOX_TABLES: dict[str, type[SandboxConfig]] = {
    "process": SandboxConfig,
    "namespaces": SandboxConfig,
    "bubblewrap": SandboxConfig,
    "container": ContainerConfig,
    "gvisor": GvisorConfig,
    "microvm": MachineConfig,
    "vm": MachineConfig,
    "http": RemoteConfig,
}


def read_sandbox(where: str, value: str | dict[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any], int]:
    """The kind, the settings of its own, the limits that are set, and how many boxes wait started. ConfigError or
    SettingsFault for what the kind does not have.
    """
    kind, settings = split_kind(value, "process")
    one_of(f"{where}.kind", kind, SANDBOX_TABLES)
    table = read_settings(where, SANDBOX_TABLES[kind], settings)
    values = table.model_dump()
    warm = values.pop("warm")
    limits = {name: found for name in LIMITS if (found := values.pop(name)) is not None}
    return kind, values, {**limits, "network": table.network}, warm
