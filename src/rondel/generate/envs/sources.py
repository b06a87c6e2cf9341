"""Where tasks come from.

kind(settings) ──> rows ──> tasks, one per question ──> split by content ──> TaskSet(train, held_out)
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from rondel.core.config.section import split_kind
from rondel.core.errors import ConfigError, DataError, RondelError
from rondel.core.media import message_text
from rondel.core.registry import find_registered, locate_path, suggest_name
from rondel.core.types import Task
from rondel.generate.envs.holdout import GRAM, asked_key, content_key, hold_out, overlapping_tasks
from rondel.generate.envs.rows import KINDS, DatasetRow
from rondel.generate.interleave import interleave_media
from rondel.generate.pictures import image_part, is_image, is_picture, source_of
from rondel.generate.video import is_video, video_part
from rondel.text.tokenization import SPLIT, SpecialTokens
from rondel.text.unicode import valid_unicode

STRICT = ConfigDict(strict=True, allow_inf_nan=False)
Found = dict[str, tuple[str, Task]]  # task id -> (content, task)


@dataclass(frozen=True, slots=True)
class DatasetColumns:
    """Which fields of a row a recipe names; None: it does not say."""

    prompt: str | None
    answer: str | None
    image: str | None
    video: str | None


@dataclass(frozen=True, slots=True)
class TaskSet:
    """`duplicates` rows were dropped for an equal question, `leaked` training tasks
    because the evaluation data has their content, `too_long` tasks because their prompts
    are longer than task.max_prompt_tokens.

    sources    of a mixture: (weight, its share of `train`); else one
    sets       task.eval.sets: tasks of other origin that are evaluated beside `held_out`
    shots      training tasks that are shown before every prompt, and not trained on
    """

    train: list[Task]
    held_out: list[Task]
    duplicates: int = 0
    leaked: int = 0
    sources: tuple[tuple[float, list[Task]], ...] = ()
    too_long: int = 0
    sets: Mapping[str, list[Task]] = field(default_factory=dict)
    shots: tuple[Task, ...] = ()

    @property
    def evaluated(self) -> list[Task]:
        """The tasks of all sets that are evaluated."""
        return [*self.held_out, *(task for own in self.sets.values() for task in own)]

    @property
    def every_task(self) -> list[Task]:
        return [*self.train, *self.evaluated]


def load_evaluation_sets(
    tables: Mapping[str, dict[str, Any]], tasks: TaskSet, *, env: str, trains: bool = True
) -> TaskSet:
    """`tasks` with task.eval.sets, whose tables are like task.data. A training task with the content of one is left
    out, and counted as leaked, unless nothing is trained.
    """
    if not tables:
        return tasks
    sets = {name: _read_evaluation_set(name, table, env) for name, table in tables.items()}
    if not trains:
        return replace(tasks, sets=sets)
    asked = [task for own in sets.values() for task in own]
    contents = {asked_key(task) for task in asked}
    leaked = overlapping_tasks(tasks.train, asked, GRAM)
    leaked |= {task.id for task in tasks.train if asked_key(task) in contents}
    train = [task for task in tasks.train if task.id not in leaked]
    sources = tuple((weight, [task for task in own if task.id not in leaked]) for weight, own in tasks.sources)
    if not train or not all(own for _, own in sources):
        raise DataError(
            "task.eval.sets leave nothing to train on, or nothing of a source: every task has the content of one of "
            "theirs. Bring evaluation data that the training data does not contain"
        )
    gone = len(tasks.train) - len(train)
    return replace(tasks, train=train, sources=sources, leaked=tasks.leaked + gone, sets=sets)


def _read_evaluation_set(name: str, table: dict[str, Any], env: str) -> list[Task]:
    settings = dict(table)
    kind = settings.pop("kind", None)
    if kind is None or kind == "mix":
        raise ConfigError(f"task.eval.sets.{name} needs a kind, and not 'mix': give each source a set of its own")
    for key in settings:
        if key in ("holdout", "ngram", SPLIT) or key.startswith("eval_"):
            raise ConfigError(f"task.eval.sets.{name}.{key} has no meaning: all tasks of a set are evaluated")
    try:
        columns = DatasetColumns(*(_column_name(settings, key) for key in ("prompt", "answer", "image", "video")))
        found, _ = _read_tasks(kind, settings, env, columns)
    except (ConfigError, DataError) as error:  # it speaks of task.data, which is read in the same way
        raise type(error)(str(error).replace("task.data", f"task.eval.sets.{name}"), page=error.page) from error
    return [task for _, task in found.values()]


def load_tasks(data: dict[str, Any], *, env: str) -> TaskSet:
    """The tasks of a recipe's `[task] data`: `{kind = "reasoning_gym", name = "chain_sum", size = 500, holdout = 32}`.

    kind            one of ours, or "module:name": a function(**settings) -> iterable of dicts;
                    "mix" for several: its `sources` are tables like this one, each with a `source`,
                    its name, which its tasks have as
                    data["source"], a `weight`, and where it is not task.env an `env`
    prompt, answer  which field holds the question (text, or a list of messages) and the gold
                    answer; answer = "" for none; a field of a table in the row: answer = "reward_model.ground_truth".
                    Fields "prompt" and "messages" that are not the question are left out of the task
    image           which field holds the picture of a question, or a list of them: a path (from the
                    data's own folder), bytes, an opened picture; they stand where the question
                    says <image>, or before its words
    video           the same of its video, or a list of them, where it says <video>: a list of frames, each what an
                    image is, a folder of them, an animated GIF or WebP, or a table {video, fps}
    holdout         how many tasks to hold out: a number, or a fraction below 1; whole contents, so a few more may come
    eval_<key>      evaluation data from elsewhere: the same kind with <key> changed, as in eval_path or eval_split
    ngram           a training task that shares so many words in a row with evaluation data from
                    elsewhere is left out; 0 does not look
    split_special_tokens   false: the data means the control tokens that its prompts, messages and
                           answers spell; else they are text
    where           which rows to keep, by their fields: where = { level = [2, 4], topic =
                    "algebra", family = ["a", "b"] }, a range, a value or one of several texts
    seed            of the split, and of kinds that draw
    """
    if data.get("kind") == "mix":
        return _read_mixed(dict(data), env)
    settings = dict(data)
    kind = settings.pop("kind", None)
    holdout = settings.pop("holdout", 0)
    gram = _checked_int(settings.pop("ngram", GRAM), "ngram")
    columns = DatasetColumns(*(_column_name(settings, name) for name in ("prompt", "answer", "image", "video")))
    _checked_int(settings.get("seed", 0), "seed")
    split = settings.pop(SPLIT, True)
    if not isinstance(split, bool):
        raise ConfigError(
            f"task.data.{SPLIT} = {split!r}; it is true, or false for data that means the control tokens it spells"
        )
    elsewhere = {key.removeprefix("eval_"): settings.pop(key) for key in list(settings) if key.startswith("eval_")}
    if kind is None:
        raise ConfigError(f"task.data has no 'kind'. Known: {', '.join(sorted(KINDS))}; or your own as 'module:name'")
    if elsewhere and holdout:
        raise ConfigError(
            f"task.data has both eval_{next(iter(elsewhere))} and holdout = {holdout}; evaluation data comes from one "
            f"place"
        )

    found, duplicates = _read_tasks(kind, settings, env, columns)
    if elsewhere:
        held, _ = _read_tasks(kind, settings | elsewhere, env, columns)
        shared = overlapping_tasks([task for _, task in found.values()], [task for _, task in held.values()], gram)
        asked = {asked_key(task) for _, task in held.values()}
        contents = {content for content, _ in held.values()} | {
            content for content, task in found.values() if task.id in shared or asked_key(task) in asked
        }
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
    if kind == "points" and not held:
        held = found  # evaluated under noise of its own: what is drawn for a prompt is no answer that was shown
    for task in [] if split else [task for _, task in [*found.values(), *held.values()]]:
        task.data[SPLIT] = False
    return TaskSet(train, [task for _, task in held.values()], duplicates, leaked)


def _checked_int(value: Any, key: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"task.data.{key} = {value!r}; it is a whole number")
    return value


def _column_name(settings: dict[str, Any], key: str) -> str | None:
    """The name of a field, as the recipe says it; None where it says nothing."""
    name = settings.pop(key, None)
    if name is not None and not isinstance(name, str):
        raise ConfigError(f"task.data.{key} = {name!r}; it is the name of a field, {key} = 'question' say")
    return name


def _read_mixed(settings: dict[str, Any], env: str) -> TaskSet:
    """Several sources. What one holds out, none trains on; a question that several bring belongs
    to the first of them.
    """
    tables = settings.pop("sources", None)
    settings.pop("kind")
    if (
        settings
        or not isinstance(tables, list)
        or not all(isinstance(table, dict) for table in tables)
        or len(tables) < 2
    ):
        odd = f"; it also has {', '.join(settings)}, which belongs to a source" if settings else ""
        raise ConfigError(
            f'task.data of kind "mix" has sources = [{{ source = "...", weight = 1, kind = ... }}, ...], two or '
            f"more{odd}"
        )
    sets: list[tuple[float, TaskSet]] = []
    for number, table in enumerate(tables, 1):
        own = dict(table)
        name, weight, where = own.pop("source", None), own.pop("weight", 1), split_kind(own.pop("env", env), env)[0]
        if not isinstance(name, str) or name in [s.train[0].data["source"] for _, s in sets]:
            raise ConfigError(f"task.data.sources[{number}] has source = {name!r}; each needs a name of its own")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise ConfigError(
                f"task.data.sources[{number}] ('{name}') has weight = {weight!r}; it must be a positive number"
            )
        loaded = load_tasks(own, env=where)
        for task in [*loaded.train, *loaded.held_out]:
            task.data["source"] = name
        sets.append((weight, loaded))
    placed = [((i + 0.5) / len(s.held_out), task) for _, s in sets for i, task in enumerate(s.held_out)]
    held = [task for _, task in sorted(placed, key=lambda pair: pair[0])]  # the first n are some of every source
    forbidden, seen = {asked_key(task) for task in held}, set[str]()
    sources: list[tuple[float, list[Task]]] = []
    for weight, s in sets:
        mine = [task for task in s.train if asked_key(task) not in forbidden]
        kept = [task for task in mine if question_text(task) not in seen]
        seen |= {question_text(task) for task in kept}
        if not kept:
            raise DataError(
                f"task.data: nothing is left of source '{s.train[0].data['source']}' without what others hold out or "
                f"bring, too"
            )
        sources.append((weight, kept))
    train = [task for _, tasks in sources for task in tasks]
    clean = sum(asked_key(task) not in forbidden for _, s in sets for task in s.train)
    leaked = sum(len(s.train) for _, s in sets) - clean
    return TaskSet(
        train,
        held,
        duplicates=sum(s.duplicates for _, s in sets) + clean - len(train),
        leaked=leaked + sum(s.leaked for _, s in sets),
        sources=tuple(sources),
    )


def _read_tasks(kind: str, settings: dict[str, Any], env: str, columns: DatasetColumns) -> tuple[Found, int]:
    """The different tasks of a kind, and how many rows repeated a question."""
    settings = dict(settings)
    found: Found = {}
    wanted, count, kept = settings.pop("where", {}), 0, 0
    path = settings.get("path")
    first = path[0] if isinstance(path, list) and path else path
    folder = locate_path(first).parent if isinstance(first, str) else Path()
    for count, row in enumerate(_source_rows(kind, settings), 1):  # noqa: B007
        if wanted and not _matches_filter(row, wanted):
            continue
        kept += 1
        content, task = _task_from_row(row, env, folder, columns)
        found.setdefault(task.id, (content, task))
    if not count:
        raise DataError(f"task.data of kind '{kind}' is empty ({settings}); check the path and the size")
    if not kept:
        raise DataError(f"task.data.where = {wanted} keeps none of {count} rows")
    return found, kept - len(found)


def _matches_filter(row: DatasetRow, wanted: dict[str, Any]) -> bool:
    if not isinstance(wanted, dict):
        raise ConfigError(f"task.data.where = {wanted!r}; it is a table: where = {{ level = [2, 4] }}")
    for name, rule in wanted.items():
        value = _nested_field(row.fields, name)
        if value is None:
            raise _missing_column(row, name, "where")
        if isinstance(rule, list) and rule and all(isinstance(one, str) for one in rule):
            if not isinstance(value, str):
                raise ConfigError(f"task.data.where.{name} = {rule}, and {row.where} has {value!r:.60} there, no text")
            if value not in rule:
                return False
        elif isinstance(rule, list):
            if len(rule) != 2:
                raise ConfigError(
                    f"task.data.where.{name} = {rule}; a range has two ends: [low, high]; of texts, any number"
                )
            try:
                if isinstance(value, str) or not rule[0] <= value <= rule[1]:
                    return False
            except TypeError as error:
                raise ConfigError(
                    f"task.data.where.{name} = {rule}, and {row.where} has {value!r:.60} there: {error}"
                ) from error
        elif value != rule:
            return False
    return True


def _source_rows(kind: str, settings: dict[str, Any]) -> Iterator[DatasetRow]:
    source: Callable[..., Iterable[Any]] = find_registered("task.data.kind", kind, KINDS)
    known = _signature_parameters(source)
    if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
        # a kind that does not draw needs no seed
        settings = {k: v for k, v in settings.items() if k in known or k != "seed"}
        for key in settings:
            if key not in known:
                raise ConfigError(
                    f"task.data.{key} is no setting of kind '{kind}'.{suggest_name(key, list(known))} It has: "
                    f"{', '.join(known) or 'none'}"
                )
        for key, parameter in known.items():
            if parameter.default is parameter.empty and key not in settings:
                raise ConfigError(f"task.data.{key} is missing: kind '{kind}' needs it")
    if kind in KINDS:
        _check_settings(source, settings)
    name, number = kind.partition(":")[2], 0
    try:
        for number, row in enumerate(source(**settings), 1):
            yield row if isinstance(row, DatasetRow) else DatasetRow(f"{kind}, row {number}", name, row)
    except RondelError:
        raise
    except Exception as error:
        after = f" after row {number}" if number else ""
        raise DataError(
            f"task.data of kind '{kind}' with {settings} broke{after}: {type(error).__name__}: {error}. Mend its "
            f"settings, or the function that makes it"
        ) from error


def _signature_parameters(source: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Those of a function; of one written in C, which does not say, whatever is given."""
    try:
        return inspect.signature(source).parameters
    except (TypeError, ValueError):
        return {"settings": inspect.Parameter("settings", inspect.Parameter.VAR_KEYWORD)}


def _check_settings(source: Callable[..., Any], settings: dict[str, Any]) -> None:
    """What one of our kinds is given is of the type that it says."""
    hints = get_type_hints(source)
    for key, value in settings.items():
        try:
            TypeAdapter(hints[key], config=STRICT).validate_python(value)
        except ValidationError as error:
            raise ConfigError(f"task.data.{key} = {value!r:.80}: {error.errors()[0]['msg'].lower()}") from error


def _task_from_row(row: DatasetRow, env: str, folder: Path, columns: DatasetColumns) -> tuple[str, Task]:
    """(content, task) of one row; all other fields of the row stay in task.data, but for another question."""
    prompt, answer = columns.prompt, "answer" if columns.answer is None else columns.answer
    shown = {"image": columns.image or "", "video": columns.video or ""}
    if not isinstance(row.fields, dict):
        raise DataError(f"{row.where}: a {type(row.fields).__name__}; a task is an object with named fields")
    # the recipe's to say, and not the data's
    fields = {name: value for name, value in valid_unicode(row.fields).items() if name != SPLIT}
    prompt = prompt or ("messages" if "messages" in fields and "prompt" not in fields else "prompt")
    for column, key in ((prompt, "prompt"), (answer, "answer"), *((shown[key], key) for key in shown)):
        if column and _nested_field(fields, column) is None:
            raise _missing_column(row, column, key)
    _refuse_unseen(row, fields, [key for key in shown if getattr(columns, key) is None])
    asked, gold = _nested_field(fields, prompt), _nested_field(fields, answer)
    if isinstance(gold, float) and not math.isfinite(gold):
        raise DataError(
            f"{row.where}: '{answer}' is {gold}, which no answer can be equal to: give the row a number or drop it"
        )
    fields.pop(prompt, None)
    asked = _with_media(row, asked, fields, folder, shown)
    question = _question(row, asked)
    if ":" not in env and isinstance(asked, list) and asked[-1]["role"] == "assistant":  # one of yours may want it
        raise DataError(
            f"{row.where}: the messages end with a turn of the assistant, which the policy would read before it "
            "answers: end them with the user's turn, and give what the assistant said as the field 'answer'"
        )
    for name in ("prompt", "messages"):  # one question: a conversation beside the named field may hold the solution
        fields.pop(name, None)
    fields["prompt" if isinstance(asked, str) else "messages"] = asked
    if answer:
        fields.pop(answer, None)
        fields["answer"] = gold
    digest = blake2b(question.encode(), digest_size=8).hexdigest()
    return content_key(row.content or question), Task(f"{row.name}/{digest}", env, fields)


def _refuse_unseen(row: DatasetRow, fields: dict[str, Any], unsaid: list[str]) -> None:
    """A picture that a recipe says nothing of would be left out of the question without a word."""
    for kind in unsaid:
        if name := next((name for name in (kind, f"{kind}s") if fields.get(name)), None):
            what = "pictures" if kind == "image" else "videos"
            raise DataError(
                f"{row.where}: the field '{name}' is said to hold {what}, and the recipe does not say what becomes of "
                f"them: set {kind} = '{name}' "
                f"in task.data to show them, or {kind} = '' to leave them out"
            )


def _with_media(row: DatasetRow, asked: Any, fields: dict[str, Any], folder: Path, columns: dict[str, str]) -> Any:
    """The question with the images and videos of its row, and those that its messages name, as task.data can hold
    them.
    """
    if isinstance(asked, list) and not all(map(_is_message, asked)):
        return asked
    given: dict[str, list[dict[str, Any]]] = {}
    try:
        for kind, column in columns.items():
            if not column:
                continue
            found = _nested_field(fields, column)
            fields.pop(column, None)
            given[kind] = (
                [image_part(one, folder) for one in (found if isinstance(found, list) else [found])]
                if kind == "image"
                else [video_part(one, folder) for one in (found if _is_several_videos(found) else [found])]
            )
        if not columns["image"] and (held := [name for name, value in fields.items() if is_picture(value)]):
            raise DataError(f"the field '{held[0]}' holds an image; say image = '{held[0]}' in task.data")
        if given:
            asked = interleave_media(asked, given)
        return [_store_media(m, folder) for m in asked] if isinstance(asked, list) else asked
    except DataError as error:
        raise DataError(f"{row.where}: {error}") from error


def _is_several_videos(found: Any) -> bool:
    """A list of videos, and not the frames of one: its items are lists or tables with one."""
    return (
        isinstance(found, list)
        and bool(found)
        and all(isinstance(one, list) or (isinstance(one, dict) and "video" in one) for one in found)
    )


def _store_media(message: Any, folder: Path) -> Any:
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    return {**message, "content": [_store_part(part, folder) for part in message["content"]]}


def _store_part(part: dict[str, Any], folder: Path) -> dict[str, Any]:
    if is_video(part):
        return part if "name" in part else video_part(part, folder)
    return image_part(source_of(part), folder) if is_image(part) and "name" not in part else part


def _nested_field(fields: dict[str, Any], column: str) -> Any:
    """The field `column`; "reward_model.ground_truth" lies in a table of the row."""
    found: Any = fields
    for name in [column] if column in fields else column.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def question_text(task: Task) -> str:
    """The question of a task, as one text."""
    return (
        task.data["prompt"]
        if "prompt" in task.data
        else "\n".join(f"{m['role']}: {message_text(m['content'])}" for m in task.data["messages"])
    )


def control_tokens_in(task: Task, special: SpecialTokens) -> list[str]:
    """The control tokens that question and answer of a task spell."""
    return special.find_control_tokens(f"{question_text(task)}\n{task.data.get('answer', '')}")


def _question(row: DatasetRow, asked: Any) -> str:
    if isinstance(asked, str) and asked.strip():
        return asked
    if isinstance(asked, list) and asked and all(map(_is_message, asked)):
        return "\n".join(f"{m['role']}: {message_text(m['content'])}" for m in asked)
    what = "empty" if isinstance(asked, str) else f"{asked!r:.60}, a {type(asked).__name__}"
    raise DataError(
        f"{row.where}: the prompt is {what}; it must be a text, or a list of messages with role and content"
    )


def _is_message(node: Any) -> bool:
    if not isinstance(node, dict) or not isinstance(node.get("role"), str):
        return False
    content = node.get("content")
    return isinstance(content, str) or (isinstance(content, list) and all(isinstance(part, dict) for part in content))


def _missing_column(row: DatasetRow, column: str, key: str) -> DataError:
    has = list(row.fields)
    none = ", or answer = '' if the reward needs none" if key == "answer" else ""
    if column in has:
        return DataError(f"{row.where}: '{column}' is null; give the row a value or drop it{none}")
    return DataError(
        f"{row.where}: no '{column}'.{suggest_name(column, has)} It has: {', '.join(has)}; name the field with {key} = "
        f"'...'{none}"
    )
