"""What each view of the page is told of a run: headline, books, time, findings, card. Plain
data; the words on the page are the page's.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rondel.core.errors import UserError
from rondel.runtime.journal.log import read_history
from rondel.runtime.telemetry.accounts import KINDS, seconds_to_shares
from rondel.runtime.telemetry.card import run_summary
from rondel.runtime.telemetry.diagnose.story import differing
from rondel.runtime.telemetry.metrics import metric_meaning
from rondel.runtime.telemetry.trace import PID, TRACKS, trace_marks

if TYPE_CHECKING:
    from rondel.dashboard.run import DashboardRun

Json = dict[str, Any]
HEADLINE: dict[str, tuple[str, str, frozenset[str]]] = {  # key -> (title, metric, findings that colour it)
    "reward": ("reward", "score/reward_mean", frozenset({"reward_collapse", "reward_hacking", "failing_reward"})),
    "eval": ("eval", "eval/score", frozenset({"overfit"})),
    "signal": ("signal", "filter/signal_fraction", frozenset({"no_signal", "solved", "dropped_groups"})),
    "entropy": ("entropy", "train/entropy", frozenset({"entropy_collapse", "entropy_explosion"})),
    "kl": ("KL to start", "train/kl_to_start", frozenset({"kl_runaway"})),
    "lag": ("lag", "loop/lag_max", frozenset({"lag_uncorrected", "stale_rollouts"})),
    "gap": ("engine gap", "train/gap_max", frozenset({"gap_above_bound", "gap_growing"})),
    "length": ("length", "generate/length_mean", frozenset({"length_bias"})),
    "cut": ("truncated", "generate/truncated_fraction", frozenset({"truncation"})),
}
SPARK = 60  # points of a curve in the headline
SMALL = 32 << 20  # bytes of a journal whose card is made on the spot
SLICES = 1500  # of one track


def headline_metrics(run: DashboardRun) -> dict[str, Json]:
    """Newest number, limit, and the gravest finding about it."""
    found = {f["name"]: f["severity"] for f in run.ranked_findings()}
    out: dict[str, Json] = {}
    fresh, bound = run.visible_columns.last_value("train/mismatch_k3_lag_0"), run.story.facts.get("mismatch_bound")
    for key, (title, metric, rules) in HEADLINE.items():
        alarms = sorted(
            (name for name in rules & found.keys()), key=lambda name: ("error", "warning", "note").index(found[name])
        )
        value = (
            [e["score"] for e in run.story.evals if e["profile"] == run.story.evals[0]["profile"]][-1]
            if metric == "eval/score" and run.story.evals
            else run.visible_columns.last_value(metric)
        )
        out[key] = {
            "title": title,
            "metric": metric,
            "unit": metric_unit(metric, run.scores_are_shares),
            "value": value,
            "alarm": found[alarms[0]] if alarms else "",
            "why": [name.replace("_", " ") for name in alarms],
            "limit": run.visible_columns.last_value("loop/lag_limit") if key == "lag" else None,
            "k3": {"now": fresh, "bound": bound} if key == "gap" and fresh is not None and bound is not None else None,
        }
    return out


def metric_unit(metric: str, share: bool) -> str:
    """`share`: no reward outside [0, 1] was seen, so that a score is one."""
    told = metric_meaning(metric)
    return "share" if share and metric.startswith("eval/") else told[0] if told else ""


def run_states(runs: list[DashboardRun]) -> list[Json]:
    """What is sent whenever something has happened."""
    out = []
    for i, run in enumerate(runs):
        with run.lock:
            out.append(
                {
                    "run": i,
                    "name": run.folder.name or str(run.folder),
                    "folder": str(run.folder),
                    "state": run.state,
                    "step": run.step,
                    "planned": run.planned_steps,
                    "warm": run.warm,
                    "read": run.read_share,
                    "sampled": len(run.sampled) if run.sampled is not None else 0,
                    "events": run.events,
                    "damaged": run.damaged,
                    "resumes": run.story.resumes[-20:],
                    "time": run.time,
                    "began": run.began,
                    "changes": run.changes,
                    "head": headline_metrics(run),
                    "alarms": _count_findings(run),
                    "steps": len(run.visible_columns),
                }
            )
    return out


def _count_findings(run: DashboardRun) -> dict[str, int]:
    severities = [f["severity"] for f in run.ranked_findings()]
    return {
        "error": severities.count("error"),
        "warning": severities.count("warning"),
        "note": severities.count("note"),
        "said": len(run.story.said),
    }


def metric_names(runs: list[DashboardRun]) -> list[Json]:
    """Every metric that any run has, with unit and meaning."""
    known = sorted({name for run in runs for name in run.visible_columns.values} | {"eval/score"})
    shares = all(run.scores_are_shares for run in runs)
    return [
        {"name": name, "unit": metric_unit(name, shares), "meaning": told[1]}
        for name in known
        if (told := metric_meaning(name) or ("", "of this trainer or algorithm"))
    ]


def ledger_view(run: DashboardRun, first: int, last: int) -> Json:
    """Ledger, lag, memory."""
    with run.lock:
        shown, drawn = run.visible_columns, max(first, run.warm + 1)  # of the supervised steps nobody drew the groups
        lags = {
            int(name[12:]): shown.sum_between(name, drawn, last)
            for name in list(shown.values)
            if name.startswith("loop/lag_is_")
        }
        total = sum(lags.values())
        held, workers = dict[str, dict[str, float]](), dict[str, dict[str, float]]()
        for name in list(shown.values):
            if not name.startswith("mem/") or (value := shown.last_value(name)) is None:
                continue
            # mem/engine-0/kv is of a worker, mem/train_weights of a phase
            worker, of_worker, what = name[4:].partition("/")
            phase, _, who = name[4:].partition("_")
            if of_worker:
                workers.setdefault(worker, {})[what] = value
            else:
                held.setdefault(phase, {})[who or "peak"] = value
        return {
            "ledger": dict(run.story.ledger) or _sampled_ledger(run),
            "lags": {lag: n / total for lag, n in sorted(lags.items()) if n} if total else {},
            "limit": shown.last_value("loop/lag_limit"),
            "memory": held,
            "workers": workers,
            "group": run.story.recipe_value("algo.group_size"),
        }


def _sampled_ledger(run: DashboardRun) -> dict[str, float]:
    return {
        n[7:]: v
        for n in run.visible_columns.values
        if n.startswith("ledger/") and (v := run.visible_columns.last_value(n)) is not None
    }


def time_breakdown(run: DashboardRun, first: int, last: int, steps: int) -> Json:
    """Accounts of these steps, 100 % each, and the last few steps as slices."""
    with run.lock:
        accounts = run.time_accounts(first, last)
        seconds = run.visible_columns.sum_between("time/step", first, last)
    return {
        "accounts": [
            {"worker": worker, "seconds": sum(a.values()), "shares": seconds_to_shares(a)}
            for worker, a in sorted(accounts.items())
        ],
        "seconds": seconds,
        "kinds": KINDS,
        "timeline": timeline(run, steps),
    }


def timeline(run: DashboardRun, steps: int) -> Json | None:
    """Tracks of slices (name, begin, seconds), groups (begin, end, what became of it,
    reward): of the newest steps, by `rondel trace`.
    """
    events = run.newest_events(steps)
    if not events or not any(e["kind"] == "StepDone" for e in events):
        return None
    marks = trace_marks(events)
    titles = {
        m["tid"]: m["args"]["name"] for m in marks if m["ph"] == "M" and m["name"] == "thread_name" and m["pid"] == PID
    }
    tracks: dict[str, list[tuple[str, float, float]]] = {}
    begun, groups, done = {}, [], []
    for m in marks:
        at = m["ts"] / 1e6
        if m["ph"] == "X" and m["cat"] == "step":
            done.append((m["name"], at, m["dur"] / 1e6))
        elif m["ph"] == "X":
            tracks.setdefault(titles[m["tid"]], []).append((m["name"], at, m["dur"] / 1e6))
        elif m["ph"] == "b":
            begun[m["id"], m["name"]] = at, m["args"]
        elif m["ph"] == "e" and m["tid"] == TRACKS["groups"]:
            since, told = begun.pop((m["id"], m["name"]))
            rewards = told.get("rewards") or []
            groups.append((since, at, m["name"], sum(rewards) / len(rewards) if rewards else None, told["group"]))
    length = max((m["ts"] + m.get("dur", 0) for m in marks), default=0) / 1e6
    return {
        "tracks": {name: slices[-SLICES:] for name, slices in tracks.items()},
        "steps": done,
        "groups": groups[-SLICES:],
        "seconds": length,
    }


def findings_view(run: DashboardRun) -> Json:
    with run.lock:
        return {
            "findings": run.ranked_findings(), "said": list(reversed(run.story.said[-200:])), "broke": run.story.broke,
            "stalls": [(step, e["message"]) for step, e in run.story.stalls[-20:]], "reading": run.state == "reading",
        }  # fmt: skip


def card_view(run: DashboardRun) -> Json:
    """What `rondel card` wrote, if the journal has not grown since, or the same made now."""
    path, journal = run.folder / "card.json", run.tail.path
    if path.exists() and not (journal.exists() and journal.stat().st_mtime_ns > path.stat().st_mtime_ns):
        try:
            return {"card": json.loads(path.read_text(encoding="utf-8")), "written": True}
        except ValueError as error:
            raise UserError(f"{path} is no card ({error}); remove it, and it is made from the journal") from error
    if not run.events or run.tail.size > SMALL:
        return {"card": None, "large": run.tail.size > SMALL}
    return {"card": run_summary(read_history(run.folder), run.story.job), "written": False}


def recipe_differences(runs: list[DashboardRun]) -> Json:
    """The keys in which not all runs agree, each with its value in every run."""
    found: dict[str, list[Any]] = {}
    for run in runs[1:]:
        for name in differing(runs[0].story.job, run.story.job, skip=("run.",)):
            found[name] = [other.story.recipe_value(name) for other in runs]
    return found
