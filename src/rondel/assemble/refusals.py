"""Settings that contradict each other: each is refused by name, with its remedy, before anything is loaded."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from rondel.assemble.format_refusals import refuse_formats
from rondel.assemble.layer_refusals import refuse_layers
from rondel.core.config.job import Job
from rondel.core.config.section import split_kind
from rondel.core.config.task import EvaluationConfig
from rondel.core.config.trainer import CriticConfig, MemoryConfig
from rondel.core.errors import ConfigError, DataError
from rondel.core.protocols import Env, NamedAgentsEnv
from rondel.core.registry import suggest_name
from rondel.core.types import Sampling, Task
from rondel.generate.envs.episode import refuse_untrainable
from rondel.generate.envs.holdout import asked_key, content_key
from rondel.models.control.kinds import is_control, is_world_model
from rondel.models.flow.kinds import is_flow
from rondel.score import has_offload

if TYPE_CHECKING:
    from rondel.algos.criteria import CriterionBonus
    from rondel.algos.table import Algorithm
    from rondel.assemble.model_info import ModelInfo
    from rondel.assemble.rows import AlgorithmRows


def refuse_job(job: Job, rows: AlgorithmRows, sampling: Sampling) -> None:
    """What the keys of a recipe cannot know of each other, and the row says."""
    if sampling.temperature == 0:
        raise ConfigError(
            "engine.sampling.temperature = 0 is greedy: every sample of a group is the same, and greedy samples are "
            "not trainable. Use 1.0"
        )
    refuse_untrainable(sampling)
    _check_foreign(job, sampling)
    _check_engine_ranks(job)
    _check_demonstrations(job, rows.main)
    _check_critic(job, rows.main)
    _check_teacher(job, rows, sampling)
    _check_behavior_top(job, rows)
    _check_whole_distribution(rows, sampling)
    _check_focused(job, rows)
    _check_policies(job, rows)
    refuse_formats(job, rows)
    refuse_layers(job)
    _check_offload(job)
    for row in rows.all_rows:
        _check_baseline(job, row)
        _check_reference(job, row)
        _check_replays(job, row)
    if job.trainer.optimizer.kind == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            'trainer.optimizer.kind = "adamw_8bit" needs the package bitsandbytes, which is not installed: '
            "pip install 'rondel[qlora]', or take \"adamw\""
        )
    if job.trainer.optimizer.kind != "adamw" and job.place.ranks > 1:
        raise ConfigError(
            f'trainer.optimizer.kind = "{job.trainer.optimizer.kind}" with place.ranks = {job.place.ranks}: it needs '
            'each tensor whole. Use "adamw", or one rank'
        )
    if job.trainer.memory.optimizer == "host" and job.place.ranks > 1:
        raise ConfigError(
            f'trainer.memory.optimizer = "host" with place.ranks = {job.place.ranks}: each rank keeps a shard of the '
            "optimizer on its own device. Remove it, or use one rank"
        )
    guess = job.engine.speculative
    if not job.place.one_module and guess.kind == "draft" and guess.lr > 0:
        raise ConfigError(
            f'engine.speculative.lr = {guess.lr:g} with place.kind = "{job.place.kind}" and {job.place.ranks} ranks: '
            "a draft learns only where trainer and engine share a module. "
            'Set engine.speculative.lr = 0, which keeps the draft as it is, or use place.kind = "shared" with one rank'
        )


def _check_offload(job: Job) -> None:
    """`offload = true` of the trainer and of a reward, where devices are not shared in turn."""
    if job.trainer.memory.offload and job.place.ranks > 1:
        raise ConfigError(
            f"trainer.memory.offload = true with place.ranks = {job.place.ranks}: the shards of several ranks stay "
            "on their devices. Remove it, or use one rank"
        )
    if job.trainer.memory.offload and job.place.kind != "shared":
        raise ConfigError(
            'trainer.memory.offload = true has no effect on a device of its own: use place.kind = "shared", or '
            "remove it"
        )
    if has_offload(job.task.reward_spec):
        refuse_offloaded_reward(job)


def refuse_offloaded_reward(job: Job) -> None:
    """A reward that leaves its device to the trainer; one of your own says so only when it is built."""
    if not job.place.one_module or job.policies:
        raise ConfigError(
            "task.reward: offload = true is for one policy with place.kind = 'shared' and one rank, whose trainer "
            "wants the reward model's device: leave it out, and give it a device of its own"
        )


def refuse_idle_evaluation(job: Job, held_out: list[Task]) -> None:
    """Settings of evaluations that never take place."""
    if held_out:
        return
    for name, field in EvaluationConfig.model_fields.items():
        if getattr(job.task.eval, name) != field.get_default(call_default_factory=True):
            raise ConfigError(
                f"task.eval.{name} has no effect: no tasks are held out, so nothing is evaluated. Set "
                "task.data.holdout = 50 (eval_path for "
                "files), or remove it; on the command line --task.eval={} leaves out what the recipe says of it"
            )


def refuse_shown_tasks(job: Job, held_out: list[Task]) -> None:
    """Held-out questions whose answer stands in the prompt."""
    given = {content_key(example["prompt"]) for example in job.task.shown_examples}
    if shown := [task.id for task in held_out if asked_key(task) in given]:
        raise ConfigError(
            f"task.env.examples has the question of held-out task {shown[0]}: its evaluation would only read. Use "
            "another example"
        )


def refuse_idle_memory(memory: MemoryConfig, device: str) -> None:
    """Settings that move what is in host memory already."""
    instead = {
        "activations": 'take "disk", which writes them to a file in the folder of the run, or remove the key',
        "optimizer": "remove the key",
    }
    for name, remedy in instead.items():
        if getattr(memory, name) == "host" and not device.startswith("cuda"):
            raise ConfigError(
                f'trainer.memory.{name} = "host" saves memory of a GPU, and this trainer works on {device}, where '
                f"all is in host memory already: {remedy}"
            )


def refuse_unanswered(key: str, tasks: list[Task]) -> None:
    """A demonstration is the task's own answer."""
    if lacking := next((t for t in tasks if "answer" not in t.data), None):
        raise DataError(
            f"{key}: task {lacking.id} has no 'answer' to show; it has: {', '.join(lacking.data)}. Name its field "
            "with answer = '...' in the data"
        )


def refuse_unwritable(key: str, tasks: list[Task]) -> None:
    """An answer that is shown is a text; completions of a chat are lists of messages."""
    if odd := next((t for t in tasks if not isinstance(t.data["answer"], str | int | float)), None):
        shown = odd.data["answer"]
        raise DataError(
            f"{key}: the answer of task {odd.id} is a {type(shown).__name__}, {shown!r:.80}, and would be learned as it "
            "is written here: give a text, the content of the assistant's message say"
        )


def refuse_without_routes(job: Job) -> None:
    """Routing replay needs the engine's record of every token, and no engine wrote a demonstration."""
    if shown := [key for key in ("guides", "beside") if getattr(job.algo, key)]:
        raise ConfigError(
            f"algo.{shown[0]} with routing replay: a demonstration has no recorded routes, since no engine wrote it. "
            "Set trainer.routing_replay = false"
        )


def refuse_untold_routes(job: Job, known: ModelInfo, driver: Any) -> None:
    """What is known of a mixture once it is loaded: whether a server of others can tell where it sent tokens."""
    if known.told_experts is None or not hasattr(driver, "experts"):
        raise ConfigError(
            f'engine.kind = "{job.engine.kind}" tells no routed experts of this model, which has {known.routers} '
            "routers: its choices cannot be replayed. "
            "Set trainer.routing_replay = false, with algo.correction.kind = 'importance', or use engine.kind = "
            '"builtin"'
        )


def refuse_unrepeatable(job: Job, device: str, ranks: int) -> None:
    """A recorded run is done again bit for bit: what would make that a matter of luck is refused by name."""
    path = job.model.path
    rows_alone = is_flow(path) or is_control(path) or is_world_model(path)  # the same bits whoever is beside them
    rules = [
        (
            job.engine.kind == "builtin",
            f'engine.kind = "{job.engine.kind}" does not tell what it computed when: use "builtin"',
        ),
        (
            job.engine.numerics == "aligned" or rows_alone,
            f'engine.numerics = "{job.engine.numerics}" makes bits depend on who else is in the batch: '
            'set engine.numerics = "aligned"',
        ),
        (
            device == "cpu",
            f'place.device is {device}, whose kernels do not promise the same bits twice: set place.device = "cpu"',
        ),
        (job.place.threads != "auto", "sums depend on how many threads share them: set place.threads to a number"),
        (
            ranks == 1 or job.place.cluster != "torchrun",
            f'the replay makes its {ranks} ranks itself, and torchrun made these: set place.cluster = "process"',
        ),
        (
            job.engine.speculative.kind == "off",
            f'engine.speculative.kind = "{job.engine.speculative.kind}" guesses as much as its clock says is worth it: '
            'set it to "off"',
        ),
        (
            job.task.curriculum.get("kind") not in ("priority", "band", "focused"),
            "task.curriculum draws by what has ended so far, and when that was is not recorded: use shuffle or "
            "easy_first",
        ),
        (not job.engine.compile, "engine.compile chooses kernels by the size of the batch: set it to false"),
    ]
    for holds, rule in rules:
        if not holds:
            raise ConfigError(f"run.record: {rule}", page="docs/runs.md#the-same-run-again")


def _check_foreign(job: Job, sampling: Sampling) -> None:
    """What an engine of others does not have, each by name."""
    e, p = job.engine, job.place
    if e.kind == "builtin":
        if e.url is not None:
            raise ConfigError(
                f'engine.url = {e.url!r} has no effect with engine.kind = "builtin": use "sglang" or "vllm", or '
                "remove it"
            )
        return
    who = f'engine.kind = "{e.kind}"'
    rules = [
        (bool(e.url), 'needs an address: engine.url = "http://127.0.0.1:30000"'),
        (p.kind == "split", 'is on a device of its own: set place.kind = "split"'),
        (
            p.cluster != "local" and p.engine_count == 1,
            'counts by engine.url: leave place.cluster at "auto" and place.engines at 1',
        ),
        (job.model.adapter.kind == "off", "reads whole weights, and only the adapter would travel: drop model.adapter"),
        (
            e.numerics != "aligned",
            'does not compute as the trainer does, bit by bit: numerics = "aligned" is for the built-in engine',
        ),
        (
            not sampling.truncates_support,
            f"does not tell which tokens it drew from (top_k = {sampling.top_k}, top_p = {sampling.top_p}, min_p = "
            f"{sampling.min_p}), and the trainer needs them: use top_k = 0, top_p = 1 and min_p = 0",
        ),
        (
            job.loop.max_staleness == 0 or not any(isinstance(s, str) for s in sampling.stop),
            "may interrupt a sample in the middle of a stop string when max_staleness is above 0: give its token ids "
            "in engine.sampling.stop",
        ),
    ]
    for holds, rule in rules:
        if not holds:
            raise ConfigError(f"{who} {rule}", page="docs/generate.md#external-engines")


def _check_engine_ranks(job: Job) -> None:
    """What an engine of several processes does not have, each by name."""
    p, e = job.place, job.engine
    if p.engine_processes == 1:
        return
    rules = [
        (
            e.kind == "builtin",
            f'is not how engine.kind = "{e.kind}" is arranged: start its servers so, and leave it out here',
        ),
        (p.kind == "split", 'needs devices of its own: set place.kind = "split"'),
        (
            not p.on_ray,
            f'is for engines on the machine of the run, and place.cluster = "{p.cluster}" has them anywhere: '
            'use "process" or "torchrun"',
        ),
        (job.model.adapter.kind == "off", "takes whole weights: drop model.adapter"),
        (e.numerics == "fast", 'computes in parts, and not in the order of the trainer: set engine.numerics = "fast"'),
        (not e.compile, "runs its passes operation by operation: set engine.compile = false"),
        (
            job.sync.kind in ("auto", "ipc", "disk", "distributed", "tensor"),
            "reads new weights by ipc, disk, distributed or tensor, "
            f'and sync.kind = "{job.sync.kind}" is none of them: leave it at "auto"',
        ),
        (not job.policies, "serves one model: drop the policies, or this setting"),
        (not job.run.record, "writes no schedule that is replayed: set run.record = false"),
        (
            p.engine_dp == 1 or job.engine.speculative.kind in ("off", "ngram"),
            'has no cache for a draft model on each process: set engine.speculative.kind = "ngram" or "off"',
        ),
    ]
    for holds, rule in rules:
        if not holds:
            raise ConfigError(
                f"place.engines.{p.engine_sizes} {rule}", page="docs/place.md#engines-of-several-processes"
            )


SOLUTION = "{solution}"  # what a context may not hold that every answer reads
# environments whose one agent has no name
NAMELESS = {"single_turn", "tools", "search", "gateway", "verifiers", "gym", "repository"}


def refuse_unplayed(job: Job, env: Env) -> None:
    """A policy whose agents the environment does not have; one of the user's may say whom it has in `agents`."""
    known = env.agents if isinstance(env, NamedAgentsEnv) else None
    if (
        job.policies
        and known is not None
        and (odd := next((agent for agent in job.agent_policies if agent not in known), None))
    ):
        raise ConfigError(
            f"policies.{job.agent_policies[odd]} plays the agent '{odd}', and the environment has none of that "
            f"name.{suggest_name(odd, list(known))} "
            f"It has {', '.join(known)}; name them in policies.{job.agent_policies[odd]}.agents"
        )


def _check_policies(job: Job, rows: AlgorithmRows) -> None:
    """What weights of their own are not carried with, each by name."""
    if not job.policies:
        return
    table = job.task.data.get("sources", [])
    envs = {split_kind(source.get("env", job.task.env_kind), job.task.env_kind)[0] for source in table} or {
        job.task.env_kind
    }
    p, first = job.place, next(iter(job.policies))
    rules = [
        (
            not envs <= NAMELESS,
            f'task.env = "{job.task.env_kind}" has one agent, without a name, which plays model.path: use env = '
            f'"agents", or one of yours with chat.beside("{first}")',
        ),
        (job.engine.kind == "builtin", f'engine.kind = "{job.engine.kind}" serves one model: use the built-in engine'),
        (
            p.cluster in ("local", "process"),
            f'place.cluster = "{p.cluster}" starts the workers of one: use place.kind = "shared", '
            'or cluster = "process"',
        ),
        (p.ranks == 1, f"place.ranks = {p.ranks} shards one: set it to 1"),
        (p.engine_count == 1, f"place.engines = {p.engine_count} are replicas of one: set it to 1"),
        (
            not job.trainer.memory.offload,
            "trainer.memory.offload lets one trainer and one engine take turns: set it to false",
        ),
        (not job.model.teachers, "model.teacher teaches one: remove it, and set algo.kind to a row without a teacher"),
        (
            "values" not in rows.needs or all(is_world_model(policy.model or "") for policy in job.policies.values()),
            f"algo.kind = '{rows.main.name}' has a critic of one: use a row that compares a group, grpo or rloo say",
        ),
        (
            job.engine.speculative.kind != "draft",
            'engine.speculative.kind = "draft" learns from one: use "ngram" or "off"',
        ),
        (
            not job.loop.warmup.steps,
            "loop.warmup shows answers to one: run it first as a run of its own (loop.steps = 0), and start from its "
            "checkpoint with model.path",
        ),
    ]
    for holds, rule in rules:
        if not holds:
            raise ConfigError(
                f"policies.{first} has weights of its own, which is not carried here: {rule}",
                page="docs/generate.md#agents-with-weights-of-their-own",
            )


def _check_baseline(job: Job, row: Algorithm) -> None:
    if job.algo.group_size == 1 and row.advantage.compares:
        raise ConfigError(
            f"algo.group_size = 1 gives {row.name} no baseline: every advantage would be 0. Use 4 or more, or kind = "
            "'reinforce'"
        )


def _check_demonstrations(job: Job, row: Algorithm) -> None:
    if ("guidance" in row.needs) != (job.algo.guides > 0):
        raise ConfigError(
            f"algo.guides = {job.algo.guides} has no effect on kind = '{row.name}', which would train demonstrations "
            "as its own samples: use kind = 'luffy', or a supervised phase: loop.warmup"
            if job.algo.guides
            else (
                f"algo.kind = '{row.name}' learns from demonstrations beside its samples: "
                "set algo.guides = 1; tasks need an 'answer'"
            ),
            page="docs/train.md#a-teacher-demonstrations-preferences",
        )


def _check_critic(job: Job, row: Algorithm) -> None:
    knobs = [
        name for name, field in CriticConfig.model_fields.items() if getattr(job.trainer.critic, name) != field.default
    ]
    if knobs and "values" not in row.needs:
        raise ConfigError(
            f"trainer.critic.{knobs[0]} has no effect: algo.kind = '{row.name}' has no critic. Remove it, or use "
            "kind = 'ppo', or algo.advantage = { kind = 'gae' }",
            page="docs/train.md#credit-and-a-critic",
        )


def _check_teacher(job: Job, rows: AlgorithmRows, sampling: Sampling) -> None:
    for row in rows.all_rows:
        if row.criterion_bonus is not None:
            _check_criteria(job, row.criterion_bonus, sampling)
    pupil = rows.student_row
    if (pupil is not None) != (job.model.teacher is not None):
        raise ConfigError(
            f"{pupil.name} learns from a teacher: name one with model.teacher = 'folder or hub id', or let the policy "
            "teach itself with model.teacher = [{ context = '{prompt} The answer is {answer}.' }]"
            if pupil is not None
            else (
                "model.teacher has no effect: nothing is distilled. Remove it, "
                "or set algo.distill = { coef = 1.0 } or algo.kind = 'opd'"
            ),
            page="docs/train.md#a-teacher-demonstrations-preferences",
        )
    if job.engine.sampling.temperature != 1 and (far := next((t for t in job.model.teachers if t.url), None)):
        raise ConfigError(
            f"engine.sampling.temperature = {job.engine.sampling.temperature:g}, and the teacher at {far.url} tells "
            "logprobs of temperature 1: use 1.0, or load the teacher here with a path"
        )
    if job.trainer.memory.teachers == "one":
        _check_teachers_read(job)
    if "teacher_hidden" not in rows.needs:
        return
    mesh = job.place.mesh.to_mesh(job.place.ranks)
    rules = [
        (
            all(t.url is None for t in job.model.teachers),
            "reads the teacher's last hidden states, and a server tells logprobs: use path, or kind = 'distill'",
        ),
        (
            job.loop.updates_per_step * job.loop.epochs == 1 or not any(t.is_policy for t in job.model.teachers),
            "reads the head of the policy that began the step, which the first update moves: set loop.updates_per_step "
            "= 1 and loop.epochs = 1, or use kind = 'distill'",
        ),
        (
            not sampling.truncates_support,
            "compares whole distributions, and top_k, top_p or min_p cut the policy's: set them to 0, 1 and 0",
        ),
        (
            job.place.cluster != "torchrun",
            "needs ranks that the run makes itself, each beside whole teachers: use place.ranks or place.mesh, and not "
            "torchrun, or use kind = 'distill'",
        ),
        (
            mesh.world == 1 or not any(t.is_policy for t in job.model.teachers),
            "reads the whole head of the policy, which lies in shards: set place.ranks = 1, or use kind = 'distill'",
        ),
        (
            not job.trainer.memory.offload,
            "multiplies with the teacher's head in every pass: set trainer.memory.offload = false, or use kind = "
            "'distill'",
        ),
    ]
    for holds, rule in rules:
        if not holds:
            raise ConfigError(
                f'algo.distill.kind = "full" {rule}', page="docs/train.md#a-teacher-demonstrations-preferences"
            )


def _check_criteria(job: Job, rule: CriterionBonus, sampling: Sampling) -> None:
    """Criteria of a reward, each with a hint that the policy reads."""
    hints = job.model.teachers
    absent = next((f"{name} = {place:g}" for name, place in rule.criteria.items() if place >= len(hints)), "")
    rules = [
        (
            bool(rule.criteria) or not rule.coef,
            "has no criteria: set algo.distill.criteria = { form = 0 }, parts of the reward, each with the place of "
            "its hint in model.teacher = [{ context = '{prompt} Mind the form.' }]",
        ),
        (not absent, f"names a hint that model.teacher does not have: {absent}, and it has {len(hints)}"),
        (
            all(t.is_policy and SOLUTION not in (t.context or "") for t in hints),
            "scores with the policy behind hints that every answer has: give each entry of model.teacher a context "
            "without {solution}, and neither path nor url",
        ),
        (
            not sampling.truncates_support,
            "compares with the log-probabilities of the draw, and top_k, top_p or min_p cut these: set them to 0, 1 and 0",
        ),
    ]
    for holds, rule_text in rules:
        if not holds:
            raise ConfigError(
                f'algo.distill.kind = "criteria" {rule_text}', page="docs/train.md#a-teacher-demonstrations-preferences"
            )


def _check_teachers_read(job: Job) -> None:
    """trainer.memory.teachers = "one"."""
    loaded = [t.path for t in job.model.teachers if t.path is not None]
    rules = [
        (bool(loaded), "has no effect without a teacher that has a path: remove it"),
        (
            all(isinstance(path, str) for path in loaded),
            "reads teachers from their files, and one of random weights has none: save it first, or remove the key",
        ),
        (
            not job.trainer.memory.offload,
            "reads from files what trainer.memory.offload keeps in host memory: leave one of them out",
        ),
        (
            job.place.cluster != "torchrun",
            "needs ranks that the run makes itself: use place.ranks or place.mesh, and not torchrun, or remove the key",
        ),
    ]
    for holds, rule in rules:
        if not holds:
            raise ConfigError(f'trainer.memory.teachers = "one" {rule}')


def _check_behavior_top(job: Job, rows: AlgorithmRows) -> None:
    """A row that reads a head of the vocabulary, or more draws, at every draw."""
    if "behavior_top" not in rows.needs:
        return
    rules = [
        (
            len(rows.behavior_wants) == 1,
            f"rows of this recipe want different things of it ({', '.join(sorted(rows.behavior_wants))}): give all "
            "sources rows that read the likeliest tokens, or that read more draws",
        ),
        (
            job.engine.kind == "builtin",
            f'engine.kind = "{job.engine.kind}" does not tell them of the distribution that it draws from: '
            'use "builtin"',
        ),
    ]
    for holds, rule in rules:
        if not holds:
            raise ConfigError(f"algo.surrogate reads more of the distribution of every draw than its token, and {rule}")


def _check_focused(job: Job, rows: AlgorithmRows) -> None:
    """An order in which a whole batch decides what the next one asks."""
    if job.task.curriculum.get("kind") != "focused":
        return
    filters = [*rows.main.filters, *map(str, job.task.filters)]
    rules = [
        (job.loop.max_staleness == 0, "decides by the batch before: set loop.max_staleness = 0"),
        (not filters, f"asks for whole batches, and filters leave groups out ({', '.join(filters)}): remove them"),
        (not job.loop.oversample.groups, "asks for whole batches: set loop.oversample = 0"),
        ("sources" not in job.task.data, "orders one source: take data without sources"),
        (
            job.task.curriculum.get("top", 4) <= job.loop.groups_per_step,
            f"asks top = {job.task.curriculum.get('top', 4)} questions again, and a batch has "
            f"{job.loop.groups_per_step}: lower it",
        ),
    ]
    for holds, rule in rules:
        if not holds:
            raise ConfigError(f"task.curriculum.kind = 'focused' {rule}", page="docs/generate.md#tasks")


def _check_whole_distribution(rows: AlgorithmRows, sampling: Sampling) -> None:
    """A trainer computes log-probabilities at one temperature: the sampler's,
    or 1 for a row that learns the model's own."""
    kinds = {row.surrogate.whole_distribution: row.name for row in rows.all_rows}
    if len(kinds) > 1 and (sampling.temperature != 1 or sampling.truncates_support):
        raise ConfigError(
            f"'{kinds[True]}' learns the model's own distribution at temperature 1, and '{kinds[False]}' that of the "
            f"sampler (temperature = {sampling.temperature:g}, top_k = {sampling.top_k}, top_p = {sampling.top_p:g}, min_p = "
            f"{sampling.min_p:g}): give all sources rows of one kind, or sample with temperature = 1, top_k = 0, top_p = 1 "
            "and min_p = 0"
        )


def _check_replays(job: Job, row: Algorithm) -> None:
    """Groups that come back, for a row that does not look at who drew a token, or that counts rewards over steps."""
    if job.loop.replays.groups and row.advantage.remembers:
        raise ConfigError(
            f"loop.replays with '{row.name}', whose advantage remembers what earlier steps have earned: a group that "
            "comes back would be counted twice. Leave replays out, or take another advantage",
            page="docs/train.md",
        )
    lag, bound = job.loop.replays.max_lag, job.loop.max_staleness
    if lag is not None and lag > bound and "advantages" in row.needs and not row.corrects_staleness:
        raise ConfigError(
            f"loop.replays.max_lag = {lag} is beyond loop.max_staleness = {bound}, and '{row.name}' trains tokens of "
            'old weights as if they were fresh: set algo.correction = { kind = "importance" }, take a row that reads '
            "the log-probabilities of the behavior (topr, aipo, dppo_tv, decoupled, ...), or leave max_lag out",
            page="docs/train.md",
        )


def _check_reference(job: Job, row: Algorithm) -> None:
    if job.loop.warmup.steps and row.needs & {"ref_logprobs", "ref_means"}:
        asks = "algo.kl.coef" if row.kl.coef else f"algo.kind = '{row.name}'"
        raise ConfigError(
            f"{asks} with loop.warmup: the reference would be the model before its supervised phase. Run the warmup "
            "as a run of its own (loop.steps = 0) and start from its checkpoint with model.path"
        )
