"""Quantised rollouts: the engine rounds its weights, the trainer does not, and the correction weighs what lies between."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from kits.engine import plain_logprobs
from kits.runs import events, final, run, run_and_die, tiny
from kits.sweeps import covering
from rondel.algos.correction import Importance
from rondel.algos.table import GRPO, resolve_algorithm
from rondel.assemble import evaluate_checkpoint, train
from rondel.assemble.rows import rows_of
from rondel.core.errors import ConfigError
from rondel.formats import FORMATS, format_of
from rondel.models.load import load_model
from rondel.models.weight_formats import formatted_parameters
from rondel.runtime.journal.log import read
from rondel.runtime.journal.store import read_step
from rondel.runtime.telemetry.card import card_of, render_markdown
from rondel.train.step_metrics import MismatchAlarm, bound_of

ROUNDED = {"model__format": {"engine": "int4"}, "algo__correction": {"kind": "importance"}}
SHORT = {"loop__warmup__steps": 0, "loop__steps": 3}
PLACES = {
    "shared": {},
    "in process": {"place__kind": "split", "place__cluster": "local"},
    "workers": {"place__kind": "split"},
    "two ranks": {"place__kind": "split", "place__ranks": 2, "sync__kind": "ipc"},
    "beside": {"place__ranks": 2},
    "parts of an engine": {"place__kind": "split", "place__engines": {"tp": 2}},
    "prefill apart": {"place__kind": "split", "place__engines": {"prefill": True}},
    "ray": {"place__kind": "split", "place__cluster": "ray", "place__patience": 120.0},
}


@pytest.fixture(scope="module")
def rounded(tmp_path_factory) -> Path:
    """Engine and trainer on one device; every checkpoint is kept."""
    folder = tmp_path_factory.mktemp("rounded") / "run"
    every = {"run__checkpoint__every": 1, "run__checkpoint__keep": 9, "task__eval__every": 3}
    run(folder, **SHORT, **ROUNDED, **every, trainer__lr=1e-2)
    return folder


@pytest.mark.slow
def test_each_side_has_its_own_logprobs(rounded):
    """What a token was drawn with is what the rounded weights say of it, and what the trainer notes what the whole ones do:
    computed again from the checkpoint of the version that drew it, by transformers.
    """
    seen = 0
    for step in (2, 3):
        path = str(rounded / f"checkpoints/step-{step - 1:06d}")
        whole, served = (load_model(path, dtype="float32") for _ in range(2))
        with torch.no_grad():
            for name in formatted_parameters(served.model):
                p = served.model.get_parameter(name)
                p.copy_(format_of("int4").fake(p))
        for row in read_step(rounded, step)[:12]:
            at = [i for i, written in enumerate(row["mask"]) if written]
            for loaded, told, other in (
                (served, "behavior_logprobs", "trainer_logprobs"),
                (whole, "trainer_logprobs", "behavior_logprobs"),
            ):
                truth = plain_logprobs(loaded, row["tokens"])
                got = [row[told][i] for i in at]
                assert got == pytest.approx([float(truth[i - 1]) for i in at], abs=2e-5)
                seen += sum(abs(a - row[other][i]) > 1e-4 for a, i in zip(got, at))
    assert seen > 50, "the two sides differ by what was rounded"


@pytest.mark.slow
@pytest.mark.parametrize("place", covering(PLACES, ["shared", "two ranks", "parts of an engine"]))
def test_wherever_engine_and_trainer_are(tmp_path, rounded, place):
    """Encoded weights arrive at every update, and K3 is that of the format: below its alarm, far above rounding in fp32."""
    if place == "ray":
        pytest.importorskip("ray")
    if place == "shared":
        tmp_path = rounded
    else:
        run(tmp_path, **SHORT, **ROUNDED, **PLACES[place])
    done = [e["metrics"] for e in events(tmp_path, "StepDone")]
    assert all(1e-7 < m["train/mismatch_k3_lag_0"] < 0.2 for m in done), done
    assert all(abs(m["train/correction"] - 1) < 0.1 and "train/correction_truncated" in m for m in done)
    whole = sum(t.nbytes for n, t in final(tmp_path).items() if n.startswith("model/"))
    engines = 2 if place == "beside" else 1
    assert all(0 < e["bytes_copied"] < 0.5 * whole * engines for e in events(tmp_path, "Synced"))
    assert not events(tmp_path, "Warned")
    held = [t for n, t in final(tmp_path).items() if n.startswith("model/") and n.endswith("proj.weight")]
    assert held and not any(torch.equal(format_of("int4").fake(t), t) for t in held), "the trainer's are whole"


@pytest.mark.slow
@pytest.mark.sweep  # its trainer has no format; law 9 kills one that has
def test_a_killed_run_ends_with_the_same_bits(tmp_path):
    how = {**ROUNDED, "loop__warmup__steps": 2, "loop__steps": 6, "run__checkpoint__every": 2}
    run(tmp_path / "whole", **how)
    assert run_and_die(tmp_path / "killed", ("StepDone", 5), **how) == -9
    run(tmp_path / "killed", **how)
    a, b = final(tmp_path / "whole"), final(tmp_path / "killed")
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.slow
def test_an_evaluation_says_with_which_weights(rounded):
    """In the run, on its card, and of a checkpoint, which is rounded again or evaluated whole."""
    told = events(rounded, "Evaluated")
    assert told and {e["request"]["weights"] for e in told} == {"rounded to int4, in the engine alone"}
    page = render_markdown(card_of(rounded))
    assert "Measured with weights rounded to int4, in the engine alone." in page
    assert "the correction weighed tokens by" in page and "4.5 bits a weight, in the engine alone" in page
    again = evaluate_checkpoint(str(rounded), None, {})
    assert again.request["weights"] == "rounded to int4, in the engine alone" and again.score == told[-1]["score"]
    assert "weights" not in evaluate_checkpoint(str(rounded), None, {"model.format": "none"}).request
    assert all("weights" not in e.get("request", {}) for e in read(rounded) if e["kind"] != "Evaluated")


@pytest.mark.slow
def test_a_run_whose_engine_held_codes_is_evaluated_on_one_device(tmp_path):
    """Trained weights that are rounded, too: an evaluation has one module, whose numbers are those of the codes."""
    form = {"engine": "int4", "trainer": "rounded", "held": "encoded"}
    split = {"place__kind": "split", "place__cluster": "local"}
    run(tmp_path, **SHORT, **split, model__format=form, task__eval__every=3)
    told, again = events(tmp_path, "Evaluated")[-1], evaluate_checkpoint(str(tmp_path), None, {})
    assert again.score == told["score"] and [s["text"] for s in again.samples] == [s["text"] for s in told["samples"]]
    assert again.request["weights"] == told["request"]["weights"] == "rounded to int4, as the trainer's are"


@pytest.mark.parametrize(
    ("algo", "good"),
    [
        ({"kind": "grpo"}, False),
        ({"kind": "dapo"}, False),
        ({"kind": "grpo", "correction": {"kind": "importance"}}, True),
        ({"kind": "grpo", "correction": {"kind": "binary_kl_mask"}}, True),
        ({"kind": "grpo", "correction": {"kind": "freshness"}}, False),
        ({"kind": "grpo", "correction": {"kind": "off_policy_mask"}}, False),
        ({"kind": "grpo", "ratio": {"anchor": "behavior"}}, True),
        ({"kind": "sft"}, True),  # its tokens were drawn by nobody
    ],
    ids=str,
)
def test_a_row_that_weighs_nothing_is_refused(tmp_path, algo, good):
    from rondel.assemble.format_refusals import refuse_formats

    job = tiny(tmp_path, model__format={"engine": "fp8"}, **{f"algo__{key}": value for key, value in algo.items()})
    if good:
        return refuse_formats(job, rows_of(job))
    with pytest.raises(ConfigError, match=r"algo.correction.kind = 'importance'.*algo.ratio.anchor = 'behavior'"):
        refuse_formats(job, rows_of(job))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"algo__correction": {}}, "takes its tokens for the trainer's own"),
        ({"model__adapter": {"kind": "lora"}}, "only the adapter travels"),
        ({"engine__numerics": "aligned"}, "equal bits on both sides"),
        ({"engine__kind": "sglang", "engine__url": "http://127.0.0.1:1", "place__kind": "split"}, "rules of its own"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(tmp_path, changes, said):
    with pytest.raises(ConfigError, match=rf'model.format = {{ engine = "int4" }}.*{said}'):
        train(tiny(tmp_path, **{**ROUNDED, **changes}), quiet=True)


@pytest.mark.parametrize(
    ("form", "changes", "said"),
    [
        ({}, {"engine__compile": True}, "records where weights lie"),
        ({}, {"place__kind": "split", "place__engines": {"tp": 2}}, "share decoded weights"),
        ({"trainer": "rounded"}, {}, "the trainer's own tensors"),
    ],
    ids=str,
)
def test_an_engine_that_cannot_hold_codes_says_so(tmp_path, form, changes, said):
    given = {"model__format": {"engine": "int4", "held": "encoded", **form}, "algo__correction": {"kind": "importance"}}
    with pytest.raises(ConfigError, match=f'held = "encoded" with .*{said}'):
        train(tiny(tmp_path, **given, **changes), quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", covering(["whole", "rounded"], ["rounded"]))
def test_an_engine_that_holds_codes_trains_the_same(tmp_path, trainer):
    """Codes that stay codes: the same tokens, so the same checkpoint, in less memory. `rounded`: as the format's name alone."""
    form, place = {"engine": "int4", "trainer": trainer}, {"place__kind": "split", "place__cluster": "local"}
    told = {}
    for held in ("decoded", "encoded"):
        given = form if held == "decoded" and trainer == "whole" else form | {"held": held}
        run(tmp_path / held, **SHORT, **ROUNDED | {"model__format": given}, **place)
        rows = [e["memory"] for e in events(tmp_path / held, "WorkerTime") if e["worker"] == "engine"]
        told[held] = final(tmp_path / held), rows[-1]["engine weights"] + rows[-1]["engine packed"]
    if trainer == "rounded":
        run(tmp_path / "name", **SHORT, **ROUNDED | {"model__format": "int4"}, **place)
        told["name"] = final(tmp_path / "name"), told["decoded"][1]
    (first, most), *others = told.values()
    for tensors, size in others:
        assert tensors.keys() == first.keys() and all(torch.equal(tensors[n], first[n]) for n in first)
        assert size == most or size < 0.5 * most
    assert told["encoded"][1] < 0.5 * most
    if trainer == "rounded":
        done = [e["metrics"] for e in events(tmp_path / "encoded", "StepDone")]
        assert max(m["train/gap_max"] for m in done) < 1e-4


def test_a_recipe_names_one_format_or_the_engines(tmp_path):
    for name in FORMATS:
        model = tiny(tmp_path, model__format={"engine": name}).model
        assert (model.trained_format, model.rollout_format, model.engine_format) == ("none", name, name)
        model = tiny(tmp_path, model__format=name).model
        assert (model.trained_format, model.rollout_format, model.engine_format) == (name, "none", name)
    for wrong, said in (
        ({"engine": "none"}, "rounds nothing"),
        ({"engine": "fp5"}, "format"),
        ({"trainer": "fp8"}, "trainer"),
    ):
        with pytest.raises(ConfigError, match=said):
            tiny(tmp_path, model__format=wrong)


def test_the_alarm_names_the_format_and_what_helps():
    """At 0.04 nats, as SmolLM2 has in fp8, silent; at 0.6, as it has in int4, once."""
    low = bound_of(torch.bfloat16, mixture=False, foreign=False, engine_bits=8.002)
    high = bound_of(torch.bfloat16, mixture=False, foreign=False, engine_bits=4.5)
    assert 0.04 < low < high < 0.6 and bound_of(torch.bfloat16, mixture=False, foreign=False) < 0.04
    assert not MismatchAlarm(low, rounded="fp8").check_metrics({"train/mismatch_k3_lag_0": 0.04})
    alarm = MismatchAlarm(high, rounded="int4")
    said = alarm.check_metrics({"train/mismatch_k3_lag_0": 0.6})
    assert "weights in int4" in said and 'model.format = "int4"' in said and "bits" in said
    assert not alarm.check_metrics({"train/mismatch_k3_lag_0": 0.6})


def test_the_share_of_weights_that_a_bound_held():
    """By hand: w = exp(x), high 2, low 0.5."""
    x, sample = torch.log(torch.tensor([0.1, 0.6, 1.0, 3.0, 9.0])), torch.tensor([0, 0, 0, 1, 1])

    def share(**knobs):
        row = Importance(**knobs)
        found = row.truncated(x, sample, row(x, sample, torch.zeros(5)))
        return None if found is None else found.tolist()

    assert share() == [False, False, False, True, True]
    assert share(action="clip") == [True, False, False, True, True]
    assert share(veto=0.2) == [False, False, False, True, True]
    assert share(level="geometric", high=5.0) == [False, False, False, True, True]  # sqrt(27)
    assert share(action="mask") is None and share(level="none", veto=0.1) is None
    assert share(high="auto") == (Importance(high="auto")(x, sample, x) < x.exp() * (1 - 1e-5)).tolist()
    assert GRPO.correction.truncated(x, sample, x) is None
    assert math.isclose(sum(share(action="clip")) / 5, 0.6)
    assert resolve_algorithm({"kind": "grpo", "correction": {"kind": "importance"}}).corrects_numerics
