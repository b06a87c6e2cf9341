"""Generate, Score and what joins them to Train, as functions that the loop calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rondel.assemble.refusals import refuse_unanswered, refuse_unwritable
from rondel.core.config.job import Job
from rondel.core.errors import ConfigError, DataError, ends_the_run, error_boundary, error_text
from rondel.core.protocols import DemonstratingEnv, EnvByTask, GoldEnv, SelfScoringEnv
from rondel.core.registry import find_registered, refuse_uncallable
from rondel.core.types import (
    DATA,
    DROPPED,
    GREEDY,
    POLICY,
    Completion,
    EnvFault,
    Failed,
    Group,
    Request,
    Sampling,
    Score,
    Slot,
    Task,
    Trajectory,
    sample_key,
)
from rondel.driver.demonstration_stream import DemonstrationStream
from rondel.driver.prompt_visit import PromptVisit
from rondel.driver.step_watch import CURRENT_ANSWER, StepWatch
from rondel.driver.teacher_prompts import write_teacher_prompts
from rondel.generate.engine.resumption import end_at_stop, generate_until_done
from rondel.generate.envs.chat import TokenChat
from rondel.generate.envs.demonstrations import Demonstrate, GoldEpisode
from rondel.generate.envs.episode import (
    assign_parents,
    episode_of,
    join_episodes,
    refuse_miscast,
    refuse_other_temperature,
    refuse_untrainable,
    refuse_wide,
    refuse_without_support,
    share_scores,
)
from rondel.generate.envs.order import ShuffledOrder
from rondel.generate.envs.sources import TaskSet, load_tasks
from rondel.generate.template import Template
from rondel.score.result import check_score
from rondel.system.loop_turns import TURN_TOKENS
from rondel.text.unicode import valid_unicode
from rondel.train.pack import TrainBatch, TrainSample, train_samples

if TYPE_CHECKING:
    from rondel.algos.table import Algorithm
    from rondel.assemble.run_components import Components

# in the place of a sample's number in a key: of demonstrations, of those among samples, of noise that a group shares
DEMONSTRATED, SHOWN, SHARED = -1, -2, -3


@dataclass
class GroupRollouts:
    """Generate and Score for one phase. `watch`: where steps are scored while answers are written."""

    parts: Components
    group_size: int
    guides: int = 0
    greedy: bool = False
    watch: StepWatch | None = None

    def __post_init__(self) -> None:
        """What the recipe says of every episode is read here, once."""
        job = self.parts.job
        self.seed, self.system, self.cast = job.loop.seed, job.task.system, job.agent_policies
        self.failures = None if self.parts.failures.is_unlimited else self.parts.failures
        self.asks_again = any(row.advantage.asks_again for row in self.parts.rows.all_rows)
        self.contexts = [] if job.model.teacher is None else [teacher.context for teacher in job.model.teachers]

    async def generate_group(self, slot: Slot) -> Group:
        """G trajectories at once, each scored as soon as it is written, while its siblings still are."""
        visit = self._open_visit(slot)
        episodes = await self._run_round(slot, 0)
        while visit is not None and visit.should_ask_again(episodes):
            episodes = await self._run_round(slot, visit.rounds * (self.group_size + 1))
        if visit is not None:
            episodes = visit.close()
        group = Group(slot.number, slot.task, join_episodes(episodes), slot.born)
        if self.contexts and self.parts.rows.needs_teacher(slot.task.stream):
            info = self.parts.model_info
            write_teacher_prompts(group, self.contexts, Template(info.tokenizer, None), info.max_context)
        return group

    def _open_visit(self, slot: Slot) -> PromptVisit | None:
        """Of a row that asks a prompt again while none of its answers is right."""
        if not self.asks_again:
            return None
        rule = self.parts.rows.row_of(slot.task.stream).advantage.asks_again
        return None if rule is None else PromptVisit(slot.task.id, self.seed, slot.number, *rule)

    async def _run_round(self, slot: Slot, first: int) -> list[list[Trajectory]]:
        """G scored episodes whose numbers begin with `first`, and in the first round what stands beside them."""
        asked = [self._run_scored_episode(slot, first + index) for index in range(self.group_size)]
        if self.greedy and not first:
            asked.append(self._run_scored_episode(slot, self.group_size, GREEDY))
        if not first:
            asked += [self._demonstrate_task(slot, DATA) for _ in range(self._guides_of(slot.task))]
        episodes = list(await asyncio.gather(*asked))
        if self.scores_together:
            await self._score_together(slot, episodes, first)
        return episodes

    def _guides_of(self, task: Task) -> int:
        """Demonstrations in a group: another row than the one that asks for them would train them as its own samples."""
        return self.guides if self.guides and "guidance" in self.parts.rows.row_of(task.stream).needs else 0

    @property
    def scores_together(self) -> bool:
        """Whether the reward sees the answers to a task in one call."""
        return self.parts.pool is not None and self.parts.pool.groupwise

    async def _demonstrate_task(self, slot: Slot, policy: str) -> list[Trajectory]:
        section, env = self.parts.job.task, self.parts.env
        if isinstance(env, DemonstratingEnv):
            return [self.demonstrate_by_env(env, slot.task, sample_key(self.seed, slot.number, DEMONSTRATED), policy)]
        if isinstance(env, GoldEnv):
            return await GoldEpisode(env, policy=policy).run(slot.task, self.open_chat(lambda turn: 0))
        shows = Demonstrate(
            suffix=section.suffix, system=section.system, examples=section.shown_examples, policy=policy
        )
        return [await shows.run(slot.task, self.open_chat(lambda turn: 0))]

    def demonstrate_by_env(self, env: DemonstratingEnv, task: Task, key: int, policy: str = POLICY) -> Trajectory:
        """Its own demonstration, drawn by `key`."""
        trajectory = env.demonstrate(task, self.open_chat(lambda turn: key), key)
        trajectory.policy = policy
        return trajectory

    async def _run_scored_episode(self, slot: Slot, index: int, policy: str = POLICY) -> list[Trajectory]:
        """One that is scored, or a failure; while a run pauses it is asked for again: the world's
        fault anew, a reward's of the same answer.
        """
        async with self.watched(slot.task):
            return await self._score_until_settled(slot, index, policy)

    def watched(self, task: Task) -> AbstractAsyncContextManager[Any]:
        """Around an episode and its score."""
        return nullcontext() if self.watch is None else self.watch.open(task)

    async def _score_until_settled(self, slot: Slot, index: int, policy: str) -> list[Trajectory]:
        episode = assign_parents(await self._sample_episode(slot, index, policy))
        if self.scores_together:  # when its siblings are there
            return episode
        await self.score_episode(episode, slot.task)
        while not _is_dropped(episode[0]) and self.failures and await self.failures.should_retry(episode[0].score):
            if isinstance(episode[0].outcome, EnvFault):
                episode = assign_parents(await self._sample_episode(slot, index, policy))
            for trajectory in episode:
                trajectory.score = None if isinstance(trajectory.score, Failed) else trajectory.score
            await self.score_episode(episode, slot.task)
        return episode

    async def _score_together(self, slot: Slot, episodes: list[list[Trajectory]], first: int = 0) -> None:
        """A groupwise reward sees all answers in one call. While a run pauses all are asked for again, and those that
        the world broke are played again first.
        """
        asked = [i for i, episode in enumerate(episodes) if episode[0].score is None]
        while True:
            unscored = [t for i in asked for t in episodes[i] if t.score is None]  # branches with them
            await self.score_episodes(episodes, slot.task)
            scores = [episode[0].score for episode in episodes if not _is_dropped(episode[0])]
            if self.failures is None or not any([await self.failures.should_retry(score) for score in scores]):
                return
            for trajectory in unscored:
                trajectory.score = None
            for i in asked:
                if isinstance(episodes[i][0].outcome, EnvFault):
                    policy = GREEDY if i == self.group_size else POLICY
                    episodes[i] = assign_parents(await self._sample_episode(slot, first + i, policy))

    async def _sample_episode(self, slot: Slot, index: int, policy: str = POLICY) -> list[Trajectory]:
        sampling = replace(self.parts.sampling, temperature=0.0) if policy == GREEDY else None
        key = partial(sample_key, self.seed, slot.number, index)

        def open_chat() -> TokenChat:
            chat = self.open_chat(key, sampling, group=f"group-{slot.number}")
            chat.group_key = sample_key(self.seed, slot.number, SHARED)
            return chat

        episode = await self.run_episode(slot.task, open_chat)
        for trajectory in episode:
            trajectory.policy = trajectory.policy if policy == POLICY else policy
            refuse_without_support(trajectory, self.parts.sampling)
        return episode

    async def run_episode(self, task: Task, chat: Callable[[], TokenChat]) -> list[Trajectory]:
        """One episode. An environment that breaks is tried once more, then it is a fault, which is data."""
        reason = ""
        for _ in range(2):
            opened = chat()
            try:
                episode = await opened.episode.finish(await episode_of(self.parts.env, task, opened))
                for trajectory in episode:
                    refuse_miscast(trajectory, self.cast)
                return episode
            except (Exception, SystemExit) as error:
                if ends_the_run(error):
                    raise
                # without it an environment may well fail: that is the policy's doing, and the reward judges what was
                # written; of one that scores itself nobody else knows what it is worth
                over = opened.episode
                if over.is_out_of_budget and (over.drops or not self._is_scored_by_env(task)):
                    return await over.rescue()
                reason = valid_unicode(error_text(error))
        return [Trajectory(outcome=EnvFault(reason))]

    def _is_scored_by_env(self, task: Task) -> bool:
        env = self.parts.env
        own = env.envs[task.env] if isinstance(env, EnvByTask) else env
        return isinstance(own, SelfScoringEnv) and own.scores_itself

    def open_chat(
        self, key: Callable[[int], int], sampling: Sampling | None = None, namespace: str = "", group: str = ""
    ) -> TokenChat:
        p = self.parts

        async def ask_engine(request: Request) -> Completion:
            done = await p.engine.generate(request)
            cut = done.finish_reason == "abort"
            if cut:
                done = await generate_until_done(p.engine.generate, request, done)
            # a server, too, draws in pieces where weights come
            if done.text is not None and (cut or len(set(done.versions)) > 1):
                done = await end_at_stop(p.model_info.tokenizer, done, request.sampling)
            return done

        async def generate(request):
            request.namespace, request.id = namespace, group
            if sampling is None:  # an environment may have changed it
                refuse_untrainable(request.sampling)
                refuse_other_temperature(request.sampling, p.sampling.temperature)
            if p.replays_routing and sampling is None:
                request.wants |= {"experts"}
            if sampling is None:
                request.wants |= p.behavior_wants
            if sampling is not None or not (p.sampling.truncates_support or request.sampling.truncates_support):
                return await ask_engine(request)
            request.wants |= {"support"}
            done = await ask_engine(request)
            refuse_wide(done.support or [], request.sampling)
            done.support = [None if ids is None else np.asarray(ids, np.int32) for ids in done.support or []]
            return done

        episode = p.episodes()
        episode.watcher = CURRENT_ANSWER.get()
        if sampling is None:
            episode.commands = p.commands
        else:  # what is measured is scored, however it ended
            episode.drops, episode.is_measured = False, True
        return TokenChat(
            p.model_info.tokenizer,
            generate,
            sampling=sampling or p.sampling,
            key=key,
            max_context=p.model_info.max_context,
            system=self.system,
            sight=p.model_info.sight,
            cast=self.cast,
            episode=episode,
            stop_ids=p.model_info.stop_ids,
        )

    async def score(self, group: Group) -> None:
        """Whoever has no score yet: what was shown, and not written."""
        await asyncio.gather(*(self._score_trajectory(t, group.task) for t in group.trajectories if t.score is None))

    async def score_episodes(self, episodes: list[list[Trajectory]], task: Task) -> None:
        """Several of one task, whose first trajectories a groupwise reward sees together."""
        waiting = [e[0] for e in episodes if e[0].score is None and not isinstance(e[0].outcome, EnvFault)]
        for trajectory, score in zip(waiting, await self.parts.pool.score_group(waiting, task), strict=True):
            trajectory.score = score
        for episode in episodes:
            await self.score_episode(episode, task)

    async def score_episode(self, episode: list[Trajectory], task: Task) -> None:
        """The first by the reward, or as its environment says; the others have that score, or one of their own."""
        await self._score_trajectory(episode[0], task)
        for trajectory in episode[1:]:
            if trajectory.score is not None:
                trajectory.score = check_score(trajectory.score, trajectory)
        share_scores(episode)

    async def _score_trajectory(self, trajectory: Trajectory, task: Task) -> None:
        if isinstance(trajectory.outcome, EnvFault):
            trajectory.score = Failed("environment fault", trajectory.outcome.reason)
        elif _is_dropped(trajectory):
            return
        elif trajectory.score is None:
            answer, pool = CURRENT_ANSWER.get(), self.parts.pool
            trajectory.score = await (pool.score(trajectory, task) if answer is None else answer.score(trajectory))
        else:
            trajectory.score = check_score(trajectory.score, trajectory)


def _is_dropped(trajectory: Trajectory) -> bool:
    """Whether it has no score because its budget was used up: nothing is broken, and nothing mends by asking again."""
    return isinstance(trajectory.score, Failed) and trajectory.score.reason == DROPPED


def rollouts_of(parts: Components) -> GroupRollouts:
    """Of the loop itself: samples, and what the row wants beside them."""
    job = parts.job
    return GroupRollouts(parts, job.algo.group_size, job.algo.guides, "greedy" in parts.row.needs, parts.step_watch)


class SupervisedRollouts(GroupRollouts):
    """The supervised phase: Generate copies the data set's answers, Score has nothing to ask."""

    async def generate_group(self, slot: Slot) -> Group:
        return replace(await super().generate_group(slot), supervised=True)

    def _open_visit(self, slot: Slot) -> PromptVisit | None:
        return None

    async def _sample_episode(self, slot: Slot, index: int, policy: str = POLICY) -> list[Trajectory]:
        episode = await self._demonstrate_task(slot, policy)
        for trajectory in episode:
            trajectory.score = Score(1.0)
        return episode


def shown_of(job: Job, tasks: TaskSet, rows: list[Algorithm]) -> list[DemonstrationStream]:
    """The components of algo.beside, each with its row: from data of their own, or the tasks' own answers."""
    found = []
    for i, (b, row) in enumerate(zip(job.algo.beside, rows, strict=True)):
        if row.needs:
            raise ConfigError(
                f"algo.beside: kind = '{b.kind}' learns from rewards or from tokens that the policy drew; what stands "
                f"beside is shown to it. "
                "Use kind = 'sft'"
            )
        stream, own = f"beside.{i}", b.data is None
        source = tasks.train if b.data is None else load_tasks(b.data, env=stream).train
        refuse_unanswered("algo.beside", source)
        refuse_unwritable("algo.beside", source)
        found.append(
            DemonstrationStream(
                stream,
                [replace(t, env=stream, data=t.data | {"source": stream}) for t in source],
                row,
                b.weight,
                b.groups_per_step,
                job.task.suffix if own else "",
                job.task.shown_examples if own else [],
            )
        )
    return found


async def prepare(groups: list[Group]) -> TrainBatch:
    """What the trainer credits and trains: the scored trajectories of the step."""
    return await _batch_in_turns(groups)


async def _batch_in_turns(groups: Iterable[Group]) -> TrainBatch:
    """`batch_of`, in passes of the event loop that are short however long the answers are: long ones beside it."""
    samples: list[TrainSample] = []
    tokens = 0
    for group in groups:
        more = sum(len(trajectory.tokens) for trajectory in group.trajectories)
        if more > TURN_TOKENS:
            samples += await asyncio.to_thread(list, train_samples([group]))
            continue
        samples += train_samples([group])
        if (tokens := tokens + more) > TURN_TOKENS:
            await asyncio.sleep(0)
            tokens = 0
    return TrainBatch(samples)


def batch_function(job: Job) -> Callable[[TrainBatch], TrainBatch]:
    """The user's step from the samples of a step to what is trained; without one the batch stays as it is."""
    if (kind := job.algo.batch) is None:
        return lambda batch: batch
    found = find_registered("algo.batch", kind, {})
    refuse_uncallable(f"algo.batch = '{kind}'", found, "batch")

    def reshape(batch: TrainBatch) -> TrainBatch:
        with error_boundary(DataError, f"algo.batch = '{kind}'"):
            given = found(batch)
        if not isinstance(given, TrainBatch) or not given.samples:
            what = f"a {type(given).__name__}" if not isinstance(given, TrainBatch) else "a batch without samples"
            raise DataError(f"algo.batch = '{kind}' returned {what}; return a TrainBatch with at least one sample")
        return given

    return reshape


def prepare_of(parts: Components) -> Callable[[list[Group]], Awaitable[TrainBatch]]:
    """The same with groups that come back, what is shown beside, and what teachers elsewhere say of it. The step's
    first number chooses what is shown, so that a step done again, or replayed, gets the same."""
    rollouts, reshape = rollouts_of(parts), batch_function(parts.job)

    async def prepare_batch(groups: list[Group]) -> TrainBatch:
        beside: list[Group] = []
        for shown in parts.shown:
            first = min(group.id for group in groups) * shown.groups
            for number in range(first, first + shown.groups):
                task = ShuffledOrder(shown.tasks, parts.job.loop.seed).task_at(number)
                if isinstance(parts.env, DemonstratingEnv):
                    key = sample_key(parts.job.loop.seed, number, SHOWN)
                    trajectory = rollouts.demonstrate_by_env(parts.env, task, key)
                else:
                    shows = Demonstrate(suffix=shown.suffix, system=parts.job.task.system, examples=shown.examples)
                    trajectory = await shows.run(task, rollouts.open_chat(lambda turn: 0))
                trajectory.score = Score(1.0)
                beside.append(Group(-1 - len(beside), task, [trajectory], 0))
        again = parts.returning.due_groups() if parts.returning is not None else []
        batch = reshape(await _batch_in_turns([*groups, *again, *beside]))
        if parts.teachers is not None:
            await parts.teachers(batch)
        return batch

    return prepare_batch
