"""The kinds of task data: each a function of its settings that yields rows of named fields."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rondel.words.errors import DataError, boundary
from rondel.words.registry import located, nearest, places


class Row(NamedTuple):
    """`Row("train.jsonl:17", "train", {"prompt": "3 + 4 =", "answer": "7"})`. `content` replaces the question in the hold-out."""

    where: str
    name: str
    fields: Any
    content: str = ""


def reasoning_gym(
    name: str, size: int = 500, seed: int = 0, args: dict[str, Any] | None = None, levels: list[int] | None = None
) -> Iterator[Row]:
    """A generated data set of reasoning-gym; `args` are its own settings. The entry is kept for its scorer.

    levels: of its curriculum, each with its share of the rows, which have it as `level`; 0 is the easiest
    """
    try:
        import reasoning_gym as gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DataError("kind 'reasoning_gym' needs a package: pip install 'rondel[tasks]'") from error
    if name not in DATASETS:
        raise DataError(f"reasoning_gym has no data set '{name}'.{nearest(name, list(DATASETS))}")
    number = 0
    for place, level in enumerate(levels or [None]):
        part = size // len(levels) + (place < size % len(levels)) if levels else size
        for entry in _entries(gym, name, {**(args or {}), "size": part, "seed": seed + place}, level):
            number += 1
            fields = {"prompt": entry["question"], "answer": entry["answer"], "entry": entry} | ({"level": level} if levels else {})
            yield Row(f"{name}, entry {number}", name, fields, str(entry["metadata"].get("expression", "")))


def _entries(gym: Any, name: str, settings: dict[str, Any], level: int | None) -> Iterable[dict[str, Any]]:
    from dataclasses import fields

    from reasoning_gym.coaching.base_curriculum import DefaultCurriculumContext, RangeAttributeMode
    from reasoning_gym.factory import CURRICULA, DATASETS, create_curriculum

    given = dict(settings)
    if level is not None:
        if name not in CURRICULA:
            raise DataError(f"reasoning_gym '{name}' has no curriculum: leave task.data.levels out")
        curriculum = create_curriculum(name)
        hardest = max(len(attribute.levels) for attribute in curriculum.attributes.values()) - 1
        if not isinstance(level, int) or not 0 <= level <= hardest:
            raise DataError(f"task.data.levels has {level!r}; the curriculum of '{name}' goes from 0 to {hardest}")
        curriculum.set_global_level(level)
    try:
        if level is None:
            return list(gym.create_dataset(name, **given))
        of_level = curriculum.generate_configuration(given, DefaultCurriculumContext(RangeAttributeMode.UPPER_BOUND))
        return list(gym.create_dataset(name, **{f.name: getattr(of_level, f.name) for f in fields(of_level)}))
    except (TypeError, ValueError, AssertionError) as error:
        known = [field for field in DATASETS[name][1].__dataclass_fields__ if field not in ("size", "seed")]
        own = {key: value for key, value in settings.items() if key not in ("size", "seed")}
        at = f" at level {level}" if level is not None else ""
        raise DataError(f"reasoning_gym '{name}'{at} refuses args = {own}: {error}. Its settings: {', '.join(known)}") from error


def gym(name: str, n: int = 100, seed: int = 0, args: dict[str, Any] | None = None) -> Iterator[Row]:
    """n seeds of a world with Gymnasium's verbs, for `env = "gym"`; `eval_seed` holds others out. `args` are the world's own."""
    for number in range(seed, seed + n):
        fields = {"prompt": f"{name}, seed {number}", "answer": "", "world": name, "seed": number, "args": args or {}}
        yield Row(f"{name}, seed {number}", name.partition(":")[2] or name, fields)


def jsonl(path: str | list[str]) -> Iterator[Row]:
    """One JSON object a line, of a file or of several one behind the other; blank lines are skipped."""
    if isinstance(path, list):
        yield from itertools.chain.from_iterable(map(jsonl, path))
        return
    with _existing(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield Row(f"{path}:{number}", Path(path).stem, json.loads(line))
            except json.JSONDecodeError as error:
                raise DataError(f"{path}:{number}: not JSON ({error.msg} at column {error.colno}); one object a line") from error


def parquet(path: str | list[str]) -> Iterator[Row]:
    """A parquet file, or several one behind the other; a row a task."""
    if isinstance(path, list):
        yield from itertools.chain.from_iterable(map(parquet, path))
        return
    from pyarrow import parquet as format

    file = _existing(path)
    with boundary(DataError, f"reading {path} as parquet"):
        rows = format.read_table(file).to_pylist()
    for number, fields in enumerate(rows, 1):
        yield Row(f"{path}, row {number}", Path(path).stem, fields)


def datasets(name: str, split: str = "train", subset: str | None = None) -> Iterator[Row]:
    """A data set of the Hugging Face hub, or a folder written by `save_to_disk`."""
    try:
        import datasets as hub
    except ImportError as error:
        raise DataError("kind 'datasets' needs a package: pip install 'rondel[tasks]'") from error
    with boundary(DataError, f"loading data set '{name}', split '{split}' (is the name right, and the machine online?)"):
        saved = any((located(name) / f).is_file() for f in ("state.json", "dataset_dict.json"))
        rows = hub.load_from_disk(str(located(name))) if saved else hub.load_dataset(name, subset, split=split)
        if isinstance(rows, hub.DatasetDict):
            rows = rows[split]
    for number, fields in enumerate(rows, 1):
        yield Row(f"{name}[{split}], row {number}", Path(name).name, fields)


def verifiers(name: str, split: str = "train", args: dict[str, Any] | None = None) -> Iterator[Row]:
    """The examples of an environment of verifiers; `eval_split = "eval"` holds its own evaluation data out."""
    from rondel.generate.envs.verifiers import examples

    for number, example in enumerate(examples(name, split, args or {}), 1):
        fields = {"prompt": example["prompt"], "answer": example.get("answer") or "", "example": example}
        yield Row(f"{name}, example {number}", name.partition(":")[2] or name, fields)


def inline(rows: list[dict[str, Any]]) -> Iterator[Row]:
    """Rows written in the recipe."""
    for number, fields in enumerate(rows, 1):
        yield Row(f"task.data.rows[{number}]", "list", fields)


def digits() -> Iterator[Row]:
    """All 100 sums of two digits, "3+4=" -> "7": what a model of a million parameters learns in a minute."""
    for a in range(10):
        for b in range(10):
            yield Row(f"{a}+{b}", "digits", {"prompt": f"{a}+{b}=", "answer": str(a + b)})


def quadrants(size: int = 160, seed: int = 0, pixels: int = 56) -> Iterator[Row]:
    """Pictures of noise of which one quarter is light; the answer is its number, 1 to 4, as one reads. For models that look."""
    import numpy as np

    rng, half = np.random.default_rng(seed), pixels // 2
    for number in range(size):
        picture, quarter = rng.integers(0, 60, (pixels, pixels, 3), dtype=np.uint8), number % 4
        y, x = divmod(quarter, 2)
        picture[y * half : (y + 1) * half, x * half : (x + 1) * half] += np.uint8(rng.integers(120, 190))
        said = [{"type": "image", "image": picture}, {"type": "text", "text": "light?"}]
        yield Row(
            f"quadrants, picture {number + 1}", "quadrants", {"messages": [{"role": "user", "content": said}], "answer": str(quarter + 1)}
        )


KINDS: dict[str, Callable[..., Iterable[Row]]] = {
    "reasoning_gym": reasoning_gym,
    "jsonl": jsonl,
    "parquet": parquet,
    "datasets": datasets,
    "list": inline,
    "verifiers": verifiers,
    "gym": gym,
    "digits": digits,
    "quadrants": quadrants,
}


def _existing(path: str) -> Path:
    file = located(path)
    if not file.is_file():
        there = [p.name for p in file.parent.iterdir()] if file.parent.is_dir() else []
        raise DataError(
            f"no file '{path}' (from {' or '.join(map(str, places()))}).{nearest(file.name, there)} Give a path from there, or an absolute one"
        )
    return file
