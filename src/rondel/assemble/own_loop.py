"""`rondel.Trainer`: engine and trainer for a loop that is written by hand, with the checks of the loop that is not."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Coroutine, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rondel.assemble.components import sync_of
from rondel.assemble.deployment import deploy_job
from rondel.assemble.recipe_parts import sampling_of
from rondel.assemble.refusals import refuse_job
from rondel.assemble.rows import rows_of
from rondel.core.config.job import Job
from rondel.core.errors import UserError
from rondel.core.types import GREEDY, Failed, Group, Request, Sampling, Score, Task, Trajectory, sample_key
from rondel.generate.template import Template
from rondel.models.save import save_model
from rondel.score.result import read_score
from rondel.train import own_steps
from rondel.train.pack import batch_of
from rondel.train.step import LocalTrainer

Prompt = str | list[int] | list[dict[str, Any]]
PROMPT = 1024  # tokens that a prompt is thought to have, where engine.kv_pages = "auto"
T = TypeVar("T")


class Trainer:
    """Sample, score yourself, add gradients up, step:

    >>> trainer = rondel.Trainer({"model": {"path": "smollm2-135m"}, "algo": {"kind": "grpo"}, "trainer": {"lr": 1e-5}})  # doctest: +SKIP
    >>> answers = trainer.sample(["3 + 4 ="], rondel.Sampling(n=8, max_tokens=8))  # doctest: +SKIP
    >>> rewards = [[float("7" in answer.text) for answer in group] for group in answers]  # doctest: +SKIP
    >>> trainer.forward_backward(answers, rewards), trainer.optim_step()  # doctest: +SKIP

    recipe    a TOML file or its tables as dicts; only `model` is needed. task, reward and loop are yours, and not read:
              nor are filters of a row, as dapo's, which leaves out groups of equal rewards
    sections  tables whose keys override it

    Engine and trainer hold the same weights in this process; after each optim_step the engine is given the new version
    in a transaction, with a probe scored on both sides (law 6).
    """

    def __init__(self, recipe: str | Path | Mapping[str, Any], **sections: dict[str, Any]) -> None:
        overrides = {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}
        self._folder = tempfile.TemporaryDirectory(prefix="rondel-trainer-")
        self.job = job = _complete_job(recipe, overrides, self._folder.name)
        rows, sampling = rows_of(job), sampling_of(job)
        refuse_job(job, rows, sampling)
        if not job.place.one_module or job.policies or job.trainer.memory.offload or job.model.teachers:
            raise UserError(
                "rondel.Trainer has one policy, whose engine and trainer share the weights in this process: leave out "
                "policies, teachers, trainer.memory.offload and place, or use rondel.run"
            )
        if rows.of or job.algo.beside or rows.main.is_adaptive:
            what = "a coefficient or an advantage that follows earlier steps" if rows.main.is_adaptive else "more rows"
            raise UserError(
                f"algo has {what}, and rondel.Trainer adds up the gradient of one row as it stands: leave out "
                "kl.target, entropy.delta, algo.sources and algo.beside, take an advantage that remembers nothing, or "
                "use rondel.run"
            )
        if "greedy" in rows.needs or rows.main.advantage.asks_again:
            what = "a greedy answer to every prompt" if "greedy" in rows.needs else "prompts that are asked again"
            raise UserError(
                f"'{rows.main.name}' needs {what}, which a loop by hand does not draw: use rondel.run, or another "
                "algo.advantage.kind"
            )
        self.algo, self.temperature = rows.main, sampling.temperature
        self._behavior_wants = rows.behavior_wants
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rondel-trainer", daemon=True)
        self._thread.start()
        self._seed, self._sampled, self._added = job.loop.seed, 0, 0
        with ExitStack() as ends:  # all of it goes again where something fails
            ends.callback(self._folder.cleanup)
            ends.callback(self._end_loop)
            with ThreadPoolExecutor(1) as aside:  # its threads of arithmetic end with it
                self._placed = aside.submit(
                    deploy_job,
                    job,
                    rows.needs,
                    sampling,
                    lambda known: min(known.max_context, PROMPT + sampling.max_tokens),
                    None,
                ).result()
            ends.callback(self._placed.close)
            assert isinstance(self._placed.trainer, LocalTrainer)
            self._trainer: LocalTrainer = self._placed.trainer
            self._sync = sync_of(job, self._placed)
            self._sync.moved = lambda: self._trainer.moved
            self._template = Template(self.tokenizer)
            self._wait(self._sync(self._trainer, self._placed.engine))
            self._ends = ends.pop_all()

    @property
    def tokenizer(self) -> Any:
        return self._trainer.loaded.tokenizer

    @property
    def version(self) -> int:
        """Of the weights that the engine serves: it grows with every optim_step and load_state."""
        return self._trainer.version

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling | None = None) -> list[list[Trajectory]]:
        """`sampling.n` answers to each prompt: a text, token ids, or messages for the model's chat template. -> for
        each prompt its answers, with `text`, and tokens, logprobs and versions as they were drawn. The temperature is
        that of `engine.sampling`, because it is a part of the policy that is trained, or 0, to evaluate.
        """
        if isinstance(prompts, str) or any(isinstance(p, dict | int) for p in prompts):
            raise UserError("prompts is one prompt; give a list of them: trainer.sample([prompt])")
        own = sampling_of(self.job)
        chosen = own if sampling is None else sampling
        if chosen.temperature not in (0.0, self.temperature) or (chosen.temperature and chosen.untrainable_settings):
            raise UserError(
                f"the policy is trained at temperature {self.temperature:g} without "
                f"{chosen.untrainable_settings or 'other settings'}: "
                "say engine={'sampling': {'temperature': ...}} where the Trainer is made, or sample with temperature "
                "0 to evaluate"
            )
        return self._wait(self._sample([self._encode(p) for p in prompts], chosen))

    def forward_backward(
        self,
        answers: Sequence[Sequence[Trajectory]],
        rewards: Sequence[Sequence[float]] | None = None,
        *,
        weight: float = 1.0,
    ) -> dict[str, float]:
        """Add the gradient of `weight` times the loss of these groups to what is there. `rewards`: one for each
        answer; None where the trajectories have a score already. -> metrics. A group whose rewards are equal has no
        signal under most rows.
        """
        if rewards is not None and [len(group) for group in answers] != [
            len(group) if isinstance(group, Sized) else None for group in rewards
        ]:
            raise UserError("rewards must have one number for each answer: a list for each prompt")
        groups = []
        for number, group in enumerate(answers):
            scored = [
                t if rewards is None else replace(t, score=_read_reward(rewards[number][i], number, i))
                for i, t in enumerate(group)
            ]
            if any(t.policy == GREEDY for t in scored):
                raise UserError("greedy answers (temperature 0) are for evaluation: the policy did not draw them")
            groups.append(Group(number, Task(str(number), "own", {}), scored, self.version))
        batch = batch_of(groups)
        if not batch.samples:
            raise UserError("there is nothing to train on: no answer has a reward and a written token")
        first, self._added = not self._added, self._added + 1
        try:
            return self._wait(
                self._on_device(own_steps.accumulate, self._trainer, batch, self.algo, weight=weight, first=first)
            )
        except Exception:
            self._added = 0
            raise

    def optim_step(self, lr: float | None = None) -> dict[str, float]:
        """One optimizer step with the gradient that was added up, at `lr` or `trainer.lr`; the engine serves the new
        weights when it returns. -> metrics.
        """
        if not self._added:
            raise UserError("there is no gradient: call forward_backward before optim_step")
        self._added = 0
        return self._wait(self._step(lr))

    def logprobs(self, tokens: list[int]) -> list[float]:
        """Of one text through the training path, at temperature 1; 0 for its first token."""
        return self._wait(self._trainer.logprobs(tokens))

    def save(self, folder: str | Path) -> None:
        """The model as `transformers.from_pretrained` loads it (an adapter as peft does)."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._wait(self._on_device(save_model, self._trainer.loaded, Path(folder)))

    def save_state(self, folder: str | Path) -> None:
        """All that training goes on from: masters, moments, random state."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._wait(self._trainer.save(Path(folder)))

    def load_state(self, folder: str | Path) -> None:
        """Go on from `save_state`; the engine serves these weights when it returns."""
        self._added = 0

        async def load() -> None:
            async with self._placed.devices.parked():
                served = self.version
                await self._trainer.load(Path(folder))
                self._trainer.moved, self._sync.root = True, None
                self._trainer.version = max(served, self.version) + 1  # engines never go back
                await self._sync(self._trainer, self._placed.engine)

        self._wait(load())

    def close(self) -> None:
        """Ends its threads and gives the memory back."""
        self._ends.close()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- on its event loop -----------------------------------------------------------------------

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            work.close()
            raise UserError("this trainer is closed; make another")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _on_device(self, function: Any, *args: Any, **how: Any) -> Any:
        return await self._trainer._device(lambda: function(*args, **how))

    async def _step(self, lr: float | None) -> dict[str, float]:
        async with self._placed.devices.parked():
            metrics = await self._on_device(own_steps.apply, self._trainer, lr)
            await self._sync(self._trainer, self._placed.engine)
        return metrics

    async def _sample(self, prompts: list[list[int]], sampling: Sampling) -> list[list[Trajectory]]:
        wants = frozenset({"support"}) if sampling.truncates_support else frozenset[str]()
        wants |= self._behavior_wants
        number, self._sampled = self._sampled, self._sampled + len(prompts)
        one = replace(sampling, n=1)

        async def answer(place: int, prompt: list[int], i: int) -> Trajectory:
            key = sample_key(self._seed + sampling.seed, number + place, i)
            done = await self._placed.engine.generate(Request(prompt, one, key=key, wants=wants))
            t = Trajectory(policy=GREEDY) if not sampling.temperature else Trajectory()
            t.extend(prompt)
            t.extend(
                done.tokens,
                logprobs=done.logprobs,
                versions=done.versions,
                support=done.support,
                behavior_top=done.behavior_top,
                steps=done.steps,
            )
            t.text = (
                done.text if done.text is not None else self.tokenizer.decode(done.tokens, skip_special_tokens=True)
            )
            t.finish_reason, t.experts = done.finish_reason, done.experts
            return t

        jobs = [answer(place, prompt, i) for place, prompt in enumerate(prompts) for i in range(sampling.n)]
        flat = await asyncio.gather(*jobs)
        return [list(flat[i * sampling.n : (i + 1) * sampling.n]) for i in range(len(prompts))]

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._template.special.encode_text(prompt, split=True, add_special_tokens=True)
        if prompt and isinstance(prompt[0], dict):
            return self._template.render_opening(list(prompt))  # type: ignore[arg-type]
        return list(prompt)  # type: ignore[arg-type]


def _read_reward(given: Any, group: int, answer: int) -> Score:
    score = read_score(given)
    if isinstance(score, Failed):
        told = f"{score.reason} {score.detail}".strip().replace("returned", "is", 1)
        raise UserError(f"rewards[{group}][{answer}] {told}: give a finite number for each answer")
    return score


def _complete_job(recipe: str | Path | Mapping[str, Any], overrides: dict[str, Any], folder: str) -> Job:
    """What a recipe must have beside its model, where it says nothing of it. No supervised phase comes first, and
    nobody knows which step is the last.
    """
    if isinstance(recipe, Mapping):
        loop = recipe.get("loop", {})
        steps = {} if isinstance(loop, Mapping) and "passes" in loop else {"steps": 1}
        data = {"kind": [{"prompt": "", "answer": ""}]}
        own: dict[str, dict[str, Any]] = {"task": {"data": data}, "loop": steps, "run": {"folder": folder}}
        tables = {n: {**own.get(n, {}), **t} if isinstance(t, Mapping) else t for n, t in recipe.items()}
        job = Job.read(own | tables, overrides | {"loop.warmup.steps": 0})
    else:
        job = Job.read(recipe, {"run.folder": folder} | overrides | {"loop.warmup.steps": 0})
    if job.trainer.schedule != "constant":
        raise UserError(
            f"trainer.schedule = '{job.trainer.schedule}' needs to know the last step, which rondel.Trainer does not: "
            "give trainer={'schedule': 'constant'}, and optim_step(lr) the rate of each step"
        )
    return job
