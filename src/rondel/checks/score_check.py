"""Do gold, empty and wrong attempts get the scores that they deserve, scored as episodes of a run are?

gold replies known, or scored by the environment ──> scripts play whole episodes, calls and all
else                                             ──> the reward judges the answers alone
"""

from __future__ import annotations

from itertools import islice

from rondel.assemble.run_components import Components
from rondel.checks.scripted_policy import ScriptedStage, build_scripts, knows_gold
from rondel.core.protocols import GoldEnv, SelfScoringEnv
from rondel.core.types import Failed, Task, Trajectory
from rondel.score.preflight import CheckFinding, check_attempts, check_reward, count_tried


async def check_scores(parts: Components) -> list[CheckFinding]:
    """Findings on the first training tasks."""
    env, own = parts.env, isinstance(parts.env, SelfScoringEnv)
    tasks: list[Task] = []
    if own or isinstance(env, GoldEnv):
        known = (task for task in parts.tasks.train if knows_gold(env, task))
        tasks = list(islice(known, count_tried(parts.pool)))
    if tasks:
        found = await _check_episodes(parts, tasks)
    elif own:
        told = "the environment has no gold(task) and no task an 'answer', so its scores were not tried"
        found = [CheckFinding("gold", True, told)]
    else:
        found = await check_reward(parts.pool, parts.tasks.train)
    by = "environment" if own else "reward"
    return [CheckFinding(f"{by}: {f.what}", f.ok, f.message, f.remedy, f.warning) for f in found]


async def _check_episodes(parts: Components, tasks: list[Task]) -> list[CheckFinding]:
    """Each task played by the scripts of gold, empty and wrong replies."""
    info = parts.model_info
    system = parts.job.task.system
    stage = ScriptedStage(parts.env, info.tokenizer, parts.sampling, info.max_context, system, sight=info.sight)
    scripts = build_scripts(info.tokenizer, tasks, parts.env)

    async def play(kind: str, task: Task) -> Trajectory | Failed:
        played = await stage.play_episode(kind, task, scripts[kind])
        return Failed("environment fault", played.fault) if played.fault else played.trajectories[0]

    return await check_attempts(parts.pool, tasks, play, maximum=getattr(parts.env, "maximum", None))
