"""One stage of a pipeline: a recipe whose models may be the results of other stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rondel.core.config.job import Job
from rondel.core.registry import look_beside

REFERENCE = "stage:"  # model.path = "stage:warmup": what the stage "warmup" trained


@dataclass(frozen=True, slots=True)
class StageRecipe:
    """Example: StageRecipe("student", "train", job, ("warmup", "math"), Path("student.toml")).

    kind    "train" or "eval"
    job     its recipe; a model may still be "stage:NAME". job.run.folder is where the stage lives
    needs   the stages that must have ended before: those of `after`, and those whose models it reads
    origin  the file beside which modules and data of the recipe are looked for
    """

    name: str
    kind: str
    job: Job
    needs: tuple[str, ...]
    origin: Path

    @property
    def folder(self) -> Path:
        return Path(self.job.run.folder)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The stages whose models it reads, in the order in which they are named."""
        return tuple(dict.fromkeys(text.removeprefix(REFERENCE) for text in references(self.job.to_dict())))

    @property
    def steps(self) -> int | None:
        """Training steps with those of the supervised phase; None where the recipe counts passes over the data."""
        return None if self.job.loop.steps is None else self.job.loop.warmup.steps + self.job.loop.steps

    def resolve(self, model_of: Callable[[str], Any]) -> dict[str, Any]:
        """The recipe as a tree in which "stage:NAME" is model_of(NAME)."""
        tree: dict[str, Any] = replace_references(self.job.to_dict(), model_of)
        return tree

    def look_beside_origin(self) -> None:
        """Modules and data files that the recipe names are looked for beside it, from now on."""
        look_beside(self.origin)


def is_reference(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(REFERENCE)


def references(node: Any) -> Iterator[str]:
    """Every "stage:NAME" in a tree."""
    if isinstance(node, dict | list | tuple):
        for inner in node.values() if isinstance(node, dict) else node:
            yield from references(inner)
    elif is_reference(node):
        yield node


def replace_references(node: Any, model_of: Callable[[str], Any]) -> Any:
    if isinstance(node, dict):
        return {key: replace_references(inner, model_of) for key, inner in node.items()}
    if isinstance(node, list | tuple):
        return [replace_references(inner, model_of) for inner in node]
    return model_of(node.removeprefix(REFERENCE)) if is_reference(node) else node
