"""Law 16, docs: every command and snippet in README, docs and recipes is run by a test: whole, reduced, or, where it
needs hardware or an hour, parsed.

The tables say which. What is shown and not in a table fails; what is in a table and no longer shown fails too.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kits.once import made_once
from kits.sweeps import covering
from rondel.cli import VERBS, main
from rondel.core.config.algorithm import OF_GROUPS
from rondel.core.config.job import Job
from rondel.core.config.toml_reader import parse_overrides
from rondel.core.sandbox_types import CommandResult

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SMALLER = shlex.split(
    "--loop.warmup.steps=6 --loop.warmup.groups_per_step=2 --loop.steps=2 --loop.groups_per_step=2 --algo.group_size=2 "
    "--run.checkpoint.every=4 --place.threads=1"
)
SMALLEST = [  # of an example
    *SMALLER,
    *("--loop.warmup.steps=1", "--loop.steps=1"),
]

# As shown -> "whole", "reduced" (with SMALLER), why it is only parsed, or which other test runs what it names: of such a
# command the recipe is read, and `make sweeps` runs it reduced.
COMMANDS = {
    "make train": "parsed: the quickstart takes minutes",
    "make test": "parsed: it is running",
    "make check": "parsed: it may be running",
    'rondel eval runs/tiny --draws 16 --k 1,4,16 --set aime=aime.jsonl --set sums={ kind = "digits" }': "parsed: minutes of draws; tests/units/test_evaluation_sets.py runs such",
    "rondel eval runs/tiny --best --json": "parsed: minutes of draws; tests/units/test_evaluation_sets.py runs such",
    "rondel serve runs/tiny": "parsed: it serves until it is ended; tests/e2e/test_serve.py runs servers",
    "rondel audit runs/tiny": "parsed: it ends with 1 where it finds something; tests/units/test_audit.py runs it",
    "rondel audit runs/tiny --steps 10:20 --json --fail": "parsed: it ends with 1 where it finds something; tests/units/test_audit.py runs it",
    "rondel serve smollm2-135m --training --folder runs/service": "parsed: it serves until it is ended; tests/e2e/test_tinker_sdk.py runs it",
    "rondel serve ./smollm2 --training --dtype float32": "parsed: it serves until it is ended; tests/e2e/test_tinker_sdk.py runs it",
    "python -m tinker_cookbook.recipes.chat_sl.train model_name=./smollm2 dataset=conversations.jsonl renderer_name=role_colon batch_size=8 lora_rank=8 learning_rate=5e-4 max_length=256 max_steps=6": "parsed: tinker-cookbook is no part of CI; the page says what came of it",
    "python -m tinker_cookbook.recipes.math_rl.train model_name=./smollm2 env=arithmetic renderer_name=role_colon group_size=8 groups_per_batch=8 lora_rank=8 learning_rate=5e-4 max_tokens=5 loss_fn=importance_sampling max_steps=5": "parsed: tinker-cookbook is no part of CI; the page says what came of it",
    "rondel init first": "whole",
    "rondel init second --model smollm2-135m": "whole",
    "rondel check recipes/tiny.toml": "whole",
    "rondel train recipes/tiny.toml": "reduced",
    "rondel train recipes/tiny.toml --place.kind=split --loop.max_staleness=1 --algo.correction.kind=importance --run.folder=runs/apart": "reduced",
    "rondel view runs/tiny --limit 4": "whole",
    "rondel convert checkpoints/run/iter_0000100 runs/converted --like Qwen/Qwen3-0.6B": "parsed: it needs a checkpoint and the hub; tests/units/test_megatron_convert.py converts such",
    "rondel convert Qwen/Qwen3-0.6B runs/megatron": "parsed: it needs the hub; tests/units/test_megatron_convert.py converts such",
    "rondel doctor --cluster": "parsed: it would join whatever Ray cluster runs; tests/e2e/test_doctor_cluster.py runs it",
    "rondel train recipes/cartpole.toml": "parsed: tests/e2e/test_control.py runs it smaller",
    "rondel train recipes/cartpole_tokens.toml": "parsed: tests/e2e/test_token_worlds.py runs it smaller",
    "rondel train recipes/catch.toml": "parsed: tests/e2e/test_catch.py runs it smaller",
    "rondel train recipes/catch_chunks.toml": "parsed: tests/e2e/test_catch_chunks.py runs it smaller",
    "rondel eval runs/cartpole --n 20": "parsed: tests/e2e/test_control.py evaluates such a run",
    "rondel replay runs/cartpole --step 2": "parsed: tests/e2e/test_control.py replays such a run",
    "rondel serve runs/cartpole": "parsed: it serves until it is ended; tests/e2e/test_serve_steps.py asks such a server",
    "rondel export runs/cartpole exported/cartpole": "parsed: tests/e2e/test_control.py exports such a run",
    "rondel eval runs/digits --draws 16": "parsed: tests/e2e/test_flows.py evaluates such a run",
    "rondel serve runs/digits": "parsed: it serves until it is ended; tests/e2e/test_serve_steps.py asks such a server",
    "rondel export runs/digits exported/digits": "parsed: tests/e2e/test_flows.py exports such a run",
    "rondel train recipes/cartpole_model.toml": "parsed: tests/e2e/test_learned_worlds.py runs it smaller",
    "rondel train recipes/pendulum_chunks.toml": "parsed: it needs MuJoCo; tests/e2e/test_chunks.py runs it in another world",
    "rondel train recipes/pendulum.toml": "parsed: it needs MuJoCo; tests/e2e/test_control.py runs it smaller, where that is",
    "rondel train recipes/flow.toml": "parsed: tests/e2e/test_flows.py runs it smaller",
    "rondel train recipes/video.toml": "parsed: tests/e2e/test_flow_mesh.py runs it smaller",
    "rondel plan recipes/video_large.toml --what-if hardware=h100": "whole",
    "rondel simulate recipes/video_large.toml --what-if hardware=h100 --staleness 0,1 --split 1:1,1:2 --steps 5": "whole",
    "rondel train recipes/blocks.toml": "parsed: tests/e2e/test_block_runs.py runs it smaller",
    "rondel train recipes/digits.toml": "parsed: tests/e2e/test_flows.py runs it smaller, where scikit-learn is",
    "rondel view runs/digits --step 101 --png before.png": "parsed: tests/e2e/test_flows.py writes such a file",
    "rondel view runs/digits --png after.png": "parsed: tests/e2e/test_flows.py writes such a file",
    "rondel view runs/cartpole --step 1 --limit 2 --png before.png": "parsed: tests/units/test_episode_frames.py",
    "rondel view runs/cartpole --limit 2 --png after.png": "parsed: tests/units/test_episode_frames.py",
    "rondel train recipes/moe.toml": "reduced",
    "rondel train recipes/ppo.toml": "read: tests/units/test_critic.py runs its row",
    "PYTHONPATH=examples rondel train recipes/calculator.toml": "parsed: minutes and a model of 93 MB; tests/units/test_tools.py plays tools",
    "PYTHONPATH=examples rondel train recipes/code.toml --loop.seed=0 --place.threads=1": "parsed: minutes and a model of 93 MB; "
    "tests/units/test_code_recipes.py runs a step of it",
    "python examples/small_repositories.py runs/small-repositories": "parsed: tests/units/test_code_recipes.py makes such",
    "rondel train recipes/repository.toml --loop.seed=0 --place.threads=1": "parsed: minutes and a model of 93 MB; "
    "tests/units/test_code_recipes.py runs a step of it",
    "rondel train recipes/lora.toml": "parsed: it takes minutes and a model of 93 MB; tests/units/test_adapters.py runs a tiny one",
    "rondel train recipes/vision.toml": "read: tests/e2e/test_vision_run.py trains it",
    "rondel tasks search --out runs/corpus": "parsed: it downloads 51 MB; tests/units/test_search_corpus.py makes smaller ones",
    "rondel tasks search --out runs/tables --source tables": "whole",
    "rondel train recipes/search.toml --loop.seed=0 --place.threads=1": "parsed: minutes; tests/units/test_search_env.py "
    "trains a smaller one",
    "rondel tasks shop --out runs/shop-world --n 4000": "whole",
    "rondel train recipes/shop.toml --loop.seed=0 --place.threads=1": "parsed: minutes; tests/units/test_shop_env.py trains a smaller one",
    "PYTHONPATH=examples rondel train recipes/relay.toml": "parsed: tests/units/test_policies.py runs it whole",
    "rondel train recipes/opd.toml": "parsed: its teacher is a whole run of recipes/tiny.toml; tests/units/test_distill.py runs one",
    "rondel card runs/tiny": "whole",
    "rondel check-env recipes/tiny.toml": "whole",
    "PYTHONPATH=examples rondel check-env guess:Guess --task.data.kind=guess:numbers --n 7": "whole",
    "rondel card --diff runs/tiny runs/apart": "whole",
    "rondel tasks repositories --out tasks --n 60 --seed 0": "parsed: it fetches packages and takes half an hour; tests/units/test_repository_generated.py makes tasks",
    "rondel diagnose runs/tiny": "whole",
    "rondel diagnose runs/tiny runs/apart": "whole",
    "rondel diagnose runs/tiny --json --fail-on error": "parsed: of a reduced run it finds errors; tests/units/test_diagnose.py runs it",
    "rondel trace runs/tiny -o trace.json": "whole",
    "rondel dashboard runs/tiny runs/apart": "parsed: it serves until a signal; tests/e2e/test_dashboard.py runs it",
    "PYTHONPATH=examples rondel check recipes/tiny.toml --task.reward=my_reward:grade": "whole",
    "PYTHONPATH=examples rondel train recipes/tiny.toml --task.reward=my_reward:grade --run.folder=runs/mine": "reduced",
    "PYTHONPATH=examples rondel train recipes/tiny.toml --task.reward=my_group_reward:rank --run.folder=runs/ranked": "read: "
    "tests/units/test_groupwise.py scores with it",
    "PYTHONPATH=examples rondel train recipes/tiny.toml --task.env.kind=my_env:SecondThought --task.env.hint=Think. --run.folder=runs/two-turns": "reduced",
    "PYTHONPATH=examples rondel train recipes/tiny.toml --task.env=guess:Guess --task.data.kind=guess:numbers --loop.warmup.steps=0 "
    "--loop.steps=200 --engine.sampling.max_tokens=1 --trainer.lr=3e-3 --run.folder=runs/guess": "reduced",
    "PYTHONPATH=examples rondel train recipes/tiny.toml --task.env=search:Search --task.data.kind=search:questions "
    "--task.reward=search:grade --model.path.max_position_embeddings=2048 --run.folder=runs/facts": "read: tests/units/test_examples.py plays it",
    "PYTHONPATH=examples rondel train recipes/tiny.toml --task.env=shop:Shop --task.data.kind=shop:wishes "
    "--model.path.max_position_embeddings=2048 --loop.warmup.steps=0 --run.folder=runs/shop": "read: tests/units/test_examples.py plays it",
    "PYTHONPATH=examples rondel train recipes/tiny.toml --task.env=repair:Repair --task.data.kind=repair:bugs "
    "--model.path.max_position_embeddings=2048 --loop.warmup.steps=0 --run.folder=runs/repair": "read: tests/units/test_examples.py plays it",
    "PYTHONPATH=examples rondel train recipes/tiny.toml --task.env.kind=gym --task.env.turns=3 --loop.warmup.steps=0 --run.folder=runs/world "
    "--task.data.kind=gym --task.data.name=guess_world:make": "read: tests/units/test_gym.py trains it",
    "PYTHONPATH=examples rondel train recipes/tiny.toml --task.env.kind=gateway --task.env.agent=my_agent:solve --loop.groups_per_step=8 "
    "--run.folder=runs/agent": "read: tests/e2e/test_gateway_run.py trains it",
    "rondel train recipes/tiny.toml --run.checkpoint.every=20": "reduced",
    "rondel replay runs/tiny --step 8": "whole",
    "rondel check recipes/tiny.toml --task.reward=number": "whole",
    "rondel explain recipes/tiny.toml --algo.kind=dapo --algo.surrogate.high=0.3": "whole",
    "rondel explain recipes/tiny.toml --loop.steps=5": "whole",
    "rondel plan recipes/tiny.toml": "whole",
    "PYTHONPATH=examples rondel pipeline recipes/pipelines/specialists.toml --plan": "whole",
    "PYTHONPATH=examples rondel pipeline recipes/pipelines/specialists.toml": "parsed: minutes; tests/units/test_pipeline_run.py runs a smaller one",
    "rondel plan recipes/tiny.toml --what-if hardware=h100": "whole",
    "rondel plan --what-if model=70b gpus=64 hardware=h100 output=16k group=8 prompts=256": "whole",
    "rondel plan --calibrate": "parsed: half a minute of runs; tests/units/test_calibrating.py does the arithmetic",
    "rondel bench plan --json": "parsed: tests/e2e/test_bench.py runs it smaller",
    "rondel simulate recipes/tiny.toml --what-if hardware=h100 --staleness 0,1,2": "whole",
    "rondel simulate recipes/tiny.toml --lengths runs/tiny": "whole",
    "rondel simulate --what-if model=7b gpus=64 output=16k prompts=64 --staleness 0,1,4 --split 1:1,1:3 --steps 5": "whole",
    "rondel simulate --chain": "parsed: half a minute; tests/units/test_simulated.py runs most of it",
    "rondel import --from trl examples/peers/trl.yaml -o from_trl.toml": "whole",
    "rondel import --from verl examples/peers/verl.sh -o from_verl.toml": "whole",
    "rondel import --from openrlhf examples/peers/openrlhf.sh -o from_openrlhf.toml": "whole",
    "rondel explain from_trl.toml": "whole",
    "rondel view runs/tiny --step 8 --min-reward 1": "whole",
    "rondel view runs/tiny --html rollouts.html": "whole",
    "rondel eval runs/tiny": "whole",
    "rondel train recipes/tiny.toml --place.kind=shared --place.ranks=2": "parsed: tests/e2e/test_colocated.py runs it",
    "rondel engines runs/apart 3": "parsed: tests/e2e/test_elastic_engines.py runs it",
    "rondel eval smollm2-135m recipes/quickstart.toml --rates rated.jsonl --samples 8": "parsed: minutes; tests/units/test_curriculum.py rates a tiny one",
    "rondel prepare recipes/quickstart.toml --stage models": "parsed: it copies 270 MB; tests/units/test_prepare.py prepares tiny ones",
    "rondel submit recipes/quickstart.toml --to slurm --nodes 2 --gpus 8 --dry-run": "whole",
    "rondel submit recipes/quickstart.toml --to slurm --nodes 2 --gpus 8 --with torchrun --partition gpu --time 24:00:00 --dry-run": "whole",
    "rondel submit recipes/quickstart.toml --to kubernetes --nodes 2 --gpus 8 --image registry/rondel:latest --secret keys --dry-run": "whole",
    "rondel submit recipes/quickstart.toml --to kuberay --nodes 2 --gpus 8 --image registry/rondel:latest --place.engines=4 --dry-run": "whole",
    "rondel submit recipes/quickstart.toml --to ray --nodes 2 --gpus 8 --address http://head:8265 --dry-run": "whole",
    "tensorboard --logdir runs/tiny/tensorboard": "parsed: it serves until it is stopped",
    "rondel serve smollm2-135m": "parsed: it serves until it is stopped",
}
TINY = (
    '{"random": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}'
)
SNIPPETS: dict[
    str, Any
] = {  # a line of a python block -> what is replaced to run it reduced; {} runs it whole; a text names the test that runs it
    'card = rondel.run("recipes/tiny.toml", loop={"steps": 5})': {
        'loop={"steps": 5}': 'quiet=True, loop={"steps": 1, "groups_per_step": 2, "warmup": {"steps": 1, "groups_per_step": 2}}, algo={"group_size": 2}, place={"threads": 1}, run={"folder": "runs/notebook"}'
    },
    'card = rondel.run("recipes/tiny.toml", task=task, run={"folder": "runs/ends_right"})': {
        'run={"folder"': 'quiet=True, loop={"steps": 1, "groups_per_step": 2, "warmup": {"steps": 0}}, algo={"group_size": 2}, place={"threads": 1}, run={"folder"'
    },
    "training.optim_step(types.AdamParams(learning_rate=1e-3, eps=1e-8)).result()": "tests/e2e/test_tinker_sdk.py",
    'trainer = rondel.Trainer({"model": {"path": "smollm2-135m"}, "algo": {"kind": "grpo"}, "trainer": {"lr": 1e-5}})': {
        '"smollm2-135m"': TINY
    },
    'outs = engine.generate(["3 + 4 ="], rondel.Sampling(n=2, max_tokens=8))': {'"smollm2-135m"': TINY},
    'for sample in engine.generate(["The capital of France is"], rondel.Sampling(n=2, max_tokens=6, seed=1))[0]:': {
        '"smollm2-135m"': TINY
    },
    'sampling = rondel.Sampling(grammar={"json_schema": person | {"additionalProperties": False}}, max_tokens=40)': {
        '"smollm2-135m"': TINY
    },
    "from openai import OpenAI": "tests/e2e/test_serve.py",
    '        ran = await box.run(["python3", "-c", "print(open(0).read()[::-1])"], stdin=b"abc", timeout=10)': "tests/e2e/test_boxes.py",
    "from rondel.algos.table import DR_GRPO": {},
    "from rondel.models.merge import merge": "tests/units/test_adapters.py",
    "def grade(trajectory, task, brevity=0.0):": {},
    'for event in read("runs/tiny"):': {},
}
RECIPES = {
    "tiny.toml": "reduced",
    "moe.toml": "reduced",
    "ppo.toml": "read: tests/units/test_critic.py runs its row",
    "vision.toml": "read: tests/e2e/test_vision_run.py trains it",
    "cartpole_tokens.toml": "parsed: tests/e2e/test_token_worlds.py runs it smaller",
    "catch.toml": "parsed: tests/e2e/test_catch.py runs it smaller",
    "catch_chunks.toml": "parsed: tests/e2e/test_catch_chunks.py runs it smaller",
    "cartpole.toml": "parsed: tests/e2e/test_control.py runs it smaller",
    "cartpole_model.toml": "parsed: tests/e2e/test_learned_worlds.py runs it smaller",
    "pendulum_chunks.toml": "parsed: it needs MuJoCo; tests/e2e/test_chunks.py runs it in another world",
    "pendulum.toml": "parsed: it needs MuJoCo; tests/e2e/test_control.py runs it smaller, where that is",
    "flow.toml": "parsed: tests/e2e/test_flows.py runs it smaller",
    "blocks.toml": "parsed: tests/e2e/test_block_runs.py runs it smaller",
    "video.toml": "parsed: tests/e2e/test_flow_mesh.py runs it smaller",
    "video_large.toml": "parsed: it is to be planned, as docs/video.md does",
    "digits.toml": "parsed: tests/e2e/test_flows.py runs it smaller, where scikit-learn is",
    "search.toml": "parsed: it needs a corpus; tests/units/test_search_env.py trains it smaller",
    "shop.toml": "parsed: it needs a shop; tests/units/test_shop_env.py trains it smaller",
    "relay.toml": "parsed: tests/units/test_policies.py runs it whole",
    **dict.fromkeys(
        ("dr_grpo.toml", "dapo.toml", "gspo.toml", "cispo.toml", "rloo.toml", "reinforce_pp.toml"),
        "parsed: tests/e2e/test_learning.py trains twenty steps of it on three seeds",
    ),
    "opd.toml": "parsed: it learns from what recipes/tiny.toml has trained; tests/units/test_distill.py runs one",
    "lora.toml": "parsed: it takes minutes and a model of 93 MB; tests/units/test_adapters.py runs a tiny one",
    **dict.fromkeys(
        ("code.toml", "repository.toml"),
        "parsed: it takes minutes and a model of 93 MB; tests/units/test_code_recipes.py runs a step of it",
    ),
    "calculator.toml": "parsed: it takes minutes and a model of 93 MB; tests/units/test_tools.py plays tools",
    "quickstart.toml": "parsed: it takes minutes and a model of 93 MB",
}
PIPELINES = {
    "specialists.toml": "tests/units/test_pipeline_file.py",  # a path: that test reads it, with every recipe and its data
}
EXAMPLES = {
    "three_digits.py": "by recipes/pipelines/specialists.toml",
    "my_reward.py": "by a command of README.md",
    "my_group_reward.py": "by a command of docs/score.md",
    "my_env.py": "by a command of docs/generate.md",
    "guess.py": "by another",
    "my_agent.py": "by a third",
    "sums.py": "by recipes/calculator.toml",
    "functions.py": "by recipes/code.toml",
    "small_repositories.py": "tests/units/test_code_recipes.py",
    "guess_world.py": "by a fourth",
    "search.py": "and so on",
    "shop.py": "and so on",
    "repair.py": "and so on",
    "relay.py": "by recipes/relay.toml",
    "my_loss_term.py": "tests/units/test_table.py",  # a path: that test runs it
    **dict.fromkeys(("cuda_kernel.py", "tilelang_kernel.py"), "tests/units/test_example_kernels.py"),
    **dict.fromkeys(
        ("my_transport.py", "my_filter.py", "my_shaping.py", "my_batch.py", "my_engine.py"), "tests/units/test_seams.py"
    ),
}
SHOWN_ONLY = {"text", ""}  # drawings and output


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^ *(```+)([^\n`]*)\n(.*?)^ *\1 *$", text, re.DOTALL | re.MULTILINE):
            found.append(Block(page, text.count("\n", 0, match.start()) + 1, match[2].strip(), match[3]))
    return [b for b in found if not languages or b.language in languages]


def commands() -> list[tuple[str, str]]:
    """(place, command) of every line of a shell block; comments and continuations are joined away."""
    lines = []
    for block in blocks("bash", "sh"):
        for line in block.text.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                lines.append((block.place, shlex.join(words).replace("'", "")))
    return lines


# -- nothing is shown that is not known, nothing is known that is not shown ------------------------


def test_every_block_says_what_it_is():
    known = {"bash", "sh", "python", "toml"} | SHOWN_ONLY
    assert [b.place for b in blocks() if b.language not in known] == []


def test_every_command_is_in_the_table():
    shown = dict((command, place) for place, command in commands())
    assert {c: p for c, p in shown.items() if c not in COMMANDS} == {}, (
        "not in COMMANDS: say whether it runs whole, reduced or is parsed"
    )
    assert COMMANDS.keys() - shown.keys() == set(), "in COMMANDS, but shown nowhere"


def test_every_snippet_is_in_the_table():
    shown = {b.place: [line for line in SNIPPETS if line in b.text.splitlines()] for b in blocks("python")}
    assert [place for place, lines in shown.items() if len(lines) != 1] == [], (
        "each python block needs one line of SNIPPETS"
    )
    assert SNIPPETS.keys() - {line for lines in shown.values() for line in lines} == set(), (
        "in SNIPPETS, but shown nowhere"
    )


def test_every_recipe_and_example_is_in_the_table():
    assert {p.name for p in (ROOT / "recipes").glob("*.toml")} == RECIPES.keys()
    assert {p.name for p in (ROOT / "recipes" / "pipelines").glob("*.toml")} == PIPELINES.keys()
    assert all(name in (ROOT / test).read_text(encoding="utf-8") for name, test in PIPELINES.items())
    assert {p.name for p in (ROOT / "examples").glob("*.py")} == EXAMPLES.keys()
    run = [c for c, how in COMMANDS.items() if not how.startswith("parsed") and "train" in c]
    run += [path.read_text(encoding="utf-8") for path in (ROOT / "recipes").rglob("*.toml")]
    run += [(ROOT / how).read_text(encoding="utf-8") for how in EXAMPLES.values() if how.startswith("tests/")]
    assert [name for name in EXAMPLES if not any(f"{Path(name).stem}:" in c for c in run)] == []


def test_every_link_leads_somewhere():
    links = [
        (page, target)
        for page in PAGES
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    ]
    assert [(page.name, t) for page, t in links if not t.startswith("http") and not (page.parent / t).exists()] == []


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    text = re.sub(r"^ *(```+).*?^ *\1 *$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = [heading.lower() for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in headings}


def test_every_anchor_is_a_heading():
    links = [
        (page, target, anchor)
        for page in PAGES
        for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text(encoding="utf-8"))
    ]
    assert len(links) > 20
    wrong = [
        (page.name, target, anchor)
        for page, target, anchor in links
        if anchor not in anchors_of(page.parent / target if target else page)
    ]
    assert wrong == []


@cache
def names_in(path: Path) -> set[str]:
    """Functions, classes and constants of a Python file, and members of its classes: `Buffer`, `Buffer.admit`."""
    found: set[str] = set()

    def add_names(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                add_names(node.body, f"{node.name}.")
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update(prefix + target.id for target in targets if isinstance(target, ast.Name))

    add_names(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return found


def named_links() -> list[tuple[str, str, Path, str]]:
    """(page, file as written, file, name) of every link like `[buffer.py: Buffer.admit](../src/rondel/buffer.py)`."""
    return [
        (page.name, file, (page.parent / target).resolve(), name)
        for page in PAGES
        for file, name, target in re.findall(
            r"\[(\w+\.py):\s+([\w.]+)\]\(([^)#]+)\)", page.read_text(encoding="utf-8").replace("\\_", "_")
        )
    ]


@pytest.mark.slow
def test_every_named_link_leads_to_its_name():
    """Links name functions instead of line numbers, so they can be checked and do not go stale."""
    links = named_links()
    assert len(links) > 50
    wrong = [
        (page, file, name)
        for page, file, path, name in links
        if path.name != file or not path.exists() or name not in names_in(path)
    ]
    assert wrong == []


@cache
def swept_tests(path: Path) -> set[str]:
    """Tests of a file of which `make test` runs no case."""
    tests = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)]
    return {test.name for test in tests if "pytest.mark.sweep" in map(ast.unparse, test.decorator_list)}


def test_no_test_that_proves_a_law_is_left_to_the_sweeps():
    links = [link for link in named_links() if link[0] == "design.md" and link[3].startswith("test_")]
    assert len(links) > 80 and [(file, name) for _, file, path, name in links if name in swept_tests(path)] == []


def test_the_laws_are_numbered_and_whoever_cites_one_finds_it():
    """Every `law N` in code, tests and docs is in docs/design.md, and every law there names its test."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^### Law (\d+): [^\n]+\n(.*?)(?=^##)", text, re.DOTALL | re.MULTILINE))
    assert list(sections) == [str(n) for n in range(1, len(sections) + 1)]
    assert [n for n, body in sections.items() if not re.search(r"- Test:\s+\[test_", body)] == []
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "docs").glob("*.md")]
    cited = {
        number
        for path in files
        for numbers in re.findall(r"\b[Ll]aws? (\d+(?:(?:, | and )\d+)*)", path.read_text(encoding="utf-8"))
        for number in re.findall(r"\d+", numbers)
    }
    assert cited <= sections.keys()


def test_every_verb_is_in_the_readme():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [verb for verb in VERBS if f"| `rondel {verb}" not in text] == []


def maker(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["make_recipe", "make_papers"])
def test_a_page_is_what_the_code_says(name):
    made = maker(name)
    assert made.PAGE.read_text(encoding="utf-8") == made.page(), f"run: python docs/{name}.py"


def test_every_row_has_its_paper_and_a_test_that_exists():
    from rondel.algos.table import TABLE

    made, page = maker("make_papers"), (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert (
        list(TABLE) == [name for name in TABLE if f"| `{name}`{made.recipe(name)} | [" in page]
        and made.ORACLES.keys() == TABLE.keys()
    )
    assert [test for test in made.ORACLES.values() if f"def {test}(" not in tests] == []


# -- recipes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_read(name):
    job = Job.read(ROOT / "recipes" / name)
    assert job.run.folder == f"runs/{Path(name).stem}"


@pytest.mark.parametrize("block", blocks("toml"), ids=lambda b: b.place)
def test_a_piece_of_a_recipe_is_read(block, tmp_path, monkeypatch):
    """Laid over the tiny recipe, section by section. What has stages is a pipeline."""
    from rondel.algos.table import resolve_algorithm
    from rondel.pipeline.pipeline_file import read_pipeline

    if "stages" in tomllib.loads(block.text):
        monkeypatch.chdir(ROOT)
        (tmp_path / "shown.toml").write_text(block.text, encoding="utf-8")
        assert read_pipeline(tmp_path / "shown.toml").stages
        return
    tree = tomllib.loads((ROOT / "recipes" / "tiny.toml").read_text(encoding="utf-8"))
    for section, keys in tomllib.loads(block.text).items():
        tree[section] = tree.get(section, {}) | keys
    job = Job.parse(tree, block.place)
    resolve_algorithm({k: v for k, v in job.algo.model_dump().items() if v != {} and k not in OF_GROUPS})
    # a reader's own; test_verifiers.py, test_repository_formats.py and test_shop_env.py have some
    own = ("verifiers", "repository", "shop_tasks")
    if "data" in tomllib.loads(block.text).get("task", {}) and job.task.data["kind"] not in own:
        from rondel.generate.envs.sources import load_tasks

        assert load_tasks(job.task.data, env=job.task.env_kind).train
    import inspect

    from rondel.score import REWARDS, build_reward

    reward = job.task.reward_spec
    # a reader's own model: the keys must be its own; test_reward_model.py builds some
    if isinstance(reward, dict) and "path" in reward:
        known = {
            *inspect.signature(REWARDS["model"]).parameters,
            *inspect.signature(REWARDS[reward["kind"]]).parameters,
            "kind",
        }
        assert reward.keys() <= known
    else:
        assert callable(build_reward(reward, {"sandbox": NoBoxes, "deadline": lambda: job.task.reward_calls.timeout}))


class NoBoxes:
    """A reward that runs code asks for them when it is made, and tries its packages in one."""

    alive = clean = True

    def __init__(self, spec="process"):
        self.spec = spec

    def cell(self, limits, **settings):
        return self

    def call(self, code, **how):
        return CommandResult(0, 0, b"", b"")


# -- commands and snippets -------------------------------------------------------------------------


APART = "rondel train recipes/tiny.toml --place.kind=split --loop.max_staleness=1 --algo.correction.kind=importance --run.folder=runs/apart"
AFTER = {
    "rondel explain from_trl.toml": "rondel import --from trl examples/peers/trl.yaml -o from_trl.toml",
    "rondel card --diff runs/tiny runs/apart": APART,
    "rondel diagnose runs/tiny runs/apart": APART,
}  # another worker may have run it


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder as a newcomer has it after one reduced run of the tiny recipe."""

    def make(folder: Path) -> None:
        for name in ("recipes", "examples"):
            shutil.copytree(ROOT / name, folder / name)
        here = Path.cwd()
        os.chdir(folder)
        try:
            with pytest.raises(SystemExit) as end:
                main(["train", "recipes/tiny.toml", *SMALLER])
        finally:
            os.chdir(here)
        assert not end.value.code

    return made_once(tmp_path_factory, "docs", make)


@pytest.fixture
def inside(place, monkeypatch) -> Path:
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return place


READ = [c for c, how in COMMANDS.items() if how.startswith("read")]
RUN = [c for c, how in COMMANDS.items() if how in ("whole", "reduced")]


@pytest.mark.parametrize("command", READ)
def test_the_recipe_of_a_command_is_read(command):
    """The test that it names exists, and its keys are keys, whose values are as they should be."""
    assert (ROOT / COMMANDS[command].split()[1]).is_file()
    verb, recipe, *words = [word for word in shlex.split(command) if not word.startswith("PYTHONPATH=")][1:]
    assert verb == "train"
    assert Job.read(ROOT / recipe, parse_overrides(words)).run.folder in (
        f"runs/{Path(recipe).stem}",
        *(word.partition("=")[2] for word in words),
    )


@pytest.mark.slow
@pytest.mark.parametrize("command", covering([*RUN, *READ], RUN))
def test_a_command_does_its_work(inside, monkeypatch, capsys, command):
    words = shlex.split(command)
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        assert name == "PYTHONPATH"
        monkeypatch.syspath_prepend(str(inside / value))
    assert words.pop(0) == "rondel"
    if command in AFTER and not (inside / words[-1]).exists():
        with pytest.raises(SystemExit):
            main([*shlex.split(AFTER[command])[1:], *(SMALLER if COMMANDS[AFTER[command]] == "reduced" else [])])
    if "-o" in words:  # what comes after it may have come first, where a worker took tests from another
        (inside / words[words.index("-o") + 1]).unlink(missing_ok=True)
    with pytest.raises(SystemExit) as end:
        smaller = SMALLEST if command.startswith("PYTHONPATH") else SMALLER
        main([*words, *(smaller if COMMANDS[command] != "whole" else [])])
    out, err = capsys.readouterr()
    assert not end.value.code, f"{command}: {out[-1500:]}{err}"
    if words[0] == "train" and "--run.folder" in command:
        folder = Path(parse_overrides([w for w in words if w.startswith("--")])["run.folder"])
        assert (folder / "card.json").is_file()


@pytest.mark.parametrize("command", [c for c, how in COMMANDS.items() if how.startswith("parsed")])
def test_a_long_command_exists(command, capsys):
    program, *words = [word for word in shlex.split(command) if "=" not in word or word.startswith("--")]
    if program == "make":
        # a target without a recipe would pass silently, so the target is looked for by name; nothing is run
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    if program == "rondel":
        with pytest.raises(SystemExit) as end:
            main([*words[: 1 + (words[0] == "bench")], "--help"])
        failed, told = end.value.code, capsys.readouterr().out
    else:
        tool = shutil.which(program) or str(Path(sys.executable).with_name(program))
        asked = subprocess.run([tool, "--help"], capture_output=True, text=True, timeout=120)
        failed, told = asked.returncode, asked.stdout
    wanted = [word for word in words if word.startswith("--") and "." not in word]  # a key of the recipe is no option
    assert not failed and all(word.partition("=")[0] in told for word in wanted)


@pytest.mark.slow
@pytest.mark.parametrize("block", blocks("python"), ids=lambda b: b.place)
def test_a_snippet_runs(inside, block):
    line, changes = next((line, change) for line, change in SNIPPETS.items() if line in block.text.splitlines())
    if isinstance(changes, str):  # it needs a server, which that test has
        assert line in (ROOT / changes).read_text(encoding="utf-8")
        return
    text = block.text
    for shown, smaller in changes.items():
        assert shown in text
        text = text.replace(shown, smaller)
    exec(compile(text, block.place, "exec"), {"__name__": "__main__"})


def test_the_reward_of_the_readme_is_the_example():
    shown = [b.text for b in blocks("python") if "def grade" in b.text]
    assert shown == [(ROOT / "examples" / "my_reward.py").read_text(encoding="utf-8")]
