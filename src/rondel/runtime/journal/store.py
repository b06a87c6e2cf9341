"""The rollout store: every trajectory that was trained, one Parquet file a step, one row a trajectory.

    rollouts/step-000012.parquet     and the pictures in them once for the whole run, in media/ (image_store.py)

`groups_of(read_step(folder, 12))` are the groups the trainer saw, exactly: `view`
shows them, `replay` trains on them again.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np

from rondel.core.drawn_steps import steps_from_rows
from rondel.core.errors import CheckpointError, UserError, error_boundary
from rondel.core.events import Event, GroupsTaken, Resumed
from rondel.core.types import (
    Drift,
    EnvFault,
    Failed,
    Group,
    Ok,
    Outcome,
    OutOfBudget,
    PolicyFault,
    Score,
    Task,
    Trajectory,
)
from rondel.runtime.journal.image_store import IMAGE_URL, ImageStore
from rondel.system.files import guard_write, make_folder, numbered_paths, open_replacement
from rondel.text.unicode import read_exact_json, write_json

# (group id, sample index) -> one number for each of the T tokens; read on the store's thread, a trajectory at a time
PerToken = Mapping[tuple[int, int], Any]
OUTCOMES: dict[str, type] = {"ok": Ok, "env_fault": EnvFault, "policy_fault": PolicyFault, "out_of_budget": OutOfBudget}


class RolloutStore:
    """The writer, on a thread of its own: `subscribe(store.write)`, `await
    store.annotate(...)` after each step, `store.close()`.

    A resume deletes the files of the steps that will be repeated. What could not be
    written is told by whoever comes next.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._last: Future[Any] | None = None  # piece of work
        self._annotated: Future[Any] | None = None  # the last step that was

    def write(self, event: Event) -> None:
        if isinstance(event, GroupsTaken):
            self._run_in_order(write_step, self.folder, event.step, event.groups, version=event.version)
        elif isinstance(event, Resumed):
            self._run_in_order(self._delete_later_steps, event.step)

    async def annotate_rollouts(
        self, step: int, *, trainer_logprobs: PerToken | None = None, advantages: PerToken | None = None
    ) -> None:
        """What is known only after training. It waits for the step before, so that a slow
        disk slows the run, and for nothing else.
        """
        before = self._annotated
        self._annotated = self._run_in_order(
            annotate_step, self.folder, step, trainer_logprobs=trainer_logprobs, advantages=advantages
        )
        if before is not None:
            before.result() if before.done() else await _wait_shielded(before)

    async def wait_until_written(self) -> None:
        """All that was given is there."""
        if self._last is not None:
            await _wait_shielded(self._last)

    def close(self) -> None:
        """When everything is written."""
        self._thread.shutdown()

    def _delete_later_steps(self, after: int) -> None:
        for step in stored_steps(self.folder):
            if step > after:
                path_of(self.folder, step).unlink()

    def _run_in_order(self, work: Callable[..., Any], *args: Any, **how: Any) -> Future[Any]:
        """One after the other; whatever follows a fault has the same."""
        before = self._last

        def run_after_previous() -> None:
            if before is not None:
                before.result()
            work(*args, **how)

        self._last = self._thread.submit(run_after_previous)
        return self._last


async def _wait_shielded(work: Future[Any]) -> None:
    """Whoever is told to wait no more takes nothing with it: the work goes on."""
    await asyncio.shield(asyncio.wrap_future(work))


def path_of(folder: str | Path, step: int) -> Path:
    return Path(folder) / "rollouts" / f"step-{step:06d}.parquet"


def stored_steps(folder: str | Path) -> list[int]:
    """The steps whose rollouts are stored, in order."""
    return list(numbered_paths(Path(folder) / "rollouts", "step-", ".parquet"))


# -- writing ---------------------------------------------------------------------------------------


def write_step(
    folder: str | Path,
    step: int,
    groups: Iterable[Group],
    extra: PerToken | None = None,
    *,
    advantages: PerToken | None = None,
    version: int | None = None,
) -> Path:
    """Store one step's groups, whole or not at all. `extra` holds the trainer's
    logprobs, `version` the weights being trained.
    """
    rows = (
        {
            **_rollout_row(group, sample, trajectory),
            "trained_at": version,
            "trainer_logprobs": (extra or {}).get((group.id, sample)),
            "advantages": (advantages or {}).get((group.id, sample)),
        }
        for group in groups
        for sample, trajectory in enumerate(group.trajectories)
    )
    return _write_rows(path_of(folder, step), rows)


def annotate_step(
    folder: str | Path, step: int, *, trainer_logprobs: PerToken | None = None, advantages: PerToken | None = None
) -> None:
    """Add what is known only after training to a step that is stored already."""
    import pyarrow.parquet as pq

    path, schema = path_of(folder, step), _rollout_schema()

    def annotated(table: Any) -> Any:
        keys = list(zip(*(table[name].to_pylist() for name in ("group", "sample", "part")), strict=True))
        for name, told in (("trainer_logprobs", trainer_logprobs), ("advantages", advantages)):
            if told:
                old = table[name]
                values = [
                    _part_of(told[group, sample], part) if (group, sample) in told else old[i].as_py()
                    for i, (group, sample, part) in enumerate(keys)
                ]
                table = table.set_column(
                    schema.get_field_index(name), schema.field(name), _build_column(values, schema.field(name).type)
                )
        return table

    with guard_write(path), pq.ParquetFile(path) as stored:
        parts = range(stored.num_row_groups)
        _replace_tables(path, (annotated(stored.read_row_group(i).select(schema.names).cast(schema)) for i in parts))


def _rollout_row(group: Group, sample: int, t: Trajectory) -> dict[str, Any]:
    failed = t.score if isinstance(t.score, Failed) else None
    return {
        "group": group.id,
        "sample": sample,
        "part": 0,
        "task": group.task.id,
        "env": group.task.env,
        "task_data": group.task.data,
        "born": group.born,
        "tokens": t.tokens,
        "mask": t.mask,
        "behavior_logprobs": t.logprobs,
        "versions": t.versions,
        "experts": t.experts,
        "steps": None if t.steps is None else t.steps.stored,
        "steps_layout": None if t.steps is None else t.steps.layout,
        "support": t.support,
        "top_ids": _half_of(t.behavior_top, 0),
        "top_logprobs": _half_of(t.behavior_top, 1),
        "teacher_prompts": t.teacher_prompts,
        "media": t.media,
        "reward": t.reward,
        "reward_parts": t.score.parts if isinstance(t.score, Score) else {},
        "step_positions": [position for position, _ in t.score.steps] if isinstance(t.score, Score) else [],
        "step_rewards": [value for _, value in t.score.steps] if isinstance(t.score, Score) else [],
        "failed": failed.reason if failed else None,
        "failed_detail": failed.detail if failed else None,
        "outcome": next(name for name, kind in OUTCOMES.items() if isinstance(t.outcome, kind)),
        "outcome_reason": getattr(t.outcome, "reason", None),
        "finish_reason": t.finish_reason,
        "text": t.text,
        "timings": t.timings,
        "policy": t.policy,
        "agent": t.agent,
        "parent": t.parent,
        "drift": None if t.drift is None else t.drift._asdict(),
    }


def _half_of(tops: list[Any | None] | None, half: int) -> list[Any | None] | None:
    """The ids (0) or the log-probabilities (1) of `Trajectory.behavior_top`."""
    return None if tops is None else [None if top is None else top[half] for top in tops]


def _rollout_schema() -> Any:
    import pyarrow as pa

    integers, numbers = pa.list_(pa.int32()), pa.list_(pa.float32())
    columns = {
        "group": pa.int64(),
        "sample": pa.int32(),
        "part": pa.int32(),
        "task": pa.string(),
        "env": pa.string(),
        "task_data": pa.string(),
        "born": pa.int64(),
        "trained_at": pa.int64(),
        "tokens": integers,
        "mask": pa.list_(pa.bool_()),
        "behavior_logprobs": numbers,
        "trainer_logprobs": numbers,
        "advantages": numbers,
        "versions": integers,
        "experts": pa.binary(),
        "steps": pa.binary(),
        "steps_layout": pa.int32(),
        "support": pa.list_(integers),
        "top_ids": pa.list_(integers),
        "top_logprobs": pa.list_(numbers),
        "teacher_prompts": pa.list_(integers),
        "reward": pa.float64(),
        "reward_parts": pa.string(),
        "step_positions": integers,
        "step_rewards": pa.list_(pa.float64()),
        "failed": pa.string(),
        "failed_detail": pa.string(),
        "outcome": pa.string(),
        "outcome_reason": pa.string(),
        "finish_reason": pa.string(),
        "text": pa.string(),
        "timings": pa.string(),
        "policy": pa.string(),
        "agent": pa.string(),
        "parent": pa.int64(),
        "media": pa.string(),
        "drift": pa.string(),
    }
    return pa.schema(list(columns.items()))


JSON = ("task_data", "reward_parts", "timings", "media", "drift")  # columns of small trees, as strict JSON text
ARRAYS = ("experts", "steps")  # columns of arrays, as numpy's files
# columns whose values repeat; of numbers of every token a dictionary is slow, larger than they are, and eight times
# as much in memory while it is made
REPEATED = ["task", "env", "outcome", "outcome_reason", "finish_reason", "failed", "policy", "agent"]
# columns whose smallest and largest value a reader may ask for; of a long text they would be copies of it
COUNTED = ["group", "sample", "part", "born", "trained_at", "reward"]
PER_TOKEN = (
    *("tokens", "mask", "behavior_logprobs", "versions", "support", "top_ids", "top_logprobs"),
    *("trainer_logprobs", "advantages"),
)

PART = 1 << 16  # tokens of a step that are made into columns together


def _write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    with guard_write(path):
        make_folder(path.parent)
        _replace_tables(path, _row_tables(rows, path.parent))
    return path


def _row_tables(rows: Iterable[dict[str, Any]], folder: Path) -> Iterator[Any]:
    """Tables of PART tokens. A longer trajectory has several rows, one behind the other: parquet's writer wants four
    times as much memory as a row's numbers take.
    """
    part: list[dict[str, Any]] = []
    tokens = 0
    for row in rows:
        data, media = row["task_data"], row["media"]
        row = {**row, "media": ImageStore(folder).store_images(media) if media else None}
        row |= {name: write_json(row[name]) for name in JSON} | {name: _pack_array(row[name]) for name in ARRAYS}
        if IMAGE_URL in row["task_data"]:
            row["task_data"] = write_json(ImageStore(folder).replace_data_urls(data))
        for piece in _split_row(row):
            part.append(piece)
            tokens += len(piece["tokens"])
            if tokens >= PART:
                yield _rows_table(part)
                part, tokens = [], 0
    yield _rows_table(part)


def _split_row(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each PART tokens, at least one; the text in as many equal pieces, all else in the first."""
    count = -(-len(row["tokens"]) // PART) or 1
    size = -(-len(row["text"]) // count)
    for number in range(count):
        own = row if number == 0 else {"group": row["group"], "sample": row["sample"], "part": number}
        text = row["text"][number * size : (number + 1) * size]
        yield own | {"text": text} | {name: _part_of(row[name], number) for name in PER_TOKEN}


def _part_of(values: Any, number: int) -> Any:
    return None if values is None else values[number * PART : (number + 1) * PART]


def _join_parts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The inverse of `_split_row`; a file of before there were parts has none."""
    whole: list[dict[str, Any]] = []
    texts: list[list[str]] = []
    for row in rows:
        if row.pop("part"):
            texts[-1].append(row["text"])
            for name in PER_TOKEN:
                if row[name] is not None:
                    whole[-1][name] += row[name]
        else:
            whole.append(row)
            texts.append([row["text"]])
    for row, text in zip(whole, texts):
        row["text"] = "".join(text)
    return whole


def _rows_table(rows: list[dict[str, Any]]) -> Any:
    import pyarrow as pa

    schema = _rollout_schema()
    columns = {
        f.name: _build_column([_replace_invalid_unicode(row.get(f.name)) for row in rows], f.type) for f in schema
    }
    return pa.table(columns, schema=schema)


def _replace_tables(path: Path, tables: Iterator[Any]) -> None:
    """One behind the other in one file, whole or not at all; there is one at least."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    first = next(tables)
    with (
        open_replacement(path, first.nbytes) as file,
        pq.ParquetWriter(
            file, _rollout_schema(), compression="zstd", use_dictionary=REPEATED, write_statistics=COUNTED
        ) as writer,
    ):
        for table in chain([first], tables):
            writer.write_table(table)
    pa.default_memory_pool().release_unused()


def _build_column(values: list[Any], kind: Any) -> Any:
    """Lists of numbers by numpy, one row after the other: a row is short, and between
    two of them other threads may run.
    """
    import pyarrow as pa

    if not (pa.types.is_list(kind) and pa.types.is_primitive(kind.value_type)):
        return pa.array(values, kind)
    dtype = kind.value_type.to_pandas_dtype()
    parts = [np.asarray([] if value is None else value, dtype=dtype) for value in values]
    ends = np.cumsum([0, *map(len, parts)])
    offsets = pa.array(ends, pa.int32(), mask=np.array([*(value is None for value in values), False]))
    return pa.ListArray.from_arrays(
        offsets, pa.array(np.concatenate([*parts, np.empty(0, dtype)]), kind.value_type), type=kind
    )


def _replace_invalid_unicode(value: Any) -> Any:
    """Text that is no valid Unicode (a tool may return such) is stored with replacement
    marks rather than stopping the run.
    """
    if not isinstance(value, str) or value.isascii():
        return value
    return value.encode("utf-8", "replace").decode()


def _pack_array(array: Any) -> bytes | None:
    if array is None:
        return None
    out = io.BytesIO()
    np.save(out, np.asarray(array), allow_pickle=False)
    return out.getvalue()


# -- reading ---------------------------------------------------------------------------------------


def read_step(folder: str | Path, step: int) -> list[dict[str, Any]]:
    """The rows of one step, in the order they were trained in."""
    import pyarrow.parquet as pq

    folder, path = Path(folder), path_of(folder, step)
    if not folder.is_dir():
        raise UserError(f"no run folder at {folder}; `rondel train RUN.toml` makes one (key run.folder)")
    if not path.exists():
        raise UserError(f"{folder} has no rollouts of step {step}; {_describe_steps(stored_steps(folder))}")
    with error_boundary(
        CheckpointError, f"{path} cannot be read; the file is damaged, the other steps are not affected"
    ):
        rows = _join_parts(pq.read_table(path, schema=_rollout_schema()).to_pylist())
        album = ImageStore(path.parent)
        for row in rows:
            row.update({name: read_exact_json(row[name]) for name in JSON if row[name] is not None})
            row.update(task_data=album.restore_data_urls(row["task_data"]), media=album.load_images(row["media"] or []))
            row.update({name: np.load(io.BytesIO(row[name]), allow_pickle=False) for name in ARRAYS if row[name]})
    return rows


def _describe_steps(known: list[int]) -> str:
    if not known:
        return "none are stored yet"
    gapless = known == list(range(known[0], known[-1] + 1))
    shown = f"{known[0]} to {known[-1]}" if gapless and len(known) > 2 else ", ".join(map(str, known[-12:]))
    return f"stored: {shown}"


def groups_of(rows: list[dict[str, Any]]) -> list[Group]:
    """The groups as the trainer saw them: the exact inverse of `write_step` (logprobs
    are float32, as engines give them).
    """
    groups = []
    for number, members in groupby(rows, key=lambda row: row["group"]):
        first, *rest = members
        task = Task(first["task"], first["env"], first["task_data"])
        groups.append(Group(number, task, [_decode_trajectory(row) for row in (first, *rest)], first["born"]))
    return groups


def _decode_trajectory(row: dict[str, Any]) -> Trajectory:
    t = Trajectory(
        experts=row["experts"],
        policy=row["policy"],
        agent=row["agent"] or "",
        parent=row["parent"],
        score=_decode_score(row),
        outcome=_read_outcome(row),
        finish_reason=row["finish_reason"],
        text=row["text"],
        timings=row["timings"],
        drift=Drift(**row["drift"]) if row["drift"] else None,
    )
    columns = [row[name] for name in ("tokens", "mask", "behavior_logprobs", "versions")]
    if len({len(column) for column in columns}) != 1:
        raise CheckpointError(
            f"group {row['group']} sample {row['sample']}: columns of lengths {[len(c) for c in columns]}; the file is "
            f"damaged"
        )
    steps = None if row["steps"] is None else steps_from_rows(row["steps"], row.get("steps_layout") or 0)
    for written, run in groupby(zip(*columns), key=lambda token: token[1]):
        tokens, _, logprobs, versions = (list(column) for column in zip(*run))
        if not written:
            t.extend(tokens)
            continue
        own, steps = (None, None) if steps is None else (steps[: len(tokens)], steps[len(tokens) :])
        t.extend(tokens, logprobs=logprobs, versions=versions, steps=own)
    t.support, t.media = row["support"], row["media"]
    t.teacher_prompts = row["teacher_prompts"] or []
    if row["top_ids"] is not None:
        t.behavior_top = [
            None if ids is None else (ids, logprobs) for ids, logprobs in zip(row["top_ids"], row["top_logprobs"])
        ]
    return t


def _decode_score(row: dict[str, Any]) -> Score | Failed | None:
    if row["failed"] is not None:
        return Failed(row["failed"], row["failed_detail"])
    if row["reward"] is None:
        return None
    return Score(row["reward"], row["reward_parts"], tuple(zip(row["step_positions"] or [], row["step_rewards"] or [])))


def _read_outcome(row: dict[str, Any]) -> Outcome:
    kind = OUTCOMES[row["outcome"]]
    return kind() if kind is Ok else kind(row["outcome_reason"])
