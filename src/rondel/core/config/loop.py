"""[loop]: how long, how large a step, how stale, and what happens to requests in flight."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rondel.core.config.section import ConfigSection, SettingsTable


class WarmupConfig(SettingsTable):
    """A supervised phase before the loop: the same loop, whose Generate copies the data set's answers."""

    steps: int = Field(0, ge=0, description="steps of the supervised phase; 0 is none")
    lr: float = Field(1e-4, ge=0, description="its learning rate, constant")
    groups_per_step: int = Field(32, ge=1, description="its demonstrations in one step")


class OversampleConfig(SettingsTable):
    """Groups begun beyond those that a step trains; `oversample = 4` is `oversample = { groups = 4 }`."""

    groups: int = Field(
        0,
        ge=0,
        description="begun beyond those that are waited for: the first to finish are trained, who is late is lost",
    )
    late: Literal["drop", "retry"] = Field(
        "drop", description="what becomes of the task of a group that is late: gone and counted, or asked again"
    )

    @model_validator(mode="after")
    def _check_late(self) -> OversampleConfig:
        if self.__dict__["late"] == "retry" and not self.__dict__["groups"]:
            raise ValueError(
                'late = "retry" has no effect: without groups beyond the step\'s no group is ever late, it is waited '
                "for. Set groups, or remove it"
            )
        return self


class ReplaysConfig(SettingsTable):
    """Groups that are trained once more, in a later step; `replays = 4` is `replays = { groups = 4 }`."""

    groups: int = Field(0, ge=0, description="of each step, that come back in a later one, once")
    max_lag: int | None = Field(
        None,
        ge=1,
        le=1000,
        description="versions that a group may be old when it comes back; unset, max_staleness. More than that needs a "
        "row that weighs, masks or drops by who drew a token",
    )

    @model_validator(mode="after")
    def _check_groups(self) -> ReplaysConfig:
        if self.__dict__["max_lag"] is not None and not self.__dict__["groups"]:
            raise ValueError("max_lag has no effect without groups that come back: set groups, or remove it")
        return self


class LoopConfig(ConfigSection):
    steps: int | None = Field(
        None, ge=0, description="training steps after the supervised phase; this or passes is needed"
    )
    passes: float | None = Field(
        None,
        gt=0,
        description="in place of steps: how often each training task is trained; steps is then passes · tasks / "
        "groups_per_step",
    )
    groups_per_step: int = Field(16, ge=1, description="P, groups in one step")
    updates_per_step: int = Field(1, ge=1, description="optimizer moves in one step")
    epochs: int = Field(
        1,
        ge=1,
        description="how often a step goes over its own batch, each time in updates_per_step updates; passes over the "
        "data are loop.passes",
    )
    replays: ReplaysConfig = Field(
        ReplaysConfig(), description="groups of each step that come back in a later one; a number is its `groups`"
    )
    max_staleness: int = Field(
        0, ge=0, le=1000, description="S, versions between a group's admission and its training; 0 is on-policy"
    )
    in_flight: Literal["hold", "drain", "abort"] = Field(
        "hold", description="what happens to a request while the weights change: it waits, it ends first, or it is cut"
    )
    window: int | Literal["auto"] = Field(
        "auto",
        description="how many younger groups may be trained before an unfinished one; 1 is first in, first out; "
        '"auto": as many as leave it its time',
    )
    oversample: OversampleConfig = Field(
        OversampleConfig(), description="groups begun beyond those that a step trains; a number is its `groups`"
    )
    seed: int = Field(0, description="of the order of tasks and of all noise")
    max_refills: int = Field(20, ge=1, description="a step stops refilling after this many times P dropped groups")
    warmup: WarmupConfig = Field(WarmupConfig(), description="a supervised phase before the loop")

    @model_validator(mode="before")
    @classmethod
    def _read_shorthand(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        tables = ("oversample", "replays")
        numbers = {n: v for n in tables if isinstance(v := given.get(n), int) and not isinstance(v, bool)}
        return given | {name: {"groups": number} for name, number in numbers.items()}

    @model_validator(mode="after")
    def _check_together(self) -> LoopConfig:
        mine = self.__dict__
        if mine["warmup"].__dict__["steps"] == 0:  # a phase that is left out has no settings
            object.__setattr__(self, "warmup", WarmupConfig())
        if mine["steps"] is None and mine["passes"] is None:
            raise ValueError(
                "steps is not set: steps = 100 is the number of training steps; passes = 2 counts them in passes over "
                "the data"
            )
        if mine["steps"] is not None and mine["passes"] is not None:
            raise ValueError(
                f"steps = {mine['steps']} and passes = {mine['passes']:g} both say how long the run is: remove one of "
                f"them"
            )
        again = mine["replays"].__dict__
        if again["groups"] and not mine["max_staleness"] and again["max_lag"] is None:
            raise ValueError(
                "replays has no effect at max_staleness = 0: what is trained again is at least one version old. Set "
                "max_staleness, or replays.max_lag"
            )
        if again["groups"] > mine["groups_per_step"]:
            raise ValueError(
                f"replays = {again['groups']} is more than a step has: groups_per_step = {mine['groups_per_step']}"
            )
        oversample = mine["oversample"].__dict__["groups"]
        if oversample and mine["window"] != "auto":
            raise ValueError(
                "window has no effect with oversample, which takes whoever has finished: remove one of them"
            )
        if oversample and mine["in_flight"] == "drain":
            raise ValueError(
                'in_flight = "drain" would wait for those that oversample means not to wait for: use "hold" or "abort"'
            )
        return self
