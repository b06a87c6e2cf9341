"""The run card: what a run did, answered from its journal and never from memory.
`write_card(folder)` -> card.md and card.json.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from rondel.core.config.environment import ToolsConfig
from rondel.core.config.old_recipe import translate_moved_keys
from rondel.core.config.section import split_kind
from rondel.core.errors import UserError
from rondel.runtime.journal.log import drop_repeated_events, read_history, read_recipe
from rondel.runtime.journal.store import read_step, stored_steps
from rondel.runtime.telemetry.accounts import seconds_of, seconds_to_shares
from rondel.runtime.telemetry.drawn_images import encode_png
from rondel.runtime.telemetry.metrics import add_boxes
from rondel.runtime.telemetry.run_images import before_and_after, draws_images
from rondel.runtime.telemetry.scores import failure_text, interval_text, is_share, score_text, within_unit
from rondel.runtime.telemetry.world_card import world_rows, world_sentence, world_summary
from rondel.system.files import replace_file
from rondel.text.unicode import write_json

Events = list[dict[str, Any]]
EVAL = ("score", "low", "high", "n", "step", "version", "profile", "request")
DRAWN = {"draws": 1, "interval": "", "metrics": {}, "of": {}}  # what older journals lack; of: the score by source
UNKNOWN = "not recorded"
IMAGES = "images.png"


def wilson_interval(successes: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Interval of a share: (p + z²/2n ± z·sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n).  Wilson
    1927, doi:10.1080/01621459.1927.10502953.

    Unlike p ± z·sqrt(p(1-p)/n) it is honest at 0 and 1: `wilson_interval(0, 10)` is (0, 0.28).
    Knowing nothing, n = 0, is (0, 1).
    """
    if not 0 <= successes <= max(n, 0):
        raise ValueError(f"{successes} successes of {n}: it must lie in [0, n]")
    if n == 0:
        return 0.0, 1.0
    p, spread = successes / n, z * z / n
    centre, half = p + spread / 2, z * math.sqrt(p * (1 - p) / n + spread / (4 * n))
    return max(0.0, (centre - half) / (1 + spread)), min(1.0, (centre + half) / (1 + spread))


def normal_interval(values: list[float], z: float = 1.959964) -> tuple[float, float]:
    """mean ± z·s/√n, s unbiased: the interval of a mean of numbers of any size.  One value
    says nothing of its spread: (value, value).
    """
    mean = sum(values) / len(values)
    half = (
        z * math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
        if len(values) > 1
        else 0.0
    )
    return mean - half, mean + half


def compared_intervals(*evaluations: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Of evaluations that are compared, made in one way: where rewards of one lie outside [0, 1], Wilson's of another,
    which knows that they lie inside, becomes the normal one, with the widest spread that its score allows.
    """
    named = [e.get("interval", "") for e in evaluations]
    if "normal" not in named:
        return [(e["low"], e["high"]) for e in evaluations]
    return [
        _normal_of_share(e["score"], e["n"]) if name == "Wilson" else (e["low"], e["high"])
        for e, name in zip(evaluations, named)
    ]


def _normal_of_share(p: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """`normal_interval` of n rewards of 0 and 1 with mean p."""
    half = z * math.sqrt(max(0.0, p * (1 - p)) / (n - 1)) if n > 1 else 0.0
    return p - half, p + half


def sparkline(values: list[float], width: int = 60) -> str:
    """A curve as text: [0, 1, 2, 3] -> '▁▃▆█'. Longer ones are averaged into `width` columns; NaN leaves a gap."""
    if len(values) > width:
        cuts = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    known = [v for v in values if math.isfinite(v)]
    if not known:
        return ""
    low, span = min(known), (max(known) - min(known)) or 1.0
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (v - low) / span)] if math.isfinite(v) else " " for v in values)


def write_card(folder: str | Path) -> dict[str, Any]:
    """Read the journal and job.toml of a run, write both cards, return what card.json holds."""
    card = card_of(folder)
    save_card(folder, card)
    return card


def card_of(folder: str | Path) -> dict[str, Any]:
    """What card.json holds, from the journal and job.toml of a run. Writes nothing."""
    folder = Path(folder)
    raw = read_history(folder)
    if not raw:
        raise UserError(f"the journal in {folder} is empty: the run has not started, so there is nothing to report")
    recipe = read_recipe(folder)
    translate_moved_keys(recipe)
    return run_summary(raw, recipe)


def save_card(folder: str | Path, card: dict[str, Any]) -> None:
    """card.json and card.md; where the policy draws images, images.png: those of its first and of its last step."""
    read = partial(read_step, folder)
    if card["images"] and (found := before_and_after(card["recipe"], stored_steps(folder), read)) is not None:
        replace_file(Path(folder) / IMAGES, encode_png(found[0]))
    else:
        card = card | {"images": False}
    for name, text in (("card.json", write_json(card) + "\n"), ("card.md", render_markdown(card))):
        replace_file(Path(folder) / name, text.encode("utf-8", "replace"))


# -- from events to numbers ------------------------------------------------------------------------


def run_summary(raw: Events, job: dict[str, Any]) -> dict[str, Any]:
    """Everything the card says, as data. `raw` is the whole history: interrupted work is not
    counted, but its time is.
    """
    events = drop_repeated_events(raw)
    done = [e for e in events if e["kind"] == "StepDone"]
    all_evals = [e for e in events if e["kind"] == "Evaluated"]
    evals = [e for e in all_evals if e["profile"] == all_evals[0]["profile"]]  # only equal questions can be compared
    facts: dict[str, Any] = next((e["facts"] for e in reversed(events) if e["kind"] == "RunStarted"), {})
    ledger = done[-1]["ledger"] if done else {}
    warm = job.get("loop", {}).get("warmup", {}).get("steps", 0)
    finished = [e["rewards"] for e in events if e["kind"] == "GroupFinished"]
    return {
        "eval_before": _evaluation_row(evals[0]) if evals else None,
        "eval_after": _evaluation_row(evals[-1]) if len(evals) > 1 and evals[-1]["step"] > evals[0]["step"] else None,
        "eval_supervised": next((_evaluation_row(e) for e in evals[:-1] if 0 < e["step"] == warm), None),
        "eval_sets": _last_rows([e for e in all_evals if e["step"] == evals[-1]["step"]]) if evals else [],
        "score_is_share": all(map(is_share, evals)) and all(map(within_unit, finished)),
        "seconds": round(_wall_seconds(raw), 1),
        "steps": done[-1]["step"] if done else 0,
        "images": draws_images(job),
        "trained_groups": ledger.get("trained", 0),
        "ledger": ledger,
        "resumes": sum(e["kind"] == "Resumed" for e in raw),
        "ended": next((e["reason"] for e in reversed(events) if e["kind"] == "RunEnded"), "not ended"),
        "warnings": list(dict.fromkeys(e["message"] for e in raw if e["kind"] == "Warned")),
        "rewards": _mean_rewards(events),
        "episodes": _count_episodes(events),
        "boxes": add_boxes(e.get("boxes") or {} for e in events if e["kind"] == "GroupFinished"),
        "shapes": count_shapes(done),
        "shared": count_shared_tokens(done),
        "policies": policy_summaries(done, facts),
        "world": world_summary(done),
        "questions": answer_questions(events, job, facts),
        "loss": facts.get("loss", UNKNOWN),
        "seeds": {"loop": facts.get("seed", UNKNOWN)},
        "data": facts.get("tasks", {}),
        "cost": {
            "device_hours": round(sum(seconds * devices for seconds, devices in _lives(raw)) / 3600, 4),
            "devices": max(devices for _, devices in _lives(raw)),
        },
        "workers": {worker: seconds_to_shares(seconds) for worker, seconds in seconds_of(events).items()},
        "memory": memory_by_worker(events, facts),
        "samples_before": evals[0]["samples"] if evals else [],
        "samples_after": evals[-1]["samples"] if len(evals) > 1 else [],
        "facts": facts,
        "recipe": job,
    }


def memory_by_worker(events: Events, facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """{"trainer-0": {"moments": {"planned": 7.2e8, "counted": 7.2e8}, "rss": ...},
    ...}: the most that each worker has told.
    """
    planned, most = facts.get("memory_planned", {}), dict[str, dict[str, Any]]()
    for event in events:
        if event["kind"] == "WorkerTime":
            held = most.setdefault(event["worker"], {})
            for what, n in event.get("memory", {}).items():
                if n:
                    before = held.get(what, {"counted": 0})["counted"]
                    held[what] = {"planned": planned.get(what), "counted": max(before, n)}
    return {worker: held for worker, held in most.items() if held}


def _evaluation_row(event: dict[str, Any]) -> dict[str, Any]:
    return {key: event[key] for key in EVAL} | {key: event.get(key) or given for key, given in DRAWN.items()}


def _last_rows(events: Events) -> list[dict[str, Any]]:
    """Every set at one step; of a set that a resumed run evaluated again there the last."""
    last = {event["profile"]: event for event in events}
    return [_evaluation_row(event) | {"share": is_share(event)} for event in last.values()]


def _wall_seconds(raw: Events) -> float:
    """Wall time of all lives of the run."""
    return math.fsum(seconds for seconds, _ in _lives(raw))


def _lives(raw: Events) -> list[tuple[float, int]]:
    """[(seconds, devices), ...]: each life from its RunStarted to its last sign. Ranks may be others in each."""
    lives, begun, last, devices = list[tuple[float, int]](), raw[0]["t"], raw[0]["t"], 1
    for event in raw:
        if event["kind"] == "RunStarted":
            lives.append((last - begun, devices))
            begun, devices = event["t"], event["facts"].get("devices", 1)
        last = event["t"]
    return [*lives, (last - begun, devices)]


def _mean_rewards(events: Events) -> list[float | None]:
    """The mean reward of what finished before each step; None where nothing did, as in the supervised phase."""
    curve: list[float | None] = []
    rewards: list[float] = []
    for event in events:
        if event["kind"] == "GroupFinished":
            rewards += event["rewards"]
        elif event["kind"] == "StepDone":
            curve.append(math.fsum(rewards) / len(rewards) if rewards else None)
            rewards = []
    return curve


def _count_episodes(events: Events) -> dict[str, int]:
    """{"all": 1280, "drift_thought": 3, "out_of_turns": 1}: of the samples that were drawn."""
    finished = [e for e in events if e["kind"] == "GroupFinished" and not e.get("supervised")]
    counts = sum((Counter(e.get("episodes") or {}) for e in finished), Counter[str]())
    return {"all": sum(len(e["lengths"]) for e in finished), **counts}


def count_shapes(done: Events) -> dict[str, int]:
    """{"128x128": 12, "256x256": 40}: training passes of each fixed shape; empty where micro-batches have none."""
    passes: Counter[str] = Counter()
    for name, n in ((name, n) for e in done for name, n in e["metrics"].items()):
        if (shape := name.partition("/")[2]).startswith("shape_"):
            passes[shape.removeprefix("shape_")] += int(n)
    return dict(sorted(passes.items(), key=lambda item: int(item[0].partition("x")[0])))


def count_shared_tokens(done: Events) -> list[float]:
    """[tokens whose keys and values ranks of cp gave each other, all packed tokens]; empty where there were none."""
    shared, packed = (sum(e["metrics"].get(f"train/{n}_tokens", 0.0) for e in done) for n in ("shared", "packed"))
    return [shared, packed] if shared else []


def policy_summaries(done: Events, facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """{"critic": {"agents": ["critic"], "model": ..., "reward_first": 0.1, "reward_last":
    0.9, ...}, ...} of a run that has several.
    """
    told: dict[str, dict[str, Any]] = {}
    for name, known in facts.get("policies", {}).items():
        rewards = [e["metrics"][m] for e in done if (m := f"{name}/reward_mean") in e["metrics"]]
        told[name] = known | {
            "reward_first": rewards[0] if rewards else None,
            "reward_last": rewards[-1] if rewards else None,
        }
    return told


def answer_questions(events: Events, job: dict[str, Any], facts: dict[str, Any]) -> dict[str, str]:
    """The nine questions a reviewer should ask, from measurement where there is one
    and from the recipe where it decides.
    """

    def recipe_value(dotted: str) -> Any:
        node: Any = job
        for name in dotted.split("."):
            node = node.get(name) if isinstance(node, dict) else None
        return UNKNOWN if node is None else node

    done = [e for e in events if e["kind"] == "StepDone"]
    gaps = [gap for e in done for name, gap in e["metrics"].items() if name.endswith("/gap_max")]  # of every policy
    probes = [e["probe_gap"] for e in events if e["kind"] == "Synced"]
    warm = (
        0 if recipe_value("loop.warmup.steps") == UNKNOWN else recipe_value("loop.warmup.steps")
    )  # its groups nobody drew
    trained = {e["step"] for e in done if e["step"] > warm and not e["note"]}  # not of an update that was refused
    lags = [
        e["version"] - born for e in events if e["kind"] == "GroupsTaken" and e["step"] in trained for born in e["born"]
    ]
    gap = f"largest |log p(trainer) - log p(engine)| of a trained token {max(gaps):.1e}" if gaps else "gap not measured"
    fresh = [k3 for e in done for name, k3 in e["metrics"].items() if name.endswith("/mismatch_k3_lag_0")]
    used = facts.get("arithmetic", {})
    kernels = f"{used['kernels']} on the CPU; " if "kernels" in used else ""
    bound = f", a warning above {facts['mismatch_bound']:g}" if "mismatch_bound" in facts else ""
    form = facts.get("resolved", {}).get("model.format", "none")
    gap += f"; largest K3 of fresh tokens in a step {max(fresh):.1e} nats{bound}" if fresh else ""
    probe = (
        f"largest mean difference a token on the probe prompt after {len(probes)} syncs {max(probes):.1e}"
        if probes
        else "no sync recorded"
    )
    env, settings = split_kind(recipe_value("task.env"), "single_turn")
    most = settings.get("turns", ToolsConfig.model_fields["turns"].default if env in ("tools", "gym") else UNKNOWN)
    turns = f"at most {most} turns" if most != UNKNOWN else "as many turns as it takes"
    turns = "one turn" if env == "single_turn" else turns
    replay = facts.get("resolved", {}).get("routing_replay", "none: no routed experts recorded")
    return {
        "framework": _format_facts(facts.get("versions")),
        "engine and topology": f"engine {recipe_value('engine.kind')}, placement {recipe_value('place.kind')}, "
        f"{facts.get('device', UNKNOWN)}, {facts.get('place', UNKNOWN)}{_mesh_words(facts.get('mesh'))}",
        "precision and what enforces consistency": f"{_format_facts(facts.get('dtypes'))}; {kernels}one model "
        f"definition on both sides; {gap}; {probe}"
        + ("" if form.startswith("none") else f"; weights in {form}{correction_sentence(done)}"),
        "on-policy or measured lag": f"{_summarize_lag(lags)}; cap {recipe_value('loop.max_staleness')}",
        "whose logprobs": (
            "the engine's, stored for each token when it was drawn (after temperature and truncation of the support); "
        )
        + (
            "the trainer recomputes its own, and the gap above is between the two"
            if gaps
            else "a recomputation was not recorded"
        ),
        "routing replay": str(replay),
        "group size": f"{recipe_value('algo.group_size')} answers a task, {recipe_value('loop.groups_per_step')} tasks "
        f"a step, updates a step: {recipe_value('loop.updates_per_step')}, passes over them: "
        f"{recipe_value('loop.epochs')}",
        "multi-turn budgets": (
            f"environment {env}, {turns} of at most {recipe_value('engine.sampling.max_tokens')} tokens"
        ),
        "where the time went": _format_facts(time_shares(done)) if done else "no step was finished",
    }


def _mesh_words(mesh: str | None) -> str:
    """How the ranks of a trainer lie, where there are several."""
    return f", mesh {mesh}" if mesh else ""


def correction_sentence(done: Events) -> str:
    """; the correction weighed tokens by 0.998 on average, held 0.4 % of the weights to its bound and dropped 0 %.
    Nothing of a row without one.
    """

    def mean_of(name: str) -> float | None:
        told = [e["metrics"][f"train/{name}"] for e in done if f"train/{name}" in e["metrics"]]
        return math.fsum(told) / len(told) if told else None

    weight, held, dropped = map(mean_of, ("correction", "correction_truncated", "correction_dropped"))
    if held is None:
        clipped = mean_of("clip_fraction")
        return "" if clipped is None else f"; the surrogate clipped {clipped:.2%} of the tokens"
    return (
        f"; the correction weighed tokens by {weight:.4g} on average, held {held:.2%} of the weights to its bound and "
        f"dropped {dropped:.2%}"
    )


def _summarize_lag(lags: list[int]) -> str:
    if not lags:
        return "no group was trained"
    if max(lags) == 0:
        return f"on-policy: all {len(lags)} trained groups were written by the weights being trained"
    shares = ", ".join(f"{n / len(lags):.0%} at {lag}" for lag, n in sorted(Counter(lags).items()))
    return f"off-policy: lag mean {sum(lags) / len(lags):.2f}, max {max(lags)} versions ({shares})"


def time_shares(done: Events) -> dict[str, str]:
    """{"wait": "61 %", ...}: the phases of all steps, largest first; they add up to the step (law 13)."""
    total = sum(e["seconds"].get("step", 0.0) for e in done)
    phases: Counter[str] = Counter()
    for event in done:
        phases.update({name: seconds for name, seconds in event["seconds"].items() if name != "step"})
    if not total:
        return {}
    return {name: f"{seconds / total:.1%}" for name, seconds in phases.most_common()}


def _format_facts(facts: Any) -> str:
    if isinstance(facts, dict):
        return ", ".join(f"{name} {value}" for name, value in facts.items())
    return UNKNOWN if facts is None else str(facts)


# -- from numbers to a page ------------------------------------------------------------------------


def render_markdown(card: dict[str, Any]) -> str:
    """The card as a page that can be read without knowing Rondel."""
    before, after, share = card["eval_before"], card["eval_after"], card["score_is_share"]
    parts = [
        "# Run card",
        f"{card['steps']} steps, {card['trained_groups']} trained groups, {card['seconds']:.0f} s in all"
        + (f", resumed {_format_count(card['resumes'])}" if card["resumes"] else "")
        + f". Ended: {card['ended']}.",
        "## Held-out tasks",
        markdown_table(
            (
                "",
                "score" if share else "mean reward",
                f"95 % interval{_interval_name(before, after, share)}",
                "tasks",
                "after step",
            ),
            [
                _eval_row("before", before, share),
                *(
                    [_eval_row("after the supervised phase", card["eval_supervised"], share)]
                    if card["eval_supervised"]
                    else []
                ),
                _eval_row("after", after, share),
            ],
        ),
        *_unscored_sentences([e for e in (before, card["eval_supervised"], after) if e]),
        _interval_verdict(before, after),
        *([f"Measured with weights {weights}."] if before and (weights := before["request"].get("weights")) else []),
        *_set_tables(card["eval_sets"]),
        *(["## What it drew", f"![above: the first step, below: the last one]({IMAGES})"] if card["images"] else []),
        "## Reward while training",
        _curve_text(card["rewards"]),
        *(
            [
                "## Policies",
                markdown_table(
                    ("policy", "agents", "model", "trained", "mean reward, first and last step"),
                    _policy_rows(card["policies"]),
                ),
            ]
            if card["policies"]
            else []
        ),
        *(
            [
                "## Model of the world",
                world_sentence(card["world"]),
                markdown_table(("", "first step", "last step"), world_rows(card["world"])),
            ]
            if card["world"]
            else []
        ),
        *(
            [
                "## Episodes",
                markdown_table(
                    ("what became of them", "episodes"),
                    [(name.replace("_", " "), str(n)) for name, n in card["episodes"].items()],
                ),
            ]
            if len(card["episodes"]) > 1
            else []
        ),
        *(["## Sandboxes", markdown_table(("what", "used"), box_rows(card["boxes"]))] if card["boxes"] else []),
        *([shapes_text(card["shapes"])] if card["shapes"] else []),
        *([shared_text(*card["shared"])] if card["shared"] else []),
        "## Nine questions",
        markdown_table(("question", "answer"), list(card["questions"].items())),
        "## To do it again",
        markdown_table(("what", "which"), _reproduction_rows(card)),
        f"```text\n{card['loss']}\n```",
        "## Time of each worker",
        markdown_table(
            ("worker", "its time, 100 %"),
            [(worker, _format_account(account)) for worker, account in card["workers"].items()],
        )
        if card["workers"]
        else "No worker has reported.",
        "## Memory",
        markdown_table(("who", "what", "planned", "counted, at most"), _memory_rows(card["memory"]))
        if card["memory"]
        else "No worker has reported.",
        "## Ledger of groups",
        markdown_table(("what became of them", "groups"), list(card["ledger"].items()))
        if card["ledger"]
        else "No step was finished.",
    ]
    for title, samples in (("Answers before", card["samples_before"]), ("Answers after", card["samples_after"])):
        if samples:
            parts += [f"## {title}", *map(_format_sample, samples[:4])]
    if card["warnings"]:
        parts += ["## Warnings", "\n".join(f"- {_escape_cell(w)}" for w in card["warnings"])]
    return "\n\n".join(parts) + "\n"


def shapes_text(shapes: Mapping[str, int]) -> str:
    """Distinct shapes of the run: 2 (128x128 in 12 passes, 256x256 in 40 passes)."""
    each = ", ".join(f"{shape} in {n} passes" for shape, n in shapes.items())
    return f"Distinct shapes of the training passes, tokens x trained tokens: {len(shapes)} ({each})."


def box_rows(boxes: Mapping[str, float]) -> list[tuple[str, str]]:
    """(what, in all and for each episode), as a card shows it; what nobody counted is said to be so."""
    n = boxes["episodes"]

    def spent(name: str) -> str:
        return f"{boxes[name]:.1f} s, {boxes[name] / n:.2f} s an episode" if name in boxes else "not counted here"

    peak = f"{boxes['peak'] / 1e6:.1f} MB in one episode, at most" if "peak" in boxes else "not counted here"
    return [
        ("episodes with a box", f"{n:.0f}"),
        ("boxes open", spent("seconds")),
        ("computing in boxes", spent("cpu")),
        ("memory of a box", peak),
    ]


def _policy_rows(policies: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (
            name,
            ", ".join(each["agents"]) or "everyone else",
            f"{each['model']}, {each['parameters'] / 1e6:.4g} M numbers",
            "frozen" if each["frozen"] else f"lr {each['lr']:g}",
            "not recorded"
            if each["reward_first"] is None
            else f"{each['reward_first']:.3f} to {each['reward_last']:.3f}",
        )
        for name, each in policies.items()
    ]


def _memory_rows(memory: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """What the planner has a word for stands beside its bill."""
    return [
        (worker, what, "" if each["planned"] is None else _format_mb(each["planned"]), _format_mb(each["counted"]))
        for worker, tenants in memory.items()
        for what, each in tenants.items()
    ]


def _format_mb(n: float) -> str:
    return f"{n / 1e6:,.{0 if n >= 1e7 else 2}f} MB"


def _reproduction_rows(card: dict[str, Any]) -> list[tuple[str, str]]:
    """What else than the recipe determines the run, and what it costs."""
    data, cost = dict(card["data"]), card["cost"]
    digests = data.pop("digests", {})
    return [
        ("seeds", _format_facts(card["seeds"])),
        ("tasks", _format_facts(data) or UNKNOWN),
        ("digests of the tasks (blake2b)", _format_facts(digests) or UNKNOWN),
        ("cost", f"{cost['device_hours']:.3g} device-hours on {cost['devices']} device{'s' * (cost['devices'] != 1)}"),
    ]


def _format_account(account: dict[str, float]) -> str:
    return ", ".join(f"{kind} {share:.1%}" for kind, share in account.items())


def _format_count(n: int) -> str:
    return "once" if n == 1 else f"{n} times"


def _eval_row(title: str, e: dict[str, Any] | None, share: bool) -> tuple[str, ...]:
    if e is None:
        return (title, "not evaluated", "", "", "")
    return (
        title,
        score_text(e["score"], share),
        interval_text(e["low"], e["high"], share),
        str(e["n"]),
        str(e["step"]),
    )


def _unscored_sentences(evaluations: list[dict[str, Any]]) -> list[str]:
    """For each evaluation with answers that the reward failed on: how many zeros of its score are those."""
    return [
        f"After step {e['step']}, {failed} of the answers {failure_text(e['request'])}."
        for e in evaluations
        if (failed := e["request"].get("failed"))
    ]


def _interval_name(before: dict[str, Any] | None, after: dict[str, Any] | None, share: bool) -> str:
    """How the intervals were made; older journals, one draw a task, took Wilson's for shares."""
    named = dict.fromkeys(e["interval"] or ("Wilson" if share else "") for e in (before, after) if e)
    return f" ({', '.join(filter(None, named))})" if any(named) else ""


def _set_tables(sets: list[dict[str, Any]]) -> list[str]:
    """Every set with its pass@k and the like; nothing where the table above has said it all."""
    if len(sets) < 2 and not any(e["metrics"] for e in sets):
        return []
    rows: list[tuple[str, ...]] = []
    for e in sets:
        of = f"{e['n']} tasks, {e['draws']} draw{'s' * (e['draws'] != 1)} each"
        figures = {"score" if e["share"] else "mean reward": (e["score"], e["low"], e["high"]), **e["metrics"]}
        for name, (value, low, high) in figures.items():
            share = e["share"] or name.startswith(("pass@", "majority@"))
            rows.append((e["profile"], name, score_text(value, share), interval_text(low, high, share), of))
    table = markdown_table(("set", "metric", "value", "95 % interval", "of"), rows)
    return [f"### Every set after step {sets[0]['step']}", table]


def _interval_verdict(before: dict[str, Any] | None, after: dict[str, Any] | None) -> str:
    if before is None or after is None:
        return "Without both evaluations this run shows no effect."
    (low, high), (low_after, high_after) = compared_intervals(before, after)
    if low == high or low_after == high_after:
        return (
            "All tasks of one evaluation earned the same, so its interval has no width: it cannot tell the difference "
            "from chance."
        )
    if low > high_after or low_after > high:
        return "The intervals do not overlap: the difference is larger than chance on these tasks explains."
    return "The intervals overlap: this many tasks cannot tell the difference from chance."


def _curve_text(rewards: list[float | None]) -> str:
    known = {step: r for step, r in enumerate(rewards, 1) if r is not None}
    if not known:
        return "No reward was recorded."
    first, last = min(known), max(known)
    span = f"lowest {min(known.values()):.3f}, highest {max(known.values()):.3f}"
    curve = sparkline([math.nan if r is None else r for r in rewards[first - 1 : last]])
    return (
        f"`{curve}`\n\nMean reward from {known[first]:.3f} at step {first} to {known[last]:.3f} at step {last} "
        f"({span})."
    )


def _format_sample(sample: dict[str, Any]) -> str:
    reward = sample.get("reward")
    told = "reward not computed" if reward is None else f"reward {reward:g}"
    body = f"prompt  {sample.get('prompt', '')}\nwrote   {sample.get('text', '')}\nanswer  {sample.get('answer', '')}"
    fence = "`" * max(3, 1 + max((len(run) for run in _backtick_runs(body)), default=0))
    return f"{told}\n\n{fence}text\n{body}\n{fence}"


def _backtick_runs(text: str) -> list[str]:
    return "".join(c if c == "`" else " " for c in text).split()


def markdown_table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(_escape_cell(str(cell)) for cell in line) + " |" for line in lines)


def _escape_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def shared_text(shared: float, packed: float) -> str:
    """What context parallel ranks exchanged: 12.5 % of the tokens."""
    return (
        f"Tokens whose keys and values the ranks of cp gave each other: {shared / packed:.1%} of {packed:.0f}; all "
        "others lay whole on one rank."
    )
