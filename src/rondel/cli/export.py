"""rondel export: the model of a run as a folder that other tools load, with a model card; and to the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rondel.core.errors import UserError, error_text
from rondel.system.run_weights import find_run_weights


def run(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|CHECKPOINT", help="A run folder (its newest checkpoint), or one of its checkpoints."
        ),
    ],
    into: Annotated[Path, typer.Argument(metavar="DIR", help="Where the model goes; it must not exist.")],
    best: Annotated[
        bool, typer.Option("--best", help="Of a run the checkpoint that run.checkpoint.best kept, not the newest.")
    ] = False,
    push: Annotated[
        str, typer.Option("--push", metavar="USER/NAME", help="Upload it to this model repository, too.")
    ] = "",
    public: Annotated[bool, typer.Option("--public", help="A repository that --push makes is not private.")] = False,
) -> None:
    """Write the model of a run as other tools load it.

    With a model card (README.md). Of a run with model.format: codes and scales, as vLLM and SGLang read them. A policy
    of points or actions is a program of torch, too, which needs no code of its model.
    """
    from rondel.models.block_diffusion.settings import has_blocks
    from rondel.models.model_export import export_model
    from rondel.models.program_export import PROGRAM
    from rondel.runtime.telemetry.model_card import write_model_card

    if into.exists():
        raise UserError(f"{into} exists already: name a folder that does not, or remove it")
    token = _hub_token(push) if push else ""
    weights = find_run_weights(str(source), best, "run.checkpoint.every says when there is one")
    checkpoint = Path(weights.model)
    if not (checkpoint / "optimizer.safetensors").is_file():
        raise UserError(f"{checkpoint} is neither a run folder nor one of its checkpoints")
    before = _weight_bytes(checkpoint)
    form = export_model(checkpoint, into)
    if weights.run is not None:
        write_model_card(weights.run, weights.step, into, name=push, form=form)
    kind = f" in {form}, {_weight_bytes(into) / 1e6:,.1f} MB of weights, {before / 1e6:,.1f} before" if form else ""
    print(f"{into}: {checkpoint.name}{kind or f', {before / 1e6:,.1f} MB of weights'}")
    if push:
        print(f"pushed  {_push(into, push, token, public, f'{source}, step {weights.step}')}")
    for other in sorted((checkpoint / "policies").glob("*/")):
        print(f"left    the policy '{other.name}' has weights of its own: rondel export {other} {into}-{other.name}")
    if (into / PROGRAM).is_file():
        print(f"program {into / PROGRAM}, for torch alone")
    adapter, ours = (into / "adapter_config.json").is_file(), (into / PROGRAM).is_file() or has_blocks(str(into))
    serve = f"{'rondel' if ours else 'vllm'} serve {into}"
    print(f"next    {'see README.md for how to load the adapter' if adapter else serve}")


def _weight_bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.glob("*.safetensors") if p.name != "optimizer.safetensors")


def _hub_token(repository: str) -> str:
    """Known before anything is written."""
    if repository.count("/") != 1 or not all(repository.split("/")):
        raise UserError(f"--push {repository}: a repository is USER/NAME")
    try:
        from huggingface_hub import get_token
    except ModuleNotFoundError as error:
        raise UserError("--push needs the package huggingface_hub: pip install 'rondel[hub]'") from error
    token = get_token()
    if not token:
        raise UserError("--push needs a token of the hub with write access: run `hf auth login`, or set HF_TOKEN")
    return token


def _push(folder: Path, repository: str, token: str, public: bool, what: str) -> str:
    """-> the address of the repository. What was exported stays where the upload fails."""
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    try:
        where = api.create_repo(repository, private=not public, exist_ok=True)
        api.upload_folder(folder_path=str(folder), repo_id=repository, commit_message=f"rondel export of {what}")
    except Exception as error:
        raise UserError(
            f"--push {repository}: {error_text(error)}. The model is in {folder}; when this is mended: hf upload "
            f"{repository} {folder}"
        ) from error
    return str(where)
