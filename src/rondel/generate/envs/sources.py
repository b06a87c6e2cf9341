"""Where tasks come from.

kind(settings) ──> rows ──> tasks, one per question ──> split by content ──> TaskSet(train, held_out)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from rondel.generate.envs.holdout import content_key, hold_out
from rondel.generate.envs.rows import KINDS, Row
from rondel.words.errors import ConfigError, DataError
from rondel.words.registry import find, nearest
from rondel.words.types import Task

Found = dict[str, tuple[str, Task]]  # task id -> (content, task)


@dataclass(frozen=True, slots=True)
class TaskSet:
    """`duplicates` rows were dropped for an equal question, `leaked` training tasks because the evaluation data has their content."""

    train: list[Task]
    held_out: list[Task]
    duplicates: int = 0
    leaked: int = 0


def load_tasks(data: dict[str, Any], *, env: str) -> TaskSet:
    """The tasks of a recipe's `[task] data`: `{kind = "reasoning_gym", name = "chain_sum", size = 500, holdout = 32}`.

    kind            one of ours, or "module:name": a function(**settings) -> iterable of dicts
    prompt, answer  which field holds the question (text, or a list of messages) and the gold answer; answer = "" for none;
                    a field of a table in the row: answer = "reward_model.ground_truth"
    holdout         how many tasks to hold out: a number, or a fraction below 1; whole contents, so a few more may come
    eval_<key>      evaluation data from elsewhere: the same kind with <key> changed, as in eval_path or eval_split
    seed            of the split, and of kinds that draw
    """
    settings = dict(data)
    kind, holdout = settings.pop("kind", None), settings.pop("holdout", 0)
    columns = settings.pop("prompt", None), settings.pop("answer", "answer")
    elsewhere = {key.removeprefix("eval_"): settings.pop(key) for key in list(settings) if key.startswith("eval_")}
    if kind is None:
        raise ConfigError(f"task.data has no 'kind'. Known: {', '.join(sorted(KINDS))}; or your own as 'module:name'")
    if elsewhere and holdout:
        raise ConfigError(f"task.data has both eval_{next(iter(elsewhere))} and holdout = {holdout}; evaluation data comes from one place")

    found, duplicates = _read(kind, settings, env, columns)
    if elsewhere:
        held, _ = _read(kind, settings | elsewhere, env, columns)
        contents = {content for content, _ in held.values()}
    else:
        contents = hold_out([content for content, _ in found.values()], holdout, settings.get("seed", 0))
        held = {id: (content, task) for id, (content, task) in found.items() if content in contents}
    train = [task for content, task in found.values() if content not in contents]
    if not train or (holdout and not held):
        raise DataError(
            f"{kind}: {len(found)} different tasks leave {len(train)} to train on and {len(held)} held out; "
            "change holdout, bring more tasks, or bring evaluation data that the training data does not contain"
        )
    leaked = len(found) - len(train) if elsewhere else 0
    return TaskSet(train, [task for _, task in held.values()], duplicates, leaked)


def _read(kind: str, settings: dict[str, Any], env: str, columns: tuple[str | None, str]) -> tuple[Found, int]:
    """The different tasks of a kind, and how many rows repeated a question."""
    found: Found = {}
    count = 0
    for count, row in enumerate(_rows(kind, settings), 1):  # noqa: B007
        content, task = _task(row, env, *columns)
        found.setdefault(task.id, (content, task))
    if not count:
        raise DataError(f"task.data of kind '{kind}' is empty ({settings}); check the path and the size")
    return found, count - len(found)


def _rows(kind: str, settings: dict[str, Any]) -> Iterator[Row]:
    source: Callable[..., Iterable[Any]] = find("task.data.kind", kind, KINDS)
    known = inspect.signature(source).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
        settings = {k: v for k, v in settings.items() if k in known or k != "seed"}  # a kind that does not draw needs no seed
        for key in settings:
            if key not in known:
                raise ConfigError(
                    f"task.data.{key} is no setting of kind '{kind}'.{nearest(key, list(known))} It has: {', '.join(known) or 'none'}"
                )
        for key, parameter in known.items():
            if parameter.default is parameter.empty and key not in settings:
                raise ConfigError(f"task.data.{key} is missing: kind '{kind}' needs it")
    name = kind.partition(":")[2]
    for number, row in enumerate(source(**settings), 1):
        yield row if isinstance(row, Row) else Row(f"{kind}, row {number}", name, row)


def _task(row: Row, env: str, prompt: str | None, answer: str) -> tuple[str, Task]:
    """(content, task) of one row; all other fields of the row stay in task.data."""
    if not isinstance(row.fields, dict):
        raise DataError(f"{row.where}: a {type(row.fields).__name__}; a task is an object with named fields")
    fields = dict(row.fields)
    prompt = prompt or ("messages" if "messages" in fields and "prompt" not in fields else "prompt")
    for column, key in ((prompt, "prompt"), (answer, "answer")):
        if column and _at(fields, column) is None:
            raise _missing(row, column, key)
    asked, gold = _at(fields, prompt), _at(fields, answer)
    fields.pop(prompt, None)
    question = _question(row, asked)
    fields["prompt" if isinstance(asked, str) else "messages"] = asked
    if answer:
        fields.pop(answer, None)
        fields["answer"] = gold
    digest = blake2b(question.encode(), digest_size=8).hexdigest()
    return content_key(row.content or question), Task(f"{row.name}/{digest}", env, fields)


def _at(fields: dict[str, Any], column: str) -> Any:
    """The field `column`; "reward_model.ground_truth" lies in a table of the row."""
    found: Any = fields
    for name in [column] if column in fields else column.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _question(row: Row, asked: Any) -> str:
    if isinstance(asked, str) and asked.strip():
        return asked
    if isinstance(asked, list) and asked and all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in asked):
        return "\n".join(f"{m.get('role')}: {m['content']}" for m in asked)
    what = "empty" if isinstance(asked, str) else f"{asked!r:.60}, a {type(asked).__name__}"
    raise DataError(f"{row.where}: the prompt is {what}; it must be a text, or a list of messages with role and content")


def _missing(row: Row, column: str, key: str) -> DataError:
    has = list(row.fields)
    none = ", or answer = '' if the reward needs none" if key == "answer" else ""
    return DataError(f"{row.where}: no '{column}'.{nearest(column, has)} It has: {', '.join(has)}; name the field with {key} = '...'{none}")
