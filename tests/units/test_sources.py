"""Tasks from every kind, a hold-out that does not leak, errors that name the place, a stream that resumes."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from rondel.checks.recipe_check import _check_tasks
from rondel.core.errors import ConfigError, DataError
from rondel.core.types import Task
from rondel.generate.envs.holdout import content_key
from rondel.generate.envs.order import ShuffledOrder, stream_tasks
from rondel.generate.envs.single_turn import opening_messages
from rondel.generate.envs.sources import TaskSet, load_evaluation_sets, load_tasks


def load(**data):
    return load_tasks(data, env="single_turn")


def lines(folder, name, *rows):
    path = folder / name
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return str(path)


def test_digits_hold_out_whole_sums():
    tasks = load(kind="digits", holdout=20)
    assert len(tasks.train) + len(tasks.held_out) == 100 and 20 <= len(tasks.held_out) <= 21
    sums = [
        {frozenset(t.data["prompt"].rstrip("=").split("+")) for t in side} for side in (tasks.train, tasks.held_out)
    ]
    assert not sums[0] & sums[1]
    assert all(eval(t.data["prompt"][:-1]) == int(t.data["answer"]) for t in tasks.train + tasks.held_out)
    assert tasks == load(kind="digits", holdout=20) != load(kind="digits", holdout=20, seed=1)
    assert len({t.id for t in tasks.train}) == len(tasks.train) and all(t.id.startswith("digits/") for t in tasks.train)


def test_content_forgets_order_and_nothing_else():
    assert content_key("3 + 4 =") == content_key("4+3=") != content_key("3 - 4 =")
    assert content_key("34 + 1") != content_key("3 + 41") and content_key("1.5 m") != content_key("1 5 m")
    assert content_key("Tom has 3 apples") != content_key("Ann has 3 apples")


@pytest.mark.slow
def test_reasoning_gym_dedupes_keeps_the_entry_and_does_not_leak():
    pytest.importorskip("reasoning_gym")
    args = dict(min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    tasks = load(kind="reasoning_gym", name="chain_sum", size=400, seed=3, holdout=0.2, args=args)
    everything = tasks.train + tasks.held_out
    assert len(everything) + tasks.duplicates == 400 and tasks.duplicates > 100
    assert len({t.data["prompt"] for t in everything}) == len(everything)
    assert not {key(t) for t in tasks.train} & {key(t) for t in tasks.held_out}
    assert abs(len(tasks.held_out) - 0.2 * len(everything)) <= 2
    assert everything[0].data["entry"]["question"] == everything[0].data["prompt"] and everything[0].id.startswith(
        "chain_sum/"
    )
    assert tasks == load(kind="reasoning_gym", name="chain_sum", size=400, seed=3, holdout=0.2, args=args)


def key(task):
    return content_key(task.data["entry"]["metadata"]["expression"])


@pytest.mark.slow
def test_phrasing_does_not_leak():
    pytest.importorskip("reasoning_gym")
    args = dict(min_terms=2, max_terms=2, min_digits=1, max_digits=1, format_style="natural")
    tasks = load(kind="reasoning_gym", name="basic_arithmetic", size=300, holdout=40, args=args)
    assert not {key(t) for t in tasks.train} & {key(t) for t in tasks.held_out}


def test_jsonl_columns_and_evaluation_from_elsewhere(tmp_path):
    rows = [{"question": f"{a} times {b}?", "answer": a * b, "level": a} for a in range(5) for b in range(5)]
    train, test = (
        lines(tmp_path, "train.jsonl", *rows, rows[0]),
        lines(tmp_path, "test.jsonl", *rows[:3], {"question": "9 times 9?", "answer": 81}),
    )
    tasks = load(kind="jsonl", path=train, eval_path=test, prompt="question")
    assert tasks.duplicates == 1 and len(tasks.held_out) == 4
    assert tasks.leaked == 5 and len(tasks.train) == 20  # 0x0, 0x1, 0x2 and, turned round, 1x0, 2x0
    assert tasks.train[0].data == {"prompt": "0 times 3?", "answer": 0, "level": 0} and tasks.train[0].id.startswith(
        "train/"
    )


def test_messages_parquet_datasets_list_and_a_function_of_the_user(tmp_path, monkeypatch):
    import pyarrow as pa
    from pyarrow import parquet

    rows = [
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": f"{n}?"}], "gold": str(n)}
        for n in range(4)
    ]
    expected = load(kind="list", rows=rows, answer="gold").train
    assert expected[2].data == {"messages": rows[2]["messages"], "answer": "2"} and expected[2].id.startswith("list/")
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    (tmp_path / "theirs.py").write_text(f"def rows(n):\n    return {rows!r}[:n]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for found in (
        load(kind="parquet", path=str(tmp_path / "p.parquet"), answer="gold").train,
        load(kind="jsonl", path=lines(tmp_path, "p.jsonl", *rows), answer="gold").train,
        load(kind="theirs:rows", n=4, answer="gold", seed=3).train,
    ):
        assert [t.data for t in found] == [t.data for t in expected]
        assert [t.id.split("/")[1] for t in found] == [t.id.split("/")[1] for t in expected]


def test_csv_as_spreadsheets_write_it(tmp_path):
    """Quotes, commas and line ends inside of a text, the mark of the encoding, several files, another delimiter."""
    text = '\ufeffquestion,answer\r\n"How many, in\r\nall?",7\r\n\r\n"Say ""two""",2\r\n'
    (tmp_path / "a.csv").write_bytes(text.encode())
    (tmp_path / "b.csv").write_text("question\tanswer\n1, or 2?\t3\n")
    found = load(kind="csv", path=[str(tmp_path / "a.csv")], prompt="question").train
    assert [t.data["prompt"] for t in found] == ["How many, in\r\nall?", 'Say "two"']
    assert [t.data["answer"] for t in found] == ["7", "2"]
    (only,) = load(kind="csv", path=str(tmp_path / "b.csv"), prompt="question", delimiter="\t").train
    assert only.data == {"prompt": "1, or 2?", "answer": "3"}


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("prompt,answer\n1+1=,2,3\n", "csv", r"t.csv:2: 3 values for 2 columns \(prompt, answer\): .* in quotes"),
        ("prompt,prompt\n1,2\n", "csv", "t.csv:1: two columns have one name"),
        ("question,answer\n1,2\n", "csv", "t.csv:2: no 'prompt'.*It has: question, answer"),
        ("prompt,answer\n1,2\n", "jsonl", 't.csv:1: not JSON .*; kind = "csv" reads tables of text'),
        ("", "csv", "empty"),
    ],
)
def test_bad_csv_names_the_place_and_the_remedy(tmp_path, text, kind, message):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        load(kind=kind, path=str(tmp_path / "t.csv"))


def test_datasets_from_a_folder(tmp_path):
    hub = pytest.importorskip("datasets")
    hub.Dataset.from_list([{"q": f"{n}+1", "a": str(n + 1)} for n in range(6)]).save_to_disk(tmp_path / "mine")
    tasks = load(kind="datasets", name=str(tmp_path / "mine"), prompt="q", answer="a", holdout=2)
    assert (
        len(tasks.train) == 4
        and tasks.train[0].id.startswith("mine/")
        and set(tasks.train[0].data) == {"prompt", "answer"}
    )


def test_a_reward_without_gold_answers_needs_none():
    assert load(kind="list", rows=[{"prompt": "write a poem"}], answer="").train[0].data == {"prompt": "write a poem"}


def test_a_turn_of_the_assistant_is_an_answer_and_no_prompt():
    asked = [{"role": "user", "content": "3 + 4 ="}, {"role": "assistant", "content": "7"}]
    rows = [{"messages": asked, "answer": "7"}]
    for env in ("single_turn", "tools", "repl"):
        with pytest.raises(
            DataError, match=r"rows\[1\]: the messages end with a turn of the assistant.*field 'answer'"
        ):
            load_tasks({"kind": "list", "rows": rows}, env=env)
    assert load_tasks({"kind": "list", "rows": rows}, env="mine:Env").train[0].data["messages"] == asked
    rows = [{"messages": [*asked, {"role": "user", "content": "5 + 1 ="}], "answer": "6"}]
    assert load_tasks({"kind": "list", "rows": rows}, env="single_turn").train[0].data == rows[0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "has no 'kind'"),
        ({"kind": "jsnl", "path": "x"}, "Did you mean 'jsonl'"),
        ({"kind": "jsonl"}, "task.data.path is missing"),
        ({"kind": "jsonl", "pth": "x"}, "Did you mean 'path'"),
        ({"kind": "digits", "holdout": -1}, "holdout = -1"),
        ({"kind": "digits", "holdout": "20"}, "holdout = '20'"),
        ({"kind": "jsonl", "path": "x", "eval_path": "y", "holdout": 3}, "one place"),
        ({"kind": "no_such_module:rows"}, "no module"),
    ],
)
def test_a_recipe_that_cannot_mean_what_it_says(data, message):
    with pytest.raises(ConfigError, match=message):
        load(**data)


@pytest.mark.parametrize(
    ("rows", "more", "message"),
    [
        ([{"prompt": "1", "answer": "2"}, "{bad"], {}, r"train.jsonl:2: not JSON .*one object a line"),
        ([[1]], {}, r"train.jsonl:1: a list"),
        ([], {}, "empty"),
        ([{"question": "1", "answer": "2"}], {"prompt": "questoin"}, "no 'questoin'. Did you mean 'question'"),
        (
            [{"question": "1", "answer": "2"}],
            {},
            "train.jsonl:1: no 'prompt'.*It has: question, answer; name the field with prompt",
        ),
        (
            [{"prompt": "1", "answer": "2"}, {"prompt": "2", "answer": None}],
            {},
            r"train.jsonl:2: 'answer' is null; give the row a value or drop it, or answer = ''",
        ),
        ([{"prompt": "1", "answr": "2"}], {}, "no 'answer'. Did you mean 'answr'.*answer = ''"),
        ([{"prompt": 17, "answer": "2"}], {}, "the prompt is 17, a int"),
        ([{"prompt": " ", "answer": "2"}], {}, "the prompt is empty"),
        ([{"prompt": ["hi"], "answer": "2"}], {}, "list of messages"),
        ([{"prompt": "1", "answer": "2"}], {"holdout": 1}, "leave 0 to train on"),
        ([{"prompt": str(n), "answer": "2"} for n in range(5)], {"holdout": 0.01}, "0 held out"),
    ],
)
def test_bad_data_names_the_place_and_the_remedy(tmp_path, rows, more, message):
    with pytest.raises(DataError, match=message):
        load(kind="jsonl", path=lines(tmp_path, "train.jsonl", *rows), **more)


@pytest.mark.slow
def test_bad_sources_name_the_nearest(tmp_path):
    lines(tmp_path, "train.jsonl", {"prompt": "1", "answer": "2"})
    with pytest.raises(DataError, match=r"no file .*Did you mean 'train.jsonl'"):
        load(kind="jsonl", path=str(tmp_path / "trian.jsonl"))
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(DataError, match="as parquet"):
        load(kind="parquet", path=str(tmp_path / "bad.parquet"))
    pytest.importorskip("reasoning_gym")
    with pytest.raises(DataError, match="Did you mean 'chain_sum'"):
        load(kind="reasoning_gym", name="chain_sm")
    with pytest.raises(DataError, match="min_terms"):
        load(kind="reasoning_gym", name="chain_sum", args={"terms": 2})


# -- the stream ----------------------------------------------------------------------------------

TASKS = [Task(str(n), "x", {}) for n in range(7)]


async def first(n, *, seed, **where):
    found = []
    async for task in stream_tasks(ShuffledOrder(TASKS, seed), **where):
        found.append(task.id)
        if len(found) == n:
            return found


def test_every_epoch_is_a_permutation_of_its_own():
    ids = asyncio.run(first(21, seed=5))
    epochs = [ids[i : i + 7] for i in (0, 7, 14)]
    assert all(sorted(e) == sorted(t.id for t in TASKS) for e in epochs) and len({tuple(e) for e in epochs}) == 3
    assert ids != asyncio.run(first(21, seed=6))


def test_a_resumed_stream_goes_on_exactly():
    ids = asyncio.run(first(40, seed=5))
    for start in (0, 1, 6, 7, 13, 30):
        assert asyncio.run(first(40 - start, seed=5, start=start)) == ids[start:]
    assert [ShuffledOrder(TASKS, 5).task_at(n).id for n in range(40)] == ids
    assert ShuffledOrder(TASKS, 5).task_at(10**15) == ShuffledOrder(TASKS, 5).task_at(10**15)


def test_the_order_is_pinned():
    """Do not change without a decision: a changed order breaks the resume of runs that are under way."""
    assert [t.id for t in (ShuffledOrder(TASKS, 0).task_at(n) for n in range(14))] == PINNED


PINNED = list("03415266312045")


@pytest.mark.parametrize("named", ["problem", "prompt", None])
def test_the_question_is_the_field_that_the_recipe_names(named):
    """NuminaMath has the solution in a field "messages" beside the problem."""
    solved = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "it is 4"}]
    rows = [{"problem": "2+2?", "prompt": "2+2?", "messages": solved, "answer": "4", "level": 3}]
    (task,) = load_tasks(
        {"kind": "list", "rows": rows, **({"prompt": named} if named else {})}, env="single_turn"
    ).train
    assert opening_messages(task) == [{"role": "user", "content": "2+2?"}]
    assert "messages" not in task.data and task.data["level"] == 3
    rows[0]["messages"] = solved[:1]
    (task,) = load_tasks({"kind": "list", "rows": rows, "prompt": "messages"}, env="single_turn").train
    assert "prompt" not in task.data and opening_messages(task) == solved[:1]


def test_the_form_of_a_question_hides_no_leak():
    """The same question as a text, and as messages behind a system prompt: of another set, of eval_rows, of a mixture."""
    mine = [{"prompt": "What is 12 times 7?", "answer": "84"}, {"prompt": "What is 5 plus 6?", "answer": "11"}]
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 12 times 7?"}]
    theirs = [{"messages": said, "answer": "84"}]
    plain = load_tasks({"kind": "list", "rows": mine}, env="single_turn")
    other = {"source": "b", "kind": "list", "rows": [{"prompt": "Name a fish.", "answer": "cod"}], "eval_rows": theirs}
    for tasks, left in (
        (load_evaluation_sets({"m": {"kind": "list", "rows": theirs}}, plain, env="single_turn"), 1),
        (load_tasks({"kind": "list", "rows": mine, "eval_rows": theirs}, env="single_turn"), 1),
        (load_tasks({"kind": "mix", "sources": [{"source": "a", "kind": "list", "rows": mine}, other]}, env="x"), 2),
    ):
        assert (len(tasks.train), tasks.leaked) == (left, 1)


def test_a_field_may_lie_in_a_table_of_the_row():
    row = {"prompt": [{"role": "user", "content": "3+4"}], "reward_model": {"ground_truth": "7", "style": "rule"}}
    (task,) = load_tasks({"kind": "list", "rows": [row], "answer": "reward_model.ground_truth"}, env="e").train
    assert task.data["answer"] == "7" and task.data["reward_model"] == row["reward_model"]
    with pytest.raises(DataError, match=r"no 'reward_model\.truth'"):
        load_tasks({"kind": "list", "rows": [row], "answer": "reward_model.truth"}, env="e")


def test_a_check_tells_what_was_left_out():
    one, two = Task("a", "e", {"prompt": "1"}), Task("b", "e", {"prompt": "2"})
    told = _check_tasks(SimpleNamespace(tasks=TaskSet([one], [two], duplicates=1, leaked=7, too_long=2)))
    assert (
        told.ok
        and told.message
        == "1 to train on, 1 held out; left out: 1 duplicate, 7 that the evaluation contains, 2 with too long a prompt"
    )
    assert (
        _check_tasks(SimpleNamespace(tasks=TaskSet([one], [two]))).message
        == "1 to train on, 1 held out; left out: none"
    )
