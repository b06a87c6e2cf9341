"""What a teacher reads instead of the prompt: the same conversation, whose last message tells more."""

from __future__ import annotations

from collections.abc import Sequence
from string import Formatter
from typing import Any

from rondel.core.errors import ConfigError, DataError
from rondel.core.types import Group, Task, Trajectory
from rondel.generate.template import Template

SOLUTION, PROMPT = "solution", "prompt"


def write_teacher_prompts(group: Group, contexts: Sequence[str | None], template: Template, max_context: int) -> None:
    """`Trajectory.teacher_prompts` of every scored sample, for teachers with these contexts.

    {prompt} is what the policy read last before it began to write, {solution} the best other answer of the group if its
    reward is above the group's mean, every other name a field of the task. Where there is no {solution} the teacher
    reads the prompt itself.
    """
    if all(context is None for context in contexts):
        return
    for trajectory in group.trajectories:
        if trajectory.written and trajectory.reward is not None:
            fields = task_fields(group.task, contexts) | solution_for(trajectory, group)
            trajectory.teacher_prompts = [
                None if context is None else teacher_prompt(trajectory, context, fields, template)
                for context in contexts
            ]
            answer = len(trajectory.tokens) - trajectory.mask.index(True)
            for prompt in trajectory.teacher_prompts:
                if prompt is not None and len(prompt) + answer > max_context:
                    raise DataError(
                        f"task {group.task.id}: with its context a teacher would read {len(prompt) + answer} tokens, "
                        f"and the model reads {max_context}. Shorten the context, or lower engine.sampling.max_tokens"
                    )


def task_fields(task: Task, contexts: Sequence[str | None]) -> dict[str, str]:
    """The fields of the task that the contexts name, as text."""
    names = {name for context in contexts if context is not None for name in _field_names(context)}
    names -= {PROMPT, SOLUTION}
    if missing := sorted(names - task.data.keys()):
        raise DataError(
            f"a teacher's context names {{{missing[0]}}}, and task {task.id} has no such field; it has: "
            f"{', '.join(task.data)}"
        )
    return {name: str(task.data[name]) for name in names}


def solution_for(trajectory: Trajectory, group: Group) -> dict[str, str]:
    """The best other answer, if there is one that scored above the mean."""
    rewards = group.rewards
    others = [t for t in group.policy_samples if t is not trajectory and t.reward is not None]
    best = max(others, key=lambda t: t.reward or 0.0, default=None)
    if best is None or best.reward is None or not best.reward > sum(rewards) / len(rewards):
        return {}
    return {SOLUTION: best.text}


def teacher_prompt(
    trajectory: Trajectory, context: str, fields: dict[str, str], template: Template
) -> list[int] | None:
    """The tokens of the opening with `context` in the place of its last message; None where a field is not known."""
    if _field_names(context) - fields.keys() - {PROMPT}:
        return None
    length = trajectory.mask.index(True)
    opening = [turn for turn in trajectory.conversation if turn.end <= length]
    messages: list[dict[str, Any]] = [{"role": turn.role, "content": turn.text} for turn in opening]
    if not messages or trajectory.media or template.render_opening(messages, ()) != list(trajectory.tokens[:length]):
        raise ConfigError(
            "model.teacher.context: this environment begins with more than plain messages (tools, images, or tokens of "
            "its own), and a teacher would not read the same beside the context. Use it with text alone"
        )
    messages[-1] = {**messages[-1], "content": context.format(**{PROMPT: messages[-1]["content"]} | fields)}
    return list(template.render_opening(messages, ()))


def _field_names(context: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(context) if name is not None}
