"""`rondel check-env`: is an environment fit to be trained in? Scripts play it, at a
policy's best and worst, before a model does.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rondel.assemble.components import LENDS, env_of
from rondel.assemble.recipe_parts import sampling_of
from rondel.assemble.workers import sight_within
from rondel.checks.scripted_policy import (
    RequestBarrier,
    Script,
    ScriptedEpisode,
    ScriptedStage,
    build_scripts,
    knows_gold,
)
from rondel.core.config.job import Job
from rondel.core.errors import RondelError
from rondel.core.types import Failed, Score, Task
from rondel.driver.event_loop_watchdog import EventLoopWatchdog
from rondel.generate.envs.sources import load_tasks
from rondel.generate.envs.tools import Tools
from rondel.models.load import tokenizer_of
from rondel.score import reward_urls
from rondel.score.pool import RewardPool
from rondel.score.preflight import PAID, CheckFinding, Scores, judge_scores, p95
from rondel.score.result import check_score, read_score

JUDGED = ("gold", "empty", "wrong")
ODD = 5  # tasks for scripts that no answer deserves
TOGETHER = 4  # episodes at once
SHORT = 0.02  # seconds of them all: what is below is noise
PATIENCE = 5.0  # seconds for the slowest of them to ask, once another has


@dataclass
class EnvironmentReport:
    """What was found, and what was measured: seconds as figures["env_median_s"], a share as figures["together"]."""

    findings: list[CheckFinding]
    figures: dict[str, float]

    @property
    def ok(self) -> bool:
        return all(finding.ok for finding in self.findings)


def check_env(job: Job, *, n: int = 20, timeout: float = 60.0, patience: float = PATIENCE) -> EnvironmentReport:
    """The first n tasks of a recipe in its environment, under its reward. A fault of the recipe is a finding, too."""
    try:
        found = load_tasks(job.task.data, env=job.task.env_kind)
        env, tasks = env_of(job, found), found.train[: min(n, PAID) if reward_urls(job.task.reward_spec) else n]
        tokenizer, context, sight = tokenizer_of(job.model.path)
        sight = sight_within(job, sight, str(job.model.path))
        stage = ScriptedStage(env, tokenizer, sampling_of(job), context, job.task.system, timeout, sight)
    except RondelError as error:
        return EnvironmentReport([CheckFinding("recipe", False, str(error), "see the message")], {})
    pool: list[RewardPool] = []
    try:
        return asyncio.run(_Check(job, stage, tasks, patience, pool).run())
    except RondelError as error:  # a reward that cannot be made
        return EnvironmentReport([CheckFinding("reward", False, str(error), "see the message")], {})
    finally:
        for one in pool:
            one.close()


class _Check:
    def __init__(
        self, job: Job, stage: ScriptedStage, tasks: Sequence[Task], patience: float, pool: list[RewardPool]
    ) -> None:
        self.job, self.stage, self.tasks, self.patience, self.pool = job, stage, tasks, patience, pool
        self.scripts = build_scripts(stage.tokenizer, tasks, stage.env)
        self.figures: dict[str, float] = {"tasks": len(tasks)}
        self.own = 0  # episodes that the environment scored itself
        self.rewards: list[float] = []  # seconds of its calls

    async def run(self) -> EnvironmentReport:
        opened = _count_tool_instances(self.stage.env)
        with EventLoopWatchdog() as stalls:
            played = await self._all_of_them()
            again, together, alone, at_once = await self._at_once()
            await self.stage.play_episode("dies", self.tasks[0], self.scripts["empty"], dies=True)
        left = await _leftover_tasks()
        everything = [*played, *again, *at_once]
        found = [self._check_faults(everything), _check_record(everything), self._check_budget(everything)]
        found += await self._check_scores(played)
        found += [
            _check_closed(opened, left),
            CheckFinding(
                "blocking",
                not stalls.longest,
                f"the event loop stood still for {stalls.describe()}"
                if stalls.longest
                else "other episodes go on meanwhile",
                "await what waits, or call it through asyncio.to_thread: one that blocks stops every episode of the "
                "run",
            ),
            self._check_concurrency(together, alone, at_once),
            self._check_determinism(played, again),
            *self._check_times(played),
        ]
        self.figures["stall_s"] = stalls.longest
        return EnvironmentReport(found, self.figures)

    async def _all_of_them(self) -> list[ScriptedEpisode]:
        """Every script on every task that it suits, a few episodes at a time."""
        lanes = asyncio.Semaphore(TOGETHER)

        async def play_one(name: str, task: Task, script: Script) -> ScriptedEpisode:
            async with lanes:
                return await self.stage.play_episode(name, task, script)

        asked = []
        for name, script in self.scripts.items():
            tasks = self.tasks if name in JUDGED else self.tasks[:ODD]
            asked += [
                play_one(name, task, script) for task in tasks if name != "gold" or knows_gold(self.stage.env, task)
            ]
        return list(await asyncio.gather(*asked))

    async def _at_once(self) -> tuple[list[ScriptedEpisode], int, float, list[ScriptedEpisode]]:
        """The same few episodes one after the other, and at once. -> the former, how many
        met, the seconds of one, the latter.
        """
        loop, few = asyncio.get_running_loop(), self.tasks[:TOGETHER]
        began = loop.time()
        again = [await self.stage.play_episode("wrong", task, self.scripts["wrong"]) for task in few]
        alone = loop.time() - began
        began = loop.time()
        await asyncio.gather(*(self.stage.play_episode("wrong", task, self.scripts["wrong"]) for task in few))
        self.figures["together"] = (loop.time() - began) / max(alone, 1e-9)
        meeting = RequestBarrier(len(few), self.patience)
        met = await asyncio.gather(
            *(self.stage.play_episode("wrong", task, self.scripts["wrong"], meeting=meeting) for task in few)
        )
        return again, meeting.most, alone, list(met)

    def _check_faults(self, played: list[ScriptedEpisode]) -> CheckFinding:
        faults = [p for p in played if p.fault]
        if not faults:
            return CheckFinding(
                "runs", True, f"{len(played)} episodes of {len(self.scripts)} scripts ended without a fault"
            )
        message = f"{len(faults)} of {len(played)} episodes broke; {faults[0].episode_label}: {faults[0].fault}"
        return CheckFinding(
            "runs",
            False,
            message,
            "whatever the policy writes is an answer to read or to score; raise only when the world breaks",
        )

    def _check_budget(self, played: list[ScriptedEpisode]) -> CheckFinding:
        rule = (
            "give messages through chat.give alone, and end the episode when reply() says 'length' or the turns "
            "are over"
        )
        for p in played:
            longest = max((len(t.tokens) for t in p.trajectories), default=0)
            if longest > self.stage.max_context:
                return CheckFinding(
                    "budget",
                    False,
                    f"{p.episode_label}: {longest} tokens, the context holds {self.stage.max_context}",
                    rule,
                )
            if any(r.sampling.max_tokens > self.stage.sampling.max_tokens for r, _ in p.actor.drawn):
                return CheckFinding(
                    "budget", False, f"{p.episode_label}: it asks for more than engine.sampling.max_tokens", rule
                )
            if p.actor.asked > self.stage.max_turns or f"of at most {self.stage.max_turns}" in p.fault:
                return CheckFinding(
                    "budget", False, f"{p.episode_label}: more than {self.stage.max_turns} replies", rule
                )
        turns = max(p.actor.asked for p in played)
        longest = max((len(t.tokens) for p in played for t in p.trajectories), default=0)
        self.figures |= {"turns": turns, "tokens": longest}
        return CheckFinding(
            "budget", True, f"at most {turns} replies and {longest} tokens an episode, of {self.stage.max_context}"
        )

    async def _check_scores(self, played: list[ScriptedEpisode]) -> list[CheckFinding]:
        scores: Scores = {name: [] for name in JUDGED}
        failed: list[tuple[str, Task, Failed]] = []
        values: list[float] = []
        ended = [p for p in played if p.trajectories and not p.fault]
        for p in ended:
            score = await self._score_episode(p)
            if isinstance(score, Failed):
                failed.append((p.script, p.task, score))
                continue
            values.append(score.value)
            if p.script in scores:
                scores[p.script].append((p.task, p.trajectories[0].text, score))
        by = "the environment" if self.own else "the reward"
        if values:
            self.figures |= {"score_min": min(values), "score_max": max(values)}
        where = (
            f"of {len(values)} episodes {by} scores between {min(values):g} and {max(values):g}"
            if values
            else "no episode has a score"
        )
        found = [CheckFinding("scores", bool(values), where, "set chat.trajectory.score, or task.reward")]
        if not any(p.script == "gold" for p in played):
            told = "no task has an 'answer' and the environment no gold(task), so gold was not tried"
            return [
                *found,
                CheckFinding("gold", True, told),
                *judge_scores({"gold": [], "empty": [], "wrong": []}, failed, len(ended))[:1],
            ]
        maximum = getattr(self.stage.env, "maximum", None) if self.own else self.pool[0].maximum if self.pool else None
        return found + judge_scores(scores, failed, len(ended), maximum)

    async def _score_episode(self, played: ScriptedEpisode) -> Score | Failed:
        root = played.trajectories[0]
        if root.score is not None:
            self.own += 1
            return check_score(root.score if isinstance(root.score, Failed) else read_score(root.score), root)
        if not self.pool:
            spec, calls = self.job.task.reward_spec, self.job.task.reward_calls
            self.pool.append(RewardPool(spec, workers=calls.workers, timeout=calls.timeout, lends=LENDS))
        began = asyncio.get_running_loop().time()
        score = await self.pool[0].score(root, played.task)
        self.rewards.append(asyncio.get_running_loop().time() - began)
        return score

    def _check_concurrency(self, met: int, alone: float, at_once: list[ScriptedEpisode]) -> CheckFinding:
        n, ratio = len(at_once), self.figures["together"]
        if met < n:
            message = f"of {n} episodes begun at once {met} asked the policy; the others waited for these to end"
            return CheckFinding("together", False, message, "no lock around an episode: give each a world of its own")
        took = (
            f"they take {ratio:.2f} of the time of one after the other"
            if alone > SHORT
            else "they are too short to compare their times"
        )
        return CheckFinding("together", True, f"{n} episodes at once ask side by side; {took}")

    def _check_determinism(self, played: list[ScriptedEpisode], again: list[ScriptedEpisode]) -> CheckFinding:
        """Told, and not required: the world may draw."""
        first = {p.task.id: p.environment_tokens for p in played if p.script == "wrong"}
        other = sum(first[p.task.id] != p.environment_tokens for p in again)
        self.figures["differ"] = other
        said = (
            f"{other} of {len(again)} differ in what the environment gives: a resumed run will not be bit-equal"
            if other
            else "the same tokens"
        )
        return CheckFinding("same twice", True, said)

    def _check_times(self, played: list[ScriptedEpisode]) -> list[CheckFinding]:
        def time_finding(what: str, seconds: list[float]) -> CheckFinding:
            self.figures |= {f"{what}_median_s": statistics.median(seconds), f"{what}_p95_s": p95(seconds)}
            return CheckFinding(
                f"time: {what}",
                True,
                f"{statistics.median(seconds) * 1e3:.1f} ms a call, 95 % within {p95(seconds) * 1e3:.1f} ms",
            )

        calls = [p.seconds / max(1, p.actor.asked) for p in played]
        return [time_finding("env", calls), *([time_finding("reward", self.rewards)] if self.rewards else [])]


def _check_record(played: list[ScriptedEpisode]) -> CheckFinding:
    wrong = [(p, said) for p in played if (said := p.find_misrecording())]
    if not wrong:
        return CheckFinding("record", True, "every token is masked as given, or is one that the policy drew there")
    p, said = wrong[0]
    return CheckFinding(
        "record", False, f"{p.episode_label}: {said}", "leave chat.trajectory to the chat: give() and reply() write it"
    )


def _count_tool_instances(env: Any) -> dict[str, list[int]]:
    """Tools of a class are made and closed under count: name -> [made, closed]."""
    counts: dict[str, list[int]] = {}
    if not isinstance(env, Tools):
        return counts
    for place, one in enumerate(env.classes):
        if isinstance(one, type) and hasattr(one, "close"):
            env.classes[place] = _counting_class(one, counts.setdefault(one.__name__, [0, 0]))
    return counts


def _counting_class(one: type, count: list[int]) -> type:
    class CallCounts(one):  # type: ignore[misc]
        def __init__(self, task: Task) -> None:
            super().__init__(task)
            count[0] += 1

        def close(self) -> Any:
            count[1] += 1
            return super().close()

    CallCounts.__name__ = one.__name__
    return CallCounts


async def _leftover_tasks() -> int:
    """Tasks of the event loop that outlive their episodes."""
    for _ in range(60):
        left = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        if not left:
            break
        await asyncio.sleep(0.05)
    return len(left)


def _check_closed(opened: dict[str, list[int]], left: int) -> CheckFinding:
    open_still = {name: made - closed for name, (made, closed) in opened.items() if made != closed}
    if open_still or left:
        what = ", ".join(
            [*(f"{n} {name}" for name, n in open_still.items()), *([f"{left} tasks of the event loop"] if left else [])]
        )
        return CheckFinding(
            "closed",
            False,
            f"left open behind the last episode: {what}",
            "end what an episode began in a finally, or in close()",
        )
    tools = ", ".join(f"{made} {name}" for name, (made, _) in opened.items())
    return CheckFinding("closed", True, f"nothing is left open{f'; closed: {tools}' if tools else ''}")
