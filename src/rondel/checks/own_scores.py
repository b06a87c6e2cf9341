"""The scores of an environment that judges its episodes itself: gold replies must reach the best, empty and wrong ones
must not.
"""

from __future__ import annotations

from rondel.assemble.run_components import Components
from rondel.checks.scripted_policy import ScriptedStage, build_scripts
from rondel.core.protocols import GoldEnv
from rondel.core.types import Failed, Task
from rondel.score.preflight import CheckFinding, Scores, judge_scores
from rondel.score.result import check_score, read_score

TRIED = 8  # tasks


async def check_own_scores(parts: Components) -> list[CheckFinding]:
    """Findings on the first training tasks, played by scripts."""
    info, has_gold = parts.model_info, isinstance(parts.env, GoldEnv)
    tasks = [task for task in parts.tasks.train if has_gold or task.data.get("answer") not in (None, "")][:TRIED]
    if not tasks:
        told = "the environment has no gold(task) and no task an 'answer', so its scores were not tried"
        return [CheckFinding("environment: gold", True, told)]
    system = parts.job.task.system
    stage = ScriptedStage(parts.env, info.tokenizer, parts.sampling, info.max_context, system, sight=info.sight)
    scripts = build_scripts(info.tokenizer, tasks, parts.env)
    scores: Scores = {"gold": [], "empty": [], "wrong": []}
    failures: list[tuple[str, Task, Failed]] = []
    for name, found in scores.items():
        for task in tasks:
            played = await stage.play_episode(name, task, scripts[name])
            if played.fault:
                failures.append((name, task, Failed("environment fault", played.fault)))
                continue
            root = played.trajectories[0]
            score = root.score if isinstance(root.score, Failed) else check_score(read_score(root.score), root)
            if isinstance(score, Failed):
                failures.append((name, task, score))
            else:
                found.append((task, root.text, score))
    judged = judge_scores(scores, failures, 3 * len(tasks))
    return [CheckFinding(f"environment: {f.what}", f.ok, f.message, f.remedy) for f in judged]
