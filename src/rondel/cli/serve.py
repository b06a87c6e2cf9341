"""rondel serve: the engine as a server, with OpenAI's API and SGLang's control endpoints."""

from __future__ import annotations

import secrets
import tomllib
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from rondel.core.errors import UserError
from rondel.system.files import replace_file
from rondel.system.interpreter import import_whole
from rondel.system.run_weights import find_run_weights


def run(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_RUN",
            help="A run folder, a checkpoint, a model folder, hub id, GGUF file, "
            '"smollm2-135m" or { random = "llama", ... }.',
        ),
    ],
    host: Annotated[str, typer.Option(help="Where to listen; anything but loopback needs a key.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="0 takes a free one; the line that is printed names it.")
    ] = 8000,
    port_file: Annotated[str, typer.Option(metavar="FILE", help="Write the port here when it listens.")] = "",
    join: Annotated[
        str, typer.Option(metavar="RUN", help="Folder of a run that takes this server as one more engine.")
    ] = "",
    api_key: Annotated[str, typer.Option(envvar="RONDEL_API_KEY", help="Clients send it as a Bearer token.")] = "",
    best: Annotated[
        bool, typer.Option("--best", help="Of a run the checkpoint that run.checkpoint.best kept, not the newest.")
    ] = False,
    name: Annotated[str, typer.Option(help="What clients call the model; its path when left out.")] = "",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    numerics: Annotated[
        str,
        typer.Option(
            help="fast, aligned (the same bits whatever else is in the batch) or rounded, as engine.numerics."
        ),
    ] = "fast",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 takes OMP_NUM_THREADS, or else all cores.")] = 0,
    kv_pages: Annotated[
        int, typer.Option(min=0, help="Cache pages of one token each; 0 takes what memory allows.")
    ] = 0,
    max_running: Annotated[int, typer.Option(min=1, help="Answers in one batch.")] = 64,
    compile: Annotated[
        bool, typer.Option("--compile", help="Fuse the small operations; takes seconds at the start.")
    ] = False,
    speculative: Annotated[str, typer.Option(help="Guess tokens ahead: off, ngram or draft:MODEL.")] = "off",
    tp: Annotated[
        int, typer.Option(min=1, max=64, help="Processes that share every matrix (tensor parallel), one a GPU.")
    ] = 1,
    ep: Annotated[
        int,
        typer.Option(
            min=1, max=64, help="As many as --tp or --dp: experts of a mixture lie whole on one of these processes."
        ),
    ] = 1,
    dp: Annotated[
        int,
        typer.Option(
            min=1, max=64, help="Processes with requests of their own that share the experts of a mixture, one a GPU."
        ),
    ] = 1,
    encoders: Annotated[
        int,
        typer.Option(
            min=0,
            max=1,
            help="1: one more process encodes the pictures of a vision-language model, on a GPU of its own; also with "
            "--tp or --dp.",
        ),
    ] = 0,
    adapter: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FOLDER", help="A LoRA adapter that clients ask for as a model.")
    ] = None,
    enable_return_routed_experts: Annotated[
        bool,
        typer.Option(
            "--enable-return-routed-experts",
            help="Of a mixture: tell which experts tokens went to, where a request asks for it "
            "(return_routed_experts).",
        ),
    ] = False,
    enable_adapters: Annotated[
        bool, typer.Option("--enable-adapters", help="Adapters may be loaded while it runs (/v1/load_lora_adapter).")
    ] = False,
    training: Annotated[
        bool, typer.Option("--training", help="Let others train adapters of the model, as the tinker SDK speaks.")
    ] = False,
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where --training keeps runs and checkpoints: runs/training-api.")
    ] = None,
    max_queue: Annotated[
        int, typer.Option(min=1, help="Answers that may run and wait; more are told to come back (429).")
    ] = 1024,
    max_samples: Annotated[int, typer.Option(min=1, help="Answers of one request.")] = 128,
    max_body: Annotated[
        int, typer.Option(min=0, help="Bytes of one request; 0: 4 MiB, for a model that sees images or is trained 64.")
    ] = 0,
    deadline: Annotated[float, typer.Option(min=0.1, help="Seconds after which an answer is given up.")] = 3600.0,
    drain: Annotated[float, typer.Option(min=0, help="Seconds that answers have to end after SIGTERM.")] = 30.0,
) -> None:
    """Serve a model over HTTP.

    OpenAI's completions and chat, and SGLang's control endpoints for trainers.
    """
    try:
        import_whole("rondel.assemble.server")
        from rondel.assemble.served_engine import RequestLimits, ServerSettings
        from rondel.assemble.server import serve_model
        from rondel.driver.elastic_engines import check_run, register_server
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("starlette", "uvicorn", "prometheus_client"):
            raise
        raise UserError(f"serving needs the package {error.name}: pip install 'rondel[serve]'") from error

    ends = ExitStack()
    if join:
        check_run(Path(join), host)

    def announce_address(host: str, port: int, what: str) -> None:
        if join:
            ends.callback(register_server(Path(join), host, port).unlink, missing_ok=True)
        if port_file:
            replace_file(Path(port_file).absolute(), f"{port}\n")  # whoever waits for it must not read half of it
        print(f"serving http://{f'[{host}]' if ':' in host else host}:{port} ({what})", flush=True)

    key = api_key
    if training:
        key = key or f"tml-{secrets.token_urlsafe(24)}"
        if not key.startswith("tml-"):
            raise UserError("--api-key: the tinker SDK takes keys that begin with tml-")
        if join:
            raise UserError("--join with --training: a run takes engines whose weights it sends itself; leave one out")
    elif folder is not None:
        raise UserError("--folder is where --training keeps runs and checkpoints: add --training, or leave it out")
    with ends:
        settings = ServerSettings(
            host=host,
            port=port,
            api_key=key,
            name=name,
            dtype=dtype,
            numerics=numerics,
            device=device,
            threads=threads or None,
            kv_pages=kv_pages or "auto",
            max_running=max_running,
            speculative=speculative,
            compile=compile,
            tp=tp,
            ep=ep,
            dp=dp,
            encoders=encoders,
            drain=drain,
            adapters=_parse_adapters(adapter or [], enable_adapters),
            routed_experts=enable_return_routed_experts,
            limits=RequestLimits(body=max_body, samples=max_samples, queue=max_queue, deadline=deadline),
        )
        if not training:
            serve_model(_parse_model(model, best), settings, ready=announce_address)
            return

        def announce_training(host: str, port: int, what: str) -> None:
            announce_address(host, port, what)
            print(f"key     {key}\nuse     TINKER_API_KEY={key} TINKER_BASE_URL=http://{host}:{port}", flush=True)

        from rondel.assemble.training_server import serve_training

        serve_training(
            _parse_model(model, best),
            settings,
            folder=folder or Path("runs/training-api"),
            key=key,
            ready=announce_training,
        )


def _parse_adapters(given: list[str], enabled: bool) -> dict[str, str] | None:
    """{name: folder}; None where none can be served."""
    out: dict[str, str] = {}
    for one in given:
        name, equals, folder = one.partition("=")
        if not (name and equals and folder):
            raise UserError(
                f"--adapter {one}: say a name and a folder, as in --adapter poet=runs/poet/checkpoints/step-000024"
            )
        if name in out:
            raise UserError(f"--adapter {name} is given twice")
        out[name] = folder
    return out if out or enabled else None


def _parse_model(text: str, best: bool = False) -> str | dict[str, Any]:
    if not text.lstrip().startswith("{"):
        return find_run_weights(text, best, "train it first, or serve its starting model").model
    try:
        return tomllib.loads(f"model = {text}")["model"]
    except (ValueError, RecursionError) as error:
        raise UserError(
            f'MODEL = {text} is no inline table: {error}. For example: {{ random = "llama", hidden_size = 64, '
            "intermediate_size = 128, num_hidden_layers = 2, num_attention_heads = 4, num_key_value_heads = 2 }"
        ) from error
