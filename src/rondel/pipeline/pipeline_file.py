"""A pipeline file: its stages as whole recipes, in an order in which they can run.

folder = "runs/specialists"         parallel = 2
[shared]        sections of a recipe, laid over that of every stage
[stages.math]   recipe = "rl.toml"   model = "stage:warmup"   and sections of a recipe, laid over both
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from rondel.core.config.job import Job
from rondel.core.config.old_recipe import translate_moved_keys
from rondel.core.config.section import CLOSED
from rondel.core.config.toml_reader import drop_contradicted, read_toml, recipe_origin, refuse_odd_text, set_dotted
from rondel.core.config.validation_messages import explain_faults
from rondel.core.errors import ConfigError
from rondel.core.registry import look_beside, suggest_name
from rondel.pipeline.stage_recipe import REFERENCE, StageRecipe, is_reference

SECTIONS = tuple(Job.model_fields)
NOT_EVALUATED = ("algo", "trainer", "sync")  # sections that an evaluation has no use for
RESERVED = ("recipes", "logs", "replaced")  # folders of the pipeline itself
RECIPE_TABLE = dict[str, Any]


class SharedConfig(BaseModel):
    """Sections of a recipe: `task = { eval = { every = 10 } }`."""

    model_config = CLOSED
    model: str | RECIPE_TABLE = Field({}, description='the section; a text is model.path: model = "stage:warmup"')
    task: RECIPE_TABLE = {}
    algo: RECIPE_TABLE = {}
    loop: RECIPE_TABLE = {}
    engine: RECIPE_TABLE = {}
    trainer: RECIPE_TABLE = {}
    place: RECIPE_TABLE = {}
    sync: RECIPE_TABLE = {}
    policies: RECIPE_TABLE = {}
    run: RECIPE_TABLE = {}

    @property
    def sections(self) -> dict[str, Any]:
        """Those that were given, as a piece of a recipe."""
        given = {name: getattr(self, name) for name in SECTIONS if getattr(self, name)}
        return given | ({"model": {"path": self.model}} if isinstance(self.model, str) else {})


class StageConfig(SharedConfig):
    """One stage: [stages.NAME]."""

    kind: Literal["train", "eval"] = "train"
    recipe: str | None = Field(None, description="a recipe, from the folder of this file or the current one")
    after: list[str] = Field([], description="stages that must have ended before, beside those whose models it reads")


class PipelineConfig(BaseModel):
    model_config = CLOSED
    folder: str = Field(min_length=1, description="where the pipeline lives, each stage in a folder of its name")
    parallel: int = Field(1, ge=1, description="stages that run side by side at most")
    shared: SharedConfig = SharedConfig()
    stages: dict[str, StageConfig] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """`stages` in an order in which they can run, as near to that of the file as their needs allow."""

    path: Path
    folder: Path
    parallel: int
    stages: dict[str, StageRecipe]

    def dependents(self, names: set[str]) -> set[str]:
        """`names`, and every stage that reads a model of one of them, or of one that does."""
        found = set(names)
        for name, stage in self.stages.items():
            if found & set(stage.inputs):
                found.add(name)
        return found


def read_pipeline(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Pipeline:
    """Every fault of the file and of its recipes is a ConfigError before anything runs.

    overrides   {"stages.math.loop.steps": 5}, as on the command line
    """
    path = Path(path)
    tree = read_toml(path)
    for dotted, value in (overrides or {}).items():
        set_dotted(tree, dotted, value)
    refuse_odd_text(tree, str(path))
    try:
        given = PipelineConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{path}: {'; '.join(explain_faults(error, PipelineConfig))}") from error
    for name in given.stages:
        if not re.fullmatch(r"[A-Za-z0-9][\w-]*", name, re.ASCII) or name in RESERVED:
            raise ConfigError(
                f"{path}: a stage cannot be called '{name}', which names its folder: take letters, digits, '-' and "
                f"'_', and none of {', '.join(RESERVED)}"
            )
    reader = StageReader(path, given)
    stages = {name: reader.read_stage(name) for name in given.stages}
    order = order_stages(path, {name: stage.needs for name, stage in stages.items()})
    return Pipeline(path, Path(given.folder), given.parallel, {name: stages[name] for name in order})


@dataclass(frozen=True, slots=True)
class StageReader:
    """From the tables of a file to recipes."""

    path: Path
    given: PipelineConfig

    def read_stage(self, name: str) -> StageRecipe:
        own = self.given.stages[name]
        tree, origin = self._recipe_tree(name, ())
        if own.kind == "eval":
            idle = [section for section in NOT_EVALUATED if getattr(own, section)]
            if idle := idle + [f"loop.{key}" for key in own.loop if key != "seed"]:
                raise ConfigError(
                    f"{self._where(name)}.{idle[0]} has no effect: an evaluation trains nothing; remove it"
                )
            tree = {section: keys for section, keys in tree.items() if section not in NOT_EVALUATED}
            tree["model"] = {key: value for key, value in tree.get("model", {}).items() if key != "teacher"}
            tree["loop"] = {"steps": 0} | {key: v for key, v in tree.get("loop", {}).items() if key == "seed"}
        if "folder" in own.run or "folder" in self.given.shared.run:
            raise ConfigError(f"{self._where(name)}.run.folder: the folder of a stage is {self.given.folder}/{name}")
        tree["run"] = tree.get("run", {}) | {"folder": str(Path(self.given.folder, name))}
        look_beside(origin)
        job = Job.parse(tree, source=self._where(name))
        stage = StageRecipe(name, own.kind, job, (), origin)
        needs = tuple(dict.fromkeys([*own.after, *stage.inputs]))
        for needed in needs:
            if needed not in self.given.stages:
                raise ConfigError(
                    f"{self._where(name)} needs the stage '{needed}', and there is "
                    f"none.{suggest_name(needed, list(self.given.stages))} "
                    f"The stages are: {', '.join(self.given.stages)}"
                )
        return StageRecipe(name, own.kind, job, needs, origin)

    def _recipe_tree(self, name: str, asked: tuple[str, ...]) -> tuple[dict[str, Any], Path]:
        """The recipe of a stage before it is checked. An evaluation without one has the tasks of what it evaluates."""
        own = self.given.stages[name]
        tree, origin = self._base_tree(name, own, asked)
        for sections in (self.given.shared.sections, own.sections):
            drop_contradicted(tree, {f"loop.{key}": value for key, value in sections.get("loop", {}).items()})
            tree = overlay(tree, sections)
        return tree, origin

    def _base_tree(self, name: str, own: StageConfig, asked: tuple[str, ...]) -> tuple[dict[str, Any], Path]:
        model = own.sections.get("model", {}).get("path")
        if own.recipe is not None:
            found = self._find_recipe(own.recipe)
            tree = read_toml(found)
            if found.name == "job.toml":
                translate_moved_keys(tree)
            return tree, recipe_origin(found)
        if own.kind == "train":
            return {}, self.path
        source = str(model).removeprefix(REFERENCE)
        if is_reference(model) and source in self.given.stages and source not in asked:
            return self._recipe_tree(source, (*asked, name))
        if not (own.task or self.given.shared.task):
            raise ConfigError(
                f'{self._where(name)} evaluates {model!r}, and says no tasks: give it a recipe = "...", or a task table'
            )
        return {}, self.path

    def _find_recipe(self, recipe: str) -> Path:
        beside = self.path.parent / recipe
        return beside if beside.exists() or not Path(recipe).exists() else Path(recipe)

    def _where(self, name: str) -> str:
        return f"{self.path}: stages.{name}"


def overlay(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`under` with the keys of `over`, table by table. A table of another kind replaces the whole one that it is laid
    over: { kind = "mix" } over { kind = "jsonl", path = "x" } leaves no path.
    """
    out = dict(under)
    for key, value in over.items():
        below = out.get(key)
        joins = isinstance(value, dict) and isinstance(below, dict) and not _is_other_kind(below, value)
        out[key] = overlay(below, value) if joins else value  # type: ignore[arg-type]
    return out


def _is_other_kind(under: Mapping[str, Any], over: Mapping[str, Any]) -> bool:
    return any(name in over and over[name] != under.get(name) for name in ("kind", "random"))


def order_stages(path: Path, needs: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Each behind all that it needs; among those that could come next, the first of the file."""
    order: list[str] = []
    while len(order) < len(needs):
        ready: Callable[[str], bool] = partial(_is_ready, order, needs)
        if (following := next(filter(ready, needs), None)) is None:
            cycle = " -> ".join(_find_cycle({n: needs[n] for n in needs if n not in order}))
            raise ConfigError(
                f"{path}: stages wait for each other: {cycle} (-> reads needs); remove one of these needs"
            )
        order.append(following)
    return order


def _is_ready(order: list[str], needs: Mapping[str, tuple[str, ...]], name: str) -> bool:
    return name not in order and set(needs[name]) <= set(order)


def _find_cycle(left: Mapping[str, tuple[str, ...]]) -> list[str]:
    """["a", "b", "a"]: every stage that is left needs another one that is left."""
    walk = [next(iter(left))]
    while walk[-1] not in walk[:-1]:
        walk.append(next(need for need in left[walk[-1]] if need in left))
    return walk[walk.index(walk[-1]) :]
