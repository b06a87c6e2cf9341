"""Job: the whole recipe as one frozen tree. An unknown key, or a set key that nothing read, is an error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from hashlib import blake2b
from pathlib import Path
from typing import Any

from pydantic import Field, PrivateAttr, ValidationError, field_validator, model_validator

from rondel.core.config.algorithm import MOST_ANSWERS, AlgorithmConfig
from rondel.core.config.engine import EngineConfig
from rondel.core.config.loop import LoopConfig
from rondel.core.config.model import AdapterConfig, ModelConfig
from rondel.core.config.old_recipe import translate_moved_keys
from rondel.core.config.place import PlaceConfig
from rondel.core.config.policy import PolicyConfig
from rondel.core.config.run import RunConfig
from rondel.core.config.section import ConfigSection
from rondel.core.config.sync import SyncConfig
from rondel.core.config.task import TaskConfig
from rondel.core.config.toml_reader import drop_contradicted, read_toml, recipe_origin, refuse_odd_text, set_dotted
from rondel.core.config.trainer import TrainerConfig
from rondel.core.config.validation_messages import explain_faults
from rondel.core.errors import ConfigError
from rondel.core.given_objects import name_objects
from rondel.core.registry import look_beside
from rondel.core.types import DATA, GREEDY, POLICY

# how names of metrics begin
STAGES = ("score", "filter", "generate", "train", "sync", "loop", "eval", "time", "mem", "ledger")


class Job(ConfigSection):
    """One run, complete: `Job.read("recipes/quickstart.toml", {"loop.steps": 5})`."""

    model: ModelConfig
    task: TaskConfig
    algo: AlgorithmConfig = AlgorithmConfig()
    loop: LoopConfig
    engine: EngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    place: PlaceConfig = PlaceConfig()
    sync: SyncConfig = SyncConfig()
    policies: dict[str, PolicyConfig] = Field(
        {}, description="weights of their own for some agents of an episode: [policies.NAME]"
    )
    run: RunConfig
    _origin: str = PrivateAttr("")

    @property
    def origin(self) -> str:
        """Where the recipe lies, if it was read from a file."""
        return self._origin

    @field_validator("policies")
    @classmethod
    def _check_policies(cls, given: dict[str, PolicyConfig]) -> dict[str, PolicyConfig]:
        taken: dict[str, str] = {}
        for name, policy in given.items():
            if not re.fullmatch(r"[A-Za-z][\w-]*", name, re.ASCII) or name in (POLICY, DATA, GREEDY, *STAGES):
                raise ValueError(
                    f"a policy cannot be called '{name}', which names files and metrics: take a word of letters and "
                    f"digits, "
                    f"and none of {', '.join((POLICY, DATA, GREEDY, *STAGES))}"
                )
            for agent in policy.agents or [name]:
                if agent in taken:
                    raise ValueError(
                        f"'{agent}' cannot play both '{taken[agent]}' and '{name}': name it in one of them"
                    )
                taken[agent] = name
        return given

    @model_validator(mode="after")
    def _bound_answers(self) -> Job:
        loop, algo = self.__dict__["loop"].__dict__, self.__dict__["algo"].__dict__
        for key, groups, size in (
            ("loop.groups_per_step", loop["groups_per_step"] + loop["oversample"].groups, algo["group_size"]),
            ("loop.warmup.groups_per_step", loop["warmup"].__dict__["groups_per_step"], 1),
        ):
            if groups * size > MOST_ANSWERS:
                raise ValueError(
                    f"{key} = {groups} with algo.group_size = {algo['group_size']} are {groups * size} answers in one "
                    f"step, and at most "
                    f"{MOST_ANSWERS} are carried: lower one of them"
                )
        return self

    @property
    def steps(self) -> int:
        """Training steps after the supervised phase; where the recipe says passes, they
        are known once the data is read.
        """
        assert self.loop.steps is not None, f"loop.passes = {self.loop.passes} is not resolved yet: see with_steps"
        return self.loop.steps

    @property
    def agent_policies(self) -> dict[str, str]:
        """{agent: policy} of those with weights of their own."""
        return {agent: name for name, policy in self.policies.items() for agent in policy.agents or [name]}

    @property
    def may_share_base(self) -> bool:
        """Whether policies of one model would be adapters on one base in memory, served by one engine."""
        plain = self.model.engine_format == "none" and self.model.vision.tower == "frozen" and not self.engine.compile
        return bool(self.policies) and self.place.one_module and self.model.adapter.kind != "off" and plain

    def of_policy(self, name: str) -> Job:
        """The same run as one policy sees it: with its model and its learning rate, and as if it were alone."""
        if name == POLICY:
            return self.model_copy(update={"policies": {}})
        policy = self.policies[name]
        model: dict[str, Any] = {"path": self.model.path if policy.model is None else policy.model}
        if policy.frozen:
            model["adapter"] = AdapterConfig()
        own = {name: value for name in ("lr", "clip") if (value := getattr(policy, name)) is not None}
        epochs = {} if policy.epochs is None else {"epochs": policy.epochs}
        update = {
            "policies": {},
            "model": self.model.model_copy(update=model),
            "trainer": self.trainer.model_copy(update=own),
            "loop": self.loop.model_copy(update=epochs),
        }
        return self.model_copy(update=update)

    @classmethod
    def read(cls, path: str | Path | Mapping[str, Any], overrides: dict[str, Any] | None = None) -> Job:
        """Parse a TOML recipe, or take its tables as dicts, apply dotted overrides, validate; every fault is one
        readable ConfigError.
        """
        if isinstance(path, Mapping):
            tree = deepcopy(name_objects(path))
            look_beside(Path("recipe.toml"))
            return cls._with_overrides(tree, overrides or {}, "the recipe")
        path = Path(path)
        tree = read_toml(path)
        if path.name == "job.toml":
            translate_moved_keys(tree)
        look_beside(origin := recipe_origin(path))
        job = cls._with_overrides(tree, overrides or {}, str(path))
        job._origin = str(origin.resolve())
        return job

    @classmethod
    def _with_overrides(cls, tree: dict[str, Any], overrides: dict[str, Any], source: str) -> Job:
        drop_contradicted(tree, overrides)
        for dotted, value in overrides.items():
            set_dotted(tree, dotted, deepcopy(name_objects(value, dotted)))  # a later override may write into it
        refuse_odd_text(tree, source)
        return cls.parse(tree, source=source)

    @classmethod
    def parse(cls, tree: dict[str, Any], source: str = "recipe") -> Job:
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            faults = ConfigError(f"{source}: {'; '.join(explain_faults(error, cls))}")
            faults.page = faults.page or "docs/recipe.md"
            raise faults from error

    def to_dict(self) -> dict[str, Any]:
        """Every final value, as plain data."""
        return self.model_dump(mode="json")

    def on_one_device(self) -> Job:
        """The same for a command that looks into the parts: whole in this process."""
        place = self.place.model_copy(update={"kind": "shared", "cluster": "local", "engines": 1, "ranks": 1})
        engine = self.engine.model_copy(update={"kind": "builtin", "url": None})
        sync, model = self.sync.model_copy(update={"kind": "auto"}), self.model.on_one_module()
        return self.model_copy(update={"place": place, "engine": engine, "sync": sync, "model": model})

    def digest(self) -> str:
        """What must be equal for a folder to be continued: everything but where the run lives and
        how long it goes on.
        """
        tree = self.to_dict()
        tree.pop("run")
        tree["loop"].pop("steps")
        return blake2b(repr(tree).encode(), digest_size=8).hexdigest()
