"""OpenRLHF's `train_ppo_ray`: its flags, in a script or alone. The flat names of
releases before 0.10 are read as today's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from rondel.importing.peer import (
    DEVICE,
    ENGINE,
    FOLDER,
    LAUNCHER,
    LORA,
    MEMORY,
    PACKED,
    MissingKeys,
    Part,
    PeerFormat,
    PeerSettings,
    RecipeLine,
    SameKeys,
    translate_adapter,
    translate_truncation,
)
from rondel.importing.placement import translate_placement

ROWS = {  # algo.advantage.estimator -> (row, advantage laid over it, its eps)
    "gae": ("ppo", None, None),
    "group_norm": ("grpo", "group_norm", 1e-9),
    "dr_grpo": ("grpo", "group_center", None),
    "rloo": ("grpo", "leave_one_out", None),
    "reinforce": ("reinforce_pp", None, None),
    "reinforce_baseline": ("reinforce_pp_baseline", None, None),
}
# estimators that take one off before they charge the KL
BASELINE = ("group_norm", "dr_grpo", "rloo", "reinforce_baseline")
CHARGED = ("gae", "reinforce")  # their rows here charge the KL to the reward unless told otherwise
AGGREGATES = {"token-mean": "token_mean", "seq-mean-token-mean": "seq_mean_token_mean"}
SCHEDULES = {name: name for name in ("constant", "linear", "cosine")} | {"constant_with_warmup": "constant"}
REASONS = {
    "launcher *": LAUNCHER,
    "critic.*": "the row has no critic, or it has the policy's own settings",
    "reward.*": "a reward is a function here: task.reward = 'module:name'",
    "ref.*": "the reference is a frozen copy of the starting weights, on the one device",
    "vllm.*": ENGINE,
    "ds.lora.*": LORA,
    "ds.load_in_4bit": (
        "whole weights cannot be trained in 4 bits: with ds.lora.rank it is model.adapter.kind = 'qlora'"
    ),
    "ds.packing_samples": PACKED,
    "ds.*": DEVICE,
    "*num_nodes": DEVICE,
    "*num_gpus_per_node": DEVICE,
    "train.colocate_*": DEVICE,
    "*micro_batch_size": MEMORY,
    "*max_tokens_per_gpu": MEMORY,
    "train.dynamic_batch_enable": PACKED,
    "actor.gradient_checkpointing*": MEMORY,
    "actor.muon.*": 'its Muon has a rate of its own; trainer.optimizer = { kind = "muon" } takes that of AdamW',
    "actor.min_lr_ratio": "a schedule ends at 0 here",
    "algo.advantage.gamma": "this advantage discounts nothing",
    "algo.advantage.lambd": "it belongs to a critic",
    "train.async_queue_size": "set loop.max_staleness: it bounds the lag by a number",
    "data.apply_chat_template": "a prompt becomes a chat when the model has a template",
    "data.input_template": "task.env.suffix and task.system are what is added to a prompt",
    "logger.wandb.*": FOLDER,
    "train.agent_func_path": "turns are an environment: task.env = 'module:name'",
    "eval.n_samples_per_prompt": "an evaluation draws one answer a task",
    "ckpt.output_dir": FOLDER,
    "ckpt.load_enable": "an unfinished run folder is continued by the same command",
    "ckpt.*": FOLDER,
}


def _translate_model(s: PeerSettings) -> Iterator[Part]:
    key = "actor.model_name_or_path"
    yield RecipeLine("model.path", s[key] or "MODEL", (key,), ask="" if s[key] else "the flags name no model")
    if compute := s.translate_choice("ds.param_dtype", {"bf16": "bfloat16", "fp16": "float16"}):
        yield RecipeLine("model.dtype", compute, ("ds.param_dtype",), "master weights are float32 here")
    if s.require_number("ds.lora.rank"):
        yield from translate_adapter(
            s,
            rank="ds.lora.rank",
            alpha="ds.lora.alpha",
            targets="ds.lora.target_modules",
            dropout="ds.lora.dropout",
            four_bits="ds.load_in_4bit",
        )


def _translate_task(s: PeerSettings) -> Iterator[Part]:
    name, label = str(s["data.prompt_dataset"] or "DATASET"), s["data.label_key"]
    columns = {"prompt": s["data.input_key"], "answer": label or ""}
    keys: tuple[str, ...] = ("data.prompt_dataset", "data.prompt_split", "data.input_key", "data.label_key")
    if s.is_set("data.image_key") or s["data.max_images_per_prompt"]:
        columns["image"], keys = s["data.image_key"], (*keys, "data.image_key")
    sets = [_dataset_entry(s, one.strip()) | columns for one in name.split(",")]
    ask = "" if s["data.prompt_dataset"] else "the flags name no data"
    if len(sets) == 1:
        yield RecipeLine("task.data", sets[0], keys, ask=ask)
        yield from (MissingKeys((key,), "there is one data set") for key in ("data.prompt_probs",) if s.is_set(key))
    else:
        shares = (
            [float(share) for share in str(s["data.prompt_probs"]).split(",")]
            if s["data.prompt_probs"]
            else [1.0] * len(sets)
        )
        named = [{"source": f"{i}-{PurePath(one.strip()).stem}"} for i, one in enumerate(name.split(","), 1)]
        sources = [who | {"weight": share} | own for who, share, own in zip(named, shares, sets)]
        even = (
            ""
            if s["data.prompt_probs"]
            else "theirs are put one behind the other, so a large one weighs more: the weight is its share of the rows"
        )
        yield RecipeLine("task.data", {"kind": "mix", "sources": sources}, (*keys, "data.prompt_probs"), ask=even)
    urls = s["reward.remote_url"]
    if isinstance(urls, str) and urls.endswith(".py"):
        module = urls.rpartition("/")[2].removesuffix(".py")
        wrap = "theirs takes (queries, prompts, labels); ours takes (trajectory, task) and returns a number: wrap it"
        yield RecipeLine("task.reward", f"{module}:reward_func", ("reward.remote_url",), ask=wrap)
    else:
        why = f"a reward is a function here, and cannot be asked of {urls or s['reward.model_name_or_path']}"
        yield RecipeLine("task.reward", "math", ask=why)
    key, bounds = "algo.dynamic_filtering_enable", "algo.dynamic_filtering_range"
    if s[key] and list(s[bounds]) == [0, 1]:
        yield RecipeLine("task.filters", ["signal"], (key, bounds), "drops groups whose rewards are all equal")
    elif s[key]:
        yield MissingKeys(
            (key, bounds), 'task.filters = ["signal"] drops groups whose rewards are all equal; no other range exists'
        )
    else:
        yield SameKeys((key,), "no group is dropped")


def _dataset_entry(s: PeerSettings, name: str) -> dict[str, Any]:
    """One of their data sets, as task.data begins."""
    local = name.endswith((".jsonl", ".json"))
    return (
        {"kind": "jsonl", "path": name}
        if local
        else {"kind": "datasets", "name": name, "split": s["data.prompt_split"]}
    )


def _algorithm_lines(s: PeerSettings) -> Iterator[Part]:
    key, loss = "algo.advantage.estimator", "actor.policy_loss_type"
    row, advantage, eps = s.translate_choice(key, ROWS) or (str(s[key]), None, None)
    if s[loss] == "gspo" and advantage:
        yield RecipeLine("algo.kind", "gspo", (loss,))
    else:
        yield RecipeLine("algo.kind", row, (key,))
        yield (
            SameKeys((loss,), "the clipped ratio")
            if s[loss] == "ppo"
            else MissingKeys((loss,), f"with the advantage {s[key]} there is no row for it")
        )
    group = "rollout.n_samples_per_prompt"
    yield RecipeLine("algo.group_size", s.require_integer(group), (group,))
    if advantage:
        yield RecipeLine("algo.advantage.kind", advantage, (key,))
    if eps:
        yield RecipeLine("algo.advantage.eps", eps)
    if s[key] in CHARGED:
        yield RecipeLine(
            "algo.advantage.gamma", float(s.require_number("algo.advantage.gamma")), ("algo.advantage.gamma",)
        )
    if s[key] == "gae":
        yield RecipeLine(
            "algo.advantage.lam", float(s.require_number("algo.advantage.lambd")), ("algo.advantage.lambd",)
        )
        yield from _critic_lines(s)


def _critic_lines(s: PeerSettings) -> Iterator[Part]:
    yield RecipeLine("algo.value.clip", float(s.require_number("critic.value_clip")), ("critic.value_clip",))
    yield RecipeLine("trainer.critic.lr", float(s.require_number("critic.adam.lr")), ("critic.adam.lr",))
    yield RecipeLine(
        "trainer.critic.warmup", max(0, s.require_integer("critic.freezing_steps")), ("critic.freezing_steps",)
    )
    if s["critic.model_name_or_path"]:
        yield RecipeLine("trainer.critic.path", str(s["critic.model_name_or_path"]), ("critic.model_name_or_path",))


def _translate_loss(s: PeerSettings) -> Iterator[Part]:
    both, clip = "actor.eps_clip_low_high", "actor.eps_clip"
    low, high = (
        s[both] if isinstance(s[both], list) and len(s[both]) == 2 else (s.require_number(clip), s.require_number(clip))
    )
    keys = (both,) if s[both] else (clip,)
    yield RecipeLine("algo.surrogate.low", float(low), keys)
    yield RecipeLine("algo.surrogate.high", float(high), keys)
    if s[both] and s.is_set(clip):
        yield MissingKeys((clip,), "it has no effect there: eps_clip_low_high comes first")
    if s["actor.dual_clip"] is not None:
        yield RecipeLine("algo.surrogate.dual", float(s.require_number("actor.dual_clip")), ("actor.dual_clip",))
    mode = "actor.loss_agg_mode"
    if (
        aggregate := "seq_mean_token_mean"
        if s["actor.policy_loss_type"] == "gspo"
        else s.translate_choice(mode, AGGREGATES)
    ):
        yield RecipeLine("algo.aggregate.kind", aggregate, (mode,))
    else:
        yield MissingKeys((mode,), f"known here: {', '.join(AGGREGATES.values())}")
    yield RecipeLine("algo.entropy.coef", float(s.require_number("actor.entropy_coef") or 0), ("actor.entropy_coef",))
    if s["actor.entropy_coef"] and aggregate != "token_mean":
        yield MissingKeys(
            ("actor.entropy_coef",), f"their entropy is a mean over tokens; here the weights are those of {aggregate}"
        )
    yield from _translate_kl(s, str(aggregate))
    buffer, factor = "reward.overlong_buffer_len", "reward.overlong_penalty_factor"
    if s[buffer]:
        yield RecipeLine("algo.shaping.kind", "overlong", (buffer,))
        yield RecipeLine("algo.shaping.buffer", s.require_integer(buffer), (buffer,))
        yield RecipeLine("algo.shaping.factor", float(s.require_number(factor)), (factor,))
        yield MissingKeys(("reward.clip_range",), "one shaping at a time: the overlong penalty")
        return
    if s.is_set(factor):
        yield MissingKeys((factor,), "it has no effect there: overlong_buffer_len is not set")
    least, most = s["reward.clip_range"]
    samples = s.require_integer("rollout.n_samples_per_prompt")
    if s["algo.advantage.estimator"] == "group_norm" and -least == most >= samples**0.5:
        yield SameKeys(
            ("reward.clip_range",),
            f"of {samples} answers none is further from the mean of its group than that many deviations",
        )
    elif s["algo.advantage.estimator"] in BASELINE:
        yield MissingKeys(
            ("reward.clip_range",),
            "there the reward less its baseline is clipped, here a reward before the baseline: left out",
        )
    elif -least == most:
        yield RecipeLine("algo.shaping", {"kind": "clip", "limit": float(most)}, ("reward.clip_range",))
    else:
        yield MissingKeys(("reward.clip_range",), "a reward is clipped at ±limit here")


def _translate_kl(s: PeerSettings, aggregate: str) -> Iterator[Part]:
    """In the loss or in the reward, where it is by default. Every estimator is held to ±10 a token."""
    coef = "algo.kl.init_coef"
    use = "algo.kl.use_loss"
    kind = "algo.kl.estimator"
    unbiased = "algo.kl.unbiased_gradient"
    target, horizon = "algo.kl.target", "algo.kl.horizon"
    if not s.require_number(coef):
        yield RecipeLine("algo.kl.coef", 0.0, (coef,))
        yield SameKeys((use, kind, unbiased), "there is no KL term")
        return
    table = {"kind": str(s[kind]), "coef": float(s[coef]), "clamp": 10.0}
    steered = {"target": float(s.require_number(target)), "horizon": s.require_integer(horizon)} if s[target] else {}
    keys = (coef, kind, use, *((target, horizon) if steered else ()))
    if s[use]:
        through = {"through": "k2"} if s[unbiased] and s[kind] != "k2" else {}
        yield RecipeLine("algo.kl", table | {"where": "loss"} | through | steered, keys)
        if aggregate != "token_mean":
            yield MissingKeys((use,), f"their KL is a mean over tokens; here the weights are those of {aggregate}")
    else:
        behind = s["algo.advantage.estimator"] in BASELINE
        yield RecipeLine("algo.kl", table | {"where": "advantage" if behind else "reward"} | steered, keys)
        if s["algo.advantage.estimator"] == "reinforce_baseline":
            yield MissingKeys(
                (coef, use),
                "there it is charged before the advantages of the step get mean 0 and deviation 1, here after",
            )
    if s[unbiased] and s[use]:
        yield MissingKeys(
            (unbiased,),
            "the gradient is that of k2 here too, but without their weight policy / old policy, which is 1 in a first "
            "update",
        )
    elif s[unbiased]:
        yield MissingKeys((unbiased,), "it has no effect there: the KL is in the reward")


def _correction_lines(s: PeerSettings) -> Iterator[Part]:
    """A gate on the trainer's probability by the engine's; releases before 0.10 had a name for each."""
    level, mode, gating, bounds = (
        f"algo.advantage.is_correction_{end}" for end in ("level", "mode", "gating", "threshold")
    )
    old, kind, ice = "enable_vllm_is_correction", "vllm_is_correction_type", "use_icepop"
    wish, keys = (s[level], s[mode], s[gating]), (level, mode, gating, bounds)
    if s.is_set(old):
        names = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}
        named = "icepop" if s.is_set(ice) else s.values.get(kind, "tis")
        wish, keys = (*names.get(str(named), ("", "")), "ratio"), (old, kind, ice, bounds)
    if wish[0] == "off":
        yield from (
            MissingKeys((key,), "it has no effect there: is_correction_level is off")
            for key in (mode, gating, bounds)
            if s.is_set(key)
        )
        yield SameKeys((level,), "no correction")
        return
    if (
        s["actor.policy_loss_type"] == "gspo"
        and (s.translate_choice("algo.advantage.estimator", ROWS) or ("", None))[1]
    ):
        yield RecipeLine(
            "algo.ratio.anchor",
            "behavior",
            keys[:1],
            "its ratio is then policy / engine, and nothing is masked or clipped for it",
        )
        yield from (
            MissingKeys((key,), "it has no effect there with policy_loss_type = gspo")
            for key in keys[1:]
            if s.is_set(key)
        )
        return
    low, high = s[bounds] if isinstance(s[bounds], list) and len(s[bounds]) == 2 else (0.0, s[bounds])
    held = {"low": float(low), "high": float(high)}
    tables = {
        ("token", "clip", "ratio"): {"kind": "importance", "action": "clip"} | held,
        ("token", "mask", "ratio"): {"kind": "importance", "action": "mask"} | held,
        ("seq", "mask", "ratio"): {"kind": "importance", "high": float("inf"), "reject": "geometric"}
        | {f"reject_{end}": bound for end, bound in held.items()},
    }
    if wish in tables:
        yield RecipeLine("algo.correction", tables[wish], keys)
    else:
        yield MissingKeys(keys, f"a correction {' '.join(map(str, wish))} does not exist here; importance weights do")


def _translate_loop(s: PeerSettings) -> Iterator[Part]:
    prompts = s.require_integer("rollout.batch_size")
    samples = s.require_integer("rollout.n_samples_per_prompt")
    batch = s.require_integer("train.batch_size")
    yield RecipeLine("loop.groups_per_step", prompts, ("rollout.batch_size",))
    note = f"{prompts * samples} samples in batches of {batch}" + ", rounded" * bool(prompts * samples % batch)
    yield RecipeLine("loop.updates_per_step", max(1, round(prompts * samples / batch)), ("train.batch_size",), note)
    yield RecipeLine("loop.passes", float(s.require_number("train.num_episodes")), ("train.num_episodes",))
    if s.is_set("data.max_samples"):
        yield MissingKeys(
            ("data.max_samples",), "a data set is read whole; task.data.where chooses rows by their fields"
        )
    yield RecipeLine("loop.epochs", s.require_integer("train.max_epochs"), ("train.max_epochs",))
    yield RecipeLine("loop.seed", s.require_integer("train.seed"), ("train.seed",))
    if s["train.async_enable"]:
        yield MissingKeys(
            ("train.async_enable",),
            "set loop.max_staleness: it bounds the lag by a number, and 1 is one step off-policy",
        )
    else:
        yield SameKeys(("train.async_enable",), "loop.max_staleness is 0")
    if s["train.partial_rollout_enable"]:
        yield RecipeLine(
            "loop.in_flight", "hold", ("train.partial_rollout_enable",), "it needs loop.max_staleness above 0"
        )


def _translate_sampling(s: PeerSettings) -> Iterator[Part]:
    yield RecipeLine(
        "engine.sampling.temperature", float(s.require_number("rollout.temperature")), ("rollout.temperature",)
    )
    length, whole = "rollout.max_new_tokens", "data.max_len"
    if s[length] is not None:
        yield RecipeLine("engine.sampling.max_tokens", s.require_integer(length), (length,))
    else:
        ask = f"there an answer may fill what its prompt leaves of {s[whole]} tokens; here all answers have one limit"
        yield RecipeLine("engine.sampling.max_tokens", s.require_integer(whole), (whole,), ask=ask)
    yield from translate_truncation(s, "rollout.top_p")
    yield RecipeLine(
        "task.eval.sampling.temperature", float(s.require_number("eval.temperature")), ("eval.temperature",)
    )


def _translate_optimizer(s: PeerSettings) -> Iterator[Part]:
    if s["actor.optim"] == "adam":
        yield SameKeys(("actor.optim",), "AdamW")
    yield RecipeLine("trainer.lr", float(s.require_number("actor.adam.lr")), ("actor.adam.lr",))
    kind, least, share = "actor.lr_scheduler", "actor.min_lr_ratio", "actor.lr_warmup_ratio"
    if schedule := s.translate_choice(kind, SCHEDULES):
        yield RecipeLine("trainer.schedule", schedule, (kind,))
    elif str(s[kind]) == "cosine_with_min_lr":
        yield RecipeLine("trainer.schedule", "cosine", (kind,), f"theirs ends at {s[least]} of the rate, ours at 0")
        yield MissingKeys((least,), "a cosine ends at 0 here")
    else:
        yield MissingKeys((kind,), "constant, linear and cosine exist here")
    if s.require_number(share):
        yield RecipeLine(
            "trainer.optimizer.warmup_steps", 0, (share,), ask=f"{s[share]} of all steps: write the number"
        )
    else:
        yield SameKeys((share,), "no warm-up")
    yield RecipeLine("trainer.clip", float(s.require_number("actor.max_norm")), ("actor.max_norm",))
    yield RecipeLine(
        "trainer.optimizer.weight_decay",
        float(s.require_number("actor.adam.weight_decay")),
        ("actor.adam.weight_decay",),
    )
    yield RecipeLine("trainer.optimizer.betas", list(s["actor.adam.betas"]), ("actor.adam.betas",))
    if s["actor.adam.eps"] == 1e-8:
        yield SameKeys(("actor.adam.eps",), "1e-8")


def _translate_run(s: PeerSettings) -> Iterator[Part]:
    yield RecipeLine(
        "run.folder",
        str(s["ckpt.path"]) if s.is_set("ckpt.path") else "runs/openrlhf",
        ("ckpt.path",) if s.is_set("ckpt.path") else (),
    )
    every = s.require_integer("ckpt.save_steps")
    yield RecipeLine("run.checkpoint.every", max(0, every), ("ckpt.save_steps",), "one at the end" * (every <= 0))
    yield RecipeLine("run.checkpoint.keep", max(1, s.require_integer("ckpt.max_num")), ("ckpt.max_num",))
    yield RecipeLine("task.eval.every", max(0, s.require_integer("eval.steps")), ("eval.steps",))
    if s.is_set("eval.dataset"):
        yield MissingKeys(("eval.dataset", "eval.split"), "name it in task.data: eval_name, eval_path or eval_split")
    tracked = ("logger.tensorboard_dir", "logger.wandb.key")
    if names := [name for name, key in zip(("tensorboard", "wandb"), tracked) if s.is_set(key) and s[key]]:
        yield RecipeLine(
            "run.sinks", names, tracked, "they lie in the run folder; wandb takes its key from its own login"
        )


def _translate_placement(s: PeerSettings) -> Iterator[Part]:
    yield from translate_placement(
        s,
        axes={"tp": ("ds.tensor_parallel_size",), "cp": ("ds.ring_attn_size",)},
        engine_tp="vllm.tensor_parallel_size",
        engines="" if s["train.colocate_all"] else "vllm.num_engines",
        apart=not s["train.colocate_all"],
    )


OPENRLHF = PeerFormat.from_parts(
    "openrlhf",
    (
        _translate_model,
        _translate_task,
        _algorithm_lines,
        _translate_loss,
        _correction_lines,
        _translate_loop,
        _translate_sampling,
        _translate_optimizer,
        _translate_placement,
        _translate_run,
    ),
    REASONS,
)
