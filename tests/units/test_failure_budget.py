"""Faults of the world over a whole run: too many end it, and a pause may mend it."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from kits import runs
from kits.bandit import Bandit
from kits.fakes import CountingTrainer, endless, loop_kit
from kits.no_rows import NO_ROWS
from rondel import loop
from rondel.buffer import Buffer
from rondel.core.errors import ConfigError, RewardError
from rondel.core.failure_rate import LAST, LEAST
from rondel.core.types import Failed, Sampling, Score, Slot, Task
from rondel.driver.failure_budget import FailureBudget


def test_the_limit():
    failures = FailureBudget(0.1)
    for _ in range(LEAST - 1):
        failures.count_score(Failed("timeout"))
        assert not failures.why
    failures.count_score(Failed("environment fault", "no disk"))
    assert (
        failures.spent.is_set()
        and failures.why == f"{LEAST} of the last {LEAST} answers have no score, {LEAST - 1} of them: timeout"
    )
    calm = FailureBudget(0.1)
    for n in range(10 * LAST):
        calm.count_score(Failed("timeout") if n % 10 == 9 else Score(1.0))  # a tenth is not more than a tenth
    assert not calm.why
    never = FailureBudget(1.0)
    for _ in range(LAST):
        never.count_score(Failed("timeout"))
    assert not never.why


WORLD = """
import os
from pathlib import Path
class Env:
    async def run(self, task, chat):
        chat.give([{"role": "user", "content": task.data["prompt"]}])
        await chat.reply()
        if Path(os.environ["RONDEL_TEST_DOWN"]).exists():
            raise RuntimeError("the sandbox is down")
        return chat.trajectory
"""


@pytest.mark.slow
def test_a_run_stops_with_the_cause_and_a_checkpoint_and_goes_on(tmp_path, monkeypatch):
    (tmp_path / "their_world.py").write_text(WORLD)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("RONDEL_TEST_DOWN", str(tmp_path / "down"))
    changes = {
        "task__env": "their_world:Env",
        "task__reward": {"kind": "number", "max_failures": 0.2},
        "loop__warmup__steps": 0,
        "run__checkpoint__every": 0,
        "task__eval__n": 4,
    }
    from rondel.core.events import StepDone, subscribe

    end = subscribe(
        lambda event: (tmp_path / "down").touch() if isinstance(event, StepDone) and event.step == 3 else None
    )
    try:
        with pytest.raises(
            RewardError,
            match=r"stopped after step \d of 8, which is in a checkpoint: .* environment fault .*sandbox is down.*max_failures = 0.2",
        ):
            runs.run(tmp_path / "run", **changes)
    finally:
        end()
    done = [e["step"] for e in runs.events(tmp_path / "run", "StepDone")]
    assert done[-1] < 8 and all(runs.balances(e["ledger"]) for e in runs.events(tmp_path / "run", "StepDone"))
    (tmp_path / "down").unlink()
    runs.run(tmp_path / "run", **changes)
    assert runs.events(tmp_path / "run", "RunEnded")[-1]["step"] == 8
    steps = [e["step"] for e in runs.events(tmp_path / "run", "StepDone")]
    assert (
        steps[-1] == 8
        and sorted(set(steps)) == list(range(1, 9))
        and runs.events(tmp_path / "run", "Resumed")[-1]["step"] == done[-1]
    )


def test_what_was_scored_twice_is_counted_once(tmp_path):
    parts = SimpleNamespace(
        job=runs.tiny(Path(tmp_path)), sampling=Sampling(), failures=FailureBudget(0.5), pool=None, rows=NO_ROWS
    )
    rollouts = Bandit(parts, 4)
    rollouts.faults = 1.0

    async def group():
        found = await rollouts.generate_group(Slot(0, Task("t", "x", {}), 0))
        await rollouts.score(found)

    asyncio.run(group())
    assert len(parts.failures.recent) == 4


def test_a_pause_ends_when_the_world_mends(tmp_path):
    """Down from the 100th answer on and up again after six questions: no answer is lost, and one asks at a time."""
    parts = SimpleNamespace(
        job=runs.tiny(Path(tmp_path)),
        sampling=Sampling(),
        failures=FailureBudget(0.3, patience=60, first=0.001),
        pool=None,
        rows=NO_ROWS,
    )
    rollouts, trainer, asked = Bandit(parts, 8), CountingTrainer(), []

    class Down(Bandit):
        async def _sample_episode(self, slot, index, policy="policy"):
            asked.append((slot.number, index))
            self.faults = (
                1.0
                if len(asked) > 100 and (parts.failures.since is None or len(asked) < down[0] + 6) and not mended
                else 0.0
            )
            if self.faults == 0.0 and parts.failures.since is not None:
                mended.append(True)
            if parts.failures.since is None:
                down[0] = len(asked)
            return await super()._sample_episode(slot, index, policy)

    mended, down = [], [0]
    rollouts = Down(parts, 8)
    buffer = Buffer(groups_per_step=4, max_staleness=1)
    asyncio.run(asyncio.wait_for(loop.run(endless(), buffer, **loop_kit(trainer, rollouts, 20)), 60))
    book = buffer.ledger()
    assert runs.balances(book) and not parts.failures.why and mended and parts.failures.since is None
    assert sum(n for name, n in book.items() if name.startswith("failed")) <= 100 / 8, (
        "what failed before the pause, and nobody after"
    )
    assert len(asked) - len(set(asked)) < 200


def test_patience_has_an_end():
    async def down():
        failures = FailureBudget(0.3, patience=0.05, first=0.01)
        for _ in range(LEAST):
            failures.count_score(Failed("timeout"))
        assert failures.since is not None and not failures.why
        return failures, await asyncio.gather(*(hopes(failures) for _ in range(5)))

    async def hopes(failures):
        tries = 0
        while await failures.should_retry(Failed("timeout")):
            tries += 1
        return tries

    failures, tries = asyncio.run(asyncio.wait_for(down(), 20))
    assert (
        failures.spent.is_set()
        and "it has waited 0.05 s (task.reward.patience)" in failures.why
        and 1 <= sum(tries) <= 10
    )


def test_who_is_given_up_in_its_turn_leaves_it_to_others():
    async def two():
        failures = FailureBudget(0.3, patience=60, first=0.01)
        for _ in range(LEAST):
            failures.count_score(Failed("timeout"))
        first = asyncio.create_task(failures.should_retry(Failed("timeout")))
        second = asyncio.create_task(failures.should_retry(Failed("timeout")))
        await asyncio.sleep(0)
        first.cancel()
        assert await second
        assert not await failures.should_retry(Score(1.0)) and failures.since is None

    asyncio.run(asyncio.wait_for(two(), 20))


def test_patience_without_a_budget_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="set max_failures below 1"):
        runs.tiny(tmp_path, task__reward={"kind": "number", "patience": 5.0})
