"""The command line. A verb is a file whose `run` is the command; only the file of
the verb that was asked for is imported.
"""

from __future__ import annotations

import functools
import importlib
import keyword
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, NoReturn

import typer

import rondel
from rondel.core.errors import FULL, ConfigError, RondelError, Stopped, disk_refusal, leaf_errors, root_cause
from rondel.system.streams import discard_output, reopen_closed_streams, replace_unencodable
from rondel.text.unicode import visible_text

VERBS = (
    "init",
    "recipes",
    "train",
    "pipeline",
    "eval",
    "serve",
    "check",
    "check-env",
    "tasks",
    "explain",
    "plan",
    "simulate",
    "import",
    "view",
    "replay",
    "diagnose",
    "audit",
    "trace",
    "card",
    "dashboard",
    "doctor",
    "sandbox",
    "export",
    "merge",
    "convert",
    "prepare",
    "submit",
    "engines",
    "bench",
)
# where a verb is explained, shown below its --help: pages of docs/ in the source tree
PAGES = {
    "init": "docs/install.md#a-project-of-your-own",
    "train": "docs/runs.md",
    "pipeline": "docs/pipeline.md",
    "eval": "docs/runs.md#held-out-sets-passk-and-the-best-checkpoint",
    "serve": "docs/generate.md#over-http",
    "check": "docs/recipe.md",
    "check-env": "docs/generate.md#is-it-fit-to-be-trained-in",
    "explain": "docs/recipe.md",
    "plan": "docs/plan.md",
    "import": "docs/import.md",
    "view": "docs/runs.md#looking-at-a-run",
    "replay": "docs/runs.md#looking-at-a-run",
    "card": "docs/runs.md#looking-at-a-run",
    "diagnose": "docs/runs.md#what-is-wrong-with-it",
    "audit": "docs/runs.md#was-the-reward-earned",
    "dashboard": "docs/dashboard.md",
    "doctor": "docs/install.md",
    "sandbox": "docs/generate.md#sandboxes",
    "export": "docs/train.md#number-formats",
    "tasks": "docs/generate.md#search",
    "convert": "docs/import.md#checkpoints-of-megatron-core",
    "prepare": "docs/place.md",
    "submit": "docs/place.md",
    "engines": "docs/place.md",
}
MORE = "More: "  # before a page, in the help of a command and below an error
# SETTINGS of a verb that takes --section.key=value
OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}


def main(argv: list[str] | None = None) -> None:
    """`rondel VERB ...`: exits 0 only if the work was done; a RondelError is one line on stderr (and one with the page
    that knows more, if there is one) and 1, a bug of ours 2, a signal 128 and its number.
    """
    reopen_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        replace_unencodable(stream)
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    app = _build_app([words[0]] if words and words[0] in VERBS else list(VERBS), debug)
    try:
        app(words, prog_name="rondel")
    except OSError as error:  # the help of a command is written by typer itself
        _end_with(error, debug)


def run_program() -> None:
    """`main` as a process of its own, which is gone at once when the work is done."""
    from rondel.system.interpreter import end_process, is_program

    try:
        main()
    except SystemExit as end:
        if is_program("rondel") and not isinstance(end.code, str):
            end_process(end.code or 0)
        raise


def _build_app(verbs: list[str], debug: bool) -> typer.Typer:
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True)
    app.callback()(_rondel)
    for verb in verbs:
        module = importlib.import_module(f"rondel.cli.{verb.replace('-', '_')}{'_' * keyword.iskeyword(verb)}")
        page = MORE + PAGES[verb] if verb in PAGES else None
        settings = getattr(module, "SETTINGS", {})
        app.command(verb, context_settings=settings, epilog=page)(_wrap_command(module.run, debug))
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rondel {rondel.__version__}")
        raise typer.Exit


def _rondel(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; also after the verb.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Reinforcement-learning post-training for language models, whole on a laptop.

    Start with: rondel doctor, then rondel init FOLDER, or rondel recipes.
    """


def _wrap_command(run: Callable[..., Any], debug: bool) -> Callable[..., Any]:
    """The command, whose every ending is an exit code and one line."""

    @functools.wraps(run)
    def command(*args: Any, **kwargs: Any) -> None:
        try:
            try:
                run(*args, **kwargs)
            finally:
                sys.stdout.flush()
        except (typer.Exit, SystemExit):
            raise
        except BrokenPipeError:  # `rondel view RUN | head` is no fault
            discard_output(sys.stdout)
            raise
        except BaseException as error:
            if type(error).__module__.startswith(("click", "typer")):
                raise  # a fault in the words of the command: typer says it with the usage
            _end_with(error, debug)

    return command


def _end_with(error: BaseException, debug: bool) -> NoReturn:
    text, code = describe_error(error)
    if isinstance(error, OSError):
        discard_output(sys.stdout)  # it may be what could not be written
    with suppress(OSError):  # a terminal that was closed
        if debug:
            traceback.print_exc()
        print(visible_text(text), file=sys.stderr)
        if page := getattr(root_cause(error), "page", ""):
            print(MORE + page, file=sys.stderr)
    raise SystemExit(code) from None


def sort_words(*words: str) -> tuple[list[str], dict[str, Any]]:
    """("RUN.toml", "--loop.steps=5"), in any order -> (["RUN.toml"], {"loop.steps": 5})."""
    from rondel.core.config.toml_reader import parse_overrides

    overrides = parse_overrides([word for word in words if word.startswith("--")])
    return [word for word in words if word and not word.startswith("--")], overrides


def read_job(*words: str) -> tuple[Any, dict[str, Any]]:
    """The Job that one recipe and its overrides mean, and the overrides."""
    from rondel.core.config.job import Job

    paths, overrides = sort_words(*words)
    if len(paths) != 1:
        raise ConfigError(f"one recipe is needed and {len(paths)} were given{': ' if paths else ''}{', '.join(paths)}")
    return Job.read(paths[0], overrides), overrides


def setting_of(words: list[str]) -> Any:
    """Recipe, overrides and what-ifs in any order: what has '=' and no dashes is a what-if."""
    from rondel.planner.flow_shape import is_planned_flow
    from rondel.planner.workload import of_job, what_if

    asked = [word for word in words if "=" in word and not word.startswith("--")]
    questions = [word for several in asked for word in several.split() if "=" in word]
    rest = [word for word in words if word and word not in asked]
    if not rest:
        if not questions:
            raise ConfigError("a recipe or a model is needed: name RUN.toml, or ask --what-if model=7b")
        return what_if(questions)
    job, _ = read_job(*rest)
    if is_planned_flow(job.model.path):
        from rondel.planner.flow_workload import flow_of_job, flow_what_if

        return flow_what_if(questions, flow_of_job(job))
    start = of_job(job)
    return what_if(questions, start) if questions else start


def describe_error(error: BaseException) -> tuple[str, int]:
    """(the one line, the exit code). Of several errors that ended a task group together, the first of ours speaks."""
    from rondel.runtime.memory import ran_out

    cause, others = root_cause(error), len(leaf_errors(error)) - 1
    text = " ".join(str(cause).split())
    if isinstance(cause, Stopped):
        return str(cause), cause.code
    if isinstance(cause, RondelError):
        return f"error: {text}{f' (and {others} more; --debug shows them)' if others else ''}", 1
    if isinstance(cause, KeyboardInterrupt):
        return "stopped; continue with the same command", 130
    # what is written to a file is named
    lost = isinstance(cause, OSError) and cause.errno in FULL and cause.filename is None
    if refused := disk_refusal(cause, "writing the output" if lost else ""):
        return f"error: {refused}", 1
    if ran_out(cause):
        return (
            f"error: out of memory ({text or 'Python'}): `rondel plan RUN.toml` shows what needs how much, and what to "
            f"lower",
            1,
        )
    return (
        f"error: {type(cause).__name__}{': ' if text else ''}{text}; run again with --debug; this is a bug of ours",
        2,
    )
