"""More than two hundred broken recipes, overrides, data files, folders, checkpoints and runs:
each ends with 1 and one line that names the key, the file or the line, and what to do; quickly,
without a traceback, and without calling it a bug.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kits.once import made_once
from kits.runs import FAST
from rondel.cli import main

TINY = Path(__file__).parents[2] / "recipes" / "tiny.toml"
SMALL = [
    *(f"--model.path.{key}={n}" for key, n in (("hidden_size", 32), ("intermediate_size", 64), ("num_hidden_layers", 1))),
    "--loop.warmup.steps=0", "--loop.steps=2", "--loop.groups_per_step=2", "--algo.group_size=2", "--run.sinks=[]", "--place.threads=1",
    "--loop.max_refills=1",
]  # fmt: skip
CPU = 5.0  # seconds of one; most take a hundredth
Words = Callable[[Path, Path], list[str]]  # (a folder of the test, a finished run) -> the command


# -- what is broken ----------------------------------------------------------------------------------


def recipe(*overrides: str) -> Words:
    return lambda folder, finished: ["train", str(TINY), f"--run.folder={folder / 'run'}", *SMALL, *overrides]


def files(content: bytes, name: str = "recipe.toml") -> Words:
    """A recipe of its own."""

    def words(folder: Path, finished: Path) -> list[str]:
        (folder / name).write_bytes(content)
        return ["train", str(folder / name), f"--run.folder={folder / 'run'}", *SMALL]

    return words


def named(name: str) -> Words:
    """A recipe of this name."""
    return lambda folder, finished: ["train", name, f"--run.folder={folder / 'run'}"]


def data(content: bytes | str, more: str = "", name: str = "tasks.jsonl", kind: str = "jsonl") -> Words:
    """The tiny recipe on this file."""

    def words(folder: Path, finished: Path) -> list[str]:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return table(f'{{ kind = "{kind}", path = "{folder / name}"{more} }}')(folder, finished)

    return words


def table(text: str, *more: str) -> Words:
    """The tiny recipe with this task.data."""
    return recipe("--task.eval={}", f"--task.data={text}", *more)


def folder(make: Callable[[Path], Path | str | None], *more: str) -> Words:
    """The tiny recipe in a run folder that `make` has made something of."""

    def words(folder: Path, finished: Path) -> list[str]:
        run = folder / "run"
        return ["train", str(TINY), *SMALL, *more, f"--run.folder={make(run) or run}"]

    return words


def place(name: str, what: str, *more: str) -> Words:
    """A run folder in which `name` is something else than a run has there."""

    def make(run: Path) -> None:
        path = run / name
        path.parent.mkdir(parents=True)
        if what == "a folder":
            path.mkdir()
        elif what == "a link":
            path.symlink_to("/nowhere/at/all")
        elif what == "a pipe":
            os.mkfifo(path)
        else:
            path.write_text("mine")

    return folder(make, *more)


def run(name: str, content: bytes | None, *verb: str) -> Words:
    """A finished run of four steps of which one file is damaged, or gone."""

    def words(folder: Path, finished: Path) -> list[str]:
        shutil.copytree(finished, folder / "run")
        for path in [folder / "run" / name] if "*" not in name else list((folder / "run").glob(name)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
            if content is not None:
                path.write_bytes(path.name.encode() if content == b"name" else content)
        if verb[0] == "train":
            return ["train", str(TINY), *SMALL, "--loop.steps=6", f"--run.folder={folder / 'run'}", *verb[1:]]
        return [verb[0], str(folder / "run"), *verb[1:]]

    return words


def model(files: dict[str, bytes | None], *more: str) -> Words:
    """The tiny recipe on a model folder, a checkpoint of that run, in which files are others."""

    def words(folder: Path, finished: Path) -> list[str]:
        shutil.copytree(finished / "checkpoints" / "step-000004", folder / "model")
        for name, content in files.items():
            (folder / "model" / name).unlink(missing_ok=True)
            if content is not None:
                (folder / "model" / name).write_bytes(content)
        return recipe(f"--model.path={folder / 'model'}", *more)(folder, finished)

    return words


def command(*words: str) -> Words:
    """{finished} and {folder} stand for these."""
    return lambda folder, finished: [word.format(folder=folder, finished=finished) for word in words]


GOOD = '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3"}\n'
TEXT = TINY.read_bytes()
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="


def config(**changes: object) -> bytes:
    base = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64, "vocab_size": 105}  # fmt: skip
    return json.dumps(base | changes).encode()


CASES: dict[str, tuple[Words, str]] = {
    # -- numbers of the recipe -----------------------------------------------------------------------
    "heads that do not divide": (recipe("--model.path.num_attention_heads=5", "--model.path.num_key_value_heads=5"), "not a multiple of the number of attention heads (5)"),
    "key heads that do not divide": (recipe("--model.path.num_key_value_heads=3"), "num_key_value_heads = 3 cannot be made: the first must be a multiple"),
    "no layers": (recipe("--model.path.num_hidden_layers=0"), "num_hidden_layers = 0 cannot be made: it is a whole number of at least 1"),
    "fewer than no layers": (recipe("--model.path.num_hidden_layers=-1"), "num_hidden_layers = -1"),
    "more layers than anybody has": (recipe("--model.path.num_hidden_layers=1000000000"), "at most 10000"),
    "a model without width": (recipe("--model.path.hidden_size=0"), "hidden_size = 0 cannot be made"),
    "a model whose width is a text": (recipe("--model.path.hidden_size='big'"), "hidden_size = 'big' cannot be made"),
    "a model whose width is half a number": (recipe("--model.path.hidden_size=32.5"), "hidden_size = 32.5 cannot be made"),
    "no heads": (recipe("--model.path.num_attention_heads=0"), "num_attention_heads = 0"),
    "no key heads": (recipe("--model.path.num_key_value_heads=0"), "num_key_value_heads = 0"),
    "no feed-forward": (recipe("--model.path.intermediate_size=0"), "intermediate_size = 0"),
    "an odd head": (recipe("--model.path.hidden_size=36"), "even rotary dimension"),
    "an odd head of its own": (recipe("--model.path.head_dim=3"), "head_dim = 3 cannot be made: a head of rotary positions has an even width"),
    "no context": (recipe("--model.path.max_position_embeddings=0"), "max_position_embeddings = 0"),
    "no vocabulary": (recipe("--model.path.vocab_size=0"), "vocab_size = 0"),
    "fewer words than none": (recipe("--model.path.vocab_size=-5"), "vocab_size = -5"),
    "fewer tokens than the tokenizer has": (recipe("--model.path.vocab_size=3"), "this model's tokens are 0 to 2"),
    "a setting that no config has": (recipe("--model.path.hiden_size=32"), "no 'hiden_size'"),
    "a random number": (recipe("--model.path.random=5"), "knows no model type '5'"),
    "a random nothing": (recipe("--model.path={}"), 'needs random = "llama"'),
    "a seed of letters for a model": (recipe("--model.path.seed='x'"), "seed is a whole number"),
    "no path of a model": (recipe("--model.path=''"), "is not a model folder"),
    "a width without memory": (recipe("--model.path.hidden_size=100000000"), "making a random 'llama'"),
    "no tokens at once": (recipe("--trainer.micro_tokens=0"), "trainer.micro_tokens = 0: input should be greater than or equal to 1"),
    "fewer tokens at once than none": (recipe("--trainer.micro_tokens=-1"), "trainer.micro_tokens = -1"),
    "a beta of 1": (recipe("--trainer.optimizer.betas=[0.9, 1.0]"), "trainer.optimizer.betas.1 = 1.0: input should be less than 1"),
    "a beta above 1": (recipe("--trainer.optimizer.betas=[1.5, 0.9]"), "trainer.optimizer.betas.0 = 1.5"),
    "a beta below 0": (recipe("--trainer.optimizer.betas=[-0.1, 0.9]"), "trainer.optimizer.betas.0 = -0.1"),
    "a beta that is no number": (recipe("--trainer.optimizer.betas=[nan, 0.9]"), "trainer.optimizer.betas.0 = nan"),
    "three betas": (recipe("--trainer.optimizer.betas=[0.9, 0.9, 0.9]"), "at most 2 items"),
    "one beta": (recipe("--trainer.optimizer.betas=[0.9]"), "'trainer.optimizer.betas.1' is missing"),
    "an infinite rate": (recipe("--trainer.lr=inf"), "trainer.lr = inf: input should be a finite number"),
    "a rate that is no number": (recipe("--trainer.lr=nan"), "trainer.lr = nan"),
    "a rate that no number survives": (recipe("--trainer.lr=1e30"), "the weights have overflowed, lower trainer.lr"),
    "an infinite rate of the supervised phase": (recipe("--loop.warmup.lr=inf", "--loop.warmup.steps=1"), "loop.warmup.lr = inf"),
    "an infinite rate of the critic": (recipe("--trainer.critic.lr=inf", "--algo.kind=ppo"), "trainer.critic.lr = inf"),
    "infinite decay": (recipe("--trainer.optimizer.weight_decay=inf"), "trainer.optimizer.weight_decay = inf"),
    "a clip that is no number": (recipe("--trainer.clip=nan"), "trainer.clip = nan"),
    "an infinite temperature": (recipe("--engine.sampling.temperature=inf"), "engine.sampling.temperature = inf"),
    "a temperature of nearly nothing": (recipe("--engine.sampling.temperature=1e-300"), "0 (greedy) or positive, from 1e-6"),
    "an infinite temperature of evaluations": (recipe("--task.eval.sampling.temperature=inf"), "task.eval.sampling = "),
    "no tokens in evaluations": (recipe("--task.eval.sampling.max_tokens=0"), "task.eval.sampling = "),
    "a top_p that is no number": (recipe("--engine.sampling.top_p=nan"), "engine.sampling.top_p = nan"),
    "answers longer than any context": (recipe("--engine.sampling.max_tokens=1000000000000"), "exceeds the model's context of 64: lower max_tokens"),
    "a group of everybody": (recipe("--algo.group_size=1000000000"), "2000000000 answers in one step, and at most 1000000 are carried"),
    "groups without end": (recipe("--loop.groups_per_step=1000000000"), "loop.groups_per_step = 1000000000"),
    "late groups without end": (recipe("--loop.oversample=1000000000"), "lower one of them"),
    "a supervised step without end": (recipe("--loop.warmup.steps=1", "--loop.warmup.groups_per_step=1000000000"), "loop.warmup.groups_per_step = 1000000000"),
    "endless staleness": (recipe("--loop.max_staleness=1000000000"), "loop.max_staleness = 1000000000"),
    "both steps and passes": (recipe("--loop.passes=2"), "both say how long the run is: remove one"),
    "endless passes": (recipe("--loop.passes=inf"), "loop.passes = inf"),
    "an entropy that nobody means": (recipe("--algo.entropy.coef=-5"), "coef = -5; it must lie in [-1, 1]"),
    "an entropy that is no number": (recipe("--algo.entropy.coef=nan"), "algo.entropy.coef = nan is not a number"),
    "an infinite entropy": (recipe("--algo.entropy.coef=inf"), "coef = inf; it must lie in [-1, 1]"),
    "a negative distance": (recipe("--algo.kl.coef=-1"), "must not be negative"),
    "a distance of endless weight": (recipe("--algo.kl.coef=inf"), "coef = inf; it must not exceed 1e+06: the loss would overflow"),
    "a distance that no number survives": (recipe("--algo.kl.coef=1e300"), "coef = 1e+300; it must not exceed 1e+06"),
    "a distance that is no number": (recipe("--algo.kl.coef=nan"), "algo.kl.coef = nan is not a number"),
    "a clip below 0": (recipe("--algo.surrogate.low=-1"), "low = -1; it must lie in [0, 1]"),
    "a clip in quotes": (recipe("--algo.surrogate.low='x'"), "write x without quotes"),
    "a component that is true": (recipe("--algo.advantage={ kind = true }"), "algo.advantage.kind = True is not a text"),
    "more requests than memory": (recipe("--engine.max_running=1000000000000"), "engine.max_running = 1000000000000"),
    "no pages": (recipe("--engine.kv_pages=0"), "engine.kv_pages = 0: input should be greater than or equal to 1; or input should be 'auto'"),
    "fewer pages than none": (recipe("--engine.kv_pages=-1"), "engine.kv_pages = -1"),
    "more pages than memory": (recipe("--engine.kv_pages=1000000000000"), "out of memory"),
    "pages of letters": (recipe("--engine.kv_pages=many"), "write the number without quotes; or input should be 'auto'"),
    "no threads": (recipe("--place.threads=0"), "place.threads = 0"),
    "fewer threads than none": (recipe("--place.threads=-1"), "place.threads = -1"),
    "threads for everybody": (recipe("--place.threads=1000000000"), "place.threads = 1000000000"),
    "a device that nobody sells": (recipe("--place.device=banana"), "place.device = 'banana'; it is 'auto', 'cpu'"),
    "no device": (recipe("--place.device=''"), "place.device = ''; it is 'auto'"),
    "a window of nothing": (recipe("--loop.window=0", "--loop.max_staleness=2"), "it must lie in [1, 5]"),
    "an end of no letters": (recipe("--engine.sampling.stop=['']"), "stop holds an empty string"),
    "an end that is no token": (recipe("--engine.sampling.stop=[99999999]"), "token 99999999: this model's tokens are 0 to 104"),
    "endless patience": (recipe("--place.patience=inf"), "place.patience = inf"),
    "a reward that may think for ever": (recipe("--task.reward.timeout=1e300"), "task.reward.timeout = 1e+300"),
    "a million reward workers": (recipe("--task.reward.workers=1000000"), "task.reward.workers = 1000000"),
    "a million engines": (recipe("--place.kind=split", "--place.engines=1000000"), "place.engines = 1000000"),
    "an adapter wider than memory": (recipe("--model.adapter={ kind = 'lora', rank = 100000000 }"), "model.adapter.rank = 100000000"),
    "an adapter for a layer that is not there": (recipe("--model.adapter={ kind = 'lora', targets = ['nope'] }"), "'nope' is no linear layer"),
    "no checkpoint kept": (recipe("--run.checkpoint.keep=0"), "run.checkpoint.keep = 0"),
    # -- names ---------------------------------------------------------------------------------------
    "a reward that is a number": (recipe("--task.reward=math:pi"), "reward 'math:pi' is 3.14159"),
    "a reward that is a module": (recipe("--task.reward=json:decoder"), "and no function or class"),
    "a reward of one argument": (recipe("--task.reward=json:dumps"), "is called as f(trajectory, task), and cannot be"),
    "a reward without a kind": (recipe("--task.reward={}"), "has no 'kind'"),
    "a reward that does not exist": (recipe("--task.reward={ kind = 'nope' }"), "reward 'nope' does not exist"),
    "a reward of a number": (recipe("--task.reward={ kind = 5 }"), "has no 'kind'"),
    "a reward with a setting too many": (recipe("--task.reward={ kind = 'number', nope = 1 }"), "unexpected keyword argument 'nope'"),
    "a tolerance that nothing meets": (recipe("--task.reward={ kind = 'number', tolerance = -1 }"), "tolerance = -1; it must be a number of at least 0"),
    "a tolerance that everything meets": (recipe("--task.reward={ kind = 'number', tolerance = inf }"), "tolerance = inf"),
    "a deadline of its own": (recipe("--task.reward={ kind = 'math', deadline = 5 }"), "has no setting 'deadline': task.reward.timeout is its deadline"),
    "a box of its own": (recipe("--task.reward={ kind = 'code', sandbox = 5 }"), "sandbox = 5; it is a kind"),
    "a reward without a name": (recipe("--task.reward=''"), "reward '' does not exist"),
    "a reward of a colon": (recipe("--task.reward=':'"), "your own is written 'module:name'"),
    "a reward of half a name": (recipe("--task.reward='json:'"), "your own is written 'module:name'"),
    "a sink that is a number": (recipe("--run.sinks=['math:pi']"), "run.sinks: 'math:pi' is 3.14159"),
    "a sink that cannot be opened": (recipe("--run.sinks=['json:dumps']"), "run.sinks: opening 'json:dumps'"),
    "a sink of a number": (recipe("--run.sinks=[5]"), "run.sinks.0 = 5"),
    "a filter that is a number": (recipe("--task.filters=['math:pi']"), "filter 'math:pi' is 3.14159"),
    "a filter that is none": (recipe("--task.filters=['json:dumps']"), "task.filters: 'json:dumps': TypeError"),
    "an environment that is a number": (recipe("--task.env=math:pi"), "environment 'math:pi' is 3.14159"),
    "an environment of one argument": (recipe("--task.env=math:sqrt"), "is called as f(task, chat), and cannot be"),
    "an environment without a name": (recipe("--task.env=''"), "environment '' does not exist"),
    "a curriculum that does not exist": (recipe("--task.curriculum={ kind = 'odd' }"), "task.curriculum.kind 'odd' does not exist"),
    "a curriculum with a setting too many": (recipe("--task.curriculum={ x = 1 }"), "cannot be made from {'x': 1}"),
    "no tools": (recipe("--task.env=tools"), "'task.env.tools' is missing"),
    "a tool that is a number": (recipe("--task.env=tools", "--task.env.tools=['math:pi']"), "tool 'math:pi' is 3.14159"),
    "a tool server that is not there": (recipe("--task.env=tools", "--task.env.tools=['mcp:/nowhere/server']"), "there is no command '/nowhere/server'"),
    "an agent that is a number": (recipe("--task.env=gateway", "--task.env.agent=math:pi"), "agent(task, base_url, api_key)"),
    "an agent that is no command": (recipe("--task.env=gateway", "--task.env.agent=['/nowhere/agent']"), "there is no command '/nowhere/agent'"),
    "agents with a setting too many": (recipe("--task.env=agents", "--task.env.agents=[{ x = 1 }]"), "task.env.agents[1] has no setting 'x'"),
    "traces to nowhere": (recipe("--run.sinks=[{ kind = 'opentelemetry', url = 'not a url' }]"), "is not an address of OTLP"),
    "a server at no address": (recipe("--engine.kind=vllm", "--engine.url='not a url'", "--place.kind=split"), "engine.url: 'not a url' is no address; it is one like http://"),
    "a cluster at no address": (recipe("--place.kind=split", "--place.cluster=ray:nope"), '"ray:nope" names no Ray'),
    "torchrun without torchrun": (recipe("--place.kind=split", "--place.cluster=torchrun"), "torchrun --nproc-per-node"),
    "a critic that is not there": (recipe("--trainer.critic.path=/nowhere/x", "--algo.kind=ppo"), "no model folder at /nowhere/x"),
    "a draft that is not there": (recipe("--engine.speculative={ kind = 'draft', model = '/nowhere/x' }"), "no model folder at /nowhere/x"),
    "tokens of images for a model of text": (recipe("--model.vision.image_tokens=16"), "reads text alone: leave it out"),
    "a tower for a model of text": (recipe("--model.vision.tower=trained"), "model.vision.tower = 'trained'"),
    "a policy that is a number": (recipe("--policies=5"), "policies = 5"),
    # -- the words of the command ----------------------------------------------------------------------
    "an override of no key": (recipe("--=5"), "write --section.key=value"),
    "an override of half a key": (recipe("--loop.=5"), "unknown key 'loop.'"),
    "an override into a number": (recipe("--loop.steps.x=5"), "'steps' is a value, not a section"),
    "a number for a section": (recipe("--loop=5"), "loop = 5"),
    "a list for a section": (recipe("--trainer=[1]"), "trainer = [1]"),
    "a section without what it needs": (recipe("--model={}"), "'model.path' is missing; add it"),
    "a date for a number": (recipe("--loop.steps=1979-05-27"), "loop.steps = datetime.date(1979, 5, 27)"),
    "a number of 5,000 digits": (recipe("--loop.seed=" + "9" * 5000), "--loop.seed cannot be read: it has a number of more than 4300 digits"),
    "lists in lists in lists": (recipe("--task.data=" + "[" * 3000), "--task.data cannot be read: tables or lists are nested too deep"),
    "half a character": (recipe("--task.system=\udc80"), "task.system = '\\udc80' has the character '\\udc80', which is no text"),
    "a zero character": (recipe('--task.env.suffix="a\\u0000"'), "task.env.suffix = 'a\\x00'"),
    # -- files of recipes --------------------------------------------------------------------------------
    "a recipe in UTF-16": (files(TEXT.decode().encode("utf-16")), "is not TOML: byte 1 is not UTF-8; save the file as UTF-8"),
    "a recipe in Latin-1": (files(b"# caf\xe9\n" + TEXT), "byte 6 is not UTF-8; save the file as UTF-8"),
    "a compressed recipe": (files(gzip.compress(TEXT)), "is not UTF-8"),
    "an empty recipe": (files(b""), "'task' is missing; add it to the recipe"),
    "a recipe with a zero at its end": (files(TEXT + b"\0"), "recipe.toml is not TOML"),
    "a recipe that says a section twice": (files(TEXT + b"\n[loop]\nsteps = 3\n"), "Cannot declare ('loop',) twice"),
    "a recipe with a number of 5,000 digits": (files(b"x = " + b"9" * 5000), "recipe.toml is not TOML: it has a number of more than 4300 digits"),
    "a recipe nested too deep": (files(b"x = " + b"[" * 3000), "recipe.toml is not TOML: tables or lists are nested too deep"),
    "a recipe in JSON": (files(b'{"model": 1}'), "recipe.toml is not TOML"),
    "a recipe in YAML": (files(b"model:\n  path: x\n"), "Expected '=' after a key"),
    "a recipe that is a folder": (named("/"), "is a folder and no recipe: name a file"),
    "a recipe inside a file": (named(str(TINY / "x.toml")), "a file is where a folder is needed"),
    "a recipe of 5,000 letters": (named("a" * 5000), "the name is too long: choose a shorter one"),
    "a recipe with a zero in its name": (named("a\0b"), "embedded null byte"),
    "a recipe that is not there": (named("/nowhere/x.toml"), "no recipe at /nowhere/x.toml"),
    "two recipes": (command("train", str(TINY), str(TINY)), "one recipe is needed and 2 were given"),
    # -- tasks in the recipe -----------------------------------------------------------------------------
    "data without a kind": (table("{ x = 1 }"), "task.data has no 'kind'"),
    "data of a number": (table("{ kind = 5 }"), "task.data.kind 5 is no name"),
    "data with a setting too many": (table("{ kind = 'digits', nope = 2 }"), "task.data.nope is no setting of kind 'digits'"),
    "data of a function that is a number": (table("{ kind = 'math:pi' }"), "task.data.kind 'math:pi' is 3.14159"),
    "data of a function that gives a number": (table("{ kind = 'os:getpid' }"), "broke: TypeError"),
    "fewer held out than none": (table("{ kind = 'digits', holdout = -1 }"), "task.data.holdout = -1; it must be a number of tasks"),
    "one and a half held out": (table("{ kind = 'digits', holdout = 1.5 }"), "task.data.holdout = 1.5"),
    "all held out": (table("{ kind = 'digits', holdout = 100 }"), "change holdout"),
    "held out, but no number": (table("{ kind = 'digits', holdout = nan }"), "task.data.holdout = nan"),
    "endlessly many held out": (table("{ kind = 'digits', holdout = inf }"), "task.data.holdout = inf"),
    "true held out": (table("{ kind = 'digits', holdout = true }"), "task.data.holdout = True"),
    "letters held out": (table("{ kind = 'digits', holdout = 'x' }"), "task.data.holdout = 'x'"),
    "a seed of letters": (table("{ kind = 'digits', seed = 'x' }"), "task.data.seed = 'x'; it is a whole number"),
    "words in a row in letters": (table("{ kind = 'digits', ngram = 'x' }"), "task.data.ngram = 'x'"),
    "rows that are a number": (table("{ kind = 'list', rows = 5 }"), "task.data.rows = 5"),
    "a row that is a number": (table("{ kind = 'list', rows = [5] }"), "task.data.rows"),
    "no rows": (table("{ kind = 'list', rows = [] }"), "is empty"),
    "an answer that is no number": (table("{ kind = 'list', rows = [{ prompt = '1', answer = nan }] }"), "task.data.rows[1]: 'answer' is nan"),
    "a generator that does not exist": (table("{ kind = 'reasoning_gym', name = 'chain_summ' }"), "Did you mean 'chain_sum'?"),
    "a generator of nothing": (table("{ kind = 'reasoning_gym', name = 'chain_sum', size = 0 }"), "size must be positive"),
    "a generator of letters": (table("{ kind = 'reasoning_gym', name = 'chain_sum', size = 'x' }"), "task.data.size = 'x'"),
    "a generator with a number of settings": (table("{ kind = 'reasoning_gym', name = 'chain_sum', args = 5 }"), "task.data.args = 5"),
    "a generator with a setting too many": (table("{ kind = 'reasoning_gym', name = 'chain_sum', args = { nope = 2 } }"), "Its settings: min_terms"),
    "a generator at no level": (table("{ kind = 'reasoning_gym', name = 'chain_sum', levels = 5 }"), "task.data.levels = 5"),
    "pictures without a side": (table("{ kind = 'quadrants', size = 8, pixels = -4 }"), "task.data.pixels = -4"),
    "a world that is not there": (table("{ kind = 'gym', name = 'nowhere:make', n = 3 }", "--task.env=gym"), "no module 'nowhere'"),
    "a world that is a number": (table("{ kind = 'gym', name = 'math:pi', n = 3 }", "--task.env=gym"), "the world 'math:pi' is 3.14159"),
    "a condition that is a number": (table("{ kind = 'digits', where = 5 }"), "task.data.where = 5; it is a table"),
    "a range of three ends": (table("{ kind = 'digits', where = { answer = [1, 2, 3] } }"), "a range has two ends"),
    "a condition that nothing meets": (table("{ kind = 'digits', where = { answer = [1, 2] } }"), "keeps none of 100 rows"),
    "a range of letters": (table("{ kind = 'list', rows = [{ prompt = 'a', answer = '1', level = 3 }], where = { level = ['a', 'b'] } }"), "task.data.where.level = ['a', 'b']"),
    "a field whose name is a number": (table("{ kind = 'digits', prompt = 5 }"), "task.data.prompt = 5; it is the name of a field"),
    "a gold field whose name is a number": (table("{ kind = 'digits', answer = 5 }"), "task.data.answer = 5"),
    "a mixture of nothing": (table("{ kind = 'mix', sources = [] }"), "two or more"),
    "a mixture of endless weight": (table("{ kind = 'mix', sources = [{ source = 'a', weight = inf, kind = 'digits' }, { source = 'b', kind = 'digits' }] }"), "it must be a positive number"),
    # -- files of tasks ----------------------------------------------------------------------------------
    "tasks that are not UTF-8": (data(GOOD.encode() + b'{"prompt": "caf\xe9", "answer": "1"}\n'), "tasks.jsonl:3: byte 0xe9 at column 16 is not UTF-8: save the file as UTF-8"),
    "tasks in UTF-16": (data(GOOD.encode("utf-16")), "tasks.jsonl:1: the file is in UTF-16, and not JSON lines in UTF-8: iconv"),
    "tasks in UTF-32": (data(GOOD.encode("utf-32")), "in UTF-32"),
    "tasks in UTF-16 that do not say so": (data(GOOD.encode("utf-16-le")), "tasks.jsonl:1: not JSON"),
    "tasks in half a gzip": (data(gzip.compress(GOOD.encode() * 1000)[:50]), "the gzip file is damaged or not whole"),
    "tasks in a gzip with another checksum": (data(gzip.compress(GOOD.encode())[:-6] + b"123456"), "the gzip file is damaged or not whole"),
    "tasks in a zip": (data(b"PK\x03\x04" + bytes(100)), "the file is a zip archive, and not JSON lines in UTF-8: unzip it"),
    "tasks in zstd": (data(b"\x28\xb5\x2f\xfd" + bytes(100)), "zstd -d"),
    "tasks in parquet that are called lines": (data(b"PAR1\x15\x04\x15" + bytes(range(256))), 'kind = "parquet" reads it'),
    "tasks nested too deep": (data('{"prompt": "1", "answer": ' + "[" * 1000 + "]" * 1000 + "}\n"), "tasks.jsonl:1: lists or objects are nested too deep"),
    "a task with a number of 5,000 digits": (data(GOOD + '{"prompt": "1", "answer": ' + "9" * 5000 + "}\n"), "tasks.jsonl:3: a number of more than 4300 digits: write it as a text"),
    "half a character in a prompt": (data(GOOD + '{"prompt": "\\ud83d", "answer": "1"}\n'), "tasks.jsonl:3: '\\ud83d' is half a character"),
    "half a character in an answer": (data(GOOD + '{"prompt": "5", "answer": "\\ud83d"}\n'), "tasks.jsonl:3: '\\ud83d' is half a character"),
    "half a character in a name": (data(GOOD + '{"prompt": "5", "answer": "1", "\\ud83d": 1}\n'), "tasks.jsonl:3"),
    "an answer that JSON has no word for": (data(GOOD + '{"prompt": "5", "answer": NaN}\n'), "tasks.jsonl:3: NaN is no number of JSON"),
    "an endless answer": (data(GOOD + '{"prompt": "5", "answer": Infinity}\n'), "tasks.jsonl:3: Infinity is no number of JSON"),
    "an answer beyond all numbers": (data(GOOD + '{"prompt": "5", "answer": 1e999}\n'), "tasks.jsonl:3: 'answer' is inf"),
    "tasks as one list": (data('[{"prompt": "1", "answer": "2"}]\n'), "tasks.jsonl:1: a list; a task is an object with named fields"),
    "tasks as one list over many lines": (data(json.dumps([{"prompt": "1", "answer": "2"}], indent=2)), "jq -c '.[]'"),
    "a task that is a number": (data(GOOD + "5\n"), "tasks.jsonl:3: a int"),
    "a task that is null": (data(GOOD + "null\n"), "tasks.jsonl:3: a NoneType"),
    "zeros between the tasks": (data(GOOD + "\0\0\0\n"), "tasks.jsonl:3: not JSON"),
    "a tab inside a text": (data(GOOD + '{"prompt": "a\tb", "answer": "1"}\n'), "tasks.jsonl:3: not JSON (Invalid control character"),
    "an empty question": (data(GOOD + '{"prompt": "", "answer": "1"}\n'), "tasks.jsonl:3: the prompt is empty"),
    "no question": (data(GOOD + '{"prompt": null, "answer": "1"}\n'), "tasks.jsonl:3: 'prompt' is null"),
    "a conversation of nothing": (data('{"messages": [], "answer": "1"}\n'), "a list of messages with role and content"),
    "a message without a role": (data('{"messages": [{"content": "1"}], "answer": "1"}\n'), "with role and content"),
    "a message whose role is a number": (data('{"messages": [{"role": 5, "content": "1"}], "answer": "1"}\n'), "with role and content"),
    "a message without content": (data('{"messages": [{"role": "user", "content": null}], "answer": "1"}\n'), "with role and content"),
    "a message of a number": (data('{"messages": [{"role": "user", "content": [5]}], "answer": "1"}\n'), "with role and content"),
    "a message of a part without a type": (data('{"messages": [{"role": "user", "content": [{"x": 5}]}], "answer": "1"}\n'), "Use 'text', 'image' and 'video'"),
    "an image that is not there": (data('{"messages": [{"role": "user", "content": [{"type": "image", "image": "/nowhere.png"}]}], "answer": "1"}\n'), "tasks.jsonl:1: no image at /nowhere.png"),
    "an image that is a number": (data('{"prompt": "x", "pic": 5, "answer": "1"}\n', ", image = 'pic'"), "tasks.jsonl:1: an image of type int"),
    "an image that is no image": (data('{"prompt": "x", "pic": "data:image/png;base64,AAAA", "answer": "1"}\n', ", image = 'pic'"), "tasks.jsonl:1: an image that cannot be read"),
    "an image for a model of text": (data(f'{{"prompt": "x", "pic": "data:image/png;base64,{PNG}", "answer": "1"}}\n', ", image = 'pic'"), "a model that reads text alone: take a vision-language model"),
    "images that the recipe says nothing of": (data('{"prompt": "x", "images": ["a.png"], "answer": "1"}\n'), "tasks.jsonl:1: the field 'images' is said to hold pictures"),
    "nothing but blank lines": (data("\n\n\n"), "is empty"),
    "an evaluation that is not there": (data(GOOD, ', eval_path = "/nowhere.jsonl"'), "no file '/nowhere.jsonl'"),
    "an evaluation that is a folder": (data(GOOD, ', eval_path = "/tmp"'), "It is a folder."),
    "a path of numbers": (data(GOOD, ", eval_path = [5]"), "task.data.path = [5]"),
    "an evaluation of another setting": (data(GOOD, ", eval_nope = 1"), "task.data.nope is no setting"),
    "a field that no row has": (data(GOOD, ", answer = 'gold'"), "name the field with answer = '...'"),
    "a condition on a field that no row has": (data(GOOD, ", where = { level = 1 }"), "tasks.jsonl:1: no 'level'"),
    "a path that is a number": (table('{ kind = "jsonl", path = 5 }'), "task.data.path = 5"),
    "an empty path": (table('{ kind = "jsonl", path = "" }'), "no file ''"),
    "a path with a zero": (table('{ kind = "jsonl", path = "a\\u0000b" }'), "task.data.path = 'a\\x00b'"),
    "a path that is a folder": (table('{ kind = "jsonl", path = "/tmp" }'), "It is a folder."),
    "a path of 5,000 letters": (table('{ kind = "jsonl", path = "' + "a" * 5000 + '" }'), "no file 'aaa"),
    "no paths": (table('{ kind = "jsonl", path = [] }'), "is empty"),
    "a path of lists": (table('{ kind = "jsonl", path = [["x"]] }'), "task.data.path = [['x']]"),
    "no path": (table('{ kind = "jsonl" }'), "task.data.path is missing"),
    "parquet that is text": (data("hello", name="tasks.parquet", kind="parquet"), "as parquet"),
    "parquet that is empty": (data(b"", name="tasks.parquet", kind="parquet"), "as parquet"),
    "parquet that breaks off": (data(b"PAR1" + bytes(50), name="tasks.parquet", kind="parquet"), "as parquet"),
    # -- run folders -------------------------------------------------------------------------------------
    "a run folder of no letters": (folder(lambda run: "''"), "run.folder = ''"),
    "a run folder without a name": (recipe("--run.folder="), "run.folder = ''"),
    "a run folder with a zero": (folder(lambda run: '"a\\u0000b"'), "run.folder = 'a\\x00b'"),
    "a run folder of half a character": (folder(lambda run: f"{run}\udc80"), "run.folder ="),
    "a run folder that is a file": (folder(lambda run: run.write_text("mine") and None), "run: something else of that name is there: move it away"),
    "a run folder that is a link to nowhere": (folder(lambda run: run.symlink_to("/nowhere/at/all")), "something else of that name is there"),
    "a run folder that is a link to itself": (folder(lambda run: run.symlink_to(run)), "run.folder = '"),
    "a run folder inside a file": (folder(lambda run: run.write_text("mine") and run / "a"), "a file is where a folder is needed"),
    "a run folder of 300 letters": (folder(lambda run: run / ("a" * 300)), "the name is too long: choose a shorter one"),
    "a run folder of 6,000 letters": (folder(lambda run: run / "/".join(["a" * 200] * 30)), "the name is too long"),
    "a run folder where nothing can be made": (folder(lambda run: "/proc/rondel"), "run.folder = '/proc/rondel'"),
    "a run folder that is a device": (folder(lambda run: "/dev/null"), "something else of that name is there"),
    "a lock that is a folder": (place(".lock", "a folder"), ".lock is a folder, and the run needs a file there: move it away"),
    "a lock that is a link to nowhere": (place(".lock", "a link"), ".lock is a link that leads nowhere"),
    "a lock that is a pipe": (place(".lock", "a pipe"), ".lock is no ordinary file"),
    "a token log that is a file": (place("wal", "a file"), "wal is a file, and the run needs a folder there: move it away"),
    "a token log that is a link to nowhere": (place("wal", "a link"), "wal is a link that leads nowhere"),
    "an engine's token log that is a file": (place("wal/engine-0", "a file"), "wal/engine-0: something else of that name is there: move it away"),
    "a segment of it that is a folder": (place("wal/engine-0/000001.bin", "a folder"), "wal/engine-0/000001.bin: a folder of that name is there"),
    "checkpoints that are a file": (place("checkpoints", "a file"), "checkpoints is a file, and the run needs a folder there"),
    "checkpoints that are a link to nowhere": (place("checkpoints", "a link"), "checkpoints is a link that leads nowhere"),
    "rollouts that are a file": (place("rollouts", "a file"), "rollouts is a file"),
    "a journal that is a folder": (place("journal.jsonl", "a folder"), "journal.jsonl is a folder, and the run needs a file there"),
    "a journal that is a pipe": (place("journal.jsonl", "a pipe"), "journal.jsonl is no ordinary file"),
    "a journal that is a link to nowhere": (place("journal.jsonl", "a link"), "journal.jsonl is a link that leads nowhere"),
    "a stored recipe that is a folder": (place("job.toml", "a folder"), "job.toml is a folder"),
    "a stored recipe of somebody else": (place("job.toml", "a file"), "job.toml is not TOML"),
    "an origin that is a folder": (place("recipe.path", "a folder"), "recipe.path is a folder"),
    "a card that is a folder": (place("card.md", "a folder"), "card.md is a folder"),
    "tensorboard that is a file": (place("tensorboard", "a file", "--run.sinks=['tensorboard']"), "tensorboard is a file, and the run needs a folder there: move it away"),
    "tensorboard that is a link to nowhere": (place("tensorboard", "a link", "--run.sinks=['tensorboard']"), "tensorboard is a link that leads nowhere"),
    "metrics that are a folder": (place("metrics.jsonl", "a folder", "--run.sinks=['jsonl']"), "metrics.jsonl is a folder"),
    "a table of metrics that is a folder": (place("metrics.csv", "a folder", "--run.sinks=['csv']"), "metrics.csv is a folder"),
    # -- runs and checkpoints ----------------------------------------------------------------------------
    "a journal that ends in noise": (run("journal.jsonl", b"a\nb\nc\n", "train"), "ends in several lines that are not JSON: it was damaged or edited. Put a copy of it back, or move it away"),
    "a journal of noise": (run("journal.jsonl", b"a\nb\nc\n", "card"), "journal.jsonl line 1 is not an event"),
    "a journal nested too deep": (run("journal.jsonl", b"[" * 100000 + b"\n\n", "diagnose"), "nested too deep"),
    "a journal of other things": (run("journal.jsonl", b'{"n": "x", "t": "y", "kind": 5}\n\n', "trace"), "are no number, time and name"),
    "a journal of half events": (run("journal.jsonl", b'{"n": 0, "t": 1, "kind": "StepDone"}\n\n', "card"), "a StepDone without step"),
    "a journal that is gone": (run("journal.jsonl", None, "card"), "holds no journal.jsonl"),
    "a journal without a line": (run("journal.jsonl", b"", "card"), "the journal in"),
    "a stored recipe that is damaged": (run("job.toml", b"loop = 5\n", "card"), "job.toml: ValueError: loop is no table. Put a copy of it back"),
    "a stored recipe of bytes": (run("job.toml", b"\xff\xfe", "diagnose"), "Put a copy of it back"),
    "a stored recipe without sections": (run("job.toml", b"", "replay", "--step", "3"), "'model' is missing"),
    "a step that was not taken": (command("replay", "{finished}", "--step", "99"), "finished: 1 to 4"),
    "a step that is not stored": (command("view", "{finished}", "--step", "99"), "has no rollouts of step 99; stored: 1 to 4"),
    "a group that is not there": (command("view", "{finished}", "--group", "99"), "has no group 99; it has"),
    "rollouts that are gone": (run("rollouts", None, "replay", "--step", "3"), "the rollouts of step 3 are not stored"),
    "rollouts of noise": (run("rollouts/step-000004.parquet", b"noise", "view"), "the file is damaged, the other steps are not affected"),
    "checkpoints that are gone": (run("checkpoints", None, "train"), "its journal tells of one after step 4: put a copy back"),
    "checkpoints without weights": (run("checkpoints/*/model.safetensors", None, "train"), "model.safetensors is missing"),
    "checkpoints with torn weights": (run("checkpoints/*/model.safetensors", b"torn", "train"), "no checkpoint in"),
    "checkpoints without an optimizer": (run("checkpoints/*/optimizer.safetensors", None, "train"), "optimizer.safetensors is missing"),
    "checkpoints without a manifest": (run("checkpoints/*/manifest.json", None, "train"), "its manifest cannot be read"),
    "checkpoints with a manifest of noise": (run("checkpoints/*/manifest.json", b"[]", "train"), "put a whole copy of one there"),
    "checkpoints with a manifest nested too deep": (run("checkpoints/*/manifest.json", b"[" * 100000, "train"), "its manifest cannot be read (RecursionError"),
    "checkpoints with another state": (run("checkpoints/*/state.json", b"{}", "train"), "state.json has 2 bytes"),
    "no checkpoint to evaluate": (run("checkpoints", None, "eval"), "has no checkpoint yet; train it"),
    "a checkpoint without weights to evaluate": (run("checkpoints/*/model.safetensors", None, "eval"), "loading the model"),
    "a run that was not recorded, again": (command("replay", "{finished}", "--into", "{folder}/again"), "only a run that was trained with --record"),
    "a card of nothing": (command("card", "{folder}/nowhere"), "no run folder at"),
    "a difference to nothing": (command("card", "--diff", "{finished}"), "two run folders and --diff go together"),
    "a trace into a folder": (command("trace", "{finished}", "-o", "{folder}"), "a folder of that name is there: move it away"),
    "a page into a folder that is not there": (command("view", "{finished}", "--html", "{folder}/a/b.html"), "there is no such file or folder: correct the path"),
    # -- models ------------------------------------------------------------------------------------------
    "a model without a config": (model({"config.json": None}), "no config.json in it"),
    "a model whose config is noise": (model({"config.json": b"noise"}), "config.json is no whole JSON file"),
    "a model whose config is a list": (model({"config.json": b"[]"}), "loading the model"),
    "a model of no layers": (model({"config.json": config(num_hidden_layers=0)}), "num_hidden_layers = 0 cannot be made"),
    "a model of heads that do not divide": (model({"config.json": config(num_key_value_heads=3)}), "num_key_value_heads = 3"),
    "a model of a type that nobody knows": (model({"config.json": config(model_type="lama")}), "lama"),
    "a model without weights": (model({"model.safetensors": None}), "no file named model.safetensors"),
    "a model of torn weights": (model({"model.safetensors": b"torn"}), "model.safetensors is no whole safetensors file (4 bytes"),
    "a model without a tokenizer": (model({"tokenizer.json": None, "tokenizer_config.json": None}), "loading the"),
    "a model whose tokenizer is noise": (model({"tokenizer.json": b"noise"}), "tokenizer.json is no whole JSON file"),
    "a GGUF that is not there": (recipe("--model.path=/nowhere/x.gguf"), "no GGUF file at /nowhere/x.gguf"),
    "a model of another dtype": (recipe("--model.dtype=fp8"), "model.dtype = 'fp8'"),
    # -- other commands ----------------------------------------------------------------------------------
    "a plan of no layers": (command("plan", str(TINY), "--model.path.num_hidden_layers=0"), "num_hidden_layers = 0 cannot be made"),
    "a plan of nothing": (command("plan"), "a recipe or a model is needed"),
    "a plan of an unknown model": (command("plan", "--what-if", "model=nope"), "no shape is known of 'nope'"),
    "an explanation of a broken recipe": (command("explain", str(TINY), "--trainer.lr=inf"), "trainer.lr = inf"),
    "a model to serve that is no table": (command("serve", "{{ random = "), "is no inline table"),
    "an import of nothing": (command("import", "--from", "trl", "/nowhere/x.yaml"), "/nowhere/x.yaml"),
    "a dashboard of nothing": (command("dashboard", "{folder}/nowhere"), "no run folder at"),
    "an evaluation of nothing": (command("eval", "{folder}"), "name the tasks"),
    "a benchmark that does not exist": (command("bench", "stpe"), "Did you mean 'step'?"),
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """Four steps with two checkpoints, and everything imported."""

    def make(where: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", "1")
            settings = ["--loop.steps=4", "--run.checkpoint.every=2", f"--run.folder={where}", "--quiet"]
            try:
                main(["train", str(TINY), *SMALL, *settings])
            except SystemExit as end:
                assert not end.code

    return made_once(tmp_path_factory, "finished", make)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if i % 6 else ()) for i, name in enumerate(CASES)]
)
def test_it_is_one_line_that_says_what_to_do(capfd, tmp_path, monkeypatch, finished, name):
    make, said = CASES[name]
    monkeypatch.chdir(tmp_path)  # what has no folder of its own must not begin one here
    words = make(tmp_path, finished)
    before, there = time.process_time(), set(os.listdir(tmp_path))
    with pytest.raises(SystemExit) as end:
        main(words)
    err = capfd.readouterr().err
    assert end.value.code == 1, err
    assert "Traceback" not in err and "bug of ours" not in err, err
    (line,) = [row for row in err.splitlines() if row.startswith("error:")]
    assert said in line, line
    assert time.process_time() - before < CPU
    assert set(os.listdir(tmp_path)) <= {*there, "run"}


def test_there_are_more_than_two_hundred():
    assert len(CASES) >= 200 and FAST


# -- and what is not broken ----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["gzip", "marked", "windows"])
def test_tasks_are_read_as_gzip_with_a_mark_and_with_lines_of_windows(tmp_path, how):
    from rondel.generate.envs.sources import load_tasks

    content = {
        "gzip": gzip.compress(GOOD.encode()),
        "marked": b"\xef\xbb\xbf" + GOOD.encode(),
        "windows": GOOD.replace("\n", "\r\n").encode(),
    }
    path = tmp_path / ("tasks.jsonl.gz" if how == "gzip" else "tasks.jsonl")
    path.write_bytes(content[how])
    tasks = load_tasks({"kind": "jsonl", "path": str(path)}, env="single_turn").train
    assert [(t.data["prompt"], t.data["answer"]) for t in tasks] == [("1+1=", "2"), ("1+2=", "3")]
    assert all(t.id.startswith("tasks/") for t in tasks)
