"""The rollout store: what was trained comes back exactly."""

import asyncio
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.run_folder import group, write_run
from rondel.core.errors import CheckpointError, UserError
from rondel.core.events import GroupsTaken, Resumed
from rondel.core.types import EnvFault, Failed, Group, Ok, PolicyFault, Score, Task, Trajectory
from rondel.runtime.journal.store import (
    RolloutStore,
    annotate_step,
    groups_of,
    path_of,
    read_step,
    stored_steps,
    write_step,
)

# a token of probability 0 is never drawn
logprobs = st.floats(max_value=0.0, width=32, allow_nan=False, allow_infinity=False)
numbers = st.floats(allow_nan=False)
texts = st.text(max_size=12)
placed = st.lists(st.tuples(st.integers(0, 99), numbers), max_size=2).map(tuple)


@st.composite
def trajectories(draw):
    score = (
        st.none()
        | st.builds(Score, numbers, st.dictionaries(texts, numbers, max_size=2), placed)
        | st.builds(Failed, texts, texts)
    )
    t = Trajectory(
        policy=draw(texts),
        parent=draw(st.none() | st.integers(0, 9)),
        score=draw(score),
        outcome=draw(st.just(Ok()) | st.builds(EnvFault, texts) | st.builds(PolicyFault, texts)),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        text=draw(texts),
        timings=draw(st.dictionaries(texts, numbers, max_size=2)),
    )
    for written in draw(st.lists(st.booleans(), max_size=4)):
        n = draw(st.integers(0, 3))
        tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n))
        if written:
            lps = draw(st.lists(logprobs, min_size=n, max_size=n))
            t.extend(tokens, logprobs=lps, versions=draw(st.lists(st.integers(0, 99), min_size=n, max_size=n)))
        else:
            t.extend(tokens)
    return t


@st.composite
def batches(draw):
    data = st.dictionaries(
        texts, st.none() | st.integers() | numbers | texts | st.lists(st.integers(), max_size=2), max_size=3
    )
    return [
        Group(
            number,
            Task(draw(texts), draw(texts), draw(data)),
            draw(st.lists(trajectories(), min_size=1, max_size=3)),
            draw(st.integers(0, 9)),
        )
        for number in draw(st.lists(st.integers(0, 2**40), unique=True, max_size=3))
    ]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(batches())
def test_groups_come_back_exactly(tmp_path_factory, batch):
    folder = tmp_path_factory.mktemp("run")
    write_step(folder, 3, batch)
    assert groups_of(read_step(folder, 3)) == batch


def test_routed_experts_come_back_with_their_dtype(tmp_path):
    g = group(1, 0, [1.0])
    g.trajectories[0].experts = np.arange(12 * 2 * 2, dtype=np.uint8).reshape(12, 2, 2)
    write_step(tmp_path, 1, [g])
    experts = groups_of(read_step(tmp_path, 1))[0].trajectories[0].experts
    assert experts.dtype == np.uint8 and np.array_equal(experts, g.trajectories[0].experts)


def test_invalid_unicode_does_not_stop_a_run(tmp_path):
    g = group(1, 0, [1.0])
    g.trajectories[0].text = "half \ud83d a pair"
    write_step(tmp_path, 1, [g])
    assert read_step(tmp_path, 1)[0]["text"] == "half ? a pair"


def test_what_is_known_after_training_is_added(tmp_path):
    batch = [group(1, 0, [1.0, 0.0])]
    write_step(tmp_path, 1, batch, {(1, 0): [-0.5] * 13}, version=2)
    annotate_step(tmp_path, 1, advantages={(1, 1): [0.25] * 13})
    first, second = read_step(tmp_path, 1)
    assert first["trainer_logprobs"] == [-0.5] * 13 and first["advantages"] is None and first["trained_at"] == 2
    assert second["trainer_logprobs"] is None and second["advantages"] == [0.25] * 13
    assert groups_of([first, second]) == batch


@pytest.mark.parametrize("tokens", [1, 5, 12, 13, 14])
def test_a_long_trajectory_is_stored_in_parts_and_comes_back_whole(tmp_path, monkeypatch, tokens):
    """However its length and theirs fit; the file has no more tokens together than a part."""
    import pyarrow.parquet as pq

    monkeypatch.setattr("rondel.runtime.journal.store.PART", tokens)
    g = group(1, 0, [1.0, 0.0], 8)
    n = len(g.trajectories[0].tokens)
    g.trajectories[0].support = [None] * (n - 1) + [[2, 9]]
    write_step(tmp_path, 1, [g, group(2, 0, [0.5])], version=2)
    advantages = {(1, 1): np.arange(n) / 2, (2, 0): np.arange(len(group(2, 0, [0.5]).trajectories[0].tokens)) / 4}
    annotate_step(tmp_path, 1, advantages=advantages)
    rows = read_step(tmp_path, 1)
    assert groups_of(rows) == [g, group(2, 0, [0.5])] and [row["trained_at"] for row in rows] == [2, 2, 2]
    assert [row["advantages"] for row in rows] == [None, *(list(values) for values in advantages.values())]
    file = pq.ParquetFile(path_of(tmp_path, 1))
    held = [sum(map(len, file.read_row_group(i)["tokens"].to_pylist())) for i in range(file.num_row_groups)]
    assert sum(held) == sum(len(row["tokens"]) for row in rows) and max(held) < 2 * tokens


def test_numbers_of_every_token_are_stored_without_a_dictionary(tmp_path):
    """Arrow makes one in eight times the memory of the numbers, which are a million of a long answer."""
    import pyarrow.parquet as pq

    write_step(tmp_path, 1, [group(1, 0, [1.0])])
    annotate_step(tmp_path, 1, advantages={(1, 0): [0.25] * 13})
    columns = pq.ParquetFile(path_of(tmp_path, 1)).metadata.row_group(0).to_dict()["columns"]
    with_one = {c["path_in_schema"] for c in columns if c["has_dictionary_page"]}
    assert {"task", "policy"} <= with_one and not any(".list." in name for name in with_one)


def test_a_resume_takes_back_the_steps_it_repeats(tmp_path):
    store = RolloutStore(tmp_path)
    for step in (1, 2, 3):
        store.write(GroupsTaken(step, step, [group(step, 0, [1.0])]))
    store.write(Resumed(1, 1, "c"))
    store.close()
    assert stored_steps(tmp_path) == [1]


def test_a_run_does_not_wait_for_what_it_stores_and_learns_what_was_not(tmp_path):
    """Written beside the event loop, in order; annotated when all before is there; a fault is told
    by what follows it.
    """
    who, batch = [], [group(1, 0, [1.0, 0.0])]
    before = threading.enumerate()

    class Shown(list):
        def __iter__(self):
            who.append(threading.current_thread().name)
            return super().__iter__()

    async def go():
        store = RolloutStore(tmp_path)
        store.write(GroupsTaken(1, 1, Shown(batch)))
        await store.annotate_rollouts(1, advantages={(1, 1): np.full(13, 0.25, np.float32)})
        await store.wait_until_written()
        assert read_step(tmp_path, 1)[1]["advantages"] == [0.25] * 13
        path_of(tmp_path, 2).mkdir()
        store.write(GroupsTaken(2, 2, batch))
        await store.annotate_rollouts(2)
        for told in (store.annotate_rollouts(3), store.wait_until_written()):
            with pytest.raises(CheckpointError, match=r"writing .*step-000002\.parquet"):
                await told
        store.close()

    asyncio.run(go())
    assert who == ["rollouts_0"] and set(threading.enumerate()) <= set(before)


def test_who_waits_no_more_loses_nothing_of_what_is_being_stored(tmp_path):
    batch, hold = [group(1, 0, [1.0, 0.0])], threading.Event()

    class Slow(list):
        def __iter__(self):
            hold.wait(10)
            return super().__iter__()

    async def go():
        store = RolloutStore(tmp_path)
        store.write(GroupsTaken(1, 1, Slow(batch)))
        await store.annotate_rollouts(1, advantages={(1, 1): [0.25] * 13})
        waits = asyncio.create_task(store.annotate_rollouts(1, trainer_logprobs={(1, 0): [-0.5] * 13}))
        await asyncio.sleep(0.01)
        waits.cancel()
        hold.set()
        await store.wait_until_written()
        store.close()

    asyncio.run(go())
    first, second = read_step(tmp_path, 1)
    assert first["trainer_logprobs"] == [-0.5] * 13 and second["advantages"] == [0.25] * 13


def test_a_missing_step_is_named_with_those_that_exist(tmp_path):
    write_run(tmp_path)
    with pytest.raises(UserError, match="no rollouts of step 9; stored: 1 to 4"):
        read_step(tmp_path, 9)
    path_of(tmp_path, 2).unlink()
    with pytest.raises(UserError, match="stored: 1, 3, 4"):
        read_step(tmp_path, 2)
    with pytest.raises(UserError, match="no run folder at"):
        read_step(tmp_path / "nowhere", 1)
    (tmp_path / "fresh").mkdir()
    with pytest.raises(UserError, match="none are stored yet"):
        read_step(tmp_path / "fresh", 1)


@pytest.mark.parametrize("damage", [b"", b"PAR1 not really", None])
def test_a_corrupt_file_is_one_readable_error(tmp_path, damage):
    write_run(tmp_path)
    path = path_of(tmp_path, 2)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] if damage is None else damage)
    with pytest.raises(CheckpointError, match=r"step-000002\.parquet cannot be read; the file is damaged"):
        read_step(tmp_path, 2)


def test_columns_that_disagree_are_refused(tmp_path):
    write_step(tmp_path, 1, [group(1, 0, [1.0])])
    rows = read_step(tmp_path, 1)
    rows[0]["mask"].pop()
    with pytest.raises(CheckpointError, match="group 1 sample 0"):
        groups_of(rows)


def test_no_draft_is_left_and_none_is_read(tmp_path):
    write_step(tmp_path, 1, [group(1, 0, [1.0])])
    (tmp_path / "rollouts" / ".step-000002.parquet.tmp").write_bytes(b"half")
    assert stored_steps(tmp_path) == [1] and len(list((tmp_path / "rollouts").iterdir())) == 2
