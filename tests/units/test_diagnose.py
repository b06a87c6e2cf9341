"""`rondel diagnose`: each fault is found by its rule, a healthy run has none, and
the words are those that a person needs.
"""

import json
from dataclasses import replace

import pytest
from filelock import FileLock

from kits.diagnose import FAULTS, engine, healthy, write
from kits.sweeps import covering
from rondel.cli import main
from rondel.core import events as words
from rondel.core.events import Advised, StepDone, subscribe
from rondel.core.types import Group, Task, Trajectory
from rondel.driver.phases import tell_silence
from rondel.runtime.journal.log import Journal
from rondel.runtime.telemetry import diagnose
from rondel.runtime.telemetry.advice import Advisor, PlacementFacts, advise_runtime
from rondel.runtime.telemetry.diagnose import RULES, read_story

SEEDS = (0, 1, 2)


def named(folder) -> list[str]:
    return [f.name for f in diagnose.diagnose(folder)]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_nothing_else(tmp_path, fault):
    changes, expected = FAULTS[fault]
    found = diagnose.diagnose(write(tmp_path, **changes))
    assert {f.name for f in found} == expected, [(f.name, f.evidence) for f in found]
    for f in found:
        assert f.evidence and f.meaning.endswith(".") and f.action, f
        assert any(c.isdigit() for c in f.evidence), "evidence has numbers"


@pytest.mark.parametrize("seed", range(8))
def test_a_healthy_run_has_no_finding(tmp_path, seed):
    assert named(write(tmp_path, seed=seed)) == []


@pytest.mark.slow
@pytest.mark.parametrize("seeds", covering([(SEEDS[:1],), (SEEDS,)], [(SEEDS[:1],)]), ids=["one", "all"])
def test_precision_and_recall_over_noise(tmp_path, seeds):
    """The table that the documentation quotes: every fault under three seeds."""
    rows, hits, said, due = [], 0, 0, 0
    for fault, (changes, expected) in FAULTS.items():
        found = [set(named(write(tmp_path / f"{fault}-{seed}", seed=seed, **changes))) for seed in seeds]
        hit, told = sum(len(f & expected) for f in found), sum(map(len, found))
        hits, said, due = hits + hit, said + told, due + len(seeds) * len(expected)
        rows.append(
            f"{fault:<32} {', '.join(sorted(expected)):<30} found {hit}/{len(seeds) * len(expected)}, beside it "
            f"{told - hit}"
        )
    print(
        "\n".join(
            [
                *rows,
                f"recall {hits / due:.3f}, precision {hits / said:.3f} over {len(FAULTS)} faults x {len(seeds)} seeds",
            ]
        )
    )
    assert len(FAULTS) >= 20 and hits / due >= 0.97 and hits / said >= 0.95


def test_a_fault_of_one_of_several_policies_is_told_of_that_one(tmp_path):
    def critic(step, rng):
        own = {f"critic/{name.removeprefix('train/')}": value for name, value in healthy(step, rng).items()}
        return own | {"critic/entropy": 1.2 * 0.8**step, "critic/reward_mean": 0.4, "policy/reward_mean": 0.6}

    job = {"policies.critic": {"lr": 1e-5}, "policies.judge": {"frozen": True}}
    (found,) = diagnose.diagnose(write(tmp_path / "one", metrics=critic, job=job))
    assert found.name == "entropy_collapse" and found.evidence.startswith("policy 'critic': entropy 0.781")
    assert "mean reward 0.4" in found.evidence
    (found,) = diagnose.diagnose(
        write(
            tmp_path / "note",
            metrics=critic,
            job={**job, "policies.critic": {"frozen": True}},
            note=lambda s: "x" * (s == 4),
        )
    )
    assert found.name == "steps_skipped", "told once, and nothing of what is frozen"


def test_every_rule_has_a_fault():
    shown = {rule.__name__ for rule in RULES}
    assert len(shown) == len(RULES) and len(set().union(*(expected for _, expected in FAULTS.values()))) >= len(RULES)


def test_the_gravest_comes_first(tmp_path):
    folder = write(
        tmp_path, job={"run.checkpoint.every": 0}, finished=lambda s: {"truncated": 2}, last=words.Broke("SyncError: x")
    )
    found = diagnose.diagnose(folder)
    assert [f.severity for f in found] == ["error", "warning", "warning"] and found[0].name == "broke"


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_without_any_signal_is_told_from_its_first_step(tmp_path, steps):
    wrong = {"rewards": lambda step, rng: [[0.0] * 4] * 4, "job": {"run.checkpoint.every": 1}}
    (found,) = diagnose.diagnose(write(tmp_path / "wrong", steps=steps, **wrong))
    span = "step 1" if steps == 1 else "steps 1 to 2"
    assert found.name == "no_signal" and found.severity == "error" and f"mean reward 0 ({span})" in found.evidence
    assert named(write(tmp_path / "healthy", steps=steps, job={"run.checkpoint.every": 1})) == []


def test_a_silent_step_is_told_with_what_the_run_said_of_it(tmp_path):
    fault, _ = FAULTS["nothing is written"]
    (found,) = diagnose.diagnose(write(tmp_path / "asked", **fault))
    assert found.name == "silent" and found.evidence.endswith("steps") and "check-env" in found.action
    full = [Trajectory(finish_reason="length")]
    heard = []
    end = subscribe(heard.append)
    tell_silence([Group(0, Task("t", "x", {}), full, 0)], {"policy"}, trained=1)
    end()
    (found,) = diagnose.diagnose(write(tmp_path / "full", beside=lambda step: heard, **fault))
    assert found.evidence.endswith("steps: their prompts leave no room for an answer")
    assert found.action == "take shorter prompts, a model with a longer context, or a larger task.env.budget"


def test_a_critic_learns_from_unanimous_groups_too(tmp_path):
    fault, _ = FAULTS["all wrong"]
    assert "no_signal" not in named(write(tmp_path, facts={"needs": ["values"]}, **fault))


def test_a_run_that_goes_on_has_not_died(tmp_path):
    write(tmp_path, last=None)
    with FileLock(tmp_path / ".lock"):
        assert named(tmp_path) == [] and read_story(tmp_path).alive
    assert named(tmp_path) == ["died"]


def test_the_last_words_of_a_worker(tmp_path):
    write(tmp_path, last=None)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "engine-0.log").write_text("loading\nRuntimeError: CUDA error: out of memory\n")
    assert named(tmp_path) == ["out_of_memory", "died"]


def test_a_resumed_run_is_told_once(tmp_path):
    """What a resume repeats is superseded: the rows are those of one run."""
    write(tmp_path, steps=12, last=None)
    journal = Journal(tmp_path)
    journal.write(words.Resumed(10, 10, "checkpoints/step-000010"))
    journal.close()
    story = read_story(tmp_path)
    assert [s.number for s in story.steps] == list(range(1, 11)) and story.resumes == [10]


@pytest.mark.slow
@pytest.mark.parametrize("steps", covering([40, 400], [40]))
def test_a_hundred_thousand_events(tmp_path, steps):
    """Of 400 steps. All of them are folded; `rondel diagnose` takes 1.7 s of CPU time for it (two busy cores of a Zen 4)."""
    write(tmp_path, steps=steps, rewards=lambda s, rng: [[1.0, 0.0]] * 124)
    assert sum(1 for _ in (tmp_path / "journal.jsonl").open()) > 250 * steps
    assert len(read_story(tmp_path).steps) == steps


# -- the command -------------------------------------------------------------------------------------


def test_the_command(tmp_path, capsys):
    folder = write(tmp_path / "a", last=None)
    assert _run("diagnose", str(folder)) == 0
    said = capsys.readouterr().out
    assert "ended early" in said and "1. error: died" in said and "next:" in said
    assert _run("diagnose", str(folder), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["state"] == "ended early" and told["step"] == 24 and told["findings"][0]["name"] == "died"
    assert _run("diagnose", str(folder), "--fail-on", "error") == 1
    capsys.readouterr()
    good = write(tmp_path / "b", job={"trainer.lr": 2e-5})
    assert _run("diagnose", str(good), "--fail-on", "note") == 0
    assert "complete; nothing found" in capsys.readouterr().out
    assert _run("diagnose", str(folder), str(good)) == 0
    said = capsys.readouterr().out
    assert "(only here)" in said and "trainer.lr: 1e-05 -> 2e-05" in said


def test_what_is_no_run_folder(tmp_path, capsys):
    assert _run("diagnose", str(tmp_path / "none")) == 1
    assert "no run folder" in capsys.readouterr().err


def _run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return int(ended.value.code or 0)


# -- advice: against the closed form ----------------------------------------------------------------------


def test_the_gain_is_that_of_the_closed_form():
    """R = 9 s of rollouts, T = 3 s: with 2 engines more the step is max(9·1/2, 3) for one
    more, which is as far as twice as many go.
    """
    split = PlacementFacts(split=True, engines=1, ranks=1, staleness=1)
    told = advise_runtime({"wait": 6.0, "train": 3.0}, 0.0, split)
    assert (
        told.gain == pytest.approx(9 / max(9 / 2, 3)) and "place.engines = 2" in told.message and "67%" in told.message
    )
    four = advise_runtime({"wait": 6.0, "train": 3.0}, 0.0, PlacementFacts(True, 4, 1, 1))
    assert four.gain == pytest.approx(9 / max(9 * 4 / 8, 3)) and "place.engines = 8" in four.message
    idle = advise_runtime({"wait": 0.0, "train": 9.0}, 0.7, split)
    assert idle.gain == pytest.approx(9 / max(0.3 * 9, 9 / 2)) and "place.ranks = 2" in idle.message
    synchronous = advise_runtime({"wait": 4.0, "train": 6.0}, 0.5, PlacementFacts(True, 1, 1, 0))
    assert synchronous.gain == pytest.approx(10 / max(4, 6)) and "max_staleness = 1" in synchronous.message
    assert advise_runtime({"wait": 1.0, "train": 9.0}, 0.1, split) is None, "all is well"
    less = advise_runtime({"wait": 4.0, "train": 6.0}, 0.0, split)
    assert [who.waiting for who in (told, less, idle, synchronous)] == ["trainer", "trainer", "engine", "engine"]
    assert advise_runtime({"wait": 8.0, "train": 1.0}, 0.0, PlacementFacts(False, 1, 1, 0)) is None, (
        "one device can do one thing"
    )


def test_advice_is_given_once_in_twenty_steps():
    heard, advisor = [], Advisor(PlacementFacts(True, 1, 1, 1), after=2)
    end = subscribe(heard.append)
    for step in range(1, 45):
        advisor.on_event(engine(step, generate=9.0))
        advisor.on_event(StepDone(step, step, {}, {"wait": 6.0, "train": 3.0, "milestone": 50.0, "step": 59.0}, {}))
    end()
    assert [e.step for e in heard if isinstance(e, Advised)] == [22, 42] and heard[0].gain == pytest.approx(2.0)


def test_a_held_out_score_above_1_is_no_percentage(tmp_path):
    fault = FAULTS["held out falls, trained rises"][0]
    above = [
        replace(e, score=2 * e.score, low=2 * e.low, high=2 * e.high, reward_min=0.0, reward_max=2.0)
        for s in (1, 8, 24)
        for e in fault["beside"](s)
    ]
    write(tmp_path, **fault | {"beside": lambda s: [e for e in above if e.step == s]})
    [found] = [f for f in diagnose.diagnose(tmp_path) if f.name == "overfit"]
    assert "held-out score 1.1 after step 8, 0.76 after step 24" in found.evidence


def test_a_score_of_the_supervised_phase_is_no_sign_of_a_reward_learned_by_heart(tmp_path):
    """It was the best in step 8 of ten that copied; a reward there was none."""
    fault = FAULTS["held out falls, trained rises"][0]
    write(tmp_path / "copied", **fault, job={"loop.warmup": {"steps": 10}})
    write(tmp_path / "rewarded", **fault, job={"loop.warmup": {"steps": 8}})
    told = {name: [f.name for f in diagnose.diagnose(tmp_path / name)] for name in ("copied", "rewarded")}
    assert "overfit" not in told["copied"] and "overfit" in told["rewarded"]
