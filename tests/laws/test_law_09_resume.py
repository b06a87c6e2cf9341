"""Law 9, resume: n steps = k steps + kill -9 + resume + (n - k) steps, bit-equal on a CPU at `S = 0`. An asynchronous
run with a recorded schedule and aligned numerics replays bit for bit. A run that is complete says so and exits with 0.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from kits import forked, runs
from kits.forked import Forked
from kits.once import made_once
from kits.recordings import SPLIT, Straggler, again, record
from kits.runs import FAST, RECIPE, balances, events, final, steps
from kits.sweeps import covering
from kits.train import awkward_groups, batch, bits, model, row, step, trainer
from rondel.assemble.arithmetic import arithmetic_of
from rondel.assemble.facts import warn_of_other_arithmetic
from rondel.cli.replay import run as replay_command
from rondel.core.errors import ConfigError
from rondel.core.events import RunStarted, StepDone, Warned, subscribe
from rondel.driver import replay
from rondel.models.cpu_kernels import LOOPS, PLAIN_KERNELS, kernels_of
from rondel.runtime.devices import default_threads
from rondel.runtime.journal import store
from rondel.runtime.journal.log import Journal
from rondel.train.checkpoint import Checkpoints, find_flaw, load_trainer, save_trainer

SHORT = {"loop__warmup__steps": 4, "loop__steps": 4, "run__checkpoint__every": 2}


def run(folder: Path, **changes) -> None:
    runs.run(folder, **{**SHORT, **changes})


def run_and_die(folder: Path, moment: tuple[str, int], what: signal.Signals = signal.SIGKILL, **changes) -> int:
    return runs.run_and_die(folder, moment, what, **{**SHORT, **changes})


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The run that nobody interrupts: 4 supervised steps, 4 of RL, a checkpoint every 2."""
    return made_once(tmp_path_factory, "whole", run)


def same_run(folder: Path, whole: Path) -> None:
    ours, theirs = final(folder), final(whole)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert steps(folder) == steps(whole)
    for n in store.stored_steps(whole):
        for a, b in zip(store.read_step(folder, n), store.read_step(whole, n), strict=True):
            a.pop("timings"), b.pop("timings")
            assert a == b


@pytest.mark.slow
def test_other_arithmetic_than_the_run_began_with_is_named(tmp_path, whole):
    """Last bits are others: a run that goes on, or is replayed, with other kernels, torch or threads says so, and how to
    take the old ones."""
    ours = events(whole, "RunStarted")[0]["facts"]["arithmetic"]
    assert ours["kernels"] == kernels_of(torch.device("cpu")) and ours["torch"] == torch.__version__
    assert ours["threads"] == str(default_threads()) and {"instructions", "processor"} <= ours.keys()
    plain = {"kernels": PLAIN_KERNELS, "torch": "2.14.0", "instructions": "AVX2", "threads": "2"}
    journal = Journal(tmp_path)
    for number, start in enumerate((plain | {"kernels": LOOPS}, plain | {"threads": "1", "torch": "2.13.0"}), 1):
        journal.write(RunStarted(str(tmp_path), "h", {"arithmetic": start}))
        journal.write(StepDone(number, number, {}, {}, {}))
    journal.close()
    told: list[str] = []
    forget = subscribe(lambda event: told.append(event.message) if isinstance(event, Warned) else None)
    warn_of_other_arithmetic("the run goes on", tmp_path, {"arithmetic": plain})
    warn_of_other_arithmetic("step 1 is replayed", tmp_path, {"arithmetic": plain}, 1)
    warn_of_other_arithmetic("it", tmp_path, {"arithmetic": plain | {"threads": "1", "torch": "2.13.0"}})
    warn_of_other_arithmetic("it", tmp_path, {})
    forget()
    last, first = told
    assert "the run goes on with other arithmetic (torch: 2.14.0, and was 2.13.0; threads: 2, and was 1)" in last
    assert "OMP_NUM_THREADS=1 takes as many threads" in last and "KERNELS" not in last
    assert f"step 1 is replayed with other arithmetic (kernels: {PLAIN_KERNELS}, and was {LOOPS})" in first
    assert "RONDEL_CPU_KERNELS=1 in the environment" in first


@pytest.mark.parametrize(
    ("facts", "was"), [({"cpu_kernels": LOOPS}, LOOPS), ({}, PLAIN_KERNELS)], ids=["its kernels alone", "nothing"]
)
def test_a_journal_of_an_older_version_names(tmp_path, facts, was):
    journal = Journal(tmp_path)
    journal.write(RunStarted(str(tmp_path), "h", facts))
    journal.close()
    told: list[str] = []
    forget = subscribe(lambda event: told.append(event.message) if isinstance(event, Warned) else None)
    for now in (LOOPS, PLAIN_KERNELS):
        warn_of_other_arithmetic("the run goes on", tmp_path, {"arithmetic": {"kernels": now, "torch": "2.14.0"}})
    warn_of_other_arithmetic("the run goes on", tmp_path, {"arithmetic": {"torch": "2.14.0", "device": "mps"}})
    forget()
    [only] = told
    assert f"and was {was})" in only


def test_a_device_that_is_neither_cpu_nor_cuda_has_its_name():
    assert arithmetic_of(torch.device("mps"), 1, has_loops=True) == {"torch": torch.__version__, "device": "mps"}


@pytest.mark.slow
def test_a_replay_elsewhere_warns(tmp_path, whole, capsys):
    """A run whose journal names another processor: a step of it, and the whole compared with itself."""
    shutil.copytree(whole, tmp_path / "other")
    journal = tmp_path / "other" / "journal.jsonl"
    own = json.dumps(events(whole, "RunStarted")[0]["facts"]["arithmetic"]["processor"])
    journal.write_text(journal.read_text().replace(own, '"Z80"'))
    told = "warning: step 5 is replayed with other arithmetic (processor: "
    for folder, warns in ((whole, False), (tmp_path / "other", True)):
        replay_command(str(folder), step=5, as_json=True)
        out, err = capsys.readouterr()
        done = json.loads(out)
        assert done["recorded"]["train/loss"] == done["replayed"]["train/loss"] and (told in err) == warns, err
    assert replay.differences(tmp_path / "other", whole) == []


@pytest.mark.slow
@pytest.mark.sweep  # that more steps go on as in a run of as many (below) compares one run with all steps of another
def test_two_runs_are_equal(whole, tmp_path):
    run(tmp_path / "run")
    same_run(tmp_path / "run", whole)


KILLS = [  # moments, each counted from the start of the process that it ends -> the last checkpoint then
    (
        [
            *[("Admitted", 1), ("StepDone", 1)],  # nothing was learned yet; then before the first checkpoint
            *[("fsync", 1), ("fsync", 1)],  # while a checkpoint is written, twice the same
            *[("Checkpointed", 2), ("Admitted", 1)],  # at the border of the two phases, and again at once
            *[("GroupsTaken", 2), ("Synced", 3)],  # rollouts stored, not trained; then trained, not booked
            ("Checkpointed", 2),  # everything is done but the last words
        ],
        8,
    )
]


APART = [  # few of them in a run, which no later restart can mend
    ([("Admitted", 1), ("StepDone", 1)], 0),
    ([("fsync", 1), ("fsync", 1)], 0),
    ([("Checkpointed", 2), ("Admitted", 1)], 4),
    ([("GroupsTaken", 6), ("Synced", 3)], 0),
    ([("Checkpointed", 4)], 8),
]


@pytest.mark.slow
@pytest.mark.parametrize(("moments", "last"), covering([*KILLS, *APART], KILLS))
def test_a_killed_run_ends_with_the_same_bits(whole, tmp_path, moments, last):
    folder = tmp_path / "run"
    for moment in moments:
        assert run_and_die(folder, moment) == -9
    assert not last or max(Checkpoints(folder / "checkpoints", 2).list_checkpoints()) == last
    run(folder)
    same_run(folder, whole)
    assert not list((folder / "checkpoints").glob(".writing-*"))


STALE = {
    "loop__max_staleness": 1,
    "algo__correction": {"kind": "importance"},
    "loop__warmup__steps": 0,
    "loop__steps": 8,
    "engine__sampling": {"max_tokens": 12},
}

STOPS = [  # one after the other: the moment, the step that is kept, and who asks
    (("StepDone", 4), 4, signal.SIGTERM),  # in an evaluation
    (("Admitted", 4 + 2), 5, signal.SIGTERM),  # in rollouts
    (("Synced", 1 + 2), 7, signal.SIGHUP),  # in a step, by a terminal that was closed
]


# A run that is asked to end has begun its next step with fewer requests than the whole run has at that moment. Where
# attention over few rows takes other kernels (processors without AVX-512: 5e-7 in a logprob), that shows in the last
# bit of what the engine records, so these runs compute what does not depend on company.
ALIGNED = {"engine__numerics": "aligned"}


@pytest.fixture(scope="module")
def whole_aligned(tmp_path_factory) -> Path:
    return made_once(tmp_path_factory, "whole-aligned", partial(run, **ALIGNED))


@pytest.mark.slow
def test_a_run_that_is_asked_to_end_keeps_its_last_step_and_goes_on_bit_for_bit(whole_aligned, tmp_path):
    folder = tmp_path / "run"
    for moment, kept, asks in STOPS:
        assert run_and_die(folder, moment, asks, **ALIGNED) == 128 + asks
        assert [e["step"] for e in events(folder, "StepDone")][-1] == kept == events(folder, "Checkpointed")[-1]["step"]
    run(folder, **ALIGNED)
    assert [e["step"] for e in events(folder, "Resumed")] == [kept for _, kept, _ in STOPS]
    same_run(folder, whole_aligned)


TORCHRUN = Path(runs.__file__).with_name("torchrun.py")


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["process", "torchrun", "ray"])
def test_the_whole_process_group_may_be_asked(tmp_path, cluster):
    """By the command, on several processes: exit code and word; nobody ends before the
    checkpoint is whole, nobody is left after it. Ray would take SIGTERM for itself, print a stack and leave.
    """
    folder = tmp_path / "run"
    ranks = {"place.ranks": 2} if cluster == "process" else {}
    settings = {
        "loop.steps": 12,
        "loop.warmup.steps": 0,
        "run.folder": str(folder),
        "place.kind": "split",
        "place.cluster": cluster,
        **ranks,
    }
    words = [f"--{key}={json.dumps(value)}" for key, value in {**FAST, **settings}.items()]
    words = ["train", str(RECIPE), "--quiet", *words]

    def launch() -> Forked:
        if cluster != "torchrun":
            return Forked(words, stderr=subprocess.PIPE, start_new_session=True)
        several = ["--nproc-per-node", "2", "--no-python", "rondel", *(w for w in words if w != "--quiet")]
        return Forked(several, script=TORCHRUN, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)

    with launch() as process:
        while not (folder / "journal.jsonl").is_file() or len(events(folder, "StepDone")) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        # Ray's own processes would end first
        os.killpg(process.pid, signal.SIGTERM) if cluster != "ray" else process.terminate()
        told, said = process.communicate(timeout=60)
    kept = events(folder, "Checkpointed")[-1]["step"]
    assert process.returncode == 143 or cluster == "torchrun", "which has codes of its own"
    assert f"stopped by SIGTERM after step {kept} of 12" in said and "same command" in said, said
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    if cluster == "torchrun":  # the ranks that it started follow the first, which alone speaks
        assert told.count("run folder ") == told.count("step  2/12") == 1
        assert "2 of the trainer, 1 of the engine" in events(folder, "RunStarted")[0]["facts"]["place"]
    assert find_flaw(folder / "checkpoints" / f"step-{kept:06d}") is None
    if cluster != "process":  # who starts it again means nothing to a checkpoint that is whole
        return
    with launch() as process:
        said = process.communicate(timeout=200)[1]
    assert process.returncode == 0, said
    assert [e["step"] for e in events(folder, "Resumed")] == [kept]
    assert [e["step"] for e in events(folder, "StepDone")] == list(range(1, 13))


COSINE = {"trainer__schedule": "cosine", "trainer__optimizer__warmup_steps": 3, "loop__updates_per_step": 2}
STEP_BY_STEP = {"kind": "process", "scorer": "kits.step_scorers:by_length", "separator": "e", "pipelined": True}
RLOO = {
    **{"algo__kind": "rloo", "algo__kl": {"coef": 0.05}, "model__dtype": "bfloat16", "loop__warmup__steps": 0},
    **COSINE,
}
VALUED = {"task__reward": STEP_BY_STEP, "loop__warmup__steps": 0, "engine__sampling": {"max_tokens": 16}, **ALIGNED}
LORA = {"model__adapter": {"kind": "lora", "rank": 4, "alpha": 8}, "trainer__lr": 1e-2}
PPO = {"algo": {"kind": "ppo", "group_size": 4, "correction": {"kind": "importance"}}, "trainer__critic__lr": 1e-3}
RATED = {"task__curriculum": {"kind": "priority"}, **ALIGNED}
BACK = {"loop__replays": {"groups": 2, "max_lag": 3}}
THREES = [{"prompt": "1 + 1 + 1 =", "answer": "3"}, {"prompt": "0 + 2 + 2 =", "answer": "4"}]
BEST = {
    "task__eval": {"n": 4, "samples": 2, "every": 1, "sets": {"threes": {"kind": "list", "rows": THREES}}},
    "run__checkpoint": {"every": 2, "keep": 1, "best": "eval/score"},
}
# The recipe, and when it is killed. Each feature alone (a sweep) says which of those beside it it is.
TOGETHER = {
    "an adapter, rloo with KL, cosine, bfloat16, killed among steps that are valued": (
        {**RLOO, **VALUED, **LORA, "loop__steps": 3},
        ("GroupFinished", 4 + 2),
    ),
    "a critic, tasks by their rates, groups that come back, the best of several evaluations": (
        {**PPO, "trainer__critic__warmup": 1, **RATED, **BACK, **BEST, "loop__warmup__steps": 1, "loop__steps": 5},
        ("StepDone", 5),
    ),
    "float16 with its loss scale, in a format": (
        {"model__dtype": "float16", "model__format": "int4", "loop__warmup__steps": 1, "loop__steps": 4},
        ("StepDone", 4),
    ),
}
ALONE = {
    "rloo with KL, two updates, cosine, bfloat16": (RLOO, ("StepDone", 3)),
    "two updates, cosine over both phases": (COSINE, ("StepDone", 3)),
    "steps valued while they are written, killed among them": (VALUED, ("GroupFinished", 4 + 2)),
    "an adapter": ({**LORA, "model__dtype": "bfloat16"}, ("StepDone", 5)),
    "a critic": (PPO, ("StepDone", 5)),
    "tasks by their rates": (RATED, ("StepDone", 7)),
    "groups that come back": (
        {"algo__correction": {"kind": "importance"}, "loop__warmup__steps": 0, "loop__steps": 6, **BACK},
        ("StepDone", 5),
    ),
    "the best of several evaluations": (BEST, ("StepDone", 5)),
    "float16": ({"model__dtype": "float16"}, ("StepDone", 5)),
    "a format": ({"model__format": "int4"}, ("StepDone", 5)),
}
OTHERS = TOGETHER | ALONE


@pytest.mark.slow
@pytest.mark.parametrize("name", covering(OTHERS, TOGETHER))
def test_other_recipes_resume_to_the_same_bits(tmp_path, name):
    """A reference, several updates a step with a schedule, masters behind a bf16 copy; a pipelined process reward; and
    whatever else a checkpoint or the journal must keep.
    """
    recipe, moment = OTHERS[name]
    run(tmp_path / "whole", **recipe)
    assert run_and_die(tmp_path / "run", moment, **recipe) == -9
    run(tmp_path / "run", **recipe)
    same_run(tmp_path / "run", tmp_path / "whole")
    told = [event["counts"].get("process_steps", 0) for event in events(tmp_path / "run", "RewardCounts")]
    assert any(told) == ("task__reward" in recipe)
    kept = final(tmp_path / "run")
    assert any(key.startswith("critic/") for key in kept) == ("trainer__critic__lr" in recipe)
    assert ("optimizer/loss_scale" in kept) == (recipe.get("model__dtype") == "float16")
    assert any("lora" in key for key in kept) == ("model__adapter" in recipe)
    drawn, came_back = (
        [{e["number"]: e["task"] for e in events(tmp_path / n, "Admitted")} for n in ("run", "whole")],
        {e["step"] for e in events(tmp_path / "run", "Replayed")},
    )
    assert drawn[0] == drawn[1] and bool(came_back) == ("loop__replays" in recipe)
    if "task__curriculum" in recipe:
        assert len(set(drawn[0].values())) < len(drawn[0])  # some came back before an epoch was over
    if "task__eval" in recipe:
        best = [json.loads((tmp_path / n / "checkpoints" / "best.json").read_text()) for n in ("run", "whole")]
        assert best[0] == best[1]


@pytest.mark.slow
def test_with_refills_the_samples_are_the_same(tmp_path):
    """A dropped group is replaced when its reward arrives, so the engine's batches
    depend on the clock, and with them the last bits of a behavior logprob (numerics = "fast"). Tokens,
    rewards, ledger are those of the uninterrupted run."""
    easy = {"algo__kind": "dapo", "task__reward": "kits.rewards:parity", "loop__warmup__steps": 2}
    run(tmp_path / "whole", **easy)
    assert run_and_die(tmp_path / "run", ("StepDone", 5), **easy) == -9
    run(tmp_path / "run", **easy)
    done = events(tmp_path / "run", "StepDone")
    assert [e["ledger"] for e in done] == [e["ledger"] for e in events(tmp_path / "whole", "StepDone")]
    assert done[-1]["ledger"].get("filtered/unanimous", 0) > 0
    for n in store.stored_steps(tmp_path / "whole"):
        for a, b in zip(store.read_step(tmp_path / "run", n), store.read_step(tmp_path / "whole", n), strict=True):
            assert all(a[key] == b[key] for key in ("group", "sample", "task", "tokens", "mask", "versions", "reward"))
            assert a["trainer_logprobs"] == pytest.approx(b["trainer_logprobs"], abs=1e-4)


@pytest.mark.slow
def test_a_stale_run_loses_no_group_and_trains_none_twice(tmp_path):
    """S = 1, requests held over the update, killed twice and asked to end once: finished groups come back whole,
    unfinished ones are started again.
    """
    folder = tmp_path / "run"
    assert run_and_die(folder, ("StepDone", 3), **STALE) == -9
    assert run_and_die(folder, ("GroupsTaken", 3), **STALE) == -9
    assert run_and_die(folder, ("GroupFinished", 6), signal.SIGTERM, **STALE) == 128 + signal.SIGTERM
    run(folder, **STALE)
    done = events(folder, "StepDone")
    assert [e["step"] for e in done] == list(range(1, 9))
    assert all(balances(e["ledger"]) for e in done)
    taken = [number for e in events(folder, "GroupsTaken") for number in e["numbers"]]
    assert len(taken) == len(set(taken)) == 8 * 4
    dropped = [e["number"] for e in events(folder, "GroupFinished") if not e["kept"]]
    issued = [e["number"] for e in events(folder, "Admitted")]
    assert issued == list(range(len(issued))) and len(issued) >= done[-1]["ledger"]["issued"]
    assert not set(taken) & set(dropped)
    ended = sorted([*taken, *dropped])
    assert max(ended) - len(ended) < 8  # what is missing is in flight, at most (S + 1)·P young ones
    assert set(range(min(set(issued) - set(ended)))) <= set(ended)
    assert all(e["version"] - born <= 1 for e in events(folder, "GroupsTaken") for born in e["born"])


# -- the folder ----------------------------------------------------------------------------------


def spoil(checkpoint: Path, how: str) -> None:
    if how == "truncated":
        data = (checkpoint / "optimizer.safetensors").read_bytes()
        (checkpoint / "optimizer.safetensors").write_bytes(data[: len(data) // 2])
    elif how == "flipped":
        data = bytearray((checkpoint / "model.safetensors").read_bytes())
        data[len(data) // 2] ^= 1
        (checkpoint / "model.safetensors").write_bytes(data)
    elif how == "no manifest":
        (checkpoint / "manifest.json").unlink()
    elif how == "odd manifest":
        (checkpoint / "manifest.json").write_text('{"step": 8, "fjles": {}}')
    elif how == "empty manifest":
        (checkpoint / "manifest.json").write_text('{"step": 8, "files": {}}')
    elif how == "lost file":
        (checkpoint / "state.json").unlink()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["truncated", "flipped", "no manifest", "odd manifest", "empty manifest", "lost file"])
def test_a_corrupt_newest_checkpoint_is_skipped_with_a_warning(whole, tmp_path, how):
    shutil.copytree(whole / "checkpoints", tmp_path / "checkpoints")
    folders = sorted((tmp_path / "checkpoints").iterdir())
    spoil(folders[-1], how)
    said = []
    end = subscribe(lambda event: said.append(event.message))
    try:
        path, state = Checkpoints(tmp_path / "checkpoints", 2).find_latest()
    finally:
        end()
    assert path == folders[-2] and state["step"] == 6
    assert len(said) == 1 and "step-000008 is skipped" in said[0]
    assert find_flaw(folders[-1]) and not find_flaw(folders[-2])


@pytest.mark.slow
def test_a_run_goes_on_from_the_checkpoint_before_a_corrupt_one(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    spoil(folder / "checkpoints" / "step-000008", "flipped")
    run(folder)
    same_run(folder, whole)
    assert [e["step"] for e in events(folder, "Resumed")] == [6]


def test_a_corrupt_leftover_never_outlives_a_good_checkpoint(tmp_path):
    """keep = 1: the new checkpoint must not be taken for the old one because a corrupt one has a higher number."""
    import asyncio

    store = Checkpoints(tmp_path, 1)
    t = trainer(model("llama"))
    for n in (4, 9):
        asyncio.run(store.write(n, t.save, {"step": n}))
    spoil(tmp_path / "step-000009", "flipped")
    asyncio.run(store.write(6, t.save, {"step": 6}))
    assert list(store.list_checkpoints()) == [6] and store.find_latest()[1]["step"] == 6


@pytest.mark.slow
def test_a_complete_run_says_so_and_trains_nothing(whole):
    """By the command itself: exit code 0, the word, and not a byte of the journal."""
    journal = (whole / "journal.jsonl").read_bytes()
    short = {key.replace("__", "."): value for key, value in SHORT.items()}
    words = [f"--{key}={json.dumps(value)}" for key, value in {**FAST, **short}.items()]
    done = forked.run(["train", RECIPE, f"--run.folder={whole}", *words])
    assert done.returncode == 0, done.stderr
    assert "is complete: 8 of 8 steps" in " ".join((done.stdout + done.stderr).split())
    assert (whole / "journal.jsonl").read_bytes() == journal


@pytest.mark.slow
def test_a_changed_recipe_is_refused_with_the_difference(whole):
    with pytest.raises(ConfigError, match=r"trainer.lr: 0.001 -> 0.5") as error:
        run(whole, trainer__lr=0.5, loop__steps=99)
    assert "loop.steps" not in str(error.value)  # going on longer is no other recipe
    run(whole, run__checkpoint={"keep": 3})  # nor is where and how it is kept


@pytest.mark.slow
def test_more_steps_go_on_from_the_last_checkpoint(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    run(folder, loop__steps=6)
    assert [e["step"] for e in events(folder, "StepDone")] == list(range(1, 11))
    assert [e["step"] for e in events(folder, "Resumed")] == [8]
    run(tmp_path / "long", loop__steps=6)
    same_run(folder, tmp_path / "long")


# -- the trainer's part --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "tied"])
def test_a_loaded_trainer_goes_on_bit_for_bit(tmp_path, kind, dtype):
    algo = row("grpo")
    t, other = trainer(model(kind, dtype), algo), trainer(model(kind, dtype), algo)
    for n in range(3):
        step(t, batch(awkward_groups(n), algo), algo)
    save_trainer(t, tmp_path)
    step(other, batch(awkward_groups(9), algo), algo)  # a trainer that was elsewhere forgets all of it
    load_trainer(other, tmp_path)
    assert bits(other) == bits(t) and (other.step_number, other.version) == (3, 3)
    for which in (t, other):
        step(which, batch(awkward_groups(5), algo), algo)
    assert bits(other) == bits(t)


@pytest.mark.slow
@pytest.mark.sweep  # chosen moments above kill in each part of a step
def test_kills_at_random_moments(tmp_path):
    """By the benchmark of that name, with small batches and checkpoints that lie closer together."""
    small = [f"--{key}={json.dumps(value)}" for key, value in FAST.items() if not key.endswith((".steps", ".every"))]
    done = forked.run(
        ["bench", "kill_resume", "--kills=1", "--steps=8", f"--folder={tmp_path}", *small, "--run.checkpoint.every=3"]
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1])["equal"] is True


# -- a recorded run, done again under other delays -------------------------------------------------


def mixes(rows: list[dict]) -> bool:
    """Whether a sample was written by two versions."""
    return any(len({v for v in row["versions"] if v >= 0}) > 1 for row in rows)


@pytest.mark.slow
@pytest.mark.sweep  # episodes of several turns (next) are such samples, one after another
@pytest.mark.parametrize("staleness", [1, 2])
def test_a_recorded_run_is_replayed_bit_for_bit(tmp_path, staleness):
    assert mixes(record(tmp_path / "run", staleness, loop__max_staleness=staleness, **SPLIT))
    again(tmp_path / "run", tmp_path / "again", seed=7)
    if staleness == 1:
        record(tmp_path / "other", 9, **SPLIT)  # or the law would hold of runs that nothing disturbs
        assert replay.differences(tmp_path / "run", tmp_path / "other")


@pytest.mark.slow
def test_episodes_of_several_turns(tmp_path):
    changes = {
        "task__env": "kits.rewards:Twice",
        "engine__sampling": {"max_tokens": 12, "ignore_eos": True},
    }
    rows = record(tmp_path / "run", 6, **changes, **SPLIT)
    assert any(len(set(row["versions"])) > 2 for row in rows) and mixes(rows)
    again(tmp_path / "run", tmp_path / "again", seed=2)


@pytest.mark.slow
def test_on_a_shared_device_with_a_filter_and_late_groups_dropped(tmp_path):
    changes = {"task__filters": ["signal"], "loop__oversample": {"groups": 2, "late": "drop"}, "algo__group_size": 2}
    record(tmp_path / "run", 4, Straggler(), **changes)
    ended = events(tmp_path / "run", "GroupFinished")
    assert {e["kept"] for e in ended} == {True, False} and {"late", "unanimous"} <= {e["reason"] for e in ended}
    again(tmp_path / "run", tmp_path / "again", seed=5)


@pytest.mark.slow
@pytest.mark.parametrize(  # each alone says which of two it is
    ("how", "late"),
    covering(
        [("abort", "retry"), ("abort", "drop"), ("abort", None), ("drain", None), (None, "retry"), (None, "drop")],
        {("abort", "retry"), ("drain", None)},
    ),
)
def test_whatever_becomes_of_answers_in_flight_and_of_groups_that_were_given_up(tmp_path, how, late):
    """What is late depends on the clock, and so do the numbers, the tasks and the noise of all
    that is asked instead.
    """
    changes = {"loop__in_flight": how} if how else {}
    changes |= {"loop__oversample": {"groups": 3, "late": late}} if late else {}
    folder = tmp_path / "run"
    rows = record(folder, 3, Straggler() if late else None, **changes, **SPLIT)
    assert how is None or mixes(rows) == (how == "abort")
    assert any(e["reason"] == "late" for e in events(folder, "GroupFinished")) == (late is not None)
    again(folder, tmp_path / "again", seed=8)
