"""`rondel trace`: what a viewer may rely on by the Trace Event Format, and that the slices are the run's time."""

import json
from collections import Counter, defaultdict

import pytest

from kits.diagnose import write
from kits.runs import events, run
from rondel.cli import main
from rondel.core import events as words
from rondel.runtime.telemetry.trace import build_trace

pytestmark = pytest.mark.slow

NEEDS = {  # phase of the format -> fields beside name, ph, ts, pid, tid
    "X": {"dur", "cat"}, "b": {"id", "cat"}, "e": {"id", "cat"}, "C": {"args"}, "M": {"args"}, "i": {"s"},
}  # fmt: skip
PLACES = {
    "shared": {},
    "split": {"place__kind": "split", "loop__max_staleness": 1, "algo__correction__kind": "importance"},
}


def check_format(told: dict) -> dict[int, list[dict]]:
    """Fields, pairs, nesting. -> the slices of each track, in order."""
    assert json.loads(json.dumps(told, allow_nan=False)) == told and isinstance(told["traceEvents"], list)
    tracks, begun = defaultdict(list), {}
    for e in told["traceEvents"]:
        assert {"name", "ph", "ts", "pid", "tid"} <= e.keys() and NEEDS[e["ph"]] <= e.keys(), e
        assert isinstance(e["ts"], int) and e["ts"] >= 0 and isinstance(e["pid"], int) and isinstance(e["tid"], int)
        if e["ph"] == "X":
            assert e["dur"] >= 0
            tracks[e["tid"]].append(e)
        elif e["ph"] == "b":
            key = e["cat"], e["id"], e["name"]
            assert key not in begun
            begun[key] = e["ts"]
        elif e["ph"] == "e":
            assert e["ts"] >= begun.pop((e["cat"], e["id"], e["name"]))
        elif e["ph"] == "C":
            assert all(isinstance(v, int | float) for v in e["args"].values())
        elif e["ph"] == "i":
            assert e["s"] in "gpt"
    assert not begun, "every group that begins ends"
    for slices in tracks.values():
        stack: list[int] = []
        for e in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
            while stack and stack[-1] <= e["ts"]:
                stack.pop()
            assert not stack or e["ts"] + e["dur"] <= stack[-1], f"{e['name']} crosses what it lies in"
            stack.append(e["ts"] + e["dur"])
    return tracks


@pytest.mark.parametrize("place", PLACES)
def test_a_real_run(tmp_path, place, capsys):
    run(tmp_path, loop__warmup__steps=2, loop__steps=4, **PLACES[place])
    with pytest.raises(SystemExit) as ended:
        main(["trace", str(tmp_path), "-o", str(tmp_path / "trace.json")])
    assert not ended.value.code and "perfetto" in capsys.readouterr().out
    told = json.loads((tmp_path / "trace.json").read_text())
    tracks = check_format(told)
    names = {e["args"]["name"]: e["tid"] for e in told["traceEvents"] if e["name"] == "thread_name"}
    workers = {"engine", "trainer"} if place == "shared" else {"engine-0", "trainer-0"}
    assert names.keys() == {"controller", "groups", *workers}
    steps = [e for e in tracks[1] if e["cat"] == "step"]
    assert [e["name"] for e in steps] == [f"step {n}" for n in range(1, 7)]
    for drawn, done in zip(steps, events(tmp_path, "StepDone"), strict=True):
        assert drawn["dur"] == pytest.approx(done["seconds"]["step"] * 1e6, abs=2)
        inside = [e for e in tracks[1] if e["cat"] == "phase" and e["args"]["step"] == done["step"]]
        assert sum(e["dur"] for e in inside) == pytest.approx(drawn["dur"], abs=len(inside)), "phases fill the step"
    for worker in workers:
        drawn = sum(e["dur"] for e in tracks[names[worker]])
        assert drawn == pytest.approx(
            1e6 * sum(sum(e["seconds"].values()) for e in events(tmp_path, "WorkerTime") if e["worker"] == worker),
            rel=1e-3,
        )
    groups = [e for e in told["traceEvents"] if e["ph"] == "b"]
    trained = sum(len(e["numbers"]) for e in events(tmp_path, "GroupsTaken"))
    assert sum(e["name"] == "trained" for e in groups) == sum(e["name"] == "in the buffer" for e in groups) == trained
    assert {"lag", "tokens per second", "groups in flight"} == {
        e["name"] for e in told["traceEvents"] if e["ph"] == "C"
    }


def test_verdicts_and_lives(tmp_path):
    """A resumed run draws both lives; a group that was in flight then is unfinished; colours say
    what became of groups.
    """
    write(tmp_path, steps=3, last=words.Admitted(12, "t/12", 3))
    write(
        tmp_path,
        steps=2,
        finished=lambda s: {"kept": False, "reason": "no signal"},
        beside=lambda s: [words.Warned("slow")],
    )
    told = build_trace(tmp_path)
    check_format(told)
    named = Counter((e["name"], e.get("cname")) for e in told["traceEvents"] if e["ph"] == "b")
    assert (
        named[("kept", "good")] == 12
        and named[("dropped: no signal", "bad")] == 8
        and named[("unfinished", "grey")] == 1
    )
    assert [e["args"]["message"] for e in told["traceEvents"] if e["ph"] == "i" and e["cat"] == "said"] == [
        "slow",
        "slow",
    ]


def test_nothing_to_draw(tmp_path):
    (tmp_path / "journal.jsonl").touch()
    with pytest.raises(Exception, match="nothing to draw"):
        build_trace(tmp_path)
