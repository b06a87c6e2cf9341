"""The kinds of task data: each a function of its settings that yields rows of named fields."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rondel.core.errors import DataError, disk_refusal, error_boundary
from rondel.core.registry import import_attribute, locate_path, search_folders, suggest_name
from rondel.generate.envs.points import find_points

REPOSITORIES = "rondel.generate.envs.repository.reader"  # by name: a run without repositories imports none of it


class DatasetRow(NamedTuple):
    """`DatasetRow("train.jsonl:17", "train", {"prompt": "3 + 4 =", "answer": "7"})`. `content`
    replaces the question in the hold-out.
    """

    where: str
    name: str
    fields: Any
    content: str = ""


def reasoning_gym(
    name: str, size: int = 500, seed: int = 0, args: dict[str, Any] | None = None, levels: list[int] | None = None
) -> Iterator[DatasetRow]:
    """A generated data set of reasoning-gym; `args` are its own settings. The entry is kept for its scorer.

    levels: of its curriculum, each with its share of the rows, which have it as `level`; 0 is the easiest
    """
    try:
        import reasoning_gym as gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DataError("kind 'reasoning_gym' needs a package: pip install 'rondel[tasks]'") from error
    if name not in DATASETS:
        raise DataError(f"reasoning_gym has no data set '{name}'.{suggest_name(name, list(DATASETS))}")
    number = 0
    for place, level in enumerate(levels or [None]):
        part = size // len(levels) + (place < size % len(levels)) if levels else size
        for entry in _dataset_entries(gym, name, {**(args or {}), "size": part, "seed": seed + place}, level):
            number += 1
            fields = {"prompt": entry["question"], "answer": entry["answer"], "entry": entry} | (
                {"level": level} if levels else {}
            )
            yield DatasetRow(f"{name}, entry {number}", name, fields, str(entry["metadata"].get("expression", "")))


def _dataset_entries(gym: Any, name: str, settings: dict[str, Any], level: int | None) -> Iterable[dict[str, Any]]:
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
        raise DataError(
            f"reasoning_gym '{name}'{at} refuses args = {own}: {error}. Its settings: {', '.join(known)}"
        ) from error


def gym(name: str, n: int = 100, seed: int = 0, args: dict[str, Any] | None = None) -> Iterator[DatasetRow]:
    """n seeds of a world with Gymnasium's verbs, for `env = "gym"`; `eval_seed` holds
    others out. `args` are the world's own.
    """
    for number in range(seed, seed + n):
        fields = {"prompt": f"{name}, seed {number}", "answer": "", "world": name, "seed": number, "args": args or {}}
        yield DatasetRow(f"{name}, seed {number}", name.partition(":")[2] or name, fields)


def jsonl(path: str | list[str]) -> Iterator[DatasetRow]:
    """One JSON object a line, of a file or of several one behind the other, plain or as gzip;
    blank lines are skipped.
    """
    if isinstance(path, list):
        yield from itertools.chain.from_iterable(map(jsonl, path))
        return
    name = Path(path.removesuffix(".gz")).stem
    for number, line in enumerate(_read_lines(_existing_path(path), path, "JSON lines"), 1):
        if line.strip():
            yield DatasetRow(f"{path}:{number}", name, _parse_row(line, f"{path}:{number}"))


def read_csv(path: str | list[str], delimiter: str = ",") -> Iterator[DatasetRow]:
    """Rows of a table of text whose first line names the fields, as spreadsheets write it; every value is a text."""
    if isinstance(path, list):
        yield from itertools.chain.from_iterable(read_csv(one, delimiter) for one in path)
        return
    name = Path(path.removesuffix(".gz")).stem
    lines = enumerate(_read_lines(_existing_path(path), path, "CSV"), 1)
    try:
        table = csv.reader((_decode_line(line, f"{path}:{number}") for number, line in lines), delimiter=delimiter)
        header = next(table, [])
        if len(set(header)) < len(header):
            raise DataError(f"{path}:1: two columns have one name: {', '.join(header)}")
        for row in table:
            where = f"{path}:{table.line_num}"
            if len(row) not in (0, len(header)):
                raise DataError(
                    f"{where}: {len(row)} values for {len(header)} columns ({', '.join(header)}): a text with a "
                    f"'{delimiter}' in it stands in quotes"
                )
            if row:
                yield DatasetRow(where, name, dict(zip(header, row, strict=True)))
    except (csv.Error, TypeError) as error:
        raise DataError(f"{path}: no CSV: {error}") from error


def _read_lines(file: Path, path: str, what: str) -> Iterator[bytes]:
    """The lines of a file without the mark of its encoding; what begins as another format is refused by its name."""
    with wrap_read_errors(path):
        with file.open("rb") as raw:
            first = raw.read(4)
        for magic, format, remedy in FORMATS:
            if first.startswith(magic):
                raise DataError(f"{path}:1: the file is {format}, and not {what} in UTF-8: {remedy}")
        with gzip.open(file) if first.startswith(GZIP) else file.open("rb") as lines:
            for number, line in enumerate(lines):
                yield line if number else line.removeprefix(b"\xef\xbb\xbf")


GZIP = b"\x1f\x8b"
FORMATS = (  # how a file begins that is no JSON lines, what it is, what to do
    (b"\xff\xfe\0\0", "in UTF-32", "iconv -f UTF-32 -t UTF-8 FILE"),
    (b"\0\0\xfe\xff", "in UTF-32", "iconv -f UTF-32 -t UTF-8 FILE"),
    (b"\xff\xfe", "in UTF-16", "iconv -f UTF-16 -t UTF-8 FILE"),
    (b"\xfe\xff", "in UTF-16", "iconv -f UTF-16 -t UTF-8 FILE"),
    (b"PK\x03\x04", "a zip archive", "unzip it"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "zstd -d FILE"),
    (b"BZh", "compressed with bzip2", "bunzip2 FILE"),
    (b"\xfd7zX", "compressed with xz", "unxz FILE"),
    (b"PAR1", "parquet", 'kind = "parquet" reads it'),
)


@contextmanager
def wrap_read_errors(path: str) -> Iterator[None]:
    """A file that breaks off or cannot be read is an error with its name."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path}: the gzip file is damaged or not whole ({error}): copy it again, or unpack what is left of it"
        ) from error
    except OSError as error:
        raise DataError(disk_refusal(error, f"reading {path}") or f"reading {path}: {error}") from error


def _parse_row(line: bytes, where: str) -> Any:
    """The object of one line. Numbers and texts that no task can hold are refused here, where the line is known."""
    text = _decode_line(line, where)
    try:
        found = json.loads(text, parse_constant=_refuse_constant)
        if "\\u" in text:
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: {error.object[error.start]!a} is half a character: write the whole one, or leave it out"
        ) from error
    except RecursionError as error:
        raise DataError(
            f"{where}: lists or objects are nested too deep: flatten them, or write them as a text"
        ) from error
    except json.JSONDecodeError as error:
        hint = "; a JSON array becomes one with jq -c '.[]' FILE" if line.strip() in (b"[", b"[{") else ""
        hint = '; kind = "csv" reads tables of text' if where.endswith(":1") and _names_columns(text) else hint
        raise DataError(f"{where}: not JSON ({error.msg} at column {error.colno}); one object a line{hint}") from error
    except ValueError as error:
        what = "a number of more than 4300 digits" if "digits" in str(error) else str(error)
        raise DataError(f"{where}: {what}: write it as a text") from error


def _decode_line(line: bytes, where: str) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: byte {line[error.start]:#04x} at column {error.start + 1} is not UTF-8: save the file as UTF-8 "
            f"(iconv -f LATIN1 -t UTF-8 FILE)"
        ) from error


def _names_columns(line: str) -> bool:
    """Whether it may be the first line of a CSV file."""
    return "," in line and not line.lstrip().startswith(("{", "["))


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")


def parquet(path: str | list[str]) -> Iterator[DatasetRow]:
    """A parquet file, or several one behind the other; a row a task."""
    if isinstance(path, list):
        yield from itertools.chain.from_iterable(map(parquet, path))
        return
    from pyarrow import parquet as format

    file = _existing_path(path)
    with error_boundary(DataError, f"reading {path} as parquet (kind = 'jsonl' reads JSON lines)"):
        rows = format.read_table(file).to_pylist()
    for number, fields in enumerate(rows, 1):
        yield DatasetRow(f"{path}, row {number}", Path(path).stem, fields)


def read_dataset(name: str, split: str = "train", subset: str | None = None) -> Iterator[DatasetRow]:
    """A data set of the Hugging Face hub, or a folder written by `save_to_disk`."""
    try:
        import datasets as hub
    except ImportError as error:
        raise DataError("kind 'datasets' needs a package: pip install 'rondel[tasks]'") from error
    with error_boundary(
        DataError, f"loading data set '{name}', split '{split}' (is the name right, and the machine online?)"
    ):
        saved = any((locate_path(name) / f).is_file() for f in ("state.json", "dataset_dict.json"))
        rows = hub.load_from_disk(str(locate_path(name))) if saved else hub.load_dataset(name, subset, split=split)
        if isinstance(rows, hub.DatasetDict):
            rows = rows[split]
    for number, fields in enumerate(rows, 1):
        yield DatasetRow(f"{name}[{split}], row {number}", Path(name).name, fields)


def verifiers(name: str, split: str = "train", args: dict[str, Any] | None = None) -> Iterator[DatasetRow]:
    """The examples of an environment of verifiers; `eval_split = "eval"` holds its own evaluation data out."""
    from rondel.generate.envs.verifiers import read_examples

    for number, example in enumerate(read_examples(name, split, args or {}), 1):
        fields = {"prompt": example["prompt"], "answer": example.get("answer") or "", "example": example}
        yield DatasetRow(f"{name}, example {number}", name.partition(":")[2] or name, fields)


def repository(path: str, format: str = "auto", source: str = "", test: str = "") -> Iterator[DatasetRow]:
    """Repositories to work on, for `env = "repository"`: a folder of tasks, one task, or rows in a .jsonl file.

    format   "auto", "rondel", "harbor", "terminal_bench" or "swebench" (generate/envs/repository/reader.py)
    source   for rows of SWE-bench: the folder that holds the checkouts
    test     for rows of SWE-bench: the command of the tests, where it is not pytest's
    """
    task_specs, load_task = (
        import_attribute("task.data", f"{REPOSITORIES}:{name}") for name in ("task_specs", "load_task")
    )
    for where, spec in task_specs(path, format, source, test):
        task = load_task(spec)
        fields: dict[str, Any] = {
            "prompt": task.statement,
            "answer": "",
            "repository": json.dumps(spec),
            "name": task.name,
        }
        if task.settings.difficulty is not None:
            fields["difficulty"] = task.settings.difficulty
        yield DatasetRow(where, task.name, fields)


def inline_rows(rows: list[dict[str, Any]]) -> Iterator[DatasetRow]:
    """Rows written in the recipe."""
    for number, fields in enumerate(rows, 1):
        yield DatasetRow(f"task.data.rows[{number}]", "list", fields)


def digit_sums() -> Iterator[DatasetRow]:
    """All 100 sums of two digits, "3+4=" -> "7": what a model of a million parameters learns in a minute."""
    for a in range(10):
        for b in range(10):
            yield DatasetRow(f"{a}+{b}", "digits", {"prompt": f"{a}+{b}=", "answer": str(a + b)})


def quadrants(size: int = 160, seed: int = 0, pixels: int = 56) -> Iterator[DatasetRow]:
    """Pictures of noise of which one quarter is light; the answer is its number, 1 to
    4, as one reads. For models that look.
    """
    import numpy as np

    if pixels < 2:
        raise DataError(f"task.data.pixels = {pixels}; a picture of four quarters has at least 2 a side")
    rng, half = np.random.default_rng(seed), pixels // 2
    for number in range(size):
        picture, quarter = rng.integers(0, 60, (pixels, pixels, 3), dtype=np.uint8), number % 4
        y, x = divmod(quarter, 2)
        picture[y * half : (y + 1) * half, x * half : (x + 1) * half] += np.uint8(rng.integers(120, 190))
        said = [{"type": "image", "image": picture}, {"type": "text", "text": "light?"}]
        yield DatasetRow(
            f"quadrants, picture {number + 1}",
            "quadrants",
            {"messages": [{"role": "user", "content": said}], "answer": str(quarter + 1)},
        )


def search_questions(corpus: str) -> Iterator[DatasetRow]:
    """The questions that `rondel tasks search` made of a corpus. Hold-outs take whole documents."""
    path = f"{corpus}/questions.jsonl"
    for number, line in enumerate(_read_lines(_existing_path(path), path, "JSON lines"), 1):
        fields = _parse_row(line, f"{path}:{number}")
        yield DatasetRow(f"{path}:{number}", fields["family"], fields, fields["document"])


def shop_tasks(path: str) -> Iterator[DatasetRow]:
    """The tasks that `rondel tasks shop` made for `env = "shop"`. Hold-outs take whole users."""
    file = f"{path}/tasks.jsonl"
    for number, line in enumerate(_read_lines(_existing_path(file), file, "JSON lines"), 1):
        fields = _parse_row(line, f"{file}:{number}")
        yield DatasetRow(f"{file}:{number}", fields["family"], fields, f"customer {fields['user']}")


def points(name: str = "ring", args: dict[str, Any] | None = None) -> Iterator[DatasetRow]:
    """One task for each prompt of a set of points that a flow learns from; `args` are the settings of the set."""
    told = {"name": name, "args": args or {}}
    for prompt in find_points(name, args or {}):
        yield DatasetRow(f"{name}, {prompt}", name, {"prompt": prompt, "answer": "", "points": told})


KINDS: dict[str, Callable[..., Iterable[DatasetRow]]] = {
    "reasoning_gym": reasoning_gym,
    "jsonl": jsonl,
    "csv": read_csv,
    "parquet": parquet,
    "datasets": read_dataset,
    "list": inline_rows,
    "verifiers": verifiers,
    "gym": gym,
    "repository": repository,
    "digits": digit_sums,
    "quadrants": quadrants,
    "search_questions": search_questions,
    "shop_tasks": shop_tasks,
    "points": points,
}


def _existing_path(path: str) -> Path:
    file = locate_path(path)
    if not os.path.isfile(file):  # False, too, of what could be no name
        raise DataError(
            f"no file '{path[:200]}' (from {' or '.join(map(str, search_folders()))}).{_suggest_file(file)} Give a "
            "path from there, or an absolute one"
        )
    return file


def _suggest_file(file: Path) -> str:
    """Why it is none, or one that is there under a name like it."""
    if os.path.isdir(file):
        return " It is a folder."
    if os.path.islink(file):
        return " It is a link that leads nowhere."
    there = os.listdir(file.parent) if os.path.isdir(file.parent) else []
    return suggest_name(file.name, [name for name in there if name != file.name])
