"""Objects of Python where a recipe has names: they are the same run, also in processes that never saw the file they were written in."""

import pickle
import threading

import numpy as np
import pytest

import rondel
from kits.runs import RECIPE, tiny
from rondel.core import given_objects, registry
from rondel.core.config.job import Job
from rondel.core.errors import ConfigError
from rondel.core.registry import find_registered
from rondel.core.types import Verdict
from rondel.score.pool import RewardPool


def recipe(folder):
    return {name: table for name, table in tiny(folder).to_dict().items() if table}


@pytest.fixture(autouse=True)
def _forgotten():
    yield
    registry.GIVEN.clear()


@pytest.mark.slow
def test_a_closure_a_lambda_and_an_object_are_rewards_and_filters_of_a_run(tmp_path):
    wanted, seen = 0.25, []

    class KeepAll:
        def __init__(self, least: float = 0.0) -> None:
            self.least = least

        def __call__(self, group):
            seen.append(len(group.trajectories))
            return Verdict(True)

    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]
    card = rondel.run(
        recipe(tmp_path / "run"),
        quiet=True,
        task={
            "data": {"kind": {"train": rows, "test": [{"prompt": "9+0=", "answer": "9"}]}, "eval_split": "test"},
            "reward": {
                "kind": "combine",
                "parts": {"a": lambda trajectory, task: wanted, "b": lambda trajectory, task: 1.0},
            },
            "filters": [{"kind": KeepAll, "least": 0.5}],
        },
        loop={"steps": 1, "warmup": {"steps": 0}},
    )
    assert card["eval_before"]["score"] == pytest.approx(1.25) and seen


def test_what_can_be_imported_keeps_its_name_and_other_rows_are_another_recipe():
    assert given_objects.name_objects(pickle.dumps) == "_pickle:dumps"
    one, other = ([{"prompt": "1", "answer": a}] for a in "12")
    names = [given_objects.name_objects(rows, "task.data")["kind"] for rows in (one, one, other)]
    assert names[0] == names[1] != names[2]
    assert find_registered("task", names[2], {})() == other


def test_a_name_whose_object_is_not_here_says_so(tmp_path):
    job = Job.read(recipe(tmp_path), {"task.reward": lambda trajectory, task: 1.0})
    name = job.task.reward
    registry.GIVEN.clear()
    with pytest.raises(ConfigError, match="given as an object of Python, and this process does not have it"):
        find_registered("reward", name, {})


def test_what_cannot_travel_is_refused_with_what_to_do():
    lock = threading.Lock()
    name = given_objects.name_objects(lambda trajectory, task: float(lock.locked()))
    with pytest.raises(ConfigError, match="cannot be sent to the process that calls it"):
        RewardPool(name)


def test_what_never_travels_may_hold_what_cannot():
    """A filter with a lock stays in this process; a reward beside it is sent."""
    lock = threading.Lock()
    given_objects.name_objects(lambda group: lock.locked(), "task.filters")
    name = given_objects.name_objects(lambda trajectory, task: 0.5, "task.reward")
    RewardPool(name).close()


def test_sections_and_rows_of_another_shape_are_refused():
    with pytest.raises(ConfigError, match="it is a table of the recipe"):
        rondel.run(RECIPE, loop=5)
    for rows in (["2 + 2 ="], [5]):
        with pytest.raises(ConfigError, match="rows are dicts"):
            given_objects.name_objects(rows, "task.data")


def test_a_data_frame_is_its_rows():
    """Numbers as Python has them, and what is missing as null, which is refused where an answer is due."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"prompt": ["1+1=", "2+2="], "answer": [2, 4], "note": ["easy", float("nan")]})
    source = find_registered("task", given_objects.name_objects(frame, "task.data")["kind"], {})
    rows = [{"prompt": "1+1=", "answer": 2, "note": "easy"}, {"prompt": "2+2=", "answer": 4, "note": None}]
    assert source() == rows and all(type(row["answer"]) is int for row in source())


class Once:
    async def run(self, task, chat):
        return chat.trajectory


@pytest.mark.parametrize("key", ["task.env", "task.reward", "task.filters"])
def test_an_object_that_cannot_be_called_is_refused_with_its_class(tmp_path, key):
    for given in (Once(), {"kind": Once()}):
        with pytest.raises(ConfigError, match=rf"{key}.* is an object of Once.* give the class .*'kind': Once"):
            Job.read(recipe(tmp_path), {key: [given] if key == "task.filters" else given})


def test_numbers_of_numpy_are_the_numbers_that_they_are(tmp_path):
    given = {"loop.steps": np.int64(7), "trainer.lr": np.float64(0.25), "task.eval.k": [np.int32(1)]}
    job = Job.read(recipe(tmp_path), {**given, "model.path.tie_word_embeddings": np.bool_(True)})
    told = [job.loop.steps, job.trainer.lr, job.task.eval.k[0], job.model.path["tie_word_embeddings"]]
    assert told == [7, 0.25, 1, True] and [type(one) for one in told] == [int, float, int, bool]


def test_the_version_is_that_of_the_package():
    from importlib.metadata import version

    assert rondel.__version__ == version("rondel")
