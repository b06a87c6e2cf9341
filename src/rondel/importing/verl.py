"""verl's PPO trainer: its hydra YAML, or overrides `key.sub=value` on a command line or in a script."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rondel.core.errors import ConfigError
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
    translate_sinks,
    translate_truncation,
)
from rondel.importing.placement import translate_placement

ACTOR, ROLLOUT, OPTIM = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.actor.optim"
ROWS = {  # algorithm.adv_estimator -> (row, advantage laid over it)
    "gae": ("ppo", None),
    "grpo": ("grpo", "group_norm"),
    "grpo_vectorized": ("grpo", "group_norm"),
    "rloo": ("grpo", "leave_one_out"),
    "rloo_vectorized": ("grpo", "leave_one_out"),
    "reinforce_plus_plus": ("reinforce_pp", None),
    "reinforce_plus_plus_baseline": ("reinforce_pp_baseline", None),
    "remax": ("remax", None),
    "opo": ("opo", None),
    "grpo_passk": ("pass_at_k", None),
    "gpg": ("gpg", None),
    "gdpo": ("gdpo", None),
    "optimal_token_baseline": ("otb", None),
    "tir_optimal_token_baseline": ("otb", None),
    "codapo": ("codapo", None),
}
SCORERS = {"openai/gsm8k": "number"} | dict.fromkeys(  # data_source -> the reward nearest to theirs
    (
        "lighteval/MATH",
        "DigitalLearningGmbH/MATH-lighteval",
        "HuggingFaceH4/MATH-500",
        "math_dapo",
        "math",
        "hiyouga/geometry3k",
    ),
    "math",
)
CHARGED = ("gae", "reinforce_plus_plus")  # their rows here charge the KL to the reward unless told otherwise
LOSSES = {  # policy_loss.loss_mode -> row
    "gspo": "gspo_token",
    "sapo": "sapo",
    "gpg": "gpg",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "geo_mean": "gmpo",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
    "cispo": "cispo",
    "up": "up",
}
AGGREGATES = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum-norm": "fixed_norm",
}
CLAMPED = {"k3": {"clamp": 10.0}}
KLS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
REJECTS = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}
# loss_mode -> {knob: key below the actor's}; those without low and high read clip_ratio_low and clip_ratio_high
KNOBS = {
    "vanilla": {"dual": "clip_ratio_c"},
    "up": {"dual": "clip_ratio_c"},
    "sapo": {"positive": "tau_pos", "negative": "tau_neg"},
    "clip_cov": {
        "share": "policy_loss.clip_cov_ratio",
        "least": "policy_loss.clip_cov_lb",
        "most": "policy_loss.clip_cov_ub",
    },
    "kl_cov": {"share": "policy_loss.kl_cov_ratio", "coef": "policy_loss.ppo_kl_coef"},
    "dppo_tv": {"cap": "clip_ratio_c"},
    "dppo_kl": {"cap": "clip_ratio_c"},
}
BY_SAMPLE = ("sapo", "geo_mean")  # losses that are a mean over samples whatever loss_agg_mode says
UNCLIPPED = ("sapo", "gpg", "kl_cov")
REASONS = {
    "launcher *": LAUNCHER,
    "--*": "it chooses among their config files",
    "defaults": "it chooses among their config files",
    "*_target_": "it names a class of theirs",
    "hydra*": "it steers their config reader",
    "critic*": "the row has no critic, or it has the policy's own settings",
    "trainer.critic_warmup": "the row has no critic",
    "algorithm.gamma": "this advantage discounts nothing",
    "algorithm.lam": "it belongs to a critic",
    "algorithm.kl_ctrl*": "it steers a KL that this config does not have",
    "algorithm.filter_groups*": "groups without signal are dropped and refilled; loop.max_refills bounds it",
    "*clip_ratio*": "this loss does not read it",
    "*policy_loss*": "this loss does not read it",
    "*tau_*": "this loss does not read it",
    "*param_offload": MEMORY,
    "*optimizer_offload": MEMORY,
    "*fsdp_config*": DEVICE,
    "*megatron*": DEVICE,
    "*_micro_batch_size*": MEMORY,
    "*use_dynamic_bsz": PACKED,
    "*max_token_len_per_gpu": MEMORY,
    "*sequence_parallel_size": DEVICE,
    "*use_remove_padding": PACKED,
    "*enable_gradient_checkpointing": MEMORY,
    "*torch_compile": MEMORY,
    "*lora*": LORA,
    "actor_rollout_ref.rollout.multi_turn*": "turns are an environment: task.env = 'module:name'",
    "actor_rollout_ref.rollout.agent*": "turns are an environment: task.env = 'module:name'",
    "actor_rollout_ref.rollout.val_kwargs*": (
        "evaluations draw one answer a task, greedily unless task.eval says otherwise"
    ),
    "actor_rollout_ref.rollout*": ENGINE,
    "actor_rollout_ref.ref*": "the reference is a frozen copy of the starting weights",
    "actor_rollout_ref.model*": "the model is loaded as its folder says",
    "data.max_prompt_length": (
        "a prompt may fill the model's context, and a longer one is an error; task.max_prompt_tokens leaves it out"
    ),
    "data.filter_overlong_prompts*": "prompts are counted in the process",
    "data.truncation": "a prompt is never cut",
    "reward*": "a reward is a function here: task.reward = 'module:name'",
    "trainer.nnodes": DEVICE,
    "trainer.n_gpus_per_node": DEVICE,
    "trainer.resume*": "an unfinished run folder is continued by the same command",
    "trainer.project_name": FOLDER,
    "trainer.experiment_name": FOLDER,
    "trainer.val_before_train": "held-out tasks are asked before and after",
    "trainer.balance_batch": DEVICE,
}


def _translate_model(s: PeerSettings) -> Iterator[Part]:
    yield RecipeLine("model.path", _expand_user(s["actor_rollout_ref.model.path"]), ("actor_rollout_ref.model.path",))
    dtypes = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
    dtypes |= {"float16": "float16", "fp16": "float16"}
    key = f"{ACTOR}.fsdp_config.dtype"
    if found := s.translate_choice(key, dtypes):
        yield RecipeLine("model.dtype", found, (key,), "master weights are float32 here")
    if s[f"{ACTOR}.fsdp_config.model_dtype"] in ("fp32", "float32"):
        yield SameKeys((f"{ACTOR}.fsdp_config.model_dtype",), "master weights are float32")
    model = "actor_rollout_ref.model"
    if s.require_number(f"{model}.lora_rank"):
        yield from translate_adapter(
            s, rank=f"{model}.lora_rank", alpha=f"{model}.lora_alpha", targets=f"{model}.target_modules"
        )


def _translate_task(s: PeerSettings) -> Iterator[Part]:
    train, held = _file_paths(s["data.train_files"]), _file_paths(s["data.val_files"])
    data = {"kind": "parquet", "path": train, "eval_path": held, "prompt": s["data.prompt_key"]}
    data["answer"] = "reward_model.ground_truth"
    keys: tuple[str, ...] = ("data.train_files", "data.val_files", "data.prompt_key")
    printed = s.is_set("data.video_key") and s["data.image_key"] == s.peer.defaults["data.image_key"]
    if s.is_set("data.image_key") and printed:  # a printed config names every key, also those of no use to a text model
        yield MissingKeys(
            ("data.image_key",),
            f"the config names every key; if the rows have images, add image = '{s['data.image_key']}' to task.data",
        )
    elif s.is_set("data.image_key"):
        data["image"], keys = s["data.image_key"], (*keys, "data.image_key")
    yield RecipeLine("task.data", data, keys)
    if s["data.filter_overlong_prompts"]:
        both = ("data.max_prompt_length", "data.filter_overlong_prompts")
        yield RecipeLine("task.max_prompt_tokens", s.require_integer("data.max_prompt_length"), both)
    path, name = s["reward.custom_reward_function.path"], s["reward.custom_reward_function.name"]
    if path:
        wrap = (
            "theirs takes (data_source, solution_str, ground_truth, extra_info); ours takes (trajectory, task): wrap it"
        )
        both = ("reward.custom_reward_function.path", "reward.custom_reward_function.name")
        yield RecipeLine("task.reward", f"{Path(str(path)).stem}:{name or 'compute_score'}", both, ask=wrap)
    else:
        field = str(s["data.reward_fn_key"])
        ask = (
            f"a scorer for each {field} of your rows: those that theirs are nearest to; name the others, "
            "remove what you have not"
        )
        yield RecipeLine(
            "task.reward", {"kind": "by", "field": field, "parts": dict(SCORERS)}, ("data.reward_fn_key",), ask=ask
        )
    if s.require_number("data.val_max_samples") > 0:
        yield RecipeLine("task.eval.n", s.require_integer("data.val_max_samples"), ("data.val_max_samples",))
    else:
        yield SameKeys(("data.val_max_samples",), "all of them")
    if s["algorithm.filter_groups.enable"]:
        yield RecipeLine("task.filters", ["signal"], ("algorithm.filter_groups.enable",))
    else:
        yield SameKeys(("algorithm.filter_groups.enable",), "no group is dropped")


def _algorithm_lines(s: PeerSettings) -> Iterator[Part]:
    estimator, mode = "algorithm.adv_estimator", f"{ACTOR}.policy_loss.loss_mode"
    if _taught_alone(s):
        yield RecipeLine("algo.kind", "opd", (REWARDLESS,), "learns from the teacher alone")
        yield RecipeLine("algo.group_size", s.require_integer(f"{ROLLOUT}.n"), (f"{ROLLOUT}.n",))
        yield from (MissingKeys((estimator,), "no reward is read") for _ in range(s.is_set(estimator)))
        return
    row, advantage = s.translate_choice(estimator, ROWS) or (str(s[estimator]), None)
    loss = None if s[mode] == "vanilla" else s.translate_choice(mode, LOSSES) or str(s[mode])
    if loss and advantage:
        yield RecipeLine("algo.kind", loss, (mode,))
    else:
        yield RecipeLine("algo.kind", row, (estimator,))
        if loss:
            yield MissingKeys((mode,), f"with the advantage {s[estimator]} there is no row for this loss")
        else:
            yield SameKeys((mode,), "the clipped ratio")
    yield RecipeLine("algo.group_size", s.require_integer(f"{ROLLOUT}.n"), (f"{ROLLOUT}.n",))
    normed = "algorithm.norm_adv_by_std_in_grpo"
    if advantage == "group_norm":
        yield RecipeLine("algo.advantage.kind", "group_norm" if s[normed] else "group_center", (estimator, normed))
    elif advantage:
        yield RecipeLine("algo.advantage.kind", advantage, (estimator,))
    if s[estimator] == "codapo":
        yield from _codapo_lines(s)
    if s[estimator] in CHARGED:
        yield RecipeLine("algo.advantage.gamma", float(s.require_number("algorithm.gamma")), ("algorithm.gamma",))
    if s[estimator] == "grpo_passk":
        yield RecipeLine("algo.advantage.divide", bool(s[normed]), (normed,))
    if s[estimator] == "gae":
        yield RecipeLine("algo.advantage.lam", float(s.require_number("algorithm.lam")), ("algorithm.lam",))
        yield from _critic_lines(s)
    if advantage != "group_norm" and s[estimator] != "grpo_passk" and s.is_set(normed):
        yield MissingKeys((normed,), f"it has no effect there with adv_estimator = {s[estimator]}")


def _codapo_lines(s: PeerSettings) -> Iterator[Part]:
    """Keys that came after the release whose keys are known here, with their defaults."""
    defaults = {"codapo_weight_offset": 0.1, "codapo_accuracy_key": "acc", "codapo_top_k": 4}
    given = {name: s.values.get(f"algorithm.{name}", default) for name, default in defaults.items()}
    ours = {
        "algo.advantage.delta": float(given["codapo_weight_offset"]),
        "algo.advantage.part": str(given["codapo_accuracy_key"]),
    }
    for (key, value), name in zip(ours.items(), defaults, strict=False):
        ask = "the reward must return it as a part: { acc = 1.0, ... }" if name == "codapo_accuracy_key" else ""
        yield RecipeLine(key, value, (f"algorithm.{name}",), ask=ask)
    table = {"kind": "focused", "top": int(given["codapo_top_k"]), "part": ours["algo.advantage.part"]}
    yield RecipeLine("task.curriculum", table, ("algorithm.codapo_top_k",), "every other batch, as there")


def _critic_lines(s: PeerSettings) -> Iterator[Part]:
    yield RecipeLine("algo.value.clip", float(s.require_number("critic.cliprange_value")), ("critic.cliprange_value",))
    yield RecipeLine("trainer.critic.lr", float(s.require_number("critic.optim.lr")), ("critic.optim.lr",))
    yield RecipeLine("trainer.critic.warmup", s.require_integer("trainer.critic_warmup"), ("trainer.critic_warmup",))
    if s.is_set("critic.model.path") and s["critic.model.path"] != s["actor_rollout_ref.model.path"]:
        yield RecipeLine("trainer.critic.path", _expand_user(s["critic.model.path"]), ("critic.model.path",))
    else:
        yield SameKeys(("critic.model.path",), "a copy of the policy")


def _translate_loss(s: PeerSettings) -> Iterator[Part]:
    yield from _translate_surrogate(s)
    mode, scale, own = f"{ACTOR}.loss_agg_mode", f"{ACTOR}.loss_scale_factor", f"{ACTOR}.policy_loss.loss_mode"
    if s[own] in BY_SAMPLE:
        note = "their mean is over each micro-batch" if s[own] == "geo_mean" else ""
        yield RecipeLine("algo.aggregate.kind", "seq_mean_token_mean", (own,), note)
        beside = bool(s[f"{ACTOR}.use_kl_loss"] or s[f"{ACTOR}.entropy_coeff"])
        if s[mode] == "seq-mean-token-mean":
            yield SameKeys((mode,), f"{s[own]} is a mean over samples")
        elif beside or s.is_set(mode):
            other = "; there it adds up KL and entropy, which have the weights of the loss here" * beside
            yield MissingKeys((mode,), f"{s[own]} is a mean over samples there whatever it says{other}")
    elif aggregate := s.translate_choice(mode, AGGREGATES):
        yield RecipeLine("algo.aggregate.kind", aggregate, (mode,))
        if aggregate == "fixed_norm" and s[scale]:
            yield RecipeLine("algo.aggregate.length", s.require_integer(scale), (scale,))
    else:
        yield MissingKeys((mode,), f"known here: {', '.join(AGGREGATES.values())}")
    yield RecipeLine(
        "algo.entropy.coef", float(s.require_number(f"{ACTOR}.entropy_coeff")), (f"{ACTOR}.entropy_coeff",)
    )
    yield from _translate_kl(s)
    if not _taught_alone(s):
        yield from _translate_overlong(s)


def _translate_surrogate(s: PeerSettings) -> Iterator[Part]:
    """The knobs that each loss reads."""
    mode = f"{ACTOR}.policy_loss.loss_mode"
    if s[mode] == "vanilla":
        yield RecipeLine("algo.surrogate.kind", "clip", (mode,))
    if str(s[mode]).startswith("dppo"):
        yield RecipeLine("algo.ratio.anchor", "proximal", (mode,), "the paper anchors at the behavior")
    plain = f"{ACTOR}.clip_ratio"
    sides = () if s[mode] in UNCLIPPED else ("low",) if s[mode] == "up" else ("low", "high")
    for side in sides:
        key = f"{plain}_{side}"
        yield RecipeLine(
            f"algo.surrogate.{side}",
            s.require_number(plain if s[key] is None else key),
            (key,) if s[key] is not None else (key, plain),
        )
    low, high = s[f"{plain}_low"], s[f"{plain}_high"]
    if low is not None and high is not None and s.is_set(plain):
        told = f"it has no effect there: clip_ratio_low = {low} and clip_ratio_high = {high} come first"
        yield SameKeys((plain,), "so are low and high") if s[plain] == low == high else MissingKeys((plain,), told)
    for knob, end in KNOBS.get(str(s[mode]), {}).items():
        yield RecipeLine(f"algo.surrogate.{knob}", float(s.require_number(f"{ACTOR}.{end}")), (f"{ACTOR}.{end}",))


def _translate_kl(s: PeerSettings) -> Iterator[Part]:
    """In the loss or in the reward; a row here has it in one place."""
    use, coef, kind = f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"
    charged = "algorithm.use_kl_in_reward"
    price, cost, control = "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty", "algorithm.kl_ctrl.type"
    if s[use] and (found := KLS.get(str(s[kind]).removesuffix("+"))):
        through = {"through": "k2"} if str(s[kind]).endswith("+") and found != "k2" else {}
        table = (
            {"kind": found, "coef": float(s.require_number(coef)), "where": "loss"} | through | CLAMPED.get(found, {})
        )
        yield RecipeLine("algo.kl", table, (use, coef, kind))
    elif s[use]:
        yield MissingKeys((kind, use, coef), "known here: k1, k2, k3, each with the gradient of k2 too")
    else:
        yield SameKeys((use,), "no KL in the loss")
        yield from (
            MissingKeys((key,), "it has no effect there: use_kl_loss is false") for key in (coef, kind) if s.is_set(key)
        )
    if not s[charged]:
        if not s[use]:
            yield RecipeLine("algo.kl.coef", 0.0, (charged,))
        yield SameKeys((charged,), "no KL in the reward")
        yield from (
            MissingKeys((key,), "it has no effect there: use_kl_in_reward is false")
            for key in (price, cost)
            if s.is_set(key)
        )
    elif s[use] or not (found := s.translate_choice(cost, KLS)):
        yield MissingKeys(
            (charged, price, cost), "a KL in the loss and in the reward, or of another kind than k1, k2, k3"
        )
    else:
        steered = {
            "target": float(s.require_number("algorithm.kl_ctrl.target_kl")),
            "horizon": s.require_integer("algorithm.kl_ctrl.horizon"),
        }
        adaptive = s[control] == "adaptive"
        # ReMax takes the reward that is still to come
        where = "advantage" if s["algorithm.adv_estimator"] == "remax" else "reward"
        table = (
            {"kind": found, "coef": float(s.require_number(price)), "where": where}
            | CLAMPED.get(found, {})
            | (steered if adaptive else {})
        )
        keys = ("algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.horizon") if adaptive else ()
        yield RecipeLine("algo.kl", table, (charged, price, cost, control, *keys))


def _translate_overlong(s: PeerSettings) -> Iterator[Part]:
    """DAPO's soft limit lies in the reward manager there, and in the row's shaping here."""
    for root in (
        "reward.reward_kwargs.overlong_buffer_cfg",
        "reward_model.overlong_buffer",
        "reward.custom_reward_function.overlong_buffer",
    ):
        if not s.is_set(f"{root}.enable"):
            continue
        if s[f"{root}.enable"]:
            yield RecipeLine("algo.shaping.kind", "overlong", (f"{root}.enable",))
            if s.is_set(f"{root}.len"):
                yield RecipeLine("algo.shaping.buffer", s.require_integer(f"{root}.len"), (f"{root}.len",))
            if s.is_set(f"{root}.penalty_factor"):
                yield RecipeLine(
                    "algo.shaping.factor",
                    float(s.require_number(f"{root}.penalty_factor")),
                    (f"{root}.penalty_factor",),
                )
            return
        yield SameKeys((f"{root}.enable", f"{root}.len", f"{root}.penalty_factor"), "off")
    yield RecipeLine("algo.shaping.kind", "none")


def _correction_lines(s: PeerSettings) -> Iterator[Part]:
    """Importance weights (truncated, or masked if there are two bounds) and rejection by the
    ratio of a token, an answer, or its mean.
    """
    root = "algorithm.rollout_correction"
    level, cap, normed = f"{root}.rollout_is", f"{root}.rollout_is_threshold", f"{root}.rollout_is_batch_normalize"
    reject, bounds, bypass = f"{root}.rollout_rs", f"{root}.rollout_rs_threshold", f"{root}.bypass_mode"
    if s[bypass]:
        yield MissingKeys(
            (bypass, f"{root}.loss_type"),
            "the ratio is taken to the proximal policy; algo.ratio.anchor = 'behavior' leaves it out",
        )
    table: dict[str, Any] = {"kind": "importance"}
    if s[level]:
        low, high = _parse_bounds(s[cap])
        table |= {"level": s[level], "high": high} | ({} if low is None else {"action": "mask", "low": low})
        table |= {"normalize": s[level]} if s[normed] else {}
    elif s[reject]:
        table |= {"level": "none"}
    if s[reject]:
        known = str(s[reject]) in REJECTS
        low, high = _parse_bounds(s[bounds]) if known else (None, 0.0)
        low = 1 / high if known and low is None else low
        if not known or not low or not low <= 1 <= high:
            yield MissingKeys((reject, bounds), f"known here: one of {', '.join(REJECTS)}, with bounds around 1")
        else:  # their bounds hold the engine's probability by the trainer's
            table |= {
                "reject": REJECTS[s[reject]],
                "reject_low": 1 / high,
                "reject_high": 1 / low,
                "denominator": "accepted",
            }
    if s[level] and s[normed] and "reject" in table:
        yield MissingKeys(
            (normed,), "there the mean weight is taken before anything is rejected, here over what is left"
        )
    if s[f"{ACTOR}.policy_loss.loss_mode"] == "geo_mean" and s[level] == "token":
        yield MissingKeys(
            (level,),
            "geo_mean there weighs an answer by the geometric mean of its tokens' weights, here each token by its own",
        )
    keys = (level, cap, normed) if s[level] else ()
    if len(table) > 1 and (s[level] or "reject" in table):
        yield RecipeLine("algo.correction", table, (*keys, *((reject, bounds) if "reject" in table else ())))
    yield from (
        MissingKeys((key,), "it has no effect there: rollout_is is not set")
        for key in (cap, normed)
        if not s[level] and s.is_set(key)
    )


def _parse_bounds(text: Any) -> tuple[float | None, float]:
    """ "0.5_2.0" -> (0.5, 2.0); 2.0 -> (None, 2.0)"""
    try:
        *low, high = (float(part) for part in str(text).split("_"))
    except ValueError as error:
        raise ConfigError(
            f"rollout_correction: the threshold {text!r} is neither a number nor two, as in 0.5_2.0"
        ) from error
    return (low[0] if low else None), high


def _translate_loop(s: PeerSettings) -> Iterator[Part]:
    prompts, mini = s.require_integer("data.train_batch_size"), s.require_integer(f"{ACTOR}.ppo_mini_batch_size")
    yield RecipeLine("loop.groups_per_step", prompts, ("data.train_batch_size",))
    note = "" if prompts % mini == 0 else f"{prompts} / {mini}, rounded"
    yield RecipeLine(
        "loop.updates_per_step",
        max(1, round(prompts / mini)),
        (f"{ACTOR}.ppo_mini_batch_size", "data.train_batch_size"),
        note,
    )
    if s["trainer.total_training_steps"]:
        yield RecipeLine(
            "loop.steps", s.require_integer("trainer.total_training_steps"), ("trainer.total_training_steps",)
        )
        if s.is_set("trainer.total_epochs"):
            yield MissingKeys(("trainer.total_epochs",), "total_training_steps counts instead")
    else:
        keys = ("trainer.total_epochs", "trainer.total_training_steps")
        yield RecipeLine(
            "loop.passes",
            float(s.require_number("trainer.total_epochs")),
            keys,
            "each of their passes leaves out what does not fill a step",
        )
    yield RecipeLine("loop.epochs", s.require_integer(f"{ACTOR}.ppo_epochs"), (f"{ACTOR}.ppo_epochs",))
    if s["data.seed"] is not None:
        yield RecipeLine("loop.seed", s.require_integer("data.seed"), ("data.seed",))
    if s["trainer.v1.trainer_mode"] == "sync":
        yield SameKeys(("trainer.v1.trainer_mode",), "loop.max_staleness is 0")
    else:
        yield MissingKeys(("trainer.v1.trainer_mode",), "set loop.max_staleness: it bounds the lag by a number")


def _translate_sampling(s: PeerSettings) -> Iterator[Part]:
    yield RecipeLine(
        "engine.sampling.temperature", float(s.require_number(f"{ROLLOUT}.temperature")), (f"{ROLLOUT}.temperature",)
    )
    whole, own = "data.max_response_length", f"{ROLLOUT}.response_length"
    if not s.is_set(own) or s[own] == s[whole]:
        yield RecipeLine("engine.sampling.max_tokens", s.require_integer(whole), (whole, own))
    else:
        yield RecipeLine("engine.sampling.max_tokens", s.require_integer(own), (own,))
        yield from (
            MissingKeys((key,), f"it has no effect there: {own} comes first") for key in (whole,) if s.is_set(key)
        )
    yield from translate_truncation(s, f"{ROLLOUT}.top_p")
    yield from translate_truncation(s, f"{ROLLOUT}.top_k")
    yield RecipeLine("engine.sampling.ignore_eos", bool(s[f"{ROLLOUT}.ignore_eos"]), (f"{ROLLOUT}.ignore_eos",))
    if s.is_set(f"{ROLLOUT}.max_num_seqs"):
        yield RecipeLine(
            "engine.max_running",
            s.require_integer(f"{ROLLOUT}.max_num_seqs"),
            (f"{ROLLOUT}.max_num_seqs",),
            "speed only",
        )
    val = f"{ROLLOUT}.val_kwargs"
    drawn = bool(s[f"{val}.do_sample"])
    yield RecipeLine(
        "task.eval.sampling.temperature",
        float(s.require_number(f"{val}.temperature")) * drawn,
        (f"{val}.temperature", f"{val}.do_sample"),
    )
    if drawn and s[f"{val}.top_p"] != 1:
        yield RecipeLine("task.eval.sampling.top_p", float(s.require_number(f"{val}.top_p")), (f"{val}.top_p",))
    elif s[f"{val}.top_p"] == 1:
        yield SameKeys((f"{val}.top_p",), "it changes nothing at this value")
    if s[f"{val}.n"] == 1:
        yield SameKeys((f"{val}.n",), "one answer a task")


def _translate_optimizer(s: PeerSettings) -> Iterator[Part]:
    yield RecipeLine("trainer.lr", float(s.require_number(f"{OPTIM}.lr")), (f"{OPTIM}.lr",))
    kind = f"{OPTIM}.lr_scheduler_type"
    if s[kind] in ("constant", "cosine"):
        yield RecipeLine("trainer.schedule", s[kind], (kind,))
    else:
        yield MissingKeys((kind,), "constant, linear and cosine exist here")
    least = f"{OPTIM}.min_lr_ratio"
    if s[least]:
        yield (
            MissingKeys((least,), "a cosine ends at 0 here")
            if s[kind] == "cosine"
            else SameKeys((least,), "the rate is constant")
        )
    steps, share = f"{OPTIM}.lr_warmup_steps", f"{OPTIM}.lr_warmup_steps_ratio"
    if s.require_number(steps) is not None and s.require_number(steps) >= 0:
        yield RecipeLine("trainer.optimizer.warmup_steps", s.require_integer(steps), (steps,))
        yield from (MissingKeys((share,), "lr_warmup_steps counts instead"),) if s.is_set(share) else ()
    elif s[share]:
        total = s["trainer.total_training_steps"]
        warmup = int(total * s.require_number(share)) if total else 0
        yield RecipeLine(
            "trainer.optimizer.warmup_steps",
            warmup,
            (share,),
            ask="" if total else f"{s[share]} of all steps: write the number",
        )
    else:
        yield SameKeys((steps, share), "no warm-up")
    yield RecipeLine("trainer.clip", float(s.require_number(f"{OPTIM}.clip_grad")), (f"{OPTIM}.clip_grad",))
    old = f"{ACTOR}.grad_clip"
    if s.is_set(old):
        same = s[old] == s[f"{OPTIM}.clip_grad"]
        yield (
            SameKeys((old,), "so is optim.clip_grad")
            if same
            else MissingKeys((old,), f"it has no effect there: {OPTIM}.clip_grad clips")
        )
    decay = f"{OPTIM}.weight_decay"
    yield RecipeLine(
        "trainer.optimizer.weight_decay",
        float(s.require_number(decay)),
        (decay,),
        "on matrices only here, on every weight there",
    )
    yield RecipeLine("trainer.optimizer.betas", list(s[f"{OPTIM}.betas"]), (f"{OPTIM}.betas",))
    if s[f"{OPTIM}.optimizer"] == "AdamW":
        yield SameKeys((f"{OPTIM}.optimizer", f"{OPTIM}.optimizer_impl"), "AdamW")
    replay = f"{ROLLOUT}.enable_rollout_routing_replay"
    yield RecipeLine("trainer.routing_replay", bool(s[replay]), (replay,), "of a mixture of experts")


def _translate_run(s: PeerSettings) -> Iterator[Part]:
    name = "trainer.default_local_dir"
    yield RecipeLine(
        "run.folder",
        _expand_user(s[name]) if s.is_set(name) else f"runs/{s['trainer.experiment_name']}",
        (name,) if s.is_set(name) else ("trainer.experiment_name",),
    )
    every = s.require_integer("trainer.save_freq")
    yield RecipeLine("run.checkpoint.every", max(0, every), ("trainer.save_freq",), "one at the end" * (every <= 0))
    if s["trainer.max_actor_ckpt_to_keep"]:
        yield RecipeLine(
            "run.checkpoint.keep",
            s.require_integer("trainer.max_actor_ckpt_to_keep"),
            ("trainer.max_actor_ckpt_to_keep",),
        )
    else:
        yield MissingKeys(
            ("trainer.max_actor_ckpt_to_keep",), "they keep every checkpoint; run.checkpoint.keep is 2 here"
        )
    yield RecipeLine("task.eval.every", max(0, s.require_integer("trainer.test_freq")), ("trainer.test_freq",))
    if s.is_set("trainer.logger"):
        yield from translate_sinks(s, "trainer.logger")


def _expand_user(path: Any) -> str:
    return str(Path(str(path)).expanduser())


def _file_paths(value: Any) -> Any:
    """One path, or a list of several."""
    paths = [_expand_user(path) for path in (value if isinstance(value, list) else [value])]
    return paths if len(paths) > 1 else (paths or [""])[0]


REWARDLESS = "distillation.distillation_loss.use_task_rewards"


def _taught_alone(s: PeerSettings) -> bool:
    """Does it learn from a teacher and from no reward?"""
    return bool(s.values.get("distillation.enabled")) and not s.values.get(REWARDLESS, True)


def _distillation_lines(s: PeerSettings) -> Iterator[Part]:
    """A teacher's opinion of every token; which estimator of the KL, and where it goes, a recipe says otherwise."""
    root = "distillation"
    loss = f"{root}.distillation_loss"
    told = {key: s.values[key] for key in s.values if key.startswith(f"{root}.")}
    if not told.get(f"{root}.enabled"):
        return
    teachers = [
        (key, _expand_user(value))
        for key, value in told.items()
        if key.endswith(".model_path") and ".teacher_models." in key
    ]
    ask = "" if teachers else "the config names no teacher"
    if len(teachers) < 2:
        yield RecipeLine(
            "model.teacher",
            teachers[0][1] if teachers else "TEACHER",
            tuple(key for key, _ in teachers) or (f"{root}.enabled",),
            ask=ask,
        )
    else:
        value = [
            {"path": path, "source": str(told.get(key.replace("model_path", "key"), key.split(".")[2]))}
            for key, path in teachers
        ]
        yield RecipeLine(
            "model.teacher",
            value,
            tuple(key for key, _ in teachers),
            "each teaches the rows of its source",
            "name the sources of task.data",
        )
    mode, policy, weigh = (
        told.get(f"{loss}.{name}", default)
        for name, default in (("loss_mode", "k3"), ("use_policy_gradient", False), ("distillation_loss_coef", 1.0))
    )
    where = "charged to the advantage" if policy else "in the loss"
    same = mode in ("k1", "kl") and policy
    ask = (
        ""
        if same
        else f"theirs is {mode} of the token, {where}; here log pi - log pi_teacher of it is charged to the advantage"
    )
    keys = tuple(
        key
        for key in (
            f"{loss}.loss_mode",
            f"{loss}.use_policy_gradient",
            f"{loss}.distillation_loss_coef",
            f"{root}.enabled",
        )
        if key in told
    )
    yield RecipeLine("algo.distill.coef", float(weigh), keys, ask=ask)


def _translate_placement(s: PeerSettings) -> Iterator[Part]:
    megatron = f"{ACTOR}.megatron"
    axes = {
        "tp": (f"{megatron}.tensor_model_parallel_size",),
        "pp": (f"{megatron}.pipeline_model_parallel_size",),
        "chunks": (f"{megatron}.virtual_pipeline_model_parallel_size",),
        "cp": (
            f"{megatron}.context_parallel_size",
            f"{ACTOR}.ulysses_sequence_parallel_size",
            f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
        ),
        "ep": (f"{megatron}.expert_model_parallel_size",),
    }
    without = {
        f"{ROLLOUT}.data_parallel_size": "an engine is one copy of the weights here; "
        "place.engines says how many there are",
        f"{megatron}.expert_tensor_parallel_size": "an expert lies whole on a rank here",
        f"{ROLLOUT}.pipeline_model_parallel_size": "an engine of several devices divides every matrix here, "
        "not its layers",
        f"{ROLLOUT}.expert_parallel_size": "an engine of several devices divides every matrix here, not its experts",
    }
    yield from translate_placement(
        s,
        axes=axes,
        engine_tp=f"{ROLLOUT}.tensor_model_parallel_size",
        without=without,
    )


VERL = PeerFormat.from_parts(
    "verl",
    (
        _translate_model,
        _translate_task,
        _algorithm_lines,
        _translate_loss,
        _distillation_lines,
        _correction_lines,
        _translate_loop,
        _translate_sampling,
        _translate_optimizer,
        _translate_placement,
        _translate_run,
    ),
    REASONS,
)
