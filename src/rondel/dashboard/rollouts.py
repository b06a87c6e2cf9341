"""The stored answers of a run for the reader: a table of one step, one answer token by
token, and the same task at two steps.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from rondel.cli.episode_frames import acted_steps
from rondel.cli.view import load_tokenizer, logprob_gap, prompt_text, supervised_steps, tokenizer_file, trajectory_view
from rondel.core.errors import UserError
from rondel.runtime.journal.log import read_recipe
from rondel.runtime.journal.store import path_of, read_step, stored_steps
from rondel.runtime.telemetry.drawn_images import ZOOM, image_of, png_address
from rondel.runtime.telemetry.run_images import before_and_after

EXCERPT = 80  # characters of a prompt in the table
PAGE = 1500  # tokens that are sent at once
NEAR = 200  # steps that are searched for a task
WINDOW = 4  # tokens before, which decide how the next one is spelled
Json = dict[str, Any]


@lru_cache(maxsize=4)
def _read_rows_cached(folder: Path, step: int, written: float) -> list[Json]:
    return read_step(folder, step)


def read_rows(folder: Path, step: int) -> list[Json]:
    """Read once, until the file is another one: training adds to it what it learned."""
    return _read_rows_cached(folder, step, rollouts_written(folder, step))


def rollouts_written(folder: Path, step: int) -> float:
    """When the file of a step was, in seconds; 0 where there is none."""
    path = path_of(folder, step)
    return path.stat().st_mtime if path.exists() else 0.0


def rollout_table(folder: Path, step: int | None) -> Json:
    """One line for each answer of a step, the last step where none is named."""
    stored = stored_steps(folder)
    if not stored:
        return {"stored": [], "step": None, "rows": []}
    wanted = stored[-1] if step is None else step
    step = min(stored, key=lambda known: abs(known - wanted))
    return {
        "stored": [stored[0], stored[-1], len(stored)], "step": step,
        "rows": [_rollout_row(at, r, supervised=is_supervised(folder, step)) for at, r in enumerate(read_rows(folder, step))],
    }  # fmt: skip


def is_supervised(folder: Path, step: int) -> bool:
    """Whether the answers of this step are the tasks' own, which nobody scored."""
    return step <= supervised_steps(folder)


def _rollout_row(at: int, row: Json, *, supervised: bool = False) -> Json:
    lag = None if supervised or row["trained_at"] is None else row["trained_at"] - row["born"]
    error = row["failed"] or (row["outcome_reason"] or row["outcome"] if row["outcome"] != "ok" else None)
    return {
        "at": at,
        "group": row["group"],
        "sample": row["sample"],
        "task": row["task"],
        "prompt": _prompt_excerpt(prompt_text(row["task_data"])),
        "reward": None if supervised else row["reward"],
        "length": sum(row["mask"]),
        "gap": None if supervised else logprob_gap(row),
        "lag": lag,
        "finish": row["finish_reason"],
        "error": error,
        "agent": row["agent"] or "",
    }


def _prompt_excerpt(text: str) -> str:
    """The beginning of a prompt, on one line."""
    return " ".join(text[: 4 * EXCERPT].split())[:EXCERPT]


def read_answer(folder: Path, step: int, at: int, first: int = 0) -> Json:
    """One answer: facts, prompt, whether it is an episode in a world, the image that it is, and from token `first` on a
    page of (text, written, version, logprob, trainer's logprob, advantage).
    """
    row = find_row(folder, step, at)
    read = _token_reader(folder)
    shown = is_supervised(folder, step)
    told = trajectory_view(row, read, supervised=shown)
    until = min(len(row["tokens"]), first + PAGE)
    names = (None if shown else "behavior_logprobs", "trainer_logprobs", None if shown else "advantages")
    columns = [(row[name] if name else None) or [None] * len(row["tokens"]) for name in names]
    tokens = [
        (text, row["mask"][i], row["versions"][i], *(column[i] for column in columns))
        for i, text in zip(range(first, until), token_texts(row["tokens"], read, first, until))
    ]
    return {
        "task": told["task"],
        "facts": told["facts"],
        "answer": told["answer"],
        "tokens": tokens,
        "first": first,
        "of": len(row["tokens"]),
        "spelled": read is not None,
        "text": row["text"],
        "prompt": prompt_text(row["task_data"]),
        "episode": acted_steps(row) is not None,
        "image": None if (drawn := image_of(row)) is None else png_address(drawn.repeat(ZOOM, 0).repeat(ZOOM, 1)),
        "now": row["trained_at"],
        "born": row["born"],
    }


def run_images(folder: Path) -> Json:
    """{"png", "first", "last"}: what the first and the last step drew."""
    if (found := before_and_after(read_recipe(folder), stored_steps(folder), partial(read_step, folder))) is None:
        raise UserError("no step of this run drew images")
    image, (first, last) = found
    return {"png": png_address(image), "first": first, "last": last}


def find_row(folder: Path, step: int, at: int) -> Json:
    found = read_rows(folder, step)
    if not 0 <= at < len(found):
        raise UserError(f"step {step} has {len(found)} answers and no number {at}")
    return found[at]


@lru_cache(maxsize=4)
def _token_decoder(file: Path) -> Callable[[list[int]], str] | None:
    return load_tokenizer(file.parents[2])


def _token_reader(folder: Path) -> Callable[[list[int]], str] | None:
    file = tokenizer_file(folder)
    return None if file is None else _token_decoder(file)


def token_texts(ids: list[int], read: Callable[[list[int]], str] | None, first: int, until: int) -> list[str]:
    """The text of each token, by what it adds to those before it; a character that takes
    several tokens stands at the last of them.
    """
    if read is None:
        return [f"⟨{ids[i]}⟩" for i in range(first, until)]
    out, start, said = [], max(0, first - WINDOW), 0
    said = len(read(ids[start:first]))
    for i in range(first, until):
        text = read(ids[start : i + 1])
        if text.endswith("�"):
            out.append("")
            continue
        out.append(text[said:])
        start = max(0, i + 1 - WINDOW)
        said = len(read(ids[start : i + 1]))
    return out


# -- two steps ---------------------------------------------------------------------------------------


def steps_of(folder: Path, task: str, near: int) -> list[int]:
    """The steps around one that have this task."""
    import pyarrow.parquet as pq

    closest = sorted(stored_steps(folder), key=lambda step: abs(step - near))[:NEAR]
    return sorted(
        step for step in closest if task in pq.read_table(path_of(folder, step), columns=["task"])["task"].to_pylist()
    )


def compare_groups(folder: Path, task: str, a: int, b: int, pick: tuple[int, int] = (0, 0)) -> Json:
    """One task at two steps: rewards and lengths of both groups, and what differs
    between one answer of each, word by word.
    """
    sides: list[Json] = []
    for step, at in zip((a, b), pick):
        own = [r for r in read_rows(folder, step) if r["task"] == task]
        if not own:
            raise UserError(f"step {step} has no answer to {task}")
        lines = [{**_rollout_row(i, r, supervised=is_supervised(folder, step)), "at": i} for i, r in enumerate(own)]
        sides.append(
            {
                "step": step,
                "rows": lines,
                "pick": min(at, len(own) - 1),
                "text": own[min(at, len(own) - 1)]["text"] or "",
            }
        )
    return {
        "task": task,
        "prompt": prompt_text(own[0]["task_data"]),
        "sides": sides,
        "diff": word_diff(sides[0]["text"], sides[1]["text"]),
    }


def word_diff(old: str, new: str) -> list[tuple[str, str]]:
    """[("same", "the sum is "), ("gone", "7"), ("new", "8")]: a few thousand words of each."""
    a, b = (re.findall(r"\s+|\w+|[^\w\s]", text)[:4000] for text in (old, new))
    out: list[tuple[str, str]] = []
    for what, i, j, k, n in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if what == "equal":
            out.append(("same", "".join(a[i:j])))
        else:
            out += [(name, text) for name, text in (("gone", "".join(a[i:j])), ("new", "".join(b[k:n]))) if text]
    return out
