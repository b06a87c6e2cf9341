"""rondel import: every key of a peer's config has one fate, and the recipe means what the config means."""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kits.algos import Ragged, scored, tokens
from kits.algos_oracle import VERL as VERL_CASES
from kits.algos_oracle import far_reference, of_verl
from rondel.algos.soft_surrogates import GammaWeight
from rondel.algos.table import FAMILIES, TABLE, resolve_algorithm
from rondel.cli import main
from rondel.cli.import_ import RecipeTable, import_config
from rondel.core.config.job import Job
from rondel.core.errors import ConfigError
from rondel.core.mesh import Mesh
from rondel.core.types import Task, Trajectory
from rondel.generate.envs.sources import load_tasks
from rondel.importing import openrlhf, trl, verl
from rondel.importing.openrlhf import OPENRLHF
from rondel.importing.peer import SINKS
from rondel.importing.read import parse_scalar, read_config, read_overrides
from rondel.importing.render import render_lists, render_recipe
from rondel.importing.shell import read_commands
from rondel.importing.translate import nest_lines, translate_config
from rondel.importing.trl import TRL
from rondel.importing.verl import VERL
from rondel.runtime.telemetry.sinks import SINKS as TRACKERS
from rondel.score import build_reward
from rondel.train.annotate import advantages_of

PEERS = {peer.name: peer for peer in (TRL, VERL, OPENRLHF)}
EXAMPLES = Path(__file__).parents[2] / "examples" / "peers"
ROWS = RecipeTable()
ALIVE = {
    "trl": {"model_name_or_path": "m"},
    "verl": {},
    "openrlhf": {"actor.model_name_or_path": "m", "algo.advantage.estimator": "group_norm"},
}


def said(name: str, **given) -> dict:
    """{"algo.surrogate.high": 0.28, ...}: the lines that a config becomes; keys may be written with __ for a dot."""
    report = translate_config(PEERS[name], {key.replace("__", "."): value for key, value in given.items()}, ROWS)
    return {line.key: line.value for line in report.lines}


def whole(report) -> Job:
    """The text is TOML that says the lines, and a recipe; the row is one wherever it exists."""
    text = render_recipe(report, "a config")
    tree = tomllib.loads(text)
    assert tree == json.loads(json.dumps(nest_lines(report.lines)))
    job = Job.parse(tree)
    if job.algo.kind in ROWS.names:
        resolve_algorithm({key: value for key, value in tree["algo"].items() if key != "group_size"})
    return job


def one_fate_each(report, given) -> None:
    fates = [*report.translated, *report.same, *report.missing, *report.unknown]
    assert sorted(fates) == sorted(given)
    assert all(key in {line.key for line in report.lines} for keys in report.translated.values() for key in keys)


# -- whole configs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_an_example_becomes_a_recipe_in_which_every_key_has_one_fate(path):
    name = path.stem
    report, _ = import_config(name, str(path))
    given = read_config(name, path.read_text(), path.parent)
    assert len(given) > 10
    one_fate_each(report, given)
    whole(report)


def plausible(key, default):
    """The default, or another value of its type that the peer's own optimizer takes: AdamW refuses a beta of 1 or more."""
    if "adam_beta" in key:
        return st.sampled_from([default, 0.5])
    if isinstance(default, bool):
        return st.booleans()
    if isinstance(default, int):
        return st.sampled_from([default, max(2, default + 1), max(1, 2 * default)])
    if isinstance(default, float):
        return st.sampled_from([default, 0.5, 1.5])
    if isinstance(default, str):
        return st.sampled_from([default, "x"])
    return st.just(default)


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_any_config_becomes_a_recipe_in_which_every_key_has_one_fate(name, data):
    peer = PEERS[name]
    keys = data.draw(st.lists(st.sampled_from(sorted(peer.defaults)), unique=True, max_size=40))
    given = {key: data.draw(plausible(key, peer.defaults[key])) for key in keys}
    given |= dict.fromkeys(
        data.draw(st.lists(st.sampled_from(["no.such.key", "lerning_rate", "beta.gamma"]), unique=True)), 1
    )
    given |= {
        old: peer.defaults[new]
        for old, new in data.draw(st.lists(st.sampled_from(sorted(peer.renamed.items())), max_size=3))
        if new in peer.defaults
    }
    given |= ALIVE[name]
    report = translate_config(peer, given, ROWS)
    one_fate_each(report, given)
    whole(report)
    assert all(f"  {key}" in render_lists(report) for key in [*report.missing, *report.unknown, *report.same])


VERL_ACTOR, MEGATRON = "actor_rollout_ref.actor", "actor_rollout_ref.actor.megatron"
VERL_ENGINE = "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    "name, given, place",
    [
        ("verl", {f"{VERL_ACTOR}.ulysses_sequence_parallel_size": 4}, {"kind": "shared", "mesh": {"cp": 4}}),
        (
            "verl",
            {
                f"{MEGATRON}.tensor_model_parallel_size": 2,
                f"{MEGATRON}.pipeline_model_parallel_size": 2,
                f"{MEGATRON}.context_parallel_size": 1,
                f"{VERL_ENGINE}.tensor_model_parallel_size": 4,
            },
            {"kind": "split", "mesh": {"tp": 2, "pp": 2}, "engines": {"tp": 4}},
        ),
        ("verl", {f"{MEGATRON}.expert_model_parallel_size": 8}, {"kind": "shared", "mesh": {"ep": 8}}),
        ("verl", {f"{VERL_ENGINE}.tensor_model_parallel_size": 1}, None),
        (
            "trl",
            {"parallelism_config.tp_size": 2, "parallelism_config.dp_replicate_size": 2},
            {"kind": "shared", "mesh": {"replicas": 2, "tp": 2}},
        ),
        (
            "trl",
            {"use_vllm": True, "vllm_mode": "server", "vllm_tensor_parallel_size": 2},
            {"kind": "split", "engines": {"tp": 2}},
        ),
        ("trl", {"vllm_tensor_parallel_size": 2}, None),
        (
            "openrlhf",
            {"ds_tensor_parallel_size": 2, "ring_attn_size": 2, "vllm_num_engines": 4, "vllm_tensor_parallel_size": 2},
            {"kind": "split", "mesh": {"tp": 2, "cp": 2}, "engines": {"count": 4, "tp": 2}},
        ),
        (
            "openrlhf",
            {"ring_attn_size": 2, "vllm_num_engines": 4, "colocate_all_models": True},
            {"kind": "shared", "mesh": {"cp": 2}},
        ),
    ],
)
def test_parallel_sizes_become_a_mesh_and_engines(name, given, place):
    """With the world of the mesh; what needs no line has none."""
    report = translate_config(PEERS[name], given | ALIVE[name], ROWS)
    one_fate_each(report, given | ALIVE[name])
    assert nest_lines(report.lines).get("place") == place
    job = whole(report)
    sizes = (place or {}).get("mesh", {})
    assert job.place.ranks == math.prod(sizes.values())
    assert job.place.engine_tp == (place or {}).get("engines", {}).get("tp", 1)


def test_parallel_sizes_that_nothing_here_has_are_named():
    sizes = [f"{MEGATRON}.{axis}_model_parallel_size" for axis in ("tensor", "expert")]
    given = {
        **dict.fromkeys(sizes, 2),
        f"{MEGATRON}.virtual_pipeline_model_parallel_size": 2,
        f"{VERL_ENGINE}.expert_parallel_size": 2,
        f"{VERL_ENGINE}.tensor_model_parallel_size": "$TP",
    }
    report = translate_config(VERL, given, ROWS)
    one_fate_each(report, given)
    assert set(report.translated) == {*sizes}
    assert "one stage" in report.missing[f"{MEGATRON}.virtual_pipeline_model_parallel_size"]
    staged = {f"{MEGATRON}.{kind}pipeline_model_parallel_size": 2 for kind in ("", "virtual_")}
    assert whole(translate_config(VERL, staged, ROWS)).place.mesh.to_mesh(2) == Mesh(pp=2, chunks=2)
    assert "variable" in report.missing[f"{VERL_ENGINE}.tensor_model_parallel_size"]
    shared = {f"{VERL_ENGINE}.tensor_model_parallel_size": 2}
    [line] = translate_config(VERL, shared, ROWS).open_questions[-1:]
    assert line.key == "place.kind" and line.value == "split" and "share the trainer's devices" in line.ask


@pytest.mark.parametrize("name", PEERS)
def test_a_bare_config_is_written_with_their_defaults(name):
    """Nothing set but the model: whatever is not ours is written, and nothing else is."""
    report = translate_config(PEERS[name], ALIVE[name], ROWS)
    whole(report)
    other = {line.key: (line.value, ours) for line, ours in report.other}
    assert all(value != ours for value, ours in other.values())
    expected = {
        "trl": {
            "algo.advantage.eps": 1e-4,
            "algo.aggregate.kind": "token_mean",
            "trainer.schedule": "linear",
            "trainer.lr": 1e-6,
            "loop.seed": 42,
        },
        "verl": {
            "algo.kind": "ppo",
            "trainer.optimizer.weight_decay": 0.01,
            "loop.groups_per_step": 1024,
            "loop.updates_per_step": 4,
            "algo.group_size": 1,
        },
        "openrlhf": {
            "algo.advantage.eps": 1e-9,
            "trainer.optimizer.betas": [0.9, 0.95],
            "loop.groups_per_step": 1024,
            "loop.updates_per_step": 8,
        },
    }[name]
    assert {key: other[key][0] for key in expected} == expected


# -- what a key means ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "peer, config, wanted",
    [
        ("trl", {"fp16": True}, "float16"),
        ("trl", {"fp16": True, "bf16": False}, "float16"),
        ("trl", {"bf16": True}, "bfloat16"),
        ("trl", {}, "bfloat16"),
        ("trl", {"bf16": False}, "float32"),
        ("verl", {"actor_rollout_ref.actor.fsdp_config.dtype": "float16"}, "float16"),
        ("openrlhf", {"ds.param_dtype": "fp16"}, "float16"),
        ("openrlhf", {}, "bfloat16"),
    ],
)
def test_precisions_are_those_of_the_peer(peer, config, wanted):
    assert said(peer, **config)["model.dtype"] == wanted


def test_the_batches_of_trl():
    """8 a device, 4 processes, 6 moves accumulate 2: 192 completions are 24 groups of 8, in 3 moves."""
    batch = {
        "per_device_train_batch_size": 8,
        "num_processes": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 6,
    }
    lines = said("trl", **batch, num_generations=8, max_steps=30, warmup_steps=6)
    assert (lines["loop.groups_per_step"], lines["loop.updates_per_step"], lines["loop.steps"]) == (24, 3, 10)
    assert lines["trainer.optimizer.warmup_steps"] == 2
    assert (
        said("trl", per_device_train_batch_size=4, num_processes=2, gradient_accumulation_steps=4)[
            "loop.groups_per_step"
        ]
        == 4
    )


def test_every_row_and_part_that_an_importer_knows_exists():
    """A row of theirs that has no equal is written by its own name, marked to be decided, and
    never a name of ours that does not exist.
    """
    rows = {row for row, _ in trl.LOSSES.values()} | {row for row, _ in verl.ROWS.values()} | {*verl.LOSSES.values()}
    rows |= {row for row, *_ in openrlhf.ROWS.values()}
    assert rows <= set(ROWS.names)
    advantages = {a for _, a in verl.ROWS.values()} | {a for _, a, _ in openrlhf.ROWS.values()}
    aggregates = {a for _, a in trl.LOSSES.values()} | {*verl.AGGREGATES.values(), *openrlhf.AGGREGATES.values()}
    for family, kinds in (("advantage", advantages - {None}), ("aggregate", aggregates)):
        assert kinds <= FAMILIES[family].keys()
    report = translate_config(TRL, ALIVE["trl"] | {"loss_type": "newpo"}, ROWS)
    assert "algo.kind" in {line.key for line in report.open_questions} and not any(
        line.key == "algo.aggregate.kind" for line in report.lines
    )


@pytest.mark.parametrize(
    "name, command, remedy",
    [
        ("trl", "trl sft --learning_rate 1e-5", "loop.warmup.steps"),
        ("trl", "accelerate launch trl/scripts/dpo.py --beta 0.1", "online_dpo"),
        ("trl", "python -m trl.scripts.rloo --beta 0.1", 'algo.kind = "rloo"'),
        ("trl", "python examples/scripts/sft_gemma3.py --beta 0.1", "loop.warmup.steps"),
        ("trl", "trl kto --beta 0.1", "by hand"),
        ("trl", "learning_rate: 1e-5\npacking: true\n", "loop.warmup.steps"),
        ("trl", '{"beta": 0.1, "reward_clip_range": [-5, 5]}', 'algo.kind = "rloo"'),
        ("verl", "torchrun -m verl.trainer.sft_trainer optim.lr=1e-5", "loop.warmup.steps"),
        ("verl", "python -m verl.trainer.fsdp_sft_trainer optim.lr=1e-5", "loop.warmup.steps"),
        ("verl", "python3 -m verl.trainer.main_eval data.path=x", "rondel eval"),
        ("verl", "model:\n  partial_pretrain: m\n", "loop.warmup.steps"),
        ("openrlhf", "deepspeed --module openrlhf.cli.train_sft --learning_rate 1e-5", "loop.warmup.steps"),
        ("openrlhf", "deepspeed --module openrlhf.cli.train_rm --learning_rate 1e-5", "reward model"),
        ("openrlhf", "deepspeed --module openrlhf.cli.train_dpo --beta 0.1", "online_dpo"),
    ],
)
def test_another_trainer_of_theirs_is_refused(name, command, remedy):
    with pytest.raises(ConfigError, match=r"is another trainer of") as refused:
        read_config(name, command)
    assert remedy in str(refused.value)


@pytest.mark.parametrize(
    "name, command",
    [
        ("trl", "trl vllm-serve --model x &\ntrl grpo --beta 0.1"),
        ("trl", "python my_grpo_after_sft.py --beta 0.1"),
        ("trl", "python train.py --beta 0.1"),
        ("verl", "python3 -m verl.experimental.fully_async_policy.fully_async_main a.b=1"),
        (
            "openrlhf",
            "python -m openrlhf.cli.serve_rm --port 5000\nray job submit -- python -m openrlhf.cli.train_ppo_ray --beta "
            "0.1",
        ),
    ],
)
def test_their_trainer_is_read_among_other_commands(name, command):
    assert len(read_config(name, command)) == 1


@pytest.mark.parametrize(
    "loss, kind, aggregate",
    [
        ("grpo", "grpo", "seq_mean_token_mean"),
        ("dapo", "grpo", "token_mean"),
        ("dr_grpo", "grpo", "fixed_norm"),
        ("luspo", "grpo", "seq_mean_token_sum"),
    ],
)
def test_the_losses_of_trl(loss, kind, aggregate):
    lines = {"algo.aggregate.kind": "seq_mean_token_mean"} | said("trl", loss_type=loss)
    assert lines["algo.kind"] == kind and lines["algo.aggregate.kind"] == aggregate


def test_vespo_of_trl_is_the_row():
    lines = nest_lines(
        translate_config(TRL, ALIVE["trl"] | {"loss_type": "vespo", "vespo_k_neg": 4.0, "use_vllm": True}, ROWS).lines
    )["algo"]
    row = resolve_algorithm({k: v for k, v in lines.items() if k not in ("group_size", "mask_truncated")})
    assert row.surrogate == GammaWeight(2.0, 3.0, 4.0, 2.0) and not row.correction.needs
    assert row.aggregate == TABLE["vespo"].aggregate


def lost_of_trl(**given) -> str:
    report = translate_config(TRL, ALIVE["trl"] | given, ROWS)
    return "\n".join(f"{keys}: {why}" for keys, why in [*report.lost, *report.missing.items()])


@pytest.mark.parametrize("loss, over_all", [("dapo", True), ("cispo", True), ("vespo", True), ("grpo", False)])
def test_a_denominator_of_trl_over_several_updates_is_named(loss, over_all):
    one = {"loss_type": loss, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    assert "generation batch" not in lost_of_trl(**one)
    assert ("generation batch / 4; here" in lost_of_trl(**one, steps_per_generation=8)) is over_all


def test_the_weight_of_vespo_without_a_correction_for_vllm_is_named():
    told = "vllm_importance_sampling_correction: the weight of an answer reaches from the engine"
    off = {"loss_type": "vespo", "vllm_importance_sampling_correction": False}
    assert told in lost_of_trl(use_vllm=True, **off) and told not in lost_of_trl(**off)
    assert told not in lost_of_trl(use_vllm=True, **off | {"loss_type": "dapo"})
    bounds = lost_of_trl(use_vllm=True, loss_type="vespo", vllm_importance_sampling_clip_min=0.5)
    assert "vllm_importance_sampling_clip_min: the weight of an answer" in bounds


@pytest.mark.parametrize("given", [{}, {"router_aux_loss_coef": 0.01}])
def test_the_loss_that_balances_a_router_is_named(given):
    assert "balances its router" in lost_of_trl(**given)
    assert "balances its router" not in lost_of_trl(router_aux_loss_coef=0.0)


def test_a_deviation_over_the_batch_is_batch_norm():
    """(r - mean of the group) / (std of all rewards + 1e-4), as TRL computes it."""
    lines = nest_lines(translate_config(TRL, ALIVE["trl"] | {"scale_rewards": "batch"}, ROWS).lines)["algo"]
    row = resolve_algorithm({k: v for k, v in lines.items() if k not in ("group_size", "mask_truncated")})
    rewards, group = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.5, 0.0]).double(), torch.tensor([0, 0, 0, 1, 1, 1])
    means = rewards.view(2, 3).mean(1).repeat_interleave(3)
    assert torch.allclose(row.advantage(scored(rewards, group)), (rewards - means) / (rewards.std() + 1e-4))


def test_the_clip_of_trl_is_one_number_unless_there_are_two():
    assert {"algo.surrogate.low": 0.1, "algo.surrogate.high": 0.1}.items() <= said("trl", epsilon=0.1).items()
    both = said("trl", epsilon=0.1, epsilon_high=0.3, delta=4.0)
    assert (both["algo.surrogate.low"], both["algo.surrogate.high"], both["algo.surrogate.dual"]) == (0.1, 0.3, 4.0)
    assert (
        said("trl", scale_rewards="none")["algo.advantage.kind"]
        == said("trl", scale_rewards=False)["algo.advantage.kind"]
        == "group_center"
    )


@pytest.mark.parametrize("delta", [1.1, 1.28, 2.0])
def test_delta_of_trl_holds_good_and_bad_answers_as_there(delta):
    """-min(min(r, delta)·A, clip(r, 1 - low, 1 + high)·A), on both sides of 1 + high =
    1.28: the same gradient for either sign of A.
    """
    config = ALIVE["trl"] | {"epsilon": 0.2, "epsilon_high": 0.28, "delta": delta}
    row = resolve_algorithm(
        {
            k: v
            for k, v in nest_lines(translate_config(TRL, config, ROWS).lines)["algo"].items()
            if k not in ("group_size", "mask_truncated")
        }
    )
    for sign in (1.0, -1.0):
        logp = torch.linspace(-1.0, 1.0, 41, dtype=torch.float64).requires_grad_()
        a = torch.full_like(logp, sign).detach()
        r = logp.exp()
        theirs = -torch.min(r.clamp(max=delta) * a, r.clamp(0.8, 1.28) * a)
        ours = row.surrogate(tokens(logp, logp, a)).loss_T
        both = [torch.autograd.grad(loss.sum(), logp, retain_graph=True)[0] for loss in (theirs, ours)]
        assert torch.equal(*both) and torch.allclose(theirs, ours)


def test_delta_of_trl_below_1_is_named():
    assert "on-policy token" in translate_config(TRL, ALIVE["trl"] | {"delta": 0.9}, ROWS).missing["delta"]


def test_steps_of_trl_are_moves_of_the_optimizer():
    """Each of our steps is 4 of theirs here, in max_steps, warm-up, checkpoints and
    evaluations; a share of all steps is one of max_steps.
    """
    batch = {
        "per_device_train_batch_size": 8,
        "num_processes": 1,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
    }
    batch |= {"num_iterations": 2, "eval_strategy": "steps", "eval_steps": 10, "max_steps": 200}
    lines = said("trl", **batch, save_steps=100, warmup_ratio=0.1)
    got = [
        lines[key]
        for key in ("loop.steps", "run.checkpoint.every", "task.eval.every", "trainer.optimizer.warmup_steps")
    ]
    assert got == [50, 25, 3, 5]
    shares = said("trl", **batch, save_steps=0.5)
    assert shares["run.checkpoint.every"] == 25
    report = translate_config(TRL, ALIVE["trl"] | {"save_steps": 0.5, "warmup_ratio": 0.1}, ROWS)
    assert {"run.checkpoint.every", "trainer.optimizer.warmup_steps"} <= {line.key for line in report.open_questions}


def test_batches_of_trl_that_do_not_divide_are_asked_about():
    for more, asks in (
        ({"steps_per_generation": 6}, True),
        ({"steps_per_generation": 2}, False),
        ({"steps_per_generation": 2, "num_iterations": 2}, True),
        ({"steps_per_generation": 8, "num_iterations": 2}, False),
    ):
        config = ALIVE["trl"] | {"gradient_accumulation_steps": 4, "num_processes": 2} | more
        report = translate_config(TRL, config, ROWS)
        assert any("do not divide" in line.ask for line in report.open_questions) == asks, more


def test_evaluations_of_trl_draw_as_its_training_does():
    """eval_steps is logging_steps where it is not set; num_generations_eval answers are drawn there."""
    lines = said("trl", eval_strategy="steps", temperature=0.7, logging_steps=25)
    assert (lines["task.eval.every"], lines["task.eval.sampling.temperature"]) == (25, 0.7)
    report = translate_config(TRL, ALIVE["trl"] | {"eval_strategy": "epoch", "num_generations_eval": 4}, ROWS)
    assert "counts steps" in report.missing["eval_strategy"] and "one answer" in report.missing["num_generations_eval"]
    assert "task.eval.sampling.temperature" not in said("trl")


@pytest.mark.parametrize(
    "text, value",
    [
        ("<think>a\nb</think>\nc", 1.0),
        ("<think>a</think></think>", 1.0),
        ("so <think>a</think>", 0.0),
        ("\n<think>a</think>", 0.0),
        ("<think>a</think><think>b</think>", 0.0),
        ("<think>a", 0.0),
    ],
)
def test_thoughts_of_trl_come_first_as_there(text, value):
    """TRL: re.match(r"^<think>(?!.*<think>)(.*?)</think>.*$", text, DOTALL | MULTILINE)."""
    reward = build_reward(said("trl", reward_funcs="think_format_reward")["task.reward"])
    assert reward(Trajectory(text=text), Task("t", "e", {})) == value


def test_weights_of_trl_without_a_reward_are_refused():
    """zip would have left the second reward out."""
    config = ALIVE["trl"] | {"reward_funcs": ["accuracy_reward", "think_format_reward"], "reward_weights": [1.0]}
    with pytest.raises(ConfigError, match=r"1 numbers for 2 reward_funcs"):
        translate_config(TRL, config, ROWS)


def test_where_a_line_of_trl_looks_at_other_log_probabilities_it_says_so():
    notes = {
        line.key: line.note
        for config in (
            {"use_vllm": True, "beta": 0.1},
            {"off_policy_mask_threshold": 0.5, "num_iterations": 2, "num_processes": 1},
        )
        for line in translate_config(TRL, ALIVE["trl"] | config, ROWS).lines
    }
    assert "policy / engine" in notes["algo.kl"] and "at each update" in notes["algo.correction"]


def test_the_entropy_bonus_of_trl_acts_where_its_loss_does():
    """Their mean runs over the chosen tokens only, ours over all: coef / top. (Of 40
    tokens 10 are chosen: no rounding.)
    """
    lines = nest_lines(
        translate_config(TRL, ALIVE["trl"] | {"top_entropy_quantile": 0.25, "entropy_coef": 0.02}, ROWS).lines
    )["algo"]
    row = resolve_algorithm({k: v for k, v in lines.items() if k not in ("group_size", "mask_truncated")})
    assert (row.entropy.coef, row.entropy.top, row.surrogate.top) == (0.08, 0.25, 0.25)
    entropy = torch.rand(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    chosen = row.entropy.select(tokens(entropy, entropy, entropy, entropy=entropy))
    mine = (row.aggregate(torch.tensor([40])) * (row.entropy.coef * entropy) * chosen).sum()
    assert float(mine) == pytest.approx(0.02 * float(entropy.topk(10).values.mean()), rel=1e-12)


def test_a_kl_of_trl_beside_a_ratio_of_answers_is_not_weighed_by_tokens():
    report = translate_config(
        TRL, ALIVE["trl"] | {"beta": 0.1, "use_bias_correction_kl": True, "importance_sampling_level": "sequence"}, ROWS
    )
    assert "ratio of its answer" in report.missing["use_bias_correction_kl"]
    assert "unbiased" not in nest_lines(report.lines)["algo"]["kl"]


@pytest.mark.parametrize("estimator", ["group_norm", "dr_grpo", "rloo", "reinforce_baseline"])
def test_what_openrlhf_does_behind_the_baseline_is_named(estimator):
    given = {"actor.model_name_or_path": "m", "algo.advantage.estimator": estimator, "rollout.n_samples_per_prompt": 4}
    report = translate_config(OPENRLHF, given | {"reward.clip_range": [-1, 1]}, ROWS)
    assert "before the baseline" in report.missing["reward.clip_range"]
    assert not any(line.key.startswith("algo.shaping") for line in report.lines)
    row = resolve_algorithm(
        {key: value for key, value in nest_lines(report.lines)["algo"].items() if key != "group_size"}
    )
    draw = Ragged.make([3, 2, 4], 3, groups=1)
    base = advantages_of(replace(row, kl=replace(row.kl, coef=0.0)), draw.scored())
    cost = 0.01 * (draw.others_3T[1] - draw.others_3T[2])  # of k1
    owed = torch.cat([piece.flip(0).cumsum(0).flip(0) for piece in cost.split([3, 2, 4])])
    assert torch.allclose(advantages_of(row, draw.scored()), base - owed, atol=1e-12, rtol=0)
    assert any("algo.kl.init_coef" in keys for keys, _ in report.lost) == (estimator == "reinforce_baseline")
    plain = translate_config(
        OPENRLHF, given | {"algo.advantage.estimator": "reinforce", "reward.clip_range": [-1, 1]}, ROWS
    )
    assert nest_lines(plain.lines)["algo"]["shaping"] == {"kind": "clip", "limit": 1.0}
    assert not any("algo.kl.init_coef" in keys for keys, _ in plain.lost)


def test_gspo_of_openrlhf_with_a_correction_starts_its_ratio_at_the_engine():
    given = ALIVE["openrlhf"] | {"actor.policy_loss_type": "gspo", "algo.advantage.is_correction_level": "token"}
    report = translate_config(OPENRLHF, given | {"algo.advantage.is_correction_mode": "clip"}, ROWS)
    algo = nest_lines(report.lines)["algo"]
    assert algo["ratio"] == {"anchor": "behavior"} and "correction" not in algo
    assert "no effect" in report.missing["algo.advantage.is_correction_mode"]


def test_entropy_and_kl_of_openrlhf_are_means_over_tokens():
    given = ALIVE["openrlhf"] | {
        "actor.loss_agg_mode": "seq-mean-token-mean",
        "actor.entropy_coef": 0.01,
        "algo.kl.use_loss": True,
    }
    report = translate_config(OPENRLHF, given, ROWS)
    assert (
        "mean over tokens" in report.missing["actor.entropy_coef"]
        and "mean over tokens" in report.missing["algo.kl.use_loss"]
    )
    tokens = translate_config(OPENRLHF, given | {"actor.loss_agg_mode": "token-mean"}, ROWS)
    assert not {"actor.entropy_coef", "algo.kl.use_loss"} & tokens.missing.keys()


def test_the_clip_ratio_of_verl_has_no_effect_beside_its_defaults():
    report = translate_config(
        VERL, {"actor_rollout_ref.actor.clip_ratio": 0.3, "algorithm.adv_estimator": "grpo"}, ROWS
    )
    assert "clip_ratio_low = 0.2" in report.missing["actor_rollout_ref.actor.clip_ratio"]
    assert not any(line.value == 0.3 for line in report.lines)
    wide = {"actor_rollout_ref.actor.clip_ratio": 0.3, "actor_rollout_ref.actor.clip_ratio_low": None}
    lines = {
        line.key: line.value for line in translate_config(VERL, wide | {"algorithm.adv_estimator": "grpo"}, ROWS).lines
    }
    assert lines["algo.surrogate.low"] == 0.3 and "algo.surrogate.high" not in lines


def test_what_trl_cuts_off_a_draw_is_cut_off_here():
    lines = said("trl", top_p=0.9, top_k=40, min_p=0.05)
    assert [lines[f"engine.sampling.{name}"] for name in ("top_p", "top_k", "min_p")] == [0.9, 40, 0.05]
    assert not {"engine.sampling.top_p", "engine.sampling.min_p"} & said("trl", top_p=1.0, min_p=None).keys()


def test_codapo_of_verl_brings_its_focused_phase():
    lines = said(
        "verl", algorithm__adv_estimator="codapo", algorithm__codapo_top_k=3, algorithm__codapo_weight_offset=0.2
    )
    assert lines["algo.kind"] == "codapo" and lines["algo.advantage.delta"] == 0.2
    assert lines["algo.advantage.part"] == "acc"
    assert lines["task.curriculum"] == {"kind": "focused", "top": 3, "part": "acc"}


def test_the_loss_of_verl():
    lines = said("verl", algorithm__adv_estimator="rloo", actor_rollout_ref__actor__loss_agg_mode="seq-mean-token-sum")
    assert (
        lines["algo.kind"] == "grpo"
        and lines["algo.advantage.kind"] == "leave_one_out"
        and lines["algo.surrogate.dual"] == 3.0
    )
    assert lines["algo.aggregate.kind"] == "seq_mean_token_sum"
    kl = {"actor_rollout_ref__actor__use_kl_loss": True, "actor_rollout_ref__actor__kl_loss_type": "mse"}
    assert said("verl", algorithm__adv_estimator="grpo", **kl)["algo.kl"] == {"kind": "k2", "coef": 0.001}
    assert (
        said("verl", algorithm__adv_estimator="grpo", algorithm__norm_adv_by_std_in_grpo=False)["algo.advantage.kind"]
        == "group_center"
    )


def test_the_kl_that_openrlhf_charges_by_default_is_there_or_named():
    """Never in the loss when it is in the reward there, never left out in silence."""
    report = translate_config(OPENRLHF, ALIVE["openrlhf"], ROWS)
    wished = {"kind": "k1", "coef": 0.01, "clamp": 10.0, "where": "advantage"}
    if ROWS.rejection_reason({"kind": "grpo", "kl": wished}):
        assert "algo.kl.init_coef = 0.01" in " ".join(keys for keys, _ in report.lost)
        assert not any(line.key.startswith("algo.kl") for line in report.lines)
    else:
        assert nest_lines(report.lines)["algo"]["kl"] == wished
    without = translate_config(OPENRLHF, ALIVE["openrlhf"] | {"algo.kl.init_coef": 0}, ROWS)
    assert nest_lines(without.lines)["algo"]["kl"] == {"coef": 0.0} and "init_coef" not in render_lists(without)


def test_flat_flags_of_openrlhf_mean_what_they_are_called_today():
    old = read_config(
        "openrlhf",
        "python -m openrlhf.cli.train_ppo_ray --advantage_estimator rloo --n_samples_per_prompt 4 --actor_learning_rate 2e-6",
    )
    new = read_config(
        "openrlhf", "--algo.advantage.estimator rloo --rollout.n_samples_per_prompt 4 --actor.adam.lr 2e-6"
    )
    a, b = (translate_config(OPENRLHF, given, ROWS) for given in (old, new))
    assert (
        nest_lines(a.lines) == nest_lines(b.lines)
        and set(a.translated) == set(old)
        and "# n_samples_per_prompt" in render_recipe(a, "x")
    )


VLLM = {"use_vllm": True, "vllm_importance_sampling_clip_max": 1.5}
ROLLOUT = "algorithm.rollout_correction"
GATE = {"algo.advantage.is_correction_level": "token", "algo.advantage.is_correction_threshold": [0.8, 1.3]}


def gate(low, high, value):
    return value if low <= value <= high else 0.0


@pytest.mark.parametrize(
    "name, config, weight",
    [  # weight(w of the token, those of its answer) as the peer computes it
        ("trl", VLLM, lambda w, all: gate(0, 1.5, math.prod(all))),
        ("trl", VLLM | {"vllm_importance_sampling_mode": "token_truncate"}, lambda w, all: min(w, 1.5)),
        (
            "trl",
            VLLM | {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.7},
            lambda w, all: gate(0.7, 1.5, w),
        ),
        (
            "trl",
            VLLM | {"vllm_importance_sampling_mode": "sequence_truncate", "vllm_importance_sampling_clip_min": 0.7},
            lambda w, all: min(max(math.prod(all), 0.7), 1.5),
        ),
        ("verl", {f"{ROLLOUT}.rollout_is": "token"}, lambda w, all: min(w, 2.0)),
        (
            "verl",
            {f"{ROLLOUT}.rollout_rs": "token_k1", f"{ROLLOUT}.rollout_rs_threshold": 1.3},
            lambda w, all: float(1 / 1.3 <= w <= 1.3),
        ),
        (
            "verl",
            {f"{ROLLOUT}.rollout_is": "token", f"{ROLLOUT}.rollout_is_threshold": "0.8_1.3"},
            lambda w, all: gate(0.8, 1.3, w),
        ),
        (
            "verl",
            {
                f"{ROLLOUT}.rollout_is": "sequence",
                f"{ROLLOUT}.rollout_rs": "seq_mean_k1",
                f"{ROLLOUT}.rollout_rs_threshold": "0.9_1.2",
            },
            lambda w, all: min(math.prod(all), 2.0) * (0.9 <= math.prod(all) ** (-1 / len(all)) <= 1.2),
        ),
        ("openrlhf", GATE, lambda w, all: gate(0.8, 1.3, w)),
        ("openrlhf", GATE | {"algo.advantage.is_correction_mode": "clip"}, lambda w, all: min(max(w, 0.8), 1.3)),
        (
            "openrlhf",
            GATE | {"algo.advantage.is_correction_level": "seq"},
            lambda w, all: w * (0.8 <= math.prod(all) ** (1 / len(all)) <= 1.3),
        ),
        (
            "openrlhf",
            {"enable_vllm_is_correction": True, "use_icepop": True, "vllm_is_truncated_threshold": [0.8, 1.3]},
            lambda w, all: gate(0.8, 1.3, w),
        ),
    ],
)
def test_a_correction_gives_the_weights_of_the_peer(name, config, weight):
    """Written out token by token from what each does; verl's rejection bounds hold the
    engine's probability by the trainer's.
    """
    config = ALIVE[name] | ({"algorithm.adv_estimator": "grpo"} if name == "verl" else {}) | config
    report = translate_config(PEERS[name], config, ROWS)
    one_fate_each(report, config)
    row = resolve_algorithm(
        {key: value for key, value in nest_lines(report.lines)["algo"].items() if key != "group_size"}
    )
    generator = torch.Generator().manual_seed(5)
    x, sample = 0.3 * torch.randn(60, generator=generator, dtype=torch.float64), torch.arange(60) // 4
    got = row.correction(x, sample, torch.ones(60))
    want = [weight(math.exp(v), x[sample == n].exp().tolist()) for v, n in zip(x.tolist(), sample.tolist())]
    assert got.tolist() == pytest.approx(want, rel=1e-12) and len(set(want)) > 1


@pytest.mark.parametrize("name", VERL_CASES)
def test_a_config_of_verl_has_the_gradient_of_verls_formula(name):
    """KL, entropy and denominators included; the formula is written out in
    tests/kits/algos_oracle.py, and compared with verl's in test_peers.py.
    """
    config = {"algorithm.adv_estimator": "grpo"} | VERL_CASES[name]
    report = translate_config(VERL, config, ROWS)
    one_fate_each(report, config)
    row = resolve_algorithm(
        {key: value for key, value in nest_lines(report.lines)["algo"].items() if key != "group_size"}
    )
    batch = far_reference(Ragged.make([3, 7, 1, 10, 5, 2, 8, 4], 11))
    gradient = batch.loss(row)[1]
    wanted = of_verl(VERL_CASES[name], batch, advantages_of(row, batch.scored()).tolist())
    assert float((gradient - wanted).norm()) <= 1e-10 * max(1.0, float(wanted.norm())) and float(wanted.norm()) > 1e-3


def test_what_of_verl_cannot_be_said_is_named():
    """Where KL and entropy are added up otherwise than the loss, and a mean weight before the
    rejection. ReMax takes what is still to come.
    """
    actor, base = "actor_rollout_ref.actor", {"algorithm.adv_estimator": "grpo"}
    sapo = base | {f"{actor}.policy_loss.loss_mode": "sapo", f"{actor}.entropy_coeff": 0.1}
    assert any(
        f"{actor}.loss_agg_mode" in keys and "KL and entropy" in why
        for keys, why in translate_config(VERL, sapo, ROWS).lost
    )
    both = {f"{ROLLOUT}.rollout_is": "token", f"{ROLLOUT}.rollout_is_batch_normalize": True}
    both |= {f"{ROLLOUT}.rollout_rs": "token_k1", f"{ROLLOUT}.rollout_rs_threshold": "0.5_2.0"}
    assert (
        "before anything is rejected"
        in translate_config(VERL, base | both, ROWS).missing[f"{ROLLOUT}.rollout_is_batch_normalize"]
    )
    remax = {"algorithm.adv_estimator": "remax", "algorithm.use_kl_in_reward": True}
    assert nest_lines(translate_config(VERL, remax, ROWS).lines)["algo"]["kl"]["where"] == "advantage"
    dppo = base | {f"{actor}.policy_loss.loss_mode": "dppo_tv"}
    lines = {line.key: line.value for line in translate_config(VERL, dppo, ROWS).lines}
    assert (lines["algo.ratio.anchor"], lines["algo.surrogate.cap"]) == ("proximal", 3.0)


@pytest.mark.parametrize(
    "name, config, row, surrogate",
    [
        ("trl", {"loss_type": "sapo", "sapo_temperature_neg": 1.2}, "sapo", {"negative": 1.2}),
        ("trl", {"loss_type": "cispo", "epsilon_high": 5.0}, "cispo", {"high": 4.0}),
        ("trl", {"top_entropy_quantile": 0.3}, "grpo", {"kind": "forking", "top": 0.3}),
        ("verl", {"actor_rollout_ref.actor.policy_loss.loss_mode": "gspo"}, "gspo_token", {"low": 0.2, "high": 0.2}),
        ("verl", {"actor_rollout_ref.actor.policy_loss.loss_mode": "cispo"}, "cispo", {"low": 0.2, "high": 0.2}),
        ("verl", {"actor_rollout_ref.actor.policy_loss.loss_mode": "kl_cov"}, "kl_cov", {"share": 0.0002, "coef": 0.1}),
        (
            "verl",
            {"actor_rollout_ref.actor.policy_loss.loss_mode": "up", f"{VERL_ACTOR}.clip_ratio_c": 4.0},
            "up",
            {"dual": 4.0},
        ),
        ("verl", {"algorithm.adv_estimator": "optimal_token_baseline"}, "otb", {"kind": "clip", "dual": 3.0}),
        ("verl", {"algorithm.adv_estimator": "tir_optimal_token_baseline"}, "otb", {"kind": "clip", "dual": 3.0}),
        ("openrlhf", {"actor.policy_loss_type": "gspo"}, "gspo", {"low": 0.2, "high": 0.2}),
    ],
)
def test_a_loss_of_theirs_is_a_row_with_their_knobs(name, config, row, surrogate):
    config = ALIVE[name] | ({"algorithm.adv_estimator": "grpo"} if name == "verl" else {}) | config
    algo = nest_lines(translate_config(PEERS[name], config, ROWS).lines)["algo"]
    assert algo["kind"] == row and surrogate.items() <= algo["surrogate"].items()
    resolve_algorithm({key: value for key, value in algo.items() if key != "group_size"})


def test_ppo_of_the_peers_is_a_row_with_its_critic():
    job = whole(
        translate_config(
            VERL,
            {"critic.optim.lr": 2e-5, "trainer.critic_warmup": 20, "algorithm.lam": 0.95, "critic.model.path": "v"},
            ROWS,
        )
    )
    assert (job.algo.kind, job.trainer.critic.lr, job.trainer.critic.warmup, job.trainer.critic.path) == (
        "ppo",
        2e-5,
        20,
        "v",
    )
    assert (
        resolve_algorithm(
            {"kind": "ppo", **{k: getattr(job.algo, k) for k in ("advantage", "value", "shaping")}}
        ).advantage.lam
        == 0.95
    )
    job = whole(
        translate_config(
            OPENRLHF, {"actor.model_name_or_path": "m", "critic_learning_rate": 4e-6, "algo.kl.target": 6.0}, ROWS
        )
    )
    assert (job.algo.kind, job.trainer.critic.lr, job.algo.value) == ("ppo", 4e-6, {"clip": 0.5})
    assert job.algo.kl == {
        "kind": "k1",
        "coef": 0.01,
        "clamp": 10.0,
        "where": "reward",
        "target": 6.0,
        "horizon": 10000,
    }
    assert (
        "the row has no critic"
        in translate_config(VERL, {"algorithm.adv_estimator": "grpo", "critic.optim.lr": 1.0}, ROWS).missing[
            "critic.optim.lr"
        ]
    )


def test_a_row_that_does_not_exist_is_named_and_nothing_else_is_trained():
    report = translate_config(
        VERL,
        {"algorithm.adv_estimator": "other_baseline", "actor_rollout_ref.actor.clip_ratio_high": 0.3},
        ROWS,
    )
    assert {line.key for line in report.open_questions} >= {"algo.kind"} and "does not exist here yet" in render_lists(
        report
    )
    assert report.missing["actor_rollout_ref.actor.clip_ratio_high"].startswith(
        "it belongs to the row 'other_baseline'"
    )
    with pytest.raises(ConfigError, match="other_baseline"):
        resolve_algorithm({"kind": whole(report).algo.kind})


def test_a_knob_that_the_row_does_not_read_is_named():
    report = translate_config(OPENRLHF, ALIVE["openrlhf"] | {"algo.kl.init_coef": 0.0, "algo.kl.estimator": "k2"}, ROWS)
    assert "algo.kl.estimator" in report.same
    report = translate_config(
        VERL, {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.actor.kl_loss_coef": 0.1}, ROWS
    )
    assert "use_kl_loss is false" in report.missing["actor_rollout_ref.actor.kl_loss_coef"]


ADAPTERS = {
    "trl": ({"use_peft": True, "lora_r": 32, "lora_target_modules": ["q_proj"]}, 32, 32, ["q_proj"]),
    "verl": ({"actor_rollout_ref.model.lora_rank": 64, "actor_rollout_ref.model.lora_alpha": 32}, 64, 32, "all-linear"),
    "openrlhf": ({"lora_rank": 8, "target_modules": ["q_proj", "v_proj"]}, 8, 16, ["q_proj", "v_proj"]),
}


def test_rewards_that_trl_normalises_one_by_one_are_gdpo():
    given = {
        "multi_objective_aggregation": "normalize_then_sum",
        "reward_funcs": ["accuracy_reward", "think_format_reward"],
    }
    report = translate_config(TRL, ALIVE["trl"] | given | {"reward_weights": [1.0, 0.5]}, ROWS)
    job = whole(report)
    assert job.algo.advantage == {
        "kind": "parts_norm",
        "eps": 1e-4,
        "weights": {"accuracy_reward": 1.0, "think_format_reward": 0.5},
    }
    assert {name: part["weight"] for name, part in job.task.reward["parts"].items()} == {
        "accuracy_reward": 1.0,
        "think_format_reward": 1.0,
    }


def test_masked_truncated_answers_of_trl_are_masked_here():
    job = whole(translate_config(TRL, ALIVE["trl"] | {"mask_truncated_completions": True}, ROWS))
    assert job.algo.mask_truncated and not whole(translate_config(TRL, ALIVE["trl"], ROWS)).algo.mask_truncated


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_of_theirs_is_one_here(name):
    given, rank, alpha, targets = ADAPTERS[name]
    report = translate_config(PEERS[name], given | ALIVE[name], ROWS)
    one_fate_each(report, given | ALIVE[name])
    adapter = whole(report).model.adapter
    assert (adapter.kind, adapter.rank, adapter.alpha, adapter.targets) == ("lora", rank, alpha, targets)
    assert whole(translate_config(PEERS[name], ALIVE[name], ROWS)).model.adapter.kind == "off"


def test_dropout_in_an_adapter_is_named():
    report = translate_config(TRL, ALIVE["trl"] | {"use_peft": True, "lora_dropout": 0.05, "use_rslora": True}, ROWS)
    assert "could not recompute" in report.missing["lora_dropout"] and "plain LoRA" in report.missing["use_rslora"]
    assert "q_proj" in next(line.value for line in report.lines if line.key == "model.adapter")["targets"]


def test_a_typo_gets_the_nearest_name():
    report = translate_config(
        VERL, {"actor_rollout_ref.rollout.temprature": 0.9, "algorithm.adv_estimator": "grpo"}, ROWS
    )
    assert report.unknown == {
        "actor_rollout_ref.rollout.temprature": "Did you mean 'actor_rollout_ref.rollout.temperature'?"
    }


def test_of_two_names_of_one_key_the_later_counts():
    given = {"pretrain": "a", "actor.model_name_or_path": "b", "algo.advantage.estimator": "rloo"}
    report = translate_config(OPENRLHF, given, ROWS)
    one_fate_each(report, given)
    assert nest_lines(report.lines)["model"]["path"] == "b" and "says it again" in report.missing["pretrain"]


@pytest.mark.parametrize("first", [True, False])
def test_an_old_name_at_its_default_says_nothing(first):
    """A dump of a whole config has old names beside today's."""
    for name, today, old, key, value in (
        (
            "trl",
            ALIVE["trl"] | {"use_vllm": True, "vllm_importance_sampling_clip_max": 2.0},
            {"vllm_importance_sampling_cap": None},
            "algo.correction",
            {"level": "sequence", "action": "mask", "high": 2.0},
        ),
        (
            "verl",
            {"reward.reward_model.enable": True, "reward.reward_model.model_path": "judge"},
            {"reward_model.enable": None, "reward_model.model.path": None, "reward_model.reward_kwargs": {}},
            "task.reward",
            None,
        ),
    ):
        whole_dump = old | today if first else today | old
        report, plain = (translate_config(PEERS[name], config, ROWS) for config in (whole_dump, today))
        one_fate_each(report, whole_dump)
        lines = {line.key: line.value for line in report.lines}
        assert lines == {line.key: line.value for line in plain.lines} and set(old) <= set(report.same)
        assert value is None or value.items() <= lines[key].items()
    alone = said("trl", **ALIVE["trl"], use_vllm=True, vllm_importance_sampling_cap=None)
    assert alone["algo.correction"]["high"] == 3.0


# -- the data and what stands around the loop ---------------------------------------------------------


@pytest.mark.parametrize(
    "name, given, passes",
    [
        ("trl", {"num_train_epochs": 2}, 2.0),
        ("trl", {"num_train_epochs": 0.5}, 0.5),
        ("verl", {"trainer.total_epochs": 15}, 15.0),
        ("openrlhf", {"train.num_episodes": 3}, 3.0),
    ],
)
def test_passes_over_the_data_are_passes(name, given, passes):
    report = translate_config(PEERS[name], ALIVE[name] | given, ROWS)
    job = whole(report)
    assert (job.loop.passes, job.loop.steps) == (passes, None) and not any(
        line.key.startswith("loop.") and line.key != "loop.groups_per_step" for line in report.open_questions
    )


def test_prompts_that_verl_filters_are_filtered_here():
    given = {"data.max_prompt_length": 700, "data.filter_overlong_prompts": True}
    assert whole(translate_config(VERL, given, ROWS)).task.max_prompt_tokens == 700
    alone = translate_config(VERL, {"data.max_prompt_length": 700}, ROWS)
    assert (
        whole(alone).task.max_prompt_tokens is None
        and "task.max_prompt_tokens" in alone.missing["data.max_prompt_length"]
    )


def test_images_several_files_and_scorers_by_source(tmp_path):
    given = {
        "data.train_files": ["~/a.parquet", "b.parquet"],
        "data.val_files": "c.parquet",
        "data.image_key": "images",
    }
    job = whole(translate_config(VERL, given, ROWS))
    assert (
        job.task.data["path"] == [str(Path.home() / "a.parquet"), "b.parquet"]
        and job.task.data["eval_path"] == "c.parquet"
    )
    assert job.task.data["image"] == "images" and "image" not in whole(translate_config(VERL, {}, ROWS)).task.data
    printed = translate_config(VERL, {"data.image_key": "images", "data.video_key": "videos"}, ROWS)
    assert "image" not in whole(printed).task.data and "add image = 'images'" in printed.missing["data.image_key"]
    reward = job.task.reward
    assert (reward["kind"], reward["field"], reward["parts"]["openai/gsm8k"]) == ("by", "data_source", "number")
    for i, rows in enumerate(("12", "3")):
        (tmp_path / f"{i}.jsonl").write_text("".join(json.dumps({"prompt": f"{n}?", "answer": n}) + "\n" for n in rows))
    tasks = load_tasks({"kind": "jsonl", "path": [str(tmp_path / f"{i}.jsonl") for i in (0, 1)]}, env="single_turn")
    assert sorted(task.data["answer"] for task in tasks.train) == ["1", "2", "3"]


def test_several_sets_of_openrlhf_are_a_mixture():
    given = ALIVE["openrlhf"] | {
        "data.prompt_dataset": "a.jsonl,org/b",
        "data.prompt_probs": "0.2,0.8",
        "data.image_key": "image",
    }
    sources = whole(translate_config(OPENRLHF, given, ROWS)).task.data["sources"]
    assert [(s["source"], s["weight"], s["kind"], s["image"]) for s in sources] == [
        ("1-a", 0.2, "jsonl", "image"),
        ("2-b", 0.8, "datasets", "image"),
    ]


@pytest.mark.parametrize(
    "name, given, kept",
    [
        ("trl", {"report_to": ["wandb", "swanlab"]}, ["wandb"]),
        ("verl", {"trainer.logger": ["console", "wandb", "mlflow"]}, ["wandb", "mlflow"]),
        ("openrlhf", {"use_wandb": "key"}, ["wandb"]),
    ],
)
def test_sinks_that_exist_here_are_kept(name, given, kept):
    report = translate_config(PEERS[name], ALIVE[name] | given, ROWS)
    assert whole(report).run.sinks == kept and set(SINKS) <= {*TRACKERS}


def test_distillation_of_verl_has_a_teacher_here():
    root = "distillation"
    given = {
        f"{root}.enabled": True,
        f"{root}.teacher_models.teacher_model.model_path": "big",
        "algorithm.adv_estimator": "grpo",
    }
    loss = {f"{root}.distillation_loss.loss_mode": "k1", f"{root}.distillation_loss.use_policy_gradient": True}
    report = translate_config(VERL, given | loss | {f"{root}.distillation_loss.use_task_rewards": False}, ROWS)
    algo = nest_lines(report.lines)["algo"]
    assert (whole(report).model.teacher, algo["distill"], algo["kind"]) == ("big", {"coef": 1.0}, "opd")
    assert "algo.distill.coef" not in {line.key for line in report.open_questions}
    assert "algo.distill.coef" in {
        line.key for line in translate_config(VERL, given, ROWS).open_questions
    }  # theirs is k3 in the loss
    assert not any(
        line.key == "model.teacher" for line in translate_config(VERL, given | {f"{root}.enabled": False}, ROWS).lines
    )


# -- reading ---------------------------------------------------------------------------------------


def test_yaml_json_and_the_command_line_of_trl_say_the_same(tmp_path):
    want = {
        "beta": 0.04,
        "num_generations": 4,
        "reward_funcs": ["accuracy_reward", "think_format_reward"],
        "bf16": True,
        "learning_rate": 1e-6,
    }
    (tmp_path / "c.yaml").write_text("beta: 0.04\nnum_generations: 16\nlearning_rate: 1e-6\n")
    line = "--num-generations 4 --reward_funcs accuracy_reward think_format_reward --bf16"
    assert read_config("trl", json.dumps(want)) == want
    assert (
        read_config(
            "trl",
            "# c\n---\nbeta: 0.04\nnum_generations: 4\nlearning_rate: 1e-6\nbf16: true\nreward_funcs: [accuracy_reward, "
            "think_format_reward]\n",
        )
        == want
    )
    assert read_config("trl", f"trl grpo --beta 0.04 --learning_rate 1e-6 {line}") == want
    assert read_config("trl", f"trl grpo --config c.yaml {line}", tmp_path) == want | {"config": "c.yaml"}
    launched = read_config(
        "trl", f"accelerate launch --num_processes 8 --mixed_precision bf16 grpo.py --beta 0.04 {line}"
    )
    assert (
        launched["num_processes"] == 8 and launched["launcher --mixed_precision"] == "bf16" and launched["beta"] == 0.04
    )


def test_a_switch_of_trl_that_is_turned_off_is_off():
    line = "trl grpo --no_use_bias_correction_kl --use_vllm --no-vllm-importance-sampling-correction --beta 0.1"
    given = read_config("trl", line)
    off = {"use_bias_correction_kl": False, "vllm_importance_sampling_correction": False}
    assert given == off | {"use_vllm": True, "beta": 0.1}
    lines = nest_lines(translate_config(TRL, ALIVE["trl"] | given, ROWS).lines)["algo"]
    assert "unbiased" not in lines["kl"] and "correction" not in lines


@pytest.mark.parametrize("word", ["no", "False", "f", "0", "yes", "True", "t", "1"])
def test_a_switch_of_trl_may_be_a_word(word):
    given = read_config("trl", f"trl grpo --use_vllm {word} --mask_truncated_completions {word}")
    on, lines = word in ("yes", "True", "t", "1"), said("trl", **ALIVE["trl"], **given)
    assert lines["algo.mask_truncated"] is on and ("algo.correction" in lines) is on


def test_nested_yaml_of_verl_and_its_overrides_say_the_same():
    text = "algorithm:\n  adv_estimator: grpo\ntrainer:\n  logger: [console]\ndata:\n  seed: null\n"
    assert read_config("verl", text) == {
        "algorithm.adv_estimator": "grpo",
        "trainer.logger": ["console"],
        "data.seed": None,
    }
    refers = "a: 1\nb: ${a}\nc: ${oc.select:x.y,512}\nd: runs/${e}/x\ne: n${b}\nf: ${x.y}\ng: ${c}\n"
    assert read_config("verl", refers) == {
        "a": 1,
        "b": 1,
        "c": 512,
        "d": "runs/n1/x",
        "e": "n1",
        "f": "${x.y}",
        "g": 512,
    }
    assert read_overrides(
        ["algorithm.adv_estimator=grpo", "+trainer.logger=['console']", "++data.seed=null", "~data.x"]
    ) == read_config("verl", text)


def test_a_script_is_read_as_its_shell_would():
    text = """
    # a comment with a 'quote
    export A=2
    B=$((A * 1024 + (3 - 1)))
    NAME="run ${A}"
    WHERE=${ROOT:-"/data"}/${NAME}
    LIST=(
        x.one=$A   # why
        x.two="$NAME"
    )
    LIST+=(x.three=$((B / 2)))
    python -m verl.trainer.main_ppo \\
        a.b=${B} \\
        a.c="$WHERE" "${LIST[@]}" a.d=$UNKNOWN $@ 2>&1 | tee log.txt
    """
    assert read_config("verl", text) == {
        "a.b": 2050,
        "a.c": "/data/run 2",
        "x.one": 2,
        "x.two": "run 2",
        "x.three": 1025,
        "a.d": "$UNKNOWN",
    }
    assert list(read_commands('echo "don\'t"\nA=1 python x --n $A')) == [
        ["echo", "don't"],
        ["A=1", "python", "x", "--n", "$A"],
    ]


def test_a_variable_where_a_number_counts_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"data.train_batch_size = '\$BATCH' is not a number; write the value itself"):
        translate_config(VERL, read_config("verl", "data.train_batch_size=$BATCH"), ROWS)


@pytest.mark.parametrize(
    "text, value",
    [
        ("1e-6", 1e-6),
        ("-1", -1),
        ("True", True),
        ("null", None),
        ("[a,'b',1]", ["a", "b", 1]),
        ("'x'", "x"),
        ("1_000", "1_000"),
        ("nan", "nan"),
        ("", ""),
    ],
)
def test_what_a_word_means(text, value):
    assert parse_scalar(text) == value and type(parse_scalar(text)) is type(value)


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def rondel(capsys):
    def call(*words):
        with pytest.raises(SystemExit) as end:
            main([str(word) for word in words])
        out, err = capsys.readouterr()
        return end.value.code or 0, out, err

    return call


def test_the_command_writes_prints_and_lists(rondel, tmp_path):
    target = tmp_path / "new" / "mine.toml"
    code, out, err = rondel("import", "--from", "trl", EXAMPLES / "trl.yaml", "-o", target)
    assert code == 0 and f"rondel check {target}" in out and "temprature: Did you mean 'temperature'?" in err
    assert Job.read(target).algo.surrogate == {"high": 0.28}
    code, out, _ = rondel("import", "--from", "trl", EXAMPLES / "trl.yaml")
    assert code == 0 and out == target.read_text()
    whole_report = json.loads(rondel("import", "--from", "trl", EXAMPLES / "trl.yaml", "--json")[1])
    assert whole_report["recipe"] == out and whole_report["unknown"]["temprature"]
    code, _, err = rondel("import", "--from", "trl", EXAMPLES / "trl.yaml", "-o", target)
    assert code == 1 and "exists; name another file" in err


@pytest.mark.parametrize(
    "words, message",
    [
        (["trl", "no.yaml"], "no config at no.yaml"),
        (["trl", "{}"], "sets no key of trl"),
        (["trl", "a: [1 =\n"], "is not YAML"),
        (["trl", '{"a" = 1}'], "is not JSON"),
        (["trl", "trl grpo --config nowhere.yaml"], "nowhere.yaml cannot be read"),
        (["verl", "python main_ppo a.b=1\npython main_ppo a.b=2"], "trains 2 times"),
    ],
)
def test_what_cannot_be_read_is_one_line(rondel, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    if words[1] == "{}":
        Path("empty.json").write_text("{}")
        words = [words[0], "empty.json"]
    code, out, err = rondel("import", "--from", *words)
    assert (code, out) == (1, "") and message in err and len(err.splitlines()) == 1


def test_the_page_shows_what_the_command_says():
    page = (EXAMPLES.parents[1] / "docs" / "import.md").read_text()
    report, _ = import_config("trl", str(EXAMPLES / "trl.yaml"))
    shown = page.partition("```text\n")[2].partition("```")[0]
    assert shown.strip() in render_recipe(report, "trl.yaml") and shown.startswith("[algo]")
