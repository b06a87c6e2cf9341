"""TRL's GRPO: a YAML of `trl grpo --config`, JSON of GRPOConfig's fields, or a command line."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from rondel.core.errors import ConfigError
from rondel.importing.peer import (
    DEVICE,
    ENGINE,
    FOLDER,
    LAUNCHER,
    LORA,
    MEMORY,
    NF4,
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

BATCH = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_processes",
    "steps_per_generation",
    "generation_batch_size",
)
REWARDS: dict[str, Any] = {
    "accuracy_reward": "math",
    "think_format_reward": {"kind": "format", "pattern": "^<think>(?!.*<think>).*?</think>"},
}
LOSSES = {  # loss_type -> (row, how token terms are added up)
    "grpo": ("grpo", "seq_mean_token_mean"),
    "dapo": ("grpo", "token_mean"),
    "bnpo": ("grpo", "token_mean"),
    "dr_grpo": ("grpo", "fixed_norm"),
    "luspo": ("grpo", "seq_mean_token_sum"),
    "cispo": ("cispo", "token_mean"),
    "sapo": ("sapo", "seq_mean_token_mean"),
    "vespo": ("vespo", "token_mean"),
}
OVER_GENERATION = ("dapo", "cispo", "vespo")  # losses whose denominator is of all that was generated at once
SHAPE = ("k_pos", "lambda_pos", "k_neg", "lambda_neg")  # of VESPO's weight
SCHEDULES = {name: name for name in ("constant", "linear", "cosine")} | {"constant_with_warmup": "constant"}
REASONS = {
    "launcher *": LAUNCHER,
    "sapo_*": "the loss is not sapo",
    "vespo_*": "the loss is not vespo",
    "entropy_*": "the coefficient of the entropy is constant here",
    "epsilon*": "this loss does not read it",
    "vllm_*": ENGINE,
    "use_vllm": ENGINE,
    "lora_*": LORA,
    "use_*ora": LORA,
    "use_peft": LORA,
    "load_in_*": "quantised weights cannot be trained here",
    "bnb_*": NF4,
    "use_bnb_*": NF4,
    "load_in_4bit": "whole weights cannot be trained in 4 bits: with use_peft it is model.adapter.kind = 'qlora'",
    "fsdp*": DEVICE,
    "deepspeed": DEVICE,
    "parallelism_config*": DEVICE,
    "ds3_*": DEVICE,
    "ddp_*": DEVICE,
    "gradient_checkpointing*": MEMORY,
    "activation_checkpointing*": MEMORY,
    "dataloader_*": "tasks are read in the process",
    "hub_*": "nothing is uploaded",
    "push_to_hub": "nothing is uploaded",
    "log*": "every step is in the journal; rondel view and rondel card read it",
    "save_only_model": "a checkpoint is whole",
    "attn_implementation": "one attention of its own, packed and paged",
    "config": "it was read",
    "run_name": FOLDER,
    "project": FOLDER,
}


def _translate_model(s: PeerSettings) -> Iterator[Part]:
    if s["model_name_or_path"]:
        yield RecipeLine("model.path", s["model_name_or_path"], ("model_name_or_path",))
    else:
        yield RecipeLine(
            "model.path", "MODEL", ("model_name_or_path",), ask="the config names no model: it is given in Python there"
        )
    mixed = bool(not s["fp16"] if s["bf16"] is None else s["bf16"])
    compute = "bfloat16" if mixed else "float16" if s["fp16"] else "float32"
    yield RecipeLine("model.dtype", compute, ("bf16", "fp16"), "master weights are float32 here")
    if s["dtype"] in ("float32", "auto", None):
        yield SameKeys(("dtype",), "master weights are float32")
    if s["use_peft"]:
        yield from translate_adapter(
            s,
            rank="lora_r",
            alpha="lora_alpha",
            targets="lora_target_modules",
            dropout="lora_dropout",
            switch=("use_peft",),
            four_bits="load_in_4bit",
        )


def _translate_task(s: PeerSettings) -> Iterator[Part]:
    asked = "the reward reads the field `answer`: name the field of the gold answer with answer = '...'"
    if s["dataset_name"]:
        data = {"kind": "datasets", "name": s["dataset_name"], "split": s["dataset_train_split"], "answer": "solution"}
        if s["dataset_config"]:
            data["subset"] = s["dataset_config"]
        if s["eval_strategy"] != "no":
            data["eval_split"] = s["dataset_test_split"]
        yield RecipeLine(
            "task.data",
            data,
            ("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split"),
            ask=asked,
        )
    else:
        data = {"kind": "datasets", "name": "DATASET", "answer": "solution"}
        yield RecipeLine(
            "task.data", data, ("dataset_name",), ask="the config names no data set: it is given in Python there"
        )
    names = s["reward_funcs"] or []
    names = [names] if isinstance(names, str) else names
    known = [REWARDS[name] for name in names if name in REWARDS]
    own = [name for name in names if name not in REWARDS]
    if s["reward_weights"] and len(s["reward_weights"]) != len(names):
        raise ConfigError(
            f"reward_weights has {len(s['reward_weights'])} numbers for {len(names)} reward_funcs; give one for each"
        )
    apart = s["multi_objective_aggregation"] == "normalize_then_sum"  # each part has its own scale, and then its weight
    if len(known) == len(names) == 1 and not apart:
        yield RecipeLine("task.reward", known[0], ("reward_funcs",))
    elif names and not own:
        weights = [1.0] * len(names) if apart or not s["reward_weights"] else s["reward_weights"]
        each = {n: ({"kind": r} if isinstance(r, str) else r) | {"weight": w} for n, r, w in zip(names, known, weights)}
        yield RecipeLine("task.reward", {"kind": "combine", "parts": each}, ("reward_funcs", "reward_weights"))
    elif len(own) == 1 and "." in own[0]:
        module, _, function = own[0].rpartition(".")
        wrap = "theirs takes lists of completions; ours takes (trajectory, task) and returns a number: wrap it"
        yield RecipeLine("task.reward", f"{module}:{function}", ("reward_funcs",), ask=wrap)
    else:
        why = (
            f"name the reward; {', '.join(own) or 'none'} cannot be taken over" if own else "the config names no reward"
        )
        yield RecipeLine("task.reward", "math", ("reward_funcs",), ask=why)


def _algorithm_lines(s: PeerSettings) -> Iterator[Part]:
    row, aggregate = s.translate_choice("loss_type", LOSSES) or (s["loss_type"], None)
    yield RecipeLine("algo.kind", row, ("loss_type",))
    yield RecipeLine("algo.group_size", s.require_integer("num_generations"), ("num_generations",))
    yield from _advantage_lines(s)
    if s["importance_sampling_level"] != "token":
        yield RecipeLine("algo.ratio.kind", s["importance_sampling_level"], ("importance_sampling_level",))
    else:
        yield SameKeys(("importance_sampling_level",), "the ratio is each token's")
    yield from _translate_surrogate(s, row)
    if s.require_number("beta"):
        sequence = s["importance_sampling_level"] != "token"
        unbiased = {"unbiased": True} if s["use_bias_correction_kl"] and not sequence else {}
        if s["use_bias_correction_kl"] and sequence:
            yield MissingKeys(
                ("use_bias_correction_kl",),
                "there the KL of a token is weighed by the ratio of its answer; here it is not weighed",
            )
        yield RecipeLine(
            "algo.kl",
            {"kind": "k3", "coef": float(s["beta"]), "where": "loss"} | unbiased,
            ("beta", "use_bias_correction_kl"),
            "weighed by policy / engine here, by policy / old policy there" * bool(unbiased and s["use_vllm"]),
        )
    else:
        yield RecipeLine("algo.kl.coef", 0.0, ("beta",))
        yield SameKeys(("use_bias_correction_kl",), "there is no KL term")
    if aggregate:
        yield RecipeLine("algo.aggregate.kind", aggregate, ("loss_type",))
    if s["loss_type"] == "bnpo":
        yield MissingKeys(
            ("loss_type",), "their mean is over each micro-batch; here it is over the batch (written: token_mean)"
        )
    if s["loss_type"] in OVER_GENERATION and (updates := _updates_of_generation(s)) > 1:
        yield MissingKeys(
            ("loss_type",),
            f"their sum over an update is divided by the tokens of the whole generation batch / {updates}; here by those "
            "of the update (written: token_mean)",
        )
    coef, top = float(s.require_number("entropy_coef")), s.require_number("top_entropy_quantile")
    if coef and row == "grpo" and 0 < top < 1:
        note = "theirs is a mean over the tokens of highest entropy, ours over all"
        yield RecipeLine("algo.entropy.coef", coef / top, ("entropy_coef", "top_entropy_quantile"), note)
        yield RecipeLine("algo.entropy.top", float(top), ("top_entropy_quantile",))
    else:
        yield RecipeLine("algo.entropy.coef", coef, ("entropy_coef",))
    steers = ("use_adaptive_entropy", "entropy_target", "entropy_coef_delta", "entropy_coef_min", "entropy_coef_max")
    if s["use_adaptive_entropy"]:
        for knob, key in zip(("target", "delta", "least", "most"), steers[1:]):
            yield RecipeLine(f"algo.entropy.{knob}", float(s.require_number(key)), (steers[0], key))
    else:
        yield SameKeys(steers, "the coefficient of the entropy is fixed")
    if s["entropy_coef"] and aggregate != "token_mean":
        yield MissingKeys(
            ("entropy_coef",), f"their entropy is a mean over tokens; here the weights are those of {aggregate}"
        )
    yield RecipeLine("algo.mask_truncated", bool(s["mask_truncated_completions"]), ("mask_truncated_completions",))
    yield from _correction_lines(s)
    if s["router_aux_loss_coef"] == 0:
        yield SameKeys(("router_aux_loss_coef",), "no loss balances a router")
    else:
        yield MissingKeys(
            ("router_aux_loss_coef",),
            "a mixture of experts trains there with the loss that balances its router, unset with the coefficient of the "
            "model's config; here it has none: look at train/expert_load_imbalance",
        )


def _translate_surrogate(s: PeerSettings, row: str) -> Iterator[Part]:
    """The knobs that each loss reads."""
    top, high = "top_entropy_quantile", "epsilon" if s["epsilon_high"] is None else "epsilon_high"
    forks = row == "grpo" and s[top] < 1
    if forks:
        yield RecipeLine("algo.surrogate.kind", "forking", (top,), "of the whole update here, of a micro-batch there")
        yield RecipeLine("algo.surrogate.top", float(s.require_number(top)), (top,))
    if row == "cispo":
        yield RecipeLine(
            "algo.surrogate.high",
            round(s.require_number(high) - 1, 9),
            (high,),
            "the largest weight is 1 + high here, and high there",
        )
    elif row == "sapo":
        yield RecipeLine(
            "algo.surrogate.positive", float(s.require_number("sapo_temperature_pos")), ("sapo_temperature_pos",)
        )
        yield RecipeLine(
            "algo.surrogate.negative", float(s.require_number("sapo_temperature_neg")), ("sapo_temperature_neg",)
        )
    elif row == "vespo":
        for knob in SHAPE:
            yield RecipeLine(f"algo.surrogate.{knob}", float(s.require_number(f"vespo_{knob}")), (f"vespo_{knob}",))
    else:
        bound, delta = s.require_number(high), s.require_number("delta")
        yield RecipeLine("algo.surrogate.low", s.require_number("epsilon"), ("epsilon",))
        keys = ("epsilon_high", "epsilon") if high == "epsilon" else (high,)
        if delta is None or row != "grpo" or delta >= 1 + bound:
            yield RecipeLine("algo.surrogate.high", bound, keys)
        elif delta >= 1:
            note = (
                "delta holds the ratio of good answers below 1 + epsilon, and that of bad ones is held at 1 + epsilon"
            )
            yield RecipeLine("algo.surrogate.high", round(delta - 1, 9), ("delta",), note)
            yield RecipeLine("algo.surrogate.dual", 1.0 + bound, ("delta", *keys))
    if s["delta"] is not None and row == "grpo":
        if s.require_number("delta") >= 1 + s.require_number(high):
            yield RecipeLine("algo.surrogate.dual", float(s.require_number("delta")), ("delta",))
        elif s.require_number("delta") < 1:
            yield RecipeLine("algo.surrogate.high", s.require_number(high), (high,))
            yield MissingKeys(
                ("delta",),
                "below 1 it takes the gradient of every on-policy token with A > 0; surrogate.high cannot be negative",
            )
    elif s["delta"] is None:
        yield SameKeys(("delta",), "not set")
    if s[top] == 1:
        yield SameKeys((top,), "every token is trained")


def _advantage_lines(s: PeerSettings) -> Iterator[Part]:
    how = "multi_objective_aggregation"
    if s[how] == "normalize_then_sum":
        names = [s["reward_funcs"]] if isinstance(s["reward_funcs"], str) else s["reward_funcs"] or []
        weights = {"weights": dict(zip(names, map(float, s["reward_weights"])))} if s["reward_weights"] else {}
        ask = (
            ""
            if names and all(name in REWARDS for name in names)
            else "the reward must return { name: value } for each of its parts"
        )
        yield RecipeLine(
            "algo.advantage", {"kind": "parts_norm", "eps": 1e-4} | weights, (how, "reward_weights"), "GDPO", ask
        )
        yield from (
            MissingKeys((key,), f"it has no effect there with {how} = normalize_then_sum")
            for key in ("scale_rewards",)
            if s.is_set(key)
        )
        return
    scale = {True: "group", False: "none"}.get(s["scale_rewards"], s["scale_rewards"])
    if scale == "none":
        yield RecipeLine("algo.advantage.kind", "group_center", ("scale_rewards",))
    elif scale == "group":
        yield RecipeLine("algo.advantage.kind", "group_norm", ("scale_rewards",))
        yield RecipeLine("algo.advantage.eps", 1e-4)
    elif scale == "batch":
        table = {"kind": "batch_norm", "over": "rewards", "eps": 1e-4}
        yield RecipeLine(
            "algo.advantage", table, ("scale_rewards",), "over the step here, over a generation batch there"
        )
    else:
        yield MissingKeys(("scale_rewards",), "known here: group, batch or none")
    if s[how] == "sum_then_normalize":
        yield SameKeys((how,), "rewards are added before they are normalised")


def _correction_lines(s: PeerSettings) -> Iterator[Part]:
    """On by default wherever vLLM samples; one correction at a time here."""
    threshold, use = "off_policy_mask_threshold", s["use_vllm"] and s["vllm_importance_sampling_correction"]
    if s[threshold] is not None and use:
        yield MissingKeys((threshold,), "one correction at a time: the importance weights of vLLM")
    elif s[threshold] is not None:
        yield RecipeLine(
            "algo.correction",
            {"kind": "off_policy_mask", "delta": float(s.require_number(threshold))},
            (threshold,),
            "of the policy that begins the step; there of the policy at each update" * (_updates_per_step(s) > 1),
        )
    if s["loss_type"] == "vespo":
        if use:
            yield MissingKeys(
                (
                    "vllm_importance_sampling_mode",
                    "vllm_importance_sampling_clip_max",
                    "vllm_importance_sampling_clip_min",
                ),
                "the weight of an answer reaches from the engine to the policy here, uncut; there the part between the "
                "engine and the trainer is cut first",
            )
        elif s["use_vllm"]:
            yield MissingKeys(
                ("vllm_importance_sampling_correction",),
                "the weight of an answer reaches from the engine to the policy here; there it begins at the trainer's own "
                "probabilities, without what vLLM computed otherwise",
            )
        return
    if not use:
        return
    level, _, action = str(s["vllm_importance_sampling_mode"]).partition("_")
    low, high = s["vllm_importance_sampling_clip_min"], s["vllm_importance_sampling_clip_max"]
    keys = ("vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max")
    table: dict[str, Any] = {
        "kind": "importance",
        "level": level,
        "action": action,
        "high": float("inf" if high is None else high),
    }
    if low is not None or action == "mask":
        table |= {"action": "clip" if action == "truncate" else action, "low": float(low or 0)}
    yield RecipeLine(
        "algo.correction", table, (*keys, *(("vllm_importance_sampling_clip_min",) if low is not None else ()))
    )


def _batch_lines(s: PeerSettings) -> Iterator[Part]:
    group, accumulate = s.require_integer("num_generations"), s.require_integer("gradient_accumulation_steps")
    device = s.require_integer("per_device_train_batch_size") * s.require_integer("num_processes")
    rounds = (
        s.require_integer("generation_batch_size") // device
        if s["generation_batch_size"]
        else s.require_number("steps_per_generation") or accumulate
    )
    completions = device * max(rounds, accumulate)
    updates, moves = max(1, rounds // accumulate), _updates_per_step(s)
    ask = (
        ""
        if s.is_set("num_processes")
        else "their batch grows with the number of processes, which is no key: this is for 1"
    )
    if rounds % accumulate and (accumulate % rounds or s.require_integer("num_iterations") > 1):
        ask = (
            f"{rounds} batches a generation and {accumulate} an update do not divide, so an update there mixes what "
            "several versions wrote, or what it has seen already; here a step is whole updates of one version"
        )
    yield RecipeLine(
        "loop.groups_per_step",
        max(1, completions // group),
        BATCH,
        f"{completions} completions in groups of {group}",
        ask,
    )
    yield RecipeLine("loop.updates_per_step", updates, ("steps_per_generation", "gradient_accumulation_steps"))
    yield RecipeLine("loop.epochs", s.require_integer("num_iterations"), ("num_iterations",))
    if s.require_number("max_steps") > 0:
        yield RecipeLine(
            "loop.steps",
            -(-s.require_integer("max_steps") // moves),
            ("max_steps",),
            f"{moves} of their steps are one here" * (moves > 1),
        )
        if s.is_set("num_train_epochs"):
            yield MissingKeys(("num_train_epochs",), "max_steps counts instead")
    else:
        yield RecipeLine("loop.passes", float(s.require_number("num_train_epochs")), ("num_train_epochs", "max_steps"))
    yield RecipeLine("loop.seed", s.require_integer("seed"), ("seed",))


def _updates_of_generation(s: PeerSettings) -> int:
    """Their optimizer steps on what was generated at once, in one pass."""
    accumulate = s.require_integer("gradient_accumulation_steps")
    device = s.require_integer("per_device_train_batch_size") * s.require_integer("num_processes")
    rounds = (
        s.require_integer("generation_batch_size") // device
        if s["generation_batch_size"]
        else s.require_number("steps_per_generation") or accumulate
    )
    return int(max(1, rounds // accumulate))


def _updates_per_step(s: PeerSettings) -> int:
    """How many of their steps are one here."""
    return _updates_of_generation(s) * s.require_integer("num_iterations")


def _convert_steps(s: PeerSettings, steps: int) -> int:
    """So many of their steps, in ours."""
    return -(-steps // _updates_per_step(s))


def _interval_line(s: PeerSettings, ours: str, key: str, strategy: str) -> RecipeLine:
    """An interval in their steps, or a share of all of them."""
    number, total = s.require_number(key), s.require_number("max_steps")
    if number >= 1 or total > 0:
        steps = math.ceil(number if number >= 1 else number * total)
        moves = _updates_per_step(s)
        return RecipeLine(
            ours, _convert_steps(s, steps), (key, strategy), f"{moves} of their steps are one here" * (moves > 1)
        )
    return RecipeLine(ours, 0, (key, strategy), ask=f"{number:g} of all steps: write the number")


def _translate_sampling(s: PeerSettings) -> Iterator[Part]:
    yield RecipeLine("engine.sampling.temperature", float(s.require_number("temperature")), ("temperature",))
    yield RecipeLine(
        "engine.sampling.max_tokens", s.require_integer("max_completion_length"), ("max_completion_length",)
    )
    if s["eval_strategy"] != "no":
        note = "theirs evaluates as it trains; here an answer is greedy unless told"
        yield RecipeLine(
            "task.eval.sampling.temperature", float(s.require_number("temperature")), ("temperature",), note
        )
        yield MissingKeys(("num_generations_eval",), "an evaluation draws one answer a task")
    yield from translate_truncation(s, "top_p")
    yield from translate_truncation(s, "top_k")
    yield from translate_truncation(s, "min_p")
    if s["repetition_penalty"] in (1, None):
        yield SameKeys(("repetition_penalty",), "it changes nothing at this value")
    else:
        yield MissingKeys(
            ("repetition_penalty",), "the trainer could not recompute the logprobs, so training samples without it"
        )


def _translate_optimizer(s: PeerSettings) -> Iterator[Part]:
    yield RecipeLine("trainer.lr", float(s.require_number("learning_rate")), ("learning_rate",))
    schedule = s.translate_choice("lr_scheduler_type", SCHEDULES)
    if schedule:
        yield RecipeLine("trainer.schedule", schedule, ("lr_scheduler_type",))
    else:
        yield MissingKeys(("lr_scheduler_type",), "constant, linear and cosine exist here")
    warmup = s.require_number("warmup_steps")
    if 0 < warmup < 1 and s.require_number("max_steps") > 0:
        total = math.ceil(warmup * s.require_integer("max_steps"))
        yield RecipeLine(
            "trainer.optimizer.warmup_steps",
            _convert_steps(s, total),
            ("warmup_steps", "max_steps"),
            f"{warmup:g} of {s['max_steps']} of their steps",
        )
    elif 0 < warmup < 1:
        yield RecipeLine(
            "trainer.optimizer.warmup_steps", 0, ("warmup_steps",), ask=f"{warmup:g} of all steps: write the number"
        )
    else:
        yield RecipeLine("trainer.optimizer.warmup_steps", _convert_steps(s, int(warmup)), ("warmup_steps",))
    yield RecipeLine("trainer.clip", float(s.require_number("max_grad_norm")), ("max_grad_norm",))
    yield RecipeLine("trainer.optimizer.weight_decay", float(s.require_number("weight_decay")), ("weight_decay",))
    yield RecipeLine(
        "trainer.optimizer.betas",
        [s.require_number("adam_beta1"), s.require_number("adam_beta2")],
        ("adam_beta1", "adam_beta2"),
    )
    if s["adam_epsilon"] == 1e-8:
        yield SameKeys(("adam_epsilon",), "1e-8")
    if str(s["optim"]).startswith("adamw_torch"):
        yield SameKeys(("optim",), "AdamW")
    elif s["optim"] in ("adamw_8bit", "adamw_bnb_8bit"):
        yield RecipeLine("trainer.optimizer.kind", "adamw_8bit", ("optim",))


def _translate_run(s: PeerSettings) -> Iterator[Part]:
    yield RecipeLine("run.folder", str(s["output_dir"] or "runs/trl"), ("output_dir",))
    if s["save_strategy"] == "no":
        yield RecipeLine("run.checkpoint.every", 0, ("save_strategy",), "one at the end")
    elif s["save_strategy"] == "steps":
        yield _interval_line(s, "run.checkpoint.every", "save_steps", "save_strategy")
    if s["save_total_limit"] is not None:
        yield RecipeLine("run.checkpoint.keep", max(1, s.require_integer("save_total_limit")), ("save_total_limit",))
    else:
        yield MissingKeys(("save_total_limit",), "they keep every checkpoint; run.checkpoint.keep is 2 here")
    if s["eval_strategy"] == "steps":
        yield _interval_line(
            s, "task.eval.every", "eval_steps" if s["eval_steps"] else "logging_steps", "eval_strategy"
        )
    elif s["eval_strategy"] != "no":
        yield MissingKeys(("eval_strategy",), "task.eval.every counts steps, and no line says how many: 0 here")
    if s.is_set("report_to"):
        yield from translate_sinks(s, "report_to")


def _translate_placement(s: PeerSettings) -> Iterator[Part]:
    """accelerate's ParallelismConfig, and vLLM's devices, which are its server's or the trainer's."""
    sizes = {
        "replicas": ("dp_replicate_size",),
        "shards": ("dp_shard_size",),
        "cp": ("cp_size", "sp_size"),
        "tp": ("tp_size",),
    }
    yield from translate_placement(
        s,
        axes={axis: tuple(f"parallelism_config.{name}" for name in names) for axis, names in sizes.items()},
        engine_tp="vllm_tensor_parallel_size" if s["use_vllm"] else "",
        apart=bool(s["use_vllm"]) and s["vllm_mode"] == "server",
    )


TRL = PeerFormat.from_parts(
    "trl",
    (
        _translate_model,
        _translate_task,
        _algorithm_lines,
        _batch_lines,
        _translate_sampling,
        _translate_optimizer,
        _translate_placement,
        _translate_run,
    ),
    REASONS,
)
