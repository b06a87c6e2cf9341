"""Metrics: one schema of names `stage/what`, and the fold that turns the events of a step into one row of numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from rondel.core.events import (
    Evaluated,
    Event,
    GroupFinished,
    GroupsTaken,
    Replayed,
    Resident,
    Resumed,
    RewardCounts,
    Speculated,
    StepDone,
    Synced,
    Warned,
    WorkerTime,
    emit,
)
from rondel.runtime.telemetry.world_card import MEANING

SCHEMA: dict[str, tuple[str, str]] = {  # name -> (unit, meaning)
    "score/reward_mean": (
        "reward",
        "mean over the scored trajectories that finished since the last step, dropped groups included",
    ),
    "score/reward_std": ("reward", "standard deviation of the same"),
    "score/reward_min": ("reward", "smallest of the same"),
    "score/reward_max": ("reward", "largest of the same"),
    "score/length_correlation": ("number", "of reward and length within the groups that were trained, from -1 to 1"),
    "score/failed_fraction": ("share", "trajectories whose reward could not be computed; they are in no other number"),
    "filter/signal_fraction": (
        "share",
        "of groups of several answers, those whose rewards differ; where answers are compared, only these teach",
    ),
    "filter/dropped_fraction": ("share", "groups a filter refused, for any reason"),
    "generate/length_mean": ("tokens", "tokens the policy wrote in one trajectory"),
    "generate/length_p95": ("tokens", "95 % of the trajectories are at most this long"),
    "generate/length_max": ("tokens", "the longest trajectory"),
    "generate/repetition": (
        "share",
        "8-grams that one answer of each trained group had written before, in its last 2,000 tokens",
    ),
    "generate/tokens": ("tokens", "written since the last step, all trajectories together"),
    "generate/spread": (
        "distance",
        "root mean square of what the points of a group deviate from their mean, where the policy draws points: the "
        "diversity of its answers to one prompt",
    ),
    "generate/truncated_fraction": (
        "share",
        "trajectories cut at max_tokens, or whose context, budget or turns ran out",
    ),
    "episode/drift_share": (
        "share",
        "episodes whose tokens are not what the chat template would write of the same messages now (task.env.drift)",
    ),
    "episode/out_of_budget_share": ("share", "episodes that used up task.env.budget"),
    "episode/box_seconds": ("seconds", "that the sandbox of one episode was open, on average"),
    "episode/box_cpu_seconds": ("seconds", "of computing in the sandbox of one episode, on average"),
    "episode/box_memory_peak": ("bytes", "that the sandbox of one episode took at most"),
    "generate/guess_acceptance": ("share", "guessed tokens that stayed (engine.speculative)"),
    "generate/tokens_per_round": (
        "tokens",
        "a request's tokens of a step in which it guessed; plain decoding writes 1",
    ),
    "train/draft_loss": ("nats", "cross-entropy of the draft on the tokens that the policy wrote"),
    "train/loss": ("nats", "value of the surrogate; not a headline: it may be 0 while the policy learns"),
    "train/entropy": ("nats", "mean entropy of the policy at the tokens it wrote"),
    "train/kl_to_start": ("nats", "estimated KL of the policy to the weights the run started from"),
    "train/kl_ref": ("nats", "the KL term of the loss, to the reference"),
    "train/gap_mean": ("nats", "mean |log p(trainer) - log p(engine)| over the written tokens"),
    "train/gap_max": (
        "nats",
        "largest of the same; a single token: what warns is train/mismatch_k3_lag_0, above the bound of the run's "
        "precision",
    ),
    "train/gap_p99": ("nats", "99 % of the written tokens are at most so far apart"),
    "train/mismatch_k3": (
        "nats",
        "KL(engine || trainer) a token, estimated by w - 1 - log w with w = p(trainer) / p(engine)",
    ),
    "train/mismatch_probability_mean": ("share", "mean |p(trainer) - p(engine)|"),
    "train/mismatch_probability_max": ("share", "largest of the same"),
    "train/mismatch_perplexity_ratio": (
        "ratio",
        "the trainer's perplexity of an answer by the engine's, mean over the answers",
    ),
    "train/mismatch_chi2_token": ("number", "mean w² - 1"),
    "train/mismatch_chi2_sample": ("number", "the same with the weight of whole answers"),
    "train/mismatch_ess_token": ("share", "effective sample size (Σ w)² / (n·Σ w²)"),
    "train/mismatch_ess_sample": ("share", "the same with the weight of whole answers"),
    "train/mismatch_weight_mean": ("ratio", "mean of w; 1 where the tokens were drawn from what the engine says"),
    "train/mismatch_weight_std": ("ratio", "standard deviation of w"),
    "train/mismatch_weight_max": ("ratio", "largest w"),
    "train/clip_fraction": ("share", "tokens whose ratio the surrogate clipped"),
    "train/ratio_max_deviation": ("ratio", "largest |policy / proximal - 1|; 0 at the first update of a batch"),
    "train/correction": ("ratio", "mean weight of the proximal/behavior correction"),
    "train/correction_dropped": ("share", "tokens that the correction masked, rejected or vetoed: their weight is 0"),
    "train/correction_truncated": ("share", "tokens whose importance weight the bound of the correction held"),
    "train/correction_high": ("1", 'the bound of importance weights that the update chose (high = "auto")'),
    "train/correction_bias_squared": ("1", "of the mean of truncated weights at that bound"),
    "train/correction_variance": ("1", "of the mean of truncated weights at that bound"),
    "train/truncated_masked": (
        "answers",
        "answers that gave no gradient because the token limit cut them off: algo.mask_truncated",
    ),
    "train/not_computed": (
        "share",
        "tokens of answers that no pass read, for their advantage is 0 and so is their gradient; entropy, gap and K3 "
        "are of the others",
    ),
    "train/shared_tokens": (
        "tokens",
        "packed tokens whose keys and values the ranks of place.mesh.cp gave each other: of samples too long for one",
    ),
    "train/expert_load_imbalance": (
        "ratio",
        "tokens of a layer's busiest expert by the mean of its experts, mean over the layers; 1 is even (MaxVio + 1, "
        "arXiv:2408.15664)",
    ),
    "train/starved_experts": ("share", "experts to which no token of the step went"),
    "train/shapes": (
        "shapes",
        "different ones among the training passes of the step, where micro-batches have fixed shapes "
        "(trainer.micro_tokens)",
    ),
    "train/padding_share": ("share", "padding among the tokens that these passes computed"),
    "train/compiled_graphs": ("graphs", "compiled in this process so far, one for each shape and row"),
    "train/compile_s": ("s", "of the step in which shapes were compiled"),
    "train/grad_norm": ("norm", "global norm of the gradient before clipping"),
    "train/loss_scale": (
        "number",
        "what the loss is multiplied by before its backward pass in float16; doubles and halves",
    ),
    "train/overflows": (
        "updates",
        "updates of the step that float16 could not hold at that scale, and that were not taken",
    ),
    "train/lr": ("rate", "learning rate of this step"),
    "train/tokens": ("tokens", "trainable tokens of the batch"),
    "train/weights_changed": ("share", "weights the update changed; 0 means that nothing was learned"),
    "sync/seconds": ("s", "the weights' way from trainer to engine"),
    "sync/bytes_copied": ("bytes", "moved on that way; 0 when both share one copy"),
    "sync/paused": ("s", "in which the engines stood still for it alone"),
    "sync/probe_gap": ("nats", "difference of both sides on the probe prompt after the sync"),
    "loop/supervised": ("number", "1 in a step of the supervised phase (loop.warmup), which has a loss and no rewards"),
    "loop/lag_mean": ("versions", "weights' age at training: version trained minus version at admission"),
    "loop/lag_max": ("versions", "largest of the same; never above loop.max_staleness"),
    "loop/replayed_groups": ("groups", "of earlier steps, trained once more in this one (loop.replays)"),
    "loop/replayed_lag_max": ("versions", "age of the oldest of these; never above loop.replays.max_lag"),
    "loop/lag_limit": ("versions", "loop.max_staleness in this phase"),
    "loop/late_fraction": (
        "share",
        "groups given up because they would have been older than the limit (loop.oversample)",
    ),
    "generate/tail_length_ratio": (
        "ratio",
        "mean length in the half of the groups that finished last, by that in the half that finished first",
    ),
    "score/tail_reward_gap": (
        "reward",
        "mean reward in the half of the groups that finished last, minus that in the half that finished first",
    ),
    "loop/tokens_per_second": ("tokens/s", "written tokens over the whole step, training included"),
    "eval/score": (
        "reward",
        "mean reward on the held-out tasks at this version; where rewards are 0 or 1, the share that is solved",
    ),
    "eval/low": ("reward", "lower end of its 95 % interval"),
    "eval/high": ("reward", "upper end of its 95 % interval"),
}
SOURCES = 24  # more different ones are a column of the data, and no mixture
FAMILIES: dict[str, tuple[str, str]] = {  # names that begin so
    "score/reward_of_": ("reward", "mean reward of the tasks that one source of a mixture brought"),
    "eval/score_of_": ("reward", "mean reward on the held-out tasks of one source, at this version"),
    "eval/": (
        "reward",
        "of one held-out set at this version: score, low and high; with task.eval.samples above 1 avg@k, and pass@k "
        "and majority@k, which are shares",
    ),
    "score/part_": ("reward", "mean of a named part, with its weight, over the trained answers"),
    "episode/drift_": (
        "share",
        "episodes by the kind of their first drift: a thought that the template drops, a tool_call or whitespace that "
        "it writes otherwise, tokenization, other",
    ),
    "episode/out_of_": ("share", "episodes that used up one budget: tokens, turns, seconds, cost"),
    "score/judge_": (
        "number",
        "of a judge since the last step: calls, cache_hits, retries, unreadable, failures, seconds (all calls "
        "together)",
    ),
    "score/remote_": ("number", "of a remote reward since the last step: calls, retries, failures, seconds"),
    "score/model_": ("number", "of a reward model since the last step: texts, batches, tokens, seconds"),
    "time/": (
        "s",
        "a phase on the learner's path; time/step is their sum. With a worker's name, time/engine/idle, what that one "
        "did since it last told",
    ),
    "mem/": (
        "bytes",
        "peak on a shared device in a phase; with a name behind it, what was held of that at the phase's end; of a "
        "worker: rss, peak, and what it holds",
    ),
    "ledger/": ("groups", "what became of the groups issued so far"),
    "train/expert_load_imbalance_": ("ratio", "the same of one layer"),
    "train/shape_": ("passes", "training passes of one shape, tokens x trained tokens"),
    "train/route_margin_flipped_": (
        "score",
        "the same of tokens that chose otherwise than in the engine: above its max none did",
    ),
    "train/route_margin_": (
        "score",
        "quantile over tokens and layers of s_k - s_(k+1): the last chosen expert before the next",
    ),
    "train/mismatch_k3_tenth_": ("nats", "the K3 of the first, second, ... tenth of the answers"),
    "train/mismatch_k3_lag_": (
        "nats",
        "the K3 of tokens that were so many versions old; at lag 0 the run warns above the bound of its precision, "
        "which its card names: 1e-06 in float32, 5e-05 in float16, 0.003 in bfloat16, with a rounded residual stream "
        "0.0002 and 0.01, which is that of servers of others, too, 0.1 for mixtures of experts",
    ),
    "loop/lag_is_": ("share", "groups of this step that were so many versions old: the histogram of lag"),
}


# of a run with several policies, behind the name of each; "policy" is model.path's
OF_POLICY: dict[str, tuple[str, str]] = {
    "reward_mean": ("reward", "mean reward of its agents in the groups that were trained"),
    "length_mean": ("tokens", "tokens that it wrote in one of their trajectories"),
    "real_steps": ("steps", "that were played in the world, in the groups that were trained"),
    "imagined_steps": ("steps", "that the policy took in the model of the world"),
    "trusted": ("share", "episodes beside which something was imagined"),
} | {name: ("number", f"{meaning}, on episodes before they are trained on") for name, meaning in MEANING.items()}


def metric_meaning(name: str) -> tuple[str, str] | None:
    """(unit, meaning) of a metric; None for one that only the run's own trainer or algorithm knows.

    critic/gap_max is train/gap_max of the policy that the recipe calls "critic".
    """
    if told := SCHEMA.get(name) or _of_family(name):
        return told
    policy, _, what = name.partition("/")
    told = OF_POLICY.get(what) or SCHEMA.get(f"train/{what}") or _of_family(f"train/{what}")
    return (told[0], f"{told[1]}; of the policy '{policy}'") if told else None


def _of_family(name: str) -> tuple[str, str] | None:
    return next((what for prefix, what in FAMILIES.items() if name.startswith(prefix)), None)


def from_groups(finished: Iterable[GroupFinished]) -> dict[str, float]:
    """Score, Filter and Generate of one step. Nothing finished, nothing said: a missing number is not a 0."""
    finished = list(finished)
    rewards = [r for group in finished for r in group.rewards]
    lengths = sorted(n for group in finished for n in group.lengths)
    row: dict[str, float] = {}
    if finished:
        if several := [group for group in finished if len(group.lengths) > 1]:
            row["filter/signal_fraction"] = sum(len(set(g.rewards)) > 1 for g in several) / len(several)
        row["filter/dropped_fraction"] = sum(not g.kept for g in finished) / len(finished)
    if rewards:
        mean = math.fsum(rewards) / len(rewards)
        row["score/reward_mean"] = mean
        row["score/reward_std"] = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))
        row["score/reward_min"], row["score/reward_max"] = min(rewards), max(rewards)
    of: dict[str, list[float]] = {}
    for group in finished:
        of.setdefault(group.source, []).extend(group.rewards)
    if 1 < len(of) <= SOURCES:
        row |= {f"score/reward_of_{name or 'others'}": math.fsum(own) / len(own) for name, own in of.items() if own}
    if lengths:
        row["score/failed_fraction"] = sum(g.failed for g in finished) / len(lengths)
        row["generate/length_mean"] = sum(lengths) / len(lengths)
        row["generate/length_p95"] = lengths[math.ceil(0.95 * len(lengths)) - 1]  # nearest rank
        row["generate/length_max"] = lengths[-1]
        row["generate/tokens"] = sum(lengths)
        row["generate/truncated_fraction"] = sum(g.truncated for g in finished) / len(lengths)
        row |= from_episodes(finished, len(lengths))
    return row


def from_episodes(finished: list[GroupFinished], n: int) -> dict[str, float]:
    """What became of the n episodes beside their rewards; nothing where there was no drift and no budget ended."""
    counts = sum((Counter(group.episodes) for group in finished), Counter[str]())
    row = {f"episode/{name}": count / n for name, count in counts.items()}
    for begin, name in (("drift_", "drift_share"), ("out_of_", "out_of_budget_share")):
        if of := [count for what, count in counts.items() if what.startswith(begin)]:
            row[f"episode/{name}"] = sum(of) / n
    boxes = add_boxes(group.boxes for group in finished)
    for what, name in (("seconds", "box_seconds"), ("cpu", "box_cpu_seconds")):
        if what in boxes:
            row[f"episode/{name}"] = boxes[what] / boxes["episodes"]
    if "peak" in boxes:
        row["episode/box_memory_peak"] = boxes["peak"]
    return row


def add_boxes(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """[{"episodes": 8, "seconds": 41.2, "cpu": 3.1, "peak": 3e7}, {}] -> their sums, and the largest peak."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = max(total.get(name, 0.0), value) if name == "peak" else total.get(name, 0.0) + value
    return total


def from_tail(finished: Iterable[GroupFinished]) -> dict[str, float]:
    """Whether who finishes late is other than who finishes first. The events are in order of finishing."""
    written = [group for group in finished if group.lengths]
    halves = written[: len(written) // 2], written[(len(written) + 1) // 2 :]
    row: dict[str, float] = {}
    first, last = ([n for group in half for n in group.lengths] for half in halves)
    if sum(first) and last:
        row["generate/tail_length_ratio"] = (sum(last) / len(last)) / (sum(first) / len(first))
    earned, after = ([r for group in half for r in group.rewards] for half in halves)
    if earned and after:
        row["score/tail_reward_gap"] = math.fsum(after) / len(after) - math.fsum(earned) / len(earned)
    return row


class LateBias:
    """Says it once, if taking the first to finish leaves out what would have earned more, or less.

    Of each step with late groups the gap between the rewards of those that finished last
    and first; warns where the mean of at least STEPS of them is SIGMAS standard errors from 0.
    """

    STEPS, SIGMAS = 8, 3.0

    def __init__(self) -> None:
        self.gaps: dict[int, float] = {}  # by step
        self.told = False

    def write(self, step: int, row: dict[str, float]) -> None:
        """A step that is told again is repeated by a run that went back, and so is what followed it."""
        if "score/tail_reward_gap" not in row:  # an evaluation, or a step of the warmup
            return
        self.gaps = {earlier: gap for earlier, gap in self.gaps.items() if earlier < step}
        if not row.get("loop/late_fraction") or self.told:
            return
        self.gaps[step] = row["score/tail_reward_gap"]
        n = len(self.gaps)
        mean = math.fsum(self.gaps.values()) / n
        error = math.sqrt(math.fsum((gap - mean) ** 2 for gap in self.gaps.values()) / max(1, n - 1) / n)
        self.told = n >= self.STEPS and abs(mean) > self.SIGMAS * error
        if self.told:
            less = "less" if mean < 0 else "more"
            emit(
                Warned(
                    f"groups that finish last earn {abs(mean):.2g} {less} than those that finish first, and "
                    f"loop.oversample gives up who is later still: "
                    "the training reward is not that of the tasks, and what takes long is trained less. Trust held-out "
                    "evaluations; "
                    "loop.max_staleness with oversample = 0 loses nobody"
                )
            )


def from_guesses(told: list[Speculated]) -> dict[str, float]:
    """Speculative decoding in one step of the loop; nothing where nothing was guessed."""
    rounds, proposed, accepted = (sum(getattr(e, name) for e in told) for name in ("rounds", "proposed", "accepted"))
    return (
        {"generate/guess_acceptance": accepted / proposed, "generate/tokens_per_round": 1 + accepted / rounds}
        if proposed
        else {}
    )


def from_taken(taken: GroupsTaken) -> dict[str, float]:
    """How old the consumed groups were. lag = version trained - version at admission."""
    lags = [taken.version - group.born for group in taken.groups]
    if not lags:
        return {}
    histogram = {f"loop/lag_is_{lag}": n / len(lags) for lag, n in sorted(Counter(lags).items())}
    return {
        "loop/lag_mean": sum(lags) / len(lags),
        "loop/lag_max": max(lags),
        "loop/lag_limit": taken.limit,
        **histogram,
    }


def from_evaluation(event: Evaluated, *, main: bool) -> dict[str, float]:
    """The numbers of one set: `eval/score` of the main one, `eval/aime/score` of another, `eval/aime/pass@4` of
    every one that draws its tasks more than once.
    """
    own = f"eval/{event.profile}/"
    prefix = "eval/" if main else own
    row = {f"{prefix}score": event.score, f"{prefix}low": event.low, f"{prefix}high": event.high}
    row |= {f"{prefix}score_of_{name}": score for name, score in event.of.items()}
    return row | {f"{own}{name}": value for name, (value, _, _) in event.metrics.items()}


class StepMetrics:
    """The reader that gathers events between two StepDones: `subscribe(StepMetrics(sink.write, progress.row).read)`.

    Each writer is called `writer(step, row)`, once for each step, and once for each evaluation with its eval/ numbers.

    held    bytes of tenants by worker, as it last told
    """

    def __init__(self, *writers: Callable[[int, dict[str, float]], None]) -> None:
        self.writers = writers
        self.held: dict[str, dict[str, int]] = {}
        self._finished: list[GroupFinished] = []
        self._guesses: list[Speculated] = []
        self._row: dict[str, float] = {}
        self._book: dict[str, int] | None = {}  # of the step before; None: a resumed run has not told it
        self._main_set = ""

    def on_event(self, event: Event) -> None:
        match event:
            case GroupFinished() if event.supervised:
                self._row["loop/supervised"] = 1.0
            case GroupFinished() if event.lengths:  # one that was given up has nothing to say
                self._finished.append(event)
            case RewardCounts():
                for name, value in event.counts.items():
                    self._row[f"score/{name}"] = self._row.get(f"score/{name}", 0) + value
            case Speculated():
                self._guesses.append(event)
            case GroupsTaken():
                self._row |= from_taken(event)
            case Replayed():
                self._row |= {"loop/replayed_groups": len(event.groups), "loop/replayed_lag_max": event.oldest}
            case Synced():
                self._row |= {"sync/seconds": event.seconds, "sync/bytes_copied": event.bytes_copied}
                self._row |= {"sync/probe_gap": event.probe_gap, "sync/paused": event.paused}
            case Resident():
                self._row |= {f"mem/{phase}": peak for phase, peak in event.peak.items()}
                self._row |= {
                    f"mem/{phase}_{who}": n for phase, held in event.held.items() for who, n in held.items() if n
                }
            case WorkerTime():
                for kind, seconds in event.seconds.items():
                    name = f"time/{event.worker}/{kind}"
                    self._row[name] = self._row.get(name, 0.0) + seconds
                self._row |= {f"mem/{event.worker}/{what}": n for what, n in event.memory.items()}
                self.held[event.worker] = event.memory
            case Evaluated():
                self._main_set = self._main_set or event.profile  # of several sets the main one is told first
                self._write_row(event.step, from_evaluation(event, main=event.profile == self._main_set))
            case StepDone():
                self._write_row(event.step, self._complete_row(event))
                self._finished, self._guesses, self._row = [], [], {}
            case Resumed():
                self._finished, self._guesses, self._row = [], [], {}
                self._book = None if event.step else {}

    def _complete_row(self, done: StepDone) -> dict[str, float]:
        row = (
            from_groups(self._finished)
            | from_tail(self._finished)
            | self._late_fraction(done)
            | from_guesses(self._guesses)
            | self._row
            | done.metrics
        )
        row |= {f"time/{phase}": seconds for phase, seconds in done.seconds.items()}
        row |= {f"ledger/{name}": count for name, count in done.ledger.items()}
        if "generate/tokens" in row and done.seconds.get("step"):
            row["loop/tokens_per_second"] = row["generate/tokens"] / done.seconds["step"]
        return row

    def _late_fraction(self, done: StepDone) -> dict[str, float]:
        """Who has been given up since the last step, among these and the trained. Each phase has a ledger of its own."""
        before, self._book = self._book, {} if "loop/supervised" in self._row else done.ledger
        if before is None:
            return {}
        late, trained = (done.ledger.get(name, 0) - before.get(name, 0) for name in ("filtered/late", "trained"))
        return {"loop/late_fraction": late / (late + trained)} if late else {}

    def _write_row(self, step: int, row: dict[str, float]) -> None:
        for writer in self.writers:
            writer(step, row)
