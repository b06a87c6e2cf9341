"""[place]: devices and processes."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rondel.core.config.section import LONGEST, ConfigSection


class PlaceConfig(ConfigSection):
    kind: Literal["shared", "split"] = Field(
        "shared", description="engine and trainer on one device, or on devices of their own"
    )
    cluster: Literal["auto", "local", "process", "torchrun", "ray"] = Field(
        "auto",
        description="where they run: in this process, in processes of their own, as Ray actors; auto: local if shared, "
        "process if split",
    )
    engines: int = Field(1, ge=1, le=4096, description="engines of a split run")
    ranks: int = Field(
        1, ge=1, le=4096, description="processes among which the trainer's weights lie in shards (FSDP2)"
    )
    address: str | None = Field(
        None, description='of a running Ray cluster: "auto", "ray://host:10001"; unset, one is started'
    )
    patience: float = Field(
        60.0,
        gt=0,
        le=LONGEST,
        description="seconds without progress in what it was asked for after which a process counts as stuck",
    )
    device: str = Field("auto", description='"cpu", "cuda", "cuda:1"; "auto" takes a GPU if there is one')
    threads: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = Field(
        "auto", description='CPU threads; "auto" is all that this process may use'
    )

    @model_validator(mode="after")
    def _check_together(self) -> PlaceConfig:
        mine = self.__dict__
        if mine["address"] is not None and not re.fullmatch(
            r"auto|local|(ray://)?(\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}", mine["address"]
        ):
            raise ValueError(
                f'address = "{mine["address"]}" is none of Ray: it is "auto", "host:6379" or "ray://host:10001"'
            )
        if mine["cluster"] == "auto":
            object.__setattr__(self, "cluster", "process" if mine["kind"] == "split" else "local")
        if mine["kind"] == "shared" and mine["cluster"] != "local":
            raise ValueError(f'cluster = "{mine["cluster"]}" needs kind = "split": a shared device is in one process')
        if mine["cluster"] == "local" and (mine["engines"], mine["ranks"]) != (1, 1):
            raise ValueError('more than one engine or rank needs kind = "split" and cluster = "process"')
        return self
